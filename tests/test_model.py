"""The model: against float64 NumPy, and the same function wherever its tokens lie."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P

from models import ModelConfig, RopeScaling, Transformer
from models.config import REMAT
from models.layers import MLP, rotary_frequencies, rotary_tables
from models.sharding import RULES, param_specs
from ring_jax import from_layout, make_mesh, permutation, to_layout

CONFIG = ModelConfig(
    vocab_size=40, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24, rope_theta=500.0
)
B, T = 2, 16
LAYOUTS = ("contiguous", "striped", "zigzag")
# Lengths 3, 2, 4, 1 and six tokens of padding: no document ends with a shard of four.
PACKED_POSITIONS = np.array([0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0], np.int32)
PACKED_SEGMENTS = np.array([1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 0, 0, 0, 0, 0, 0], np.int32)


@functools.cache
def make_model(**changes) -> Transformer:
    return jax.jit(lambda: Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (B, T)).astype(np.int32)


def run(model: Transformer, tokens: np.ndarray, **keywords) -> np.ndarray:
    keywords = {name: jnp.asarray(x) for name, x in keywords.items()}
    return np.asarray(jax.jit(lambda model, tokens, keywords: model(tokens, **keywords))(model, tokens, keywords))


def run_sharded(
    model, tokens, *, layout, sequence, tensor=1, positions=None, segment_ids=None, dropout_seed=None
) -> np.ndarray:
    """The same call on local shards; everything goes in and comes out in natural order."""
    cut = P("data", "sequence")
    call = jax.shard_map(
        lambda model, tokens, extra: model(tokens, layout=layout, dropout_seed=dropout_seed, **extra),
        mesh=make_mesh(tensor=tensor, sequence=sequence),
        in_specs=(param_specs(model), cut, cut),
        out_specs=P("data", ("pipeline", "sequence")),  # the weights vary over pipeline, so the logits do, too
    )
    extra = {"positions": positions, "segment_ids": segment_ids}
    place = functools.partial(to_layout, layout=layout, num_shards=sequence)
    extra = {name: place(np.broadcast_to(x, tokens.shape)) for name, x in extra.items() if x is not None}
    return from_layout(np.asarray(jax.jit(call)(model, place(tokens), extra)), layout, sequence)


# --- one device ----------------------------------------------------------------------------------------------------


def numpy_model(model: Transformer, tokens, positions, segment_ids) -> np.ndarray:
    """The whole forward pass in float64, dense, head by head."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model)
    config, layers = model.config, weights.layers

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def turn(x, positions):
        half = config.head_dim // 2
        angle = positions[..., None] * config.rope_theta ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    sees = (positions[:, :, None] >= positions[:, None, :]) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    sees &= segment_ids[:, :, None] > 0
    x = weights.embedding.get_value()[tokens]
    for i in range(config.num_layers):
        h, out = norm(x, layers.attention_norm.scale.get_value()[i]), 0
        for n in range(config.num_heads):
            k = n // (config.num_heads // config.num_kv_heads)
            query = turn(h @ layers.attention.query.get_value()[i, :, n], positions)
            key = turn(h @ layers.attention.key.get_value()[i, :, k], positions)
            score = query @ key.transpose(0, 2, 1) / np.sqrt(config.head_dim)
            share = np.where(sees, np.exp(score - score.max(-1, keepdims=True)), 0)
            share /= np.maximum(share.sum(-1, keepdims=True), 1e-300)
            out += share @ (h @ layers.attention.value.get_value()[i, :, k]) @ layers.attention.output.get_value()[i, n]
        x = x + out
        h = norm(x, layers.mlp_norm.scale.get_value()[i])
        gate, up = h @ layers.mlp.gate.get_value()[i], h @ layers.mlp.up.get_value()[i]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layers.mlp.down.get_value()[i]
    head = weights.embedding.get_value().T if weights.unembedding is None else weights.unembedding.get_value()
    return norm(x, weights.final_norm.scale.get_value()) @ head


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_forward_equals_numpy_in_float64(tokens, tie_embeddings):
    model = make_model(tie_embeddings=tie_embeddings)
    place = {
        "positions": np.stack([np.arange(T, dtype=np.int32), PACKED_POSITIONS]),
        "segment_ids": np.stack([np.ones(T, np.int32), PACKED_SEGMENTS]),
    }
    logits = run(model, tokens, **place)
    want = numpy_model(model, tokens, **place)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, want, atol=5e-6 * np.abs(want).max())


def test_a_row_without_positions_is_one_document(tokens):
    model = make_model()
    explicit = run(model, tokens, positions=jnp.arange(T), segment_ids=jnp.ones((B, T), jnp.int32))
    np.testing.assert_allclose(run(model, tokens), explicit, atol=1e-6)


def test_a_packed_document_gets_the_logits_it_gets_alone(tokens):
    model = make_model()
    packed = run(model, tokens, positions=PACKED_POSITIONS, segment_ids=PACKED_SEGMENTS)
    alone = run(model, tokens[:, 5:9])
    np.testing.assert_allclose(packed[:, 5:9], alone, atol=2e-6)
    unset = run(model, tokens, segment_ids=PACKED_SEGMENTS)  # rotary angles are relative: documents need not start at 0
    np.testing.assert_allclose(unset[:, 5:9], alone, atol=2e-6)
    assert np.abs(run(model, tokens)[:, 5:9] - alone).max() > 0.1


@pytest.mark.parametrize("remat", REMAT)
def test_the_module_is_a_plain_pytree(tokens, remat):
    model = make_model(remat=remat)
    grads = jax.jit(jax.grad(lambda model: jnp.mean(model(jnp.asarray(tokens)) ** 2)))(model)
    assert jax.tree.structure(grads) == jax.tree.structure(model)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)
    assert isinstance(moved, Transformer)
    # The slope along the gradient, against a difference quotient of the forward pass in float64.
    ends = [
        np.mean(numpy_model(moved, tokens, np.arange(T)[None], np.ones((1, T))) ** 2)
        for moved in (
            jax.tree.map(lambda p, g, step=step: np.float64(p) + step * np.float64(g), model, grads)
            for step in (1e-4, -1e-4)
        )
    ]
    slope = sum(float(np.sum(np.float64(g) ** 2)) for g in jax.tree.leaves(grads))
    assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(slope, rel=1e-4)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layers", "pattern", "inputs"),
    [(2, 2, 0), pytest.param(4, 4, 0, marks=SLOW), pytest.param(4, 2, 2, marks=SLOW)],
)
def test_what_is_kept_does_not_depend_on_the_pattern_of_windows(layers, pattern, inputs):
    """Layers in a loop, one a trip, against all in one, where XLA could merge what is computed again with the forward
    pass, and against two a trip, which cuts the inputs of both out of the stack before it starts."""

    def temporaries(windows: int) -> int:
        config = dataclasses.replace(CONFIG, num_layers=layers, embed_dim=256, mlp_dim=128, windows=(None,) * windows)
        model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))

        def objective(model, x):
            return model.run_layers(x, None, None, layout="contiguous").sum()

        x = jax.ShapeDtypeStruct((1, 2048, 256), jnp.float32)
        return jax.jit(jax.grad(objective)).lower(model, x).compile().memory_analysis().temp_size_in_bytes

    looped, unrolled = temporaries(0), temporaries(pattern)
    assert unrolled <= 1.03 * looped + inputs * 4 * 2048 * 256, (looped, unrolled)


def test_bfloat16_stays_near_float32(tokens):
    model, wide = make_model(compute_dtype="bfloat16"), make_model()
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    logits, want = run(model, tokens), run(wide, tokens)
    assert logits.dtype == np.float32
    assert 1e-4 < np.abs(logits - want).max() / np.abs(want).max() < 3e-2


def test_a_token_outside_the_vocabulary_is_not_silently_clamped(tokens):
    wrong = tokens.copy()
    wrong[1, 3] = CONFIG.vocab_size
    logits = run(make_model(), wrong)
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1, 3]).all()


@pytest.mark.parametrize(("dtype", "vocab_size"), [("uint8", 256), ("int16", 40_000), ("uint16", 65_536)])
def test_token_ids_of_a_type_that_does_not_hold_the_size_of_the_vocabulary(tokens, dtype, vocab_size):
    model = make_model(vocab_size=vocab_size)
    np.testing.assert_array_equal(run(model, tokens.astype(dtype)), run(model, tokens))


# --- the MLP in chunks -----------------------------------------------------------------------------------------------


def mlp_grads(x, chunk: int | None) -> dict[str, np.ndarray]:
    """Gradients of the weights of a layer's MLP, float64."""
    config = dataclasses.replace(CONFIG, num_layers=1, mlp_chunk=chunk)
    mlp = jax.tree.map(lambda w: w[0], MLP(config, rngs=nnx.Rngs(0)))
    grads = jax.jit(jax.grad(lambda mlp, x: jnp.sum(mlp(x).astype(jnp.float32))))(mlp, x)
    return {name: np.asarray(getattr(grads, name).get_value(), np.float64) for name in ("gate", "up", "down")}


def test_gradients_of_chunks_are_summed_in_float32():
    x = jax.random.normal(jax.random.key(1), (1, 2048, CONFIG.embed_dim)).astype(jnp.bfloat16)
    exact = mlp_grads(x.astype(jnp.float32), None)
    at_once, chunked = mlp_grads(x, None), mlp_grads(x, 32)
    for name, want in exact.items():
        errors = [np.sqrt(np.mean((found[name] - want) ** 2)) for found in (chunked, at_once)]
        assert errors[0] <= 1.3 * errors[1], (name, errors)


def test_a_chunk_counts_the_tokens_of_all_rows():
    """Three rows of 8 in chunks of 10: three passes of 8, the same gradients as all at once, and no hidden layer of
    24."""
    x = jax.random.normal(jax.random.key(1), (3, 8, CONFIG.embed_dim))
    mlp = jax.tree.map(lambda w: w[0], MLP(dataclasses.replace(CONFIG, num_layers=1, mlp_chunk=10), rngs=nnx.Rngs(0)))
    program = str(jax.make_jaxpr(jax.grad(lambda mlp, x: mlp(x).sum()))(mlp, x))
    assert f"[8,{CONFIG.mlp_dim}]" in program and f"[24,{CONFIG.mlp_dim}]" not in program
    assert f",8,{CONFIG.mlp_dim}]" not in program
    for got, want in zip(*(mlp_grads(x, chunk).values() for chunk in (10, None)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


# --- rotary angles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theta", "scaling"), [(10_000.0, RopeScaling()), (500_000.0, RopeScaling(factor=8.0))])
def test_rotary_angles_are_those_of_float64_at_every_position(theta, scaling):
    rng = np.random.default_rng(0)
    drawn = [rng.integers(2**n, 2 ** (n + 1), 50) for n in range(31)]
    positions = np.concatenate([[0, 65535, 65536, 2**24 + 1, 2**31 - 1, -1, -(2**20)], *drawn])
    cos, sin = jax.jit(lambda p: rotary_tables(p, 64, theta, scaling))(positions.astype(np.int32))
    assert (cos.dtype, sin.dtype) == (jnp.float32, jnp.float32)
    angle = positions[:, None].astype(np.longdouble) * rotary_frequencies(64, theta, scaling)
    error = np.maximum(np.abs(np.array(cos) - np.cos(angle)), np.abs(np.array(sin) - np.sin(angle))).max(-1)
    assert error.max() < 1e-6, positions[error.argmax()]


def test_logits_do_not_change_when_all_positions_move(tokens):
    want = run(make_model(), tokens)
    for start in (2**20, 2**24 - 3, 2**31 - 1 - T):
        moved = run(make_model(), tokens, positions=start + np.arange(T, dtype=np.int32))
        np.testing.assert_allclose(moved, want, atol=5e-6)


def test_scaled_frequencies_are_those_of_llama_3_1():
    """The piecewise formula in float64, and four frequencies worked out by hand for a context of 64 tokens."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    plain = rotary_frequencies(128, 500_000.0, RopeScaling())
    np.testing.assert_array_equal(plain, 500_000.0 ** (-np.arange(64) / 64))

    def scale(frequency: float) -> float:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            return frequency
        if wavelength > 8192:
            return frequency / 8
        smooth = (8192 / wavelength - 1) / (4 - 1)
        return (1 - smooth) * frequency / 8 + smooth * frequency

    want, got = np.array([scale(f) for f in plain]), rotary_frequencies(128, 500_000.0, scaling)
    np.testing.assert_allclose(got, want, rtol=1e-14)
    kinds = (got == plain).sum(), (got == plain / 8).sum()
    assert kinds == (29, 29)  # 6 between them
    # theta 4 and head 8: f = 1, 1/2, 1/4, 1/8 turn 10.19, 5.09, 2.546, 1.273 times in 64 tokens.
    short = dataclasses.replace(scaling, original_max_position=64)
    np.testing.assert_allclose(rotary_frequencies(8, 4.0**2, short), [1, 0.5, 0.1440141, 0.0255869], rtol=1e-5)


def test_scaled_frequencies_reach_the_model(tokens):
    """Six times the context with all frequencies divided by six: the angles are those of the short context."""
    scaling = RopeScaling(factor=6.0, low_freq_factor=1e5, high_freq_factor=2e5, original_max_position=16)
    positions = jnp.arange(T) * 6
    want = run(make_model(), tokens)
    np.testing.assert_allclose(run(make_model(rope_scaling=scaling), tokens, positions=positions), want, atol=2e-6)
    assert np.abs(run(make_model(), tokens, positions=positions) - want).max() > 0.1


def test_scaling_out_of_range_is_refused():
    scaling = RopeScaling(factor=0.5, low_freq_factor=4.0, high_freq_factor=1.0, original_max_position=0)
    assert [p.split(" ")[0] for p in dataclasses.replace(CONFIG, rope_scaling=scaling).problems()] == [
        "model.rope_scaling.factor=0.5",
        "model.rope_scaling.low_freq_factor=4.0",
        "model.rope_scaling.original_max_position=0",
    ]


# --- shards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("sequence", "tensor"), [(2, 2), (4, 1)])
def test_default_positions_come_from_the_shard(tokens, layout, sequence, tensor):
    model = make_model()
    sharded = run_sharded(model, tokens, layout=layout, sequence=sequence, tensor=tensor)
    np.testing.assert_allclose(sharded, run(model, tokens), atol=3e-6)


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_a_layout_of_shards_that_the_call_does_not_see_is_refused(tokens, layout):
    """Where `jax.jit` cuts the sequence: the order of one shard would be taken for that of four."""
    model, cut = make_model(), jax.NamedSharding(make_mesh(sequence=4), P(None, "sequence"))
    call = jax.jit(lambda model, tokens, positions: model(tokens, positions=positions, layout=layout))
    moved, at = jax.device_put(to_layout(tokens, layout, 4), cut), jnp.asarray(permutation(layout, T, 4), jnp.int32)
    message = rf"{layout=}: the mesh axis 'sequence' has size 4.*pass positions=, or"
    with pytest.raises(ValueError, match=message):
        call(model, moved, None)
    with jax.set_mesh(cut.mesh):
        with pytest.raises(ValueError, match=message):
            call(model, tokens, None)
        got = call(model, moved, at)
        natural = jax.jit(lambda model, tokens: model(tokens))(model, jax.device_put(tokens, cut))
    want = run(model, tokens)
    np.testing.assert_allclose(from_layout(np.asarray(got), layout, 4), want, atol=3e-6)
    np.testing.assert_allclose(natural, want, atol=3e-6)


def test_an_order_without_a_name_needs_positions(tokens):
    with pytest.raises(ValueError, match="layout=None says nothing about the order of the tokens; pass positions="):
        make_model()(jnp.asarray(tokens), layout=None)


def test_positions_counted_from_0_on_every_shard_would_show(tokens):
    model = make_model()
    local = np.tile(np.arange(T // 4, dtype=np.int32), 4)
    wrong = run_sharded(model, tokens, layout="contiguous", sequence=4, positions=local)
    assert np.abs(wrong - run(model, tokens)).max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_on_shards(tokens, layout):
    model = make_model()
    place = {"positions": PACKED_POSITIONS, "segment_ids": PACKED_SEGMENTS}
    sharded = run_sharded(model, tokens, layout=layout, sequence=4, **place)
    np.testing.assert_allclose(sharded, run(model, tokens, **place), atol=3e-6)


def test_parameters_that_are_not_sharded_by_the_rules_are_refused(tokens):
    model, mesh = make_model(), make_mesh(tensor=2, pipeline=2)

    def call(specs):
        sharded = jax.shard_map(lambda m, t: m(t), mesh=mesh, in_specs=(specs, P()), out_specs=P("pipeline"))
        return jax.eval_shape(sharded, model, jnp.asarray(tokens))

    with pytest.raises(ValueError, match=r"holds 1 of 2 layers, so model\(tokens\) would skip the others"):
        call(param_specs(model))
    with pytest.raises(ValueError, match="4 query heads on each of 2 shards of the tensor axis do not make 4"):
        call(P())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_heads": 5},
            "model.num_heads=5 must be a multiple of model.num_kv_heads=2.*choose num_kv_heads from .1, 5",
        ),
        ({"head_dim": 7}, "model.head_dim=7 must be even.*use 8"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"rope_theta": 0.0}, "model.rope_theta=0.0 must be greater than 0 and finite; 10000 is usual"),
        ({"rope_theta": float("inf")}, "model.rope_theta=inf must be greater than 0 and finite"),
        ({"norm_eps": -1e-6}, "model.norm_eps=-1e-06 must be greater than 0 and finite; 1e-6 is usual"),
    ],
)
def test_sizes_that_make_no_model(changes, text):
    with pytest.raises(ValueError, match=text):
        Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


def test_unknown_compute_type():
    config = dataclasses.replace(CONFIG)
    object.__setattr__(config, "compute_dtype", "float16")  # the constructor checks it in the tests already
    (problem,) = config.problems()
    assert problem == "model.compute_dtype='float16' must be one of float32, bfloat16; did you mean 'bfloat16'?"


def test_rules_name_the_axes_of_the_mesh():
    assert {RULES.batch, RULES.heads, RULES.layers, RULES.sequence} == set(make_mesh().axis_names)
