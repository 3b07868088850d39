"""Where a process belongs in a job of many: flags, else what a cluster's launcher put into the environment."""

import dataclasses
from collections.abc import Mapping

from train.config import DistributedConfig

# Who tells how many processes there are and which this one is; JAX finds the address of the first one by itself.
_LAUNCHERS = {
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID")),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """How the processes find each other. None: `jax.distributed.initialize` finds out itself."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


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
