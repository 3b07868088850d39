"""Dense attention: the definition of right. Everything else in this package is compared with it."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from ring_jax import masks, options
from ring_jax.masks import Tokens
from ring_jax.options import TokenIds


def reference_attention(
    query: Float[Array | np.ndarray, "B T N H"],
    key: Float[Array | np.ndarray, "B S K H"],
    value: Float[Array | np.ndarray, "B S K Hv"],
    *,
    scale: float | None = None,
    is_causal: bool = False,
    segment_ids: TokenIds = None,
    positions: TokenIds = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend densely, forming every score.

        s[t,j] = scale * q[t] . k[j]  where visible(t, j), else -inf
        out[t] = sum_j exp(s[t,j] - lse[t]) v[j],   lse[t] = log sum_j exp(s[t,j])

    A query that sees no key gives exactly 0, lse -inf, and no gradient. Runs in the dtype of the inputs (float64 under
    `jax.enable_x64`; float32 at least), O(T*S) memory, and is differentiated by JAX itself.

    Args:
      query: ``[B, T, N, H]``. key: ``[B, S, K, H]``, N a multiple of K. value: ``[B, S, K, Hv]``.
      scale: of the scores; None means 1/sqrt(H).
      is_causal: a query sees keys at its own position and before.
      segment_ids: int ``[B, S]`` or ``[S]``, or a pair (query's, keys'). Attention stays inside a segment; 0 is
        padding.
      positions: int, shaped like segment_ids; None means 0, 1, 2, ... for queries and keys alike.
      return_residual: also return lse.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype; with ``return_residual`` also lse ``[B, T, N]``, float32 or wider.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit together.

    Example:
      >>> x = jnp.ones((1, 3, 1, 2))
      >>> reference_attention(x, x, x, is_causal=True).shape
      (1, 3, 1, 2)

    Reference:
      Vaswani et al., Attention Is All You Need, arXiv:1706.03762, section 3.2.1; grouped heads: arXiv:2305.13245.
    """
    options.check_arrays(query, key, value)
    batch, length, num_heads, head_dim = query.shape
    lengths, num_kv_heads = (length, key.shape[1]), key.shape[2]
    pairs = zip(
        options.as_pair("positions", positions, batch, lengths)
        if positions is not None
        else (jnp.arange(n, dtype=jnp.int32)[None] for n in lengths),
        options.as_pair("segment_ids", segment_ids, batch, lengths),
        strict=True,
    )
    query_tokens, key_tokens = (Tokens(*pair) for pair in pairs)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.astype(dtype).reshape(batch, length, num_kv_heads, -1, head_dim)
    scale = head_dim**-0.5 if scale is None else scale
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key.astype(dtype), precision="highest")
    scores *= jnp.asarray(scale, dtype)
    mask = masks.visible(query_tokens, key_tokens, is_causal=is_causal)
    mask = jnp.ones((1, *lengths), bool) if mask is None else mask
    mask = mask[:, None, None]
    seen = mask.any(-1)
    top = jnp.where(mask, scores, -jnp.inf).max(-1)
    top = jnp.where(seen, top, 0)[..., None]
    # The inner `where` keeps hidden scores out of exp, so that the derivative there is 0 and never inf * 0.
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
    total = jnp.where(seen, weights.sum(-1), 1)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights / total[..., None], value.astype(dtype), precision="highest")
    out = out.reshape(batch, length, num_heads, -1).astype(query.dtype)
    lse = jnp.where(seen, top[..., 0] + jnp.log(total), -jnp.inf)
    lse = lse.transpose(0, 3, 1, 2).reshape(batch, length, num_heads)
    return (out, lse) if return_residual else out
