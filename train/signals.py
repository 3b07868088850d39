"""Ctrl-C and SIGTERM end a run at the next step, with a checkpoint; a second one ends it at once.

Python runs a signal handler only between two bytecodes of the main thread, and a compilation can keep that thread away
for minutes. So a second thread, woken by the interpreter's own C handler, answers the user right away.

In a job of many processes all must leave after the same step, and only some of them may get the signal. So there
`requested` changes in `settle` alone, which all processes call after each step and within an evaluation. A process that
cannot go on after this step (`fail`) makes all leave in the same way.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"
_FAILED = 1000  # more than any signal: `share` takes the largest


class StopRequest:
    """Context in which the first SIGINT or SIGTERM only sets `signum`; use it in the main thread."""

    def __init__(self, share: Callable[[int], int] | None = None) -> None:
        """`share` makes the signal of one process (0: none) that of all, see `distributed.largest`; None: no others."""
        self.signum: int | None = None
        self._share = share
        self._settled: int | None = None

    def __enter__(self) -> "StopRequest":
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
        signal.set_wakeup_fd(self._previous_fd)
        self._sender.close()  # ends the watcher
        self._watcher.join()
        self._receiver.close()

    @property
    def requested(self) -> bool:
        """Whether the run should leave at the next step."""
        return self._decided is not None

    def fail(self) -> None:
        """Let all processes leave after this step, which can still be saved, as for a signal."""
        self.signum = _FAILED

    @property
    def failed(self) -> bool:
        """Whether the run leaves because a process cannot go on."""
        return self._decided == _FAILED

    def settle(self) -> None:
        """Between two steps or batches: from here on `requested` is the same on all processes; once set, it stays."""
        if self._share and self._settled is None:
            self._settled = self._share(self.signum or 0) or None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self._decided or 0)

    @property
    def _decided(self) -> int | None:
        return self._settled if self._share else self.signum

    def _remember(self, signum: int, _frame: object) -> None:
        self.signum = self.signum or signum

    def _watch(self) -> None:
        seen = 0
        while received := self._receiver.recv(1):
            if received[0] not in _SIGNALS:
                continue
            seen += 1
            if seen > 1:
                print(f"{_SHOW_CURSOR if sys.stderr.isatty() else ''}stopped at once", file=sys.stderr, flush=True)
                os._exit(128 + received[0])
            name = signal.Signals(received[0]).name
            print(f"\n{name}: leaving after this step; once more stops at once", file=sys.stderr, flush=True)
