"""What the forward and the backward kernel for TPU share: the list of live tiles, the mask of one tile, the products.

A kernel's last grid axis runs over a list of the live pairs of tiles, and is as long as that list: what a mask hides
costs neither compute nor a transfer nor a grid step. A code of the list is one int32, so that the list fits the scalar
memory: (row, outer tile, inner tile, kind), the pairs of one outer tile side by side. Tiles in which nothing is hidden
(`masks.tile_whole`) skip the mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring_jax import manual, masks
from ring_jax.kernels import interpret
from ring_jax.kernels.tiles import Keys, Queries, Scores
from ring_jax.masks import Rules, Tokens

NOTHING, MASKED, WHOLE = 0, 1, 2
"""Kinds of a pair of tiles. NOTHING is the one entry of a list without live pairs: a grid of no steps is not legal."""

NO_PAIR = np.iinfo(np.int32).max
_KIND_BITS = 2
VMEM_BYTES = 48 * 2**20
"""What a kernel may take of the vector memory (64 MiB on v7x, 128 MiB on v5e and v6e)."""

MOST_PAIRS = 2**17
"""Codes of one list: 512 KiB of the scalar memory."""

MOST_ROWS, MOST_UNROLLED = 2048, 8
"""Queries of all heads in one tile; heads of a key/value head whose work is written out, for the scheduler to mix."""


class Work(NamedTuple):
    """The live pairs of tiles: codes ``[pairs + 1]``, of which the first ``count`` are steps."""

    codes: Array
    count: Array
    bits: tuple[int, int]  # of the outer and the inner tile's number

    def place(self, code: Array) -> tuple[Array, Array, Array]:
        """(row, outer tile, inner tile)."""
        outer, inner = self.bits
        return (
            code >> (outer + inner + _KIND_BITS),
            (code >> (inner + _KIND_BITS)) & ((1 << outer) - 1),
            (code >> _KIND_BITS) & ((1 << inner) - 1),
        )

    def kind(self, code: Array) -> Array:
        return code & ((1 << _KIND_BITS) - 1)

    def ends(self, codes: Any, step: Array) -> tuple[Array, Array]:
        """Whether a step is the first, and the last, of its outer tile."""
        shift = self.bits[1] + _KIND_BITS
        here, before, behind = codes[step], codes[jnp.maximum(step - 1, 0)], codes[step + 1]
        return (step == 0) | (here >> shift != before >> shift), here >> shift != behind >> shift


def fit_tiles(queries: Queries, keys: Keys, tiles: tuple[int, int]) -> tuple[int, int]:
    """Tiles for all query heads of a key/value head at once: fewer queries each where there are many heads."""
    t, s = tiles
    group, length = queries.query.shape[3:5]
    for n, size in ((length, t), (keys.kv.shape[3], s)):
        if n % size:
            raise ValueError(f"tile_size={size} must divide the {n} tokens of a block; None picks one that does")
    while group * t > MOST_ROWS and t % 256 == 0:
        t //= 2
    return t, s


def split(queries: Queries, keys: Keys, tiles: tuple[int, int]) -> int | None:
    """Number of keys to take first, where the pairs of all tiles would not fit one list; None where they do."""
    t, s = tiles
    num_tiles = keys.kv.shape[3] // s
    if queries.query.shape[0] * (queries.query.shape[4] // t) * num_tiles <= MOST_PAIRS or num_tiles == 1:
        return None
    return num_tiles // 2 * s


def part(keys: Keys, first: int | None, last: int | None) -> Keys:
    """The keys from ``first`` on, up to ``last``."""
    tokens = (None if x is None else x[:, first:last] for x in keys.tokens)
    return Keys(keys.kv[:, :, :, first:last], Tokens(*tokens))


def for_heads(group: int, body: Callable[[Any], None]) -> None:
    """Run ``body`` for each query head of a key/value head: written out, or as a loop where there are many."""
    if group > MOST_UNROLLED:
        lax.fori_loop(0, group, lambda g, _: body(g), None)
    else:
        for g in range(group):
            body(g)


def work_list(queries: Queries, keys: Keys, rules: Rules, tiles: tuple[int, int], by_key: bool) -> Work:
    """The live pairs, those of one query tile (or key tile) side by side."""
    lengths = queries.query.shape[4], keys.kv.shape[3]
    query, key = (
        masks.tile_bounds(tokens, length, size)
        for tokens, length, size in zip((queries.tokens, keys.tokens), lengths, tiles, strict=True)
    )
    shape = (queries.query.shape[0], query.num_tiles, key.num_tiles)
    live = jnp.broadcast_to(masks.tile_live(query, key, rules), shape)
    whole = jnp.broadcast_to(masks.tile_whole(query, key, rules), shape)
    if by_key:
        live, whole = jnp.swapaxes(live, 1, 2), jnp.swapaxes(whole, 1, 2)
    bits = (live.shape[1] - 1).bit_length(), (live.shape[2] - 1).bit_length()
    row, outer, inner = (lax.broadcasted_iota(jnp.int32, live.shape, axis) for axis in range(3))
    codes = (((row << bits[0]) + outer << bits[1]) + inner << _KIND_BITS) + jnp.where(whole, WHOLE, MASKED)
    codes = lax.sort(jnp.where(live, codes, NO_PAIR).ravel())
    count = live.sum(dtype=jnp.int32)
    codes = codes.at[0].set(jnp.where(count > 0, codes[0], NOTHING))
    return Work(jnp.append(codes, jnp.int32(NO_PAIR)), jnp.maximum(count, 1), bits)


class TokenRows(NamedTuple):
    """What the mask of a tile reads, as rows of one int32 array ``[R, rows, T]``; None where nothing is masked."""

    query: Array | None
    key: Array | None


def token_rows(query: Tokens, key: Tokens, rules: Rules) -> TokenRows:
    """Segment ids where there are any, positions where a rule reads them, and their chunks."""

    def rows(tokens: Tokens, has_segments: bool) -> Array | None:
        parts = [tokens.segment_ids] if has_segments else []
        if rules.is_causal or rules.window is not None:
            parts.append(tokens.positions)
        if rules.chunk_size is not None:
            assert tokens.positions is not None
            parts.append(tokens.positions // rules.chunk_size)
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in parts], 1) if parts else None

    has_segments = query.segment_ids is not None and key.segment_ids is not None
    return TokenRows(rows(query, has_segments), rows(key, has_segments))


def visible(query: Any, key: Any, rules: Rules, has_segments: bool) -> Array | None:
    """The mask ``[s, t]`` of one tile, from references to its token rows ``[rows, t]`` and ``[rows, s]``."""
    if query is None:
        return None
    parts, row = [], 0

    def pair() -> tuple[Array, Array]:
        along = query[row : row + 1, :]
        across = jnp.broadcast_to(key[row : row + 1, :], (8, key.shape[1])).T[:, :1]
        return along, across

    if has_segments:
        (at, of), row = pair(), row + 1
        parts.append((at == of) & (at != 0))
    if rules.is_causal or rules.window is not None:
        (at, of), row = pair(), row + 1
        if rules.is_causal:
            parts.append(at >= of)
        if rules.window is not None:
            parts += [at - of <= rules.window[0], of - at <= rules.window[1]]
    if rules.chunk_size is not None:
        at, of = pair()
        parts.append(at == of)
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask


def dot(x: Array, y: Array, contract: tuple[int, int], dtype: Any) -> Array:
    """A product accumulated in float32 whose operands are, or are split into, numbers of ``dtype``.

    float32 stays float32, at the precision of float32. A float32 operand of a bfloat16 product becomes the sum of two
    bfloat16 numbers, which keep 16 bits of it, and the product that of the parts.
    """
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    total = None
    for m, a in enumerate(_halves(x, dtype)):
        for n, b in enumerate(_halves(y, dtype)):
            if m + n < 2:
                part = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
                total = part if total is None else total + part
    assert total is not None
    return total


def _halves(x: Array, dtype: Any) -> tuple[Array, ...]:
    if x.dtype == dtype:
        return (x,)
    high = x.astype(dtype)
    return high, (x - high.astype(x.dtype)).astype(dtype)


def cap(s: Array, scores: Scores) -> Array:
    """cap * tanh(s / cap)."""
    limit = scores.soft_cap
    return s if limit is None else limit * jnp.tanh(s / limit)


def uncap(ds: Array, capped: Array, scores: Scores) -> Array:
    """The gradient through `cap`, from its result."""
    limit = scores.soft_cap
    return ds if limit is None else ds * (1 - jnp.square(capped / limit))


def specs(work: Work, kinds: dict[str, int]) -> Callable[..., pl.BlockSpec]:
    """A maker of block specs: each axis is named by what it is, r(ow), b(atch), k (key/value head), and o(uter) or
    i(nner) tiles; or "." for an axis that is in every block whole."""

    def spec(axes: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        def index(b, k, step, codes):
            row, outer, inner = work.place(codes[step])
            return tuple({"r": row, "b": b, "k": k, "o": outer, "i": inner, ".": 0}[axis] for axis in axes)

        block = [None if axis in "rbk" else kinds.get(axis, n) for axis, n in zip(axes, shape, strict=True)]
        return pl.BlockSpec(block, index)

    return spec


def call(
    kernel: Callable[..., None],
    work: Work,
    grid: tuple[int, int],
    ins: list[tuple[Array, pl.BlockSpec]],
    outs: tuple[int, ...],
    scratch: list[Any],
    cost: pl.CostEstimate,
    vmem_bytes: int,
    name: str,
) -> tuple[Array, ...]:
    """Run a kernel over (batch rows, key/value heads, live pairs). Each output is an input, by number, rewritten.

    Under `jax.vmap` one call after another: lists of pairs are of different lengths.
    """
    params = pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
    )

    @jax.custom_batching.sequential_vmap
    def run(count: Array, *operands: Array) -> Any:
        specs = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*grid, count),
            in_specs=[spec for _, spec in ins],
            out_specs=[ins[number][1] for number in outs],
            scratch_shapes=scratch,
        )
        return pl.pallas_call(
            kernel,
            grid_spec=specs,
            out_shape=[manual.like(operands[1 + number]) for number in outs],
            input_output_aliases={1 + number: place for place, number in enumerate(outs)},
            compiler_params=params,
            cost_estimate=cost,
            interpret=interpret.is_on(),
            name=name,
        )(*operands)

    return run(*manual.vary_alike(work.count, work.codes, *(x for x, _ in ins)))


def cost(
    queries: Queries, keys: Keys, scores: Scores, products: tuple[int, int], moved: list[Array]
) -> pl.CostEstimate:
    """Of a block in which a causal mask hides half: ``products`` of width H, and of width Hv, for each pair."""
    rows, batch, kv_heads, group, length, head = queries.query.shape
    num_keys, width = keys.kv.shape[3], keys.kv.shape[4]
    pairs = rows * batch * kv_heads * group * length * num_keys
    if scores.rules.is_causal:
        pairs //= 2
    flops = 2 * pairs * (products[0] * head + products[1] * (width - head))
    return pl.CostEstimate(
        flops=flops, transcendentals=pairs, bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved)
    )
