"""Where things are inside a model that vLLM has loaded, whatever the architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shims.errors import WrongStatesError


def runner_kind(runner: Any) -> str:
    """`v1` (persistent batch) or `v2` (a batch made anew each step).

    Raises:
        WrongStatesError: neither: the order of its batch cannot be read.
    """
    if hasattr(runner, "input_batch") and hasattr(runner.input_batch, "req_ids"):
        return "v1"
    if hasattr(runner, "prepare_inputs") and hasattr(runner, "req_states"):
        return "v2"
    raise WrongStatesError(
        f"worker, model runner {type(runner).__module__}.{type(runner).__name__}",
        "a runner whose batch order can be read (input_batch.req_ids, or prepare_inputs)",
        "neither",
        "set VLLM_USE_V2_MODEL_RUNNER=0 if this vLLM still has the first runner, and report this release",
    )


def model_of(runner: Any) -> Any:
    """The model itself: `get_model` looks through wrappers for graphs and micro-batches."""
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def follow_batches(runner: Any, note: Callable[[list[str]], None]) -> None:
    """Tell the order of each batch that the second runner makes.

    Args:
        runner: one whose kind is `v2`.
        note: is given the request ids, in the order of the batch's rows.
    """
    prepare = runner.prepare_inputs

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        batch = prepare(*args, **kwargs)
        note(list(batch.req_ids))
        return batch

    runner.prepare_inputs = prepare_inputs


def decoder_stack(model: Any) -> Any:
    """The module that owns the decoder layers, inside a multimodal wrapper too.

    Raises:
        WrongStatesError: there is no such module.
    """
    for candidate in (getattr(model, "get_language_model", lambda: None)(), model):
        inner = getattr(candidate, "model", None)
        for base in (inner, candidate):
            if base is not None and hasattr(getattr(base, "layers", None), "__len__"):
                return base
    raise WrongStatesError(
        f"worker, {type(model).__name__}",
        "decoder layers in model.layers, or in get_language_model().model.layers",
        f"members {[name for name, _ in model.named_children()]}",
        "report this architecture",
    )


def embedding_of(base: Any) -> Any:
    """The module of a decoder stack that turns token ids into vectors.

    Raises:
        WrongStatesError: it has none under a known name.
    """
    for name in ("embed_tokens", "embedding", "wte", "word_embeddings", "tok_embeddings"):
        module = getattr(base, name, None)
        if module is not None:
            return module
    raise WrongStatesError(
        f"worker, {type(base).__name__}",
        "a token embedding (embed_tokens)",
        f"members {[name for name, _ in base.named_children()]}",
        "report this architecture",
    )


def refuse_missing_layers(base: Any, layers: list[int]) -> None:
    """Refuse layers that this process does not hold.

    Args:
        layers: indices into `base.layers`.

    Raises:
        WrongStatesError: naming them.
    """
    held = base.layers
    absent = [i for i in layers if i >= len(held) or type(held[i]).__name__ == "PPMissingLayer"]
    if absent:
        raise WrongStatesError(
            f"worker, {type(base).__name__}.layers",
            f"the decoder layers {layers} in this worker",
            f"layers {absent} are missing of {len(held)} (pipeline parallel keeps them in another process)",
            "use tensor parallel only (pipeline-parallel size 1)",
        )


def split_output(output: Any, layer: str) -> tuple[Any, Any]:
    """What one decoder layer returned, as (hidden states, residual or None); R is their sum.

    Args:
        output: a tensor, or (hidden states, residual or None, …).
        layer: class name, for the message.

    Raises:
        WrongStatesError: the layer returned something else.
    """
    if hasattr(output, "dim"):
        return output, None
    if isinstance(output, (tuple, list)) and output and hasattr(output[0], "dim"):
        hidden, residual = output[0], output[1] if len(output) > 1 else None
        if residual is None:
            return hidden, None
        if hasattr(residual, "shape") and residual.shape == hidden.shape and residual.dtype == hidden.dtype:
            return hidden, residual
    raise WrongStatesError(
        f"worker, {layer}",
        "a tensor, or (hidden states, residual) of one shape and dtype",
        f"{type(output).__name__} of {[getattr(o, 'shape', type(o).__name__) for o in output or ()]}"
        if isinstance(output, (tuple, list))
        else type(output).__name__,
        "report this architecture: its layers return something the capture does not know",
    )
