"""The train step: one `shard_map`, manual over all four mesh axes, and the optimizer after it in the same `jit`.

Invariant: every collective of the step is a line of code: the ring of `ring_jax`, weights and tokens in
`models.collectives`, the hops of `train.pipeline`, the vocabulary's sums in `train.cross_entropy`, the global sums of
`train.loss`; and here, `sum_over_replicas`. `check_vma` stays on, so JAX proves that what leaves as
replicated is replicated. With it off, the gradients of replicated parameters would be scaled by the mesh, and only the
loss curve would tell.
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
from models.dropout import fold, row_words
from models.sharding import RULES, psum
from models.transformer import matmul_precision
from ring_jax import layouts
from ring_jax.dropout import as_words
from ring_jax.mesh import compiler_options
from train.config import MESH_AXES, TrainConfig
from train.loss import DROPOUT, Batch, Sums, evaluation_sums, loss_sums, targets_name
from train.optimizer import make_optimizer, make_schedule
from train.rows import deeper_targets
from train.state import TrainState, abstract_state, init_state, state_shardings, state_specs

__all__ = ["abstract_batch", "abstract_state", "init_state", "make_eval_step", "make_train_step", "place_batch"]

BATCH_SPEC = RULES.spec("batch", "sequence")


def _whole_over(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that do not cut a parameter: each of their devices holds a copy."""
    cut = {axis for axes in spec if axes is not None for axis in ((axes,) if isinstance(axes, str) else axes)}
    return tuple(axis for axis in MESH_AXES if axis not in cut)


def own_copies(params: Transformer, specs: Any) -> Transformer:
    """Every parameter as this device's own, whose gradient is what this device adds: see `sum_over_replicas`.

    Without this, JAX would sum where each parameter is used, inside the loops over layers, microbatches and pieces.
    """
    return jax.tree.map(lambda param, spec: lax.pcast(param, _whole_over(spec), to="varying"), params, specs)


def sum_over_replicas(grads: Transformer, specs: Any) -> Transformer:
    """The gradients for `own_copies`, each summed over the devices that hold a copy of its parameter: once a step."""
    return jax.tree.map(lambda grad, spec: psum(grad, *_whole_over(spec)), grads, specs)


def in_pieces(fun: Callable[..., Any], batch: Batch, config: TrainConfig) -> Callable[..., Any]:
    """The function (params, batch) summed over `accumulate` pieces of the rows, one piece after another."""
    if config.accumulate == 1:
        return fun
    rows = batch["tokens"].shape[0] // config.accumulate
    return optax.microbatching.microbatch(fun, argnums=1, microbatch_size=rows)


def make_train_step(
    config: TrainConfig, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """The compiled step (state, batch) -> (state, metrics); it donates the state and returns it in the same shardings.

    Metrics: `loss` (nats per target), `grad_norm` (before clipping), `param_norm`, `lr`, `num_targets`, `bubble` (share
    of the stages' runs that had no microbatch, counted where they run), and `skipped`: 1 when the loss or the gradient
    norm was not finite, and parameters and optimizer were left as they were. A batch without any target has loss 0 and
    gradients of exactly 0.
    """
    optimizer = make_optimizer(config.optimizer, config.num_steps)
    schedule = make_schedule(config.optimizer, config.num_steps)
    specs = state_specs(config).params

    def objective(params: Transformer, batch: Batch) -> tuple[Array, Sums]:
        sums = loss_sums(params, batch, config)
        return sums.objective, sums

    def sums_and_grads(params: Transformer, batch: Batch, seed: Array) -> tuple[Sums, Transformer]:
        if config.model.drops:
            batch = batch | {DROPOUT: row_words(seed, len(batch["tokens"]))}
        fun = in_pieces(jax.value_and_grad(objective, has_aux=True), batch, config)
        with matmul_precision(config.model):
            (_, sums), grads = fun(own_copies(params, specs), batch)
        return sums, sum_over_replicas(grads, specs)

    given = specs, BATCH_SPEC, PartitionSpec()
    mapped = jax.shard_map(sums_and_grads, mesh=mesh, in_specs=given, out_specs=(PartitionSpec(), specs))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        # Of the step that is worked on: a resumed run drops what the run that never stopped would have dropped.
        seed = fold(as_words(config.seed), state.step)
        sums, grads = mapped(state.params, batch, seed)
        count = jnp.maximum(sums.count, 1)
        grads = jax.tree.map(lambda g: g / count, grads)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(sums.objective) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updated = optax.apply_updates(state.params, updates), opt_state
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old), updated, (state.params, state.opt_state)
        )
        metrics = {
            "loss": sums.nats / count,
            "grad_norm": norm,
            "param_norm": optax.tree.norm(params),
            "lr": jnp.asarray(schedule(_updates_done(state.opt_state)), jnp.float32),
            "num_targets": sums.count,
            "bubble": 1 - sums.ticks.busy / sums.ticks.all,
            "skipped": 1.0 - good,
        }
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    shardings = state_shardings(config, mesh)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, NamedSharding(mesh, BATCH_SPEC)),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        compiler_options=compiler_options(mesh),
    )


def _updates_done(opt_state: Any) -> Array:
    """Steps that the schedule has counted: skipped ones are not among them."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]


def make_eval_step(config: TrainConfig, mesh: Mesh) -> Callable[[Transformer, Batch], tuple[Array, ...]]:
    """The compiled function (params, batch) -> (loss sum float32, number of targets int32, both by position too).

    All four are global; the last two are those of `train.positions.loss_by_position`.
    """
    shardings = state_shardings(config, mesh).params

    def local_sums(params: Transformer, batch: Batch) -> tuple[Array, ...]:
        fun = in_pieces(lambda params, batch: evaluation_sums(params, batch, config), batch, config)
        with matmul_precision(config.model):
            return fun(params, batch)

    specs = state_specs(config).params, BATCH_SPEC
    sums = jax.shard_map(local_sums, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    given = shardings, NamedSharding(mesh, BATCH_SPEC)
    return jax.jit(sums, in_shardings=given, compiler_options=compiler_options(mesh))


def abstract_batch(config: TrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a batch, without its arrays: what `place_batch` makes."""
    names = ("tokens", "positions", "segment_ids", *(targets_name(n) for n in range(1, config.model.mtp_depth + 1)))
    shape, sharding = (config.data.batch_size, config.data.seq_len), NamedSharding(mesh, BATCH_SPEC)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in names}


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
    num_shards, rows = mesh.shape[RULES.sequence], len(held) * config.num_microbatches * config.accumulate
    for depth in range(2, config.model.mtp_depth + 1):
        batch = batch | {targets_name(depth): deeper_targets(batch, depth)}
    sharding = NamedSharding(mesh, BATCH_SPEC)
    placed = {}
    for name, array in batch.items():
        if array.ndim != 2 or array.shape[0] % rows:
            raise ValueError(
                f"batch[{name!r}] has shape {array.shape}; it must be [rows, length] with rows a multiple of "
                f"data shards * num_microbatches * accumulate = {rows}; pad it with rows of segment 0"
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
