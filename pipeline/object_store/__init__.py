"""Rows in an S3-compatible object store; nothing here is imported before an address is given.

address.py    what an address is; which options may have one
failures.py   what a store answers, as errors in four parts
bucket.py     objects below an address: whole, checked, retried; the only module that knows boto3
keys.py       which names below an address are believed
ranged.py     an object as a file that is read in ranges
rows.py       the rows of an address, as a `RowStore`
ahead.py      rows fetched before they are asked for, kept in a bounded folder
lock.py       one writer per address, without a file system's locks
beside.py     the files beside the rows: copied here, published back
target.py     an address that `extract` writes to
view.py       an address that is only read
fetch.py      an address to a folder
"""
