"""From steps to whole rows: which request each row of a step belongs to, proved by its content.

Works on CPU memory, away from the thread that feeds the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shims.errors import WrongStatesError
from shims.proof import prove


@dataclass
class Step:
    """What one step of the engine did.

    Args:
        scheduled: request id -> tokens of it in this step.
        started: request id -> the whole prompt, of requests that this step is the first of.
        ended: requests that the scheduler dropped since the step before.
        order: request ids in the order of their rows.
        runner: the model runner's kind, for messages.
    """

    scheduled: dict[str, int]
    started: dict[str, list[int]]
    ended: set[str]
    runner: str
    order: list[str] | None = None

    @property
    def tokens(self) -> int:
        return sum(self.scheduled.values())


@dataclass
class Row:
    """A whole request.

    `token_ids` is int64 [T]; `columns` are [T, …] each. They may lie in the step's own buffer, and are
    good until that is given back.
    """

    request_id: str
    token_ids: Any
    columns: tuple[Any, ...]


@dataclass
class _Open:
    """A request that is not through yet; `columns` and `seen` ([T] bool) are made when it is first cut."""

    prompt: Any
    columns: tuple[Any, ...] = ()
    seen: Any = None


class Assembly:
    """Collects the rows of requests across steps."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def rows(self, step: Step, token_ids: Any, positions: Any, columns: tuple[Any, ...]) -> Iterator[Row]:
        """The requests that this step completes.

        Args:
            token_ids: int64 [tokens of the step], as they went into the model.
            positions: int64 [tokens of the step].
            columns: [tokens of the step, …] each, CPU: what is known of each token.

        Raises:
            WrongStatesError: a row's token ids or positions are not its request's.
        """
        import torch

        for request_id in step.ended:
            self._open.pop(request_id, None)
        for request_id, prompt in step.started.items():
            self._open[request_id] = _Open(torch.tensor(prompt, dtype=torch.int64))
        order = step.order or []
        counts = [step.scheduled.get(request_id, 0) for request_id in order]
        if sum(counts) != step.tokens:
            raise WrongStatesError(
                "worker, one step", f"{step.tokens} rows in a known order", f"{sum(counts)} rows of known requests",
                "report this: the batch holds requests that the scheduler did not send",
            )  # fmt: skip
        start = 0
        for request_id, count in zip(order, counts, strict=True):
            rows = slice(start, start + count)
            start = rows.stop
            request = self._open.get(request_id)
            if count and request is not None:
                first = prove(request_id, request.prompt, token_ids[rows], positions[rows], step.runner)
                yield from self._add(request_id, request, first, tuple(c[rows] for c in columns))

    def _add(self, request_id: str, request: _Open, first: int, columns: tuple[Any, ...]) -> Iterator[Row]:
        import torch

        length, count = len(request.prompt), len(columns[0])
        if count == length:
            del self._open[request_id]
            yield Row(request_id, request.prompt, columns)
            return
        if request.seen is None:
            request.columns = tuple(torch.empty(length, *c.shape[1:], dtype=c.dtype) for c in columns)
            request.seen = torch.zeros(length, dtype=torch.bool)
        for whole, part in zip(request.columns, columns, strict=True):
            whole[first : first + count] = part
        request.seen[first : first + count] = True
        if bool(request.seen.all()):
            del self._open[request_id]
            yield Row(request_id, request.prompt, request.columns)

    def incomplete(self) -> list[str]:
        """Requests that have begun and are not whole."""
        return list(self._open)
