"""Drop-in for the PyPI package `ringattention` 0.1.2, which cannot be imported on current JAX: same names, same calls.

What always holds: an argument of that package has the meaning that it had, or is refused by name; the differences that
remain are listed in `ringattention`, each where the older package lost something. Code in the older package's style
keeps its ``shard_map`` and its specs; only the import changes:

    from ring_jax.compat import blockwise_feedforward, ringattention
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from ring_jax import layouts, manual, ring_attention

_BLOCKWISE = (
    "causal_block_size",
    "deterministic",
    "dropout_rng",
    "attn_pdrop",
    "query_chunk_size",
    "key_chunk_size",
    "policy",
    "dtype",
    "precision",
    "prevent_cse",
)


def ringattention(
    q: Float[Array | np.ndarray, "B T N H"],
    k: Float[Array | np.ndarray, "B S K H"],
    v: Float[Array | np.ndarray, "B S K Hv"],
    attn_bias: Any,
    segment_ids: Any,
    cache_idx: Any,
    axis_name: str,
    float32_logits: bool,
    blockwise_kwargs: Mapping[str, Any],
) -> Float[Array, "B T N Hv"]:
    """Attend exactly over a contiguous sequence sharded over ``axis_name``; call it inside `jax.shard_map`.

        out[t] = sum_j softmax_j(q[t] . k[j] / sqrt(H) + attn_bias[j]) v[j],   over the visible keys j of all devices

    Differences from the older package, all of them where it lost something: ``attn_bias`` is added, also where it is
    positive and attention is causal (there it was dropped by a minimum), and has a gradient; key/value heads may be
    fewer than query heads; dropout drops weights after the softmax and divides the rest by 1 - attn_pdrop, as Flax does
    (there scores were dropped, the rest was normalized again); a query that sees nothing gives 0. Any local length
    works, and so does ``check_vma=True``. As there, rows and heads on other devices may draw alike under one key if
    ``check_vma=False``.

    Args:
      q, k, v: this device's shards, in the contiguous order.
      attn_bias: ``[B or 1, N or 1, 1, S]`` over the keys of the whole sequence, the same on all devices; or None.
      segment_ids: int ``[B, S]`` over the whole sequence, the same on all devices; or None. 0 is a segment too.
      cache_idx: None; other values are refused.
      axis_name: the mesh axis.
      float32_logits: no effect: logits are always float32.
      blockwise_kwargs: ``causal_block_size`` (needed): None is bidirectional, 1 causal, n causal between blocks of n
        tokens and bidirectional inside them. ``attn_pdrop`` with ``dropout_rng``, unless ``deterministic``.
        ``precision``: None or the default. Accepted because they cannot change the numbers: ``query_chunk_size``,
        ``key_chunk_size``, ``policy``, ``prevent_cse`` (tiles and recomputation are chosen here) and ``dtype`` (of the
        bias, which is float32 here).

    Returns:
      ``[B, T, N, Hv]`` in the dtype of v.

    Raises:
      NotImplementedError: cache_idx, or a precision.
      TypeError: a blockwise keyword that is missing or unknown. ValueError: shapes that do not fit.

    Example:
      >>> from functools import partial
      >>> mesh, spec = ring_jax.make_mesh(devices=jax.devices()[:1]), jax.P(None, "sequence")
      >>> attend = partial(ringattention, attn_bias=None, segment_ids=None, cache_idx=None, axis_name="sequence",
      ...     float32_logits=True, blockwise_kwargs={"causal_block_size": 1})
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> jax.shard_map(lambda q, k, v: attend(q, k, v), mesh=mesh, in_specs=spec, out_specs=spec)(x, x, x).shape
      (1, 4, 2, 8)

    Reference:
      Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, section 3.
    """
    if cache_idx is not None:
        raise NotImplementedError(
            "cache_idx: it asks for queries in the middle of a cache, which this call has no place for; give them "
            "their positions with ring_jax.ring_attention(..., positions=(query's, keys'), layout=None)"
        )
    options = _check_blockwise(blockwise_kwargs)
    lengths = q.shape[1], k.shape[1]
    dropout = _dropout(options)
    if dropout:  # whatever else the query is cut over has draws of its own
        dropout["batch_axis"] = ("data", *manual.uncounted(jnp.asarray(q), axis_name, "data", "tensor"))
    keywords: dict[str, Any] = {"axis_name": axis_name} | dropout
    keywords |= _mask(options["causal_block_size"], axis_name, lengths, bool(dropout))
    if segment_ids is not None:
        keywords["segment_ids"] = _own_segments(segment_ids, axis_name, lengths)
    if attn_bias is not None:
        total = k.shape[1] * manual.axis_size(axis_name)
        if attn_bias.ndim != 4 or attn_bias.shape[2:] != (1, total):
            raise ValueError(
                f"attn_bias must have shape [batch or 1, heads or 1, 1, {total}], over the keys of the whole sequence; "
                f"got {attn_bias.shape}. For one that depends on the query use ring_jax.ring_attention(bias=...)"
            )
        keywords["bias"] = attn_bias
    dtype = jnp.result_type(q, k, v)
    q, k, out_dtype = q.astype(dtype), k.astype(dtype), v.dtype
    out: Any = ring_attention(q, k, v.astype(dtype), **keywords)
    return out.astype(out_dtype)


ringattention_jax = ringattention


def _check_blockwise(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise for what is missing, unknown or refused; the mapping otherwise."""
    for name in given:
        if name not in _BLOCKWISE:
            raise TypeError(layouts.unknown_name("blockwise_kwargs key", name, _BLOCKWISE))
    if "causal_block_size" not in given:
        raise TypeError("blockwise_kwargs needs causal_block_size: None is bidirectional, 1 is causal")
    size = given["causal_block_size"]
    if size is not None and not (isinstance(size, int) and size >= 1):
        raise ValueError(f"causal_block_size must be None or an integer of at least 1; got {size!r}")
    precision = given.get("precision")
    if precision not in (None, lax.Precision.DEFAULT, "default", "fastest", "bfloat16"):
        raise NotImplementedError(
            f"precision={precision}: the products of one attention call have one precision; leave it None (scores and "
            'sums are float32) and set jax.default_matmul_precision("highest") around the whole step'
        )
    return given


def _dropout(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords for ``attn_pdrop``; none where it does nothing."""
    rate, rng = options.get("attn_pdrop", 0.0), options.get("dropout_rng")
    if rate == 0 or options.get("deterministic", True):
        return {}
    if rng is None:
        raise ValueError(f"dropout_rng is needed for attn_pdrop={rate}; or deterministic=True")
    return {"dropout_rate": rate, "dropout_seed": jax.random.bits(rng, dtype=jnp.uint32)}


def _mask(block: int | None, axis_name: str, lengths: tuple[int, int], dropout: bool) -> dict[str, Any]:
    """The keywords for ``causal_block_size``."""
    if block is None or block == 1:
        return {"is_causal": block == 1}
    if dropout:  # draws are by position, so every token needs one of its own
        return {"mask_fn": _block_causal(block)}
    # Causal between blocks is causal in the number of the block; of that rule the ring skips what nobody sees, of a
    # mask_fn it cannot. As positions, block numbers are not in the contiguous order: nothing is promised about them.
    rank = manual.axis_index(axis_name)
    blocks = tuple((rank * n + jnp.arange(n, dtype=jnp.int32)) // block for n in lengths)
    return {"is_causal": True, "positions": blocks, "layout": None}


@functools.cache  # one function for each size: a new one in every call would be traced and compiled anew
def _block_causal(block: int) -> Callable[..., Any]:
    return lambda query, key, *_: query // block >= key // block


def _own_segments(segment_ids: Any, axis_name: str, lengths: tuple[int, int]) -> tuple[Array, Array]:
    """This device's part of the ids of the whole sequence, for its queries and its keys."""
    rank, size = manual.axis_index(axis_name), manual.axis_size(axis_name)
    if segment_ids.ndim != 2 or any(n * size != segment_ids.shape[1] for n in lengths):
        raise ValueError(
            f"segment_ids must have shape [batch, {lengths[1] * size}], the whole sequence and the same on all devices "
            f"(PartitionSpec(batch axes, None)); got {segment_ids.shape}"
        )
    # 0 is padding in ring_jax, an ordinary segment in the older package: make room for it.
    ids = jnp.where(segment_ids >= 0, segment_ids + 1, segment_ids)
    query, key = (lax.dynamic_slice_in_dim(ids, rank * n, n, axis=1) for n in lengths)
    return query, key


def blockwise_feedforward(
    feedforward: Callable[..., Array],
    inputs: Float[Array | np.ndarray, "B T D"],
    chunk_size: int,
    static_argnums: Any = (1,),
    policy: Any = jax.checkpoint_policies.nothing_saveable,
    pre_remat: bool = True,
) -> Float[Array, "B T Do"]:
    """Run a feed-forward block over the tokens in a scan, so that its wide activations never exist for all of them.

    Step i of n = T / chunk_size computes tokens i, i + n, i + 2n, ...: ``chunk_size`` tokens at a time.
    Whatever acts on each token alone gives what ``feedforward(inputs)`` gives; dropout is drawn anew in every step.

    Args:
      feedforward: a Linen module (its parameters are shared by all steps), or any function or NNX module without
        state; called with one array ``[B, chunk_size, D]``.
      inputs: ``[B, T, D]``, T a multiple of chunk_size. Inside `shard_map`, T is the local length.
      chunk_size: tokens a step.
      static_argnums: no effect: feedforward is called with one array.
      policy: what `jax.checkpoint` keeps, where it is applied here.
      pre_remat: True when feedforward is wrapped in a checkpoint already (or should not be); False wraps it here.

    Returns:
      ``[B, T, Do]``.

    Raises:
      ValueError: a length that chunk_size does not divide.

    Example:
      >>> blockwise_feedforward(jnp.tanh, jnp.ones((1, 8, 2)), 4, pre_remat=False).shape
      (1, 8, 2)

    Reference:
      Liu and Abbeel, Blockwise Parallel Transformer, arXiv:2305.19370, section 3.
    """
    from ring_jax import flax  # here, so that `ringattention` works where Flax is not installed

    del static_argnums
    return flax.blockwise_feedforward(feedforward, inputs, chunk_size, policy=policy, pre_remat=pre_remat)
