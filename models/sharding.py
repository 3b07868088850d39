"""Where the model's arrays lie on the mesh: the one place where logical names meet mesh axes.

Invariant: every parameter has a row in `LOGICAL_AXES`, and no array is cut twice along the same mesh axis. A missing
row or a collision raises while the program is built; if either went unnoticed, a device would hold the wrong part of
a weight and only the loss would tell.

| mesh axis  | what it cuts                         | who reads it                                      |
|------------|--------------------------------------|---------------------------------------------------|
| `data`     | rows of the batch                    | the loss (global sums)                            |
| `tensor`   | heads, MLP columns; between blocks the tokens of a shard | `models.collectives`          |
| `pipeline` | layers                               | the trainer's pipeline                            |
| `sequence` | tokens of a row                      | `ring_attention`, default positions               |

Weights are cut over `data` and `sequence` together along the width of the model, and gathered where they are used;
the embedding table and the head are cut over `tensor` and `pipeline` too, along the vocabulary. Norm scales are whole.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from models.config import ModelConfig
from models.fields import is_count
from ring_jax import manual

type MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Logical name of an array's dimension to the mesh axis that cuts it; None: not cut."""

    batch: str = "data"
    """Rows of the batch (B)."""
    sequence: str = "sequence"
    """Tokens of a row (T, S)."""
    layers: str = "pipeline"
    """Stacked layers (L)."""
    heads: str = "tensor"
    """Query heads (N)."""
    kv_heads: str = "tensor"
    """Key/value heads (K)."""
    mlp: str = "tensor"
    """Hidden columns of the MLP (F)."""
    vocab: MeshAxes = ("tensor", "pipeline")
    """Rows of the embedding table, columns of the head (V)."""
    embed: MeshAxes = ("data", "sequence")
    """Width of the model (D), of weights; activations are whole."""
    norm: MeshAxes = None
    """Width of the model (D), of norm scales; and what a depth block maps to."""
    depth: MeshAxes = None
    """Tokens ahead that a block predicts."""
    head_dim: MeshAxes = None
    """Channels of one head (H)."""

    def spec(self, *names: str) -> PartitionSpec:
        """The `PartitionSpec` of an array whose dimensions have these logical names.

        Raises:
          ValueError: a name is not a rule, or two of the names are cut by one mesh axis.

        Example:
          >>> ShardingRules().spec("layers", "embed", "mlp")
          PartitionSpec('pipeline', ('data', 'sequence'), 'tensor')
        """
        known = [field.name for field in dataclasses.fields(self)]
        used: dict[str, str] = {}
        entries: list[MeshAxes] = []
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{name!r} is not a logical axis; add a rule for it, or choose one of {', '.join(known)}"
                )
            axes: MeshAxes = getattr(self, name)
            entries.append(axes)
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                if axis in used:
                    raise ValueError(
                        f"the mesh axis {axis!r} cuts both {used[axis]!r} and {name!r} of an array with dimensions "
                        f"{names}; a mesh axis can cut an array once: give one of the two another rule"
                    )
                used[axis] = name
        return PartitionSpec(*entries)


RULES = ShardingRules()
WEIGHT_AXES = ("data", "sequence")
"""Axes that weights are cut over besides those of their own dimensions."""

LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "embedding": ("vocab", "embed"),
    "layers.attention_norm.scale": ("layers", "norm"),
    "layers.attention.query": ("layers", "embed", "heads", "head_dim"),
    "layers.attention.key": ("layers", "embed", "kv_heads", "head_dim"),
    "layers.attention.value": ("layers", "embed", "kv_heads", "head_dim"),
    "layers.attention.output": ("layers", "heads", "head_dim", "embed"),
    "layers.mlp_norm.scale": ("layers", "norm"),
    "layers.mlp.gate": ("layers", "embed", "mlp"),
    "layers.mlp.up": ("layers", "embed", "mlp"),
    "layers.mlp.down": ("layers", "mlp", "embed"),
    "final_norm.scale": ("norm",),
    "depth_blocks": ("depth", "embed", "norm"),
    "unembedding": ("embed", "vocab"),
}


def parameter_name(path: tuple[Any, ...]) -> str:
    """Dotted name of a parameter from its path in the pytree, e.g. `layers.mlp.down`."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")  # of the nnx.Param


def logical_axes(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Logical names of the dimensions of the parameter at this path."""
    name = parameter_name(path)
    if name not in LOGICAL_AXES:
        raise ValueError(f"the parameter {name!r} has no row in models.sharding.LOGICAL_AXES; add its logical axes")
    return LOGICAL_AXES[name]


def param_specs(params: Any, rules: ShardingRules = RULES) -> Any:
    """The pytree of `PartitionSpec` that goes with a `Transformer` (or anything of its structure)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: rules.spec(*logical_axes(path)), params)


def weight_axes(width: int, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that cut weights of a model of this width: both; or the larger that divides it, if any does.

    Example:
      >>> weight_axes(768, {"data": 64, "sequence": 4}), weight_axes(768, {"data": 64, "sequence": 8})
      (('data', 'sequence'), ('data',))
    """
    sizes = {axis: mesh_shape.get(axis, 1) for axis in WEIGHT_AXES}
    if width % math.prod(sizes.values()) == 0:
        return WEIGHT_AXES
    fits = [axis for axis, size in sizes.items() if size > 1 and width % size == 0]
    return tuple(sorted(fits, key=lambda axis: -sizes[axis])[:1])


def make_rules(config: ModelConfig, mesh_shape: Mapping[str, int]) -> ShardingRules:
    """The rules for a model on a mesh: weights cut over `weight_axes` of its width."""
    axes = weight_axes(config.embed_dim, mesh_shape)
    return RULES if axes == WEIGHT_AXES else dataclasses.replace(RULES, embed=axes or None)


def weight_notes(config: ModelConfig, mesh_shape: Mapping[str, int]) -> list[str]:
    """What is to be said where weights are not cut over all devices of `data` and `sequence`."""
    axes, sizes = weight_axes(config.embed_dim, mesh_shape), [mesh_shape.get(axis, 1) for axis in WEIGHT_AXES]
    if axes == WEIGHT_AXES:
        return []
    whole = next((axis for axis in WEIGHT_AXES if axis not in axes), "") if axes else " x ".join(WEIGHT_AXES)
    parts = math.prod(mesh_shape[axis] for axis in axes)
    return [
        f"weights, gradients and optimizer state are whole over {whole}, {math.prod(sizes) // parts} times what they "
        f"need be on each device: model.embed_dim={config.embed_dim} is not a multiple of mesh.data x mesh.sequence="
        f"{math.prod(sizes)}; use sizes whose product divides it"
    ]


def check_divisibility(config: ModelConfig, mesh_shape: Mapping[str, int]) -> list[str]:
    """Every reason why this model cannot be cut over a mesh, as `value, rule; fix`; none: an empty list.

    Args:
      config: the model.
      mesh_shape: mesh axis name to size (`mesh.shape`); an axis that is missing counts as 1.
    """
    found = config.problems()
    cuts = (
        ("num_heads", "heads", "query heads"),
        ("num_kv_heads", "kv_heads", "key/value heads"),
        ("mlp_dim", "mlp", "MLP columns"),
        ("num_layers", "layers", "layers"),
        ("vocab_size", "vocab", "vocabulary"),
    )
    for field, rule, things in cuts:
        axes, value = getattr(RULES, rule), getattr(config, field)
        axes = (axes,) if isinstance(axes, str) else axes
        size = math.prod(mesh_shape.get(axis, 1) for axis in axes)
        if is_count(value) and value % size:
            fits = max(n for n in range(1, size) if value % n == 0)
            named = " x ".join(f"mesh.{axis}" for axis in axes)
            found.append(
                f"model.{field}={value} must be divisible by {named}={size}, because the {' and '.join(axes)} axis "
                f"shares out the {things}; use {named}={fits} or model.{field}={-(-value // size) * size}"
            )
    layers, pattern, stages = config.num_layers, config.pattern, mesh_shape.get(RULES.layers, 1)
    if is_count(layers) and not layers % stages and not layers % pattern and layers // stages % pattern:
        found.append(
            f"model.windows has {pattern} entries, which must divide the {layers // stages} layers of a "
            f"pipeline stage; use mesh.pipeline={layers // pattern} or fewer, or another pattern"
        )
    return found


def psum(tree: Any, *axes: str) -> Any:
    """Sum arrays over the shards of mesh axes; an axis that is not manual here counts as size 1."""
    manual_axes = tuple(axis for axis in axes if manual.axis_is_manual(axis))
    return lax.psum(tree, manual_axes) if manual_axes else tree
