"""Where hidden states come from, one module each; all look alike to `extract`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.layers import LayerIds
from pipeline.model_info import ModelInfo
from shims.errors import UsageError
from shims.releases import proved_direct
from shims.versions import base_release, detect, has_generator

DIRECT = "direct"
ENGINES = (DIRECT, "stock", "native")
AUTO = "auto"


@dataclass(frozen=True)
class EngineOptions:
    """What an engine needs to load a model."""

    model: ModelInfo
    layers: LayerIds
    max_tokens: int
    """Longest row in tokens."""
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``."""
    tp_size: int
    gpu_memory_utilization: float
    trust_remote_code: bool
    enforce_eager: bool | None = None
    """None leaves it to the engine."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step; None leaves it to vLLM."""


class Engine(Protocol):
    """A loaded model that returns the states of whole rows."""

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """States of each row, in the order given: CPU tensors [T, L, H], L in ascending layer ids."""
        ...

    def close(self) -> None:
        """Free the model and end its processes."""
        ...


def chosen(name: str) -> str:
    """The engine that a name stands for.

    `auto` is `direct` on releases where that was run and right, and where there is no generator to be stock.

    Raises:
        UsageError: an unknown engine.
    """
    if name == AUTO:
        stack = detect()
        proved = stack.vllm is None or base_release(stack.vllm) in proved_direct()
        return DIRECT if proved or stack.speculators is None or not has_generator(stack.speculators) else "stock"
    if name not in ENGINES:
        raise UsageError("--engine", " or ".join((AUTO, *ENGINES)), repr(name), "use one of these")
    return name


def why(asked: str, engine: str) -> str:
    """Why this engine, for a person.

    Args:
        asked: what `chosen` was given.
        engine: what it gave.
    """
    if asked != AUTO:
        return "given"
    if engine == DIRECT:
        return "chosen"
    return "chosen: nobody has run the faster one on this vLLM yet, `--engine direct` takes it"


def check_engine(name: str, layers: LayerIds) -> None:
    """Refuse what an engine cannot do, before anything is loaded.

    Args:
        name: one of ENGINES.

    Raises:
        UsageError: a layer it cannot capture.
    """
    if name == "stock" and min(layers.after) < 0:
        raise UsageError(
            where="--layer-ids",
            wanted="native ids from 1 on: the stock generator captures after a layer, so native n is its n-1",
            found="native 0, the embeddings, which lie before every layer",
            next_step="leave out id 0",
        )


def max_tokens(model: ModelInfo, max_seq_len: int) -> int:
    """Longest row, in tokens, that the engine takes whole.

    vLLM always plans one generated token, so a row may have one token less than the context the
    model is loaded with; we load it with one more where the model allows.
    """
    return max_seq_len if model.max_positions is None else min(max_seq_len, model.max_positions - 1)


def open_engine(name: str, options: EngineOptions) -> Engine:
    """Load the model for an engine that returns states to its caller.

    Args:
        name: `stock` or `native`; the direct engine writes rows itself, see `pipeline.engines.direct`.
    """
    if name == "native":
        from pipeline.engines.native import NativeEngine

        return NativeEngine(options)
    from pipeline.engines.stock import StockEngine

    return StockEngine(options)
