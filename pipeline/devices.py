"""Which device, and which dtype on it? Asked before anything is loaded or written."""

from __future__ import annotations

from shims.errors import UsageError


def check_device(flag: str, device: str) -> None:
    """Check a device name of the command line, such as ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        UsageError: no such name, or no such device in this machine.
    """
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = None
    if wanted is None or wanted.type not in ("cpu", "cuda"):
        raise UsageError(flag, "cpu, cuda or cuda:N", repr(device), "use one of these")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        raise UsageError(flag, f"a device of this machine (it has {count} of them)", device, "use cpu, or another one")


def make_current(device: str) -> None:
    """Make a GPU that is named, as ``cuda:1``, the current one of this process from now on; another name does nothing.

    Pinned memory, timers and compiled kernels have no other: the process would be on the first GPU, too, or fail there.
    """
    if device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(torch.device(device))


def device_type(wanted: str) -> str:
    """``auto`` becomes ``cuda`` where there is a GPU, else ``cpu``; another name stays."""
    import torch

    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def computing_dtype(wanted: str, of_model: str) -> str:
    """The dtype to compute in.

    Args:
        wanted: as given; ``auto`` lets the machine decide.
        of_model: what the model's config names.
    """
    if wanted != "auto":
        return wanted
    try:
        import torch
    except ImportError:
        return of_model
    # On a CPU float32 is exact, and faster wherever bfloat16 instructions are missing.
    return of_model if torch.cuda.is_available() else "float32"
