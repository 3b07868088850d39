"""Cross-entropy of a vocabulary that is cut over devices, in chunks of tokens: the logits [T, V] are never formed.

    l = cap(x W)      lse = log sum_v exp(l_v)      nll = lse - l_target
    loss = lse - (1 - a) l_target - a mean_v l_v + z lse^2            (a: label smoothing, z: z-loss)

Each device holds some columns of W and all tokens of its sequence shard; a chunk of tokens costs two small collectives
(the maximum; the sums). The backward pass forms the logits of each chunk again from x, W and the lse that was kept.

Invariant: a position without a target (negative) adds exactly nothing to the loss or to any gradient, even if its
activations are NaN. A target outside the vocabulary makes its loss NaN, and all that it reaches: a number would look
like any other loss.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from models.collectives import wide_ids
from models.sharding import psum
from ring_jax import manual


class LossSpec(NamedTuple):
    """What is known when the loss is traced."""

    vocab_size: int
    axes: tuple[str, ...] = ()  # mesh axes that cut the vocabulary
    chunk: int = 1024
    soft_cap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def _logits(spec: LossSpec, x: Array, weight: Array) -> Array:
    logits = jnp.einsum("nD,DV->nV", x, weight, preferred_element_type=jnp.float32)
    return logits if spec.soft_cap is None else spec.soft_cap * jnp.tanh(logits / spec.soft_cap)


def _chunks(spec: LossSpec, *arrays: Array) -> tuple[Array, ...]:
    """[n, ...] as [chunks, chunk, ...], filled up with zeros; targets (integers) with -1."""
    count = -(-len(arrays[0]) // min(spec.chunk, len(arrays[0])))
    size = -(-len(arrays[0]) // count)

    def cut(x: Array) -> Array:
        fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        widths = [(0, count * size - len(x)), *((0, 0) for _ in x.shape[1:])]
        return jnp.pad(x, widths, constant_values=fill).reshape(count, size, *x.shape[1:])

    return tuple(cut(x) for x in arrays)


def _clean(x: Array, targets: Array) -> Array:
    return jnp.where((targets >= 0)[:, None], x, jnp.zeros((), x.dtype))


def _hits(first: Array, targets: Array, logits: Array) -> Array:
    """True at each target's own column, on the device that holds it."""
    column = lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    return column == (targets - first)[:, None]


def _forward(spec: LossSpec, x: Array, weight: Array, targets: Array, first: Array) -> tuple[Array, Array, Array]:
    """(loss, nll, lse), float32 [n]; 0 where there is no target."""

    def chunk(_, args):
        x, targets = args
        logits = _logits(spec, _clean(x, targets), weight)
        top = lax.stop_gradient(logits.max(-1))
        top = lax.pmax(top, spec.axes) if spec.axes else top
        own = jnp.where(_hits(first, targets, logits), logits, 0).sum(-1)
        sums = psum(jnp.stack([jnp.exp(logits - top[:, None]).sum(-1), own, logits.sum(-1)]), *spec.axes)
        # No device holds the column of a target outside the vocabulary: NaN here makes its loss and its gradients NaN.
        lse = jnp.where(targets < spec.vocab_size, top + jnp.log(sums[0]), jnp.nan)
        smooth = spec.label_smoothing
        loss = lse - (1 - smooth) * sums[1] - smooth * sums[2] / spec.vocab_size + spec.z_loss * jnp.square(lse)
        valid = targets >= 0
        return None, (jnp.where(valid, loss, 0), jnp.where(valid, lse - sums[1], 0), lse)

    _, results = lax.scan(chunk, None, _chunks(spec, x, targets))
    loss, nll, lse = (y.reshape(-1)[: len(x)] for y in results)
    return loss, nll, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(spec: LossSpec, x: Array, weight: Array, targets: Array, first: Array) -> tuple[Array, Array]:
    return _forward(spec, x, weight, targets, first)[:2]


def _losses_forward(spec: LossSpec, x: Array, weight: Array, targets: Array, first: Array):
    loss, nll, lse = _forward(spec, x, weight, targets, first)
    return (loss, nll), (x, weight, targets, first, lse)


def _losses_backward(spec: LossSpec, residuals, cotangents):
    """dx is this device's part: what its columns of W add."""
    x, weight, targets, first, lse = residuals
    dloss, dnll = cotangents

    def chunk(dweight, args):
        x, targets, lse, dloss, dnll = args
        x = _clean(x, targets)
        logits = _logits(spec, x, weight)
        p, hits = jnp.exp(logits - lse[:, None]), _hits(first, targets, logits)
        smooth = spec.label_smoothing
        dl = p * (1 + 2 * spec.z_loss * lse[:, None]) - (1 - smooth) * hits - smooth / spec.vocab_size
        dl = dl * dloss[:, None] + (p - hits) * dnll[:, None]
        dl = dl if spec.soft_cap is None else dl * (1 - jnp.square(logits / spec.soft_cap))
        dl = jnp.where((targets >= 0)[:, None], dl, 0)
        dl = dl.astype(x.dtype)  # operands of the compute type; the sums are float32
        dx = jnp.einsum("nV,DV->nD", dl, weight, preferred_element_type=jnp.float32).astype(x.dtype)
        return dweight + jnp.einsum("nD,nV->DV", x, dl, preferred_element_type=jnp.float32), dx

    start = manual.full_like(weight.shape, 0, jnp.float32, weight)
    dweight, dx = lax.scan(chunk, start, _chunks(spec, x, targets, lse, dloss, dnll))
    return dx.reshape(-1, x.shape[-1])[: len(x)], dweight.astype(weight.dtype), None, None


_losses.defvjp(_losses_forward, _losses_backward)


@jax.named_scope("cross_entropy")
def cross_entropy(
    spec: LossSpec, x: Array, weight: Array, targets: Array, first: Array | int = 0
) -> tuple[Array, Array]:
    """Loss and negative log-likelihood of every target, in nats.

    Args:
      spec: how the loss is made.
      x: activations [n, D] of this device's tokens, after the final norm.
      weight: this device's columns [D, v] of the output head, in the type of ``x``.
      targets: [n] integers; a negative one is ignored, one of ``spec.vocab_size`` or more gives NaN.
      first: token id of the first column.

    Returns:
      (loss, nll), float32 [n], equal on all devices that cut the vocabulary; 0 where there is no target.
    """
    x, weight, first = manual.vary_alike(x, weight, jnp.asarray(first, jnp.int32))
    return _losses(spec, x, weight, wide_ids(targets), first)
