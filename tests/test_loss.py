"""The loss, in chunks and over a cut vocabulary, and the pipeline that feeds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from models.collectives import gather_tokens
from ring_jax import make_mesh
from train.cross_entropy import LossSpec, cross_entropy
from train.flops import pipeline_bubble
from train.pipeline import layer_order, run_pipeline

V = 11


D = 5
SPECS = {
    "plain": LossSpec(V),
    "all terms": LossSpec(V, chunk=5, soft_cap=3.0, label_smoothing=0.2, z_loss=0.1),
    "chunks of one": LossSpec(V, chunk=1, z_loss=0.01),
}


def dense(spec: LossSpec, x, weight, targets):
    """(loss sum, nll sum) with every logit, in the dtype of x, differentiated by JAX."""
    valid = targets >= 0
    logits = jnp.where(valid[:, None], x, 0) @ weight
    logits = logits if spec.soft_cap is None else spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    lse = jax.nn.logsumexp(logits, -1)
    own = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], 1)[:, 0]
    a = spec.label_smoothing
    loss = lse - (1 - a) * own - a * logits.mean(-1) + spec.z_loss * lse**2
    return jnp.sum(jnp.where(valid, loss, 0)), jnp.sum(jnp.where(valid, lse - own, 0))


def draw(ignore: int = -1):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, 13).astype(np.int32)
    targets[[2, 3, 9]] = ignore
    return rng.normal(size=(13, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32), targets


def sums(spec: LossSpec, x, weight, targets):
    loss, nll = cross_entropy(spec, x, weight, targets)
    return loss.sum() + 0.5 * nll.sum(), (loss.sum(), nll.sum())


@pytest.mark.parametrize("ignore", [-1, -100])
@pytest.mark.parametrize("name", SPECS)
def test_loss_and_gradients_are_those_of_the_dense_formula(name: str, ignore: int):
    spec, arrays = SPECS[name], draw(ignore)
    (_, got), grads = jax.jit(jax.value_and_grad(functools.partial(sums, spec), (0, 1), has_aux=True))(*arrays)
    with jax.enable_x64(True):
        x, weight = (np.asarray(a, np.float64) for a in arrays[:2])
        want = dense(spec, x, weight, arrays[2])
        both = lambda x, w: (lambda s: s[0] + 0.5 * s[1])(dense(spec, x, w, arrays[2]))  # noqa: E731
        want_grads = jax.grad(both, (0, 1))(x, weight)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


def test_targets_may_be_of_a_type_that_holds_no_more_than_the_vocabulary():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, D), (D, 256)))
    targets = jnp.array([0, 7, 128, 255])
    want = cross_entropy(LossSpec(256), x, weight, targets)
    got = cross_entropy(LossSpec(256), x, weight, targets.astype(jnp.uint8))
    assert np.isfinite(want[0]).all()
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_at_ignored_positions_reaches_nothing(poison: float):
    x, weight, targets = draw()
    fun = jax.jit(jax.value_and_grad(functools.partial(sums, SPECS["all terms"]), (0, 1), has_aux=True))
    clean, poisoned = fun(x, weight, targets), x.copy()
    poisoned[targets < 0] = poison
    jax.tree.map(np.testing.assert_array_equal, fun(poisoned, weight, targets), clean)
    assert (np.asarray(clean[1][0])[targets < 0] == 0).all()


def test_no_targets_at_all():
    x, weight, targets = draw()
    fun = jax.jit(jax.value_and_grad(functools.partial(sums, SPECS["all terms"]), (0, 1), has_aux=True))
    (total, _), grads = fun(x, weight, np.full_like(targets, -1))
    assert float(total) == 0 and all((np.asarray(g) == 0).all() for g in grads)


def test_the_vocabulary_may_be_cut_over_devices():
    x, weight, targets = draw()
    weight = np.concatenate([weight, weight[:, :1] * 0.3], 1)  # 12 columns on 2 x 2 devices
    spec = LossSpec(12, ("tensor", "pipeline"), chunk=4, soft_cap=3.0, label_smoothing=0.2, z_loss=0.1)
    mesh, cut = make_mesh(tensor=2, pipeline=2), P(None, ("tensor", "pipeline"))

    def local(x, weight, targets):
        first = (jax.lax.axis_index("tensor") * 2 + jax.lax.axis_index("pipeline")) * weight.shape[1]
        loss, nll = cross_entropy(spec, x, weight, targets, first)
        return loss.sum() + 0.5 * nll.sum()

    mapped = jax.shard_map(
        jax.value_and_grad(local, (0, 1)), mesh=mesh, in_specs=(P(), cut, P()), out_specs=(P(), (P(), cut))
    )
    got = jax.jit(mapped)(x, weight, targets)
    whole = spec._replace(axes=())
    want = jax.jit(jax.value_and_grad(lambda *a: sums(whole, *a)[0], (0, 1)))(x, weight, targets)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_a_target_outside_the_vocabulary_is_nan_on_every_device():
    """A number would look like a loss, whichever part of the vocabulary its column would be behind."""
    x, weight, targets = draw()
    weight, spec = np.concatenate([weight, weight[:, :1]], 1), LossSpec(12, ("tensor", "pipeline"), chunk=4)
    mesh, cut = make_mesh(tensor=2, pipeline=2), P(None, ("tensor", "pipeline"))
    targets[[0, 5]] = 12, 2**31 - 1

    def local(x, weight, targets):
        first = (jax.lax.axis_index("tensor") * 2 + jax.lax.axis_index("pipeline")) * weight.shape[1]
        loss, nll = cross_entropy(spec, x, weight, targets, first)
        return loss.sum(), (loss, nll)

    mapped = jax.shard_map(
        jax.value_and_grad(local, has_aux=True), mesh=mesh, in_specs=(P(), cut, P()), out_specs=((P(), (P(), P())), P())
    )
    ((total, losses), dx) = jax.jit(mapped)(x, weight, targets)
    assert np.isnan(total)
    for values in (*losses, dx):
        is_nan = np.isnan(values).reshape(13, -1)
        assert is_nan[[0, 5]].all() and not np.delete(is_nan, [0, 5], 0).any()


def test_no_array_holds_all_logits():
    """Compiled for 4,096 tokens and 32,768 words: the logits would have 512 MiB."""
    shapes = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((4096, 16), "float32"), ((16, 32768), "float32"), ((4096,), "int32"))
    ]
    fun = jax.value_and_grad(functools.partial(sums, LossSpec(32768, chunk=128)), (0, 1), has_aux=True)
    used = jax.jit(fun).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert used < 4096 * 32768 * 4 / 8, used


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from walk(inner)


def test_bfloat16_operands_and_float32_sums():
    """No product has a float32 operand, forward or backward: the weight is never widened, the sums always are."""
    rng = np.random.default_rng(2)
    x, weight = (jnp.asarray(rng.normal(size=s) * c, jnp.bfloat16) for s, c in (((64, 32), 1.0), ((32, 96), 0.3)))
    targets = jnp.asarray(rng.integers(0, 96, 64), jnp.int32)
    spec = LossSpec(96, chunk=16, z_loss=1e-3, label_smoothing=0.1)
    fun = jax.value_and_grad(functools.partial(sums, spec), (0, 1), has_aux=True)
    products = [
        eqn for eqn in walk(jax.make_jaxpr(fun)(x, weight, targets).jaxpr) if "dot_general" in eqn.primitive.name
    ]
    assert len(products) == 4
    for eqn in products:
        assert {v.aval.dtype for v in eqn.invars} == {jnp.dtype("bfloat16")}
        assert eqn.outvars[0].aval.dtype == jnp.float32
    (_, _), grads = jax.jit(fun)(x, weight, targets)
    with jax.enable_x64(True):
        wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weight)]
        both = lambda x, w: (lambda s: s[0] + 0.5 * s[1])(dense(spec, x, w, targets))  # noqa: E731
        want = jax.grad(both, (0, 1))(*wide)
    for a, b in zip(grads, want, strict=True):
        # Rounding of the result alone is 2^-9 of each entry.
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2**-8 * np.abs(b).max())


def test_a_cut_vocabulary_rounds_the_gradient_of_the_activations_little_more():
    """Parts are rounded to bfloat16 before their sum over devices: half as much again, however many they are."""
    rng, v, d, n = np.random.default_rng(0), 512, 64, 64
    x, weight = (jnp.asarray(rng.normal(size=s) * c, jnp.bfloat16) for s, c in (((1, n, d), 1.0), ((d, v), 0.3)))
    targets = jnp.asarray(rng.integers(0, v, n), jnp.int32)
    wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (x[0], weight)]
    with jax.enable_x64(True):
        true = np.asarray(jax.grad(lambda x: dense(LossSpec(v), x, wide[1], targets)[0])(wide[0]))

    def error(tensor: int, pipeline: int) -> float:
        mesh, axes = make_mesh(tensor=tensor, pipeline=pipeline), ("tensor", "pipeline")

        def local(x, weight, targets):
            first = (jax.lax.axis_index("tensor") * pipeline + jax.lax.axis_index("pipeline")) * weight.shape[1]
            x = gather_tokens(x).reshape(n, d)
            return cross_entropy(LossSpec(v, axes, chunk=32), x, weight, targets, first)[0].sum()

        specs = P(None, "tensor"), P(None, axes), P()
        dx = jax.jit(jax.shard_map(jax.grad(local), mesh=mesh, in_specs=specs, out_specs=specs[0]))(x, weight, targets)
        return float(np.sqrt(np.mean((np.asarray(dx.astype(jnp.float32))[0] - true) ** 2) / np.mean(true**2)))

    assert error(4, 2) < 1.75 * error(1, 1) < 1.75 * 2**-8


@pytest.mark.parametrize(("stages", "repeats"), [(2, 1), (4, 1), (4, 2), (2, 3)])
def test_layer_order(stages: int, repeats: int):
    """Going round the stages in order meets the layers in order."""
    order = layer_order(12 if repeats == 3 else 8, stages, repeats)
    held = order.reshape(stages, repeats, -1)
    np.testing.assert_array_equal(
        np.concatenate([held[s, r] for r in range(repeats) for s in range(stages)]), np.arange(len(order))
    )


@pytest.mark.parametrize(("stages", "repeats"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
def test_pipeline_applies_every_layer_with_its_own_microbatch(stages, repeats, num_microbatches):
    """Layer i maps x to x * weight[i] + place: the order of the layers and the place of each piece both show."""
    if repeats > 1 and num_microbatches % stages:
        num_microbatches = 2 * stages
    mesh = make_mesh(pipeline=stages)
    rng, layers = np.random.default_rng(0), stages * repeats
    weight = rng.normal(size=layers).astype(np.float32)
    x = rng.normal(size=(num_microbatches, 2, 3)).astype(np.float32)
    place = rng.integers(0, 9, (num_microbatches, 2, 1)).astype(np.int32)
    order = layer_order(layers, stages, repeats)

    def local(weight, x, place):
        def stage(w, x, place, turn):
            return x * (w[0] if turn is None else w[0, turn]) + place

        out, ticks = run_pipeline(stage, weight, x, place, repeats=repeats)
        is_last = jax.lax.axis_index("pipeline") == stages - 1
        return jax.lax.psum(jnp.where(is_last, jnp.sum(out**2), 0.0), "pipeline"), ticks

    def plain(weight, x):
        for i in np.argsort(order):
            x = x * weight[i] + place
        return jnp.sum(x**2)

    specs = (P("pipeline"), P(), P())
    piped = jax.shard_map(
        jax.value_and_grad(local, (0, 1), has_aux=True), mesh=mesh, in_specs=specs, out_specs=(P(), specs[:2])
    )
    (loss, ticks), grads = jax.jit(piped)(weight, x, place)
    assert int(ticks.busy) == stages * repeats * num_microbatches
    bubble = pipeline_bubble(stages, num_microbatches, repeats)
    assert 1 - int(ticks.busy) / int(ticks.all) == pytest.approx(bubble, abs=1e-12)
    want, want_grads = jax.value_and_grad(plain, (0, 1))(weight, x)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    jax.tree.map(lambda got, true: np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4), grads, want_grads)
