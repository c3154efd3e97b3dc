"""Several packed sequences in one step: the model sees them one after the other, the loss is their mean.

So one device with ``--accumulate n`` takes the same steps as n devices with one sequence each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def stacking(forward: Callable[..., Any], counted: bool, weights: list[Any], sharded: bool) -> Callable[..., Any]:
    """A draft's ``forward`` that takes a stack of B sequences [B, T, …] where it takes one.

    Args:
        forward: of speculators' draft: returns (tokens, loss, metrics).
        counted: metrics named ``…_sum`` and ``…_total`` are added up; the others are averaged.
        weights: parameters that are trained.
        sharded: spread by FSDP, which only sees gradients in a backward pass of its own: then the activations of all
            sequences are kept until it comes. Otherwise those of one at a time are.
    """

    def stacked(**batch: Any) -> Any:
        stack = batch["hidden_states"].shape[0]
        if stack == 1:
            return forward(**batch)
        gradients: list[Any] = [None] * len(weights)
        now = torch.is_grad_enabled() and not sharded
        loss: Any = 0.0
        tokens, metrics = [], []
        for number in range(stack):
            part = forward(**{name: _one(name, value, number) for name, value in batch.items()})
            tokens.append(part[0].detach() if now and isinstance(part[0], torch.Tensor) else part[0])
            share = part[1] / stack
            if now:
                gradients = _added(gradients, _gradients(share, weights))
            loss = loss + (share.detach() if now else share)
            metrics.append(part[2])
        if now:
            loss = _Known.apply(loss, gradients, *weights)
        return tokens, loss, merged(metrics, counted)

    return stacked


# Not checkpointing: what computes activations anew may be compiled anew by then, into other ones.
class _Known(torch.autograd.Function):  # type: ignore[misc]
    """A loss whose gradients are there already: a backward pass hands them to the weights."""

    @staticmethod
    def forward(ctx: Any, loss: Any, gradients: list[Any], *weights: Any) -> Any:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        return None, None, *(None if one is None else one * outer[0] for one in ctx.gradients)


def _gradients(loss: Any, weights: list[Any]) -> tuple[Any, ...]:
    # As the trainer's own backward pass, outside of autocast; whose cache holds on to this sequence's graph.
    with torch.autocast(loss.device.type, enabled=False):
        found = torch.autograd.grad(loss, weights, allow_unused=True)
    torch.clear_autocast_cache()
    return tuple(found)


def _added(sums: list[Any], more: tuple[Any, ...]) -> list[Any]:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(sums, more, strict=True)]


def _one(name: str, value: Any, number: int) -> Any:
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
