"""Which query may attend to which key: one rule for tokens, and what follows from it for tiles.

Invariant 1: *attention depends on positions and segment ids only, never on where a token sits in the array.* Query i
attends to key j if and only if all rules that are on hold:

    segments   segment_q[i] == segment_k[j] != 0                         (0 is padding)
    causal     position_q[i] >= position_k[j]
    window     -right <= position_q[i] - position_k[j] <= left
    chunks     position_q[i] // size == position_k[j] // size
    mask_fn    what the caller's function says

Every layout is then a permutation with no mask of its own. If a mask were built from array indices instead, a zigzag
or striped layout would let tokens see their future, and the loss would look a little too good.

For tiles, the bounds of positions and ids decide. `tile_live` may say yes for a tile in which nothing is visible (the
bounds are an interval, the ids in it need not be), never no for one in which something is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

_INT32 = np.iinfo(np.int32)


class Rules(NamedTuple):
    """The rules that are on, apart from segment ids (they are on when there are any)."""

    is_causal: bool = False
    window: tuple[int, int] | None = None
    chunk_size: int | None = None
    mask_fn: Callable[..., Any] | None = None

    @property
    def read_positions(self) -> bool:
        return self.is_causal or any(rule is not None for rule in self[1:])

    def reach(self) -> tuple[float, float]:
        """(smallest, largest) difference of positions, query minus key, that can be visible."""
        left, right = self.window or (np.inf, np.inf)
        if self.chunk_size is not None:
            left, right = min(left, self.chunk_size - 1), min(right, self.chunk_size - 1)
        return (0 if self.is_causal else -right), left


class Tokens(NamedTuple):
    """What the mask needs to know of a run of tokens: int32, ``[R, T]`` with R = 1 or one row for each batch row.

    ``None`` means that no rule uses it: positions when no rule reads them, segment ids when none were given.
    """

    positions: Int[Array, "R T"] | None
    segment_ids: Int[Array, "R T"] | None


class TileBounds(NamedTuple):
    """(smallest, largest) over the tokens of each tile that are not padding, each ``[R, n]``."""

    num_tiles: int
    positions: tuple[Int[Array, "R n"], Int[Array, "R n"]] | None
    segment_ids: tuple[Int[Array, "R n"], Int[Array, "R n"]] | None
    is_real: Bool[Array, "R n"] | None  # no token of the tile is padding


def visible(query: Tokens, key: Tokens, rules: Rules) -> Bool[Array, "R T S"] | None:
    """The mask, token by token; None when every query sees every key.

    query positions 0 1 2 3,  key positions 0 1 2 3,  segments 1 1 2 2, causal:

        1 0 0 0
        1 1 0 0
        0 0 1 0
        0 0 1 1
    """
    parts = []
    if query.segment_ids is not None and key.segment_ids is not None:
        ids = query.segment_ids[:, :, None]
        parts += [(ids == key.segment_ids[:, None, :]) & (ids != 0)]
    if rules.read_positions:
        assert query.positions is not None and key.positions is not None
        at, of = query.positions[:, :, None], key.positions[:, None, :]
        if rules.is_causal:
            parts.append(at >= of)
        if rules.window is not None:
            left, right = rules.window
            parts += [at - of <= left, of - at <= right]
        if rules.chunk_size is not None:
            parts.append(at // rules.chunk_size == of // rules.chunk_size)
        if rules.mask_fn is not None:
            ids = jnp.ones_like(query.positions) if query.segment_ids is None else query.segment_ids
            key_ids = jnp.ones_like(key.positions) if key.segment_ids is None else key.segment_ids
            parts.append(_call(rules.mask_fn, at, of, ids[:, :, None], key_ids[:, None, :]))
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask


def _call(mask_fn: Callable[..., Any], at: Array, of: Array, at_ids: Array, of_ids: Array) -> Array:
    """The caller's mask, checked: bool, and not larger than queries by keys."""
    mask = jnp.asarray(mask_fn(at, of, at_ids, of_ids))
    shape = jnp.broadcast_shapes(at.shape, of.shape, at_ids.shape, of_ids.shape)
    if mask.dtype != bool:
        raise TypeError(f"mask_fn must return booleans, True where a query may attend; got {mask.dtype}")
    try:
        return jnp.broadcast_to(mask, shape)
    except ValueError:
        message = f"mask_fn must return what broadcasts to [rows, queries, keys] = {shape}; got {mask.shape}"
        raise ValueError(message) from None


def tile_starts(length: int, tile: int) -> np.ndarray:
    """First index of each tile. The last tile of an uneven length is moved back so that it lies inside."""
    return np.minimum(np.arange(-(-length // tile)) * tile, length - tile).astype(np.int32)


def tile_bounds(tokens: Tokens, length: int, tile: int) -> TileBounds:
    """Bounds of every tile of ``tile`` tokens; padding (segment 0) does not count for them."""
    starts = tile_starts(length, tile)
    index = starts[:, None] + np.arange(tile)
    positions = None if tokens.positions is None else tokens.positions[:, index]
    segments = None if tokens.segment_ids is None else tokens.segment_ids[:, index]

    def bounds(values: Array | None) -> tuple[Array, Array] | None:
        if values is None:
            return None
        if segments is None:
            return values.min(-1), values.max(-1)
        real = segments != 0
        return jnp.where(real, values, _INT32.max).min(-1), jnp.where(real, values, _INT32.min).max(-1)

    is_real = None if segments is None else (segments != 0).all(-1)
    return TileBounds(len(starts), bounds(positions), bounds(segments), is_real)


def tile_live(query: TileBounds, key: TileBounds, rules: Rules) -> Bool[Array, "R nq nk"]:
    """False where no query of the tile can see a key of the tile: the kernel's own skip predicate.

    A tile of padding alone has segment bounds that meet no other, so what its positions give does not matter.
    """
    live = jnp.ones((1, query.num_tiles, key.num_tiles), bool)
    if query.segment_ids is not None and key.segment_ids is not None:
        live &= query.segment_ids[1][:, :, None] >= key.segment_ids[0][:, None, :]
        live &= key.segment_ids[1][:, None, :] >= query.segment_ids[0][:, :, None]
    if rules.read_positions:
        assert query.positions is not None and key.positions is not None
        first, last = (x[:, :, None] for x in query.positions)
        key_first, key_last = (x[:, None, :] for x in key.positions)
        if rules.is_causal:
            live &= last >= key_first
        if rules.window is not None:
            live &= (first - key_last <= rules.window[0]) & (key_first - last <= rules.window[1])
        if rules.chunk_size is not None:
            size = rules.chunk_size
            live &= (first // size <= key_last // size) & (key_first // size <= last // size)
    return live


def tile_whole(query: TileBounds, key: TileBounds, rules: Rules) -> Bool[Array, "R nq nk"]:
    """True where every query of the tile sees every key of the tile, so that no mask is needed; no `mask_fn`."""
    whole = jnp.ones((1, query.num_tiles, key.num_tiles), bool)
    if query.segment_ids is not None and key.segment_ids is not None:
        assert query.is_real is not None and key.is_real is not None
        whole &= query.is_real[:, :, None] & key.is_real[:, None, :]
        for x in query.segment_ids:
            for y in key.segment_ids:
                whole &= x[:, :, None] == y[:, None, :]
    if rules.read_positions:
        assert query.positions is not None and key.positions is not None
        first, last = (x[:, :, None] for x in query.positions)
        key_first, key_last = (x[:, None, :] for x in key.positions)
        if rules.is_causal:
            whole &= first >= key_last
        if rules.window is not None:
            whole &= (last - key_first <= rules.window[0]) & (key_last - first <= rules.window[1])
        if rules.chunk_size is not None:
            chunks = [x // rules.chunk_size for x in (first, last, key_first, key_last)]
            for x in chunks[1:]:
                whole &= chunks[0] == x
    return whole
