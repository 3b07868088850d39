"""Attention dropout from a counter: which probabilities fall is a function of the tokens, not of how they are cut.

    keep[b, n, t, s] = threefry(key of (seed, row b, head n, segment and position of query t), position of key s)

Nothing else enters, so that ring size, layout, strategy and tiles cannot change the dropped set, and the backward pass
finds the forward's by computing it again. If each shard drew from a key of its own instead, the same run on another
mesh would be another run, and shards that share a key would drop alike.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.random import threefry2x32_p
from jaxtyping import Bool, Int, UInt32

from ring_jax import manual


def mix(first: Array, second: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Two words from a key of two words and a counter of two words, with broadcasting (Threefry-2x32, 20 rounds)."""
    words = manual.vary_alike(*jnp.broadcast_arrays(first, second, low, high))
    mixed, other, _ = manual.vary_alike(*threefry2x32_p.bind(*words), words[0])  # the primitive forgets the axes
    return mixed, other


def as_words(seed: Any) -> UInt32[Array, "2"] | UInt32[Array, "B 2"]:
    """Two words from a Python int of up to 64 bits, an integer array of shape [] or [2], or a key of `jax.random`.

    An array of shape [B, 2] stays as it is, and so do B keys: every batch row has a seed of its own. Of a key of four
    words (``impl="rbg"``) the second half is encrypted with the first: fresh keys hold the same two words twice.
    """
    if isinstance(seed, np.ndarray) and seed.ndim == 0 and np.issubdtype(seed.dtype, np.integer):
        seed = int(seed)
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        high = 0 if -(2**31) <= seed < 2**32 else int(seed) >> 32 & 0xFFFFFFFF  # as the same number in 32 bits
        return jnp.array([high, int(seed) & 0xFFFFFFFF], jnp.uint32)
    array = jnp.asarray(seed)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
        if array.shape[-1] == 4:
            array = jnp.stack(mix(*jnp.moveaxis(array, -1, 0)), -1)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape[-1:] not in ((), (2,)) or array.ndim > 2:
        rule = "an integer, an integer array of shape [], [2] or [batch, 2], or a key of jax.random"
        raise TypeError(f"dropout_seed must be {rule}; got {array.dtype}{list(array.shape)}")
    return array.astype(jnp.uint32) if array.ndim else _words_of(array)


def _words_of(number: Array) -> UInt32[Array, "2"]:
    """(high, low) of an integer of any width, as of the same Python int: high is 0 for what 32 bits hold."""
    low = number.astype(jnp.uint32)
    if number.dtype.itemsize <= 4:
        return jnp.stack([jnp.zeros_like(low), low])
    fits = number < 2**32
    if jnp.issubdtype(number.dtype, jnp.signedinteger):
        fits &= number >= -(2**31)
    return jnp.stack([jnp.where(fits, 0, number >> 32).astype(jnp.uint32), low])


def query_words(
    seed: UInt32[Array, "2"] | UInt32[Array, "seeds 2"],
    rows: Int[Array, " B"],
    heads: Int[Array, " N"],
    positions: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"] | None,
) -> UInt32[Array, "B N T 2"]:
    """The key of every (row, head, query); ``rows`` and ``heads`` are numbers in the whole batch and model.

    Where every row has a seed of its own, its number does not enter.
    """
    if seed.ndim == 2 and len(seed) != len(rows):
        raise ValueError(f"dropout_seed has seeds for {len(seed)} rows, and there are {len(rows)}; pass one for each")
    rows, heads, positions = (x.astype(jnp.uint32) for x in (rows[:, None], heads[None], positions))
    rows = rows if seed.ndim == 1 else jnp.zeros_like(rows)
    first, second = mix(seed[..., :1], seed[..., 1:], rows, heads)
    ids = jnp.zeros_like(positions) if segment_ids is None else segment_ids.astype(jnp.uint32)
    words = mix(first[:, :, None], second[:, :, None], ids[:, None], positions[:, None])
    return jnp.stack(words, -1)


def keep(words: UInt32[Array, "*n T 2"], key_positions: Int[Array, " S"], rate: float) -> Bool[Array, "*n T S"]:
    """Which probabilities stay: each with chance 1 - rate."""
    counter = key_positions.astype(jnp.uint32)
    bits, _ = mix(words[..., :1], words[..., 1:], counter, jnp.zeros_like(counter))
    return bits >= _threshold(rate)


def keep_features(words: UInt32[Array, "*n 2"], num_features: int, rate: float) -> Bool[Array, "*n D"]:
    """Which of the numbers of every token stay, each with chance 1 - rate; ``words`` are the keys of the tokens."""
    counter = jnp.arange(-(-num_features // 2), dtype=jnp.uint32)
    bits = jnp.concatenate(mix(words[..., :1], words[..., 1:], counter, jnp.zeros_like(counter)), -1)
    return bits[..., :num_features] >= _threshold(rate)


def _threshold(rate: float) -> np.uint32:
    return np.uint32(min(round(rate * 2**32), 2**32 - 1))


def keep_mask(
    seed: Any,
    rate: float,
    *,
    num_heads: int,
    query_positions: Int[Array | np.ndarray, "B T"],
    key_positions: Int[Array | np.ndarray, "B S"],
    query_segments: Int[Array | np.ndarray, "B T"] | None = None,
) -> Bool[Array, "B N T S"]:
    """The set that `ring_jax.dot_product_attention` keeps, densely: for tests and for a look.

    Args:
      seed: as ``dropout_seed``. rate: chance to be dropped, 0 <= rate < 1.
      num_heads: N. query_positions, key_positions, query_segments: int32, as the call sees them.

    Returns:
      True where a probability stays (and is divided by 1 - rate).

    Example:
      >>> at = jnp.arange(4)[None]
      >>> keep_mask(0, 0.5, num_heads=2, query_positions=at, key_positions=at).shape
      (1, 2, 4, 4)

    Reference:
      Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011 (Threefry).
    """
    query_positions, key_positions = jnp.asarray(query_positions), jnp.asarray(key_positions)
    rows = jnp.arange(len(query_positions))
    segments = None if query_segments is None else jnp.asarray(query_segments)
    words = query_words(as_words(seed), rows, jnp.arange(num_heads), query_positions, segments)
    return jax.vmap(lambda w, at: keep(w, at, rate))(
        words, jnp.broadcast_to(key_positions, (len(rows), key_positions.shape[1]))
    )
