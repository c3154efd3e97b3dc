"""Which adaptations a stack needs. Pure: imports neither vLLM nor torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shims.adaptations import ADAPTATIONS, Adaptation
from shims.releases import SPECULATORS, TRANSFORMERS, known
from shims.touchpoints import by_key
from shims.verbs import Moved, Provide, Wrap
from shims.versions import Stack, has_generator, is_exact_release, known_as, within

# What a state means, in the order from good to bad.
STATES = {
    "native": "nothing to adapt",
    "adapted": "a known release; the rows below make it right",
    "unverified": "a part of this stack is no known release: rows were chosen by range and by signature",
    "absent": "vllm or speculators is not installed: at most `import speculators` is adapted, to train or evaluate",
    "unsupported": "the generator cannot run on this stack",
}


@dataclass(frozen=True)
class Plan:
    """The rows for one stack, and how sure they are.

    Args:
        stack: the versions planned for.
        adaptations: rows in force, in the order in which they are applied.
        state: key of `STATES`.
        note: what the user should know or do, '' if nothing.
    """

    stack: Stack
    adaptations: tuple[Adaptation, ...]
    state: str
    note: str = ""

    def rows_for(self, touchpoint: str) -> list[Adaptation]:
        return [row for row in self.adaptations if row.touchpoint == touchpoint]

    def as_dict(self) -> dict[str, Any]:
        return {
            "stack": self.stack.as_dict(),
            "adaptations": [row.as_dict() for row in self.adaptations],
            "state": self.state,
            "note": self.note,
        }

    def render(self) -> str:
        """The plan as text for a terminal."""
        lines = [f"{self.stack}", f"state: {self.state} ({STATES[self.state]})"]
        lines += [f"note: {self.note}"] if self.note else []
        groups = (
            ("what this vLLM and transformers need", [r for r in self.adaptations if not r.defect]),
            ("faults of the generator, mended on every vLLM", [r for r in self.adaptations if r.defect]),
        )
        for title, rows in groups:
            if rows:
                lines += ["", f"{title}:"]
            for row in rows:
                lines += [f"  {row.touchpoint}: {row.verb.describe()}  [{row.range or 'always'}]", f"      {row.why}"]
        return "\n".join(lines)


def select(stack: Stack) -> Plan:
    """The plan for `stack`: rows by version, a state, and a note where something is to be said."""
    if stack.vllm is None or stack.speculators is None:
        absent = [name for name in ("vllm", "speculators") if getattr(stack, name) is None]
        notes = [f"{' and '.join(absent)} not found", *_unknown(stack)]
        return Plan(stack, _to_import(stack), "absent", "; ".join(notes))
    oldest = known()[0]
    if within(stack.vllm, f"<{oldest}") or within(stack.speculators, "<0.3"):
        return Plan(stack, (), "unsupported", f"vllm before {oldest} and speculators before 0.3.0 were never looked at")
    used = by_key()
    rows = tuple(
        row
        for row in ADAPTATIONS
        if row.holds_for(stack) and within(stack.speculators, used[row.touchpoint].speculators)
    )
    notes = []
    if not has_generator(stack.speculators):
        notes.append(
            f"speculators {stack.speculators} has no VllmHiddenStatesGenerator (it was removed in 0.5.0): code that "
            "imports it gets the direct engine's; extract with --engine direct or --engine native"
        )
    if unknown := _unknown(stack):
        return Plan(stack, rows, "unverified", "; ".join([*notes, *unknown, "check a few rows with `verify`"]))
    return Plan(stack, rows, "adapted" if rows else "native", "; ".join(notes))


def _unknown(stack: Stack) -> list[str]:
    """What of the stack is no release that was read, a sentence each."""
    tables = (("vllm", stack.vllm, known()), ("speculators", stack.speculators, SPECULATORS))
    found = [
        f"{package} {version} is not a known release (newest known: {releases[-1]})"
        for package, version, releases in tables
        if version is not None and known_as(version, releases) is None
    ]
    oldest, newest = TRANSFORMERS
    version = stack.transformers
    if version is not None and not (within(version, f">={oldest},<={newest}") and is_exact_release(version)):
        found.append(f"transformers {version} is not a known release (known: {oldest} to {newest})")
    return found


def _to_import(stack: Stack) -> tuple[Adaptation, ...]:
    """The rows without which speculators cannot be imported beside this transformers, on a machine without vLLM."""
    if stack.speculators is None:
        return ()
    return tuple(row for row in ADAPTATIONS if row.transformers and not row.vllm and row.holds_for(stack))


def choices(plan: Plan, touchpoint: str) -> Iterator[list[Adaptation]]:
    """The sets of rows that may adapt one call, the likeliest first; a signature has to confirm one of them.

    Rows are chosen by version. A build that is not an exact release may be ahead of its version: there any
    combination of the touchpoint's rows on the call comes into question.
    """
    rows = [row for row in plan.rows_for(touchpoint) if not isinstance(row.verb, (Moved, Provide))]
    yield rows
    if plan.state != "unverified" or plan.stack.vllm is None or is_exact_release(plan.stack.vllm):
        return
    code = [row for row in rows if isinstance(row.verb, Wrap)]
    shapes = [
        row
        for row in ADAPTATIONS
        if row.touchpoint == touchpoint
        and not isinstance(row.verb, (Wrap, Moved, Provide))
        and row.holds_for(_without_vllm(plan, row))
    ]
    for size in range(len(shapes) + 1):
        for chosen in itertools.combinations(shapes, size):
            yield [*chosen, *code]


def _without_vllm(plan: Plan, row: Adaptation) -> Stack:
    """The plan's stack with a vLLM that this row's range admits, so that only the other ranges decide."""
    return replace(plan.stack, vllm=next((v for v in known() if within(v, row.vllm)), None))
