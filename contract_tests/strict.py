"""Rows that a release does not need. Pure: works on readings alone.

A row that is needed and missing shows as `broken` in `judge`; this is the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from contract_tests.readers.found import ABSENT, FOUND, Reading
from shims.adaptations import ADAPTATIONS, Adaptation
from shims.contract import binds
from shims.planning import select
from shims.touchpoints import by_key
from shims.verbs import Compute, Drop, Fill, Moved, Provide, Rename, reshape
from shims.versions import Stack, within

_SHAPES = (Drop, Rename, Fill, Compute)
_NAMES = (Moved, Provide)


@dataclass(frozen=True)
class Idle:
    """A row that is in force where nothing calls for it."""

    row: str
    release: str
    speculators: str
    why: str

    def __str__(self) -> str:
        return f"{self.row} on {self.release} (speculators {self.speculators}): {self.why}"


def idle_rows(vllm: Reading, speculators: str) -> list[Idle]:
    """Rows on vLLM's names that are selected for this pair and that its signatures do not call for.

    Rows whose reason is behaviour are passed over, as are those that run code: no signature shows them.
    """
    rows = select(Stack(vllm.release, speculators)).adaptations
    idle = []
    for row in rows:
        why = _why_idle(row, rows, vllm, speculators)
        if why and not row.behavioural:
            idle.append(Idle(row.name, f"vllm {vllm.release}", speculators, why))
    return idle


def _why_idle(row: Adaptation, rows: tuple[Adaptation, ...], vllm: Reading, speculators: str) -> str:
    touchpoint = by_key()[row.touchpoint]
    if touchpoint.package != "vllm":
        return ""
    found = vllm.at(touchpoint.home)
    if isinstance(row.verb, _NAMES):
        return f"{touchpoint.home} is there" if found.status == FOUND else ""
    moved = next((r.verb for r in rows if r.touchpoint == row.touchpoint and isinstance(r.verb, Moved)), None)
    if moved is not None and found.status == ABSENT:
        found = vllm.at(moved.home)
    call = touchpoint.call_for(speculators)
    if not isinstance(row.verb, _SHAPES) or call is None or found.signature is None:
        return ""
    others = [r.verb for r in rows if r.touchpoint == row.touchpoint and r is not row]
    fits = binds(found.signature, reshape(call, others))
    return f"{found.home}{found.signature} takes the call as it is" if fits else ""


def wrong_ranges(package: str, readings: Mapping[str, Reading]) -> Iterator[Idle]:
    """Rows on another package's names whose range is too wide or too narrow for what was read of it."""
    for row in ADAPTATIONS:
        touchpoint = by_key()[row.touchpoint]
        wanted = row.transformers if package == "transformers" else ""
        if touchpoint.package != package or not isinstance(row.verb, _NAMES):
            continue
        for release, reading in readings.items():
            found, covered = reading.at(touchpoint.home), within(release, wanted)
            needless = found.status == FOUND or (touchpoint.kind == "annotation" and not found.text)
            if needless and covered:
                yield Idle(row.name, f"{package} {release}", row.speculators, f"nothing lacks {touchpoint.home}")
            if not needless and not covered:
                why = f"{touchpoint.home} is absent and not covered"
                yield Idle(row.name, f"{package} {release}", row.speculators, why)
