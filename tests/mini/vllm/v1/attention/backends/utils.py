from types import SimpleNamespace


def resolve_kv_cache_layout(vllm_config, supported_layouts, kv_cache_specs=None):
    vllm_config.cache_config.kv_cache_layout = supported_layouts[0]
    return SimpleNamespace(name=supported_layouts[0])
