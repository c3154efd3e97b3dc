"""The extraction by replicas, from plan to a checked folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline import disk, manifest, run_history
from pipeline.bad_rows import BadRow, refuse_too_many
from pipeline.config import ExtractConfig, VerifyConfig
from pipeline.engines import DIRECT
from pipeline.extract import Extracted, finish, say_estimate, say_plan, survey
from pipeline.finishing import vocabulary_of
from pipeline.formats import DamagedRow
from pipeline.formats.stores import Claim
from pipeline.job import Job, engine_options, placed, plan_job, refuse_foreign_folder, row_sink_settings, settings_of
from pipeline.lock import exclusive
from pipeline.places import signature
from pipeline.preflight import choose, preflight
from pipeline.progress import StageProgress, heartbeat, stage_progress
from pipeline.replicas.leases import Leases
from pipeline.replicas.ledger import Ledger
from pipeline.replicas.ray_cluster import RayCluster, connected, require_ray
from pipeline.replicas.replica import Task
from pipeline.replicas.sink import LeasedSinkSettings
from pipeline.replicas.supervisor import Life, Owner, Supervisor
from pipeline.row_set import RowSet
from pipeline.verify import verify
from pipeline.writing import writing
from shims.errors import SpecshimError, UsageError

_ROWS_PER_CHUNK = 16
"""Where a file holds one row; else a chunk is a file."""
_ROUNDS = 2
"""Times that what the check finds missing or damaged is computed before the run gives up."""


def extract_with_replicas(config: ExtractConfig) -> Extracted:
    """As :func:`pipeline.extract.extract`, by several engines; ends when the structure check has passed.

    Raises:
        UsageError: an option or input cannot be used; nothing was changed.
        DiskFull: the space ended; finished rows stay.
        SpecshimError: replicas died too often, or gave impossible states; finished rows stay.
    """
    job = plan_job(config)
    _check(job)
    require_ray()
    mapping = vocabulary_of(config.vocab, job.model.fingerprint)
    say_plan(job)
    with placed(job) as job, exclusive(job.config.output_dir), contextlib.ExitStack() as files:
        settings = settings_of(job)
        refuse_foreign_folder(job, settings)
        leases = files.enter_context(contextlib.closing(Leases(job.config.output_dir)))
        # What a killed run left behind may still be writing for a moment.
        leases.wait_for_all()
        for number in range(_ROUNDS):
            done = _round(job, settings, leases, mapping)
            faults = verify(VerifyConfig(config.output_dir, structure_only=True, prepared=config.prepared_data)).faults
            if not faults:
                return done
            if number == _ROUNDS - 1:
                raise SpecshimError(
                    str(config.output_dir),
                    "`specshim verify --structure` to pass",
                    f"{len(faults)} faults, the first: {faults[0]}",
                    "look at that file and at the disk; the same command computes such rows again",
                )
    raise AssertionError("a round either returns or raises")


def _check(job: Job) -> None:
    replicas = job.config.replicas or 0
    for flag, value, low in (("--replicas", replicas, 1), ("--max-restarts", job.config.max_restarts, 0)):
        if value < low:
            raise UsageError(flag, f"at least {low}", str(value), "give a larger number")
    if job.engine != DIRECT:
        raise UsageError(
            "--replicas",
            "the direct engine, whose workers write their rows themselves",
            f"--engine {job.engine}",
            "give --engine direct, or leave out --replicas",
        )
    if not job.shard.alone:
        raise UsageError(
            "--replicas",
            "the whole data set: replicas share out its rows themselves",
            f"--shard {job.shard}",
            "give one of the two",
        )


def _round(job: Job, settings: Mapping[str, Any], leases: Leases, mapping: tuple[Any, Any] | None) -> Extracted:
    rows = job.rows()
    found = survey(job, rows)
    done = Extracted(found.rows, found.tokens, found.cut_rows, found.done, redone_rows=len(found.damaged))
    record = manifest.compose("extract", with_plan=True, **settings)
    if found.to_compute:
        say_estimate(job, rows, found.to_compute, run_history.stack_name(record))
        _Run(job, rows, record, leases, done, found.to_compute).compute()
    finish(job, rows, record, None, done, mapping)
    return done


class _Run:
    """The computing of the rows that are missing."""

    def __init__(
        self, job: Job, rows: RowSet, record: dict[str, Any], leases: Leases, done: Extracted, missing: Sequence[int]
    ) -> None:
        self._job, self._rows, self._record, self._leases, self._done = job, rows, record, leases, done
        self._missing = missing
        self._config = job.config
        self._progress: StageProgress | None = None
        lengths = rows.lengths(missing)
        needed = job.row_bytes.total(lengths)
        reserve = int(self._config.min_free_gib * disk.GIB)
        self._space = job.target.space(self._config.output_dir, needed, reserve)
        self._claim = Claim(len(job.data), absent=rows.bad.rows.keys())

    def compute(self) -> None:
        """Have replicas compute them, and say in the manifest what each did."""
        config, replicas = self._config, self._config.replicas or 1
        with connected(config.ray_address) as ray:
            cluster = RayCluster(ray, self._task(), replicas, config.tp_size)
            owner = Owner(self._began, self._settled, self._found, self._leases.free, self._there)
            supervisor = Supervisor(cluster, replicas, config.max_restarts, owner)
            try:
                with heartbeat(f"starting {replicas} replicas"):
                    first = supervisor.first()
                if config.preflight:
                    self._preflight(cluster, first)
                # What a killed run left is cleared before; full shards are named after.
                self._sweep()
                with stage_progress("extract", len(self._missing)) as self._progress:
                    supervisor.run(Ledger(self._missing, self._rows_per_chunk))
                self._done.seconds = self._progress.seconds
            finally:
                self._done.restarts, self._done.lives = supervisor.restarts, supervisor.lives
                cluster.close()
        self._leases.wait_for_all()
        self._sweep()
        self._end(supervisor.lives)

    @property
    def _rows_per_chunk(self) -> int:
        return self._config.rows_per_file if self._job.format.many_rows_per_file else _ROWS_PER_CHUNK

    def _task(self) -> Task:
        # Each replica writes the name of its own stack into its rows. It may have another working folder.
        settings = asdict(row_sink_settings(self._job, stack=""))
        paths = ("prepared_data", "model") if self._job.target.address else ("folder", "prepared_data", "model")
        settings |= {name: str(Path(settings[name]).absolute()) for name in paths}
        options = engine_options(self._job)
        options = replace(options, model=replace(options.model, path=options.model.path.absolute()))
        sink = LeasedSinkSettings(**settings, rows_per_chunk=self._rows_per_chunk)
        guessed = self._config.dtype == "auto" and self._job.dtype != self._job.model.dtype
        return Task(options, sink, signature(sink.folder), guessed=guessed)

    def _preflight(self, cluster: RayCluster, slot: int) -> None:
        job = self._job
        preflight(
            _OneReplica(cluster, slot),
            [self._rows.row(index)[1] for index in choose(self._missing, job.config.preflight)],
            model=job.model,
            layers=job.layers,
            dtype=job.dtype,
            against=job.config.preflight_against,
            trust_remote_code=job.config.trust_remote_code,
        )

    def _sweep(self) -> None:
        with writing(self._rows.store, self._claim, self._space):
            pass

    def _began(self, life: Life) -> None:
        record = self._record | dict(life.facts or {})
        life.run = run_history.begin(
            self._config.output_dir, record, engine=DIRECT, shard=str(self._job.shard), replica=life.slot + 1
        )
        self._job.target.publish()

    def _settled(self, life: Life, done: Sequence[int], faults: Mapping[int, str]) -> None:
        tokens = self._count(done)
        life.tokens += tokens
        self._done.computed_rows += len(done) + len(faults)
        self._done.computed_tokens += tokens
        for index, fault in faults.items():
            row_id, ids, mask = self._rows.row(index)
            bad = BadRow(index, row_id, fault, ids, mask)
            self._count([index])
            if self._config.max_bad:
                self._rows.bad.add(bad)
                self._job.target.publish()
            refuse_too_many(self._rows.bad, self._config.max_bad, bad)
        self._space.stop_at_low_water(0)

    def _found(self, rows: Iterable[int]) -> None:
        found = list(rows)
        self._done.kept_rows += len(found)
        self._count(found)

    def _count(self, rows: Sequence[int]) -> int:
        """Show and reckon with rows that are through; returns their tokens."""
        lengths = self._rows.lengths(rows)
        self._space.taken(self._job.row_bytes.total(lengths))
        assert self._progress is not None, "rows settle while the bar is shown"
        self._progress.advance(rows=len(rows), tokens=sum(lengths))
        return sum(lengths)

    def _there(self, index: int) -> bool:
        try:
            self._rows.check(index)
        except (DamagedRow, FileNotFoundError):
            return False
        return True

    def _end(self, lives: Sequence[Life]) -> None:
        """Complete the manifest's entries of the replicas that lived to the end."""
        for life in lives:
            if life.run is None or life.cause:
                continue
            seconds = round((life.last or 0.0) - (life.first or 0.0), 2)
            facts = {"rows": life.rows, "tokens": life.tokens, "seconds": max(0.0, seconds)}
            run_history.end(self._config.output_dir, "extract", life.run, facts)
        self._job.target.publish()


class _OneReplica:
    """A replica as an engine that returns states, for the preflight."""

    def __init__(self, cluster: RayCluster, slot: int) -> None:
        self._cluster, self._slot = cluster, slot

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """States of each row: CPU tensors [T, L, H]."""
        return self._cluster.states(self._slot, rows)

    def close(self) -> None:
        """The replica goes on."""
