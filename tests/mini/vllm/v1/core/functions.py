"""Not vLLM's: the functions that its releases keep here or there."""

from types import SimpleNamespace

from vllm import VERSION


def unify_hybrid_kv_cache_specs(spec):
    pass


def _get_kv_cache_groups_uniform_spec(spec):
    return [SimpleNamespace(layer_names=list(spec), kv_cache_spec=next(iter(spec.values())))]


def _config(vllm_config, groups, memory):
    assert memory > 0
    blocks = vllm_config.cache_config.num_gpu_blocks_override or 1000
    return SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)


if VERSION < (0, 12):

    def get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, kv_cache_specs, available_memory):
        assert set(kv_cache_specs) == {name for group in kv_cache_groups for name in group.layer_names}
        return _config(vllm_config, kv_cache_groups, available_memory)

else:

    def get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, available_memory):
        return _config(vllm_config, kv_cache_groups, available_memory)
