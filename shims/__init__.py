"""Make speculators' vLLM hidden-state generator right on the vLLM that is installed.

    import shims
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

Importing this package arms import hooks and does nothing else: no torch, no vLLM. Set SHIMS_DISABLE=1
to import it without effect.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shims.tripwire import Tripwire

if TYPE_CHECKING:
    from shims.planning import Plan
    from shims.reporting import Report

__all__ = ["install", "overrides", "plan", "report", "require", "uninstall"]
__version__ = "0.1.0"


def plan(vllm: str | None = None, speculators: str | None = None, transformers: str | None = None) -> Plan:
    """The adaptations for a stack; versions not given are those installed here.

    With both vllm and speculators given, an unnamed transformers is left unknown rather than taken
    from this environment, since it is another stack that is asked for.

    Raises:
        UsageError: a version is not PEP 440.
    """
    from shims.planning import select
    from shims.releases import known
    from shims.versions import Stack, detect, parse, spelled

    for name, version in (("vllm", vllm), ("speculators", speculators), ("transformers", transformers)):
        if version is not None:
            parse(version, f"--{name}")
    # `0.16` and `v0.16.0` are the release 0.16.0.
    vllm = None if vllm is None else spelled(vllm, known())
    here = detect()
    elsewhere = vllm is not None and speculators is not None
    return select(
        Stack(
            vllm or here.vllm,
            speculators or here.speculators,
            transformers or (None if elsewhere else here.transformers),
            None if elsewhere else here.torch,
        )
    )


def _put_hooks() -> None:
    from shims import patching

    if patching.active() is None:
        patching.apply(plan())


_tripwire = Tripwire(_put_hooks)


def install() -> None:
    """Put the shims in force in this process. Idempotent, before or after vLLM is imported."""
    _tripwire.arm()


def install_by_environment() -> None:
    """`install()`, unless SHIMS_DISABLE is set to something other than 0."""
    if os.environ.get("SHIMS_DISABLE", "0") in ("", "0"):
        install()


def uninstall() -> list[str]:
    """Put back everything the shims changed in this process.

    Returns:
        Names left alone because someone else has changed them since; normally empty.
    """
    _tripwire.disarm()
    patching = sys.modules.get("shims.patching")
    receipt = patching.active() if patching is not None else None
    return list(patching.undo(receipt)) if patching is not None and receipt is not None else []


def report() -> Report:
    """What is in force here, confirmed by which signature, on which model runner."""
    from shims.reporting import describe

    patching = sys.modules.get("shims.patching")
    receipt = patching.active() if patching is not None else None
    return describe(receipt.plan if receipt else plan(), receipt, _tripwire.armed)


def require(verified: bool = False) -> Report:
    """Raise unless the generator may run here; with `verified`, unless the release is a known one.

    Raises:
        SpecshimError: see `shims.reporting.refuse_unless_usable`.
    """
    from shims.reporting import refuse_unless_usable

    found = report()
    refuse_unless_usable(found, verified)
    return found


def overrides(**settings: Any) -> AbstractContextManager[None]:
    """Settings for generators built in this context; see `shims.behaviours.overrides.overrides`."""
    from shims.behaviours.overrides import overrides as context

    return context(**settings)


install_by_environment()
