from mini_scheduler import MiniScheduler

from vllm import VERSION


class _Scheduler(MiniScheduler):
    def __init__(self, vllm_config, kv_cache_config):
        super().__init__(
            budget=vllm_config.scheduler_config.max_num_batched_tokens,
            places=vllm_config.scheduler_config.max_num_seqs,
            blocks=kv_cache_config.num_blocks,
            block_size=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            prefix_caching=vllm_config.cache_config.enable_prefix_caching,
            chunked=vllm_config.scheduler_config.enable_chunked_prefill,
        )


if VERSION < (0, 11, 1):

    class Scheduler(_Scheduler):
        def __init__(self, vllm_config, kv_cache_config, structured_output_manager):
            super().__init__(vllm_config, kv_cache_config)

else:

    class Scheduler(_Scheduler):
        def __init__(self, vllm_config, kv_cache_config, structured_output_manager, block_size):
            super().__init__(vllm_config, kv_cache_config)
            if block_size != self.block_size:
                raise ValueError(f"the scheduler counts blocks of {block_size}, the cache has {self.block_size}")
