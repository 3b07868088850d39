"""Every option is right or refused, and every refusal names the value, the rule and the fix, before any device work."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring_jax
from ring_jax import Schedule, options
from ring_jax.mesh import Target, target

pytestmark = pytest.mark.usefixtures("own_errors")
QUERY, KEY = jnp.ones((2, 8, 4, 6)), jnp.ones((2, 8, 2, 6))

REFUSED = [
    ({"is_causal": True, "layout": None}, "is_causal=True, layout=None: an unnamed order says nothing; pass positions"),
    ({"local_window_size": 3, "layout": None}, "local_window_size=3, layout=None.*pass positions"),
    ({"chunk_size": 3, "layout": None}, "chunk_size=3, layout=None.*pass positions"),
    ({"mask_fn": lambda *ids: True, "layout": None}, "mask_fn, layout=None.*pass positions"),
    ({"score_fn": lambda s, *ids: s, "layout": None}, "score_fn, layout=None.*pass positions"),
    ({"dropout_rate": 0.1, "dropout_seed": 0, "layout": None}, "dropout_rate=0.1, layout=None.*pass positions"),
    ({"query_seq_lengths": jnp.array([8, 8]), "layout": None}, "query_seq_lengths, layout=None.*segment id 0"),
    ({"key_value_seq_lengths": jnp.array([8, 8]), "layout": None}, "key_value_seq_lengths, layout=None.*segment id 0"),
    ({"bias": jnp.zeros((1, 1, 8, 8)), "schedule": Schedule(rotate="queries")}, 'bias.*use rotate="keys" or "auto"'),
    ({"mask": jnp.ones((8, 8), bool), "schedule": Schedule(rotate="queries")}, 'mask.*use rotate="keys" or "auto"'),
    ({"schedule": Schedule(two_directions=True, rotate="queries")}, "two_directions splits the keys"),
]
BY_STRATEGY = [
    ({"strategy": "all_gather", "schedule": Schedule(two_directions=True)}, 'two_directions is about a ring.*"usp"'),
    ({"strategy": "ulysses", "schedule": Schedule(inner_size=2)}, 'inner_size is about a ring.*"usp"'),
    ({"strategy": "all_gather", "schedule": Schedule(rotate="keys")}, 'rotate is about a ring.*"usp"'),
    ({"strategy": "ring", "schedule": Schedule(ulysses_size=2)}, 'ulysses_size is about strategy="usp" alone'),
    ({"strategy": "ulysses", "schedule": Schedule(gradient_dtype="bfloat16")}, "leave gradient_dtype alone"),
]


@pytest.mark.parametrize("call", [ring_jax.dot_product_attention, ring_jax.ring_attention])
@pytest.mark.parametrize(("keywords", "message"), REFUSED)
def test_combinations_that_are_refused(keywords, message: str, call):
    with pytest.raises(NotImplementedError, match=message):
        call(QUERY, KEY, KEY, **keywords)
    assert re.search(message, ring_jax.supports(**keywords))


@pytest.mark.parametrize(("keywords", "message"), BY_STRATEGY)
def test_combinations_with_a_strategy_that_are_refused(keywords, message: str):
    with pytest.raises(NotImplementedError, match=message):
        ring_jax.dot_product_attention(QUERY, KEY, KEY, **keywords)
    assert re.search(message, ring_jax.supports(**keywords))


def test_every_refusal_is_tested():
    """A row of the table that no test reaches could refuse anything, or nothing."""
    left = set(options.REFUSALS)
    for keywords, _ in REFUSED + BY_STRATEGY:
        every = {name: keywords.get(name, default) for name, (default, _) in options.OPTIONS.items()}
        left -= {refusal for refusal in options.REFUSALS if refusal.applies(every)}
    # The kinds of refusal that are made for several options alike are tested with one each above.
    assert len(left) <= 1, left


def test_every_keyword_is_in_the_table():
    """A keyword that no table knows would be silently ignored."""
    parameters = inspect.signature(ring_jax.dot_product_attention).parameters
    placement = {"query", "key", "value", "mesh", "batch_axis", "head_axis", "sequence_axis"}
    assert set(parameters) == set(options.OPTIONS) | placement
    assert {name: parameters[name].default for name in options.OPTIONS} == {
        name: default for name, (default, _) in options.OPTIONS.items()
    }
    ring = set(inspect.signature(ring_jax.ring_attention).parameters)
    assert set(parameters) - ring == {"strategy", "mesh", "sequence_axis"}
    assert ring - set(parameters) == {"axis_name"}
    dense = set(inspect.signature(ring_jax.reference_attention).parameters)
    how = {"strategy", "layout", "implementation", "schedule"}
    assert set(options.OPTIONS) - how == dense - {"query", "key", "value"}


def test_defaults_are_supported():
    parameters = inspect.signature(ring_jax.dot_product_attention).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    assert ring_jax.supports(**defaults) is None
    assert ring_jax.supports(dropout_rate=0.0, sinks=None, score_args=(), strategy="ring", implementation="xla") is None


@pytest.mark.parametrize("call", [ring_jax.dot_product_attention, ring_jax.ring_attention])
def test_unknown_keywords_raise(call):
    with pytest.raises(TypeError, match="windw"):
        call(QUERY, KEY, KEY, windw=3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"layout": "zigzg"}, 'did you mean "zigzag"'),
        ({"layout": "stripe"}, 'did you mean "striped"'),
        ({"strategy": "rng"}, 'did you mean "ring"'),
        ({"implementation": "xlaa"}, 'did you mean "xla"'),
        ({"segment_ids": jnp.ones((2, 7), int)}, r"segment_ids must have shape \[8\] or \[2, 8\].*got \(2, 7\)"),
        ({"positions": jnp.ones((3, 8), int)}, r"positions must have shape.*got \(3, 8\)"),
        ({"positions": (jnp.ones(8, int),) * 3}, "positions must be one array or a pair"),
        ({"local_window_size": (-1, 0)}, r"local_window_size=\(-1, 0\) must not be negative; a side without a limit"),
        ({"chunk_size": 0}, "chunk_size=0 must be at least 1; None means no limit"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap=0.0 must be positive and finite; None means no cap"),
        ({"dropout_rate": 1.0, "dropout_seed": 0}, r"dropout_rate=1.0 must lie in \[0, 1\)"),
        ({"scale": float("inf")}, "scale=inf must be finite"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1 needs a dropout_seed"),
        ({"score_args": (1.0,)}, "score_args are given, but no score_fn"),
        ({"sinks": jnp.ones(3)}, r"sinks must have shape \[4\]; got \[3\]"),
        ({"query_seq_lengths": jnp.ones(3, int)}, r"query_seq_lengths must have shape \[2\]"),
        ({"bias": jnp.zeros((2, 3, 8, 8))}, r"bias must broadcast to .*\[2, 4, 8, 8\]; got \[2, 3, 8, 8\]"),
        ({"mask": jnp.ones((9, 8), bool)}, r"mask must broadcast to .*\[2, 4, 8, 8\]; got \[9, 8\]"),
        ({"schedule": Schedule(rotate="query")}, 'rotate=.*did you mean "queries"'),
        ({"schedule": Schedule(gradient_dtype="bf16")}, 'gradient_dtype=.*did you mean "bfloat16"'),
        ({"score_fn": lambda s, *ids: s[..., 0]}, "score_fn must return scores of the shape that it got"),
        ({"mask_fn": lambda *ids: jnp.ones((3, 5, 7), bool)}, "mask_fn must return what broadcasts to"),
    ],
)
def test_bad_values(keywords, message):
    with pytest.raises(ValueError, match=message):
        ring_jax.dot_product_attention(QUERY, KEY, KEY, **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"scale": jnp.float32(2)}, "scale must be a Python number.*learned temperature"),
        ({"is_causal": jnp.array(True)}, "is_causal must be a Python bool"),
        ({"segment_ids": jnp.ones((2, 8))}, "segment_ids must be integers; got float32"),
        ({"local_window_size": jnp.int32(3)}, "local_window_size must be a Python int or a pair.*traced"),
        ({"local_window_size": (1.0, 2)}, "local_window_size must be a Python int or a pair"),
        ({"chunk_size": jnp.int32(3)}, "chunk_size must be a Python int, known when the function is traced"),
        ({"logits_soft_cap": jnp.float32(3)}, "logits_soft_cap must be a Python number"),
        ({"dropout_rate": None}, "dropout_rate must be a Python number"),
        ({"dropout_rate": jnp.float32(0.1)}, "dropout_rate must be a Python number"),
        ({"dropout_rate": 0.1, "dropout_seed": 0.5}, "dropout_seed must be an integer"),
        ({"mask": jnp.ones((8, 8))}, "mask must be boolean, True attends; got float32"),
        ({"bias": jnp.ones((8, 8), bool)}, "bias must be floating point; got bool"),
        ({"sinks": jnp.ones(4, int)}, "sinks must be floating point; got int32"),
        ({"mask_fn": 3}, "mask_fn must be a function; got int"),
        ({"score_fn": 3}, "score_fn must be a function; got int"),
        ({"score_args": 3, "score_fn": lambda s, *ids: s}, "score_args must be a tuple of arrays; got int"),
        ({"schedule": "fast"}, "schedule must be a ring_jax.Schedule; got str"),
        ({"mask_fn": lambda *ids: 1.0}, "mask_fn must return booleans"),
    ],
)
def test_bad_types(keywords, message):
    with pytest.raises(TypeError, match=message):
        ring_jax.dot_product_attention(QUERY, KEY, KEY, **keywords)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8, 5, 6), (2, 8, 2, 6), (2, 8, 2, 6)), "5 query heads must be a multiple of 2 key/value heads"),
        (((2, 8, 4, 6), (3, 8, 2, 6), (3, 8, 2, 6)), "one batch size"),
        (((2, 8, 4, 6), (2, 8, 2, 6), (2, 7, 2, 6)), "one length and one number of heads"),
        (((2, 8, 4, 6), (2, 8, 2, 5), (2, 8, 2, 6)), "one head size"),
        (((8, 4, 6), (2, 8, 2, 6), (2, 8, 2, 6)), "query must have 4 dimensions"),
        (((2, 0, 4, 6), (2, 8, 2, 6), (2, 8, 2, 6)), "no dimension may be empty"),
    ],
)
def test_bad_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        ring_jax.dot_product_attention(*map(jnp.ones, shapes))


def test_bad_dtypes():
    with pytest.raises(TypeError, match="one dtype; got query float32, key bfloat16"):
        ring_jax.dot_product_attention(QUERY, KEY.astype("bfloat16"), KEY)
    with pytest.raises(TypeError, match=r"query must be floating point \(float16, .*\); got int32"):
        ring_jax.dot_product_attention(QUERY.astype(int), KEY, KEY)


@pytest.mark.parametrize(
    ("axes", "shape", "layout", "message"),
    [
        ({"data": 8}, (1, 16, 4, 6), "contiguous", "batch size 1 .*data of size 8.*sequence axis"),
        ({"tensor": 8}, (2, 16, 4, 6), "contiguous", "4 query heads .*tensor of size 8"),
    ],
)
def test_sizes_that_do_not_fit_the_mesh(axes, shape, layout, message):
    key = jnp.ones((*shape[:2], 2, 6))
    with pytest.raises(ValueError, match=message):
        ring_jax.dot_product_attention(jnp.ones(shape), key, key, mesh=ring_jax.make_mesh(**axes), layout=layout)


def test_odd_shards_in_two_directions():
    mesh, spec = ring_jax.make_mesh(sequence=2), jax.P(None, "sequence")
    call = functools.partial(ring_jax.ring_attention, schedule=Schedule(two_directions=True))
    with pytest.raises(ValueError, match=r"1 runs of keys .* so 3 keys a device must be a multiple of 2; pad"):
        jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)(*3 * (jnp.ones((1, 6, 2, 4)),))


def test_an_axis_that_is_not_there():
    """It must not count as size 1 where the arrays are cut: each device would attend to its own shard."""
    mesh, spec = jax.make_mesh((4,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P(None, "sp")
    for call in (ring_jax.ring_attention, ring_jax.ulysses_attention):
        with pytest.raises(ValueError, match=r"axis_name='sequence' is none of the axes .*\(sp\).* or None if"):
            jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)(QUERY, KEY, KEY)
    call = functools.partial(ring_jax.ring_attention, axis_name=None)
    jax.eval_shape(
        jax.shard_map(call, mesh=mesh, in_specs=jax.P("sp"), out_specs=jax.P("sp")), *3 * (jnp.ones((4, 8, 2, 4)),)
    )


def test_a_score_function_that_closes_over_what_it_should_be_given():
    def loss(slope):
        call = functools.partial(ring_jax.dot_product_attention, score_fn=lambda s, *ids: s * slope)
        return call(QUERY, KEY, KEY).sum()

    with pytest.raises(ValueError, match=r"score_fn closes over a traced array.*score_args"):
        jax.grad(loss)(1.0)


def test_wrong_call_inside_shard_map():
    mesh = ring_jax.make_mesh(sequence=2)
    spec = jax.P(None, "sequence")
    with pytest.raises(ValueError, match=r"inside shard_map call ring_jax.ring_attention"):
        jax.shard_map(ring_jax.dot_product_attention, mesh=mesh, in_specs=spec, out_specs=spec)(QUERY, KEY, KEY)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [2, 6])
def test_a_shard_that_zigzag_cannot_halve(length: int, is_causal: bool):
    mesh, spec = ring_jax.make_mesh(sequence=2), jax.P(None, "sequence")
    x = jnp.ones((1, length, 2, 4))
    call = functools.partial(ring_jax.ring_attention, layout="zigzag", is_causal=is_causal)
    with pytest.raises(ValueError, match=f"query length={length} must be a positive multiple of 4"):
        jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)(x, x, x)


@pytest.mark.parametrize(
    ("size", "keywords", "message"),
    [
        (8, {"strategy": "ulysses"}, r'4 query heads .* 8 devices .* use strategy="ring" or "usp" with ulysses_size=4'),
        (3, {"strategy": "ulysses"}, r'4 query heads .* 3 devices .* use strategy="ring"'),
        (4, {"strategy": "usp", "schedule": Schedule(ulysses_size=3)}, r"ulysses_size=3 must divide .* \[1, 2, 4\]"),
        (8, {"strategy": "usp", "schedule": Schedule(ulysses_size=8)}, "4 query heads .* 8 devices"),
        (4, {"schedule": Schedule(inner_size=3)}, r"inner_size=3 must divide the 4 places .* \[1, 2, 4\]"),
    ],
)
def test_sizes_that_do_not_fit_a_strategy(size: int, keywords, message: str):
    with pytest.raises(ValueError, match=message):
        ring_jax.dot_product_attention(QUERY, KEY, KEY, mesh=ring_jax.make_mesh(sequence=size), **keywords)


def test_one_axis_for_two_dimensions():
    with pytest.raises(ValueError, match="may cut one dimension only"):
        ring_jax.dot_product_attention(
            QUERY, KEY, KEY, mesh=ring_jax.make_mesh(sequence=2), batch_axis="sequence", head_axis=None
        )


@pytest.mark.parametrize("name", ["layout"])
@pytest.mark.parametrize("ring", [1, 2])
def test_the_layout_has_an_effect(name: str, ring: int):
    """It changes the result on a ring; tests/test_options.py shows the effect of every other option."""
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(2, 16, 2, 6)).astype("float32") for _ in range(3)]
    base = {"is_causal": True}
    changed = {
        "is_causal": {"is_causal": False},
        "segment_ids": {"segment_ids": np.repeat([1, 2], 8)},
        "positions": {"positions": np.arange(16)[::-1].copy()},
        "scale": {"scale": 0.1},
        "layout": {"layout": "striped"},
    }[name]
    attend = functools.partial(ring_jax.dot_product_attention, mesh=ring_jax.make_mesh(sequence=ring))
    plain, other = (jax.jit(functools.partial(attend, **keywords))(*x) for keywords in (base, base | changed))
    assert (np.abs(plain - other).max() > 1e-2) == (name != "layout" or ring > 1)


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"implementation": "cudnn"}, ("it is a kernel for gpu, and these devices are cpu", "implementation='xla'")),
        ({"implementation": "pallas_tpu", "is_causal": True}, ("it is a kernel for tpu",)),
    ],
)
def test_a_kernel_by_name_is_judged_for_the_devices(keywords, parts):
    reason = ring_jax.supports(**keywords)
    assert reason is not None and all(part in reason for part in parts)


@pytest.mark.parametrize(
    ("implementation", "keywords", "part"),
    [
        ("cudnn", {"local_window_size": 4}, "local_window_size"),
        ("pallas_tpu", {"score_fn": lambda s, *_: s}, "score_fn"),
        ("pallas_gpu", {"dropout_rate": 0.1, "dropout_seed": 0}, "dropout_rate"),
    ],
)
def test_what_a_kernel_lacks_is_refused_of_it_by_name(implementation, keywords, part, monkeypatch):
    where = {"cudnn": ("gpu", "NVIDIA H100"), "pallas_gpu": ("gpu", "NVIDIA H100"), "pallas_tpu": ("tpu", "TPU v5p")}
    monkeypatch.setattr(options, "target", lambda mesh: Target(*where[implementation]))
    assert part in ring_jax.supports(implementation=implementation, **keywords)
    assert ring_jax.supports(implementation=implementation, is_causal=True, layout="zigzag") is None


@pytest.mark.parametrize("count", [1, 3, 8])
def test_seeds_are_one_for_each_row(count):
    x = jnp.ones((4, 8, 2, 4))
    with pytest.raises(ValueError, match=rf"seeds for {count} rows, and there are 4"):
        ring_jax.dot_product_attention(x, x, x, dropout_rate=0.5, dropout_seed=jnp.ones((count, 2), jnp.uint32))


def test_the_default_device_decides_where_there_is_no_mesh():
    with jax.default_device(jax.devices()[1]):
        assert target() == Target("cpu", jax.devices()[1].device_kind)
    with jax.default_device("cpu"):
        assert target().platform == "cpu"
