"""How one call or name is adapted. Each verb names the difference, not the version.

The call verbs (`Drop`, `Rename`, `Fill`, `Compute`) are pure and know how the adapted call looks, so that it
can be checked against a signature without running anything. The others refer to code in
`shims.behaviours` by `module:function`, loaded only when it is first needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shims.contract import Call


def load(reference: str) -> Any:
    """The object that `module:name` refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Verb:
    """Base of all verbs; the defaults leave a call as it is."""

    def describe(self) -> str:
        raise NotImplementedError

    def reshape(self, call: Call) -> Call:
        """The shape of the call after this verb."""
        return call

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords after this verb; positional arguments never change."""
        return kwargs

    @property
    def reference(self) -> str | None:
        """`module:function` of the code behind this verb, if it needs code."""
        return None


@dataclass(frozen=True)
class Drop(Verb):
    """Leave out a keyword that the callee no longer, or not yet, takes."""

    keyword: str

    def describe(self) -> str:
        return f"drop {self.keyword}"

    def reshape(self, call: Call) -> Call:
        return call.without(self.keyword)

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in kwargs.items() if k != self.keyword}


@dataclass(frozen=True)
class Rename(Verb):
    """Give a keyword under the name that the callee has for it."""

    keyword: str
    name: str

    def describe(self) -> str:
        return f"rename {self.keyword} to {self.name}"

    def reshape(self, call: Call) -> Call:
        return call.without(self.keyword).adding(self.name) if self.keyword in call.keywords else call

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.keyword not in kwargs:
            return kwargs
        rest = {k: v for k, v in kwargs.items() if k != self.keyword}
        return {self.name: kwargs[self.keyword], **rest}


@dataclass(frozen=True)
class Fill(Verb):
    """Give a keyword a constant value where the caller gives none."""

    keyword: str
    value: Any

    def describe(self) -> str:
        return f"fill {self.keyword}={self.value!r}"

    def reshape(self, call: Call) -> Call:
        return call.adding(self.keyword)

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {self.keyword: self.value, **kwargs}


@dataclass(frozen=True)
class Compute(Verb):
    """Set a keyword from the call's other arguments: `function(args, kwargs) -> value`."""

    keyword: str
    function: str

    def describe(self) -> str:
        return f"compute {self.keyword}"

    def reshape(self, call: Call) -> Call:
        return call.adding(self.keyword)

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, self.keyword: load(self.function)(args, kwargs)}

    @property
    def reference(self) -> str:
        return self.function


@dataclass(frozen=True)
class Moved(Verb):
    """Offer a name at its old home: it lives in `home` now. Looked up at first use, never at import."""

    home: str

    def describe(self) -> str:
        return f"moved to {self.home}"


@dataclass(frozen=True)
class Provide(Verb):
    """Supply a module or name that the release does not have: `function() -> object`."""

    function: str

    def describe(self) -> str:
        return f"provide ({self.function.rpartition(':')[2]})"

    @property
    def reference(self) -> str:
        return self.function


@dataclass(frozen=True)
class Wrap(Verb):
    """Run code around the original: `function(wrapped, instance, args, kwargs) -> result`."""

    function: str

    def describe(self) -> str:
        return f"wrap ({self.function.rpartition(':')[2]})"

    @property
    def reference(self) -> str:
        return self.function


@dataclass(frozen=True)
class Substitute(Verb):
    """Put a stand-in in the place of a global of speculators' own: `function(original) -> object`."""

    function: str

    def describe(self) -> str:
        return f"substitute ({self.function.rpartition(':')[2]})"

    @property
    def reference(self) -> str:
        return self.function


@dataclass(frozen=True)
class Replace(Verb):
    """Put code in the place of a method of speculators' own: `function(self, …)`."""

    function: str

    def describe(self) -> str:
        return f"replace ({self.function.rpartition(':')[2]})"

    @property
    def reference(self) -> str:
        return self.function


def reshape(call: Call, verbs: list[Verb]) -> Call:
    """The shape of `call` after all `verbs`, in order."""
    for verb in verbs:
        call = verb.reshape(call)
    return call


def adapted(verbs: list[Verb], override: Callable[[], dict[str, Any]] = dict) -> Callable[..., Any]:
    """`function(wrapped, instance, args, kwargs)`, as wrapt wants it, that applies the call verbs in order.

    `Wrap` verbs see the call already reshaped by the call verbs; `override()` gives keywords that win
    over both the caller's and the verbs'.
    """
    wraps = [load(verb.function) for verb in verbs if isinstance(verb, Wrap)]

    def call(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for verb in verbs:
            kwargs = verb.apply(args, kwargs)
        kwargs = {**kwargs, **override()}
        for wrap in wraps:
            wrapped = _bound(wrap, wrapped, instance)
        return wrapped(*args, **kwargs)

    return call


def _bound(wrap: Callable[..., Any], inner: Callable[..., Any], instance: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrap(inner, instance, args, kwargs)
