"""What a run measures, on disk: `metrics.jsonl`, one row per step, and the same numbers for TensorBoard.

What always holds: a step has at most one row, in order, also after a run was killed and resumed. The rows that a
killed run wrote after its last checkpoint are dropped on resume, because those steps are run again; otherwise a
reader would see them twice. Numbers are float32 values written so that they read back to the same bits. A row that
cannot be written is lost whole, counted, and the run goes on.
"""

import contextlib
import errno
import io
import json
import math
import os
import pathlib
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from tensorboardX import summary as board_summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.writer import Event, SessionLog

from train.unwritten import Unwritten

METRICS_FILE = "metrics.jsonl"
BOARD_FOLDER = "tensorboard"


class MetricsLog:
    """Appends rows to `metrics.jsonl` and scalars to the TensorBoard files of a run directory."""

    def __init__(self, run_dir: pathlib.Path, *, first_step: int, unwritten: Unwritten | None = None):
        """Append from `first_step` on; what cannot be written is counted in `unwritten`."""
        self._run_dir, self._unwritten = run_dir, unwritten or Unwritten()
        self._rows = Appender(run_dir / METRICS_FILE)
        self._events = Appender(
            run_dir / BOARD_FOLDER / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        )
        self._hide_from(first_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One row, on disk when this returns. A value that is not finite is written as null.

        A value is a number or, for one that has parts, a dictionary of numbers: `name/part` on TensorBoard.
        """
        row = {"step": step, **_finite(values)}
        with self._unwritten.attempt(METRICS_FILE):
            self._rows.append((json.dumps(row, allow_nan=False) + "\n").encode(), line=True)
        self._show_values(step, values)

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Add to the row of `step`, where it is the last one; the old row stands until the new one does."""
        path = self._run_dir / METRICS_FILE
        with self._unwritten.attempt(METRICS_FILE):
            rest, last = _split_last(path.read_bytes() if path.exists() else b"")
            if last.get("step") == step:
                self._rows.close()  # of the file that is replaced
                line = json.dumps(last | _finite(values), allow_nan=False) + "\n"
                write_text(path, rest.decode("utf-8", "replace") + line)
        self._show_values(step, values)

    def _show_values(self, step: int, values: Mapping[str, Any]) -> None:
        now = time.time()
        # A value that is not finite is a gap in the curve.
        scalars = [board_summary.scalar(name, number) for name, number in _flat(values) if math.isfinite(number)]
        self._show(Event(wall_time=now, step=step, summary=scalar) for scalar in scalars)

    def rewind(self, step: int) -> int:
        """Drop the rows after `step`, which the run returned to, as on resume; returns how many."""
        dropped = 0
        with self._unwritten.attempt(METRICS_FILE):
            dropped = drop_rows_after(self._run_dir, step)
        self._hide_from(step + 1)
        return dropped

    def _hide_from(self, step: int) -> None:
        """Begin the event file, or go on in it, with the mark that hides what was written for later steps."""
        mark = [Event(wall_time=time.time(), step=step, file_version="brain.Event:2")]
        if step > 1 or any((self._run_dir / BOARD_FOLDER).glob("*")):  # a run may start again at its first step
            mark.append(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        self._show(mark)

    def _show(self, events: Iterable[Event]) -> None:
        """Put events before TensorBoard."""
        with self._unwritten.attempt(BOARD_FOLDER):
            (self._run_dir / BOARD_FOLDER).mkdir(exist_ok=True)
            self._events.append(_records(events))

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.close()
        self._events.close()


class Appender:
    """A file to which pieces are added, each whole or not at all, for every reader to see when `append` returns."""

    def __init__(self, path: pathlib.Path):
        """The file is made by the first piece."""
        self._path = path
        self._file: io.FileIO | None = None

    def append(self, piece: bytes, *, line: bool = False) -> None:
        """Add a piece; a `line` does not become part of one that a killed process left half-written.

        Raises:
          OSError: nothing of it was written.
        """
        if self._file is None:
            self._file = io.FileIO(self._path, "a+")
        before = os.fstat(self._file.fileno()).st_size
        try:
            if line and before and os.pread(self._file.fileno(), 1, before - 1) != b"\n":
                piece = b"\n" + piece
            if self._file.write(piece) != len(piece):  # what is left of a disk that is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            self.close()
            raise

    def close(self) -> None:
        """Give the file back; another `append` opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()


def _records(events: Iterable[Event]) -> bytes:
    """Events as TensorBoard reads them. Not tensorboardX's own writer: its thread dies of a full disk, and then its
    queue fills up and stops the run."""
    pieces = []
    for event in events:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        pieces += [length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))]
    return b"".join(pieces)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, number) of every value, `name/part` for one that has parts."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{part}", number) for part, number in value.items())
        else:
            yield name, value


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; lines that were not written completely are left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # the process was killed while it wrote this line
            continue
    return found


def read_rows(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """All rows that were written completely."""
    return read_lines(run_dir / METRICS_FILE)


def drop_rows_after(run_dir: pathlib.Path, step: int) -> int:
    """Keep the rows up to `step`; returns how many were dropped. Rows are in order, so the file is cut: no disk is too
    full for that, and a process that is killed leaves it cut or whole."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return 0
    rows, keep = read_rows(run_dir), 0
    with path.open("r+b") as file:
        for line in file:
            if (found := _step_of(line)) is not None and found > step:
                break
            keep += len(line)
        file.truncate(keep)
    return sum(row["step"] > step for row in rows)


def _split_last(content: bytes) -> tuple[bytes, dict[str, Any]]:
    """(everything before the last row, that row); an empty row where the end is not one."""
    rest, newline, line = content.rstrip(b"\n").rpartition(b"\n")
    try:
        return rest + newline, json.loads(line)
    except ValueError:
        return content, {}


def _step_of(line: bytes) -> int | None:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return None


def _finite(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def write_json(path: pathlib.Path, value: Any, *, lasting: bool = True) -> None:
    """Write a JSON file at once, never half-written; a number that is not finite is written as null."""
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n", lasting=lasting)


def write_text(path: pathlib.Path, text: str, *, lasting: bool = True) -> None:
    """Write a text file at once, never half-written; what is `lasting` is whole after a loss of power, too."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if lasting:
            os.fsync(file.fileno())
    os.replace(temporary, path)
