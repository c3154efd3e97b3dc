"""Where states leave the model: hooks on decoder layers that call one custom op.

The op is opaque to torch.compile, so the same hooks serve eager and compiled execution. It says that
it changes the hidden states (it does not), which keeps a compiler from dropping or moving it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from shims.model_parts import (
    adds_residual,
    decoder_stack,
    embedding_of,
    layers_of,
    refuse_missing_layers,
    refuse_partial_layers,
    refuse_scaled_layers,
    rows_of,
    split_output,
)


class Receiver(Protocol):
    """Takes what the taps see, while the model runs."""

    def state(self, slot: int, hidden: Any, residual: Any | None) -> None:
        """R = hidden + residual, each [padded tokens, hidden size], for the slot-th tapped layer."""
        ...

    def inputs(self, token_ids: Any | None, positions: Any | None) -> None:
        """What the model was given: [padded tokens] each; None where it is given elsewhere."""
        ...


# One model a process: vLLM runs each worker of an engine in one.
_receiver: Receiver | None = None


def _tap(hidden: Any, residual: Any | None, slot: int) -> None:
    if _receiver is not None:
        _receiver.state(slot, hidden, residual)


def _no_effect(hidden: Any, residual: Any | None, slot: int) -> None:
    """Shape inference of an op without results."""


_op = torch.library.custom_op(
    "specshim::tap", _tap, mutates_args=("hidden",), schema="(Tensor(a!) hidden, Tensor? residual, int slot) -> ()"
)
_op.register_fake(_no_effect)


def attach(model: Any, native_ids: list[int], receiver: Receiver | None, devices: int = 1) -> None:
    """Hook the layers. To be called after the model is loaded and before it runs (and is compiled).

    Args:
        model: the model that the runner calls.
        native_ids: ascending; 0 is the input of the first layer, k the output of layer k - 1.
        receiver: None on devices that capture nothing. They are hooked all the same: a compiler fuses sums over the
            devices with what follows, and a sum that is fused on one device alone never ends.
        devices: over which the model is split.

    Raises:
        WrongStatesError: the model has no such layers.
    """
    global _receiver
    base = decoder_stack(model)
    refuse_missing_layers(base, [max(i - 1, 0) for i in native_ids])
    refuse_scaled_layers(base, [i - 1 for i in native_ids if i])
    refuse_partial_layers(base, [i - 1 for i in native_ids if i], devices)
    layers = layers_of(base)
    for slot, native in enumerate(native_ids):
        if native == 0:
            layers[0].register_forward_pre_hook(_before(slot), with_kwargs=True)
        else:
            layer = layers[native - 1]
            layer.register_forward_hook(_after(slot, adds_residual(layer)))
    embedding_of(base).register_forward_pre_hook(_embedding, with_kwargs=True)
    model.register_forward_pre_hook(_whole_model, with_kwargs=True)
    _receiver = receiver


def _after(slot: int, adds: bool) -> Callable[[Any, Any, Any], None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        hidden, residual = split_output(output, type(module).__name__, adds)
        torch.ops.specshim.tap(hidden, residual, slot)

    return hook


def _before(slot: int) -> Callable[[Any, Any, Any], None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states")
        if hidden is None:
            hidden = next(a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
        torch.ops.specshim.tap(rows_of(hidden, type(module).__name__), None, slot)

    return hook


def _embedding(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Multimodal models embed before the forward, which then sees vectors only."""
    if not torch.compiler.is_compiling() and _receiver is not None:
        _receiver.inputs(args[0] if args else next(iter(kwargs.values())), None)


def _whole_model(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling() and _receiver is not None:
        named = {**dict(zip(("input_ids", "positions"), args, strict=False)), **kwargs}
        _receiver.inputs(named.get("input_ids"), named.get("positions"))
