import torch
from transformers import AutoConfig, AutoTokenizer
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_spec,
    get_kv_cache_config_from_groups,
    unify_hybrid_kv_cache_specs,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from speculators import VERSION

NEWER = VERSION >= (0, 4)
if NEWER:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    from speculators.utils.util import mem_get_info


class VllmHiddenStatesGenerator:
    def __init__(
        self, model_path, layer_ids=None, max_model_len=64, gpu_memory_utilization=0.8, tensor_parallel_size=1
    ):
        self.layer_ids, self._request_counter = layer_ids, 0
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.config = AutoConfig.from_pretrained(model_path, trust_remote_code=True)
        self.vllm_config = self._create_vllm_config(model_path, max_model_len, gpu_memory_utilization)
        self.executor = MultiprocExecutor(vllm_config=self.vllm_config)
        self._setup_capture()
        specs = self.executor.collective_rpc("get_kv_cache_spec")[0]
        unify_hybrid_kv_cache_specs(specs)
        groups = _get_kv_cache_groups_uniform_spec(specs)
        free = mem_get_info()[0] if NEWER else torch.cuda.mem_get_info()[0]
        kv_cache_config = get_kv_cache_config_from_groups(
            vllm_config=self.vllm_config,
            kv_cache_groups=groups,
            available_memory=free,
            **({} if NEWER else {"kv_cache_specs": specs}),
        )
        self.vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.scheduler = Scheduler(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config=self.vllm_config),
            **({"block_size": 16} if NEWER else {}),
        )
        self.executor.initialize_from_config([kv_cache_config])
        if NEWER:
            function = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
            init_none_hash(function)
            self.block_hasher = get_request_block_hasher(self.vllm_config.cache_config.block_size, function)

    def _create_vllm_config(self, model, max_model_len, gpu_memory_utilization):
        caching = {"enable_prefix_caching": False} if NEWER else {}
        kind = {"is_encoder_decoder": False} if NEWER else {}
        return VllmConfig(
            model_config=ModelConfig(
                model=model,
                tokenizer=model,
                trust_remote_code=True,
                dtype="auto",
                max_model_len=max_model_len,
                enforce_eager=True,
            ),
            cache_config=CacheConfig(block_size=16, gpu_memory_utilization=gpu_memory_utilization, **caching),
            parallel_config=ParallelConfig(
                tensor_parallel_size=1,
                worker_extension_cls="speculators.data_generation.custom_worker.HiddenStatesWorkerExtension",
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=32, max_model_len=max_model_len, max_num_batched_tokens=8192, **kind
            ),
            device_config=DeviceConfig(),
            load_config=LoadConfig(),
        )

    def _setup_capture(self):
        self.executor.collective_rpc("_setup_hidden_states_capture", args=(self.layer_ids,))

    def generate(self, token_ids):
        """Results in the order of the ids as text, as speculators 0.4 has them."""
        prompts = {f"req_{self._request_counter}_{index}": prompt for index, prompt in enumerate(token_ids)}
        self._request_counter += 1
        hasher = {"block_hasher": self.block_hasher} if NEWER else {}
        self.executor.collective_rpc("_reset_capture")
        for name, prompt in prompts.items():
            request = Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
                pooling_params=None,
                eos_token_id=1,
                arrival_time=0.0,
                **hasher,
            )
            self.scheduler.add_request(request)
        while (step := self.scheduler.schedule()).total_num_scheduled_tokens:
            self.executor.execute_model(step)
            self.executor.sample_tokens(None)
        self.scheduler.finish_requests(list(prompts), RequestStatus.FINISHED_ABORTED)
        states = self.executor.collective_rpc("_get_captured_states", args=(list(prompts),), unique_reply_rank=0)
        ascending = sorted(set(self.layer_ids))
        by_layer = {name: dict(zip(ascending, found, strict=True)) for name, found in states.items()}
        return [
            {
                "input_ids": torch.tensor(prompts[name]),
                "hidden_states": [by_layer[name][i] for i in self.layer_ids],
                "loss_mask": None,
            }
            for name in sorted(prompts)
        ]

    def __del__(self):
        if hasattr(self, "executor"):
            self.executor.shutdown()
