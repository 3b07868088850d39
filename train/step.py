"""The train step: one `shard_map`, manual over all four mesh axes, and the optimizer after it in the same `jit`.

Invariant: every collective of the step is a line of code: the ring of `ring_jax`, the sums over `tensor` in
`models.layers`, the hops of `train.pipeline`, the dealing out of tokens and the global sums of `train.loss`; and here,
`sum_gradients_over_replicas`. `check_vma` stays on, so JAX proves that what leaves as replicated is replicated. With it
off, the gradients of replicated parameters would be scaled by the mesh, and only the loss curve would tell.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import Transformer
from models.sharding import RULES, param_specs, parameter_name
from ring_jax import layouts
from train.config import TrainConfig
from train.loss import Batch, loss_sums
from train.optimizer import make_optimizer, make_schedule
from train.state import TrainState, abstract_state, init_state, state_shardings, state_specs

__all__ = ["abstract_state", "init_state", "make_eval_step", "make_train_step", "place_batch"]

BATCH_SPEC = RULES.spec("batch", "sequence")


def sum_gradients_over_replicas(params: Transformer) -> Transformer:
    """Mark every parameter as used by all devices that hold a copy of it; the transpose sums their gradients.

    Without this, JAX would put the sums where each parameter is used, inside the loops over layers and microbatches.
    Tensor shards do equal work on what is not cut over them, so their gradients are equal and need no sum; but the
    head works on tokens that are shared out over them.
    """

    def cast(path: tuple[Any, ...], param: Array, spec: PartitionSpec) -> Array:
        axes = [RULES.batch, RULES.sequence, RULES.layers]
        if parameter_name(path) in ("final_norm.scale", "unembedding"):
            axes.append(RULES.heads)
        return lax.pcast(param, tuple(axis for axis in axes if axis not in spec), to="varying")

    return jax.tree_util.tree_map_with_path(cast, params, param_specs(params))


def make_train_step(
    config: TrainConfig, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """The compiled step (state, batch) -> (state, metrics); it donates the state and returns it in the same shardings.

    Metrics: `loss` (nats per target), `grad_norm` (before clipping), `lr`, `num_targets`. A batch without any
    target has loss 0 and gradients of exactly 0.
    """
    optimizer = make_optimizer(config.optimizer, config.num_steps)
    schedule = make_schedule(config.optimizer, config.num_steps)
    specs = state_specs(config).params

    def local_loss(params: Transformer, batch: Batch) -> tuple[Array, Array]:
        loss_sum, num_targets = loss_sums(
            sum_gradients_over_replicas(params),
            batch,
            layout=config.layout,
            num_microbatches=config.num_microbatches,
        )
        return loss_sum / jnp.maximum(num_targets, 1), num_targets

    loss_and_grads = jax.shard_map(
        jax.value_and_grad(local_loss, has_aux=True),
        mesh=mesh,
        in_specs=(specs, BATCH_SPEC),
        out_specs=((PartitionSpec(), PartitionSpec()), specs),
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        (loss, num_targets), grads = loss_and_grads(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "lr": jnp.asarray(schedule(state.step), jnp.float32),
            "num_targets": num_targets,
        }
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    shardings = state_shardings(config, mesh)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, NamedSharding(mesh, BATCH_SPEC)),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )


def make_eval_step(config: TrainConfig, mesh: Mesh) -> Callable[[Transformer, Batch], tuple[Array, Array]]:
    """The compiled function (params, batch) -> (global loss sum float32, global number of targets int32)."""
    shardings = state_shardings(config, mesh).params

    def local_sums(params: Transformer, batch: Batch) -> tuple[Array, Array]:
        return loss_sums(params, batch, layout=config.layout, num_microbatches=config.num_microbatches)

    sums = jax.shard_map(
        local_sums,
        mesh=mesh,
        in_specs=(state_specs(config).params, BATCH_SPEC),
        out_specs=(PartitionSpec(), PartitionSpec()),
    )
    return jax.jit(sums, in_shardings=(shardings, NamedSharding(mesh, BATCH_SPEC)))


def place_batch(
    batch: dict[str, np.ndarray], config: TrainConfig, mesh: Mesh, *, data_indices: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Put a batch in natural order into the layout and onto the mesh.

    Args:
      batch: tokens, targets, positions and segment_ids, each [B, T] int32.
      config: gives the layout.
      mesh: rows are cut over `data`, tokens over `sequence`; each process hands over only what its devices hold.
      data_indices: the indices of the data axis whose rows the batch holds, rising (`train.rows.local_data_indices`);
        None: it holds the rows of all.

    Raises:
      ValueError: a shape that the mesh cannot cut.
    """
    held = tuple(range(mesh.shape[RULES.batch])) if data_indices is None else data_indices
    num_shards, rows = mesh.shape[RULES.sequence], len(held) * config.num_microbatches
    sharding = NamedSharding(mesh, BATCH_SPEC)
    placed = {}
    for name, array in batch.items():
        if array.ndim != 2 or array.shape[0] % rows:
            raise ValueError(
                f"batch[{name!r}] has shape {array.shape}; it must be [rows, length] with rows a multiple of "
                f"mesh.data * num_microbatches = {rows}; pad it with rows of segment 0"
            )
        layouts.check_length(config.layout, np.shape(array)[1], num_shards)
        permuted = np.asarray(layouts.to_layout(np.asarray(array, np.int32), config.layout, num_shards))
        shape = (len(permuted) // len(held) * mesh.shape[RULES.batch], permuted.shape[1])
        placed[name] = jax.make_array_from_callback(shape, sharding, functools.partial(_shard, permuted, held))
    return placed


def _shard(rows: np.ndarray, held: tuple[int, ...], index: Any) -> np.ndarray:
    """One device's part of the global batch (`index`), out of the rows of some indices of the data axis."""
    each = len(rows) // len(held)
    here = held.index((index[0].start or 0) // each) * each
    return rows[here : here + each, index[1]]
