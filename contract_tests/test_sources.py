"""Fetching, from an index of this machine's own: ranges, fallbacks, the cache, and what goes wrong."""

from __future__ import annotations

import io
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from contract_tests.readers import read_source
from contract_tests.sources import Settings, SourceError, open_release, release, released
from contract_tests.sources.trees import MAX_FILE

_MODULE = b"def f(a, b=1): ...\n"
_BULK = bytes(range(256)) * 8192  # 2 MB that do not compress away


def _wheel(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _sdist(name: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class _Index:
    """A simple index in memory; counts the bytes that it hands out."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.failing: dict[str, int] = {}
        self.sent = self.answers = 0
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                name = self.path.rstrip("/").rpartition("/")[2]
                if name in index.failing:
                    self._answer(index.failing[name], b"no")
                elif name == "demo":
                    links = "".join(f'<a href="/files/{file}">{file}</a>' for file in index.files)
                    self._answer(200, f"<html><body>{links}</body></html>".encode(), "text/html")
                elif name in index.files:
                    self._range(index.files[name])
                else:
                    self._answer(404, b"")

            def _range(self, content: bytes) -> None:
                wanted = self.headers.get("Range", "").removeprefix("bytes=")
                if not wanted:
                    return self._answer(200, content)
                if not re.fullmatch(r"\d*-\d*", wanted):
                    return self._answer(416, b"")
                first, _, last = wanted.partition("-")
                start = int(first) if first else max(0, len(content) - int(last))
                end = min(int(last) if first and last else len(content) - 1, len(content) - 1)
                extra = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
                return self._answer(206, content[start : end + 1], **extra)

            def _answer(self, code: int, body: bytes, kind: str = "application/octet-stream", **extra: str) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                for header, value in extra.items():
                    self.send_header(header, value)
                # Counted before it is sent: the client may look at the counts as soon as it has the answer.
                index.sent += len(body)
                index.answers += 1
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Index]:
    served = _Index()
    monkeypatch.setattr(release, "_pages", {})
    yield served
    served.server.shutdown()
    served.server.server_close()


@pytest.fixture
def settings(index: _Index, tmp_path: Path) -> Settings:
    return Settings(index.url, tmp_path / "cache", certificates=None, timeout=5)


def test_a_wheel_is_read_by_ranges_and_then_from_the_cache(index: _Index, settings: Settings) -> None:
    index.files["demo-1.0-py3-none-any.whl"] = _wheel({"demo/data.bin": _BULK, "demo/m.py": _MODULE})
    tree = open_release("demo", "1.0", settings)
    assert str(read_source(tree, ["demo.m:f"])["demo.m:f"].signature) == "(a, b=…)"
    tree.save()
    assert index.sent < len(_BULK)
    before = index.sent
    again = open_release("demo", "1.0", replace(settings, offline=True))
    assert again.read("demo/m.py") == _MODULE
    assert again.sha256("demo/m.py") == tree.sha256("demo/m.py")
    assert index.sent == before


def test_files_wanted_together_come_together(index: _Index, settings: Settings) -> None:
    modules = {f"demo/m{i}.py": _MODULE * (i + 1) for i in range(30)}
    index.files["demo-1.0-py3-none-any.whl"] = _wheel({**modules, "demo/data.bin": _BULK, "demo/z.py": _MODULE})
    tree = open_release("demo", "1.0", settings)
    before = index.answers
    tree.prefetch([*modules, "demo/z.py", "demo/not_there.py"])
    assert index.answers == before + 2  # one range before the bulk, one after it
    for path, content in modules.items():
        assert tree.read(path) == content
    assert tree.read("demo/z.py") == _MODULE
    assert index.answers == before + 2
    assert index.sent < len(_BULK)


def test_offline_says_what_is_missing_and_what_to_do(index: _Index, settings: Settings) -> None:
    index.files["demo-1.0-py3-none-any.whl"] = _wheel({"demo/m.py": _MODULE, "demo/n.py": b"x = 1\n"})
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


def test_a_damaged_wheel_gives_way_to_the_source_distribution(index: _Index, settings: Settings) -> None:
    whole = _wheel({"demo/m.py": _MODULE})
    index.files["demo-1.0-py3-none-any.whl"] = whole[: len(whole) // 2]
    index.files["demo-1.0.tar.gz"] = _sdist("demo-1.0", {"src/demo/m.py": _MODULE, "README": b"no source"})
    tree = open_release("demo", "1.0", settings)
    assert tree.paths() == {"demo/m.py"}
    assert tree.distribution.kind == "sdist"
    assert tree.read("demo/m.py") == _MODULE


def test_a_release_of_which_nothing_can_be_read(index: _Index, settings: Settings) -> None:
    index.files["demo-1.0-py3-none-any.whl"] = b"not a zip at all"
    index.files["demo-1.0.tar.gz"] = b"not an archive"
    with pytest.raises(SourceError) as caught:
        open_release("demo", "1.0", settings)
    assert "demo-1.0-py3-none-any.whl" in caught.value.found
    assert "demo-1.0.tar.gz" in caught.value.found


def test_a_file_that_unpacks_to_more_than_a_source_file_is_refused(index: _Index, settings: Settings) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo/m.py", b"#" * (MAX_FILE + 1))
    index.files["demo-1.0-py3-none-any.whl"] = buffer.getvalue()
    with pytest.raises(SourceError, match="no release of a Python package"):
        open_release("demo", "1.0", settings).read("demo/m.py")


def test_an_index_that_fails_and_a_release_that_is_not_there(index: _Index, settings: Settings) -> None:
    index.files["demo-1.0-py3-none-any.whl"] = _wheel({"demo/m.py": _MODULE})
    with pytest.raises(SourceError, match=r"not there \(newest: 1.0\)"):
        open_release("demo", "2.0", settings)
    with pytest.raises(SourceError, match="has none"):
        released("absent", settings)
    index.failing["demo"] = 500
    release._pages.clear()
    with pytest.raises(SourceError, match="an answer from the package index"):
        open_release("demo", "1.0", settings)


def test_releases_are_listed_oldest_first_without_previews(index: _Index, settings: Settings) -> None:
    for version in ("1.10", "1.9", "2.0rc1"):
        index.files[f"demo-{version}-py3-none-any.whl"] = _wheel({"demo/m.py": _MODULE})
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
