"""`python -m contract_tests.gate.mutation`: does the gate report each harmful edit, and no harmless one?"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from contract_tests.gate.edits import Edit, aims, random_edits
from contract_tests.gate.judging import Comparison, judged
from contract_tests.gate.releases import Release
from contract_tests.gate.report import Finding, Level
from contract_tests.readers.facts import ModuleFacts
from contract_tests.readers.library import Library
from contract_tests.recorded import OTHERS, recorded_others
from contract_tests.snapshot import read_library
from contract_tests.sources import Settings, SourceTree, open_release
from contract_tests.sources.store import Store
from shims.errors import SpecshimError
from shims.releases import known

SPECULATORS = "0.4.0.1"
REPORTED = (Level.BROKEN, Level.NOT_JUDGED)


class EditedTree:
    """A tree in which some files are others."""

    def __init__(self, tree: SourceTree, files: dict[str, bytes]) -> None:
        self.tree, self.files, self.label = tree, files, f"{tree.label}, edited"

    def paths(self) -> frozenset[str]:
        return self.tree.paths() | frozenset(self.files)

    def read(self, path: str) -> bytes:
        return self.files[path] if path in self.files else self.tree.read(path)


class EditedLibrary(Library):
    """The modules of an edited tree; those that are as before are taken from the library of the original."""

    def __init__(self, original: Library, files: dict[str, bytes]) -> None:
        super().__init__(EditedTree(original.tree, files))
        self._original, self._edited = original, files

    def module(self, name: str) -> ModuleFacts | None:
        path = self.path_of(name)
        return super().module(name) if path in self._edited or path is None else self._original.module(name)


@dataclass
class Score:
    """How many edits of each kind were taken rightly."""

    right: Counter[tuple[str, bool]] = field(default_factory=Counter)
    total: Counter[tuple[str, bool]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, edit: Edit, findings: list[Finding]) -> None:
        """Count one edit: a harmful one has to be reported at its use, a harmless one nowhere."""
        reported = {finding.key for finding in findings if finding.level in REPORTED}
        right = edit.key in reported if edit.harmful else not reported
        self.total[edit.kind, edit.harmful] += 1
        self.right[edit.kind, edit.harmful] += right
        if not right:
            also = next((f.headline for f in findings if f.level in REPORTED), "nothing is reported")
            self.wrong.append(f"{edit}: {also}")

    def render(self) -> str:
        """The table, and what went wrong."""
        lines = [f"{'edit':<24} {'harmful, reported':>18} {'harmless, silent':>18}"]
        for kind in sorted({kind for kind, _ in self.total}):
            cells = (self._cell(kind, harmful) for harmful in (True, False))
            lines.append(f"{kind:<24} " + " ".join(f"{cell:>18}" for cell in cells))
        both = [f"{self._sum(self.right, harmful)}/{self._sum(self.total, harmful)}" for harmful in (True, False)]
        lines += [f"{'all':<24} {both[0]:>18} {both[1]:>18}", *(f"wrong: {line}" for line in self.wrong)]
        return "\n".join(lines)

    def _cell(self, kind: str, harmful: bool) -> str:
        total = self.total[kind, harmful]
        return f"{self.right[kind, harmful]}/{total}" if total else "-"

    @staticmethod
    def _sum(counts: Counter[tuple[str, bool]], harmful: bool) -> int:
        return sum(count for (_, is_harmful), count in counts.items() if is_harmful is harmful)


def score(tree: SourceTree, version: str, count: int, seed: int, store: Store | None = None) -> Score:
    """Edit one release, gate each edit against the original, and count.

    Raises:
        SourceError: the release cannot be read.
    """
    library = Library(tree, store)
    original = Release("original", version, read_library(library, "vllm", version), partial(_same, library))
    others = {package: recorded_others(package) for package in OTHERS}
    before = judged(original, SPECULATORS, others)
    then = {one.touchpoint.key: one for one in before}
    result = Score()
    for edit in random_edits(aims(library, before, SPECULATORS), count, seed):
        edited = EditedLibrary(library, edit.files)
        target = Release("edited", version, read_library(edited, "vllm", version), partial(_same, edited))
        comparison = Comparison(target, original, SPECULATORS)
        now = judged(target, SPECULATORS, others)
        result.add(edit, [comparison.finding(one, then.get(one.touchpoint.key)) for one in now])
    return result


def _same(library: Library) -> Library:
    return library


def main(arguments: list[str] | None = None) -> int:
    """Print the score; returns the exit code (1: an edit was taken wrongly, 2: the release cannot be read)."""
    parser = argparse.ArgumentParser(prog="python -m contract_tests.gate.mutation", description=__doc__)
    parser.add_argument("release", nargs="?", default=known()[-1], help="vLLM release whose sources are edited")
    parser.add_argument("--edits", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    settings = Settings.from_environment()
    try:
        tree = open_release("vllm", options.release, settings)
        found = score(tree, options.release, options.edits, options.seed, Store(settings.cache))
    except SpecshimError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{found.render()}\n{options.edits} edits of vllm {options.release}, seed {options.seed}: "
          f"{time.perf_counter() - started:.0f} s")  # fmt: skip
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
