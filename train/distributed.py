"""Many processes, one mesh: joining them at the start, agreeing on decisions, and leaving together.

What always holds: every process makes the same decisions in the same order, because a device program or a collective
that only some processes start hangs the others, or gives them wrong values. So whatever one process alone can know (a
signal, a full disk, a damaged file) is first made known to all: `any_process`, `largest`. What must be equal from the
start (configuration, text, shapes) is compared by `check_same` through the coordination service, which needs no device.
Process 0 alone writes logs, metrics and summaries. In a job of one process all of this does nothing.
"""

import contextlib
import dataclasses
import json
import pathlib
import socket
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils

from train.config import DistributedConfig
from train.save_barrier import SaveBarrier
from train.watchdog import LOST, Watchdog


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """How the processes find each other. None: `jax.distributed.initialize` finds out itself."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


class JoinError(ValueError):
    """This process could not become one of the job."""


class Job:
    """This process's place in the job; the module has one, as JAX has."""

    def __init__(self) -> None:
        self.process, self.num_processes = 0, 1
        self.watchdog: Watchdog | None = None
        self.client: Any = None
        self.start_timeout = 300
        self.batch_shapes: str | None = None
        self.num_compared = 0


_job = Job()
_SHOWS_WITHIN_S = 20.0

# Who tells how many processes there are and which this one is; JAX finds the address of the first one by itself.
_LAUNCHERS = {
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID")),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ()),
}


def find_cluster(config: DistributedConfig, environment: Mapping[str, str]) -> Cluster | None:
    """Where this process belongs, from the flags or else from the environment; None when it is alone.

    Environment: JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID (or the JOB_COMPLETION_INDEX of an
    indexed Kubernetes Job, which a JobSet consists of), SLURM, Open MPI, and Cloud TPU slices of several hosts.

    Raises:
      ValueError: flags or variables that contradict each other, or are not complete.
    """
    given = (config.coordinator_address, config.num_processes, config.process_id)
    if config.cluster == "none":
        return None
    if config.cluster == "jax":
        return Cluster()
    if any(value is not None for value in given):
        return _complete("--coordinator-address, --num-processes and --process-id", *given)
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    for count, process, others in _LAUNCHERS.values():
        if all(name in environment for name in (count, process, *others)):
            size = _number(environment, count)
            rank = _number(environment, process)
            return Cluster(coordinator_address=address, num_processes=size, process_id=rank) if size > 1 else None
    if "JAX_NUM_PROCESSES" in environment:
        process = "JAX_PROCESS_ID" if "JAX_PROCESS_ID" in environment else "JOB_COMPLETION_INDEX"
        rank = _number(environment, process) if process in environment else None
        names = "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (or JOB_COMPLETION_INDEX)"
        found = _complete(names, address, _number(environment, "JAX_NUM_PROCESSES"), rank)
        return found if found.num_processes != 1 else None
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return Cluster()
    return None


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
      cluster: from `find_cluster`; with None there is nothing to join, and errors go their way.
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
    _job.client.wait_at_barrier("the end", 1000 * config.stall_timeout)
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


def largest(value: int) -> int:
    """The largest value of all processes; all of them have to call it."""
    if _job.num_processes == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def any_process(flag: bool) -> bool:
    """Whether it is true on any process; all of them have to call it."""
    return largest(int(flag)) == 1


def gather(text: str) -> list[str]:
    """The text of every process, in order, through the coordination service; all processes have to call it."""
    if _job.num_processes == 1:
        return [text]
    _job.num_compared += 1
    place, limit = f"ring_jax/gather/{_job.num_compared}", _job.start_timeout * 1000
    _job.client.key_value_set(f"{place}/{_job.process}", text)
    return [_job.client.blocking_key_value_get(f"{place}/{process}", limit) for process in range(_job.num_processes)]


def save_barrier() -> SaveBarrier | None:
    """Where the processes meet while they write a checkpoint; None for a job of one process."""
    return SaveBarrier(_job.client, process=_job.process) if _job.num_processes > 1 else None


def check_same(name: str, values: Mapping[str, Any]) -> None:
    """Wait until all processes have come here, and compare what they bring; no device is used.

    Raises:
      JoinError: this process differs from process 0; names the process, the fields and both values.
    """
    if _job.num_processes == 1:
        return
    at(f"comparing the {name} of all processes", 0)
    text = json.dumps(values, sort_keys=True, default=str)
    _job.num_compared += 1
    key, limit = f"ring_jax/same/{_job.num_compared}", _job.start_timeout * 1000
    if is_main():
        _job.client.key_value_set(key, text)
    first = json.loads(_job.client.blocking_key_value_get(key, limit))
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
    _job.client.wait_at_barrier(key, limit)


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
    blind = [process for process, host in enumerate(gather("" if _is_there(path) else socket.gethostname())) if host]
    if is_main():
        path.unlink()
    if blind:
        raise JoinError(
            f"run_dir={str(folder)!r} must be one folder for all processes, but process {', '.join(map(str, blind))} "
            "cannot see what process 0 writes there; name one on a file system that all hosts mount"
        )


def _is_there(path: pathlib.Path) -> bool:
    """Whether a new file of another host shows, which may take a network file system some seconds."""
    deadline = time.monotonic() + _SHOWS_WITHIN_S
    while not path.exists():
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
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator_address,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            initialization_timeout=config.start_timeout,
            heartbeat_timeout_seconds=3 * config.heartbeat_timeout,  # the watchdog comes first, and says more
            shutdown_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise JoinError(
            f"this process could not join the job ({cluster}): {error}. All processes must start within "
            f"--distributed.start-timeout {config.start_timeout} s of each other, with the same coordinator address "
            "and number of processes, and reach that address"
        ) from error
    state = jax_distributed.global_state  # the key-value store has no public name; orbax uses it like this, too
    _job.process, _job.num_processes, _job.client = state.process_id, state.num_processes, state.client
    _job.start_timeout = config.start_timeout
    _job.watchdog = Watchdog(
        state.client,
        process=state.process_id,
        num_processes=state.num_processes,
        silence=config.heartbeat_timeout,
        stall=config.stall_timeout,
    )
    _job.watchdog.start()
    return _job.watchdog


def _leave_in_error(watchdog: Watchdog, error: BaseException, code: int) -> None:
    is_symptom = isinstance(error, jax.errors.JaxRuntimeError)
    if is_symptom and "RESOURCE_EXHAUSTED" in str(error):
        is_symptom = False
    message, code = watchdog.explain(error, code=LOST if is_symptom else code, is_symptom=is_symptom)
    watchdog.leave(message, code)


def _complete(names: str, address: str | None, count: int | None, process: int | None) -> Cluster:
    if address is None or count is None or process is None:
        raise ValueError(
            f"{names} must be given together; got coordinator address {address}, number of processes {count}, "
            f"process id {process}"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator address {address!r} must be HOST:PORT of process 0; for example node0:55527")
    if not 0 <= process < count:
        raise ValueError(
            f"process id {process} must be at least 0 and below the number of processes {count}; number them 0 to "
            f"{max(count - 1, 0)}"
        )
    return Cluster(coordinator_address=address, num_processes=count, process_id=process)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdigit():
        raise ValueError(f"the environment variable {name}={text!r} must be a whole number; unset or correct it")
    return int(text)
