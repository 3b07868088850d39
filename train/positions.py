"""Loss by position in context: the curve that shows whether a model uses a long context.

What always holds: a target belongs to exactly one bucket, by the position of its token in its document, and buckets
hold plain sums and counts. So the parts of any mesh, layout and number of batches add up to the same curve, and its
sums and counts add up to the held-out loss. Means are taken once, at the end, on the host.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int


def position_edges(seq_len: int) -> tuple[int, ...]:
    """First positions of the buckets, doubling: 0, 1, 2, 4, ... and, at the end, `seq_len`.

    Example:
      >>> position_edges(12)
      (0, 1, 2, 4, 8, 12)
    """
    if seq_len < 1:
        raise ValueError(f"{seq_len=} must be at least 1 to have positions; use the length of a row")
    powers = itertools.takewhile(lambda power: power < seq_len, (2**exponent for exponent in itertools.count()))
    return (0, *powers, seq_len)


@jax.named_scope("loss_by_position")
def loss_by_position(
    nats: Float[Array, "R T"], positions: Int[Array, "R T"], valid: Bool[Array, "R T"], edges: tuple[int, ...]
) -> tuple[Float[Array, " E"], Int[Array, " E"]]:
    """Sum the loss and count the targets of each bucket of positions, over the tokens given.

    Pure sums over this shard's tokens: inside a `shard_map`, `psum` both results over the axes that cut the tokens.

    Args:
      nats: loss of each token's target.
      positions: place of each token in its document.
      valid: whether the token has a target; elsewhere `nats` may hold anything, NaN too.
      edges: increasing; bucket i holds positions from edges[i] up to, not including, edges[i + 1]. Positions below the
        first or from the last on count in the first and the last bucket, so that no target is lost.

    Returns:
      (sums float32, counts int32), each of len(edges) - 1.
    """
    num_buckets = len(edges) - 1
    if num_buckets < 1 or any(later <= edge for edge, later in itertools.pairwise(edges)):
        raise ValueError(f"{edges=} must increase and be at least two; use position_edges(seq_len)")
    bucket = sum((positions >= edge).astype(jnp.int32) for edge in edges[1:-1]) + jnp.zeros_like(positions, jnp.int32)
    nats = jnp.where(valid, nats.astype(jnp.float32), 0.0)
    here = [valid & (bucket == index) for index in range(num_buckets)]
    sums = jnp.stack([jnp.sum(jnp.where(this, nats, 0.0)) for this in here])
    return sums, jnp.stack([jnp.sum(this, dtype=jnp.int32) for this in here])


class PositionCurve:
    """Adds up the sums and counts of many batches, in float64 and Python integers."""

    def __init__(self, seq_len: int):
        """An empty curve over the buckets of `position_edges(seq_len)`."""
        self.edges = position_edges(seq_len)
        self.clear()

    def clear(self) -> None:
        """Forget what was added."""
        self.sums = np.zeros(len(self.edges) - 1, np.float64)
        self.counts = np.zeros(len(self.edges) - 1, np.int64)

    def add(self, sums: Array | np.ndarray, counts: Array | np.ndarray) -> None:
        """Add one batch's global sums and counts, as `loss_by_position` gives them."""
        if np.shape(sums) != self.sums.shape or np.shape(counts) != self.counts.shape:
            raise ValueError(
                f"sums of shape {np.shape(sums)} and counts of shape {np.shape(counts)} must be {self.sums.shape}, one "
                f"for each bucket of edges={self.edges}; make both from position_edges(seq_len)"
            )
        self.sums += np.asarray(sums, np.float64)
        self.counts += np.asarray(counts, np.int64)

    def means(self) -> dict[str, float]:
        """First position of each bucket that has targets -> mean loss in nats."""
        filled = zip(self.edges[:-1], self.sums, self.counts, strict=True)
        return {str(edge): float(total / count) for edge, total, count in filled if count}

    def row(self) -> dict[str, dict[str, float]]:
        """What goes into the row of metrics of an evaluation: nothing where no curve was made."""
        means = self.means()
        return {"held_out_loss_by_position": means} if means else {}

    def mean(self) -> float:
        """Mean over all targets: the loss that the curve is a breakdown of; NaN for an empty curve."""
        return float(self.sums.sum() / self.counts.sum()) if self.counts.sum() else math.nan
