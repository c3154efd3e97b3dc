"""Rows that cannot be right: states of a wrong shape, not finite, zero, constant; ids and masks out of range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def fault_of_states(states: Any, num_tokens: int, num_layers: int, hidden_size: int) -> str | None:
    """What is wrong with the states of one row; None when nothing is.

    Args:
        states: tensor [T, L, H].
        num_tokens: T that the row's token ids ask for.
    """
    if list(states.shape) != [num_tokens, num_layers, hidden_size]:
        return (
            f"states {list(states.shape)} for {num_tokens} tokens, wanted [{num_tokens}, {num_layers}, {hidden_size}]"
        )
    low, high = states.amin(dim=-1).float(), states.amax(dim=-1).float()
    # NaN survives min and max, infinities are one of the two.
    for kind, wrong in (("not finite", ~(low.isfinite() & high.isfinite())), ("constant", low == high)):
        if bool(wrong.any()):
            token, layer = wrong.nonzero()[0].tolist()
            if kind == "constant" and float(low[token, layer]) == 0:
                kind = "all zero"
            first = f"token {token}, layer column {layer}"
            return f"{int(wrong.sum())} of {wrong.numel()} state vectors {kind} (first: {first})"
    return None


def fault_of_tokens(token_ids: Sequence[int], loss_mask: Sequence[int] | None, vocab_size: int) -> str | None:
    """What is wrong with a row's token ids and loss mask; None when nothing is.

    Args:
        loss_mask: None where the row has none.
    """
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        return f"token id {low if low < 0 else high}, the vocabulary ends with {vocab_size - 1}"
    if loss_mask is None:
        return None
    if len(loss_mask) != len(token_ids):
        return f"a loss mask of {len(loss_mask)} for {len(token_ids)} tokens"
    strange = sorted(set(loss_mask) - {0, 1})
    return f"loss mask holds {strange[0]}, not 0 and 1 alone" if strange else None
