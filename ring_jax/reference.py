"""Dense attention: the definition of right. Everything else in this package is compared with it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from ring_jax import arguments, dropout, masks, options
from ring_jax.kernels.tiles import widened
from ring_jax.masks import Tokens
from ring_jax.options import TokenIds


def reference_attention(
    query: Float[Array | np.ndarray, "B T N H"],
    key: Float[Array | np.ndarray, "B S K H"],
    value: Float[Array | np.ndarray, "B S K Hv"],
    bias: Any = None,
    mask: Any = None,
    *,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Any = None,
    chunk_size: int | None = None,
    segment_ids: TokenIds = None,
    positions: TokenIds = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    mask_fn: Any = None,
    score_fn: Any = None,
    score_args: Any = (),
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend densely, forming every score.

        s[t,j] = score_fn(cap(scale * q[t] . k[j])) + bias[t,j]  where visible(t, j), else -inf
        lse[t] = log sum_j exp(s[t,j]),   p[t,j] = exp(s[t,j]) / (exp(lse[t]) + exp(sink))
        out[t] = sum_j keep[t,j] / (1 - rate) p[t,j] v[j]

    A query that sees no key gives exactly 0, lse -inf, and no gradient. One that holds NaN or Inf, or sees a key or
    value that does, is NaN, and gives no gradient either; what is hidden may hold anything. Runs in the dtype of the
    inputs (float64 under `jax.enable_x64`; float32 at least), O(T*S) memory, and is differentiated by JAX itself.

    Args:
      query: ``[B, T, N, H]``. key: ``[B, S, K, H]``, N a multiple of K. value: ``[B, S, K, Hv]``.
      bias, mask, query_seq_lengths, key_value_seq_lengths, scale, is_causal, local_window_size, chunk_size,
        segment_ids, positions, logits_soft_cap, sinks, mask_fn, score_fn, score_args, dropout_rate, dropout_seed: as
        in `ring_jax.dot_product_attention`, for arrays in natural order; positions None means 0, 1, 2, ...
      return_residual: also return lse (without sinks).

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype; with ``return_residual`` also lse ``[B, T, N]``, float32 or wider.

    Raises:
      ValueError, TypeError: shapes, dtypes or values that do not fit together.

    Example:
      >>> x = jnp.ones((1, 3, 1, 2))
      >>> reference_attention(x, x, x, is_causal=True).shape
      (1, 3, 1, 2)

    Reference:
      Vaswani et al., Attention Is All You Need, arXiv:1706.03762, section 3.2.1; grouped heads: arXiv:2305.13245.
    """
    keywords = {name: default for name, (default, _) in options.OPTIONS.items()}
    keywords |= {name: x for name, x in locals().items() if name in keywords}
    options.check(**keywords)
    query, key, value = arguments.as_arrays(query, key, value)
    batch, length, num_heads, head_dim = query.shape
    lengths, num_kv_heads = (length, key.shape[1]), key.shape[2]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    (positions, segment_ids), (key_positions, key_segment_ids) = _tokens(keywords, batch, lengths)
    tokens = Tokens(positions, segment_ids), Tokens(key_positions, key_segment_ids)
    allowed = _allowed(keywords, tokens, (batch, num_heads, *lengths))
    query, spoiled = _clean(query, segment_ids)
    (key, spoiled_key), (value, spoiled_value) = (_clean(x, key_segment_ids) for x in (key, value))
    grouped = query.astype(dtype).reshape(batch, length, num_kv_heads, -1, head_dim)
    scale = head_dim**-0.5 if scale is None else scale
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key.astype(dtype), precision="highest")
    scores = jnp.where(allowed, scores.reshape(allowed.shape) * jnp.asarray(scale, dtype), 0)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    if score_fn is not None:
        at, of = positions[:, None, :, None], key_positions[:, None, None, :]
        heads = jnp.arange(num_heads, dtype=jnp.int32)[:, None, None]
        args = widened(arguments.as_score_args(score_args), dtype)
        scores = jnp.asarray(score_fn(scores, at, of, heads, *args)).astype(dtype)
    bias = arguments.as_pairwise("bias", bias, (batch, num_heads, *lengths))
    scores = scores if bias is None else scores + bias.astype(dtype)
    top = jnp.where(allowed, scores, -jnp.inf).max(-1)
    seen = allowed.any(-1) & (top != -jnp.inf)
    top = lax.stop_gradient(jnp.where(seen, top, 0)[..., None])
    # The inner `where` keeps hidden scores out of exp, so that the derivative there is 0 and never inf * 0.
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - top, 0)), 0)
    total = jnp.where(seen, weights.sum(-1), 1)
    lse = jnp.where(seen, top[..., 0] + jnp.log(total), -jnp.inf)
    weights = weights / total[..., None]
    if sinks is not None:
        sinks = jnp.asarray(arguments.as_row("sinks", sinks, num_heads, jnp.floating), dtype)
        weights *= jax.nn.sigmoid(jnp.where(seen, lse, 0) - sinks[:, None])[..., None]
    if dropout_rate:
        kept = dropout.keep_mask(
            dropout_seed,
            dropout_rate,
            num_heads=num_heads,
            query_positions=jnp.broadcast_to(positions, (batch, length)),
            key_positions=jnp.broadcast_to(key_positions, (batch, lengths[1])),
            query_segments=None if segment_ids is None else jnp.broadcast_to(segment_ids, (batch, length)),
        )
        weights = jnp.where(kept, weights / (1 - dropout_rate), 0)
    weights = weights.reshape(batch, num_kv_heads, -1, *lengths)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, value.astype(dtype), precision="highest")
    spoiled = _spoiled(allowed, spoiled, spoiled_key | spoiled_value)
    out = jnp.where(spoiled[..., None], jnp.nan, out.reshape(batch, length, num_heads, -1)).astype(query.dtype)
    return (out, jnp.where(spoiled, jnp.nan, lse.transpose(0, 2, 1))) if return_residual else out


def _allowed(keywords: dict[str, Any], tokens: tuple[Tokens, Tokens], shape: tuple[int, int, int, int]) -> Array:
    """The mask ``[B, N, T, S]`` of all rules and of ``mask``."""
    window, chunk_size = options.window_of(keywords["local_window_size"]), options.chunk_of(keywords["chunk_size"])
    rules = masks.Rules(bool(keywords["is_causal"]), window, chunk_size, keywords["mask_fn"])
    allowed, dense = masks.visible(*tokens, rules), arguments.as_pairwise("mask", keywords["mask"], shape)
    allowed = jnp.ones((1, 1, *shape[2:]), bool) if allowed is None else allowed[:, None]
    return jnp.broadcast_to(allowed if dense is None else allowed & dense, shape)


def _clean(x: Any, segment_ids: Array | None) -> tuple[Array, Array]:
    """The array with 0 for padding and for heads of tokens that are not finite; and which those are, ``[B, T, N]``."""
    x = jnp.asarray(x)
    if segment_ids is not None:
        x = jnp.where((segment_ids != 0)[..., None, None], x, jnp.zeros((), x.dtype))
    spoiled = ~jnp.isfinite(x).all(-1)
    return jnp.where(spoiled[..., None], jnp.zeros((), x.dtype), x), spoiled


def _spoiled(allowed: Array, query: Array, key: Array) -> Array:
    """Which queries ``[B, T, N]`` see a key, and are spoiled themselves or see one that is."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    query, key = query.transpose(0, 2, 1)[..., None], key.transpose(0, 2, 1)[:, :, None]
    return (allowed & (query | key)).any(-1).transpose(0, 2, 1)


def _tokens(keywords: dict[str, Any], batch: int, lengths: tuple[int, int]) -> list[tuple[Array, Array | None]]:
    """Positions and segment ids of both sides, with sequence lengths turned into padding."""
    positions = arguments.as_pair("positions", keywords["positions"], batch, lengths)
    segments = arguments.as_pair("segment_ids", keywords["segment_ids"], batch, lengths)
    real = [
        arguments.as_row(name, keywords[name], batch, jnp.integer)
        for name in ("query_seq_lengths", "key_value_seq_lengths")
    ]
    sides = []
    for length, at, ids, count in zip(lengths, positions, segments, real, strict=True):
        index = jnp.arange(length, dtype=jnp.int32)[None]
        if ids is None and any(x is not None for x in real):
            ids = jnp.ones((1, length), jnp.int32)
        if count is not None:
            ids = jnp.where(index < count[:, None], ids, 0)
        sides.append((index if at is None else at, ids))
    return sides
