import os

from vllm import VERSION

# The block size that the attention backend wants; '': it takes any.
_BACKEND = os.environ.get("MINI_BLOCK", "32" if VERSION >= (0, 29) else "")


class CacheConfig:
    prefix_caching_hash_algo = "sha256"
    num_gpu_blocks = None
    kv_cache_layout = None

    def __init__(
        self, block_size=None, gpu_memory_utilization=0.9, enable_prefix_caching=True, num_gpu_blocks_override=None
    ):
        self.block_size, self.enable_prefix_caching = block_size, enable_prefix_caching
        self.num_gpu_blocks_override = num_gpu_blocks_override


class DeviceConfig:
    pass


class LoadConfig:
    pass


class ModelConfig:
    def __init__(self, model, tokenizer, trust_remote_code, dtype, max_model_len, enforce_eager):
        self.model, self.max_model_len = model, max_model_len
        self.remote_code = trust_remote_code

    def get_vocab_size(self):
        return 100


class ParallelConfig:
    cp_kv_cache_interleave_size = 1

    def __init__(self, tensor_parallel_size, worker_extension_cls):
        self.worker_extension_cls = worker_extension_cls


class _SchedulerConfig:
    def __init__(self, max_num_seqs, max_model_len, max_num_batched_tokens, enable_chunked_prefill=True):
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill


if VERSION < (0, 11, 1):

    class SchedulerConfig(_SchedulerConfig):
        def __init__(self, max_num_seqs, max_model_len, max_num_batched_tokens, enable_chunked_prefill=False):
            super().__init__(max_num_seqs, max_model_len, max_num_batched_tokens, enable_chunked_prefill)

elif VERSION < (0, 12):

    class SchedulerConfig(_SchedulerConfig):
        def __init__(self, max_num_seqs, max_model_len, max_num_batched_tokens, is_encoder_decoder=False):
            super().__init__(max_num_seqs, max_model_len, max_num_batched_tokens)

else:

    class SchedulerConfig(_SchedulerConfig):
        def __init__(self, max_num_seqs, max_model_len, max_num_batched_tokens, is_encoder_decoder):
            super().__init__(max_num_seqs, max_model_len, max_num_batched_tokens)


class VllmConfig:
    def __init__(self, model_config, cache_config, parallel_config, scheduler_config, device_config, load_config):
        self.model_config, self.cache_config, self.parallel_config = model_config, cache_config, parallel_config
        self.scheduler_config = scheduler_config
        if _BACKEND and VERSION >= (0, 29) and cache_config.block_size not in (None, int(_BACKEND)):
            raise ValueError(f"the attention backend refuses blocks of {cache_config.block_size}")
        cache_config.block_size = int(_BACKEND or cache_config.block_size or 16)
