"""Attention on global arrays, sharded over a mesh: the call that replaces `jax.nn.dot_product_attention`.

The custom VJP is outside and ``shard_map`` inside, so that differentiation never goes through a ``shard_map``. Hence it
works under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.checkpoint` and a scan over layers, on Auto and Explicit meshes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from ring_jax import core, layouts, manual, options, planner, routes, sharded
from ring_jax.kernels.tiles import is_float
from ring_jax.options import Schedule, TokenIds
from ring_jax.problem import Inputs, Place, Spec

type _Axis = str | tuple[str, ...] | None


class _Shards(NamedTuple):
    """How one call is cut: the mesh, and the mesh axes of batch, heads and sequence that it has."""

    mesh: Mesh | AbstractMesh
    names: tuple[str, ...]  # the axes that shard_map makes manual
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    sequence: tuple[str, ...]
    all_batch: tuple[str, ...]  # with those that are manual outside already
    all_heads: tuple[str, ...]

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in axes)

    @property
    def arrays(self) -> PartitionSpec:
        """Of query, key, value, out; without its last entry, of lse."""
        return PartitionSpec(self.batch or None, self.sequence or None, self.heads or None)

    @property
    def saved(self) -> PartitionSpec:
        """Of what the backward pass keeps: an axis in front that counts devices."""
        return PartitionSpec(self.names)

    def pairwise(self, x: Any) -> Any:
        """Of a bias or mask ``[B, N, T, S]``: keys are not cut."""
        if x is None:
            return None
        axes = (self.batch, self.heads, self.sequence)
        return PartitionSpec(*((axis or None) if n > 1 else None for axis, n in zip(axes, x.shape, strict=False)))

    def inputs(self, inputs: Inputs) -> Inputs:
        """The inputs with a `PartitionSpec` in the place of every array."""

        def tokens(x: Array) -> PartitionSpec:
            return PartitionSpec((self.batch or None) if x.shape[0] > 1 else None, self.sequence or None)

        def alike(spec: PartitionSpec, tree: Any) -> Any:
            return jax.tree.map(lambda _: spec, tree)

        whole, rows = PartitionSpec(), PartitionSpec(self.batch or None)
        specs: Any = Inputs(
            *(alike(self.arrays, x) for x in inputs[:3]),
            self.pairwise(inputs.bias),
            alike(PartitionSpec(self.heads or None), inputs.sinks),
            alike(whole, inputs.score_args),
            self.pairwise(inputs.mask),
            *(jax.tree.map(tokens, x) for x in (inputs.query_tokens, inputs.key_tokens)),
            *(alike(rows, x) for x in (inputs.query_lengths, inputs.key_lengths)),
            alike(whole, inputs.seed),
            alike(whole, inputs.place),
        )
        return specs


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
    batch_axis: _Axis = "data",
    head_axis: _Axis = "tensor",
    sequence_axis: str | None = "sequence",
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attend exactly over global arrays whose sequence is sharded over a mesh axis.

        out[t] = sum_j exp(scale * q[t] . k[j] - lse[t]) v[j],   over all visible keys j

    A drop-in for `jax.nn.dot_product_attention`: same conventions, arrays of any sharding (they are resharded where
    they must be). Batch rows are cut over ``batch_axis``, heads over ``head_axis``, tokens over ``sequence_axis``.

    Order of operations on a score: scale, soft cap, ``score_fn``, bias, mask; then sinks join the normaliser.

    Args:
      query: ``[B, T, N, H]``, float16, bfloat16, float32 or float64, in the order that ``layout`` names.
      key: ``[B, S, K, H]``; N must be a multiple of K. Key/value heads are never expanded.
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
      positions: int, shaped like segment_ids; None derives them from ``layout``.
      logits_soft_cap: scores become cap * tanh(scores / cap).
      sinks: float ``[N]``, an extra logit for each head whose probability is dropped.
      mask_fn: ``mask_fn(q_pos, kv_pos, q_seg, kv_seg)`` -> bool, True attends; int32 arrays ``[1, t, 1]`` and
        ``[1, 1, s]`` of a tile (segment ids 1 where none are given). It must not close over traced arrays.
      score_fn: ``score_fn(scores, q_pos, kv_pos, head, *score_args)`` -> scores of the same shape; arrays that
        broadcast to the tile ``[b, N, t, s]``, head counted in the whole model. Gradients go to scores and score_args.
      score_args: arrays for score_fn, whole on every device.
      dropout_rate, dropout_seed: probabilities to drop, and which: an int, an integer array of shape [] or [2], or a
        key of `jax.random`. The dropped set is a function of seed, batch row, head, segment and both positions.
      strategy: ``"ring"``, ``"all_gather"``, ``"ulysses"``, ``"usp"``; ``"auto"`` picks one for the hardware and the
        sizes and logs which and why (`ring_jax.choose_strategy`). All give the same numbers.
      layout: order of the sequence in all arrays, see `ring_jax.to_layout`; None promises nothing (pass positions).
        Any length is taken: padding is internal. A multiple of `ring_jax.layouts.required_multiple` saves a copy.
      implementation: ``"xla"``; None picks the best that supports the call.
      schedule: how a ring runs, see `ring_jax.Schedule`.
      return_residual: also return the log-sum-exp, without sinks.
      mesh: the mesh; None takes that of `jax.set_mesh`, and without one runs on one device.
      batch_axis, head_axis, sequence_axis: mesh axis names; one that the mesh lacks counts as size 1.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype, or ``(out, lse)`` with lse ``[B, T, N]`` in float32 (float64 for
      float64 inputs). Both are differentiable. A query that sees nothing gives 0 and lse -inf.

    Raises:
      ValueError, TypeError: shapes, dtypes, names or sizes that do not fit the mesh; before any device work.
      NotImplementedError: a combination that is not verified, with the reason; see `ring_jax.supports`.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> dot_product_attention(x, x, x, is_causal=True).shape
      (1, 4, 2, 8)

    Reference:
      Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, section 3. Sinks: Xiao et al., arXiv:2309.17453; soft cap: Gemma 2, arXiv:2408.00118, section 2.
    """
    keywords = dict(locals())
    for name in ("query", "key", "value", "mesh", "batch_axis", "head_axis", "sequence_axis"):
        del keywords[name]
    options.check(**keywords)
    options.check_arrays(query, key, value)
    shards = _make_shards(mesh, batch_axis, head_axis, sequence_axis)
    strategy = keywords.pop("strategy")
    if shards is None:
        placement = {"axis_name": sequence_axis or "sequence", "batch_axis": batch_axis, "head_axis": head_axis}
        arrays = {"query": query, "key": key, "value": value}
        return sharded.attend("ring" if strategy == "auto" else strategy, arrays | keywords | placement)
    _check_sizes(query, key, shards)
    heads = shards.size(shards.heads)
    axis_name, num_heads = shards.sequence[0] if shards.sequence else "", (query.shape[2] // heads, key.shape[2] // heads)
    spec = sharded.make_spec(query, key, keywords, axis_name, strategy, num_heads)
    inputs, padding = _pad(shards, spec, sharded.make_inputs(query, key, value, keywords, 1))
    spec = _settle(shards, spec, inputs, padding)
    inputs = _place(shards, inputs, shards.inputs(inputs))
    out, lse = (padding.remove(shards, x) for x in _attend(spec, shards, inputs))
    return (out, lse) if return_residual else out


def _make_shards(mesh, batch_axis: _Axis, head_axis: _Axis, sequence_axis: str | None) -> _Shards | None:
    """Match the axis names with the mesh; None where there is no mesh."""
    context = jax.sharding.get_abstract_mesh()
    if mesh is None:
        mesh = context
    if mesh.empty:
        return None
    manual_axes = frozenset(context.manual_axes)
    if sequence_axis in manual_axes:
        raise ValueError(
            f"{sequence_axis=} is manual here: inside shard_map call ring_jax.ring_attention(..., "
            f"axis_name={sequence_axis!r}) on the local shards instead"
        )

    def named(axis: _Axis) -> tuple[str, ...]:
        names = (axis,) if isinstance(axis, str) else tuple(axis or ())
        return tuple(name for name in names if name in mesh.shape)

    def present(axis: _Axis) -> tuple[str, ...]:
        return tuple(name for name in named(axis) if name not in manual_axes)

    batch, heads, sequence = present(batch_axis), present(head_axis), present(sequence_axis)
    used = [*batch, *heads, *sequence]
    if len(set(used)) < len(used):
        raise ValueError(f"a mesh axis may cut one dimension only; got {batch_axis=}, {head_axis=}, {sequence_axis=}")
    names = tuple(name for name in mesh.axis_names if name not in manual_axes)
    return _Shards(mesh, names, batch, heads, sequence, named(batch_axis), named(head_axis))


def _check_sizes(query: Any, key: Any, shards: _Shards) -> None:
    """Raise ValueError for sizes that the mesh cannot cut evenly."""
    batch, heads = shards.size(shards.batch), shards.size(shards.heads)
    if query.shape[0] % batch:
        raise ValueError(
            f"batch size {query.shape[0]} must be divisible by mesh axis {'*'.join(shards.batch)} of size {batch}; "
            f"make the batch a multiple of {batch}, or move those devices to the sequence axis"
        )
    for name, count in (("query", query.shape[2]), ("key/value", key.shape[2])):
        if count % heads:
            raise ValueError(
                f"{count} {name} heads must be divisible by mesh axis {'*'.join(shards.heads)} of size {heads}; "
                "make that axis smaller, or move its devices to the sequence axis"
            )


def _is_explicit(shards: _Shards) -> bool:
    return AxisType.Explicit in shards.mesh.axis_types


def _place(shards: _Shards, tree: Any, specs: Any) -> Any:
    """Reshard on Explicit meshes; on others XLA does."""
    if not _is_explicit(shards):
        return tree
    return jax.tree.map(lambda x, spec: jax.sharding.reshard(x, NamedSharding(shards.mesh, spec)), tree, specs)


class _Padding(NamedTuple):
    """For queries and keys: real length, padded length, and the index in the array of each padded slot."""

    sides: tuple[tuple[int, int, np.ndarray], tuple[int, int, np.ndarray]]

    @property
    def is_none(self) -> bool:
        return all(length == padded for length, padded, _ in self.sides)

    def insert(self, shards: _Shards, x: Any, axis: int, side: int) -> Any:
        """Zeros in the padded slots of an axis; as it is where the axis has size 1 or needs none."""
        length, padded, slots = self.sides[side]
        if length == padded or x.shape[axis] != length or x.shape[axis] == 1 != padded and x.ndim == 4 and axis > 1:
            return x
        return _take(shards, x, slots, axis)

    def remove(self, shards: _Shards, x: Array) -> Array:
        """Queries without the padded slots."""
        length, padded, slots = self.sides[0]
        return x if length == padded else _take(shards, x, np.flatnonzero(slots < length), 1)


def _take(shards: _Shards, x: Array, index: np.ndarray, axis: int) -> Array:
    """Entries of an axis, 0 where the index lies outside."""
    spec = [None] * x.ndim
    if x.ndim > 1 and x.shape[0] % shards.size(shards.batch) == 0:
        spec[0] = shards.batch or None
    where = (slice(None),) * axis + (index,)
    if not _is_explicit(shards):
        return x.at[where].get(mode="fill", fill_value=0)
    sharding = NamedSharding(shards.mesh, PartitionSpec(*spec))
    return jax.sharding.reshard(x, sharding).at[where].get(mode="fill", fill_value=0, out_sharding=sharding)


def _pad(shards: _Shards, spec: Spec, inputs: Inputs) -> tuple[Inputs, _Padding]:
    """Fill both sequences up to lengths that the layout can cut evenly."""
    size = shards.size(shards.sequence)
    sides = []
    for x in (inputs.query, inputs.key):
        padded, slots = layouts.padded_slots(spec.layout or "contiguous", x.shape[1], size)
        sides.append((x.shape[1], padded, slots))
    padding = _Padding(tuple(sides))
    if padding.is_none:
        return inputs, padding

    def pairwise(x: Array | None) -> Array | None:
        if x is not None:
            for axis, side in ((2, 0), (3, 1)):
                x = x if x.shape[axis] == 1 else padding.insert(shards, x, axis, side)
        return x

    def tokens(tree: Any, side: int) -> Any:
        return jax.tree.map(lambda x: padding.insert(shards, x, 1, side), tree)

    return inputs._replace(
        query=padding.insert(shards, inputs.query, 1, 0),
        key=padding.insert(shards, inputs.key, 1, 1),
        value=padding.insert(shards, inputs.value, 1, 1),
        bias=pairwise(inputs.bias),
        mask=pairwise(inputs.mask),
        query_tokens=tokens(inputs.query_tokens, 0),
        key_tokens=tokens(inputs.key_tokens, 1),
    ), padding


def _settle(shards: _Shards, spec: Spec, inputs: Inputs, padding: _Padding) -> Spec:
    """The spec with what depends on the sizes: padding, and the strategy for "auto"."""
    if not padding.is_none:
        spec = spec._replace(real_lengths=tuple(length for length, _, _ in padding.sides))
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
    if spec.schedule != Schedule():
        return spec._replace(strategy=planner.report(planner.Choice("ring", "a schedule was given")).strategy)
    choice = planner.choose_strategy(sizes, _device_kind(shards.mesh), gathered)
    return spec._replace(strategy=planner.report(choice).strategy)


def _device_kind(mesh: Mesh | AbstractMesh) -> str:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].device_kind
    return getattr(mesh.abstract_device, "device_kind", None) or jax.devices()[0].device_kind


def _shard_map(body, shards: _Shards, in_specs, out_specs):
    """``body`` on local shards: manual over every axis of the mesh that is not manual already."""
    nested = bool(jax.sharding.get_abstract_mesh().manual_axes)
    mesh = None if nested else shards.mesh
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(shards.names))


def _local(spec: Spec, shards: _Shards, inputs: Inputs) -> Inputs:
    query = inputs.query
    first_head = manual.first_index(shards.all_heads, query, spec.num_heads[0])
    first_row = manual.first_index(shards.all_batch, query, query.shape[0])
    place = Place(manual.axis_index(spec.axis_name), first_row, first_head)
    return manual.vary_alike(inputs._replace(place=place))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec: Spec, shards: _Shards, inputs: Inputs):
    def body(inputs: Inputs):
        return core.forward(spec, _local(spec, shards, inputs))[:2]

    return _shard_map(body, shards, (shards.inputs(inputs),), shards.arrays)(inputs)


def _attend_forward(spec: Spec, shards: _Shards, inputs: Inputs):
    def body(inputs: Inputs):
        out, lse, saved = core.forward(spec, _local(spec, shards, inputs))
        return out, lse, jax.tree.map(lambda x: x[None], saved)

    specs = shards.arrays, shards.arrays, shards.saved
    out, lse, saved = _shard_map(body, shards, (shards.inputs(inputs),), specs)(inputs)
    return (out, lse), (inputs, saved)


def _attend_backward(spec: Spec, shards: _Shards, residuals, cotangents):
    inputs, saved = residuals
    specs = shards.inputs(inputs)

    def body(inputs: Inputs, saved: core.Saved, dout: Array, dlse: Array):
        saved = jax.tree.map(lambda x: x[0], saved)
        grads = core.backward(spec, *manual.vary_alike(_local(spec, shards, inputs), saved, dout, dlse))
        return jax.tree.map(_sum_shared, grads, gradients)

    args = tuple(spec if is_float(x) else None for spec, x in zip(specs.score_args, inputs.score_args, strict=True))
    gradients: Any = core.InputGradients(*specs[:5], args)
    in_specs = (specs, shards.saved, shards.arrays, shards.arrays)
    return (core.as_cotangents(_shard_map(body, shards, in_specs, gradients)(inputs, saved, *cotangents)),)


def _sum_shared(x: Array, spec: PartitionSpec) -> Array:
    """A gradient summed over the devices that share its array."""
    cut = {name for axes in spec if axes is not None for name in ((axes,) if isinstance(axes, str) else axes)}
    shared = tuple(sorted(jax.typeof(x).manual_axis_type.varying - cut))
    return jax.lax.psum(x, shared) if shared else x


_attend.defvjp(_attend_forward, _attend_backward)
