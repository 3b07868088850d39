"""Every option is right or refused, and every refusal names the value, the rule and the fix, before any device work."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as jaxtyping_config

import ring_jax
from ring_jax import options

QUERY, KEY = jnp.ones((2, 8, 4, 6)), jnp.ones((2, 8, 2, 6))

VALUES = {
    "bias": jnp.zeros((1, 1, 8, 8)),
    "mask": jnp.ones((1, 1, 8, 8), bool),
    "query_seq_lengths": jnp.array([8, 8]),
    "key_value_seq_lengths": jnp.array([8, 8]),
    "local_window_size": (2, 0),
    "chunk_size": 4,
    "logits_soft_cap": 30.0,
    "sinks": jnp.zeros(4),
    "mask_fn": lambda *ids: True,
    "score_fn": lambda scores, *ids: scores,
    "score_args": (1.0,),
    "dropout_rate": 0.1,
    "dropout_seed": 3,
    "strategy": "ulysses",
    "implementation": "cudnn",
}


@pytest.fixture(autouse=True)
def _own_errors():
    """The library's own checks, as a user sees them: without the run-time type checker of the test suite."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("call", [ring_jax.dot_product_attention, ring_jax.ring_attention])
@pytest.mark.parametrize("name", VALUES)
def test_options_not_built_are_refused_by_name(name: str, call):
    refusal = NotImplementedError
    if name == "strategy" and call is ring_jax.ring_attention:
        refusal = TypeError  # it is one strategy
    with pytest.raises(refusal, match=name):
        call(QUERY, KEY, KEY, **{name: VALUES[name]})
    assert name in ring_jax.supports(**{name: VALUES[name]})


def test_every_keyword_is_built_or_refused():
    """A keyword that no table knows would be silently ignored."""
    parameters = inspect.signature(ring_jax.dot_product_attention).parameters
    built = {
        "scale",
        "is_causal",
        "segment_ids",
        "positions",
        "strategy",
        "layout",
        "implementation",
        "return_residual",
    }
    placement = {"query", "key", "value", "mesh", "batch_axis", "head_axis", "sequence_axis"}
    assert set(parameters) == set(options.NOT_BUILT) | built | placement
    ring = set(inspect.signature(ring_jax.ring_attention).parameters)
    assert set(parameters) - ring == {"strategy", "mesh", "batch_axis", "head_axis", "sequence_axis"}
    assert ring - set(parameters) == {"axis_name"}


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
    with pytest.raises(TypeError, match="query must be floating point; got int32"):
        ring_jax.dot_product_attention(QUERY.astype(int), KEY, KEY)


@pytest.mark.parametrize(
    ("axes", "shape", "layout", "message"),
    [
        ({"sequence": 4}, (2, 12, 4, 6), "zigzag", "query length=12 must be a positive multiple of 8.*pad to 16"),
        ({"sequence": 4}, (2, 15, 4, 6), "contiguous", "multiple of 4.*pad to 16"),
        ({"sequence": 4}, (2, 18, 4, 6), "striped", "multiple of 4.*pad to 20"),
        ({"data": 8}, (1, 16, 4, 6), "contiguous", "batch size 1 .*data of size 8.*sequence axis"),
        ({"tensor": 8}, (2, 16, 4, 6), "contiguous", "4 query heads .*tensor of size 8"),
        ({"tensor": 4}, (2, 16, 4, 6), "contiguous", "2 key/value heads .*tensor of size 4"),
    ],
)
def test_sizes_that_do_not_fit_the_mesh(axes, shape, layout, message):
    key = jnp.ones((*shape[:2], 2, 6))
    with pytest.raises(ValueError, match=message):
        ring_jax.dot_product_attention(jnp.ones(shape), key, key, mesh=ring_jax.make_mesh(**axes), layout=layout)


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


def test_causal_without_an_order():
    with pytest.raises(NotImplementedError, match=r"layout=None.*needs positions"):
        ring_jax.dot_product_attention(QUERY, KEY, KEY, is_causal=True, layout=None)


def test_one_axis_for_two_dimensions():
    with pytest.raises(ValueError, match="may cut one dimension only"):
        ring_jax.dot_product_attention(
            QUERY, KEY, KEY, mesh=ring_jax.make_mesh(sequence=2), batch_axis="sequence", head_axis=None
        )


@pytest.mark.parametrize("name", ["is_causal", "segment_ids", "positions", "scale", "layout"])
@pytest.mark.parametrize("ring", [1, 2])
def test_every_option_has_an_effect(name: str, ring: int):
    """Turning an option on changes the result, on one device and on a ring."""
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
