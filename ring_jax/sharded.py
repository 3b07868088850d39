"""Attention inside ``shard_map``: each device passes its shard of the sequence and gets its shard of the result."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from ring_jax import arguments, core, dropout, layouts, manual, options, routes
from ring_jax.kernels import registry
from ring_jax.kernels.protocol import Call
from ring_jax.kernels.tiles import Scores, is_float
from ring_jax.masks import Rules, Tokens
from ring_jax.mesh import Target, target
from ring_jax.options import Schedule, TokenIds
from ring_jax.problem import Inputs, Place, Spec
from ring_jax.shards import check_one_axis

type Result = Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]


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
    score_args: Any = (),
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    layout: str | None = "contiguous",
    implementation: str | None = None,
    schedule: Schedule | None = None,
    return_residual: bool = False,
    axis_name: str | None = "sequence",
    batch_axis: Any = "data",
    head_axis: Any = "tensor",
) -> Result:
    """Attend exactly over a sequence that is sharded over a mesh axis; call it inside `jax.shard_map`.

        out[t] = sum_j exp(scale * q[t] . k[j] - lse[t]) v[j],   over all visible keys j of the whole axis

    Keys and values travel round the axis with ``lax.ppermute``, queries stay.

    Args:
      query: this device's shard ``[B, T, N, H]``, float16, bfloat16, float32 or float64.
      key: ``[B, S, K, H]``; N must be a multiple of K. Key/value heads are never expanded.
      value: ``[B, S, K, Hv]``.
      bias, mask: this device's queries, all keys: ``[B, N, T, S of the whole axis]``, each axis 1 where it is the same
        for all; keys in the order of the sharded array.
      sinks: ``[N]``, this device's heads. query_seq_lengths, key_value_seq_lengths: ``[B]``, of the whole sequence.
      segment_ids, positions: int shards ``[B, S]`` or ``[S]``, or a pair (query's, keys').
      scale, is_causal, local_window_size, chunk_size, logits_soft_cap, mask_fn, score_fn, score_args, dropout_rate,
        dropout_seed, layout, implementation, schedule, return_residual: as in `dot_product_attention`.
      axis_name: the mesh axis that the sequence is sharded over, manual here; None where it is not cut. Outside of
        ``shard_map`` there is one device, whatever the name. Auto axes may cut rows and heads; Explicit ones may not.
      batch_axis, head_axis: the axes that batch rows and heads are sharded over, where they are: they tell
        ``score_fn`` and dropout the numbers of this device's heads and rows in the whole model. With either, an axis
        over which the query varies must be named. Under ``check_vma=False`` nothing tells whether rows or heads are
        cut: pass None where they are not.

    Returns:
      out ``[B, T, N, Hv]`` in the query's dtype, or ``(out, lse)`` with lse ``[B, T, N]`` in float32 (float64 for
      float64 inputs). Both are differentiable. A query that sees nothing gives 0 and lse -inf. Scores, softmax
      statistics and the accumulators of out, dq, dk and dv are float32.

    Raises:
      ValueError, TypeError: shapes, dtypes, names or values that do not fit; before any device work.
      NotImplementedError: a combination that is not verified, see `ring_jax.supports`.

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
    return attend("ring", dict(locals()))


def all_gather_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **keywords: Any
) -> Result:
    """Attend as `ring_attention` does, by gathering keys and values of the whole axis once.

    The same arguments, results and errors; dK and dV are summed by a reduce-scatter. It holds K and V of the whole
    sequence, and its transfer hides behind nothing in the call: for short sequences, many query heads for each
    key/value head, and masks that leave a ring uneven.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> all_gather_attention(x, x, x, is_causal=True).shape  # outside of shard_map: one device
      (1, 4, 2, 8)

    Reference:
      The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.
    """
    return attend("all_gather", _complete(dict(locals()) | keywords))


def ulysses_attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **keywords: Any) -> Result:
    """Attend as `ring_attention` does, by exchanging heads for sequence before and after.

    The same arguments, results and errors; N must be a multiple of the axis. Fewer key/value heads than devices are
    sent to each device that has a query head of theirs.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> ulysses_attention(x, x, x, is_causal=True).shape  # outside of shard_map: one device
      (1, 4, 2, 8)

    Reference:
      Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509, section 3.
    """
    return attend("ulysses", _complete(dict(locals()) | keywords))


def usp_attention(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **keywords: Any) -> Result:
    """Attend as `ring_attention` does, with Ulysses among neighbors and a ring between such groups.

    The same arguments, results and errors; ``schedule.ulysses_size`` sets the size of a group.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> usp_attention(x, x, x, is_causal=True).shape  # outside of shard_map: one device
      (1, 4, 2, 8)

    Reference:
      Fang and Zhao, USP: a unified sequence parallelism approach, arXiv:2405.07719, section 3.
    """
    return attend("usp", _complete(dict(locals()) | keywords))


_PARAMETERS = inspect.signature(ring_attention).parameters.values()
_DEFAULTS = {p.name: p.default for p in _PARAMETERS if p.kind is p.KEYWORD_ONLY}


def _complete(keywords: dict[str, Any]) -> dict[str, Any]:
    """All keywords of `ring_attention`; TypeError for one that it has not."""
    keywords.pop("keywords")
    unknown = sorted(set(keywords) - set(_DEFAULTS) - {"query", "key", "value", "bias", "mask"})
    if unknown:
        raise TypeError(f"unknown keyword {unknown[0]!r}; it takes those of ring_attention: {', '.join(_DEFAULTS)}")
    return _DEFAULTS | keywords


def attend(strategy: str, keywords: dict[str, Any]) -> Any:
    """One call inside ``shard_map``, all keywords of `ring_attention` given."""
    placement = {name: keywords.pop(name) for name in ("axis_name", "batch_axis", "head_axis")}
    arrays = [keywords.pop(name) for name in ("query", "key", "value")]
    options.check(**keywords, strategy=strategy)
    query, key, value = arguments.as_arrays(*arrays)
    axis_name = _check_axis_name(placement["axis_name"], keywords["layout"], query) or ""
    check_counted(query, keywords, axis_name, placement["batch_axis"], placement["head_axis"])
    spec = make_spec(query, key, keywords, axis_name, strategy, (query.shape[2], key.shape[2]))
    size = manual.axis_size(axis_name)
    inputs = make_inputs(query, key, value, keywords, size)
    _check_cut(inputs)
    first_row = manual.first_index(placement["batch_axis"], inputs.query, query.shape[0])
    first_head = manual.first_index(placement["head_axis"], inputs.query, query.shape[2])
    inputs = inputs._replace(place=Place(manual.axis_index(axis_name), first_row, first_head))
    check_local_lengths(inputs, spec, size)
    spec = settle_kernel(spec, keywords["implementation"], inputs, target(), size, is_local=True)
    # Positions are tied to the query: values that depend on positions alone would be computed once for a whole scan
    # over layers and kept, one mask for every tile.
    names = ("query", "query_tokens", "key_tokens", "query_lengths", "key_lengths", "seed", "place")
    tied = lax.optimization_barrier({name: getattr(inputs, name) for name in names})
    out, lse = core.attend(*vary_alike(spec, inputs._replace(**tied)))
    return (out, lse) if keywords["return_residual"] else out


def vary_alike(spec: Spec, inputs: Inputs) -> tuple[Spec, Inputs]:
    """All but query, key and value varying over the same manual axes; of these three, over which they are shared.

    In half precision what devices share has a gradient in float32 until it has been summed: options by a cast here,
    query, key and value, whose cast would cost time and memory, in the backward pass.
    """

    def wide(x: Any) -> Any:
        shared = x is not None and is_float(x) and manual.shared_over(x, inputs)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if shared else x

    args = tuple(map(wide, inputs.score_args))
    others = inputs._replace(bias=wide(inputs.bias), sinks=wide(inputs.sinks), score_args=args)
    arrays = {name: getattr(inputs, name) for name in ("query", "key", "value")}
    shared = tuple(manual.shared_over(x, inputs) for x in arrays.values())
    return spec._replace(shared=shared), manual.vary_alike(others)[0]._replace(**arrays)


def _check_axis_name(axis_name: Any, layout: str | None, query: Array) -> str | None:
    """The name; ValueError for one over which the shards cannot meet, or of whose shards the layout would not know."""
    check_one_axis("axis_name", axis_name)
    if not axis_name or manual.axis_is_manual(axis_name):
        return axis_name
    if manual.axis_is_mapped(axis_name):
        raise ValueError(
            f"{axis_name=} is an axis of jax.vmap here, over which nothing travels, so each shard would attend to "
            "itself alone; use jax.shard_map over a mesh axis, or pass None if the sequence is not cut"
        )
    outside = sorted(jax.sharding.get_abstract_mesh().manual_axes)
    if outside:
        raise ValueError(
            f"{axis_name=} is none of the axes that shard_map has made manual here ({', '.join(outside)}), so each "
            "device would attend to its own shard alone; name the axis of the sequence, or None if it is not cut"
        )
    size = max(mesh.shape.get(axis_name, 1) for mesh in (jax.sharding.get_abstract_mesh(), manual.mesh_of(query)))
    if size > 1 and layout in ("striped", "zigzag"):
        raise ValueError(
            f"{layout=}: the mesh axis {axis_name!r} has size {size}, and this call is for one shard, whose positions "
            "would be others; call dot_product_attention with mesh= or under jax.set_mesh, ring_attention in shard_map"
        )
    return axis_name


def check_counted(query: Array, keywords: dict[str, Any], *axes: Any) -> None:
    """ValueError where `score_fn` or dropout would count heads or rows from 0 on every device of an axis not named."""
    if keywords["score_fn"] is None and not keywords["dropout_rate"]:
        return
    left = manual.uncounted(query, *axes)
    if left:
        option = "dropout_rate" if keywords["score_fn"] is None else "score_fn"
        raise ValueError(
            f"{option}: the query differs along mesh axis {', '.join(left)}, on every device of which heads and rows "
            "would be counted from 0; name it in head_axis if it cuts heads, otherwise in batch_axis"
        )


def _check_cut(inputs: Inputs) -> None:
    """ValueError for arrays that an Explicit axis cuts, which no shard_map around the call has made manual."""
    names = manual.cut_by_type(inputs)
    if names:
        raise ValueError(
            f"mesh axis {', '.join(names)} is Explicit, not manual, and cuts an array of this call; add it to the "
            "axis_names of jax.shard_map, make it an Auto axis, or call ring_jax.dot_product_attention(..., mesh=mesh)"
        )


def make_spec(
    query: Any, key: Any, keywords: dict[str, Any], axis_name: str, strategy: str, num_heads: tuple[int, int]
) -> Spec:
    """The static part of a call whose keywords have been checked; ``num_heads`` are those of one device."""
    scale, cap = keywords["scale"], keywords["logits_soft_cap"]
    window, chunk_size = options.window_of(keywords["local_window_size"]), options.chunk_of(keywords["chunk_size"])
    rules = Rules(bool(keywords["is_causal"]), window, chunk_size, keywords["mask_fn"])
    scores = Scores(
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        None if cap is None else float(cap),
        rules,
        keywords["score_fn"],
        float(keywords["dropout_rate"]),
    )
    positions, segments = keywords["positions"], keywords["segment_ids"]
    one_order = query.shape[1] == key.shape[1] and not any(isinstance(x, tuple) for x in (positions, segments))
    return Spec(
        axis_name,
        strategy,
        scores,
        keywords["layout"],
        num_heads,
        bool(keywords["return_residual"]),
        keywords["schedule"] or Schedule(),
        default_positions=positions is None,
        # Positions may restart without segment ids, or by another side's: then nothing is skipped but at run time.
        promised=positions is None or (one_order and segments is not None),
    )


def make_inputs(query: Any, key: Any, value: Any, keywords: dict[str, Any], num_shards: int) -> Inputs:
    """The arrays of a call, checked, with positions dropped where no rule reads them.

    ``num_shards`` is 1 where the arrays are those of the whole sequence.
    """
    batch, lengths, num_heads = query.shape[0], (query.shape[1], key.shape[1]), query.shape[2]
    positions = arguments.as_pair("positions", keywords["positions"], batch, lengths)
    segments = arguments.as_pair("segment_ids", keywords["segment_ids"], batch, lengths)
    if not any(options.is_on(name, keywords[name]) for name in options.READS_POSITIONS):
        positions = None, None
    shape = (batch, num_heads, lengths[0], lengths[1] * num_shards)
    real = [
        arguments.as_row(name, keywords[name], batch, jnp.integer)
        for name in ("query_seq_lengths", "key_value_seq_lengths")
    ]
    zero = jnp.int32(0)
    return Inputs(
        query=query,
        key=key,
        value=value,
        bias=arguments.as_pairwise("bias", keywords["bias"], shape),
        sinks=arguments.as_row("sinks", keywords["sinks"], num_heads, jnp.floating),
        score_args=arguments.as_score_args(keywords["score_args"]),
        mask=arguments.as_pairwise("mask", keywords["mask"], shape),
        query_tokens=Tokens(positions[0], segments[0]),
        key_tokens=Tokens(positions[1], segments[1]),
        query_lengths=real[0],
        key_lengths=real[1],
        seed=_seed(keywords["dropout_seed"], batch) if keywords["dropout_rate"] else None,
        place=Place(zero, zero, zero),
    )


def _seed(seed: Any, batch: int) -> Array:
    words = dropout.as_words(seed)
    if words.ndim == 2 and len(words) != batch:
        raise ValueError(
            f"dropout_seed of shape {list(words.shape)} has seeds for {len(words)} rows, and there are {batch}; give "
            "one for each row, or one for all"
        )
    return words


def settle_kernel(
    spec: Spec, implementation: str | None, inputs: Inputs, target: Target, num_shards: int, is_local: bool = False
) -> Spec:
    """The spec with the kernel that computes its blocks, see `registry.choose`.

    ``is_local`` says that the inputs are those of one of the ``num_shards``.
    """
    given = inputs.query_tokens.segment_ids, inputs.query_lengths, inputs.key_lengths, spec.real_lengths
    cut = 1 if is_local else num_shards
    local = inputs.query.shape[1] // cut, inputs.key.shape[1] // cut
    place = routes.devices_a_place(num_shards, spec.strategy, spec.schedule, *spec.num_heads)
    call = Call(
        *target,
        dtype=inputs.query.dtype,
        head_sizes=(inputs.query.shape[-1], inputs.value.shape[-1]),
        lengths=(local[0] * place, local[1] * (num_shards if spec.strategy == "all_gather" else place)),
        scores=spec.scores,
        layout=spec.layout,
        default_positions=spec.default_positions,
        has_segments=any(x is not None for x in given),
        has_bias=inputs.bias is not None,
        has_mask=inputs.mask is not None,
        strategy=spec.strategy,
        two_directions=spec.schedule.two_directions,
        tile_size=spec.schedule.tile_size,
        return_lse=spec.return_lse,
        group=spec.num_heads[0] // spec.num_heads[1],
        num_blocks=num_shards if spec.strategy in ("ring", "usp") else 1,
    )
    return spec._replace(kernel=registry.report(registry.choose(implementation, call)))


def check_local_lengths(inputs: Inputs, spec: Spec, num_shards: int) -> None:
    """Raise ValueError for a shard that zigzag cannot cut into its two chunks."""
    if spec.layout == "zigzag" and num_shards > 1:
        for name, x in (("query", inputs.query), ("key", inputs.key)):
            layouts.check_length("zigzag", x.shape[1] * num_shards, num_shards, f"{name} length")
