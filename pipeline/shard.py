"""``--shard i/n``: which rows of the data set this process computes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shims.errors import UsageError


@dataclass(frozen=True)
class Shard:
    """The ``number``-th of ``of`` processes, counted from 1; 1/1 computes everything."""

    number: int = 1
    of: int = 1

    def owns(self, index: int, rows_per_file: int = 1) -> bool:
        """Whether row ``index`` is this process's; rows of one file belong to one process."""
        return (index // rows_per_file) % self.of == self.number - 1

    @property
    def alone(self) -> bool:
        """No other process shares the folder."""
        return self.of == 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def parse_shard(text: str | None) -> Shard:
    """The shard that ``i/n`` names; None is everything.

    Raises:
        UsageError: not two whole numbers with 1 <= i <= n.
    """
    if text is None:
        return Shard()
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.of:
        raise UsageError(
            "--shard", "i/n, the i-th of n processes, 1 <= i <= n", repr(text), "give e.g. --shard 1/4 to --shard 4/4"
        )
    return shard
