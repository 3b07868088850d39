"""Files that could not be written: said once each, counted, and no reason to end a run.

What always holds: a full disk, or a store that fails, costs what should have been written, never a step. Whatever a
run writes beside its checkpoints is written inside `attempt`; checkpoints have their own rule (`train.checkpoint`).
"""

import contextlib
import io
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import IO, Any


class Unwritten:
    """Counts failed writes by the name of what was to be written; `say` is told of the first of each."""

    def __init__(self, say: Callable[[str], object] = lambda line: None):
        self._say, self._lock = say, threading.Lock()  # the heartbeat writes from a thread of its own
        self.counts: dict[str, int] = {}
        """Name to number of writes that failed; a row of metrics is one write."""

    @contextlib.contextmanager
    def attempt(self, name: str) -> Generator[None]:
        """An `OSError` inside is counted for `name`; every other error goes its way."""
        try:
            yield
        except OSError as error:
            with self._lock:
                self.counts[name] = self.counts.get(name, 0) + 1
                is_first = self.counts[name] == 1
            if is_first:
                self._say(f"{name} cannot be written ({error}); the run goes on, and counts what it cannot write")

    def summary(self) -> str | None:
        """All counts in words; None when everything was written."""
        if not self.counts:
            return None
        return "not written: " + ", ".join(f"{name} ({count} times)" for name, count in sorted(self.counts.items()))


class _Output(io.TextIOWrapper):
    """A stream that loses what cannot be written: a full disk under a log, or a reader that is gone."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def standard_output() -> IO[str]:
    """Standard output whose failure ends nothing; what was printed before comes before."""
    plain: Any = sys.stdout
    try:
        number = plain.fileno()
    except (OSError, AttributeError):  # not a file, as under a test
        return plain
    plain.flush()
    raw = io.FileIO(os.dup(number), "w")
    return _Output(raw, encoding=plain.encoding, errors="backslashreplace", write_through=True)


def writable(option: str, name: str) -> pathlib.Path:
    """A file that can be written, its folder made; ValueError where not: said before the work, not after it."""
    path = pathlib.Path(name).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{option} {name} cannot be written ({error}); name a file in a folder of yours") from None
    return path
