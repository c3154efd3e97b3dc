from vllm import VERSION

if VERSION < (0, 33):
    from vllm.v1.core.functions import (
        _get_kv_cache_groups_uniform_spec,
        get_kv_cache_config_from_groups,
        unify_hybrid_kv_cache_specs,
    )

    __all__ = ["_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs"]


def get_request_block_hasher(block_size, hash_function):
    return hash_function


def init_none_hash(hash_function):
    pass
