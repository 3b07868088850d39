"""The strategy that "auto" takes: closed forms against a published table, and what is said about the choice."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest

import ring_jax
from ring_jax import planner
from ring_jax.planner import HARDWARE, Sizes, choose_strategy, hidden_length

# c_min in tokens a device, forward and backward with float32 gradients, balanced causal: heads to key/value heads of
# 1, 4, 8 and 16 (performance model, table 4.3).
TABLE = {
    "TPU v4": ((6111, 1528, 764, 382), (7333, 1833, 917, 458)),
    "TPU v5 lite": ((4378, 1094, 547, 274), (5253, 1313, 657, 328)),
    "TPU v5p": ((5100, 1275, 638, 319), (6120, 1530, 765, 382)),
    "TPU v6 lite": ((10222, 2556, 1278, 639), (12267, 3067, 1533, 767)),
    "NVIDIA H100": ((4396, 1099, 549, 275), (5275, 1319, 659, 330)),
    "NVIDIA B200": ((5000, 1250, 625, 312), (6000, 1500, 750, 375)),
}


@pytest.mark.parametrize("kind", TABLE)
def test_hidden_length_is_that_of_the_table(kind: str):
    hardware = planner.find_hardware(kind)
    assert hardware is not None
    for column, ratio in enumerate((1, 4, 8, 16)):
        sizes = Sizes(8, 32 * ratio, 32, 4096, 2, 4, balanced_causal=True)
        for got, row in zip(hidden_length(sizes, hardware), TABLE[kind], strict=True):
            assert got == pytest.approx(row[column], rel=2e-3), (kind, ratio)


@pytest.mark.parametrize(
    ("sizes", "kind", "gathered", "strategy", "reason"),
    [
        (Sizes(1, 32, 8, 4096, 2), "NVIDIA H100", 0, "ring", "one device"),
        (Sizes(8, 32, 8, 16384, 2, balanced_causal=True), "NVIDIA H100 80GB HBM3", 0, "ring", "hide every hop"),
        (Sizes(8, 32, 8, 512, 2, balanced_causal=True), "NVIDIA H200", 0, "ulysses", "of a ring's bytes"),
        (Sizes(4, 32, 8, 512, 2, balanced_causal=True), "NVIDIA H200", 1e9, "all_gather", "one transfer instead of 3"),
        (Sizes(4, 32, 8, 512, 2, balanced_causal=True), "TPU v5 lite", 1e10, "ring", "would not fit well"),
        (Sizes(3, 32, 8, 512, 2), "NVIDIA H200", 0, "all_gather", "one transfer instead of 2"),
        (Sizes(8, 32, 8, 16, 2, num_hops=2), "NVIDIA H200", 0, "ring", "reaches 2 of 7 other shards"),
        (Sizes(8, 32, 8, 16, 2), "abacus", 0, "ring", "no figures for device kind 'abacus'"),
    ],
)
def test_choices(sizes, kind, gathered, strategy, reason):
    choice = choose_strategy(sizes, kind, gathered)
    assert choice.strategy == strategy and reason in choice.reason


def test_auto_reports_what_it_took(caplog):
    x = jnp.ones((1, 16, 2, 4))
    mesh = ring_jax.make_mesh(sequence=4)
    with caplog.at_level(logging.INFO, logger="ring_jax"):
        jax.jit(lambda x: ring_jax.dot_product_attention(x, x, x, is_causal=True, local_window_size=3, mesh=mesh))(x)
    assert "strategy auto: ring, the mask reaches 1 of 3 other shards" in caplog.text


def test_auto_counts_with_a_ring_that_goes_one_way():
    """Between the two lengths, one way and both, hops are hidden only if half of the keys go each way."""
    both = hidden_length(Sizes(16, 32, 8, 0, 2, balanced_causal=True), HARDWARE["TPU v5p"])[1]
    sizes = Sizes(16, 32, 8, round(1.5 * both), 2, balanced_causal=True)
    assert choose_strategy(sizes, "TPU v5p").strategy == "ulysses"
    assert choose_strategy(sizes._replace(local_length=round(2.1 * both)), "TPU v5p").strategy == "ring"


CALL = {"num_devices": 8, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("keywords", "strategy", "words"),
    [
        ({"seq_len": 131072, "hardware": "h100"}, "ring", "hide every hop"),
        ({"seq_len": 131072, "hardware": "NVIDIA H100 80GB HBM3"}, "ring", "NVLink"),
        ({"seq_len": 8192, "hardware": "h100"}, "ulysses", "gain nothing up to 16K tokens"),
        ({"seq_len": 8192, "hardware": "h100"}, "ulysses", "a hop waits 45 us"),
        ({"seq_len": 32768, "hardware": "h100", "link": "network"}, "ulysses", "too few to hide a hop"),
        ({"seq_len": 32768, "hardware": "h100", "link": "network"}, "ulysses", "50.0 GB/s a hop (the network"),
        ({"seq_len": 65536, "hardware": "v5e"}, "ring", "22.5 GB/s a hop (torus 8 without wraparound)"),
        (
            {"seq_len": 65536, "hardware": "h100", "link": "network", "num_heads": 4, "num_kv_heads": 4},
            "usp",
            "of a ring's bytes",
        ),
        ({"seq_len": 8192, "hardware": "h100", "num_heads": 3, "num_kv_heads": 1}, "all_gather", "one transfer"),
        ({"seq_len": 131072, "hardware": "h100", "layout": "contiguous"}, "ulysses", "busy for 53.3% of the time"),
        ({"seq_len": 65536, "hardware": "h100", "batch": 16}, "ring", "data parallelism"),
        ({"seq_len": 2**20, "hardware": "v5e", "batch": 64}, "ring", "Nothing fits the 17 GB of a device"),
        ({"seq_len": 8192, "hardware": "v5p", "num_devices": 1}, "ring", "one device"),
        ({"seq_len": 131072, "hardware": "h100", "new_tokens": 1}, "queries", "the ring does not pay"),
        ({"seq_len": 131072, "hardware": "h100", "new_tokens": 1}, "queries", "memory bound"),
        ({"seq_len": 131072, "hardware": "h100", "new_tokens": 65536}, "ring", "enough work"),
    ],
    ids=str,
)
def test_plans_say_what_to_use_and_why(keywords, strategy, words):
    found = ring_jax.plan(**CALL | keywords)
    assert found.strategy == strategy
    assert words in str(found)
    assert found.ring_pays == (strategy == "ring" and found.num_devices > 1)


def test_a_plan_is_plain_data():
    found = ring_jax.plan(seq_len=65536, hardware="v5p", **CALL)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["strategy"] == found.strategy and len(data["options"]) == len(found.options) == 4
    row = next(x for x in data["options"] if x["strategy"] == "ring")
    assert (
        row["total_s"] == found.option("ring").total_s == row["forward_s"] + row["backward_s"] > row["exposed_s"] >= 0
    )
    assert str(found).count("\n") >= 5
    with pytest.raises(ValueError, match="strategy='relay' is not among the options of this plan: ring"):
        found.option("relay")


def test_time_falls_with_devices_and_rises_with_length():
    def seconds(**keywords) -> float:
        return ring_jax.plan(**CALL | {"hardware": "v5p", "seq_len": 262144} | keywords).option("ring").total_s

    assert seconds(num_devices=16) < seconds() < seconds(seq_len=524288)
    assert seconds(local_window_size=4095, layout="contiguous") < 0.2 * seconds()
    assert seconds(two_directions=True) < seconds()


def test_the_plan_agrees_with_auto_where_hops_are_well_hidden():
    for kind in ("v5p", "h100", "v6e"):
        for length in (2**17, 2**20):
            found = ring_jax.plan(seq_len=length, hardware=kind, **CALL | {"num_devices": 8})
            sizes = Sizes(8, 32, 8, length // 8, 2, balanced_causal=True)
            device_kind = next(name for name, hardware in HARDWARE.items() if hardware.name == kind)
            assert found.strategy == choose_strategy(sizes, device_kind).strategy == "ring"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"hardware": "abacus"}, "hardware='abacus' is not in the table; known: v4, v5e"),
        ({"layout": "spiral"}, "layout='spiral' must be one of contiguous, striped, zigzag"),
        ({"seq_len": 1000}, "seq_len=1000 must be a positive multiple of 16 .* use 1008"),
        ({"num_kv_heads": 5}, "num_heads=32 must be a positive multiple of num_kv_heads=5"),
        ({"link": "copper"}, "link='copper' must be one of auto, fast, line, network"),
    ],
)
def test_plans_that_cannot_be(keywords, message):
    with pytest.raises(ValueError, match=message):
        ring_jax.plan(**CALL | {"seq_len": 65536, "hardware": "h100"} | keywords)
