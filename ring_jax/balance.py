"""Even work per shard for any mask: which tiles of the sequence each shard of the sequence axis gets.

Invariant: *the order returned moves whole tiles, so it never changes which token sees which, nor how many pairs of
tiles are live; it changes only which device works on a pair, and at which ring step.* Attention depends on positions
and segment ids, never on the place in the array. It must be given both in the new order, with ``layout=None``; if the
positions stayed behind, causal attention would see wrong tokens.

Zigzag and striped are even for one causal document. For packed documents the work of a token depends on its place in
its document, and zigzag leaves one shard with two or three times the mean. Eight tiles, documents of 6 and 2, causal:

    live keys of tile    1 2 3 4 5 6 | 1 2
    zigzag, 2 shards     shard 0: 1+2+1+2 = 6      shard 1: 3+4+5+6 = 18
    here                 shard 0: 12               shard 1: 12

What is live is decided by the rule of the kernel, `ring_jax.masks.tile_live`: bounds of positions and segment ids over
the tokens of a tile that are not padding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Integer, Shaped

from ring_jax import layouts, options, swaps

type _Numbers = Shaped[Array | np.ndarray, "..."] | Sequence[Any] | None
type _Window = int | tuple[int, int] | None

MOST_TILES = 16384  # the pairs of tiles are kept as int16: 512 MiB


class _Tokens(NamedTuple):
    """What the mask needs to know of the sequence, in natural order, one row for each batch row that differs."""

    positions: Integer[np.ndarray, "R T"]
    segment_ids: Integer[np.ndarray, "R T"]


class _Rule(NamedTuple):
    """The mask's keywords, read and checked."""

    num_shards: int
    tile: int
    is_causal: bool
    window: tuple[int, int] | None
    chunk_size: int | None
    mask: Bool[np.ndarray, "n n"] | None


def balanced_permutation(
    segment_ids: _Numbers = None,
    *,
    seq_len: int | None = None,
    num_shards: int,
    tile: int = 128,
    is_causal: bool = True,
    local_window_size: _Window = None,
    chunk_size: int | None = None,
    positions: _Numbers = None,
    mask: _Numbers = None,
    steps: bool = True,
) -> Int[np.ndarray, " T"]:
    """Order the sequence so that every shard, and every ring step, has the same work: ``new[i] = old[order[i]]``.

        minimize max_r sum_s W[r, s], then sum_s max_r W[r, s],   W = `live_tiles` of (shard, ring step)

    Tiles go to shards heaviest first, the lightest shard with room taking the next; then pairs of tiles are swapped.
    Call it on the host, once for each batch of data; the result is the same on every host. Then reorder the tokens
    with it and call attention with ``positions=order`` (or ``positions[order]``), ``segment_ids=segment_ids[order]``
    and ``layout=None``.

    Args:
      segment_ids: int ``[T]`` or ``[B, T]``; 0 is padding. None is one document. Of several rows the sum is balanced.
      seq_len: T; needed where neither segment_ids nor positions say it.
      num_shards: size P of the sequence axis.
      tile: tokens that stay together, best the kernel's tile; T must be a multiple of P * tile. Time and memory grow
        with (T / tile)**2.
      is_causal, local_window_size, chunk_size: as in `ring_jax.dot_product_attention`.
      positions: int, shaped like segment_ids; None counts from 0 over the whole sequence. May restart in a document.
      mask: bool ``[T/tile, T/tile]`` (query, key): what else hides a pair of tiles. All rules must say yes, so pass
        ``is_causal=False`` with a mask that looks ahead.
      steps: also even the ring steps; False balances the sums alone and is faster.

    Returns:
      An int64 array ``[T]``, a permutation of ``range(T)``: runs of ``tile`` tokens, in increasing order on a shard.

    Raises:
      ValueError, TypeError: sizes that do not fit each other; the message names those that do.

    Example:
      >>> balanced_permutation(seq_len=8, num_shards=2, tile=2)
      array([0, 1, 6, 7, 2, 3, 4, 5])
      >>> balanced_permutation(np.array([1, 1, 1, 1, 1, 1, 2, 2]), num_shards=2, tile=1)
      array([1, 2, 5, 6, 0, 3, 4, 7])

    Reference:
      Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2), 1969 (heaviest first).
    """
    tokens, rule = _read(
        segment_ids, seq_len, num_shards, tile, is_causal, local_window_size, chunk_size, positions, mask
    )
    pairs = _live_pairs(tokens, rule)
    owner = swaps.even_shards(pairs.sum(1, dtype=np.int64), num_shards)
    if steps:
        owner = swaps.even_steps(pairs, owner, num_shards)
    first = np.argsort(owner, kind="stable") * tile
    return (first[:, None] + np.arange(tile)).reshape(-1)


def live_tiles(
    order: str | _Numbers,
    segment_ids: _Numbers = None,
    *,
    seq_len: int | None = None,
    num_shards: int,
    tile: int = 128,
    is_causal: bool = True,
    local_window_size: _Window = None,
    chunk_size: int | None = None,
    positions: _Numbers = None,
    mask: _Numbers = None,
) -> Int[np.ndarray, "P P"]:
    """Count the live tiles that each shard computes at each ring step, for any order of the sequence.

        W[r, s] = number of live (query tile, key tile) with the query's on shard r and the key's on shard r - s mod P

    The backward pass visits the same pairs on the same shards at the same steps. ``W.sum(1)`` is the work of a shard,
    ``W.max(0).sum()`` the time of the ring where all shards wait for the slowest at every step.

    Args:
      order: the name of a layout, or a permutation such as `balanced_permutation` returns.
      segment_ids, positions, mask: in natural order, as for `balanced_permutation`; so are all others.

    Returns:
      An int64 array ``[P, P]``, summed over the rows of segment_ids and positions.

    Raises:
      ValueError, TypeError: as `balanced_permutation`, and for an order that is no permutation.

    Example:
      >>> documents = np.repeat([1, 2], [6, 2])
      >>> live_tiles("zigzag", documents, num_shards=2, tile=1).sum(1)
      array([ 6, 18])
      >>> live_tiles(balanced_permutation(documents, num_shards=2, tile=1), documents, num_shards=2, tile=1).sum(1)
      array([12, 12])
    """
    tokens, rule = _read(
        segment_ids, seq_len, num_shards, tile, is_causal, local_window_size, chunk_size, positions, mask
    )
    length = tokens.positions.shape[1]
    if isinstance(order, str):
        order = layouts.permutation(order, length, num_shards)
    order = np.asarray(order)
    if order.shape != (length,) or not np.array_equal(np.sort(order), np.arange(length)):
        raise ValueError(
            f"order of shape {order.shape} must be a permutation of range({length}); "
            f"pass the result of balanced_permutation, or one of {', '.join(layouts.LAYOUTS)}"
        )
    if rule.mask is not None:
        rule = rule._replace(mask=_reorder_mask(rule.mask, order, tile))
    pairs = _live_pairs(_Tokens(*(x[:, order] for x in tokens)), rule)
    each = len(pairs) // num_shards
    return swaps.by_step(pairs.reshape(num_shards, each, num_shards, each).sum((1, 3), dtype=np.int64))


def _read(
    segment_ids, seq_len, num_shards, tile, is_causal, window, chunk_size, positions, mask
) -> tuple[_Tokens, _Rule]:
    """Check all arguments; `_Tokens` with rows made equal, and `_Rule`."""
    if seq_len is not None and not isinstance(seq_len, (int, np.integer)):
        raise ValueError(f"seq_len={seq_len!r} must be a whole number")
    for name, value in (("num_shards", num_shards), ("tile", tile), ("chunk_size", chunk_size)):
        if value is not None and not (isinstance(value, (int, np.integer)) and value >= 1):
            raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
    if not isinstance(is_causal, (bool, np.bool_)):
        raise TypeError(f"is_causal must be a Python bool; got {is_causal!r}")
    arrays = {"positions": _rows("positions", positions), "segment_ids": _rows("segment_ids", segment_ids)}
    lengths = {name: x.shape[1] for name, x in arrays.items() if x is not None}
    if seq_len is not None:
        lengths["seq_len"] = seq_len
    if not lengths:
        raise ValueError("the length of the sequence is not known: pass segment_ids, or seq_len for one document")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"positions, segment_ids and seq_len must have one length; got {shown}. Leave seq_len out")
    length = next(iter(lengths.values()))
    _check_tile(length, num_shards, tile)
    counts = {x.shape[0] for x in arrays.values() if x is not None} - {1}
    if len(counts) > 1:
        raise ValueError(f"segment_ids and positions must have the same rows, or one row; got {sorted(counts)} rows")
    shape = (max(counts, default=1), length)
    ids = np.ones((1, 1), np.int64) if arrays["segment_ids"] is None else arrays["segment_ids"]
    places = np.arange(length) if arrays["positions"] is None else arrays["positions"]
    tokens = _Tokens(np.broadcast_to(places, shape), np.broadcast_to(ids, shape))
    rule = _Rule(num_shards, tile, bool(is_causal), options.window_of(window), chunk_size, _mask(mask, length // tile))
    return tokens, rule


def _rows(name: str, value: Any) -> np.ndarray | None:
    """``value`` as int64 ``[R, T]``."""
    if value is None:
        return None
    if isinstance(value, tuple):
        raise TypeError(f"{name} must be one array: with a pair, queries and keys could not share one order")
    value = np.asarray(value)
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name} must be integers; got {value.dtype}. Cast them to int32")
    if value.ndim not in (1, 2) or 0 in value.shape:
        raise ValueError(f"{name} must have shape [T] or [B, T]; got {value.shape}")
    return np.atleast_2d(value).astype(np.int64)


def _check_tile(length: int, num_shards: int, tile: int) -> None:
    """Raise ValueError, with the nearest length and the nearest tile that fit."""
    multiple = num_shards * tile
    if length < 1 or length % multiple:
        padded = max(1, -(-length // multiple)) * multiple
        local = length // num_shards
        fits = (
            [] if length < 1 or length % num_shards else [t for t in range(1, min(tile, local) + 1) if local % t == 0]
        )
        other = f" or use tile={fits[-1]}" if fits else ""
        raise ValueError(
            f"seq_len={length} must be a positive multiple of {multiple} ({num_shards} shards * tile {tile}); "
            f"pad to {padded}{other}"
        )
    if length // tile > MOST_TILES:
        smallest = -(-length // MOST_TILES)
        fits = next(t for t in range(smallest, length + 1) if length // num_shards % t == 0)
        raise ValueError(
            f"tile={tile} cuts {length} tokens into {length // tile} tiles, which must be at most {MOST_TILES}; "
            f"use tile={fits}"
        )


def _mask(value: Any, num_tiles: int) -> np.ndarray | None:
    if value is None:
        return None
    mask = np.asarray(value)
    if mask.dtype != bool or mask.shape != (num_tiles, num_tiles):
        raise ValueError(
            f"mask must be bool [{num_tiles}, {num_tiles}], one entry for each pair of tiles (query, key); "
            f"got {mask.dtype} {list(mask.shape)}. Change it, or the tile"
        )
    return mask


def _live_pairs(tokens: _Tokens, rule: _Rule) -> Int[np.ndarray, "n n"]:
    """In how many rows each (query tile, key tile) is live."""
    num_tiles = tokens.positions.shape[1] // rule.tile
    total = np.zeros((num_tiles, num_tiles), np.int16 if len(tokens.positions) < 2**15 else np.int32)
    far = np.iinfo(np.int64).max // 4  # leaves room to add a window
    for positions, ids in zip(*tokens, strict=True):
        real = (ids != 0).reshape(num_tiles, rule.tile)

        def bounds(values: np.ndarray, real: np.ndarray = real) -> tuple[np.ndarray, np.ndarray]:
            values = values.reshape(real.shape)
            return np.where(real, values, far).min(1), np.where(real, values, -far).max(1)

        low, high = bounds(ids)
        live = (high[:, None] >= low) & (high >= low[:, None])
        low, high = bounds(positions)
        if rule.is_causal:
            live &= high[:, None] >= low
        if rule.window is not None:
            left, right = rule.window
            live &= (high >= low[:, None] - left) & (low <= high[:, None] + right)
        if rule.chunk_size is not None:
            low, high = bounds(positions // rule.chunk_size)
            live &= (high[:, None] >= low) & (high >= low[:, None])
        total += live
    return total if rule.mask is None else total * rule.mask


def _reorder_mask(mask: Bool[np.ndarray, "n n"], order: np.ndarray, tile: int) -> Bool[np.ndarray, "n n"]:
    """The mask of the reordered tiles: a pair is live if tokens of a live pair of old tiles are in it."""
    num_tiles = len(mask)
    source = (order // tile).reshape(num_tiles, tile)
    if (source == source[:, :1]).all():
        return mask[np.ix_(source[:, 0], source[:, 0])]
    holds = np.zeros((num_tiles, num_tiles), np.float32)
    holds[np.arange(num_tiles)[:, None], source] = 1
    return holds @ mask.astype(np.float32) @ holds.T > 0
