"""How one call on global arrays is cut: mesh axes, the sharding of every array, and padding of uneven lengths."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ring_jax import layouts
from ring_jax.problem import Inputs, Spec

type Axis = str | tuple[str, ...] | None


class Shards(NamedTuple):
    """How one call is cut: the mesh, and the mesh axes of batch, heads and sequence that it has."""

    mesh: Mesh | AbstractMesh
    names: tuple[str, ...]  # the axes that shard_map makes manual
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    sequence: tuple[str, ...]
    outer_batch: tuple[str, ...]  # those that are manual outside already
    outer_heads: tuple[str, ...]

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

        def alike(spec: Any, tree: Any) -> Any:
            return jax.tree.map(lambda _: spec, tree)

        def keys(x: Array | None) -> Any:
            shared = x is not None and x.shape[2] % self.size(self.heads)  # fewer heads than shards of them
            return alike(PartitionSpec(*self.arrays[:2]) if shared else self.arrays, x)

        whole, rows = PartitionSpec(), PartitionSpec(self.batch or None)
        return Inputs(
            query=alike(self.arrays, inputs.query),
            key=keys(inputs.key),
            value=keys(inputs.value),
            bias=self.pairwise(inputs.bias),
            sinks=alike(PartitionSpec(self.heads or None), inputs.sinks),
            score_args=alike(whole, inputs.score_args),
            mask=self.pairwise(inputs.mask),
            query_tokens=jax.tree.map(tokens, inputs.query_tokens),
            key_tokens=jax.tree.map(tokens, inputs.key_tokens),
            query_lengths=alike(rows, inputs.query_lengths),
            key_lengths=alike(rows, inputs.key_lengths),
            seed=alike(rows if getattr(inputs.seed, "ndim", 1) == 2 else whole, inputs.seed),
            place=alike(whole, inputs.place),
        )


def make_shards(
    mesh, batch_axis: Axis, head_axis: Axis, sequence_axis: str | None, layout: str | None
) -> Shards | None:
    """Match the axis names with the mesh; None where there is no mesh."""
    check_one_axis("sequence_axis", sequence_axis)
    axes = {"batch_axis": batch_axis, "head_axis": head_axis, "sequence_axis": sequence_axis}
    given = [name for option, axis in axes.items() for name in _names(option, axis)]
    context = jax.sharding.get_abstract_mesh()
    if mesh is None:
        mesh = context
    if mesh.empty:
        return None
    _check_mesh(mesh, given, f"{batch_axis=}, {head_axis=}, {sequence_axis=}", sequence_axis, layout)
    manual_axes = frozenset(context.manual_axes)
    if sequence_axis in manual_axes:
        raise ValueError(
            f"{sequence_axis=} is manual here: inside shard_map call ring_jax.ring_attention(..., "
            f"axis_name={sequence_axis!r}) on the local shards instead"
        )

    def named(axis: Axis, outer: bool = False) -> tuple[str, ...]:
        names = (axis,) if isinstance(axis, str) else tuple(axis or ())
        return tuple(name for name in names if name in mesh.shape and (name in manual_axes) == outer)

    batch, heads, sequence = named(batch_axis), named(head_axis), named(sequence_axis)
    used = [*batch, *heads, *sequence]
    if len(set(used)) < len(used):
        raise ValueError(
            f"a mesh axis may cut one dimension only; got {batch_axis=}, {head_axis=}, "
            f"{sequence_axis=}. Pass None for the others, as head_axis=None"
        )
    names = tuple(name for name in mesh.axis_names if name not in manual_axes)
    return Shards(mesh, names, batch, heads, sequence, named(batch_axis, True), named(head_axis, True))


def _names(option: str, axis: Any) -> tuple[str, ...]:
    names = (axis,) if isinstance(axis, str) else () if axis is None else axis
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{option}={axis!r} must be the name of a mesh axis, a tuple of names, or None")
    return tuple(names)


def check_one_axis(option: str, axis: Any) -> None:
    """Raise ValueError for what is not the name of one mesh axis, or None."""
    if axis is not None and not isinstance(axis, str):
        raise ValueError(
            f"{option}={axis!r} must be the name of one mesh axis, or None: a ring goes round one axis. Give the mesh "
            "one axis for all devices that share the sequence, as ring_jax.make_mesh(sequence=...) does, and say with "
            "Schedule(inner_size=...) how many lie in a fast group"
        )


def _check_mesh(mesh: Any, given: list[str], shown: str, sequence_axis: str | None, layout: str | None) -> None:
    """Raise ValueError for a mesh whose devices would not be used, or of which the layout would not know."""
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    axes = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if sizes and given and not any(name in mesh.shape for name in given):
        raise ValueError(
            f"{shown}: the mesh has none of these axes, but {axes}, so every device would compute alone all that it "
            "holds; pass its own names, or None for all three"
        )
    if sequence_axis is None or sequence_axis in mesh.shape or layout not in ("striped", "zigzag"):
        return
    if any(name not in given for name in sizes):
        raise ValueError(
            f"{layout=}: the mesh has no {sequence_axis=}, but {axes}, so its positions would be those of one shard; "
            "pass the name of the axis that cuts the sequence, or sequence_axis=None where none does"
        )


def check_sizes(query: Any, key: Any, shards: Shards) -> None:
    """Raise ValueError for sizes that the mesh cannot cut evenly."""
    batch, heads = shards.size(shards.batch), shards.size(shards.heads)
    if query.shape[0] % batch:
        raise ValueError(
            f"batch size {query.shape[0]} must be divisible by mesh axis {'*'.join(shards.batch)} of size {batch}; "
            f"make the batch a multiple of {batch}, or move those devices to the sequence axis"
        )
    axis, fix = "*".join(shards.heads), "make that axis smaller, or move its devices to the sequence axis"
    if query.shape[2] % heads:
        raise ValueError(f"{query.shape[2]} query heads must be divisible by mesh axis {axis} of size {heads}; {fix}")
    if key.shape[2] % heads and heads % key.shape[2]:
        raise ValueError(
            f"{key.shape[2]} key/value heads must be divisible by mesh axis {axis} of size {heads}, or divide it; {fix}"
        )


def share_heads(shards: Shards, copies: int, x: Array) -> Array:
    """Keys or values with one head for each shard of the heads, from fewer: each shard needs one of them."""
    return x if copies == 1 else place(shards, jnp.repeat(x, copies, axis=2), shards.arrays)


def sum_heads(shards: Shards, copies: int, x: Array) -> Array:
    """The transpose of `share_heads`: the gradient of each head, from those of its copies."""
    if copies == 1:
        return x
    x = place(shards, x, PartitionSpec(*shards.arrays[:2]))
    return x.reshape(*x.shape[:2], -1, copies, x.shape[3]).sum(3)


def is_explicit(shards: Shards) -> bool:
    return AxisType.Explicit in shards.mesh.axis_types


def place(shards: Shards, tree: Any, specs: Any) -> Any:
    """Reshard over the Explicit axes of the mesh; over others XLA does."""
    if not is_explicit(shards):
        return tree
    explicit = {
        name
        for name, kind in zip(shards.mesh.axis_names, shards.mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }

    def named(axes: Any) -> Any:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return tuple(name for name in names if name in explicit) or None

    def move(x: Array, spec: PartitionSpec) -> Array:
        return jax.sharding.reshard(x, NamedSharding(shards.mesh, PartitionSpec(*map(named, spec))))

    return jax.tree.map(move, tree, specs)


class Side(NamedTuple):
    """Queries or keys: real and padded length, and the index in the array of each padded slot (padding: the length)."""

    length: int
    padded: int
    slots: np.ndarray

    def insert(self, shards: Shards, x: Array, axis: int) -> Array:
        """The array with zeros in the slots of padding."""
        if self.length == self.padded:
            return x
        if (self.slots[: self.length] == np.arange(self.length)).all():
            widths = [(0, self.padded - self.length if i == axis else 0) for i in range(x.ndim)]
            return jnp.pad(_whole(shards, x, axis), widths)
        return _take(shards, x, self.slots, axis)

    def remove(self, shards: Shards, x: Array) -> Array:
        """The array without the slots of padding, for axis 1."""
        if self.length == self.padded:
            return x
        order = np.argsort(self.slots, kind="stable")[: self.length]
        if (order == np.arange(self.length)).all():
            return _whole(shards, x, 1)[:, : self.length]
        return _take(shards, x, order, 1)


class Padding(NamedTuple):
    """What is added to either side."""

    query: Side
    key: Side

    @property
    def is_none(self) -> bool:
        return all(side.length == side.padded for side in self)


def _whole(shards: Shards, x: Array, axis: int) -> Array:
    """On Explicit meshes: the array with that axis not cut."""
    if not is_explicit(shards):
        return x
    spec: list[Any] = [None] * x.ndim
    if x.shape[0] % shards.size(shards.batch) == 0:
        spec[0] = shards.batch or None
    if x.ndim == 4 and axis == 1 and x.shape[2] % shards.size(shards.heads) == 0:
        spec[2] = shards.heads or None
    return place(shards, x, PartitionSpec(*spec))


def _take(shards: Shards, x: Array, index: np.ndarray, axis: int) -> Array:
    """Entries of an axis, 0 where the index lies outside."""
    x, where = _whole(shards, x, axis), (slice(None),) * axis + (index,)
    if not is_explicit(shards):
        return x.at[where].get(mode="fill", fill_value=0)
    return x.at[where].get(mode="fill", fill_value=0, out_sharding=jax.typeof(x).sharding)


def pad(shards: Shards, spec: Spec, inputs: Inputs) -> tuple[Inputs, Padding]:
    """Fill both sequences up to lengths that the layout, and two directions, can cut evenly."""
    size, cut = shards.size(shards.sequence), 2 if spec.schedule.two_directions else 1
    padding = Padding(
        *(
            Side(x.shape[1], *layouts.padded_slots(spec.layout or "contiguous", x.shape[1], size, cut))
            for x in (inputs.query, inputs.key)
        )
    )
    if padding.is_none:
        return inputs, padding

    def pairwise(x: Array | None) -> Array | None:
        if x is not None:
            for axis, side in zip((2, 3), padding, strict=True):
                x = x if x.shape[axis] == 1 else side.insert(shards, x, axis)
        return x

    def tokens(tree: Any, side: Side) -> Any:
        return jax.tree.map(lambda x: side.insert(shards, x, 1), tree)

    return inputs._replace(
        query=padding.query.insert(shards, inputs.query, 1),
        key=padding.key.insert(shards, inputs.key, 1),
        value=padding.key.insert(shards, inputs.value, 1),
        bias=pairwise(inputs.bias),
        mask=pairwise(inputs.mask),
        query_tokens=tokens(inputs.query_tokens, padding.query),
        key_tokens=tokens(inputs.key_tokens, padding.key),
    ), padding
