"""How blocks travel a ring: the order of hops and steps, whatever the steps compute.

A *block* is what moves (keys and values, or queries with their cotangents); a *track* is the list of offsets that one
block visits. With two directions the keys are two blocks on mirrored tracks; otherwise there is one. Three rules:

  - a hop is issued before the step's compute, from values that the step only reads;
  - equal hops that follow each other are one rolled `lax.scan`, the last step peeled off it (`_steps_a_trip`);
  - a travelling gradient moves one hop behind its block, while the next step computes, and home at the end. The part
    of the block that is at home stays there.

If a gradient moved with its block instead, each hop would cost the time of the step and of the transfer.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ring_jax import routes
from ring_jax.mesh import target
from ring_jax.routes import Grid

HOMECOMING = "homecoming"
"""Name scope of the last hop of a travelling gradient: nothing is left to compute behind which it could hide."""

type Blocks = tuple[Any, ...]
type Plan = tuple[tuple[int, ...], ...]
"""For each group offset, the offsets inside the group that are visited."""


def walk(grid: Grid, plan: Plan, two_directions: bool, attend: Callable[..., Any], carry: Any, blocks: Blocks) -> Any:
    """Visit all offsets with a carry that stays: ``carry = attend(carry, blocks, group, offsets)``."""
    for group, tracks, here in _groups(grid, plan, two_directions, blocks):
        moves, table = _moves(tracks), jnp.array(tracks, jnp.int32).T
        here, t = _hop(grid, here, tuple(track[0] for track in tracks)), 0
        while t < len(moves):
            move, count = moves[t], _alike(moves, t)

            def step(state, offsets, move=move, group=group):
                carry, here = _in_order(state)
                arriving = _hop(grid, here, move)
                return (attend(carry, here, group, offsets), arriving), None

            (carry, here), _ = _scan(step, (carry, here), table[t : t + count])
            t += count
        carry, here = _in_order((carry, here))
        carry = attend(carry, here, group, table[t])
    return carry


def tour(
    grid: Grid, plan: Plan, two_directions: bool, step: Callable[..., Any], acc: Any, blocks: Blocks, dtype: Any
) -> tuple[Any, Blocks | None]:
    """Visit all offsets and bring home what the steps add up for each block.

    ``acc, grads = step(acc, blocks, group, offsets)`` with one gradient for each block, which is sent in ``dtype``.
    Returns acc and the gradients at home, None where nothing is visited.
    """

    def send(tree: Any, hop: Callable[[Any], Any]) -> Any:
        wide = jax.tree.map(lambda x: x.dtype, tree)
        return jax.tree.map(lambda x, wide: x.astype(wide), hop(jax.tree.map(lambda x: x.astype(dtype), tree)), wide)

    home, riding, at = None, None, 0
    for group, tracks, here in _groups(grid, plan, two_directions, blocks):
        acc, part = _tour_group(grid, tracks, group, step, acc, here, send)
        if group == 0:
            home = part
        else:
            moved = None if riding is None else send(riding, lambda x, by=group - at: grid.hop(x, (by, 0)))
            riding, at = _add(moved, part), group
    if riding is not None:
        with jax.named_scope(HOMECOMING):
            riding = send(riding, lambda x: grid.hop(x, (-at, 0)))
        home = _add(home, riding)
    return acc, home


def _tour_group(grid: Grid, tracks: Plan, group: int, step, acc, here: Blocks, send) -> tuple[Any, Blocks]:
    """Visit the offsets of one group; the gradients end where the group's blocks began."""
    moves, table = _moves(tracks), jnp.array(tracks, jnp.int32).T
    first = tuple(track[0] for track in tracks)
    here, home, riding, t = _hop(grid, here, first), None, None, 0
    if not any(first) and len(moves) > 1 and moves[0] == moves[1]:

        def leave_home(state, offsets):
            acc, here = _in_order(state)
            arriving = _hop(grid, here, moves[0])
            acc, grads = step(acc, here, group, offsets)
            return (acc, arriving), grads

        (acc, here), grads = _scan(leave_home, (acc, here), table[:2])
        home, riding = (jax.tree.map(lambda x, i=i: x[i], grads) for i in (0, 1))
        t = 2
    while t < len(moves):
        move, count = moves[t], 1
        if riding is not None and moves[t - 1] == move:
            count = _alike(moves, t)

            def ride(state, offsets, move=move):
                acc, here, riding = _in_order(state)
                arriving = _hop(grid, here, move)
                riding = send(riding, lambda x: _hop(grid, x, move))
                acc, grads = step(acc, here, group, offsets)
                return (acc, arriving, _add(riding, grads)), None

            (acc, here, riding), _ = _scan(ride, (acc, here, riding), table[t : t + count])
        else:
            acc, here, riding = _in_order((acc, here, riding))
            arriving = _hop(grid, here, move)
            acc, home, riding = _one(
                grid, moves, t, not any(first), step, acc, here, group, table[t], home, riding, send
            )
            here = arriving
        t += count
    acc, here, riding = _in_order((acc, here, riding))
    acc, home, riding = _one(grid, moves, t, not any(first), step, acc, here, group, table[t], home, riding, send)
    if riding is not None:
        back = tuple(-track[-1] for track in tracks)
        with jax.named_scope(HOMECOMING):
            riding = send(riding, lambda x: _hop(grid, x, back))
        home = _add(home, riding)
    assert home is not None
    return acc, home


def _one(grid, moves, t: int, starts_at_home: bool, step, acc, here, group, offsets, home, riding, send):
    """One step outside a scan: what rides catches up, what the step adds joins it or stays at home."""
    if riding is not None:
        riding = send(riding, lambda x: _hop(grid, x, moves[t - 1]))
    acc, grads = step(acc, here, group, offsets)
    if t == 0 and starts_at_home:
        return acc, grads, riding
    return acc, home, _add(riding, grads)


def _groups(grid: Grid, plan: Plan, two_directions: bool, blocks: Blocks) -> Iterator[tuple[int, Plan, Blocks]]:
    """For each group offset that is visited: its tracks, and the blocks as they arrive there.

    The hop to the next group is issued before the steps of this one: it has all of them to hide behind.
    """
    visited = [group for group, offsets in enumerate(plan) if offsets]
    if visited:
        blocks = grid.hop(blocks, (visited[0], 0))
    for n, group in enumerate(visited):
        last = n + 1 == len(visited)
        ahead = blocks if last else grid.hop(blocks, (visited[n + 1] - group, 0))
        tracks = (plan[group], routes.mirrored(plan[group], grid.inner)) if two_directions else (plan[group],)
        yield group, tracks, blocks
        blocks = ahead


def _scan(step, state, table: Array):
    """`lax.scan`, but for a single step the step itself."""
    if len(table) == 1:
        return step(state, table[0])
    return lax.scan(step, state, table, unroll=_steps_a_trip())


def _steps_a_trip() -> int:
    """On accelerators two: what leaves in one buffer arrives in the other. With one, XLA copies each block before it is
    sent, because the loop writes what arrives to where the kernel still reads (docs/kernels.md)."""
    return 1 if target().platform == "cpu" else 2


def _in_order(state: Any) -> Any:
    """Tie a step to the one before it: ``(sums, blocks, ...)``.

    A GPU's compiler would send all hops first, so everything is tied. A TPU's would wait for the tokens of a block, to
    make the list of tiles of the next step before the kernel of this one; that alone is tied there: with keys and
    gradients tied, too, their hops land between two kernels.
    """
    platform = target().platform
    if platform == "gpu":
        return lax.optimization_barrier(state)
    if platform == "tpu":
        leaves, tree = jax.tree.flatten(state[1:])
        tokens = {i: x for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.integer)}
        sums, tokens = lax.optimization_barrier((state[0], tokens))
        return sums, *jax.tree.unflatten(tree, [tokens.get(i, x) for i, x in enumerate(leaves)])
    return state


def _hop(grid: Grid, blocks: Blocks, move: tuple[int, ...]) -> Blocks:
    """Move each track's block; tracks that move alike share a message."""
    if len(set(move)) == 1:
        return grid.hop(blocks, (0, move[0]))
    return tuple(grid.hop(block, (0, by)) for block, by in zip(blocks, move, strict=True))


def _moves(tracks: Plan) -> list[tuple[int, ...]]:
    """Places to move between one step and the next, for each track."""
    return list(zip(*(routes.shifts(track) for track in tracks), strict=True))


def _alike(moves: list[tuple[int, ...]], t: int) -> int:
    """How many moves from t on are the same."""
    count = 1
    while t + count < len(moves) and moves[t + count] == moves[t]:
        count += 1
    return count


def _add(x: Any, y: Any) -> Any:
    return y if x is None else jax.tree.map(jnp.add, x, y)
