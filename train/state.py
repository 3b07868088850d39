"""The state of a run: step, parameters, optimizer state, and where each array lies on the mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import Transformer
from models.sharding import make_rules, param_specs
from train.config import TrainConfig
from train.optimizer import make_optimizer
from train.pipeline import layer_order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step changes."""

    step: Array
    """Steps done so far, int32."""
    params: Any
    """The `Transformer`, float32."""
    opt_state: Any
    """State of the optax optimizer; its copies of the parameters are sharded like them."""


def _create(config: TrainConfig) -> TrainState:
    params: Any = Transformer(config.model, rngs=nnx.Rngs(config.seed))
    params = reorder_layers(params, np.arange(config.model.num_layers), schedule_order(config))
    optimizer = make_optimizer(config.optimizer, config.num_steps)
    return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))


def schedule_order(config: TrainConfig) -> np.ndarray:
    """Which layer lies where in the stacked parameters of this run, see `train.pipeline.layer_order`."""
    return layer_order(config.model.num_layers, config.mesh.pipeline, config.repeats)


def reorder_layers(tree: Any, before: np.ndarray, after: np.ndarray) -> Any:
    """Parameters, or anything that holds copies of them, with the layers stacked in another order."""
    if (before == after).all():
        return tree
    index = np.argsort(before)[after]

    def reorder(path: tuple[Any, ...], x: Any) -> Any:
        return x[index] if any(getattr(key, "name", None) == "layers" for key in path) else x

    return jax.tree_util.tree_map_with_path(reorder, tree)


def state_specs(config: TrainConfig) -> TrainState:
    """The state as a pytree of `PartitionSpec`: parameters and their moments by `param_specs`, all else replicated."""
    shapes = jax.eval_shape(lambda: _create(config))
    rules = make_rules(config.model, config.mesh.sizes())

    def specs(node: Any) -> Any:
        return param_specs(node, rules) if isinstance(node, Transformer) else PartitionSpec()

    return jax.tree.map(specs, shapes, is_leaf=lambda node: isinstance(node, Transformer))


def state_shardings(config: TrainConfig, mesh: Mesh) -> TrainState:
    """The state as a pytree of `NamedSharding`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs(config))


def init_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """A fresh state, created in its shardings; its values depend on the configuration, not on the mesh."""
    return jax.jit(lambda: _create(config), out_shardings=state_shardings(config, mesh))()


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without its arrays: what a checkpoint is restored into."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: _create(config)),
        state_shardings(config, mesh),
    )
