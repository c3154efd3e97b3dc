"""Which rows are trained on, and which are held out."""

from __future__ import annotations

import random
from collections.abc import Sequence


def split_rows(rows: Sequence[int], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Training and validation rows, both at least one where there are two.

    Args:
        share: of validation rows, 0 to 1.
    """
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    held_out = min(max(1, round(len(shuffled) * share)), len(shuffled) - 1)
    return sorted(shuffled[held_out:]), sorted(shuffled[:held_out])
