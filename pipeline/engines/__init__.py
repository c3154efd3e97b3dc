"""Where hidden states come from, one module each; all look alike to `extract`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.layers import LayerIds
from pipeline.model_info import ModelInfo
from shims.errors import UsageError

ENGINES = ("stock",)


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


class Engine(Protocol):
    """A loaded model that returns the states of whole rows."""

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """States of each row, in the order given: CPU tensors [T, L, H], L in ascending layer ids."""
        ...

    def close(self) -> None:
        """Free the model and end its processes."""
        ...


def check_engine(name: str, layers: LayerIds) -> None:
    """Refuse what an engine cannot do, before anything is loaded.

    Raises:
        UsageError: an unknown engine, or a layer it cannot capture.
    """
    if name not in ENGINES:
        raise UsageError("--engine", " or ".join(ENGINES), repr(name), "use one of these")
    if name == "stock" and min(layers.after) < 0:
        raise UsageError(
            where="--layer-ids",
            wanted="native ids from 1 on: the stock generator captures after a layer, so native n is its n-1",
            found="native 0, the embeddings, which lie before every layer",
            next_step="leave out id 0",
        )


def max_tokens(name: str, model: ModelInfo, max_seq_len: int) -> int:
    """Longest row, in tokens, that the engine takes whole.

    The stock generator always plans one generated token, so a row may have one token less
    than the context it loads the model with; we load it with one more where the model allows.
    """
    if model.max_positions is None:
        return max_seq_len
    return min(max_seq_len, model.max_positions - 1 if name == "stock" else model.max_positions)


def open_engine(name: str, options: EngineOptions) -> Engine:
    """Load the model.

    Raises:
        UsageError: an unknown engine.
    """
    check_engine(name, options.layers)
    from pipeline.engines.stock import StockEngine

    return StockEngine(options)
