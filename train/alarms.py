"""Alarms: a loss that jumps, a loss that is not finite, a step that does not come; and their record on disk.

What always holds: an alarm is one line of `alarms.jsonl` from the moment it is raised, and one excursion of the loss is
one alarm. Whether the loss spikes is a function of the losses alone, which are equal in every process, so that all of
them decide alike.
"""

import collections
import json
import math
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from train.metrics import Appender, read_lines, write_text
from train.unwritten import Unwritten

ALARMS_FILE = "alarms.jsonl"
KINDS = ("loss_spike", "not_finite", "stall", "rollback")
_OF_A_STEP = ("loss_spike", "not_finite")
_WINDOW = 64
_MIN_HISTORY = 16
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_LEAST_DEVIATION = 0.01  # of the median: a loss that hardly moves is no reason for an alarm about nothing


class SpikeAlarm:
    """Tells a loss that lies far above those of the last steps, by the robust z-score (x - median) / (1.48 MAD)."""

    def __init__(self, threshold: float, *, min_history: int = _MIN_HISTORY):
        """Alarm from a z-score of `threshold` on, when at least `min_history` losses are known."""
        self._threshold, self._min_history = threshold, min_history
        self._losses: collections.deque[tuple[int, float]] = collections.deque(maxlen=_WINDOW)
        self._above = False

    def add(self, step: int, loss: float) -> float | None:
        """Take the loss of a step; returns its z-score when a spike begins here. One not finite is left out."""
        if not math.isfinite(loss):
            return None
        score = self.score(loss)
        begins = score >= self._threshold and not self._above
        self._above = score >= self._threshold
        self._losses.append((step, loss))
        return score if begins else None

    def score(self, loss: float) -> float:
        """The robust z-score of a loss against the window; 0 while there is too little history."""
        known = [value for _, value in self._losses]
        if len(known) < self._min_history:
            return 0.0
        median = statistics.median(known)
        deviation = _MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in known)
        return (loss - median) / max(deviation, _LEAST_DEVIATION * abs(median), 1e-12)

    def forget_after(self, step: int) -> None:
        """Drop the losses of later steps: they will come again."""
        kept = [(at, loss) for at, loss in self._losses if at <= step]
        self._losses.clear()
        self._losses.extend(kept)
        self._above = False


class AlarmLog:
    """Writes alarms to `alarms.jsonl`, says them, and counts those of the whole run, also of processes before."""

    def __init__(
        self,
        run_dir: pathlib.Path,
        *,
        say: Callable[[str], object],
        writes: bool = True,
        unwritten: Unwritten | None = None,
    ):
        """Say each alarm with `say`; write it unless another process does (`writes`)."""
        self._path = run_dir / ALARMS_FILE
        self._file, self._say, self._writes = Appender(self._path), say, writes
        self._unwritten = unwritten or Unwritten(say)
        self._lock = threading.Lock()  # the stall alarm comes from the heartbeat's thread
        self.alarms = read_alarms(run_dir)

    def raise_alarm(self, kind: str, step: int, text: str, **details: Any) -> None:
        """Record one alarm; `kind` is one of `KINDS`."""
        assert kind in KINDS, kind
        alarm = {"kind": kind, "step": step, "time": time.time(), "text": text, **details}
        with self._lock:
            self.alarms.append(alarm)
            if not self._writes:
                return
            self._say(f"alarm at step {step}: {text}")
            with self._unwritten.attempt(ALARMS_FILE):
                self._file.append((json.dumps(alarm) + "\n").encode(), line=True)
                self._file.close()  # alarms are rare

    def forget_after(self, step: int) -> None:
        """A resumed run stands after `step`; what it will find in later steps is dropped, as it is written then.

        Kept are alarms that no step will raise again: a stall, a return, and what led to one.
        """
        returns = [place for place, alarm in enumerate(self.alarms) if alarm["kind"] == "rollback"]
        history = returns[-1] if returns else -1
        kept = [
            alarm
            for place, alarm in enumerate(self.alarms)
            if place <= history or alarm["kind"] not in _OF_A_STEP or alarm["step"] <= step
        ]
        if len(kept) == len(self.alarms):
            return
        self.alarms = kept
        if self._writes:
            with self._unwritten.attempt(ALARMS_FILE):
                write_text(self._path, "".join(json.dumps(alarm) + "\n" for alarm in kept))

    def counts(self) -> dict[str, int]:
        """Number of alarms of each kind."""
        return count_kinds(self.alarms)


def count_kinds(alarms: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Number of alarms of each kind, zeros included."""
    counted = collections.Counter(alarm["kind"] for alarm in alarms)
    return {kind: counted[kind] for kind in KINDS}


def read_alarms(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """All alarms of a run that were written completely."""
    return read_lines(run_dir / ALARMS_FILE)
