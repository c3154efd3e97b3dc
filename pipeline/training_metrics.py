"""What speculators' trainer reports, as JSON lines, event files and progress."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.progress import StageProgress
from pipeline.training_parallel import Ranks
from pipeline.training_series import Series
from shims.errors import SpecshimError

_VALIDATION = "val"
_LEFT_OUT = ("error_records",)
Sink = Callable[[dict[str, Any]], None]


class MetricsLog(logging.Handler):
    """Takes what the trainer logs, writes it as JSON lines, and moves the progress.

    A line has ``kind`` (train or val), ``step``, ``epoch``, ``lr``, ``tokens`` (of the step, all processes) and the
    metrics: ``loss``, and for each draft token i ``loss_i``, ``full_acc_i`` (it and all before it right) and
    ``cond_acc_i`` (right where all before it were).
    """

    def __init__(
        self, path: Path, progress: StageProgress, series: Series, ranks: Ranks, *, begin_at: int, step: int, sink: Sink
    ) -> None:
        """Go on writing ``path`` behind its first ``begin_at`` bytes: what follows is computed anew.

        Args:
            step: optimizer steps done so far.
            sink: gets each line too.
        """
        super().__init__(logging.INFO)
        self._file: Any = None
        if ranks.first:
            self._file = path.open("r+b" if path.exists() and begin_at else "wb")
            self._file.truncate(begin_at)
            self._file.seek(begin_at)
        self._progress, self._series, self._ranks, self._sink = progress, series, ranks, sink
        self._last: dict[str, float] = {}
        self._loss_fault: str | None = None
        self.steps = step
        self.tokens = 0
        """Of the batch under way, in this process."""

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.msg, dict):
            return
        kind = _VALIDATION if _VALIDATION in record.msg else "train"
        metrics = {
            name.removesuffix("_epoch"): float(value)
            for name, value in record.msg[kind].items()
            if not name.startswith(_LEFT_OUT)
        }
        # Where metrics are counted, the trainer has added them up over the processes already.
        if not self._series.counted:
            metrics = self._ranks.averaged(metrics)
        self.steps += kind != _VALIDATION
        line: dict[str, Any] = {"kind": kind, "step": self.steps}
        line |= {"epoch": record.msg.get("epoch"), "lr": record.msg.get("lr")}
        if kind != _VALIDATION:
            line["tokens"] = round(self._ranks.summed({"tokens": self.tokens})["tokens"])
        self._write(line | metrics)
        if metrics["loss"] != metrics["loss"] or abs(metrics["loss"]) == float("inf"):
            self._loss_fault = f"{kind} loss is {metrics['loss']} at step {self.steps}"
        if kind == _VALIDATION:
            self._last = metrics
        else:
            self._progress.advance(rows=1, tokens=line["tokens"], note=_note(metrics))

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write((json.dumps(line) + "\n").encode())
            self._file.flush()
        self._sink(line)

    def refuse_broken_loss(self) -> None:
        """Stop a training that has diverged.

        Raises:
            SpecshimError: a loss was not a number.
        """
        if self._loss_fault:
            raise SpecshimError(
                "train", "a finite loss", self._loss_fault, "check the data with `specshim verify`, or lower --lr"
            )

    def validation(self) -> dict[str, float]:
        """The latest validation metrics.

        Raises:
            SpecshimError: a loss was not a number.
        """
        self.refuse_broken_loss()
        return dict(self._last)

    def durable(self) -> int:
        """Bytes written so far, on the disk."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return int(self._file.tell())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def _note(metrics: dict[str, float]) -> str:
    """For the progress line: loss, and how often the first, second … draft token is right."""
    names = sorted(name for name in metrics if name.startswith("full_acc_"))
    right = "/".join(f"{100 * metrics[name]:.0f}" for name in names)
    return f"loss {metrics['loss']:.3f}, right {right} %"


@contextmanager
def metrics_to(log: MetricsLog) -> Iterator[MetricsLog]:
    """Listen to speculators' metrics while the block runs."""
    logger = logging.getLogger("speculators.metrics")
    before = logger.level, logger.propagate
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        log.close()


@contextmanager
def counted_over(ranks: Ranks, series: Series) -> Iterator[None]:
    """Let the trainer divide sums by totals of all processes, not of this one."""
    if not series.counted or ranks.size == 1:
        yield
        return
    from speculators.train import trainer

    original = trainer.normalize_counted_metrics

    def over_all(metrics: dict[str, Any], _world_size: int = 1) -> Any:
        return original(ranks.summed(metrics), ranks.size)

    trainer.normalize_counted_metrics = over_all
    try:
        yield
    finally:
        trainer.normalize_counted_metrics = original


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
