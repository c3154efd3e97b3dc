"""The harness that takes rows away does take them away, in every process, and names a check for each row."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from contract_tests import mutate, without_row
from contract_tests.mutate import CANNOT, PROVED, ROOT, SURVIVED, UNIT, Proof, Verdicts
from shims.adaptations import ADAPTATIONS

ROW = "request-without-eos"
NAMES = "from shims.planning import select; from shims.versions import Stack\n"
NAMES += "print(*[r.name for r in select(Stack('0.32.0', '0.4.0.1')).adaptations])"


def _python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_row_is_left_out_in_a_process_and_in_its_children() -> None:
    within_child = (
        f"import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', {NAMES!r}], text=True))"
    )
    for code in (NAMES, within_child):
        whole = _python(code, {**os.environ, "PYTHONPATH": str(ROOT)}).stdout.split()
        shorter = _python(code, without_row.environment(ROW, os.environ)).stdout.split()
        assert ROW in whole
        assert shorter == [name for name in whole if name != ROW]


def test_the_shims_themselves_do_not_listen() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), without_row.VARIABLE: ROW}
    assert ROW in _python(NAMES, environment).stdout.split()


def test_a_row_that_is_none_is_refused() -> None:
    done = _python(NAMES, without_row.environment("nothing-like-it", os.environ))
    assert done.returncode == 1
    assert "there is no such row" in done.stderr
    assert mutate.main(["nothing-like-it"]) == 2


def test_a_row_cannot_be_left_out_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(without_row.VARIABLE, ROW)
    with pytest.raises(RuntimeError, match="can no longer be left out"):
        without_row.arm()


@pytest.mark.parametrize("row", ADAPTATIONS, ids=lambda row: row.name)
def test_each_row_has_a_check_that_fails_without_it(row: object) -> None:
    """The static ones are run here; those in `tests/` by `nox -s mutate-rows`."""
    assert isinstance(row, type(ADAPTATIONS[0]))
    proofs = list(mutate._static(row))
    assert all(proof.outcome == PROVED for proof in proofs)
    assert proofs or row.name in UNIT


@pytest.mark.parametrize("test", sorted(set(UNIT.values())))
def test_each_named_test_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("outcomes", "proved"),
    [
        ([], False),
        ([CANNOT], False),
        ([PROVED], True),
        ([PROVED, CANNOT], True),
        ([PROVED, SURVIVED], False),
        ([SURVIVED], False),
    ],
)
def test_one_check_that_passes_without_the_row_is_enough_to_say_so(outcomes: list[str], proved: bool) -> None:
    verdicts = Verdicts(ADAPTATIONS[0], [Proof("unit", "a test", outcome) for outcome in outcomes])
    assert verdicts.proved is proved
    assert mutate._rendered(verdicts).startswith("ok" if proved else "LEFT")
    assert ("rows that survive: none" in mutate._summary([verdicts], 1.0)) is proved


def test_a_test_that_cannot_be_run_proves_nothing() -> None:
    assert mutate._test("tests/test_whole_chain.py::no_such_test", None)[0] == "error"
