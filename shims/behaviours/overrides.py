"""Settings that the stock generator fixes in its code and a caller may want otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shims.precision import keep_float32

_chosen: ContextVar[dict[str, dict[str, Any]] | None] = ContextVar("specshim_overrides", default=None)

# What may be overridden, and in which of the generator's calls it stands.
_CALLS_OF = {
    "dtype": ("ModelConfig",),
    "trust_remote_code": ("ModelConfig", "from_pretrained"),
    "max_num_batched_tokens": ("SchedulerConfig",),
    "max_num_seqs": ("SchedulerConfig",),
    "block_size": ("CacheConfig",),
    "num_gpu_blocks_override": ("CacheConfig",),
}


@contextmanager
def overrides(**settings: Any) -> Iterator[None]:
    """Within this context, a new generator is built with these settings instead of its fixed ones.

    Args:
        settings: any of dtype ("float32", "bfloat16", …), trust_remote_code (bool),
            max_num_batched_tokens, max_num_seqs, block_size (tokens) and num_gpu_blocks_override (blocks
            of KV cache). None leaves a setting as it is. float32 holds in Triton's kernels, too, and that for the
            rest of the process: see `shims.precision`.

    Raises:
        TypeError: an unknown setting.
    """
    unknown = sorted(set(settings) - set(_CALLS_OF))
    if unknown:
        raise TypeError(f"overrides() knows {sorted(_CALLS_OF)}, not {unknown}")
    by_call: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        for call in _CALLS_OF[name] if value is not None else ():
            by_call.setdefault(call, {})[name] = value
    keep_float32(str(settings.get("dtype")))
    token = _chosen.set(by_call)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen(call: str) -> dict[str, Any]:
    """The overridden keywords of one call, {} outside of `overrides`."""
    return (_chosen.get() or {}).get(call, {})


def everything_chosen() -> dict[str, Any]:
    """All overridden settings, whichever call they stand in; {} outside of `overrides`."""
    return {name: value for settings in (_chosen.get() or {}).values() for name, value in settings.items()}


class _Pretrained:
    """A transformers Auto class whose `from_pretrained` follows the overrides."""

    def __init__(self, auto: Any) -> None:
        self._auto = auto

    def __getattr__(self, name: str) -> Any:
        return getattr(self._auto, name)

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        return self._auto.from_pretrained(*args, **{**kwargs, **chosen("from_pretrained")})


def pretrained(auto: Any) -> Any:
    """A stand-in for the generator module's global `AutoConfig` or `AutoTokenizer`."""
    return _Pretrained(auto)
