"""The block kernel in plain XLA: tiles of queries against tiles of keys, dead tiles never visited.

It serves every call on every platform. Scores, statistics and all accumulators are float32 (float64 for float64
inputs), and so are the probabilities and the gradients of the scores: rounded to bfloat16 they would make the error of
dq and dv up to twice that of `jax.nn.dot_product_attention`. float32 inputs are multiplied in full float32 on every
platform; how half precision multiplies its float32 operands is up to `jax.default_matmul_precision`.

For each query tile the live key tiles are listed first and the loop runs over that list alone, so that a causal or
packed block costs what its mask needs. A row that has seen nothing has maximum `empty`, sum 0 and output 0: masked
scores are -inf and the maximum is never below `empty`, which is finite, so exp(-inf - maximum) is 0 and never NaN.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ring_jax.kernels.protocol import Call, Carry, Cotangents, Gradients
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores, Tiling, put_rows, rows_of, tile_size

__all__ = ["backward_block", "forward_block", "refuses", "tile_size"]


def refuses(call: Call) -> str | None:
    """Serves everything."""
    return None


def _einsum(inputs: Any) -> Callable[..., Array]:
    """`jnp.einsum` for inputs of this dtype: on TPU and GPU float32 operands would be rounded by default."""
    is_half = jnp.finfo(inputs).bits < 32
    return functools.partial(jnp.einsum, precision=None if is_half else lax.Precision.HIGHEST)


def _loop(count: Array, body, carry):
    """A loop of ``count`` steps; its counter starts from a value that varies like ``count``, which vmap relies on."""
    return lax.fori_loop(jnp.zeros_like(count), count, body, carry)


def forward_block(
    carry: Carry, queries: Queries, keys: Keys, pairs: Pairs, scores: Scores, tiles: tuple[int, int]
) -> Carry:
    """Fold one block of keys and values into the softmax state of every query."""
    head, dtype, einsum = queries.query.shape[-1], carry.out.dtype, _einsum(queries.query.dtype)
    tiling = Tiling(queries, keys, pairs, scores, tiles)
    order, counts = tiling.live_lists(by_key=False)
    num_rows, num_q = counts.shape

    def query_tile(step: Array, carry: Carry) -> Carry:
        row, i = step // num_q, step % num_q
        start = tiling.starts[0][i]
        q_tile = rows_of(queries.query, row, start, tiles[0], 4)

        def key_tile(n: Array, state: Carry) -> Carry:
            tile = tiling.tile(row, i, order[row, i, n])
            kv_tile = rows_of(keys.kv, row, tile.starts[1], tiles[1], 3)
            raw = einsum("bkgth,bksh->bkgts", q_tile, kv_tile[..., :head], preferred_element_type=dtype)
            s = tile.mask(tile.bias(tile.modify(tile.cap(raw * jnp.asarray(scores.scale, dtype)))))
            maximum = jnp.maximum(state.maximum, s.max(-1))
            weights = jnp.exp(s - maximum[..., None])
            rescale = jnp.exp(state.maximum - maximum)
            kept = tile.drop(weights)
            values = einsum("bkgts,bksh->bkgth", kept, kv_tile[..., head:].astype(dtype))
            return Carry(state.out * rescale[..., None] + values, maximum, state.total * rescale + weights.sum(-1))

        state = Carry(*(rows_of(x, row, start, tiles[0], 4) for x in carry))
        state = _loop(counts[row, i], key_tile, state)
        return Carry(*(put_rows(x, y, row, start, 4) for x, y in zip(carry, state, strict=True)))

    return lax.fori_loop(0, num_rows * num_q, query_tile, carry)


def backward_block(
    sums: Gradients,
    queries: Queries,
    cotangents: Cotangents,
    keys: Keys,
    pairs: Pairs,
    scores: Scores,
    tiles: tuple[int, int],
) -> Gradients:
    """Add one block's part to the gradients.

    p = exp(s - lse), dv = p^T dout, ds = p * (dout v^T - delta), and ds goes back through bias, score function, cap and
    scale to dq = ds k, dk = ds^T q. Scores are held as [keys, queries] here: then no product needs a transposed copy
    of a whole tile. A key that is not finite is 0 in the products: rows that see it have lse NaN already. The mask
    comes after the lse, and once more on ds: a row that is NaN has no part in the gradients of keys it does not see.
    """
    head, dtype, einsum = queries.query.shape[-1], sums.query.dtype, _einsum(queries.query.dtype)
    tiling = Tiling(queries, keys, pairs, scores, tiles, transposed=True)
    order, counts = tiling.live_lists(by_key=True)
    num_rows, num_k = counts.shape
    per_query = (queries.query, *cotangents[:3], *(() if cotangents.lost is None else (cotangents.lost,)))

    def key_tile(step: Array, sums: Gradients) -> Gradients:
        row, j = step // num_k, step % num_k
        start, scale = tiling.starts[1][j], jnp.asarray(scores.scale, dtype)
        kv_tile = rows_of(keys.kv, row, start, tiles[1], 3)
        k_tile, v_tile = kv_tile[..., :head], kv_tile[..., head:]
        k_tile = jnp.where(jnp.isfinite(k_tile), k_tile, 0)

        def query_tile(n: Array, state):
            sums, dk_tile, dv_tile = state
            tile = tiling.tile(row, order[row, j, n], j)
            begin = tile.starts[0]
            q_tile, do_tile, lse, delta, *lost = (rows_of(x, row, begin, tiles[0], 4) for x in per_query)
            raw = einsum("bksh,bkgth->bksgt", k_tile, q_tile, preferred_element_type=dtype)
            capped = tile.cap(raw * scale)
            modified, pull = tile.modify_and_pull(capped)
            s = tile.bias(modified) - lse[:, :, None]
            s = tile.mask(s - lost[0][:, :, None] if lost else s)
            p = jnp.exp(s)
            dp = tile.drop(einsum("bksh,bkgth->bksgt", v_tile, do_tile, preferred_element_type=dtype))
            ds = tile.hide(p * (dp - delta[:, :, None]), s)
            ds_modified, dargs = pull(ds)
            draw = tile.pull_cap(ds_modified, capped, s) * scale
            dv_tile += einsum("bksgt,bkgth->bksh", tile.drop(p), do_tile.astype(dtype))
            dk_tile += einsum("bksgt,bkgth->bksh", draw, q_tile.astype(dtype))
            dq = jnp.moveaxis(einsum("bksh,bksgt->bkhgt", k_tile.astype(dtype), draw), 2, -1)
            sums = Gradients(
                put_rows(sums.query, rows_of(sums.query, row, begin, tiles[0], 4) + dq, row, begin, 4),
                sums.keys,
                tile.add_to_bias(sums.bias, ds),
                tuple(jax.tree.map(jnp.add, sums.args, dargs)),
            )
            return sums, dk_tile, dv_tile

        dkv = rows_of(sums.keys, row, start, tiles[1], 3)
        sums, dk_tile, dv_tile = _loop(counts[row, j], query_tile, (sums, dkv[..., :head], dkv[..., head:]))
        return sums._replace(keys=put_rows(sums.keys, jnp.concatenate([dk_tile, dv_tile], -1), row, start, 3))

    return lax.fori_loop(0, num_rows * num_k, key_tile, sums)
