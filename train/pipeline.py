"""The pipeline: stages of layers on the devices of one mesh axis, microbatches flowing through them.

With v = 1 repeats (GPipe) stage s works on microbatch m in tick m + s. With 3 stages, 4 microbatches, `.` the bubble:

    tick      0  1  2  3  4  5
    stage 0   0  1  2  3  .  .
    stage 1   .  0  1  2  3  .
    stage 2   .  .  0  1  2  3

With v > 1 (circular, interleaved) each stage holds v groups of layers and a microbatch goes round v times, so the
bubble is (p - 1) / (v m + p - 1) of the ticks. Microbatches go in groups of p: what the last stage sends arrives at the
first in the tick in which it is needed, and nothing has to be kept waiting. 2 stages, 2 microbatches, 2 repeats (3.1
is microbatch 3 in repeat 1):

    tick      0    1    2    3    4
    stage 0   0.0  1.0  0.1  1.1  .
    stage 1   .    0.0  1.0  0.1  1.1

Invariant: every stage uses the positions and segment ids of the microbatch it is working on. With those of the
microbatch that just entered, late stages would mask and rotate one row's tokens as if they were another's.
All stages run every tick, in the bubble on values that are thrown away: no collective depends on data. In the bubble
they see zeros for the place, that is segment 0, padding: attention then has no tile to compute.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from models import Transformer
from models.sharding import RULES
from ring_jax import manual


def layer_order(num_layers: int, stages: int, repeats: int) -> np.ndarray:
    """Which layer lies where in the stacked parameters: ``stacked[i] = layer[order[i]]``.

    Stage s holds the s-th part of the stack, which for repeat r are layers (r * stages + s) * n to that + n.
    """
    groups = np.arange(num_layers).reshape(repeats, stages, -1)
    return np.swapaxes(groups, 0, 1).reshape(-1)


def bubble(stages: int, microbatches: int, repeats: int) -> float:
    """Share of the ticks in which a stage has nothing to do."""
    return (stages - 1) / (repeats * microbatches + stages - 1)


@jax.named_scope("pipeline")
def run_pipeline(model: Transformer, inputs: Array, place: Any, *, layout: str | None, repeats: int = 1) -> Array:
    """Pass microbatches through all layers.

    Args:
      model: this stage's layers.
      inputs: [M, b, t, D], what enters the first layer.
      place: positions and segment_ids, [M, b, T] each.
      layout: order of the tokens. repeats: how often a microbatch goes round.

    Returns:
      [M, b, t, D], behind the last layer on the last stage; on other stages something else.
    """
    stages, count = manual.axis_size(RULES.layers), inputs.shape[0]

    def stage(x: Array, here: Any, layers: Any = None) -> Array:
        return model.run_layers(x, here["positions"], here["segment_ids"], layout=layout, layers=layers)

    if stages == 1 and count == 1:
        return stage(inputs[0], jax.tree.map(lambda p: p[0], place))[None]
    if stages == 1:
        return lax.map(lambda piece: stage(*piece), (inputs, place))
    return _run_stages(model, stage, inputs, place, stages, repeats)


def _run_stages(model: Transformer, stage: Any, inputs: Array, place: Any, stages: int, repeats: int) -> Array:
    index, count = manual.axis_index(RULES.layers), inputs.shape[0]
    to_next = [(i, (i + 1) % stages) for i in range(stages)]
    groups = jax.tree.map(lambda w: w.reshape(repeats, -1, *w.shape[1:]), model.layers)

    def work(tick: Array) -> tuple[Array, Array, Array]:
        """(whether there is any, microbatch, repeat) of this stage."""
        number = tick - index
        group, rest = number // (stages * repeats), number % (stages * repeats)
        if repeats == 1:
            return (number >= 0) & (number < count), number, jnp.zeros_like(number)
        return (number >= 0) & (number < count * repeats), group * stages + rest % stages, rest // stages

    def run_tick(received: Array, tick: Array) -> tuple[Array, Array]:
        works, microbatch, repeat = work(tick)
        microbatch = jnp.clip(microbatch, 0, count - 1)

        def of_microbatch(p: Array) -> Array:
            here = lax.dynamic_index_in_dim(p, microbatch, keepdims=False)
            return jnp.where(works, here, jnp.zeros_like(here))

        entering = lax.dynamic_index_in_dim(inputs, microbatch, keepdims=False)
        layers = None
        if repeats > 1:
            layers = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, repeat, keepdims=False), groups)
        x = jnp.where((index == 0) & (repeat == 0), entering, received)
        x = stage(x, jax.tree.map(of_microbatch, place), layers)
        return lax.ppermute(x, RULES.layers, to_next), x

    inputs = manual.vary_alike(inputs, index, jax.tree.leaves(model.layers))[0]
    ticks = jnp.arange(repeats * count + stages - 1)
    _, outputs = lax.scan(run_tick, jnp.zeros_like(inputs[0]), ticks)
    microbatches = np.arange(count)
    if repeats == 1:
        return outputs[stages - 1 :]
    last = (microbatches // stages) * stages * repeats + (repeats - 1) * stages + microbatches % stages
    return outputs[last + stages - 1]
