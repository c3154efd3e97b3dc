"""For eyes: TensorBoard event files while a training runs, and a picture of it at its end. Both are optional."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.atomic import write_bytes

EVENTS_FOLDER = "tensorboard"
PLOT_NAME = "training.png"
_NOT_METRICS = ("kind", "step", "epoch")


class Events:
    """Writes each metrics line as TensorBoard scalars."""

    def __init__(self, folder: Path, step: int) -> None:
        """Go on in ``folder`` behind ``step``; what a killed run wrote after it is hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    @staticmethod
    def missing() -> str:
        """Why no event files can be written; empty where they can."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: F401
        except ImportError as error:
            return str(error)
        return ""

    def add(self, line: dict[str, Any]) -> None:
        """One line of the metrics file."""
        for name, value in line.items():
            if name not in _NOT_METRICS and isinstance(value, int | float):
                self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def plot(lines: Sequence[dict[str, Any]], path: Path) -> str:
    """Loss and accuracy over the steps, as a PNG.

    Returns:
        Why there is none; empty where there is.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"{error}"
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "val"]
    figure, (losses, accuracy) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    losses.plot([line["step"] for line in train], [line["loss"] for line in train], color="0.7", label="training")
    losses.plot(
        [line["step"] for line in held_out], [line["loss"] for line in held_out], "o-", color="C0", label="held out"
    )
    losses.set(xlabel="step", ylabel="loss")
    losses.legend()
    for number, name in enumerate(sorted({name for line in held_out for name in line if name.startswith("full_acc_")})):
        steps = [line["step"] for line in held_out if name in line]
        values = [100 * line[name] for line in held_out if name in line]
        accuracy.plot(steps, values, "o-", color=f"C{number}", label=f"first {number + 1} right")
    accuracy.set(xlabel="step", ylabel="held-out draft tokens, %", ylim=(0, None))
    accuracy.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    pyplot.close(figure)
    write_bytes(path, content.getvalue())
    return ""
