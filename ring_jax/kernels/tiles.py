"""Tiles of one block: which pairs of tiles are live, and what is done to the scores inside one.

Order of operations on a score: scale, soft cap, score function, bias, mask; dropout falls on the probabilities. Every
kernel goes through these steps, forward and backward, so that an option is written once. A backward pass that left one
out would return the gradient of another function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ring_jax import dropout, masks
from ring_jax.masks import Rules, Tokens

SMALLEST_TILE, LARGEST_TILE, TILES_A_SIDE, MANY_HEADS = 64, 512, 64, 8
"""64 tokens measured best on CPU for 8 heads, 128 for 2 (benchmarks/attention.py, the quickstart). Longer blocks take
larger tiles, so that the lists of tiles stay short: 64 by 64 up to 32,768 local tokens."""


class Scores(NamedTuple):
    """What happens to a score, as far as it is known when the call is traced."""

    scale: float
    soft_cap: float | None = None
    rules: Rules = Rules()
    score_fn: Callable[..., Any] | None = None
    dropout_rate: float = 0.0

    @property
    def read_positions(self) -> bool:
        return self.rules.read_positions or self.score_fn is not None or self.dropout_rate > 0


class Queries(NamedTuple):
    """Everything that belongs to a query token; words are the keys of its dropout."""

    query: Array  # [R, b, K, G, T, H]
    tokens: Tokens  # [R, T]
    words: Array | None = None  # [R, b, K, G, T, 2]


class Keys(NamedTuple):
    """Everything that belongs to a key token: keys and values side by side."""

    kv: Array  # [R, b, K, S, H+Hv]
    tokens: Tokens  # [R, S]


class Pairs(NamedTuple):
    """What belongs to pairs of a query and a key of this block, and what the score function wants besides."""

    bias: Array | None = None  # [R, b, K, G, T, S], each 1 where it is the same for all
    mask: Array | None = None
    heads: Array | None = None  # [K, G], numbers in the whole model
    score_args: tuple[Any, ...] = ()  # the floats in the dtype of the scores at least, see `widened`


def tile_size(length: int, chunk: int, num_heads: int = MANY_HEADS) -> int:
    """Tokens in a tile for ``length`` local tokens whose positions run in chunks of ``chunk``.

    The largest divisor of the chunk up to the wanted size, so that no tile straddles two zigzag chunks (such a tile
    would be live for nearly every query). Where that would be tiny, a full tile and an overlapping last one.
    ``num_heads`` counts what one tile computes side by side: heads, and batch rows that share a mask.
    """
    smallest = SMALLEST_TILE if num_heads >= MANY_HEADS else 2 * SMALLEST_TILE
    wanted = min(LARGEST_TILE, max(smallest, length // TILES_A_SIDE))
    best = max(size for size in range(1, min(wanted, chunk) + 1) if chunk % size == 0)
    return best if best >= min(wanted // 2, chunk) else min(wanted, length)


def _corner(x: Array, row: Array, start: Array, axis: int) -> list[Array]:
    """Indices of a slice: ``row`` of the leading axis, ``start`` of ``axis``, 0 elsewhere."""
    index = [jnp.int32(0)] * x.ndim
    index[0], index[axis] = jnp.asarray(row, jnp.int32), start
    return index


def rows_of(x: Array, row: Array, start: Array, size: int, axis: int) -> Array:
    """Row ``row`` of ``x`` (its leading axis dropped), and ``size`` tokens of axis ``axis`` from ``start``."""
    shape = [1, *x.shape[1:]]
    shape[axis] = size
    return lax.dynamic_slice(x, _corner(x, row, start, axis), shape)[0]


def put_rows(x: Array, tile: Array, row: Array, start: Array, axis: int) -> Array:
    """Undo `rows_of`: ``x`` with the tile written in its place."""
    return lax.dynamic_update_slice(x, tile[None], _corner(x, row, start, axis))


class Tiling(NamedTuple):
    """The tiles of one block. With ``transposed`` a tile of scores is [b, K, s, G, t], else [b, K, G, t, s]."""

    queries: Queries
    keys: Keys
    pairs: Pairs
    scores: Scores
    sizes: tuple[int, int]
    transposed: bool = False

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries.query.shape[4], self.keys.kv.shape[3]

    @property
    def starts(self) -> tuple[Array, Array]:
        query, key = (jnp.asarray(masks.tile_starts(*x)) for x in zip(self.lengths, self.sizes, strict=True))
        return query, key

    @property
    def hides(self) -> bool:
        """Some rule is on that may hide a pair; without one `Tile.mask` is the identity."""
        has_segments = self.queries.tokens.segment_ids is not None and self.keys.tokens.segment_ids is not None
        overlap = any(length % size for length, size in zip(self.lengths, self.sizes, strict=True))
        return has_segments or overlap or self.scores.rules.read_positions or self.pairs.mask is not None

    def live(self) -> Array:
        """``[R, nq, nk]``, see `masks.tile_live`."""
        query = masks.tile_bounds(self.queries.tokens, self.lengths[0], self.sizes[0])
        key = masks.tile_bounds(self.keys.tokens, self.lengths[1], self.sizes[1])
        live = masks.tile_live(query, key, self.scores.rules)
        return jnp.broadcast_to(live, (self.queries.query.shape[0], *live.shape[1:]))

    def live_lists(self, by_key: bool) -> tuple[Array, Array]:
        """For each query tile (or key tile): indices of the live tiles of the other side first, and their number."""
        live = jnp.swapaxes(self.live(), 1, 2) if by_key else self.live()
        return jnp.argsort(~live, axis=-1, stable=True).astype(jnp.int32), live.sum(-1, dtype=jnp.int32)

    def tile(self, row: Array, i: Array, j: Array) -> "Tile":
        """Query tile i and key tile j of row ``row``."""
        return Tile(self, row, (i, j), (self.starts[0][i], self.starts[1][j]))


class Tile(NamedTuple):
    """One pair of tiles. Every method is the identity for an option that is off."""

    tiling: Tiling
    row: Array
    index: tuple[Array, Array]
    starts: tuple[Array, Array]

    def _turn(self, x: Array) -> Array:
        """From [b, K, G, t, s] to the order of the tiling."""
        return jnp.moveaxis(x, -1, 2) if self.tiling.transposed else x

    def _natural(self, x: Array) -> Array:
        """Undo `_turn`."""
        return jnp.moveaxis(x, 2, -1) if self.tiling.transposed else x

    def _tokens(self) -> tuple[Tokens, Tokens]:
        """Tokens [1, t] and [1, s]."""
        query, key = (
            Tokens(*(None if x is None else rows_of(x, self.row, start, size, 1)[None] for x in side))
            for side, start, size in zip(
                (self.tiling.queries.tokens, self.tiling.keys.tokens), self.starts, self.tiling.sizes, strict=True
            )
        )
        return query, key

    def _pair_corner(self, x: Array) -> tuple[list[Array], list[int]]:
        """Where this tile lies in a pairwise array [R, b, K, G, T, S], and its shape there."""
        index, shape = [jnp.int32(0)] * 6, [1, *x.shape[1:]]
        if x.shape[0] > 1:
            index[0] = jnp.asarray(self.row, jnp.int32)
        for axis, start, size in zip((4, 5), self.starts, self.tiling.sizes, strict=True):
            if x.shape[axis] > 1:
                index[axis], shape[axis] = start, size
        return index, shape

    def cap(self, s: Array) -> Array:
        """cap * tanh(s / cap)."""
        cap = self.tiling.scores.soft_cap
        return s if cap is None else cap * jnp.tanh(s / cap)

    def pull_cap(self, ds: Array, capped: Array, s: Array) -> Array:
        """The gradient through `cap`, from its result; 0 where hidden, as slopes of cap and score function there may
        be anything."""
        cap = self.tiling.scores.soft_cap
        ds = ds if cap is None else ds * (1 - jnp.square(capped / cap))
        return ds if cap is None and self.tiling.scores.score_fn is None else self.hide(ds, s)

    def modify(self, s: Array) -> Array:
        """The caller's score function."""
        return s if self.tiling.scores.score_fn is None else self._modify(s, self.tiling.pairs.score_args)

    def _modify(self, s: Array, args: tuple[Any, ...]) -> Array:
        natural = self._natural(s)
        b, kv_heads, group, t, length = natural.shape
        at, of = (tokens.positions for tokens in self._tokens())
        heads, score_fn = self.tiling.pairs.heads, self.tiling.scores.score_fn
        assert at is not None and of is not None and heads is not None and score_fn is not None
        heads = heads.reshape(1, -1, 1, 1)
        new = score_fn(
            natural.reshape(b, kv_heads * group, t, length), at[:, None, :, None], of[:, None, None], heads, *args
        )
        shape = (b, kv_heads * group, t, length)
        if jnp.shape(new) != shape:
            raise ValueError(f"score_fn must return scores of the shape that it got, {shape}; got {jnp.shape(new)}")
        return self._turn(jnp.asarray(new, s.dtype).reshape(natural.shape))

    def modify_and_pull(self, s: Array) -> tuple[Array, Callable[[Array], tuple[Array, tuple[Array, ...]]]]:
        """`modify`, and its gradient: of the scores and of the float arguments."""
        if self.tiling.scores.score_fn is None:
            return s, lambda ds: (ds, ())
        args = self.tiling.pairs.score_args
        floats = float_args(args)

        def fun(s: Array, *new: Array) -> Array:
            values = iter(new)
            return self._modify(s, tuple(next(values) if is_float(x) else x for x in args))

        new, pull = jax.vjp(fun, s, *floats)

        def pull_all(ds: Array) -> tuple[Array, tuple[Array, ...]]:
            ds, *dargs = pull(ds)
            return ds, tuple(dargs)

        return new, pull_all

    def bias(self, s: Array) -> Array:
        """Add the bias."""
        bias = self.tiling.pairs.bias
        return (
            s if bias is None else s + self._turn(lax.dynamic_slice(bias, *self._pair_corner(bias))[0].astype(s.dtype))
        )

    def add_to_bias(self, total: Array | None, ds: Array) -> Array | None:
        """Add this tile's gradient, summed over the axes on which the bias is the same for all."""
        if total is None:
            return None
        index, shape = self._pair_corner(total)
        axes = tuple(axis for axis, size in enumerate(shape[1:]) if size == 1)
        ds = self._natural(ds)[None].sum(tuple(axis + 1 for axis in axes), keepdims=True)
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, index, shape) + ds, index)

    def _visible(self) -> Array | None:
        """True where the mask allows, in the order of the tiling; None where it allows everything.

        A last tile that was moved back to lie inside repeats tokens of the one before it: those are masked out.
        """
        tiling = self.tiling
        query, key = self._tokens()
        mask = masks.visible(query, key, tiling.scores.rules)
        for index, start, length, size, shape in zip(
            self.index, self.starts, tiling.lengths, tiling.sizes, ((1, -1, 1), (1, 1, -1)), strict=True
        ):
            if length % size:
                first_seen = (start + jnp.arange(size) >= index * size).reshape(shape)
                mask = first_seen if mask is None else mask & first_seen
        mask = None if mask is None else mask[:, None, None]
        if tiling.pairs.mask is not None:
            dense = lax.dynamic_slice(tiling.pairs.mask, *self._pair_corner(tiling.pairs.mask))[0]
            mask = dense if mask is None else mask & dense
        return None if mask is None else self._turn(mask)

    def mask(self, s: Array) -> Array:
        """-inf where the mask forbids."""
        visible = self._visible()
        assert (visible is not None) == self.tiling.hides
        return s if visible is None else jnp.where(visible, s, -jnp.inf)

    def hide(self, ds: Array, s: Array) -> Array:
        """0 where a masked score is -inf, whatever was computed there."""
        return jnp.where(s == -jnp.inf, 0, ds) if self.tiling.hides else ds

    def drop(self, p: Array) -> Array:
        """Dropout: what stays is divided by the chance to stay."""
        rate, words = self.tiling.scores.dropout_rate, self.tiling.queries.words
        if not rate:
            return p
        positions = self._tokens()[1].positions
        assert words is not None and positions is not None
        words = rows_of(words, self.row, self.starts[0], self.tiling.sizes[0], 4)
        keep = dropout.keep(words, positions[0], rate)
        return jnp.where(self._turn(keep), p * (1 / (1 - rate)), 0)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def widened(args: tuple[Any, ...], dtype: Any) -> tuple[Any, ...]:
    """The floats in ``dtype`` at least: a score computed from half precision would be off by percents far away."""
    return tuple(x.astype(jnp.promote_types(x.dtype, dtype)) if is_float(x) else x for x in args)


def float_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that have a gradient."""
    return tuple(x for x in args if is_float(x))
