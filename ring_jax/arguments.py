"""The arrays of a call, checked before any device work: kinds, shapes, and integers that 32 bits hold.

What always holds: *no value changes on its way in.* Positions and ids are int32 inside, and one that would wrap is
refused: an id of 2^32 would become 0, which is padding, and two ids that differ by 2^32 would be one segment.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

FLOATS = ("float16", "bfloat16", "float32", "float64")
_INT32 = np.iinfo(np.int32)


def as_arrays(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
    """The three as JAX arrays; ValueError or TypeError for what is not grouped-query attention."""
    arrays = {name: _as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
    for name, x in arrays.items():
        if x.ndim != 4:
            fix = "; add the batch with x[None]" if x.ndim == 3 else ""
            rule = "4 dimensions [batch, length, heads, head size]"
            raise ValueError(f"{name} must have {rule}; got shape {x.shape}{fix}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} must be floating point ({', '.join(FLOATS)}); got {x.dtype}. Cast it to one")
    query, key, value = arrays.values()
    if not query.dtype == key.dtype == value.dtype:
        dtypes = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
        raise TypeError(f"query, key and value must have one dtype; got {dtypes}. Cast them to one")
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        raise ValueError(f"no dimension may be empty; got {shapes}. Leave the call out where there is nothing to see")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"query, key and value must have one batch size; got {shapes}. Repeat the rows of the smaller")
    if key.shape[1:3] != value.shape[1:3]:
        order = "the order is [batch, length, heads, head size]"
        raise ValueError(f"key and value must have one length and one number of heads; got {shapes}; {order}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have one head size; got {shapes}. Only the value's may be another")
    if query.shape[2] % key.shape[2]:
        rule = f"{query.shape[2]} query heads must be a multiple of {key.shape[2]} key/value heads"
        raise ValueError(f"{rule}; got {shapes}. Change either number, or repeat key and value heads")
    return query, key, value


def _as_array(name: str, x: Any) -> Array:
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise TypeError(f"{name} must be an array; got {type(x).__name__} ({error})") from None


def as_int32(name: str, x: Any, of: str = "") -> Array:
    """Integers as int32: TypeError for what is none, or is traced and wider; ValueError for one that would wrap."""
    x = x if isinstance(x, (Array, np.ndarray)) or hasattr(x, "__jax_array__") else np.asarray(x)
    x = x if isinstance(x, np.ndarray) else _as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers; got {x.dtype}{of}. Cast to int32")
    if np.can_cast(x.dtype, np.int32):
        return jnp.asarray(x, jnp.int32)
    rule = f"{name} must fit 32 bits, from {_INT32.min} to {_INT32.max}"
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{rule}; got traced {x.dtype}{of}, whose values are not known. Cast it with .astype(jnp.int32)"
        )
    low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
    if low < _INT32.min or high > _INT32.max:
        raise ValueError(f"{rule}; got {low} to {high}{of}. Number them from 0")
    return jnp.asarray(x.astype(np.int32))


def as_pair(name: str, value: Any, batch: int, lengths: tuple[int, int]) -> tuple[Any, Any]:
    """Split ``segment_ids`` or ``positions`` into the query's and the keys', each int32 ``[1 or B, length]``."""
    if value is None:
        return None, None
    if isinstance(value, list) and any(hasattr(x, "shape") for x in value):
        raise TypeError(
            f"{name} must be one array or a tuple of two; got a list of arrays. Pass a tuple, or stack them"
        )
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be one array or a pair (query's, keys'); got {len(pair)} arrays")
    if any(x is None for x in pair):
        rest = "ones for a side that has no segments" if name == "segment_ids" else "jnp.arange for a side in order"
        raise ValueError(f"{name} must be given for both sides or for none; got None in the pair. Pass {rest}")
    arrays = []
    for x, length, side in zip(pair, lengths, ("query", "keys"), strict=True):
        x = as_int32(name, x, f" for the {side}")
        if x.shape not in ((length,), (batch, length), (1, length)):
            one = not isinstance(value, tuple) and lengths[0] != lengths[1]
            fix = ". Queries and keys differ in length: pass a pair (query's, keys')" if one else ""
            raise ValueError(
                f"{name} must have shape [{length}] or [{batch}, {length}] for the {side} (local lengths inside "
                f"shard_map); got {x.shape}{fix}"
            )
        arrays.append(jnp.broadcast_to(x, (x.shape[0] if x.ndim == 2 else 1, length)))
    if name == "positions":
        _check_distance(pair)
    return arrays[0], arrays[1]


def _check_distance(pair: tuple[Any, ...]) -> None:
    """ValueError for NumPy positions whose difference would not fit 32 bits; of others it is not known."""
    known = [x for x in pair if isinstance(x, np.ndarray) and x.size]
    if known and max(int(x.max()) for x in known) - min(int(x.min()) for x in known) > _INT32.max:
        raise ValueError(f"positions must lie less than {_INT32.max + 1} apart: differences are 32-bit. Count from 0")


def as_pairwise(name: str, value: Any, shape: tuple[int, int, int, int]) -> Array | None:
    """``bias`` or ``mask`` with all four axes, each of size 1 or that of ``shape`` [B, N, T, S]."""
    if value is None:
        return None
    x = _as_array(name, value)
    kind, rule = (np.bool_, "boolean, True attends") if name == "mask" else (jnp.floating, "floating point")
    if not jnp.issubdtype(x.dtype, kind):
        fix = "Compare it: mask != 0" if name == "mask" else "Cast it; booleans go in mask"
        raise TypeError(f"{name} must be {rule}; got {x.dtype}. {fix}")
    x = x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x
    if x.ndim != 4 or any(n not in (1, full) for n, full in zip(x.shape, shape, strict=True)):
        letters = "[batch, query heads, queries, keys]"
        raise ValueError(f"{name} must broadcast to {letters} = {list(shape)}; got {list(jnp.shape(value))}")
    return x


def as_row(name: str, value: Any, size: int, kind: Any) -> Array | None:
    """``sinks`` [N] or sequence lengths [B], checked."""
    if value is None:
        return None
    x = as_int32(name, value) if kind is jnp.integer else _as_array(name, value)
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(f"{name} must be floating point; got {x.dtype}. Cast it to float32")
    if x.shape != (size,):
        each = "batch row" if kind is jnp.integer else "query head"
        raise ValueError(f"{name} must have shape [{size}]; got {list(x.shape)}. Pass one entry for each {each}")
    return x


def as_score_args(values: Any) -> tuple[Array, ...]:
    """``score_args``, each an array."""
    try:
        return tuple(jnp.asarray(x) for x in values)
    except TypeError:
        kinds = ", ".join(type(x).__name__ for x in values)
        raise TypeError(f"score_args must be a flat tuple of arrays; got {kinds}. Pass jax.tree.leaves(...)") from None
