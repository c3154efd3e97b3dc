"""Rows of hidden states as the trainer's collate function expects them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.formats.stores import RowStore

Item = dict[str, Any]


class StateDataset:
    """Rows by index, for a torch DataLoader.

    An item holds ``hidden_states`` [T, 3H] (the auxiliary layers side by side),
    ``verifier_last_hidden_states`` [T, H], ``input_ids`` and ``loss_mask`` int64 [T],
    ``position_ids`` [T] and ``lengths`` [1], passed through ``align`` (speculators' own shift of
    tokens against states, which shortens a row by one).
    """

    def __init__(
        self,
        store: RowStore,
        indices: Sequence[int],
        lengths: Sequence[int],
        align: Callable[[Item], Item],
        noise: Callable[[Item], Item] | None = None,
    ) -> None:
        """Take the rows ``indices`` of ``store``.

        Args:
            lengths: tokens of each of these rows, as stored.
            noise: applied before ``align``; None for validation.
        """
        self._store, self._indices, self._align, self._noise = store, list(indices), align, noise
        self.lengths = [length - 1 for length in lengths]
        """Tokens of each item, after the shift."""

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> Item:
        import torch

        row = self._store.read(self._indices[position])
        states = row.states.float()
        tokens = len(row.token_ids)
        item: Item = {
            "hidden_states": states[:, :-1].flatten(1),
            "verifier_last_hidden_states": states[:, -1],
            "input_ids": row.token_ids,
            "loss_mask": row.loss_mask,
            "lengths": torch.tensor([tokens], dtype=torch.long),
            "position_ids": torch.arange(tokens, dtype=torch.long),
        }
        return self._align(self._noise(item) if self._noise else item)


def split_rows(rows: Sequence[int], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Training and validation rows, both at least one where there are two.

    Args:
        share: of validation rows, 0 to 1.
    """
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    held_out = min(max(1, round(len(shuffled) * share)), len(shuffled) - 1)
    return sorted(shuffled[held_out:]), sorted(shuffled[:held_out])
