"""What the installed package says about names: the second reader, by importing."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from typing import Any

from contract_tests.readers.found import ABSENT, FOUND, OPAQUE, Found
from shims.contract import Parameter, Signature


def read_live(home: str) -> Found:
    """What stands at `module:qualified.name`, or at `module`, in this environment.

    Attributes that only exist on instances cannot be seen on a class: those come as `opaque`.
    """
    module_name, _, qualname = home.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        return Found(ABSENT, detail=f"{type(error).__name__}: {error}")
    owner = None
    for part in qualname.split(".") if qualname else []:
        owner = target
        try:
            target = getattr(target, part)
        except AttributeError as error:
            if isinstance(owner, type):
                return _on_instances(owner, part)
            return Found(ABSENT, detail=str(error))
    return _describe(target, owner, home)


def _on_instances(owner: type, name: str) -> Found:
    home = f"{owner.__module__}:{owner.__qualname__}.{name}"
    if any(name in getattr(base, "__annotations__", {}) for base in owner.__mro__):
        return Found(FOUND, "attribute", home)
    return Found(OPAQUE, "attribute", home, detail=f"{owner.__qualname__} may set {name} on its instances")


def _describe(target: Any, owner: Any, home: str) -> Found:
    if inspect.ismodule(target):
        return Found(FOUND, "module", target.__name__)
    own_home = f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    if inspect.isclass(target):
        abstract = tuple(sorted(getattr(target, "__abstractmethods__", ())))
        return Found(FOUND, "class", own_home, Signature.of(target), _defaults(target), abstract=abstract)
    if callable(target) and not isinstance(target, Enum) and hasattr(target, "__qualname__"):
        found = Signature.of(target)
        kind = "method" if isinstance(owner, type) else "function"
        return Found(FOUND, kind, own_home, found, _defaults(target), inspect.iscoroutinefunction(target))
    return Found(FOUND, "attribute", home)


def _defaults(target: Any) -> tuple[tuple[str, str], ...]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple((p.name, repr(p.default)[:60]) for p in parameters if p.default is not p.empty)


def same_shape(source: Found, live: Found) -> list[str]:
    """Where the two readers disagree on a name that both could read; empty where they agree."""
    if FOUND not in (source.status, live.status) or OPAQUE in (source.status, live.status):
        return []
    if source.status != live.status:
        return [f"source says {source.status}, the live object {live.status}"]
    if source.signature is None or live.signature is None:
        return []
    return [
        f"{name}: source {_shape(ours)}, live {_shape(theirs)}"
        for name, (ours, theirs) in _paired(source.signature, live.signature).items()
        if _shape(ours) != _shape(theirs)
    ]


def _paired(ours: Signature, theirs: Signature) -> dict[str, tuple[Parameter | None, Parameter | None]]:
    left, right = ({p.name: p for p in s.parameters} for s in (ours, theirs))
    return {name: (left.get(name), right.get(name)) for name in {**left, **right}}


def _shape(parameter: Parameter | None) -> str:
    if parameter is None:
        return "nothing"
    # pydantic shows a keyword-only field as it likes; whether it is required is what counts.
    return "required" if parameter.required else "optional"
