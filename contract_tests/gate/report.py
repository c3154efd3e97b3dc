"""What the gate says: findings with levels, and the report that holds them. Plain data for all formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from contract_tests.gate.changes import Change


class Level(str, Enum):
    """How bad a finding is; the worst first."""

    BROKEN = "broken"
    NOT_JUDGED = "not judged"  # could be judged on the baseline, cannot be judged now
    GUARDED = "gone, but the consumer catches that"
    LOOK = "changed body: look"
    ADAPTED = "adapted"  # changed, or not as speculators expects; a row covers it
    CHANGED = "changed, still fits"
    STANDING = "no better before"  # broken, or not to be judged, on the baseline already
    HOLDS = "holds"

    @property
    def rank(self) -> int:
        return list(Level).index(self)


# What --fail-on asks for -> levels that then fall short.
FAIL_ON: dict[str, tuple[Level, ...]] = {
    "broken": (Level.BROKEN,),
    "unverified": (Level.BROKEN, Level.LOOK),
    "drift": (Level.BROKEN, Level.GUARDED, Level.LOOK, Level.CHANGED),
}


@dataclass(frozen=True)
class Finding:
    """The verdict on one use of one name.

    Args:
        key: short name of the use.
        home: `module:qualified.name`.
        level: how bad it is.
        kind: of use, see `shims.touchpoints`.
        used_in: file of the consumer, '' where unknown.
        line: in that file, 0 where unknown.
        why: the reason, '' where it simply holds.
        changes: against the baseline.
        rows: adaptations that cover it.
        candidates: rows, or calls, that might mend it: guesses.
        first: first release with the change, '' where nothing changed or that is not known.
        last_held: newest release before on which it held, '' where that is not known.
        excerpt: unified diff of a changed body, line by line.
        also: further places of the same use.
    """

    key: str
    home: str
    level: Level
    kind: str
    used_in: str = ""
    line: int = 0
    why: str = ""
    changes: tuple[Change, ...] = ()
    rows: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    first: str = ""
    last_held: str = ""
    excerpt: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """`file:line`, as far as known."""
        return f"{self.used_in}:{self.line}" if self.line else self.used_in

    @property
    def headline(self) -> str:
        """The finding in one line."""
        parts = self.why or "; ".join(map(str, self.changes))
        return f"{self.key}: {self.level.value}{f': {parts}' if parts else ''}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "home": self.home,
            "level": self.level.value,
            "kind": self.kind,
            "used_in": self.used_in,
            "line": self.line,
            "why": self.why,
            "changes": [change.as_dict() for change in self.changes],
            "rows": list(self.rows),
            "candidates": list(self.candidates),
            "first": self.first,
            "last_held": self.last_held,
            "excerpt": list(self.excerpt),
            "also": list(self.also),
        }


@dataclass(frozen=True)
class Report:
    """One target against one baseline, for one consumer.

    Args:
        target: name of what was judged.
        version: what it was taken for.
        baseline: release that it was compared with, '' for none.
        consumer: whose uses were judged, `speculators 0.4.0.1`.
        state: `verified` (run live with good results), `static` (a known release, never run), `unknown`, or
            `not read` where nothing could be judged.
        findings: one for each use, in the order of the tables.
        rows_new, rows_gone: adaptations in force on the target and not on the baseline, and the reverse.
        notes: what the reader should know beside the findings.
        seconds: that it took.
        file, line: where the user's own files name the target, '' and 0 where they do not.
    """

    target: str
    version: str
    baseline: str
    consumer: str
    state: str
    findings: tuple[Finding, ...]
    rows_new: tuple[str, ...] = ()
    rows_gone: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    file: str = ""
    line: int = 0
    counts: Counter[Level] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", Counter(finding.level for finding in self.findings))

    @property
    def verdict(self) -> str:
        """In one word or two: the worst of the findings that concern the upgrade."""
        if self.counts[Level.BROKEN]:
            return "broken"
        if self.counts[Level.NOT_JUDGED]:
            return "not judged"
        return "adapted" if self.counts[Level.ADAPTED] else "holds"

    def notable(self) -> list[Finding]:
        """The findings that are more than `holds`, the worst first."""
        found = [finding for finding in self.findings if finding.level is not Level.HOLDS]
        return sorted(found, key=lambda finding: finding.level.rank)

    def exit_code(self, fail_on: str = "broken") -> int:
        """0: holds or adapted; 1: falls short; 2: something that held on the baseline cannot be judged.

        Args:
            fail_on: `broken`; `unverified`: also a release that nobody ran, and a changed body; `drift`: also
                any change of a name that is used, covered or not.
        """
        if self.state == "not read":
            return 2
        unverified = fail_on != "broken" and self.state != "verified"
        covered = fail_on == "drift" and any(f.level is Level.ADAPTED and f.changes for f in self.findings)
        if any(self.counts[level] for level in FAIL_ON[fail_on]) or unverified or covered:
            return 1
        return 2 if self.counts[Level.NOT_JUDGED] else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "version": self.version,
            "baseline": self.baseline,
            "consumer": self.consumer,
            "verdict": self.verdict,
            "state": self.state,
            "counts": {level.value: self.counts[level] for level in Level},
            "rows_new": list(self.rows_new),
            "rows_gone": list(self.rows_gone),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
            "file": self.file,
            "line": self.line,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def exit_code(reports: Iterable[Report], fail_on: str) -> int:
    """Of several reports together: what falls short counts for more than what could not be judged."""
    codes = {report.exit_code(fail_on) for report in reports}
    return 1 if 1 in codes else 2 if 2 in codes else 0
