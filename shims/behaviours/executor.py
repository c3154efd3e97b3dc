"""The executor as the generator sees it, and what a worker tells when it fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any


class AdaptedExecutor:
    """vLLM's executor with some methods adapted; everything else is the executor's own.

    Args:
        executor: the real executor.
        methods: name -> `adapter(wrapped, executor, args, kwargs)`; `wrapped` is None where the
            release has no such method.
    """

    def __init__(self, executor: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._executor = executor
        for name, adapter in methods.items():
            setattr(self, name, self._adapt(adapter, getattr(executor, name, None)))

    def _adapt(self, adapter: Callable[..., Any], wrapped: Callable[..., Any] | None) -> Callable[..., Any]:
        return lambda *args, **kwargs: adapter(wrapped, self._executor, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_executor"], name)


def single_reply(wrapped: Callable[..., Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bare reply of the one worker asked, where the release wraps it in a list of one."""
    reply = wrapped(*args, **kwargs)
    return reply[0] if kwargs.get("unique_reply_rank") is not None else reply


def no_second_half(wrapped: None, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`sample_tokens` of a release whose execute_model does the whole step: nothing is left to do."""


def explain_failure(wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send a failure with its type and traceback instead of its bare, possibly empty, message."""
    output = args[0] if args else kwargs["output"]
    # Subclasses carry data that vLLM itself reads: those pass as they are.
    if isinstance(output, Exception) and not hasattr(output, "kv_connector_output"):
        # format_tb leaves out the notes: vLLM has put this very traceback there already.
        frames = "".join(traceback.format_tb(output.__traceback__))
        output = RuntimeError(f"{type(output).__name__}: {str(output) or '(no message)'}\nin the worker:\n{frames}")
    return wrapped(output)
