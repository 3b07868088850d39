"""Bytes and hops of every strategy and schedule, read from the compiled program.

Table 4.4 of a performance model: with e bytes an entry, B rows, K key/value heads, N query heads, c tokens a shard and
P devices, a device sends forward

    ring, all-gather   e B K (H + Hv) c (P - 1)
    Ulysses            e B (N (H + Hv) + K (H + Hv)) c (P - 1) / P

and backward the same with e + e_g for e in a ring or all-gather (e_g: the dtype of dK and dV on the road); Ulysses
repeats its forward bytes.
"""

import math

import jax.numpy as jnp
import pytest
from programs import BATCH, compile_call

from ring_jax import Schedule
from ring_jax.inspection import inspect

LOCAL, HEADS, DIMS = 8, (8, 4), (6, 10)
ENTRY = 4 * BATCH * LOCAL * sum(DIMS)  # bytes of one head of K and V, or of Q and out, float32


def report(size: int, **keywords):
    keywords = {"heads": HEADS, "dims": DIMS} | keywords
    return inspect(compile_call(size, keywords.pop("local", LOCAL), **keywords))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_all_gather(size: int, backward: bool):
    found = report(size, strategy="all_gather", backward=backward)
    assert found.count("all-gather") == 1
    assert found.sent_bytes("all-gather") == ENTRY * HEADS[1] * (size - 1)
    assert found.count("reduce-scatter") == backward
    assert found.sent_bytes("reduce-scatter") == backward * ENTRY * HEADS[1] * (size - 1)
    assert found.count() == 1 + backward


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 4), (4, 4), (4, 2), (8, 2), (8, 8)])
def test_ulysses(size: int, kv_heads: int, backward: bool):
    """Key/value heads are sent to the devices that have query heads of theirs, and never expanded beyond."""
    found = report(size, strategy="ulysses", heads=(8, kv_heads), backward=backward)
    assert found.count("all-to-all") == found.count()
    sent_kv = max(kv_heads, size)
    # Forward Q, out and KV; backward dout, dQ and dKV: each query-side array has one of the two head sizes.
    assert found.sent_bytes() == ENTRY * (8 + sent_kv) * (size - 1) // size


@pytest.mark.parametrize("backward", [False, True])
def test_usp(backward: bool):
    """Four devices as two groups of two: Ulysses bytes of a pair, and a ring of two places."""
    found = report(4, strategy="usp", backward=backward)
    assert found.sent_bytes("all-to-all") == ENTRY * sum(HEADS) // 2
    # A place holds two shards of half of the heads.
    assert found.sent_bytes("collective-permute") == (1 + backward) * ENTRY * HEADS[1]
    assert {x.kind for x in found.collectives} == {"all-to-all", "collective-permute"}


@pytest.mark.parametrize(("size", "window"), [(8, 1), (8, 7), (8, 8), (8, 9), (8, 20), (8, 57), (4, 100), (5, 0)])
def test_a_window_is_a_halo(size: int, window: int):
    """Contiguous: ceil(w / c) hops, forward, and backward for keys and for gradients alike."""
    hops = min(size - 1, math.ceil(window / LOCAL))
    for backward in (False, True):
        found = report(size, layout="contiguous", local_window_size=(window, 0), backward=backward)
        assert found.count() == found.count("collective-permute")
        assert found.sent_bytes() == (1 + backward) * hops * ENTRY * HEADS[1]


def test_a_window_on_both_sides_goes_both_ways():
    found = report(8, layout="contiguous", local_window_size=(12, 3), is_causal=False)
    assert found.sent_bytes() == 3 * ENTRY * HEADS[1]  # two shards behind, one before


def test_a_window_in_zigzag_reaches_the_neighbors_of_both_chunks():
    """Shard r holds chunks r and 2P - 1 - r, so a short window meets shards r - 1, r and r + 1."""
    found = report(8, local_window_size=(3, 0))
    assert found.sent_bytes() == 2 * ENTRY * HEADS[1]


def test_chunks_are_static_where_positions_are():
    """Chunks of two shards: each shard meets its chunk's other half, one before or one behind."""
    found = report(8, layout="contiguous", chunk_size=2 * LOCAL, is_causal=False)
    assert found.sent_bytes() == 2 * ENTRY * HEADS[1]
    assert report(8, layout="contiguous", chunk_size=LOCAL).count() == 0


def test_an_order_without_a_name_skips_nothing():
    found = report(4, layout=None, local_window_size=(1, 0), packed=True)
    assert found.sent_bytes() >= 3 * ENTRY * HEADS[1]


def test_given_positions_are_trusted_inside_segments_only():
    """Without segment ids they may restart, which no promise covers: nothing is skipped but at run time."""
    assert report(8, layout="contiguous", local_window_size=(3, 0), packed=True).count() < 7
    positions = {"positions": jnp.arange(LOCAL)}
    found = report(8, layout="contiguous", local_window_size=(3, 0), **positions)
    assert found.sent_bytes() >= 7 * ENTRY * HEADS[1]


@pytest.mark.parametrize("backward", [False, True])
def test_two_directions(backward: bool):
    """Two permutes a step with half of the bytes each, one step on and one step back."""
    found = report(4, schedule=Schedule(two_directions=True), backward=backward, layout="contiguous")
    assert found.sent_bytes() == (1 + backward) * 3 * ENTRY * HEADS[1]
    block = ENTRY * HEADS[1] // 2
    assert {x.bytes for x in found.collectives} <= {block, 2 * block}  # backward a hop may carry K, V and gradient
    shifts = {shift: sum(x.bytes * x.runs for x in found.collectives if x.shift % 4 == shift) for shift in (1, 3)}
    assert shifts[1] == shifts[3] == found.sent_bytes() // 2


@pytest.mark.parametrize(("heads", "sides"), [((4, 4), "queries"), ((4, 2), "keys")])
@pytest.mark.parametrize("dtype", ["float32"])
def test_the_cheaper_side_travels_backward(heads: tuple[int, int], sides: str, dtype: str):
    """With as many key/value heads as heads Q, dO, lse, delta and dQ are less than K, V, dK and dV."""
    dims = (16, 16)
    a_token = 4 * BATCH * LOCAL
    by_keys = 2 * a_token * heads[1] * sum(dims)
    by_queries = a_token * heads[0] * (sum(dims) + 2 + dims[0])
    assert (by_queries < by_keys) == (sides == "queries")
    found = report(4, heads=heads, dims=dims, backward=True, dtype=dtype)
    assert found.sent_bytes() == 3 * min(by_keys, by_queries)
    other = Schedule(rotate="keys" if sides == "queries" else "queries")
    assert report(4, heads=heads, dims=dims, backward=True, schedule=other).sent_bytes() == 3 * max(by_keys, by_queries)


def test_gradients_travel_in_the_dtype_that_was_asked_for():
    found = report(4, backward=True, schedule=Schedule(gradient_dtype="bfloat16", rotate="keys"))
    narrow = sum(x.bytes * x.runs for x in found.collectives if x.dtype == "bf16")
    # A CPU may widen a bfloat16 message; then the number of entries is what counts.
    assert narrow == 3 * ENTRY * HEADS[1] // 2 or found.sent_bytes() == 6 * ENTRY * HEADS[1]


@pytest.mark.parametrize("backward", [False, True])
def test_two_levels(backward: bool):
    """Eight devices as two groups of four: the slow links carry one hop for each group but the own."""
    schedule = Schedule(inner_size=4, rotate="keys")
    found = report(8, schedule=schedule, backward=backward, layout="contiguous")
    crossing = [x for x in found.collectives if x.shift is not None and x.shift % 4 == 0]
    assert sum(x.runs * x.bytes for x in crossing) == (1 + backward) * ENTRY * HEADS[1]
    inside = sum(x.runs * x.bytes for x in found.collectives) - sum(x.runs * x.bytes for x in crossing)
    assert inside == (1 + backward) * 2 * 3 * ENTRY * HEADS[1]
