"""The files for CI systems are valid by those systems' own schemas, and do what they say when they are run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract_tests.gate.options import parsed
from contract_tests.recorded import recorded
from contract_tests.stub import stub_files, write_files

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")
_VALID = {
    "action.yml": "vendor.github-actions",
    ".github/workflows/vllm-gate.yml": "vendor.github-workflows",
    ".github/workflows/vllm-drift.yml": "vendor.github-workflows",
    "ci/gitlab.yml": "vendor.gitlab-ci",
}
_SCRIPTS = ("ci/gate.sh", "ci/drift_issue.sh")


@pytest.mark.skipif(importlib.util.find_spec("check_jsonschema") is None, reason="needs check-jsonschema")
@pytest.mark.parametrize("file", _VALID)
def test_each_file_is_valid(file: str, tmp_path: Path) -> None:
    def check(path: Path) -> int:
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", _VALID[file], str(path)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert check(ROOT / file) == 0
    (tmp_path / "wrong.yml").write_text("runs: {using: 3}\njobs: 7\nscript: {a: 1}\n.x: {script: 7}\n", "utf-8")
    assert check(tmp_path / "wrong.yml") != 0


@pytest.mark.parametrize("script", _SCRIPTS)
def test_each_script_is_bash(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / script)], check=False).returncode == 0
    assert os.access(ROOT / script, os.X_OK)


def _load(file: str) -> Any:
    return yaml.safe_load((ROOT / file).read_text("utf-8"))


def test_no_input_is_pasted_into_a_script() -> None:
    """An input, a branch name for one, may hold anything; the environment cannot be broken out of."""
    for file in ("action.yml", ".github/workflows/vllm-gate.yml", ".github/workflows/vllm-drift.yml"):
        for run in re.findall(r"run: (.*(?:\n {8,}.*)*)", (ROOT / file).read_text("utf-8")):
            assert "${{" not in run, run


def test_the_hook_and_the_template_call_the_gate_as_it_is() -> None:
    (hook,) = _load(".pre-commit-hooks.yaml")
    assert parsed(hook["entry"].split()[2:], "specshim gate").from_diff == ""
    for script in [line for line in _load("ci/gitlab.yml")[".vllm-gate"]["script"] if line.startswith("specshim")]:
        options = parsed(script.replace('"', "").replace("$GATE_FAIL_ON", "drift").split()[2:], "specshim gate")
        assert {output.format for output in options.outputs} == {"text", "markdown", "json", "junit", "html"}


@pytest.mark.parametrize(
    ("file", "watched"),
    [
        *(
            (name, True)
            for name in ("requirements.txt", "requirements-gpu.in", "a/requirements/x.txt"[:0] or "uv.lock")
        ),
        *((name, True) for name in ("pyproject.toml", "sub/poetry.lock", "Dockerfile", "docker/Dockerfile.gpu")),
        *((name, False) for name in ("README.md", "src/main.py", "my_pyproject.toml.bak", "Dockerfiles.md/x")),
    ],
)
def test_the_hook_looks_at_files_that_name_packages(file: str, watched: bool) -> None:
    (hook,) = _load(".pre-commit-hooks.yaml")
    assert bool(re.search(hook["files"], file)) is watched


def test_the_hooks_requirements_are_the_extras() -> None:
    (hook,) = _load(".pre-commit-hooks.yaml")
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(f'"{requirement}"' in text for requirement in hook["additional_dependencies"])


# --- the script of the action, run ---------------------------------------------------------------


def _run(tmp_path: Path, **environment: str) -> tuple[int, str, str, str]:
    """(exit code, printed, summary, outputs) of `ci/gate.sh` as the action runs it."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    program = f'#!/bin/sh\nshift\nexec {sys.executable} -m contract_tests.gate "$@"\n'
    (tools / "specshim").write_text(program, "utf-8")
    (tools / "specshim").chmod(0o755)
    base = {key: value for key, value in os.environ.items() if not key.startswith(("GITHUB_", "CI_", "GATE_"))}
    summary, outputs = tmp_path / "summary.md", tmp_path / "outputs.txt"
    given = {
        **base,
        "PATH": f"{tools}{os.pathsep}{base['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SPECSHIM_CACHE": str(tmp_path / "cache"),
        "SPECSHIM_OFFLINE": "1",
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_OUTPUT": str(outputs),
        "GATE_FORMAT": "github",
        **environment,
    }
    command = ["bash", str(ROOT / "ci/gate.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    said, told = (path.read_text("utf-8") if path.is_file() else "" for path in (summary, outputs))
    return done.returncode, done.stdout + done.stderr, said, told


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_files(stub_files(recorded("0.33.0")), tmp_path / "checkout")


def test_a_target_that_holds(tmp_path: Path, checkout: Path) -> None:
    code, printed, summary, outputs = _run(tmp_path, GATE_TARGETS="checkout", GATE_BASELINE="0.33.0")
    assert code == 0, printed
    assert printed.startswith("::") and summary.startswith("### ")
    assert outputs == "exit-code=0\nreports=vllm-gate\n"
    written = {path.name for path in (tmp_path / "vllm-gate").iterdir()}
    assert written == {"gate.md", "gate.json", "gate.xml", "gate.sarif", "gate.html"}


def _gated_into(stdout: Any, checkout: Path, *options: str) -> tuple[int, str]:
    """(exit code, complaints) of the gate as a process of its own."""
    command = [sys.executable, "-m", "contract_tests.gate", str(checkout), "--baseline", "0.33.0", *options]
    given = {**os.environ, "PYTHONPATH": str(ROOT), "SPECSHIM_OFFLINE": "1"}
    done = subprocess.run(command, env=given, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_behind_standard_output_is_said(checkout: Path, form: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = _gated_into(full, checkout, "--format", form)
    assert (code, [line.split(":")[0].strip() for line in said.splitlines()]) == (
        2,
        ["writing", "wanted", "found", "next"],
    ), said


def test_a_reader_that_has_had_enough_gets_the_verdict_and_the_files(checkout: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        assert _gated_into(pipe, checkout, "--output", f"junit={tmp_path / 'gate.xml'}") == (0, "")
    assert (tmp_path / "gate.xml").is_file()


def test_a_target_that_breaks_and_one_that_cannot_be_read(tmp_path: Path, checkout: Path) -> None:
    (checkout / "vllm/v1/request.py").write_text("x = 1\n", "utf-8")
    code, printed, summary, outputs = _run(tmp_path, GATE_TARGETS="checkout nowhere", GATE_BASELINE="0.33.0")
    assert code == 1, printed
    assert "::error" in printed and "Request" in summary and "nowhere" in summary
    assert "exit-code=1" in outputs


def test_options_reach_the_gate_as_they_are(tmp_path: Path, checkout: Path) -> None:
    for fail_on, expected in (("broken", 0), ("unverified", 1)):
        given = {"GATE_TARGETS": "checkout", "GATE_BASELINE": "0.33.0", "GATE_SPECULATORS": "0.3.0 0.4.0.1"}
        code, printed, *_ = _run(tmp_path, GATE_FAIL_ON=fail_on, **given)
        assert code == expected, printed
        assert "speculators 0.3.0 uses it" in printed and "speculators 0.4.0.1 uses it" in printed


def test_an_input_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    hostile = f"$(touch {marker}) `touch {marker}` ; touch {marker} --output=x"
    code, printed, *_ = _run(tmp_path, GATE_TARGETS=hostile, GATE_BASELINE=f"$(touch {marker})")
    assert code == 2, printed
    assert not marker.exists() and not (tmp_path / "x").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_pull_request_that_leaves_vllm_alone(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    code, printed, _, outputs = _run(tmp_path)
    assert (code, "nothing to judge" in printed, "exit-code=0" in outputs) == (0, True, True), printed


# --- the nightly issue ---------------------------------------------------------------------------


def _issue(tmp_path: Path, code: str, open_issue: str) -> list[str]:
    """What `ci/drift_issue.sh` asks of `gh`."""
    tools = tmp_path / "tools"
    tools.mkdir()
    log = tmp_path / "log"
    program = f'#!/bin/sh\necho "$@" >> {log}\n[ "$1 $2" != "issue list" ] || echo "{open_issue}"\n'
    (tools / "gh").write_text(program, "utf-8")
    (tools / "gh").chmod(0o755)
    write_files({"vllm-gate/gate.md": "ü".encode() * 50_000}, tmp_path)
    given = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "CODE": code, "RUN": "address"}
    subprocess.run(["bash", str(ROOT / "ci/drift_issue.sh")], cwd=tmp_path, env=given, check=True, capture_output=True)
    return [line for line in log.read_text("utf-8").splitlines() if not line.startswith(("label", "issue list"))]


@pytest.mark.parametrize(
    ("code", "open_issue", "asked"),
    [("1", "", "issue create"), ("2", "", "issue create"), ("1", "7", "issue edit 7"), ("0", "7", "issue close 7")],
)
def test_one_issue_is_opened_updated_and_closed(tmp_path: Path, code: str, open_issue: str, asked: str) -> None:
    (line,) = _issue(tmp_path, code, open_issue)
    assert line.startswith(asked)


def test_nothing_to_say_is_not_said(tmp_path: Path) -> None:
    assert _issue(tmp_path, "0", "") == []
