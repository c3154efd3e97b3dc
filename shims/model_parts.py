"""Where things are inside a model that vLLM has loaded, whatever the architecture."""

from __future__ import annotations

import ast
import inspect
import textwrap
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


def devices_of(worker: Any) -> int:
    """Over how many devices a worker's model is split."""
    return int(worker.parallel_config.tensor_parallel_size)


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


# Names under which architectures keep the text model, its decoder layers, and its token embedding.
_BODIES = ("model", "transformer", "gpt_neox", "backbone")
_LAYERS = ("layers", "h", "blocks")
_EMBEDDINGS = ("embed_tokens", "embedding", "embeddings", "embed_in", "wte", "word_embeddings", "tok_embeddings")


def decoder_stack(model: Any) -> Any:
    """The module that owns the decoder layers, inside a multimodal wrapper too.

    Raises:
        WrongStatesError: there is no such module.
    """
    for candidate in (getattr(model, "get_language_model", lambda: None)(), model):
        for inner in (*(getattr(candidate, name, None) for name in _BODIES), candidate):
            for base in (inner, getattr(inner, "decoder", None)):
                if base is not None and any(hasattr(getattr(base, name, None), "__len__") for name in _LAYERS):
                    return base
    raise WrongStatesError(
        f"worker, {type(model).__name__}",
        f"decoder layers, as {', '.join(_LAYERS)} of {', '.join(_BODIES)}, or of its decoder",
        f"members {[name for name, _ in model.named_children()]}",
        "report this architecture",
    )


def layers_of(base: Any) -> Any:
    """The decoder layers of what `decoder_stack` found, in their order."""
    return next(layers for name in _LAYERS if hasattr(layers := getattr(base, name, None), "__len__"))


def embedding_of(base: Any) -> Any:
    """The module of a decoder stack that turns token ids into vectors.

    Raises:
        WrongStatesError: it has none under a known name.
    """
    for name in _EMBEDDINGS:
        module = getattr(base, name, None)
        if module is not None:
            return module
    raise WrongStatesError(
        f"worker, {type(base).__name__}",
        f"a token embedding ({', '.join(_EMBEDDINGS)})",
        f"members {[name for name, _ in base.named_children()]}",
        "report this architecture",
    )


def refuse_missing_layers(base: Any, layers: list[int]) -> None:
    """Refuse layers that this process does not hold.

    Args:
        layers: indices into `layers_of(base)`.

    Raises:
        WrongStatesError: naming them.
    """
    held = layers_of(base)
    absent = [i for i in layers if i >= len(held) or type(held[i]).__name__ == "PPMissingLayer"]
    if absent:
        raise WrongStatesError(
            f"worker, layers of {type(base).__name__}",
            f"the decoder layers {layers} in this worker",
            f"layers {absent} are missing of {len(held)} (pipeline parallel keeps them in another process)",
            "use tensor parallel only (pipeline-parallel size 1)",
        )


def refuse_scaled_layers(base: Any, layers: list[int]) -> None:
    """Refuse layers that divide the residual stream, as DeepSeek's do in float16 lest it overflow.

    The next token is the same, for a norm takes the factor away; the states are neither transformers' nor those that a
    server in bfloat16 feeds a draft
    (https://github.com/vllm-project/vllm/blob/v0.25.1/vllm/model_executor/models/deepseek_v2.py, `Fix FP16 overflow`).

    Args:
        layers: indices into `layers_of(base)`.

    Raises:
        WrongStatesError: naming the factor.
    """
    for layer in (layers_of(base)[i] for i in layers):
        factor = getattr(layer, "routed_scaling_factor", None)
        if factor in (None, 1) or not any(str(each.dtype) == "torch.float16" for each in layer.parameters()):
            continue
        try:
            scales = "float16" in inspect.getsource(type(layer).forward)
        except (OSError, TypeError):
            scales = True
        if scales:
            raise WrongStatesError(
                f"worker, {type(layer).__name__}",
                "states as the model defines them",
                f"in float16 the layer divides them by `routed_scaling_factor` ({factor}), lest they overflow",
                "compute in bfloat16 (`extract --dtype bfloat16`)",
            )


def refuse_partial_layers(base: Any, layers: list[int], devices: int) -> None:
    """Refuse layers that leave the sum over the devices to the next one, as vLLM's own classes for NVIDIA's do.

    What such a layer returns on one device is that device's share
    (https://github.com/vllm-project/vllm/blob/v0.29.0/vllm/models/deepseek_v32/nvidia/model.py,
    `The previous layer's MLP/MoE output is left un-reduced`). Nothing in it says so.

    Args:
        layers: indices into `layers_of(base)`.
        devices: over which the model is split.

    Raises:
        WrongStatesError: naming the class.
    """
    for layer in (layers_of(base)[i] for i in layers) if devices > 1 else ():
        try:
            source = inspect.getsource(type(layer).forward)
        except (OSError, TypeError):
            continue
        if "fused_allreduce" in source:
            raise WrongStatesError(
                f"worker, {type(layer).__name__}",
                "states as the model defines them",
                f"on {devices} devices the layer returns one device's share of them",
                "use one device, or a vLLM whose class for this model sums within the layer (DeepSeek-V3.2, GLM-5: "
                "below 0.29)",
            )


def adds_residual(layer: Any) -> bool:
    """Whether a layer adds the residual that it is given, so that the one it returns is still to be added by the next.

    Some architectures (Cohere, StableLM, Exaone 4, PhiMoE, Granite hybrids) return whole hidden states, and beside
    them a residual that nobody reads: added to them, it would give numbers that look right. Such a layer takes no
    residual, or its forward sets the name anew before it reads it.

    Args:
        layer: a decoder layer.

    Returns:
        True where the source cannot be read, as most architectures do it.
    """
    forward = type(layer).forward
    given = inspect.signature(forward).parameters.values()
    hidden_in = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in given)
    if not hidden_in and not any("residual" in each.name for each in given):
        return False
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError):
        return True
    for statement in getattr(body, "body", ()):
        uses = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == "residual"]
        if uses:
            # In a plain assignment, what is read is read first; under an `if` the name may be read or not.
            return not isinstance(statement, ast.Assign) or any(isinstance(node.ctx, ast.Load) for node in uses)
    return True


def split_output(output: Any, layer: str, adds: bool = True) -> tuple[Any, Any]:
    """What one decoder layer returned, as (hidden states, residual or None); R is their sum.

    Args:
        output: a tensor, or (hidden states, residual or None, …).
        layer: class name, for the message.
        adds: see `adds_residual`; else a residual is left out.

    Raises:
        WrongStatesError: the layer returned something else.
    """
    if hasattr(output, "dim"):
        return rows_of(output, layer), None
    if isinstance(output, (tuple, list)) and output and hasattr(output[0], "dim"):
        hidden, residual = output[0], output[1] if len(output) > 1 else None
        # More than two: parts of the state that the next layer adds, except for keys and values (HunYuan's).
        more = any(getattr(each, "shape", None) == hidden.shape for each in output[2:]) or len(output) > 3
        fits = residual is None or getattr(residual, "shape", None) == hidden.shape
        if fits and not more:
            if residual is None or not adds:
                return rows_of(hidden, layer), None
            if residual.dtype == hidden.dtype:
                return rows_of(hidden, layer), rows_of(residual, layer)
    raise WrongStatesError(
        f"worker, {layer}",
        "a tensor, or (hidden states, residual) of one shape and dtype",
        f"{type(output).__name__} of {[getattr(o, 'shape', type(o).__name__) for o in output or ()]}"
        if isinstance(output, (tuple, list))
        else type(output).__name__,
        "report this architecture: its layers return something the capture does not know",
    )


def rows_of(hidden: Any, layer: str) -> Any:
    """Hidden states as [tokens, hidden size]: layers of transformers, inside of vLLM, have a batch of one in front.

    Raises:
        WrongStatesError: the tensor has another form, as several streams side by side.
    """
    if hidden.dim() == 3 and hidden.shape[0] == 1:
        return hidden[0]
    if hidden.dim() != 2:
        raise WrongStatesError(
            f"worker, {layer}",
            "hidden states [tokens, hidden size], one state a token",
            f"a tensor {list(hidden.shape)}",
            "this architecture has no single residual stream that a draft could be trained on; use another model",
        )
    return hidden
