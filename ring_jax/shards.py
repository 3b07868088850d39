"""How one call on global arrays is cut: mesh axes, the sharding of every array, and padding of uneven lengths."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ring_jax import layouts
from ring_jax.problem import Inputs

type Axis = str | tuple[str, ...] | None


class Shards(NamedTuple):
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
        """Of what the backward pass keeps: an axis in front that counts the devices that differ."""
        return PartitionSpec((*self.batch, *self.heads, *self.sequence) or None)

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


def make_shards(mesh, batch_axis: Axis, head_axis: Axis, sequence_axis: str | None) -> Shards | None:
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

    def named(axis: Axis) -> tuple[str, ...]:
        names = (axis,) if isinstance(axis, str) else tuple(axis or ())
        return tuple(name for name in names if name in mesh.shape)

    def present(axis: Axis) -> tuple[str, ...]:
        return tuple(name for name in named(axis) if name not in manual_axes)

    batch, heads, sequence = present(batch_axis), present(head_axis), present(sequence_axis)
    used = [*batch, *heads, *sequence]
    if len(set(used)) < len(used):
        raise ValueError(f"a mesh axis may cut one dimension only; got {batch_axis=}, {head_axis=}, {sequence_axis=}")
    names = tuple(name for name in mesh.axis_names if name not in manual_axes)
    return Shards(mesh, names, batch, heads, sequence, named(batch_axis), named(head_axis))


def check_sizes(query: Any, key: Any, shards: Shards) -> None:
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


def is_explicit(shards: Shards) -> bool:
    return AxisType.Explicit in shards.mesh.axis_types


def place(shards: Shards, tree: Any, specs: Any) -> Any:
    """Reshard on Explicit meshes; on others XLA does."""
    if not is_explicit(shards):
        return tree
    return jax.tree.map(lambda x, spec: jax.sharding.reshard(x, NamedSharding(shards.mesh, spec)), tree, specs)


class Padding(NamedTuple):
    """For queries and keys: real length, padded length, and the index in the array of each padded slot."""

    sides: tuple[tuple[int, int, np.ndarray], tuple[int, int, np.ndarray]]

    @property
    def is_none(self) -> bool:
        return all(length == padded for length, padded, _ in self.sides)

    def insert(self, shards: Shards, x: Any, axis: int, side: int) -> Any:
        """Zeros in the padded slots of an axis."""
        length, padded, slots = self.sides[side]
        return x if length == padded else _take(shards, x, slots, axis)

    def remove(self, shards: Shards, x: Array) -> Array:
        """Queries without the padded slots."""
        length, padded, slots = self.sides[0]
        return x if length == padded else _take(shards, x, np.flatnonzero(slots < length), 1)


def _take(shards: Shards, x: Array, index: np.ndarray, axis: int) -> Array:
    """Entries of an axis, 0 where the index lies outside."""
    spec = [None] * x.ndim
    if x.ndim > 1 and x.shape[0] % shards.size(shards.batch) == 0:
        spec[0] = shards.batch or None
    where = (slice(None),) * axis + (index,)
    if not is_explicit(shards):
        return x.at[where].get(mode="fill", fill_value=0)
    sharding = NamedSharding(shards.mesh, PartitionSpec(*spec))
    return jax.sharding.reshard(x, sharding).at[where].get(mode="fill", fill_value=0, out_sharding=sharding)


def pad(shards: Shards, layout: str | None, inputs: Inputs) -> tuple[Inputs, Padding]:
    """Fill both sequences up to lengths that the layout can cut evenly."""
    size = shards.size(shards.sequence)
    sides = []
    for x in (inputs.query, inputs.key):
        padded, slots = layouts.padded_slots(layout or "contiguous", x.shape[1], size)
        sides.append((x.shape[1], padded, slots))
    padding = Padding(tuple(sides))
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


def device_kind(mesh: Mesh | AbstractMesh) -> str:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].device_kind
    return getattr(mesh.abstract_device, "device_kind", None) or jax.devices()[0].device_kind
