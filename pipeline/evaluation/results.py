"""Everything an evaluation found, as one value that report and demo read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.evaluation.acceptance import Acceptance
from pipeline.evaluation.request import DRAFT, NONE, EngineAnswer, first_difference
from pipeline.evaluation.verdict import Verdict, judge

HELD_OUT, REPLAY = "held-out rows", "the server's own answers"
"""Texts that acceptance was teacher-forced on."""


@dataclass
class Results:
    """Parts in the order in which they were made; a part that was not run is absent."""

    draft: str
    verifier: str
    steps: int
    layers: tuple[int, ...]
    """Native ids that the draft was fed, teacher-forced and served."""
    trained: tuple[int, ...] | None = None
    """Native ids that the draft was trained on; None where nobody says."""
    forced: list[str] = field(default_factory=list)
    """What `check-draft` refused, and --force passed over."""
    teacher_forced: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Text and draft -> :meth:`TeacherForced.as_dict`."""
    engines: dict[str, EngineAnswer] = field(default_factory=dict)
    """Kind -> what it answered."""
    not_run: dict[str, str] = field(default_factory=dict)
    """Part -> why."""
    gaps: dict[str, list[float]] = field(default_factory=dict)
    """Kind -> by how much the best token led, in log probability, where its answers first differ."""

    def promised(self) -> Acceptance | None:
        """What teacher forcing promises a server: on the server's own answers where there are any, else held-out."""
        for name in (name_of(REPLAY, DRAFT), name_of(HELD_OUT, DRAFT)):
            if name in self.teacher_forced:
                return acceptance_in(self.teacher_forced[name]["as_served"])
        return None

    def served(self) -> Acceptance | None:
        """What the server's counters say of the draft."""
        answer = self.engines.get(DRAFT)
        return answer.acceptance if answer else None

    def verdict(self) -> Verdict:
        """What the two say together, and the layers."""
        return judge(self.promised(), self.served(), fed=self.fed(), trained=self.trained)

    def fed(self) -> tuple[int, ...]:
        """Native ids that fed the draft: in the server's own words, where one was run."""
        answer = self.engines.get(DRAFT)
        return tuple(answer.layers) if answer and answer.layers else self.layers

    def speed_up(self, kind: str) -> float | None:
        """Tokens per second over those without speculation."""
        base, answer = self.engines.get(NONE), self.engines.get(kind)
        if base is None or answer is None or not base.tokens_per_second:
            return None
        return answer.tokens_per_second / base.tokens_per_second

    def same_answers(self, kind: str) -> tuple[int, int] | None:
        """(answers that equal those without speculation, all answers)."""
        base, answer = self.engines.get(NONE), self.engines.get(kind)
        if base is None or answer is None:
            return None
        pairs = list(zip(base.outputs, answer.outputs, strict=True))
        return sum(first_difference(a, b) is None for a, b in pairs), len(pairs)

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "draft": self.draft,
            "verifier": self.verifier,
            "draft_tokens_a_step": self.steps,
            "layers_native": list(self.layers),
            "layers_trained_on": list(self.trained) if self.trained else None,
            "forced": self.forced,
            "verdict": self.verdict().as_dict(),
            "teacher_forced": self.teacher_forced,
            "served": {kind: self._engine(kind, answer) for kind, answer in self.engines.items()},
            "not_run": self.not_run,
        }

    def _engine(self, kind: str, answer: EngineAnswer) -> dict[str, Any]:
        same = self.same_answers(kind)
        found = answer.acceptance
        return {
            "tokens": answer.tokens,
            "seconds": answer.seconds,
            "tokens_per_second": answer.tokens_per_second,
            "speed_up": self.speed_up(kind),
            "tokens_per_step": answer.tokens_per_step,
            "same_answers": list(same) if same else None,
            "gaps_where_they_differ": self.gaps.get(kind, []),
            "drafts": answer.drafts,
            "layers_it_said": answer.layers,
            "runner": answer.runner,
            "acceptance": found.as_dict() if found else None,
            "stack": answer.stack,
        }


def name_of(text: str, draft: str) -> str:
    """How a teacher-forced part is called."""
    return f"{draft} on {text}"


def acceptance_in(found: Mapping[str, Any]) -> Acceptance:
    """What :meth:`Acceptance.as_dict` gave, back as a value."""
    error = found["standard_error"]
    return Acceptance(
        tuple(found["conditional"]),
        tuple(found["at_risk"]),
        found["length"],
        float("inf") if error is None else error,
        found["chains"],
    )
