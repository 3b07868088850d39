"""What every kernel of one block is: two functions, with the softmax state carried in and out.

    forward_block(carry, queries, keys, pairs, scores, tiles)             -> carry    unnormalized output, maximum, sum
    backward_block(sums, queries, cotangents, keys, pairs, scores, tiles) -> sums     dq, dkv, dbias, dargs

Shapes (R rows with a mask of their own, b batch rows that share one; R * b = B): q ``[R,b,K,G,T,H]``, keys and values
side by side in kv ``[R,b,K,S,H+Hv]``, softmax statistics ``[R,b,K,G,T]``. Statistics and all accumulators are float32
(float64 for float64 inputs). A row that has seen nothing has maximum `empty`, sum 0 and output 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jax import Array

from ring_jax.kernels.tiles import Scores


class Carry(NamedTuple):
    """Online-softmax state of every query: out = sum exp(s - maximum) v, total = sum exp(s - maximum)."""

    out: Array  # [R, b, K, G, T, Hv]
    maximum: Array  # [R, b, K, G, T]
    total: Array  # [R, b, K, G, T]


class Cotangents(NamedTuple):
    """What the backward pass needs of every query, all of the *final* result.

    lse is the global log-sum-exp (inf for a row that gives no gradient), delta is sum(dout * out) - dlse, and lost is
    what lse lost to rounding, or None where scores are small enough for that not to matter.
    """

    dout: Array  # [R, b, K, G, T, Hv]
    lse: Array  # [R, b, K, G, T]
    delta: Array
    lost: Array | None


class Gradients(NamedTuple):
    """Sums over all blocks so far; the keys' is that of one block."""

    query: Array  # [R, b, K, G, T, H]
    keys: Array  # [R, b, K, S, H+Hv]
    bias: Array | None  # as Pairs.bias
    args: tuple[Array, ...]  # of the float score_args


def empty(dtype: Any) -> float:
    """Running maximum of a row that has seen no key."""
    return float(np.finfo(dtype).min)


class Call(NamedTuple):
    """What decides whether a kernel serves a call: all known when the call is traced."""

    platform: str  # "cpu", "gpu", "tpu"
    device_kind: str
    dtype: Any
    head_sizes: tuple[int, int]  # of queries and keys, and of values
    lengths: tuple[int, int]  # queries and keys of one block
    scores: Scores
    layout: str | None
    default_positions: bool  # none were given
    has_segments: bool  # ids, or lengths of rows, or padding behind the sequence
    has_bias: bool
    has_mask: bool
    strategy: str
    two_directions: bool
    tile_size: int | None  # that was asked for
    return_lse: bool  # so that it may have a gradient
    group: int = 1  # query heads for each key/value head
    num_blocks: int = 1  # at most, that one device folds together


@runtime_checkable
class Kernel(Protocol):
    """A module of this package that computes blocks."""

    forward_block: Callable[..., Carry]
    backward_block: Callable[..., Gradients]
    tile_size: Callable[..., int]
    refuses: Callable[[Call], str | None]
    """Why a call is not served: the option, and what to use instead; None where it is."""
