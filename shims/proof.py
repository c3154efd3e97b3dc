"""Whose rows are these? The comparison on which every engine's capture rests."""

from __future__ import annotations

from typing import Any

from shims.errors import WrongStatesError


def prove(request_id: str, prompt: Any, token_ids: Any, positions: Any, runner: str) -> int:
    """Compare rows of one step with the request that they are taken for.

    Args:
        prompt: int64 [tokens of the prompt].
        token_ids: int64 [rows], as they went into the model.
        positions: int64 [rows].
        runner: the model runner's kind, for the message.

    Returns:
        The position of the first row.

    Raises:
        WrongStatesError: a token id or a position is not the request's.
    """
    import numpy as np

    first = int(positions[0])
    wanted = prompt[first : first + len(token_ids)].numpy()
    counts_up = np.array_equal(positions.numpy(), np.arange(first, first + len(token_ids)))
    if counts_up and np.array_equal(token_ids.numpy(), wanted):
        return first
    raise WrongStatesError(
        f"worker, request {request_id}, rows from position {first}",
        f"token ids {wanted[:8].tolist()}… at positions {first}…{first + len(token_ids) - 1}",
        f"token ids {token_ids[:8].tolist()}… at positions {positions[:8].tolist()}…",
        f"report this: model runner {runner} orders its batch in a way the capture does not know",
    )
