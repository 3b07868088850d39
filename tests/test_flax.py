"""Flax's own attention modules, NNX and Linen, give the same with the ring on 8 devices; nothing passed is ignored."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE
from flax import nnx
from jax import lax

import ring_jax
from ring_jax import rotary
from ring_jax.flax import RingAttention, TokenMask, attention_fn

BATCH, LENGTH, WIDTH, HEADS = 2, 24, 12, 4
RNG = np.random.default_rng(0)
X, COTANGENT = RNG.normal(size=(2, BATCH, LENGTH, WIDTH)).astype("float32")
# Documents that cross the shards, with padding between them.
SEGMENTS = np.array([[3] * 7 + [0] * 2 + [1] * 15, [2] * 10 + [5] * 13 + [0]], np.int32)
RESTART = np.array([[*range(7), 0, 0, *range(15)], [*range(10), *range(13), 0]], np.int32)
REAL = (SEGMENTS != 0)[..., None]
SAME = (SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :]) & (SEGMENTS != 0)[:, None, :, None]
TRIL = np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))
ORDER = ring_jax.permutation("zigzag", LENGTH, 4)


def mesh() -> jax.sharding.Mesh:
    return ring_jax.make_mesh(data=2, sequence=4)


def run(call, model, x=X, cotangent=COTANGENT):
    """(out, gradients of the weights and of x) of ``call(model, x)``, under jit."""

    def objective(model, x):
        out = call(model, x)
        return jnp.sum(out * cotangent), out

    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    (_, out), slopes = step(model, x)
    return np.asarray(out), [np.asarray(g) for g in jax.tree.leaves(slopes)]


def assert_close(got, want, rows=None):
    np.testing.assert_allclose(*(x if rows is None else x * rows for x in (got[0], want[0])), atol=FORWARD_TOLERANCE)
    assert len(got[1]) == len(want[1]) > 0
    for x, y in zip(got[1], want[1], strict=True):
        # A bias of the keys moves all scores of a query alike: its true gradient is 0, and what is left is rounding.
        scale = np.abs(y).max() if np.abs(y).max() > 1e-4 else 1
        np.testing.assert_allclose(x, y, atol=GRADIENT_TOLERANCE * scale, rtol=0)


def nnx_layer(function, **options) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        HEADS, WIDTH, num_kv_heads=2, attention_fn=function, decode=False, rngs=nnx.Rngs(0), **options
    )


def linen_layer(function, **options) -> nn.MultiHeadDotProductAttention:
    return nn.MultiHeadDotProductAttention(HEADS, attention_fn=function, **options)


@pytest.fixture(scope="module")
def linen_weights():
    return jax.jit(linen_layer(nn.dot_product_attention).init)(jax.random.key(1), X)


@pytest.mark.parametrize("causal", ["always", "by call"])
def test_nnx_causal(causal: str):
    want = run(lambda m, x: m(x, is_causal=True), nnx_layer(nnx.dot_product_attention))
    if causal == "always":
        got = run(lambda m, x: m(x), nnx_layer(attention_fn(is_causal=True, mesh=mesh())))
    else:
        got = run(lambda m, x: m(x, is_causal=True), nnx_layer(attention_fn(mesh=mesh(), strategy="ulysses")))
    assert_close(got, want)


def test_nnx_segments_in_a_layout():
    """The structured mask goes where Flax has its dense one."""
    weights = COTANGENT * REAL
    want = run(lambda m, x: m(x, mask=SAME & TRIL), nnx_layer(nnx.dot_product_attention), cotangent=weights)
    layer = nnx_layer(attention_fn(is_causal=True, mesh=mesh(), layout="zigzag"))
    mask = TokenMask(segment_ids=SEGMENTS[:, ORDER])
    got = run(lambda m, x: m(x[:, ORDER], mask=mask)[:, np.argsort(ORDER)], layer, cotangent=weights)
    assert_close(got, want, REAL)


def test_nnx_input_positions_are_positions():
    want = run(lambda m, x: m(x, is_causal=True), nnx_layer(nnx.dot_product_attention))
    shuffled = np.random.default_rng(3).permutation(LENGTH)
    at = np.broadcast_to(shuffled, (BATCH, LENGTH)).astype("int32")
    layer = nnx_layer(attention_fn(is_causal=True, mesh=mesh(), layout=None))
    got = run(lambda m, x: m(x[:, shuffled], input_positions=jnp.asarray(at))[:, np.argsort(shuffled)], layer)
    assert_close(got, want)


def test_linen_causal(linen_weights):
    want = run(lambda w, x: linen_layer(nn.dot_product_attention).apply(w, x, mask=TRIL), linen_weights)
    ours = linen_layer(attention_fn(is_causal=True, mesh=mesh()))
    assert_close(run(ours.apply, linen_weights), want)


def test_linen_segments(linen_weights):
    weights = COTANGENT * REAL
    plain = linen_layer(nn.dot_product_attention)
    want = run(lambda w, x: plain.apply(w, x, mask=SAME), linen_weights, cotangent=weights)
    for function, mask in (
        (attention_fn(mesh=mesh(), segment_ids=SEGMENTS), None),
        (attention_fn(mesh=mesh()), TokenMask(segment_ids=SEGMENTS)),
    ):
        layer = linen_layer(function)
        got = run(lambda w, x, layer=layer, mask=mask: layer.apply(w, x, mask=mask), linen_weights, cotangent=weights)
        assert_close(got, want, REAL)


def test_dense_masks_on_request(linen_weights):
    mask = RNG.random((BATCH, 1, LENGTH, LENGTH)) < 0.5
    mask[..., 0] = True
    mask = mask.astype("float32")  # as Linen's make_causal_mask gives it
    want = run(lambda w, x: linen_layer(nn.dot_product_attention).apply(w, x, mask=mask), linen_weights)
    layer = linen_layer(attention_fn(dense_masks=True, mesh=mesh()))
    assert_close(run(lambda w, x: layer.apply(w, x, mask=mask), linen_weights), want)


def test_bias():
    query, key, value = RNG.normal(size=(3, BATCH, LENGTH, HEADS, 6)).astype("float32")
    bias, cotangent = RNG.normal(size=(HEADS, LENGTH, LENGTH)).astype("float32"), query[::-1]
    inputs = (query, key, value, bias)
    want, got = (
        run(lambda m, _, f=f: f(*m, is_causal=True), inputs, cotangent=cotangent)
        for f in (nnx.dot_product_attention, attention_fn(mesh=mesh()))
    )
    assert_close(got, want)


def test_dropout_uses_the_rate_and_the_key_that_flax_passes():
    query = RNG.normal(size=(BATCH, LENGTH, HEADS, 6)).astype("float32")
    attend, key = attention_fn(mesh=mesh()), jax.random.key(7)
    seed = jax.random.bits(key, dtype=jnp.uint32)
    call = jax.jit(attend, static_argnames=("dropout_rate", "deterministic"))
    dropped = call(query, query, query, dropout_rng=key, dropout_rate=0.5)
    want = jax.jit(
        lambda x, seed: ring_jax.dot_product_attention(x, x, x, dropout_rate=0.5, dropout_seed=seed, mesh=mesh())
    )(query, seed)
    np.testing.assert_array_equal(dropped, want)
    off = call(query, query, query, dropout_rng=key, dropout_rate=0.5, deterministic=True)
    np.testing.assert_allclose(off, nnx.dot_product_attention(query, query, query), atol=FORWARD_TOLERANCE)
    assert np.abs(dropped - off).max() > 0.1


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_dropout_of_the_modules(kind: str, linen_weights):
    """On average over keys dropout changes nothing; with one key it does."""
    keys, few = jax.random.split(jax.random.key(2), 200), X[:, :4]
    if kind == "linen":
        layer = linen_layer(attention_fn(), dropout_rate=0.25)

        def call(key, deterministic=False):
            return layer.apply(linen_weights, few, deterministic=deterministic, rngs={"dropout": key})
    else:
        module = nnx_layer(attention_fn(), keep_rngs=False, dropout_rate=0.25)

        def call(key, deterministic=False):
            return module(few, deterministic=deterministic, rngs=nnx.Rngs(dropout=key))

    still = call(keys[0], deterministic=True)
    outs = np.asarray(jax.jit(lambda keys: lax.map(call, keys))(keys))
    assert np.abs(outs[0] - outs[1]).max() > 1e-2
    np.testing.assert_allclose(outs.mean(0), still, atol=5 * outs.std(0).max() / len(keys) ** 0.5)


def test_signature_has_every_argument_of_both():
    """Linen passes only what the signature names; what it lacked would be ignored without a word."""
    ours = set(inspect.signature(attention_fn()).parameters)
    for theirs in (nnx.dot_product_attention, nn.dot_product_attention):
        assert set(inspect.signature(theirs).parameters) <= ours


def test_dtype_and_promotion():
    query, key = X.reshape(BATCH, LENGTH, 2, 6), jnp.asarray(X.reshape(BATCH, LENGTH, 2, 6), jnp.bfloat16)
    assert attention_fn()(query, key, key).dtype == jnp.float32
    assert attention_fn()(query, key, key, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    halves = attention_fn()(query, key, key, promote_dtype=lambda x, dtype: [y.astype("float16") for y in x])
    assert halves.dtype == jnp.float16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask", TRIL),
        ("precision", lax.Precision.HIGHEST),
        ("module", object()),
        ("einsum_dot_general", lax.dot_general),
        ("qk_attn_weights_einsum", jnp.einsum),
        ("attn_weights_value_einsum", jnp.einsum),
    ],
)
def test_refused_arguments(name: str, value):
    query = X.reshape(BATCH, LENGTH, 2, 6)
    with pytest.raises(NotImplementedError, match=name):
        attention_fn()(query, query, query, **{name: value})


def test_refusals_reach_the_user_of_the_modules(linen_weights):
    with pytest.raises(NotImplementedError, match="sow_weights"):
        nnx_layer(attention_fn())(X, sow_weights=True)
    with pytest.raises(NotImplementedError, match=r"precision=HIGHEST.*default_matmul_precision"):
        linen_layer(attention_fn(), precision=lax.Precision.HIGHEST).apply(linen_weights, X)
    with pytest.raises(
        NotImplementedError, match=r"dense mask.*is_causal=.*segment_ids=.*local_window_size=.*mask_fn="
    ):
        linen_layer(attention_fn()).apply(linen_weights, X, mask=TRIL)


def test_refused_options():
    with pytest.raises(TypeError, match="did you mean logits_soft_cap"):
        attention_fn(logit_soft_cap=30.0)
    with pytest.raises(TypeError, match="dropout_rate on Flax's module"):
        attention_fn(dropout_rate=0.1)
    with pytest.raises(TypeError, match="pass it to the call"):
        RingAttention(8, 2, segment_ids=SEGMENTS, rngs=nnx.Rngs(0))
    query = X.reshape(BATCH, LENGTH, 2, 6)
    with pytest.raises(ValueError, match="segment_ids was given twice"):
        attention_fn(segment_ids=SEGMENTS)(query, query, query, mask=TokenMask(segment_ids=SEGMENTS))
    with pytest.raises(ValueError, match="dropout_rng is needed"):
        attention_fn()(query, query, query, dropout_rate=0.1)
    with pytest.raises(ValueError, match="layout=None promises nothing"):
        RingAttention(WIDTH, 2, layout=None, rngs=nnx.Rngs(0))(X)
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple of num_kv_heads=3"):
        RingAttention(WIDTH, 4, num_kv_heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="head_dim=3 must be even"):
        RingAttention(WIDTH, 4, rngs=nnx.Rngs(0))


def dense_layer(layer: RingAttention, x, positions, segment_ids=None):
    """The layer on one device: the plain rotation, and dense attention in natural order."""

    def turn(y):
        half = y.shape[-1] // 2
        angle = positions[..., None, None] * 100.0 ** (-jnp.arange(half) / half)
        a, b = y[..., :half], y[..., half:]
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)

    query, key, value = turn(layer.query(x)), turn(layer.key(x)), layer.value(x)
    keywords = {} if segment_ids is None else {"segment_ids": segment_ids, "positions": positions}
    return layer.out(ring_jax.reference_attention(query, key, value, is_causal=True, **keywords))


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize("packed", [False, True])
def test_ring_attention_layer(layout: str, packed: bool):
    """Rotary angles follow the layout's positions, or the given ones; so does the causal order."""
    options = {"num_kv_heads": 2, "head_dim": 6, "use_bias": True, "rope_theta": 100.0}
    order = ring_jax.permutation(layout, LENGTH, 4)
    back, weights = np.argsort(order), COTANGENT * REAL if packed else COTANGENT
    dense = RingAttention(WIDTH, HEADS, **options, rngs=nnx.Rngs(0))
    ring = RingAttention(WIDTH, HEADS, **options, layout=layout, rngs=nnx.Rngs(0))
    given, moved, at = {}, {}, jnp.arange(LENGTH)
    if packed:
        given, at = {"segment_ids": jnp.asarray(SEGMENTS)}, jnp.asarray(RESTART)
        moved = {"segment_ids": jnp.asarray(SEGMENTS[:, order]), "positions": jnp.asarray(RESTART[:, order])}
    want = run(lambda m, x: dense_layer(m, x, at, **given), dense, cotangent=weights)
    with jax.set_mesh(mesh()):
        got = run(lambda m, x: m(x[:, order], **moved)[:, back], ring, cotangent=weights)
    assert_close(got, want)


def test_ring_attention_layer_has_the_weights_of_flax():
    theirs = nnx_layer(nnx.dot_product_attention)
    ours = RingAttention(WIDTH, HEADS, num_kv_heads=2, use_bias=True, rope_theta=None, mesh=mesh(), rngs=nnx.Rngs(1))
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    assert_close(run(lambda m, x: m(x), ours), run(lambda m, x: m(x, is_causal=True), theirs))


def test_ring_attention_layer_options_reach_attention():
    """Window, soft cap and learned sinks: on eight devices as on one, each with an effect."""
    options = {"local_window_size": (5, 0), "logits_soft_cap": 2.0, "sinks": True, "head_dim": 6}
    one = RingAttention(WIDTH, HEADS, **options, rngs=nnx.Rngs(0))
    many = RingAttention(WIDTH, HEADS, **options, mesh=mesh(), rngs=nnx.Rngs(0))
    want = run(lambda m, x: m(x), one)
    assert_close(run(lambda m, x: m(x), many), want)
    assert len(want[1]) == 4 + 1 + 1  # four projections, the sinks, x
    for name, off in (("local_window_size", None), ("logits_soft_cap", None), ("sinks", False)):
        other = RingAttention(WIDTH, HEADS, **(options | {name: off}), rngs=nnx.Rngs(0))
        assert np.abs(np.asarray(jax.jit(lambda m: m(X))(other)) - want[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.arange(float(LENGTH)), "positions must be integers; got float64"),
        ((np.arange(LENGTH),) * 2, "positions must be one array"),
    ],
)
def test_ring_attention_layer_positions_that_are_refused(positions, message):
    layer = RingAttention(WIDTH, HEADS, head_dim=6, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=message):
        layer(X, positions=positions)


@pytest.mark.parametrize("theta", [0.0, -1e4, float("inf"), float("nan")])
def test_bases_that_give_no_rotary_frequencies_are_refused(theta):
    with pytest.raises(ValueError, match=rf"rope_theta={theta} must be greater than 0 and finite; 10000 is usual"):
        RingAttention(WIDTH, HEADS, head_dim=6, rope_theta=theta, rngs=nnx.Rngs(0))


def test_ring_attention_layer_sees_differences_of_positions_only():
    """The same tokens a billion places on give the same, but for rounding."""
    layer = RingAttention(WIDTH, HEADS, head_dim=6, num_kv_heads=2, rope_theta=1e4, rngs=nnx.Rngs(0))
    x, at = jnp.asarray(RNG.normal(size=(1, 12, WIDTH)), jnp.float32), jnp.arange(12)
    segments = jnp.ones(12, jnp.int32)
    near = layer(x, positions=at, segment_ids=segments)
    assert np.abs(layer(x, positions=2 * at, segment_ids=segments) - near).max() > 1e-3
    for shift in (10**6, 2**24 + 1, 2**31 - 12):
        far = layer(x, positions=at + shift, segment_ids=segments)
        np.testing.assert_allclose(far, near, atol=5e-6 * float(np.abs(near).max()))


def test_rotation_at_large_positions():
    x = RNG.normal(size=(1, 4, 2, 64)).astype("float32")
    at = np.array([3, 10**6, 2**24 + 1, 2**31 - 1], np.int32)
    angle = at[:, None] * 1e4 ** (-np.arange(32) / 32)
    pairs = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angle)[:, None]
    want = np.concatenate([pairs.real, pairs.imag], -1)
    got = rotary.rotate(jnp.asarray(x), *rotary.tables(jnp.asarray(at), rotary.frequencies(64, 1e4)))
    assert np.abs(got - want).max() < 2e-6 * np.abs(x).max()
