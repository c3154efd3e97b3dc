"""Token ids to hidden states, in any of the formats.

What is finished is decided by what lies on disk and passes its check, so a killed run is
continued by the same command.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline import disk, duration, manifest, run_history
from pipeline.bad_rows import BadRow, BadRows, refuse_too_many
from pipeline.config import ExtractConfig
from pipeline.content_checks import fault_of_states
from pipeline.devices import computing_dtype
from pipeline.engines import Engine, EngineOptions, check_engine, max_tokens, open_engine
from pipeline.final_norm import FinalNorm
from pipeline.finishing import finish_formats, vocabulary_of
from pipeline.formats import StateRow, Wanted, float8
from pipeline.formats.registry import NORMED, RESIDUAL, Format, get_format, recognised
from pipeline.formats.sidecars import check_datasets_installed
from pipeline.formats.stores import Claim, RowStore
from pipeline.layers import LayerIds, resolve
from pipeline.lock import shared
from pipeline.model_info import ModelInfo, read_model, refuse_missing_weights, refuse_remote_code, sha256_file
from pipeline.preflight import check_options, choose, preflight
from pipeline.prepared import PreparedFile
from pipeline.progress import StageProgress, console, stage_progress
from pipeline.row_set import RowSet, Survey
from pipeline.shard import Shard, parse_shard
from pipeline.writing import writing
from shims.errors import SpecshimError, UsageError

_NAMED = 10
"""Rows named one by one; the rest is counted."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
STORE_DTYPES = (*DTYPES, float8.NAME)


@dataclass(frozen=True)
class Job:
    """Everything that decides the bytes of a row; fixed before the model loads."""

    config: ExtractConfig
    model: ModelInfo
    layers: LayerIds
    data: PreparedFile
    row_limit: int
    """Tokens kept per row."""
    dtype: str
    """Computed in."""
    store_dtype: str
    """Stored in."""
    format: Format
    shard: Shard

    @property
    def last_state(self) -> str:
        """What is stored of the last state: R_n, or N where the format wants that."""
        return RESIDUAL if RESIDUAL in self.format.last_states else NORMED

    @property
    def row_bytes(self) -> disk.RowSize:
        """What a row takes on disk."""
        return disk.RowSize(len(self.layers.ids), self.model.hidden_size, self.store_dtype)

    def header(self, index: int) -> dict[str, str]:
        """Strings in a row's file that tell whose it is."""
        header = {
            "row": str(index),
            "layer_ids": " ".join(map(str, self.layers.ids)),
            "layer_convention": self.layers.convention,
            "model_fingerprint": self.model.fingerprint,
        }
        return header if self.last_state == RESIDUAL else header | {"last_state": self.last_state}

    def rows(self, store: RowStore | None = None) -> RowSet:
        """The rows in the output folder."""
        suffix = "" if self.shard.alone else f"-{self.shard.number}-of-{self.shard.of}"
        return RowSet(
            data=self.data,
            row_limit=self.row_limit,
            store=store or self.open_store(),
            bad=BadRows(self.config.output_dir, suffix),
            wanted=Wanted(len(self.layers.ids), self.model.hidden_size, self.store_dtype),
            header=self.header,
        )

    def open_store(self) -> RowStore:
        """The output folder's rows."""
        return self.format.open(self.config.output_dir, self.config.rows_per_file)

    def owns(self, index: int) -> bool:
        """Whether this process computes row ``index``."""
        return self.shard.owns(index, self.config.rows_per_file if self.format.many_rows_per_file else 1)


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

    def counts(self) -> dict[str, int]:
        """The numbers for the manifest: the data's, not this run's."""
        return {"rows": self.rows, "tokens": self.tokens, "cut_rows": self.cut_rows, "bad_rows": self.bad_rows}


def plan_job(config: ExtractConfig) -> Job:
    """Check every option and input without loading a model or vLLM.

    Raises:
        UsageError: naming the flag, or the file and line.
    """
    _check_numbers(config)
    form = get_format(config.format)
    model = read_model(config.model_path)
    refuse_remote_code(model, config.trust_remote_code)
    refuse_missing_weights(model)
    layers = resolve(config.layer_ids, config.layer_convention, model.num_layers)
    check_engine(config.engine, layers)
    data = PreparedFile(config.prepared_data, model.vocab_size)
    source = manifest.read(config.prepared_data.parent, "prepare")
    if source is not None:
        manifest.require_same(
            str(config.prepared_data.parent / manifest.FILE_NAME),
            {"model.fingerprint": model.fingerprint},
            source,
            "prepare the data again with this model, or give the model it was prepared with",
        )
    dtype = computing_dtype(config.dtype, model.dtype)
    store_dtype = dtype if config.store_dtype == "auto" else config.store_dtype
    form.refuse_unfit(layers, model.num_layers, store_dtype)
    check_datasets_installed(form.name)
    return Job(
        config, model, layers, data, max_tokens(config.engine, model, config.max_seq_len), dtype, store_dtype, form,
        parse_shard(config.shard),
    )  # fmt: skip


def _check_numbers(config: ExtractConfig) -> None:
    for flag, value, low in (
        ("--batch-size", config.batch_size, 1),
        ("--max-seq-len", config.max_seq_len, 1),
        ("--tp-size", config.tp_size, 1),
        ("--rows-per-file", config.rows_per_file, 1),
        ("--max-bad", config.max_bad, 0),
        ("--min-free-gib", config.min_free_gib, 0),
    ):
        if not value >= low:
            raise UsageError(flag, f"at least {low}", str(value), "give a larger number")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise UsageError(
            "--gpu-memory-utilization",
            "a share above 0, at most 1",
            str(config.gpu_memory_utilization),
            "give such a share",
        )
    if config.dtype not in DTYPES:
        raise UsageError("--dtype", ", ".join(DTYPES), repr(config.dtype), "use one of these")
    if config.store_dtype not in STORE_DTYPES:
        raise UsageError("--store-dtype", ", ".join(STORE_DTYPES), repr(config.store_dtype), "use one of these")
    check_options(config.preflight, config.preflight_against)


def extract(config: ExtractConfig) -> Extracted:
    """Compute the states of every prepared row that has no good file yet.

    Raises:
        UsageError: an option or input cannot be used; nothing was changed.
        DiskFull: the space ended; finished rows stay.
        SpecshimError: a batch failed or gave impossible states; finished rows stay.
    """
    job = plan_job(config)
    mapping = vocabulary_of(config.vocab, job.model.fingerprint)
    _say(job)
    with shared(config.output_dir, job.shard):
        settings = _settings(job)
        _refuse_foreign_folder(job, settings)
        rows = job.rows()
        result = _survey(job, rows)
        missing = result.missing
        done = Extracted(result.rows, result.tokens, result.cut_rows, result.done, redone_rows=len(result.damaged))
        record = manifest.compose("extract", with_plan=True, **settings)
        run = None
        if missing or result.damaged:
            missing = result.to_compute
            _say_estimate(job, rows, missing)
            # First of all, so that a stack that cannot do it leaves the folder as it was.
            engine = open_engine(config.engine, _engine_options(job))
            try:
                _preflight(job, rows, engine, missing)
                run = run_history.begin(config.output_dir, record, engine=config.engine, shard=str(job.shard))
                _compute(job, rows, engine, missing, run_history.stack_name(record), done)
            finally:
                engine.close()
        _finish(job, rows, record, run, done, mapping)
    return done


def _compute(job: Job, rows: RowSet, engine: Engine, missing: Sequence[int], stack: str, done: Extracted) -> None:
    norm = FinalNorm(job.model, job.config.trust_remote_code) if job.last_state == NORMED else None
    claim = Claim(len(job.data), job.owns, rows.bad.rows.keys())
    reserve = int(job.config.min_free_gib * disk.GIB)
    remaining = job.row_bytes.total(rows.lengths(missing))
    with (
        writing(rows.store, claim, job.config.output_dir, lambda: remaining),
        stage_progress("extract", len(missing)) as progress,
    ):
        for batch in _batches(missing, job.config.batch_size):
            size = job.row_bytes.total(rows.lengths(batch))
            disk.stop_at_low_water(job.config.output_dir, size, remaining, reserve)
            _extract_batch(job, rows, engine, batch, progress, stack, norm)
            rows.store.sync()
            remaining -= size
    done.computed_rows, done.seconds, done.computed_tokens = progress.rows, progress.seconds, progress.tokens


def _finish(
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
        run = run_history.begin(folder, record, engine=job.config.engine, shard=str(job.shard))
    fields: dict[str, Any] = {"counts": done.counts(), "bad_rows": rows.bad.summary(), "complete": done.complete}
    if done.seconds:
        fields["speed"] = {"tokens": done.computed_tokens, "seconds": round(done.seconds, 2)}
    if done.complete:
        finish_formats(job.format, folder, rows.tokens, rows.bad.indices, record, mapping)
    facts = {"rows": done.computed_rows, "tokens": done.computed_tokens, "seconds": round(done.seconds, 2)}
    run_history.end(folder, "extract", run, facts, **fields)


def status(config: ExtractConfig) -> Survey:
    """What of the job lies in the output folder; changes nothing, needs no lock.

    Raises:
        UsageError: as :func:`extract`.
    """
    job = plan_job(config)
    _refuse_foreign_folder(job, _settings(job))
    return job.rows().survey(job.owns, content=config.check_content)


def _survey(job: Job, rows: RowSet) -> Survey:
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


def _preflight(job: Job, rows: RowSet, engine: Engine, missing: Sequence[int]) -> None:
    if job.config.preflight:
        preflight(
            engine,
            [rows.row(index)[1] for index in choose(missing, job.config.preflight)],
            model=job.model,
            layers=job.layers,
            dtype=job.dtype,
            against=job.config.preflight_against,
            trust_remote_code=job.config.trust_remote_code,
        )


def _say_estimate(job: Job, rows: RowSet, missing: Sequence[int]) -> None:
    """Print what is still to come in bytes and time; refuse what does not fit."""
    folder = job.config.output_dir
    lengths = rows.lengths(missing)
    needed = job.row_bytes.total(lengths)
    previous = manifest.read(folder, "extract")
    time = duration.describe(job.model, sum(lengths), job.dtype, job.config.tp_size, previous)
    free = disk.human(disk.free_bytes(folder))
    console.print(
        f"{len(missing)} rows to compute, {sum(lengths)} tokens: {disk.human(needed)} of {free} free; time {time}",
        highlight=False,
        soft_wrap=True,
    )
    if previous is not None:
        record = manifest.compose("extract", with_plan=True)
        for others in run_history.other_stacks(folder, "extract", run_history.stack_name(record)):
            console.print(f"rows here were computed with {others}; the manifest keeps both", highlight=False)
    if not job.config.ignore_space:
        files = -(-len(missing) // job.config.rows_per_file) if job.format.many_rows_per_file else len(missing)
        reserve = int(job.config.min_free_gib * disk.GIB)
        disk.refuse_what_does_not_fit(folder, needed, files, reserve, "--ignore-space")


def _say(job: Job) -> None:
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


def _settings(job: Job) -> dict[str, Any]:
    return {
        "model": manifest.describe_model(job.model),
        "engine": job.config.engine,
        "layers": job.layers.as_dict(),
        "last_state": job.last_state,
        "dtype": job.dtype,
        "store_dtype": job.store_dtype,
        "max_seq_len": job.config.max_seq_len,
        "row_limit": job.row_limit,
        "format": job.format.name,
        "rows_per_file": job.config.rows_per_file if job.format.many_rows_per_file else 1,
        "inputs": {"prepared_data": sha256_file(job.config.prepared_data)},
    }


def _refuse_foreign_folder(job: Job, settings: Mapping[str, Any]) -> None:
    folder = job.config.output_dir
    root = folder / job.format.root
    if root.exists() and not root.is_dir():
        raise UsageError(
            f"--output-dir {folder}",
            f"{job.format.root} to be a folder",
            "a file",
            "choose another --output-dir, or move it",
        )
    existing = manifest.read(folder, "extract")
    if existing is None:
        strange = recognised(folder)
        if strange:
            raise UsageError(
                f"--output-dir {folder}",
                f"a new folder, or one with the {manifest.FILE_NAME} of its rows",
                f"row files ({strange[0].name}) without {manifest.FILE_NAME}",
                "choose another --output-dir",
            )
        return
    compared = ("layers", "last_state", "dtype", "store_dtype", "max_seq_len", "engine", "format", "rows_per_file")
    wanted = {
        "model.fingerprint": settings["model"]["fingerprint"],
        **{name: settings[name] for name in compared},
        "inputs.prepared_data": settings["inputs"]["prepared_data"],
    }
    manifest.require_same(
        str(folder / manifest.FILE_NAME),
        wanted,
        existing,
        "choose another --output-dir, or repeat the command that began this one",
    )


def _engine_options(job: Job) -> EngineOptions:
    # Short data needs no long context: less memory for caches and warm-up.
    longest = min(job.row_limit, max(job.data.lengths))
    return EngineOptions(
        model=job.model,
        layers=job.layers,
        max_tokens=longest,
        dtype=job.dtype,
        tp_size=job.config.tp_size,
        gpu_memory_utilization=job.config.gpu_memory_utilization,
        trust_remote_code=job.config.trust_remote_code,
    )


def _batches(indices: Sequence[int], size: int) -> list[list[int]]:
    """Rows in groups of at most ``size``.

    The groups are cut at multiples of ``size``, so that rows meet the same rows in a batch however often the run was
    interrupted: the shape of a batch can decide the last bit of a state.
    """
    return [list(group) for _, group in itertools.groupby(indices, key=lambda index: index // size)]


def _extract_batch(
    job: Job,
    rows: RowSet,
    engine: Engine,
    batch: Sequence[int],
    progress: StageProgress,
    stack: str,
    norm: FinalNorm | None,
) -> None:
    contents = [rows.row(index) for index in batch]
    named = ", ".join(f"{index} (id {row_id})" for index, (row_id, _, _) in zip(batch, contents, strict=True))
    try:
        states = engine.states([ids for _, ids, _ in contents])
    except SpecshimError as error:
        raise SpecshimError(
            where=f"rows {named}: {error.where}",
            wanted=error.wanted,
            found=error.found,
            next_step=f"{error.next_step}; finished rows are kept, so the same command goes on from here",
        ) from error
    except Exception as error:
        console.print(traceback.format_exc(), highlight=False, soft_wrap=True, markup=False)
        raise SpecshimError(
            where=f"rows {named}",
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
            bad = BadRow(index, row_id, fault, ids, mask)
            if job.config.max_bad:
                rows.bad.add(bad)
            refuse_too_many(rows.bad, job.config.max_bad, bad)
        else:
            row = stored_row(norm.normed_last(row_states) if norm else row_states, ids, mask, row_id, job.store_dtype)
            rows.store.write(index, row, job.header(index) | {"stack": stack})
        progress.advance(rows=1, tokens=len(ids))


def stored_row(
    states: Any, token_ids: Sequence[int], loss_mask: Sequence[int], row_id: str, store_dtype: str
) -> StateRow:
    """A row as it is stored.

    Args:
        states: tensor [T, L, H].
        store_dtype: ``float32``, ``bfloat16``, ``float16`` or ``float8_e4m3``.
    """
    import torch

    row = StateRow(
        states=states,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        loss_mask=torch.tensor(loss_mask, dtype=torch.int64),
        row_id=row_id,
    )
    if store_dtype == float8.NAME:
        return float8.compressed(row)
    return replace(row, states=states.to(getattr(torch, store_dtype)))
