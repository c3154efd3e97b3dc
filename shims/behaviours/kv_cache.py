"""KV-cache planning: what the engine core settles before it builds a scheduler, for a hand-built engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def specs_of_groups(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Layer name -> KV-cache spec, read back from the call's groups."""
    return {layer: group.kv_cache_spec for group in kwargs["kv_cache_groups"] for layer in group.layer_names}


def block_size_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens a block, as the KV cache really has them."""
    return block_size(kwargs["kv_cache_config"])


def block_size(kv_cache_config: Any) -> int:
    """Tokens a block: the smallest over the groups, as the engine core takes it."""
    return min(int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups)


def publish_layout_after_specs(
    wrapped: Callable[..., Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Once the workers have told their KV-cache specs, settle one layout and tell it to them."""
    reply = wrapped(*args, **kwargs)
    if args[:1] == ("get_kv_cache_spec",):
        executor.set_kv_cache_layout(_resolve(executor, reply).name)
    return reply


def publish_layout_and_interleave_after_specs(
    wrapped: Callable[..., Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """As `publish_layout_after_specs`, with the context-parallel interleave size of the configuration."""
    reply = wrapped(*args, **kwargs)
    if args[:1] == ("get_kv_cache_spec",):
        interleave = executor.vllm_config.parallel_config.cp_kv_cache_interleave_size
        executor.set_kv_cache_layout(_resolve(executor, reply).name, interleave)
    return reply


def _resolve(executor: Any, specs_by_worker: list[dict[str, Any]]) -> Any:
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    specs = [spec for specs in specs_by_worker for spec in specs.values()]
    return resolve_kv_cache_layout(executor.vllm_config, executor.get_supported_kv_cache_layouts(), specs)
