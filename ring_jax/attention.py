"""Attention on global arrays, sharded over a mesh: the call that replaces `jax.nn.dot_product_attention`.

The custom VJP is outside and ``shard_map`` inside, so that differentiation never goes through a ``shard_map``. Hence it
works under `jax.jit`, `jax.grad`, `jax.vmap`, `jax.checkpoint` and a scan over layers, on Auto and Explicit meshes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from ring_jax import layouts, manual, options, ring
from ring_jax.masks import Tokens
from ring_jax.options import TokenIds
from ring_jax.ring import Inputs, RingSpec

type _Axis = str | tuple[str, ...] | None


class _Shards(NamedTuple):
    """How one call is cut: the mesh, and the mesh axes of batch, heads and sequence that it has."""

    mesh: Mesh | AbstractMesh
    names: frozenset[str]  # the axes that shard_map makes manual
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    sequence: tuple[str, ...]

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in axes)

    @property
    def arrays(self) -> PartitionSpec:
        """Of query, key, value, out; without its last entry, of lse."""
        return PartitionSpec(self.batch or None, self.sequence or None, self.heads or None)

    def inputs(self, inputs: Inputs) -> Any:
        """The inputs with a `PartitionSpec` in the place of every array."""

        def tokens(x: Array) -> PartitionSpec:
            return PartitionSpec((self.batch or None) if x.shape[0] > 1 else None, self.sequence or None)

        arrays: Any = self.arrays
        scalar: Any = PartitionSpec()
        query_tokens, key_tokens = (jax.tree.map(tokens, x) for x in (inputs.query_tokens, inputs.key_tokens))
        return Inputs(arrays, arrays, arrays, query_tokens, key_tokens, scalar)


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
    score_args: tuple[Any, ...] = (),
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    strategy: str = "auto",
    layout: str | None = "contiguous",
    implementation: str | None = None,
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

    Args:
      query: ``[B, T, N, H]``, float16, bfloat16, float32 or float64, in the order that ``layout`` names.
      key: ``[B, S, K, H]``; N must be a multiple of K. Key/value heads are never expanded.
      value: ``[B, S, K, Hv]``.
      scale: a Python number; None means 1/sqrt(H).
      is_causal: a query sees keys at its own position and before. T and S may differ: positions count from 0 in both.
      segment_ids: int ``[B, S]`` or ``[S]``, or a pair (query's, keys'). Attention stays inside a segment. 0 is
        padding: such a token sees and is seen by nothing, gives exactly 0, gets no gradient, and may hold NaN.
      positions: int, shaped like segment_ids; None derives them from ``layout``.
      strategy: ``"ring"``; ``"auto"`` picks it.
      layout: order of the sequence in all arrays, see `ring_jax.to_layout`; None promises nothing (pass positions).
      implementation: ``"xla"``; None picks the best that supports the call.
      return_residual: also return the log-sum-exp.
      mesh: the mesh; None takes that of `jax.set_mesh`, and without one runs on one device.
      batch_axis, head_axis, sequence_axis: mesh axis names; one that the mesh lacks counts as size 1.
      bias, mask, query_seq_lengths, key_value_seq_lengths, local_window_size, chunk_size, logits_soft_cap, sinks,
        mask_fn, score_fn, score_args, dropout_rate, dropout_seed: refused by name until they are built.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype, or ``(out, lse)`` with lse ``[B, T, N]`` in float32 (float64 for
      float64 inputs). Both are differentiable. A query that sees nothing gives 0 and lse -inf.

    Raises:
      ValueError, TypeError: shapes, dtypes, names or sizes that do not fit the mesh; before any device work.
      NotImplementedError: an option that is not built yet, by name.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> dot_product_attention(x, x, x, is_causal=True).shape
      (1, 4, 2, 8)

    Reference:
      Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, section 3.
    """
    keywords = dict(locals())
    for name in ("query", "key", "value", "mesh", "batch_axis", "head_axis", "sequence_axis"):
        del keywords[name]
    options.check(**keywords)
    options.check_arrays(query, key, value)
    shards = _make_shards(mesh, batch_axis, head_axis, sequence_axis)
    if shards is None:
        del keywords["strategy"]
        return ring.ring_attention(query, key, value, **keywords, axis_name=sequence_axis or "sequence")
    _check_sizes(query, key, shards, layout)
    spec = ring.make_spec(query, keywords, shards.sequence[0] if shards.sequence else "")
    inputs = ring.make_inputs(query, key, value, keywords)
    if AxisType.Explicit in shards.mesh.axis_types:
        placed = jax.tree.map(lambda p: NamedSharding(shards.mesh, p), shards.inputs(inputs))
        inputs = jax.tree.map(jax.sharding.reshard, inputs, placed)
    out, lse = _attend(spec, shards, *inputs)
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

    def present(axis: _Axis) -> tuple[str, ...]:
        names = (axis,) if isinstance(axis, str) else tuple(axis or ())
        return tuple(name for name in names if name in mesh.shape and name not in manual_axes)

    batch, heads, sequence = present(batch_axis), present(head_axis), present(sequence_axis)
    used = [*batch, *heads, *sequence]
    if len(set(used)) < len(used):
        raise ValueError(f"a mesh axis may cut one dimension only; got {batch_axis=}, {head_axis=}, {sequence_axis=}")
    return _Shards(mesh, frozenset(mesh.axis_names) - manual_axes, batch, heads, sequence)


def _check_sizes(query: Any, key: Any, shards: _Shards, layout: str | None) -> None:
    """Raise ValueError for sizes that the mesh cannot cut evenly."""
    batch, heads, sequence = shards.size(shards.batch), shards.size(shards.heads), shards.size(shards.sequence)
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
    for name, x in (("query", query), ("key", key)):
        layouts.check_length(layout or "contiguous", x.shape[1], sequence, f"{name} length")


def _shard_map(body, shards: _Shards, in_specs, out_specs):
    """``body`` on local shards: manual over every axis of the mesh that is not manual already."""
    nested = bool(jax.sharding.get_abstract_mesh().manual_axes)
    mesh = None if nested else shards.mesh
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=shards.names)


def _local(spec: RingSpec, inputs: Inputs) -> Inputs:
    rank = manual.axis_index(spec.axis_name)
    return Inputs(*manual.vary_alike(*inputs._replace(rank=rank)))


def _forward(spec: RingSpec, shards: _Shards, inputs: Inputs) -> tuple[Array, Array, Array | None]:
    def body(inputs: Inputs):
        return ring.forward(spec, _local(spec, inputs))

    return _shard_map(body, shards, (shards.inputs(inputs),), shards.arrays)(inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec: RingSpec, shards: _Shards, query, key, value, query_tokens: Tokens, key_tokens: Tokens, rank):
    out, lse, _ = _forward(spec, shards, Inputs(query, key, value, query_tokens, key_tokens, rank))
    return out, lse


def _attend_forward(spec: RingSpec, shards: _Shards, *arrays):
    inputs = Inputs(*arrays)
    out, lse, lost = _forward(spec, shards, inputs)
    return (out, lse), (inputs, out, lse, lost)


def _attend_backward(spec: RingSpec, shards: _Shards, residuals, cotangents):
    def body(inputs: Inputs, *rest: Any):
        return ring.backward(spec, _local(spec, inputs), *rest)

    arrays = (*residuals, *cotangents)
    specs = (shards.inputs(residuals[0]), *5 * (shards.arrays,))
    return (*_shard_map(body, shards, specs, shards.arrays)(*arrays), None, None, None)


_attend.defvjp(_attend_forward, _attend_backward)
