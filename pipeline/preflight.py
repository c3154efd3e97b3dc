"""``--preflight K``: are the engine's states right? Asked of a few rows before the bulk is computed."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.content_checks import fault_of_states
from pipeline.engines import Engine
from pipeline.layers import LayerIds
from pipeline.model_info import ModelInfo
from pipeline.progress import console
from pipeline.reference import Reference, relative_errors
from pipeline.thresholds import threshold_of
from shims.errors import SpecshimError, UsageError

AGAINST = ("transformers", "solo")


def check_options(rows: int, against: str) -> None:
    """Refuse a number of rows below 0, or an unknown reference.

    Raises:
        UsageError: naming the option.
    """
    if rows < 0:
        raise UsageError("--preflight", "at least 0 rows", str(rows), "give a number of rows")
    if against not in AGAINST:
        raise UsageError("--preflight-against", " or ".join(AGAINST), repr(against), "use one of these")


def choose(indices: Sequence[int], count: int) -> list[int]:
    """``count`` of the rows, spread evenly over them, first and last among them."""
    if count >= len(indices) or count < 2:
        return list(indices[:count])
    return [indices[round(k * (len(indices) - 1) / (count - 1))] for k in range(count)]


def preflight(
    engine: Engine,
    rows: Sequence[Sequence[int]],
    *,
    model: ModelInfo,
    layers: LayerIds,
    dtype: str,
    against: str,
    trust_remote_code: bool,
) -> float:
    """Compute the rows as one batch, and compare each with a reference.

    Args:
        rows: token ids.
        against: ``transformers`` (float32, on the CPU), or ``solo``: the engine itself, one row at a time, which
            finds rows that were mixed up but not a wrong model.

    Returns:
        The largest relative error.

    Raises:
        SpecshimError: a row differs, or its states cannot be right.
    """
    limit = threshold_of(dtype)
    together = engine.states(rows)
    reference = None
    if against == "transformers":
        reference = Reference(model, layers, weights_dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)
    worst = 0.0
    for number, (ids, states) in enumerate(zip(rows, together, strict=True)):
        fault = fault_of_states(states, len(ids), len(layers.ids), model.hidden_size)
        if not fault:
            wanted = reference.states(ids)[0] if reference else engine.states([ids])[0]
            error = float(relative_errors(states, wanted).max())
            worst = max(worst, error)
            # Not a number is never small enough.
            fault = None if error <= limit else f"relative error {error:.2e} above {limit:g}"
        if fault:
            raise SpecshimError(
                where=f"--preflight, row {number + 1} of {len(rows)} ({len(ids)} tokens)",
                wanted=f"the states that {'transformers' if reference else 'the engine alone with this row'} computes",
                found=fault,
                next_step="do not extract with this stack: see `specshim report`, and report the versions",
            )
    console.print(f"preflight: {len(rows)} rows equal {against} (largest relative error {worst:.1e})", highlight=False)
    return worst
