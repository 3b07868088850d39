"""What a run measures, on disk: `metrics.jsonl`, one flushed row per step, and the same numbers for TensorBoard.

What always holds: a step has exactly one row, in order, also after a run was killed and resumed. The rows that a
killed run wrote after its last checkpoint are dropped on resume, because those steps are run again; otherwise a
reader would see them twice. Numbers are float32 values written so that they read back to the same bits.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import tensorboardX

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends rows to `metrics.jsonl` and scalars to the TensorBoard files of a run directory."""

    def __init__(self, run_dir: pathlib.Path, *, first_step: int):
        """Open for appending; `first_step` is the first step that will be written."""
        self._run_dir = run_dir
        self._open(first_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One row, on disk when this returns. A value that is not finite is written as null.

        A value is a number or, for one that has parts, a dictionary of numbers: `name/part` on TensorBoard.
        """
        row = {"step": step, **_finite(values)}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in values.items():
            parts = {f"/{part}": number for part, number in value.items()} if isinstance(value, dict) else {"": value}
            for part, number in parts.items():
                if math.isfinite(number):  # a gap in the curve; TensorBoard would warn at every one
                    self._board.add_scalar(name + part, number, step)

    def rewind(self, step: int) -> int:
        """Drop the rows after `step`, which the run returned to, as on resume; returns how many."""
        self._file.close()
        self._board.close()
        dropped = drop_rows_after(self._run_dir, step)
        self._open(step + 1)
        return dropped

    def _open(self, first_step: int) -> None:
        self._file = (self._run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._board = tensorboardX.SummaryWriter(
            str(self._run_dir / "tensorboard"), purge_step=first_step if first_step > 1 else None
        )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()


def read_rows(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """All rows that were written completely."""
    path = run_dir / METRICS_FILE
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # the process was killed while it wrote this line
            continue
    return rows


def drop_rows_after(run_dir: pathlib.Path, step: int) -> int:
    """Keep the rows up to `step`; returns how many were dropped. The file is replaced at once, never half-written."""
    rows = read_rows(run_dir)
    kept = [row for row in rows if row["step"] <= step]
    path = run_dir / METRICS_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(temporary, path)
    return len(rows) - len(kept)


def _finite(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return value if math.isfinite(value) else None


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write a JSON file at once, never half-written."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a text file at once, never half-written."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
