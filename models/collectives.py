"""What passes between devices inside the model: weights gathered where they run, tokens between blocks.

    weights    cut over (data, sequence) along D, as far as these divide it; gathered for one layer at a time, their
               gradient comes back as a sum cut the same way (reduce-scatter), in float32 whatever the compute type
    tokens     between blocks a device holds 1 / tensor of the tokens of its sequence shard: gathered before the
               column-parallel matmul, summed and cut again after the row-parallel one (Megatron's sequence parallelism)

Invariant: over an axis that is not manual, or has size 1, everything here is the identity. So `model(tokens)` runs with
no mesh at all, and nothing is sent over an axis of size 1.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from models.sharding import RULES, WEIGHT_AXES, weight_axes
from ring_jax import manual

GATHERED = "gathered weight"
"""Name of gathered weights for rematerialization: they are never kept for the backward pass."""
_COPIES = ("slice", "dynamic_slice", "squeeze", "pvary", "optimization_barrier")
"""Operations on the way from a stack of weights to one gathered weight that give what they are given, or a part."""


def keep_all_but_weights(operation: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps everything for the backward pass but what is made of weights alone.

    It is asked about one operation after another. A result that it does not keep, and that is needed, is made again
    from the nearest that is kept: so it must say no to all between a weight and its use, or another form of the weight
    would be kept in the place of the gathered one.
    """
    return operation.name not in _COPIES and not _is_gathered(params)


def _is_gathered(params: dict[str, Any]) -> bool:
    """Whether an operation gives the name `GATHERED`, or is a call of functions that do."""
    inner = (getattr(value, "jaxpr", value) for value in params.values())
    equations = (equation for jaxpr in inner for equation in getattr(jaxpr, "eqns", ()))
    return params.get("name") == GATHERED or any(_is_gathered(equation.params) for equation in equations)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(weight: Array, axis: int, axes: tuple[str, ...], types: tuple[jnp.dtype, jnp.dtype]) -> Array:
    """``types`` are those of the weight and of the result. In the forward rule this call is one operation."""
    whole = weight.astype(types[1])
    whole = lax.all_gather(whole, axes, axis=axis, tiled=True) if axes else whole
    return checkpoint_name(whole, GATHERED)


def _gather_forward(weight: Array, axis: int, axes: Any, types: Any) -> tuple[Array, None]:
    return _gather(weight, axis, axes, types), None


def _gather_backward(axis: int, axes: tuple[str, ...], types: Any, _: None, cotangent: Array) -> tuple[Array]:
    wide = cotangent.astype(jnp.promote_types(types[0], jnp.float32))
    wide = lax.psum_scatter(wide, axes, scatter_dimension=axis, tiled=True) if axes else wide
    return (wide.astype(types[0]),)


_gather.defvjp(_gather_forward, _gather_backward)


def gather_weight(weight: Array, axis: int, size: int, like: Array) -> Array:
    """A whole weight in the type of ``like``, from this device's part of dimension ``axis`` (``size`` in all)."""
    axes: tuple[str, ...] = ()
    if weight.shape[axis] != size:
        axes = weight_axes(size, {name: manual.axis_size(name) for name in WEIGHT_AXES})
        axes = tuple(name for name in axes if manual.axis_is_manual(name))
    elif weight.dtype == like.dtype:
        return weight
    weight = manual.vary_alike(weight, like)[0]  # so that the sum over devices that share it is one in float32, too
    return _gather(weight, axis % weight.ndim, axes, (weight.dtype, jnp.dtype(like.dtype)))


def wide_ids(ids: Array) -> Array:
    """Token ids in a type that holds every id of a vocabulary, its size, and -1; the ids may come as bytes."""
    return ids.astype(jnp.int64 if ids.dtype.itemsize > 4 else jnp.int32)


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
