"""Settings that the stock generator fixes in its code and a caller may want otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_chosen: ContextVar[dict[str, dict[str, Any]] | None] = ContextVar("specshim_overrides", default=None)

# What may be overridden, and in which of the generator's calls it stands.
_CALL_OF = {
    "dtype": "ModelConfig",
    "trust_remote_code": "ModelConfig",
    "max_num_batched_tokens": "SchedulerConfig",
    "max_num_seqs": "SchedulerConfig",
    "block_size": "CacheConfig",
    "num_gpu_blocks_override": "CacheConfig",
}


@contextmanager
def overrides(**settings: Any) -> Iterator[None]:
    """Within this context, a new generator is built with these settings instead of its fixed ones.

    Args:
        settings: any of dtype ("float32", "bfloat16", …), trust_remote_code (bool),
            max_num_batched_tokens, max_num_seqs, block_size (tokens) and num_gpu_blocks_override (blocks
            of KV cache). None leaves a setting as it is.

    Raises:
        TypeError: an unknown setting.
    """
    unknown = sorted(set(settings) - set(_CALL_OF))
    if unknown:
        raise TypeError(f"overrides() knows {sorted(_CALL_OF)}, not {unknown}")
    by_call: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if value is not None:
            by_call.setdefault(_CALL_OF[name], {})[name] = value
    token = _chosen.set(by_call)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen(call: str) -> dict[str, Any]:
    """The overridden keywords of one call, {} outside of `overrides`."""
    return (_chosen.get() or {}).get(call, {})
