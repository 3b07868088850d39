"""Many processes, one mesh: joining them at the start, agreeing on decisions, and leaving together.

What always holds: every process makes the same decisions in the same order, because a device program or a collective
that only some processes start hangs the others, or gives them wrong values. So whatever one process alone can know (a
signal, a full disk, a damaged file) is first made known to all: `any_process`, `largest`. What must be equal from the
start (configuration, text, shapes) is compared by `check_same` through the coordination service, which needs no device.
Process 0 alone writes logs, metrics and summaries. In a job of one process all of this does nothing.
"""

import contextlib
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils

from train.cluster import Cluster
from train.config import DistributedConfig
from train.errors import TryAgainError
from train.save_barrier import SaveBarrier
from train.watchdog import LOST, Watchdog


class JoinError(ValueError):
    """This process cannot be one of the job: it was started in another way."""


class Job:
    """This process's place in the job; the module has one, as JAX has."""

    def __init__(self) -> None:
        self.process, self.num_processes = 0, 1
        self.watchdog: Watchdog | None = None
        self.client: Any = None
        self.batch_shapes: str | None = None
        self.num_compared = 0


_job = Job()
_SHOWS_WITHIN_S = 20.0
_JAX_MARGIN_S = 60
_LOOKS_EVERY_S, _LEAST_BYTES = 5.0, 2**20
# The watchdog ends the wait for a process that is lost or gets nowhere, and says which; one that is late may be reading
# its text for hours.
_NO_LIMIT_MS = 2**31 - 1
_LATE = ("DEADLINE_EXCEEDED", "UNAVAILABLE")


@contextlib.contextmanager
def joined(
    cluster: Cluster | None,
    config: DistributedConfig,
    *,
    platform: str,
    exit_code: Callable[[BaseException], int],
) -> Generator[None]:
    """Be one process of the job; an error inside ends the process, after telling the others why.

    Args:
      cluster: from `train.cluster.find_cluster`; with None there is nothing to join, and errors go their way.
      config: the time limits.
      platform: the run's `platform`; CPU devices of several processes talk by gloo.
      exit_code: what the process exits with after an error.
    """
    if cluster is None:
        yield
        return
    watchdog = _join(cluster, config, platform=platform)
    try:
        yield
    except BaseException as error:
        _leave_in_error(watchdog, error, exit_code(error))
    # Process 0 may still write and sample: JAX's own shutdown would end it after the heartbeat's limit.
    at("waiting for the other processes to end", 0)
    _job.client.wait_at_barrier("the end", _NO_LIMIT_MS)
    watchdog.stop()
    jax.distributed.shutdown()


def is_main() -> bool:
    """Whether this process writes what is written once."""
    return _job.process == 0


def num_processes() -> int:
    """Processes of the job."""
    return _job.num_processes


def at(phase: str, step: int) -> None:
    """Tell the watchdog what this process does next, and that it got this far."""
    if _job.watchdog:
        _job.watchdog.at(phase, step)


@contextlib.contextmanager
def reading(what: str, step: int) -> Generator[None]:
    """A call that reads or writes much and does not come back meanwhile: as long as bytes move, it gets somewhere."""
    at(f"reading the {what}", step)
    if not _job.watchdog:
        yield
        return
    done = threading.Event()

    def look() -> None:
        before = _bytes_moved()
        while not done.wait(_LOOKS_EVERY_S):
            if _bytes_moved() - before >= _LEAST_BYTES:
                before = _bytes_moved()
                at(f"reading the {what}", step)

    thread = threading.Thread(target=look, name="reading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_moved() -> int:
    """Bytes that this process has read and written so far; 0 where the system does not tell."""
    try:
        lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def largest(value: int) -> int:
    """The largest value of all processes; all of them have to call it."""
    if _job.num_processes == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def any_process(flag: bool) -> bool:
    """Whether it is true on any process; all of them have to call it."""
    return largest(int(flag)) == 1


def from_main(value: Any) -> Any:
    """Process 0's value, plain JSON, on all processes; all of them have to call it.

    Decides what depends on a file system that they share: each may see a change at another time.
    """
    if _job.num_processes == 1:
        return value
    _job.num_compared += 1
    place = f"ring_jax/main/{_job.num_compared}"
    if is_main():
        _job.client.key_value_set(place, json.dumps(value))
    return json.loads(_job.client.blocking_key_value_get(place, _NO_LIMIT_MS))


def gather(text: str) -> list[str]:
    """The text of every process, in order, through the coordination service; all processes have to call it."""
    if _job.num_processes == 1:
        return [text]
    _job.num_compared += 1
    place = f"ring_jax/gather/{_job.num_compared}"
    _job.client.key_value_set(f"{place}/{_job.process}", text)
    return [
        _job.client.blocking_key_value_get(f"{place}/{process}", _NO_LIMIT_MS) for process in range(_job.num_processes)
    ]


def save_barrier() -> SaveBarrier | None:
    """Where the processes meet while they write a checkpoint; None for a job of one process."""
    return SaveBarrier(_job.client, process=_job.process) if _job.num_processes > 1 else None


def check_same(name: str, values: Mapping[str, Any]) -> None:
    """Wait until all processes have come here, and compare what they bring; no device is used. For a process that does
    not come the watchdog ends the wait.

    Raises:
      JoinError: this process differs from process 0; names the process, the fields and both values.
    """
    if _job.num_processes == 1:
        return
    at(f"comparing the {name} of all processes", 0)
    text = json.dumps(values, sort_keys=True, default=str)
    _job.num_compared += 1
    key = f"ring_jax/same/{_job.num_compared}"
    if is_main():
        _job.client.key_value_set(key, text)
    first = json.loads(_job.client.blocking_key_value_get(key, _NO_LIMIT_MS))
    mine = json.loads(text)
    lines = [
        f"  - {field}: {mine.get(field, '(absent)')} here, {first.get(field, '(absent)')} in process 0"
        for field in sorted(mine.keys() | first.keys())
        if mine.get(field) != first.get(field)
    ]
    if lines:
        raise JoinError(
            f"the {name} of process {_job.process} on {socket.gethostname()} must be that of process 0, but these "
            "differ:\n" + "\n".join(lines) + "\nStart every process from the same files with the same flags."
        )
    _job.client.wait_at_barrier(key, _NO_LIMIT_MS)


def check_shared(folder: pathlib.Path) -> None:
    """All processes see the same folder; what each would write into one of its own could never be put together.

    Raises:
      JoinError: names the processes that do not see a file of process 0.
    """
    if _job.num_processes == 1:
        return
    at("looking for a file of process 0 in the run directory", 0)
    path = folder / f".seen_by_all_{gather(uuid.uuid4().hex)[0]}"
    if is_main():
        path.touch()
    check_same("folders", {})  # it is there when the others have passed
    blind = [process for process, host in enumerate(gather("" if wait_for(path) else socket.gethostname())) if host]
    if is_main():
        path.unlink()
    if blind:
        raise JoinError(
            f"run_dir={str(folder)!r} must be one folder for all processes, but process {', '.join(map(str, blind))} "
            "cannot see what process 0 writes there; name one on a file system that all hosts mount"
        )


def wait_for(path: pathlib.Path) -> bool:
    """Whether a new file of another host shows, which may take a network file system some seconds."""
    deadline = time.monotonic() + (_SHOWS_WITHIN_S if _job.num_processes > 1 else 0.0)
    while not os.path.exists(path):  # False where the store does not answer, too
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def check_batch(batch: Mapping[str, np.ndarray]) -> None:
    """All processes bring batches of the same shapes; called for each batch, compared for the first.

    Raises:
      JoinError: this process's first batch differs from process 0's.
      ValueError: a later one differs from the first.
    """
    if _job.num_processes == 1:
        return
    shapes = {field: str((array.shape, str(array.dtype))) for field, array in sorted(batch.items())}
    if _job.batch_shapes is None:
        check_same("batch shapes", shapes)
        _job.batch_shapes = str(shapes)
    if str(shapes) != _job.batch_shapes:
        raise ValueError(
            f"process {_job.process}: the batch shapes {shapes} must stay those of the first batch, "
            f"{_job.batch_shapes}: other processes cannot know of a change; pad the rows to one length"
        )


def wait_for_the_verdict() -> None:
    """Another process is on its way out, in error: the watchdog says why, and ends this one, too."""
    at("waiting for the end of a process that failed", 0)
    _job.client.wait_at_barrier("a process failed", _NO_LIMIT_MS)


def to_host(tree: Any) -> Any:
    """The whole arrays in the memory of every process, one array at a time; all processes have to call it."""
    if _job.num_processes == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda array: multihost_utils.process_allgather(array, tiled=True), tree)


class Silent:
    """Stands in for a writer, on the processes that write nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **keywords: None


def _join(cluster: Cluster, config: DistributedConfig, *, platform: str) -> Watchdog:
    # JAX's own handler of SIGTERM would come before `train.signals`, which makes the processes agree by `largest`.
    jax.config.update("jax_enable_preemption_service", False)
    if platform == "cpu" or jax.config.jax_platforms == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    alarm = threading.Timer(config.start_timeout, _come_too_late, [_not_joined(cluster, config, "no answer in time")])
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator_address,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            initialization_timeout=config.start_timeout + _JAX_MARGIN_S,
            heartbeat_timeout_seconds=3 * config.heartbeat_timeout,  # the watchdog comes first, and says more
            shutdown_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        kind = TryAgainError if any(word in str(error) for word in _LATE) else JoinError
        raise kind(_not_joined(cluster, config, error)) from error
    finally:
        alarm.cancel()
    state = jax_distributed.global_state  # the key-value store has no public name; orbax uses it like this, too
    _job.process, _job.num_processes, _job.client = state.process_id, state.num_processes, state.client
    _job.watchdog = Watchdog(
        state.client,
        process=state.process_id,
        num_processes=state.num_processes,
        silence=config.heartbeat_timeout,
        stall=config.stall_timeout,
    )
    _job.watchdog.start()
    return _job.watchdog


def _come_too_late(message: str) -> None:
    """JAX aborts the process when another one does not come, with a stack trace; so it may not come to that."""
    with contextlib.suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(LOST)


def _not_joined(cluster: Cluster, config: DistributedConfig, reason: object) -> str:
    return (
        f"this process could not join the job ({cluster}): {reason}. All processes must start within "
        f"--distributed.start-timeout {config.start_timeout} s of each other, with the same coordinator address and "
        "number of processes, and reach that address"
    )


def _leave_in_error(watchdog: Watchdog, error: BaseException, code: int) -> None:
    is_symptom = isinstance(error, jax.errors.JaxRuntimeError)
    if is_symptom and "RESOURCE_EXHAUSTED" in str(error):
        is_symptom = False
    message, code = watchdog.explain(error, code=LOST if is_symptom else code, is_symptom=is_symptom)
    watchdog.leave(message, code)
