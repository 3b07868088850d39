"""Closed forms against published tables, and against the programs that are compiled."""

import pytest
from programs import compile_call

from ring_jax import costs, hardware, links
from ring_jax.hardware import HARDWARE
from ring_jax.inspection import inspect

# Tokens a device from which a hop is hidden: not causal forward, balanced forward, balanced backward with float32
# gradients, for heads to key/value heads of 1, 4, 8 and 16; bfloat16, kernels at the peak, both directions on TPU.
HIDDEN = {
    "TPU v4": ((3056, 6111, 7333), (764, 1528, 1833), (382, 764, 917), (191, 382, 458)),
    "TPU v5 lite": ((2189, 4378, 5253), (547, 1094, 1313), (274, 547, 657), (137, 274, 328)),
    "TPU v5p": ((2550, 5100, 6120), (638, 1275, 1530), (319, 638, 765), (159, 319, 382)),
    "TPU v6 lite": ((5111, 10222, 12267), (1278, 2556, 3067), (639, 1278, 1533), (319, 639, 767)),
    "TPU7x": ((12817, 25633, 30760), (3204, 6408, 7690), (1602, 3204, 3845), (801, 1602, 1922)),
    "NVIDIA H100": ((2198, 4396, 5275), (549, 1099, 1319), (275, 549, 659), (137, 275, 330)),
    "NVIDIA H200": ((2198, 4396, 5275), (549, 1099, 1319), (275, 549, 659), (137, 275, 330)),
    "NVIDIA B200": ((2500, 5000, 6000), (625, 1250, 1500), (312, 625, 750), (156, 312, 375)),
}
INFINIBAND = ((19780, 39560, 47472), (4945, 9890, 11868), (2472, 4945, 5934), (1236, 2472, 2967))


def near(value: float):
    """0.1 %, or the half unit that the printed figure was rounded by."""
    return pytest.approx(value, rel=1e-3, abs=0.501)


@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_length_by_hardware(kind: str):
    found = HARDWARE[kind]
    for ratio, row in zip((1, 4, 8, 16), HIDDEN[kind], strict=True):
        sizes = {"kv_share": 1 / ratio, "itemsize": 2, "gradient_itemsize": 4}
        whole = costs.hidden_length(**sizes, flops=found.flops, rate=found.hop_bytes)
        half = costs.hidden_length(**sizes, flops=found.flops, rate=found.hop_bytes, share=0.5)
        assert (whole[0], *half) == tuple(near(x) for x in row), ratio


def test_hidden_length_between_hosts():
    h100 = HARDWARE["NVIDIA H100"]
    rate = links.single_link(h100, 8, "network").hop_rate()
    for ratio, row in zip((1, 4, 8, 16), INFINIBAND, strict=True):
        sizes = {"kv_share": 1 / ratio, "itemsize": 2, "gradient_itemsize": 4, "flops": h100.flops, "rate": rate}
        assert (costs.hidden_length(**sizes)[0], *costs.hidden_length(**sizes, share=0.5)) == tuple(map(near, row))


# Ring Attention, table 2: TFLOP/s, GB/s, shortest block and sequence a device in thousands of tokens.
@pytest.mark.parametrize(
    ("tflops", "rate", "block", "sequence"),
    [(312, 300, 1.0, 6.2), (123, 112, 1.1, 6.6), (275, 268, 1.0, 6.2), (196, 186, 1.1, 6.3), (312, 12.5, 24.5, 149.5)],
)
def test_the_paper_has_the_form_for_as_many_key_heads_as_heads(tflops, rate, block, sequence):
    sizes = {"kv_share": 1, "itemsize": 2, "gradient_itemsize": 2}
    found = costs.hidden_length(**sizes, flops=tflops * 1e12, rate=rate * 1e9)[0] / 1e3
    if rate > 100:
        assert round(found, 1) == block and round(6 * found, 1) == sequence
    else:  # the paper's own two figures of this row differ from 312 / 12.5 = 24.96 by 1.8 % and 0.2 %
        assert found == pytest.approx(block, rel=0.02) and 6 * found == pytest.approx(sequence, rel=2e-3)


# 32 heads, 8 key/value heads of 128, zigzag over 8 devices; 600 and 500 TFLOP/s, 370 GB/s, float32 gradients:
# FLOPs of a step, MB of a hop, milliseconds of step and hop, of the hop between hosts, of both backward.
WORKED = {
    131072: (2.199e12, 67.11, 3.665, 0.181, 1.342, 10.995, 0.544),
    65536: (5.498e11, 33.55, 0.916, 0.091, 0.671, 2.749, 0.272),
    32768: (1.374e11, 16.78, 0.229, 0.045, 0.336, 0.687, 0.136),
    8192: (8.59e9, 4.19, 0.014, 0.011, 0.084, 0.043, 0.034),
}


@pytest.mark.parametrize("length", WORKED)
def test_worked_examples(length: int):
    call = costs.make_call(seq_len=length, num_heads=32, num_kv_heads=8, head_dim=128)
    (share,) = set(costs.step_shares(call, 8))
    forward, backward = costs.step_flops(call, 8, share)
    sent = costs.hop_bytes(call, 8)
    link = links.single_link(HARDWARE["NVIDIA H100"], 8)._replace(latency=0)
    slow = links.single_link(HARDWARE["NVIDIA H100"], 8, "network")._replace(latency=0)
    found = (
        forward,
        sent.forward / 1e6,
        forward / 600e9,
        link.hop(sent.forward) * 1e3,
        slow.hop(sent.forward) * 1e3,
        backward / 500e9,
        link.hop(sent.backward) * 1e3,
    )
    units = (0, 0.005, *[0.00051] * 5)  # half a unit of the last printed place
    want = [pytest.approx(x, rel=1e-3, abs=u) for x, u in zip(WORKED[length], units, strict=True)]
    assert list(found) == want


def test_totals_of_the_worked_example():
    """128K: zigzag 29.32 ms, contiguous 54.98; all-gather 1.270 ms exposed of 469.8 MB, Ulysses 0.794 of 293.6."""
    call = costs.make_call(seq_len=131072, num_heads=32, num_kv_heads=8, head_dim=128)
    link = links.single_link(HARDWARE["NVIDIA H100"], 8)._replace(latency=0)
    for layout, milliseconds in (("zigzag", 29.32), ("contiguous", 54.98)):
        found = costs.attention_time(call._replace(layout=layout), "ring", link, (6e14, 5e14))
        assert found is not None and found.compute.forward * 1e3 == pytest.approx(milliseconds, rel=1e-3)
        assert found.exposed.forward == 0
    for strategy, megabytes, milliseconds in (("all_gather", 469.8, 1.270), ("ulysses", 293.6, 0.794)):
        sent, found = costs.sent_bytes(call, strategy, 8), costs.attention_time(call, strategy, link, (6e14, 5e14))
        assert sent is not None and sent.forward / 1e6 == pytest.approx(megabytes, rel=1e-3)
        assert found is not None and found.exposed.forward * 1e3 == pytest.approx(milliseconds, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "step", "hop"),
    [("TPU v5 lite", 6.98, 0.746), ("TPU v5p", 2.99, 0.373), ("TPU v6 lite", 1.49, 0.373), ("TPU7x", 0.596, 0.373)],
)
def test_worked_examples_on_tpu(kind: str, step: float, hop: float):
    """8,192 tokens, kernels at 0.4 of the peak, hops one way; the last by chip, which is two devices."""
    found, devices = HARDWARE[kind], HARDWARE[kind].per_chip
    call = costs.make_call(seq_len=65536, num_heads=32, num_kv_heads=8, head_dim=128)
    assert costs.step_flops(call, 8, 0.5)[0] / (0.4 * devices * found.flops) * 1e3 == pytest.approx(step, abs=0.00501)
    assert costs.hop_bytes(call, 8).forward / (devices * found.link_bytes) * 1e3 == pytest.approx(hop, rel=1e-3)


@pytest.mark.parametrize(("count", "bound"), [(2, 2 / 3), (4, 4 / 7), (8, 0.533), (64, 64 / 127)])
def test_contiguous_causal_keeps_little_more_than_half_busy(count: int, bound: float):
    call = costs.make_call(seq_len=1024 * count, num_heads=32, head_dim=128, layout="contiguous")
    assert costs.balance(call, count) == pytest.approx(bound, rel=1e-3)
    assert costs.balance(call._replace(layout="zigzag"), count) == 1
    assert costs.balance(call._replace(is_causal=False), count) == 1
    # Whole tiles on the diagonal: n / (n + 1) for n tiles in a block.
    assert costs.balance(call._replace(layout="striped"), count, tile=256) == pytest.approx(4 / 5)


def test_meta_threshold_of_moving_keys():
    """Llama 3 405B, 128 heads and 8 key/value heads: from 12.5 % new tokens on, however slow the link."""
    sizes = {"num_devices": 4, "kv_share": 8 / 128, "itemsize": 2, "flops": 8e14, "rate": 1e9}
    for new, moves in ((12_500, True), (12_499, False)):
        assert costs.keys_should_travel(new_tokens=new, cached_tokens=100_000 - new, **sizes) is moves
    # The other condition: so many tokens that their work hides the hops, N (F / W) e K / (2 heads).
    enough = 4 * 8e14 / 25e9 * 2 * (8 / 128) / 2
    for new, moves in ((int(enough), True), (int(enough) - 1, False)):
        assert costs.keys_should_travel(new_tokens=new, cached_tokens=10**6, **sizes | {"rate": 25e9}) is moves


@pytest.mark.parametrize(("heads", "kv_heads", "count"), [(32, 32, 2), (32, 8, 5), (64, 8, 9), (128, 8, 17)])
def test_ulysses_sends_less_from(heads: int, kv_heads: int, count: int):
    assert costs.ulysses_sends_less_from(heads, kv_heads) == count
    for devices in (2, 4, 8, 16, 32):
        call = costs.make_call(seq_len=64 * devices, num_heads=heads, num_kv_heads=kv_heads, head_dim=64)
        ring, other = (costs.sent_bytes(call, strategy, devices) for strategy in ("ring", "ulysses"))
        if kv_heads % devices == 0:  # otherwise Ulysses sends copies of key/value heads, too
            assert ring is not None and other is not None
            assert (other.forward < ring.forward) == (devices > count), devices


@pytest.mark.parametrize(
    ("peak", "bandwidth", "efficiency", "percents"),
    [
        (9.89e14, 3.35e12, 0.6, {1024: 86, 2048: 43, 4096: 22, 8192: 10.8, 16384: 5.4, 32768: 2.7}),
        (4.59e14, 2.46e12, 0.4, {1024: 36, 4096: 9.1, 8192: 4.6}),
    ],
)
def test_an_unfused_merge_costs(peak, bandwidth, efficiency, percents):
    for length, percent in percents.items():
        found = costs.merge_share(
            flops=peak, hbm_bandwidth=bandwidth, local_length=length, share=0.5, efficiency=efficiency
        )
        assert 100 * found == pytest.approx(percent, abs=0.55 if percent > 11 else 0.051)


@pytest.mark.parametrize(
    ("stages", "pieces", "repeats", "schedule", "bubble"),
    [
        (4, 4, 1, "gpipe", 0.4286),
        (8, 8, 1, "1f1b", 0.4667),
        (8, 32, 1, "gpipe", 0.1795),
        (8, 32, 2, "gpipe", 0.0986),
        (8, 32, 4, "gpipe", 0.0519),
        (8, 32, 1, "1f1b", 0.1795),
        (8, 32, 1, "zb-h1", 0.0680),
        (8, 32, 1, "zb-h2", 0),
    ],
)
def test_bubbles(stages, pieces, repeats, schedule, bubble):
    assert costs.pipeline_bubble(stages, pieces, repeats, schedule=schedule) == pytest.approx(bubble, abs=5e-5)


def test_microbatches_in_flight():
    found = {schedule: costs.in_flight(8, 32, schedule) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")}
    assert found == {"gpipe": 32, "1f1b": 8, "zb-h1": 8, "zb-h2": 15}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("strategy", "size", "heads", "keywords"),
    [
        ("ring", 4, (8, 2), {}),
        ("ring", 4, (8, 8), {}),  # queries travel backward
        ("ring", 4, (8, 2), {"layout": "contiguous", "local_window_size": (9, 0)}),
        ("all_gather", 4, (8, 2), {}),
        ("ulysses", 4, (8, 2), {}),  # key/value heads in copies
        ("ulysses", 2, (6, 2), {"is_causal": False}),
        ("usp", 4, (8, 2), {}),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_compiled_program(strategy, size, heads, keywords, backward):
    local, dims = 8, (6, 10)
    window = keywords.get("local_window_size", (None,))[0]
    call = costs.make_call(
        seq_len=local * size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dims[0],
        value_dim=dims[1],
        batch=2,
        itemsize=4,
        layout=keywords.get("layout", "zigzag"),
        is_causal=keywords.get("is_causal", True),
        window=window,
    )
    compiled = compile_call(size, local, strategy=strategy, heads=heads, dims=dims, backward=backward, **keywords)
    predicted = costs.sent_bytes(call, strategy, size)
    assert predicted is not None
    assert predicted[backward] == inspect(compiled).sent_bytes() > 0


def test_what_the_heads_do_not_allow():
    call = costs.make_call(seq_len=96, num_heads=4, head_dim=8)
    assert costs.sent_bytes(call, "ulysses", 3) is None
    assert costs.attention_memory(call, "ulysses", 3) is None
    assert costs.attention_time(call, "ulysses", links.single_link(HARDWARE["TPU v4"], 3), (1e14, 1e14)) is None


def test_memory_of_strategies():
    """Bytes by hand: 4 devices, 64 tokens each, 8 heads, 2 key/value heads of 16, bfloat16."""
    call = costs.make_call(seq_len=256, num_heads=8, num_kv_heads=2, head_dim=16)
    ring, gather = (costs.attention_memory(call, strategy, 4) for strategy in ("ring", "all_gather"))
    queries = 64 * 8 * (2 * 16 + 2 * 16 + 4 * 16 + 4)  # Q, out, its float32 sum, lse
    block = 64 * 2 * 32  # entries of K and V
    assert ring is not None and gather is not None
    assert ring.forward == queries + 2 * 2 * block
    assert ring.backward == ring.forward + 64 * 8 * (2 * 16 + 4 * 16) + 2 * 4 * block
    assert gather.forward == queries + 2 * 5 * block
    # More devices, the same tokens on each: a ring holds the same, an all-gather more.
    wide = call._replace(seq_len=1024)
    assert costs.attention_memory(wide, "ring", 16) == ring
    assert costs.attention_memory(wide, "all_gather", 16).forward == gather.forward + 2 * 12 * block


@pytest.mark.parametrize("name", ["v5p:4x4x8", "h200x8x16"])
def test_times_grow_with_the_slowest_link(name: str):
    """A ring that leaves the host, or an axis that does not close, waits for its slowest hop."""
    topology = hardware.parse_topology(name)
    call = costs.make_call(seq_len=32768, num_heads=8, num_kv_heads=8, head_dim=128)
    fast = links.single_link(topology.hardware, 8, "fast")
    slow = links.single_link(topology.hardware, 8, "line" if topology.platform == "tpu" else "network")
    found = [costs.attention_time(call, "ring", link, (1e14, 1e14)) for link in (fast, slow)]
    assert found[0].compute == found[1].compute and found[0].total < found[1].total
    assert slow.is_slow and not fast.is_slow
