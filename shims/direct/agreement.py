"""Does this vLLM take the direct engine's calls? Asked of its live signatures, before a model is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from shims.contract import Signature, misfits
from shims.direct.touchpoints import DIRECT
from shims.errors import DriftError
from shims.touchpoints import Touchpoint
from shims.versions import detect, within


def require_agreement(touchpoints: Iterable[Touchpoint] = DIRECT) -> None:
    """Refuse a vLLM that would not take a call of the direct engine.

    Raises:
        DriftError: naming the first call that does not bind.
    """
    vllm = detect().vllm
    for touchpoint in touchpoints:
        call = touchpoint.call_for(None)
        if call is None or not within(vllm, touchpoint.vllm):
            continue
        target = _target(touchpoint)
        signature = Signature.of(target) if target is not None else None
        reasons = ["is not there"] if target is None else misfits(signature, call) if signature else []
        if reasons:
            raise DriftError(
                f"{touchpoint.home}, which {touchpoint.used_in} calls",
                f"a callable that takes {call}",
                f"vllm {vllm}: {signature or ''} {', '.join(reasons)}".replace("  ", " "),
                "nothing was loaded; use --engine stock or native, or a vLLM of `specshim plan` that is known "
                "(`specshim gate` shows what changed)",
            )


def _target(touchpoint: Touchpoint) -> Any:
    """The live object, or None."""
    try:
        found: Any = importlib.import_module(touchpoint.module)
    except ModuleNotFoundError:
        return None
    for name in touchpoint.qualname.split("."):
        found = getattr(found, name, None)
    return found
