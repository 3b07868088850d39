"""cuDNN's fused attention as `ring_jax.kernels.cudnn` calls it, in dense XLA: the same arguments, results and rounding.

What cuDNN documents and tensor cores do: scores and sums in float32, probabilities and the gradients of scores rounded
to the dtype of the inputs before a product, results rounded to it; delta from the out and dout that were passed;
a causal mask is aligned at the first row and key. Fed with float32 it rounds nothing, which shows the caller's logic.
"""

import jax.numpy as jnp
import pytest
from jax import Array

from ring_jax.kernels import cudnn, registry


def install(patch: pytest.MonkeyPatch) -> None:
    """Put it in cuDNN's place, and let float32 pass."""
    patch.setattr(cudnn, "attention", attention)
    patch.setattr(cudnn, "attention_gradients", attention_gradients)
    patch.setattr(cudnn, "DTYPES", (*cudnn.DTYPES, "float32"))
    patch.setattr(cudnn, "HOPPER_AND_LATER", (*cudnn.HOPPER_AND_LATER, "cpu"))
    assert "cudnn" in registry.KERNELS


def _group(query: Array, key: Array) -> Array:
    """``[B, N, T, H]`` as ``[B, K, G, T, H]``."""
    return query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])


def _scores(query: Array, key: Array, scale: float, is_causal: bool) -> Array:
    s = scale * jnp.einsum("bkgth,bksh->bkgts", _group(query, key), key, preferred_element_type=jnp.float32)
    return jnp.where(jnp.tri(*s.shape[-2:], dtype=bool), s, -jnp.inf) if is_causal else s


def attention(query: Array, key: Array, value: Array, scale: float, is_causal: bool) -> tuple[Array, Array]:
    """(out, lse)."""
    s = _scores(query, key, scale, is_causal)
    top = s.max(-1, keepdims=True)
    p = jnp.exp(s - top)
    total = p.sum(-1)
    out = jnp.einsum("bkgts,bksh->bkgth", p.astype(value.dtype), value, preferred_element_type=jnp.float32)
    out = (out / total[..., None]).astype(query.dtype)
    shape = query.shape[:3]
    return out.reshape(*shape, -1), (top[..., 0] + jnp.log(total)).reshape(shape)


def attention_gradients(query, key, value, lse, out, dout, scale: float, is_causal: bool) -> tuple[Array, Array, Array]:
    """(dq, dk, dv)."""
    dtype, wide = query.dtype, {"preferred_element_type": jnp.float32}
    assert dtype == key.dtype == value.dtype == out.dtype == dout.dtype
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    q, do, lse, delta = (_group(x, key) for x in (query, dout, lse[..., None], delta[..., None]))
    p = jnp.exp(_scores(query, key, scale, is_causal) - lse)
    dp = jnp.einsum("bkgth,bksh->bkgts", do, value, **wide)
    ds = (scale * p * (dp - delta)).astype(dtype)
    dv = jnp.einsum("bkgts,bkgth->bksh", p.astype(dtype), do, **wide)
    dk = jnp.einsum("bkgts,bkgth->bksh", ds, q, **wide)
    dq = jnp.einsum("bkgts,bksh->bkgth", ds, key, **wide).reshape(query.shape)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)
