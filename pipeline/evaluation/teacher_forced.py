"""Acceptance on given texts: the draft's chains at every position against what the verifier itself would say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipeline.evaluation.acceptance import Acceptance, Chain, acceptance, chains_of, on_path, walk
from pipeline.evaluation.draft_model import DraftModel
from pipeline.evaluation.held_out import States
from pipeline.progress import StageProgress

_ROWS_AT_ONCE = 8


@dataclass
class TeacherForced:
    """What was found on a set of rows."""

    steps: int
    rows: int = 0
    tokens: int = 0
    own_tokens: int = 0
    """Tokens of the assistant that are the verifier's greedy choice."""
    reply_tokens: int = 0
    chains: list[Chain] = field(default_factory=list)
    walked: list[Chain] = field(default_factory=list)
    """The chains that a server would start."""

    @property
    def everywhere(self) -> Acceptance:
        """Every position counts the same."""
        return acceptance(self.chains, self.steps)

    @property
    def as_served(self) -> Acceptance:
        """Each chain begins behind what the one before yielded."""
        return acceptance(self.walked, self.steps)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "steps": self.steps,
            "rows": self.rows,
            "tokens": self.tokens,
            "reply_tokens": self.reply_tokens,
            "greedy_share": self.own_tokens / self.reply_tokens if self.reply_tokens else 0.0,
            "every_position": self.everywhere.as_dict(),
            "as_served": self.as_served.as_dict(),
        }


def measure(draft: DraftModel, rows: Iterable[States], steps: int, progress: StageProgress) -> TeacherForced:
    """Run the draft over the rows.

    Args:
        steps: draft tokens a chain.
    """
    result = TeacherForced(steps)
    batch: list[States] = []
    for states in rows:
        batch.append(states)
        if len(batch) == _ROWS_AT_ONCE:
            _add(result, draft, batch, progress)
            batch = []
    if batch:
        _add(result, draft, batch, progress)
    return result


def _add(result: TeacherForced, draft: DraftModel, batch: list[States], progress: StageProgress) -> None:
    import torch

    inputs = [(torch.tensor(states.row.tokens), states.auxiliary) for states in batch]
    for states, drafted in zip(batch, draft.chains(inputs, result.steps), strict=True):
        row = states.row
        chains = chains_of(drafted, row.tokens, states.own, row.mask)
        own, replies = on_path(row.tokens, states.own, row.mask)
        result.rows += 1
        result.tokens += len(row.tokens)
        result.own_tokens += own
        result.reply_tokens += replies
        result.chains += chains
        result.walked += walk(chains)
        progress.advance(rows=1, tokens=len(row.tokens))
