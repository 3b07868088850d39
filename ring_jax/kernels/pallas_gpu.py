"""The block kernel for GPUs in Pallas (Triton): any mask of positions and segments, the softmax state carried within.

Three programs: the forward pass and dq go over query tiles, dk and dv over key tiles. Each reads its part of what came
before (o, m, l, or a gradient's sum) and writes it back in place, so that nothing is merged outside. Scores, statistics
and accumulators are float32. For half precision, probabilities and gradients of scores are rounded to it before a
product, as every tensor-core kernel does; float32 inputs are multiplied in full float32.

Which tiles are live is decided by `masks.tile_live` and listed before the kernel starts; dead tiles are not visited,
and tiles in which every query sees every key come first and are not masked. Were a tile listed as full that is not, its
queries would see hidden keys; were a live one left out, they would miss some.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ring_jax import manual, masks, mesh
from ring_jax.kernels import interpret
from ring_jax.kernels.protocol import Call, Carry, Cotangents, Gradients, empty
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores
from ring_jax.masks import Rules, Tokens

__all__ = ["TILES", "backward_block", "forward_block", "refuses", "tile_size"]

SMALLEST_TILE = 16
LARGEST_HEAD = 256
LONG_LIST = 512
_EMPTY = empty(jnp.float32)


class Tiles(NamedTuple):
    """(queries, keys) of a tile for heads of 128 numbers in half precision; larger ones get smaller tiles."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    warps: tuple[int, int] = (4, 4)  # forward, backward
    stages: tuple[int, int] = (3, 2)


TILES = {"NVIDIA H": Tiles((128, 64), (64, 64), (8, 8)), "": Tiles((64, 64), (32, 32))}
"""By the start of the device kind, the first that fits. Change an entry before the first call to use other tiles."""


def refuses(call: Call) -> str | None:
    """Why a call is not served."""
    reasons = (
        (call.scores.score_fn is not None, "score_fn is Python that this kernel does not run"),
        (call.scores.rules.mask_fn is not None, "mask_fn is Python that this kernel does not run"),
        (call.scores.dropout_rate > 0, "it has no dropout_rate"),
        (call.has_bias, "it reads no bias"),
        (call.has_mask, "it reads no dense mask (rules and segment_ids it does)"),
        (jnp.dtype(call.dtype) == jnp.float64, "its accumulators are float32, too small for float64 inputs"),
        (max(call.head_sizes) > LARGEST_HEAD, f"head size {max(call.head_sizes)} is above {LARGEST_HEAD}"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def tile_size(length: int, chunk: int, num_heads: int = 1) -> int:
    """The largest power of two up to 128 that divides the chunk; where that is tiny, tiles with padding at the end."""
    best = next(size for size in (128, 64, 32, 16, 1) if chunk % size == 0)
    return best if best >= SMALLEST_TILE else min(64, max(SMALLEST_TILE, pl.next_power_of_2(length)))


class _Lists(NamedTuple):
    """For each tile of one side: live tiles of the other, those without a mask first; how many of those, and of all."""

    order: Array  # [R, n, m]
    full: Array  # [R, n]
    live: Array  # [R, n]


class _Marks(NamedTuple):
    """What the mask reads of one side, int32 ``[R, T]`` each, None where no rule reads it."""

    tokens: Tokens
    chunks: Array | None


class _Plan(NamedTuple):
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


def _plan(queries: Queries, keys: Keys, scores: Scores, tiles: tuple[int, int], backward: bool) -> _Plan:
    rows, batch, kv_heads, group, length, head = queries.query.shape
    num_keys, dtype = keys.kv.shape[3], queries.query.dtype
    heads = tuple(-(-size // SMALLEST_TILE) * SMALLEST_TILE for size in (head, keys.kv.shape[-1] - head))
    kind = mesh.target().device_kind
    table = next(table for start, table in TILES.items() if kind.startswith(start))
    wanted, stages = list(table.backward if backward else table.forward), table.stages[backward]
    times = max(heads) * dtype.itemsize / (128 * 2)
    while times > 1:
        wanted[wanted.index(max(wanted))] //= 2
        times, stages = times / 2, 2
    wanted = tuple(max(SMALLEST_TILE, min(pair)) for pair in zip(wanted, tiles, strict=True))
    padded = tuple(-(-n // tile) * tile for n, tile in zip((length, num_keys), wanted, strict=True))
    sizes = rows, batch * kv_heads, group
    return _Plan(scores, wanted, padded, heads, num_keys, sizes, dtype, table.warps[backward], stages)


def _pad(x: Array, shape: tuple[int, ...], value: float = 0) -> Array:
    """To the last axes ``shape``."""
    widths = [(0, 0)] * (x.ndim - len(shape)) + [(0, n - m) for n, m in zip(shape, x.shape[-len(shape) :], strict=True)]
    return jnp.pad(x, widths, constant_values=value) if any(end for _, end in widths) else x


def _pad_kv(plan: _Plan, kv: Array, head: int) -> Array:
    """Keys and values side by side, each padded."""
    if kv.shape[-2:] == (plan.lengths[1], sum(plan.heads)):
        return kv
    parts = (_pad(x, (plan.lengths[1], size)) for x, size in zip(jnp.split(kv, [head], -1), plan.heads, strict=True))
    return jnp.concatenate(list(parts), -1)


def _unpad_kv(plan: _Plan, kv: Array, shape: tuple[int, ...], head: int) -> Array:
    """Undo `_pad_kv`."""
    if kv.shape[-2:] == shape[-2:]:
        return kv.reshape(shape)
    key, value = jnp.split(kv[..., : shape[-2], :], [plan.heads[0]], -1)
    return jnp.concatenate([key[..., :head], value[..., : shape[-1] - head]], -1).reshape(shape)


def _marks(tokens: Tokens, rules: Rules, length: int) -> _Marks:
    """Padding repeats the last token: the bounds of its tile stay as they are."""
    tokens = Tokens(
        *(None if x is None else jnp.pad(x, ((0, 0), (0, length - x.shape[1])), mode="edge") for x in tokens)
    )
    if rules.chunk_size is None:
        return _Marks(tokens, None)
    assert tokens.positions is not None
    return _Marks(tokens, tokens.positions // rules.chunk_size)


def _bounds(x: Array | None, tile: int) -> tuple[Array, Array]:
    """(smallest, largest) of each tile, padding counted."""
    assert x is not None
    x = x.reshape(x.shape[0], -1, tile)
    return x.min(-1), x.max(-1)


def _lists(plan: _Plan, query: _Marks, key: _Marks, by_key: bool) -> _Lists:
    """The tiles to visit, by `masks.tile_live`."""
    rules, rows = plan.scores.rules, plan.sizes[0]
    sides = zip((query.tokens, key.tokens), plan.lengths, plan.tiles, strict=True)
    live = masks.tile_live(*(masks.tile_bounds(*side) for side in sides), rules)
    full = live & _sure(plan, query, key)
    live, full = (jnp.broadcast_to(x, (rows, *plan.counts)) for x in (live, full))
    if by_key:
        live, full = jnp.swapaxes(live, 1, 2), jnp.swapaxes(full, 1, 2)
    rank = jnp.where(full, 0, jnp.where(live, 1, 2)) * live.shape[2] + np.arange(live.shape[2])
    if live.shape[2] > LONG_LIST:
        order = jnp.argsort(rank, -1)
    else:  # fewer and smaller programs than a sort
        place = (rank[..., None] > rank[..., None, :]).sum(-1)
        order = ((place[..., None, :] == np.arange(live.shape[2])[:, None]) * np.arange(live.shape[2])).sum(-1)
    return _Lists(order.astype(jnp.int32), full.sum(-1, dtype=jnp.int32), live.sum(-1, dtype=jnp.int32))


def _sure(plan: _Plan, query: _Marks, key: _Marks) -> Array:
    """True where every query of a tile surely sees every key of the other, ``[1 or R, nq, nk]``."""
    rules = plan.scores.rules
    sure = (np.arange(plan.counts[1]) + 1) * plan.tiles[1] <= plan.num_keys
    sure = jnp.broadcast_to(jnp.asarray(sure), (1, *plan.counts))

    def bounds(query: Array | None, key: Array | None):
        (low, high), (key_low, key_high) = (_bounds(x, tile) for x, tile in zip((query, key), plan.tiles, strict=True))
        return low[:, :, None], high[:, :, None], key_low[:, None], key_high[:, None]

    if query.tokens.segment_ids is not None and key.tokens.segment_ids is not None:
        low, high, key_low, key_high = bounds(query.tokens.segment_ids, key.tokens.segment_ids)
        sure &= (low != 0) & (low == high) & (low == key_low) & (low == key_high)
    if query.chunks is not None:
        low, high, key_low, key_high = bounds(query.chunks, key.chunks)
        sure &= (low == high) & (low == key_low) & (low == key_high)
    if rules.is_causal or rules.window is not None:
        low, high, key_low, key_high = bounds(query.tokens.positions, key.tokens.positions)
        if rules.is_causal:
            sure &= low >= key_high
        if rules.window is not None:
            sure &= (high - key_low <= rules.window[0]) & (key_high - low <= rules.window[1])
    return sure


def _at(marks: _Marks, start: Any, size: int) -> _Marks:
    """Those of one tile, ``[1, size]``, in a kernel."""
    return jax.tree.map(lambda ref: ref[pl.ds(start, size)].reshape(1, size), marks)


def _visible(plan: _Plan, at: _Marks, of: _Marks, first_key: Any) -> Array | None:
    """The mask of one tile, ``[queries, keys]``, in a kernel."""
    mask = masks.visible(at.tokens, of.tokens, plan.scores.rules._replace(chunk_size=None))
    parts = [] if mask is None else [mask.reshape(plan.tiles)]
    if at.chunks is not None and of.chunks is not None:
        parts.append(at.chunks.reshape(-1, 1) == of.chunks)
    if plan.num_keys != plan.lengths[1]:
        parts.append(jnp.broadcast_to(first_key + jnp.arange(plan.tiles[1])[None] < plan.num_keys, plan.tiles))
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _dot(plan: _Plan, x: Array, y: Array, **transposed: bool) -> Array:
    """A product summed in float32; x may be float32 and is rounded to the dtype of the arrays."""
    precision = lax.Precision.HIGHEST if plan.dtype == jnp.float32 else None
    return triton.dot(x.astype(plan.dtype), y, precision=precision, **transposed)


def _loop(lists: _Lists, i: Any, step: Any, state: Any) -> Any:
    """``state = step(index of a live tile, state, whether it needs a mask)``."""
    full, live = lists.full[i], lists.live[i]
    state = lax.fori_loop(0, full, lambda n, x: step(lists.order[n], x, False), state)
    return lax.fori_loop(full, live, lambda n, x: step(lists.order[n], x, True), state)


def _forward_kernel(
    plan: _Plan, lists, queries, keys, query, kv, out_in, maximum_in, total_in, out, maximum, total
) -> None:
    i, (size, key_size) = pl.program_id(0), plan.tiles
    at = _at(queries, i * size, size)
    q = [query[:, pl.ds(*piece)] for piece in plan.key_pieces]

    def step(j, state, masked: bool):
        sums, top, weight = state
        rows = pl.ds(j * key_size, key_size)
        k = [kv[rows, pl.ds(*piece)] for piece in plan.key_pieces]
        s = sum(_dot(plan, x, y, trans_b=True) for x, y in zip(q, k, strict=True)) * plan.scores.scale
        s = _cap(plan, s)
        visible = _visible(plan, at, _at(keys, j * key_size, key_size), j * key_size) if masked else None
        s = s if visible is None else jnp.where(visible, s, -jnp.inf)
        new = jnp.maximum(top, s.max(1))
        p, rescale = jnp.exp(s - new[:, None]), jnp.exp(top - new)
        v = [kv[rows, pl.ds(*piece)] for piece in plan.value_pieces]
        sums = tuple(x * rescale[:, None] + _dot(plan, p, y) for x, y in zip(sums, v, strict=True))
        return sums, new, weight * rescale + p.sum(1)

    columns = [pl.ds(start - plan.heads[0], width) for start, width in plan.value_pieces]
    state = tuple(out_in[:, x] for x in columns), maximum_in[...], total_in[...]
    sums, maximum[...], total[...] = _loop(lists, i, step, state)
    for x, values in zip(columns, sums, strict=True):
        out[:, x] = values


def _cap(plan: _Plan, s: Array) -> Array:
    cap = plan.scores.soft_cap
    return s if cap is None else cap * jnp.tanh(s / cap)


def _finite(k: Array) -> Array:
    """A key that is not finite is 0: rows that see it have lse NaN already."""
    return jnp.where(jnp.abs(k.astype(jnp.float32)) < jnp.inf, k, jnp.zeros((), k.dtype))


def _slopes(plan: _Plan, q, k, v, dout, lse, delta, visible) -> tuple[Array, Array]:
    """(p, gradient of the raw scores) of one tile ``[queries, keys]``."""
    s = sum(_dot(plan, x, y, trans_b=True) for x, y in zip(q, k, strict=True)) * plan.scores.scale
    capped = _cap(plan, s)
    s = capped if visible is None else jnp.where(visible, capped, -jnp.inf)
    p = jnp.exp(s - lse[:, None])
    dp = sum(_dot(plan, x, y, trans_b=True) for x, y in zip(dout, v, strict=True))
    ds = p * (dp - delta[:, None]) * plan.scores.scale
    cap = plan.scores.soft_cap
    return p, ds if cap is None else ds * (1 - (capped / cap) * (capped / cap))


def _query_kernel(plan: _Plan, lists, queries, keys, query, kv, dout, lse, delta, before, dq) -> None:
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
        return tuple(x + _dot(plan, ds, y) for x, y in zip(sums, k, strict=True))

    sums = _loop(lists, i, step, tuple(before[:, x] for x in columns))
    for x, values in zip(columns, sums, strict=True):
        dq[:, x] = values


def _key_kernel(plan: _Plan, lists, queries, keys, query, kv, dout, lse, delta, before, dkv) -> None:
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
            dk = tuple(x + _dot(plan, ds, y, trans_a=True) for x, y in zip(dk, q, strict=True))
            return dk, dv

        return _loop(lists, j, step, state)

    state = tuple(before[:, x] for x in columns), tuple(before[:, x] for x in value_columns)
    dk, dv = lax.fori_loop(0, plan.sizes[2], head, state)
    for x, values in zip((*columns, *value_columns), (*dk, *dv), strict=True):
        dkv[:, x] = values


class _Operand(NamedTuple):
    """An array ``[R, b*K, ...]`` and, for each further axis, what a program gets of it: "all", a "tile", one "head"."""

    array: Array
    axes: tuple[str, ...]

    def spec(self, tile: int, rows: Any) -> pl.BlockSpec:
        sizes = zip(self.axes, self.array.shape[2:], strict=True)
        shape = [{"head": None, "tile": tile, "all": size}[axis] for axis, size in sizes]

        def index(i: Any, *place: Any) -> tuple[Any, ...]:
            return *rows(place[-1]), *({"head": place[0], "tile": i, "all": 0}[axis] for axis in self.axes)

        return pl.BlockSpec((None, None, *shape), index)


def _run(plan: _Plan, kernel, marks: tuple[_Marks, _Marks], operands: list[_Operand], carried: list[_Operand], by_key):
    """Run a kernel for each tile, row of masks, key/value head and, unless tiles are of keys, query head.

    What is carried comes last, is written in place, and is returned.
    """
    rows, heads, group = plan.sizes
    lists = _lists(plan, *marks, by_key)

    def row(z: Any) -> tuple[Any, Any]:
        return lax.div(z, jnp.int32(heads)), lax.rem(z, jnp.int32(heads))

    list_specs = (
        pl.BlockSpec((None, None, lists.order.shape[2]), lambda i, *place: (row(place[-1])[0], i, 0)),
        *(pl.BlockSpec((None, lists.full.shape[1]), lambda i, *place: (row(place[-1])[0], 0)) for _ in range(2)),
    )
    mark_specs = jax.tree.map(
        lambda x: pl.BlockSpec((None, x.shape[1]), lambda i, *place: (row(place[-1])[0], 0)), marks
    )
    specs = [x.spec(plan.tiles[by_key], row) for x in (*operands, *carried)]
    arrays = [x.array for x in (*operands, *carried)]
    first = 3 + len(jax.tree.leaves(marks)) + len(operands)
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=(plan.counts[by_key], *(() if by_key else (group,)), rows * heads),
        in_specs=[_Lists(*list_specs), *mark_specs, *specs],
        out_specs=tuple(specs[len(operands) :]),
        out_shape=tuple(manual.like(x.array) for x in carried),
        input_output_aliases={first + i: i for i in range(len(carried))},
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret.is_on(),
        name=kernel.__name__.strip("_"),
    )(lists, *marks, *arrays)


def _open(plan: _Plan, queries: Queries, keys: Keys) -> tuple[tuple[_Marks, _Marks], Array, Array]:
    """Marks, queries ``[R, b*K, G, T, H]``, and keys and values ``[R, b*K, S, H+Hv]``, padded."""
    rules, rows = plan.scores.rules, plan.sizes[:2]
    marks = _marks(queries.tokens, rules, plan.lengths[0]), _marks(keys.tokens, rules, plan.lengths[1])
    marks = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows[0], x.shape[1])), marks)
    query = _pad(queries.query, (plan.lengths[0], plan.heads[0]))
    kv = _pad_kv(plan, keys.kv, queries.query.shape[-1])
    return marks, query.reshape(*rows, *query.shape[3:]), kv.reshape(*rows, *kv.shape[3:])


def forward_block(
    carry: Carry, queries: Queries, keys: Keys, pairs: Pairs, scores: Scores, tiles: tuple[int, int]
) -> Carry:
    """Fold one block of keys and values into the softmax state of every query."""
    plan = _plan(queries, keys, scores, tiles, False)
    marks, query, kv = _open(plan, queries, keys)
    (length, value), rows = carry.out.shape[-2:], plan.sizes[:2]
    out = _pad(carry.out, (plan.lengths[0], plan.heads[1]))
    statistics = [_pad(x, (plan.lengths[0],), fill) for x, fill in zip(carry[1:], (_EMPTY, 0), strict=True)]
    carried = [_Operand(out.reshape(*rows, *out.shape[3:]), ("head", "tile", "all"))]
    carried += [_Operand(x.reshape(*rows, *x.shape[3:]), ("head", "tile")) for x in statistics]
    operands = [_Operand(query, ("head", "tile", "all")), _Operand(kv, ("all", "all"))]
    out, *statistics = _run(plan, _forward_kernel, marks, operands, carried, False)
    out, *statistics = out[..., :length, :value], *(x[..., :length] for x in statistics)
    return Carry(*(x.reshape(y.shape) for x, y in zip((out, *statistics), carry, strict=True)))


def backward_block(
    sums: Gradients,
    queries: Queries,
    cotangents: Cotangents,
    keys: Keys,
    pairs: Pairs,
    scores: Scores,
    tiles: tuple[int, int],
) -> Gradients:
    """Add one block's part to the gradients: p = exp(s - lse), dv = p^T dout, ds = p (dout v^T - delta)."""
    plan = _plan(queries, keys, scores, tiles, True)
    marks, query, kv = _open(plan, queries, keys)
    head, rows = queries.query.shape[-1], plan.sizes[:2]
    dout = _pad(cotangents.dout.astype(plan.dtype), (plan.lengths[0], plan.heads[1]))
    lse, delta = _pad(cotangents.lse, (plan.lengths[0],), jnp.inf), _pad(cotangents.delta, (plan.lengths[0],))
    of_query = [query, *(x.reshape(*rows, *x.shape[3:]) for x in (dout, lse, delta))]

    def operands(axis: str, head: str, key_axis: str) -> list[_Operand]:
        q, *rest = (_Operand(x, (head, axis, "all")[: x.ndim - 2]) for x in of_query)
        return [q, _Operand(kv, (key_axis, "all")), *rest]

    dq = _pad(sums.query, (plan.lengths[0], plan.heads[0]))
    dq = _Operand(dq.reshape(*rows, *dq.shape[3:]), ("head", "tile", "all"))
    (dq,) = _run(plan, _query_kernel, marks, operands("tile", "head", "all"), [dq], False)
    dkv = _pad_kv(plan, sums.keys, head)
    dkv = _Operand(dkv.reshape(*rows, *dkv.shape[3:]), ("tile", "all"))
    (dkv,) = _run(plan, _key_kernel, marks, operands("all", "all", "tile"), [dkv], True)
    dq = dq[..., : sums.query.shape[-2], :head].reshape(sums.query.shape)
    return sums._replace(query=dq, keys=_unpad_kv(plan, dkv, sums.keys.shape, head))
