"""Dropout of activations: which numbers fall is a function of the tokens, never of how they are cut.

    keep[b, t, d] = threefry(key of (seed, row b, place in the model, segment and position of token t), d)

The place is a number: that of a layer and of the sum inside it. Nothing of a shard, a microbatch or a tick enters, so
the same numbers fall on every mesh, in every layout and schedule, and where the backward pass computes a layer again.
Attention probabilities fall by `ring_jax`, from the same keys of the rows. A draw from a key for each device would make
another run of every mesh, and tensor shards that share one would drop alike.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, UInt32

from models.collectives import own_tokens
from models.sharding import RULES
from ring_jax import dropout, manual

EMBEDDING = 0
PROBABILITIES, ATTENTION, MLP_SUM = 1, 2, 3


def place_in(layer: Array | int, place: int) -> Array | int:
    """Number of a place in a layer; `EMBEDDING` is before all of them."""
    return layer * 3 + place


def row_words(seed: Any, batch: int) -> UInt32[Array, "B 2"]:
    """The keys of this device's rows, by their numbers in the whole batch.

    Args:
      seed: an int, an integer array of shape [] or [2], or a key of `jax.random`.
      batch: rows on this device; the `data` axis cuts the whole batch into equal parts.
    """
    seed = dropout.as_words(seed)
    if seed.ndim != 1:
        raise ValueError(f"the seed has shape {list(seed.shape)}; one seed for all rows has shape [] or [2]")
    rows = manual.axis_index(RULES.batch) * batch + jnp.arange(batch)
    return fold(seed, rows)


def fold(words: UInt32[Array, "*n 2"], number: Array | int) -> UInt32[Array, "*m 2"]:
    """Keys made of keys and a number each."""
    number = jnp.asarray(number).astype(jnp.uint32)
    return jnp.stack(dropout.mix(words[..., 0], words[..., 1], number, jnp.zeros_like(number)), -1)


def drop_tokens(
    x: Float[Array, "B t D"],
    words: UInt32[Array, "B 2"] | None,
    positions: Int[Array, "... T"],
    segment_ids: Int[Array, "... T"] | None,
    rate: float,
) -> Float[Array, "B t D"]:
    """Each number 0 with chance ``rate``, else divided by 1 - rate.

    Args:
      x: activations of this tensor shard's tokens.
      words: keys of the rows at this place; None drops nothing.
      positions, segment_ids: of all tokens of the sequence shard; those that share both share their draws.
    """
    if words is None or not rate:
        return x
    positions = own_tokens(jnp.atleast_2d(positions))
    segment_ids = None if segment_ids is None else own_tokens(jnp.atleast_2d(segment_ids))
    rows, one_head = jnp.zeros(len(x), jnp.int32), jnp.zeros(1, jnp.int32)
    tokens = dropout.query_words(words, rows, one_head, positions, segment_ids)[:, 0]
    kept = dropout.keep_features(tokens, x.shape[-1], rate)
    # In float32: the factor rounded to bfloat16 would make everything larger or smaller, layer after layer.
    return jnp.where(kept, x.astype(jnp.float32) * (1 / (1 - rate)), 0).astype(x.dtype)
