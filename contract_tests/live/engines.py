"""The engines under test, each as a context in which one generator lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract_tests.live.models import CONTEXT

Generate = Callable[[list[list[int]]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Wish:
    """What to build.

    Args:
        layer_ids: states after these layers, in any order, repeats allowed where the engine takes them.
        overrides: settings as `shims.overrides` takes them.
        share: of the device's memory.
        devices: to split the model over.
    """

    path: Path
    layer_ids: Sequence[int]
    dtype: str
    overrides: dict[str, Any]
    share: float
    devices: int = 1


@contextmanager
def stock(wish: Wish) -> Iterator[Generate]:
    """The unedited generator of the installed speculators."""
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    generator = _built(VllmHiddenStatesGenerator, wish)
    try:
        yield generator.generate
    finally:
        generator.executor.shutdown()


@contextmanager
def direct(wish: Wish) -> Iterator[Generate]:
    """Ours, behind the same class."""
    from shims.direct.generator import VllmHiddenStatesGenerator

    with _built(VllmHiddenStatesGenerator, wish) as generator:
        yield generator.generate


def _built(generator: Any, wish: Wish) -> Any:
    import shims

    with shims.overrides(dtype=wish.dtype, **wish.overrides):
        return generator(
            str(wish.path),
            layer_ids=list(wish.layer_ids),
            max_model_len=CONTEXT,
            gpu_memory_utilization=wish.share,
            tensor_parallel_size=wish.devices,
        )


@contextmanager
def native(wish: Wish) -> Iterator[Generate]:
    """vLLM's connector, as `specshim extract --engine native` drives it."""
    import torch

    from pipeline.engines import EngineOptions
    from pipeline.engines.native import NativeEngine
    from pipeline.layers import AFTER, resolve
    from pipeline.model_info import read_model

    model = read_model(str(wish.path))
    layers = resolve(sorted(set(wish.layer_ids)), AFTER, model.num_layers)
    engine = NativeEngine(EngineOptions(model, layers, CONTEXT - 1, wish.dtype, wish.devices, wish.share, False))

    def generate(prompts: list[list[int]]) -> list[dict[str, Any]]:
        cut = [prompt[: CONTEXT - 1] for prompt in prompts]
        states = engine.states(cut)
        columns = [layers.ids.index(i) for i in wish.layer_ids]
        return [
            {"input_ids": torch.tensor(p), "hidden_states": [s[:, c] for c in columns]}
            for p, s in zip(cut, states, strict=True)
        ]

    try:
        yield generate
    finally:
        engine.close()


ENGINES = {"stock": stock, "direct": direct, "native": native}
