"""The search behind `ring_jax.balance`: which shard gets which tile, given how much work each pair of tiles is.

Invariant: *every shard keeps as many tiles as every other, and all hosts find the same order.* The hosts of a job
search on their own and must agree to the last bit, or each would hold another part of the sequence. So nothing here
depends on time, on the number of cores or on the version of NumPy: sums are of whole numbers or in a fixed order, and
random numbers come from RandomState, whose stream never changes.
"""

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

EVEN_ENOUGH = 1.01  # max / mean of the work of a shard, up to which the ring steps may make it worse
SWAPS_AT_ONCE = 64
PATIENCE = 60  # batches without a gain before the search ends
MOST_WORK = 20_000_000  # step times computed: about a second


def by_step(work: Shaped[np.ndarray, "P P"]) -> Shaped[np.ndarray, "P P"]:
    """(shard of the query, shard of the key) to (shard, ring step)."""
    shard = np.arange(len(work))
    return work[shard[:, None], (shard[:, None] - shard) % len(work)]


def even_shards(weights: Int[np.ndarray, " n"], num_shards: int) -> Int[np.ndarray, " n"]:
    """The shard of every tile: as many tiles on each, and sums of ``weights`` as even as swaps can make them."""
    each = len(weights) // num_shards
    owner = np.empty(len(weights), np.int64)
    heap = [(0, 0, shard) for shard in range(num_shards)]
    for i in np.argsort(-weights, kind="stable"):
        load, count, shard = heapq.heappop(heap)
        owner[i] = shard
        if count + 1 < each:
            heapq.heappush(heap, (load + int(weights[i]), count + 1, shard))
    loads = np.zeros(num_shards, np.int64)
    np.add.at(loads, owner, weights)
    for _ in range(4 * len(weights)):  # every swap lowers the sum of squares, so it would end without the limit too
        heavy = loads.argmax()
        others = (s for s in np.argsort(loads, kind="stable") if loads[heavy] - loads[s] > 1)
        swap = next((found for s in others if (found := _best_swap(weights, owner, heavy, s, loads))), None)
        if swap is None:
            break
        i, j = swap
        moved = weights[i] - weights[j]
        loads[owner[i]] -= moved
        loads[owner[j]] += moved
        owner[i], owner[j] = owner[j], owner[i]
    return owner


def _best_swap(weights, owner, heavy, light, loads) -> tuple[int, int] | None:
    """The tiles of two shards whose exchange brings their loads nearest to each other; None if none does."""
    gap = loads[heavy] - loads[light]
    here, there = (np.flatnonzero(owner == shard) for shard in (heavy, light))
    there = there[np.argsort(weights[there], kind="stable")]
    at = np.searchsorted(weights[there], weights[here] - gap / 2)
    near = np.clip(np.stack([at - 1, at]), 0, len(there) - 1)
    left = np.abs(gap - 2 * (weights[here] - weights[there[near]]))
    best = np.unravel_index(left.argmin(), left.shape)
    return (int(here[best[1]]), int(there[near[best]])) if left[best] < gap else None


class _Work(NamedTuple):
    """What a swap of two tiles changes, kept up to date; float64 that hold whole numbers."""

    by_query: Float[np.ndarray, "n P"]  # live keys of each tile, by the shard that has them
    by_key: Float[np.ndarray, "n P"]  # live queries of each tile, by shard
    total: Float[np.ndarray, "P P"]  # (shard of the query, shard of the key)


def even_steps(pairs: Int[np.ndarray, "n n"], owner: np.ndarray, num_shards: int) -> Int[np.ndarray, " n"]:
    """Swap tiles so that the shards are even at every ring step too, with no shard above `EVEN_ENOUGH`.

    A batch of swaps is drawn for one step, the more often the more its slowest shard exceeds the mean: a tile of one of
    the two shards that meet there, and any tile of another shard.
    """
    shard_of, random = owner.copy(), np.random.RandomState(0)
    onehot = np.eye(num_shards)[owner]
    by_query, by_key = (_sum_by_shard(x, onehot) for x in (pairs, pairs.T))
    work = _Work(by_query, by_key, onehot.T @ by_query)
    mean = work.total.sum() / num_shards
    limit = max(work.total.sum(1).max(), EVEN_ENOUGH * mean)
    best, fails = (np.inf, owner), 0
    for _ in range(MOST_WORK // (4 * num_shards * SWAPS_AT_ONCE)):
        steps = by_step(work.total)
        time = steps.max(0).sum()
        if time < best[0]:
            best = time, shard_of.copy()
        excess = np.cumsum(num_shards * steps.max(0) - steps.sum(0)).astype(np.int64)
        if fails == PATIENCE or time <= 1.002 * mean or excess[-1] == 0:
            break
        step = np.searchsorted(excess, random.randint(excess[-1], dtype=np.int64), side="right")
        slow = steps[:, step].argmax()
        here = (slow, (slow - step) % num_shards)[random.randint(2)]
        mine, theirs = np.flatnonzero(shard_of == here), np.flatnonzero(shard_of != here)
        i, j = (tiles[random.randint(len(tiles), size=SWAPS_AT_ONCE)] for tiles in (mine, theirs))
        score = _score_swaps(work, pairs, i, j, here, shard_of[j], limit)
        k = score[1:].argmin()
        fails = fails + 1 if score[1 + k] >= score[0] else 0
        if fails == 0:
            _swap(work, pairs, i[k], j[k], here, shard_of[j[k]])
            shard_of[i[k]], shard_of[j[k]] = shard_of[j[k]], here
    return best[1]


def _sum_by_shard(pairs: Int[np.ndarray, "n n"], onehot: Float[np.ndarray, "n P"]) -> Float[np.ndarray, "n P"]:
    """``pairs @ onehot``, in blocks of rows to save memory."""
    return np.concatenate([pairs[i : i + 1024].astype(np.float64) @ onehot for i in range(0, len(pairs), 1024)])


def _power(x: np.ndarray) -> np.ndarray:
    x = x * x
    x = x * x
    return x * x


def _swapped(work: _Work, pairs, i, j) -> tuple[np.ndarray, np.ndarray, np.ndarray | np.integer]:
    """(rows, columns, corner): the work changes by d rows + columns d + corner d d, d = +1 where i was, -1 where j."""
    corner = np.stack([pairs[i, i], pairs[j, j]]).sum(0, dtype=np.int64) - pairs[i, j] - pairs[j, i]
    return work.by_query[j] - work.by_query[i], work.by_key[j] - work.by_key[i], corner


def _score_swaps(work: _Work, pairs, i, j, here, there, limit) -> Int[np.ndarray, " scores"]:
    """The score now, and after each of K exchanges of tiles ``i[k]`` (of shard ``here``) and ``j[k]``; less is better.

    In place of the slowest shard of a step stands the 8-norm over its shards, which feels the next ones too: while
    several shards are equally slow, no one swap lowers their maximum. Only the work of two shards changes.
    """
    num_shards = len(work.total)
    scale = num_shards**2 / work.total.sum()
    rows, columns, corner = _swapped(work, pairs, i, j)
    shards = np.arange(num_shards)
    sign = (shards == here) * 1.0 - (shards == there[:, None])
    norms = np.cumsum(_power(by_step(work.total) * scale), 0)[-1]
    norms = np.broadcast_to(norms, (len(i) + 1, num_shards)).copy()
    k = np.arange(len(i))[:, None]
    for side, shard in ((1, np.full_like(there, here)), (-1, there)):
        row = side * rows + (columns[k[:, 0], shard] + side * corner)[:, None] * sign
        column = side * columns + (rows[k[:, 0], shard] + side * corner)[:, None] * sign
        key = (shard[:, None] - shards) % num_shards  # [K, step]: whose keys the shard has at the step
        query = (shard[:, None] + shards) % num_shards  # and who has the shard's
        before = work.total[shard[:, None], key]
        norms[1:] += _power((before + row[k, key]) * scale) - _power(before * scale)
        before = work.total[query, shard[:, None]]
        change = _power((before + column[k, query]) * scale) - _power(before * scale)
        norms[1:] += np.where(sign[k, query] == 0, change, 0)
    score = np.rint(np.sqrt(np.sqrt(np.sqrt(np.maximum(norms, 0)))) * 2.0**40).astype(np.int64).sum(1)
    loads, moved = work.total.sum(1), rows.sum(1)
    score[1:][np.maximum(loads[here] + moved, loads[there] - moved) > limit] = np.iinfo(np.int64).max
    return score


def _swap(work: _Work, pairs, i, j, here, there) -> None:
    """Exchange tile i of shard ``here`` and tile j of shard ``there``, in place."""
    rows, columns, corner = _swapped(work, pairs, i, j)
    sign = np.zeros(len(work.total))
    sign[here], sign[there] = 1, -1
    work.total[...] += np.outer(sign, rows) + np.outer(columns, sign) + corner * np.outer(sign, sign)
    for sums, x in ((work.by_query, pairs.T), (work.by_key, pairs)):
        sums += np.outer(x[j].astype(np.int64) - x[i], sign)
