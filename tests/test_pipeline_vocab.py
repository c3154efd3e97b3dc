"""Draft and target vocabulary agree in both directions, whatever was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from pipeline.vocab import fault_of, load_mapping, mapping_arrays, select_tokens  # noqa: E402
from shims.errors import UsageError  # noqa: E402


@st.composite
def counts_and_size(draw: st.DrawFn) -> tuple[dict[int, int], int, int]:
    target = draw(st.integers(1, 60))
    counts = draw(st.dictionaries(st.integers(0, target - 1), st.integers(1, 5)))
    return counts, draw(st.integers(1, target)), target


@given(counts_and_size())
def test_offsets_name_the_marked_tokens(case: tuple[dict[int, int], int, int]) -> None:
    counts, size, target = case
    d2t, t2d = mapping_arrays(select_tokens(counts, size, target), target)
    assert (d2t.dtype, d2t.shape, t2d.dtype, t2d.shape) == (np.int64, (size,), np.bool_, (target,))
    assert (np.arange(size) + d2t).tolist() == np.flatnonzero(t2d).tolist()
    assert fault_of(d2t, t2d) is None


@given(counts_and_size())
def test_no_token_left_out_is_more_frequent_than_one_taken(case: tuple[dict[int, int], int, int]) -> None:
    counts, size, target = case
    chosen = set(select_tokens(counts, size, target))
    assert len(chosen) == size
    left_out = [counts[token] for token in counts if token not in chosen]
    if left_out:  # then nothing unseen was taken, and nothing rarer
        assert min(counts.get(token, 0) for token in chosen) >= max(left_out)


def test_padding_takes_the_smallest_unseen_ids() -> None:
    assert select_tokens({5: 2, 1: 9}, 4, 8) == [0, 1, 2, 5]


@pytest.mark.parametrize(("size", "counts"), [(9, {}), (0, {}), (2, {8: 1}), (2, {-1: 1})])
def test_a_size_or_token_outside_the_target_vocabulary_is_refused(size: int, counts: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="target vocabulary"):
        select_tokens(counts, size, 8)


def test_a_pair_that_disagrees_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    d2t, t2d = mapping_arrays([1, 3], 5)
    np.save(tmp_path / "d2t.npy", d2t + 1)
    np.save(tmp_path / "t2d.npy", t2d)
    with pytest.raises(UsageError, match="maps to 2, t2d says 1"):
        load_mapping(tmp_path)


def test_a_pickled_array_is_never_loaded(tmp_path) -> None:  # type: ignore[no-untyped-def]
    np.save(tmp_path / "d2t.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "t2d.npy", np.zeros(3, dtype=np.bool_))
    with pytest.raises(UsageError, match="allow_pickle=False"):
        load_mapping(tmp_path)
