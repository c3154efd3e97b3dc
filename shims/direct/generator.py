"""`VllmHiddenStatesGenerator` for releases of speculators that have none (0.5 and later), on the direct engine.

The constructor and `generate()` keep the contract of speculators 0.4.0.1:
https://github.com/vllm-project/speculators/blob/v0.4.0.1/src/speculators/data_generation/vllm_hidden_states_generator.py
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from shims.behaviours.overrides import everything_chosen
from shims.behaviours.prompts import checked_prompts
from shims.config_names import stated
from shims.direct import spool
from shims.direct.engine import DirectEngine, DirectOptions
from shims.errors import SpecshimError, UsageError, WrongStatesError

logger = logging.getLogger("specshim")

# What may lie in the spool at once.
_SPOOL_BYTES = 2 << 30


class VllmHiddenStatesGenerator:
    """Hidden states of prompts, taken during prefill.

    Args:
        model_path: folder or name of the model.
        layer_ids: states after these layers (convention `after`), any order; default [2, n//2, n-3, n-1].
        max_model_len: most tokens of a prompt, plus one.
        gpu_memory_utilization: share of the device's memory that vLLM may use.
        tensor_parallel_size: devices to split the model over.
        max_num_batched_tokens: tokens of one step; None leaves it to vLLM.

    Raises:
        ValueError: a layer that the model does not have.
        SpecshimError: the model does not load.
    """

    def __init__(
        self,
        model_path: str,
        layer_ids: list[int] | None = None,
        max_model_len: int = 2048,
        gpu_memory_utilization: float = 0.8,
        tensor_parallel_size: int = 1,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        from transformers import PretrainedConfig

        chosen = everything_chosen()
        trusted = bool(chosen.pop("trust_remote_code", False))
        self.model_path, self.tensor_parallel_size = model_path, tensor_parallel_size
        self._trusted = trusted
        # As written: the class of a model that transformers does not know is not needed for a number.
        config, _ = PretrainedConfig.get_config_dict(model_path)
        layers = stated(config.get("text_config") or config, "num_hidden_layers")
        if type(layers) is not int:
            raise UsageError(
                f"model_path {model_path}", "a config.json that says the number of layers", str(layers),
                "use a decoder-only language model",
            )  # fmt: skip
        self.layer_ids = [2, layers // 2, layers - 3, layers - 1] if layer_ids is None else list(layer_ids)
        outside = [i for i in self.layer_ids if not 0 <= i < layers]
        if outside or not self.layer_ids:
            raise ValueError(f"layer_ids {outside or self.layer_ids}: wanted indices from 0 to {layers - 1}")
        self._ascending = sorted(set(self.layer_ids))
        self._spool = spool.folder(_SPOOL_BYTES)
        self._serial = 0
        self._engine: DirectEngine | None = None
        tokens = chosen.pop("max_num_batched_tokens", max_num_batched_tokens)
        try:
            self._engine = DirectEngine(
                DirectOptions(
                    model=model_path,
                    native_ids=[i + 1 for i in self._ascending],
                    sink="shims.direct.spool:Spool",
                    sink_settings={"folder": self._spool.name},
                    max_model_len=max_model_len,
                    dtype=chosen.pop("dtype", "auto"),
                    tensor_parallel_size=tensor_parallel_size,
                    gpu_memory_utilization=gpu_memory_utilization,
                    trust_remote_code=trusted,
                    max_num_batched_tokens=tokens,
                    more=chosen,
                )
            )
        except BaseException:
            self._spool.cleanup()
            raise

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer; rows of token ids do without."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=self._trusted)

    @property
    def vllm_config(self) -> Any:
        """The configuration that vLLM made."""
        return self._running.vllm_config

    @property
    def workers(self) -> list[dict[str, Any]]:
        """What each worker said of itself."""
        return self._running.workers

    @property
    def _running(self) -> DirectEngine:
        if self._engine is None:
            raise SpecshimError("generator", "to be open", "it was closed", "build a new one")
        return self._engine

    def generate(self, token_ids: Any) -> list[dict[str, Any]]:
        """Prefill the prompts and return the residual stream after each chosen layer.

        Args:
            token_ids: token ids of each prompt, as lists or a [prompts, tokens] tensor; any number of
                prompts. A prompt longer than max_model_len - 1 is cut, with a warning.

        Returns:
            One dict a prompt, in the order given: `input_ids` int64 [T] (cut as the prompt was),
            `hidden_states`: for each of layer_ids, in their order, [T, hidden size] on the CPU in the
            model's dtype; id i means after layer i. `loss_mask`: None.

        Raises:
            ValueError: no prompts, an empty prompt, or a token id outside of the vocabulary.
            WrongStatesError: the states of a prompt could not be proved complete and its own.
            SpecshimError: vLLM failed.
        """
        prompts = checked_prompts(self.vllm_config.model_config, token_ids)
        first = self._serial
        self._serial += len(prompts)
        results: list[dict[str, Any] | None] = [None] * len(prompts)
        named = ((str(first + i), prompt) for i, prompt in enumerate(prompts))
        for settled in self._running.run(named):
            for row_id, fault in settled.faults.items():
                raise WrongStatesError(
                    f"prompt {int(row_id) - first}", "finite states that are not constant", fault,
                    "check the model and its dtype",
                )  # fmt: skip
            for row_id in settled.done:
                index = int(row_id) - first
                if 0 <= index < len(prompts):  # else of an earlier call that failed
                    results[index] = self._result(prompts[index], row_id)
        absent = [index for index, result in enumerate(results) if result is None]
        if absent:
            raise WrongStatesError(
                "worker reply",
                f"{len(prompts)} rows",
                f"none for prompts {absent[:5]}",
                "report this, with the prompts",
            )
        return [result for result in results if result is not None]

    def _result(self, prompt: Sequence[int], row_id: str) -> dict[str, Any]:
        ids, states = spool.take(Path(self._spool.name), row_id)
        if ids.tolist() != list(prompt):
            raise WrongStatesError("worker reply", "the prompt's token ids", "others", "report this")
        by_layer = {layer: states[:, slot] for slot, layer in enumerate(self._ascending)}
        return {
            "input_ids": ids,
            "hidden_states": [by_layer[i].contiguous() for i in self.layer_ids],
            "loss_mask": None,
        }

    def close(self) -> None:
        """End the engine's processes and remove what was on its way."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            self._spool.cleanup()

    def __enter__(self) -> VllmHiddenStatesGenerator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self.close()
