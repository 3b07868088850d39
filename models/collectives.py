"""What passes between devices inside the model: weights gathered where they run, tokens between blocks.

    weights    cut over (data, sequence) along D, as far as these divide it; gathered for one layer at a time, their
               gradient comes back as a sum cut the same way (reduce-scatter), in float32 whatever the compute type
    tokens     between blocks a device holds 1 / tensor of the tokens of its sequence shard: gathered before the
               column-parallel matmul, summed and cut again after the row-parallel one (Megatron's sequence parallelism)

Invariant: over an axis that is not manual, or has size 1, everything here is the identity. So `model(tokens)` runs with
no mesh at all, and nothing is sent over an axis of size 1.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from models.sharding import RULES, WEIGHT_AXES, weight_axes
from ring_jax import manual

GATHERED = "gathered weight"
"""Name of gathered weights for rematerialization: they are never kept for the backward pass."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(weight: Array, axis: int, axes: tuple[str, ...], dtype: jnp.dtype) -> Array:
    return lax.all_gather(weight.astype(dtype), axes, axis=axis, tiled=True)


def _gather_forward(weight: Array, axis: int, axes: tuple[str, ...], dtype: jnp.dtype) -> tuple[Array, None]:
    return _gather(weight, axis, axes, dtype), None


def _gather_backward(axis: int, axes: tuple[str, ...], dtype: jnp.dtype, _: None, cotangent: Array) -> tuple[Array]:
    return (lax.psum_scatter(cotangent.astype(jnp.float32), axes, scatter_dimension=axis, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def gather_weight(weight: Array, axis: int, size: int, like: Array) -> Array:
    """A whole weight in the type of ``like``, from this device's part of dimension ``axis`` (``size`` in all)."""
    if weight.shape[axis] == size:
        return weight.astype(like.dtype)
    axes = weight_axes(size, {name: manual.axis_size(name) for name in WEIGHT_AXES})
    axes = tuple(name for name in axes if manual.axis_is_manual(name))
    weight = manual.vary_alike(weight, like)[0]
    return checkpoint_name(_gather(weight, axis % weight.ndim, axes, jnp.dtype(like.dtype)), GATHERED)


def gather_tokens(x: Array, axis: int = 1) -> Array:
    """All tokens of the sequence shard, from this device's part of them."""
    if manual.axis_size(RULES.heads) == 1:
        return x
    return lax.all_gather(x, RULES.heads, axis=axis, tiled=True)


def scatter_tokens(partial: Array, axis: int = 1) -> Array:
    """This device's part of the tokens, summed over the tensor shards."""
    if manual.axis_size(RULES.heads) == 1:
        return partial
    return lax.psum_scatter(partial, RULES.heads, scatter_dimension=axis, tiled=True)


def own_tokens(x: Array, axis: int = 1) -> Array:
    """This tensor shard's part of an array that all tensor shards of the sequence shard hold alike."""
    shards = manual.axis_size(RULES.heads)
    if shards == 1:
        return x
    count = x.shape[axis] // shards
    return lax.dynamic_slice_in_dim(x, manual.axis_index(RULES.heads) * count, count, axis=axis)


def vocab_shard(held: int, size: int) -> tuple[Array | int, tuple[str, ...]]:
    """First token id of this device's part of the vocabulary, and the axes that it is cut over."""
    if held == size:
        return 0, ()
    axes = (RULES.heads, RULES.layers)
    index = manual.axis_index(axes[0]) * manual.axis_size(axes[1]) + manual.axis_index(axes[1])
    return index * held, tuple(axis for axis in axes if manual.axis_is_manual(axis))


def replicated(x: Array) -> Array:
    """A value that is equal on all tensor and pipeline shards, typed as such where these axes have size 1."""
    varying = jax.typeof(x).manual_axis_type.varying
    ones = tuple(axis for axis in (RULES.heads, RULES.layers) if axis in varying and manual.axis_size(axis) == 1)
    return lax.psum(x, ones) if ones else x
