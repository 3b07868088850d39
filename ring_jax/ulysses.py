"""Ulysses: devices exchange heads for sequence, attend to whole heads, and exchange back.

    before  [B, T, N, H]: all heads of this device's tokens      after  [B, u * T, N / u, H]: some heads of all tokens

Key/value heads go where their query heads go. With fewer key/value heads than devices each is sent to all devices that
have a query head of it; none is sent twice to one device. (Where heads do not fall evenly, devices that need fewer than
the most get one again, since all messages of an all-to-all have one size.) The gradient of a head that was sent to
several devices is the sum of what they send back.

With ``grid.ulysses == 1`` every function is the identity. Inside a ring (USP) the devices of one place exchange.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ring_jax.problem import Inputs
from ring_jax.routes import Grid


class HeadRoutes(NamedTuple):
    """Which key/value heads each of the u devices gets, and how its query heads share them.

    ``sent`` ``[u, m]``: key/value heads sent to each device; one that has fewer than m gets its last again. ``used``
    ``[u, k]``: for each group of query heads of a device, which of the m heads is theirs; None where it is 0 ... m - 1.
    """

    num_kv_heads: int
    sent: np.ndarray
    used: np.ndarray | None


def route_heads(grid: Grid, num_heads: int, num_kv_heads: int) -> HeadRoutes:
    """A group is the largest number of neighboring query heads that never spans two key/value heads or two devices."""
    group, own = num_heads // num_kv_heads, num_heads // grid.ulysses
    wanted = (np.arange(0, num_heads, math.gcd(own, group)) // group).reshape(grid.ulysses, -1)
    distinct = [np.unique(row) for row in wanted]
    most = max(len(row) for row in distinct)
    sent = np.stack([np.pad(row, (0, most - len(row)), mode="edge") for row in distinct])
    used = np.stack([np.searchsorted(row, heads) for row, heads in zip(distinct, wanted, strict=True)])
    same = used.shape == sent.shape and (used == np.arange(most)).all()
    return HeadRoutes(num_kv_heads, sent, None if same else used)


def _all_to_all(grid: Grid, x: Array, split: int, concat: int) -> Array:
    if grid.ulysses == 1:
        return x
    groups = grid.members() if grid.num_places > 1 else None
    return lax.all_to_all(x, grid.axis_name, split, concat, tiled=True, axis_index_groups=groups)


def _all_gather(grid: Grid, x: Array, axis: int) -> Array:
    groups = grid.members() if grid.num_places > 1 else None
    return lax.all_gather(x, grid.axis_name, axis=axis, tiled=True, axis_index_groups=groups)


def heads_for_sequence(grid: Grid, x: Array) -> Array:
    """``[B, T, N, ...]`` to ``[B, u * T, N / u, ...]``."""
    return _all_to_all(grid, x, 2, 1)


def sequence_for_heads(grid: Grid, x: Array) -> Array:
    """Undo `heads_for_sequence`, which is also its transpose."""
    return _all_to_all(grid, x, 1, 2)


def enter_arrays(grid: Grid, inputs: Inputs) -> tuple[Array, Array, Array]:
    """Query, key and value after the exchange; keys and values share a message."""
    query, key, value = inputs[:3]
    if grid.ulysses == 1:
        return query, key, value
    routes = route_heads(grid, query.shape[2], key.shape[2])
    kv = jnp.concatenate([key, value], -1)
    if routes.sent.size != routes.num_kv_heads:
        kv = jnp.take(kv, routes.sent.reshape(-1), axis=2)
    kv = heads_for_sequence(grid, kv)
    if routes.used is not None:
        kv = jnp.take(kv, jnp.asarray(routes.used)[inputs.place.rank % grid.ulysses], axis=2)
    key, value = jnp.split(kv, [key.shape[-1]], axis=-1)
    return heads_for_sequence(grid, query), key, value


def leave_keys(grid: Grid, routes: HeadRoutes, dkv: Array, rank: Array, dtype) -> Array:
    """The gradient of keys and values back to where they came from, copies summed in the dtype of ``dkv``."""
    if grid.ulysses == 1:
        return dkv.astype(dtype)
    if routes.used is not None:
        mine = jnp.asarray(routes.used)[rank % grid.ulysses]
        dkv = _sum_into(routes.sent.shape[1], mine, dkv)
    if routes.sent.size == routes.num_kv_heads:
        return sequence_for_heads(grid, dkv.astype(dtype))
    dkv = sequence_for_heads(grid, dkv)
    return _sum_into(routes.num_kv_heads, jnp.asarray(routes.sent.reshape(-1)), dkv).astype(dtype)


def _sum_into(count: int, heads: Array, x: Array) -> Array:
    """``[B, T, n, H]`` summed into ``count`` heads, entry i into head ``heads[i]``."""
    return jnp.einsum("BTnH,nm->BTmH", x, jax.nn.one_hot(heads, count, dtype=x.dtype), precision="highest")


def enter_tokens(grid: Grid, inputs: Inputs, length: int) -> Inputs:
    """Everything besides query, key and value: tokens of the whole place, this device's heads of the rest.

    ``length`` counts the queries of this device before the exchange.
    """
    if grid.ulysses == 1:
        return inputs
    member = inputs.place.rank % grid.ulysses

    def gather(tokens):
        return jax.tree.map(lambda x: _all_gather(grid, x, 1), tokens)

    mask = None if inputs.mask is None else enter_pairwise(grid, inputs.mask, length, member)
    return inputs._replace(
        bias=None if inputs.bias is None else enter_pairwise(grid, inputs.bias, length, member),
        sinks=None if inputs.sinks is None else own_heads(grid, inputs.sinks, member, 0),
        mask=mask,
        query_tokens=gather(inputs.query_tokens),
        key_tokens=gather(inputs.key_tokens),
    )


def own_heads(grid: Grid, x: Array, member: Array, axis: int) -> Array:
    """This device's part of an array that holds all heads of the place."""
    count = x.shape[axis] // grid.ulysses
    return lax.dynamic_slice_in_dim(x, member * count, count, axis)


def enter_pairwise(grid: Grid, x: Array, length: int, member: Array) -> Array:
    """A bias or mask ``[B, N, T, S]``, its axes 1 where it is the same for all, for this device's heads.

    A device with one query may have a row of its own or the one of all: it is exchanged, which is right for both. Of
    heads a device has as many as there are devices in the exchange, so that there 1 is never one of several.
    """
    one_row = x.shape[2] == 1 and length > 1
    if x.shape[1] == 1:
        return x if one_row else _all_gather(grid, x, 2)
    return own_heads(grid, x, member, 1) if one_row else _all_to_all(grid, x, 1, 2)
