"""Several packed sequences in one step: the model sees them one after the other, the loss is their mean.

So one device with ``--accumulate n`` takes the same steps as n devices with one sequence each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stacking(forward: Callable[..., Any], counted: bool) -> Callable[..., Any]:
    """A draft's ``forward`` that takes a stack of B sequences [B, T, …] where it takes one.

    Args:
        forward: of speculators' draft: returns (tokens, loss, metrics).
        counted: metrics named ``…_sum`` and ``…_total`` are added up; the others are averaged.
    """

    def stacked(**batch: Any) -> Any:
        stack = batch["hidden_states"].shape[0]
        if stack == 1:
            return forward(**batch)
        # Activations of one sequence at a time are kept; the backward pass computes the others' anew.
        from torch.utils.checkpoint import checkpoint

        loss: Any = 0.0
        tokens, metrics = [], []
        for number in range(stack):
            single = {name: _one(name, value, number) for name, value in batch.items()}
            part = checkpoint(forward, use_reentrant=False, **single)
            tokens.append(part[0])
            loss = loss + part[1] / stack
            metrics.append(part[2])
        return tokens, loss, merged(metrics, counted)

    return stacked


def _one(name: str, value: Any, number: int) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    # Lengths have no batch dimension where the trainer's own code makes them.
    return value[number] if name == "lengths" else value[number : number + 1]


def merged(parts: list[dict[str, Any]], counted: bool) -> dict[str, Any]:
    """The metrics of several sequences as those of one."""
    both = {name: sum(part[name] for part in parts[1:]) + parts[0][name] for name in parts[0]}
    if counted:
        return {
            name: value if name.endswith(("_sum", "_total")) else value / len(parts) for name, value in both.items()
        }
    return {name: value / len(parts) for name, value in both.items()}
