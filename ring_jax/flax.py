"""Adapters for Flax, NNX and Linen. The only file of the package that imports Flax, which is no dependency of it.

Invariant 6 at Flax's interface: *every argument that Flax passes is honored, or refused by name with the reason and
the alternative; nothing is ignored.* Flax passes a dense ``[B, N, T, S]`` mask wherever a model has any mask at all; at
the lengths that need a ring it does not fit, so it is refused unless asked for, and `TokenMask` goes in its place.

Invariant 1 in `RingAttention`: *the rotary angle of a token and its place in the causal order come from one position*,
never from where the token sits in the array. If the two were derived apart, a zigzag layout would train, to a loss a
little too high.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Float

from ring_jax import arguments, dot_product_attention, layouts, rotary

_OWN = "set it on the call of the Flax module, which passes it on"
_NOT_OPTIONS = {
    "query": _OWN,
    "key": _OWN,
    "value": _OWN,
    "bias": "it belongs to one call; call the function that attention_fn returns with bias=",
    "mask": "pass TokenMask(segment_ids=..., positions=...), or a dense mask with dense_masks=True, as Flax's mask=",
    "dropout_rate": "set dropout_rate on Flax's module: it passes the rate and a key",
    "dropout_seed": "set dropout_rate on Flax's module: the seed is drawn from the key that it passes",
    "return_residual": "Flax's modules take one array back; call ring_jax.dot_product_attention for the lse",
}
"""Keywords of `dot_product_attention` that cannot be fixed in advance -> what to do instead."""

_EINSUM = (
    "scores are formed tile by tile with their own gradient, which a replaced product would not have; leave it out"
)
_REFUSED = {
    "precision": (
        "the products of one attention call have one precision; leave it None (scores and sums are float32) and set "
        'jax.default_matmul_precision("highest") around the whole step where more is wanted'
    ),
    "module": "sow_weights needs the weights [B, N, T, S], never formed here; use Flax's attention on a short input",
    "einsum_dot_general": _EINSUM,
    "qk_attn_weights_einsum": _EINSUM,
    "attn_weights_value_einsum": _EINSUM,
}
"""Arguments of Flax's attention functions that only their default is accepted for -> why."""

_DENSE_MASK = (
    "mask: a dense mask [B, N, T, S] is refused, it has T * S entries. Use is_causal=True, segment_ids=, "
    "local_window_size= or mask_fn= of attention_fn, or pass mask=TokenMask(segment_ids=..., positions=...) to the "
    "Flax module; attention_fn(dense_masks=True) passes the dense mask on (cut over the queries)"
)


class TokenMask(NamedTuple):
    """What `ring_jax` needs in the place of a dense mask: pass it as ``mask=`` to a Flax attention module.

    Flax hands its ``mask`` through untouched, so a model that already passes one needs no other change.

    Args:
      segment_ids: int ``[B, S]`` or ``[S]``, or a pair; see `ring_jax.dot_product_attention`.
      positions: int, shaped like segment_ids; None derives them from the layout.

    Example:
      >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=attention_fn(), decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 4, 8)), mask=TokenMask(segment_ids=jnp.array([1, 1, 2, 2]))).shape
      (1, 4, 8)
    """

    segment_ids: Any = None
    positions: Any = None


def attention_fn(*, is_causal: bool = False, dense_masks: bool = False, **options: Any) -> Callable[..., Array]:
    """Make the ``attention_fn`` of `nnx.MultiHeadAttention` or Linen's `nn.MultiHeadDotProductAttention`.

    The function that is returned has the parameters of both of Flax's own, on arrays ``[B, T, N, H]``:

    - dtype, promote_dtype, bias, is_causal, input_positions (as ``positions``) and the dropout arguments are honored;
      float32 softmax is what happens with any ``force_fp32_for_softmax``.
    - dropout: the seed is drawn from Flax's key. With ``broadcast_dropout`` (Flax's default) Flax drops the same pairs
      in every batch row and head; here each has draws of its own. Rate and scaling are the same.
    - mask: `TokenMask`. A query that sees nothing gives 0, where Flax gives the mean of the values.
    - refused: precision other than the default, sow_weights, replaced einsums, dense masks (see dense_masks).

    Args:
      is_causal: always causal; otherwise as Flax's call says.
      dense_masks: pass dense masks on. They are in the order of the layout, True (or nonzero) attends.
      **options: any keyword of `ring_jax.dot_product_attention` that is the same in every call: ``mesh``, ``layout``,
        ``strategy``, ``local_window_size``, ``logits_soft_cap``, ``mask_fn``, ``sequence_axis``, ...; also
        ``segment_ids`` and ``positions``, where the function is made inside the step.

    Returns:
      A function with a real signature: Linen reads it to decide what to pass.

    Raises:
      TypeError: an option that `dot_product_attention` does not have, or that belongs to one call. The returned
        function raises NotImplementedError for what is refused, and as `ring_jax.dot_product_attention` does.

    Example:
      >>> causal = attention_fn(is_causal=True, layout="contiguous")
      >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=causal, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 4, 8))).shape
      (1, 4, 8)

    Reference:
      Flax 0.12, `flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention`.
    """
    _check_options(options)
    always_causal = is_causal

    def attend(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        *,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        input_positions: Any = None,
    ) -> Array:
        _refuse(
            precision=None if _is_default(precision) else precision,
            module=module,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        del broadcast_dropout, force_fp32_for_softmax  # see the docstring of attention_fn
        query, key, value = _promote(promote_dtype, dtype, query, key, value)
        keywords = options | {"is_causal": always_causal or is_causal}
        if isinstance(mask, TokenMask):
            _add(keywords, segment_ids=mask.segment_ids, positions=mask.positions)
        elif mask is not None and not dense_masks:
            raise NotImplementedError(_DENSE_MASK)
        elif mask is not None:
            keywords["mask"] = _four_dimensions(jnp.asarray(mask)).astype(bool)
        _add(keywords, positions=input_positions, bias=None if bias is None else _four_dimensions(jnp.asarray(bias)))
        if not deterministic:
            keywords |= _dropout(dropout_rate, dropout_rng)
        out: Any = dot_product_attention(query, key, value, **keywords)
        return out

    return attend


def _check_options(options: dict[str, Any]) -> None:
    """Raise TypeError for a name that `dot_product_attention` lacks, or that belongs to one call."""
    known = [name for name in inspect.signature(dot_product_attention).parameters if name not in _NOT_OPTIONS]
    for name in options:
        if name in _NOT_OPTIONS:
            raise TypeError(f"{name} is no option of the adapter: {_NOT_OPTIONS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise TypeError(f"{name} is no option of the adapter: {hint}choose from {', '.join(known)}")


def _is_default(precision: Any) -> bool:
    if isinstance(precision, (tuple, list)):
        return all(_is_default(x) for x in precision)
    return precision in (None, lax.Precision.DEFAULT, "default", "fastest", "bfloat16")


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            shown = f"{name}={value}" if name == "precision" else name
            raise NotImplementedError(f"{shown}: {_REFUSED[name]}")


def _promote(promote_dtype: Callable[..., Any] | None, dtype: Any, *arrays: Any) -> Any:
    """Cast to one dtype, as Flax does: ``dtype``, or what the three promote to."""
    if promote_dtype is not None:
        return promote_dtype(arrays, dtype=dtype)
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def _add(keywords: dict[str, Any], **given: Any) -> None:
    """Add what is not None; twice the same keyword is an error, not a choice."""
    for name, value in given.items():
        if value is not None:
            if keywords.get(name) is not None:
                raise ValueError(f"{name} was given twice (attention_fn, TokenMask, input_positions); keep one")
            keywords[name] = value


def _four_dimensions(x: Array) -> Array:
    """NumPy's broadcasting of missing leading dimensions, made explicit."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def _dropout(rate: float, rng: Any) -> dict[str, Any]:
    """The keywords for Flax's rate and key; none for rate 0."""
    if rate == 0.0:
        return {}
    if rng is None:
        raise ValueError(f"dropout_rng is needed for dropout_rate={rate}; pass a key, or deterministic=True")
    return {"dropout_rate": rate, "dropout_seed": jax.random.bits(rng, dtype=jnp.uint32)}


class RingAttention(nnx.Module):
    """Attention layer over global arrays: projections, rotary embedding, grouped heads, and the ring.

        q, k, v = rotate(x Wq), rotate(x Wk), x Wv;   y = attention(q, k, v) Wo

    Parameters are named and shaped as those of `nnx.MultiHeadAttention` (query, key, value, out), so its weights fit.

    Args:
      embed_dim: D, width of the input and of the output.
      num_heads: N query heads.
      num_kv_heads: K key/value heads, a divisor of N; None means N.
      head_dim: H; None means D / N.
      use_bias: give every projection a bias.
      rope_theta: base of the rotary frequencies; None leaves the embedding out.
      sinks: learn one sink logit per query head (float32, from 0).
      is_causal, strategy, layout, mesh: see `ring_jax.dot_product_attention`.
      dtype: of the computation; None takes that of input and parameters. param_dtype: of the parameters.
      rngs: for the initial weights.
      **options: other keywords of `ring_jax.dot_product_attention`, fixed for the layer and hashable:
        ``local_window_size``, ``logits_soft_cap``, ``chunk_size``, ``scale``, ``sequence_axis``, ...

    Raises:
      ValueError: sizes that do not fit together. TypeError: unknown options.

    Example:
      >>> layer = RingAttention(32, 4, num_kv_heads=2, layout="zigzag", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 8, 32))).shape
      (1, 8, 32)

    Reference:
      Ainslie et al., GQA, arXiv:2305.13245; Su et al., RoFormer, arXiv:2104.09864.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        use_bias: bool = False,
        rope_theta: float | None = 10_000.0,
        sinks: bool = False,
        is_causal: bool = True,
        strategy: str = "auto",
        layout: str | None = "contiguous",
        mesh: Mesh | AbstractMesh | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"{embed_dim=} must be a multiple of {num_heads=}; or pass head_dim")
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if rope_theta is not None and head_dim % 2:
            raise ValueError(f"{head_dim=} must be even for rotary embedding; or pass rope_theta=None")
        if rope_theta is not None and not 0 < rope_theta < math.inf:
            raise ValueError(f"{rope_theta=} must be greater than 0 and finite; 10000 is usual, None leaves it out")
        fixed = options | {"is_causal": is_causal, "strategy": strategy, "layout": layout, "mesh": mesh}
        for name in ("segment_ids", "positions"):
            if name in options:
                raise TypeError(f"{name} is no option of the layer: pass it to the call")
        _check_options(fixed)
        self.rope_theta = rope_theta
        self.options = tuple(sorted(fixed.items()))  # hashable, as a static part of a pytree must be
        linear = functools.partial(
            nnx.LinearGeneral, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.query = linear(embed_dim, (num_heads, head_dim))
        self.key = linear(embed_dim, (num_kv_heads, head_dim))
        self.value = linear(embed_dim, (num_kv_heads, head_dim))
        self.out = linear((num_heads, head_dim), embed_dim, axis=(-2, -1))
        self.sinks = nnx.Param(jnp.zeros(num_heads, jnp.float32)) if sinks else None

    def __call__(
        self, x: Float[Array | np.ndarray, "B T D"], *, positions: Any = None, segment_ids: Any = None
    ) -> Array:
        """Attend over a sequence in the order of the layout.

        Args:
          x: ``[B, T, D]``.
          positions: int ``[B, T]`` or ``[T]``, in the order of x; None derives them from the layout and the mesh.
          segment_ids: int ``[B, T]`` or ``[T]``; 0 is padding.

        Returns:
          ``[B, T, D]``.

        Raises:
          ValueError: ``layout=None`` without positions. TypeError: a pair of positions. Others as
            `ring_jax.dot_product_attention`.
        """
        x = jnp.asarray(x)
        if isinstance(positions, (tuple, list)):
            raise TypeError("positions must be one array: queries and keys of this layer are the same tokens")
        positions = None if positions is None else arguments.as_int32("positions", positions)
        query, key, value = self.query(x), self.key(x), self.value(x)
        options = dict(self.options)
        if self.rope_theta is not None:
            places = self._positions(x.shape[1]) if positions is None else positions
            cos, sin = rotary.tables(places, rotary.frequencies(query.shape[-1], self.rope_theta))
            query, key = (rotary.rotate(y, cos, sin) for y in (query, key))
        if self.sinks is not None:
            options["sinks"] = self.sinks[...]
        tokens = {"positions": positions, "segment_ids": segment_ids}
        attended: Any = dot_product_attention(query, key, value, **tokens, **options)
        return self.out(attended)

    def _positions(self, length: int) -> Array:
        """Token i of the array stood at ``permutation[i]``: what attention derives for itself."""
        options = dict(self.options)
        if options["layout"] is None:
            raise ValueError("layout=None promises nothing about the order, so rotary embedding needs positions")
        mesh = jax.sharding.get_abstract_mesh() if options["mesh"] is None else options["mesh"]
        num_shards = mesh.shape.get(options.get("sequence_axis", "sequence"), 1)
        return jnp.asarray(layouts.permutation(options["layout"], length, num_shards), jnp.int32)


def blockwise_feedforward(
    feedforward: Callable[..., Array], inputs: Any, chunk_size: int, *, policy: Any, pre_remat: bool
) -> Array:
    """Run a feed-forward block over the tokens, ``chunk_size`` of them at a time; see `ring_jax.compat`."""
    batch, length, width = inputs.shape
    if chunk_size < 1 or length % chunk_size:
        raise ValueError(f"sequence length {length} must be a multiple of {chunk_size=}")
    chunks = jnp.moveaxis(inputs.reshape(batch, chunk_size, length // chunk_size, width), 2, 0)
    if isinstance(feedforward, linen.Module):

        def body(module, carry, chunk):
            return carry, module(chunk)

        if not pre_remat:
            body = linen.remat(body, policy=policy, prevent_cse=False)  # in a scan nothing can be merged back
        split: Any = {"params": False, "dropout": True}
        _, outputs = linen.scan(body, variable_broadcast="params", split_rngs=split)(feedforward, None, chunks)
    else:
        call = feedforward if pre_remat else jax.checkpoint(feedforward, policy=policy, prevent_cse=False)
        _, outputs = lax.scan(lambda carry, chunk: (carry, call(chunk)), None, chunks)
    return jnp.moveaxis(outputs, 0, 2).reshape(batch, length, -1)
