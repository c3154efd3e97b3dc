"""Which state a layer id means.

Write R_k for the residual stream after k decoder layers. Two conventions are in use:
``after`` i is R_{i+1} (the generator of speculators 0.3 and 0.4), ``native`` i is R_i
(vLLM serving, speculators from 0.5 on, draft configs). So native = after + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shims.errors import UsageError

AFTER = "after"
NATIVE = "native"
CONVENTIONS = (AFTER, NATIVE)
_MIN_LAYERS_FOR_DEFAULTS = 8


@dataclass(frozen=True)
class LayerIds:
    """Ascending, distinct layer ids together with what they mean."""

    ids: tuple[int, ...]
    convention: str

    @property
    def after(self) -> tuple[int, ...]:
        """The same states as ``after`` ids; R_0 is -1, which no stock engine offers."""
        return self.ids if self.convention == AFTER else tuple(i - 1 for i in self.ids)

    @property
    def native(self) -> tuple[int, ...]:
        """The same states as ``native`` ids."""
        return self.ids if self.convention == NATIVE else tuple(i + 1 for i in self.ids)

    def as_dict(self) -> dict[str, object]:
        """The form in manifests: ids, convention, and the native ids spelled out."""
        return {"ids": list(self.ids), "convention": self.convention, "native": list(self.native)}

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.ids))} ({self.convention})"


def default_ids(num_layers: int) -> LayerIds:
    """The states that vLLM's EAGLE-3 serving reads by default, plus the last one.

    Native [2, n//2, n-3, n], that is after [1, n//2-1, n-4, n-1]. (The stock generator's
    own defaults lie one layer later, where no server looks.)
    """
    if num_layers < _MIN_LAYERS_FOR_DEFAULTS:
        raise UsageError(
            where="--layer-ids",
            wanted=f"explicit ids: the defaults need a model of at least {_MIN_LAYERS_FOR_DEFAULTS} layers",
            found=f"a model of {num_layers} layers and no --layer-ids",
            next_step="give --layer-ids, three auxiliary layers and the last one",
        )
    return LayerIds((1, num_layers // 2 - 1, num_layers - 4, num_layers - 1), AFTER)


def resolve(requested: Sequence[int] | None, convention: str, num_layers: int) -> LayerIds:
    """Check the requested ids against the model and put them in ascending order.

    Args:
        requested: ids in ``convention``, any order; None for the defaults.
        convention: ``after`` or ``native``.
        num_layers: decoder layers of the model.

    Raises:
        UsageError: an unknown convention, no id, an id out of range or given twice.
    """
    if convention not in CONVENTIONS:
        raise UsageError("--layer-convention", " or ".join(CONVENTIONS), repr(convention), "use one of the two")
    if requested is None:
        chosen = default_ids(num_layers)
        return chosen if convention == AFTER else LayerIds(chosen.native, NATIVE)
    first, last = (0, num_layers - 1) if convention == AFTER else (0, num_layers)
    outside = [i for i in requested if not first <= i <= last]
    if outside or not requested:
        raise UsageError(
            where="--layer-ids",
            wanted=f"ids from {first} to {last} ({convention} convention, model of {num_layers} layers)",
            found=", ".join(map(str, outside)) or "none",
            next_step="correct the ids, or the --layer-convention they are meant in",
        )
    repeated = sorted({i for i in requested if list(requested).count(i) > 1})
    if repeated:
        raise UsageError(
            where="--layer-ids",
            wanted="each layer once (engines drop repeated ids, and the columns would shift)",
            found=f"{', '.join(map(str, repeated))} more than once",
            next_step="give every id once",
        )
    return LayerIds(tuple(sorted(requested)), convention)
