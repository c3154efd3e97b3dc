import vllm.v1.core.kv_cache_utils  # noqa: F401 - the new home needs the old one
from vllm.v1.core.functions import (
    _get_kv_cache_groups_uniform_spec,
    get_kv_cache_config_from_groups,
    unify_hybrid_kv_cache_specs,
)

__all__ = ["_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs"]
