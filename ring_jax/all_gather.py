"""All-gather: every device gets all keys and values once and attends alone; dK and dV are summed where they belong.

The bytes are those of the ring. It holds all of K and V at a time, and nothing hides the transfer but what runs before
it; in exchange there is one collective, and the block kernel runs once over a long row.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ring_jax import ring
from ring_jax.kernels.protocol import Carry, Cotangents, Gradients
from ring_jax.kernels.tiles import Keys
from ring_jax.problem import Problem, wire_dtype, zeros


def _gather(problem: Problem) -> tuple[Keys, tuple[int, int]]:
    """The keys of all devices, in the order of the array, and the tile sizes for them."""
    grid, length = problem.grid, problem.lengths[1]
    keys = problem.keys
    if grid.num_places > 1:
        kv = lax.all_gather(keys.kv, grid.axis_name, axis=3, tiled=True)
        tokens = jax.tree.map(lambda x: lax.all_gather(x, grid.axis_name, axis=1, tiled=True), keys.tokens)
        keys = Keys(kv, tokens)
    index = jnp.concatenate(
        [grid.token_index(problem.spec.layout, jnp.int32(place), length) for place in range(grid.num_places)]
    )
    keys = keys._replace(tokens=problem.key_tokens(keys.tokens, index))
    return keys, problem.tile_sizes(length * grid.num_places)


def forward(problem: Problem, carry: Carry) -> Carry:
    """Fold all keys into the softmax state of this device's queries."""
    keys, sizes = _gather(problem)
    return problem.kernel.forward_block(carry, problem.queries, keys, problem.pairs, problem.spec.scores, sizes)


def backward(problem: Problem, cotangents: Cotangents) -> Gradients:
    """Gradients of this device's queries and keys, and of its rows of the bias. Keys are gathered again."""
    keys, sizes = _gather(problem)
    bias = problem.pairs.bias
    sums = Gradients(
        zeros(problem, problem.queries.query.shape),
        zeros(problem, keys.kv.shape),
        None if bias is None else zeros(problem, bias.shape),
        ring.zero_args(problem),
    )
    sums = problem.kernel.backward_block(
        sums, problem.queries, cotangents, keys, problem.pairs, problem.spec.scores, sizes
    )
    return sums._replace(keys=_scatter(problem, sums.keys))


def _scatter(problem: Problem, dkv: Array) -> Array:
    """Sum over devices what each has for the keys of all, and keep one's own."""
    if problem.grid.num_places == 1:
        return dkv
    own = lax.psum_scatter(dkv.astype(wire_dtype(problem)), problem.grid.axis_name, scatter_dimension=3, tiled=True)
    return own.astype(dkv.dtype)
