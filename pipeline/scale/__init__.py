"""How long a large extraction takes, and what it needs: a simulation, and the arithmetic beside it.

simulation.py   replicas, shared storage, failures and a trainer as events; no dependency, no clock
plan.py         what a run needs in bytes, objects, network and money
__main__.py     `python -m pipeline.scale`: both, for one's own numbers
"""
