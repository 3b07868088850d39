"""The block kernel by itself: any tile size gives the same result, and the tile rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import documents
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_jax import masks
from ring_jax.kernels import protocol, tiles, xla
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores
from ring_jax.masks import Rules, Tokens

LENGTH = 30


@functools.partial(jax.jit, static_argnums=(0, 1))
def block(sizes: tuple[int, int], rules: Rules):
    rng = np.random.default_rng(0)
    q, dout = (jnp.asarray(rng.normal(size=(2, 1, 2, 3, LENGTH, n)), jnp.float32) for n in (4, 5))
    kv = jnp.asarray(rng.normal(size=(2, 1, 2, LENGTH, 9)), jnp.float32)
    lse, delta = (jnp.asarray(rng.normal(size=(2, 1, 2, 3, LENGTH)), jnp.float32) for _ in range(2))
    rows = [documents(LENGTH, 8, seed) for seed in (0, 1)]
    segments, positions = (jnp.stack([jnp.asarray(row[i]) for row in rows]) for i in (0, 1))
    tokens = Tokens(positions if rules.read_positions else None, segments)
    queries, keys, scores = Queries(q, tokens), Keys(kv, tokens), Scores(0.5, rules=rules)
    zero = jnp.zeros(lse.shape)
    carry = protocol.Carry(jnp.zeros(dout.shape), zero + protocol.empty("float32"), zero)
    carry = xla.forward_block(carry, queries, keys, Pairs(), scores, sizes)
    sums, cotangents = protocol.Gradients(0 * q, 0 * kv, None, ()), protocol.Cotangents(dout, lse + 4, delta, None)
    sums = xla.backward_block(sums, queries, cotangents, keys, Pairs(), scores, sizes)
    return *carry, sums.query, sums.keys


@pytest.mark.parametrize("rules", [Rules(), Rules(is_causal=True), Rules(window=(3, 2), chunk_size=7)], ids=str)
def test_tile_sizes_do_not_matter(rules: Rules):
    """Also sizes that do not divide the length: the last tile then overlaps the one before."""
    whole = block((LENGTH, LENGTH), rules)
    for sizes in ((15, 10), (7, 11), (1, 29)):
        for got, want in zip(block(sizes, rules), whole, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6 * max(1, np.abs(want[np.abs(want) < 1e30]).max()))


@given(st.integers(1, 5000), st.booleans())
@settings(deadline=None)
def test_tile_size_rule(length: int, zigzag: bool):
    chunk = length // 2 if zigzag and length % 2 == 0 else length
    tile = tiles.tile_size(length, chunk)
    assert 1 <= tile <= min(tiles.LARGEST_TILE, length)
    assert chunk % tile == 0 or tile >= min(tiles.SMALLEST_TILE, chunk)
    assert -(-length // tile) <= 2 * max(tiles.TILES_A_SIDE, 5000 // tiles.SMALLEST_TILE)
    starts = masks.tile_starts(length, tile)
    assert starts[0] == 0 and starts[-1] + tile == length
    assert set((starts[:, None] + np.arange(tile)).ravel()) == set(range(length))


ANY_RULES = st.builds(
    Rules,
    is_causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6)),
    chunk_size=st.none() | st.integers(1, 9),
    mask_fn=st.none(),
)


@given(st.integers(0, 10_000), st.sampled_from([1, 3, 4, 8, 16]), ANY_RULES, st.sampled_from([40, 2**31]))
@settings(deadline=None, max_examples=80)
def test_no_live_tile_is_skipped(seed: int, tile: int, rules: Rules, end: int):
    """The skip predicate may say yes for nothing, never no for something: random ids, unsorted, with padding."""
    rng = np.random.default_rng(seed)
    sides = []
    for _ in range(2):
        ids = rng.integers(0, 5, (2, 16)).astype(np.int32)
        positions = rng.integers(end - 40, end, (2, 16)).astype(np.int32)
        sides.append(Tokens(jnp.asarray(positions) if rules.read_positions else None, jnp.asarray(ids)))
    bounds = [masks.tile_bounds(side, 16, tile) for side in sides]
    live = np.asarray(masks.tile_live(*bounds, rules))
    shown = np.asarray(masks.visible(*sides, rules))
    starts = masks.tile_starts(16, tile)
    for row, i, j in np.ndindex(live.shape):
        cut = slice(starts[i], starts[i] + tile), slice(starts[j], starts[j] + tile)
        assert live[row, i, j] or not shown[row][cut].any()


@pytest.mark.parametrize(("dtype", "full"), [("float32", True), ("bfloat16", False)])
def test_products_of_float32_are_not_left_to_the_platform(dtype: str, full: bool):
    """On a CPU the precision that a program asks for changes nothing; on TPU and GPU the default rounds float32."""
    x = jax.ShapeDtypeStruct((1, 1, 1, 1, 64, 8), dtype)
    kv = jax.ShapeDtypeStruct((1, 1, 1, 64, 16), dtype)
    row = jax.ShapeDtypeStruct(x.shape[:-1], "float32")
    tokens, pairs, scores, sizes = Tokens(None, None), Pairs(), Scores(0.5), (64, 64)

    def both(q, kv, row, wide):
        queries, keys, sums = Queries(q, tokens), Keys(kv, tokens), protocol.Gradients(wide, 0 * kv, None, ())
        carry = xla.forward_block(protocol.Carry(wide, row, row), queries, keys, pairs, scores, sizes)
        sums = sums._replace(keys=sums.keys.astype("float32"))
        given = protocol.Cotangents(q, row, row, None)
        return carry, xla.backward_block(sums, queries, given, keys, pairs, scores, sizes)

    text = jax.jit(both).lower(x, kv, row, jax.ShapeDtypeStruct(x.shape, "float32")).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert [line.count("HIGHEST") for line in products] == [2 * full] * 7
