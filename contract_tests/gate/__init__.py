"""The upgrade gate: is this vLLM safe to merge? `specshim gate`, or `python -m contract_tests.gate`.

Sources are read and compared; nothing that is judged is imported, run or unpacked to disk.
"""
