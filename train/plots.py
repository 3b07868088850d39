"""`loss.png`: how the loss fell, beside the bigram model that has to be beaten."""

import math
import pathlib
from typing import Any

from matplotlib.figure import Figure


def save_loss_plot(
    path: pathlib.Path, rows: list[dict[str, Any]], *, bigram_bits_per_byte: float, bytes_per_token: float = 1.0
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
