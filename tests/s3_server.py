"""A real S3 server in the test process (moto's), and what tests do to it and to processes that use it."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "very-secret-word", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "states-of-tests"


@contextmanager
def running() -> Iterator[str]:
    """A server without buckets; its address.

    One request at a time: moto looks at a condition (`If-None-Match`) and writes in two steps, between which its
    threads let others through, and closes what is still being read when it is written anew. A real store does neither.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    app, turn = server._server.app, threading.Lock()

    def one_at_a_time(*request: Any) -> Any:
        with turn:
            return app(*request)

    server._server.app = one_at_a_time
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def environment(endpoint: str) -> dict[str, str]:
    """What a client needs; nothing of the machine's own settings is read."""
    nowhere = {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    return {**KEYS, **nowhere, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}


@functools.cache
def _client_of(endpoint: str) -> Any:
    import boto3

    return boto3.session.Session().client("s3", endpoint_url=endpoint)


def client() -> Any:
    """A client of our own, which `pipeline` has no part in."""
    return _client_of(os.environ["AWS_ENDPOINT_URL"])


def objects(prefix: str = "", s3: Any = None) -> dict[str, bytes]:
    """Everything in the bucket whose name begins so, without that beginning."""
    s3, found = s3 or client(), {}
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        for entry in page.get("Contents", ()):
            found[entry["Key"][len(prefix) :]] = s3.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
    return found


def in_child(work: Callable[[], object], seconds: float = 120.0) -> int:
    """Do something in a fork of this process; how it ended (negative: the signal)."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError(f"the child did not end in {seconds} s")


def die() -> None:
    """As a machine that is switched off."""
    os.kill(os.getpid(), signal.SIGKILL)
