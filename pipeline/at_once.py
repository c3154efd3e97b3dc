"""Questions that take long to answer, several asked side by side, the answers in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pipeline.formats.stores import Remote, RowStore

_WHOLE_AT_ONCE = 4
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def answers(function: Callable[[Asked], Answer], asked: Iterable[Asked], threads: int) -> Iterator[Answer]:
    """``function`` of each, in order; no more than twice ``threads`` are ahead of the one that is taken.

    Args:
        threads: 1 asks in this thread, one after the other.
    """
    if threads == 1:
        yield from map(function, asked)
        return
    with ThreadPoolExecutor(threads, "specshim-ask") as pool:
        ahead: deque[Future[Answer]] = deque()
        try:
            for one in asked:
                ahead.append(pool.submit(function, one))
                if len(ahead) >= 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def threads_for(store: RowStore, whole: bool = False) -> int:
    """How many of a store's rows to ask for side by side.

    Args:
        whole: the rows' states are read, too; a row may be 100 MB.
    """
    if not isinstance(store, Remote):
        return 1
    return min(store.at_once, _WHOLE_AT_ONCE) if whole else store.at_once
