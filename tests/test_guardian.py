"""Who looks after an engine's processes is there once, and no longer than they are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shims.guardian import guard, guarding, identity

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")


def guardians() -> set[int]:
    """Those that look after this process."""
    words = ["-m", "shims.guardian", str(os.getpid())]
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said = place.read_text().split("\0")
        except OSError:  # it ended meanwhile
            continue
        if said[1:4] == words and identity(int(place.parent.name)):
            found.add(int(place.parent.name))
    return found


def test_a_process_that_asks_again_has_one() -> None:
    guard()
    before = guardians()
    guard()
    assert before and guardians() == before


def test_it_goes_with_the_last_of_those_it_looks_after() -> None:
    """A notebook that opens one engine after the other does not gather them."""
    before = guardians()
    with guarding():
        engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (own,) = guardians() - before
    time.sleep(1)
    assert identity(own), "it went while the engine lives"
    engine.communicate(b"\n")
    for _ in range(600):
        if not identity(own):
            return
        time.sleep(0.1)
    pytest.fail("it stayed")
