"""DATA: functions of vLLM whose *bodies* the shims rely on: their signatures say nothing of what matters.

The shims do by hand what the engine core does, or stand where the worker runs a step. A change inside of these is no
break, but somebody has to look.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Watched:
    """One function.

    Args:
        home: `module:qualified.name`.
        why: what the shims do that depends on it.
        relies: file of the shims that does it.
    """

    home: str
    why: str
    relies: str

    @property
    def key(self) -> str:
        return f"body of {self.home.removeprefix('vllm.')}"


_CORE = "vllm.v1.engine.core:EngineCore"
_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_PROC = "vllm.v1.executor.multiproc_executor:WorkerProc"
_EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
_CAPTURE, _CACHE = "shims/behaviours/capture.py", "shims/behaviours/kv_cache.py"
_REPLIES, _PLUGIN = "shims/behaviours/executor.py", "shims/plugin.py"

WATCHED: tuple[Watched, ...] = (
    Watched(f"{_CORE}._initialize_kv_caches", "the generator plans the KV cache as the engine core does", _CACHE),
    Watched(
        "vllm.v1.attention.backends.utils:resolve_kv_cache_layout",
        "its answer is published to the workers before any planning",
        _CACHE,
    ),
    Watched(
        "vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend",
        "the block size is left to the platform and the backend",
        _CACHE,
    ),
    Watched(
        "vllm.platforms.interface:Platform.update_block_size_for_backend",
        "the block size is left to the platform and the backend",
        _CACHE,
    ),
    Watched(f"{_WORKER}.execute_model", "the order of rows is taken while it runs", _CAPTURE),
    Watched(f"{_V1}.execute_model", "hooks see its batch; it decides when the model runs", _CAPTURE),
    Watched(f"{_V1}._prepare_inputs", "model runner V1: the order of rows is its persistent batch", _CAPTURE),
    Watched(f"{_V2}.execute_model", "hooks see its batch; it decides when the model runs", _CAPTURE),
    Watched(f"{_V2}.prepare_inputs", "model runner V2: the order of rows is the batch that it returns", _CAPTURE),
    Watched("vllm.config.vllm:VllmConfig.use_v2_model_runner", "decides which of the two runners serves", _CAPTURE),
    Watched(f"{_EXECUTOR}.collective_rpc", "its replies are unwrapped", _REPLIES),
    Watched(f"{_PROC}.worker_busy_loop", "a failure in a worker is explained where it is sent", _REPLIES),
    Watched(f"{_PROC}.enqueue_output", "a failure in a worker is explained where it is sent", _REPLIES),
    Watched("vllm.plugins:load_general_plugins", "the shims reach the workers as a plugin", _PLUGIN),
    Watched("vllm.plugins:load_plugins_by_group", "the shims reach the workers as a plugin", _PLUGIN),
)  # fmt: skip
