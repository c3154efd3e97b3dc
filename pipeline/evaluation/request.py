"""What an engine process is asked, and what it answers: plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.evaluation.acceptance import Acceptance, served_acceptance

NONE, NGRAM, DRAFT, UNTRAINED = "no speculation", "n-gram", "draft", "untrained draft"
NGRAM_MIN, NGRAM_MAX = 2, 4
"""Tokens of the text that the n-gram baseline looks up in the prompt and the answer so far."""


@dataclass(frozen=True)
class EngineRequest:
    """One engine: how it is built, and what it answers."""

    kind: str
    model: str
    prompts: list[list[int]]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    """More of `LLM`'s keywords."""
    speculative_config: dict[str, Any] | None = None
    logprobs: int | None = None
    """Ask for so many alternatives of each token."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class EngineAnswer:
    """What it said, how fast, and what its speculation was worth."""

    kind: str
    outputs: list[list[int]]
    seconds: float
    drafts: int = 0
    draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Of each answer's first token: by how much the best one beats the next, in log probability."""
    stack: dict[str, str] = field(default_factory=dict)
    layers: list[int] = field(default_factory=list)
    """Native ids of the verifier's layers that fed the draft, in the server's own words; empty where it said none."""
    runner: str | None = None
    """The model runner that said so."""

    @property
    def tokens(self) -> int:
        """Tokens said."""
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        """Of all answers together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a pass of the verifier yields, passes without a draft included: each gives one of its own.

        An n-gram lookup often finds nothing, so its length over the steps that had a draft says less.
        """
        steps = self.tokens - sum(self.accepted_per_position)
        return self.tokens / steps if steps > 0 else 0.0

    @property
    def acceptance(self) -> Acceptance | None:
        """What the draft's steps were worth; None where nothing was drafted."""
        return served_acceptance(self.drafts, self.accepted_per_position) if self.drafts else None


def speculation(kind: str, draft: str | None, steps: int) -> dict[str, Any] | None:
    """vLLM's `speculative_config`.

    Args:
        draft: folder of the draft, for the kinds that have one.
        steps: draft tokens a step.
    """
    if kind == NONE:
        return None
    if kind == NGRAM:
        return {
            "method": "ngram",
            "num_speculative_tokens": steps,
            "prompt_lookup_min": NGRAM_MIN,
            "prompt_lookup_max": NGRAM_MAX,
        }
    return {"method": "eagle3", "model": draft, "num_speculative_tokens": steps}


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place at which two answers differ; None if they are the same."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))
