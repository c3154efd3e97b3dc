"""What speculators' trainer logs, as JSON lines and as progress."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.progress import StageProgress
from shims.errors import SpecshimError

_VALIDATION = "val"


class MetricsLog(logging.Handler):
    """Takes what the trainer logs, writes it as JSON lines, and moves the progress."""

    def __init__(self, path: Path, progress: StageProgress, tokens_per_step: int) -> None:
        super().__init__(logging.INFO)
        self._file = path.open("w", encoding="utf-8")
        self._progress, self._tokens = progress, tokens_per_step
        self._last: dict[str, float] = {}
        self._loss_fault: str | None = None
        self.steps = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.msg, dict):
            return
        kind = _VALIDATION if _VALIDATION in record.msg else "train"
        metrics = {name.removesuffix("_epoch"): float(value) for name, value in record.msg[kind].items()}
        line = {
            "kind": kind,
            "step": self.steps,
            "epoch": record.msg.get("epoch"),
            "lr": record.msg.get("lr"),
            **metrics,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if metrics["loss"] != metrics["loss"]:
            self._loss_fault = f"{kind} loss is not a number at step {self.steps}"
        if kind == _VALIDATION:
            self._last = metrics
        else:
            self.steps += 1
            self._progress.advance(rows=1, tokens=self._tokens, note=f"loss {metrics['loss']:.3f}")

    def validation(self) -> dict[str, float]:
        """The latest validation metrics.

        Raises:
            SpecshimError: a loss was not a number.
        """
        if self._loss_fault:
            raise SpecshimError(
                "train", "a finite loss", self._loss_fault, "check the data with `specshim verify`, or lower --lr"
            )
        return dict(self._last)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def metrics_to(path: Path, progress: StageProgress, tokens_per_step: int) -> Iterator[MetricsLog]:
    """Listen to speculators' metrics while the block runs."""
    logger = logging.getLogger("speculators.metrics")
    before = logger.level, logger.propagate
    handler = MetricsLog(path, progress, tokens_per_step)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        handler.close()
