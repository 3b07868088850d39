"""The strategy that "auto" takes: closed forms against a published table, and what is said about the choice."""

import logging

import jax
import jax.numpy as jnp
import pytest

import ring_jax
from ring_jax import planner
from ring_jax.planner import Sizes, choose_strategy, hidden_length

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
