"""Rows of one format to another one, without a number changed that need not be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import disk, manifest, run_history
from pipeline.config import ConvertConfig
from pipeline.convert_source import Source, model_of, open_source
from pipeline.final_norm import FinalNorm
from pipeline.finishing import finish_formats, vocabulary_of
from pipeline.formats import DamagedRow, StateRow, Wanted, float8
from pipeline.formats.registry import NORMED, RESIDUAL, Format, get_format, recognised
from pipeline.formats.sidecars import check_datasets_installed
from pipeline.formats.stores import Claim, RowStore
from pipeline.layer_proof import prove_layers
from pipeline.layers import AFTER, CONVENTIONS, LayerIds
from pipeline.lock import exclusive
from pipeline.model_info import ModelInfo
from pipeline.object_store.address import refuse_addresses
from pipeline.progress import stage_progress
from pipeline.writing import writing
from shims.errors import UsageError

_STORE_DTYPES = ("auto", "float32", "bfloat16", "float16", float8.NAME)
_SYNC_EVERY = 64
"""Rows between two calls that make them durable."""


@dataclass
class Converted:
    """What a run did."""

    rows: int = 0
    """Of the whole set, those without states included."""
    written: int = 0
    kept: int = 0
    """Found finished on disk."""
    exact: bool = True
    """Every stored number is the source's; else rounded, normed or given up."""


@dataclass(frozen=True)
class Plan:
    """How a row becomes another one."""

    source: Source
    format: Format
    layers: LayerIds
    columns: list[int]
    """Which of the source's states, in the order of ``layers``."""
    store_dtype: str
    last_state: str
    model: ModelInfo | None

    @property
    def norms(self) -> bool:
        """Whether the last state has to be normed."""
        return self.last_state == NORMED and self.source.last_state == RESIDUAL

    @property
    def exact(self) -> bool:
        """Whether the source can be had back."""
        same_dtype = self.store_dtype == self.source.record.get("store_dtype", self.source.record["dtype"])
        return same_dtype and not self.norms and len(self.columns) == len(self.source.layers.ids)

    def header(self, index: int) -> dict[str, str]:
        """Strings in a row's file that tell whose it is; the same as `extract` writes."""
        header = {
            "row": str(index),
            "layer_ids": " ".join(map(str, self.layers.ids)),
            "layer_convention": self.layers.convention,
            "model_fingerprint": self.source.record["model"]["fingerprint"],
        }
        return header if self.last_state == RESIDUAL else header | {"last_state": self.last_state}

    def converted(self, row: StateRow, norm: FinalNorm | None) -> StateRow:
        """The row in the target's layers and dtype."""
        import torch

        if self.columns != list(range(len(self.source.layers.ids))):
            scale = None if row.scale is None else row.scale[:, self.columns]
            row = replace(row, states=row.states[:, self.columns], scale=scale)
        if norm is not None:
            row = float8.dense(row)
            row = replace(row, states=norm.normed_last(row.states))
        if self.store_dtype == float8.NAME:
            return float8.compressed(row)
        row = float8.dense(row)
        return replace(row, states=row.states.to(getattr(torch, self.store_dtype)))


def convert(config: ConvertConfig) -> Converted:
    """Write every row of the source in another format; run again, it goes on where it stopped.

    Raises:
        UsageError: an option or the source cannot be used, or the states that the target needs are not there.
        DiskFull: the space ended; finished rows stay.
    """
    refuse_addresses(config)
    plan = _plan(config)
    mapping = vocabulary_of(config.vocab, plan.source.record["model"]["fingerprint"])
    if plan.source.foreign and plan.model is not None:
        prove_layers(plan.source, plan.model, config.prove, config.trust_remote_code)
    done = Converted(plan.source.total, exact=plan.exact)
    with exclusive(config.output_dir):
        settings = _settings(config, plan)
        _refuse_foreign_folder(config, settings)
        record = manifest.compose("convert", **settings)
        store = plan.format.open(config.output_dir, config.rows_per_file)
        missing = [index for index in plan.source.indices if not _is_there(plan, store, index)]
        done.kept = len(plan.source.indices) - len(missing)
        size = disk.RowSize(len(plan.layers.ids), plan.source.record["model"]["hidden_size"], plan.store_dtype)
        remaining = size.total(len(plan.source.tokens(index)[0]) for index in missing)
        reserve = int(config.min_free_gib * disk.GIB)
        if missing and not config.ignore_space:
            files = -(-len(missing) // config.rows_per_file) if plan.format.many_rows_per_file else len(missing)
            disk.refuse_what_does_not_fit(config.output_dir, remaining, files, reserve, "--ignore-space")
        run = run_history.begin(config.output_dir, record)
        norm = FinalNorm(plan.model, config.trust_remote_code) if plan.norms and plan.model else None
        space = disk.Space(config.output_dir, remaining, reserve)
        claim = Claim(plan.source.total, absent=plan.source.absent.keys())
        with (
            writing(store, claim, space),
            stage_progress("convert", len(missing)) as progress,
        ):
            for index in missing:
                row = plan.source.read(index)
                tokens = len(row.token_ids)
                space.stop_at_low_water(size.of(tokens))
                stack = {"stack": row.header["stack"]} if "stack" in row.header else {}
                store.write(index, plan.converted(row, norm), plan.header(index) | stack)
                space.taken(size.of(tokens))
                done.written += 1
                if done.written % _SYNC_EVERY == 0:
                    store.sync()
                progress.advance(rows=1, tokens=tokens)
        finish_formats(
            plan.format, config.output_dir, lambda: _tokens(plan.source), set(plan.source.absent), record, mapping
        )
        run_history.end(config.output_dir, "convert", run, {"rows": done.written}, complete=True)
    return done


def _plan(config: ConvertConfig) -> Plan:
    form = get_format(config.format, "--to")
    if config.store_dtype not in _STORE_DTYPES:
        raise UsageError("--store-dtype", ", ".join(_STORE_DTYPES), repr(config.store_dtype), "use one of these")
    for flag, value, low in (("--rows-per-file", config.rows_per_file, 1), ("--prove", config.prove, 1)):
        if value < low:
            raise UsageError(flag, f"at least {low}", str(value), "give a larger number")
    _refuse_one_in_the_other(config.source, config.output_dir)
    check_datasets_installed(form.name)
    source = open_source(config)
    model = model_of(config, source)
    layers = _target_layers(config, source.layers)
    num_layers = source.record["model"]["num_layers"]
    stored = source.record.get("store_dtype", source.record["dtype"])
    store_dtype = config.store_dtype
    if store_dtype == "auto":
        store_dtype = "bfloat16" if stored == float8.NAME and not form.float8 else stored
    form.refuse_unfit(layers, num_layers, store_dtype, "--to")
    has_last = layers.native[-1] == num_layers
    last_state = _last_state(config, source, form, model) if has_last else RESIDUAL
    if form.needs_mask and source.indices and source.tokens(source.indices[0])[1] is None:
        raise UsageError(
            f"source folder {source.folder}",
            f"rows with a loss mask, which {form.readers} reads",
            "rows without one",
            "extract again from prepared data",
        )
    columns = [source.layers.native.index(native) for native in layers.native]
    return Plan(source, form, layers, columns, store_dtype, last_state, model)


def _refuse_one_in_the_other(source: Path, output: Path) -> None:
    """Stop where new rows would lie among those they are made from, and be taken for theirs, or the other way round."""
    read, written = source.resolve(), output.resolve()
    if read == written:
        raise UsageError("--output-dir", "another folder than the source", str(output), "choose another")
    if read in written.parents or written in read.parents:
        within = "inside of" if read in written.parents else "around"
        raise UsageError(
            "--output-dir", "a folder beside the source", f"{output}, {within} the source {source}", "choose another"
        )


def _target_layers(config: ConvertConfig, held: LayerIds) -> LayerIds:
    """The layers to write. An id means the same state in both conventions, one apart; no state is made up."""
    convention = config.layer_convention or held.convention
    if convention not in CONVENTIONS:
        raise UsageError("--layer-convention", " or ".join(CONVENTIONS), repr(convention), "use one of the two")
    native = held.native
    if config.layer_ids is not None:
        native = LayerIds(tuple(sorted(set(config.layer_ids))), convention).native
        absent = [number for number in native if number not in held.native]
        if absent or not native:
            raise UsageError(
                "--layer-ids",
                f"layers that the source holds: {held} = native {' '.join(map(str, held.native))}",
                f"native {', '.join(map(str, absent))} is not among them" if absent else "none",
                "choose among these, or extract again: one layer's states cannot be made from another's",
            )
    if convention == AFTER:
        if 0 in native:
            raise UsageError(
                "--layer-convention after",
                "layers that lie after one: the embeddings (native 0) have no such id",
                f"native {' '.join(map(str, native))}",
                "use --layer-convention native, or leave native 0 out with --layer-ids",
            )
        return LayerIds(tuple(number - 1 for number in native), AFTER)
    return LayerIds(native, convention)


def _last_state(config: ConvertConfig, source: Source, form: Format, model: ModelInfo | None) -> str:
    if source.last_state in form.last_states:
        return source.last_state
    if source.last_state == NORMED:
        raise UsageError(
            f"--to {form.name}",
            "last states before the final norm (R_n)",
            "the source holds them after it (N), and the norm cannot be undone: it divides by a length that is lost",
            "extract again, or choose sharded or specforge",
        )
    if model is None:
        raise UsageError(
            f"--to {form.name}",
            "--model: its final norm turns the source's last states (R_n) into those that this format stores (N)",
            "no --model",
            f"give the model of the states ({source.record['model']['path']})",
        )
    return NORMED


def _is_there(plan: Plan, store: RowStore, index: int) -> bool:
    ids, mask = plan.source.tokens(index)
    wanted = Wanted(
        num_layers=len(plan.layers.ids),
        hidden_size=plan.source.record["model"]["hidden_size"],
        dtype=plan.store_dtype,
        header=plan.header(index),
        token_ids=ids,
        loss_mask=mask,
    )
    try:
        store.check(index, wanted)
    except (DamagedRow, FileNotFoundError):
        return False
    return True


def _tokens(source: Source) -> Iterator[tuple[list[int], list[int]]]:
    for index in range(source.total):
        ids, mask = source.tokens(index)
        yield ids, mask if mask is not None else [0] * len(ids)


def _settings(config: ConvertConfig, plan: Plan) -> dict[str, Any]:
    source = plan.source.record
    return {
        "model": source["model"],
        "engine": source.get("engine"),
        "layers": plan.layers.as_dict(),
        "last_state": plan.last_state,
        "dtype": source["dtype"],
        "store_dtype": plan.store_dtype,
        "chat_template_sha256": source.get("chat_template_sha256"),
        "max_seq_len": source.get("max_seq_len"),
        "row_limit": source.get("row_limit"),
        "format": plan.format.name,
        "rows_per_file": config.rows_per_file if plan.format.many_rows_per_file else 1,
        "exact": plan.exact and bool(source.get("exact", True)),
        "counts": source.get("counts") or {"rows": plan.source.total},
        "bad_rows": source.get("bad_rows", []),
        "source_sha256": source.get("source_sha256"),
        "inputs": {
            **(source.get("inputs") or {}),
            "source_format": source.get("format"),
            "source_store_dtype": source.get("store_dtype", source["dtype"]),
            "source_layers": plan.source.layers.as_dict(),
            "source_stacks": source.get("stacks", {}),
        },
    }


def _refuse_foreign_folder(config: ConvertConfig, settings: Mapping[str, Any]) -> None:
    existing = manifest.read(config.output_dir, "convert")
    where = str(config.output_dir / manifest.FILE_NAME)
    if existing is None:
        if recognised(config.output_dir):
            raise UsageError(
                f"--output-dir {config.output_dir}",
                "a new folder, or one that the same conversion began",
                f"rows without {manifest.FILE_NAME}",
                "choose another --output-dir",
            )
        return
    # A source of another tool names no prepared data; what it was is handed on by what was made of it.
    compared = ("layers", "last_state", "dtype", "store_dtype", "format", "rows_per_file", "source_sha256")
    wanted = {
        "model.fingerprint": settings["model"]["fingerprint"],
        "inputs.prepared_data": settings["inputs"].get("prepared_data"),
        **{name: settings[name] for name in compared},
    }
    manifest.require_same(where, wanted, existing, "choose another --output-dir, or remove this one")
