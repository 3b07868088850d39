"""The mesh: four named axes, and devices placed so that ring neighbors are neighbors on the machine."""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh

AXES = ("data", "tensor", "pipeline", "sequence")
"""Order of the mesh axes.

==========  ==========================================  =================================
axis        what is cut over it                         traffic
==========  ==========================================  =================================
data        batch rows                                  gradient sums
tensor      heads, MLP width                            activations, twice a layer
pipeline    layers                                      activations, once a stage
sequence    tokens (context parallelism)                keys and values round the ring
==========  ==========================================  =================================
"""


def make_mesh(
    *, data: int = 1, tensor: int = 1, pipeline: int = 1, sequence: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arrange devices in a (data, tensor, pipeline, sequence) mesh.

    The sequence axis is innermost, so that ring neighbors are neighbors: consecutive GPUs of a host, and on TPU what
    `jax.experimental.mesh_utils` lays along the torus.

    Args:
      data, tensor, pipeline, sequence: axis sizes, at least 1.
      devices: the devices to use; None takes all (on a CPU host the first that are needed).

    Returns:
      A `jax.sharding.Mesh` with Auto axes.

    Raises:
      ValueError: a size below 1, or sizes whose product is not the number of devices.

    Example:
      >>> make_mesh(sequence=1, devices=jax.devices()[:1]).axis_names
      ('data', 'tensor', 'pipeline', 'sequence')
    """
    shape = (data, tensor, pipeline, sequence)
    text = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
    if min(shape) < 1:
        raise ValueError(f"mesh axis sizes must be at least 1; got {text}")
    needed = math.prod(shape)
    given = list(jax.devices() if devices is None else devices)
    simulated = devices is None and given[0].platform == "cpu"
    if needed > len(given) or (needed < len(given) and not simulated):
        fix = (
            f'simulate more with jax.config.update("jax_num_cpu_devices", {needed}) before JAX is first used'
            if simulated
            else "change the sizes, or pass the devices to use"
        )
        raise ValueError(f"mesh {text} needs {needed} devices, but there are {len(given)} ({given[0].platform}); {fix}")
    if given[0].platform == "cpu":
        return Mesh(np.array(given[:needed]).reshape(shape), AXES)
    try:
        placed = mesh_utils.create_device_mesh(shape, given)
    except NotImplementedError:  # an axis that is no product of whole sides of the torus: it takes part of one
        placed = mesh_utils.create_device_mesh(shape, given, allow_split_physical_axes=True)
    return Mesh(placed, AXES)


class Target(NamedTuple):
    """The devices that a call is compiled for; they need not be here."""

    platform: str  # "cpu", "gpu" or "tpu"
    device_kind: str


def target(mesh: Mesh | AbstractMesh | None = None) -> Target:
    """The devices of a mesh; without one, those of the mesh around the call, `jax.default_device`, or this process's.

    Where arrays lie that are on no mesh is not known when a call is traced: on the CPU of a host with accelerators say
    so by `jax.default_device`, or name ``implementation="xla"``.
    """
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
    else:
        device = (mesh or jax.sharding.get_abstract_mesh()).abstract_device or jax.config.jax_default_device
        device = jax.devices(device)[0] if isinstance(device, str) else device or jax.devices()[0]
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    return Target(platform if platform in ("gpu", "tpu") else "cpu", device.device_kind)


_WITH_SPARSE_CORES = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")
_OFFLOADED = tuple(f"xla_tpu_enable_sparse_core_collective_offload_{kind}" for kind in ("all_gather", "reduce_scatter"))


def compiler_options(mesh: Mesh | AbstractMesh | None = None) -> dict[str, Any]:
    """What XLA must be told for transfers to hide: ``jax.jit(f, compiler_options=compiler_options(mesh))``.

    GPU: by default XLA keeps one collective under way. A backward ring has three: K with V, dK with dV, and the
    positions or segment ids. TPU v5p, v6e and tpu7x: all-gathers and reduce-scatters run on the SparseCores, beside the
    matmuls; on the TensorCore they would run alone. A ring's hops need nothing there. Options that ``LIBTPU_INIT_ARGS``
    sets are left to it.

    Example:
      >>> compiler_options()  # of a CPU
      {}
    """
    platform, kind = target(mesh)
    if platform == "gpu":
        return {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
        }
    if kind not in _WITH_SPARSE_CORES:
        return {}
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    return dict.fromkeys((name for name in _OFFLOADED if name not in given), True)
