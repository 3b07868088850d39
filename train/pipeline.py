"""The pipeline: stages of layers on the devices of one mesh axis, microbatches flowing through them (GPipe).

Stage s works on microbatch m in tick m + s. With 3 stages and 4 microbatches, and `.` for the bubble:

    tick      0  1  2  3  4  5
    stage 0   0  1  2  3  .  .
    stage 1   .  0  1  2  3  .
    stage 2   .  .  0  1  2  3

Invariant: every stage uses the positions and segment ids of the microbatch it is working on, number tick - stage. With
those of the microbatch that just entered, late stages would mask and rotate one row's tokens as if they were another's.
All stages run every tick, in the bubble on values that are thrown away: no collective depends on data. In the bubble
they see zeros for the place, that is segment 0, padding: attention then has no tile to compute.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from models.sharding import RULES
from ring_jax import manual


@jax.named_scope("pipeline")
def run_pipeline(stage: Callable[[Array, Any], Array], inputs: Array, place: Any) -> Array:
    """Pass microbatches through all stages.

    Args:
      stage: (x, place) -> x of the same shape and type, this device's layers.
      inputs: [M, ...], what stage 0 receives, microbatch by microbatch.
      place: pytree of [M, ...], what every stage must know of the microbatch it is working on.

    Returns:
      [M, ...], the last stage's outputs; on other stages, their own outputs of some ticks.
    """
    num_stages, num_microbatches = manual.axis_size(RULES.layers), inputs.shape[0]
    if num_stages == 1 and num_microbatches == 1:
        return stage(inputs[0], jax.tree.map(lambda p: p[0], place))[None]
    if num_stages == 1:
        return lax.map(lambda piece: stage(*piece), (inputs, place))
    index = manual.axis_index(RULES.layers)
    to_next = [(i, (i + 1) % num_stages) for i in range(num_stages)]

    def run_tick(received: Array, this: tuple[Array, Array]) -> tuple[Array, Array]:
        tick, entering = this
        microbatch = tick - index
        works = (microbatch >= 0) & (microbatch < num_microbatches)

        def of_microbatch(p: Array) -> Array:
            here = lax.dynamic_index_in_dim(p, jnp.clip(microbatch, 0, num_microbatches - 1), keepdims=False)
            return jnp.where(works, here, jnp.zeros_like(here))

        place_here = jax.tree.map(of_microbatch, place)
        x = stage(jnp.where(index == 0, entering, received), place_here)
        return lax.ppermute(x, RULES.layers, to_next), x

    bubble = num_stages - 1
    entering = jnp.pad(inputs, ((0, bubble), *((0, 0) for _ in inputs.shape[1:])))
    entering = manual.vary_alike(entering, index)[0]
    _, outputs = lax.scan(run_tick, jnp.zeros_like(entering[0]), (jnp.arange(num_microbatches + bubble), entering))
    return outputs[bubble:]
