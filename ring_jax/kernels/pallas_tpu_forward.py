"""The forward kernel for TPU: one block of keys folded into the softmax state, read and rewritten in place.

A tile of scores is [keys, queries]: the statistics of a query are then rows, as they lie in memory, and their sums run
along sublanes. The output of a query tile is kept transposed, [Hv, t], while its keys pass, for the same reason.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_jax.kernels import pallas_tpu_parts as parts
from ring_jax.kernels.protocol import Carry
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores


def forward_block(
    carry: Carry, queries: Queries, keys: Keys, pairs: Pairs, scores: Scores, tiles: tuple[int, int]
) -> Carry:
    """Fold one block of keys and values into the softmax state of every query."""
    _, batch, kv_heads, group, _, head = queries.query.shape
    width, (t, s) = keys.kv.shape[-1], parts.fit_tiles(queries, keys, tiles)
    if half := parts.split(queries, keys, (t, s)):
        for some in (parts.part(keys, None, half), parts.part(keys, half, None)):
            carry = forward_block(carry, queries, some, pairs, scores, tiles)
        return carry
    work = parts.work_list(queries, keys, scores.rules, (t, s), by_key=False)
    rows = parts.token_rows(queries.tokens, keys.tokens, scores.rules)

    spec = parts.specs(work, {"o": t, "i": s})
    ins = [
        (queries.query, spec("rbk.o.", queries.query.shape)),
        (keys.kv, spec("rbki.", keys.kv.shape)),
        (carry.out, spec("rbk.o.", carry.out.shape)),
        (carry.maximum, spec("rbk.o", carry.maximum.shape)),
        (carry.total, spec("rbk.o", carry.total.shape)),
    ]
    if rows.query is not None and rows.key is not None:
        ins += [(rows.query, spec("r.o", rows.query.shape)), (rows.key, spec("r.i", rows.key.shape))]
    has_segments = queries.tokens.segment_ids is not None and keys.tokens.segment_ids is not None
    moved = [queries.query, keys.kv, *carry, *carry]
    return Carry(
        *parts.call(
            functools.partial(_kernel, work, scores, has_segments),
            work,
            (batch, kv_heads),
            ins,
            (2, 3, 4),
            [pltpu.VMEM((group, width - head, t), jnp.float32)],
            parts.cost(queries, keys, scores, (1, 1), moved),
            parts.VMEM_BYTES,
            "ring_attention_forward",
        )
    )


def _kernel(work: parts.Work, scores: Scores, has_segments: bool, codes: Any, *refs: Any) -> None:
    """One pair of tiles of all query heads of one key/value head."""
    query, kv, out_in, maximum_in, total_in, *token_refs = refs[:-4]
    out, maximum, total, turned = refs[-4:]
    query_rows, key_rows = token_refs or (None, None)
    step = pl.program_id(2)
    head, for_each = query.shape[2], functools.partial(parts.for_heads, query.shape[0])
    first, last = work.ends(codes, step)
    kind = work.kind(codes[step])

    def begin(g: Any) -> None:
        turned[g] = out_in[g].T

    def finish(g: Any) -> None:
        out[g] = turned[g].T

    @pl.when(first)
    def _():
        maximum[...], total[...] = maximum_in[...], total_in[...]
        for_each(begin)

    def fold(is_masked: bool) -> None:
        k, v = kv[:, :head], kv[:, head:].T
        mask = parts.visible(query_rows, key_rows, scores.rules, has_segments) if is_masked else None

        def head_of(g: Any) -> None:
            here = pl.ds(g, 1)
            s = parts.cap(parts.dot(k, query[g], (1, 1), k.dtype) * scores.scale, scores)
            s = s if mask is None else jnp.where(mask, s, -jnp.inf)
            before = maximum[here]
            now = jnp.maximum(before, s.max(0, keepdims=True))
            p = jnp.exp(s - now)
            rescale = jnp.exp(before - now)
            maximum[here] = now
            total[here] = total[here] * rescale + p.sum(0, keepdims=True)
            turned[g] = turned[g] * rescale + parts.dot(v, p, (1, 0), v.dtype)

        for_each(head_of)

    pl.when(kind == parts.MASKED)(functools.partial(fold, True))
    pl.when(kind == parts.WHOLE)(functools.partial(fold, False))

    @pl.when(last)
    def _():
        for_each(finish)
