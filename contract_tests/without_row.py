"""Take one adaptation row away, in this process and in those that it starts. For `contract_tests.mutate`.

The row is left out while `shims.adaptations` is being loaded, so everything that reads the table sees it
without the row. The shims know nothing of this: a child process gets it through a `sitecustomize` of the
harness's own, on a path that `environment` sets.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

VARIABLE = "SPECSHIM_WITHOUT_ROW"
_TABLE = "shims.adaptations"
_HERE = Path(__file__).parent
_PATH = (_HERE / "startup", _HERE.parent)


def environment(row: str, base: Mapping[str, str]) -> dict[str, str]:
    """`base`, for a process in which the row `row` is missing."""
    path = os.pathsep.join(filter(None, [*map(str, _PATH), base.get("PYTHONPATH")]))
    return {**base, VARIABLE: row, "PYTHONPATH": path}


def arm() -> None:
    """Leave out the row named in the environment, if one is, when the table is loaded in this process.

    Raises:
        RuntimeError: the table is loaded already.
    """
    row = os.environ.get(VARIABLE)
    if not row or any(isinstance(finder, _Shortening) for finder in sys.meta_path):
        return
    if _TABLE in sys.modules:
        raise RuntimeError(f"{_TABLE} is loaded: {row} can no longer be left out")
    sys.meta_path.insert(0, _Shortening(row))


class _Shortening:
    """A finder that finds the table as everyone does, and has it loaded without one row."""

    def __init__(self, row: str) -> None:
        self._row, self._busy = row, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if name != _TABLE or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_shortened(module: ModuleType) -> None:
            load(module)
            rows = vars(module)["ADAPTATIONS"]
            kept = tuple(row for row in rows if row.name != self._row)
            if len(kept) == len(rows):
                raise LookupError(f"{VARIABLE}={self._row}: there is no such row")
            vars(module)["ADAPTATIONS"] = kept

        vars(spec.loader)["exec_module"] = load_shortened
        return spec
