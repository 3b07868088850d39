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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from models.sharding import RULES
from ring_jax import manual


class Ticks(NamedTuple):
    """How often the stages ran their layers, counted where they run, int32, summed over the stages."""

    busy: Array
    """On a microbatch."""
    all: Array
    """With the runs in the bubble, whose results are thrown away."""


def layer_order(num_layers: int, stages: int, repeats: int) -> np.ndarray:
    """Which layer lies where in the stacked parameters: ``stacked[i] = layer[order[i]]``.

    Stage s holds the s-th part of the stack, which for repeat r are layers (r * stages + s) * n to that + n.
    """
    groups = np.arange(num_layers).reshape(repeats, stages, -1)
    return np.swapaxes(groups, 0, 1).reshape(-1)


@jax.named_scope("pipeline")
def run_pipeline(
    stage: Callable[[Any, Array, Any, Any], Array], layers: Any, inputs: Array, place: Any, *, repeats: int = 1
) -> tuple[Array, Ticks]:
    """Pass microbatches through all layers.

    Args:
      stage: (layers, x, place, turn) -> x of the same shape and type. With repeats its layers are [n, repeats, ...], of
        which it is to run those of this turn; it cuts them out itself, where the backward pass can cut them out again:
        cut out here, a copy would be kept for every tick. Without, turn is None.
      layers: pytree of [n, ...], what this stage holds, in the order of `layer_order`.
      inputs: [M, ...], what enters the first layer, microbatch by microbatch.
      place: pytree of [M, ...], what every stage must know of the microbatch it is working on.
      repeats: how often a microbatch goes round; from 2 on M must be a multiple of the number of stages.

    Returns:
      [M, ...], behind the last layer on the last stage, on other stages something else; and the ticks.
    """
    stages, count = manual.axis_size(RULES.layers), inputs.shape[0]
    if stages == 1:
        ticks = Ticks(jnp.int32(count), jnp.int32(count))
        if count == 1:
            return stage(layers, inputs[0], jax.tree.map(lambda p: p[0], place), None)[None], ticks
        return lax.map(lambda piece: stage(layers, piece[0], piece[1], None), (inputs, place)), ticks
    index = manual.axis_index(RULES.layers)
    to_next = [(i, (i + 1) % stages) for i in range(stages)]
    if repeats > 1:
        layers = jax.tree.map(lambda w: jnp.moveaxis(w.reshape(repeats, -1, *w.shape[1:]), 0, 1), layers)

    def run_tick(received: Array, tick: Array) -> tuple[Array, tuple[Array, Array]]:
        number = tick - index
        works = (number >= 0) & (number < count * repeats)
        group, rest = number // (stages * repeats), number % (stages * repeats)
        microbatch = number if repeats == 1 else group * stages + rest % stages
        repeat = jnp.zeros_like(number) if repeats == 1 else rest // stages
        microbatch = jnp.clip(microbatch, 0, count - 1)

        def of_microbatch(p: Array) -> Array:
            here = lax.dynamic_index_in_dim(p, microbatch, keepdims=False)
            return jnp.where(works, here, jnp.zeros_like(here))

        entering = lax.dynamic_index_in_dim(inputs, microbatch, keepdims=False)
        x = jnp.where((index == 0) & (repeat == 0), entering, received)
        x = stage(layers, x, jax.tree.map(of_microbatch, place), None if repeats == 1 else repeat)
        return lax.ppermute(x, RULES.layers, to_next), (x, works)

    inputs = manual.vary_alike(inputs, index, jax.tree.leaves(layers))[0]
    _, (outputs, works) = lax.scan(run_tick, jnp.zeros_like(inputs[0]), jnp.arange(repeats * count + stages - 1))
    ticks = Ticks(lax.psum(jnp.sum(works, dtype=jnp.int32), RULES.layers), jnp.int32(stages * len(works)))
    if repeats == 1:
        return outputs[stages - 1 :], ticks
    microbatch = np.arange(count)
    last = (microbatch // stages) * stages * repeats + (repeats - 1) * stages + microbatch % stages
    return outputs[last + stages - 1], ticks
