"""The backward kernel for TPU: dK and dV of a key tile on the chip while its query tiles pass, dQ summed in memory.

Each pair of tiles is computed once, for all three gradients: five products instead of the seven of two kernels. A tile
of dQ is therefore read, added to and written back at every step, by copies that this kernel starts itself: the read
runs while the step computes, the write while the next one does. Two rules keep them right: at most one write is under
way, and a step whose query tile is that of the step before waits for the write before it reads.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_jax.kernels import pallas_tpu_parts as parts
from ring_jax.kernels.protocol import Cotangents, Gradients
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores


def backward_block(
    sums: Gradients,
    queries: Queries,
    cotangents: Cotangents,
    keys: Keys,
    pairs: Pairs,
    scores: Scores,
    tiles: tuple[int, int],
) -> Gradients:
    """Add one block's part to the gradients of queries and keys."""
    _, batch, kv_heads, group, _, head = queries.query.shape
    t, s = parts.fit_tiles(queries, keys, tiles)
    if half := parts.split(queries, keys, (t, s)):
        done = []
        for first, last in ((None, half), (half, None)):
            part = sums._replace(keys=sums.keys[:, :, :, first:last])
            part = backward_block(part, queries, cotangents, parts.part(keys, first, last), pairs, scores, tiles)
            sums, done = sums._replace(query=part.query), [*done, part.keys]
        return sums._replace(keys=jnp.concatenate(done, 3))
    work = parts.work_list(queries, keys, scores.rules, (t, s), by_key=True)
    rows = parts.token_rows(queries.tokens, keys.tokens, scores.rules)
    spec = parts.specs(work, {"o": s, "i": t})
    ins = [
        (queries.query, spec("rbk.i.", queries.query.shape)),
        (cotangents.dout, spec("rbk.i.", cotangents.dout.shape)),
        (cotangents.lse, spec("rbk.i", cotangents.lse.shape)),
        (cotangents.delta, spec("rbk.i", cotangents.delta.shape)),
        (keys.kv, spec("rbko.", keys.kv.shape)),
        (sums.query, pl.BlockSpec(memory_space=pl.ANY)),
        (sums.keys, spec("rbko.", sums.keys.shape)),
    ]
    if rows.query is not None and rows.key is not None:
        ins += [(rows.query, spec("r.i", rows.query.shape)), (rows.key, spec("r.o", rows.key.shape))]
    has_segments = queries.tokens.segment_ids is not None and keys.tokens.segment_ids is not None
    moved = [queries.query, cotangents.dout, keys.kv, sums.query, sums.query, sums.keys, sums.keys]
    dq, dkv = parts.call(
        functools.partial(_kernel, work, scores, has_segments, head),
        work,
        (batch, kv_heads),
        ins,
        (5, 6),
        [
            pltpu.VMEM((s, head), keys.kv.dtype),
            pltpu.VMEM((head, s), keys.kv.dtype),
            pltpu.VMEM((2, group, t, head), jnp.float32),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ],
        parts.cost(queries, keys, scores, (3, 2), moved),
        parts.VMEM_BYTES,
        "ring_attention_backward",
    )
    return sums._replace(query=dq, keys=dkv)


def _kernel(work: parts.Work, scores: Scores, has_segments: bool, head: int, codes: Any, *refs: Any) -> None:
    """One pair of tiles of all query heads of one key/value head."""
    query, dout, lse, delta, kv, _, dkv_in, *token_refs = refs[:-7]
    dq, dkv, finite, turned, sums, reading, writing = refs[-7:]
    query_rows, key_rows = token_refs or (None, None)
    b, k_head, step = (pl.program_id(axis) for axis in range(3))
    first, _ = work.ends(codes, step)
    kind = work.kind(codes[step])
    slot = step % 2

    def tile_of_dq(step: Any) -> Any:
        row, _, i = work.place(codes[step])
        size = sums.shape[2]
        return dq.at[row, b, k_head, :, pl.ds(pl.multiple_of(i * size, size), size), :]

    def read(step: Any) -> Any:
        return pltpu.make_async_copy(tile_of_dq(step), sums.at[step % 2], reading)

    def write(step: Any) -> Any:
        return pltpu.make_async_copy(sums.at[step % 2], tile_of_dq(step), writing)

    @pl.when(first)
    def _():
        dkv[...] = dkv_in[...]
        k = kv[:, :head].astype(jnp.float32)
        k = jnp.where(jnp.isfinite(k), k, 0.0)
        finite[...], turned[...] = k.astype(kv.dtype), k.T.astype(kv.dtype)

    def add(is_masked: bool) -> None:
        k, v, dtype = finite[...], kv[:, head:], kv.dtype
        mask = parts.visible(query_rows, key_rows, scores.rules, has_segments) if is_masked else None

        def head_of(g: Any) -> None:
            here = pl.ds(g, 1)
            capped = parts.cap(parts.dot(k, query[g], (1, 1), dtype) * scores.scale, scores)
            s = capped - lse[here]  # a row that is NaN has no part in keys that it does not see
            p = jnp.exp(s if mask is None else jnp.where(mask, s, -jnp.inf))
            ds = p * (parts.dot(v, dout[g], (1, 1), dtype) - delta[here])
            ds = parts.uncap(ds, capped, scores)
            ds = ds if mask is None else jnp.where(mask, ds, 0.0)
            dkv[:, head:] += parts.dot(p, dout[g], (1, 0), dtype)
            dkv[:, :head] += parts.dot(ds, query[g], (1, 0), dtype) * scores.scale
            part = (parts.dot(turned[...], ds, (1, 0), dtype) * scores.scale).T
            pl.when(g == 0)(lambda: read(step).wait())
            sums[slot, g] += part

        parts.for_heads(query.shape[0], head_of)

    @pl.when(kind != parts.NOTHING)
    def _():
        before = jnp.maximum(step - 1, 0)
        (row, _, i), (row_before, _, i_before) = work.place(codes[step]), work.place(codes[before])
        is_same = (row == row_before) & (i == i_before)
        pl.when((step > 0) & is_same)(lambda: write(before).wait())
        read(step).start()
        pl.when(kind == parts.MASKED)(functools.partial(add, True))
        pl.when(kind == parts.WHOLE)(functools.partial(add, False))
        pl.when((step > 0) & ~is_same)(lambda: write(before).wait())
        write(step).start()
        pl.when(codes[step + 1] == parts.NO_PAIR)(lambda: write(step).wait())
