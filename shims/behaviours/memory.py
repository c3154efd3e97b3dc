"""How much memory the KV cache may take where no accelerator answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shims.errors import SpecshimError


def _ram() -> tuple[int, int]:
    """(available, total) RAM in bytes."""
    try:
        import psutil  # vLLM and speculators both bring it
    except ImportError:
        raise SpecshimError(
            "sizing the KV cache", "the free RAM of this machine", "psutil is not installed", "pip install psutil"
        ) from None
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def free_and_total(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """(free, total) bytes: the accelerator's answer, or the RAM's where there is no accelerator."""
    import torch

    # A CUDA build of torch names an accelerator on a machine that has none, so ask for the device itself.
    if not torch.accelerator.is_available():
        return _ram()
    free, total = wrapped(*args, **kwargs)
    return int(free), int(total)


class _Cuda:
    """`torch.cuda` with a memory query that answers on a machine without CUDA."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cuda, name)

    def mem_get_info(self, *args: Any) -> tuple[int, int]:
        return self._cuda.mem_get_info(*args) if self._cuda.is_available() else _ram()


class _Torch:
    """torch as the generator module sees it; torch itself stays as it is."""

    def __init__(self, torch: Any) -> None:
        self._torch, self.cuda = torch, _Cuda(torch.cuda)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def torch_facade(torch: Any) -> Any:
    """A stand-in for the generator module's global `torch`."""
    return _Torch(torch)
