"""One strategy's forward or backward pass alone, compiled for simulated devices: what `ring_jax.inspect` looks at.

The backward pass is compiled apart from the forward, or XLA may merge their hops.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

import ring_jax
from ring_jax import core, manual, sharded
from ring_jax.problem import Place

BATCH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 16, 16


def compile_call(
    size: int,
    local: int,
    *,
    backward: bool = False,
    strategy: str = "ring",
    dtype: str = "float32",
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    dims: tuple[int, int] = (HEAD_DIM, VALUE_DIM),
    batch: int = BATCH,
    packed: bool = False,
    **keywords: Any,
):
    """Compiled; causal zigzag unless ``keywords`` say otherwise."""
    keywords = {"is_causal": True, "layout": "zigzag"} | keywords
    mesh, spec = ring_jax.make_mesh(sequence=size), P(None, "sequence")
    placed = functools.partial(jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, spec))
    rows = (batch, local * size)
    query, out = (placed((*rows, heads[0], n), dtype) for n in dims)
    key, value = (placed((*rows, heads[1], n), dtype) for n in dims)
    given = {name: placed(rows, "int32") for name in ("segment_ids", "positions")} if packed else {}
    if backward:
        call = functools.partial(_backward, strategy, keywords)
        lse = placed(query.shape[:-1], "float32")
        arrays = (query, key, value, given, out, lse)
    else:
        attend = getattr(ring_jax, f"{strategy}_attention")
        call = lambda query, key, value, given: attend(query, key, value, **given, **keywords)  # noqa: E731
        arrays = (query, key, value, given)
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)).lower(*arrays).compile()


def _backward(strategy: str, keywords: dict[str, Any], query, key, value, given, out, lse):
    """(dq, dk, dv) from the residuals that the forward pass keeps; ``out`` also serves as its cotangent."""
    every = sharded._DEFAULTS | {"bias": None, "mask": None} | given | keywords
    every = {name: x for name, x in every.items() if name not in ("axis_name", "batch_axis", "head_axis")}
    spec = sharded.make_spec(query, key, every, "sequence", strategy, (query.shape[2], key.shape[2]))
    inputs = sharded.make_inputs(query, key, value, every, manual.axis_size("sequence"))
    place = Place(jax.lax.axis_index("sequence"), jnp.int32(0), jnp.int32(0))
    inputs, lse = manual.vary_alike(inputs._replace(place=place), lse)
    lost = None if out.dtype == jnp.float32 else out
    arrays = None
    if strategy in ("ulysses", "usp"):  # residuals are kept as they are after the exchange
        grid = core._grid(spec)

        def turn(x):
            return x.reshape(x.shape[0], x.shape[1] * grid.ulysses, -1, *x.shape[3:])

        query_, key_, value_ = core.ulysses.enter_arrays(grid, inputs)
        # What the forward pass kept, not what this pass exchanges: constants of the same shape.
        arrays = tuple(jnp.zeros_like(x) + turn(query)[..., :1, :1] for x in (query_, key_, value_))
        saved = core.Saved(arrays, turn(out), None if lost is None else turn(lost), turn(lse), None)
    else:
        saved = core.Saved(None, out, lost, lse, None)
    grads = core.backward(spec, core.kept(inputs, saved), saved, out, jnp.zeros_like(inputs.query[..., 0], lse.dtype))
    return grads.query, grads.key, grads.value
