"""States that cannot be right, whatever the model: wrong shape, not finite, zero, constant."""

from __future__ import annotations

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
