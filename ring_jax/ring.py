"""The ring: keys and values travel from place to place, queries stay; in the backward pass whichever side is cheaper.

At each step a place computes with the block that is there while that block is already on its way to the next place.
N places need N - 1 hops: the last step sends nothing, and a mask that cannot reach a block spares its step and its hop
(`routes.reachable`). Inside this file T and S are the lengths at one place.

Invariant 1: positions and segment ids of the keys travel with K and V (what the number of the source place tells is
derived from it instead). Invariant 3: *dK and dV ride with their K and V and come home with them.* The backward pass
computes scores again from the global lse and the final output; nothing is kept for a step. A backward pass that used
one step's own lse, or did not send dK and dV home, would have the right loss.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from ring_jax import layouts, manual, routes, travel
from ring_jax.kernels.protocol import Carry, Cotangents, Gradients
from ring_jax.kernels.tiles import Keys, Pairs, float_args
from ring_jax.problem import Problem, columns, put_columns, wire_dtype, zeros


def forward(problem: Problem, carry: Carry) -> Carry:
    """Fold the keys of the whole ring into the softmax state of this place's queries."""
    halves, grid = _Halves(problem), problem.grid

    def attend(carry: Carry, blocks: tuple[Keys, ...], group: int, offsets: Array) -> Carry:
        for half, block in enumerate(blocks):
            source = grid.source(problem.place.rank, group, offsets[half])
            keys, pairs = halves.arrived(block, source, half), halves.pairs(problem.pairs, source, half)
            carry = problem.kernel.forward_block(
                carry, problem.queries, keys, pairs, problem.spec.scores, halves.tile_sizes
            )
        return carry

    plan = routes.reachable(grid, problem.reach)
    return travel.walk(grid, plan, two_directions(problem), attend, carry, halves.split(problem.keys))


def two_directions(problem: Problem) -> bool:
    """Asked for, and there is a ring."""
    return problem.spec.schedule.two_directions and problem.grid.num_places > 1


def backward(problem: Problem, cotangents: Cotangents) -> Gradients:
    """Gradients of this place's queries and keys, and of its rows of the bias."""
    if queries_travel(problem, cotangents):
        return _backward_with_queries(problem, cotangents)
    return _backward_with_keys(problem, cotangents)


def _backward_with_keys(problem: Problem, cotangents: Cotangents) -> Gradients:
    halves, grid = _Halves(problem), problem.grid

    def step(acc: Gradients, blocks: tuple[Keys, ...], group: int, offsets: Array):
        grads = []
        for half, block in enumerate(blocks):
            source = grid.source(problem.place.rank, group, offsets[half])
            keys, pairs = halves.arrived(block, source, half), halves.pairs(problem.pairs, source, half)
            sums = acc._replace(keys=zeros(problem, keys.kv.shape), bias=halves.columns(acc.bias, source, half))
            sums = problem.kernel.backward_block(
                sums, problem.queries, cotangents, keys, pairs, problem.spec.scores, halves.tile_sizes
            )
            grads.append(sums.keys)
            acc = sums._replace(keys=acc.keys, bias=halves.put_columns(acc.bias, sums.bias, source, half))
        return acc, tuple(grads)

    bias = problem.pairs.bias
    acc = Gradients(
        zeros(problem, problem.queries.query.shape),
        zeros(problem, (0,)),
        None if bias is None else zeros(problem, bias.shape),
        zero_args(problem),
    )
    plan, blocks = routes.reachable(grid, problem.reach), halves.split(problem.keys)
    acc, home = travel.tour(grid, plan, two_directions(problem), step, acc, blocks, wire_dtype(problem))
    return acc._replace(keys=zeros(problem, problem.keys.kv.shape) if home is None else halves.join(home))


def _backward_with_queries(problem: Problem, cotangents: Cotangents) -> Gradients:
    """The same with queries, cotangents and dQ on the road, keys and dK, dV at home."""
    grid, place = problem.grid, problem.place.rank // problem.grid.ulysses
    index = grid.token_index(problem.spec.layout, place, problem.lengths[1])
    at_home = problem.keys._replace(tokens=problem.key_tokens(problem.keys.tokens, index))
    sizes = problem.tile_sizes(problem.lengths[1])

    def step(acc: Gradients, blocks: tuple, group: int, offsets: Array):
        ((queries, moved),) = blocks
        index = grid.token_index(
            problem.spec.layout, grid.source(problem.place.rank, group, offsets[0]), problem.lengths[0]
        )
        queries = queries._replace(tokens=problem.query_tokens(queries.tokens, index))
        sums = acc._replace(query=zeros(problem, queries.query.shape))
        sums = problem.kernel.backward_block(sums, queries, moved, at_home, problem.pairs, problem.spec.scores, sizes)
        return sums._replace(query=acc.query), (sums.query,)

    acc = Gradients(zeros(problem, (0,)), zeros(problem, problem.keys.kv.shape), None, zero_args(problem))
    # Queries that are (a, b) on meet the keys that would have come from (-a, -b).
    plan = routes.opposite(grid, routes.reachable(grid, problem.reach))
    blocks = ((problem.queries._replace(tokens=problem.given_tokens), cotangents),)
    acc, home = travel.tour(grid, plan, False, step, acc, blocks, wire_dtype(problem))
    return acc._replace(query=zeros(problem, problem.queries.query.shape) if home is None else home[0])


def zero_args(problem: Problem) -> tuple[Array, ...]:
    """Accumulators for the gradients of the float score_args."""
    query, args = problem.queries.query, float_args(problem.pairs.score_args)
    return tuple(manual.full_like(x.shape, 0, x.dtype, query) for x in args)


def queries_travel(problem: Problem, cotangents: Cotangents) -> bool:
    """Whether the backward pass moves queries: when asked to, or when that sends fewer bytes a hop."""
    schedule, pairs = problem.spec.schedule, problem.pairs
    if schedule.rotate != "auto" or schedule.two_directions or pairs.bias is not None or pairs.mask is not None:
        return schedule.rotate == "queries"
    by_keys, by_queries = bytes_a_hop(problem, cotangents)
    return by_queries < by_keys


def bytes_a_hop(problem: Problem, cotangents: Cotangents) -> tuple[int, int]:
    """What one hop of the backward pass sends with keys, and with queries, on the road.

    K, V in the dtype of the arrays and dK, dV in the gradient dtype, against Q, dO in theirs, lse and delta in float32
    and dQ in the gradient dtype; and what tokens and options add to either.
    """
    query, kv, sent = problem.queries.query, problem.keys.kv, wire_dtype(problem).itemsize
    queries = problem.queries._replace(tokens=problem.given_tokens), cotangents
    by_keys, by_queries = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (problem.keys, queries))
    return by_keys + kv.size * sent, by_queries + query.size * sent


class _Halves:
    """The keys of a place as blocks: all of them, or for two directions half of each chunk in either.

    Halves of chunks, not of shards: under a causal mask both directions then have the same work at every step.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.count = 2 if two_directions(problem) else 1
        self.keys = problem.lengths[1]
        size, ulysses = problem.grid.num_devices, problem.grid.ulysses
        self.chunks = self.keys // layouts.chunk_length(problem.spec.layout, self.keys // ulysses, size)
        if self.keys % (self.count * self.chunks):
            raise ValueError(
                f"two_directions cuts each of the {self.chunks} runs of keys of a device in two, so {self.keys} keys "
                f"a device must be a multiple of {2 * self.chunks}; pad the sequence or leave two_directions off"
            )
        self.tile_sizes = problem.tile_sizes(self.keys // self.count, self.count)

    def take(self, x: Array, axis: int, half: int) -> Array:
        """One half of the chunks of an axis of keys."""
        if self.count == 1:
            return x
        axis %= x.ndim
        cut = x.reshape(*x.shape[:axis], self.chunks, 2, -1, *x.shape[axis + 1 :])
        part = cut[(slice(None),) * (axis + 1) + (half,)]
        return part.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def split(self, keys: Keys) -> tuple[Keys, ...]:
        tokens = keys.tokens
        return tuple(
            Keys(
                self.take(keys.kv, 3, half),
                type(tokens)(*(None if x is None else self.take(x, 1, half) for x in tokens)),
            )
            for half in range(self.count)
        )

    def join(self, home: tuple[Array, ...]) -> Array:
        """Undo `split` for what came home, ``[R, b, K, S / count, H+Hv]`` each."""
        if self.count == 1:
            return home[0]
        cut = [x.reshape(*x.shape[:3], self.chunks, 1, -1, x.shape[-1]) for x in home]
        return jnp.concatenate(cut, 4).reshape(*home[0].shape[:3], -1, home[0].shape[-1])

    def arrived(self, block: Keys, source: Array, half: int) -> Keys:
        """The block with the tokens that did not travel."""
        index = self.problem.grid.token_index(self.problem.spec.layout, source, self.keys)
        return block._replace(tokens=self.problem.key_tokens(block.tokens, self.take(index, 0, half)))

    def columns(self, x: Array | None, source: Array, half: int) -> Array | None:
        """Columns of a pairwise array for the keys of a block."""
        x = columns(x, source * self.keys, self.keys)
        return x if x is None or x.shape[-1] == 1 else self.take(x, -1, half)

    def put_columns(self, x: Array | None, part: Any, source: Array, half: int) -> Array | None:
        """Undo `columns`."""
        if x is None or x.shape[-1] == 1:
            return part
        if self.count == 2:
            both = cast(Array, columns(x, source * self.keys, self.keys))
            cut = both.reshape(*both.shape[:-1], self.chunks, 2, -1)
            part = cut.at[..., half, :].set(part.reshape(*part.shape[:-1], self.chunks, -1)).reshape(both.shape)
        return put_columns(x, part, source * self.keys, self.keys)

    def pairs(self, pairs: Pairs, source: Array, half: int) -> Pairs:
        bias, mask = (self.columns(x, source, half) for x in (pairs.bias, pairs.mask))
        return pairs._replace(bias=bias, mask=mask)
