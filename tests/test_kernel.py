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
from ring_jax.kernels import xla
from ring_jax.masks import Tokens

LENGTH = 30


@functools.partial(jax.jit, static_argnums=(0, 1))
def block(tiles: tuple[int, int], is_causal: bool):
    rng = np.random.default_rng(0)
    q, dout = (jnp.asarray(rng.normal(size=(2, 1, 2, 3, LENGTH, n)), jnp.float32) for n in (4, 5))
    kv = jnp.asarray(rng.normal(size=(2, 1, 2, LENGTH, 9)), jnp.float32)
    lse, delta = (jnp.asarray(rng.normal(size=(2, 1, 2, 3, LENGTH)), jnp.float32) for _ in range(2))
    rows = [documents(LENGTH, 8, seed) for seed in (0, 1)]
    segments, positions = (jnp.stack([jnp.asarray(row[i]) for row in rows]) for i in (0, 1))
    tokens = Tokens(positions if is_causal else None, segments)
    keywords = {"scale": 0.5, "is_causal": is_causal, "tiles": tiles}
    zero = jnp.zeros(lse.shape)
    carry = xla.Carry(jnp.zeros(dout.shape), zero + xla.EMPTY, zero)
    carry = xla.forward_block(carry, q, kv, tokens, tokens, **keywords)
    return *carry, *xla.backward_block(jnp.zeros(q.shape), q, kv, dout, lse + 4, delta, tokens, tokens, **keywords)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tile_sizes_do_not_matter(is_causal: bool):
    """Also sizes that do not divide the length: the last tile then overlaps the one before."""
    whole = block((LENGTH, LENGTH), is_causal)
    for tiles in ((15, 10), (7, 11), (1, 29)):
        for got, want in zip(block(tiles, is_causal), whole, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6 * max(1, np.abs(want[np.abs(want) < 1e30]).max()))


@given(st.integers(1, 5000), st.booleans())
@settings(deadline=None)
def test_tile_size_rule(length: int, zigzag: bool):
    chunk = length // 2 if zigzag and length % 2 == 0 else length
    tile = xla.tile_size(length, chunk)
    assert 1 <= tile <= min(xla.LARGEST_TILE, length)
    assert chunk % tile == 0 or tile >= min(xla.SMALLEST_TILE, chunk)
    assert -(-length // tile) <= 2 * max(xla.TILES_A_SIDE, 5000 // xla.SMALLEST_TILE)
    starts = masks.tile_starts(length, tile)
    assert starts[0] == 0 and starts[-1] + tile == length
    assert set((starts[:, None] + np.arange(tile)).ravel()) == set(range(length))


@given(st.integers(0, 10_000), st.sampled_from([1, 3, 4, 8, 16]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_no_live_tile_is_skipped(seed: int, tile: int, is_causal: bool):
    """The skip predicate may say yes for nothing, never no for something: random ids, unsorted, with padding."""
    rng = np.random.default_rng(seed)
    sides = []
    for _ in range(2):
        ids = rng.integers(0, 5, (2, 16)).astype(np.int32)
        positions = rng.integers(-(2**31), 2**31, (2, 16)).astype(np.int32)
        sides.append(Tokens(jnp.asarray(positions) if is_causal else None, jnp.asarray(ids)))
    bounds = [masks.tile_bounds(side, 16, tile) for side in sides]
    live = np.asarray(masks.tile_live(*bounds, is_causal=is_causal))
    shown = np.asarray(masks.visible(*sides, is_causal=is_causal))
    starts = masks.tile_starts(16, tile)
    for row, i, j in np.ndindex(live.shape):
        cut = slice(starts[i], starts[i] + tile), slice(starts[j], starts[j] + tile)
        assert live[row, i, j] or not shown[row][cut].any()
