"""Attention on global arrays, sharded over a mesh: the call that replaces `jax.nn.dot_product_attention`.

The custom VJP is outside and ``shard_map`` inside, so that differentiation never goes through a ``shard_map``. Hence it
works under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.checkpoint` and a scan over layers, on Auto and Explicit meshes.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Float

from ring_jax import arguments, core, manual, options, planner, routes, sharded
from ring_jax.kernels import interpret
from ring_jax.kernels.tiles import is_float
from ring_jax.mesh import target
from ring_jax.options import Schedule, TokenIds
from ring_jax.problem import Inputs, Place, Spec
from ring_jax.shards import Axis, Padding, Shards, check_sizes, make_shards, pad, place, share_heads, sum_heads


def dot_product_attention(
    query: Float[Array | np.ndarray, "B T N H"],
    key: Float[Array | np.ndarray, "B S K H"],
    value: Float[Array | np.ndarray, "B S K Hv"],
    bias: Any = None,
    mask: Any = None,
    *,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Any = None,
    chunk_size: int | None = None,
    segment_ids: TokenIds = None,
    positions: TokenIds = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    mask_fn: Any = None,
    score_fn: Any = None,
    score_args: Any = (),
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    strategy: str = "auto",
    layout: str | None = "contiguous",
    implementation: str | None = None,
    schedule: Schedule | None = None,
    return_residual: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: Axis = "data",
    head_axis: Axis = "tensor",
    sequence_axis: str | None = "sequence",
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attend exactly over global arrays whose sequence is sharded over a mesh axis.

        out[t] = sum_j exp(scale * q[t] . k[j] - lse[t]) v[j],   over all visible keys j

    A drop-in for `jax.nn.dot_product_attention`: same conventions, arrays of any sharding (they are resharded where
    they must be). Batch rows are cut over ``batch_axis``, heads over ``head_axis``, tokens over ``sequence_axis``.

    Order of operations on a score: scale, soft cap, ``score_fn``, bias, mask; then sinks join the normaliser.

    Args:
      query: ``[B, T, N, H]``, float16, bfloat16, float32 or float64, in the order that ``layout`` names.
      key: ``[B, S, K, H]``; N must be a multiple of K. Key/value heads are never expanded on a device; where K is
        smaller than the head axis, and divides it, each device holds the one head that its queries share.
      value: ``[B, S, K, Hv]``.
      bias: float, broadcastable to ``[B, N, T, S]``, added to the scores; cut over the queries, not over the keys.
      mask: bool, broadcastable to ``[B, N, T, S]``, True attends; cut as the bias. O(T*S) memory: for long sequences
        prefer the rules below.
      query_seq_lengths, key_value_seq_lengths: int ``[B]``; tokens from there on (in natural order) are padding.
      scale: a Python number; None means 1/sqrt(H).
      is_causal: a query sees keys at its own position and before. T and S may differ: positions count from 0 in both.
      local_window_size: (left, right), an int is both: a query at p sees positions p - left to p + right.
      chunk_size: a query at p sees positions q with q // chunk_size == p // chunk_size.
      segment_ids: int ``[B, S]`` or ``[S]``, or a pair (query's, keys'). Attention stays inside a segment. 0 is
        padding: such a token sees and is seen by nothing, gives exactly 0, gets no gradient, and may hold NaN.
      positions: int, shaped like segment_ids, from 0 to 2^31 - 1; None derives them from ``layout``. Traced ones, and
        traced segment_ids, must be int32 or narrower.
      logits_soft_cap: scores become cap * tanh(scores / cap).
      sinks: float ``[N]``, an extra logit for each head whose probability is dropped.
      mask_fn: ``mask_fn(q_pos, kv_pos, q_seg, kv_seg)`` -> bool, True attends; int32 arrays ``[1, t, 1]`` and
        ``[1, 1, s]`` of a tile (segment ids 1 where none are given). It must not close over traced arrays.
      score_fn: ``score_fn(scores, q_pos, kv_pos, head, *score_args)`` -> scores of the same shape; arrays that
        broadcast to the tile ``[b, N, t, s]``, head counted in the whole model. Gradients go to scores and score_args.
      score_args: arrays for score_fn, whole on every device.
      dropout_rate, dropout_seed: probabilities to drop, and which: an int, an integer array of shape [] or [2], or a
        key of `jax.random`. The dropped set is a function of seed, batch row, head, segment and both positions. An
        integer array [B, 2] gives each row a seed of its own, and the row's number does not enter.
      strategy: ``"ring"``, ``"all_gather"``, ``"ulysses"``, ``"usp"``; ``"auto"`` picks one for the hardware and the
        sizes and logs which and why (`ring_jax.choose_strategy`). All give the same numbers.
      layout: order of the sequence in all arrays, see `ring_jax.to_layout`. It promises that inside a segment
        differences of positions are those of natural indices: windows and chunks skip by it what they cannot reach.
        None promises nothing (pass positions). Any length is taken: padding is internal; a multiple of
        `ring_jax.layouts.required_multiple` saves a copy.
      implementation: a kernel by name (docs/kernels.md); None picks the best that serves the call on these devices.
      schedule: how a ring runs, see `ring_jax.Schedule`.
      return_residual: also return the log-sum-exp, without sinks.
      mesh: the mesh; None takes that of `jax.set_mesh`, and without one runs on one device.
      batch_axis, head_axis, sequence_axis: mesh axis names, of batch rows and heads also tuples; None where nothing is
        cut. One that the mesh lacks counts as size 1, but a mesh of several devices must have one of the three.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype, or ``(out, lse)`` with lse ``[B, T, N]`` in float32 (float64 for
      float64 inputs). Both are differentiable, once, in reverse mode. A query that sees nothing gives 0 and lse -inf.

    Raises:
      ValueError, TypeError: shapes, dtypes, names or sizes that do not fit the mesh; before any device work.
      NotImplementedError: a combination that is not verified, with the reason; see `ring_jax.supports`.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> dot_product_attention(x, x, x, is_causal=True).shape
      (1, 4, 2, 8)

    Reference:
      Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, section 3.
      Sinks: Xiao et al., arXiv:2309.17453. Soft cap: Gemma 2, arXiv:2408.00118, section 2.
    """
    keywords = dict(locals())
    for name in ("query", "key", "value", "mesh", "batch_axis", "head_axis", "sequence_axis"):
        del keywords[name]
    options.check(**keywords)
    query, key, value = arguments.as_arrays(query, key, value)
    shards = make_shards(mesh, batch_axis, head_axis, sequence_axis, layout)
    strategy = keywords.pop("strategy")
    if shards is None:
        placement = {"axis_name": sequence_axis, "batch_axis": batch_axis, "head_axis": head_axis}
        arrays = {"query": query, "key": key, "value": value}
        return sharded.attend("ring" if strategy == "auto" else strategy, arrays | keywords | placement)
    check_sizes(query, key, shards)
    sharded.check_counted(query, keywords, shards.outer_batch, shards.outer_heads)
    heads = shards.size(shards.heads)
    axis_name, num_heads = (
        shards.sequence[0] if shards.sequence else "",
        (query.shape[2] // heads, max(1, key.shape[2] // heads)),
    )
    spec = sharded.make_spec(query, key, keywords, axis_name, strategy, num_heads)
    spec = spec._replace(copies=max(1, heads // key.shape[2]))
    inputs, padding = pad(shards, spec, sharded.make_inputs(query, key, value, keywords, 1))
    spec = _settle(shards, spec, inputs, padding)
    num_shards = shards.size(shards.sequence)
    spec = sharded.settle_kernel(spec, keywords["implementation"], inputs, target(shards.mesh), num_shards)
    outer = Place(
        jnp.int32(0),
        manual.first_index(shards.outer_batch, inputs.query, query.shape[0]),
        manual.first_index(shards.outer_heads, inputs.query, query.shape[2]),
    )
    inputs = place(shards, inputs._replace(place=outer), shards.inputs(inputs))
    spec, inputs = sharded.vary_alike(spec, inputs)  # inside another shard_map
    out, lse = (padding.query.remove(shards, x) for x in _attend(spec, shards, inputs))
    return (out, lse) if return_residual else out


def _settle(shards: Shards, spec: Spec, inputs: Inputs, padding: Padding) -> Spec:
    """The spec with what depends on the sizes: padding, and the strategy for "auto"."""
    if not padding.is_none:
        spec = spec._replace(real_lengths=(padding.query.length, padding.key.length))
    size = shards.size(shards.sequence)
    if spec.strategy != "auto":
        return spec
    local = inputs.query.shape[1] // size, inputs.key.shape[1] // size
    grid = routes.Grid("", 1, size, 1)
    rules = spec.scores.rules
    plan = routes.reachable(grid, routes.Reach(spec.layout, rules, local, spec.default_positions, spec.promised))
    width = planner.itemsize(inputs.query.dtype)
    sizes = planner.Sizes(
        size,
        *spec.num_heads,
        local[1],
        width,
        planner.itemsize(spec.schedule.gradient_dtype),
        rules.is_causal and spec.layout in ("zigzag", "striped"),
        len([offset for offset in plan[0] if offset]),
    )
    entries = inputs.key.shape[-1] + inputs.value.shape[-1]
    rows = inputs.key.shape[0] // shards.size(shards.batch)
    gathered = width * rows * spec.num_heads[1] * entries * inputs.key.shape[1]
    if spec.schedule._replace(tile_size=None) != Schedule():
        return spec._replace(strategy=planner.report(planner.Choice("ring", "a schedule was given")).strategy)
    choice = planner.choose_strategy(sizes, target(shards.mesh).device_kind, gathered)
    return spec._replace(strategy=planner.report(choice).strategy)


def _shard_map(body, shards: Shards, in_specs, out_specs):
    """``body`` on local shards: manual over every axis of the mesh that is not manual already.

    An interpreted kernel has constants without axes, so that types cannot be checked around it. Outside of `jax.jit` it
    is a program all the same: op by op each of its constants is a result, which `jax_debug_nans` takes for a fault.
    """
    nested = bool(jax.sharding.get_abstract_mesh().manual_axes)
    names, mesh, check = frozenset(shards.names), None if nested else shards.mesh, not interpret.is_on()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=check)

    def run(*args):
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        return (mapped if is_traced else jax.jit(mapped))(*args)

    return run


def _local(spec: Spec, shards: Shards, inputs: Inputs, like: Array) -> Inputs:
    """The inputs with this device's place, all varying alike; ``like`` is the query or what is cut as it is."""
    first_row = inputs.place.first_row + manual.first_index(shards.batch, like, like.shape[0])
    first_head = inputs.place.first_head + manual.first_index(shards.heads, like, spec.num_heads[0])
    place = Place(manual.axis_index(spec.axis_name), first_row, first_head)
    return manual.vary_alike(inputs._replace(place=place))[0]


def _with_copies(spec: Spec, shards: Shards, inputs: Inputs) -> Inputs:
    """The inputs with a key/value head for each shard of the heads, as far as they still hold keys and values."""
    key, value = (None if x is None else share_heads(shards, spec.copies, x) for x in (inputs.key, inputs.value))
    return inputs._replace(key=cast(Any, key), value=cast(Any, value))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec: Spec, shards: Shards, inputs: Inputs):
    """(out, lse) with its own gradient; copies of heads are made in here, so that their gradients are summed in here.

    The transpose of a copy outside would sum what is rounded to half precision already, and in half precision.
    """
    inputs = _with_copies(spec, shards, inputs)

    def body(inputs: Inputs):
        return core.forward(spec, _local(spec, shards, inputs, inputs.query))[:2]

    return _shard_map(body, shards, (shards.inputs(inputs),), shards.arrays)(inputs)


def _attend_forward(spec: Spec, shards: Shards, inputs: Inputs):
    def body(inputs: Inputs):
        out, lse, saved = core.forward(spec, _local(spec, shards, inputs, inputs.query))
        return out, lse, jax.tree.map(lambda x: x[None], saved)

    specs, copied = (shards.arrays, shards.arrays, shards.saved), _with_copies(spec, shards, inputs)
    out, lse, saved = _shard_map(body, shards, (shards.inputs(copied),), specs)(copied)
    out, lse, saved = jax.tree.map(lambda x: checkpoint_name(x, core.ATTENTION), (out, lse, saved))
    return (out, lse), (core.kept(inputs, saved), saved)


def _attend_backward(spec: Spec, shards: Shards, residuals, cotangents):
    given, saved = residuals
    inputs = _with_copies(spec, shards, given)
    specs, arrays = shards.inputs(inputs), cast(Any, shards.arrays)

    def body(inputs: Inputs, saved: core.Saved, dout: Array, dlse: Array):
        kept = jax.tree.map(lambda x: x[0], saved)
        grads = core.backward(spec, *manual.vary_alike(_local(spec, shards, inputs, dout), kept, dout, dlse))
        return jax.tree.map(functools.partial(_sum_shared, shards), grads, gradients)

    def floats(args: Any) -> Any:
        """None for arguments without a gradient."""
        return tuple(x if is_float(y) else None for x, y in zip(args, inputs.score_args, strict=True))

    gradients: Any = core.InputGradients(arrays, arrays, arrays, specs.bias, specs.sinks, floats(specs.score_args))
    in_specs = (specs, shards.saved, shards.arrays, shards.arrays)
    summed = _shard_map(body, shards, in_specs, gradients)(inputs, saved, *cotangents)
    key, value = (sum_heads(shards, spec.copies, x) for x in (summed.key, summed.value))
    summed = summed._replace(key=key, value=value)
    return (core.as_cotangents(spec, summed, given, saved.out.dtype),)


def _sum_shared(shards: Shards, x: Array, spec: jax.P) -> Array:
    """A gradient summed over the devices that share its array: over the axes that cut the call, but not this array."""
    cut = {name for axes in spec if axes is not None for name in ((axes,) if isinstance(axes, str) else axes)}
    shared = tuple(name for name in (*shards.batch, *shards.heads, *shards.sequence) if name not in cut)
    return jax.lax.psum(x, shared) if shared else x


_attend.defvjp(_attend_forward, _attend_backward)
