"""`extract` beyond the plain run: shards, status, bad rows, preflight, storage types, every format."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline_fixtures import FakeEngine, ReferenceEngine, write_conversations, write_model, write_weights

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("datasets")

from pipeline import extract as extract_module  # noqa: E402
from pipeline import manifest  # noqa: E402
from pipeline.__main__ import main  # noqa: E402
from pipeline.bad_rows import BadRow, BadRows  # noqa: E402
from pipeline.config import ExtractConfig, PrepareConfig, VerifyConfig, VocabConfig  # noqa: E402
from pipeline.disk import DiskFull  # noqa: E402
from pipeline.engines.row_sink import RowSink, RowSinkSettings  # noqa: E402
from pipeline.extract import Extracted, extract, plan_job, status  # noqa: E402
from pipeline.formats.registry import FORMATS, open_rows  # noqa: E402
from pipeline.lock import exclusive, holder, shared  # noqa: E402
from pipeline.preflight import choose  # noqa: E402
from pipeline.prepare import prepare  # noqa: E402
from pipeline.shard import Shard, parse_shard  # noqa: E402
from pipeline.verify import verify  # noqa: E402
from pipeline.vocab import build_vocab  # noqa: E402
from shims.direct.engine import Settled  # noqa: E402
from shims.errors import SinkError, SpecshimError, UsageError  # noqa: E402

ROWS = 12


class Place:
    """A model, prepared rows, and the engine that the next run gets."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.model = write_model(root / "model")
        write_conversations(root / "conversations.jsonl", count=ROWS)
        prepare(PrepareConfig(str(self.model), root / "conversations.jsonl", root / "prepared"))
        self.data = root / "prepared" / "tokenized_data.jsonl"
        self.engines: list[Any] = []
        self.make: Callable[[Any], Any] = FakeEngine
        monkeypatch.setattr(extract_module, "open_engine", lambda name, options: self._opened(options))

    def _opened(self, options: Any) -> Any:
        self.engines.append(self.make(options))
        return self.engines[-1]

    def config(self, out: str = "states", **more: Any) -> ExtractConfig:
        settings = {"dtype": "float32", "engine": "stock"} | more
        return ExtractConfig(str(self.model), self.data, self.root / out, **settings)

    def extract(self, out: str = "states", **more: Any) -> Extracted:
        return extract(self.config(out, **more))

    def rows(self, out: str = "states") -> dict[int, tuple[Any, ...]]:
        store = open_rows(self.root / out, manifest.require_rows(self.root / out, "folder"))
        return {index: (store.read(index).states.tolist(), *store.tokens(index)) for index in store.indices()}

    def record(self, out: str = "states") -> dict[str, Any]:
        return manifest.require_rows(self.root / out, "folder")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_is_written_directly_verified_and_gone_on_with(place: Place, name: str) -> None:
    model = write_model(place.root / "real", hidden=32)
    write_weights(model)
    prepare(PrepareConfig(str(model), place.root / "conversations.jsonl", place.root / "p2"))
    build_vocab(VocabConfig(place.root / "p2", 64))
    place.model, place.data, place.make = model, place.root / "p2" / "tokenized_data.jsonl", ReferenceEngine
    settings = {"format": name, "rows_per_file": 5, "vocab": place.root / "p2"}
    place.extract(**settings)
    found = verify(VerifyConfig(place.root / "states", str(model), sample=ROWS, prepared=place.data))
    assert not found.faults and found.rows == ROWS and len(found.compared) == ROWS
    assert all(row.same_next == 1.0 for row in found.compared)
    again = place.extract(**settings)
    assert again.kept_rows == ROWS and again.computed_rows == 0 and len(place.engines) == 1


# shards


@pytest.mark.parametrize("name", ["hs_safetensors", "sharded", "speculators-0.4"])
def test_shards_share_the_rows_and_the_last_one_finishes(place: Place, name: str) -> None:
    place.extract("whole", format=name, rows_per_file=2)
    results = [place.extract(format=name, rows_per_file=2, shard=f"{number}/3") for number in (2, 1, 3)]
    assert [result.complete for result in results] == [False, False, True]
    assert sum(result.computed_rows for result in results) == ROWS
    assert place.rows() == place.rows("whole")
    record = place.record()
    assert record["complete"] and [run["shard"] for run in record["runs"]] == ["2/3", "1/3", "3/3"]
    assert not verify(VerifyConfig(place.root / "states")).faults
    if name == "speculators-0.4":
        assert len(json.loads((place.root / "states" / "sample_lengths.json").read_text())) == ROWS


def test_shards_at_the_same_time(place: Place) -> None:
    """Six processes, each its own rows, one folder."""
    place.extract("whole", format="sharded", rows_per_file=2)
    context = multiprocessing.get_context("fork")
    configs = [place.config(format="sharded", rows_per_file=2, shard=f"{number}/6") for number in range(1, 7)]
    processes = [context.Process(target=extract, args=(config,)) for config in configs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert place.record()["complete"] and len(place.record()["runs"]) == 6
    assert place.rows() == place.rows("whole")


def test_who_may_write_beside_whom(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    with shared(folder, Shard(1, 2)):
        with shared(folder, Shard(2, 2)):
            pass
        for taken, words in (
            (lambda: shared(folder, Shard(1, 2)), "a number of its own"),
            (lambda: shared(folder, Shard(3, 3)), "in 3 shards"),
            (lambda: shared(folder, Shard()), "no other run"),
            (lambda: exclusive(folder), "no other run"),
        ):
            with pytest.raises(UsageError, match=words), taken():
                pass
    with shared(folder, Shard(3, 3)):
        pass
    with exclusive(folder), pytest.raises(UsageError, match="holds its lock"), shared(folder, Shard(1, 2)):
        pass


def _enter(folder: Path, number: int, of: int) -> None:
    for _ in range(50):
        with shared(folder, Shard(number, of)):
            pass


def test_shards_that_begin_at_the_same_moment_do_not_turn_each_other_away(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_enter, args=(tmp_path / "states", n, 4)) for n in range(1, 5)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        holder(tmp_path / "states")
    assert [process.exitcode for process in processes] == [0] * 4


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/2/3", "-1/2"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        parse_shard(text)


def test_every_row_belongs_to_one_shard() -> None:
    for per_file in (1, 7):
        shards = [parse_shard(f"{number}/4") for number in range(1, 5)]
        assert all(sum(shard.owns(index, per_file) for shard in shards) == 1 for index in range(100))
    assert not any(
        len({shard.number for shard in shards if any(shard.owns(first + k, 7) for k in range(7))}) > 1
        for first in range(0, 98, 7)
    )


# status, damage


def test_status_says_what_is_done_missing_and_damaged_and_changes_nothing(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(place.config()).missing == list(range(ROWS))
    assert not (place.root / "states").exists()
    place.extract()
    store = plan_job(place.config()).open_store()
    store.locate(3).unlink()
    store.locate(4).unlink()
    store.locate(7).write_bytes(store.locate(7).read_bytes()[:-1])
    before = sorted(path.name for path in (place.root / "states").rglob("*"))
    arguments = ["--model-path", place.model, "--prepared-data", place.data, "--output-dir", place.root / "states"]
    with pytest.raises(SystemExit) as ended:
        main(["extract", *map(str, arguments), "--engine", "stock", "--dtype", "float32", "--status"])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "9 of 12 rows done, 2 missing, 1 damaged" in said and "missing: 3-4" in said and "damaged: row 7" in said
    assert sorted(path.name for path in (place.root / "states").rglob("*")) == before
    assert len(place.engines) == 1


def test_a_changed_bit_is_found_where_content_is_asked_for(place: Place) -> None:
    place.extract()
    undisturbed = place.rows()
    path = plan_job(place.config()).open_store().locate(5)
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    assert not status(place.config()).damaged
    assert list(status(place.config(check_content=True)).damaged) == [5]
    assert any("content hash" in fault for fault in verify(VerifyConfig(place.root / "states")).faults)
    result = place.extract(check_content=True)
    assert (result.computed_rows, result.redone_rows) == (1, 1) and place.rows() == undisturbed


def test_batches_meet_the_same_rows_after_a_kill() -> None:
    assert extract_module._batches([0, 1, 2, 3, 4, 5], 4) == [[0, 1, 2, 3], [4, 5]]
    assert extract_module._batches([1, 2, 3, 4, 5], 4) == [[1, 2, 3], [4, 5]]
    assert extract_module._batches([3, 9], 4) == [[3], [9]]


# bad rows


def spoils(*bad: int) -> Callable[[Any], Any]:
    """An engine whose states of these rows, counted as computed, are zero."""

    def make(options: Any) -> FakeEngine:
        engine = FakeEngine(options)
        engine._spoil = lambda states: states * 0 if engine.rows_computed - 1 in bad else states
        return engine

    return make


@pytest.mark.parametrize("name", ["hs_safetensors", "sharded", "speculators-0.5"])
def test_bad_rows_are_listed_capped_left_out_and_not_computed_again(place: Place, name: str) -> None:
    place.make = spoils(2, 9)
    with pytest.raises(SpecshimError, match="2 bad rows so far") as caught:
        place.extract(format=name, max_bad=1, rows_per_file=4)
    assert "all zero" in caught.value.found and "row 9" in caught.value.where
    place.make = FakeEngine
    result = place.extract(format=name, max_bad=2, rows_per_file=4)
    assert result.complete and result.bad_rows == 2
    record = place.record()
    assert [bad["row"] for bad in record["bad_rows"]] == [2, 9] and record["counts"]["bad_rows"] == 2
    assert sorted(place.rows()) == [index for index in range(ROWS) if index not in (2, 9)]
    found = verify(VerifyConfig(place.root / "states"))
    assert not found.faults and found.left_out == 2 and "2 rows are left out" in found.verdict()
    assert place.extract(format=name, max_bad=2, rows_per_file=4).computed_rows == 0
    for path in (place.root / "states").glob("bad_rows*.jsonl"):
        path.unlink()
    assert place.extract(format=name, rows_per_file=4).computed_rows == 2 and len(place.rows()) == ROWS


def test_without_leave_the_first_bad_row_stops_the_run_and_is_not_listed(place: Place) -> None:
    place.make = spoils(2)
    with pytest.raises(SpecshimError, match=r"row 2 .*") as caught:
        place.extract()
    assert "all zero" in caught.value.found
    assert not list((place.root / "states").glob("bad_rows*"))


def test_a_list_cut_off_by_a_kill_loses_its_last_line_only(tmp_path: Path) -> None:
    listed = BadRows(tmp_path)
    for index in range(3):
        listed.add(BadRow(index, "", "all zero", [1], [1]))
    path = tmp_path / "bad_rows.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    again = BadRows(tmp_path)
    assert again.indices == {0, 1}
    again.add(BadRow(7, "", "constant", [1], [1]))
    assert BadRows(tmp_path).indices == {0, 1, 7}


# preflight


@pytest.fixture
def real(place: Place) -> Place:
    """The same with a model whose states a reference can compute."""
    place.model = write_model(place.root / "real", hidden=32)
    write_weights(place.model)
    prepare(PrepareConfig(str(place.model), place.root / "conversations.jsonl", place.root / "p2"))
    place.data, place.make = place.root / "p2" / "tokenized_data.jsonl", ReferenceEngine
    return place


class Mixed(ReferenceEngine):
    """Hands out the states of the row before it, as a batch in another order does."""

    def states(self, rows: Any) -> list[Any]:
        found = super().states(rows)
        return [
            torch.cat([other[: len(own)], own[len(other) :]])
            for own, other in zip(found, found[-1:] + found[:-1], strict=True)
        ]


class Normed(ReferenceEngine):
    """Gives N for R_n."""

    def states(self, rows: Any) -> list[Any]:
        found = super().states(rows)
        for states in found:
            states[:, -1] = self._reference.normed(states[:, -1])
        return found


@pytest.mark.parametrize("against", ["transformers", "solo"])
def test_right_states_pass_the_preflight(real: Place, against: str) -> None:
    assert real.extract(preflight=4, preflight_against=against).complete


@pytest.mark.parametrize(
    ("engine", "against"), [(Mixed, "transformers"), (Mixed, "solo"), (Normed, "transformers")], ids=str
)
def test_a_bulk_run_does_not_begin_on_wrong_states(real: Place, engine: Any, against: str) -> None:
    real.make = engine
    with pytest.raises(SpecshimError, match="--preflight") as caught:
        real.extract(preflight=4, preflight_against=against)
    assert "relative error" in caught.value.found
    assert not (real.root / "states").exists()


def test_the_rows_of_a_preflight_are_spread() -> None:
    assert choose(range(100), 4) == [0, 33, 66, 99]
    assert choose([5, 6], 4) == [5, 6] and choose([5, 6], 1) == [5]


# the engine whose worker writes


def spread(states: Any) -> Any:
    """States that stay different from each other when they are rounded."""
    return states * torch.arange(1, states.shape[-1] + 1)


class Streaming:
    """The direct engine's side of the contract: rows settle in another order, written by the row sink."""

    def __init__(self, options: Any, sink: RowSinkSettings) -> None:
        self.engine, self._sink = FakeEngine(options, spoil=spread), RowSink(**sink.as_dict())
        self.stop_after: int | None = None

    def stream(self, rows: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Settled]:
        for index, ids in sorted(rows, key=lambda row: -row[0]):
            if self.stop_after is not None and self.engine.rows_computed >= self.stop_after:
                raise SpecshimError("worker", "a row", "killed", "again")
            states = self.engine.states([ids])[0]
            if index == 2:
                yield Settled([], {str(index): "constant: 1 of 8 states"})
                continue
            self._sink.write(str(index), torch.tensor(ids), states)
            yield Settled([str(index)], {})

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "store_dtype"), [("hs_safetensors", "auto"), ("sharded", "float8_e4m3"), ("speculators-0.5", "bfloat16")]
)
def test_rows_that_a_worker_writes_are_the_same_rows(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str, store_dtype: str
) -> None:
    settings = {"format": name, "store_dtype": store_dtype, "rows_per_file": 4, "max_bad": 1}
    place.make = lambda options: FakeEngine(options, spoil=spread)
    place.extract("whole", **settings)
    made: list[Streaming] = []

    def open_streaming(options: Any, sink: RowSinkSettings) -> Streaming:
        made.append(Streaming(options, sink))
        made[-1].stop_after = 5 if len(made) == 1 else None
        return made[-1]

    monkeypatch.setattr(extract_module, "StreamingEngine", Streaming)
    monkeypatch.setattr(extract_module, "open_streaming", open_streaming)
    with pytest.raises(SpecshimError, match="killed"):
        place.extract(engine="direct", **settings)
    result = place.extract(engine="direct", **settings)
    assert result.complete and result.kept_rows == 5 and result.bad_rows == 1
    wanted = place.rows("whole")
    del wanted[2]
    assert place.rows() == wanted and place.record()["engine"] == "direct"
    assert not verify(VerifyConfig(place.root / "states", prepared=place.data)).faults
    assert not list((place.root / "states").rglob("*.part"))


def test_a_disk_that_fills_under_the_worker_is_told_as_a_full_disk(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Streaming):
        def stream(self, rows: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Settled]:
            yield from super().stream(list(rows)[3:6])
            raise SinkError("/disk/row", "to write a finished row", "OSError: no space", "make room", errno)

    monkeypatch.setattr(extract_module, "StreamingEngine", Streaming)
    monkeypatch.setattr(extract_module, "open_streaming", Full)
    errno = 28
    with pytest.raises(DiskFull, match="run the same command again") as caught:
        place.extract(engine="direct")
    assert caught.value.where == "/disk/row"
    errno = 5  # another error of the disk is not lack of space
    with pytest.raises(SinkError, match="make room"):
        place.extract(engine="direct")
    monkeypatch.setattr(extract_module, "open_streaming", Streaming)
    assert place.extract(engine="direct", max_bad=1).kept_rows == 6


class Loaded:
    """The engine below the streaming one: rows settle in another order, some states are those of another row."""

    workers: tuple[()] = ()

    def __init__(self, options: Any) -> None:
        self._sink = RowSink(**options.sink_settings)
        model = SimpleNamespace(path=options.model, hidden_size=32, num_layers=8)
        layers = SimpleNamespace(native=options.native_ids, after=tuple(i - 1 for i in options.native_ids))
        self._engine = self.kind(SimpleNamespace(model=model, layers=layers))

    kind: Any = ReferenceEngine

    def run(self, rows: Iterable[tuple[str, Sequence[int]]]) -> Iterator[Settled]:
        named = list(rows)[::-1]
        for (name, ids), states in zip(named, self._engine.states([ids for _, ids in named]), strict=True):
            self._sink.write(name, torch.tensor(ids), states)
            yield Settled([name], {})

    def close(self) -> None:
        pass


class LoadedMixed(Loaded):
    kind = Mixed


@pytest.mark.parametrize("against", ["transformers", "solo"])
def test_a_preflight_of_rows_that_a_worker_writes(real: Place, monkeypatch: pytest.MonkeyPatch, against: str) -> None:
    from pipeline.engines import direct

    monkeypatch.setattr(direct, "DirectEngine", LoadedMixed)
    settings: dict[str, Any] = {"engine": "direct", "preflight": 3, "preflight_against": against}
    with pytest.raises(SpecshimError, match="--preflight"):
        real.extract(**settings)
    assert not (real.root / "states").exists()
    monkeypatch.setattr(direct, "DirectEngine", Loaded)
    assert real.extract(**settings).complete
    assert not verify(VerifyConfig(real.root / "states", str(real.model), sample=ROWS)).faults


# storage types


@pytest.mark.parametrize(
    ("store_dtype", "limit"), [("bfloat16", 3e-3), ("float16", 4e-4), ("float8_e4m3", 3e-2)], ids=str
)
def test_states_are_stored_smaller_and_verify_reports_the_error(real: Place, store_dtype: str, limit: float) -> None:
    real.extract("full")
    real.extract(store_dtype=store_dtype)
    found = verify(VerifyConfig(real.root / "states", str(real.model), sample=ROWS))
    assert not found.faults and found.worst is not None and 1e-5 < found.worst < limit
    sizes = [sum(f.stat().st_size for f in (real.root / n).rglob("hs_*")) for n in ("full", "states")]
    assert sizes[1] < sizes[0] * {"float8_e4m3": 0.40}.get(store_dtype, 0.60)
    packed = [row.storage for row in found.compared]
    assert all(p is not None and p < limit for p in packed) if store_dtype == "float8_e4m3" else packed == [None] * ROWS
    wrong = verify(VerifyConfig(real.root / "states", str(real.model), sample=ROWS, threshold=1e-5))
    assert len(wrong.faults) == ROWS


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"format": "hdf5"}, "--format"),
        ({"format": "speculators-0.4", "store_dtype": "float8_e4m3"}, "convert when you train"),
        ({"format": "speculators-0.4", "layer_ids": (1, 7)}, "three auxiliary states"),
        ({"format": "specforge", "layer_ids": (1, 2, 3, 4)}, "after the last of 8 layers"),
        ({"store_dtype": "int4"}, "--store-dtype"),
        ({"max_bad": -1}, "--max-bad"),
        ({"preflight": -1}, "--preflight"),
        ({"preflight_against": "luck"}, "--preflight-against"),
        ({"rows_per_file": 0}, "--rows-per-file"),
        ({"min_free_gib": float("nan")}, "--min-free-gib"),
        ({"shard": "5/4"}, "--shard"),
        ({"vocab": Path("/nowhere")}, "--vocab"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_loads(place: Place, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        place.extract(**more)
    assert words in str(caught.value)
    assert not place.engines and not (place.root / "states").exists()
