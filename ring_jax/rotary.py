"""Rotary position embedding: angles that are right at every position, and the turn of a head's channels.

What always holds: an angle is within 10^-6 radians of position * frequency, modulo 2 pi, at every int32 position. So
adding a constant to all positions changes rounding only.

Reference:
  Su et al., RoFormer, arXiv:2104.09864, section 3.2.2.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Radians per position of every pair of channels, theta^(-2i/H), float64 [H / 2]."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def tables(
    positions: Int[Array, "*B T"], frequency: np.ndarray
) -> tuple[Float[Array, "*B T half"], Float[Array, "*B T half"]]:
    """Cosine and sine of position * frequency, float32.

    A float32 holds neither large integers nor large angles: at position 10^6 a plain product is wrong by up to 0.06
    radians, and from 2^24 on neighbors collide. So the angle is counted in turns, of which whole ones do not matter: a
    frequency is an integer of 2^-32 turns, whose product with the position wraps round exactly, and a rest below 2^-33
    turns.
    """
    turns = np.mod(frequency / (2 * np.pi), 1.0) * 2.0**32
    whole = np.round(turns)
    rest = (turns - whole).astype(np.float32)
    wrapped = positions.astype(jnp.uint32)[..., None] * np.mod(whole, 2.0**32).astype(np.uint32)
    part = lax.bitcast_convert_type(wrapped, jnp.int32).astype(jnp.float32)  # from -1/2 to 1/2 turn
    angle = (part + positions.astype(jnp.float32)[..., None] * rest) * np.float32(2 * np.pi / 2**32)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T heads H"], cos: Float[Array, "*B T half"], sin: Float[Array, "*B T half"]
) -> Float[Array, "B T heads H"]:
    """Turn each pair of channels (i, i + H/2) of every head by the angle of its token, in float32 at least."""
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
