"""Fetching, from an index of this machine's own: ranges, fallbacks, the cache, and what goes wrong."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from contract_tests.readers import read_source
from contract_tests.served import Served, sdist, wheel
from contract_tests.sources import Settings, SourceError, open_release, release, released
from contract_tests.sources.trees import MAX_FILE

_MODULE = b"def f(a, b=1): ...\n"
_BULK = bytes(range(256)) * 8192  # 2 MB that do not compress away


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    served = Served()
    monkeypatch.setattr(release, "_pages", {})
    yield served
    served.close()


@pytest.fixture
def settings(index: Served, tmp_path: Path) -> Settings:
    return Settings(index.url, tmp_path / "cache", certificates=None, timeout=60)


def test_a_wheel_is_read_by_ranges_and_then_from_the_cache(index: Served, settings: Settings) -> None:
    index.files["demo-1.0-py3-none-any.whl"] = wheel({"demo/data.bin": _BULK, "demo/m.py": _MODULE})
    tree = open_release("demo", "1.0", settings)
    assert str(read_source(tree, ["demo.m:f"])["demo.m:f"].signature) == "(a, b=…)"
    tree.save()
    assert index.sent < len(_BULK)
    before = index.sent
    again = open_release("demo", "1.0", replace(settings, offline=True))
    assert again.read("demo/m.py") == _MODULE
    assert again.sha256("demo/m.py") == tree.sha256("demo/m.py")
    assert index.sent == before


def test_files_wanted_together_come_together(index: Served, settings: Settings) -> None:
    modules = {f"demo/m{i}.py": _MODULE * (i + 1) for i in range(30)}
    index.files["demo-1.0-py3-none-any.whl"] = wheel({**modules, "demo/data.bin": _BULK, "demo/z.py": _MODULE})
    tree = open_release("demo", "1.0", settings)
    before = index.answers
    tree.prefetch([*modules, "demo/z.py", "demo/not_there.py"])
    assert index.answers == before + 2  # one range before the bulk, one after it
    for path, content in modules.items():
        assert tree.read(path) == content
    assert tree.read("demo/z.py") == _MODULE
    assert index.answers == before + 2
    assert index.sent < len(_BULK)


def test_offline_says_what_is_missing_and_what_to_do(index: Served, settings: Settings) -> None:
    index.files["demo-1.0-py3-none-any.whl"] = wheel({"demo/m.py": _MODULE, "demo/n.py": b"x = 1\n"})
    with pytest.raises(SourceError, match=r"demo 1\.0"):
        open_release("demo", "1.0", replace(settings, offline=True))
    tree = open_release("demo", "1.0", settings)
    tree.read("demo/m.py")
    tree.save()
    with pytest.raises(SourceError) as caught:
        open_release("demo", "1.0", replace(settings, offline=True)).read("demo/n.py")
    assert "offline mode is on" in caught.value.found
    assert "--offline" in caught.value.next_step
    assert str(settings.cache) in caught.value.wanted


def test_a_damaged_wheel_gives_way_to_the_source_distribution(index: Served, settings: Settings) -> None:
    whole = wheel({"demo/m.py": _MODULE})
    index.files["demo-1.0-py3-none-any.whl"] = whole[: len(whole) // 2]
    index.files["demo-1.0.tar.gz"] = sdist("demo-1.0", {"src/demo/m.py": _MODULE, "README": b"no source"})
    tree = open_release("demo", "1.0", settings)
    assert tree.paths() == {"demo/m.py"}
    assert tree.distribution.kind == "sdist"
    assert tree.read("demo/m.py") == _MODULE


def test_a_release_of_which_nothing_can_be_read(index: Served, settings: Settings) -> None:
    index.files["demo-1.0-py3-none-any.whl"] = b"not a zip at all"
    index.files["demo-1.0.tar.gz"] = b"not an archive"
    with pytest.raises(SourceError) as caught:
        open_release("demo", "1.0", settings)
    assert "demo-1.0-py3-none-any.whl" in caught.value.found
    assert "demo-1.0.tar.gz" in caught.value.found


def test_a_file_that_unpacks_to_more_than_a_source_file_is_refused(index: Served, settings: Settings) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo/m.py", b"#" * (MAX_FILE + 1))
    index.files["demo-1.0-py3-none-any.whl"] = buffer.getvalue()
    with pytest.raises(SourceError, match="no release of a Python package"):
        open_release("demo", "1.0", settings).read("demo/m.py")


def test_an_index_that_fails_and_a_release_that_is_not_there(index: Served, settings: Settings) -> None:
    index.files["demo-1.0-py3-none-any.whl"] = wheel({"demo/m.py": _MODULE})
    with pytest.raises(SourceError, match=r"not there \(newest: 1.0\)"):
        open_release("demo", "2.0", settings)
    with pytest.raises(SourceError, match="has none"):
        released("absent", settings)
    index.failing["demo"] = 500
    release._pages.clear()
    with pytest.raises(SourceError, match="an answer from the package index"):
        open_release("demo", "1.0", settings)


def test_releases_are_listed_oldest_first_without_previews(index: Served, settings: Settings) -> None:
    for version in ("1.10", "1.9", "2.0rc1"):
        index.files[f"demo-{version}-py3-none-any.whl"] = wheel({"demo/m.py": _MODULE})
    assert released("demo", settings) == ["1.9", "1.10"]


def test_settings_follow_the_users_configuration() -> None:
    environment = {"PIP_INDEX_URL": "https://pip.example/simple", "SPECSHIM_CACHE": "/c", "SSL_CERT_FILE": "/ca.pem"}
    settings = Settings.from_environment(environment=environment)
    assert (settings.index, settings.cache, settings.certificates) == (
        "https://pip.example/simple",
        Path("/c"),
        "/ca.pem",
    )
    environment["UV_DEFAULT_INDEX"] = "https://uv.example/simple"
    environment["SPECSHIM_OFFLINE"] = "1"
    settings = Settings.from_environment(environment=environment)
    assert settings.index == "https://uv.example/simple"
    assert settings.offline
