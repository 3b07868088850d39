"""The held-out loss: one mean over all held-out targets, whatever the mesh and the number of processes.

What always holds: a process reads the rows of its indices of the data axis only, ahead of the devices; sums and counts
are global, so that every process gets the same loss.
"""

import math
from collections.abc import Callable

from jax.sharding import Mesh

from train import distributed
from train.config import TrainConfig
from train.data import Corpus, held_out_batches, local_data_indices
from train.positions import PositionCurve
from train.prefetch import Prefetch
from train.signals import StopRequest
from train.state import TrainState
from train.step import make_eval_step, place_batch

BATCHES_AHEAD = 2
_BATCHES_A_SIGNAL = 4


def make_evaluate(
    config: TrainConfig,
    mesh: Mesh,
    corpus: Corpus,
    stop: StopRequest,
    curve: PositionCurve | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> Callable[[TrainState, int | None], float | None]:
    """The function (state, number of batches, None for all) -> held-out loss, or None when a signal came in between and
    more than a few batches were left.

    Where these batches hold no target at all, the next are read until one does; without any the loss is NaN.

    An eval step may return, after its loss and count, the global sums and counts of `loss_by_position`: these go into
    `curve`, which then holds the last evaluation. `on_batch` is called before each batch; before some of them the
    processes of a job agree on whether a signal came.
    """
    eval_step = make_eval_step(config, mesh)
    indices = local_data_indices(mesh)
    held_out = held_out_batches(
        corpus.held_out,
        seq_len=config.data.seq_len,
        batch_size=config.data.batch_size,
        data_indices=indices,
        num_data=config.mesh.data,
    )

    def evaluate(state: TrainState, num_batches: int | None) -> float | None:
        total, count = 0.0, 0  # over all targets of all batches: a batch with few targets weighs little
        if curve is not None:
            curve.clear()
        with Prefetch(iter(held_out), num_batches=BATCHES_AHEAD) as ahead:
            done = 0
            while num_batches is None or done < num_batches or not count:
                if (batch := next(ahead, None)) is None:
                    break
                on_batch()
                if done % _BATCHES_A_SIGNAL == 0:
                    stop.settle()
                left = math.inf if num_batches is None else num_batches - done
                done += 1
                if stop.requested and not 0 < left <= _BATCHES_A_SIGNAL:
                    return None
                distributed.at("evaluation", int(state.step))
                placed = place_batch(batch, config, mesh, data_indices=indices)
                loss_sum, num_targets, *by_position = eval_step(state.params, placed)
                total, count = total + float(loss_sum), count + int(num_targets)
                if by_position and curve is not None:
                    curve.add(*by_position)
        return total / count if count > 0 else math.nan

    return evaluate
