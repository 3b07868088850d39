"""What one program of the GPU kernels does: tiles, masks and products, in Pallas for Triton.

Triton's arrays have sizes that are powers of two, so a head of 192 numbers is computed as 128 and 64, and products of
either are summed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ring_jax import masks
from ring_jax.kernels.tiles import Scores
from ring_jax.masks import Tokens


class Lists(NamedTuple):
    """For each tile of one side: live tiles of the other, those without a mask first; how many of those, and of all."""

    order: Array  # [R, n, m]
    full: Array  # [R, n]
    live: Array  # [R, n]


class Marks(NamedTuple):
    """What the mask reads of one side, int32 ``[R, T]`` each, None where no rule reads it."""

    tokens: Tokens
    chunks: Array | None


class Plan(NamedTuple):
    """What a kernel knows when it is traced. Lengths and head sizes are padded to what Triton takes."""

    scores: Scores
    tiles: tuple[int, int]
    lengths: tuple[int, int]
    heads: tuple[int, int]
    num_keys: int  # those that are no padding
    sizes: tuple[int, int, int]  # rows of masks; batch rows and key/value heads of one; query heads of one of those
    dtype: Any
    warps: int
    stages: int

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles of either side."""
        return self.lengths[0] // self.tiles[0], self.lengths[1] // self.tiles[1]

    @property
    def key_pieces(self) -> tuple[tuple[int, int], ...]:
        """(start, width) of the columns of queries and keys."""
        return _pieces(0, self.heads[0])

    @property
    def value_pieces(self) -> tuple[tuple[int, int], ...]:
        """Those of the values, which lie behind their keys."""
        return _pieces(self.heads[0], self.heads[1])


def _pieces(start: int, size: int) -> tuple[tuple[int, int], ...]:
    """``size`` columns as powers of two: Triton's arrays have no other sizes."""
    bits = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    return tuple((start + sum(bits[:i]), width) for i, width in enumerate(bits))


def _at(marks: Marks, start: Any, size: int) -> Marks:
    """Those of one tile, ``[1, size]``, in a kernel."""
    return jax.tree.map(lambda ref: ref[pl.ds(start, size)].reshape(1, size), marks)


def _visible(plan: Plan, at: Marks, of: Marks, first_key: Any) -> Array | None:
    """The mask of one tile, ``[queries, keys]``, in a kernel."""
    mask = masks.visible(at.tokens, of.tokens, plan.scores.rules._replace(chunk_size=None))
    parts = [] if mask is None else [mask.reshape(plan.tiles)]
    if at.chunks is not None and of.chunks is not None:
        parts.append(at.chunks.reshape(-1, 1) == of.chunks)
    if plan.num_keys != plan.lengths[1]:
        parts.append(jnp.broadcast_to(first_key + jnp.arange(plan.tiles[1])[None] < plan.num_keys, plan.tiles))
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _dot(plan: Plan, x: Array, y: Array, **transposed: bool) -> Array:
    """A product summed in float32; x may be float32 and is rounded to the dtype of the arrays."""
    precision = lax.Precision.HIGHEST if plan.dtype == jnp.float32 else None
    return triton.dot(x.astype(plan.dtype), y, precision=precision, **transposed)


def _dots(plan: Plan, x: list[Array], y: list[Array]) -> Array:
    """x y^T from the pieces of both."""
    return functools.reduce(jnp.add, (_dot(plan, a, b, trans_b=True) for a, b in zip(x, y, strict=True)))


def _fine_dot(plan: Plan, x: Array, y: Array, **transposed: bool) -> Array:
    """The same with x as the sum of two numbers of that dtype."""
    if plan.dtype == jnp.float32:
        return _dot(plan, x, y, **transposed)
    high = x.astype(plan.dtype)
    rest = x - high.astype(jnp.float32)
    return _dot(plan, high, y, **transposed) + _dot(plan, rest, y, **transposed)


def _loop(lists: Lists, i: Any, step: Any, state: Any) -> Any:
    """``state = step(index of a live tile, state, whether it needs a mask)``."""
    full, live = lists.full[i], lists.live[i]
    state = lax.fori_loop(0, full, lambda n, x: step(lists.order[n], x, False), state)
    return lax.fori_loop(full, live, lambda n, x: step(lists.order[n], x, True), state)


def forward_kernel(
    plan: Plan, lists, queries, keys, query, kv, out_in, maximum_in, total_in, out, maximum, total
) -> None:
    i, (size, key_size) = pl.program_id(0), plan.tiles
    at = _at(queries, i * size, size)
    q = [query[:, pl.ds(*piece)] for piece in plan.key_pieces]

    def step(j, state, masked: bool):
        sums, top, weight = state
        rows = pl.ds(j * key_size, key_size)
        k = [kv[rows, pl.ds(*piece)] for piece in plan.key_pieces]
        s = _dots(plan, q, k) * plan.scores.scale
        s = _cap(plan, s)
        visible = _visible(plan, at, _at(keys, j * key_size, key_size), j * key_size) if masked else None
        s = s if visible is None else jnp.where(visible, s, -jnp.inf)
        new = jnp.maximum(top, s.max(1))
        p, rescale = jnp.exp(s - new[:, None]), jnp.exp(top - new)
        v = [kv[rows, pl.ds(*piece)] for piece in plan.value_pieces]
        sums = tuple(x * rescale[:, None] + _fine_dot(plan, p, y) for x, y in zip(sums, v, strict=True))
        return sums, new, weight * rescale + p.sum(1)

    columns = [pl.ds(start - plan.heads[0], width) for start, width in plan.value_pieces]
    state = tuple(out_in[:, x] for x in columns), maximum_in[...], total_in[...]
    sums, maximum[...], total[...] = _loop(lists, i, step, state)
    for x, values in zip(columns, sums, strict=True):
        out[:, x] = values


def _cap(plan: Plan, s: Array) -> Array:
    cap = plan.scores.soft_cap
    return s if cap is None else cap * jnp.tanh(s / cap)


def _finite(k: Array) -> Array:
    """A key that is not finite is 0: rows that see it have lse NaN already."""
    return jnp.where(jnp.abs(k.astype(jnp.float32)) < jnp.inf, k, jnp.zeros((), k.dtype))


def _slopes(plan: Plan, q, k, v, dout, lse, delta, visible) -> tuple[Array, Array]:
    """(p, gradient of the raw scores) of one tile ``[queries, keys]``."""
    s = _dots(plan, q, k) * plan.scores.scale
    capped = _cap(plan, s)
    s = capped - lse[:, None]  # a row that is NaN has no part in keys that it does not see
    p = jnp.exp(s if visible is None else jnp.where(visible, s, -jnp.inf))
    dp = _dots(plan, dout, v)
    ds = p * (dp - delta[:, None]) * plan.scores.scale
    cap = plan.scores.soft_cap
    ds = ds if cap is None else ds * (1 - (capped / cap) * (capped / cap))
    return p, ds if visible is None else jnp.where(visible, ds, 0)


def query_kernel(plan: Plan, lists, queries, keys, query, kv, dout, lse, delta, before, dq) -> None:
    i, (size, key_size) = pl.program_id(0), plan.tiles
    at, columns = _at(queries, i * size, size), [pl.ds(*piece) for piece in plan.key_pieces]
    q, do = [query[:, x] for x in columns], [dout[:, pl.ds(*piece)] for piece in _pieces(0, plan.heads[1])]
    of_row = lse[...], delta[...]

    def step(j, sums, masked: bool):
        rows = pl.ds(j * key_size, key_size)
        k = [_finite(kv[rows, x]) for x in columns]
        v = [kv[rows, pl.ds(*piece)] for piece in plan.value_pieces]
        visible = _visible(plan, at, _at(keys, j * key_size, key_size), j * key_size) if masked else None
        _, ds = _slopes(plan, q, k, v, do, *of_row, visible)
        return tuple(x + _fine_dot(plan, ds, y) for x, y in zip(sums, k, strict=True))

    sums = _loop(lists, i, step, tuple(before[:, x] for x in columns))
    for x, values in zip(columns, sums, strict=True):
        dq[:, x] = values


def key_kernel(plan: Plan, lists, queries, keys, query, kv, dout, lse, delta, before, dkv) -> None:
    j, (size, key_size) = pl.program_id(0), plan.tiles
    of, columns = _at(keys, j * key_size, key_size), [pl.ds(*piece) for piece in plan.key_pieces]
    value_columns = [pl.ds(*piece) for piece in plan.value_pieces]
    k, v = [_finite(kv[:, x]) for x in columns], [kv[:, x] for x in value_columns]

    def head(g, state):
        def step(i, state, masked: bool):
            dk, dv = state
            rows = pl.ds(i * size, size)
            q = [query[g, rows, x] for x in columns]
            do = [dout[g, rows, pl.ds(*piece)] for piece in _pieces(0, plan.heads[1])]
            visible = _visible(plan, _at(queries, i * size, size), of, j * key_size) if masked else None
            p, ds = _slopes(plan, q, k, v, do, lse[g, rows], delta[g, rows], visible)
            dv = tuple(x + _dot(plan, p, y, trans_a=True) for x, y in zip(dv, do, strict=True))
            dk = tuple(x + _fine_dot(plan, ds, y, trans_a=True) for x, y in zip(dk, q, strict=True))
            return dk, dv

        return _loop(lists, j, step, state)

    state = tuple(before[:, x] for x in columns), tuple(before[:, x] for x in value_columns)
    dk, dv = lax.fori_loop(0, plan.sizes[2], head, state)
    for x, values in zip((*columns, *value_columns), (*dk, *dv), strict=True):
        dkv[:, x] = values
