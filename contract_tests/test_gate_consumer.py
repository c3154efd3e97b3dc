"""Another project's uses are found, judged, and told with file and line. No network: vLLM is a stub of a snapshot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contract_tests.gate.__main__ import main
from contract_tests.gate.consumer import gate_consumer, open_consumer
from contract_tests.gate.releases import Release
from contract_tests.gate.report import Finding, Level, Report
from contract_tests.readers.library import Library
from contract_tests.recorded import recorded
from contract_tests.served import wheel
from contract_tests.snapshot import read_library
from contract_tests.sources import FolderTree, Settings, SourceError
from contract_tests.stub import stub_files, write_files
from shims.errors import UsageError

_RELEASE = "0.33.0"
_REQUEST = "vllm/v1/request.py"
_SETTINGS = Settings("http://127.0.0.1:9/simple/", Path("/nonexistent"), offline=True)
_FILES = stub_files(recorded(_RELEASE))
_ENGINE = b"""
import abc

class Base(abc.ABC):
    @abc.abstractmethod
    def step(self, batch): ...
    def close(self, force=False): ...
    async def wait(self): ...

def build(model, *, depth=1): ...
async def serve(port): ...
LIMIT = 3
"""


@pytest.fixture
def gate(tmp_path: Path) -> Callable[..., Report]:
    """Gates one file of a consumer: `gate(code, {path: content or None})`."""

    def run(code: str, edits: dict[str, bytes | None] | None = None) -> Report:
        files = {**_FILES, "vllm/machine.py": _ENGINE}
        releases = []
        for name, changes in (("before", {}), ("after", edits or {})):
            merged = {**files, **changes}
            kept = {path: content for path, content in merged.items() if content is not None}
            library = Library(FolderTree(write_files(kept, tmp_path / name), name))
            releases.append(Release(name, _RELEASE, read_library(library, "vllm", _RELEASE), partial(_same, library)))
        write_files({"app/main.py": code.encode()}, tmp_path / "project")
        consumer = open_consumer(str(tmp_path / "project"), _SETTINGS)
        return gate_consumer(releases[1], releases[0], consumer, _SETTINGS)

    return run


def _same(library: Library) -> Library:
    return library


def _only(report: Report, level: Level) -> Finding:
    found = [finding for finding in report.findings if finding.level is level]
    assert len(found) == 1, [f.headline for f in report.findings]
    return found[0]


def _engine(old: str, new: str) -> dict[str, bytes | None]:
    assert old.encode() in _ENGINE
    return {"vllm/machine.py": _ENGINE.replace(old.encode(), new.encode())}


_CODE = """
import asyncio
from vllm.machine import Base, LIMIT, build, serve

class Mine(Base):
    def step(self, batch):
        return build("m", depth=2)

    def close(self, force=False): ...

async def main():
    await serve(80)
"""


def test_nothing_changed_and_everything_holds(gate: Callable[..., Report]) -> None:
    report = gate(_CODE)
    assert {finding.level for finding in report.findings} == {Level.HOLDS}
    assert len(report.findings) >= 8
    assert report.exit_code() == 0
    # To be strict is to ask for more than sources: someone has to have run the release live.
    assert [replace(report, state=state).exit_code("drift") for state in ("verified", "static")] == [0, 1]


@pytest.mark.parametrize(
    ("old", "new", "key", "said"),
    [
        ("def build(", "def construct(", "vllm.machine.build", "has no build"),
        ("depth=1", "width=1", "vllm.machine.build(…, depth=)", "does not know depth"),
        ("(model, *, depth=1)", "(model, *, depth=1, must)", "vllm.machine.build(…, depth=)", "requires must"),
        ("(model, *, depth=1)", "(*, depth=1)", "vllm.machine.build(…, depth=)", "at most 0 positional"),
        ("def build(", "async def build(", "vllm.machine.build(…, depth=)", "coroutine"),
        ("LIMIT = 3", "", "vllm.machine.LIMIT", "has no LIMIT"),
        ("def step(self, batch)", "def step(self, batch, extra)", "override of vllm.machine.Base.step", "extra"),
        ("def close(self, force=False)", "def close(self)", "", ""),
        (
            "    async def wait",
            "    @abc.abstractmethod\n    def novelty(self): ...\n    async def wait",
            "class of vllm.machine.Base",
            "requires a subclass to define novelty",
        ),
        ("    def close(self, force=False): ...\n", "", "override of vllm.machine.Base.close", "nobody calls"),
    ],
)
def test_what_breaks_is_told_with_its_place(
    gate: Callable[..., Report], old: str, new: str, key: str, said: str
) -> None:
    report = gate(_CODE, _engine(old, new))
    broken = [finding for finding in report.findings if finding.level is Level.BROKEN]
    assert report.exit_code() == (1 if key else 0)
    assert [(f.key, said in f.why) for f in broken if f.key == key] == ([(key, True)] if key else [])
    assert all(f.used_in == "app/main.py" and f.line for f in broken)


def test_what_moved_is_found_again(gate: Callable[..., Report]) -> None:
    moved = b"def build(model, *, depth=1): ...\n"
    edits = {**_engine("def build(model, *, depth=1): ...\n", ""), "vllm/building.py": moved}
    report = gate("from vllm.machine import build\n", edits)
    finding = _only(report, Level.BROKEN)
    assert any(change.kind == "moved" and "vllm.building:build" in change.detail for change in finding.changes)
    assert 'Moved("vllm.building:build")' in finding.candidates
    assert any("moved from vllm.machine to vllm.building: build" in note for note in report.notes)


_GUARDED = {
    "ImportError": "try:\n    from vllm.machine import build\nexcept ImportError:\n    build = None\n",
    "tuple": "try:\n    from vllm.machine import build\nexcept (ImportError, KeyError):\n    build = None\n",
    "bare": "try:\n    from vllm.machine import build\nexcept:\n    build = None\n",
    "suppress": "import contextlib\nwith contextlib.suppress(ImportError):\n    from vllm.machine import build\n",
    "version": "import vllm\nif vllm.__version__ < '9':\n    from vllm.machine import build\n",
    "hasattr": "import vllm.machine\nif hasattr(vllm.machine, 'build'):\n    vllm.machine.build('m')\n",
}


@pytest.mark.parametrize("name", _GUARDED)
def test_what_the_consumer_catches_is_no_break(gate: Callable[..., Report], name: str) -> None:
    report = gate(_GUARDED[name], _engine("def build(", "def construct("))
    assert report.exit_code() == 0
    assert Level.GUARDED in {finding.level for finding in report.findings}
    assert report.exit_code("drift") == 1


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    from vllm.machine import build\nexcept ValueError:\n    pass\n",
        "try:\n    x = 1\nexcept ImportError:\n    pass\nfrom vllm.machine import build\n",
        "try:\n    x = 1\nexcept ImportError:\n    pass\nelse:\n    from vllm.machine import build\n",
        _GUARDED["ImportError"] + "from vllm.machine import build\n",
    ],
)
def test_what_it_does_not_catch_is(gate: Callable[..., Report], code: str) -> None:
    assert gate(code, _engine("def build(", "def construct(")).exit_code() == 1


def test_what_was_broken_before_is_not_blamed_on_the_upgrade(gate: Callable[..., Report]) -> None:
    report = gate("from vllm.machine import nothing\nfrom vllm.gone.deep import Thing\nThing.part.more\n")
    assert {finding.level for finding in report.findings} == {Level.STANDING}
    assert {finding.home for finding in report.findings} >= {"vllm.machine:nothing", "vllm.gone.deep:Thing"}
    assert report.exit_code() == 0


def test_awaiting_what_is_no_longer_async(gate: Callable[..., Report]) -> None:
    report = gate(_CODE, _engine("async def serve(", "def serve("))
    assert "no coroutine function any more" in _only(report, Level.NOT_JUDGED).why
    assert report.exit_code() == 2


def test_one_finding_for_one_use_in_many_places(gate: Callable[..., Report]) -> None:
    code = "from vllm.machine import build\n" + "build('m')\n" * 6
    report = gate(code, _engine("(model, *, depth=1)", "(model, depth, *, more)"))
    finding = _only(report, Level.BROKEN)
    assert (finding.line, len(finding.also)) == (2, 5)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("vllm.machine", "vllm.machine"),
        ("vllm.machine.build", "vllm.machine:build"),
        ("vllm.config.CacheConfig.block_size", "vllm.config:CacheConfig.block_size"),
        ("vllm.LLM.generate", "vllm:LLM.generate"),
        ("vllm.gone", "vllm:gone"),
        ("vllm.gone.deep.Thing.part", "vllm.gone.deep:Thing.part"),
        ("vllm.machine.LIMIT.real", "vllm.machine:LIMIT.real"),
    ],
)
def test_where_the_module_ends(gate: Callable[..., Report], name: str, home: str) -> None:
    report = gate(f"import {name.rpartition('.')[0]}\nx = {name}\n")
    assert home in {finding.home for finding in report.findings}


def test_a_file_that_cannot_be_parsed_is_told(gate: Callable[..., Report], tmp_path: Path) -> None:
    write_files({"app/later.py": b"import vllm\nsyntax of a later Python\n"}, tmp_path / "project")
    report = gate(_CODE)
    assert any("app/later.py cannot be parsed" in note for note in report.notes)


def test_the_consumer_is_read_and_never_run(gate: Callable[..., Report]) -> None:
    gate(f"raise SystemExit('run')\n{_CODE}")


def test_forms_of_a_consumer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app-1.0-py3-none-any.whl").write_bytes(wheel({"app/main.py": _CODE.encode()}))
    write_files({"app/main.py": _CODE.encode(), "app/.venv/x.py": b"import vllm\nbad syntax"}, tmp_path)
    for text in ("app-1.0-py3-none-any.whl", "app", "."):
        consumer = open_consumer(text, _SETTINGS)
        assert consumer.uses and not consumer.notes
    for text in ("nothing", "setup.py", "vllm"):
        with pytest.raises(UsageError):
            open_consumer(text, _SETTINGS)
    write_files({"other/main.py": b"import torch\n"}, tmp_path)
    with pytest.raises(UsageError, match="no import of it"):
        open_consumer("other", _SETTINGS)
    with pytest.raises(SourceError, match="offline"):
        open_consumer("app==1.0", _SETTINGS)


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECSHIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_files(_FILES, tmp_path / "checkout")
    write_files({"main.py": b"from vllm.v1.request import Request\nRequest(request_id=1, novelty=2)\n"}, tmp_path / "a")
    arguments = ["checkout", "--speculators", "none", "--consumer", "a", "--offline", "--format", "json"]
    assert main([*arguments, "--baseline", _RELEASE]) == 2  # the baseline's own sources are not at hand
    printed = capsys.readouterr()
    report: dict[str, Any] = json.loads(printed.out)["reports"][0]
    assert report["verdict"] == "not judged" and "offline mode is on" in printed.err
    assert main(["checkout", "--consumer", "nothing-like-it"]) == 2
