"""Our own engine: rows go from vLLM's worker to their files at the speed of prefill."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeline.engines import EngineOptions
from pipeline.engines.row_sink import PROBE, RowSinkSettings, probe_path
from pipeline.formats.hs_safetensors import read_row
from shims.direct.engine import DirectEngine, DirectOptions, Settled
from shims.errors import SpecshimError


class StreamingEngine:
    """The direct engine with the row sink.

    Args:
        sink: where and how the worker writes.

    Raises:
        SpecshimError: the model does not load.
    """

    def __init__(self, options: EngineOptions, sink: RowSinkSettings) -> None:
        self._probes = tempfile.TemporaryDirectory(prefix="specshim-probes-")
        sink = replace(sink, probes=self._probes.name)
        self._engine = DirectEngine(
            DirectOptions(
                model=str(options.model.path),
                native_ids=options.layers.native,
                sink=sink.reference,
                sink_settings=sink.as_dict(),
                max_model_len=options.max_tokens + 1,
                dtype=options.dtype,
                tensor_parallel_size=options.tp_size,
                gpu_memory_utilization=options.gpu_memory_utilization,
                trust_remote_code=options.trust_remote_code,
                enforce_eager=options.enforce_eager,
                max_num_batched_tokens=options.max_num_batched_tokens,
            )
        )
        self.workers = self._engine.workers

    def stream(self, rows: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Settled]:
        """Compute rows, in any order; see :meth:`shims.direct.engine.DirectEngine.run`."""
        return self._engine.run((str(index), ids) for index, ids in rows)

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """States of a few rows, which are stored nowhere: CPU tensors [T, L, H], for a preflight.

        Raises:
            SpecshimError: the engine failed, or the states of a row cannot be right.
        """
        names = [f"{PROBE}{number}" for number in range(len(rows))]
        for settled in self._engine.run(zip(names, rows, strict=True)):
            for name, fault in settled.faults.items():
                raise SpecshimError(f"row {name}", "states that can be right", fault, "do not extract with this stack")
        paths = [probe_path(self._probes.name, name) for name in names]
        found = [read_row(path).states for path in paths]
        for path in paths:
            path.unlink()
        return found

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.close()
        self._probes.cleanup()


def open_streaming(options: EngineOptions, sink: RowSinkSettings) -> StreamingEngine:
    """Load the model for rows that the worker writes itself.

    Raises:
        SpecshimError: the model does not load.
    """
    return StreamingEngine(options, sink)
