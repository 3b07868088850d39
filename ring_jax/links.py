"""What a transfer over one mesh axis costs: which links the axis runs over, and the time of each kind of collective.

What always holds: a collective is as fast as its slowest link. A ring whose neighbors are on two GPU hosts therefore
runs at the speed of the network on every hop, since all devices wait for the one that crosses; and a ring along a TPU
axis that does not close pays for its last hop, which goes back over the whole line, on every hop.
"""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from ring_jax.hardware import Hardware, Topology

KINDS = ("auto", "fast", "line", "network")


class Link(NamedTuple):
    """How the devices of one mesh axis are joined; rates in bytes/s, one way, of one device."""

    size: int
    """Devices on the axis."""
    rate: float
    """Of the fast link: one torus link, or NVLink, as far as measured."""
    latency: float
    """Seconds before the first byte."""
    words: str
    """What it is, for people."""
    is_torus: bool = False
    """Full duplex links to two neighbors, of which a collective can use both."""
    wraps: bool = True
    """The axis closes to a ring."""
    dims: tuple[int, ...] = ()
    """Lengths of the torus dimensions that the axis runs over."""
    near: int = 0
    """Devices of the axis within one NVLink domain; 0: all."""
    network: float = math.inf
    """Rate of a device's share of the network between domains."""

    @property
    def is_slow(self) -> bool:
        """A ring here does not get the full rate of the fast link."""
        return self.size > 1 and (not self.wraps or bool(self.near))

    def part(self, size: int) -> "Link":
        """The link of groups of ``size`` neighbors on this axis."""
        if size == self.size:
            return self
        near = math.gcd(size, self.near) if self.near else 0
        near = 0 if near == size else near
        return self._replace(size=size, near=near, wraps=size <= 2 or not self.is_torus, dims=(size,))

    def every(self, stride: int) -> "Link":
        """The link of a ring over every ``stride``-th device: on a torus ``stride`` messages share each link."""
        near = max(1, self.near // stride) if self.near else 0
        rate = self.rate / stride if self.is_torus else self.rate
        return self._replace(size=self.size // stride, near=near, rate=rate)

    def hop_rate(self, two_directions: bool = False) -> float:
        """Bytes/s of a hop of the ring: everybody sends to the next at the same time."""
        rate = min(self.rate, self.network) if self.near else self.rate
        return rate * (2 if two_directions and self.is_torus else 1) / (1 if self.wraps else 2)

    def hop(self, sent: float, two_directions: bool = False) -> float:
        """Seconds of a hop that sends so many bytes."""
        return sent / self.hop_rate(two_directions) + self.latency if sent and self.size > 1 else 0.0

    def gather(self, whole: float) -> float:
        """Seconds of an all-gather of ``whole`` bytes a device in the end, or of a reduce-scatter of as many.

        Torus: (n - 1) / n of them over both directions of every dimension. Hosts: the slower of the links inside, and
        of the network, over which each device brings its share of what other domains hold.
        """
        if self.size == 1 or not whole:
            return 0.0
        part = whole * (self.size - 1) / self.size
        if self.is_torus:
            lanes = 2 * max(1, len(self.dims)) / (1 if self.wraps else 2)
            return part / (lanes * self.rate) + self.latency * self.size / 2
        domains = self.size // self.near if self.near else 1
        between = whole * (domains - 1) / domains / (max(1, self.near) * self.network)
        return max(part / self.rate if self.near != 1 else 0.0, between) + self.latency

    def exchange(self, held: float) -> float:
        """Seconds of an all-to-all of ``held`` bytes a device.

        Torus dimension of n chips, closed: n held / (8 rate), as a byte goes n / 4 links on the average and two links
        share the load; a line takes twice as long. Hosts: the slower of the links and the network.
        """
        if self.size == 1 or not held:
            return 0.0
        if self.is_torus:
            longest = max(self.dims, default=self.size)
            return longest * held / ((8 if self.wraps else 4) * self.rate) + self.latency * longest / 2
        inside = held * (self.size - 1) / self.size / self.rate if self.near != 1 else 0.0
        outside = held * (self.size - self.near) / self.size / self.network if self.near else 0.0
        return max(inside, outside) + self.latency


def single_link(hardware: Hardware, size: int, kind: str = "auto") -> Link:
    """The link of an axis of ``size`` devices that are neighbors.

    Args:
      hardware: of one device. size: devices on the axis.
      kind: "fast": NVLink, or a TPU axis that closes; "line": a TPU axis that does not; "network": one device to a host
        or slice; "auto": what the size says.

    Raises:
      ValueError: an unknown kind, or "line" for a GPU.
    """
    if kind not in KINDS or (kind == "line" and hardware.platform == "gpu"):
        raise ValueError(
            f"link={kind!r} must be one of {', '.join(KINDS)}; line is for TPUs, and this is {hardware.name}"
        )
    if kind == "network":
        words = "the network between " + ("slices" if hardware.torus_dims else "hosts")
        return Link(size, hardware.network_bytes, hardware.latency, words, near=1, network=hardware.network_bytes)
    rate = hardware.link_bytes * hardware.achieved
    if hardware.platform == "gpu":
        crosses = kind == "auto" and size > hardware.domain
        near = math.gcd(size, hardware.domain) if crosses else 0
        words = f"{near} of {size} within a host, the rest over the network" if crosses else "NVLink"
        return Link(size, rate, hardware.latency, words, near=near, network=hardware.network_bytes)
    wraps = kind == "fast" or (kind == "auto" and _closes(size, hardware))
    return Link(size, rate, hardware.latency, _torus_words((size,), wraps), True, wraps, (size,))


def axis_links(topology: Topology, sizes: Mapping[str, int]) -> dict[str, Link]:
    """The link of every mesh axis, as `ring_jax.make_mesh` lays the axes (the last varies fastest).

    GPU: device numbers follow the mesh, host by host. TPU: each axis takes dimensions of the torus.

    Args:
      topology: the devices. sizes: mesh axis to size, in mesh order; their product is the number of devices.

    Raises:
      ValueError: the product is another, or the axes cannot be laid along the torus.

    Example:
      >>> from ring_jax.hardware import parse_topology
      >>> axis_links(parse_topology("h200x8x2"), {"data": 2, "sequence": 8})["sequence"].words
      'NVLink'
      >>> axis_links(parse_topology("h200x8x2"), {"sequence": 16})["sequence"].words
      '8 of 16 within a host, the rest over the network'
    """
    if math.prod(sizes.values()) != topology.num_devices:
        text = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"mesh {text} is {math.prod(sizes.values())} devices, and {topology.name} has {topology.num_devices}"
        )
    hardware = topology.hardware
    rate = hardware.link_bytes * hardware.achieved
    if topology.platform == "tpu":
        return {
            axis: _torus_link(topology, sizes[axis], sides) for axis, sides in lay_on_torus(topology, sizes).items()
        }
    links, stride = {}, 1
    for axis, size in reversed(list(sizes.items())):
        near = math.gcd(size, topology.domain // stride) if topology.domain % stride == 0 else 1
        near = 0 if near == size else near
        words = f"{near} of {size} within a host, the rest over the network" if near else "NVLink"
        links[axis] = Link(size, rate, hardware.latency, words, near=near, network=hardware.network_bytes)
        stride *= size
    return {axis: links[axis] for axis in sizes}


class Side(NamedTuple):
    """What a mesh axis takes of one dimension of the torus: every ``stride``-th of ``of`` chips, ``length`` of them."""

    length: int
    stride: int
    of: int


def lay_on_torus(topology: Topology, sizes: Mapping[str, int]) -> dict[str, tuple[Side, ...]]:
    """What each mesh axis takes of the torus, by the rule of ``jax.experimental.mesh_utils``.

    The last axis chooses first, as many whole dimensions as its size can be the product of. The two devices of a TPU7x
    chip are a dimension, the first to be taken. Where an axis is no such product, dimensions are split: the last axis
    gets neighbors, those before it every so-many-th chip.

    Raises:
      ValueError: an axis has a factor that no dimension is left for.
    """
    cores = topology.hardware.per_chip
    dims = [*topology.shape, *([cores] if cores > 1 else [])]
    left = dict(enumerate(dims))
    laid: dict[str, tuple[Side, ...]] = {}
    for axis, size in reversed(list(sizes.items())):
        found = _subset(left, size, first=len(dims) - 1 if cores > 1 else None)
        if found is None:
            return _split_torus(topology, dims, sizes)
        laid[axis] = tuple(Side(n, 1, n) for n in (left.pop(i) for i in found) if n > 1)
    return {axis: laid[axis] for axis in sizes}


def _split_torus(topology: Topology, dims: list[int], sizes: Mapping[str, int]) -> dict[str, tuple[Side, ...]]:
    """Parts of dimensions for each axis, longest first."""
    taken = [1] * len(dims)
    laid: dict[str, tuple[Side, ...]] = {}
    for axis, size in reversed(list(sizes.items())):
        sides, rest = [], size
        for i in sorted(range(len(dims)), key=lambda i: -math.gcd(dims[i] // taken[i], size)):
            part = math.gcd(dims[i] // taken[i], rest)
            if part > 1:
                sides.append(Side(part, taken[i], dims[i]))
                taken[i], rest = taken[i] * part, rest // part
        if rest > 1:
            raise ValueError(
                f"mesh axis {axis}={size} cannot be laid along {topology.name}: no dimension is left for its factor "
                f"{rest}; choose sizes from the factors of {'x'.join(map(str, dims))}"
            )
        laid[axis] = tuple(sides)
    return {axis: laid[axis] for axis in sizes}


def _torus_link(topology: Topology, size: int, sides: tuple[Side, ...]) -> Link:
    """Messages of an axis that takes every so-many-th chip share each link; a part of a dimension does not close."""
    hardware = topology.hardware
    wraps = all(
        side.length == 2 or (side.length * side.stride == side.of and _closes(side.of, hardware)) for side in sides
    )
    stride = max((side.stride for side in sides), default=1)
    dims = tuple(side.length for side in sides)
    words = _torus_words(dims, wraps) + (f", {stride} messages share a link" if stride > 1 else "")
    rate = hardware.link_bytes * hardware.achieved / stride
    return Link(size, rate, hardware.latency, words, True, wraps, dims)


def _subset(dims: Mapping[int, int], size: int, first: int | None) -> tuple[int, ...] | None:
    """Indices of dimensions whose product is the size, most dimensions first, then with the preferred one."""
    for count in range(len(dims), 0, -1):
        found = [x for x in itertools.combinations(dims, count) if math.prod(dims[i] for i in x) == size]
        if first is not None:
            found.sort(key=lambda x: first not in x)
        if found:
            return found[0]
    return () if size == 1 else None


def _closes(length: int, hardware: Hardware) -> bool:
    """Two devices are a ring of one full-duplex link."""
    return length <= 2 or length % hardware.wraps_at == 0


def _torus_words(dims: tuple[int, ...], wraps: bool) -> str:
    shape = "x".join(map(str, dims)) or "1"
    return f"torus {shape}" if wraps else f"torus {shape} without wraparound"


def joined(*links: Link) -> Link:
    """Several mesh axes as one, for a collective over all of them."""
    used = [link for link in links if link.size > 1] or [links[0]]
    slow = [link for link in used if link.near]
    near = math.prod(link.near or link.size for link in used) if slow else 0
    return used[0]._replace(
        size=math.prod(link.size for link in used),
        wraps=all(link.wraps for link in used),
        dims=tuple(n for link in used for n in link.dims),
        near=near,
        words=" and ".join(dict.fromkeys(link.words for link in used)),
    )
