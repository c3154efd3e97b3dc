"""Does a folder of other tools hold the layers that the user says? Some rows are recomputed to prove it."""

from __future__ import annotations

from pipeline.convert_source import Source
from pipeline.formats import float8
from pipeline.formats.registry import NORMED
from pipeline.layers import NATIVE, LayerIds
from pipeline.model_info import ModelInfo
from pipeline.preflight import choose
from pipeline.progress import console
from pipeline.reference import Reference, relative_errors
from pipeline.thresholds import threshold_of
from shims.errors import UsageError


def prove_layers(source: Source, model: ModelInfo, rows: int, trust_remote_code: bool) -> None:
    """Compare ``rows`` rows with every layer of the model.

    Raises:
        UsageError: a column is not the layer it is said to be; the message names the one that it is.
    """
    import torch

    every = LayerIds(tuple(range(model.num_layers + 1)), NATIVE)
    dtype = source.record["dtype"]
    reference = Reference(model, every, weights_dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)
    worst = torch.zeros(len(source.layers.ids), model.num_layers + 2)
    chosen = choose(source.indices, rows)
    for index in chosen:
        row = float8.dense(source.read(index))
        wanted, _ = reference.states(row.token_ids.tolist())
        # The last entry stands for the normed last state.
        candidates = torch.cat([wanted, reference.normed(wanted[:, -1])[:, None]], dim=1)
        for column in range(worst.shape[0]):
            stored = row.states[:, column : column + 1].expand(-1, candidates.shape[1], -1)
            worst[column] = torch.maximum(worst[column], relative_errors(stored, candidates))
    limit = threshold_of(dtype)
    said = list(source.layers.native)
    if source.last_state == NORMED:
        said[-1] = model.num_layers + 1
    for column, native in enumerate(said):
        if not worst[column, native] <= limit:
            best = int(worst[column].argmin())
            found = _name(best, model.num_layers) if worst[column, best] <= limit else "no layer of this model"
            raise UsageError(
                f"source folder {source.folder}, state {column} of each token",
                f"{_name(native, model.num_layers)}, as --source-layer-ids {source.layers} says",
                f"{found} (relative error {worst[column, native]:.1e} against what was said)",
                "correct --source-layer-ids, --source-layer-convention or --model",
            )
    console.print(
        f"{len(chosen)} rows recomputed: the source holds layers {source.layers}", highlight=False, soft_wrap=True
    )


def _name(native: int, num_layers: int) -> str:
    return f"native {native}" if native <= num_layers else f"native {num_layers} after the final norm"
