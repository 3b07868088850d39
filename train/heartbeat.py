"""`heartbeat.json`: whether a run is alive, where it is, and since when; and the alarm when no step comes.

What always holds: the file is whole whenever it is read (written beside it and renamed), and it is renewed every second
by a thread of its own, also while the main thread compiles or saves. So an old `time` means that the process is gone,
and an old `since` that it hangs where `phase` says. Nothing that goes wrong while it is written can harm the run.
"""

import collections
import pathlib
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from train.metrics import write_json
from train.unwritten import Unwritten

HEARTBEAT_FILE = "heartbeat.json"
STEP_PHASE = "step"
_OTHER_PHASES = ("evaluate", "checkpoint", "rollback")
_OTHER_FACTOR = 10
_NUM_STEPS_FOR_MEDIAN = 64
_MIN_STEPS_FOR_MEDIAN = 3


class Heartbeat:
    """Writes the file once a second, and calls `on_stall` when a step takes too long."""

    def __init__(
        self,
        path: pathlib.Path | None,
        *,
        step: int,
        stall_factor: float,
        on_stall: Callable[[int, str], None],
        stall_min_s: float = 60.0,
        period_s: float = 1.0,
        unwritten: Unwritten | None = None,
    ):
        """Start with the thread's first beat.

        Args:
          path: the file; None writes none (a process that writes no logs) and only looks for stalls.
          step: steps done so far.
          stall_factor: a step may take this many times the median of the last ones...
          on_stall: called with (step, message) from the heartbeat's thread, once for each stall.
          stall_min_s: ... but at least so many seconds; a checkpoint, a return or a held-out batch ten times as long.
          period_s: time between two beats.
          unwritten: counts the beats that could not be written.
        """
        self._path, self._unwritten = path, unwritten or Unwritten()
        self._step, self._phase, self._since = step, "start", time.time()
        self._stall_factor, self._stall_min_s, self._on_stall = stall_factor, stall_min_s, on_stall
        self._step_times: collections.deque[float] = collections.deque(maxlen=_NUM_STEPS_FOR_MEDIAN)
        self._begun, self._stalled = time.monotonic(), False
        self._lock = threading.Lock()
        self._period_s, self._stop = period_s, threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def beat(self, phase: str, *, step: int | None = None) -> None:
        """Say that the run enters a phase; `step` when it is one step further. Costs no input or output."""
        with self._lock:
            self._phase, self._since = phase, time.time()
            self._step = self._step if step is None else step
            self._begun, self._stalled = time.monotonic(), False

    def pulse(self) -> None:
        """Say that the phase gets somewhere."""
        with self._lock:
            self._begun, self._stalled = time.monotonic(), False

    def stepped(self, step: int, seconds: float, *, compiled: bool) -> None:
        """Say that a step is done; one that was compiled tells nothing of how long the next may take."""
        if not compiled:
            self._step_times.append(seconds)
        self.beat(STEP_PHASE, step=step)

    @property
    def phase(self) -> str:
        """The phase that the run is in."""
        return self._phase

    def __enter__(self) -> "Heartbeat":
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.beat(f"failed: {kind.__name__}" if kind else "ended")
        self._write()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self._write()
            self._check_stall()

    def _write(self) -> None:
        if self._path is None:
            return
        with self._lock:
            values = {"step": self._step, "time": time.time(), "phase": self._phase, "since": self._since}
        with self._unwritten.attempt(HEARTBEAT_FILE):
            write_json(self._path, values, lasting=False)

    def _check_stall(self) -> None:
        with self._lock:
            waited, times, phase = time.monotonic() - self._begun, list(self._step_times), self._phase
            if phase not in (STEP_PHASE, *_OTHER_PHASES) or self._stalled or len(times) < _MIN_STEPS_FOR_MEDIAN:
                return
            median = statistics.median(times)
            factor = 1 if phase == STEP_PHASE else _OTHER_FACTOR
            if waited <= factor * max(self._stall_min_s, self._stall_factor * median):
                return
            self._stalled, step = True, self._step
        what = "no step" if phase == STEP_PHASE else f"no end of the phase {phase!r}"
        self._on_stall(
            step, f"{what} for {waited:.0f} s (median of the steps {median:.2f} s), the program is in {self._place()}"
        )

    def _place(self) -> str:
        """Where the main thread is, innermost line of this program first."""
        frame = sys._current_frames().get(self._main)
        stack = traceback.extract_stack(frame) if frame else []
        ours = [place for place in stack if "site-packages" not in place.filename] or stack
        return f"{ours[-1].name} ({ours[-1].filename}, line {ours[-1].lineno})" if ours else "a thread that has ended"
