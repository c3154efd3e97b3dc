"""A row file is either exactly what was written or recognised as damaged; a bad state never passes."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipeline.content_checks import fault_of_states  # noqa: E402
from pipeline.formats import DamagedRow, StateRow, Wanted  # noqa: E402
from pipeline.formats.hs_safetensors import check_file, read_row, row_path, write_row  # noqa: E402

SHAPE = Wanted(num_layers=2, hidden_size=3)


def make_row(dtype: torch.dtype = torch.float32) -> StateRow:
    states = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    return StateRow(states, torch.arange(5), torch.tensor([0, 0, 1, 1, 1]), "row-a")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_is_exact(tmp_path: Path, dtype: str) -> None:
    row, path = make_row(getattr(torch, dtype)), row_path(tmp_path, 7)
    write_row(path, row, {"model_fingerprint": "f"})
    back = read_row(path)
    assert torch.equal(back.states, row.states) and back.states.dtype == row.states.dtype
    assert torch.equal(back.token_ids, row.token_ids) and torch.equal(back.loss_mask, row.loss_mask)
    assert back.row_id == "row-a"
    wanted = replace(SHAPE, dtype=dtype, header={"model_fingerprint": "f"}, token_ids=[0, 1, 2, 3, 4])
    assert check_file(path, wanted) == 5
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["hs_7.safetensors"]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"num_layers": 3}, "hidden_states"),
        ({"hidden_size": 4}, "hidden_states"),
        ({"dtype": "bfloat16"}, "float32"),
        ({"header": {"model_fingerprint": "other"}}, "model_fingerprint"),
        ({"token_ids": [0, 1, 2, 3, 5]}, "token ids"),
        ({"token_ids": [0, 1, 2, 3]}, "token ids"),
    ],
)
def test_a_row_of_something_else_is_damaged(tmp_path: Path, wanted: dict[str, Any], words: str) -> None:
    path = row_path(tmp_path, 0)
    write_row(path, make_row(), {"model_fingerprint": "f"})
    with pytest.raises(DamagedRow, match=words):
        check_file(path, replace(SHAPE, **wanted))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_a_truncated_or_mutated_file_never_crashes_the_reader(tmp_path: Path, data: st.DataObject) -> None:
    path = row_path(tmp_path, 0)
    write_row(path, make_row(), {})
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(DamagedRow):
            check_file(path, SHAPE)
        return
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        check_file(path, SHAPE)
        read_row(path)
    except DamagedRow as damage:
        assert str(damage)


def spoiled(token: int, layer: int, value: float) -> torch.Tensor:
    states = torch.randn(5, 2, 3)
    states[token, layer] = value
    return states


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (torch.randn(4, 2, 3), r"\[4, 2, 3\] for 5 tokens"),
        (torch.randn(5, 3, 3), r"wanted \[5, 2, 3\]"),
        (spoiled(3, 1, float("nan")), "not finite .*token 3, layer column 1"),
        (spoiled(0, 0, float("-inf")), "not finite"),
        (spoiled(4, 0, 0.0), "all zero .*token 4"),
        (spoiled(2, 1, 1.5), "constant"),
    ],
    ids=["rows", "layers", "nan", "inf", "zero", "constant"],
)
def test_impossible_states_are_named(states: torch.Tensor, words: str) -> None:
    fault = fault_of_states(states, 5, 2, 3)
    assert fault is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(fault)


def test_a_write_that_fails_names_its_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = row_path(tmp_path, 0)
    write_row(path, make_row(), {})
    before = path.read_bytes()

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_row(path, make_row(torch.float16), {})
    assert caught.value.filename == str(path)
    assert [entry.read_bytes() for entry in path.parent.iterdir()] == [before]


def test_ordinary_states_pass_in_every_dtype() -> None:
    states = torch.randn(5, 2, 3)
    assert all(
        fault_of_states(states.to(dtype), 5, 2, 3) is None for dtype in (torch.float32, torch.bfloat16, torch.float16)
    )
