"""Which query may attend to which key: one rule for tokens, and what follows from it for tiles.

Invariant 1: *attention depends on positions and segment ids only, never on where a token sits in the array.* Query i
attends to key j if and only if

    segment_q[i] == segment_k[j] != 0        (when segment ids are given; 0 is padding)
    position_q[i] >= position_k[j]           (when causal)

Every layout is then a permutation with no mask of its own. If a mask were built from array indices instead, a zigzag
or striped layout would let tokens see their future, and the loss would look a little too good.

For tiles, the bounds of positions and ids decide. `tile_live` may say yes for a tile in which nothing is visible (the
bounds are an interval, the ids in it need not be), never no for one in which something is.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

_INT32 = np.iinfo(np.int32)


class Tokens(NamedTuple):
    """What the mask needs to know of a run of tokens: int32, ``[R, T]`` with R = 1 or one row for each batch row.

    ``None`` means that no rule uses it: positions when attention is not causal, segment ids when none were given.
    """

    positions: Int[Array, "R T"] | None
    segment_ids: Int[Array, "R T"] | None


class TileBounds(NamedTuple):
    """(smallest, largest) over the tokens of each tile that are not padding, each ``[R, n]``."""

    num_tiles: int
    positions: tuple[Int[Array, "R n"], Int[Array, "R n"]] | None
    segment_ids: tuple[Int[Array, "R n"], Int[Array, "R n"]] | None


def visible(query: Tokens, key: Tokens, *, is_causal: bool) -> Bool[Array, "R T S"] | None:
    """The mask, token by token; None when every query sees every key.

    query positions 0 1 2 3,  key positions 0 1 2 3,  segments 1 1 2 2, causal:

        1 0 0 0
        1 1 0 0
        0 0 1 0
        0 0 1 1
    """
    mask = None
    if is_causal:
        assert query.positions is not None and key.positions is not None
        mask = query.positions[:, :, None] >= key.positions[:, None, :]
    if query.segment_ids is not None and key.segment_ids is not None:
        same = query.segment_ids[:, :, None] == key.segment_ids[:, None, :]
        same &= query.segment_ids[:, :, None] != 0
        mask = same if mask is None else mask & same
    return mask


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

    return TileBounds(len(starts), bounds(positions), bounds(segments))


def tile_live(query: TileBounds, key: TileBounds, *, is_causal: bool) -> Bool[Array, "R nq nk"]:
    """False where no query of the tile can see a key of the tile: the kernel's own skip predicate."""
    live = jnp.ones((1, query.num_tiles, key.num_tiles), bool)
    if is_causal:
        assert query.positions is not None and key.positions is not None
        live &= query.positions[1][:, :, None] >= key.positions[0][:, None, :]
    if query.segment_ids is not None and key.segment_ids is not None:
        live &= query.segment_ids[1][:, :, None] >= key.segment_ids[0][:, None, :]
        live &= key.segment_ids[1][:, None, :] >= query.segment_ids[0][:, :, None]
    return live
