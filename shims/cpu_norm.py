"""vLLM's RMSNorm on a CPU, for rows that do not lie one after the other.

The kernel of the CPU builds of 0.12 and 0.13 takes them for dense ones: vLLM's own answers are then wrong for models
that norm queries and keys (Qwen3) or parts of latent attention (DeepSeek), and so are their states:
https://github.com/vllm-project/vllm/blob/v0.13.0/csrc/cpu/layernorm.cpp. To go once 0.13 is no longer among the known
releases.
"""

from __future__ import annotations

from typing import Any

from shims.versions import detect, within


def mend() -> bool:
    """In a worker on a CPU: have the kernel given dense rows, if it needs them; returns whether it does."""
    if not within(detect().vllm, "<0.14"):
        return False
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm import _custom_ops

    kernel = _custom_ops.rms_norm
    if not _takes_for_dense(kernel):
        return False

    def rms_norm(out: Any, rows: Any, weight: Any, epsilon: float) -> None:
        kernel(out, rows.contiguous(), weight, epsilon)

    _custom_ops.rms_norm = rms_norm
    return True


def _takes_for_dense(kernel: Any) -> bool:
    """Whether strided rows are read as if they were dense ones."""
    import torch

    rows = torch.arange(1.0, 129.0).reshape(4, 32)[:, :16]
    found, wanted, weight = torch.empty(4, 16), torch.empty(4, 16), torch.ones(16)
    kernel(found, rows, weight, 1e-6)
    kernel(wanted, rows.contiguous(), weight, 1e-6)
    return not torch.allclose(found, wanted)
