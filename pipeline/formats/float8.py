"""States in half of bfloat16's bytes: float8 e4m3 with one scale per token and layer.

The scale maps a vector's largest magnitude to e4m3's largest number, 448 (Micikevicius et al.,
"FP8 Formats for Deep Learning", 2022). Three bits of mantissa are left, so an element is off by
at most 1/16 of itself, and a vector by about 2.6 % of its norm.
"""

from __future__ import annotations

from typing import Any

from pipeline.formats import StateRow

NAME = "float8_e4m3"
_LARGEST = 448.0


def compressed(row: StateRow) -> StateRow:
    """The row with float8 states and their scales; one that has them already is returned as it is."""
    import torch

    if row.scale is not None:
        return row
    states = row.states.float()
    largest = states.abs().amax(dim=-1)
    # A vector of zeros stays one; so small that its scale would vanish in float32 counts as zero.
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest)).clamp_min(2.0**-126)
    values = (states / scale[..., None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return StateRow(values, row.token_ids, row.loss_mask, row.row_id, scale, row.header)


def dense(row: StateRow) -> StateRow:
    """The row with bfloat16 states in place of float8 ones; any other row is returned as it is."""
    if row.scale is None:
        return row
    return StateRow(_expanded(row.states, row.scale), row.token_ids, row.loss_mask, row.row_id, None, row.header)


def _expanded(values: Any, scale: Any) -> Any:
    import torch

    return (values.float() * scale[..., None]).to(torch.bfloat16)
