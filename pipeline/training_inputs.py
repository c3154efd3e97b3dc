"""May this data, this vocabulary and this model make a draft? Answered without loading any of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pipeline import manifest
from pipeline.at_once import answers, threads_for
from pipeline.config import TrainConfig, check_seed
from pipeline.devices import check_device
from pipeline.formats import DamagedRow
from pipeline.formats.registry import RESIDUAL, wanted_row
from pipeline.layers import LayerIds
from pipeline.model_info import ModelInfo, read_model, refuse_remote_code
from pipeline.object_store.address import refuse_addresses, shown
from pipeline.places import open_data, viewed
from pipeline.progress import console
from pipeline.vocab import load_mapping
from shims.errors import UsageError

_AUXILIARY_LAYERS = 3
_BLOCK = 128  # tokens; block masks are made of whole blocks
_DTYPES = ("float32", "bfloat16", "float16")
_SCHEDULERS = ("linear", "cosine", "none")


@dataclass(frozen=True)
class TrainingData:
    """Checked inputs of a training run."""

    model: ModelInfo
    layers: LayerIds
    record: dict[str, Any]
    """The extraction's manifest."""
    lengths: dict[int, int]
    """Tokens by row."""
    d2t: Any
    t2d: Any


def check_inputs(config: TrainConfig, lengths: dict[int, int] | None = None) -> TrainingData:
    """Everything that can be refused before a deep-learning library loads.

    Args:
        lengths: tokens by row, where another process has looked at the rows already.

    Raises:
        UsageError: data, vocabulary and model do not belong together, or the data lacks what a
            draft needs.
    """
    refuse_addresses(config, ("data",))
    for flag, value, low in (
        ("--epochs", config.epochs, 1),
        ("--ttt-steps", config.ttt_steps, 1),
        ("--num-layers", config.num_layers, 1),
        ("--accumulate", config.accumulate, 1),
        ("--keep-checkpoints", config.keep_checkpoints, 1),
        ("--max-steps", config.max_steps, 0),
        ("--save-steps", config.save_steps, 0),
        ("--val-steps", config.val_steps, 0),
        ("--patience", config.patience, 0),
        ("--workers", config.workers or 0, 0),
        ("--warmup-steps", config.warmup_steps or 0, 0),
    ):
        if value < low:
            raise UsageError(flag, f"at least {low}", str(value), "give a larger number")
    check_seed(config.seed)
    for flag, text, allowed in (
        ("--dtype", config.dtype, ("auto", "float32", "bfloat16")),
        ("--draft-dtype", config.draft_dtype, _DTYPES),
        ("--scheduler", config.scheduler, _SCHEDULERS),
    ):
        if text not in allowed:
            raise UsageError(flag, ", ".join(allowed), repr(text), "use one of these")
    if config.max_seq_len < _BLOCK or config.max_seq_len % _BLOCK:
        raise UsageError("--max-seq-len", f"a multiple of {_BLOCK}", str(config.max_seq_len), "give such a number")
    for flag, number, least in (
        ("--lr", config.lr, "above 0"),
        ("--ttt-step-loss-decay", config.ttt_step_loss_decay, "above 0"),
        ("--noise-std", config.noise_std, "of at least 0"),
        ("--cache-gib", config.cache_gib, "of at least 0"),
    ):
        if not math.isfinite(number) or number < 0 or (number == 0 and least == "above 0"):
            raise UsageError(flag, f"a number {least}", str(number), "give such a number")
    if config.device != "auto":
        check_device("--device", config.device)
    if not 0 < config.val_share < 1:
        raise UsageError("--val-share", "a share between 0 and 1", str(config.val_share), "give such a share")
    with viewed(config.data, "--data") as view:
        record = manifest.require_rows(view.folder, "--data")
    where = shown(config.data / manifest.FILE_NAME)
    if not record.get("complete"):
        raise UsageError(
            where, "a finished extraction", "complete = false", "run the same `specshim extract` again to finish it"
        )
    if record.get("last_state", RESIDUAL) != RESIDUAL:
        raise UsageError(
            where,
            "last states before the final norm, which the loss applies itself",
            f"last_state = {record['last_state']}",
            "extract in another --format than specforge",
        )
    model = read_model(config.model, "--model")
    refuse_remote_code(model, config.trust_remote_code, "--model")
    fingerprint = {"model.fingerprint": model.fingerprint}
    manifest.require_same(where, fingerprint, record, f"give the model of the data ({record['model']['path']})")
    layers = LayerIds(tuple(record["layers"]["ids"]), record["layers"]["convention"])
    _check_layers(where, layers, model)
    d2t, t2d = load_mapping(config.vocab, fingerprint=model.fingerprint)
    if len(t2d) != model.vocab_size:
        raise UsageError(
            f"--vocab {config.vocab}",
            f"t2d of {model.vocab_size} tokens",
            f"{len(t2d)}",
            "make it from this model's data",
        )
    if lengths is None:
        lengths = _row_lengths(config, record)
    return TrainingData(model, layers, record, lengths, d2t, t2d)


def _check_layers(where: str, layers: LayerIds, model: ModelInfo) -> None:
    if len(layers.ids) != _AUXILIARY_LAYERS + 1:
        raise UsageError(
            where,
            f"{_AUXILIARY_LAYERS} auxiliary layers and the last one",
            f"{len(layers.ids)} layers: {layers}",
            "extract again with four --layer-ids",
        )
    if layers.native[-1] != model.num_layers:
        raise UsageError(
            where,
            f"the state after the last of {model.num_layers} layers (after {model.num_layers - 1}), "
            "which the loss compares with",
            f"{layers}",
            "extract again with that layer among --layer-ids",
        )


def _row_lengths(config: TrainConfig, record: dict[str, Any]) -> dict[int, int]:
    """Tokens of each row that a draft can learn from."""
    folder = config.data
    lengths: dict[int, int] = {}
    useless = 0
    store = open_data(folder, record, "--data")
    left_out = {bad["row"] for bad in record.get("bad_rows", [])}
    indices = [index for index in range(int(record["counts"]["rows"])) if index not in left_out]

    def length_and_mask(index: int) -> tuple[int, list[int] | None] | DamagedRow | FileNotFoundError:
        try:
            return store.check(index, wanted_row(record, index)), store.tokens(index)[1]
        except (DamagedRow, FileNotFoundError) as damage:
            return damage

    for index, found in zip(indices, answers(length_and_mask, indices, threads_for(store)), strict=True):
        if not isinstance(found, tuple):
            reason = "missing" if isinstance(found, FileNotFoundError) else str(found)
            raise UsageError(
                f"row {index} in {store.locate(index)}",
                "a whole row",
                reason,
                "run the same `specshim extract` again to repair it",
            ) from found
        length, mask = found
        # The first token is never predicted, and a long row is cut to the batch.
        if mask is not None and any(mask[1 : config.max_seq_len + 1]):
            lengths[index] = length
        else:
            useless += 1
    if left_out:
        console.print(f"{len(left_out)} rows are left out: their states were bad", highlight=False)
    if len(lengths) < 2:
        raise UsageError(
            f"--data {shown(folder)}",
            f"at least two rows with a trainable token among the first {config.max_seq_len}, one of them held out",
            f"{len(lengths)} of {len(lengths) + useless}",
            "extract more rows, or look at their loss masks",
        )
    if useless:
        console.print(f"{useless} rows have no trainable token and are left out", highlight=False)
    return lengths
