"""Token ids to hidden states, one durable file a row.

What is finished is decided by what lies on disk and passes its check, so a killed run is
continued by the same command.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import manifest
from pipeline.atomic import clear_leftovers, sync_folder
from pipeline.config import ExtractConfig
from pipeline.content_checks import fault_of_states
from pipeline.engines import Engine, EngineOptions, check_engine, max_tokens, open_engine
from pipeline.formats import DamagedRow, StateRow
from pipeline.formats.hs_safetensors import FOLDER, check_row, row_indices, row_path, write_row
from pipeline.layers import LayerIds, resolve
from pipeline.lock import exclusive
from pipeline.model_info import ModelInfo, read_model, refuse_missing_weights, refuse_remote_code, sha256_file
from pipeline.prepared import PreparedFile
from pipeline.progress import StageProgress, console, stage_progress
from shims.errors import SpecshimError, UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")


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

    def header(self, index: int) -> dict[str, str]:
        """Strings in a row's file that tell whose it is."""
        return {
            "row": str(index),
            "layer_ids": " ".join(map(str, self.layers.ids)),
            "layer_convention": self.layers.convention,
            "model_fingerprint": self.model.fingerprint,
        }


@dataclass
class Extracted:
    """What a run did."""

    rows: int = 0
    tokens: int = 0
    cut_rows: int = 0
    """Rows longer than the limit, stored with ids and mask cut the same way."""
    kept_rows: int = 0
    """Found finished on disk."""
    redone_rows: int = 0
    """Found damaged on disk and computed again."""
    seconds: float = 0.0
    """Computing time, without loading the model."""
    computed_tokens: int = 0

    def counts(self) -> dict[str, int]:
        """The numbers for the manifest: the data's, not this run's."""
        return {"rows": self.rows, "tokens": self.tokens, "cut_rows": self.cut_rows}


def plan_job(config: ExtractConfig) -> Job:
    """Check every option and input without loading a model or vLLM.

    Raises:
        UsageError: naming the flag, or the file and line.
    """
    _check_numbers(config)
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
    return Job(config, model, layers, data, max_tokens(config.engine, model, config.max_seq_len), _dtype(config, model))


def _check_numbers(config: ExtractConfig) -> None:
    for flag, value, low in (
        ("--batch-size", config.batch_size, 1),
        ("--max-seq-len", config.max_seq_len, 1),
        ("--tp-size", config.tp_size, 1),
    ):
        if value < low:
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


def _dtype(config: ExtractConfig, model: ModelInfo) -> str:
    if config.dtype != "auto":
        return config.dtype
    try:
        import torch
    except ImportError:
        return model.dtype
    # On a CPU float32 is exact, and faster wherever bfloat16 instructions are missing.
    return model.dtype if torch.cuda.is_available() else "float32"


def extract(config: ExtractConfig) -> Extracted:
    """Compute the states of every prepared row that has no good file yet.

    Raises:
        UsageError: an option or input cannot be used; nothing was changed.
        SpecshimError: a batch failed or gave impossible states; finished rows stay.
    """
    job = plan_job(config)
    _say(job)
    with exclusive(config.output_dir):
        record = _settings(job)
        _refuse_foreign_folder(job, record)
        result = Extracted()
        missing = _missing_rows(job, result)
        if missing:
            # First of all, so that a stack that cannot do it leaves the folder as it was.
            engine = open_engine(config.engine, _engine_options(job))
            try:
                _make_row_folder(config)
                manifest.write(config.output_dir, manifest.compose("extract", with_plan=True, complete=False, **record))
                with stage_progress("extract", len(missing)) as progress:
                    for batch in _batches(missing, config.batch_size):
                        _extract_batch(job, engine, batch, progress)
                result.seconds, result.computed_tokens = progress.seconds, progress.tokens
            finally:
                engine.close()
        previous = manifest.read(config.output_dir, "extract")
        if missing or previous is None or not previous.get("complete"):
            manifest.write(config.output_dir, _finished(record, result))
    return result


def _make_row_folder(config: ExtractConfig) -> None:
    folder = config.output_dir / FOLDER
    folder.mkdir(exist_ok=True)
    clear_leftovers(folder)


def _finished(record: dict[str, Any], result: Extracted) -> dict[str, Any]:
    speed = {"tokens": result.computed_tokens, "seconds": round(result.seconds, 2)}
    return manifest.compose("extract", with_plan=True, complete=True, counts=result.counts(), speed=speed, **record)


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
    console.print(
        f"dtype {job.dtype} ({'chosen for this machine' if job.config.dtype == 'auto' else 'given'})",
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
        "dtype": job.dtype,
        "max_seq_len": job.config.max_seq_len,
        "row_limit": job.row_limit,
        "format": "hs_safetensors",
        "inputs": {"prepared_data": sha256_file(job.config.prepared_data)},
    }


def _refuse_foreign_folder(job: Job, record: Mapping[str, Any]) -> None:
    folder = job.config.output_dir
    if (folder / FOLDER).exists() and not (folder / FOLDER).is_dir():
        raise UsageError(
            f"--output-dir {folder}", f"{FOLDER} to be a folder", "a file", "choose another --output-dir, or move it"
        )
    existing = manifest.read(folder, "extract")
    if existing is None:
        if row_indices(folder):
            raise UsageError(
                f"--output-dir {folder}",
                f"a new folder, or one with the {manifest.FILE_NAME} of its rows",
                f"row files without {manifest.FILE_NAME}",
                "choose another --output-dir",
            )
        return
    wanted = {
        "model.fingerprint": record["model"]["fingerprint"],
        "layers": record["layers"],
        "dtype": record["dtype"],
        "max_seq_len": record["max_seq_len"],
        "engine": record["engine"],
        "inputs.prepared_data": record["inputs"]["prepared_data"],
    }
    manifest.require_same(
        str(folder / manifest.FILE_NAME),
        wanted,
        existing,
        "choose another --output-dir, or repeat the command that began this one",
    )


def _missing_rows(job: Job, result: Extracted) -> list[int]:
    """Rows without a good file; fills in the counts of the whole data set."""
    missing = []
    for index in range(len(job.data)):
        row = job.data[index]
        ids = row.input_ids[: job.row_limit]
        result.rows += 1
        result.tokens += len(ids)
        result.cut_rows += len(ids) < len(row.input_ids)
        try:
            check_row(
                row_path(job.config.output_dir, index),
                num_layers=len(job.layers.ids),
                hidden_size=job.model.hidden_size,
                dtype=job.dtype,
                metadata=job.header(index),
                token_ids=ids,
                loss_mask=row.loss_mask[: job.row_limit],
            )
            result.kept_rows += 1
        except FileNotFoundError:
            missing.append(index)
        except DamagedRow as damage:
            console.print(f"row {index} is computed again: {damage}", highlight=False, soft_wrap=True)
            result.redone_rows += 1
            missing.append(index)
    if result.kept_rows:
        console.print(f"{result.kept_rows} of {result.rows} rows are finished already", highlight=False, soft_wrap=True)
    return missing


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


def _batches(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _extract_batch(job: Job, engine: Engine, batch: Sequence[int], progress: StageProgress) -> None:
    import torch

    rows = [job.data[index] for index in batch]
    ids = [row.input_ids[: job.row_limit] for row in rows]
    named = ", ".join(f"{index} (id {row.row_id})" for index, row in zip(batch, rows, strict=True))
    try:
        states = engine.states(ids)
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
    for index, row, row_ids, row_states in zip(batch, rows, ids, states, strict=True):
        dtype = str(row_states.dtype).removeprefix("torch.")
        fault = fault_of_states(row_states, len(row_ids), len(job.layers.ids), job.model.hidden_size)
        if dtype != job.dtype:
            fault = f"states in {dtype}, asked for {job.dtype}"
        if fault:
            raise SpecshimError(
                where=f"row {index} (id {row.row_id})",
                wanted="finite states, one for each token and layer",
                found=fault,
                next_step="do not train on this; check the model and dtype, and report the versions in the manifest",
            )
        stored = StateRow(
            states=row_states,
            token_ids=torch.tensor(row_ids, dtype=torch.int64),
            loss_mask=torch.tensor(row.loss_mask[: job.row_limit], dtype=torch.int64),
            row_id=row.row_id,
        )
        write_row(row_path(job.config.output_dir, index), stored, job.header(index))
        progress.advance(rows=1, tokens=len(row_ids))
    sync_folder(job.config.output_dir / FOLDER)
