"""The two readers: what they make of code, and that they agree about code that runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract_tests.readers import Resolver, read_live, read_source
from contract_tests.readers.found import ABSENT, FOUND, OPAQUE, UNREAD, Found
from contract_tests.readers.library import Library
from contract_tests.readers.live import same_shape
from contract_tests.sources import FolderTree

_FILES = {
    "__init__.py": "from . import lazy\nfrom .config import *\nfrom .config import Config as Renamed\n",
    "config.py": """
from __future__ import annotations
import dataclasses
import enum
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import decimal

Method = Literal["a", "b"]
Other = Literal["c", Method]

def make(cls=None, **options):
    def inner(cls):
        return dataclass(cls, **options)
    return inner if cls is None else inner(cls)

@make
class Config:
    LIMIT: ClassVar[int] = 3
    size: int
    extra: InitVar[str]
    hidden: int = field(init=False)
    names: list[str] = field(default_factory=list)
    dtype: decimal.Decimal | None = None

    def __post_init__(self, extra: str) -> None:
        self.later = 1

@make(kw_only=True)
class Child(Config):
    size: int = 4
    added: bool = dataclasses.field(default=False)

@dataclass
class Marked:
    first: int
    _: KW_ONLY
    second: int = 2

class Status(enum.Enum):
    DONE = 1
""",
    "engine.py": """
import abc
import functools
from .config import Config

class Base(abc.ABC):
    def __init__(self, config, *, strict=False):
        self.config = config
        (self.left, self.right), self.third = (1, 2), 3

    @abc.abstractmethod
    def step(self, batch): ...

    @property
    def ready(self):
        return True

    def close(self): ...

class Engine(Base):
    def step(self, batch, /, limit=None, *rest, flag, **options):
        with open("x") as self.file:
            pass

    @classmethod
    def build(cls, config): ...

    @staticmethod
    def version(full=False): ...

    shutdown = Base.close
    advance = step

    async def run(self): ...

class Odd(Engine):
    def __getattr__(self, name):
        return name

@functools.lru_cache
def cached(a, b=1): ...

def wrapper(f):
    return lambda *a: f(*a)

@wrapper
def wrapped(a): ...

if wrapper:
    def branch(a): ...
else:
    def branch(a, b): ...

old_name = cached
""",
    "lazy.py": """
_TABLE = {"Engine": ".engine:Engine", "nothing": "os:path"}

def __getattr__(name):
    module, _, attribute = _TABLE[name].partition(":")
    import importlib
    return getattr(importlib.import_module(module, __package__), attribute)
""",
    "outside.py": "from elsewhere import *\nfrom elsewhere import Thing\nclass Own(Thing):\n    here = 1\n",
    "broken.py": "def f(:\n",
    "sub/__init__.py": "from ..engine import Engine as Deep\nfrom .. import config\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in _FILES.items():
        path = tmp_path / "sample" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "sample"]:
        del sys.modules[name]


def _find(package: Path, home: str) -> Found:
    return read_source(FolderTree(package), [f"sample{home}"])[f"sample{home}"]


def _signature(package: Path, home: str) -> str:
    return str(_find(package, home).signature)


def test_a_dataclass_made_by_a_decorator_of_the_package(package: Path) -> None:
    assert _signature(package, ".config:Config") == "(size, extra, names=…, dtype=…)"
    assert dict(_find(package, ".config:Config").defaults) == {"names": "list()", "dtype": "None"}


def test_an_inherited_dataclass_keeps_the_order_of_its_base(package: Path) -> None:
    assert _signature(package, ".config:Child") == "(extra, names=…, dtype=…, *, size=…, added=…)"
    assert _signature(package, ".config:Marked") == "(first, *, second=…)"


def test_imports_are_followed(package: Path) -> None:
    for home in (":Config", ":Renamed", ".engine:Config", ".config:Config"):
        assert _find(package, home).home == "sample.config:Config"
    assert _find(package, ".sub:Deep").home == "sample.engine:Engine"
    assert _find(package, ".sub:config").kind == "module"
    assert _find(package, ".lazy:Engine").home == "sample.engine:Engine"
    assert _find(package, ".engine:old_name").home == "sample.engine:cached"


def test_inherited_constructor_methods_and_attributes(package: Path) -> None:
    assert _signature(package, ".engine:Engine") == "(config, *, strict=…)"
    assert _find(package, ".engine:Engine.close").home == "sample.engine:Base.close"
    assert _signature(package, ".engine:Engine.step") == "(batch, limit=…, *rest, flag, **options)"
    assert _find(package, ".engine:Engine.advance").home == "sample.engine:Engine.advance"
    assert _signature(package, ".engine:Engine.build") == "(config)"
    assert _signature(package, ".engine:Engine.version") == "(full=…)"
    for name in ("config", "left", "third", "ready", "file"):
        assert _find(package, f".engine:Engine.{name}").kind == "attribute", name
    assert _find(package, ".engine:Engine.run").is_async
    assert _find(package, ".engine:Base").abstract == ("step",)
    assert _find(package, ".engine:Engine").abstract == ()
    assert _find(package, ".config:Status.DONE").status == FOUND
    assert _find(package, ".config:Config.later").status == FOUND


@pytest.mark.parametrize(
    "header",
    [
        "def f(a, b=1): return 0",
        "def f(\n    a,\n    b=1,\n) -> (\n    int\n    | None\n): ...",
        "def f(\n    a, b=1\n): ...",
        "def f(a, b=1) -> dict[\n    str, int\n]:\n    return {}",
        "def f(\n    a, b=1\n) -> int:  # a remark\n    @g\n    def inner(): ...\n    return 0",
    ],
)
def test_a_header_over_several_lines(package: Path, header: str) -> None:
    (package / "sample" / "headers.py").write_text(f"{header}\nclass After:\n    x: int = 1\n", encoding="utf-8")
    assert _signature(package, ".headers:f") == "(a, b=…)"
    assert _find(package, ".headers:After.x").status == FOUND


def test_literals_are_written_out(package: Path) -> None:
    assert _find(package, ".config:Other").text == "Literal['c', 'a', 'b']"


@pytest.mark.parametrize(
    ("home", "status", "shape"),
    [
        (".engine:Engine.nothing", ABSENT, ""),
        (".engine:nothing", ABSENT, ""),
        (".nowhere", ABSENT, ""),
        (".nowhere:name", ABSENT, ""),
        (".engine:Odd.anything", OPAQUE, ""),
        (".lazy:anything", OPAQUE, ""),
        (".engine:wrapped", FOUND, OPAQUE),
        (".engine:branch", FOUND, OPAQUE),
        (".engine:cached", FOUND, ""),
        (".outside:unknown", UNREAD, ""),
        (".outside:Thing", FOUND, ""),
        (".outside:Own", FOUND, UNREAD),
        (".outside:Own.here", FOUND, ""),
        (".outside:Own.inherited", UNREAD, ""),
        (".broken:f", UNREAD, ""),
        (".config:decimal", ABSENT, ""),
    ],
)
def test_what_cannot_be_concluded_is_not_called_absent(package: Path, home: str, status: str, shape: str) -> None:
    found = _find(package, home)
    assert (found.status, found.shape) == (status, shape), found
    assert found.detail or (status == FOUND and not shape)


def test_a_name_for_type_checkers_tells_who_asks_for_it(package: Path) -> None:
    assert _find(package, ".config:decimal").text == "Config"


def test_a_record_reads_back_as_it_was_written(package: Path) -> None:
    for home in (".config:Child", ".engine:Engine.step", ".engine:Base", ".outside:Own", ".config:Other"):
        found = _find(package, home)
        assert Found.from_dict(found.as_dict()) == found


@pytest.mark.parametrize(
    "home",
    [
        *(":Config", ":Renamed", ".config:Child", ".config:Marked", ".config:Status.DONE"),
        *(".engine:Base", ".engine:Engine", ".engine:Engine.step", ".engine:Engine.build", ".engine:Engine.version"),
        *(".engine:Engine.run", ".engine:Engine.close", ".engine:cached", ".engine:old_name", ".lazy:Engine"),
        *(".sub:Deep", ".engine:nothing", ".engine:Engine.nothing", ".nowhere"),
    ],
)
def test_both_readers_agree(package: Path, home: str) -> None:
    source, live = _find(package, home), read_live(f"sample{home}")
    assert not same_shape(source, live)
    if source.signature is not None:
        assert live.signature is not None
        assert set(source.signature.names) == set(live.signature.names)
    assert source.is_async == live.is_async
    assert source.abstract == live.abstract


def test_facts_of_an_unchanged_file_are_kept(package: Path, tmp_path: Path) -> None:
    from contract_tests.sources.store import Store

    store = Store(tmp_path / "cache")
    first = Resolver(Library(FolderTree(package), store)).find("sample.config:Child")
    assert list((tmp_path / "cache" / "facts").rglob("*.json"))
    assert Resolver(Library(FolderTree(package), store)).find("sample.config:Child") == first
