"""The loss: one global sum over one global count of target tokens.

Invariant: targets were made before the layout permutation, inside a document; -1 means no target. Nothing is averaged
per shard, so loss and gradients are the same on every mesh, however unevenly the targets fall.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from models import Transformer
from models.collectives import gather_tokens, replicated, vocab_shard
from models.sharding import RULES, psum
from ring_jax import manual
from train.config import TrainConfig
from train.cross_entropy import LossSpec, cross_entropy
from train.pipeline import Ticks, layer_order, run_pipeline
from train.positions import loss_by_position, position_edges

type Batch = dict[str, Array]

DROPOUT = "dropout"
"""Key of a batch under which the keys of its rows for dropout are."""


class Sums(NamedTuple):
    """Global sums over all target tokens, equal on all devices."""

    objective: Array
    """What is trained on: with smoothing, z-loss and the tokens further ahead, in units of one next-token target."""
    nats: Array
    """Negative log-likelihood of the next tokens."""
    count: Array
    """Next-token targets, int32."""
    ticks: Ticks
    """What the pipeline ran."""


def targets_name(depth: int) -> str:
    """Key of a batch under which the targets ``depth`` tokens ahead are."""
    return "targets" if depth == 1 else f"targets_{depth}"


def held_layers(config: TrainConfig) -> Array:
    """Numbers of the layers that this stage holds, in their order, int32."""
    order = layer_order(config.model.num_layers, config.mesh.pipeline, config.repeats).astype(np.int32)
    count = len(order) // manual.axis_size(RULES.layers)
    return lax.dynamic_slice_in_dim(jnp.asarray(order), manual.axis_index(RULES.layers) * count, count)


def final_activations(model: Transformer, batch: Batch, config: TrainConfig) -> tuple[Array, Ticks]:
    """Activations behind the last layer, [rows, t, D], on every pipeline stage: this tensor shard's tokens.

    Where the batch holds `DROPOUT`, the keys of its rows, some fall.
    """
    rows, pieces = batch["tokens"].shape[0], config.num_microbatches
    if rows % pieces:
        raise ValueError(f"{rows} rows of a data shard cannot be cut into num_microbatches={pieces}; use a divisor")

    def cut(x: Array) -> Array:
        return x.reshape(pieces, rows // pieces, *x.shape[1:])

    def stage(held: tuple[Any, Array], x: Array, place: Batch, turn: Array | None) -> Array:
        layers, numbers = held
        keywords = {"layout": config.layout, "words": place.get(DROPOUT), "layers": layers, "numbers": numbers}
        return model.run_layers(x, place["positions"], place["segment_ids"], turn=turn, **keywords)

    place = {name: batch[name] for name in ("positions", "segment_ids", DROPOUT) if name in batch}
    x = model.embed(batch["tokens"])
    x = model.drop_embedding(x, batch.get(DROPOUT), place["positions"], place["segment_ids"])
    held = model.layers, held_layers(config)
    x, ticks = run_pipeline(stage, held, cut(x), jax.tree.map(cut, place), repeats=config.repeats)
    x = x.reshape(rows, *x.shape[2:])
    stages = manual.axis_size(RULES.layers)
    if stages == 1:
        return x, ticks
    last = manual.axis_index(RULES.layers) == stages - 1
    x = lax.psum(jnp.where(last, x, jnp.zeros((), x.dtype)), RULES.layers)
    # The sum of its gradients over the stages is here, one in float32: else JAX would have one for each depth.
    return lax.pcast(x.astype(jnp.float32), RULES.layers, to="varying").astype(x.dtype), ticks


def token_losses(model: Transformer, x: Array, targets: Array, config: TrainConfig) -> tuple[Array, Array]:
    """(loss, nll) of every token of this data and sequence shard, float32 [rows, T]."""
    x = gather_tokens(model.final_norm(x))
    weight = model.head_weight(x)
    first, axes = vocab_shard(weight.shape[-1], config.model.vocab_size)
    spec = LossSpec(
        config.model.vocab_size,
        axes,
        config.loss.chunk,
        config.model.final_soft_cap,
        config.loss.label_smoothing,
        config.loss.z_loss,
    )
    loss, nll = cross_entropy(spec, x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1), first)
    return loss.reshape(targets.shape), nll.reshape(targets.shape)


def evaluation_sums(model: Transformer, batch: Batch, config: TrainConfig) -> tuple[Array, Array, Array, Array]:
    """(nats, count, nats by position, counts by position) of the next tokens, global sums, equal on all devices."""
    x, _ = final_activations(model, batch, config)
    _, nll = token_losses(model, x, batch["targets"], config)
    valid = batch["targets"] >= 0
    curve = loss_by_position(nll, batch["positions"], valid, position_edges(config.data.seq_len))
    sums = nll.sum(), jnp.sum(valid, dtype=jnp.int32), *curve
    nats, count, by_position, counts = (psum(replicated(x), RULES.batch, RULES.sequence) for x in sums)
    return nats, count, by_position, counts


def loss_sums(model: Transformer, batch: Batch, config: TrainConfig) -> Sums:
    """The loss of this device's shard of a batch, summed over all devices.

    Args:
      model: this device's shards of the parameters.
      batch: tokens, targets, positions and segment_ids, each [B, T] (local); targets_2, ... for tokens further ahead;
        `DROPOUT` [B, 2] where something is to fall.
      config: layout, microbatches and terms of the loss.
    """
    x, ticks = final_activations(model, batch, config)
    rows, depths = len(x), range(1, config.model.mtp_depth + 1)
    # All depths in one call: the head is gathered, and its gradient summed and scattered, once. The D x D blocks run on
    # every stage: to send their results would take as long.
    x = jnp.concatenate([model.ahead(x, ahead) for ahead in depths])
    loss, nll = token_losses(model, x, jnp.concatenate([batch[targets_name(ahead)] for ahead in depths]), config)
    objective = loss[:rows].sum()
    if len(depths) > 1:
        objective += config.loss.mtp_weight / (len(depths) - 1) * loss[rows:].sum()
    count = jnp.sum(batch["targets"] >= 0, dtype=jnp.int32)
    sums = objective, nll[:rows].sum(), count
    objective, nats, count = (psum(replicated(x), RULES.batch, RULES.sequence) for x in sums)
    return Sums(objective, nats, count, ticks)
