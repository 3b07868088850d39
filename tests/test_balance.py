"""Balanced orders: even work on documents as they are, counted by the kernel's own rule, and attention unchanged."""

import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ring_jax
from ring_jax import layouts, masks, swaps
from ring_jax.balance import balanced_permutation, live_tiles


def unevenness(work: np.ndarray) -> tuple[float, float]:
    """(slowest shard, sum of the slowest at each ring step), both over the mean work of a shard."""
    mean = work.sum() / len(work)
    return work.sum(1).max() / mean, work.max(0).sum() / mean


def packed(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Segment ids of documents one after the other; where they are too few, they come again under new ids."""
    lengths = np.tile(lengths, -(-seq_len // lengths.sum()))
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)[:seq_len]


def corpus(name: str) -> np.ndarray:
    """Lengths in bytes of files of the standard library."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    pattern = {"top": "*.py", "asyncio": "asyncio/*.py", "small": "encodings/*.py", "shuffled": "*/*.py"}[name]
    files = [f for f in sorted(root.glob(pattern)) if not f.parent.name.endswith("-packages")]
    lengths = np.array([size for f in files if (size := f.stat().st_size)])
    return np.random.default_rng(0).permutation(lengths) if name == "shuffled" else lengths


def check_order(order: np.ndarray, num_shards: int, tile: int) -> None:
    """A permutation of whole tiles, which stay in increasing order on each shard."""
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(len(order)))
    tiles = order.reshape(-1, tile)
    np.testing.assert_array_equal(tiles - tiles[:, :1], np.broadcast_to(np.arange(tile), tiles.shape))
    assert (tiles[:, 0] % tile == 0).all()
    assert (np.diff(order.reshape(num_shards, -1), axis=1) > 0).all()


@pytest.mark.parametrize("name", ["top", "asyncio", "small", "shuffled"])
def test_packed_files_are_even(name: str):
    sizes = {"num_shards": 8, "tile": 128}
    ids = packed(corpus(name), 65536)
    order = balanced_permutation(ids, **sizes)
    check_order(order, **sizes)
    zigzag, balanced = (unevenness(live_tiles(x, ids, **sizes)) for x in ("zigzag", order))
    for kind, (shards, steps) in (("zigzag", zigzag), ("balanced", balanced)):
        print(f"{name:8} {len(np.unique(ids)):3} documents {kind:8} shards {shards:.3f} steps {steps:.3f}")
    assert balanced[0] <= 1.05
    assert balanced[1] <= 1.10
    assert balanced[1] <= zigzag[1] * 1.01


RULES = {
    "causal": {},
    "all to all": {"is_causal": False},
    "causal window": {"local_window_size": 700},
    "window": {"is_causal": False, "local_window_size": (300, 1200)},
    "chunks": {"chunk_size": 1000},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("documents", [1, 12])
def test_every_rule_is_even(rule: str, documents: int):
    lengths = np.random.default_rng(documents).integers(200, 3000, documents) if documents > 1 else np.array([16384])
    ids, arguments = packed(lengths, 16384), {"num_shards": 4, "tile": 64, **RULES[rule]}
    order = balanced_permutation(ids, **arguments)
    check_order(order, 4, 64)
    shards, steps = unevenness(live_tiles(order, ids, **arguments))
    only_sums = unevenness(live_tiles(balanced_permutation(ids, steps=False, **arguments), ids, **arguments))
    assert only_sums[0] <= 1.02 and shards <= 1.02
    assert steps <= min(1.10, only_sums[1])


def test_one_causal_document_is_as_even_as_zigzag():
    sizes = {"seq_len": 8192, "num_shards": 8, "tile": 64}
    assert unevenness(live_tiles("zigzag", **sizes)) == (1, 1)
    assert unevenness(live_tiles(balanced_permutation(**sizes), **sizes)) <= (1.001, 1.02)


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.none() | st.integers(1, 9),
    st.booleans(),
    st.sampled_from(("balanced", *layouts.LAYOUTS)),
    st.integers(0, 999),
)
@settings(deadline=None, max_examples=15)
def test_counts_are_those_of_the_kernels_rule(shards, each, tile, causal, window, chunk, restart, order, seed):
    rng = np.random.default_rng(seed)
    length = 2 * shards * each * tile  # even, for zigzag
    lengths = rng.integers(1, 12, length)
    ids = np.stack([np.repeat(rng.permutation(length) % 7, lengths)[:length] for _ in range(2)])
    positions = np.concatenate([np.arange(n) for n in lengths])[:length] if restart else None
    arguments = {"is_causal": causal, "local_window_size": window, "chunk_size": chunk, "positions": positions}
    sizes = {"num_shards": shards, "tile": tile}
    if order == "balanced":
        order = balanced_permutation(ids, **sizes, **arguments)
        check_order(order, **sizes)
    work = live_tiles(order, ids, **sizes, **arguments)
    index = ring_jax.permutation(order, length, shards) if isinstance(order, str) else order
    places = (np.arange(length) if positions is None else positions)[index]
    tokens = masks.Tokens(jnp.asarray(np.stack([places, places]), jnp.int32), jnp.asarray(ids[:, index], jnp.int32))
    bounds = masks.tile_bounds(tokens, length, tile)
    live = np.asarray(masks.tile_live(bounds, bounds, masks.Rules(causal, window, chunk))).sum(0)
    for shard in range(shards):
        for step in range(shards):
            rows, columns = (slice(r % shards * 2 * each, (r % shards + 1) * 2 * each) for r in (shard, shard - step))
            assert work[shard, step] == live[rows, columns].sum()


def test_rows_are_balanced_together():
    rng = np.random.default_rng(0)
    ids = np.stack([packed(rng.integers(50, 2000, 30), 8192) for _ in range(3)])
    sizes = {"num_shards": 4, "tile": 32}
    order = balanced_permutation(ids, **sizes)
    work = live_tiles(order, ids, **sizes)
    np.testing.assert_array_equal(work, sum(live_tiles(order, row, **sizes) for row in ids))
    assert unevenness(work)[0] <= 1.02
    np.testing.assert_array_equal(order, balanced_permutation(jnp.asarray(ids, jnp.int32), **sizes))


def test_padding_is_no_work():
    ids = np.where(np.arange(4096) < 2000, 1, 0)
    sizes = {"num_shards": 4, "tile": 32}
    work = live_tiles(balanced_permutation(ids, **sizes), ids, **sizes)
    assert work.sum() == 63 * 64 / 2
    assert unevenness(work)[0] <= 1.01
    order = balanced_permutation(0 * ids, **sizes)
    check_order(order, **sizes)
    assert not live_tiles(order, 0 * ids, **sizes).any()


@pytest.mark.parametrize(("length", "shards"), [(64, 1), (64, 4), (128, 4)])
def test_few_tiles(length: int, shards: int):
    order = balanced_permutation(seq_len=length, num_shards=shards, tile=16)
    check_order(order, shards, 16)
    if length == 128:
        np.testing.assert_array_equal(order, ring_jax.permutation("zigzag", 128, 4))


def test_a_mask_of_tiles():
    mask = np.random.default_rng(0).random((64, 64)) < np.linspace(0.05, 0.9, 64)[:, None]
    arguments = {"seq_len": 1024, "num_shards": 4, "tile": 16, "mask": mask}
    for causal in (False, True):
        order = balanced_permutation(**arguments, is_causal=causal)
        work = live_tiles(order, **arguments, is_causal=causal)
        assert work.sum() == (mask & np.tri(64, dtype=bool) if causal else mask).sum()
        assert unevenness(work)[0] <= 1.02
        assert unevenness(work)[1] < unevenness(live_tiles("contiguous", **arguments, is_causal=causal))[1]
    assert live_tiles("zigzag", **arguments, is_causal=False).sum() == mask.sum()
    # A striped tile holds tokens of four tiles, and is live where one of their pairs is.
    index = ring_jax.permutation("striped", 1024, 4) // 16
    tokens = mask[np.ix_(index, index)].reshape(64, 16, 64, 16).any((1, 3))
    assert live_tiles("striped", **arguments, is_causal=False).sum() == tokens.sum()


def test_swaps_are_scored_as_they_turn_out():
    rng = np.random.default_rng(0)
    pairs, owner = rng.integers(0, 5, (40, 40)).astype(np.int16), np.arange(40) % 5
    onehot = np.eye(5)[owner]
    work = swaps._Work(pairs @ onehot, pairs.T @ onehot, onehot.T @ pairs @ onehot)
    for _ in range(20):
        i, j = rng.permutation(np.flatnonzero(owner == 2)), rng.permutation(np.flatnonzero(owner != 2))[:8]
        score = swaps._score_swaps(work, pairs, i, j, 2, owner[j], np.inf)
        swaps._swap(work, pairs, i[3], j[3], 2, owner[j[3]])
        owner[i[3]], owner[j[3]] = owner[j[3]], 2
        onehot = np.eye(5)[owner]
        np.testing.assert_array_equal(work.total, onehot.T @ pairs @ onehot)
        np.testing.assert_array_equal(work.by_query, pairs @ onehot)
        np.testing.assert_array_equal(work.by_key, pairs.T @ onehot)
        fresh = swaps._score_swaps(work, pairs, i, j, 2, owner[j], -1)
        assert abs(fresh[0] - score[4]) < 100  # of 2**40: rounding of the powers
        assert (fresh[1:] == np.iinfo(np.int64).max).all()  # above the limit


@pytest.mark.parametrize("restart", [False, True])
def test_attention_in_the_balanced_order(restart: bool):
    length, lengths = 256, np.array([90, 7, 60, 40, 30])
    ids = np.concatenate([packed(lengths, 227), np.zeros(29, np.int64)])
    positions = np.concatenate([np.arange(n) for n in (*lengths, 29)]) if restart else np.arange(length)
    order = balanced_permutation(ids, positions=positions, num_shards=4, tile=16)
    assert (order != np.arange(length)).any()
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, length, heads, 8)).astype("float32") for heads in (4, 2, 2))
    expected = ring_jax.reference_attention(q, k, v, is_causal=True, segment_ids=ids, positions=positions)
    mesh = ring_jax.make_mesh(sequence=4)

    @jax.jit
    def attend(q, k, v, ids, positions):
        return ring_jax.dot_product_attention(
            q, k, v, is_causal=True, segment_ids=ids, positions=positions, layout=None, mesh=mesh
        )

    out = attend(*(x[:, order] for x in (q, k, v)), ids[order], positions[order])
    np.testing.assert_allclose(np.asarray(out)[:, np.argsort(order)], expected, rtol=0, atol=5e-6)


REFUSED = [
    ({"seq_len": 1000}, r"seq_len=1000 must be .* multiple of 64 \(4 shards \* tile 16\); pad to 1024 or use tile=10"),
    ({"seq_len": 1001}, r"seq_len=1001 must be .* multiple of 64 \(4 shards \* tile 16\); pad to 1024$"),
    ({"seq_len": 0}, "seq_len=0 must be a positive multiple of 64.*pad to 64$"),
    ({"seq_len": 2**22}, "tile=16 cuts 4194304 tokens into 262144 tiles, .* at most 16384; use tile=256"),
    ({}, "length of the sequence is not known: pass segment_ids, or seq_len"),
    ({"seq_len": 64, "num_shards": 0}, "num_shards=0 must be a whole number, at least 1"),
    ({"seq_len": 64, "tile": -1}, "tile=-1 must be a whole number, at least 1"),
    ({"seq_len": 64, "chunk_size": 0}, "chunk_size=0 must be a whole number, at least 1"),
    ({"seq_len": 64, "local_window_size": (1, -1)}, r"local_window_size=\(1, -1\) must not be negative"),
    ({"segment_ids": np.ones(64, int), "seq_len": 128}, "one length; got segment_ids 64, seq_len 128. Leave seq_len"),
    ({"segment_ids": np.ones((1, 1, 64), int)}, r"segment_ids must have shape \[T\] or \[B, T\]; got \(1, 1, 64\)"),
    ({"segment_ids": np.ones((2, 64), int), "positions": np.ones((3, 64), int)}, r"same rows.*got \[2, 3\] rows"),
    ({"segment_ids": np.ones(64)}, "segment_ids must be integers; got float64. Cast"),
    ({"segment_ids": (np.ones(64, int), np.ones(64, int))}, "segment_ids must be one array"),
    ({"seq_len": 64, "mask": np.ones((4, 3), bool)}, r"mask must be bool \[4, 4\], .*; got bool \[4, 3\]"),
    ({"seq_len": 64, "mask": np.ones((4, 4))}, r"mask must be bool \[4, 4\], .*; got float64 \[4, 4\]"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_input_is_refused(arguments: dict, message: str):
    arguments = {"num_shards": 4, "tile": 16, **arguments}
    for call in (balanced_permutation, lambda ids=None, **rest: live_tiles("zigzag", ids, **rest)):
        with pytest.raises((ValueError, TypeError), match=message):
            call(arguments.get("segment_ids"), **{k: v for k, v in arguments.items() if k != "segment_ids"})


def test_bad_order_is_refused():
    sizes = {"seq_len": 64, "num_shards": 2, "tile": 16}
    with pytest.raises(
        ValueError, match=r"order of shape \(64,\) must be a permutation of range\(64\); pass the result"
    ):
        live_tiles(np.zeros(64, int), **sizes)
    with pytest.raises(ValueError, match="did you mean"):
        live_tiles("zigzak", **sizes)
