"""How fast each way to hidden states is, as ratios of plain prefill in the same run.

python -m benchmarks.run MODEL     all ways, each in a process of its own; writes results/
python -m benchmarks.way …         one way; prints one JSON line
"""
