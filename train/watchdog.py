"""A job of many processes ends within a time limit, with a message, when one of them dies, stalls or fails.

What always holds: no process waits for another one for ever. A thread of each process reports a sign of life, with the
step and the phase the process is in, to the coordination service of `jax.distributed`, which runs in process 0. Process
0 judges: a process that stays silent is lost; one that says it failed, failed; and when nobody gets anywhere, the job
stalls. Its verdict ends all of them. A second thread needs nothing but the clock, so that a lost process 0 is noticed
while a call to it hangs. XLA itself would wait for ever: a collective has no idea that its peer is gone.

When process 0 itself dies, JAX's own client may be faster: it aborts (SIGABRT) and says that another task died.

    process 1, 2, ...   sign of life ->   process 0: judge   -> verdict -> everyone: message, exit code
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from typing import Any

LOST = 75
"""Exit code of a job that lost a process: EX_TEMPFAIL of sysexits.h, "try again"; starting anew with --resume helps."""

_SIGNS = "ring_jax/alive"
_VERDICT = "ring_jax/verdict"


@dataclasses.dataclass(kw_only=True)
class Sign:
    """What a process says about itself."""

    host: str
    step: int = 0
    phase: str = "starting"
    moves: int = 0
    """Counts changes of step or phase: a process that gets somewhere is not stalled."""
    failed: str = ""
    """Why the process ends, when it ends early."""
    code: int = 1
    """Exit code of a process that failed."""
    done: bool = False
    """The process came to its regular end."""


class Judge:
    """Process 0's view of all signs of life."""

    def __init__(self, num_processes: int, *, silence: float, stall: float, now: float):
        """Seconds without a sign after which a process is lost, and without any progress after which the job stalls."""
        self._silence, self._stall = silence, stall
        self._seen: dict[int, tuple[str, float]] = {process: ("", now) for process in range(num_processes)}
        self._moved: tuple[tuple[int, ...], float] = ((), now)

    def verdict(self, signs: dict[int, str], now: float) -> tuple[str, int] | None:
        """(message, exit code) when the job has to end.

        Args:
          signs: the newest report of each process, as JSON; a new one differs from the one before.
          now: seconds on a clock that never goes back.
        """
        for process, text in signs.items():
            if self._seen[process][0] != text:
                self._seen[process] = (text, now)
        known = {process: _parse(text) for process, (text, _) in self._seen.items() if text}
        for process, sign in known.items():
            if sign.failed:
                return f"process {process} on {sign.host} ended: {sign.failed}", sign.code
        for process, (_, since) in self._seen.items():
            sign = known.get(process)
            if now - since > self._silence and not (sign and sign.done):
                return (
                    f"process {process}{_where(sign)} gave no sign of life for {now - since:.0f} s: killed, frozen "
                    + ("or cut off"),
                    LOST,
                )
        moves = tuple(sign.moves for sign in known.values())
        if moves != self._moved[0]:
            self._moved = (moves, now)
        if now - self._moved[1] > self._stall and not any(sign.done for sign in known.values()):
            return f"no process got anywhere for {now - self._moved[1]:.0f} s: {_phases(known)}", LOST
        return None


class Watchdog:
    """The two threads of one process."""

    def __init__(self, client: Any, *, process: int, num_processes: int, silence: float, stall: float):
        """Watch with `client`, the one of `jax.distributed`; limits in seconds as for `Judge`."""
        self._client, self._process, self._silence = client, process, silence
        self._sign, self._beats = Sign(host=socket.gethostname()), 0
        self._period = max(0.2, min(silence / 8, 5.0))
        self._judge = None
        if process == 0:
            self._judge = Judge(num_processes, silence=silence, stall=stall, now=time.monotonic())
        self._answered = time.monotonic()
        self._ending, self._verdict_known = threading.Event(), threading.Event()
        self._verdict = ("", 0)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._talk, self._watch)]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def at(self, phase: str, step: int) -> None:
        """Say where this process is; every call counts as progress."""
        self._sign.phase, self._sign.step = phase, step
        self._sign.moves += 1

    def stop(self) -> None:
        """This process came to its regular end: from now on its silence means nothing."""
        self._ending.set()
        self._sign.done = True
        self._report()

    def explain(self, error: BaseException, *, code: int, is_symptom: bool) -> tuple[str, int]:
        """Tell the others about the error that ends this process; (message, exit code) of the job.

        Args:
          error: what was raised.
          code: exit code that stands for it.
          is_symptom: whether a lost peer may be behind it, so that a verdict is worth waiting for.
        """
        self._ending.set()
        if is_symptom and self._verdict_known.wait(1.5 * self._silence + 2 * self._period):
            return self._verdict
        message = f"{type(error).__name__}: {error}" if code == 1 else str(error)
        self._sign.failed, self._sign.code = message.strip()[:1000] or type(error).__name__, code
        self._report()
        if self._process == 0:
            self._verdict_known.wait(2 * self._period)
        return message, code

    def leave(self, message: str, code: int) -> None:
        """Print and end the process without JAX's goodbye, which would wait for the processes that are gone."""
        hint = "; the job ends, start it again with --resume" if code == LOST else ""
        with contextlib.suppress(OSError):  # nobody listens, or the disk of the log is full
            print(f"\nerror: process {self._process} leaves: {message}{hint}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        if self._process == 0:  # the others read the verdict from process 0
            time.sleep(2.5 * self._period)
        os._exit(code)

    def _talk(self) -> None:
        while not self._sign.done:
            self._report()
            verdict = self._read_verdict()
            if verdict and not self._verdict_known.is_set():
                self._verdict = verdict
                self._verdict_known.set()
            time.sleep(self._period)

    def _report(self) -> None:
        self._beats += 1
        text = json.dumps({**dataclasses.asdict(self._sign), "beat": self._beats})
        try:
            self._client.key_value_set(f"{_SIGNS}/{self._process}", text, allow_overwrite=True)
        except Exception:  # process 0 is gone; `_watch` sees to that
            return
        self._answered = time.monotonic()

    def _read_verdict(self) -> tuple[str, int] | None:
        try:
            if self._judge is None:
                message, code = json.loads(self._client.key_value_try_get(_VERDICT))
                return message, code
            signs = {int(key.rsplit("/", 1)[1]): text for key, text in self._client.key_value_dir_get(_SIGNS)}
            verdict = self._judge.verdict(signs, time.monotonic())
            if verdict:
                self._client.key_value_set(_VERDICT, json.dumps(verdict), allow_overwrite=True)
            return verdict
        except Exception:  # there is no verdict yet, or no process 0
            return None

    def _watch(self) -> None:
        """End this process when there is a verdict, or when process 0 answers no more."""
        while not self._sign.done:
            if self._verdict_known.wait(self._period):
                break
            silent = time.monotonic() - self._answered
            if silent > self._silence:
                sign = self._sign
                self._verdict = (
                    f"process 0, which coordinates the job, gave no answer for {silent:.0f} s: killed, frozen or cut "
                    f"off (this process was in step {sign.step}, {sign.phase})",
                    LOST,
                )
                self._verdict_known.set()
                break
        if self._sign.done or self._ending.is_set():
            return  # the main thread is on its way out and says the same
        self.leave(*self._verdict)


def _parse(text: str) -> Sign:
    values = json.loads(text)
    return Sign(**{field.name: values[field.name] for field in dataclasses.fields(Sign)})


def _where(sign: Sign | None) -> str:
    return f" on {sign.host} (last seen in step {sign.step}, {sign.phase})" if sign else ""


def _phases(signs: dict[int, Sign]) -> str:
    """Who is where: the one that is not where all others are is the one to look at."""
    groups: dict[str, list[int]] = {}
    for process, sign in sorted(signs.items()):
        groups.setdefault(f"step {sign.step}, {sign.phase}", []).append(process)
    fewest_first = sorted(groups.items(), key=lambda group: len(group[1]))
    return "; ".join(
        f"process{'es' if len(members) > 1 else ''} {', '.join(map(str, members[:8]))}"
        f"{f' and {len(members) - 8} more' if len(members) > 8 else ''} in {place}"
        for place, members in fewest_first
    )
