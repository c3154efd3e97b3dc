"""The writer without copies: the library's own bytes, whole or absent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors.torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pipeline.formats import StateRow, safetensors_row  # noqa: E402
from pipeline.formats.content import check_content  # noqa: E402
from pipeline.formats.hs_safetensors import encode_row, read_stored, write_row  # noqa: E402
from shims.direct.rowfile import write_tensors  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
tensors = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)).map(
        lambda made: torch.randint(0, 2, made[0]).to(made[1])
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(tensors, st.none() | st.text(max_size=20).map(lambda text: {"one": text}))
def test_equal_to_the_library_byte_for_byte(tmp_path_factory: Any, named: dict[str, Any], metadata: Any) -> None:
    path = tmp_path_factory.mktemp("rows") / "row.safetensors"
    size = write_tensors(path, named, metadata)
    assert path.read_bytes() == library.save(named, metadata=metadata) and size == path.stat().st_size
    assert list(path.parent.iterdir()) == [path]


def test_a_failing_disk_leaves_nothing_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "row.safetensors"
    path.write_text("what stood here before")

    def full(handle: int, content: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError) as caught:
        write_tensors(path, {"x": torch.zeros(3)})
    assert caught.value.filename == str(path)
    assert path.read_text() == "what stood here before" and list(tmp_path.iterdir()) == [path]


def test_a_disk_that_takes_little_at_a_time_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, write = torch.arange(1000), os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, content[:7]))
    write_tensors(tmp_path / "row", {"x": whole})
    assert torch.equal(library.load((tmp_path / "row").read_bytes())["x"], whole)


def test_a_header_that_is_known_last_makes_the_same_file(tmp_path: Path) -> None:
    named, metadata = {"x": torch.arange(5)}, {"one": "known"}
    write_tensors(tmp_path / "row", named, {"one": "later"}, lambda: metadata)
    assert (tmp_path / "row").read_bytes() == library.save(named, metadata=metadata)


def test_a_last_header_of_another_length_would_shift_the_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="header of"):
        write_tensors(tmp_path / "row", {"x": torch.arange(5)}, {"one": ""}, lambda: {"one": "longer than it was"})
    assert not list(tmp_path.iterdir())


def test_a_large_row_is_hashed_beside_its_writing_and_has_the_same_bytes(tmp_path: Path) -> None:
    """Both ends of the switch: the row's hash, of these very numbers, in a file as the library has it."""
    states = torch.randn(700, 4, 128)
    assert states.nbytes > safetensors_row._LARGE
    row = StateRow(states, torch.arange(700), torch.ones(700, dtype=torch.int64), "r")
    write_row(tmp_path / "hs_0.safetensors", row, {"row": "0"})
    assert (tmp_path / "hs_0.safetensors").read_bytes() == encode_row(row, {"row": "0"})
    check_content(read_stored(tmp_path / "hs_0.safetensors"))


@pytest.mark.parametrize("wrong", [torch.zeros(2, dtype=torch.complex64), torch.zeros(4, 4).t()[:, :2]])
def test_what_it_cannot_write_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(TypeError):
        write_tensors(tmp_path / "row", {"x": wrong})
    assert not list(tmp_path.iterdir())
