"""Where the processes of a job wait for each other while a checkpoint is written.

What always holds: a process that could not write its part keeps no other waiting, and a save fails on all processes or
on none. orbax lets the others wait until the time limit of a write; then its barriers are out of step. Here all
processes meet at the n-th barrier of a save whatever it is called, and say what they call it. The one that failed is on
its way out of the save and calls it something else; all of them read that, and the save is over for all.

    process 0    write ok    3rd barrier, "write complete"  ->  two names: PeerFailed
    process 1    disk full   3rd barrier, "not saving"      ->  two names: PeerFailed, after its own OSError
"""

import hashlib
import threading
from typing import Any

_FOLDER = "ring_jax/save"
_MARGIN_MS = 30_000  # a process whose write takes too long says so at the time limit; the others hear it


class PeerFailed(RuntimeError):
    """Another process could not write its part of a checkpoint."""


class SaveBarrier:
    """The `barrier_sync_fn` of `orbax.checkpoint.AsyncOptions`; every process calls `begin` before each save."""

    def __init__(self, client: Any, *, process: int):
        """Meet by `client`, the one of `jax.distributed`."""
        self._client, self._process = client, process
        self._save, self._place, self._is_over = 0, 0, False
        self._lock = threading.Lock()  # of two threads of a save that failed, the second learns from the first

    def begin(self) -> None:
        """A save begins; nothing is left of the one before."""
        self._save, self._place, self._is_over = self._save + 1, 0, False
        if self._process == 0:
            self._client.key_value_delete(f"{_FOLDER}/{self._save - 2}")

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for all processes.

        Raises:
          PeerFailed: they do not wait for the same.
          JaxRuntimeError: one of them did not come in time.
        """
        with self._lock:
            if self._is_over:
                raise PeerFailed("this save has failed already")
            self._is_over = True
            self._place += 1
            place = f"{_FOLDER}/{self._save}/{self._place}"
            name = hashlib.sha256(key.encode()).hexdigest()[:16]
            self._client.key_value_set(f"{place}/{name}", key, allow_overwrite=True)
            self._client.wait_at_barrier(place, timeout_ms + _MARGIN_MS)
            if len(self._client.key_value_dir_get(place)) > 1:
                raise PeerFailed("another process could not write its part")
            self._is_over = False


def cause(error: BaseException) -> BaseException:
    """What failed in this process, where there is such a thing, in the place of "another one failed"."""
    found: BaseException | None = error
    while isinstance(found, PeerFailed):
        found = found.__context__
    return found or error


def most_telling(reasons: list[str]) -> str:
    """The reason of the first process that has one of its own."""
    given = [(process, reason) for process, reason in enumerate(reasons) if reason]
    own = [(process, reason) for process, reason in given if not reason.startswith(PeerFailed.__name__)]
    process, reason = (own or given)[0]
    return f"process {process}: {reason}" if len(reasons) > 1 else reason
