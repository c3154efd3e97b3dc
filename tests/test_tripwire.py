"""The finder that arms the shims: it springs once, before the first package of the stack, and is gone then."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from mini_stack import install, run_bare

from shims.tripwire import PACKAGES, Tripwire


@pytest.fixture
def sprung(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What `spring` was called for; no package of the stack counts as loaded."""
    monkeypatch.setattr(sys, "meta_path", [])
    for name in PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield []


def _wire(sprung: list[str]) -> Tripwire:
    return Tripwire(lambda: sprung.append("sprung"))


def test_armed_it_stands_in_front_once(sprung: list[str]) -> None:
    wire = _wire(sprung)
    sys.meta_path.append(object())  # type: ignore[arg-type]
    wire.arm()
    wire.arm()
    assert sys.meta_path.count(wire) == 1
    assert sys.meta_path[0] is wire
    assert wire.armed
    assert not sprung


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_the_first_import_of_a_package_springs_it_and_it_steps_aside(sprung: list[str], package: str) -> None:
    wire = _wire(sprung)
    wire.arm()
    assert wire.find_spec(package) is None
    assert sprung == ["sprung"]
    assert not wire.armed
    assert wire.find_spec(package) is None
    assert sprung == ["sprung"]


@pytest.mark.parametrize("other", ["torch", "vllm_extras", "json", "speculators_more.vllm"])
def test_other_imports_do_not(sprung: list[str], other: str) -> None:
    wire = _wire(sprung)
    wire.arm()
    assert wire.find_spec(other) is None
    assert not sprung
    assert wire.armed


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_where_a_package_is_loaded_it_springs_at_once(
    sprung: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    wire = _wire(sprung)
    wire.arm()
    assert sprung == ["sprung"]
    assert not wire.armed


def test_disarmed_it_never_springs(sprung: list[str]) -> None:
    wire = _wire(sprung)
    wire.arm()
    wire.disarm()
    wire.disarm()
    assert wire.find_spec("vllm") is None
    assert not sprung


def test_looking_whether_a_package_is_there_imports_nothing(tmp_path: Path) -> None:
    """`importlib.util.find_spec("vllm")` is how many a library asks; the answer must be the usual one."""
    code = """
import importlib.util, sys
import shims
spec = importlib.util.find_spec("vllm")
assert spec is not None and spec.origin.endswith("__init__.py")
assert "vllm" not in sys.modules
import vllm.v1.core.kv_cache_utils as utils
assert utils.get_kv_cache_config_from_groups  # the hooks were put in place all the same
"""
    run_bare(code, install(tmp_path, torch=False, vllm="0.33.0", speculators="0.3.0", transformers="5.19.0")).says()


def test_a_package_that_is_absent_is_absent_as_ever(tmp_path: Path) -> None:
    code = """
import shims
try:
    import vllm
except ModuleNotFoundError as error:
    print(error.name, shims.report().state)
"""
    assert run_bare(code).says().split() == ["vllm", "absent"]


def test_two_threads_import_at_once(tmp_path: Path) -> None:
    code = """
import threading
import shims
from importlib import import_module
names = ["vllm.config", "transformers", "speculators.data_generation.vllm_hidden_states_generator"] * 4
threads = [threading.Thread(target=import_module, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(shims.report().state)
"""
    path = install(tmp_path, torch=False, vllm="0.33.0", speculators="0.4.0.1", transformers="5.24.0")
    assert run_bare(code, path).says().strip() == "adapted"
