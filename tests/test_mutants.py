"""A few hundred damaged files to every reader; `nox -s mutate-files` feeds ten thousand to each."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("pyarrow")

from mutants import attack, readers

NAMES = (
    "hs_safetensors", "sharded", "speculators-0.4", "specforge", "d2t.npy", "token_freq.pt", "tokenized_data.jsonl",
    "conversations.jsonl", "conversations.parquet", "manifest.json",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_in_words(tmp_path: Path, name: str) -> None:
    found = readers(tmp_path)
    assert set(found) == set(NAMES)
    outcomes, faults = attack(name, found[name], 300, 1, tmp_path)
    assert not faults
    assert outcomes["refused"] > 20


def test_a_role_of_bytes_is_told_in_words(tmp_path: Path) -> None:
    """What a damaged Parquet file once gave."""
    from pipeline.conversations import RowFault, conversation_of

    with pytest.raises(RowFault, match="bytes"):
        conversation_of({"messages": [{"role": b"\xff", "content": "x"}]}, "1")
