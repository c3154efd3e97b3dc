"""The arithmetic of acceptance: what each draft step is worth, from chains that were seen to be accepted or rejected.

A chain starts at a position and proposes k tokens. Greedy verification accepts them up to the first one that is not
the verifier's own. On a given text a chain can be judged only while the text itself is what the verifier would have
said: where it is not (a sampled answer), or where the answer ends, the chain is cut short. Such a chain counts for
the steps that were judged, and for no other: this is the estimator of Kaplan and Meier for survival times of which
some are cut short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Chain:
    """One chain of draft tokens."""

    start: int
    """Position of the chain in its row."""
    accepted: int
    """Draft tokens that the verifier would have said as well, before the first other one; at most k."""
    complete: bool
    """A rejection was seen, or all k were accepted; else the chain was cut short."""


@dataclass(frozen=True)
class Acceptance:
    """What a draft's steps are worth."""

    conditional: tuple[float, ...]
    """Step t -> share accepted of the chains whose steps before t were all accepted."""
    at_risk: tuple[int, ...]
    """Step t -> chains that this share was taken of."""
    length: float
    """Expected tokens a verification yields: 1, its own, and the accepted ones."""
    error: float
    """Standard error of the length."""
    chains: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "conditional": list(self.conditional),
            "at_risk": list(self.at_risk),
            "marginal": list(self.marginal),
            "length": self.length,
            "standard_error": self.error if math.isfinite(self.error) else None,
            "chains": self.chains,
        }

    @property
    def marginal(self) -> tuple[float, ...]:
        """Step t -> share of all chains in which the steps up to t were accepted; what vLLM counts by position."""
        return tuple(math.prod(self.conditional[: step + 1]) for step in range(len(self.conditional)))


def acceptance(chains: Sequence[Chain], steps: int) -> Acceptance:
    """Estimate from chains, of which some were cut short.

    Args:
        steps: draft tokens a chain, k.
    """
    conditional, at_risk = [], []
    for step in range(steps):
        passed = sum(chain.accepted > step for chain in chains)
        judged = passed + sum(chain.accepted == step and chain.complete for chain in chains)
        at_risk.append(judged)
        conditional.append(passed / judged if judged else 0.0)
    marginal = [math.prod(conditional[: step + 1]) for step in range(steps)]
    variance = _variance(marginal)
    # Chains that were cut short carry less; those judged at the first step are the most that may be counted.
    number = at_risk[0] if at_risk else 0
    error = math.sqrt(variance / number) if number else math.inf
    return Acceptance(tuple(conditional), tuple(at_risk), 1 + sum(marginal), error, len(chains))


def served_acceptance(drafts: int, accepted_per_position: Sequence[int]) -> Acceptance:
    """The same from a server's counters.

    Args:
        drafts: chains proposed.
        accepted_per_position: step t -> chains accepted up to and including t.
    """
    before = [drafts, *accepted_per_position[:-1]]
    conditional = [now / was if was else 0.0 for now, was in zip(accepted_per_position, before, strict=True)]
    marginal = [now / drafts if drafts else 0.0 for now in accepted_per_position]
    error = math.sqrt(_variance(marginal) / drafts) if drafts else math.inf
    return Acceptance(tuple(conditional), tuple(before), 1 + sum(marginal), error, drafts)


def _variance(marginal: Sequence[float]) -> float:
    """Of the accepted number of a chain, from P(at least 1), P(at least 2), …"""
    mean = sum(marginal)
    # E[n^2] = sum over i of (2i - 1) P(n >= i).
    square = sum((2 * step + 1) * share for step, share in enumerate(marginal))
    return max(square - mean * mean, 0.0)


def walk(chains: Sequence[Chain]) -> list[Chain]:
    """The chains of one row that a server would start: each begins behind what the one before has yielded.

    All chains of a row weigh the same in :func:`acceptance`; a server starts more of them where few are accepted.
    """
    by_start = {chain.start: chain for chain in chains}
    met: list[Chain] = []
    for first in sorted(by_start):
        # Behind the accepted tokens comes the verifier's own one.
        if not met or first > met[-1].start + met[-1].accepted:
            met.append(by_start[first])
    return met


def chains_of(
    drafted: Sequence[Sequence[int]], tokens: Sequence[int], own: Sequence[int], mask: Sequence[int]
) -> list[Chain]:
    """The chains of one row.

    Args:
        drafted: step t, position j -> the token proposed for place j + 2 + t, in the target vocabulary; a chain at j
            has read the tokens up to j + 1 and the states up to j.
        tokens: the row, T of them.
        own: place i -> what the verifier says next after token i.
        mask: 1 where a token is the assistant's.
    """
    total, steps = len(tokens), len(drafted)
    found = []
    for start in range(total - 2):
        if not (mask[start + 1] and mask[start + 2]):
            continue
        accepted, complete = 0, True
        for step in range(steps):
            place = start + 2 + step
            on_path = step == 0 or tokens[place - 1] == own[place - 2]
            if place >= total or not mask[place] or not on_path:
                complete = False
                break
            if drafted[step][start] != own[place - 1]:
                break
            accepted += 1
        found.append(Chain(start, accepted, complete))
    return found


def on_path(tokens: Sequence[int], own: Sequence[int], mask: Sequence[int]) -> tuple[int, int]:
    """(tokens of the assistant that are the verifier's own greedy choice, all tokens of the assistant)."""
    places = [place for place in range(1, len(tokens)) if mask[place]]
    return sum(tokens[place] == own[place - 1] for place in places), len(places)
