"""Batches made ahead by a thread, while the devices work.

What always holds: the batches are those of the iterator, in its order, and `get_state` is its position after the last
batch that was handed out, not the last that was made. What goes wrong in the thread is raised by the next `next`,
never lost; and leaving the `with` block ends the thread, whatever it waits for. A thread has its own iterator: one
that hangs in a slow read can be left behind, and what it still does changes nothing.
"""

import copy
import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from train.rows import Batch, BatchIterator

_POLL_S = 0.1
_JOIN_S = 10.0


class Prefetch(Iterator[Batch]):
    """The next batches of an iterator, kept ready.

    `wait_s` is the time that the last `next` waited, which is time the devices may have been idle.
    """

    def __init__(self, batches: BatchIterator, *, num_batches: int):
        """Start making batches.

        Args:
            batches: The iterator, at its position; nothing else may move it from now on.
            num_batches: Batches that are made ahead; 0: none, and no thread.
        """
        self.rows = batches.rows
        self.wait_s = 0.0
        self._batches, self._num_batches = batches, num_batches
        self._start()

    def _start(self) -> None:
        self._ended: BaseException | None = None
        self._state = self._batches.get_state()
        self._stop = threading.Event()
        self._ready: queue.Queue[tuple[Batch | None, Any]] = queue.Queue(max(1, self._num_batches))
        arguments = (self._batches, self._stop, self._ready)  # it keeps those that it was started with
        self._thread = (
            threading.Thread(target=self._work, args=arguments, name="prefetch", daemon=True)
            if self._num_batches
            else None
        )
        if self._thread:
            self._thread.start()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> Batch:
        if self._ended is not None:
            raise self._ended
        started = time.perf_counter()
        if self._thread is None:
            batch: Batch | None = next(self._batches)
            state: Any = self._batches.get_state()
        else:
            batch, state = self._take()
        self.wait_s = time.perf_counter() - started
        if batch is None:
            self._ended = state
            raise self._ended
        self._state = state
        return batch

    def get_state(self) -> dict[str, int]:
        """The position after the last batch that `next` gave."""
        return self._state

    def set_state(self, state: dict[str, int]) -> None:
        """Go on from another position; what was made ahead is dropped."""
        self.close()
        self._batches = copy.copy(self._batches)
        self._batches.set_state(state)
        self._start()

    def close(self) -> None:
        """End the thread; what it made ahead is dropped. A thread that a dead disk holds is left behind."""
        self._stop.set()
        if self._thread:
            self._thread.join(_JOIN_S)

    def _take(self) -> tuple[Batch | None, Any]:
        while True:
            try:
                return self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                if self._stop.is_set():
                    raise RuntimeError("this Prefetch was closed") from None

    def _work(
        self, batches: BatchIterator, stop: threading.Event, ready: queue.Queue[tuple[Batch | None, Any]]
    ) -> None:
        while not stop.is_set():
            try:
                item = (next(batches), batches.get_state())
            except BaseException as error:  # the consumer raises it
                item = (None, error)
            while not stop.is_set():
                try:
                    ready.put(item, timeout=_POLL_S)
                    break
                except queue.Full:
                    pass
            if item[0] is None:
                return
