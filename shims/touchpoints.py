"""DATA: every name of vLLM, transformers and torch that speculators' generator (and its shims) use.

A touchpoint is reached through a *seam*: the place in speculators' own code where a shim can stand
without changing vLLM for anyone else.

    global:NAME      a global of `speculators.data_generation.vllm_hidden_states_generator`
    executor.NAME    a method of the executor that the generator builds
    generator.NAME   a method of `VllmHiddenStatesGenerator`
    worker.NAME      a method of `HiddenStatesWorkerExtension`
    import           needed while speculators is imported: offered in the foreign module itself
    use              used inside the shims' own code; watched, not adapted at a seam
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from shims.contract import Call
from shims.versions import within

GENERATOR_MODULE = "speculators.data_generation.vllm_hidden_states_generator"
WORKER_MODULE = "speculators.data_generation.custom_worker"

_GENERATOR = "data_generation/vllm_hidden_states_generator.py"
_WORKER = "data_generation/custom_worker.py"
_SHIMS = "shims/behaviours"


@dataclass(frozen=True)
class Touchpoint:
    """One foreign name and how it is used.

    Args:
        key: short name that rows, messages and documents use.
        home: `module:qualified.name` where speculators expects it.
        kind: `call`, `name`, `field`, `attribute`, `member` (of an enum), `module`, `rpc` (worker method) or
            `annotation` (a name that annotations of the module's classes may ask for at run time).
        used_in: file of the consumer.
        seam: where a shim can stand, see the module's docstring.
        calls: (speculators range, shape of the call), for kind `call`.
        speculators: releases of speculators that use it.
        vllm: releases on which it is used, where the use itself depends on the release.
        through: key of the touchpoint by way of which alone it is used: where a row replaces that, this
            use is gone.
    """

    key: str
    home: str
    kind: str
    used_in: str
    seam: str
    calls: tuple[tuple[str, Call], ...] = ()
    speculators: str = "<0.5"
    vllm: str = ""
    through: str = ""

    @property
    def module(self) -> str:
        return self.home.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.home.partition(":")[2]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def call_for(self, speculators: str | None) -> Call | None:
        """The shape in which this speculators release calls it, or None where it does not."""
        return next((call for wanted, call in self.calls if within(speculators, wanted)), None)


_KV = "vllm.v1.core.kv_cache_utils"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"


def _call(
    key: str,
    home: str,
    seam: str,
    *calls: tuple[str, Call],
    used_in: str = _GENERATOR,
    speculators: str = "<0.5",
    vllm: str = "",
    through: str = "",
) -> Touchpoint:
    return Touchpoint(key, home, "call", used_in, seam, calls, speculators, vllm, through)


def _other(
    key: str,
    home: str,
    kind: str,
    used_in: str,
    seam: str = "use",
    speculators: str = "<0.5",
    vllm: str = "",
    through: str = "",
) -> Touchpoint:
    return Touchpoint(key, home, kind, used_in, seam, (), speculators, vllm, through)


def _kw(*names: str, positional: int = 0) -> Call:
    return Call(positional, names)


_GENERATOR_CALLS = (
    _call(
        "CacheConfig",
        "vllm.config:CacheConfig",
        "global:CacheConfig",
        ("<0.4", _kw("block_size", "gpu_memory_utilization")),
        (">=0.4", _kw("block_size", "gpu_memory_utilization", "enable_prefix_caching")),
    ),
    _call("DeviceConfig", "vllm.config:DeviceConfig", "global:DeviceConfig", ("", _kw())),
    _call("LoadConfig", "vllm.config:LoadConfig", "global:LoadConfig", ("", _kw())),
    _call(
        "ModelConfig",
        "vllm.config:ModelConfig",
        "global:ModelConfig",
        ("", _kw("model", "tokenizer", "trust_remote_code", "dtype", "max_model_len", "enforce_eager")),
    ),
    _call(
        "ParallelConfig",
        "vllm.config:ParallelConfig",
        "global:ParallelConfig",
        ("", _kw("tensor_parallel_size", "worker_extension_cls")),
    ),
    _call(
        "SchedulerConfig",
        "vllm.config:SchedulerConfig",
        "global:SchedulerConfig",
        ("<0.4", _kw("max_num_seqs", "max_model_len", "max_num_batched_tokens")),
        (">=0.4", _kw("max_num_seqs", "max_model_len", "max_num_batched_tokens", "is_encoder_decoder")),
    ),
    _call(
        "VllmConfig",
        "vllm.config:VllmConfig",
        "global:VllmConfig",
        (
            "",
            _kw("model_config", "cache_config", "parallel_config", "scheduler_config", "device_config", "load_config"),
        ),
    ),
    _call(
        "SamplingParams",
        "vllm.sampling_params:SamplingParams",
        "global:SamplingParams",
        ("", _kw("max_tokens", "temperature")),
    ),
    _call(
        "get_hash_fn_by_name",
        "vllm.utils.hashing:get_hash_fn_by_name",
        "import",
        (">=0.4", _kw(positional=1)),
        speculators=">=0.4,<0.5",
    ),
    _call(
        "_get_kv_cache_groups_uniform_spec",
        f"{_KV}:_get_kv_cache_groups_uniform_spec",
        "import",
        ("", _kw(positional=1)),
    ),
    _call(
        "get_kv_cache_config_from_groups",
        f"{_KV}:get_kv_cache_config_from_groups",
        "global:get_kv_cache_config_from_groups",
        ("<0.4", _kw("vllm_config", "kv_cache_groups", "kv_cache_specs", "available_memory")),
        (">=0.4", _kw("vllm_config", "kv_cache_groups", "available_memory")),
    ),
    _call("unify_hybrid_kv_cache_specs", f"{_KV}:unify_hybrid_kv_cache_specs", "import", ("", _kw(positional=1))),
    _call(
        "get_request_block_hasher",
        f"{_KV}:get_request_block_hasher",
        "import",
        (">=0.4", _kw(positional=2)),
        speculators=">=0.4,<0.5",
    ),
    _call("init_none_hash", f"{_KV}:init_none_hash", "import", (">=0.4", _kw(positional=1)), speculators=">=0.4,<0.5"),
    _call(
        "Scheduler",
        _SCHEDULER,
        "global:Scheduler",
        ("<0.4", _kw("vllm_config", "kv_cache_config", "structured_output_manager")),
        (">=0.4", _kw("vllm_config", "kv_cache_config", "structured_output_manager", "block_size")),
    ),
    _call("Scheduler.schedule", f"{_SCHEDULER}.schedule", "use", ("", _kw())),
    _call("Scheduler.add_request", f"{_SCHEDULER}.add_request", "use", ("", _kw(positional=1))),
    _call("Scheduler.finish_requests", f"{_SCHEDULER}.finish_requests", "use", ("", _kw(positional=2))),
    _call("MultiprocExecutor", _EXECUTOR, "global:MultiprocExecutor", ("", _kw("vllm_config"))),
    _call(
        "MultiprocExecutor.collective_rpc",
        f"{_EXECUTOR}.collective_rpc",
        "executor.collective_rpc",
        ("", _kw("args", "unique_reply_rank", positional=1)),
    ),
    _call(
        "MultiprocExecutor.execute_model",
        f"{_EXECUTOR}.execute_model",
        "executor.execute_model",
        ("", _kw(positional=1)),
    ),
    # 0.3.0 does not call it; its replaced generate() does.
    _call(
        "MultiprocExecutor.sample_tokens",
        f"{_EXECUTOR}.sample_tokens",
        "executor.sample_tokens",
        ("", _kw(positional=1)),
    ),
    _call(
        "MultiprocExecutor.initialize_from_config",
        f"{_EXECUTOR}.initialize_from_config",
        "executor.initialize_from_config",
        ("", _kw(positional=1)),
    ),
    _call("MultiprocExecutor.shutdown", f"{_EXECUTOR}.shutdown", "executor.shutdown", ("", _kw())),
    _call(
        "Request",
        "vllm.v1.request:Request",
        "global:Request",
        (
            "<0.4",
            _kw("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "eos_token_id", "arrival_time"),
        ),
        (
            ">=0.4",
            _kw(
                "request_id",
                "prompt_token_ids",
                "sampling_params",
                "pooling_params",
                "eos_token_id",
                "arrival_time",
                "block_hasher",
            ),
        ),
    ),
    _call(
        "StructuredOutputManager",
        "vllm.v1.structured_output:StructuredOutputManager",
        "global:StructuredOutputManager",
        ("", _kw("vllm_config")),
    ),
)

_GENERATOR_NAMES = (
    _other("RequestStatus.FINISHED_ABORTED", "vllm.v1.request:RequestStatus.FINISHED_ABORTED", "member", _GENERATOR),
    _other("Request.num_computed_tokens", "vllm.v1.request:Request.num_computed_tokens", "attribute", _SHIMS),
    _other("ModelConfig.max_model_len", "vllm.config:ModelConfig.max_model_len", "field", _GENERATOR),
    _other("CacheConfig.num_gpu_blocks", "vllm.config:CacheConfig.num_gpu_blocks", "field", _GENERATOR),
    _other("CacheConfig.block_size", "vllm.config:CacheConfig.block_size", "field", _GENERATOR),
    _other(
        "CacheConfig.prefix_caching_hash_algo",
        "vllm.config:CacheConfig.prefix_caching_hash_algo",
        "field",
        _GENERATOR,
        speculators=">=0.4,<0.5",
    ),
    _other("KVCacheConfig.num_blocks", "vllm.v1.kv_cache_interface:KVCacheConfig.num_blocks", "field", _GENERATOR),
    _other(
        "KVCacheConfig.kv_cache_groups", "vllm.v1.kv_cache_interface:KVCacheConfig.kv_cache_groups", "field", _SHIMS
    ),
    _call(
        "resolve_kv_cache_layout",
        "vllm.v1.attention.backends.utils:resolve_kv_cache_layout",
        "use",
        ("", _kw(positional=3)),
        used_in=_SHIMS,
        vllm=">=0.29",
    ),
    _other(
        "SchedulerOutput.num_scheduled_tokens",
        "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
        "field",
        _GENERATOR,
    ),
    _other(
        "SchedulerOutput.total_num_scheduled_tokens",
        "vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",
        "field",
        _GENERATOR,
    ),
    _other(
        "SchedulerOutput.scheduled_new_reqs",
        "vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs",
        "field",
        _SHIMS,
    ),
    _other(
        "NewRequestData.prompt_token_ids",
        "vllm.v1.core.sched.output:NewRequestData.prompt_token_ids",
        "field",
        _SHIMS,
    ),
    _other("VllmConfig.cache_config", "vllm.config:VllmConfig.cache_config", "field", _GENERATOR),
    _other("VllmConfig.model_config", "vllm.config:VllmConfig.model_config", "field", _GENERATOR),
    _other("VllmConfig.parallel_config", "vllm.config:VllmConfig.parallel_config", "field", _SHIMS, vllm=">=0.33"),
    _call("ModelConfig.get_vocab_size", "vllm.config:ModelConfig.get_vocab_size", "use", ("", _kw()), used_in=_SHIMS),
    _other(
        "ParallelConfig.cp_kv_cache_interleave_size",
        "vllm.config:ParallelConfig.cp_kv_cache_interleave_size",
        "field",
        _SHIMS,
        vllm=">=0.33",
    ),
    _other(
        "KVCacheGroupSpec.layer_names",
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec.layer_names",
        "field",
        _SHIMS,
        speculators=">=0.4,<0.5",
        vllm="<0.12",
    ),
    _other(
        "KVCacheGroupSpec.kv_cache_spec", "vllm.v1.kv_cache_interface:KVCacheGroupSpec.kv_cache_spec", "field", _SHIMS
    ),
    _other("KVCacheSpec.block_size", "vllm.v1.kv_cache_interface:KVCacheSpec.block_size", "field", _SHIMS),
    _call(
        "MultiprocExecutor.get_supported_kv_cache_layouts",
        f"{_EXECUTOR}.get_supported_kv_cache_layouts",
        "use",
        ("", _kw()),
        used_in=_SHIMS,
        vllm=">=0.29",
    ),
    _call(
        "MultiprocExecutor.set_kv_cache_layout",
        f"{_EXECUTOR}.set_kv_cache_layout",
        "use",
        ("", _kw(positional=1)),
        used_in=_SHIMS,
        vllm=">=0.29,<0.33",
    ),
    _call(
        "MultiprocExecutor.set_kv_cache_layout with interleave",
        f"{_EXECUTOR}.set_kv_cache_layout",
        "use",
        ("", _kw(positional=2)),
        used_in=_SHIMS,
        vllm=">=0.33",
    ),
    _other("MultiprocExecutor.vllm_config", f"{_EXECUTOR}.vllm_config", "attribute", _SHIMS, vllm=">=0.29"),
    _other("Request.num_prompt_tokens", "vllm.v1.request:Request.num_prompt_tokens", "attribute", _SHIMS),
    _other("Request.request_id", "vllm.v1.request:Request.request_id", "attribute", _SHIMS),
    _other("NewRequestData.req_id", "vllm.v1.core.sched.output:NewRequestData.req_id", "field", _SHIMS),
    _other("transformers.AutoConfig", "transformers:AutoConfig", "name", _GENERATOR, "global:AutoConfig"),
    _other("transformers.AutoTokenizer", "transformers:AutoTokenizer", "name", _GENERATOR, "global:AutoTokenizer"),
    _other("torch.cuda.mem_get_info", "torch.cuda:mem_get_info", "name", _GENERATOR, "global:torch", "<0.4"),
    _other("torch.cuda.empty_cache", "torch.cuda:empty_cache", "name", _GENERATOR, "global:torch", "<0.4"),
    _other("mem_get_info", "torch:get_device_module", "name", "utils/util.py", "global:mem_get_info", ">=0.4,<0.5"),
    _other(
        "torch.accelerator.current_accelerator",
        "torch.accelerator:current_accelerator",
        "name",
        "utils/util.py",
        speculators=">=0.4,<0.5",
    ),
    _other(
        "torch.accelerator.current_device_index",
        "torch.accelerator:current_device_index",
        "name",
        "utils/util.py",
        speculators=">=0.4,<0.5",
    ),
    _other("vllm.__version__", "vllm:__version__", "name", "data_generation/config_generator.py"),
    _other("RequestStatus", "vllm.v1.request:RequestStatus", "name", _GENERATOR),
    _other(
        "VllmHiddenStatesGenerator.__init__",
        f"{GENERATOR_MODULE}:VllmHiddenStatesGenerator.__init__",
        "call",
        _GENERATOR,
        "generator.__init__",
    ),
    _other(
        "VllmHiddenStatesGenerator.__del__",
        f"{GENERATOR_MODULE}:VllmHiddenStatesGenerator.__del__",
        "call",
        _GENERATOR,
        "generator.__del__",
    ),
    _other(
        "VllmHiddenStatesGenerator._setup_capture",
        f"{GENERATOR_MODULE}:VllmHiddenStatesGenerator._setup_capture",
        "call",
        _GENERATOR,
        "generator._setup_capture",
    ),
    _other(
        "VllmHiddenStatesGenerator.generate",
        f"{GENERATOR_MODULE}:VllmHiddenStatesGenerator.generate",
        "call",
        _GENERATOR,
        "generator.generate",
    ),
)

_MODEL = "vllm.model_executor.models.llama:LlamaModel"
_GROUP = "vllm.distributed.parallel_state:GroupCoordinator"
_SETUP = "HiddenStatesWorkerExtension._setup_hidden_states_capture"

_WORKER_NAMES = (
    # The replaced forward of the model: the only user of these goes where capture goes by hooks.
    _call("get_pp_group", "vllm.distributed:get_pp_group", "use", ("", _kw()), used_in=_WORKER),
    _call("get_tp_group", "vllm.distributed:get_tp_group", "use", ("", _kw()), used_in=_WORKER),
    _other("GroupCoordinator.is_first_rank", f"{_GROUP}.is_first_rank", "attribute", _WORKER, through=_SETUP),
    _other("GroupCoordinator.is_last_rank", f"{_GROUP}.is_last_rank", "attribute", _WORKER, through=_SETUP),
    _other("GroupCoordinator.rank_in_group", f"{_GROUP}.rank_in_group", "attribute", _WORKER, through=_SETUP),
    _call("IntermediateTensors", "vllm.sequence:IntermediateTensors", "use", ("", _kw(positional=1)), used_in=_WORKER),
    _call("supports_eagle3", "vllm.model_executor.models.interfaces:supports_eagle3", "use", ("", _kw(positional=1)),
          used_in=_WORKER, speculators="<0.4"),
    _call("model.get_input_embeddings", f"{_MODEL}.get_input_embeddings", "use", ("", _kw(positional=1)),
          used_in=_WORKER, speculators="<0.4", through=_SETUP),
    _call("model.embed_input_ids", f"{_MODEL}.embed_input_ids", "use", ("", _kw(positional=1)),
          used_in=_WORKER, speculators=">=0.4,<0.5", through=_SETUP),
    _other("model.start_layer", f"{_MODEL}.start_layer", "attribute", _WORKER, through=_SETUP),
    _other("model.end_layer", f"{_MODEL}.end_layer", "attribute", _WORKER, through=_SETUP),
    _other("model.norm", f"{_MODEL}.norm", "attribute", _WORKER, through=_SETUP),
    _call("decoder layer", "vllm.model_executor.models.llama:LlamaDecoderLayer.forward", "use",
          ("", _kw("hidden_states", "positions", "residual")), used_in=_WORKER, through=_SETUP),
    # What capture by hooks needs of a model; these stand for the families that the live cases run.
    _other("model.layers", f"{_MODEL}.layers", "attribute", _WORKER),
    _other("model.embed_tokens", f"{_MODEL}.embed_tokens", "attribute", _SHIMS),
    _other("causal model.model", "vllm.model_executor.models.llama:LlamaForCausalLM.model", "attribute", _WORKER),
    _call("Llama layer", "vllm.model_executor.models.llama:LlamaDecoderLayer.forward", "use",
          ("", _kw("positions", "hidden_states", "residual")), used_in=_SHIMS),
    _call("Qwen3 layer", "vllm.model_executor.models.qwen3:Qwen3DecoderLayer.forward", "use",
          ("", _kw("positions", "hidden_states", "residual")), used_in=_SHIMS),
    _call("DeepSeek layer", "vllm.model_executor.models.deepseek_v2:DeepseekV2DecoderLayer.forward", "use",
          ("", _kw("positions", "hidden_states", "residual")), used_in=_SHIMS),
    _other("DeepSeek model.layers", "vllm.model_executor.models.deepseek_v2:DeepseekV2Model.layers", "attribute",
           _SHIMS),
    _other("DeepSeek model.embed_tokens", "vllm.model_executor.models.deepseek_v2:DeepseekV2Model.embed_tokens",
           "attribute", _SHIMS),
    _call("multimodal get_language_model",
          "vllm.model_executor.models.interfaces:SupportsMultiModal.get_language_model", "use", ("", _kw()),
          used_in=_WORKER, speculators=">=0.4,<0.5"),
    _other("Worker.model_runner", "vllm.v1.worker.gpu_worker:Worker.model_runner", "attribute", _WORKER),
    _other("Worker.rank", "vllm.v1.worker.gpu_worker:Worker.rank", "attribute", _SHIMS),
    _other("GPUModelRunner.model", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.model", "attribute", _WORKER),
    _other("Worker.get_kv_cache_spec", "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec", "rpc", _GENERATOR),
    _other("GPUModelRunner.get_model", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model", "attribute", _SHIMS),
    _other("GPUModelRunner.execute_model", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model", "attribute",
           _SHIMS),
    _other("GPUModelRunner.input_batch", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.input_batch", "attribute",
           _WORKER),
    _other("InputBatch.req_ids", "vllm.v1.worker.gpu_input_batch:InputBatch.req_ids", "attribute", _SHIMS),
    _other("InputBatch.req_id_to_index", "vllm.v1.worker.gpu_input_batch:InputBatch.req_id_to_index", "attribute",
           _WORKER, speculators=">=0.4,<0.5"),
    _other("V2 GPUModelRunner.execute_model", "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
           "attribute", _SHIMS, vllm=">=0.12"),
    _other("V2 GPUModelRunner.prepare_inputs", "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs",
           "attribute", _SHIMS, vllm=">=0.12"),
    _other("V2 GPUModelRunner.req_states", "vllm.v1.worker.gpu.model_runner:GPUModelRunner.req_states", "attribute",
           _SHIMS, vllm=">=0.12"),
    _other("V2 InputBatch.req_ids", "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids", "field", _SHIMS,
           vllm=">=0.12"),
    _other("HiddenStatesWorkerExtension._setup_hidden_states_capture",
           f"{WORKER_MODULE}:HiddenStatesWorkerExtension._setup_hidden_states_capture", "call", _WORKER,
           "worker._setup_hidden_states_capture"),
    _other("HiddenStatesWorkerExtension._reset_capture", f"{WORKER_MODULE}:HiddenStatesWorkerExtension._reset_capture",
           "call", _WORKER, "worker._reset_capture"),
    _other("HiddenStatesWorkerExtension._get_captured_states",
           f"{WORKER_MODULE}:HiddenStatesWorkerExtension._get_captured_states", "call", _WORKER,
           "worker._get_captured_states"),
    _call("WorkerProc.enqueue_output", "vllm.v1.executor.multiproc_executor:WorkerProc.enqueue_output", "import",
          ("", _kw(positional=1)), used_in=_SHIMS),
    _other("load_general_plugins", "vllm.plugins:load_general_plugins", "name", _SHIMS),
)  # fmt: skip

_IMPORT_NAMES = (
    _other("vllm.utils.hashing", "vllm.utils.hashing", "module", _GENERATOR, "import", ">=0.4,<0.5"),
    _other("speculators' generator", GENERATOR_MODULE, "module", "(yours)", "import", ">=0.5"),
    _other("modeling_attn_mask_utils", "transformers.modeling_attn_mask_utils", "module", "models/eagle.py", "import"),
    _other("configuration_utils.torch", "transformers.configuration_utils:torch", "annotation", "config.py", "import"),
)

# What speculators imports of transformers: module, names, file, releases of speculators. None of these has
# ever needed a row; they are here so that the first one that does is seen before it is installed.
_TRANSFORMERS = (
    (
        "transformers",
        "AutoModelForCausalLM Cache DynamicCache GenerationConfig GenerationMixin "
        "LlamaConfig PreTrainedModel PreTrainedTokenizer PretrainedConfig",
        "model.py",
        "<0.5",
    ),
    ("transformers", "get_cosine_schedule_with_warmup get_linear_schedule_with_warmup", "train/trainer.py", "<0.5"),
    ("transformers", "__version__", "data_generation/config_generator.py", "<0.5"),
    ("transformers.generation.logits_process", "LogitsProcessorList", "model.py", "<0.5"),
    ("transformers.generation.stopping_criteria", "StoppingCriteriaList", "model.py", "<0.5"),
    ("transformers.generation.streamers", "BaseStreamer", "model.py", "<0.5"),
    ("transformers.generation.utils", "GenerateOutput", "model.py", "<0.5"),
    ("transformers.modeling_attn_mask_utils", "_prepare_4d_causal_attention_mask", "models/eagle.py", "<0.5"),
    ("transformers.modeling_outputs", "CausalLMOutputWithPast", "models/eagle.py", "<0.5"),
    ("transformers.modeling_utils", "AttentionInterface", "models/eagle3/attention.py", "<0.5"),
    ("transformers.modeling_utils", "PreTrainedModel", "train/checkpointer.py", "<0.5"),
    ("transformers.models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING", "models/eagle.py", "<0.5"),
    ("transformers.models.llama.configuration_llama", "LlamaConfig", "models/eagle3/config.py", "<0.5"),
    (
        "transformers.models.llama.modeling_llama",
        "LlamaDecoderLayer LlamaMLP LlamaRMSNorm LlamaRotaryEmbedding apply_rotary_pos_emb repeat_kv",
        "models/base_components.py",
        "<0.5",
    ),
    (
        "transformers.models.qwen3.configuration_qwen3",
        "Qwen3Config",
        "models/eagle3/model_definitions.py",
        ">=0.4,<0.5",
    ),
    (
        "transformers.models.qwen3.modeling_qwen3",
        "Qwen3DecoderLayer Qwen3RMSNorm Qwen3RotaryEmbedding",
        "models/base_components.py",
        ">=0.4,<0.5",
    ),
    ("transformers.processing_utils", "Unpack", "models/eagle3/model_definitions.py", "<0.5"),
    ("transformers.utils", "is_torch_npu_available", "utils/util.py", ">=0.4,<0.5"),
    ("transformers.utils.generic", "TransformersKwargs", "models/eagle3/model_definitions.py", "<0.5"),
)
_TRANSFORMERS_NAMES = tuple(
    _other(f"{module}.{name}", f"{module}:{name}", "name", used_in, speculators=speculators)
    for module, names, used_in, speculators in _TRANSFORMERS
    for name in names.split()
)

TOUCHPOINTS: tuple[Touchpoint, ...] = (
    *_GENERATOR_CALLS,
    *_GENERATOR_NAMES,
    *_WORKER_NAMES,
    *_IMPORT_NAMES,
    *_TRANSFORMERS_NAMES,
)


@lru_cache(maxsize=1)
def by_key() -> dict[str, Touchpoint]:
    return {t.key: t for t in TOUCHPOINTS}


def used_by(speculators: str | None, touchpoints: Iterable[Touchpoint] = TOUCHPOINTS) -> list[Touchpoint]:
    """The touchpoints that this release of speculators (with its shims) uses."""
    return [t for t in touchpoints if within(speculators, t.speculators)]
