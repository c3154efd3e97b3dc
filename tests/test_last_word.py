"""What is said of an error stands behind the warnings of Python's resource tracker, and hides none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import multiprocessing, os, signal, sys, time
from multiprocessing import resource_tracker
from pipeline import __main__ as command
from shims.errors import SpecshimError

def ended(arguments):
    global kept, child
    spawned = multiprocessing.get_context("spawn")
    kept = [spawned.Lock(), spawned.Event(), spawned.Queue()]  # this process's own: released at its exit
    resource_tracker.register("/specshim-left-behind", "semaphore")
    if "child" in sys.argv:
        child = spawned.Process(target=time.sleep, args=(9,), daemon=True)
        child.start()
    if "signal" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
    if "well" in sys.argv:
        sys.exit(0)
    raise SpecshimError("the engine", "to live", "it died", "repeat it")

command.app = ended
command.main()
"""


def said(*arguments: str, code: int) -> list[str]:
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", COMMAND, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr and "leaked semaphore" in ended.stderr
    return ended.stderr.splitlines()


def test_the_tracker_is_heard_before_the_last_word() -> None:
    lines = said(code=1)
    assert lines[-1] == "the command was: specshim" and "repeat it" in lines[-2]
    assert any("There appear to be 1 leaked semaphore" in line for line in lines[:-5])
    assert "stopped by SIGTERM" in said("signal", code=128 + signal.SIGTERM)[-1]


@pytest.mark.parametrize("how", ["well", "child"])
def test_nothing_is_ended_early_that_is_in_use_or_did_not_fail(how: str) -> None:
    said(how, code=0 if how == "well" else 1)
