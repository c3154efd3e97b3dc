"""What holds the layout together: who imports whom, where versions are compared, and that the tables agree."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from mini_stack import ROOT, run_bare

from shims.adaptations import ADAPTATIONS
from shims.releases import table
from shims.touchpoints import TOUCHPOINTS, by_key
from shims.versions import newest_first, parse, within

SHIMS = sorted((ROOT / "shims").rglob("*.py"))
PACKAGES = [*SHIMS, *sorted((ROOT / "pipeline").rglob("*.py")), *sorted((ROOT / "contract_tests").rglob("*.py"))]


def _imports(path: Path) -> set[str]:
    """Every module imported anywhere in a file, inside functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def _roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in _imports(path)}


@pytest.mark.parametrize("path", SHIMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_shims_know_nothing_of_what_is_built_on_them(path: Path) -> None:
    assert not _roots(path) & {"pipeline", "contract_tests", "tests"}


def test_only_patching_knows_wrapt() -> None:
    assert [p.relative_to(ROOT).as_posix() for p in PACKAGES if "wrapt" in _roots(p)] == ["shims/patching.py"]


def test_versions_are_compared_in_one_file() -> None:
    comparing = {"packaging.version", "packaging.specifiers"}
    assert [p.relative_to(ROOT).as_posix() for p in PACKAGES if _imports(p) & comparing] == ["shims/versions.py"]


def test_importing_shims_loads_next_to_nothing() -> None:
    """Weighed by what it loads, since a clock tells more of the machine: two modules and Python's small ones."""
    code = "import sys; before = set(sys.modules); import shims; print(*sorted(set(sys.modules) - before))"
    loaded = set(run_bare(code).says().split())
    own = {name for name in loaded if name.partition(".")[0] == "shims"}
    assert own == {"shims", "shims.tripwire"} and {n.partition(".")[0] for n in loaded - own} <= sys.stdlib_module_names
    assert not loaded & {"importlib.metadata", "inspect", "logging", "dataclasses", "json", "email", "asyncio"}


def test_each_row_is_complete_and_each_name_is_given_once() -> None:
    for row in ADAPTATIONS:
        assert row.touchpoint in by_key(), row.name
        assert row.why and row.link.startswith("https://") and row.until, row.name
        assert all(within("1.0", r) in (True, False) for r in (row.vllm, row.speculators, row.transformers))
    assert len({row.name for row in ADAPTATIONS}) == len(ADAPTATIONS)
    assert len(by_key()) == len(TOUCHPOINTS)


@pytest.mark.parametrize("reference", sorted({r.verb.reference for r in ADAPTATIONS if r.verb.reference}))
def test_each_function_that_a_row_names_is_there(reference: str) -> None:
    module, _, name = reference.partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_table_of_releases_is_in_order_and_says_why_one_is_not_run() -> None:
    versions = [release["version"] for release in table()]
    assert versions == newest_first(versions, final=True)[::-1]
    assert len(versions) == len(set(versions))
    for release in table():
        assert within("3.12", release["python"]), release
        assert (release["live"] and "kernels" not in release) or release.get("note"), release
        assert ("torch" in release) != ("kernels" in release) or not release["live"], release
        assert release.get("kernels") in {None, *(r["version"] for r in table() if r["live"] and "torch" in r)}
        assert parse(release.get("wheel", release["version"])).base_version == release["version"]
