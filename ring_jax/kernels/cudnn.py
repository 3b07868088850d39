"""cuDNN's fused attention as a block kernel, where its masks suffice: full rectangles and the aligned causal block.

Under a causal mask a block is, by the positions of its first and last tokens, one of five things, of which each costs
at most one call:

    its own          causal                          (zigzag: both chunks are in order, so the whole block is)
    all before       full
    all behind       nothing
    zigzag, before   all queries x the first half of the keys
    zigzag, behind   the second half of the queries x all keys

cuDNN returns (out, lse) of a block, rounded to the dtype of the inputs; it is merged into the carry here, which costs
about 10 bytes of memory traffic for each entry of the output and step. Its backward pass takes the *global* lse, so
that p is the share in the final softmax, and computes delta from out and dout. Only sum(dout * out) enters: `stand_in`
makes an out of few entries that gives our delta, which is that of the exact output and holds the gradient of lse and
the share of sinks. With cuDNN's own delta the gradient of lse would be lost.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ring_jax.kernels.protocol import Call, Carry, Cotangents, Gradients
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores

__all__ = ["backward_block", "forward_block", "refuses", "tile_size"]

DTYPES = ("bfloat16", "float16")
HOPPER_AND_LATER = ("NVIDIA H", "NVIDIA GH", "NVIDIA B", "NVIDIA GB")
TINY = 2.0**-40


def refuses(call: Call) -> str | None:
    """Why a call is not served."""
    scores, rules = call.scores, call.scores.rules
    largest = 256 if call.device_kind.startswith(HOPPER_AND_LATER) else 128
    one_size = call.head_sizes[0] == call.head_sizes[1] or largest == 256
    sizes = f"head sizes {call.head_sizes[0]} and {call.head_sizes[1]}"
    reasons = (
        (not call.device_kind.startswith(("NVIDIA", *HOPPER_AND_LATER)), f"{call.device_kind} has no cuDNN attention"),
        (jnp.dtype(call.dtype) not in map(jnp.dtype, DTYPES), f"cuDNN takes {' and '.join(DTYPES)} only"),
        (max(call.head_sizes) > largest, f"{sizes}: at most {largest} on {call.device_kind}"),
        (any(size % 8 for size in call.head_sizes), f"{sizes} are no multiples of 8"),
        (not one_size, f"{sizes} differ, which takes Hopper or later"),
        (rules.window is not None, "local_window_size is a mask that it has not at every offset of two blocks"),
        (rules.chunk_size is not None, "chunk_size is a mask that it has not"),
        (call.has_segments, "segment_ids, lengths and padding are masks that it has not"),
        (call.has_mask, "a dense mask would have to be an array of all pairs"),
        (rules.mask_fn is not None or scores.score_fn is not None, "mask_fn and score_fn are Python"),
        (scores.soft_cap is not None, "it has no logits_soft_cap"),
        (scores.dropout_rate > 0, "its dropout_rate draws by place in a block, not by token"),
        (call.has_bias, "bias is read for each block anew"),
        (call.return_lse and jnp.dtype(call.dtype) == jnp.float16, "return_residual with float16: out of range"),
        (call.tile_size is not None, "Schedule(tile_size=...): it has tiles of its own"),
    )
    return next((reason for applies, reason in reasons if applies), _refuses_causal(call))


def _refuses_causal(call: Call) -> str | None:
    """What a causal mask adds: blocks must be aligned."""
    cut = call.strategy in ("ulysses", "usp")
    reasons = (
        (not call.default_positions, "positions were given, so that no block is surely aligned"),
        (call.layout not in ("contiguous", "zigzag"), f"layout={call.layout!r} leaves no block full or causal"),
        (call.strategy == "all_gather", 'strategy="all_gather" leaves no block aligned'),
        (call.lengths[0] != call.lengths[1], "queries and keys of different lengths are not aligned"),
        (cut and call.layout == "zigzag", f'strategy="{call.strategy}" puts zigzag chunks out of order'),
        (call.two_directions, "two_directions cuts blocks in halves that are not aligned"),
    )
    return next((reason for applies, reason in reasons if applies and call.scores.rules.is_causal), None)


def tile_size(length: int, chunk: int, num_heads: int = 1) -> int:
    """A run of consecutive positions: cuDNN chooses its own tiles; `_choose` asks for the runs."""
    return chunk


def forward_block(
    carry: Carry, queries: Queries, keys: Keys, pairs: Pairs, scores: Scores, tiles: tuple[int, int]
) -> Carry:
    """Fold one block of keys and values into the softmax state of every query."""
    shape, head = queries.query.shape, queries.query.shape[-1]
    query, key, value = _heads(queries.query), *_split(keys.kv, head)

    def part(first: int, last: int, is_causal: bool) -> Callable[[Carry], Carry]:
        """Queries from ``first`` on, keys up to ``last``."""

        def fold(carry: Carry) -> Carry:
            out, lse = attention(query[:, :, first:], key[:, :, :last], value[:, :, :last], scores.scale, is_causal)
            rows = (*shape[:4], shape[4] - first)
            return _merge(carry, out.reshape(*rows, out.shape[-1]), lse.reshape(rows), first)

        return fold

    return _choose(queries, keys, scores, tiles, part, carry)


def backward_block(
    sums: Gradients,
    queries: Queries,
    cotangents: Cotangents,
    keys: Keys,
    pairs: Pairs,
    scores: Scores,
    tiles: tuple[int, int],
) -> Gradients:
    """Add one block's part to the gradients, which come from cuDNN rounded to the dtype of the inputs."""
    query = _heads(queries.query)
    key, value = _split(jnp.where(jnp.isfinite(keys.kv), keys.kv, 0), queries.query.shape[-1])
    dout, out = stand_in(cotangents.dout.astype(query.dtype), cotangents.delta)
    lse = jnp.where(jnp.isposinf(cotangents.lse), jnp.finfo(jnp.float32).max / 4, cotangents.lse)
    of_query = query, _heads(out), _heads(dout), lse.reshape(query.shape[:3])

    def part(first: int, last: int, is_causal: bool) -> Callable[[Gradients], Gradients]:
        def add(sums: Gradients) -> Gradients:
            q, o, do, statistics = (x[:, :, first:] for x in of_query)
            k, v = key[:, :, :last], value[:, :, :last]
            dq, dk, dv = attention_gradients(q, k, v, statistics, o, do, scores.scale, is_causal)
            dkv = jnp.concatenate([dk, dv], -1).reshape(*keys.kv.shape[:3], last, -1)
            dq = dq.reshape(*sums.query.shape[:4], -1, dq.shape[-1])
            return sums._replace(
                query=sums.query.at[..., first:, :].add(dq.astype(sums.query.dtype)),
                keys=sums.keys.at[..., :last, :].add(dkv.astype(sums.keys.dtype)),
            )

        return add

    return _choose(queries, keys, scores, tiles, part, sums)


def _heads(x: Array) -> Array:
    """``[R, b, K, G, T, H]`` as cuDNN has it, ``[B, N, T, H]``."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], *x.shape[4:])


def _split(kv: Array, head: int) -> tuple[Array, Array]:
    """Keys and values ``[B, K, S, H]``."""
    kv = kv.reshape(-1, *kv.shape[2:])
    return kv[..., :head], kv[..., head:]


def _choose(queries: Queries, keys: Keys, scores: Scores, tiles: tuple[int, int], part, state: Any) -> Any:
    """The one part of this block that is visible, chosen at run time by where it lies."""
    length = keys.kv.shape[3]
    if not scores.rules.is_causal:
        return part(0, length, False)(state)
    at, of = queries.tokens.positions, keys.tokens.positions
    assert at is not None and of is not None
    parts: list[Any] = [part(0, length, True), part(0, length, False), lambda state: state]
    full, empty = at[0, 0] >= of[0, -1], at[0, -1] < of[0, 0]
    which = jnp.where(at[0, 0] == of[0, 0], 0, jnp.where(full, 1, 2))
    if tiles[1] < length:
        parts += [part(0, length // 2, False), part(length // 2, length, False)]
        which = jnp.where((which == 0) | full | empty, which, jnp.where(of[0, 0] < at[0, 0], 3, 4))
    return lax.switch(which, parts, state)


def _merge(carry: Carry, out: Array, lse: Array, first: int) -> Carry:
    """The carry with a normalized result of its rows from ``first`` on."""
    before = Carry(carry.out[..., first:, :], carry.maximum[..., first:], carry.total[..., first:])
    maximum = jnp.maximum(before.maximum, lse)
    kept, new = jnp.exp(before.maximum - maximum), jnp.exp(lse - maximum)
    after = Carry(
        before.out * kept[..., None] + out.astype(carry.out.dtype) * new[..., None], maximum, before.total * kept + new
    )
    if first == 0:
        return after
    return Carry(
        carry.out.at[..., first:, :].set(after.out),
        carry.maximum.at[..., first:].set(after.maximum),
        carry.total.at[..., first:].set(after.total),
    )


def stand_in(dout: Array, delta: Array) -> tuple[Array, Array]:
    """(dout, out) with sum(dout * out) = delta to float32's precision, for a backward pass that only sums them.

    The three largest entries of dout carry delta, each what rounding left of the one before. A row of zeros whose
    delta is not 0 (the gradient of its lse alone) gets entries too small to be seen in dv.
    """
    columns = jnp.arange(dout.shape[-1])
    alone = (dout == 0).all(-1) & (delta != 0)
    dout = jnp.where(alone[..., None] & (columns < 3), jnp.asarray(TINY, dout.dtype), dout)
    left, rest, out = dout.astype(jnp.float32), delta, jnp.zeros(dout.shape, dout.dtype)
    for _ in range(3):
        here = columns == jnp.abs(left).argmax(-1, keepdims=True)
        entry = jnp.where(here, left, 0).sum(-1)
        value = jnp.where(entry == 0, 0, rest / jnp.where(entry == 0, 1, entry)).astype(dout.dtype)
        out = jnp.where(here & (left != 0), value[..., None], out)  # past the last entry: any column
        left, rest = jnp.where(here, 0, left), rest - entry * value.astype(jnp.float32)
    return dout, out


def attention(query: Array, key: Array, value: Array, scale: float, is_causal: bool) -> tuple[Array, Array]:
    """cuDNN's forward pass of ``[B, N, T, H]``: normalized out, and lse ``[B, N, T]`` in float32."""
    out, lse = _bind("fwd", (query, key, value), (), scale, is_causal, is_training=True)
    return out, lse


def attention_gradients(
    query: Array, key: Array, value: Array, lse: Array, out: Array, dout: Array, scale: float, is_causal: bool
) -> tuple[Array, Array, Array]:
    """Its backward pass: (dq, dk, dv) in the dtype of the inputs, with p = exp(scale * q . k - lse)."""
    dq, dk, dv = _bind("bwd", (query, key, value), (lse, out, dout), scale, is_causal)
    return dq, dk, dv


def _bind(name: str, arrays: tuple, results: tuple, scale: float, is_causal: bool, **more: Any) -> list[Array]:
    """Bind the primitive behind `jax.nn.dot_product_attention`: no public call takes a global lse, or returns it in
    float32. The only place that reads JAX's internals for it."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    primitive = getattr(fused, f"_dot_product_attention_{name}_p_wrapper")
    known = inspect.signature(getattr(fused, f"_dot_product_attention_{name}_impl")).parameters
    if "score_mod" in known:  # since JAX 0.12
        more["score_mod"] = None
    unused = jnp.zeros(0, arrays[0].dtype)
    return primitive.bind(
        *arrays,
        *(unused,) * 7,  # bias, lengths and offsets of segments, page tables
        *results,
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=fused.MaskType.CAUSAL if is_causal else fused.MaskType.NO_MASK,
        layout=fused.AttentionLayout.BNTH.value,
        sliding_window_length=None,
        **more,
    )
