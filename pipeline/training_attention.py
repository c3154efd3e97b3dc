"""The attention a draft trains with: speculators' flex attention, or the same with a dense mask.

On a CPU flex_attention runs uncompiled, many times slower than a dense mask (torch 2.10), or has no backward pass at
all (2.13). Both read the same block mask.
"""

from __future__ import annotations

from typing import Any

DENSE_ATTENTION = "specshim_dense"
FLEX_ATTENTION = "simple_flex_attention"


def flex_attention_trains(device: str) -> bool:
    """Whether flex_attention can be differentiated on ``device``."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return query >= key

    inputs = [torch.zeros(1, 1, 128, 16, device=device, requires_grad=True) for _ in range(3)]
    try:
        mask = create_block_mask(causal, B=None, H=None, Q_LEN=128, KV_LEN=128, device=device)
        flex_attention(*inputs, block_mask=mask).sum().backward()
    except Exception:  # noqa: BLE001  any failure of the trial means: use the substitute
        return False
    return True


def dense_mask(block_mask: Any, queries: int, keys: int, device: Any) -> Any:
    """The block mask as a boolean tensor [1, 1, queries, keys], True where attention is allowed.

    Blocks the mask does not list are closed, and inside the listed ones its ``mask_mod``
    decides, exactly as flex_attention reads them.
    """
    import torch

    zero = torch.zeros((), dtype=torch.long, device=device)
    query, key = torch.arange(queries, device=device), torch.arange(keys, device=device)
    allowed = block_mask.mask_mod(zero, zero, query[:, None], key[None, :]).expand(queries, keys)
    blocks = block_mask.to_dense()[0, 0].to(device).bool()
    query_block, key_block = block_mask.BLOCK_SIZE
    listed = blocks.repeat_interleave(query_block, 0).repeat_interleave(key_block, 1)[:queries, :keys]
    return (allowed & listed)[None, None]


def dense_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **_unused: Any
) -> tuple[Any, None]:
    """The same attention as speculators' flex attention, computed with a dense mask.

    Args:
        query: [B, heads, Q, D].
        key: [B, kv heads, K, D]; value likewise.
        attention_mask: a BlockMask.

    Returns:
        [B, Q, heads, D], and no weights.
    """
    import torch

    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    mask = dense_mask(attention_mask, query.shape[2], key.shape[2], query.device)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def choose_attention(device: str) -> str:
    """Name of the attention to train with: speculators' flex attention, or the dense substitute."""
    if device.startswith("cuda") and flex_attention_trains(device):
        return FLEX_ATTENTION
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface().register(DENSE_ATTENTION, dense_attention)
    return DENSE_ATTENTION
