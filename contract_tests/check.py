"""`python -m contract_tests.check [RELEASE…]`: is everything that speculators uses there, in every vLLM release?

Reads the releases' sources from the package index (or the cache) and installs nothing. Exit code 0: no
touchpoint is broken and no row is idle; 1: one is; 2: something could not be read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from contract_tests.candidates import candidate_rows
from contract_tests.homes import GENERATORS
from contract_tests.judge import Judgement, Others, judge_release, last_that_held
from contract_tests.readers.found import Reading
from contract_tests.readers.library import Library
from contract_tests.recorded import OTHERS, recorded, recorded_others
from contract_tests.snapshot import read_releases
from contract_tests.sources import Settings, open_release
from contract_tests.sources.store import Store
from contract_tests.strict import Idle, idle_rows
from shims.contract import Verdict
from shims.errors import SpecshimError
from shims.releases import known
from shims.versions import within

# Beside the generators: the newest release without one, see `contract_tests.consumers`.
COLUMNS = (*GENERATORS, "0.9.0")


@dataclass(frozen=True)
class Broken:
    """One broken touchpoint, with what helps to mend it."""

    release: str
    speculators: str
    judgement: Judgement
    last_held: str | None
    candidates: list[str]

    def as_dict(self) -> dict[str, Any]:
        touchpoint = self.judgement.touchpoint
        return {
            "vllm": self.release,
            "speculators": self.speculators,
            "touchpoint": touchpoint.key,
            "home": touchpoint.home,
            "used_in": touchpoint.used_in,
            "why": self.judgement.why,
            "last_held": self.last_held,
            "candidates": self.candidates,
        }

    def __str__(self) -> str:
        touchpoint = self.judgement.touchpoint
        lines = [
            f"broken: {touchpoint.key} ({touchpoint.home}), vllm {self.release}, speculators {self.speculators}",
            f"  used in   {touchpoint.used_in}",
            f"  why       {self.judgement.why}",
            f"  last held {self.last_held or 'on no release that was read'}",
        ]
        lines += [f"  a guess   {row}" for row in self.candidates] or ["  a guess   none found"]
        return "\n".join(lines)


def broken(reading: Reading, speculators: str, judged: list[Judgement], library: Library) -> list[Broken]:
    """What is broken on one release, explained.

    Args:
        reading: of the vLLM release.
        speculators: release whose uses were judged.
        judged: all its judgements.
        library: the vLLM release's modules, searched for candidates.
    """
    earlier = [recorded(release) for release in known() if within(release, f"<{reading.release}")]
    return [
        Broken(
            reading.release,
            speculators,
            judgement,
            last_that_held(judgement.touchpoint, speculators, earlier),
            candidate_rows(judgement, reading.release, speculators, library),
        )
        for judgement in judged
        if judgement.verdict is Verdict.BROKEN
    ]


@dataclass
class Outcome:
    """What a run found."""

    judged: dict[str, dict[str, list[Judgement]]]  # vLLM release -> speculators release -> judgements
    broken: list[Broken]
    idle: list[Idle]
    seconds: float

    @property
    def exit_code(self) -> int:
        return 1 if self.broken or self.idle else 0

    def as_dict(self) -> dict[str, Any]:
        counts = {
            release: {speculators: _counts(judged) for speculators, judged in columns.items()}
            for release, columns in self.judged.items()
        }
        return {
            "seconds": round(self.seconds, 2),
            "counts": counts,
            "broken": [entry.as_dict() for entry in self.broken],
            "idle_rows": [str(entry) for entry in self.idle],
        }

    def render(self) -> str:
        """A table, and a paragraph for each thing that is wrong."""
        width = 18
        lines = ["touchpoints: hold (of these by a row) / broken / opaque / not judged", ""]
        lines.append("vllm".ljust(10) + "".join(f"speculators {c}".ljust(width + 3) for c in COLUMNS))
        for release, columns in self.judged.items():
            cells = (_cell(columns[c]).ljust(width + 3) for c in COLUMNS)
            lines.append(release.ljust(10) + "".join(cells).rstrip())
        lines += ["", *(f"{entry}\n" for entry in self.broken), *(f"idle row: {entry}" for entry in self.idle)]
        total = Counter(j.verdict.value for c in self.judged.values() for judged in c.values() for j in judged)
        summary = ", ".join(f"{total[v.value]} {v.value}" for v in Verdict)
        lines.append(f"{len(self.judged)} releases x {len(COLUMNS)}: {summary}; {self.seconds:.1f} s")
        return "\n".join(lines)


def _counts(judged: list[Judgement]) -> dict[str, int]:
    counted = Counter(j.verdict for j in judged)
    by_row = sum(1 for j in judged if j.verdict is Verdict.HOLDS and j.rows)
    return {**{verdict.value: counted[verdict] for verdict in Verdict}, "by a row": by_row}


def _cell(judged: list[Judgement]) -> str:
    if not judged:
        return "-"
    c = _counts(judged)
    return f"{c['holds']} ({c['by a row']}) / {c['broken']} / {c['opaque']} / {c['not judged']}"


def run(releases: list[str], settings: Settings) -> Outcome:
    """Read and judge releases.

    Raises:
        SourceError: one of them cannot be read.
    """
    started = time.perf_counter()
    others: Others = {package: recorded_others(package) for package in OTHERS}
    outcome = Outcome({}, [], [], 0.0)
    for reading in read_releases("vllm", releases, settings):
        columns = {speculators: judge_release(reading, speculators, others) for speculators in COLUMNS}
        outcome.judged[reading.release] = columns
        for speculators, judged in columns.items():
            outcome.idle += idle_rows(reading, speculators)
            if any(j.verdict is Verdict.BROKEN for j in judged):
                tree = open_release("vllm", reading.release, settings)
                outcome.broken += broken(reading, speculators, judged, Library(tree, Store(settings.cache)))
                tree.save()
    outcome.seconds = time.perf_counter() - started
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m contract_tests.check", description=__doc__)
    parser.add_argument("releases", nargs="*", help="vLLM releases (default: all of releases.toml)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--offline", action="store_true", help="from the cache alone")
    options = parser.parse_args(arguments)
    try:
        outcome = run(options.releases or known(), Settings.from_environment(options.offline))
    except SpecshimError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(outcome.as_dict(), indent=2) if options.json else outcome.render())
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
