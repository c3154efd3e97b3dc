"""`extract --output-dir s3://…` and what reads it, against a real S3 server (moto) in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, KEYS, client, die, environment, in_child, objects, running

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from pipeline_fixtures import FakeEngine, ReferenceEngine, write_conversations, write_model, write_weights  # noqa: E402
from test_architecture import _roots  # noqa: E402
from test_extract import ROWS, Place, Streaming, spoils  # noqa: E402
from test_replicas import Here, InProcess, replicas_in_process  # noqa: E402

from pipeline import config as configs  # noqa: E402
from pipeline import extract as extract_module  # noqa: E402
from pipeline.__main__ import main  # noqa: E402
from pipeline.config import ExtractConfig, PrepareConfig, VerifyConfig, VocabConfig  # noqa: E402
from pipeline.convert import convert  # noqa: E402
from pipeline.evaluate import evaluate  # noqa: E402
from pipeline.extract import extract, status  # noqa: E402
from pipeline.formats.registry import FORMATS  # noqa: E402
from pipeline.object_store import bucket as bucket_module  # noqa: E402
from pipeline.object_store import target as target_module  # noqa: E402
from pipeline.object_store.address import Address, parse, refuse_addresses, shown  # noqa: E402
from pipeline.object_store.ahead import Kept  # noqa: E402
from pipeline.object_store.beside import Beside  # noqa: E402
from pipeline.object_store.bucket import Bucket, clients  # noqa: E402
from pipeline.object_store.failures import StoreError  # noqa: E402
from pipeline.object_store.fetch import FetchConfig, fetch  # noqa: E402
from pipeline.object_store.lock import StoreLock, Times, look  # noqa: E402
from pipeline.object_store.rows import rows_at  # noqa: E402
from pipeline.places import holder, open_data  # noqa: E402
from pipeline.prepare import prepare  # noqa: E402
from pipeline.regenerate import regenerate  # noqa: E402
from pipeline.replicas import replica as replica_module  # noqa: E402
from pipeline.serving.check import CheckConfig, check_draft  # noqa: E402
from pipeline.train import train  # noqa: E402
from pipeline.training_batches import BatchStream, PackedRows  # noqa: E402
from pipeline.training_series import SERIES  # noqa: E402
from pipeline.verify import verify  # noqa: E402
from pipeline.vocab import build_vocab  # noqa: E402
from shims.errors import SinkError, SpecshimError, UsageError  # noqa: E402


class Hasty(Times):
    """Soon takes an owner for gone, and, unlike a real run, relies on its own lock however late it renews it."""

    @property
    def sure(self) -> float:
        return 60.0


QUICK = Hasty(beat=0.2, expiry=1.2)
PATIENT = Times(beat=0.2, expiry=120.0)
"""A busy machine may renew late: only those that wait for an owner who is gone are quick."""
PIPELINE = Path(extract_module.__file__).parent
S3 = f"s3://{BUCKET}/states"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running() as address:
        yield address


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The server with an empty bucket; nothing but the environment tells the code of it."""
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(target_module, "TIMES", PATIENT)
    s3 = client()
    s3.create_bucket(Bucket=BUCKET)
    clients.forget()
    yield Bucket(parse(S3, "test"))
    clients.forget()
    for upload in s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        s3.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    for name in objects(s3=s3):
        s3.delete_object(Bucket=BUCKET, Key=name)
    s3.delete_bucket(Bucket=BUCKET)


class Copied(Place):
    """As :class:`Place`, with model and rows that were made once."""

    def __init__(self, root: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.model, self.data = root, made / "model", made / "prepared" / "tokenized_data.jsonl"
        self.engines, self.make = [], FakeEngine
        monkeypatch.setattr(extract_module, "open_engine", lambda name, options: self._opened(options))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights, prepared rows and a vocabulary."""
    root: Path = tmp_path_factory.mktemp("made")
    write_weights(write_model(root / "model", hidden=32))
    write_conversations(root / "conversations.jsonl", count=ROWS)
    prepare(PrepareConfig(str(root / "model"), root / "conversations.jsonl", root / "prepared"))
    build_vocab(VocabConfig(root / "prepared", 64))
    return root


@pytest.fixture
def place(store: Bucket, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Copied(tmp_path, made, monkeypatch)


def at(place: Place, address: str = S3, **more: Any) -> ExtractConfig:
    return replace(place.config(**more), output_dir=Path(address))


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, locks left out."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def same(stored: dict[str, bytes], local: dict[str, bytes]) -> bool:
    """The same names and, but for the times in manifests, the same bytes."""
    timeless = ("manifest.json", "dataset_info.json", "state.json")
    strip = [{name: data for name, data in one.items() if name not in timeless} for one in (stored, local)]
    return stored.keys() == local.keys() and strip[0] == strip[1]


# What an address is.


@pytest.mark.parametrize("given", ["s3://bucket/a/b", "s3:/bucket/a/b", "s3://bucket/a//b/"])
def test_an_address_is_read_with_or_without_the_slashes_that_a_path_drops(given: str) -> None:
    assert parse(Path(given), "f") == parse(given, "f") == Address("bucket", "a/b")
    assert str(parse(given, "f")) == "s3://bucket/a/b" and shown(Path("s3://bucket/a")) == "s3://bucket/a"
    assert shown(Path("/a/b")) == "/a/b"


@pytest.mark.parametrize("given", ["s3://", "s3://bucket", "s3://bucket/", "s3://b/../c", "s3://b?x/y", "S3://b/c"])
def test_what_is_no_bucket_and_folder_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="s3://BUCKET/FOLDER"):
        parse(given, "--output-dir")


CONFIGS: dict[type[Any], tuple[Callable[[Any], Any], set[str], dict[str, Any]]] = {
    configs.PrepareConfig: (prepare, set(), {"model_path": "m", "input": Path("i"), "output_dir": Path("o")}),
    configs.RegenerateConfig: (regenerate, set(), {"model_path": "m", "input": Path("i"), "output_dir": Path("o")}),
    configs.VocabConfig: (build_vocab, set(), {"prepared": Path("p"), "draft_vocab_size": 8}),
    configs.ExtractConfig: (
        extract, {"output_dir"}, {"model_path": "m", "prepared_data": Path("p"), "output_dir": Path("o")},
    ),
    configs.ConvertConfig: (convert, set(), {"source": Path("s"), "output_dir": Path("o"), "format": "sharded"}),
    configs.VerifyConfig: (verify, {"data"}, {"data": Path("d")}),
    configs.TrainConfig: (
        train, {"data"}, {"data": Path("d"), "vocab": Path("v"), "model": "m", "output_dir": Path("o")},
    ),
    configs.EvaluateConfig: (evaluate, set(), {"draft": Path("d"), "data": Path("s"), "output_dir": Path("o")}),
    CheckConfig: (check_draft, set(), {"draft": Path("d")}),
    FetchConfig: (fetch, {"source"}, {"source": Path("s"), "output_dir": Path("o")}),
}  # fmt: skip


def test_the_list_of_stages_is_whole() -> None:
    named = {value for name, value in vars(configs).items() if name.endswith("Config")}
    assert named <= CONFIGS.keys()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, field.name)
        for kind in CONFIGS
        for field in fields(kind)
        if "Path" in str(field.type) or field.name in ("model", "model_path")
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_path_of_each_stage_takes_an_address_or_refuses_it_in_four_parts(
    kind: type[Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, allowed, needed = CONFIGS[kind]
    text = name in ("model", "model_path")
    config = kind(**needed | {name: S3 if text else Path(S3)})
    if name in allowed:
        refuse_addresses(config, allowed)
        return
    with pytest.raises(UsageError) as caught:
        run(config)
    error = caught.value
    assert error.found == f"an address, {S3}" and all((error.where, error.wanted, error.found, error.next_step))
    assert ("specshim fetch" in error.next_step) == (name in ("data", "source"))
    assert not list(tmp_path.iterdir()), "a folder was made"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"shard": "1/2"}, "use --replicas"),
        ({"format": "sharded"}, "use --format hs_safetensors"),
    ],
)
def test_what_cannot_be_at_an_address_is_refused_before_the_store_is_asked(
    place: Place, more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    clients.forget()
    with pytest.raises(UsageError, match=said):
        extract(at(place, **more))


def test_without_boto3_the_extra_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    for arguments in (
        ["extract", "--model-path", str(place.model), "--prepared-data", str(place.data), "--output-dir", S3],
        ["verify", S3],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and "specshim[s3]" in capsys.readouterr().err


def test_one_module_knows_the_client_library() -> None:
    knowing = [path for path in PIPELINE.rglob("*.py") if {"boto3", "botocore"} & _roots(path)]
    assert [path.relative_to(PIPELINE).as_posix() for path in knowing] == ["object_store/bucket.py"]


def test_a_plain_start_loads_no_client() -> None:
    code = "import sys, pipeline.__main__, pipeline.extract, pipeline.verify; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"boto3", "botocore", "pipeline.object_store.bucket", "pipeline.object_store.rows"}


# Writing.


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"sharded"}))
def test_every_format_is_the_same_set_at_an_address_as_in_a_folder(place: Place, name: str, tmp_path: Path) -> None:
    real = name in ("hs_safetensors", "specforge")
    place.make = ReferenceEngine if real else FakeEngine
    more = {"format": name, "vocab": place.data.parent}
    place.extract(**more)
    result = extract(at(place, **more))
    assert result.complete and result.computed_rows == ROWS
    assert same(objects("states/"), files(place.root / "states"))
    model = str(place.model) if real else None
    found = verify(VerifyConfig(Path(S3), model, sample=3, prepared=place.data))
    assert not found.faults and found.rows == ROWS and found.content and len(found.compared) == 3 * real
    again = extract(at(place, **more))
    assert again.kept_rows == ROWS and again.computed_rows == 0 and len(place.engines) == 2
    if not real:
        return
    fetched = fetch(FetchConfig(Path(S3), tmp_path / "copy"))
    assert fetched.others == 0 and files(tmp_path / "copy") == objects("states/")


def test_a_run_goes_on_from_another_machine(place: Place) -> None:
    """Nothing of the first run is left on this one but the objects."""
    place.make = lambda options: FakeEngine(options, fail_at=5)
    with pytest.raises(SpecshimError, match="finished rows are kept"):
        extract(at(place, batch_size=1))
    before = objects("states/")
    assert json.loads(before["manifest.json"])["complete"] is False and ".lock" not in before
    found = status(at(place))
    assert found.done == 5 and len(found.missing) == ROWS - 5
    place.make = FakeEngine
    result = extract(at(place))
    assert result.kept_rows == 5 and result.computed_rows == ROWS - 5
    place.extract()
    assert same(objects("states/"), files(place.root / "states"))
    assert len(json.loads(objects("states/")["manifest.json"])["runs"]) == 2


def test_the_worker_of_the_direct_engine_sends_its_rows_itself(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_module, "StreamingEngine", Streaming)
    monkeypatch.setattr(extract_module, "open_streaming", Streaming)
    place.extract(engine="direct", max_bad=1)
    result = extract(at(place, engine="direct", max_bad=1))
    assert result.complete and result.bad_rows == 1
    assert same(objects("states/"), files(place.root / "states"))
    assert extract(at(place, engine="direct", max_bad=1)).computed_rows == 0


def test_replicas_share_one_lock_and_the_set_is_the_same(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas_in_process(monkeypatch)
    monkeypatch.setattr(InProcess, "deaths", 3)
    hurt = extract(at(place, engine="direct", max_bad=1, replicas=2))
    assert hurt.complete and hurt.restarts == 3
    assert sorted(Here.asked) == list(range(ROWS)), "a row that a dead replica had sent was computed again"
    place.extract(engine="direct", max_bad=1, replicas=1)
    assert same(objects("states/"), files(place.root / "states"))
    client().delete_object(Bucket=BUCKET, Key="states/hidden_states/hs_4.safetensors")
    Here.asked.clear()
    assert extract(at(place, engine="direct", max_bad=1, replicas=1)).computed_rows == 1 and Here.asked == [4]


def test_a_replica_that_finds_another_run_there_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas_in_process(monkeypatch)
    monkeypatch.setattr(replica_module, "signature", lambda folder: "another")
    with pytest.raises(SpecshimError, match="storage that all machines share"):
        extract(at(place, engine="direct", replicas=1))
    assert not objects("states/")


def test_bad_rows_are_published_as_they_come(place: Place) -> None:
    place.make = spoils(2)
    result = extract(at(place, max_bad=1))
    assert result.bad_rows == 1 and json.loads(objects("states/")["bad_rows.jsonl"])["row"] == 2
    again = extract(at(place, max_bad=1))
    assert again.computed_rows == 0 and again.bad_rows == 1
    assert verify(VerifyConfig(Path(S3))).left_out == 1


def test_a_refused_run_leaves_nothing_there(place: Place) -> None:
    place.make = spoils(0)
    with pytest.raises(SpecshimError, match="--preflight"):
        extract(at(place, preflight=2, preflight_against="solo"))
    assert not objects()


def test_objects_without_a_manifest_and_sets_of_other_settings_are_refused(place: Place) -> None:
    client().put_object(Bucket=BUCKET, Key="states/notes.txt", Body=b"mine")
    with pytest.raises(UsageError, match=r"notes.txt.*without manifest"):
        extract(at(place))
    assert objects() == {"states/notes.txt": b"mine"}
    client().delete_object(Bucket=BUCKET, Key="states/notes.txt")
    extract(at(place))
    with pytest.raises(UsageError, match=rf"{S3}/manifest.json"):
        extract(at(place, max_seq_len=16))


def test_rows_of_a_wrong_size_are_computed_again_and_verify_sees_what_a_listing_cannot(place: Place) -> None:
    extract(at(place))
    right = objects("states/")
    s3, key = client(), "states/hidden_states/hs_3.safetensors"
    s3.put_object(Bucket=BUCKET, Key=key, Body=right["hidden_states/hs_3.safetensors"][:-2000])
    found = status(at(place))
    assert list(found.damaged) == [3] and "alone take" in found.damaged[3]
    assert extract(at(place)).redone_rows == 1
    assert objects("states/")["hidden_states/hs_3.safetensors"] == right["hidden_states/hs_3.safetensors"]
    flipped = bytearray(right["hidden_states/hs_3.safetensors"])
    flipped[-5] ^= 1
    s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(flipped))
    assert not status(at(place)).damaged and list(status(at(place, check_content=True)).damaged) == [3]
    assert not verify(VerifyConfig(Path(S3), structure_only=True)).faults
    faults = verify(VerifyConfig(Path(S3))).faults
    assert len(faults) == 1 and f"{S3}/hidden_states/hs_3.safetensors" in faults[0]
    s3.put_object(Bucket=BUCKET, Key=key, Body=right["hidden_states/hs_4.safetensors"])
    assert len(verify(VerifyConfig(Path(S3), structure_only=True)).faults) == 1


# Kills.


def test_killed_between_a_rows_upload_and_its_being_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Bucket.upload

    def upload(self: Bucket, name: str, content: bytes) -> None:
        own(self, name, content)
        if name.endswith("hs_3.safetensors"):
            die()

    def run() -> None:
        monkeypatch.setattr(Bucket, "upload", upload)
        extract(at(place, batch_size=1))

    assert in_child(run) == -signal.SIGKILL
    there = objects("states/")
    assert "hidden_states/hs_3.safetensors" in there and ".lock" in there
    result = extract(at(place))
    # The owner was a process of this machine: nobody waits for its lock to expire.
    assert "whether it lives" not in capsys.readouterr().err and result.kept_rows == 4
    place.extract()
    assert same(objects("states/"), files(place.root / "states"))


def test_killed_in_the_middle_of_an_upload_in_parts(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "_WHOLE", 10 << 20)
    monkeypatch.setattr(bucket_module, "_PARTS_AT_ONCE", 1)
    content = bytes(range(256)) * (48 << 10)
    parts: list[int] = []

    def run() -> None:
        def second_part(**_: Any) -> None:
            parts.append(1)
            if len(parts) == 2:
                die()

        store._s3.meta.events.register("before-send.s3.UploadPart", second_part)
        store.upload("hidden_states/hs_0.safetensors", content)

    assert in_child(run) == -signal.SIGKILL
    assert not objects(), "a part of an object can be seen"
    rows = rows_at(store.address, FORMATS["hs_safetensors"], "f")
    assert rows.indices() == [] and len(client().list_multipart_uploads(Bucket=BUCKET)["Uploads"]) == 1
    assert store.abort_unfinished() == 1 and "Uploads" not in client().list_multipart_uploads(Bucket=BUCKET)
    store.upload("hidden_states/hs_0.safetensors", content)
    assert objects()["states/hidden_states/hs_0.safetensors"] == content


def test_killed_at_later_and_later_requests_of_a_run(place: Place) -> None:
    """From the first one on, until a run ends by itself; at random lines of the code: `crash_store.py`."""
    place.extract(format="speculators-0.4")
    for deadly in range(1, 400, 13):

        def run(deadly: int = deadly) -> None:
            import boto3

            count = [0]

            def killing(**_: Any) -> None:
                count[0] += 1
                if count[0] == deadly:
                    die()

            plain = boto3.session.Session.client

            def counted(self: Any, *given: Any, **named: Any) -> Any:
                made = plain(self, *given, **named)
                made.meta.events.register("before-send.s3.*", killing)
                return made

            boto3.session.Session.client = counted
            extract(at(place, format="speculators-0.4"))

        code = in_child(run)
        assert code in (0, -signal.SIGKILL)
        there = objects("states/")
        assert "manifest.json" in there or not [name for name in there if name.startswith("data_")]
        if code == 0:
            break
    else:
        pytest.fail("no run came to its end")
    assert deadly > 20 and same(objects("states/"), files(place.root / "states"))
    assert not verify(VerifyConfig(Path(S3), prepared=place.data)).faults


# One writer.


def test_a_second_writer_is_refused_while_the_first_lives(place: Place, store: Bucket) -> None:
    first = StoreLock(store, PATIENT)
    first.acquire()
    with pytest.raises(UsageError, match="renews its lock"):
        extract(at(place))
    assert holder(Path(S3)) and status(at(place)).done == 0
    first.check()
    first.release()
    assert holder(Path(S3)) is None and extract(at(place)).complete
    assert ".lock" not in objects("states/")


def test_of_several_that_come_at_once_one_gets_the_lock(store: Bucket) -> None:
    locks, got, refused = [StoreLock(store, PATIENT) for _ in range(6)], [], []

    def come(lock: StoreLock) -> None:
        try:
            lock.acquire()
            got.append(lock)
        except UsageError:
            refused.append(lock)

    threads = [threading.Thread(target=come, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 5
    got[0].release()


def test_the_lock_of_a_machine_that_is_gone_expires_and_its_owner_notices(store: Bucket) -> None:
    gone = StoreLock(store, Times(beat=100.0, expiry=1000.0))
    gone.acquire()
    said = json.loads(objects("states/")[".lock"]) | {"machine": "another"}
    store.put_if(".lock", json.dumps(said).encode(), getattr(look(store), "etag", None))
    later, began = StoreLock(store, QUICK), time.monotonic()
    later.acquire()
    assert time.monotonic() - began >= QUICK.expiry
    later.check()
    gone._times = QUICK  # as if it had been stopped, and goes on now
    time.sleep(2 * QUICK.beat + 0.1)
    with pytest.raises(SpecshimError, match="has it"):
        gone.check()
    gone.release()
    assert getattr(look(store), "token", "") == later.token, "the loser removed the winner's lock"
    later.release()


def test_a_run_that_lost_its_lock_stops(place: Place, store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    own = FakeEngine.states

    def states(self: Any, rows: Any) -> Any:
        client().put_object(Bucket=BUCKET, Key="states/.lock", Body=b"not yours")
        time.sleep(3 * QUICK.beat)
        return own(self, rows)

    monkeypatch.setattr(FakeEngine, "states", states)
    with pytest.raises(SpecshimError, match="this run to hold its lock"):
        extract(at(place, batch_size=4))
    assert objects("states/")[".lock"] == b"not yours"
    assert json.loads(objects("states/")["manifest.json"])["complete"] is False


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_a_condition_is_refused(store: Bucket, header: str) -> None:
    def drop(params: Any, **_: Any) -> None:
        params["headers"].pop(header, None)

    store._s3.meta.events.register("before-call.s3.PutObject", drop)
    with pytest.raises(UsageError, match=f"ignores {header}"):
        StoreLock(store, QUICK).acquire()
    assert not objects()


# What a store can do wrong.


def test_names_that_lead_elsewhere_are_refused_by_every_command(place: Place, tmp_path: Path) -> None:
    extract(at(place))
    record = json.loads(objects("states/")["manifest.json"])
    for key in ("../../outside", "/etc/passwd", "a\\b", "a\tb"):
        client().put_object(Bucket=BUCKET, Key=f"states/{key}", Body=b"x")
        assert f"states/{key}" in objects(), "the client has tidied the name up"
        for run in (
            lambda: extract(at(place)),
            lambda: status(at(place)),
            lambda: verify(VerifyConfig(Path(S3))),
            lambda: fetch(FetchConfig(Path(S3), tmp_path / "copy")),
            lambda: open_data(Path(S3), record, "--data").indices(),
        ):
            with pytest.raises(SpecshimError, match="leads elsewhere"):
                run()
        client().delete_object(Bucket=BUCKET, Key=f"states/{key}")
    assert not (tmp_path / "outside").exists() and not list((tmp_path / "copy").glob("[!.]*"))
    client().put_object(Bucket=BUCKET, Key="states/read mé.txt", Body=b"x")
    assert not verify(VerifyConfig(Path(S3))).faults


def test_strangers_beside_the_rows_are_left_alone_and_named_where_a_trainer_would_read_them(
    place: Place, tmp_path: Path
) -> None:
    extract(at(place, format="speculators-0.4"))
    client().put_object(Bucket=BUCKET, Key="states/best.pt", Body=b"not ours")
    faults = verify(VerifyConfig(Path(S3))).faults
    assert faults == [f"{S3}/best.pt: would be read as a sample, because its name ends in pt"]
    assert fetch(FetchConfig(Path(S3), tmp_path / "copy")).others == 1
    assert not (tmp_path / "copy" / "best.pt").exists()


def test_a_store_that_is_down_is_told_in_four_parts_without_secrets(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://someone:hidden-word@127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    clients.forget()
    for arguments in (
        ["extract", "--model-path", str(place.model), "--prepared-data", str(place.data), "--output-dir", S3],
        ["verify", S3],
        ["fetch", S3, "--output-dir", str(place.root / "copy")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr().err
        assert ended.value.code == 1 and "AWS_ENDPOINT_URL" in said and "Could not connect" in said
        assert all(part in said for part in ("wanted:", "found:", "next:")) and "Traceback" not in said
        assert "hidden-word" not in said
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in said and KEYS["AWS_ACCESS_KEY_ID"] not in said
    assert not (place.root / "copy").exists()


def test_a_store_that_goes_away_in_the_middle_ends_the_run_and_what_was_sent_counts(
    place: Place, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = FakeEngine.states, [0]

    def states(self: Any, rows: Any) -> Any:
        seen[0] += 1
        if seen[0] == 4:
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
            clients.forget()
        return own(self, rows)

    monkeypatch.setattr(FakeEngine, "states", states)
    with pytest.raises(StoreError, match="what is finished is kept"):
        extract(at(place, batch_size=1))
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    clients.forget()
    there = objects("states/")
    assert ".lock" in there and sum(name.endswith(".safetensors") for name in there) == 3
    monkeypatch.setattr(target_module, "TIMES", QUICK)
    began = time.monotonic()
    result = extract(at(place, batch_size=1))  # the owner's process lives, but renews nothing any more
    assert time.monotonic() - began >= QUICK.expiry and result.kept_rows == 3 and result.complete


def answering(status_code: int, code: str, times: int, count: list[int]) -> Callable[..., Any]:
    """A handler in place of the network: this answer so many times, then the real one."""
    from botocore.awsrequest import AWSResponse

    class Raw:
        def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
            yield f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()

    def answer(request: Any, **_: Any) -> Any:
        count[0] += 1
        return AWSResponse(request.url, status_code, {}, Raw()) if count[0] <= times else None

    return answer


@pytest.mark.parametrize(
    ("status_code", "code", "kind", "said"),
    [
        (403, "AccessDenied", UsageError, "permission"),
        (403, "SignatureDoesNotMatch", UsageError, "credentials"),
        (404, "NoSuchBucket", UsageError, "a bucket that exists"),
        (507, "XMinioStorageFull", StoreError, "make room there"),
        (400, "QuotaExceeded", StoreError, "make room there"),
        (500, "InternalError", StoreError, "the same command goes on"),
    ],
)
def test_refusals_of_a_store_are_told(
    store: Bucket, monkeypatch: pytest.MonkeyPatch, status_code: int, code: str, kind: type[Exception], said: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    clients.forget()
    store._s3.meta.events.register("before-send.s3.PutObject", answering(status_code, code, 9, [0]))
    with pytest.raises(kind, match=said) as caught:
        store.upload("hidden_states/hs_0.safetensors", b"x")
    assert code in str(caught.value) and f"{S3}/hidden_states/hs_0.safetensors" in str(caught.value)


def test_a_refusal_in_a_worker_is_no_wrong_state(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.engines.row_sink import RowSink
    from pipeline.job import plan_job, row_sink_settings

    config = replace(place.config(engine="direct"), output_dir=Path("s3://no-such-bucket/x"))
    sink = RowSink(**row_sink_settings(replace_target(plan_job(config)), "s").as_dict())
    with pytest.raises(SinkError, match="a bucket that exists"):
        sink.write("0", [1, 2], torch.zeros(2, 4, 4))


def replace_target(job: Any) -> Any:
    target = target_module.StoreTarget(parse(job.config.output_dir, "f"), Path("/unused"), None)
    return replace(job, target=target)


def test_what_passes_is_waited_out_and_what_stays_is_not_for_ever(
    store: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.retries import standard

    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.01)
    count = [0]
    store._s3.meta.events.register("before-send.s3.PutObject", answering(503, "SlowDown", 3, count))
    store.upload("hidden_states/hs_0.safetensors", b"x")
    assert count == [4] and objects() == {"states/hidden_states/hs_0.safetensors": b"x"}
    for_ever = [0]
    store._s3.meta.events.register_first("before-send.s3.GetObject", answering(503, "SlowDown", 10**9, for_ever))
    with pytest.raises(StoreError, match="SlowDown"):
        store.read("hidden_states/hs_0.safetensors")
    assert for_ever == [6]


def test_an_object_of_another_size_than_was_sent_is_no_row(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    own = store._s3.put_object
    monkeypatch.setattr(store._s3, "put_object", lambda **given: own(**given | {"Body": given["Body"] + b"framing"}))
    with pytest.raises(StoreError, match="one of 8 bytes"):
        store.upload("hidden_states/hs_0.safetensors", b"x")


# Reading.


def test_rows_are_read_as_from_files_and_kept_within_the_limit(place: Place, tmp_path: Path, store: Bucket) -> None:
    place.extract()
    extract(at(place))
    sizes = {found.name: found.size for found in store.list("hidden_states/")}
    limit = sum(sizes[f"hidden_states/hs_{index}.safetensors"] for index in range(5))
    form = FORMATS["hs_safetensors"]
    local, remote = (
        form.open(place.root / "states", 1),
        rows_at(store.address, form, "f", kept=Kept(tmp_path / "kept", limit)),
    )
    for _ in range(2):
        remote.expect(range(ROWS))
        for index in reversed(range(ROWS)):
            mine, theirs = remote.read(index), local.read(index)
            assert torch.equal(mine.states, theirs.states) and mine.header == theirs.header
            assert remote.tokens(index) == local.tokens(index)
    kept = files(tmp_path / "kept")
    assert sorted(kept) == [f"hidden_states/hs_{index}.safetensors" for index in range(5)]
    assert sum(map(len, kept.values())) <= limit
    with pytest.raises(FileNotFoundError):
        remote.read(ROWS)
    # A kept file that was cut off is fetched again.
    (tmp_path / "kept" / "hidden_states" / "hs_2.safetensors").write_bytes(b"x")
    assert torch.equal(remote.read(2).states, local.read(2).states)


def test_structure_takes_one_small_request_a_row(place: Place, store: Bucket) -> None:
    """States of 512 kB a row, of which the check fetches an eighth."""
    place.model = write_model(place.root / "wide", hidden=512)
    prepare(PrepareConfig(str(place.model), place.data.parents[1] / "conversations.jsonl", place.root / "p2"))
    place.data = place.root / "p2" / "tokenized_data.jsonl"
    extract(at(place))
    rows = rows_at(store.address, FORMATS["hs_safetensors"], "f")
    asked: list[str] = []
    rows._bucket._s3.meta.events.register(
        "before-send.s3.GetObject", lambda request, **_: asked.append(request.headers.get("Range"))
    )
    from pipeline.formats import Wanted

    for index in range(ROWS):
        tokens = rows.check(index, Wanted(4, 512, "float32", {"row": str(index)}))
        assert len(rows.tokens(index)[0]) == tokens and tokens * 4 * 512 * 4 > 4 * (64 << 10)
    assert [str(given) for given in asked] == ["b'bytes=0-65535'"] * ROWS or asked == ["bytes=0-65535"] * ROWS


def test_fetch_goes_on_where_it_stopped_and_does_not_mix_sets(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(at(place))
    own, count = Bucket.download, [0]

    def download(self: Bucket, name: str, path: Path) -> None:
        if name.endswith(".safetensors"):
            count[0] += 1
        if count[0] == 5:
            raise StoreError("a", "b", "lost", "d")
        own(self, name, path)

    copy = tmp_path / "copy"
    monkeypatch.setattr(Bucket, "download", download)
    with pytest.raises(StoreError):
        fetch(FetchConfig(Path(S3), copy))
    monkeypatch.setattr(Bucket, "download", own)
    assert not (copy / "manifest.json").exists()
    result = fetch(FetchConfig(Path(S3), copy))
    assert result.kept >= 4 and result.kept + result.files == ROWS
    assert files(copy) == objects("states/")
    assert fetch(FetchConfig(Path(S3), copy)).files == 0
    extract(at(place, f"s3://{BUCKET}/other", max_seq_len=16))
    for folder in (copy, place.root):
        with pytest.raises(UsageError, match="choose another folder"):
            fetch(FetchConfig(Path(f"s3://{BUCKET}/other"), folder))


def test_an_unfinished_set_is_not_fetched_or_taken_for_right(place: Place, tmp_path: Path) -> None:
    place.make = lambda options: FakeEngine(options, fail_at=5)
    with pytest.raises(SpecshimError):
        extract(at(place, batch_size=1))
    with pytest.raises(UsageError, match=rf"{S3}/manifest.json"):
        fetch(FetchConfig(Path(S3), tmp_path / "copy"))
    faults = verify(VerifyConfig(Path(S3))).faults
    assert any("has not finished" in fault and S3 in fault for fault in faults)


def test_no_set_at_an_address_is_told(store: Bucket) -> None:
    with pytest.raises(UsageError, match=rf"data folder {S3}"):
        verify(VerifyConfig(Path(S3)))
    with pytest.raises(UsageError, match="a bucket that exists"):
        verify(VerifyConfig(Path("s3://no-such-bucket/x")))


def test_the_command_line_names_the_address_in_full(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "extract", "--model-path", str(place.model), "--prepared-data", str(place.data), "--output-dir", S3,
        "--engine", "stock", "--dtype", "float32",
    ]  # fmt: skip
    main_ends(given)
    assert f"-> {S3}" in capsys.readouterr().out
    main_ends([*given, "--status"])
    assert f"{ROWS} of {ROWS} rows done" in capsys.readouterr().out
    main_ends(["verify", S3, "--structure"])
    main_ends(["fetch", S3, "--output-dir", str(place.root / "copy")])
    said = capsys.readouterr().out
    assert "right in structure" in said and f"{ROWS} files copied: {S3} -> " in said


def main_ends(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


def test_old_tables_are_removed_before_the_manifest_names_new_ones(store: Bucket, tmp_path: Path) -> None:
    for number in range(2):
        client().put_object(Bucket=BUCKET, Key=f"states/data-0000{number}-of-00002.arrow", Body=b"old")
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"new")
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / ".lock").write_text("1")
    (tmp_path / "secret.txt").write_text("not one of ours")
    Beside(store, tmp_path).publish()
    assert objects("states/") == {"data-00000-of-00001.arrow": b"new", "manifest.json": b"{}"}


# Training.


@pytest.mark.parametrize("workers", [0, 1])
def test_a_store_that_goes_away_under_a_loader_is_told_in_four_parts(
    place: Place, store: Bucket, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    extract(at(place))
    rows = rows_at(store.address, FORMATS["hs_safetensors"], "f")
    lengths = [len(rows.tokens(index)[0]) for index in rows.indices()]
    packed = PackedRows(rows, range(ROWS), lengths, SERIES[0], max_tokens=256, dtype=torch.float32)
    assert packed[[[0, 1]]]["tokens"] == lengths[0] + lengths[1] - 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    clients.forget()
    with pytest.raises(SpecshimError, match="AWS_ENDPOINT_URL") as caught:
        next(iter(BatchStream(packed, [[[2], [3]]], workers=workers)))
    assert caught.value.where == f"{S3}/hidden_states/hs_2.safetensors"


@pytest.mark.parametrize("workers", [2])
def test_training_from_an_address_takes_the_same_steps(store: Bucket, tmp_path: Path, workers: int) -> None:
    pytest.importorskip("speculators")
    from pipeline_fixtures import write_states
    from test_training_resume import settings, weights

    write_states(tmp_path, rows=8)
    for name, content in files(tmp_path / "states").items():
        client().put_object(Bucket=BUCKET, Key=f"states/{name}", Body=content)
    few = {"max_steps": 2, "save_steps": 0, "val_steps": 0, "noise_std": 0.05}
    here = train(settings(tmp_path, "from-folder", **few))
    half = sum(found.size for found in store.list("hidden_states/")) / 2
    kept = {"cache_dir": tmp_path / "cache", "cache_gib": half / (1 << 30)}
    there = train(replace(settings(tmp_path, "from-store", **few, **kept, workers=workers), data=Path(S3)))
    assert there.end == here.end
    ours, theirs = weights(there.draft), weights(here.draft)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    found = files(tmp_path / "cache")
    assert 2 <= len(found) < 8 and sum(map(len, found.values())) <= half
