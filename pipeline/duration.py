"""About how long an extraction will take, said before the model loads."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pipeline.model_info import ModelInfo, tensor_shapes

_WORTH_MEASURING = 1e14
"""Floating-point operations below which any machine is done before a measurement pays."""
_SLOW = 1e10
"""Operations per second of a slow core, for a bound where nothing is measured."""
# In a process of its own: a CUDA context or an OpenMP pool in this one would be inherited by vLLM's workers.
_MEASURE = """
import sys, time, torch
cuda = torch.cuda.is_available()
size, device = (8192, "cuda") if cuda else (1024, "cpu")
a = torch.ones(size, size, dtype=getattr(torch, sys.argv[1]), device=device)
a @ a
best = float("inf")
for _ in range(4):
    start = time.perf_counter()
    b = a @ a
    if cuda:
        torch.cuda.synchronize()
    best = min(best, time.perf_counter() - start)
print(2 * size**3 / best)
"""


def active_parameters(model: ModelInfo) -> int:
    """Parameters that work on each token; of a mixture of experts, only its share."""
    text = model.config.get("text_config") or model.config
    experts = next((text[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)), 0)
    chosen = text.get("num_experts_per_tok") or experts
    total = 0.0
    for name, shape in tensor_shapes(model).items():
        routed = ".experts." in name and experts
        total += math.prod(shape) * (chosen / experts if routed else 1)
    return int(total)


def describe(model: ModelInfo, tokens: int, dtype: str, devices: int, previous: Mapping[str, Any] | None) -> str:
    """The time for ``tokens`` more tokens, in words.

    Args:
        devices: GPUs the model is spread over.
        previous: the folder's manifest; what an earlier run reached is the best estimate.
    """
    speed = (previous or {}).get("speed") or {}
    if speed.get("seconds") and speed.get("tokens"):
        rate = speed["tokens"] / speed["seconds"]
        return f"about {words(tokens / rate)} at the {rate:.0f} tokens/s of the last run here"
    work = 2.0 * active_parameters(model) * tokens
    if work < _WORTH_MEASURING:
        return f"less than {words(work / _SLOW)}, beside loading the model"
    peak = _measured(dtype)
    if peak is None:
        return f"unknown: {work:.1e} floating-point operations"
    best = work / (peak * devices)
    span = " to ".join(dict.fromkeys((words(best / 0.7), words(best / 0.1))))
    return (
        f"about {span}: {work:.1e} floating-point operations at 70 % to 10 % "
        f"of the {peak:.1e} per second that a matrix product reaches here"
    )


def _measured(dtype: str) -> float | None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, dtype], capture_output=True, text=True, check=True, timeout=120
        )
        return float(done.stdout.split()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None


def words(seconds: float) -> str:
    """A duration for a person."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(1, round(seconds))} s"
