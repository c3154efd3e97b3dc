"""A wheel on the index, read by ranges: files that will be wanted come together, in few requests."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import remotezip
import requests

from contract_tests.sources.trees import MAX_DIRECTORY, ZipTree, too_large

# Enough for the end of a wheel and the list of its files in one request.
_TAIL = 512 * 1024
# Bytes between two wanted files that are fetched along with them rather than asked around.
_GAP = 128 * 1024


class _Fetcher(remotezip.RemoteFetcher):  # type: ignore[misc]
    """Answers from what was fetched ahead, where it can."""

    def __init__(self, label: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._held: list[tuple[int, bytes]] = []
        self._label = label

    def ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch `(first, end)` ranges now, neighbours together."""
        for first, end in _merged(ranges):
            self._held.append((first, super().fetch((first, end - 1)).read()))

    def _request(self, options: dict[str, Any]) -> Any:
        raw, header = super()._request(options)
        # The archive says how long its parts are and the server what it sends; neither has to be true.
        sizes = re.findall(r"\d+", header.partition("/")[0])
        if len(sizes) == 2 and int(sizes[1]) - int(sizes[0]) > MAX_DIRECTORY:
            raw.close()
            raise too_large(self._label, f"a part of {int(sizes[1]) - int(sizes[0]) + 1} bytes")
        return raw, header

    def fetch(self, data_range: tuple[int, int | None], stream: bool = False) -> Any:
        first, last = data_range
        for start, content in self._held:
            if last is not None and start <= first and last < start + len(content):
                part = io.BytesIO(content[first - start : last - start + 1])
                return remotezip.PartialBuffer(part, first, last - first + 1, False)
        return super().fetch(data_range, stream)


class RemoteWheel(ZipTree):
    """A wheel of the index.

    Args:
        url: of the file.
        label: for messages.
        session: to ask with.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, url: str, label: str, session: requests.Session, timeout: float) -> None:
        self._fetcher = _Fetcher(label, url, session, timeout=timeout)
        archive = remotezip.RemoteZip(url, initial_buffer_size=_TAIL, fetcher=lambda *_, **__: self._fetcher)
        super().__init__(archive, label)

    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetch the files among `paths` that the wheel has."""
        starts = sorted(info.header_offset for info in self.archive.infolist())
        ends = dict(zip(starts, [*starts[1:], self.archive.start_dir], strict=True))
        wanted = (self.archive.getinfo(path).header_offset for path in paths if path in self.paths())
        self._fetcher.ahead((start, ends[start]) for start in wanted)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first - merged[-1][1] <= _GAP:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged
