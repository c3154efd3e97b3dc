"""`python -m contract_tests.mutate [ROW…]`: take each adaptation row away in turn; a named check has to fail.

Three kinds of check, of which one suffices; every kind that applies and can run here is run:

    static   the judge, on the committed snapshots, finds a touchpoint broken without the row
    unit     a test in `tests/` fails without the row
    live     a live case fails without the row, on the vLLM of this environment

Each check is seen to pass with all rows first. Exit code 1: a row survives, or a check fails with all
rows in place; a row whose only checks cannot run here counts as surviving.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from contract_tests import without_row
from contract_tests.homes import GENERATORS
from contract_tests.judge import judge_release
from contract_tests.live.run import on_gpu
from contract_tests.recorded import OTHERS, recorded, recorded_others
from shims.adaptations import ADAPTATIONS, Adaptation
from shims.contract import Verdict
from shims.errors import SpecshimError, UsageError
from shims.planning import select
from shims.releases import known
from shims.touchpoints import by_key
from shims.verbs import Compute, Drop, Fill, Moved, Provide
from shims.versions import Stack, detect, within

ROOT = Path(__file__).parents[1]

# The test that fails without the row.
_CHAIN = "tests/test_whole_chain.py"
UNIT = {
    "pydantic-finds-torch": "tests/test_patching.py::test_speculators_can_be_imported_beside_any_transformers[5.4.0]",
    "attention-mask-module-gone": "tests/test_patching.py::"
    "test_speculators_can_be_imported_beside_any_transformers[5.24.0]",
    "hashing-module-missing": "tests/test_patching.py::test_an_absent_module_is_provided_where_it_is_absent[0.11.0]",
    "generator-on-the-direct-engine": "tests/test_patching.py::test_a_speculators_without_generator_gets_one[0.5.0]",
    "chunked-prefill-on": f"{_CHAIN}::test_prompts_past_the_budget_of_a_step[0.4.0.1]",
    "prefix-caching-off": f"{_CHAIN}::test_every_row_is_its_own[0.16.0-0.3.0]",
    "block-size-chosen-by-vllm": f"{_CHAIN}::test_every_row_is_its_own[0.32.0-0.4.0.1]",
    "kv-cache-layout-resolved": f"{_CHAIN}::test_every_row_is_its_own[0.32.0-0.4.0.1]",
    "kv-cache-layout-resolved-with-interleave": f"{_CHAIN}::test_every_row_is_its_own[0.33.0-0.4.0.1]",
    "memory-query-on-cpu": f"{_CHAIN}::test_every_row_is_its_own[0.16.0-0.3.0]",
    "memory-query-answers-zero-on-cpu": f"{_CHAIN}::test_every_row_is_its_own[0.16.0-0.4.0.1]",
    "scheduler-block-size-of-the-cache": f"{_CHAIN}::test_the_scheduler_counts_the_blocks_of_the_cache[0.4.0.1]",
    "rpc-replies-with-a-list": f"{_CHAIN}::test_every_row_is_its_own[0.11.0-0.4.0.1]",
    "remote-code-as-asked-configuration": f"{_CHAIN}::test_remote_code_runs_only_where_it_was_asked_for[configuration]",
    "remote-code-as-asked-tokenizer": f"{_CHAIN}::test_remote_code_runs_only_where_it_was_asked_for[tokenizer]",
    "workers-told-of-their-blocks": f"{_CHAIN}::test_every_row_is_its_own[0.16.0-0.4.0.1]",
    "workers-end-before-the-interpreter": f"{_CHAIN}::test_the_workers_end_once_and_with_the_generator",
    "loud-construction": f"{_CHAIN}::test_a_bare_assertion_while_building_is_told_and_stops_the_workers",
    "capture-confirmed-by-workers": f"{_CHAIN}::test_a_worker_without_the_shims_is_refused",
    "requests-followed-by-id": f"{_CHAIN}::test_every_row_is_its_own[0.16.0-0.4.0.1]",
    "capture-by-hooks": f"{_CHAIN}::test_every_row_is_its_own[0.16.0-0.4.0.1]",
    "capture-reset-by-id": f"{_CHAIN}::test_every_row_is_its_own[0.16.0-0.4.0.1]",
    "states-proved-by-content": f"{_CHAIN}::test_every_row_is_its_own[0.16.0-0.4.0.1]",
    "worker-failures-carry-their-traceback": f"{_CHAIN}::test_a_bare_assertion_in_a_worker_arrives_with_its_traceback",
}

# What real vLLM proves on a CPU: the releases on which, and the model whose live cases fail there without the row.
LIVE = {
    "pydantic-finds-torch": ("", "marker"),
    "prefix-caching-off": ("", "llama"),
    "block-size-chosen-by-vllm": (">=0.29", "marker"),
    "kv-cache-layout-resolved": ("", "marker"),
    "memory-query-on-cpu": ("", "marker"),
    "memory-query-answers-zero-on-cpu": ("", "marker"),
    "scheduler-block-size-of-the-cache": (">=0.29", "llama"),
    "requests-followed-by-id": ("", "llama"),
}
OLDER = os.environ.get("SPECSHIM_OLDER_SPECULATORS", "")

PROVED, SURVIVED, CANNOT = "fails without it", "PASSES WITHOUT IT", "not run here"


@dataclass
class Proof:
    """What one kind of check says of a row.

    Args:
        kind: `static`, `unit` or `live`.
        check: name of the check.
        outcome: one of PROVED, SURVIVED, CANNOT.
        detail: how it failed, or why it was not run.
    """

    kind: str
    check: str
    outcome: str
    detail: str = ""


@dataclass
class Verdicts:
    """The proofs of one row."""

    row: Adaptation
    proofs: list[Proof] = field(default_factory=list)

    @property
    def proved(self) -> bool:
        outcomes = [proof.outcome for proof in self.proofs]
        return PROVED in outcomes and SURVIVED not in outcomes


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m contract_tests.mutate", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--no-live", action="store_true", help="leave real vLLM out, even where it is installed")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        chosen = _chosen(options.rows)
        _refuse_stale_names()
    except SpecshimError as error:
        print(error, file=sys.stderr)
        return 2
    found = []
    for row in chosen:
        verdicts = Verdicts(row, [*_static(row), *_unit(row), *(() if options.no_live else _live(row))])
        found.append(verdicts)
        print(_rendered(verdicts), flush=True)
    print(_summary(found, time.monotonic() - began))
    return 0 if all(verdicts.proved for verdicts in found) else 1


def _chosen(names: list[str]) -> list[Adaptation]:
    unknown = sorted(set(names) - {row.name for row in ADAPTATIONS})
    if unknown:
        raise UsageError("ROW", "names of rows in shims/adaptations.py", ", ".join(unknown), "see `specshim plan`")
    return [row for row in ADAPTATIONS if not names or row.name in names]


def _refuse_stale_names() -> None:
    stale = sorted({*UNIT, *LIVE} - {row.name for row in ADAPTATIONS})
    if stale:
        raise UsageError("contract_tests/mutate.py", "checks of rows that exist", ", ".join(stale), "remove them")


# --- static ---------------------------------------------------------------------------------------


def _static(row: Adaptation) -> Iterator[Proof]:
    """The first pair of releases on which the judge calls the row's touchpoint broken without it."""
    if not isinstance(row.verb, (Drop, Fill, Compute, Moved, Provide)) or row.behavioural:
        return
    for release in known():
        for speculators in GENERATORS:
            if within(release, row.vllm) and within(speculators, row.speculators):
                why = _broken_without(row, release, speculators)
                if why:
                    named = f"contract_tests/test_static.py::test_nothing_is_broken[{release}-{speculators}]"
                    yield Proof("static", named, PROVED, why)
                    return
    yield Proof("static", "contract_tests/test_static.py::test_nothing_is_broken", SURVIVED)


def _broken_without(row: Adaptation, release: str, speculators: str) -> str:
    others = {package: recorded_others(package) for package in OTHERS}
    module = by_key()[row.touchpoint].module
    # Rows on other packages hold for some of their releases: the judge chooses among them itself.
    beside = [r for r in ADAPTATIONS if r.transformers]
    rows = list(dict.fromkeys([*select(Stack(release, speculators)).adaptations, *beside]))

    def broken(in_force: list[Adaptation]) -> dict[str, str]:
        judged = judge_release(recorded(release), speculators, others, in_force)
        near = [j for j in judged if j.touchpoint.module == module]
        return {j.touchpoint.key: j.why for j in near if j.verdict is Verdict.BROKEN}

    before, after = broken(rows), broken([r for r in rows if r != row])
    return "; ".join(f"{key}: {why}" for key, why in after.items() if key not in before)


# --- unit -----------------------------------------------------------------------------------------


def _unit(row: Adaptation) -> Iterator[Proof]:
    test = UNIT.get(row.name)
    if test is None:
        return
    outcome, said = _test(test, None)
    if outcome != "passed":
        yield Proof("unit", test, CANNOT if outcome == "skipped" else SURVIVED, f"with all rows: {outcome}: {said}")
        return
    outcome, said = _test(test, row.name)
    yield Proof("unit", test, PROVED if outcome == "failed" else SURVIVED, said)


@lru_cache(maxsize=256)
def _test(test: str, missing: str | None) -> tuple[str, str]:
    """(`passed`, `failed`, `skipped` or, where pytest itself could not run it, `error`; the error it showed)."""
    environment = without_row.environment(missing, os.environ) if missing else dict(os.environ)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    last = f" {lines[-1]}" if lines else ""
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ") and "Error" in line]
    if done.returncode == 0:
        return ("passed" if " passed" in last else "skipped"), ""
    # An import that fails in the test itself, or no such test, proves nothing.
    failed = done.returncode == 1 and " failed" in last and " error" not in last
    return ("failed" if failed else "error"), errors[-1] if errors else last.strip()


# --- live -----------------------------------------------------------------------------------------


def _live(row: Adaptation) -> Iterator[Proof]:
    if row.name not in LIVE:
        return
    releases, models = LIVE[row.name]
    check = f"contract_tests.live.run --models {models}"
    here = [(v, path) for v, path in _speculators() if within(_stack(v).vllm, releases) and row.holds_for(_stack(v))]
    if not here:
        yield Proof("live", check, CANNOT, f"needs a stack for {row.range or 'any'}, vllm {releases}, on a CPU")
        return
    version, path = here[0]
    named = f"{check} (vllm {detect().vllm}, speculators {version})"
    with_all = _cases(models, path, None)
    if with_all:
        yield Proof("live", named, SURVIVED, f"with all rows: {with_all}")
        return
    without = _cases(models, path, row.name)
    yield Proof("live", named, PROVED if without else SURVIVED, without)


def _stack(speculators: str) -> Stack:
    here = detect()
    return Stack(here.vllm, speculators, here.transformers, here.torch)


@lru_cache(maxsize=1)
def _speculators() -> list[tuple[str, str]]:
    """(version, entry for the path) of the generators that can be run here."""
    here = detect()
    if here.vllm is None or here.speculators is None or importlib.util.find_spec("torch") is None or on_gpu():
        return []
    older = sorted(Path(OLDER).glob("speculators-*.dist-info")) if OLDER else []
    return [(here.speculators, ""), *((about.name.split("-")[1].removesuffix(".dist"), OLDER) for about in older)]


@lru_cache(maxsize=64)
def _cases(models: str, path: str, missing: str | None) -> str:
    """'' if all live cases pass, else the first that does not and why."""
    environment = {k: v for k, v in os.environ.items() if k != "SHIMS_DISABLE"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH")]))
    options = ["--without-row", missing] if missing else []
    command = [sys.executable, "-m", "contract_tests.live.run", "--models", models, *options]
    with tempfile.TemporaryDirectory(prefix="specshim-mutate-") as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    failing = [line for line in done.stdout.splitlines() if " fail " in line]
    last = done.stderr.strip().rpartition("\n")[2]
    return " ".join((failing or [f"exit code {done.returncode}: {last}"])[0].split())


# --- results --------------------------------------------------------------------------------------


def _rendered(verdicts: Verdicts) -> str:
    lines = [f"{'ok  ' if verdicts.proved else 'LEFT'} {verdicts.row.name}"]
    for proof in verdicts.proofs:
        lines.append(f"       {proof.kind:6} {proof.outcome:17} {proof.check}")
        lines += [f"              {proof.detail[:200]}"] if proof.detail else []
    return "\n".join(lines if verdicts.proofs else [*lines, "       no check is named in contract_tests/mutate.py"])


def _summary(found: list[Verdicts], seconds: float) -> str:
    lines = ["", f"{len(found)} rows in {seconds:.0f} s"]
    for kind in ("static", "unit", "live"):
        by_outcome = {
            outcome: [v.row.name for v in found for p in v.proofs if p.kind == kind and p.outcome == outcome]
            for outcome in (PROVED, SURVIVED, CANNOT)
        }
        lines.append(f"{kind:6} {len(by_outcome[PROVED]):3} fail without their row")
        for outcome in (SURVIVED, CANNOT):
            lines += [f"       {outcome}: {', '.join(by_outcome[outcome])}"] if by_outcome[outcome] else []
    left = [v.row.name for v in found if not v.proved]
    lines.append(f"rows that survive: {', '.join(left) or 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
