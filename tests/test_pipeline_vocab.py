"""Draft and target vocabulary agree in both directions, whatever was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from pipeline import manifest  # noqa: E402
from pipeline.config import VocabConfig  # noqa: E402
from pipeline.model_info import sha256_file  # noqa: E402
from pipeline.vocab import (  # noqa: E402
    VocabResult,
    build_vocab,
    fault_of,
    load_mapping,
    mapping_arrays,
    select_tokens,
)
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


@given(counts_and_size(), st.data())
def test_special_tokens_are_always_kept(case: tuple[dict[int, int], int, int], data: st.DataObject) -> None:
    counts, size, target = case
    special = data.draw(st.sets(st.integers(0, target - 1), max_size=size))
    chosen = select_tokens(counts, size, target, special)
    assert special <= set(chosen) and len(set(chosen)) == size
    left_out = [counts[token] for token in counts if token not in chosen]
    if left_out:
        assert min(counts.get(token, 0) for token in set(chosen) - special or {target}) >= max(left_out) or (
            set(chosen) == special
        )


def test_more_special_tokens_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match="3 special tokens"):
        select_tokens({}, 2, 8, {1, 2, 3})


class Folder:
    """A prepared folder of two special and a few ordinary tokens, and the vocabulary made of it."""

    def __init__(self, root: Path, fingerprint: str = "f" * 64) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        torch.save({1: 5, 3: 9, 6: 1}, root / "token_freq.pt")
        model = {"path": "m", "fingerprint": fingerprint, "vocab_size": 8, "num_layers": 8, "hidden_size": 4}
        record = manifest.compose(
            "prepare",
            model=model,
            counts={"rows": 3},
            inputs={},
            special_token_ids=[0, 7],
            outputs={"token_freq.pt": sha256_file(root / "token_freq.pt")},
        )
        manifest.write(root, record)

    def build(self, size: int = 4) -> VocabResult:
        return build_vocab(VocabConfig(self.root, size))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "prepared")


def test_names_carry_the_size_and_coverage_is_the_share_of_trained_tokens(folder: Folder) -> None:
    result = folder.build()
    assert (result.seen, result.special, result.padded) == (3, 2, 0)
    assert result.coverage == pytest.approx(14 / 15)
    d2t, t2d = load_mapping(folder.root, fingerprint="f" * 64)
    assert (np.arange(4) + d2t).tolist() == np.flatnonzero(t2d).tolist() == [0, 1, 3, 7]
    assert {path.name for path in folder.root.glob("*-4.*")} == {"d2t-4.npy", "t2d-4.npy", "vocab-4.json"}


def test_a_second_size_stands_beside_the_first_and_has_to_be_named(folder: Folder) -> None:
    folder.build(4)
    folder.build(6)
    with pytest.raises(UsageError, match="those of 4, 6 tokens"):
        load_mapping(folder.root)
    assert len(load_mapping(folder.root, size=6)[0]) == 6


def test_another_models_mapping_is_refused(folder: Folder) -> None:
    folder.build()
    with pytest.raises(UsageError, match=r"model\.fingerprint"):
        load_mapping(folder.root, fingerprint="a" * 64)


def test_a_file_that_changed_since_is_refused(folder: Folder) -> None:
    folder.build()
    np.save(folder.root / "d2t-4.npy", np.zeros(4, dtype=np.int64))
    with pytest.raises(UsageError, match="sha256"):
        load_mapping(folder.root)
    (folder.root / "d2t-4.npy").unlink()
    with pytest.raises(UsageError, match="no such file"):
        load_mapping(folder.root)


def test_counts_of_another_run_are_refused(folder: Folder) -> None:
    torch.save({1: 1}, folder.root / "token_freq.pt")
    with pytest.raises(UsageError, match="sha256"):
        folder.build()


def test_files_of_nobody_knows_whom_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "d2t.npy", np.zeros(3, dtype=np.int64))
    with pytest.raises(UsageError, match=r"d2t\.npy without a manifest"):
        load_mapping(tmp_path)


def test_a_pair_that_disagrees_is_refused(folder: Folder) -> None:
    folder.build()
    d2t, t2d = mapping_arrays([1, 3, 4, 5], 8)
    replace_arrays(folder.root, d2t + 1, t2d)
    with pytest.raises(UsageError, match="maps to 2, t2d says 1"):
        load_mapping(folder.root)


def test_a_pickled_array_is_never_loaded(folder: Folder) -> None:
    folder.build()
    replace_arrays(folder.root, np.array([{}], dtype=object), np.zeros(3, dtype=np.bool_))
    with pytest.raises(UsageError, match="allow_pickle=False"):
        load_mapping(folder.root)


def replace_arrays(root: Path, d2t: Any, t2d: Any) -> None:
    """Put other arrays in place, and let the manifest vouch for them."""
    record = json.loads((root / "vocab-4.json").read_text())
    for name, array in (("d2t-4.npy", d2t), ("t2d-4.npy", t2d)):
        np.save(root / name, array, allow_pickle=True)
        record["outputs"][name] = sha256_file(root / name)
    (root / "vocab-4.json").write_text(json.dumps(record))
