"""Who sends what to whom: the devices of a sequence axis as a grid, and the order in which blocks visit them.

A sequence axis of P devices is cut as P = groups * inner * ulysses. Device p is (o, i, w) with p = (o * inner + i) *
ulysses + w. The `ulysses` devices with one (o, i) exchange heads for sequence and then act as one place of the ring;
the ring has N = groups * inner places, place c = o * inner + i. A block that is at *offset* (a, b) from home was moved
a groups on and b places on inside its group. With one group and no Ulysses this is the ring of four:

    offset   place 0   place 1   place 2   place 3      (the number is the place whose keys are here)
      0         0         1         2         3
      1         3         0         1         2
      2         2         3         0         1
      3         1         2         3         0

Every hop is a full cycle over the axis, the same on all devices, so that no device can wait for one that does not send.
What a mask cannot reach is known when the program is traced (`reachable`): such an offset is neither computed nor sent.
That uses the promise of a named layout: inside a segment, differences of positions equal differences of indices.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ring_jax import layouts, manual
from ring_jax.masks import Rules
from ring_jax.options import Schedule


class Grid(NamedTuple):
    """The devices of the axis."""

    axis_name: str
    groups: int
    inner: int
    ulysses: int

    @property
    def num_devices(self) -> int:
        return self.groups * self.inner * self.ulysses

    @property
    def num_places(self) -> int:
        return self.groups * self.inner

    def members(self) -> list[list[int]]:
        """The devices of each place, which exchange heads for sequence."""
        return [[place * self.ulysses + w for w in range(self.ulysses)] for place in range(self.num_places)]

    def hop(self, tree: Any, by: tuple[int, int]) -> Any:
        """Every device sends to the one that is ``by`` = (groups, places inside the group) on."""
        by = by[0] % self.groups, by[1] % self.inner
        if by == (0, 0):
            return tree
        pairs = []
        for device in range(self.num_devices):
            place, w = divmod(device, self.ulysses)
            o, i = divmod(place, self.inner)
            to = ((o + by[0]) % self.groups) * self.inner + (i + by[1]) % self.inner
            pairs.append((device, to * self.ulysses + w))
        return lax.ppermute(tree, self.axis_name, pairs)

    def source(self, rank: Array, group: int, offset: Array | int) -> Array:
        """The place whose block is on device ``rank`` after a move of (group, offset)."""
        place = rank // self.ulysses
        o, i = place // self.inner, place % self.inner
        return ((o - group) % self.groups) * self.inner + (i - offset) % self.inner

    def token_index(self, layout: str | None, place: Array, local: int) -> Array:
        """Index in natural order (without a named layout: in the array) of each token of a place, int32 [local]."""
        length = local // self.ulysses
        shards = [
            layouts.shard_positions(layout or "contiguous", place * self.ulysses + w, length, self.num_devices)
            for w in range(self.ulysses)
        ]
        return shards[0] if self.ulysses == 1 else jnp.concatenate(shards)


def make_grid(axis_name: str, strategy: str, schedule: Schedule, num_heads: int, num_kv_heads: int) -> Grid:
    """Cut the axis for a strategy; raise ValueError for sizes that do not fit."""
    size = manual.axis_size(axis_name)
    ulysses = devices_a_place(size, strategy, schedule, num_heads, num_kv_heads)
    if num_heads % ulysses:
        fits = max(n for n in divisors(size) if num_heads % n == 0)
        other = f' or "usp" with ulysses_size={fits}' if fits > 1 else ""
        raise ValueError(
            f"{num_heads} query heads (on one device of the tensor axis) must be divisible by the {ulysses} devices "
            f'that exchange heads for sequence; use strategy="ring"{other}'
        )
    places = size // ulysses
    inner = schedule.inner_size or places
    if places % inner and size > 1:
        rule = f"must divide the {places} places of the ring on axis {axis_name!r}"
        raise ValueError(f"inner_size={inner} {rule}; choose one of {divisors(places)}")
    inner = min(inner, places)
    return Grid(axis_name, places // inner, inner, ulysses)


def devices_a_place(size: int, strategy: str, schedule: Schedule, num_heads: int, num_kv_heads: int) -> int:
    """How many devices exchange heads for sequence."""
    if strategy == "usp":
        return ulysses_size(size, schedule, num_heads, num_kv_heads)
    return size if strategy == "ulysses" else 1


def ulysses_size(size: int, schedule: Schedule, num_heads: int, num_kv_heads: int) -> int:
    """Devices that exchange heads for sequence in USP: the largest part that keeps key/value heads whole, if any."""
    if schedule.ulysses_size is not None:
        if size % schedule.ulysses_size:
            rule = f"must divide the sequence axis of size {size}"
            raise ValueError(f"ulysses_size={schedule.ulysses_size} {rule}; choose one of {divisors(size)}")
        return schedule.ulysses_size
    fits = [n for n in divisors(size) if num_heads % n == 0]
    proper = [n for n in fits if 1 < n < size] or fits
    whole = [n for n in proper if num_kv_heads % n == 0]
    return max(whole or proper)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class Reach(NamedTuple):
    """What decides which offsets a mask can reach, all known when the call is traced."""

    layout: str | None
    rules: Rules
    lengths: tuple[int, int]  # of queries and keys at one place
    default_positions: bool  # positions are the indices themselves
    promised: bool  # differences of positions are those of the layout's indices


def reachable(grid: Grid, reach: Reach) -> tuple[tuple[int, ...], ...]:
    """For each group offset, the offsets inside the group at which some query may see some key; ascending."""
    pairs = {(a, b) for a in range(grid.groups) for b in range(grid.inner)}
    if reach.layout is not None and reach.promised:
        queries, keys = (_runs(grid, reach.layout, n) for n in reach.lengths)
        pairs = {(a, b) for a, b in pairs if _any_visible(grid, reach, queries, keys, (a, b))}
    return tuple(tuple(b for b in range(grid.inner) if (a, b) in pairs) for a in range(grid.groups))


class _Run(NamedTuple):
    """Indices first, first + stride, ..., last."""

    first: int
    last: int
    stride: int


def _runs(grid: Grid, layout: str, local: int) -> list[list[_Run]]:
    """The natural indices of each place as runs."""
    size, length = grid.num_devices, local // grid.ulysses

    def shard(p: int) -> list[_Run]:
        if layout == "striped":
            return [_Run(p, p + (length - 1) * size, size)]
        if layout == "zigzag" and size > 1:
            half = length // 2
            return [_Run(c * half, (c + 1) * half - 1, 1) for c in (p, 2 * size - 1 - p)]
        return [_Run(p * length, (p + 1) * length - 1, 1)]

    return [[run for p in members for run in shard(p)] for members in grid.members()]


def _any_visible(grid: Grid, reach: Reach, queries: list, keys: list, offset: tuple[int, int]) -> bool:
    """Whether any place sees a key of the block that is there at this offset."""
    for place in range(grid.num_places):
        o, i = divmod(place, grid.inner)
        source = ((o - offset[0]) % grid.groups) * grid.inner + (i - offset[1]) % grid.inner
        if any(_runs_meet(a, b, reach) for a in queries[place] for b in keys[source]):
            return True
    return False


def _runs_meet(query: _Run, key: _Run, reach: Reach) -> bool:
    """Whether some index of ``query`` may see one of ``key``."""
    low, high = reach.rules.reach()
    low, high = max(low, query.first - key.last), min(high, query.last - key.first)
    stride = math.gcd(query.stride, key.stride)
    start = query.first - key.first
    # The differences that exist are start + multiples of the stride.
    if low > high or math.floor((high - start) / stride) < math.ceil((low - start) / stride):
        return False
    size = reach.rules.chunk_size
    if size is None or not reach.default_positions:
        return True
    return query.first // size <= key.last // size and key.first // size <= query.last // size


def mirrored(offsets: tuple[int, ...], inner: int) -> tuple[int, ...]:
    """The same offsets, visited the other way round."""
    return tuple(sorted(offsets, key=lambda b: -b % inner))


def shifts(offsets: tuple[int, ...]) -> list[int]:
    """Places to move between one visit and the next."""
    return [int(b) for b in np.diff(offsets)]


def opposite(grid: Grid, plan: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The offsets at which the other side meets, when it is the one that moves."""
    met = {(-a % grid.groups, -b % grid.inner) for a, offsets in enumerate(plan) for b in offsets}
    return tuple(tuple(b for b in range(grid.inner) if (a, b) in met) for a in range(grid.groups))
