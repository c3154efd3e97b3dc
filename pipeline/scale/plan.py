"""What a run needs in bytes, objects, network and money: arithmetic, each line from the one before."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline import disk


@dataclass(frozen=True)
class Model:
    """What of a model decides its states' size and its speed."""

    name: str
    states: int
    """States a token, the last one included."""
    hidden_size: int
    active_parameters: float
    """That work on each token."""
    weight_bytes: float
    gpus: int
    """Of one replica."""

    def bytes_per_token(self, store_dtype: str) -> float:
        """On disk, headers left out."""
        size = disk.RowSize(self.states, self.hidden_size, store_dtype)
        return (size.of(1 << 20) - size.of(0)) / (1 << 20)

    def tokens_per_s(self, flops_per_gpu: float, share: float) -> float:
        """Of one replica: two operations for each active parameter.

        Args:
            flops_per_gpu: operations per second that one GPU was measured to reach.
            share: what is left of it when a layer is split over GPUs.
        """
        return self.gpus * flops_per_gpu * share / (2 * self.active_parameters)


@dataclass(frozen=True)
class Prices:
    """In US dollars."""

    gpu_hour: float = 3.0
    storage_gb_month: float = 0.02


def objects(tokens: float, row_tokens: int, rows_per_file: int) -> int:
    """Files that hold the states."""
    return math.ceil(tokens / row_tokens / rows_per_file)


def gpu_cost(seconds: float, gpus: int, prices: Prices) -> float:
    """Of GPUs that are held all the time."""
    return seconds / 3600 * gpus * prices.gpu_hour


def month_cost(size: float, prices: Prices) -> float:
    """Of keeping so many bytes for a month."""
    return size / 1e9 * prices.storage_gb_month
