"""Curves of a run: `loss.png`, and the figures of `report.html`.

What always holds: a curve shows what `metrics.jsonl` holds, step by step; a value that was not finite or not measured
is a gap, never a zero.
"""

import base64
import io
import math
import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

type Rows = list[dict[str, Any]]


def save_loss_plot(
    path: pathlib.Path, rows: Rows, *, bigram_bits_per_byte: float, bytes_per_token: float = 1.0
) -> None:
    """Draw training and held-out loss over the steps, in bits per byte, with the bigram's as a line."""
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, label, marker in (("loss", "training text", ""), ("held_out_loss", "held-out text", "o")):
        points = [(row["step"], row[name] / math.log(2) / bytes_per_token) for row in rows if row.get(name) is not None]
        axes.plot([step for step, _ in points], [bits for _, bits in points], label=label, marker=marker)
    axes.axhline(
        bigram_bits_per_byte, color="gray", linestyle="--", label=f"bigram on held-out text: {bigram_bits_per_byte:.2f}"
    )
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def report_figures(rows: Rows) -> list[tuple[str, str]]:
    """(caption, PNG as a `data:` address) of every curve that the run measured."""
    panels = (
        ("Loss, nats per target", ("loss", "held_out_loss"), "linear"),
        ("Norms of gradient and parameters", ("grad_norm", "param_norm"), "log"),
        ("Tokens per second", ("tokens_per_s",), "linear"),
        ("Model FLOPs utilization", ("mfu",), "linear"),
        ("Seconds of a step, and of waiting for its data", ("step_time_s", "data_wait_s"), "log"),
        ("Learning rate", ("lr",), "linear"),
        ("Share of padding", ("padding_share",), "linear"),
    )
    figures = [(caption, _curves(rows, names, scale)) for caption, names, scale in panels]
    figures.append(("Held-out loss by position in context, last evaluation", _by_position(rows)))
    return [(caption, address) for caption, address in figures if address]


def _curves(rows: Rows, names: tuple[str, ...], scale: str) -> str | None:
    """One panel with a curve for each name; None where nothing was measured."""
    figure, axes = _panel()
    has_positive = False  # a logarithmic axis must have something to show
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            values = [math.nan if value is None else value for _, value in points]
            axes.plot([step for step, _ in points], values, label=name, marker="o" if len(points) < 20 else "")
            has_positive |= any(value > 0 for value in values)
    if not axes.lines:
        return None
    axes.set(xlabel="step", yscale=scale if has_positive else "linear")
    axes.legend()
    return _address(figure)


def _by_position(rows: Rows) -> str | None:
    """The curve that shows whether a long context is used."""
    curves = [row["held_out_loss_by_position"] for row in rows if row.get("held_out_loss_by_position")]
    if not curves:
        return None
    figure, axes = _panel()
    points = [(int(edge), loss) for edge, loss in curves[-1].items() if loss is not None]
    axes.plot([edge + 1 for edge, _ in points], [loss for _, loss in points], marker="o")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of context, at least", ylabel="nats per target")
    return _address(figure)


def _panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6, 3.2), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def _address(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
