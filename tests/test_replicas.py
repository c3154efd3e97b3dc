"""`extract --replicas`: who gets which rows, and what happens when replicas die. Ray itself: `nox -s live-scale`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.replicas import supervisor as supervisor_module
from pipeline.replicas.leases import Leases, wait_for_writers
from pipeline.replicas.ledger import Ledger
from pipeline.replicas.ray_cluster import RayCluster, _short, by_rank, cores_of
from pipeline.replicas.replica import Answer, _told
from pipeline.replicas.supervisor import Event, Life, Owner, Supervisor
from shims.errors import SinkError, SpecshimError, UsageError, WrongStatesError
from shims.guardian import below, identity, watch


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 400), min_size=1, max_size=60), st.sampled_from([1, 3, 16]), st.integers())
def test_each_row_is_settled_once_and_a_chunk_is_with_one_replica(rows: set[int], size: int, seed: int) -> None:
    choose = random.Random(seed)
    ledger = Ledger(sorted(rows), size)
    held: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    settled: list[int] = []
    while ledger.unsettled:
        who = choose.randrange(3)
        what = choose.choice(["take", "settle", "settle", "die"])
        if what == "take":
            new = ledger.take(who)
            assert len({row // size for row in new}) <= 1
            others = set().union(*(held[other] for other in held if other != who))
            assert not {row // size for row in new} & {row // size for row in others}
            held[who] |= set(new)
        elif what == "settle" and held[who]:
            some = choose.sample(sorted(held[who]), choose.randint(1, len(held[who])))
            ledger.settle(who, some)
            settled += some
            held[who] -= set(some)
        elif what == "die":
            for chunk, left in ledger.take_back(who).items():
                assert left <= held[who]
                there = {row for row in left if choose.random() < 0.3}
                ledger.put_back(chunk, left - there, settled=len(there))
                settled += there
            held[who] = set()
        assert ledger.backlog(who) == len(held[who])
    assert sorted(settled) == sorted(rows) and not ledger.waiting and not ledger.not_handed_out


def test_a_row_keeps_its_chunk_whatever_is_finished() -> None:
    def chunks(rows: Sequence[int]) -> set[frozenset[int]]:
        ledger = Ledger(rows, 4)
        return {frozenset(row // 4 for row in ledger.take(0)) for _ in range(10)} - {frozenset()}

    assert chunks(range(12)) == {frozenset({0}), frozenset({1}), frozenset({2})}
    assert chunks([5, 6, 11]) == {frozenset({1}), frozenset({2})}


class Scripted:
    """A cluster in memory. A replica writes rows to a set; it dies as its script says, with rows untold."""

    def __init__(self, choose: random.Random, deaths: int, poison: int | None = None) -> None:
        self._choose, self._deaths, self._poison = choose, deaths, poison
        self._queue: dict[int, list[int]] = {}
        self._events: list[Event] = []
        self.disk: set[int] = set()
        self.computed: list[int] = []
        self.started = 0
        self.opening: Answer | None = None

    def start(self, slot: int) -> None:
        self.started += 1
        self._queue[slot] = []
        self._events.append(Event(slot, self.opening or Answer()))

    def work(self, slot: int, rows: Sequence[int]) -> None:
        assert not any(event.slot == slot for event in self._events), "called twice at once"
        self._queue[slot] += rows
        some = self._queue[slot][: self._choose.randint(1, 9)]
        del self._queue[slot][: len(some)]
        if self._poison in some:
            self._events.append(Event(slot, cause=f"row {self._poison} kills"))
            return
        self.computed += some
        self.disk |= set(some)
        if self._deaths and self._choose.random() < 0.2:
            self._deaths -= 1
            self._events.append(Event(slot, cause="killed"))
            return
        self._events.append(Event(slot, Answer(done=some)))

    def next(self, seconds: float) -> Event | None:
        self._choose.shuffle(self._events)
        return self._events.pop() if self._events else None

    def end(self, slot: int) -> None:
        self._events = [event for event in self._events if event.slot != slot]


class Told:
    """The extraction's side."""

    def __init__(self, cluster: Scripted) -> None:
        self.settled: list[int] = []
        self.found: list[int] = []
        self.looks: dict[int, int] = {}
        self._cluster = cluster

    def free(self, chunk: int) -> bool:
        """Busy at the first look: something that was left behind still writes."""
        self.looks[chunk] = self.looks.get(chunk, 0) + 1
        return self.looks[chunk] > 1

    def owner(self) -> Owner:
        def settled(life: Life, done: Sequence[int], faults: Any) -> None:
            self.settled += done

        return Owner(lambda life: None, settled, self.found.extend, self.free, self._cluster.disk.__contains__)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_deaths_lose_nothing_and_nothing_finished_is_computed_again(seed: int, replicas: int) -> None:
    cluster = Scripted(random.Random(seed), deaths=6)
    told = Told(cluster)
    supervisor = Supervisor(cluster, replicas, 10, told.owner())
    supervisor.first()
    rows = [row for row in range(500) if row % 7]
    supervisor.run(Ledger(rows, 16))
    assert sorted(cluster.computed) == rows
    assert sorted([*told.settled, *told.found]) == rows
    assert supervisor.restarts == cluster.started - replicas
    assert len(told.settled) == sum(life.rows for life in supervisor.lives)


def test_restarts_are_bounded_and_the_cause_is_told() -> None:
    cluster = Scripted(random.Random(0), deaths=0, poison=40)
    supervisor = Supervisor(cluster, 2, 50, Told(cluster).owner())
    supervisor.first()
    with pytest.raises(SpecshimError, match="times in a row without a finished row; last: row 40 kills"):
        supervisor.run(Ledger(range(64), 16))
    assert cluster.started < 20
    few = Scripted(random.Random(0), deaths=100)
    supervisor = Supervisor(few, 2, 3, Told(few).owner())
    supervisor.first()
    with pytest.raises(SpecshimError, match="--max-restarts"):
        supervisor.run(Ledger(range(900), 16))
    assert few.started == 2 + 3


def test_what_would_fail_again_is_not_tried_again() -> None:
    cluster = Scripted(random.Random(0), deaths=0)
    cluster.opening = Answer(error=("loading M", "vLLM to start", "no such layer", "look"))
    with pytest.raises(SpecshimError, match="no such layer"):
        Supervisor(cluster, 2, 5, Told(cluster).owner()).first()
    assert cluster.started == 2


def test_a_process_that_keeps_a_chunk_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_LEFT_BEHIND", 0.0)
    cluster = Scripted(random.Random(0), deaths=1)
    told = Told(cluster)
    monkeypatch.setattr(told, "free", lambda chunk: False)
    supervisor = Supervisor(cluster, 1, 5, told.owner())
    supervisor.first()
    with pytest.raises(SpecshimError, match="still holds the chunk's lock"):
        supervisor.run(Ledger(range(900), 16))


def test_a_lease_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pipeline.replicas.leases import Leases; "
        "leases = Leases(Path(sys.argv[1])); leases.take(3); leases.take(4); print('held', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    leases = Leases(tmp_path)
    assert leases.free(2) and not leases.free(3) and not leases.free(4) and leases.free(5)
    monkeypatch.setattr(Leases.wait_for_all, "__defaults__", (0.3,))
    for attempt in (lambda: leases.take(3, 0.3), leases.wait_for_all, lambda: wait_for_writers(tmp_path)):
        with pytest.raises(SpecshimError, match="an engine that an earlier run left behind"):
            attempt()
    other.kill()
    leases.take(3, 60)
    leases.wait_for_all(60)
    wait_for_writers(tmp_path)
    wait_for_writers(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    other.wait()


def _looked(owner: int) -> None:
    """Wait until the process that looks after ``owner`` has done so from here on: it rests between two looks."""
    ends = time.monotonic() + 60
    rests: list[int] = []
    while (not rests or rests[-1] < rests[0] + 3) and time.monotonic() < ends:
        time.sleep(0.05)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().split(b"\0")
                if b"shims.guardian" in command and str(owner).encode() in command:
                    said = (process / "status").read_text()
                    rests.append(int(said.partition("\nvoluntary_ctxt_switches:")[2].split()[0]))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_replica_leaves_behind_is_ended(how: signal.Signals) -> None:
    code = (
        "import subprocess, sys, time; from shims.guardian import guard; guard(); "
        'inner = \'import subprocess, sys; p = subprocess.Popen([sys.executable, "-c", "input()"], '
        "stdin=subprocess.PIPE, start_new_session=True); print(p.pid, flush=True); p.wait()'; "
        "p = subprocess.Popen([sys.executable, '-c', inner], start_new_session=True); "
        "print(p.pid, flush=True); p.wait()"
    )
    replica = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    engine = [int(replica.stdout.readline()) for _ in range(2)]
    assert set(engine) <= set(below(replica.pid)) and all(identity(pid) for pid in engine)
    _looked(replica.pid)
    assert all(identity(pid) for pid in engine), "ended while the replica lives"
    replica.send_signal(how)
    replica.wait()
    ends = time.monotonic() + 60
    while any(identity(pid) for pid in engine) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(identity(pid) for pid in engine)


_OWNER = (
    "import subprocess, sys, time; from shims.guardian import guarding; "
    "wait = [sys.executable, '-c', 'import time; time.sleep(600)']; "
    "start = lambda: subprocess.Popen(wait, start_new_session=True).pid; "
    "before = start(); block = guarding(); block.__enter__(); inside = start(); {leave}; after = start(); "
    "print(before, inside, after, flush=True); time.sleep(600)"
)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
@pytest.mark.parametrize(
    ("leave", "ended"),
    [("block.__exit__(None, None, None)", [False, True, False]), ("pass", [False, True, True])],
    ids=["after its start", "in the middle of its start"],
)
def test_of_several_children_the_engines_are_ended(leave: str, ended: list[bool]) -> None:
    """A model loads for minutes: who kills the command meanwhile must not find its memory taken by an orphan."""
    owner = subprocess.Popen([sys.executable, "-c", _OWNER.format(leave=leave)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    children = [int(pid) for pid in owner.stdout.readline().split()]
    _looked(owner.pid)
    assert all(identity(pid) for pid in children), "ended while the owner lives"
    owner.kill()
    owner.wait()
    ends = time.monotonic() + 60
    while [not identity(pid) for pid in children] != ended and time.monotonic() < ends:
        time.sleep(0.05)
    time.sleep(1)
    assert [not identity(pid) for pid in children] == ended
    for pid in children:
        if identity(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
def test_what_was_told_after_the_last_look_is_heard() -> None:
    """Of an owner that is killed in the moment after its engine is up."""
    told, tell = os.pipe()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        os.write(tell, f"{engine.pid}\n".encode())
        os.close(tell)
        watch(os.getpid(), "a process that was here before this one", told, ())
        assert engine.wait(60) == -signal.SIGKILL
    os.close(told)


def test_cores_are_shared_out_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9, 10, 11})
    assert [by_rank(cores_of(slot, 4), 2) for slot in (0, 1)] == ["0,1|2,3", "8,9|10,11"]
    assert [by_rank(cores_of(slot, 2), 1) for slot in range(4)] == ["0,1", "2,3", "8,9", "10,11"]


@pytest.mark.parametrize(
    ("machines", "replicas", "tp_size", "cores"),
    [
        ([{"GPU": 4.0, "CPU": 32.0}], 2, 2, 1),
        ([{"GPU": 3.0, "CPU": 8.0}, {"GPU": 3.0, "CPU": 8.0}, {"CPU": 8.0}], 2, 3, 1),
        ([{"GPU": 3.0, "CPU": 8.0}, {"GPU": 3.0, "CPU": 8.0}], 3, 2, None),
        ([{"GPU": 2.0, "CPU": 8.0}, {"GPU": 2.0, "CPU": 8.0}], 1, 4, None),
        ([{"CPU": 9.0}], 2, 2, 4),
        ([{"CPU": 4.0}, {"CPU": 4.0}, {"CPU": 4.0}], 2, 1, 4),
        ([{"CPU": 2.0}], 3, 1, None),
    ],
)
def test_a_replica_lies_on_one_machine(
    machines: list[dict[str, float]], replicas: int, tp_size: int, cores: int | None
) -> None:
    def nodes() -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": own} for own in machines] + [{"Alive": False, "Resources": {"GPU": 8.0}}]

    ray, task = SimpleNamespace(nodes=nodes), cast("Task", SimpleNamespace(guessed=False))
    if cores is None:
        with pytest.raises(UsageError, match="on one machine"):
            RayCluster(ray, task, replicas, tp_size)
    else:
        assert RayCluster(ray, task, replicas, tp_size)._cores == cores


@pytest.mark.parametrize("kind", ["GPU", "CPU"])
def test_a_machine_without_a_gpu_does_not_say_what_gpus_compute_in(kind: str) -> None:
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {kind: 4.0}}])
    task = cast("Task", SimpleNamespace(guessed=True, options=SimpleNamespace(dtype="float32")))
    if kind == "GPU":
        with pytest.raises(UsageError, match="no GPU") as refused:
            RayCluster(ray, task, 1, 2)
        assert refused.value.where == "--dtype"
    else:
        RayCluster(ray, task, 1, 2)


def test_rays_words_are_told_from_the_cause_on() -> None:
    said = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Replica\nThe actor is dead because its "
        "worker process has died. Worker exit detail: End of file. Some common causes include: (1) the process was"
    )
    assert _short(said) == "The actor is dead because its worker process has died. Worker exit detail: End of file."
    assert _short("node failed") == "node failed" and len(_short("x" * 900)) == 600


# The whole path, with replicas in this process.

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

from test_extract import Place, Streaming  # noqa: E402

from pipeline import manifest  # noqa: E402
from pipeline.__main__ import main  # noqa: E402
from pipeline.config import VerifyConfig  # noqa: E402
from pipeline.extract import extract  # noqa: E402
from pipeline.replicas import replica as replica_module  # noqa: E402
from pipeline.replicas import run as run_module  # noqa: E402
from pipeline.replicas.replica import Replica, Task  # noqa: E402
from pipeline.replicas.sink import LeasedSink  # noqa: E402
from pipeline.verify import verify  # noqa: E402


class Here(Streaming):
    """The direct engine's double with the replicas' sink."""

    asked: list[int] = []  # noqa: RUF012

    def __init__(self, options: Any, sink: Any) -> None:
        super().__init__(options, sink=_Plain(sink))
        self._sink = LeasedSink(**sink.as_dict())

    def stream(self, rows: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Any]:
        for index, ids in rows:
            self.asked.append(index)
            yield from super().stream([(index, ids)])


class _Plain:
    """Settings as the plain sink takes them."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self._settings.as_dict().items() if k != "rows_per_chunk"}


class InProcess:
    """Real replicas, called one after the other; each of the first few dies after some rows, which it told nobody."""

    deaths = 0
    guarded = 0
    """Replicas that asked for somebody to look after them: for this process, that would be one more for each."""

    @classmethod
    def guard(cls) -> None:
        cls.guarded += 1

    def __init__(self, ray: Any, task: Task, replicas: int, tp_size: int) -> None:
        self._task, self._events = task, list[Event]()
        self._replicas: dict[int, Replica] = {}

    def start(self, slot: int) -> None:
        self._replicas[slot] = Replica(self._task)
        self._events.append(Event(slot, self._replicas[slot].open()))

    def work(self, slot: int, rows: Sequence[int]) -> None:
        answer = self._replicas[slot].work(rows)
        died = InProcess.deaths > 0 and answer.done
        InProcess.deaths -= bool(died)
        self._events.append(Event(slot, cause="killed") if died else Event(slot, answer))

    def next(self, seconds: float) -> Event | None:
        return self._events.pop(0) if self._events else None

    def end(self, slot: int) -> None:
        self._events = [event for event in self._events if event.slot != slot]

    def close(self) -> None:
        pass


@contextlib.contextmanager
def no_ray(address: str, logs: bool = False) -> Iterator[None]:
    yield None


def replicas_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`extract --replicas` starts :class:`InProcess` from here on."""
    monkeypatch.setattr(run_module, "connected", no_ray)
    monkeypatch.setattr(run_module, "require_ray", lambda: None)
    monkeypatch.setattr(run_module, "RayCluster", InProcess)
    monkeypatch.setattr(replica_module, "open_streaming", Here)
    monkeypatch.setattr(replica_module, "guard", InProcess.guard)
    monkeypatch.setattr(Here, "asked", [])
    monkeypatch.setattr(InProcess, "deaths", 0)
    monkeypatch.setattr(InProcess, "guarded", 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    replicas_in_process(monkeypatch)
    return Place(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["hs_safetensors", "sharded", "speculators-0.5"])
def test_the_set_is_the_same_whoever_dies_and_however_it_is_resized(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    more = {"engine": "direct", "format": name, "rows_per_file": 3, "max_bad": 1}
    whole = place.extract("whole", **more, replicas=1)
    assert whole.complete and whole.bad_rows == 1 and whole.restarts == 0
    Here.asked.clear()
    InProcess.deaths = 3
    hurt = place.extract(**more, replicas=2)
    assert hurt.restarts == 3 and hurt.complete and InProcess.guarded == 1 + 2 + 3
    assert place.rows() == place.rows("whole")
    assert sorted(Here.asked) == list(range(12)), "a row that a dead replica had finished was computed again"
    assert hurt.computed_rows + hurt.kept_rows == 12
    # Half of it gone, another number of replicas.
    store = place.root / "states"
    if name == "sharded":
        (store / "shards" / "rows-000000003-000000005.tar").unlink()
    else:
        for index in (3, 4, 5):
            (store / "hidden_states" / f"hs_{index}.safetensors").unlink()
    Here.asked.clear()
    again = place.extract(**more, replicas=1)
    assert sorted(Here.asked) == [3, 4, 5] and again.kept_rows == 8
    assert place.rows() == place.rows("whole")
    assert not verify(VerifyConfig(store, prepared=place.data)).faults
    runs = place.record()["runs"]
    assert len([run for run in runs if "ended" in run]) >= 2 and {run["replica"] for run in runs} == {1, 2}
    assert manifest.read(store, "extract")["complete"]  # type: ignore[index]


def test_one_engine_goes_on_with_what_replicas_began(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import extract as extract_module

    monkeypatch.setattr(InProcess, "deaths", 100)
    with pytest.raises(SpecshimError, match="no restart was left"):
        place.extract(engine="direct", max_bad=1, replicas=2, max_restarts=1)
    monkeypatch.setattr(extract_module, "StreamingEngine", Streaming)
    monkeypatch.setattr(extract_module, "open_streaming", Streaming)
    result = place.extract(engine="direct", max_bad=1)
    assert result.complete and result.kept_rows == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"replicas": 0}, "--replicas"),
        ({"replicas": 2, "max_restarts": -1}, "--max-restarts"),
        ({"replicas": 2, "engine": "stock"}, "give --engine direct"),
        ({"replicas": 2, "shard": "1/2"}, "one of the two"),
    ],
)
def test_what_replicas_cannot_do_is_refused(place: Place, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place.extract(**{"engine": "direct", **more})
    assert not (place.root / "states").exists()


@pytest.mark.parametrize("address", ["gs://bucket/x", "memory://x"])
def test_stores_that_do_not_speak_s3_are_refused(place: Place, address: str) -> None:
    settings: tuple[dict[str, Any], ...] = ({"replicas": 2}, {})
    for more in settings:
        with pytest.raises(UsageError, match="that all machines share"):
            extract(replace(place.config(**more), output_dir=Path(address)))


def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "ray", None)
    given_arguments = [
        "extract", "--model-path", str(place.model), "--prepared-data", str(place.data), "--output-dir",
        str(tmp_path / "states"), "--engine", "direct", "--replicas", "2",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(given_arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "specshim[ray]" in said and "wanted:" in said
    assert not (tmp_path / "states").exists()


def test_another_folder_under_the_same_name_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "signature", lambda folder: "")
    with pytest.raises(SpecshimError, match="storage that all machines share"):
        place.extract(engine="direct", replicas=1)
    monkeypatch.undo()
    assert json.loads(place.data.read_text().splitlines()[0])["input_ids"]


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (SinkError("row", "to be written", "no space", "make room", 28), True),
        (WrongStatesError("row", "its own", "another's", "report"), True),
        (SpecshimError("engine", "to run", "died", "again"), False),
        (ValueError("x"), False),
    ],
)
def test_what_would_go_wrong_again_ends_the_run(error: Exception, final: bool) -> None:
    told = _told(error)
    assert told.final is final and told.error is not None and all(told.error)
