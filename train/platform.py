"""Which devices a run gets, settled before JAX touches any of them.

What always holds: on CPU there are as many devices as the mesh needs, because the host's cores play them; on an
accelerator there are as many as the machine has. The number of CPU devices and the time limits of CPU collectives
can only be set before JAX first asks for a device, so `prepare` runs before everything that does.
"""

import dataclasses
import os

import jax

# With more devices than cores a device can reach a collective minutes after its peers; by default XLA ends the run.
_COLLECTIVE_TIMEOUTS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    "xla_cpu_collective_timeout_seconds": 3600,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What `prepare` found."""

    count: int
    """Devices that the mesh has to use: the first ones of a CPU host, all of an accelerator's."""
    kind: str
    """Their name, for messages."""
    simulated: bool
    """Whether one CPU host plays several devices."""


def prepare(num_devices: int, platform: str, *, num_processes: int = 1) -> Devices:
    """Choose the platform and, on CPU, make at least `num_devices` devices.

    Args:
      num_devices: devices that the mesh needs.
      platform: "auto" takes the accelerator where there is one; "cpu" never does.
      num_processes: processes that share the mesh; on CPU each plays an equal part of the devices.

    Returns:
      The devices that there are. Nothing is started when the platform is known to be the CPU.
    """
    needed = max(1, num_devices)
    local = -(-needed // num_processes)
    lengthen_collective_timeouts()
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:  # concerns CPU devices only, so it is safe to ask before it is known whether there is an accelerator
        jax.config.update(
            "jax_num_cpu_devices", local if num_processes > 1 else max(needed, jax.config.jax_num_cpu_devices)
        )
        too_late = False
    except RuntimeError:  # this process has used its devices already: it has to do with those
        too_late = True
    if jax.config.jax_platforms == "cpu" and not too_late:
        return Devices(count=local * num_processes, kind="cpu", simulated=needed > 1)
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return Devices(count=min(needed, len(devices)), kind="cpu", simulated=needed > 1)
    return Devices(count=len(devices), kind=devices[0].device_kind, simulated=False)


def check_remat(remat: str) -> None:
    """Refuse ``remat="offload"`` on devices that have no way to the host's memory; what `prepare` chose is started.

    Raises:
      ValueError: they have none; the compiler would say so after minutes.
    """
    if remat != "offload":
        return
    device = jax.local_devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if "pinned_host" not in kinds:
        raise ValueError(
            f"model.remat='offload' keeps attention in pinned_host memory, and {device.device_kind} has only "
            f"{', '.join(kinds)}; use --model.remat attention, which keeps it on the device, or layer"
        )


def lengthen_collective_timeouts() -> None:
    """Give late CPU devices time to arrive at a collective; limits that XLA_FLAGS already names stay as they are."""
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={seconds}" for name, seconds in _COLLECTIVE_TIMEOUTS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *missing])
