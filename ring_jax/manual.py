"""Manual mesh axes: what an array varies over inside ``shard_map``, and how to make arrays agree.

The only module that reads JAX's varying-manual-axes types, so that a rename in JAX is mended in one place.
With ``check_vma=False`` nothing is recorded and every function here is the identity.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh


def axis_is_manual(axis_name: str) -> bool:
    """True inside a ``shard_map`` that is manual over ``axis_name``."""
    return axis_name in jax.sharding.get_abstract_mesh().manual_axes


def axis_is_mapped(axis_name: str) -> bool:
    """True where a `jax.vmap` or a ``shard_map`` around the call has this axis name."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def axis_size(axis_name: str) -> int:
    """Size of a manual axis; an axis that is not manual here counts as 1."""
    return lax.axis_size(axis_name) if axis_is_manual(axis_name) else 1


def axis_index(axis_name: str) -> jax.Array:
    """This device's index on a manual axis, int32; 0 where the axis is not manual."""
    return lax.axis_index(axis_name) if axis_is_manual(axis_name) else jnp.int32(0)


def vary_alike(*trees):
    """Cast every array to vary over the union of all their manual axes.

    The transpose of the cast is the ``psum`` that a gradient of a replicated array needs, so a custom VJP called on
    the result may return cotangents that vary like any of its inputs.
    """
    axes = frozenset().union(*(_varying(x) for x in jax.tree.leaves(trees)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, trees)


def shared_over(x: jax.Array, *trees) -> tuple[str, ...]:
    """The axes over which `vary_alike` would cast ``x``, so that its gradient will be a sum over them."""
    return tuple(sorted(frozenset().union(*(_varying(y) for y in jax.tree.leaves(trees))) - _varying(x)))


def full_like(shape: tuple[int, ...], value: float, dtype, *like: jax.Array) -> jax.Array:
    """A constant array that varies over the same manual axes as ``like``, as a loop's first carry must."""
    return vary_alike(jnp.full(shape, value, dtype), *like)[0]


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and manual axes of an array, as the result of a Pallas kernel must state them."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def first_index(axes: str | tuple[str, ...] | None, x: jax.Array, count: int) -> jax.Array:
    """Index in the whole array of the first of ``count`` entries of ``x`` that lie on this device.

    Axes that are not manual, or over which ``x`` is known to be replicated, do not cut it.
    """
    index = jnp.int32(0)
    for name in (axes,) if isinstance(axes, str) else tuple(axes or ()):
        if axis_is_manual(name) and (not _is_checked(name) or name in _varying(x)):
            index = index * lax.axis_size(name) + lax.axis_index(name)
    return index * count


def uncounted(x: jax.Array, *axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Manual axes larger than 1 over which ``x`` varies, and that are none of ``axes``."""
    named = {name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis or ())}
    return tuple(name for name in sorted(_varying(x) - named) if lax.axis_size(name) > 1)


def mesh_of(x: jax.Array) -> AbstractMesh:
    """The mesh that an array lies on, empty for none: known of traced arrays, too."""
    return jax.typeof(x).sharding.mesh


def cut_by_type(*trees) -> tuple[str, ...]:
    """Axes that are not manual and cut one of these arrays by its type: Explicit ones."""
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(trees)]
    names = [name for spec in specs for axes in spec for name in ((axes,) if isinstance(axes, str) else axes or ())]
    return tuple(sorted(set(names)))


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _is_checked(axis_name: str) -> bool:
    """Whether types record what varies over this axis: not so under check_vma=False."""
    return axis_name in _varying(lax.axis_index(axis_name))
