"""The loss: one global sum over one global count of target tokens.

Invariant: targets were made before the layout permutation, inside a document; -1 means no target. Nothing is averaged
per shard, so loss and gradients are the same on every mesh, however unevenly the targets fall. A position
without a target contributes exactly nothing, neither to the sum nor to a gradient, even if its logits are NaN.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from models import Transformer
from models.sharding import RULES, psum
from ring_jax import manual
from train.pipeline import run_pipeline

type Batch = dict[str, Array]


@jax.named_scope("cross_entropy")
def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Summed negative log-likelihood of the targets, in nats, and their number.

    Args:
      logits: [..., V] float32.
      targets: [...] int32; a negative one is ignored.

    Returns:
      (sum float32, count int32).
    """
    valid = targets >= 0
    # Selected before the sum, and on the logits too: zero times NaN is NaN, in the gradient as well.
    logits = jnp.where(valid[..., None], logits, 0.0)
    vocabulary = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    of_target = jnp.sum(jnp.where(vocabulary == targets[..., None], logits, 0.0), axis=-1)
    nats = jax.nn.logsumexp(logits, axis=-1) - of_target
    return jnp.sum(jnp.where(valid, nats, 0.0)), jnp.sum(valid, dtype=jnp.int32)


def share_tokens(x: Array, targets: Array) -> tuple[Array, Array]:
    """Deal the last stage's tokens out over the pipeline and tensor axes: every device runs the head on its share.

    Args:
      x: [n, D] activations, equal on all tensor shards, right on the last pipeline stage only.
      targets: [n] targets of this data and sequence shard.

    Returns:
      x [m, D] and targets [m] with m = ceil(n / (pipeline * tensor)); filled up with ignored targets.
    """
    stages, shards = manual.axis_size(RULES.layers), manual.axis_size(RULES.heads)
    stage, shard = manual.axis_index(RULES.layers), manual.axis_index(RULES.heads)
    share = -(-x.shape[0] // (stages * shards))
    missing = share * stages * shards - x.shape[0]
    x = jnp.pad(x, ((0, missing), (0, 0)))
    targets = jnp.pad(targets, (0, missing), constant_values=-1)
    if stages > 1:
        x = jnp.where(stage == stages - 1, x, 0)
        x = lax.psum_scatter(x, RULES.layers, scatter_dimension=0, tiled=True)
    x = lax.dynamic_slice_in_dim(x, shard * share, share)
    return x, lax.dynamic_slice_in_dim(targets, (stage * shards + shard) * share, share)


def loss_sums(model: Transformer, batch: Batch, *, layout: str, num_microbatches: int) -> tuple[Array, Array]:
    """Global sum of the loss and global number of targets, from this device's shard of the batch.

    Args:
      model: this device's shards of the parameters.
      batch: tokens, targets, positions and segment_ids, each [B, T] (local).
      layout: order of the tokens over the sequence axis.
      num_microbatches: pieces that the rows pass through the pipeline in.

    Returns:
      (sum float32, count int32), equal on all devices.
    """
    rows, length = batch["tokens"].shape
    if rows % num_microbatches:
        raise ValueError(f"{rows} rows of a data shard cannot be cut into {num_microbatches=}; use a divisor of {rows}")

    def pieces(x: Array) -> Array:
        return x.reshape(num_microbatches, rows // num_microbatches, *x.shape[1:])

    def stage(x: Array, place: Batch) -> Array:
        return model.run_layers(x, place["positions"], place["segment_ids"], layout=layout)

    place = {name: pieces(batch[name]) for name in ("positions", "segment_ids")}
    x = run_pipeline(stage, pieces(model.embed(batch["tokens"])), place)
    x, targets = share_tokens(x.reshape(rows * length, -1), batch["targets"].reshape(-1))
    return psum(cross_entropy(model.head(x), targets), RULES.batch, RULES.heads, RULES.layers, RULES.sequence)
