"""Dense attention in float64 NumPy with every option, forward and backward by hand. No code of the library is used.

    s = score_fn(soft_cap(scale * q.k)) + bias,   -inf where hidden
    lse = log sum_j exp(s_j),   p = exp(s - log(exp(lse) + exp(sink))),   out = sum_j p_j keep_j / (1 - rate) v_j

A query that sees no key gives out 0, lse -inf, and no gradient: not to its sink either. Only the elementwise `score_fn`
is differentiated by JAX. All masks and scores are ``[B, N, T, S]`` in natural order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class Results(NamedTuple):
    """Outputs and the gradient of every float array, each float64 with its own shape; None for what was not given."""

    out: np.ndarray
    lse: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    sinks: np.ndarray | None
    score_args: tuple[np.ndarray, ...]


def token_pair(value, batch: int, lengths: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """One array or a pair to the query's ``[B, T]`` and the keys' ``[B, S]``; None counts 0, 1, 2, ... on each side."""
    if value is None:
        value = tuple(np.arange(n, dtype=np.int32) for n in lengths)
    pair = value if isinstance(value, tuple) else (value, value)
    query, key = (np.broadcast_to(x, (batch, n)) for x, n in zip(pair, lengths, strict=True))
    return query, key


def _window(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def visible(
    batch: int,
    num_heads: int,
    lengths: tuple[int, int],
    *,
    is_causal: bool = False,
    segment_ids=None,
    positions=None,
    local_window_size=None,
    chunk_size: int | None = None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    mask=None,
    mask_fn: Callable[..., Any] | None = None,
) -> np.ndarray:
    """``[B, N, T, S]``: True where every rule that was given allows it."""
    seen = np.ones((batch, *lengths), bool)
    query, key = token_pair(positions, batch, lengths)
    places = query[:, :, None], key[:, None]
    query, key = (x.astype(np.int64) for x in places)  # sums with window sizes must not overflow
    if is_causal:
        seen &= query >= key
    if local_window_size is not None:
        left, right = _window(local_window_size)
        seen &= (query - left <= key) & (key <= query + right)
    if chunk_size is not None:
        seen &= query // chunk_size == key // chunk_size
    ids = tuple(np.ones(n, np.int32) for n in lengths) if segment_ids is None else segment_ids
    query_ids, key_ids = token_pair(ids, batch, lengths)
    query_ids, key_ids = query_ids[:, :, None], key_ids[:, None]
    seen &= (query_ids == key_ids) & (query_ids != 0)
    if query_seq_lengths is not None:
        seen &= np.arange(lengths[0])[:, None] < np.asarray(query_seq_lengths)[:, None, None]
    if key_value_seq_lengths is not None:
        seen &= np.arange(lengths[1]) < np.asarray(key_value_seq_lengths)[:, None, None]
    if mask_fn is not None:
        seen &= np.asarray(mask_fn(*places, query_ids, key_ids))
    seen = np.broadcast_to(seen[:, None], (batch, num_heads, *lengths))
    return seen if mask is None else seen & np.asarray(mask)


def dense_mask(batch: int, lengths: tuple[int, int], is_causal: bool, segment_ids=None, positions=None) -> np.ndarray:
    """``[B, T, S]``: the mask of the token rules alone."""
    return visible(batch, 1, lengths, is_causal=is_causal, segment_ids=segment_ids, positions=positions)[:, 0]


def attention(query, key, value, dout, dlse, *, mask: np.ndarray, scale: float) -> tuple[np.ndarray, ...]:
    """(out, lse, dq, dk, dv) without options; ``mask`` is ``[B, T, S]``."""
    return attend(query, key, value, dout, dlse, mask=mask[:, None], scale=scale)[:5]


def attend(
    query,
    key,
    value,
    dout,
    dlse,
    *,
    mask: np.ndarray,
    scale: float,
    positions=None,
    logits_soft_cap: float | None = None,
    score_fn: Callable[..., Any] | None = None,
    score_args: tuple[Any, ...] = (),
    bias=None,
    sinks=None,
    keep=None,
    rate: float = 0.0,
) -> Results:
    """Results for the cotangents of out and of the finite part of lse.

    ``mask`` and ``keep`` (what dropout keeps) broadcast to ``[B, N, T, S]``; ``lse``, ``[B, T, N]``, is without sinks.
    """
    query, key, value, dout, dlse = (np.asarray(x, np.float64) for x in (query, key, value, dout, dlse))
    batch, length, num_heads, _ = query.shape
    num_kv_heads, shape = key.shape[2], (batch, num_heads, length, key.shape[1])
    keys, values = (np.repeat(x, num_heads // num_kv_heads, axis=2) for x in (key, value))
    raw = scale * np.einsum("btnh,bsnh->bnts", query, keys)
    modified, pull = _modify(raw, logits_soft_cap, score_fn, score_args, token_pair(positions, batch, shape[2:]))
    scores = modified if bias is None else modified + np.asarray(bias, np.float64)
    mask = np.broadcast_to(mask, shape)
    seen = mask.any(-1, keepdims=True)
    scores = np.where(mask, scores, -np.inf)
    top = np.where(seen, scores.max(-1, keepdims=True), 0)
    weights = np.exp(scores - top)
    total = np.where(seen, weights.sum(-1, keepdims=True), 1)
    plain = weights / total  # the probabilities without sinks: the derivative of lse
    lse = top + np.log(total)
    share = np.ones_like(lse)
    if sinks is not None:
        share = np.exp(lse - np.logaddexp(lse, np.asarray(sinks, np.float64)[:, None, None]))
    p = plain * share
    kept = np.ones(shape) if keep is None else np.broadcast_to(keep, shape) / (1 - rate)
    out = np.einsum("bnts,bsnh->btnh", p * kept, values)

    dp = kept * np.einsum("btnh,bsnh->bnts", dout, values)
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta) + plain * dlse.transpose(0, 2, 1)[..., None]
    draw, dscore_args = pull(ds)

    def grouped(x):  # the gradient of a key/value head is the sum over its query heads
        return x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[-1]).sum(3)

    return Results(
        out,
        np.where(seen, lse, -np.inf)[..., 0].transpose(0, 2, 1),
        scale * np.einsum("bnts,bsnh->btnh", draw, keys),
        grouped(scale * np.einsum("bnts,btnh->bsnh", draw, query)),
        grouped(np.einsum("bnts,btnh->bsnh", p * kept, dout)),
        None if bias is None else _sum_to(ds, np.shape(bias)),
        None if sinks is None else -np.where(seen, (1 - share) * delta, 0).sum((0, 2, 3)),
        dscore_args,
    )


def _modify(raw, cap, score_fn, score_args, positions) -> tuple[np.ndarray, Callable[..., Any]]:
    """Soft cap and `score_fn`; and the function that takes the slope of the result to those of ``raw`` and the args."""
    capped = raw if cap is None else cap * np.tanh(raw / cap)
    slope = 1 if cap is None else 1 - (capped / cap) ** 2
    if score_fn is None:
        return capped, lambda ds: (ds * slope, ())
    query, key = positions[0][:, None, :, None], positions[1][:, None, None]
    head = np.arange(raw.shape[1], dtype=np.int32)[:, None, None]
    args = [np.asarray(x, np.float64) if np.issubdtype(np.asarray(x).dtype, np.floating) else x for x in score_args]
    floats = [i for i, x in enumerate(args) if isinstance(x, np.ndarray) and x.dtype == np.float64]

    def modify(scores, *given):
        merged = list(args)
        for i, x in zip(floats, given, strict=True):
            merged[i] = x
        return score_fn(scores, query, key, head, *merged)

    with jax.enable_x64(True):
        result, pull = jax.vjp(modify, capped, *(args[i] for i in floats))

    def back(ds):
        with jax.enable_x64(True):
            dcapped, *dargs = pull(jax.numpy.asarray(ds))
        return np.asarray(dcapped) * slope, tuple(np.asarray(x) for x in dargs)

    return np.asarray(result), back


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Undo a broadcast: ``x`` summed to ``shape``."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] > 1), keepdims=True)
