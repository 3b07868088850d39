"""Names of topologies, and the links that the axes of a mesh get on them."""

import numpy as np
import pytest
from jax._src import mesh_utils

from ring_jax import links
from ring_jax.hardware import HARDWARE, SOURCES, Hardware, find_hardware, parse_topology
from ring_jax.links import Link, axis_links, joined, lay_on_torus, single_link


@pytest.mark.parametrize(
    ("name", "shape", "devices", "domain", "wraps", "kind"),
    [
        ("v5p:4x4x8", (4, 4, 8), 128, 128, (True, True, True), "TPU v5p"),
        ("v5e:16x8", (16, 8), 128, 128, (True, False), "TPU v5 lite"),
        ("V6E:16x16", (16, 16), 256, 256, (True, True), "TPU v6 lite"),
        ("tpu7x:4x4x4", (4, 4, 4), 128, 128, (True, True, True), "TPU7x"),
        ("v4:2x2x1", (2, 2, 1), 4, 4, (False, False, False), "TPU v4"),
        ("h200x8x16", (16, 8), 128, 8, (), "NVIDIA H200"),
        ("h100x8", (1, 8), 8, 8, (), "NVIDIA H100"),
        ("gb200x4x18", (18, 4), 72, 72, (), "NVIDIA GB200"),
    ],
)
def test_names(name, shape, devices, domain, wraps, kind):
    found = parse_topology(name)
    assert (found.shape, found.num_devices, found.domain, found.wraps) == (shape, devices, domain, wraps)
    assert find_hardware(found.device_kind) == find_hardware(kind) == found.hardware


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "v5q:4x4x8",
            r"unknown topology 'v5q:4x4x8'; did you mean 'v5[ep]'\?; known: .*v4, v5e, v5p, v6e, tpu7x.*h200x8x16",
        ),
        ("h300x8", "unknown topology 'h300x8'; did you mean 'h[12]00'"),
        ("v5p:4x4", "'v5p:4x4' is not how v5p is named"),
        ("v5ex16x16", "is not how v5e is named"),
        ("h100:8", "is not how h100 is named"),
        ("h100x8x0", "is not how h100 is named"),
        ("", "unknown topology ''"),
        ("h100x16x2", "NVLink joins at most 8 h100; use h100x8x4"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(name)


def test_every_figure_has_a_source():
    said = set(SOURCES) | {"name", "torus_dims", "per_chip", "domain"}  # what everyone can count
    assert said == set(Hardware._fields)


def test_kinds_are_told_apart():
    for kind, name in (("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p"), ("TPU v6e", "v6e")):
        assert find_hardware(kind).name == name
    assert find_hardware("NVIDIA H100 80GB HBM3").name == "h100"
    assert find_hardware("NVIDIA GB200").name == "gb200"
    assert find_hardware("cpu") is None


AXES = ("data", "tensor", "pipeline", "sequence")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v5p:4x4x8", (1, 4, 1, 32)),
        ("v5p:4x4x8", (4, 1, 8, 4)),
        ("v5p:4x4x8", (8, 1, 1, 16)),
        ("v5p:4x4x8", (1, 1, 1, 128)),
        ("v5e:16x16", (16, 1, 1, 16)),
        ("v5p:8x8x8", (1, 8, 1, 64)),
        ("tpu7x:4x4x4", (1, 8, 1, 16)),
        ("tpu7x:4x4x4", (4, 4, 1, 8)),
    ],
)
def test_axes_lie_on_the_torus_as_jax_lays_them(name, sizes):
    topology = parse_topology(name)
    core = (topology.hardware.per_chip,) if topology.hardware.per_chip > 1 else ()
    devices = np.empty((*topology.shape, *core), object)
    for i in range(devices.size):
        devices.flat[i] = type("Device", (), {"device_kind": topology.device_kind})()
    _, assigned = mesh_utils._create_device_mesh_for_nd_torus(devices, sizes)
    found = lay_on_torus(topology, dict(zip(AXES, sizes, strict=True)))
    for column, axis in enumerate(AXES):
        assert sorted(side.length for side in found[axis]) == sorted(n for n in assigned[:, column] if n > 1), axis


def test_axes_that_split_the_torus():
    """No product of 4, 4 and 8 is 64, nor of 16 and 16 8: part of a side does not close, and what skips chips shares
    each link with as many messages as it skips."""
    topology = parse_topology("v5p:4x4x8")
    found = axis_links(topology, dict(zip(AXES, (1, 2, 1, 64), strict=True)))
    assert sorted(found["sequence"].dims) == [2, 4, 8] and not found["sequence"].is_slow
    assert found["tensor"].hop_rate() == topology.hardware.link_bytes / 2
    found = axis_links(parse_topology("v5e:16x16"), {"data": 32, "sequence": 8})
    assert found["sequence"].is_slow and found["sequence"].words == "torus 8 without wraparound"
    assert found["data"].hop_rate() == 4.5e10 / 8 and "messages share a link" in found["data"].words
    with pytest.raises(ValueError, match=r"sequence=3 cannot be laid along v5p:4x4x8: .* factor 3; choose sizes from"):
        lay_on_torus(topology, {"sequence": 3})


def test_links_on_gpu_hosts():
    """Device numbers follow the mesh, the sequence axis fastest."""
    topology = parse_topology("h200x8x16")
    found = axis_links(topology, dict(zip(AXES, (2, 8, 1, 8), strict=True)))
    assert not found["sequence"].is_slow and found["sequence"].hop_rate() == pytest.approx(370e9)
    assert found["tensor"].near == 1 and found["tensor"].hop_rate() == 50e9
    found = axis_links(topology, dict(zip(AXES, (8, 4, 1, 4), strict=True)))
    assert found["sequence"].near == 0 and found["tensor"].near == 2
    wide = axis_links(topology, dict(zip(AXES, (8, 1, 1, 16), strict=True)))["sequence"]
    assert wide.is_slow and wide.hop_rate() == 50e9 and "8 of 16 within a host" in wide.words
    with pytest.raises(
        ValueError, match="data 2 x tensor 1 x pipeline 1 x sequence 8 is 16 devices, and h200x8x16 has"
    ):
        axis_links(topology, dict(zip(AXES, (2, 1, 1, 8), strict=True)))


def test_links_on_a_torus():
    topology = parse_topology("v5e:16x8")
    found = axis_links(topology, {"data": 8, "sequence": 16})
    assert found["sequence"].wraps and found["sequence"].hop_rate(two_directions=True) == 9e10
    assert not found["data"].wraps and found["data"].hop_rate() == 4.5e10 / 2
    assert "without wraparound" in found["data"].words and "8" in found["data"].words


def test_times_of_collectives():
    """By hand, without latency: closed torus of 8 and 4x4, a line, one host, two hosts."""
    ring = Link(8, 1e9, 0, "", True, True, (8,))
    assert ring.hop(2e9) == 2 and ring.hop(2e9, two_directions=True) == 1
    assert ring.gather(8e9) == pytest.approx(3.5)
    assert ring.exchange(8e9) == pytest.approx(8)  # n held / (8 rate)
    line = ring._replace(wraps=False)
    assert (line.hop(2e9), line.gather(8e9), line.exchange(8e9)) == (4, 7, 16)
    square = Link(16, 1e9, 0, "", True, True, (4, 4))
    assert square.gather(16e9) == pytest.approx(15 / 4)
    host = Link(8, 1e9, 0, "")
    assert (host.hop(2e9), host.gather(8e9), host.exchange(8e9)) == (2, 7, 7)
    hosts = Link(16, 1e9, 0, "", near=8, network=1e8)
    assert hosts.hop(2e9) == 20  # everyone waits for the hop between hosts
    assert hosts.gather(16e9) == pytest.approx(15)  # half of it from outside, by 8 devices: 10 s, less than the links
    assert hosts.exchange(16e9) == pytest.approx(80)
    assert Link(1, 1e9, 1, "").gather(1e9) == 0


def test_parts_of_an_axis():
    hosts = Link(16, 1e9, 0, "", near=8, network=1e8)
    assert not hosts.part(8).is_slow and hosts.part(16) == hosts
    assert hosts.every(8).near == 1 and hosts.every(8).size == 2
    torus = Link(8, 1e9, 0, "", True, True, (8,))
    assert torus.every(2).hop_rate() == 5e8, "two messages share each link"
    assert torus.part(2).wraps and not torus.part(4).wraps


def test_axes_joined():
    topology = parse_topology("h200x8x2")
    found = axis_links(topology, {"data": 2, "tensor": 2, "sequence": 4})
    both = joined(found["data"], found["sequence"])
    assert both.size == 8 and both.near == 4
    torus = axis_links(parse_topology("v5p:4x4x8"), {"data": 4, "tensor": 4, "sequence": 8})
    assert joined(torus["data"], torus["sequence"]).dims == (4, 8)


@pytest.mark.parametrize(("kind", "name"), [("copper", "TPU v4"), ("line", "NVIDIA H100")])
def test_links_that_are_none(kind, name):
    with pytest.raises(ValueError, match=f"link='{kind}' must be one of auto, fast, line, network"):
        single_link(HARDWARE[name], 8, kind)


def test_the_number_of_devices_tells_the_link():
    assert single_link(HARDWARE["NVIDIA H100"], 16).is_slow and not single_link(HARDWARE["NVIDIA H100"], 8).is_slow
    assert single_link(HARDWARE["TPU v5 lite"], 8).is_slow and not single_link(HARDWARE["TPU v5 lite"], 16).is_slow
    assert set(links.KINDS) == {"auto", "fast", "line", "network"}
