"""vLLM's own way: the `extract_hidden_states` speculator and its example connector.

https://docs.vllm.ai/en/latest/features/speculative_decoding/extract_hidden_states/ describes it. The
connector leaves a file a request; here each is compared with what was asked for, and removed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.engines import EngineOptions
from shims.behaviours import failures
from shims.direct.spool import folder as spool_folder
from shims.errors import SpecshimError, UsageError
from shims.guardian import guarding
from shims.precision import keep_float32
from shims.spawning import spawn_workers
from shims.versions import detect, within

# 0.17, the first with the method, fails where a step gives a request no new block.
_FIRST = "0.18"
# Before 0.22 the connector keeps the last chunk of a prompt only; 0.22 and 0.23 refuse to start with chunks.
_TAKES_CHUNKS = ">=0.24"
# Architectures whose layers leave the sum over the devices to the next layer: the connector gets one device's share.
PARTIAL = ("DeepseekV32", "GlmMoeDsa", "Dots3Note", "MiniMaxM3")
_SPOOL_BYTES = 2 << 30
# Architectures whose forward collects states in a loop of its own, and left out the last one at first.
_LATENT = ("Deepseek", "Kimi")


def check_native(options: EngineOptions) -> None:
    """Refuse what the installed vLLM's connector is known to get wrong or not to do.

    Raises:
        UsageError: with the release from which it works.
    """
    vllm = detect().vllm
    if vllm is None:
        return
    model, last = options.model, options.layers.native[-1] == options.model.num_layers
    architectures = model.config.get("architectures") or []
    latent = any(name.startswith(_LATENT) for name in architectures)
    if options.tp_size > 1 and any(name.startswith(PARTIAL) for name in architectures):
        raise UsageError(
            "--engine native",
            f"--tp-size 1 for {'/'.join(architectures)} (on several, vLLM hands out one device's share of a state)",
            f"--tp-size {options.tp_size}",
            "use --engine direct and a vLLM whose layers sum what they return (DeepSeek-V3.2, GLM-5: below 0.29)",
        )
    for met, wanted, found in (
        (not usable(vllm), f"vllm {_FIRST} or later, whose connector takes requests that run on", f"vllm {vllm}"),
        (
            within(vllm, "<0.25") and latent and last,
            f"vllm 0.25 or later for the last state of {'/'.join(architectures)} (before, it is dropped)",
            f"vllm {vllm} and native layer id {model.num_layers}",
        ),
        (
            not several_devices(vllm) and options.tp_size > 1,
            "vllm 0.31 or later for --tp-size above 1 (before, the connector waits for ranks that never answer)",
            f"vllm {vllm} and --tp-size {options.tp_size}",
        ),
        (
            not _on_cuda(),
            "a CUDA device (before 0.22 vLLM's CPU runner does not ask the model for the states and fails while it "
            "warms up; from 0.22 on the connector copies with CUDA streams)",
            "none",
        ),
    ):
        if met:
            raise UsageError("--engine native", wanted, found, "use --engine direct, which does this on every release")


def usable(release: str) -> bool:
    """Whether this vLLM's connector can be used at all."""
    return within(release, f">={_FIRST}")


def several_devices(release: str) -> bool:
    """Whether its connector ends where a model is split over devices."""
    return within(release, ">=0.31")


def takes_chunks(release: str) -> bool:
    """Whether its connector gives all states of a prompt that is computed in several steps."""
    return within(release, _TAKES_CHUNKS)


def _on_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


class NativeEngine:
    """vLLM's connector behind the engine protocol."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the model.

        Raises:
            UsageError: this release's connector cannot do it.
            SpecshimError: the model does not load.
        """
        check_native(options)
        from vllm import LLM

        self._spool: tempfile.TemporaryDirectory[str] = spool_folder(_SPOOL_BYTES)
        self._layers = len(options.layers.ids)
        chunked = takes_chunks(detect().vllm or "")
        whole = {} if chunked else {"max_num_batched_tokens": max(options.max_tokens + 1, 2048)}
        spawn_workers()
        keep_float32(options.dtype)
        with failures.collected() as told, guarding():
            try:
                self._llm: Any = LLM(
                    model=str(options.model.path),
                    dtype=options.dtype,
                    tensor_parallel_size=options.tp_size,
                    gpu_memory_utilization=options.gpu_memory_utilization,
                    trust_remote_code=options.trust_remote_code,
                    max_model_len=options.max_tokens + 1,
                    skip_tokenizer_init=True,
                    enable_prefix_caching=False,
                    enable_chunked_prefill=chunked,
                    disable_log_stats=True,
                    speculative_config={
                        "method": "extract_hidden_states",
                        "num_speculative_tokens": 1,
                        "draft_model_config": {
                            "hf_config": {"eagle_aux_hidden_state_layer_ids": list(options.layers.native)}
                        },
                    },
                    kv_transfer_config={
                        "kv_connector": "ExampleHiddenStatesConnector",
                        "kv_role": "kv_producer",
                        "kv_connector_extra_config": {"shared_storage_path": self._spool.name},
                    },
                    **whole,
                )
            except Exception as error:
                self._spool.cleanup()
                raise SpecshimError(
                    f"loading {options.model.path} with extract_hidden_states",
                    "vLLM to start",
                    failures.described(error, told),
                    "look at the innermost cause named here; --engine direct does not need the connector, and takes "
                    "states of classes that do not support EAGLE-3, too",
                ) from error

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """States of each row: CPU tensors [T, L, H].

        Raises:
            SpecshimError: vLLM failed, or left something else than these rows.
        """
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        greedy = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        outputs = self._llm.generate(prompts, greedy, use_tqdm=False)
        return [
            self._taken(position, row, output) for position, (row, output) in enumerate(zip(rows, outputs, strict=True))
        ]

    def _taken(self, position: int, row: Sequence[int], output: Any) -> Any:
        from safetensors.torch import load

        told = (getattr(output, "kv_transfer_params", None) or {}).get("hidden_states_path")
        path = Path(told) if told else None
        root = Path(self._spool.name).resolve()
        if path is None or root not in path.resolve().parents:
            raise SpecshimError(
                f"native connector, result {position}",
                f"a file below {root}",
                str(told),
                "report this release; --engine direct does not need the connector",
            )
        tensors = load(_read_when_written(path))
        path.unlink()
        states = tensors["hidden_states"]
        ids = tensors["token_ids"].tolist()
        if ids[: len(row)] != list(row) or list(states.shape[:2]) != [len(row), self._layers]:
            raise SpecshimError(
                f"native connector, result {position}",
                f"{len(row)} rows of {self._layers} states, of these token ids",
                f"states {list(states.shape)} with {len(ids)} token ids",
                "report this release; --engine direct proves each row",
            )
        return states

    def close(self) -> None:
        """End the engine's processes and remove what is left of the files."""
        llm, self._llm = self._llm, None
        with contextlib.suppress(Exception):  # one that died has nothing to end
            llm.llm_engine.engine_core.shutdown()
        self._spool.cleanup()


def _read_when_written(path: Path) -> bytes:
    """The file, after its writer (which holds a lock beside it from 0.22 on) is through."""
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        import fcntl

        with lock.open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            content = path.read_bytes()
        lock.unlink()
        return content
    return path.read_bytes()
