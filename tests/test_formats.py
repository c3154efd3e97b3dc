"""Every format gives back what was written, moves to any other and back without a changed bit, and notices damage."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
np = pytest.importorskip("numpy")

from pipeline.formats import DamagedRow, StateRow, Wanted, float8  # noqa: E402
from pipeline.formats.content import KEY  # noqa: E402
from pipeline.formats.registry import FORMATS, get_format, recognised  # noqa: E402
from pipeline.formats.shards import scan  # noqa: E402
from pipeline.formats.sidecars import Summary  # noqa: E402
from pipeline.formats.stores import Claim, RowStore  # noqa: E402
from shims.errors import UsageError  # noqa: E402

ALL = sorted(FORMATS)
WITH_FLOAT8 = sorted(name for name, form in FORMATS.items() if form.float8)
quick = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=40
)


@st.composite
def rows(draw: st.DrawFn, layers: int = 4) -> StateRow:
    """Any row a trainer could read: any length, width, dtype, and numbers of any size."""
    tokens, hidden = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dtype = getattr(torch, draw(st.sampled_from(["float32", "bfloat16", "float16"])))
    scale = 10.0 ** draw(st.integers(-6, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    states = (torch.randn(tokens, layers, hidden, generator=generator) * scale).to(dtype)
    ids = torch.randint(0, 2**40, (tokens,), generator=generator)
    mask = torch.randint(0, 2, (tokens,), generator=generator)
    return StateRow(states, ids, mask, draw(st.text(max_size=12)))


def same(left: StateRow, right: StateRow) -> bool:
    tensors = [(left.states, right.states), (left.token_ids, right.token_ids), (left.loss_mask, right.loss_mask)]
    tensors += [(left.scale, right.scale)] if left.scale is not None else []
    return left.row_id == right.row_id and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensors)


def write(folder: Path, name: str, *written: StateRow, rows_per_file: int = 3) -> RowStore:
    store = get_format(name).open(folder, rows_per_file)
    store.begin(Claim(len(written)))
    for index, row in enumerate(written):
        store.write(index, row, {"row": str(index), "model_fingerprint": "f"})
    store.close()
    return get_format(name).open(folder, 1000)


def plain_row(tokens: int = 5, seed: int = 0) -> StateRow:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, 4, 8, generator=generator)
    return StateRow(states, torch.arange(tokens), torch.ones(tokens, dtype=torch.int64), f"row-{seed}")


@pytest.mark.parametrize("name", ALL)
@quick
@given(row=rows())
def test_a_row_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, name: str, row: StateRow) -> None:
    store = write(tmp_path_factory.mktemp("rows"), name, row)
    assert same(row, store.read(0)) and same(row, store.read_stored(0))
    wanted = Wanted(
        4, row.states.shape[2], str(row.states.dtype).removeprefix("torch."), {"row": "0", "row_id": row.row_id},
        row.token_ids.tolist(), row.loss_mask.tolist(), content=True,
    )  # fmt: skip
    assert store.check(0, wanted) == len(row.token_ids)
    assert store.tokens(0) == (row.token_ids.tolist(), row.loss_mask.tolist())


@pytest.mark.parametrize("name", WITH_FLOAT8)
@quick
@given(row=rows())
def test_float8_halves_the_bytes_and_states_its_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, row: StateRow
) -> None:
    packed = float8.compressed(row)
    store = write(tmp_path_factory.mktemp("rows"), name, packed)
    assert same(packed, store.read_stored(0))
    back = store.read(0).states
    assert back.dtype == torch.bfloat16 and packed.states.element_size() == 1
    # 1/16 by the mantissa, and one unit of the smallest step for what lies far below a vector's largest element.
    largest = row.states.float().abs().amax(dim=-1, keepdim=True)
    allowed = row.states.float().abs() / 15 + largest / 448 * 2**-9
    assert bool(((back.float() - row.states.float()).abs() <= allowed + 2.0**-126).all())


def test_float8_error_of_ordinary_states_is_below_three_percent() -> None:
    row = plain_row(tokens=64)
    back = float8.dense(float8.compressed(row)).states.float()
    assert 0.01 < float((back - row.states).norm() / row.states.norm()) < 0.03


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("target", ALL)
def test_any_format_to_any_other_and_back_is_the_same_file(tmp_path: Path, source: str, target: str) -> None:
    row = plain_row()
    first = write(tmp_path / "a", source, row)
    moved = write(tmp_path / "b", target, first.read_stored(0))
    assert moved.read(0).header[KEY] == first.read(0).header[KEY]
    write(tmp_path / "c", source, moved.read_stored(0))
    assert files(tmp_path / "a") == files(tmp_path / "c")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ALL)
def test_every_kind_of_difference_is_named(tmp_path: Path, name: str) -> None:
    store = write(tmp_path, name, plain_row())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_layers": 3}, "hidden_states"),
        ({"hidden_size": 9}, "hidden_states"),
        ({"dtype": "bfloat16"}, "float32, not bfloat16"),
        ({"header": {"row": "1"}}, "metadata row is '0', not '1'"),
        ({"token_ids": [0, 1, 2, 3, 5]}, "other token ids"),
        ({"loss_mask": [0, 1, 1, 1, 1]}, "another loss mask"),
    ]
    for wanted, words in cases:
        with pytest.raises(DamagedRow, match=words):
            store.check(0, Wanted(**wanted))
    with pytest.raises(FileNotFoundError):
        store.check(1, Wanted())


@pytest.mark.parametrize("name", ALL)
def test_a_changed_bit_in_the_states_is_found(tmp_path: Path, name: str) -> None:
    row = plain_row()
    store = write(tmp_path, name, row)
    path = store.locate(0)
    content = bytearray(path.read_bytes())
    # In the last state, which each format stores without its neighbours between.
    at = content.index(row.states[1, 3].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedRow, match="content hash"):
        get_format(name).open(tmp_path, 3).check(0, Wanted(content=True))


@pytest.mark.parametrize("name", ALL)
def test_what_lies_in_a_folder_is_recognised(tmp_path: Path, name: str) -> None:
    assert recognised(tmp_path) == []
    write(tmp_path, name, plain_row(), plain_row(seed=1))
    assert name in [form.name for form in recognised(tmp_path)]


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="hs_safetensors, sharded"):
        get_format("hdf5")


# safe readers


class Payload:
    """Pickled, it makes a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return os.mkdir, (str(self._trace),)


@pytest.mark.parametrize("name", ["speculators-0.3", "speculators-0.4", "specforge"])
@pytest.mark.parametrize("old_container", [False, True], ids=["zip", "bare pickle"])
def test_a_file_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path: Path, name: str, old_container: bool
) -> None:
    store = write(tmp_path / "rows", name, plain_row())
    trace, path = tmp_path / "trace", store.locate(0)
    content = {"input_ids": torch.arange(5), "loss_mask": Payload(trace), "hidden_states": [], "hidden_state": 1}
    if old_container:
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    for read in (lambda: store.read(0), lambda: store.tokens(0), lambda: store.check(0, Wanted(content=True))):
        with pytest.raises(DamagedRow):
            read()
    assert not trace.exists()
    torch.load(path, weights_only=False) if not old_container else pickle.loads(path.read_bytes())
    assert trace.exists(), "the payload works: it is the reader that refuses it"


def test_a_packed_row_is_read_and_a_bomb_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    from pipeline.formats import specforge

    store = write(tmp_path, "specforge", plain_row())
    path = store.locate(0)
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert same(store.read(0), plain_row()) and store.indices() == [0]
    monkeypatch.setattr(specforge, "_LARGEST", 1000)
    with pytest.raises(DamagedRow, match="more than 1000 bytes"):
        store.read(0)
    packed.write_bytes(packed.read_bytes()[:-20])
    monkeypatch.undo()
    with pytest.raises(DamagedRow):
        store.read(0)


# what lies beside the rows


def summary_of(*written: StateRow) -> Summary:
    return Summary(
        lengths={index: len(row.token_ids) for index, row in enumerate(written)},
        tokens=lambda: ((row.token_ids.tolist(), row.loss_mask.tolist()) for row in written),
        description={"model": {"num_layers": 8}},
        mapping=(np.arange(3, dtype=np.int64), np.eye(1, 9, dtype=bool)[0]),
        frequency={3: 2},
    )


@pytest.mark.parametrize("name", ALL)
def test_sidecars_of_right_rows_are_right_and_wrong_ones_are_named(tmp_path: Path, name: str) -> None:
    pytest.importorskip("datasets")
    written = [plain_row(), plain_row(7, 1)]
    store, form = write(tmp_path, name, *written), get_format(name)
    if form.finish is not None:
        form.finish(tmp_path, summary_of(*written))
    assert form.check_sidecars(tmp_path, [0, 1], store, []) == []
    if form.finish is not None and name != "specforge":
        form.finish(tmp_path, summary_of(*reversed(written)))
        (tmp_path / "token_freq.pt").write_bytes(b"a sample, to those trainers that read any *pt")
        assert bool(form.check_sidecars(tmp_path, [0, 1], store, []))


# shards


def test_a_shard_is_a_tar_of_ordinary_row_files(tmp_path: Path) -> None:
    from pipeline.formats.hs_safetensors import read_row

    written = [plain_row(seed=index) for index in range(7)]
    store = write(tmp_path, "sharded", *written)
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == [
        "rows-000000000-000000002.tar", "rows-000000003-000000005.tar", "rows-000000006-000000008.tar",
    ]  # fmt: skip
    with tarfile.open(store.locate(4)) as shard:
        assert shard.getnames() == ["hs_3.safetensors", "hs_4.safetensors", "hs_5.safetensors"]
        shard.extractall(tmp_path / "out", filter="data")
    assert same(read_row(tmp_path / "out" / "hs_4.safetensors"), written[4])


@quick
@given(cut=st.integers(0, 20_000), data=st.data())
def test_a_part_cut_off_anywhere_goes_on_without_a_whole_row_lost(
    tmp_path_factory: pytest.TempPathFactory, cut: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    written = [plain_row(seed=index) for index in range(3)]
    store = get_format("sharded").open(folder, 4)
    store.begin(Claim(4))
    for index, row in enumerate(written):
        store.write(index, row, {})
    store.close()
    part = store.locate(0)
    ends = [offset + size for offset, size in scan(part)[0].values()]
    os.truncate(part, min(cut, part.stat().st_size))
    whole = [index for index, end in enumerate(ends) if -(-end // 512) * 512 <= cut]
    again = get_format("sharded").open(folder, 4)
    again.begin(Claim(4))
    assert again.indices() == whole
    order = [*whole, *data.draw(st.permutations([index for index in range(4) if index not in whole]))]
    for index in order[len(whole) :]:
        again.write(index, plain_row(seed=index), {})
    again.close()
    assert not list(folder.rglob("*.part")) and again.indices() == [0, 1, 2, 3]
    assert all(same(again.read(index), plain_row(seed=index)) for index in range(4))


def test_shards_of_two_sizes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "sharded", *[plain_row(seed=index) for index in range(3)])
    shards = tmp_path / "shards"
    shutil.copy(next(shards.iterdir()), shards / "rows-000000000-000000008.tar")
    with pytest.raises(UsageError, match="shards of one size"):
        get_format("sharded").open(tmp_path, 3)


def test_a_damaged_row_of_a_full_shard_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    written = [plain_row(seed=index) for index in range(3)]
    store = write(tmp_path, "sharded", *written)
    shard = store.locate(1)
    before, (offset, size) = shard.read_bytes(), scan(shard)[0][1]
    with shard.open("r+b") as handle:
        handle.seek(offset + size - 3)
        handle.write(b"\xff\xff\xff")
    again = get_format("sharded").open(tmp_path, 3)
    with pytest.raises(DamagedRow):
        again.check(1, Wanted(content=True))
    again.begin(Claim(3))
    again.write(1, written[1], {"row": "1", "model_fingerprint": "f"})
    assert again.locate(0).name.endswith(".part") and same(again.read(0), written[0])
    again.close()
    with tarfile.open(shard) as opened:
        assert sorted(opened.getnames()) == [f"hs_{index}.safetensors" for index in range(3)]
    assert len(shard.read_bytes()) == len(before)
    assert all(same(again.read(index), written[index]) for index in range(3))


def test_a_writer_of_many_shards_holds_few_files_open(tmp_path: Path) -> None:
    """The worker of an engine writes for another process, and cannot know which shards are full."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "shards").mkdir()
    store = get_format("sharded").open(tmp_path, 2)
    for index in [*range(0, 200, 2), *range(1, 200, 2)]:
        store.write(index, plain_row(), {"row": str(index)})
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 40
    store.close()
    again = get_format("sharded").open(tmp_path, 2)
    again.begin(Claim(200))
    again.close()
    assert again.indices() == list(range(200)) and not list(tmp_path.rglob("*.part"))


def test_rows_left_out_do_not_keep_a_shard_open(tmp_path: Path) -> None:
    store, absent = get_format("sharded").open(tmp_path, 3), {1}
    store.begin(Claim(3, absent=absent))
    store.write(0, plain_row(), {})
    store.sync()
    assert store.locate(0).name.endswith(".part")
    store.write(2, plain_row(), {})
    store.close()
    assert store.locate(0).name.endswith(".tar") and store.indices() == [0, 2]


def test_another_shards_half_written_rows_are_left_alone(tmp_path: Path) -> None:
    for name in ("hs_safetensors", "speculators-0.4", "specforge"):
        folder = tmp_path / name
        store = write(folder, name, plain_row(), plain_row())
        mine, other = (store.locate(index).with_name(f".{store.locate(index).name}.tmp-77") for index in (0, 1))
        for leftover in (mine, other):
            leftover.write_bytes(b"half")
        get_format(name).open(folder, 3).begin(Claim(2, owns=lambda index: index == 0))
        assert not mine.exists() and other.exists()


def test_a_header_is_json_text_in_every_file(tmp_path: Path) -> None:
    store = write(tmp_path, "speculators-0.4", plain_row())
    content = torch.load(store.locate(0), weights_only=True)
    assert json.loads(content["specshim"])["row"] == "0"
    assert [tuple(layer.shape) for layer in content["hidden_states"]] == [(5, 8)] * 4
