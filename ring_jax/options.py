"""What attention can do: one table of options, read by `supports` and by every entry point.

Invariant 6: *a combination of options is verified, or refused with the reason and the fix; nothing is ignored.* An
option that is not built yet is in the signatures, so that no call changes when it comes, and is refused here by name.
"""

import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from ring_jax.layouts import check_layout, unknown_name

_Ids = Int[Array | np.ndarray, "..."]
TokenIds = _Ids | tuple[_Ids, _Ids] | None
"""Segment ids or positions: one array for queries and keys alike, or a pair."""

STRATEGIES = ("auto", "ring", "all_gather", "ulysses", "usp")
IMPLEMENTATIONS = ("xla", "pallas_tpu", "cudnn", "pallas_gpu")

NOT_BUILT: dict[str, tuple[Any, str]] = {
    "bias": (None, "an additive bias is not built yet; there is no other way to pass one"),
    "mask": (None, "a dense mask is not built yet; use is_causal, segment_ids and positions"),
    "query_seq_lengths": (None, "lengths are not built yet; mark the padding with segment id 0"),
    "key_value_seq_lengths": (None, "lengths are not built yet; mark the padding with segment id 0"),
    "local_window_size": (None, "sliding windows are not built yet"),
    "chunk_size": (None, "chunked attention is not built yet; give each chunk a segment id of its own"),
    "logits_soft_cap": (None, "the soft cap is not built yet"),
    "sinks": (None, "attention sinks are not built yet"),
    "mask_fn": (None, "mask functions are not built yet; use is_causal, segment_ids and positions"),
    "score_fn": (None, "score functions are not built yet"),
    "score_args": ((), "score functions are not built yet"),
    "dropout_rate": (0.0, "attention dropout is not built yet; use 0.0"),
    "dropout_seed": (None, "attention dropout is not built yet"),
}
"""Option -> (its default, why any other value is refused)."""


def supports(**keywords: Any) -> str | None:
    """Say whether a combination of keywords of `dot_product_attention` is verified.

    Args:
      **keywords: any keywords of `dot_product_attention` or `ring_attention`, with the values to be used.

    Returns:
      None when the test suite verifies the combination against the float64 reference; otherwise the reason why the
      call would be refused, as a string that names the option.

    Example:
      >>> supports(is_causal=True, layout="zigzag") is None
      True
      >>> supports(logits_soft_cap=30.0)
      'logits_soft_cap=30.0: the soft cap is not built yet'
    """
    for name, value in keywords.items():
        if name in NOT_BUILT:
            default, reason = NOT_BUILT[name]
            if not (value is None or (isinstance(value, (tuple, float, int)) and value == default)):
                shown = f"{name}={value!r}" if isinstance(value, (str, numbers.Number, tuple)) else name
                return f"{shown}: {reason}"
    strategy, implementation = keywords.get("strategy", "auto"), keywords.get("implementation")
    if strategy in STRATEGIES[2:]:
        return f'{strategy=!s}: this strategy is not built yet; use strategy="ring"'
    if implementation in IMPLEMENTATIONS[1:]:
        return f'{implementation=!s}: this kernel is not built yet; use implementation="xla"'
    if keywords.get("is_causal") and keywords.get("layout", "contiguous") is None and keywords.get("positions") is None:
        return "layout=None: it promises nothing about the order, so causal attention needs positions"
    return None


def check(**keywords: Any) -> None:
    """Raise for unknown names (ValueError) and for combinations that are not verified (NotImplementedError)."""
    if keywords.get("strategy", "auto") not in STRATEGIES:
        raise ValueError(unknown_name("strategy", keywords["strategy"], STRATEGIES))
    if keywords.get("implementation") not in (None, *IMPLEMENTATIONS):
        raise ValueError(unknown_name("implementation", keywords["implementation"], IMPLEMENTATIONS))
    if keywords["layout"] is not None:
        check_layout(keywords["layout"])
    for name in ("is_causal", "return_residual"):
        if not isinstance(keywords[name], (bool, np.bool_)):
            raise TypeError(f"{name} must be a Python bool, known when the function is traced; got {keywords[name]!r}")
    scale = keywords["scale"]
    if scale is not None and not isinstance(scale, (numbers.Real, np.floating)):
        raise TypeError(f"scale must be a Python number; got {scale!r}. Multiply the query by a learned temperature")
    reason = supports(**keywords)
    if reason is not None:
        raise NotImplementedError(reason)


def check_arrays(query: Any, key: Any, value: Any) -> None:
    """Raise ValueError or TypeError for shapes and dtypes that are not those of grouped-query attention."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if jnp.ndim(x) != 4:
            rule = "4 dimensions [batch, length, heads, head size]"
            raise ValueError(f"{name} must have {rule}; got shape {jnp.shape(x)}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point; got {x.dtype}")
    if not query.dtype == key.dtype == value.dtype:
        dtypes = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
        raise TypeError(f"query, key and value must have one dtype; got {dtypes}. Cast them to one")
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"query, key and value must have one batch size; got {shapes}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"key and value must have one length and one number of heads; got {shapes}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have one head size; got {shapes}")
    if query.shape[2] % key.shape[2]:
        rule = f"{query.shape[2]} query heads must be a multiple of {key.shape[2]} key/value heads"
        raise ValueError(f"{rule}; got {shapes}")
    if 0 in query.shape or 0 in value.shape:
        raise ValueError(f"no dimension may be empty; got {shapes}")


def as_pair(name: str, value: Any, batch: int, lengths: tuple[int, int]) -> tuple[Any, Any]:
    """Split ``segment_ids`` or ``positions`` into the query's and the keys', each int32 ``[1 or B, length]``."""
    if value is None:
        return None, None
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be one array or a pair (query's, keys'); got {len(pair)} arrays")
    arrays = []
    for x, length, side in zip(pair, lengths, ("query", "keys"), strict=True):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers; got {x.dtype} for the {side}")
        if x.shape not in ((length,), (batch, length), (1, length)):
            raise ValueError(
                f"{name} must have shape [{length}] or [{batch}, {length}] for the {side} (local lengths inside "
                f"shard_map); got {x.shape}"
            )
        arrays.append(jnp.broadcast_to(x, (x.shape[0] if x.ndim == 2 else 1, length)).astype(jnp.int32))
    return arrays[0], arrays[1]
