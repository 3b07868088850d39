"""Rehearsals: the step compiled for a machine that is not here. Names, arithmetic, refusals; end to end for a CPU, and
for a TPU where libtpu is installed."""

import dataclasses
import doctest
import importlib.util
import json
import pathlib
import shlex

import jax
import numpy as np
import pytest
import tiny_run

import ring_jax
from ring_jax import planner, pods
from ring_jax.inspection import Collective
from train import advice, cli, forecast, rehearse
from train.flops import count_for, matmul_params, model_flops
from train.memory import estimate_memory

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = str(ROOT / "tests" / "tiny_run.py")
LARGE = str(ROOT / "configs" / "llama3_70b_128k.py")


@pytest.mark.parametrize(
    ("name", "platform", "shape", "count"),
    [
        ("v4:4x4x4", "tpu", (4, 4, 4), 64),
        ("v5e:16x16", "tpu", (16, 16), 256),
        ("v5p:4x4x8", "tpu", (4, 4, 8), 128),
        ("v6e:2x4", "tpu", (2, 4), 8),
        ("tpu7x:4x4x4", "tpu", (4, 4, 4), 128),
        ("h100x8", "gpu", (1, 8), 8),
        ("h200x8x16", "gpu", (16, 8), 128),
        ("cpu:8", "cpu", (8,), 8),
    ],
)
def test_names(name, platform, shape, count):
    pod = pods.find(name)
    assert (pod.name, pod.platform, pod.shape, pod.num_devices) == (name, platform, shape, count)
    assert platform == "cpu" or planner.find_hardware(pod.kind)


@pytest.mark.parametrize(
    "name", ["", "v9:2x2", "v5p", "v5p:4x4", "v5e:4x4x4", "v5p:4x0x4", "h200", "h200x8x8x8", "cpu"]
)
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError) as caught:
        pods.find(name)
    for part in (repr(name), "v5p:4x4x8", "v5e:16x16", "h100x8", "h200x8x16", "cpu:8", "tpu7x", "v4", "v6e"):
        assert part in str(caught.value)


def test_a_gpu_that_no_compiler_knows_can_be_planned_for():
    with pytest.raises(ValueError, match=r"'b200x8' cannot be compiled for.*only h100 and h200.*train plan"):
        pods.find("b200x8")


def test_gpu_target_names_the_device():
    text = pods.target_config(pods.find("h200x8x16"))
    assert 'device_description_str: "NVIDIA H200"' in text and "memory_bandwidth: 4800000000000" in text
    assert text.count("{") == text.count("}")


@dataclasses.dataclass(frozen=True)
class Chip:
    """What is asked of a device."""

    coords: tuple[int, ...]
    process_index: int
    id: int = 0
    platform: str = "tpu"


def slab(shape, *axes, order=None):
    """A mesh of chips in the order of their coordinates, as (axis, size)s; hosts are lines of the last side."""
    chips = [Chip(place, place[0]) for place in np.ndindex(*shape)]
    devices = np.empty(len(chips), object)
    devices[:] = [chips[i] for i in order or range(len(chips))]
    names, sizes = zip(*axes, strict=True)
    return jax.sharding.Mesh(devices.reshape(sizes), names)


def test_messages_on_a_link():
    """Worked out by hand: row after row has no two messages on a link, both ways round; every other row has."""
    torus, line = pods.find("v5p:4x4x1"), pods.find("v5e:4x4")
    ring = slab((4, 4, 1), ("sequence", 16))
    assert pods.link_load(torus, ring, "sequence") == 1
    # On lines, what goes from the end of a row to the start of the next goes back over the row, which is else free.
    assert pods.link_load(line, slab((4, 4), ("sequence", 16)), "sequence") == 1
    # Neighbors that are two chips apart share links: 0 -> 2 and 1 -> 3 both use 1 -> 2.
    apart = slab((4, 4), ("sequence", 16), order=[4 * row + i for row in range(4) for i in (0, 2, 1, 3)])
    assert pods.link_load(line, apart, "sequence") == 2
    assert pods.link_load(pods.find("h200x8x2"), ring, "sequence") == 1


def test_hosts():
    mesh = slab((2, 4), ("data", 2), ("sequence", 4))
    assert pods.crosses_hosts(mesh, "data") and not pods.crosses_hosts(mesh, "sequence")


def test_warning_of_a_ring_that_leaves_its_host():
    config, pod = tiny_run.config(), pods.find("h200x4x2")
    inside = slab((2, 4), ("data", 2), ("sequence", 4))
    across = slab((2, 4), ("data", 1), ("sequence", 8))
    assert rehearse.warnings(config, pod, inside) == []
    (line,) = rehearse.warnings(config, pod, across)
    assert (
        "crosses hosts" in line
        and "50 GB/s instead of 450" in line
        and "9 times as long" in line
        and "here are 32" in line
    )


def refused(capsys, *argv):
    assert cli.main(["rehearse", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--topology", "v5x:4"], ["unknown topology 'v5x:4'; did you mean 'v5p'?", "v5p:4x4x8", "h200x8x16"]),
        (["--topology", "v5p:2x2x1"], ["= 2 devices, but topology v5p:2x2x1 has 4", "--mesh.sequence 4"]),
        (["--topology", "cpu:2", "--data.seq-len", "66"], ["seq_len=66", "divisible by 4"]),
        (["--topology", "cpu:0"], ["unknown topology 'cpu:0'", "cpu:8"]),
    ],
)
def test_refusals(capsys, argv, parts):
    message = refused(capsys, TINY, *argv)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("topology", "says", "make"),
    [
        ("v5p:2x1x1", RuntimeError("JAX TPU support not installed; cannot generate TPU topology"), "make setup-tpu"),
        ("h200x2", NotImplementedError("topology not implemented for cuda"), "make setup-gpu"),
        ("v5p:2x1x1", RuntimeError("not divisible by the chips_per_host_bounds"), "does not exist: not divisible"),
    ],
)
def test_missing_compilers_name_their_installation(capsys, monkeypatch, topology, says, make):
    def fail(*args, **keywords):
        raise says

    monkeypatch.setattr(pods.topologies, "get_topology_desc", fail)
    assert make in refused(capsys, TINY, "--topology", topology)


def test_topology_is_needed(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["rehearse", TINY])
    assert caught.value.code == 2 and "--topology" in capsys.readouterr().err


def rehearsed(capsys, *argv):
    """(exit code, printed lines, the JSON)"""
    code = cli.main(["rehearse", TINY, "--json", *argv])
    lines = capsys.readouterr().out.splitlines()
    return code, lines, json.loads(lines[-1])


def test_end_to_end_on_simulated_devices(capsys, tmp_path):
    path = tmp_path / "new" / "step.hlo"
    flags = "--topology cpu:4 --mesh.sequence 4 --model.num-kv-heads 1 --dump-hlo".split()
    code, lines, found = rehearsed(capsys, *flags, str(path))
    assert code == rehearse.EXPOSED, "a CPU does nothing while it sends"
    assert found.keys() == {"topology", "mesh", "seq_len", "fits", "compile_s", *rehearse.FIGURES}
    config = tiny_run.config()
    # Each layer: K with V, positions and segment ids, forward, computed again and backward; and dK with dV.
    layers, hops = config.model.num_layers, 3
    assert found["ring_hops"] == layers * hops * (3 * 3 + 1)
    assert found["homecoming_hops"] == layers
    assert found["exposed_ring_hops"] == found["ring_hops"] - layers
    assert found["fits"] and found["hbm_bytes"] is None and found["step_time_s"] is None
    model = dataclasses.replace(config.model, num_kv_heads=1)
    assert found["model_flops"] == model_flops(model, count_for(model, np.ones((2, 64), int)))
    assert found["optimizer_bytes"] == 2 * found["params_bytes"] + 4 + 2 * 4  # moments, step, counts of optax
    assert found["bytes_per_chip"] > found["temporary_bytes"] + found["params_bytes"] + found["optimizer_bytes"]
    assert path.read_text().startswith("HloModule")
    assert any("collective-permute  sequence" in line and "attention, backward" in line for line in lines)


def test_exit_codes(capsys, monkeypatch):
    one = ("--topology", "cpu:1", "--mesh.sequence", "1")
    code, _, found = rehearsed(capsys, *one)
    assert (code, found["ring_hops"], found["exposed_ring_hops"]) == (0, 0, 0)
    monkeypatch.setattr(rehearse, "compile_step", lambda *_: advice.Refusal("no room", 30 * 10**9, 17 * 10**9))
    code, lines, found = rehearsed(capsys, *one)
    assert code == rehearse.DOES_NOT_FIT
    assert (found["fits"], found["bytes_per_chip"], found["hbm_bytes"]) == (False, 30 * 10**9, 17 * 10**9)
    assert found["step_time_s"] is None and found.keys() >= set(rehearse.FIGURES)
    assert "does not fit: no room" in lines
    assert len({0, 1, 2, 75, 130, 143, rehearse.DOES_NOT_FIT, rehearse.EXPOSED}) == 8


@pytest.mark.parametrize(
    ("text", "used", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (15.83G) exceeds available HBM (15.75G). HLO module: jit_f.",
            15.83,
            15.75,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.5G of 15.75G hbm. Exceeded", 31.5, 15.75),
    ],
)
def test_a_compiler_out_of_memory(text, used, available):
    found = advice.read_refusal(text)
    assert found == (found.message, round(used * 2**30), round(available * 2**30))
    assert f"needs {used * 2**30 / 1e9:.1f} GB of a device, which has 16.9 GB" in found.message


@pytest.mark.parametrize("module", [pods, advice])
def test_examples(module):
    assert doctest.testmod(module) == (0, 1)


def test_other_errors_are_no_refusals():
    assert advice.read_refusal("INTERNAL: something else") is None
    assert advice.read_refusal("RESOURCE_EXHAUSTED: of a kind not seen before") == (
        "RESOURCE_EXHAUSTED: of a kind not seen before",
        None,
        None,
    )


def large(*flags):
    pieces = ["--num-microbatches", "2", "--accumulate", "1"]
    return cli._read_config(LARGE, ["--data.batch-size", "16", "--model.remat", "none", *pieces, *flags])


def test_advice_is_valid_ordered_and_enough():
    config, available = large(), 16 * 10**9
    pod = pods.find("v5e:16x16")
    used = int(1.3 * estimate_memory(config).total)
    title, *lines, least = advice.advise(config, pod, used, available)
    assert f"less than {used / 1e9:.1f} GB" in title and "a device has 16.0 GB" in title
    sizes = [float(line.split("about ")[1].split(" GB")[0]) for line in lines]
    assert sizes == sorted(sizes) and max(sizes) < used / 1e9
    named = [line.split(":")[0].strip() for line in lines]
    assert named[0] == "--model.remat layer", "most effective where everything is kept"
    assert {"--accumulate 2", "--mesh.sequence 16 --mesh.data 2 --accumulate 2", "--model.mlp-chunk 4096"} <= set(named)
    assert "--num-microbatches 1 --accumulate 2" in named, "one stage need not have them in flight together"
    for flags, size in zip(named, sizes, strict=True):
        other = large(*shlex.split(flags))
        rehearse.check(other, pod)
        assert advice.scaled_estimate(config, used)(other) / 1e9 == pytest.approx(size, abs=0.1)
    chosen = least.removeprefix("the least that would fit: ").split(" on ")[0]
    assert "instead of" not in least
    assert advice.scaled_estimate(config, used)(large(*shlex.split(chosen))) <= available < used


def test_advice_that_more_devices_are_needed():
    config, pod = large("--data.batch-size", "8"), pods.find("v5e:16x16")
    (*_, least) = advice.advise(config, pod, None, 3 * 10**9)
    assert "devices instead of 256" in least
    assert advice.advise(config, pod, None, 10**6)[-1].startswith("nothing that would fit was found")
    assert advice.advise(config, pods.find("cpu:256"), None, None) == []


def hop(scope="jit(step)/shard_map/jvp(pipeline)/layer/attention/ppermute", **changes):
    known = dict(
        kind="collective-permute", dtype="f32", axes=("sequence",), shift=1, participants=4, bytes=8, runs=2,
        conditional=False, asynchronous=True, hidden_flops=0, hidden_kernels=0, hidden=False, scope=scope,
    )  # fmt: skip
    return Collective(**known | changes)


BACKWARD = "jit(step)/shard_map/transpose(jvp(pipeline))/while/body/checkpoint/layer/attention"


def test_the_last_homecoming():
    named = hop(f"{BACKWARD}/homecoming/ppermute", runs=6)
    assert forecast._homecomings([hop(), hop(f"{BACKWARD}/ppermute"), named]) == [named]
    assert forecast._homecomings([hop()]) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"axes": ("sequence[2]",)}, True),
        ({"axes": ("tensor",)}, False),
        ({"kind": "all-gather"}, False),
        ({"shift": None}, False),
        ({"scope": "jit(step)/mlp/reduce_scatter"}, False),
    ],
)
def test_what_a_ring_hop_is(changes, expected):
    assert forecast.is_ring_hop(hop(**changes)) is expected


def test_places_in_words():
    assert forecast.describe(hop().scope) == "attention, forward"
    assert forecast.describe(f"{BACKWARD}/ppermute") == "attention, backward"
    assert forecast.describe("jit(step)/transpose(jvp(x))/checkpoint/rematted_computation/mlp/dot") == "mlp, again"
    assert forecast.describe("jit(step)/transpose(jvp(x))/reduce_scatter:mlp/reduce_scatter") == "mlp, backward"
    assert forecast.describe("jit(step)/shard_map/psum") == "step"
    assert forecast.describe("") == "-"


def test_seconds_of_a_transfer():
    tpu, v5p = pods.find("v5p:4x4x1"), planner.find_hardware("TPU v5p")
    mesh = slab((4, 4, 1), ("data", 4), ("sequence", 4))
    one_way, both = 9e10, 18e10
    assert forecast.transfer_seconds(hop(bytes=10**9), tpu, mesh, v5p) == pytest.approx(1e9 / one_way, rel=1e-3)
    gather = hop(bytes=10**9, kind="all-gather")
    assert forecast.transfer_seconds(gather, tpu, mesh, v5p) == pytest.approx(1e9 / both, rel=1e-3)
    gpu, h200 = pods.find("h200x4x2"), planner.find_hardware("NVIDIA H200")
    mesh = slab((2, 4), ("data", 2), ("sequence", 4))
    assert forecast.transfer_seconds(hop(bytes=10**9), gpu, mesh, h200) == pytest.approx(1e9 / 450e9, rel=0.05)
    across = hop(bytes=10**9, axes=("data", "sequence"))
    assert forecast.transfer_seconds(across, gpu, mesh, h200) == pytest.approx(1e9 / 50e9, rel=0.05)


def test_executed_flops():
    config = tiny_run.config()
    model, tokens, pairs = config.model, 128, 2 * 64 * 65 // 2
    inside = model.num_layers * model.num_heads * model.head_dim
    expected = 8 * matmul_params(model) * tokens + 18 * inside * pairs  # layers and logits are computed twice
    assert forecast.executed_flops(config, tokens, pairs) == expected


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed here: `make test-tpu` runs this"
)


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "kind", "axes"),
    [
        ("v4:2x2x1", "TPU v4", {"sequence": 4}),
        ("v5e:16x16", "TPU v5 lite", {"tensor": 4, "sequence": 64}),  # no product of whole sides
        ("v6e:4x4", "TPU v6 lite", {"sequence": 16}),
        ("v5p:4x4x8", "TPU v5", {"tensor": 4, "sequence": 32}),
        ("tpu7x:4x4x4", "TPU7x", {"tensor": 4, "sequence": 32}),
    ],
)
def test_rings_on_slices(name, kind, axes):
    """The devices are as many as the name says, and every hop of a ring has its links to itself."""
    pod = pods.find(name)
    devices = pods.devices(pod)
    assert (len(devices), {device.device_kind for device in devices}) == (pod.num_devices, {kind})
    mesh = ring_jax.make_mesh(**axes, devices=devices)
    assert pods.link_load(pod, mesh, "sequence") == 1


@needs_libtpu
@pytest.mark.tpu
def test_compiled_for_a_tpu(capsys):
    small = "--mesh.sequence 4 --data.seq-len 32768 --model.head-dim 128 --model.num-heads 4 --model.embed-dim 256"
    code, lines, found = rehearsed(
        capsys, "--topology", "v5p:2x2x1", *shlex.split(small), "--model.compute-dtype", "bfloat16"
    )
    assert (code, found["exposed_ring_hops"]) == (0, 0)
    assert found["fits"] and found["hbm_bytes"] == int(planner.find_hardware("TPU v5").hbm_bytes)
    assert found["ring_hops"] > 0 and found["homecoming_hops"] == 2
    assert 0 < found["mfu"] < forecast.EFFICIENCY["tpu"]
    assert found["step_time_s"] > found["model_flops"] / 4 / planner.find_hardware("TPU v5").flops
    assert any("attention, forward" in line and "hidden" in line for line in lines)
    assert not any(device.platform != "cpu" for device in jax.devices())
