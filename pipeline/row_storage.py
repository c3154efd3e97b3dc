"""A row as it is stored: rounded, or packed into float8; the last state normed where the format wants that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline.final_norm import FinalNorm
from pipeline.formats import StateRow, float8
from pipeline.formats.registry import NORMED
from pipeline.model_info import ModelInfo, read_model


@dataclass(frozen=True)
class Storage:
    """What happens to states between engine and disk."""

    store_dtype: str
    """``float32``, ``bfloat16``, ``float16`` or ``float8_e4m3``."""
    norm: FinalNorm | None

    @classmethod
    def of(cls, store_dtype: str, last_state: str, model: ModelInfo | str, trust_remote_code: bool) -> Storage:
        """Load the norm, where it is needed.

        Args:
            last_state: ``residual`` or ``normed``.
            model: or its folder.
        """
        if last_state != NORMED:
            return cls(store_dtype, None)
        return cls(store_dtype, FinalNorm(read_model(model) if isinstance(model, str) else model, trust_remote_code))

    def row(self, states: Any, token_ids: Any, loss_mask: Any, row_id: str) -> StateRow:
        """The row to write.

        Args:
            states: tensor [T, L, H].
            token_ids: int64 [T], a tensor or numbers.
            loss_mask: the same.
        """
        import torch

        row = StateRow(
            states=states if self.norm is None else self.norm.normed_last(states),
            token_ids=torch.as_tensor(token_ids, dtype=torch.int64),
            loss_mask=torch.as_tensor(loss_mask, dtype=torch.int64),
            row_id=row_id,
        )
        if self.store_dtype == float8.NAME:
            return float8.compressed(row)
        return replace(row, states=row.states.to(getattr(torch, self.store_dtype)))
