"""vLLM's own worker of this platform, with a stream beside it (`worker_cls` of `LLM`)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from shims import cpu_norm
from shims.direct import taps
from shims.direct.stream import Stream
from shims.errors import SpecshimError
from shims.model_parts import devices_of, model_of
from shims.verbs import load

# Under this name the settings travel in vLLM's `additional_config`, which is part of its compile cache's key:
# a graph with taps is not mistaken for one without.
SETTINGS = "specshim"

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
elif current_platform.is_cuda_alike():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    raise SpecshimError(
        f"platform {type(current_platform).__name__}",
        "vLLM on CUDA, ROCm or a CPU",
        "another platform, whose worker is not known here",
        "use --engine stock",
    )


class CaptureWorker(PlatformWorker):  # type: ignore[misc]
    """Attaches the taps between loading and the first run, and follows each step. Rank 0 alone captures:
    there, states are whole."""

    _specshim: Stream | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; then attach the taps."""
        cpu_norm.mend()
        result = super().load_model(*args, **kwargs)
        native_ids = self.vllm_config.additional_config[SETTINGS]["native_ids"]
        if self.rank == 0:
            self._specshim = Stream(self, native_ids)
        else:
            taps.attach(model_of(self.model_runner), native_ids, None, devices_of(self))
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, inside of the stream's step."""
        stream = self._specshim.step(scheduler_output) if self._specshim else nullcontext()
        with stream, self._configured():
            return super().execute_model(scheduler_output, *args, **kwargs)

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._configured():
            return super().determine_available_memory(*args, **kwargs)

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._configured():
            return super().compile_or_warm_up_model(*args, **kwargs)

    def _configured(self) -> AbstractContextManager[Any]:
        """vLLM's configuration as the current one: experts of the CPU builds from 0.20 to 0.24 ask for it when they
        first run, and its CPU worker has not set it there."""
        if not current_platform.is_cpu():
            return nullcontext()
        context: AbstractContextManager[Any] = set_current_vllm_config(self.vllm_config)
        return context

    def specshim_open(self, sink: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Begin to listen.

        Args:
            sink: `module:callable` that makes the sink of these keyword arguments.

        Returns:
            Who this worker is.
        """
        if self._specshim is not None:
            self._specshim.open(load(sink)(**settings))
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "runner": self._specshim.kind if self._specshim else None,
            "model": self._specshim.model if self._specshim else None,
            "eager": bool(self.vllm_config.model_config.enforce_eager),
        }

    def specshim_poll(self) -> dict[str, Any] | None:
        """See `Stream.poll`; None on ranks that capture nothing."""
        return self._specshim.poll() if self._specshim else None
