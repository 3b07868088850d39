"""The block kernel in plain XLA: tiles of queries against tiles of keys, dead tiles never visited.

A kernel is two functions on one block of keys and values, with the softmax state carried in and out:

    forward_block(carry, q, kv, ...)  -> carry          carry = unnormalized output, running maximum, running sum
    backward_block(dq, q, kv, dout, lse, delta, ...) -> (dq, dkv)

Shapes (R rows with a mask of their own, b batch rows that share one; R * b = B): q ``[R,b,K,G,T,H]``, keys and values
side by side in kv ``[R,b,K,S,H+Hv]``, softmax statistics ``[R,b,K,G,T]``. Scores, statistics and all accumulators are
float32 (float64 for float64 inputs), and so are the probabilities and the gradients of the scores: rounded to bfloat16
they would make the error of dq and dv up to twice that of `jax.nn.dot_product_attention`.

For each query tile the live key tiles are listed first and the loop runs over that list alone, so that a causal or
packed block costs what its mask needs. A row that has seen nothing has maximum `EMPTY`, sum 0 and output 0: masked
scores are -inf and the maximum is never below `EMPTY`, which is finite, so exp(-inf - maximum) is 0 and never NaN.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ring_jax import masks
from ring_jax.masks import Tokens

EMPTY = float(np.finfo(np.float32).min)
"""Running maximum of a row that has seen no key."""

SMALLEST_TILE, LARGEST_TILE, TILES_A_SIDE, MANY_HEADS = 64, 512, 64, 8
"""64 tokens measured best on CPU for 8 heads, 128 for 2 (benchmarks/attention.py, the quickstart). Longer blocks take
larger tiles, so that the lists of tiles stay short: 64 by 64 up to 32,768 local tokens."""


class Carry(NamedTuple):
    """Online-softmax state of every query: out = sum exp(s - maximum) v, total = sum exp(s - maximum)."""

    out: Array  # [R, b, K, G, T, Hv]
    maximum: Array  # [R, b, K, G, T]
    total: Array  # [R, b, K, G, T]


def tile_size(length: int, chunk: int, num_heads: int = MANY_HEADS) -> int:
    """Tokens in a tile for ``length`` local tokens whose positions run in chunks of ``chunk``.

    The largest divisor of the chunk up to the wanted size, so that no tile straddles two zigzag chunks (such a tile
    would be live for nearly every query). Where that would be tiny, a full tile and an overlapping last one.
    ``num_heads`` counts what one tile computes side by side: heads, and batch rows that share a mask.
    """
    smallest = SMALLEST_TILE if num_heads >= MANY_HEADS else 2 * SMALLEST_TILE
    wanted = min(LARGEST_TILE, max(smallest, length // TILES_A_SIDE))
    best = max(size for size in range(1, min(wanted, chunk) + 1) if chunk % size == 0)
    return best if best >= min(wanted // 2, chunk) else min(wanted, length)


def _live_lists(live: Array) -> tuple[Array, Array]:
    """For each row of ``live [R, m, n]``: the indices of its live entries first, and how many they are."""
    return jnp.argsort(~live, axis=-1, stable=True).astype(jnp.int32), live.sum(-1, dtype=jnp.int32)


class _Tiling(NamedTuple):
    """The tiles of one block: sizes, starts, which pairs are live, and the mask inside a pair."""

    query: Tokens
    key: Tokens
    is_causal: bool
    lengths: tuple[int, int]
    sizes: tuple[int, int]

    @property
    def starts(self) -> tuple[Array, Array]:
        query, key = (jnp.asarray(masks.tile_starts(*x)) for x in zip(self.lengths, self.sizes, strict=True))
        return query, key

    def live(self) -> Array:
        """``[R, nq, nk]``, see `masks.tile_live`."""
        sides = zip((self.query, self.key), self.lengths, self.sizes, strict=True)
        return masks.tile_live(*(masks.tile_bounds(*side) for side in sides), is_causal=self.is_causal)

    def mask(self, row: Array, i: Array, j: Array) -> Array | None:
        """The mask of query tile i and key tile j, or None where every query sees every key.

        A last tile that was moved back to lie inside repeats tokens of the one before it: those are masked out.
        """
        starts = self.starts[0][i], self.starts[1][j]
        tokens = (
            Tokens(*(None if x is None else _slice(x, row, start, size, 1)[None] for x in side))
            for side, start, size in zip((self.query, self.key), starts, self.sizes, strict=True)
        )
        mask = masks.visible(*tokens, is_causal=self.is_causal)
        for index, start, length, size, shape in zip(
            (i, j), starts, self.lengths, self.sizes, ((1, -1, 1), (1, 1, -1)), strict=True
        ):
            if length % size:
                first_seen = (start + jnp.arange(size) >= index * size).reshape(shape)
                mask = first_seen if mask is None else mask & first_seen
        return None if mask is None else mask[0]


def _corner(x: Array, row: Array, start: Array, axis: int) -> list[Array]:
    """Indices of a slice: ``row`` of the leading axis, ``start`` of ``axis``, 0 elsewhere."""
    index = [jnp.int32(0)] * x.ndim
    index[0], index[axis] = jnp.asarray(row, jnp.int32), start
    return index


def _slice(x: Array, row: Array, start: Array, size: int, axis: int) -> Array:
    """Row ``row`` of ``x`` (its leading axis dropped), and ``size`` tokens of axis ``axis`` from ``start``."""
    shape = [1, *x.shape[1:]]
    shape[axis] = size
    return lax.dynamic_slice(x, _corner(x, row, start, axis), shape)[0]


def _put(x: Array, tile: Array, row: Array, start: Array, axis: int) -> Array:
    """Undo `_slice`: ``x`` with the tile written in its place."""
    return lax.dynamic_update_slice(x, tile[None], _corner(x, row, start, axis))


def _scores(q: Array, k: Array, scale: float, mask: Array | None, dtype) -> Array:
    """Scaled scores of one tile, -inf where the mask forbids."""
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=dtype) * jnp.asarray(scale, dtype)
    return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


def _loop(count: Array, body, carry):
    """A loop of ``count`` steps; its counter starts from a value that varies like ``count``, which vmap relies on."""
    return lax.fori_loop(jnp.zeros_like(count), count, body, carry)


def forward_block(
    carry: Carry,
    q: Array,
    kv: Array,
    query: Tokens,
    key: Tokens,
    *,
    scale: float,
    is_causal: bool,
    tiles: tuple[int, int],
) -> Carry:
    """Fold one block of keys and values into the softmax state of every query."""
    head, dtype = q.shape[-1], carry.out.dtype
    tiling = _Tiling(query, key, is_causal, (q.shape[4], kv.shape[3]), tiles)
    order, counts = _live_lists(tiling.live())
    query_starts, key_starts = tiling.starts
    num_rows, num_q = q.shape[0], len(query_starts)

    def query_tile(step: Array, carry: Carry) -> Carry:
        row, i = step // num_q, step % num_q
        start = query_starts[i]
        q_tile = _slice(q, row, start, tiles[0], 4)

        def key_tile(n: Array, tile: Carry) -> Carry:
            j = order[row, i, n]
            kv_tile = _slice(kv, row, key_starts[j], tiles[1], 3)

            scores = _scores(q_tile, kv_tile[..., :head], scale, tiling.mask(row, i, j), dtype)
            maximum = jnp.maximum(tile.maximum, scores.max(-1))
            weights = jnp.exp(scores - maximum[..., None])
            rescale = jnp.exp(tile.maximum - maximum)
            values = jnp.einsum("bkgts,bksh->bkgth", weights, kv_tile[..., head:].astype(dtype))
            return Carry(tile.out * rescale[..., None] + values, maximum, tile.total * rescale + weights.sum(-1))

        tile = Carry(*(_slice(x, row, start, tiles[0], 4) for x in carry))
        tile = _loop(counts[row, i], key_tile, tile)
        return Carry(*(_put(x, y, row, start, 4) for x, y in zip(carry, tile, strict=True)))

    return lax.fori_loop(0, num_rows * num_q, query_tile, carry)


def backward_block(
    dq: Array,
    q: Array,
    kv: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    query: Tokens,
    key: Tokens,
    *,
    scale: float,
    is_causal: bool,
    tiles: tuple[int, int],
) -> tuple[Array, Array]:
    """Add one block's part to dq, and return the block's dk and dv side by side.

    ``lse`` is the *global* log-sum-exp (0 for a row that sees nothing) and ``delta`` is sum(dout * out) - dlse of the
    *final* output, so that p = exp(s - lse), dv = p^T dout, ds = p * (dout v^T - delta), dq = ds k, dk = ds^T q.
    """
    head, dtype = q.shape[-1], dq.dtype
    tiling = _Tiling(query, key, is_causal, (q.shape[4], kv.shape[3]), tiles)
    order, counts = _live_lists(jnp.swapaxes(tiling.live(), 1, 2))
    query_starts, key_starts = tiling.starts
    num_rows, num_k = q.shape[0], len(key_starts)

    def key_tile(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dq, dkv = carry
        row, j = step // num_k, step % num_k
        start = key_starts[j]
        kv_tile = _slice(kv, row, start, tiles[1], 3)
        k_tile, v_tile = kv_tile[..., :head], kv_tile[..., head:]

        def query_tile(n: Array, carry):
            dq, dk_tile, dv_tile = carry
            i = order[row, j, n]
            begin = query_starts[i]
            q_tile, do_tile, lse_tile, delta_tile, dq_tile = (
                _slice(x, row, begin, tiles[0], 4) for x in (q, dout, lse, delta, dq)
            )

            # Scores are held as [keys, queries] here: then no product needs a transposed copy of a whole tile.
            mask = tiling.mask(row, i, j)
            scores = jnp.einsum("bksh,bkgth->bksgt", k_tile, q_tile, preferred_element_type=dtype)
            scores = scores * jnp.asarray(scale, dtype)
            if mask is not None:
                scores = jnp.where(mask.T[:, None], scores, -jnp.inf)
            p = jnp.exp(scores - lse_tile[:, :, None])
            dp = jnp.einsum("bksh,bkgth->bksgt", v_tile, do_tile, preferred_element_type=dtype)
            ds = p * (dp - delta_tile[:, :, None]) * jnp.asarray(scale, dtype)
            dv_tile += jnp.einsum("bksgt,bkgth->bksh", p, do_tile.astype(dtype))
            dk_tile += jnp.einsum("bksgt,bkgth->bksh", ds, q_tile.astype(dtype))
            dq_tile += jnp.moveaxis(jnp.einsum("bksh,bksgt->bkhgt", k_tile.astype(dtype), ds), 2, -1)
            return _put(dq, dq_tile, row, begin, 4), dk_tile, dv_tile

        dkv_tile = _slice(dkv, row, start, tiles[1], 3)
        start_values = dq, dkv_tile[..., :head], dkv_tile[..., head:]
        dq, dk_tile, dv_tile = _loop(counts[row, j], query_tile, start_values)
        return dq, _put(dkv, jnp.concatenate([dk_tile, dv_tile], -1), row, start, 3)

    dkv = jnp.zeros_like(kv, dtype)
    return lax.fori_loop(0, num_rows * num_k, key_tile, (dq, dkv))
