"""What is a change of a body, and what is only another way to write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract_tests.readers.bodies import Body, read_body
from contract_tests.readers.library import Library
from contract_tests.sources import FolderTree
from contract_tests.sources.store import Store

_CODE = '''
class Other:
    def run(self): return 1

class Engine(Base):
    """A class."""

    @property
    def name(self): return "x"

    def run(
        self,
        batch: list[int],
        limit: int | None = None,
    ) -> dict[str, int]:
        """What it does."""
        # A remark.
        found: dict[str, int] = {}
        for item in batch:
            logger.info("item %s", item)
            found[str(item)] = item  # kept
        text = """
never indented
"""
        return found

    def after(self): ...

def run(): return 0
'''


def _body(tmp_path: Path, code: str, name: str = "Engine.run", store: Store | None = None) -> Body | None:
    (tmp_path / "app").mkdir(exist_ok=True)
    (tmp_path / "app" / "m.py").write_text(code, encoding="utf-8")
    return read_body(Library(FolderTree(tmp_path), store), f"app.m:{name}")


def _fingerprint(tmp_path: Path, code: str) -> str:
    body = _body(tmp_path, code)
    assert body is not None
    return body.fingerprint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# A remark.", "# Another remark, longer."),
        ("  # kept", ""),
        ('"""What it does."""', '"""What it does, in more words."""'),
        ("found: dict[str, int] = {}", "found = {}"),
        ("batch: list[int],", 'batch: "list[int] | None",'),
        (") -> dict[str, int]:", "):"),
        ('logger.info("item %s", item)', 'logger.debug(\n                "%s",\n                item,\n            )'),
        ("        batch: list[int],\n        limit: int | None = None,\n    )", "        batch, limit=None)"),
        ("found[str(item)] = item", "found[str(item)]   =   item"),
        ("def after(self): ...", "def after(self, more): return 2"),
        ("def run(self): return 1", "def run(self): return 3"),
        ("def run(): return 0", "def run(): return 4"),
    ],
)
def test_another_way_to_write_it_is_no_change(tmp_path: Path, old: str, new: str) -> None:
    assert old in _CODE
    assert _fingerprint(tmp_path, _CODE.replace(old, new)) == _fingerprint(tmp_path, _CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("found[str(item)] = item", "found[str(item)] = item + 1"),
        ("limit: int | None = None", "limit: int | None = 3"),
        ("return found", "return dict(found)"),
        ("for item in batch", "for item in batch[1:]"),
        ("never indented", "never seen"),
        ("    def run(\n        self,", "    @wrapped\n    def run(\n        self,"),
        ("    def run(\n        self,", "    async def run(\n        self,"),
    ],
)
def test_another_thing_done_is_a_change(tmp_path: Path, old: str, new: str) -> None:
    assert old in _CODE
    assert _fingerprint(tmp_path, _CODE.replace(old, new)) != _fingerprint(tmp_path, _CODE)


def test_what_is_shown_leaves_out_talk_and_keeps_annotations(tmp_path: Path) -> None:
    body = _body(tmp_path, _CODE)
    assert body is not None
    text = "\n".join(body.lines)
    assert "found: dict[str, int] = {}" in text
    assert not any(word in text for word in ("What it does", "remark", "kept", "logger"))
    assert body.home == "app.m:Engine.run"


@pytest.mark.parametrize("name", ["Engine.gone", "Gone.run", "gone", "Engine", "Engine.run.inner"])
def test_what_is_not_there_is_none(tmp_path: Path, name: str) -> None:
    assert _body(tmp_path, _CODE, name) is None


def test_an_inherited_method_is_found_where_it_is_defined(tmp_path: Path) -> None:
    code = "class A:\n    def run(self): return 1\n\nclass B(A):\n    x = 1\n"
    body = _body(tmp_path, code, "B.run")
    assert body is not None and body.home == "app.m:A.run"


def test_what_was_read_once_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    first = _body(tmp_path, _CODE, store=store)
    assert list((tmp_path / "cache" / "bodies").rglob("*.json"))
    assert _body(tmp_path, _CODE, store=store) == first


def test_a_file_that_is_no_python_has_no_bodies(tmp_path: Path) -> None:
    for code in ("def run(:\n    pass\n", "class Engine:\n    def run(self):\n        syntax of later\n", "\x00"):
        assert _body(tmp_path, code) is None
