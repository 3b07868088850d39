"""What accelerators can do, and how their links join them: one table, with the source of every figure.

What always holds: every figure is for one JAX device (a TPU7x chip is two), bytes are bytes, rates are a second, and a
link's rate is one way. No device is touched: names are parsed, not looked up.
"""

import difflib
import math
import re
from typing import Literal, NamedTuple


class Hardware(NamedTuple):
    """One JAX device and its links."""

    name: str
    """As topologies are named: v5p, h100."""
    flops: float
    """FLOP/s, bfloat16 without sparsity."""
    hbm_bytes: float
    """Memory."""
    hbm_bandwidth: float
    """Bytes/s to and from the memory."""
    link_bytes: float
    """Bytes/s one way: one torus link of a TPU, all of NVLink of a GPU."""
    torus_dims: int
    """Dimensions of a TPU's torus; 0 for a GPU behind switches."""
    wraps_at: int
    """TPU: an axis of the torus closes to a ring when its length is a multiple of this."""
    per_chip: int
    """JAX devices on a chip."""
    domain: int
    """GPU: how many NVLink joins. TPU: chips of a host (the torus joins all hosts of a slice)."""
    network_bytes: float
    """Bytes/s one way of a device's share of the network between hosts (GPU) or slices (TPU)."""
    latency: float
    """Seconds before the first byte of a hop."""
    achieved: float = 1.0
    """Share of `link_bytes` that was measured on long messages; 1 where nobody has published one."""

    @property
    def platform(self) -> Literal["tpu", "gpu"]:
        """The platform of JAX."""
        return "tpu" if self.torus_dims else "gpu"

    @property
    def hop_bytes(self) -> float:
        """Best bytes/s of a hop: half of it each way round a closed TPU ring; NVLink one way."""
        return self.link_bytes * (2 if self.torus_dims else 1)


HARDWARE = {
    #                          name  FLOP/s   memory   HBM B/s   link   dims wrap chip domain network latency achieved
    "TPU v4": Hardware("v4", 2.75e14, 34.4e9, 1.23e12, 4.5e10, 3, 4, 1, 4, 6.25e9, 1e-6),
    "TPU v5 lite": Hardware("v5e", 1.97e14, 17.2e9, 8.2e11, 4.5e10, 2, 16, 1, 4, 3.1e9, 1e-6),
    "TPU v5": Hardware("v5p", 4.59e14, 103e9, 2.46e12, 9e10, 3, 4, 1, 4, 6.25e9, 1e-6),
    "TPU v6 lite": Hardware("v6e", 9.2e14, 34.4e9, 1.64e12, 9e10, 2, 16, 1, 4, 12.5e9, 1e-6),
    "TPU7x": Hardware("tpu7x", 2.307e15 / 2, 103e9, 3.7e12, 4.5e10, 3, 4, 2, 4, 6.25e9, 1e-6),
    "NVIDIA A100": Hardware("a100", 3.12e14, 80e9, 2.0e12, 300e9, 0, 0, 1, 8, 25e9, 45e-6),
    "NVIDIA H100": Hardware("h100", 9.89e14, 80e9, 3.4e12, 450e9, 0, 0, 1, 8, 50e9, 45e-6, 370 / 450),
    "NVIDIA H200": Hardware("h200", 9.89e14, 141e9, 4.8e12, 450e9, 0, 0, 1, 8, 50e9, 45e-6, 370 / 450),
    "NVIDIA B200": Hardware("b200", 2.25e15, 192e9, 8.0e12, 900e9, 0, 0, 1, 8, 50e9, 45e-6),
    "NVIDIA GB200": Hardware("gb200", 2.25e15, 192e9, 8.0e12, 900e9, 0, 0, 1, 72, 50e9, 45e-6),
}
"""By the start of ``device_kind``; the sources are in `SOURCES`."""
for _alias, _kind in (("TPU v5p", "TPU v5"), ("TPU v5e", "TPU v5 lite"), ("TPU v6e", "TPU v6 lite")):
    HARDWARE[_alias] = HARDWARE[_kind]  # the same chip says either

SOURCES = {
    "flops": "TPU: jax/_src/tpu_info.py (per core there); GPU: NVIDIA data sheets, dense. v6e: 918e12 in Cloud's pages",
    "hbm_bytes": "TPU: jax/_src/tpu_info.py, rounded; a TPU7x device has half of the chip's 206e9. GPU: data sheets",
    "hbm_bandwidth": "jax/_src/tpu_info.py; v5p: Cloud 2.765e12, scaling book 2.8e12. GPU: data sheets",
    "link_bytes": "jax-ml.github.io/scaling-book, tpus and gpus; its first edition had 1e11 for v5p, v6e and 5e10 for "
    "v5e. A TPU7x chip's 9e10 are shared by its two devices",
    "wraps_at": "scaling book, tpus: an axis wraps when it is 16 (v5e, v6e) or a multiple of 4 (v4, v5p, tpu7x); "
    "without, what goes round 'typically doubles the time'",
    "network_bytes": "scaling book: DCN a chip (halved for a TPU7x device); InfiniBand of a GPU host over its 8 GPUs",
    "latency": "TPU: about 1e-6 a hop, scaling book; GPU: xla_gpu nccl_op_launch_us, XLA's own default for H100",
    "achieved": "scaling book, gpus: 370e9 of 450e9 on H100; the others have no published figure",
}
"""Where each column of `HARDWARE` comes from."""


KERNEL_EFFICIENCY = {
    "tpu": (0.4, 0.4),
    "gpu": (0.6, 0.5),
    "tpu7x": (0.31, 0.35),
    "b200": (0.63, 0.54),
    "gb200": (0.63, 0.54),
}
"""Share of the peak that an attention kernel reaches on long causal blocks of head size 128, (forward, backward), by
name, else by platform. gpu: FlashAttention 3 on H100, 600 and 500 of 989 TFLOP/s. b200: FlashAttention 4 at 8K, 1418
and 1209 of 2250. tpu7x: tokamax's splash attention at 32K (head size 256 reaches twice that). tpu: an assumption, as
nothing is published."""


def kernel_efficiency(hardware: Hardware) -> tuple[float, float]:
    """(forward, backward) share of the peak that a good attention kernel reaches."""
    return KERNEL_EFFICIENCY.get(hardware.name, KERNEL_EFFICIENCY[hardware.platform])


_OTHERS = re.compile(r"NVIDIA H100 PCIe|NVIDIA H[12]00 NVL|.* MIG ")
"""Kinds that start like an entry and are slower: H100 PCIe 756 TFLOP/s, H100 NVL and H200 NVL 835 (NVIDIA data sheets),
and parts of a GPU."""


def find_hardware(device_kind: str) -> Hardware | None:
    """The entry whose name starts the device's kind; the longest where several do, and none for a slower variant."""
    if _OTHERS.match(device_kind):
        return None
    fits = [name for name in HARDWARE if device_kind.startswith(name)]
    return HARDWARE[max(fits, key=len)] if fits else None


class Topology(NamedTuple):
    """Accelerators that are joined, from a name such as ``v5p:4x4x8`` or ``h200x8x16``."""

    name: str
    """The name, in lower case."""
    hardware: Hardware
    """What each JAX device is."""
    shape: tuple[int, ...]
    """TPU: chips along each dimension of the torus. GPU: (hosts, GPUs of a host)."""

    @property
    def platform(self) -> Literal["tpu", "gpu"]:
        """The platform of JAX."""
        return self.hardware.platform

    @property
    def num_chips(self) -> int:
        """Chips (GPUs) in all."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """JAX devices in all."""
        return self.num_chips * self.hardware.per_chip

    @property
    def device_kind(self) -> str:
        """How `jax.Device.device_kind` starts."""
        return next(kind for kind, hardware in HARDWARE.items() if hardware == self.hardware)

    @property
    def domain(self) -> int:
        """JAX devices that fast links join: all of a TPU slice; those of a GPU host, or of an NVLink rack."""
        if self.platform == "tpu":
            return self.num_devices
        per_host = self.shape[1]
        return min(self.num_devices, self.hardware.domain) if self.hardware.domain > 8 else per_host

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Per dimension of a TPU's torus: whether it closes to a ring. GPU: none has dimensions."""
        step = self.hardware.wraps_at
        return tuple(size % step == 0 for size in self.shape) if step else ()


def parse_topology(name: str) -> Topology:
    """Read the name of a topology.

    ``KIND:AxBxC`` is a TPU slice of A x B x C chips (two numbers for v5e and v6e); ``KINDxN`` one host of N GPUs, and
    ``KINDxNxM`` M such hosts. No device is needed.

    Raises:
      ValueError: an unknown kind, a wrong number of sizes, a size below 1, more GPUs than a host has.

    Example:
      >>> parse_topology("v5p:4x4x8").num_devices, parse_topology("tpu7x:4x4x4").num_devices
      (128, 128)
      >>> parse_topology("h200x8x16").shape, parse_topology("h100x8").num_devices
      ((16, 8), 8)

    Reference:
      Names of TPU slices: cloud.google.com/tpu/docs; the same names are those of
      ``jax.experimental.topologies.get_topology_desc(platform="tpu")``.
    """
    kinds = {hardware.name: hardware for hardware in HARDWARE.values()}
    text = name.strip().lower()
    kind, _, sizes = text.partition(":") if ":" in text else text.partition("x")
    if kind not in kinds:
        close = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.4)
        raise ValueError(f"unknown topology {name!r}{f'; did you mean {close[0]!r}?' if close else ''}; {_known()}")
    hardware, words = kinds[kind], sizes.split("x")
    wanted = (hardware.torus_dims,) if hardware.torus_dims else (1, 2)
    numbers = all(word.isdecimal() and int(word) for word in words)
    if (":" in text) != bool(hardware.torus_dims) or len(words) not in wanted or not numbers:
        raise ValueError(f"topology {name!r} is not how {kind} is named; {_known()}")
    shape = tuple(int(word) for word in words)
    if hardware.torus_dims:
        return Topology(text, hardware, shape)
    per_host, hosts = shape if len(shape) == 2 else (shape[0], 1)
    if per_host > hardware.domain:
        raise ValueError(
            f"topology {name!r} has {per_host} GPUs in a host, and NVLink joins at most {hardware.domain} {kind}; "
            f"use {kind}x{hardware.domain}x{-(-per_host * hosts // hardware.domain)}"
        )
    return Topology(text, hardware, (hosts, per_host))


def _known() -> str:
    """How topologies are named, for messages."""
    names = {platform: [] for platform in ("tpu", "gpu")}
    for hardware in dict.fromkeys(HARDWARE.values()):
        names[hardware.platform].append(hardware.name)
    return (
        f"known: TPU slices as KIND:AxBxC (v5e and v6e: KIND:AxB) with KIND one of {', '.join(names['tpu'])}, such as "
        f"v5p:4x4x8 or v5e:16x16; GPU hosts as KINDxGPUS_PER_HOST or KINDxGPUS_PER_HOSTxHOSTS with KIND one of "
        f"{', '.join(names['gpu'])}, such as h100x8 or h200x8x16"
    )
