"""The picture of an evaluation; only where matplotlib is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.atomic import write_bytes
from pipeline.evaluation.request import NONE
from pipeline.evaluation.results import Results, acceptance_in


def draw(results: Results, output: Path, losses: Path | None) -> bool:
    """Write a PNG of acceptance by step, speed, and the losses of the training.

    Args:
        losses: metrics.jsonl of the training; None for no such panel.

    Returns:
        Whether it was written: not without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    import io

    panels = [_acceptance]
    panels += [_speed] if len(results.engines) > 1 else []
    curves = read_losses(losses) if losses else {}
    figure = Figure(figsize=(5.2 * (len(panels) + bool(curves)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels) + bool(curves), squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=False):
        panel(axis, results)
    if curves:
        _losses(axes[-1], curves)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_bytes(output, buffer.getvalue())
    return True


def _acceptance(axis: Any, results: Results) -> None:
    for name, found in results.teacher_forced.items():
        shares = acceptance_in(found["as_served"]).conditional
        axis.plot(range(1, len(shares) + 1), shares, marker="o", linestyle="--", label=f"teacher-forced: {name}")
    for kind, answer in results.engines.items():
        if answer.acceptance is not None:
            shares = answer.acceptance.conditional
            axis.plot(range(1, len(shares) + 1), shares, marker="s", label=f"served: {kind}")
    axis.set(title="accepted, of chains accepted so far", xlabel="draft token", ylim=(0, 1))
    axis.set_xticks(range(1, results.steps + 1))
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=7)


def _speed(axis: Any, results: Results) -> None:
    names = list(results.engines)
    rates = [results.engines[name].tokens_per_second for name in names]
    bars = axis.bar(names, rates, color=["0.6" if name == NONE else "tab:blue" for name in names])
    axis.bar_label(bars, fmt="%.0f")
    axis.set(title="tokens per second, all answers together")
    axis.tick_params(axis="x", labelsize=8)


def _losses(axis: Any, curves: dict[str, list[tuple[float, float]]]) -> None:
    for kind, points in curves.items():
        axis.plot(*zip(*points, strict=True), label=kind, marker="o" if len(points) < 30 else None, markersize=3)
    axis.set(title="loss of the training", xlabel="step")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def read_losses(file: Path) -> dict[str, list[tuple[float, float]]]:
    """(step, loss) by kind of line, from metrics.jsonl; lines of another form are passed over."""
    curves: dict[str, list[tuple[float, float]]] = {}
    if not file.is_file():
        return curves
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            point = (float(entry["step"]), float(entry["loss"]))
            kind = str(entry["kind"])
        except (ValueError, KeyError, TypeError):
            continue
        curves.setdefault(kind, []).append(point)
    return curves
