"""Token ids to hidden states, in any of the formats.

What is finished is decided by what lies on disk and passes its check, so a killed run is
continued by the same command.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline import disk, duration, manifest, run_history
from pipeline.bad_rows import BadRow, refuse_too_many
from pipeline.config import ExtractConfig
from pipeline.content_checks import fault_of_states
from pipeline.engines import DIRECT, Engine, open_engine, why
from pipeline.engines.direct import StreamingEngine, open_streaming
from pipeline.finishing import finish_formats, vocabulary_of
from pipeline.formats.stores import Claim
from pipeline.job import Job, engine_options, placed, plan_job, refuse_foreign_folder, row_sink_settings, settings_of
from pipeline.lock import shared
from pipeline.preflight import choose, preflight
from pipeline.progress import StageProgress, console, heartbeat, stage_progress
from pipeline.replicas.leases import wait_for_writers
from pipeline.row_set import RowSet, Survey
from pipeline.row_storage import Storage
from pipeline.writing import writing
from shims.direct.engine import Settled
from shims.errors import SinkError, SpecshimError

if TYPE_CHECKING:
    from pipeline.replicas.supervisor import Life

_NAMED = 10
"""Rows named one by one; the rest is counted."""


@dataclass
class Extracted:
    """What a run did."""

    rows: int = 0
    tokens: int = 0
    cut_rows: int = 0
    """Rows longer than the limit, stored with ids and mask cut the same way."""
    kept_rows: int = 0
    """Found finished on disk."""
    computed_rows: int = 0
    redone_rows: int = 0
    """Found damaged on disk and computed again."""
    bad_rows: int = 0
    """Left out, because their states cannot be right; those of earlier runs included."""
    complete: bool = False
    """Whether every row of the data is there (or left out); else other shards are not done."""
    seconds: float = 0.0
    """Computing time, without loading the model."""
    computed_tokens: int = 0
    restarts: int = 0
    """Replicas that died and were replaced."""
    lives: list[Life] = field(default_factory=list)
    """Every replica that was started, of --replicas."""

    def counts(self) -> dict[str, int]:
        """The numbers for the manifest: the data's, not this run's."""
        return {"rows": self.rows, "tokens": self.tokens, "cut_rows": self.cut_rows, "bad_rows": self.bad_rows}


def extract(config: ExtractConfig) -> Extracted:
    """Compute the states of every prepared row that has no good file yet.

    Raises:
        UsageError: an option or input cannot be used; nothing was changed.
        DiskFull: the space ended; finished rows stay.
        SpecshimError: a batch failed or gave impossible states; finished rows stay.
    """
    if config.replicas is not None:
        from pipeline.replicas.run import extract_with_replicas

        return extract_with_replicas(config)
    job = plan_job(config)
    mapping = vocabulary_of(config.vocab, job.model.fingerprint)
    say_plan(job)
    with placed(job) as job, shared(job.config.output_dir, job.shard):
        settings = settings_of(job)
        refuse_foreign_folder(job, settings)
        wait_for_writers(job.config.output_dir)
        rows = job.rows()
        result = survey(job, rows)
        missing = result.missing
        done = Extracted(result.rows, result.tokens, result.cut_rows, result.done, redone_rows=len(result.damaged))
        record = manifest.compose("extract", with_plan=True, **settings)
        run = None
        if missing or result.damaged:
            missing = result.to_compute
            stack = run_history.stack_name(record)
            say_estimate(job, rows, missing, stack)
            # First of all, so that a stack that cannot do it leaves the folder as it was.
            with heartbeat("loading the model"):
                engine = _open(job, stack)
            try:
                if job.config.preflight:
                    _preflight(job, rows, engine, missing)
                run = run_history.begin(job.config.output_dir, record, engine=job.engine, shard=str(job.shard))
                job.target.publish()
                _compute(job, rows, engine, missing, stack, done)
            finally:
                engine.close()
        finish(job, rows, record, run, done, mapping)
    return done


def _open(job: Job, stack: str) -> Engine | StreamingEngine:
    if job.engine != DIRECT:
        return open_engine(job.engine, engine_options(job))
    return open_streaming(engine_options(job), row_sink_settings(job, stack))


def _compute(
    job: Job, rows: RowSet, engine: Engine | StreamingEngine, missing: Sequence[int], stack: str, done: Extracted
) -> None:
    claim = Claim(len(job.data), job.owns, rows.bad.rows.keys())
    size = {index: job.row_bytes.of(length) for index, length in zip(missing, rows.lengths(missing), strict=True)}
    reserve = int(job.config.min_free_gib * disk.GIB)
    space = job.target.space(job.config.output_dir, sum(size.values()), reserve)
    with stage_progress("extract", len(missing)) as progress:
        if isinstance(engine, StreamingEngine):
            # The worker writes; here, what a killed run left is cleared before, and full shards are named after.
            with writing(rows.store, claim, space):
                pass
            _stream(job, rows, engine, missing, size, progress, space)
            with writing(rows.store, claim, space):
                pass
        else:
            storage = Storage.of(job.store_dtype, job.last_state, job.model, job.config.trust_remote_code)
            with writing(rows.store, claim, space):
                for batch in _batches(missing, job.config.batch_size):
                    space.stop_at_low_water(sum(size[index] for index in batch))
                    _extract_batch(job, rows, engine, batch, progress, stack, storage)
                    rows.store.sync()
                    space.taken(sum(size[index] for index in batch))
    done.computed_rows, done.seconds, done.computed_tokens = progress.rows, progress.seconds, progress.tokens


def _stream(
    job: Job,
    rows: RowSet,
    engine: StreamingEngine,
    missing: Sequence[int],
    size: Mapping[int, int],
    progress: StageProgress,
    space: disk.Space,
) -> None:
    stream = engine.stream((index, rows.row(index)[1]) for index in missing)
    for settled in _told_of_a_full_disk(stream, space):
        for index in map(int, settled.done):
            progress.advance(rows=1, tokens=len(rows.row(index)[1]))
            space.taken(size[index])
        for name, fault in settled.faults.items():
            row_id, ids, mask = rows.row(int(name))
            _left_out(job, rows, BadRow(int(name), row_id, fault, ids, mask))
            progress.advance(rows=1, tokens=len(ids))
            space.taken(size[int(name)])
        space.stop_at_low_water(0)


def _told_of_a_full_disk(stream: Iterator[Settled], space: disk.Space) -> Iterator[Settled]:
    """The same; what the worker met as a full disk is one here, too."""
    try:
        yield from stream
    except SinkError as error:
        met = OSError(error.errno, os.strerror(error.errno), error.where) if error.errno else None
        if met is not None and disk.is_full(met):
            raise space.full(met) from error
        raise


def _left_out(job: Job, rows: RowSet, bad: BadRow) -> None:
    if job.config.max_bad:
        rows.bad.add(bad)
        job.target.publish()
    refuse_too_many(rows.bad, job.config.max_bad, bad)


def finish(
    job: Job, rows: RowSet, record: dict[str, Any], run: int | None, done: Extracted, mapping: tuple[Any, Any] | None
) -> None:
    """Complete the manifest; the last of several shards, and only that, finds all rows there."""
    folder = job.config.output_dir
    rows = job.rows()  # other shards may have listed bad rows meanwhile
    done.bad_rows = len(rows.bad.rows)
    done.complete = rows.all_there()
    previous = manifest.read(folder, "extract")
    if run is None and previous is not None and (previous.get("complete") or not done.complete):
        return
    if run is None and previous is None:
        run = run_history.begin(folder, record, engine=job.engine, shard=str(job.shard))
    fields: dict[str, Any] = {"counts": done.counts(), "bad_rows": rows.bad.summary(), "complete": done.complete}
    if done.seconds:
        fields["speed"] = {"tokens": done.computed_tokens, "seconds": round(done.seconds, 2)}
    if done.complete:
        finish_formats(job.format, folder, rows.tokens, rows.bad.indices, record, mapping)
    facts = {"rows": done.computed_rows, "tokens": done.computed_tokens, "seconds": round(done.seconds, 2)}
    run_history.end(folder, "extract", run, facts, **fields)
    job.target.publish()


def status(config: ExtractConfig) -> Survey:
    """What of the job lies in the output folder; changes nothing, needs no lock.

    Raises:
        UsageError: as :func:`extract`.
    """
    with placed(plan_job(config), writing=False) as job:
        refuse_foreign_folder(job, settings_of(job))
        return job.rows().survey(job.owns, content=config.check_content)


def survey(job: Job, rows: RowSet) -> Survey:
    """What is there of the rows that this process computes; said to the user."""
    found = rows.survey(job.owns, content=job.config.check_content)
    for index, damage in list(found.damaged.items())[:_NAMED]:
        console.print(f"row {index} is computed again: {damage}", highlight=False, soft_wrap=True)
    if len(found.damaged) > _NAMED:
        console.print(f"and {len(found.damaged) - _NAMED} more rows", highlight=False)
    if found.done:
        mine = found.done + len(found.bad) + len(found.to_compute)
        console.print(f"{found.done} of {mine} rows are finished already", highlight=False, soft_wrap=True)
    if found.bad:
        console.print(
            f"{len(found.bad)} rows stay out, their states were bad (bad_rows*.jsonl; delete it to compute them again)",
            highlight=False,
            soft_wrap=True,
        )
    return found


def _preflight(job: Job, rows: RowSet, engine: Engine | StreamingEngine, missing: Sequence[int]) -> None:
    preflight(
        engine,
        [rows.row(index)[1] for index in choose(missing, job.config.preflight)],
        model=job.model,
        layers=job.layers,
        dtype=job.dtype,
        against=job.config.preflight_against,
        trust_remote_code=job.config.trust_remote_code,
    )


def say_estimate(job: Job, rows: RowSet, missing: Sequence[int], stack: str) -> None:
    """Print what is still to come in bytes and time; refuse what does not fit."""
    folder = job.config.output_dir
    lengths = rows.lengths(missing)
    needed = job.row_bytes.total(lengths)
    previous = manifest.read(folder, "extract")
    time = duration.describe(job.model, sum(lengths), job.dtype, job.config.tp_size, previous)
    console.print(
        f"{len(missing)} rows to compute, {sum(lengths)} tokens: {disk.human(needed)}"
        f"{job.target.describe_room(folder)}; time {time}",
        highlight=False,
        soft_wrap=True,
    )
    if previous is not None:
        for others in run_history.other_stacks(folder, "extract", stack, job.engine):
            console.print(f"rows here were computed with {others}; the manifest keeps both", highlight=False)
    if not job.shard.alone:
        # The other shards need their part of the disk, too.
        there = set(rows.store.indices()) | rows.bad.indices
        missing = [index for index in range(len(job.data)) if index not in there]
        needed = job.row_bytes.total(rows.lengths(missing))
    if not job.config.ignore_space:
        files = -(-len(missing) // job.config.rows_per_file) if job.format.many_rows_per_file else len(missing)
        reserve = int(job.config.min_free_gib * disk.GIB)
        job.target.refuse_what_does_not_fit(folder, needed, files, reserve)


def say_plan(job: Job) -> None:
    """Print engine, layers, dtype, and how many rows are cut."""
    console.print(f"engine {job.engine} ({why(job.config.engine, job.engine)})", highlight=False, soft_wrap=True)
    given = job.config.layer_ids
    source = "default: what vLLM's EAGLE-3 serving reads, and the last layer" if given is None else "given"
    if given is not None and list(given) != sorted(given):
        source = "given in another order; stored ascending"
    console.print(
        f"layers {job.layers} = native {' '.join(map(str, job.layers.native))} ({source})",
        highlight=False,
        soft_wrap=True,
    )
    stored = "" if job.store_dtype == job.dtype else f", stored in {job.store_dtype}"
    console.print(
        f"dtype {job.dtype} ({'chosen for this machine' if job.config.dtype == 'auto' else 'given'}){stored}",
        highlight=False,
        soft_wrap=True,
    )
    cut = sum(length > job.row_limit for length in job.data.lengths)
    if cut:
        reason = (
            "--max-seq-len"
            if job.row_limit == job.config.max_seq_len
            else f"what fits in the model's context of {job.model.max_positions}"
        )
        console.print(
            f"{cut} of {len(job.data)} rows are longer than {job.row_limit} tokens ({reason}): "
            "stored cut, ids and mask alike",
            highlight=False,
            soft_wrap=True,
        )


def _batches(indices: Sequence[int], size: int) -> list[list[int]]:
    """Rows in groups of at most ``size``.

    The groups are cut at multiples of ``size``, so that rows meet the same rows in a batch however often the run was
    interrupted: the shape of a batch can decide the last bit of a state.
    """
    return [list(group) for _, group in itertools.groupby(indices, key=lambda index: index // size)]


def _named(rows: Sequence[str]) -> str:
    few = len(rows) <= 4
    return f"rows {', '.join(rows)}" if few else f"the {len(rows)} rows from {rows[0]} to {rows[-1]}"


def _extract_batch(
    job: Job,
    rows: RowSet,
    engine: Engine,
    batch: Sequence[int],
    progress: StageProgress,
    stack: str,
    storage: Storage,
) -> None:
    contents = [rows.row(index) for index in batch]
    named = _named([f"{index} (id {row_id})" for index, (row_id, _, _) in zip(batch, contents, strict=True)])
    try:
        states = engine.states([ids for _, ids, _ in contents])
    except SpecshimError as error:
        raise SpecshimError(
            where=f"{named}: {error.where}",
            wanted=error.wanted,
            found=error.found,
            next_step=f"{error.next_step}; finished rows are kept, so the same command goes on from here",
        ) from error
    except Exception as error:
        console.print(traceback.format_exc(), highlight=False, soft_wrap=True, markup=False)
        raise SpecshimError(
            where=named,
            wanted="their hidden states",
            found=f"{type(error).__name__}: {str(error).strip() or 'no message'}",
            next_step="see the traceback above; finished rows are kept, so the same command goes on from here",
        ) from error
    for index, (row_id, ids, mask), row_states in zip(batch, contents, states, strict=True):
        dtype = str(row_states.dtype).removeprefix("torch.")
        if dtype != job.dtype:
            raise SpecshimError(
                f"row {index} (id {row_id})", f"states in {job.dtype}", f"in {dtype}", "report this, with the manifest"
            )
        fault = fault_of_states(row_states, len(ids), len(job.layers.ids), job.model.hidden_size)
        if fault:
            _left_out(job, rows, BadRow(index, row_id, fault, ids, mask))
        else:
            row = storage.row(row_states, ids, mask, row_id)
            rows.store.write(index, row, job.header(index) | {"stack": stack})
        progress.advance(rows=1, tokens=len(ids))
