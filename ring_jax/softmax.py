"""The algebra of partial softmax results.

Invariant 2: *(out, lse) pairs form a commutative monoid under `merge`, with identity (0, -inf).* Attention over any set
of keys can therefore be put together from attention over its parts, in any order; the ring's order, its tiles and its
skipped blocks can change rounding only. A query that sees nothing is the identity: exactly 0, lse -inf, no gradient.
If the identity were anything else (a mean of V, a NaN), a masked row would leak into every merge after it.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


def merge(
    out_a: Float[Array, "*B T N H"],
    lse_a: Float[Array, "*B T N"],
    out_b: Float[Array, "*B T N H"],
    lse_b: Float[Array, "*B T N"],
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T N"]]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

        lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    Args:
      out_a, out_b: normalized outputs ``[..., T, N, H]``, any float dtype.
      lse_a, lse_b: log-sum-exp of the scaled scores ``[..., T, N]``, float32; -inf where a query sees no key.

    Returns:
      ``(out, lse)``: out in the dtype of the inputs, summed in the dtype of lse. Differentiable in all four.

    Example:
      >>> zero, none = jnp.zeros((1, 1, 1, 2)), jnp.full((1, 1, 1), -jnp.inf)
      >>> out, lse = merge(jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1)), zero, none)
      >>> (out == 1).all() & (lse == 0).all()
      Array(True, dtype=bool)

    Reference:
      Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867, section 3.1.
    """
    top = lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    seen = top != -jnp.inf  # an lse that is NaN was seen
    top = jnp.where(seen, top, 0)  # exp(-inf - (-inf)) must not be formed, not even to be dropped
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = jnp.where(seen, weight_a + weight_b, 1)
    out = (weight_a / total)[..., None] * out_a.astype(total.dtype)
    out += (weight_b / total)[..., None] * out_b.astype(total.dtype)
    return out.astype(out_a.dtype), jnp.where(seen, top + jnp.log(total), -jnp.inf)


def normalize(out: Array, maximum: Array, total: Array) -> tuple[Array, Array]:
    """(out, lse) from the unnormalized sum, running maximum and running total of a finished online softmax."""
    seen = total != 0  # a total that is NaN was seen
    total = jnp.where(seen, total, 1)
    return jnp.where(seen[..., None], out / total[..., None], 0), jnp.where(seen, maximum + jnp.log(total), -jnp.inf)


def lost_by_rounding(lse: Array, maximum: Array, total: Array) -> Array:
    """What lse = maximum + log(total) lost: all of the logarithm, where a score is of the size of 1e8."""
    seen = total != 0
    return jnp.where(seen, (maximum - jnp.where(seen, lse, 0)) + jnp.log(jnp.where(seen, total, 1)), 0)
