"""Watched functions whose bodies changed, each with a unified diff."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from contract_tests.gate.changes import Change
from contract_tests.gate.releases import Release
from contract_tests.gate.report import Finding, Level
from contract_tests.readers.bodies import Body, read_body
from contract_tests.sources import SourceError
from contract_tests.watched import WATCHED, Watched

# Lines of a diff that are shown; a longer one is cut, and says so.
MOST_LINES = 40
# Comparing takes time with the square of this; the longest watched function has 600.
_MOST_COMPARED = 3000


def body_findings(target: Release, baseline: Release, first: Callable[[str], str]) -> Iterator[Finding]:
    """One finding for each watched function that the baseline or the target has.

    Args:
        target, baseline: the two releases.
        first: home -> the first release in which it is not as on the baseline.
    """
    for entry in WATCHED:
        old, new = (release.reading.bodies.get(entry.home, "") for release in (baseline, target))
        if not old and not new:
            continue
        if old == new:
            yield Finding(entry.key, entry.home, Level.HOLDS, "body", entry.relies)
            continue
        kind = "body changed" if old and new else "added" if new else "removed"
        changed = (Change(kind, entry.home.partition(":")[2]),)
        excerpt = _excerpt(entry, target, baseline)
        yield Finding(
            entry.key, entry.home, Level.LOOK, "body", entry.relies, 0, f"{kind}; {entry.why}", changed,
            first=first(entry.home), excerpt=excerpt,
        )  # fmt: skip


def _excerpt(entry: Watched, target: Release, baseline: Release) -> tuple[str, ...]:
    try:
        old, new = (read_body(release.library, entry.home) for release in (baseline, target))
    except SourceError as error:
        return (f"(the two bodies cannot be shown: {error.found})",)
    if any(len(body.lines) > _MOST_COMPARED for body in (old, new) if body is not None):
        return ("(the two bodies are too long to be compared)",)
    lines = list(_diff(old, new, baseline.name, target.name))
    more = len(lines) - MOST_LINES
    return tuple([*lines[:MOST_LINES], f"(and {more} more lines)"] if more > 0 else lines)


def _diff(old: Body | None, new: Body | None, old_name: str, new_name: str) -> Iterator[str]:
    before, after = (list(body.lines) if body is not None else [] for body in (old, new))
    homes = [body.home if body is not None else "nothing" for body in (old, new)]
    yield from difflib.unified_diff(
        before, after, f"{old_name}, {homes[0]}", f"{new_name}, {homes[1]}", n=2, lineterm=""
    )
