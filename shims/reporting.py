"""What is in force in this process, as text and as data."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shims.adaptations import Adaptation
from shims.errors import DriftError, SpecshimError
from shims.planning import STATES, Plan
from shims.touchpoints import by_key

if TYPE_CHECKING:
    from shims.patching import Receipt

RUNTIME_STATES = {
    "disabled": "the shims are not installed in this process (SHIMS_DISABLE, or uninstall())",
    "pending": "installed; vLLM and speculators are not imported yet, so nothing is confirmed",
    "drifted": "a touchpoint does not look as planned: the generator refuses to be built",
}

_KNOWN_PAIR = "install a known pair, for example vllm 0.32.0 with speculators 0.4.0.1; `specshim plan` lists rows"


@dataclass(frozen=True)
class Report:
    """The plan, what became of it here, and which model runner served last."""

    plan: Plan
    state: str
    applied: dict[str, str]
    drifted: dict[str, str]
    workers: list[dict[str, Any]]

    def status(self, row: Adaptation) -> str:
        """How one row was put in place; rows of the workers are known from what the workers answered."""
        if self.workers and by_key()[row.touchpoint].seam.startswith("worker."):
            return "confirmed by the workers"
        return self.applied.get(row.name, "waiting")

    def as_dict(self) -> dict[str, Any]:
        rows = [{**row.as_dict(), "status": self.status(row)} for row in self.plan.adaptations]
        return {
            "stack": self.plan.stack.as_dict(),
            "state": self.state,
            "adaptations": rows,
            "drifted": self.drifted,
            "workers": self.workers,
            "note": self.plan.note,
        }

    def render(self) -> str:
        meaning = {**STATES, **RUNTIME_STATES}[self.state]
        lines = [f"{self.plan.stack}, python {self.plan.stack.python}", f"state: {self.state} ({meaning})"]
        lines += [f"note: {self.plan.note}"] if self.plan.note else []
        lines += [f"drifted: {key}: {found}" for key, found in self.drifted.items()]
        lines += [f"worker {w['rank']}: {w['model']} on model runner {w['runner']}" for w in self.workers]
        for row in self.plan.adaptations:
            lines.append(f"  {row.touchpoint}: {row.verb.describe()} ({self.status(row)})")
        return "\n".join(lines)


def describe(plan: Plan, receipt: Receipt | None, armed: bool) -> Report:
    """The report on `receipt`, or on `plan` alone where nothing is patched (`armed`: yet)."""
    generator = sys.modules.get("shims.behaviours.generator")
    workers = list(generator.worker_receipts) if generator is not None else []
    if receipt is None:
        return Report(plan, ("pending" if plan.adaptations else plan.state) if armed else "disabled", {}, {}, workers)
    state = plan.state
    if receipt.drifted:
        state = "drifted"
    elif state in ("adapted", "unverified") and not receipt.applied:
        state = "pending"
    return Report(plan, state, dict(receipt.applied), dict(receipt.drifted), workers)


def refuse_unless_usable(report: Report, verified: bool) -> None:
    """Raise unless the generator may run.

    Raises:
        DriftError: a touchpoint drifted.
        SpecshimError: the stack is absent or unsupported, the shims are off, or `verified` is asked
            for and the release is not a known one.
    """
    for key, found in report.drifted.items():
        raise DriftError(key, "the shape the plan expects", found, "choose a known vLLM release (`specshim plan`)")
    bad = {"absent", "unsupported", "disabled"} | ({"unverified"} if verified else set())
    # `pending` hides the plan's own state, so both are looked at.
    for state in (report.state, report.plan.state):
        if state in bad:
            raise SpecshimError(
                f"stack {report.plan.stack}",
                "a stack the shims are proved on" if verified else "a stack the generator can run on",
                f"{state}: {report.plan.note or {**STATES, **RUNTIME_STATES}[state]}",
                "unset SHIMS_DISABLE, or call shims.install()" if state == "disabled" else _KNOWN_PAIR,
            )
