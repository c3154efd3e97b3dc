"""What an extraction is to do: every option and input checked, before a model or vLLM is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import disk, manifest
from pipeline.bad_rows import BadRows
from pipeline.config import ExtractConfig
from pipeline.devices import computing_dtype
from pipeline.engines import EngineOptions, check_engine, chosen, max_tokens
from pipeline.engines.row_sink import RowSinkSettings
from pipeline.formats import Wanted, float8
from pipeline.formats.registry import NORMED, RESIDUAL, Format, get_format
from pipeline.formats.sidecars import check_datasets_installed
from pipeline.formats.stores import RowStore
from pipeline.layers import LayerIds, resolve
from pipeline.model_info import ModelInfo, read_model, refuse_missing_weights, refuse_remote_code
from pipeline.object_store.address import is_address, parse, refuse_addresses
from pipeline.places import Target
from pipeline.preflight import check_options
from pipeline.prepared import PreparedFile
from pipeline.row_set import RowSet
from pipeline.shard import Shard, parse_shard
from shims.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")
STORE_DTYPES = (*DTYPES, float8.NAME)


@dataclass(frozen=True)
class Job:
    """Everything that decides the bytes of a row; fixed before the model loads."""

    config: ExtractConfig
    engine: str
    """One of `pipeline.engines.ENGINES`."""
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
    chat_template_sha256: str | None
    """Of the template that the rows were prepared with, where their manifest says it."""
    target: Target = field(default_factory=Target)
    """Where the rows go; ``config.output_dir`` holds the files beside them."""

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
        return self.target.open_store(self.format, self.config.output_dir, self.config.rows_per_file)

    def owns(self, index: int) -> bool:
        """Whether this process computes row ``index``."""
        return self.shard.owns(index, self.config.rows_per_file if self.format.many_rows_per_file else 1)


def plan_job(config: ExtractConfig) -> Job:
    """Check every option and input without loading a model or vLLM.

    Raises:
        UsageError: naming the flag, or the file and line.
    """
    _check_numbers(config)
    refuse_addresses(config, ("output_dir",))
    form, shard = get_format(config.format), parse_shard(config.shard)
    if is_address(config.output_dir):
        from pipeline.object_store import target

        target.check_options(parse(config.output_dir, "--output-dir"), form, shard)
    model = read_model(config.model_path)
    refuse_remote_code(model, config.trust_remote_code)
    refuse_missing_weights(model)
    layers = resolve(config.layer_ids, config.layer_convention, model.num_layers)
    engine = chosen(config.engine)
    check_engine(engine, layers)
    data = PreparedFile(config.prepared_data, model.vocab_size)
    source = manifest.read(config.prepared_data.parent, "prepare")
    if source is not None:
        manifest.require_same(
            str(config.prepared_data.parent / manifest.FILE_NAME),
            {"model.fingerprint": model.fingerprint},
            source,
            "prepare the data again with this model, or give the model it was prepared with",
        )
        _refuse_changed(config.prepared_data, data.sha256, source)
    dtype = computing_dtype(config.dtype, model.dtype)
    store_dtype = dtype if config.store_dtype == "auto" else config.store_dtype
    form.refuse_unfit(layers, model.num_layers, store_dtype)
    check_datasets_installed(form.name)
    return Job(
        config, engine, model, layers, data, max_tokens(model, config.max_seq_len), dtype, store_dtype, form,
        shard, (source or {}).get("chat_template_sha256"),
    )  # fmt: skip


def _refuse_changed(path: Path, found: str, record: Mapping[str, Any]) -> None:
    """Compare the rows with those that `prepare` wrote: a file that was cut at the end of a line looks whole.

    Raises:
        UsageError: they are others.
    """
    stated = record["outputs"].get(path.name)
    if stated not in (None, found):
        raise UsageError(
            f"--prepared-data {path}",
            f"the file that `specshim prepare` wrote (sha256 {stated[:12]}…, says {manifest.FILE_NAME} beside it)",
            f"another one ({found[:12]}…): it was changed or cut since",
            "prepare again, or put rows of your own into a folder without that manifest",
        )


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


@contextlib.contextmanager
def placed(job: Job, writing: bool = True) -> Iterator[Job]:
    """The job with its target opened, and locked where there is to be writing; a folder has a lock of its own.

    Raises:
        UsageError: an address that cannot be used, or is in use.
    """
    if not is_address(job.config.output_dir):
        yield job
        return
    from pipeline.object_store.target import opened

    with opened(parse(job.config.output_dir, "--output-dir"), writing) as target:
        yield replace(job, config=replace(job.config, output_dir=target.folder), target=target)


def settings_of(job: Job) -> dict[str, Any]:
    return {
        "model": manifest.describe_model(job.model),
        "engine": job.engine,
        "layers": job.layers.as_dict(),
        "last_state": job.last_state,
        "dtype": job.dtype,
        "store_dtype": job.store_dtype,
        "chat_template_sha256": job.chat_template_sha256,
        "max_seq_len": job.config.max_seq_len,
        "row_limit": job.row_limit,
        "format": job.format.name,
        "rows_per_file": job.config.rows_per_file if job.format.many_rows_per_file else 1,
        "inputs": {"prepared_data": job.data.sha256},
    }


def refuse_foreign_folder(job: Job, settings: Mapping[str, Any]) -> None:
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
        strange = job.target.strange(folder)
        if strange:
            raise UsageError(
                f"--output-dir {folder}",
                f"a new folder, or one with the {manifest.FILE_NAME} of its rows",
                f"{strange} without {manifest.FILE_NAME}",
                "choose another --output-dir",
            )
        return
    compared = ("layers", "last_state", "dtype", "store_dtype", "max_seq_len", "format", "rows_per_file")
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


def engine_options(job: Job) -> EngineOptions:
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
        enforce_eager=job.config.enforce_eager,
        max_num_batched_tokens=job.config.max_num_batched_tokens,
    )


def row_sink_settings(job: Job, stack: str) -> RowSinkSettings:
    """What the direct engine's worker has to know to write rows.

    Args:
        stack: for the rows' headers, see `pipeline.run_history`.
    """
    return RowSinkSettings(
        folder=job.target.address or str(job.config.output_dir),
        format=job.format.name,
        rows_per_file=job.config.rows_per_file,
        prepared_data=str(job.config.prepared_data),
        prepared_sha256=job.data.sha256,
        row_limit=job.row_limit,
        dtype=job.dtype,
        store_dtype=job.store_dtype,
        last_state=job.last_state,
        model=str(job.model.path),
        trust_remote_code=job.config.trust_remote_code,
        header={name: text for name, text in job.header(0).items() if name != "row"} | {"stack": stack},
    )
