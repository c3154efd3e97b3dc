"""DATA: what the direct engine uses of vLLM. Judged on every release like the generator's names; nothing adapts it.

`DIRECT` is what it uses whichever speculators is installed; `CAPTURE` are names that it shares with the
generator's shims and that releases of speculators without a generator (0.5 on) reach through it alone.
"""

from __future__ import annotations

from dataclasses import replace

from shims.contract import Call
from shims.touchpoints import Touchpoint, by_key

_ENGINE = "shims/direct/engine.py"
_WORKER = "shims/direct/worker.py"
_STREAM = "shims/direct/stream.py"

_LLM = "vllm.entrypoints.llm:LLM"
_LLM_ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
_ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"
_PLATFORM = "vllm.platforms.interface:Platform"


def _one(key: str, home: str, kind: str, used_in: str, call: Call | None = None, vllm: str = "") -> Touchpoint:
    return Touchpoint(f"direct {key}", home, kind, used_in, "use", (("", call),) if call else (), "", vllm)


def _overridden(name: str) -> tuple[Touchpoint, ...]:
    homes = {"Worker": "vllm.v1.worker.gpu_worker", "CPUWorker": "vllm.v1.worker.cpu_worker"}
    return tuple(_one(f"{cls}.{name}", f"{home}:{cls}.{name}", "attribute", _WORKER) for cls, home in homes.items())


# `LLM` takes any keyword and hands it to `EngineArgs`, so that is where the shape is judged.
ENGINE_KEYWORDS = (
    *("model", "dtype", "tensor_parallel_size", "gpu_memory_utilization", "trust_remote_code", "skip_tokenizer_init"),
    *("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "disable_log_stats", "worker_cls"),
    *("additional_config", "compilation_config", "max_model_len", "max_num_batched_tokens"),
)

DIRECT: tuple[Touchpoint, ...] = (
    _one("LLM", _LLM, "name", _ENGINE),
    _one("LLM.llm_engine", f"{_LLM}.llm_engine", "attribute", _ENGINE),
    _one("LLM.collective_rpc", f"{_LLM}.collective_rpc", "call", _ENGINE, Call(1, ("args",))),
    _one("EngineArgs", _ARGUMENTS, "call", _ENGINE, Call(0, ENGINE_KEYWORDS)),
    _one("EngineArgs text only", _ARGUMENTS, "call", _ENGINE, Call(0, ("language_model_only",)), ">=0.17"),
    _one("EngineArgs without pictures", _ARGUMENTS, "call", _ENGINE, Call(0, ("limit_mm_per_prompt",)), "<0.17"),
    *(
        _one(
            f"MultiModalRegistry.{name}",
            f"vllm.multimodal.registry:MultiModalRegistry.{name}",
            "attribute",
            "shims/direct/text_only.py",
            vllm=">=0.16,<0.24",
        )
        for name in ("supports_multimodal_inputs", "create_processor")
    ),
    _one("LLMEngine.add_request", f"{_LLM_ENGINE}.add_request", "call", _ENGINE, Call(3)),
    _one("LLMEngine.step", f"{_LLM_ENGINE}.step", "call", _ENGINE, Call()),
    _one("LLMEngine.vllm_config", f"{_LLM_ENGINE}.vllm_config", "attribute", _ENGINE),
    _one("LLMEngine.engine_core", f"{_LLM_ENGINE}.engine_core", "attribute", _ENGINE),
    _one("RequestOutput.finished", "vllm.outputs:RequestOutput.finished", "attribute", _ENGINE),
    _one("RequestOutput.request_id", "vllm.outputs:RequestOutput.request_id", "attribute", _ENGINE),
    _one(
        "SamplingParams",
        "vllm.sampling_params:SamplingParams",
        "call",
        _ENGINE,
        Call(0, ("max_tokens", "temperature", "detokenize")),
    ),
    _one("Platform.is_cpu", f"{_PLATFORM}.is_cpu", "call", _ENGINE, Call()),
    _one("Platform.is_cuda_alike", f"{_PLATFORM}.is_cuda_alike", "call", _WORKER, Call()),
    _one("CPU rms_norm", "vllm._custom_ops:rms_norm", "call", "shims/cpu_norm.py", Call(4), "<0.14"),
    _one("set_current_vllm_config", "vllm.config:set_current_vllm_config", "call", _WORKER, Call(1)),
    _one("VllmConfig.additional_config", "vllm.config:VllmConfig.additional_config", "field", _WORKER),
    _one("VllmConfig.scheduler_config", "vllm.config:VllmConfig.scheduler_config", "field", _STREAM),
    _one("CompilationConfig.cudagraph_mode", "vllm.config:CompilationConfig.cudagraph_mode", "field", _ENGINE),
    _one("ModelConfig.enforce_eager", "vllm.config:ModelConfig.enforce_eager", "field", _WORKER),
    _one(
        "SchedulerConfig.max_num_batched_tokens",
        "vllm.config:SchedulerConfig.max_num_batched_tokens",
        "field",
        _STREAM,
    ),
    _one(
        "SchedulerOutput.finished_req_ids",
        "vllm.v1.core.sched.output:SchedulerOutput.finished_req_ids",
        "field",
        _STREAM,
    ),
    *_overridden("load_model"),
    *_overridden("execute_model"),
    *_overridden("determine_available_memory"),
    *_overridden("compile_or_warm_up_model"),
)

_SHARED = (
    *("Worker.model_runner", "Worker.rank", "GPUModelRunner.get_model", "GPUModelRunner.input_batch"),
    *("InputBatch.req_ids", "V2 InputBatch.req_ids"),
    *("V2 GPUModelRunner.prepare_inputs", "V2 GPUModelRunner.req_states"),
    *("SchedulerOutput.num_scheduled_tokens", "SchedulerOutput.total_num_scheduled_tokens"),
    *("SchedulerOutput.scheduled_new_reqs", "NewRequestData.req_id", "NewRequestData.prompt_token_ids"),
    *("VllmConfig.model_config", "model.layers", "model.embed_tokens", "causal model.model"),
    *("Llama layer", "Qwen3 layer", "DeepSeek layer", "DeepSeek model.layers", "DeepSeek model.embed_tokens"),
    "load_general_plugins",
)
CAPTURE: tuple[Touchpoint, ...] = tuple(replace(by_key()[key], speculators=">=0.5") for key in _SHARED)
