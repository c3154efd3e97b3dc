"""The substitute attention computes what flex_attention computes; the split loses and shares no row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training_data import split_rows

torch = pytest.importorskip("torch")


@given(st.lists(st.integers(0, 999), unique=True, min_size=2, max_size=50), st.floats(0.01, 0.99), st.integers(0, 5))
def test_every_row_is_in_one_part_and_neither_is_empty(rows: list[int], share: float, seed: int) -> None:
    train, held_out = split_rows(rows, share, seed)
    assert train and held_out and sorted(train + held_out) == sorted(rows)


def document_mask(lengths: list[int], total: int):  # type: ignore[no-untyped-def]
    """Causal inside each document, with draft keys behind the real ones that see only themselves."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    owner = torch.cat([owner, torch.full((total - len(owner),), -1)])

    def allowed(_batch, _head, query, key):  # type: ignore[no-untyped-def]
        same = (owner[query] == owner[key % total]) & (owner[query] >= 0) & (query >= key)
        return same | (key % total == query)

    return allowed


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_dense_attention_equals_flex_attention(steps: int, heads: tuple[int, int]) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from pipeline.training_attention import dense_attention

    total = 256
    generator = torch.Generator().manual_seed(steps)
    query = torch.randn(1, heads[0], total, 16, generator=generator)
    key, value = (torch.randn(1, heads[1], total * steps, 16, generator=generator) for _ in range(2))
    mask = create_block_mask(
        document_mask([100, 90], total), B=None, H=None, Q_LEN=total, KV_LEN=total * steps, device="cpu"
    )
    wanted = flex_attention(query, key, value, block_mask=mask, scale=0.3, enable_gqa=heads[0] != heads[1])
    found, _ = dense_attention(None, query, key, value, mask, scaling=0.3)
    assert torch.allclose(found.transpose(1, 2), wanted, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_dense_attention_follows_speculators_own_masks(steps: int) -> None:
    pytest.importorskip("speculators")
    from speculators.models.eagle3.attention import create_combined_mask_mod, extend_mask_for_draft_tokens
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from pipeline.training_attention import dense_attention

    total = 384
    mask = create_block_mask(
        create_combined_mask_mod(torch.tensor([200, 7, 130]), total),
        B=None,
        H=None,
        Q_LEN=total,
        KV_LEN=total,
        device="cpu",
    )
    for _ in range(steps):
        mask = extend_mask_for_draft_tokens(mask)
    generator = torch.Generator().manual_seed(steps)
    query = torch.randn(1, 4, total, 16, generator=generator)
    key, value = (torch.randn(1, 2, total * (steps + 1), 16, generator=generator) for _ in range(2))
    wanted = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    found, _ = dense_attention(None, query, key, value, mask)
    assert torch.allclose(found.transpose(1, 2), wanted, atol=1e-5)


def test_dense_attention_can_be_differentiated() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    from pipeline.training_attention import dense_attention

    inputs = [torch.randn(1, 2, 128, 16, requires_grad=True) for _ in range(3)]
    mask = create_block_mask(document_mask([128], 128), B=None, H=None, Q_LEN=128, KV_LEN=128, device="cpu")
    dense_attention(None, *inputs, mask)[0].sum().backward()
    assert all(part.grad is not None and bool(part.grad.isfinite().all()) for part in inputs)
