"""Ring attention inside ``shard_map``: keys and values travel, queries stay.

Device r holds queries of shard r. At ring step s it computes with the key/value block of shard r - s while that block
is already on its way to device r + 1 (four devices; the number is the shard whose keys the device holds):

    step     device 0   device 1   device 2   device 3
      0          0          1          2          3
      1          3          0          1          2
      2          2          3          0          1
      3          1          2          3          0

N devices need N - 1 hops: the last step sends nothing. Inside this file T and S are *local* lengths.

Invariant 1: positions and segment ids of the keys travel with K and V (default positions are derived from the number
of the shard that the block came from). Invariant 3: *dK and dV ride with their K and V and come home with them.* The
backward pass computes scores again from the global lse and the final output; it keeps q, k, v, out, lse (of a rounded
out also what was lost) and nothing per step. A backward pass that used one step's own lse, or did not send dK and dV
home, would have the right loss.

Why the loop looks as it does: a rolled `lax.scan` with the last step peeled off keeps temporaries constant in N; the
hop is issued before the step's compute, from values that the kernel only reads, so that it can run meanwhile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from ring_jax import layouts, manual, options, softmax
from ring_jax.kernels import xla
from ring_jax.masks import Tokens
from ring_jax.options import TokenIds


class RingSpec(NamedTuple):
    """What is known when the ring is traced."""

    axis_name: str
    scale: float
    is_causal: bool
    layout: str | None


class Inputs(NamedTuple):
    """The arrays of one call, as the caller gave them; ``rank`` is the device's number on the ring."""

    query: Array  # [B, T, N, H]
    key: Array  # [B, S, K, H]
    value: Array  # [B, S, K, Hv]
    query_tokens: Tokens
    key_tokens: Tokens
    rank: Array


type _Block = tuple[Array, Tokens]


def ring_attention(
    query: Float[Array | np.ndarray, "B T N H"],
    key: Float[Array | np.ndarray, "B S K H"],
    value: Float[Array | np.ndarray, "B S K Hv"],
    bias: Any = None,
    mask: Any = None,
    *,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Any = None,
    chunk_size: int | None = None,
    segment_ids: TokenIds = None,
    positions: TokenIds = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    mask_fn: Any = None,
    score_fn: Any = None,
    score_args: tuple[Any, ...] = (),
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    layout: str | None = "contiguous",
    implementation: str | None = None,
    return_residual: bool = False,
    axis_name: str = "sequence",
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attend exactly over a sequence that is sharded over a mesh axis; call it inside `jax.shard_map`.

        out[t] = sum_j exp(scale * q[t] . k[j] - lse[t]) v[j],   over all visible keys j on all devices of the axis

    Keys and values go round the axis with `lax.ppermute`, one hop a step; each step folds its block into an online
    softmax. Works with ``check_vma=True``. Where the axis is not manual it counts as size 1.

    Args:
      query: this device's shard ``[B, T, N, H]``, float16, bfloat16, float32 or float64.
      key: shard ``[B, S, K, H]``; N must be a multiple of K. Key/value heads are never expanded.
      value: shard ``[B, S, K, Hv]``.
      scale: a Python number; None means 1/sqrt(H).
      is_causal: a query sees keys at its own position and before.
      segment_ids: int shard ``[B, S]`` or ``[S]``, or a pair (query's, keys'). Attention stays inside a segment. 0 is
        padding: such a token sees and is seen by nothing, gives exactly 0, gets no gradient, and may hold NaN.
      positions: int shard, shaped like segment_ids; None derives them from ``layout`` and the device's place.
      layout: order of the global sequence, see `ring_jax.permutation`; None promises nothing (then pass positions).
      implementation: ``"xla"``; None picks the best that supports the call.
      return_residual: also return the log-sum-exp.
      axis_name: the mesh axis that the sequence is sharded over.
      bias, mask, query_seq_lengths, key_value_seq_lengths, local_window_size, chunk_size, logits_soft_cap, sinks,
        mask_fn, score_fn, score_args, dropout_rate, dropout_seed: refused by name until they are built.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype, or ``(out, lse)`` with lse ``[B, T, N]`` in float32 (float64 for
      float64 inputs). Both are differentiable. A query that sees nothing gives 0 and lse -inf. Scores, softmax
      statistics and the accumulators of out, dq, dk and dv are float32.

    Raises:
      ValueError, TypeError: shapes, dtypes or names that do not fit; before any device work.
      NotImplementedError: an option that is not built yet, by name.

    Example:
      >>> from functools import partial
      >>> mesh = ring_jax.make_mesh(devices=jax.devices()[:1])
      >>> spec = jax.P(None, "sequence")
      >>> attend = jax.shard_map(partial(ring_attention, is_causal=True), mesh=mesh, in_specs=spec, out_specs=spec)
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> attend(x, x, x).shape
      (1, 4, 2, 8)

    Reference:
      Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, section 3; the backward pass from the
      global lse: Dao, FlashAttention-2, arXiv:2307.08691, section 3.1.2.
    """
    keywords = dict(locals())
    for name in ("query", "key", "value", "axis_name"):
        del keywords[name]
    options.check(**keywords)
    options.check_arrays(query, key, value)
    spec = make_spec(query, keywords, axis_name)
    inputs = make_inputs(query, key, value, keywords)._replace(rank=manual.axis_index(axis_name))
    check_local_lengths(inputs, spec)
    # Positions are tied to the query: values that depend on positions alone would be computed once for a whole scan
    # over layers and kept, one mask for every tile.
    tied = lax.optimization_barrier((inputs.query, inputs.query_tokens, inputs.key_tokens, inputs.rank))
    inputs = Inputs(tied[0], inputs.key, inputs.value, *tied[1:])
    out, lse = _attend(spec, *manual.vary_alike(*inputs))
    return (out, lse) if return_residual else out


def make_spec(query: Any, keywords: dict[str, Any], axis_name: str) -> RingSpec:
    """The static part of a call whose keywords have been checked."""
    scale = keywords["scale"]
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return RingSpec(axis_name, scale, bool(keywords["is_causal"]), keywords["layout"])


def make_inputs(query: Any, key: Any, value: Any, keywords: dict[str, Any]) -> Inputs:
    """The arrays of a call, with positions dropped where no rule reads them."""
    lengths = query.shape[1], key.shape[1]
    positions = options.as_pair("positions", keywords["positions"], query.shape[0], lengths)
    segments = options.as_pair("segment_ids", keywords["segment_ids"], query.shape[0], lengths)
    if not keywords["is_causal"]:
        positions = None, None
    query_tokens, key_tokens = (Tokens(*pair) for pair in zip(positions, segments, strict=True))
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    return Inputs(query, key, value, query_tokens, key_tokens, jnp.int32(0))


def check_local_lengths(inputs: Inputs, spec: RingSpec) -> None:
    """Raise ValueError for a shard that zigzag cannot cut into its two chunks."""
    num_shards = manual.axis_size(spec.axis_name)
    if spec.layout == "zigzag" and num_shards > 1:
        for name, x in (("query", inputs.query), ("key", inputs.key)):
            layouts.check_length("zigzag", x.shape[1] * num_shards, num_shards, f"{name} length")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: RingSpec, query, key, value, query_tokens, key_tokens, rank):
    out, lse, _ = forward(spec, Inputs(query, key, value, query_tokens, key_tokens, rank))
    return out, lse


def _attend_forward(spec: RingSpec, *arrays):
    inputs = Inputs(*arrays)
    out, lse, lost = forward(spec, inputs)
    return (out, lse), (inputs, out, lse, lost)


def _attend_backward(spec: RingSpec, residuals, cotangents):
    return (*backward(spec, *residuals, *cotangents), None, None, None)


_attend.defvjp(_attend_forward, _attend_backward)


class _Layout(NamedTuple):
    """Sizes of the kernel's axes: R rows of masks, b batch rows for each, K key/value heads, G queries for each."""

    rows: int
    kv_heads: int

    def tokens(self, x: Array, heads_axis_is_grouped: bool) -> Array:
        """``[B, T, heads, ...]`` to ``[R, b, K, (G,) T, ...]``."""
        batch, length, heads = x.shape[:3]
        group = (heads // self.kv_heads,) if heads_axis_is_grouped else ()
        x = x.reshape(self.rows, batch // self.rows, length, self.kv_heads, *group, *x.shape[3:])
        return jnp.moveaxis(x, 2, 3 + len(group))

    def heads(self, x: Array, heads_axis_is_grouped: bool) -> Array:
        """Undo `tokens`."""
        x = jnp.moveaxis(x, 3 + heads_axis_is_grouped, 2)
        rest = x.shape[4 + heads_axis_is_grouped :]
        return x.reshape(x.shape[0] * x.shape[1], x.shape[2], -1, *rest)


class _Ring(NamedTuple):
    """One call in the kernel's layout."""

    spec: RingSpec
    inputs: Inputs
    layout: _Layout
    query: Array  # [R, b, K, G, T, H]
    query_tokens: Tokens  # [R, T]
    block: _Block  # [R, b, K, S, H+Hv] and [R, S]
    size: int

    def hop(self, tree):
        """Every device sends to its right neighbor: one full cycle, the same on all devices."""
        if self.size == 1:
            return tree
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return lax.ppermute(tree, self.spec.axis_name, pairs)

    def key_tokens(self, tokens: Tokens, step: Array | int) -> Tokens:
        """Tokens of the block that is here at ``step``, with positions even where none travel."""
        if self.spec.is_causal and tokens.positions is None:
            source = (self.inputs.rank - step) % self.size
            tokens = tokens._replace(positions=self.default_positions(source, self.inputs.key.shape[1]))
        return tokens

    def default_positions(self, shard: Array, length: int) -> Array:
        positions = layouts.shard_positions(self.spec.layout or "contiguous", shard, length, self.size)
        return jnp.broadcast_to(positions, (self.layout.rows, length))

    def kernel_options(self) -> dict[str, Any]:
        lengths = self.inputs.query.shape[1], self.inputs.key.shape[1]
        chunks = (layouts.chunk_length(self.spec.layout, n, self.size) for n in lengths)
        side_by_side = self.query.shape[1] * self.inputs.query.shape[2]
        tiles = tuple(xla.tile_size(n, chunk, side_by_side) for n, chunk in zip(lengths, chunks, strict=True))
        return {"scale": self.spec.scale, "is_causal": self.spec.is_causal, "tiles": tiles}


def _open(spec: RingSpec, inputs: Inputs) -> _Ring:
    """Bring the caller's arrays into the kernel's layout; padding is zeroed so that nothing in it can matter."""
    token_arrays = jax.tree.leaves((inputs.query_tokens, inputs.key_tokens))
    layout = _Layout(max([1, *(x.shape[0] for x in token_arrays)]), inputs.key.shape[2])
    query_tokens, key_tokens = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (layout.rows, x.shape[1])), (inputs.query_tokens, inputs.key_tokens)
    )

    def zero_padding(x: Array, tokens: Tokens) -> Array:
        if tokens.segment_ids is None:
            return x
        return jnp.where((tokens.segment_ids != 0)[..., None, None], x, jnp.zeros((), x.dtype))

    query = zero_padding(inputs.query, inputs.query_tokens)
    kv = zero_padding(jnp.concatenate([inputs.key, inputs.value], -1), inputs.key_tokens)
    block = layout.tokens(kv, False), key_tokens
    ring = _Ring(
        spec, inputs, layout, layout.tokens(query, True), query_tokens, block, manual.axis_size(spec.axis_name)
    )
    if spec.is_causal and query_tokens.positions is None:
        positions = ring.default_positions(inputs.rank, inputs.query.shape[1])
        ring = ring._replace(query_tokens=query_tokens._replace(positions=positions))
    return ring


def forward(spec: RingSpec, inputs: Inputs) -> tuple[Array, Array, Array | None]:
    """(out, lse, lost) of this device's queries over the keys of the whole ring.

    out ``[B,T,N,Hv]`` and lse ``[B,T,N]``; lost is what rounding out to half precision took away, itself in half
    precision, or None where out is not rounded. The backward pass wants the exact output: delta from the rounded one
    makes the error of dq up to 2.4 times that of `jax.nn.dot_product_attention`.
    """
    ring = _open(spec, inputs)
    dtype = jnp.promote_types(ring.query.dtype, jnp.float32)
    kernel = ring.kernel_options()

    def attend(carry: xla.Carry, block: _Block, step: Array | int) -> xla.Carry:
        kv, tokens = block
        return xla.forward_block(carry, ring.query, kv, ring.query_tokens, ring.key_tokens(tokens, step), **kernel)

    def ring_step(state, step):
        carry, block = state
        arriving = ring.hop(block)
        return (attend(carry, block, step), arriving), None

    shape = (*ring.query.shape[:-1], inputs.value.shape[-1])
    carry = xla.Carry(
        manual.full_like(shape, 0, dtype, ring.query),
        manual.full_like(shape[:-1], xla.EMPTY, dtype, ring.query),
        manual.full_like(shape[:-1], 0, dtype, ring.query),
    )
    (carry, block), _ = lax.scan(ring_step, (carry, ring.block), jnp.arange(ring.size - 1))
    carry = attend(carry, block, ring.size - 1)
    exact, lse = (ring.layout.heads(x, True) for x in softmax.normalize(carry.out, carry.maximum, carry.total))
    out = exact.astype(inputs.query.dtype)
    lost = None if out.dtype == exact.dtype else (exact - out.astype(dtype)).astype(out.dtype)
    return out, lse, lost


def backward(
    spec: RingSpec, inputs: Inputs, out: Array, lse: Array, lost: Array | None, dout: Array, dlse: Array
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in the dtypes of q, k, v.

    Step 0 works on the device's own keys: their part of dK and dV stays here. From step 1 on, what a step has added
    travels one hop behind the step that adds to it next, and after the last step it is home: N - 1 hops of K and V,
    N - 1 of dK and dV, none of which waits for compute except the last.
    """
    ring = _open(spec, inputs)
    dtype = jnp.promote_types(ring.query.dtype, jnp.float32)
    kernel = ring.kernel_options()
    seen = lse > -jnp.inf
    dout = jnp.where(seen[..., None], dout, jnp.zeros((), dout.dtype))
    exact = out if lost is None else out.astype(dtype) + lost.astype(dtype)
    delta = jnp.sum(dout.astype(dtype) * exact, -1) - jnp.where(seen, dlse, 0)
    stats = (ring.layout.tokens(x, True) for x in (dout, jnp.where(seen, lse, 0), delta))
    fixed = (ring.query, *stats)

    def attend(dq: Array, block: _Block, step: Array | int) -> tuple[Array, Array]:
        (query, dout_, lse_, delta_), (kv, tokens) = fixed, block
        tokens = ring.key_tokens(tokens, step)
        return xla.backward_block(dq, query, kv, dout_, lse_, delta_, ring.query_tokens, tokens, **kernel)

    def send_keys(state, step):
        dq, block = state
        arriving = ring.hop(block)
        dq, dkv = attend(dq, block, step)
        return (dq, arriving), dkv

    def send_both(state, step):
        dq, block, pending = state
        arriving, pending = ring.hop((block, pending))
        dq, dkv = attend(dq, block, step)
        return (dq, arriving, pending + dkv), None

    dq, block = manual.full_like(ring.query.shape, 0, dtype, ring.query), ring.block
    if ring.size == 1:
        dq, home = attend(dq, block, 0)
    else:
        # Steps 0 and 1 send keys alone, steps 2 to N - 2 both, step N - 1 gradients alone.
        (dq, block), own = lax.scan(send_keys, (dq, block), jnp.arange(min(2, ring.size - 1)))
        arriving: Array | float = 0.0
        if ring.size > 2:
            (dq, block, pending), _ = lax.scan(send_both, (dq, block, own[1]), jnp.arange(2, ring.size - 1))
            arriving = ring.hop(pending)
        dq, dkv = attend(dq, block, ring.size - 1)
        home = own[0] + ring.hop(arriving + dkv)
    dq = ring.layout.heads(dq, True).astype(inputs.query.dtype)
    dk, dv = jnp.split(ring.layout.heads(home, False).astype(inputs.key.dtype), [inputs.key.shape[-1]], axis=-1)
    return dq, dk, dv
