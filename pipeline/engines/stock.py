"""speculators' own generator, unedited, made right by the shims."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import shims
from pipeline.engines import EngineOptions
from shims.direct.watch import died, lost
from shims.errors import SpecshimError, UsageError
from shims.spawning import spawn_workers
from shims.versions import detect, has_generator


class StockEngine:
    """``VllmHiddenStatesGenerator`` behind the engine protocol."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the model in vLLM worker processes.

        Raises:
            SpecshimError: the installed stack cannot be made right, or the model does not load.
        """
        shims.require()
        version = detect().speculators
        if not has_generator(version):
            raise UsageError(
                "--engine stock",
                "speculators 0.3 or 0.4, which have the generator",
                f"speculators {version}",
                "use --engine direct, which needs no speculators",
            )
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

        self._num_layers = len(options.layers.ids)
        spawn_workers()
        with shims.overrides(dtype=options.dtype, trust_remote_code=options.trust_remote_code):
            self._generator: Any = VllmHiddenStatesGenerator(
                str(options.model.path),
                layer_ids=list(options.layers.after),
                max_model_len=options.max_tokens + 1,
                gpu_memory_utilization=options.gpu_memory_utilization,
                tensor_parallel_size=options.tp_size,
            )

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """States of each row: CPU tensors [T, L, H].

        Raises:
            SpecshimError: the generator failed, or returned something else than these rows.
        """
        import torch

        results = self._generate(rows)
        if len(results) != len(rows):
            raise SpecshimError(
                "stock generator",
                f"{len(rows)} results",
                f"{len(results)}",
                "report this: rows were lost in the engine",
            )
        stacked = []
        for position, (row, result) in enumerate(zip(rows, results, strict=True)):
            returned = torch.as_tensor(result["input_ids"]).tolist()
            if returned != list(row):
                raise SpecshimError(
                    f"stock generator, result {position}",
                    f"the {len(row)} token ids that were asked for",
                    f"{len(returned)} other ids",
                    "report this: results came back in another order",
                )
            layers = result["hidden_states"]
            if len(layers) != self._num_layers:
                raise SpecshimError(
                    f"stock generator, result {position}", f"{self._num_layers} layers", f"{len(layers)}", "report this"
                )
            stacked.append(torch.stack([layer.detach().cpu() for layer in layers], dim=1))
        return stacked

    def _generate(self, rows: Sequence[Sequence[int]]) -> Any:
        pids = worker_pids(getattr(self._generator, "executor", None))
        try:
            return self._generator.generate([list(row) for row in rows])
        except Exception as error:
            gone = died(pids)
            if not gone:
                raise
            # What vLLM says of a worker that was killed is that a wait was cancelled.
            # That finished rows are kept is said by who extracts.
            names = (f"stock generator, worker process {pid}" for pid in gone)
            raise lost(names, next_step="repeat the command") from error

    def close(self) -> None:
        """End the worker processes."""
        generator, self._generator = self._generator, None
        executor = getattr(generator, "executor", None)
        if executor is not None:
            # The stock class does this in __del__, at a time of the interpreter's choosing.
            with contextlib.suppress(Exception):
                executor.shutdown()


def worker_pids(executor: Any) -> list[int]:
    """Worker processes of vLLM's multi-process executor; none where the worker is this process."""
    processes = (getattr(worker, "proc", None) for worker in getattr(executor, "workers", None) or [])
    return [process.pid for process in processes if process is not None and process.pid is not None]
