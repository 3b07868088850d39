"""Forward and backward of one call on one device of a ``shard_map``, for every strategy: exchange, attend, finish.

The custom VJPs (here for calls inside ``shard_map``, in `ring_jax.attention` outside of it) are made of `forward` and
`backward`. A sink is a key whose value is 0 and whose score is the sink: it enters after the kernel, from the lse.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ring_jax import all_gather, manual, ring, routes, softmax, ulysses
from ring_jax.kernels.protocol import Carry, Cotangents, empty
from ring_jax.kernels.tiles import is_float
from ring_jax.problem import Inputs, Problem, Spec, open_problem
from ring_jax.routes import Grid

ATTENTION = "ring_attention"
"""Name of what the backward pass needs of the forward pass, for policies of `jax.checkpoint`."""


class Saved(NamedTuple):
    """What the backward pass needs besides the inputs, after the exchange of heads for sequence."""

    arrays: tuple[Array, Array, Array] | None  # query, key and value, where they were exchanged
    out: Array  # [B, T, N, Hv]
    lost: Array | None  # what rounding `out` to half precision took away, itself in half precision
    lse: Array  # [B, T, N]
    lost_lse: Array | None


class InputGradients(NamedTuple):
    """In the shapes of the inputs, of this device alone.

    What devices may share is still to be summed, and in the dtype of its accumulator: rounded before, the error of
    the sum would grow with the devices. Of query, key and value that is so where the spec says it (`Spec.sums_later`).
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None
    score_args: tuple[Any, ...]  # None for those that have no gradient


def _grid(spec: Spec) -> Grid:
    return routes.make_grid(spec.axis_name, spec.strategy, spec.schedule, *spec.num_heads)


def _exchange(grid: Grid, inputs: Inputs, arrays: tuple[Array, Array, Array] | None) -> Inputs:
    query, key, value = arrays or ulysses.enter_arrays(grid, inputs)
    inner = ulysses.enter_tokens(grid, inputs, query.shape[1] // grid.ulysses)
    place = inputs.place
    first_head = place.first_head + (place.rank % grid.ulysses) * query.shape[2]
    return inner._replace(query=query, key=key, value=value, place=place._replace(first_head=first_head))


def forward(spec: Spec, inputs: Inputs) -> tuple[Array, Array, Saved]:
    """(out, lse, saved) of this device's queries: out ``[B,T,N,Hv]``, lse ``[B,T,N]`` without sinks.

    ``saved.lost`` is there because the backward pass wants the exact output: delta from the rounded one makes the error
    of dq up to 2.4 times that of `jax.nn.dot_product_attention`.
    """
    grid = _grid(spec)
    inner = _exchange(grid, inputs, None)
    problem = open_problem(spec, grid, inner)
    query = problem.queries.query
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    shape = (*query.shape[:-1], inner.value.shape[-1])
    carry = Carry(
        manual.full_like(shape, 0, dtype, query),
        manual.full_like(shape[:-1], empty(dtype), dtype, query),
        manual.full_like(shape[:-1], 0, dtype, query),
    )
    strategy = all_gather if spec.strategy == "all_gather" else ring
    carry = strategy.forward(problem, carry)
    exact, lse = softmax.normalize(carry.out, carry.maximum, carry.total)
    lost_lse = None
    if spec.keeps_lost or inputs.bias is not None:
        lost_lse = softmax.lost_by_rounding(lse, carry.maximum, carry.total)
        lost_lse = problem.layout.heads(lost_lse, True)
    exact, lse = (problem.layout.heads(x, True) for x in (exact, lse))
    if inner.sinks is not None:
        exact = exact * _share(lse, inner.sinks)[..., None]
    out = exact.astype(query.dtype)
    lost = None if out.dtype == exact.dtype else (exact - out.astype(dtype)).astype(out.dtype)
    arrays = (inner.query, inner.key, inner.value) if grid.ulysses > 1 else None
    saved = Saved(arrays, out, lost, lse, lost_lse)
    return ulysses.sequence_for_heads(grid, out), ulysses.sequence_for_heads(grid, lse), saved


def _share(lse: Array, sinks: Array) -> Array:
    """The part of the probability that does not go to the sink: 0 for a row that sees nothing."""
    share = jax.nn.sigmoid(lse - sinks.astype(lse.dtype))
    return jnp.where(lse == -jnp.inf, 0, share)  # also where there is no sink, -inf


def backward(spec: Spec, inputs: Inputs, saved: Saved, dout: Array, dlse: Array) -> InputGradients:
    """Gradients for the cotangents of out and lse. A row with cotangents of 0, or that sees nothing, adds nothing.

    Nothing of it starts before the cotangents are there: XLA would send its first blocks during the forward ring, and
    keep them, or merge its hops with the forward ring's.
    """
    inputs, saved, dout, dlse = lax.optimization_barrier((inputs, saved, dout, dlse))
    grid = _grid(spec)
    inner = _exchange(grid, inputs, saved.arrays)
    problem = open_problem(spec, grid, inner)
    dout = ulysses.heads_for_sequence(grid, dout)
    dlse = ulysses.heads_for_sequence(grid, dlse) if spec.return_lse else jnp.zeros_like(saved.lse)
    cotangents, dsinks = _cotangents(problem, inner, saved, dout, dlse)
    query = problem.queries.query  # a row that is not finite has lse NaN, where it counts
    finite = jnp.isfinite(query).all(-1) & ~jnp.isnan(problem.layout.tokens(saved.lse, True))
    query = jnp.where(finite[..., None], query, 0)
    problem = problem._replace(queries=problem.queries._replace(query=query))
    sums = (all_gather if spec.strategy == "all_gather" else ring).backward(problem, cotangents)
    of_query, of_keys = (sums.query.dtype if later else query.dtype for later in spec.sums_later)
    dq = ulysses.sequence_for_heads(grid, problem.layout.heads(sums.query, True).astype(of_query))
    routing = ulysses.route_heads(grid, *spec.num_heads)
    dkv = ulysses.leave_keys(grid, routing, problem.layout.heads(sums.keys, False), inputs.place.rank, of_keys)
    dk, dv = jnp.split(dkv, [query.shape[-1]], axis=-1)
    dbias = None if sums.bias is None else _leave_bias(grid, inputs, problem.lengths[0], sums.bias)
    dsinks = None if dsinks is None else _leave_sinks(grid, inputs, dsinks)
    dargs = iter(sums.args)
    args = tuple(next(dargs) if is_float(x) else None for x in inputs.score_args)
    return InputGradients(dq, dk, dv, dbias, dsinks, args)


def _cotangents(
    problem: Problem, inner: Inputs, saved: Saved, dout: Array, dlse: Array
) -> tuple[Cotangents, Array | None]:
    """What the kernel needs of every query, and the gradient of the sinks.

    With g the share that does not go to the sink, out = g * o: the kernel sees the cotangent g * dout of o, and delta
    is g * sum(dout * out) - dlse. Its delta is that of the exact output, not of the rounded one.
    """
    dtype = saved.lse.dtype
    alive = (saved.lse != -jnp.inf) & ((dout != 0).any(-1) | (dlse != 0))
    dout = jnp.where(alive[..., None], dout, jnp.zeros((), dout.dtype))
    exact = saved.out.astype(dtype)
    exact = exact if saved.lost is None else exact + saved.lost.astype(dtype)
    delta, dsinks = jnp.sum(dout.astype(dtype) * exact, -1), None
    if inner.sinks is not None:
        share = _share(saved.lse, inner.sinks)
        dsinks = -jnp.where(alive, delta * (1 - share), 0).sum((0, 1))
        dout = jnp.where(alive[..., None], dout.astype(dtype) * share[..., None], 0)
        delta = delta * share
    delta = jnp.where(alive, delta - dlse, 0)
    # A cotangent that is not finite goes into the probabilities: a key that its row does not see would get 0 * NaN.
    finite = jnp.isfinite(dout).all(-1)
    dout = jnp.where(finite[..., None], dout, jnp.zeros((), dout.dtype))
    lse = jnp.where(alive, jnp.where(finite, saved.lse, jnp.nan), jnp.inf)
    lost = None if saved.lost_lse is None else jnp.where(alive, saved.lost_lse, 0)
    dout, lse, delta = (problem.layout.tokens(x, True) for x in (dout, lse, delta))
    return Cotangents(dout, lse, delta, None if lost is None else problem.layout.tokens(lost, True)), dsinks


def _leave_bias(grid: Grid, inputs: Inputs, length: int, dbias: Array) -> Array:
    """The gradient of a bias ``[R, b, K, G, T, S]``, through the transpose of the exchange of ``length`` queries."""
    bias = cast(Array, inputs.bias)
    dbias = dbias.reshape(dbias.shape[0] * dbias.shape[1], -1, *dbias.shape[4:])
    if grid.ulysses > 1:
        member, like = inputs.place.rank % grid.ulysses, bias.astype(dbias.dtype)
        enter = functools.partial(ulysses.enter_pairwise, grid, length=length // grid.ulysses, member=member)
        (dbias,) = jax.vjp(enter, like)[1](dbias)
    return dbias


def _leave_sinks(grid: Grid, inputs: Inputs, dsinks: Array) -> Array:
    """This device's heads of the gradient in their place, 0 elsewhere."""
    sinks = cast(Array, inputs.sinks)
    if grid.ulysses > 1:
        member, full = inputs.place.rank % grid.ulysses, jnp.zeros(sinks.shape, dsinks.dtype)
        full, dsinks, start = manual.vary_alike(full, dsinks, member * len(dsinks))
        dsinks = lax.dynamic_update_slice_in_dim(full, dsinks, start, 0)
    return dsinks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: Spec, inputs: Inputs) -> tuple[Array, Array]:
    """(out, lse) with its own gradient, inside ``shard_map``.

    All arrays must vary over the same axes, but query, key and value, where ``spec.shared`` has the others.
    """
    out, lse, _ = forward(spec, manual.vary_alike(inputs)[0])
    return out, lse


def _attend_forward(spec: Spec, inputs: Inputs):
    out, lse, saved = forward(spec, manual.vary_alike(inputs)[0])
    out, lse, saved = named(out, lse, saved)
    return (out, lse), (kept(inputs, saved), saved)


def named(out: Array, lse: Array, saved: Saved) -> tuple[Array, Array, Saved]:
    """The results under the name `ATTENTION`, so that a policy of `jax.checkpoint` can keep them.

    With ``jax.checkpoint_policies.save_only_these_names(ring_jax.ATTENTION)`` the backward pass does not run the
    forward ring again: what it needs of it is kept, everything else is computed again.
    """

    def name(tree: Any) -> Any:
        return jax.tree.map(lambda x: checkpoint_name(x, ATTENTION), tree)

    out, lse = name((out, lse))
    if saved.arrays is None:  # the same arrays: kept once
        return out, lse, saved._replace(out=out, lse=lse, lost=name(saved.lost), lost_lse=name(saved.lost_lse))
    return out, lse, name(saved)


def kept(inputs: Inputs, saved: Saved) -> Inputs:
    """The inputs that the backward pass reads: not those of which `saved` has another form."""
    nothing = cast(Any, None)
    return inputs if saved.arrays is None else inputs._replace(query=nothing, key=nothing, value=nothing)


def _attend_backward(spec: Spec, residuals, cotangents):
    inputs, saved = residuals
    grads = backward(spec, *manual.vary_alike(inputs, saved, *cotangents))
    return (as_cotangents(spec, grads, inputs, saved.out.dtype),)


def as_cotangents(spec: Spec, grads: InputGradients, inputs: Inputs, dtype: Any) -> Inputs:
    """In the form and the dtypes of the inputs, of query, key and value ``dtype``; None for what has no gradient.

    Query's, key's and value's are first summed over the manual axes over which these are shared.
    """

    def rounded(x: Array | None, like: Any) -> Array | None:
        return None if x is None else x.astype(like.dtype)

    def summed(x: Array, axes: tuple[str, ...]) -> Array:
        return (lax.psum(x, axes) if axes else x).astype(dtype)

    query, key, value = map(summed, grads[:3], spec.shared)
    args = tuple(map(rounded, grads.score_args, inputs.score_args))
    bias, sinks = rounded(grads.bias, inputs.bias), rounded(grads.sinks, inputs.sinks)
    return Inputs(query, key, value, bias, sinks, args, *cast(Any, (None,) * (len(Inputs._fields) - len(grads))))


attend.defvjp(_attend_forward, _attend_backward)
