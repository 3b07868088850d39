"""Machines that are not here: their devices by name, to compile for.

What always holds: such a device takes programs and runs none, and its compiler is the one that the machine itself
would use. A program can so be checked for memory, collectives and schedule before anybody pays for the machine.

    v5p:4x4x8     a TPU slice, by chips along each side of the torus; v4, v5p, tpu7x have three sides, v5e, v6e two
    h200x8x16     16 hosts of 8 GPUs that NVLink joins, and a network between the hosts; h100x8 is one host
    cpu:8         8 simulated devices of this host's CPU, which do run
"""

import collections
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from ring_jax.hardware import parse_topology


class MissingCompilerError(RuntimeError):
    """The compiler for a kind of device is not installed here; the message has the command that installs it."""


class Pod(NamedTuple):
    """A machine by name.

    Attributes:
      platform: "tpu", "gpu" or "cpu".
      kind: its devices' ``device_kind``, the start of which `planner.HARDWARE` knows; "cpu" for simulated ones.
      shape: TPU: chips along each side. GPU: (hosts, GPUs of a host). CPU: (devices,).
      num_devices: JAX's devices, of which a chip of tpu7x is two.
      network_bytes: bytes a second that a device sends to another host; None where hosts are on one interconnect.
    """

    name: str
    platform: str
    kind: str
    shape: tuple[int, ...]
    num_devices: int
    network_bytes: float | None = None


class _Gpu(NamedTuple):
    """What XLA is told of a GPU; public figures of the vendor's data sheet."""

    hbm_bytes: int
    hbm_bytes_a_second: float


_GPUS = {"h100": _Gpu(80 * 2**30, 3.35e12), "h200": _Gpu(140 * 2**30, 4.8e12)}
"""GPUs that can be compiled for. The planner knows more (`hardware.HARDWARE`)."""

# What libtpu would otherwise ask the machine that it takes itself to be on.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# A Hopper GPU as XLA is told of it: sizes by NVIDIA's architecture paper and CUDA's tables of compute capability 9.0.
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: {bandwidth:.0f}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{kind}"
"""


def find(name: str) -> Pod:
    """The machine of that name.

    Raises:
      ValueError: no such kind, or not as many sizes as that kind has.

    Example:
      >>> find("v5p:4x4x8").num_devices, find("h200x8x16").shape
      (128, (16, 8))
    """
    simulated = re.fullmatch(r"cpu:([1-9]\d*)", name)
    if simulated:
        return Pod(name, "cpu", "cpu", (int(simulated[1]),), int(simulated[1]))
    try:
        topology = parse_topology(name)
    except ValueError as error:
        raise ValueError(f"{error}; simulated devices as cpu:8") from None
    hardware, count = topology.hardware, topology.num_devices
    if topology.platform == "tpu":
        return Pod(topology.name, "tpu", topology.device_kind, topology.shape, count)
    if hardware.name not in _GPUS:
        raise ValueError(
            f"topology {name!r} cannot be compiled for: of GPUs, only {' and '.join(_GPUS)} are described to the "
            f"compiler; rehearse one of them, or plan for {hardware.name} by closed forms (python -m train plan)"
        )
    return Pod(topology.name, "gpu", topology.device_kind, topology.shape, count, hardware.network_bytes)


def devices(pod: Pod) -> list[jax.Device]:
    """Its devices, for a mesh. Set ``jax_platforms`` to "cpu" before, or JAX looks for the hardware first.

    Raises:
      MissingCompilerError: libtpu, or JAX's CUDA plugin, is not installed.
      ValueError: there is no machine of that size.
    """
    if pod.platform == "cpu":
        return _simulated(pod)
    try:
        if pod.platform == "tpu":
            for name, value in _LIBTPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            # Of v4 a chip of two cores is one device only when libtpu is told so.
            options = {"chip_config_name": "megacore"} if pod.name.startswith("v4:") else {}
            found = topologies.get_topology_desc(pod.name, "tpu", **options).devices
        else:
            hosts, each = pod.shape
            found = topologies.get_topology_desc(
                pod.kind, "cuda", topology=f"{hosts}x1x{each}", target_config=target_config(pod)
            ).devices
    except (RuntimeError, NotImplementedError) as error:
        if "not installed" in str(error) or "not implemented" in str(error):
            raise MissingCompilerError(_missing(pod)) from None
        raise ValueError(f"topology {pod.name!r} does not exist: {error}") from None
    assert len(found) == pod.num_devices, (pod, len(found))
    return list(found)


def _missing(pod: Pod) -> str:
    extra, what = {"tpu": ("tpu", "libtpu"), "gpu": ("gpu", "JAX's CUDA plugin")}[pod.platform]
    return (
        f"topology {pod.name!r} needs {what}, which is not installed in this environment; make setup-{extra} installs "
        f"it into .venv-{extra}: then start the same command with .venv-{extra}/bin/python"
    )


def _simulated(pod: Pod) -> list[jax.Device]:
    try:
        jax.config.update("jax_num_cpu_devices", max(pod.num_devices, jax.config.jax_num_cpu_devices))
    except RuntimeError:  # this process has used its devices already
        pass
    found = jax.devices("cpu")
    if len(found) < pod.num_devices:
        raise ValueError(
            f"topology {pod.name!r} needs {pod.num_devices} simulated devices, and this process has made "
            f"{len(found)} already; ask before JAX is first used"
        )
    return found[: pod.num_devices]


def target_config(pod: Pod) -> str:
    """What XLA must know of a GPU to compile for it, as a text proto."""
    gpu = _GPUS[pod.name.split("x")[0]]
    return _HOPPER.format(kind=pod.kind, memory=gpu.hbm_bytes, bandwidth=gpu.hbm_bytes_a_second)


def crosses_hosts(mesh: Mesh, axis: str) -> bool:
    """Whether neighbors along a mesh axis are on different hosts."""
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    place = mesh.axis_names.index(axis)
    return bool((hosts != np.roll(hosts, 1, place)).any())


def link_load(pod: Pod, mesh: Mesh, axis: str) -> int:
    """Messages that share the busiest link, one way, when every device sends to the next along a mesh axis; at least 1.

    Each goes along the sides of the torus in turn, the shorter way. A side of a TPU slice is a ring where it is a
    multiple of 4 chips (v5e, v6e: 16), else a line. With 1 a hop has the speed of a link, however far it goes. GPUs
    have a switch.
    """
    if pod.platform != "tpu":
        return 1
    ring = 4 if len(pod.shape) == 3 else 16
    load = collections.Counter()
    for one, other in zip(mesh.devices.flat, np.roll(mesh.devices, -1, mesh.axis_names.index(axis)).flat, strict=True):
        load.update(_links(one.coords, other.coords, pod.shape, ring))
    return max(load.values(), default=1)


def _links(start: Sequence[int], stop: Sequence[int], shape: tuple[int, ...], ring: int) -> Iterator[tuple]:
    """Links that a message takes, each as (from, to)."""
    place = list(start)
    for side, size in enumerate(shape):
        apart = stop[side] - place[side]
        if size % ring == 0 and 2 * abs(apart) > size:
            apart -= size if apart > 0 else -size
        for _ in range(abs(apart)):
            before = tuple(place)
            place[side] = (place[side] + (1 if apart > 0 else -1)) % size
            yield before, tuple(place)
