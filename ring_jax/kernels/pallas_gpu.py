"""The block kernel for GPUs in Pallas (Triton): any mask of positions and segments, the softmax state carried within.

Three programs: the forward pass and dq go over query tiles, dk and dv over key tiles. Each reads its part of what came
before (o, m, l, or a gradient's sum) and writes it back in place, so that nothing is merged outside. Scores, statistics
and accumulators are float32. For half precision, probabilities before the product with V and gradients of scores are
split into two such numbers: rounded to one they would make the error of dq up to 2.5 times that of
`jax.nn.dot_product_attention`, that of out 1.5 times in some rings. float32 inputs are multiplied in full float32.

Which tiles are live is decided by `masks.tile_live` and listed before the kernel starts; dead tiles are not visited,
and tiles in which every query sees every key come first and are not masked. Were a tile listed as whole that is not,
its queries would see hidden keys; were a live one left out, they would miss some.
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
from ring_jax.kernels import pallas_gpu_kernels as kernels
from ring_jax.kernels.pallas_gpu_kernels import Lists, Marks, Plan
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
        (
            jnp.dtype(call.dtype) == jnp.float16,
            "gradients of scores are smaller than float16 holds, so that dq and dk would be wrong",
        ),
        (jnp.dtype(call.dtype) == jnp.float64, "its accumulators are float32, too small for float64 inputs"),
        (max(call.head_sizes) > LARGEST_HEAD, f"head size {max(call.head_sizes)} is above {LARGEST_HEAD}"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def tile_size(length: int, chunk: int, num_heads: int = 1) -> int:
    """The largest power of two up to 128 that divides the chunk; where that is tiny, tiles with padding at the end."""
    best = next(size for size in (128, 64, 32, 16, 1) if chunk % size == 0)
    return best if best >= SMALLEST_TILE else min(64, max(SMALLEST_TILE, pl.next_power_of_2(length)))


def _plan(queries: Queries, keys: Keys, scores: Scores, tiles: tuple[int, int], backward: bool) -> Plan:
    rows, batch, kv_heads, group, length, head = queries.query.shape
    num_keys, dtype = keys.kv.shape[3], queries.query.dtype
    heads = _up(head, SMALLEST_TILE), _up(keys.kv.shape[-1] - head, SMALLEST_TILE)
    kind = mesh.target().device_kind
    table = next(table for start, table in TILES.items() if kind.startswith(start))
    wanted, stages = list(table.backward if backward else table.forward), table.stages[backward]
    times = max(heads) * dtype.itemsize / (128 * 2)
    while times > 1:
        wanted[wanted.index(max(wanted))] //= 2
        times, stages = times / 2, 2
    tile, key_tile = (max(SMALLEST_TILE, _power(min(pair))) for pair in zip(wanted, tiles, strict=True))
    padded, sizes = (_up(length, tile), _up(num_keys, key_tile)), (rows, batch * kv_heads, group)
    return Plan(scores, (tile, key_tile), padded, heads, num_keys, sizes, dtype, table.warps[backward], stages)


def _up(n: int, to: int) -> int:
    """The next multiple."""
    return -(-n // to) * to


def _power(n: int) -> int:
    """The largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def _pad(x: Array, shape: tuple[int, ...], value: float = 0) -> Array:
    """To the last axes ``shape``."""
    widths = [(0, 0)] * (x.ndim - len(shape)) + [(0, n - m) for n, m in zip(shape, x.shape[-len(shape) :], strict=True)]
    return jnp.pad(x, widths, constant_values=value) if any(end for _, end in widths) else x


def _pad_kv(plan: Plan, kv: Array, head: int) -> Array:
    """Keys and values side by side, each padded."""
    if kv.shape[-2:] == (plan.lengths[1], sum(plan.heads)):
        return kv
    parts = (_pad(x, (plan.lengths[1], size)) for x, size in zip(jnp.split(kv, [head], -1), plan.heads, strict=True))
    return jnp.concatenate(list(parts), -1)


def _unpad_kv(plan: Plan, kv: Array, shape: tuple[int, ...], head: int) -> Array:
    """Undo `_pad_kv`."""
    if kv.shape[-2:] == shape[-2:]:
        return kv.reshape(shape)
    key, value = jnp.split(kv[..., : shape[-2], :], [plan.heads[0]], -1)
    return jnp.concatenate([key[..., :head], value[..., : shape[-1] - head]], -1).reshape(shape)


def _marks(tokens: Tokens, rules: Rules, length: int) -> Marks:
    """Padding repeats the last token: the bounds of its tile stay as they are."""
    tokens = Tokens(
        *(None if x is None else jnp.pad(x, ((0, 0), (0, length - x.shape[1])), mode="edge") for x in tokens)
    )
    if rules.chunk_size is None:
        return Marks(tokens, None)
    assert tokens.positions is not None
    return Marks(tokens, tokens.positions // rules.chunk_size)


def _lists(plan: Plan, query: Marks, key: Marks, by_key: bool) -> Lists:
    """The tiles to visit, by `masks.tile_live`."""
    rules, rows = plan.scores.rules, plan.sizes[0]
    at, of = (masks.tile_bounds(x.tokens, plan.lengths[i], plan.tiles[i]) for i, x in enumerate((query, key)))
    live, full = masks.tile_live(at, of, rules), masks.tile_whole(at, of, rules)
    full = full & live & ((np.arange(plan.counts[1]) + 1) * plan.tiles[1] <= plan.num_keys)
    live, full = (jnp.broadcast_to(x, (rows, *plan.counts)) for x in (live, full))
    if by_key:
        live, full = jnp.swapaxes(live, 1, 2), jnp.swapaxes(full, 1, 2)
    rank = jnp.where(full, 0, jnp.where(live, 1, 2)) * live.shape[2] + np.arange(live.shape[2])
    if live.shape[2] > LONG_LIST:
        order = jnp.argsort(rank, -1)
    else:  # fewer and smaller programs than a sort
        place = (rank[..., None] > rank[..., None, :]).sum(-1)
        order = ((place[..., None, :] == np.arange(live.shape[2])[:, None]) * np.arange(live.shape[2])).sum(-1)
    return Lists(order.astype(jnp.int32), full.sum(-1, dtype=jnp.int32), live.sum(-1, dtype=jnp.int32))


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


def _run(plan: Plan, kernel, marks: tuple[Marks, Marks], operands: list[_Operand], carried: list[_Operand], by_key):
    """Run a kernel for each tile, row of masks, key/value head and, unless tiles are of keys, query head.

    What is carried comes last, is written in place, and is returned.
    """
    rows, heads, group = plan.sizes
    lists = _lists(plan, *marks, by_key)

    def row(z: Any) -> tuple[Any, Any]:
        return lax.div(z, jnp.int32(heads)), lax.rem(z, jnp.int32(heads))

    list_specs = jax.tree.map(
        lambda x: (
            pl.BlockSpec((None, x.shape[1]), lambda i, *place: (row(place[-1])[0], 0))
            if x.ndim == 2
            else pl.BlockSpec((None, None, x.shape[2]), lambda i, *place: (row(place[-1])[0], i, 0))
        ),
        lists,
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
        in_specs=[list_specs, *mark_specs, *specs],
        out_specs=tuple(specs[len(operands) :]),
        out_shape=tuple(manual.like(x.array) for x in carried),
        input_output_aliases={first + i: i for i in range(len(carried))},
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret.is_on(),
        name=kernel.__name__.strip("_"),
    )(lists, *marks, *arrays)


def _open(plan: Plan, queries: Queries, keys: Keys) -> tuple[tuple[Marks, Marks], Array, Array]:
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
    out, *statistics = _run(plan, kernels.forward_kernel, marks, operands, carried, False)
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
    (dq,) = _run(plan, kernels.query_kernel, marks, operands("tile", "head", "all"), [dq], False)
    dkv = _pad_kv(plan, sums.keys, head)
    dkv = _Operand(dkv.reshape(*rows, *dkv.shape[3:]), ("tile", "all"))
    (dkv,) = _run(plan, kernels.key_kernel, marks, operands("all", "all", "tile"), [dkv], True)
    dq = dq[..., : sums.query.shape[-2], :head].reshape(sums.query.shape)
    return sums._replace(query=dq, keys=_unpad_kv(plan, dkv, sums.keys.shape, head))
