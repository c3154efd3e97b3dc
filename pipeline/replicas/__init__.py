"""`extract --replicas N`: several direct engines fill one folder, on one machine or on many.

ledger.py       which rows are whose: chunks handed out, taken back, settled
leases.py       a chunk has one writing process, whatever has died meanwhile
sink.py         the row sink that holds leases, and ends with the replica it belongs to
replica.py      one engine, called with rows; knows nothing of Ray
supervisor.py   hands out chunks, restarts what dies; knows nothing of Ray
ray_cluster.py  replicas as Ray actors; the only module that imports Ray
run.py          the extraction from plan to a checked folder
"""
