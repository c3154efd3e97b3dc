"""One target against one baseline: verdicts, what changed, which rows cover it, what might mend it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from contract_tests.candidates import candidate_rows
from contract_tests.gate import moves
from contract_tests.gate.beside import others_for
from contract_tests.gate.changes import Change, changes, misplaced
from contract_tests.gate.excerpts import body_findings
from contract_tests.gate.releases import Release, base_of, between, state_of
from contract_tests.gate.report import Finding, Level, Report
from contract_tests.judge import Judgement, Others, judge, judge_release, last_that_held
from contract_tests.readers.found import ABSENT
from contract_tests.recorded import recorded
from contract_tests.sources import Settings, SourceError
from shims.contract import Verdict
from shims.planning import choices, select
from shims.releases import known
from shims.verbs import Moved, Provide
from shims.versions import Stack, within


def gate(target: Release, baseline: Release, speculators: str, settings: Settings) -> Report:
    """Judge what one speculators release uses.

    Raises:
        SourceError: something that the judgement needs cannot be read.
    """
    started = time.perf_counter()
    others, notes = others_for((target.reading, baseline.reading), speculators, settings)
    before = {j.touchpoint.key: j for j in judged(baseline, speculators, others)}
    comparison = Comparison(target, baseline, speculators)
    found = [
        comparison.finding(after, before.get(after.touchpoint.key)) for after in judged(target, speculators, others)
    ]
    found += body_findings(target, baseline, comparison.first_body)
    rows_now, rows_then = (_row_names(release.version, speculators) for release in (target, baseline))
    return Report(
        target.name,
        target.version,
        baseline.version,
        f"speculators {speculators}",
        state_of(target.version, speculators),
        tuple(found),
        tuple(name for name in rows_now if name not in rows_then),
        tuple(name for name in rows_then if name not in rows_now),
        (*notes, *moves.companions(target, baseline, found)),
        time.perf_counter() - started,
    )


def _row_names(version: str, speculators: str) -> list[str]:
    return [row.name for row in select(Stack(version, speculators)).adaptations]


def judged(release: Release, speculators: str, others: Others) -> list[Judgement]:
    """Every touchpoint of one speculators release; builds that may be ahead of their version as the shims take them."""
    # A release is the target of one gate and may be the baseline of the next; others only ever grow.
    key = speculators, sum(map(len, others.values()))
    if key not in release.judged:
        found = judge_release(release.reading, speculators, others)
        release.judged[key] = [
            _confirmed(one, release, speculators) if one.verdict is Verdict.BROKEN else one for one in found
        ]
    return release.judged[key]


def _confirmed(one: Judgement, release: Release, speculators: str) -> Judgement:
    """The same as hooks do at run time: the first set of rows whose call binds is taken."""
    if one.touchpoint.package != "vllm":
        return one
    plan = select(Stack(release.version, speculators))
    for rows in choices(plan, one.touchpoint.key):
        named = [row for row in plan.rows_for(one.touchpoint.key) if isinstance(row.verb, (Moved, Provide))]
        again = judge(one.touchpoint, speculators, [*rows, *named], release.reading.at)
        if again.verdict is Verdict.HOLDS:
            return again
    return one


class Comparison:
    """Turns judgements into findings.

    Args:
        target, baseline: the two releases.
        speculators: release whose uses are judged.
    """

    def __init__(self, target: Release, baseline: Release, speculators: str) -> None:
        self.target, self.baseline, self.speculators = target, baseline, speculators
        self._between = between(baseline.version, target.version)

    def finding(self, after: Judgement, before: Judgement | None) -> Finding:
        """One touchpoint."""
        touchpoint = after.touchpoint
        differences = self._changes(after) if touchpoint.package == "vllm" else ()
        after = self._by_position(after)
        level = level_of(after, before, differences)
        finding = Finding(
            touchpoint.key, touchpoint.home, level, touchpoint.kind, touchpoint.used_in, 0, after.why, differences,
            after.rows,
        )  # fmt: skip
        if differences:
            finding = replace(finding, first=self._first(touchpoint.home, differences))
        if level is Level.BROKEN:
            earlier = [recorded(release) for release in known() if within(release, f"<{base_of(self.target.version)}")]
            finding = replace(
                finding,
                candidates=tuple(self._candidates(after)),
                last_held=last_that_held(touchpoint, self.speculators, earlier) or "",
            )
        return finding

    def _by_position(self, after: Judgement) -> Judgement:
        """The same, or broken: a call that binds, but whose positional arguments now mean something else."""
        call = after.touchpoint.call_for(self.speculators)
        old = self.baseline.reading.at(after.touchpoint.home).signature
        if after.verdict is not Verdict.HOLDS or call is None or old is None or after.found.signature is None:
            return after
        why = misplaced(old, after.found.signature, call)
        return replace(after, verdict=Verdict.BROKEN, why=f"{after.found.home}: {why}") if why else after

    def _changes(self, after: Judgement) -> tuple[Change, ...]:
        home = after.touchpoint.home
        old, new = self.baseline.reading.at(home), self.target.reading.at(home)
        found = changes(old, new)
        if new.status == ABSENT and found:
            found = moves.explained(self.target, self.baseline, old, after, found)
        return tuple(found)

    def _candidates(self, after: Judgement) -> list[str]:
        ready = moves.ready_rows(after, self.speculators, self.target.reading)
        try:
            before = self.baseline.reading.at(after.touchpoint.home).signature
            rows = candidate_rows(after, self.target.version, self.speculators, self.target.library, before)
            return [*ready, *rows]
        except SourceError:
            return ready  # the verdict stands without guesses

    def _first(self, home: str, differences: Sequence[Change]) -> str:
        """The first release whose reading shows one of these differences."""
        wanted = {(change.kind, change.name) for change in differences}
        old = self.baseline.reading.at(home)
        for release in self._between:
            found = recorded(release).at(home)
            if old.status != found.status or wanted & {(change.kind, change.name) for change in changes(old, found)}:
                return release
        return self.target.version

    def first_body(self, home: str) -> str:
        """The first release with another body than the baseline's."""
        old = self.baseline.reading.bodies.get(home)
        return next((r for r in self._between if recorded(r).bodies.get(home) != old), self.target.version)


def level_of(after: Judgement, before: Judgement | None, differences: Sequence[Change]) -> Level:
    """How bad a judgement is, given the one on the baseline (None: it was not used there)."""
    then = before.verdict if before is not None else None
    if after.verdict is Verdict.BROKEN:
        return Level.STANDING if then is Verdict.BROKEN else Level.BROKEN
    if after.verdict is not Verdict.HOLDS:
        return Level.STANDING if then is after.verdict else Level.NOT_JUDGED
    as_before = before is not None and before.rows == after.rows
    if after.rows and not (as_before and differences and not any(change.can_break for change in differences)):
        return Level.ADAPTED
    return Level.CHANGED if differences else Level.HOLDS
