"""Under every transform that a trainer uses, on Auto and Explicit meshes, from arrays in any sharding."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, assert_matches, gradients, mesh_call, ring_call, run
from jax import P
from jax.sharding import AxisType, NamedSharding

import ring_jax

CASE = Case(ring=2, layout="zigzag", kind="restart", batch=2, num_heads=4)
AXES = ("data", "tensor", "pipeline", "sequence")
SHAPES = [(2, 2, 1, 2), (1, 1, 2, 2), (2, 1, 2, 2)]


def make_mesh(shape: tuple[int, ...], kind: AxisType) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, AXES, axis_types=(kind,) * 4, devices=devices)


def remat(attend):
    return lambda *arrays, **tokens: jax.checkpoint(attend)(*arrays, **tokens)


def scan(attend):
    """Two equal layers, the second one's result."""

    def call(query, key, value, **tokens):
        def layer(carry, _):
            return carry, attend(query, key, value, **tokens)

        return jax.tree.map(lambda x: x[1], jax.lax.scan(jax.checkpoint(layer), 0.0, None, length=2)[1])

    return call


def vmap(attend):
    """An extra leading axis, over arrays and ids alike."""

    def call(*arrays, **tokens):
        out = jax.vmap(lambda arrays, tokens: attend(*arrays, **tokens))(
            *jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x, 0)]), (arrays, tokens))
        )
        return jax.tree.map(lambda x: x[0], out)

    return call


TRANSFORMS = {"plain": lambda attend: attend, "remat": remat, "scan": scan, "vmap": vmap}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_mesh_level(name: str, kind: AxisType):
    with jax.set_mesh(make_mesh((2, 2, 1, 2), kind)):
        assert_matches(CASE, run(CASE, TRANSFORMS[name](mesh_call(CASE, None))))


@pytest.mark.parametrize("name", ["remat", "scan", "vmap"])
def test_inside_shard_map(name: str):
    assert_matches(CASE, run(CASE, TRANSFORMS[name](ring_call(CASE, ring_jax.make_mesh(sequence=2)))))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_in_any_sharding(shape: tuple[int, ...], kind: AxisType):
    """Unsharded, sharded right, sharded another way: the same values and gradients."""
    mesh = make_mesh(shape, kind)
    order = CASE.order
    arrays = [x[:, order] for x in CASE.arrays()]
    tokens = {name: x[..., order] for name, x in CASE.tokens().items()}
    fun = jax.jit(lambda tokens, arrays: gradients(mesh_call(CASE, mesh), tokens, arrays))
    results = []
    for spec in (P(), P("data", "sequence"), P(None, "data"), P("sequence")):
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, spec))
        if kind == AxisType.Explicit and spec != P():
            # The loss around the call must be well typed too: cotangents like the output.
            arrays_ = [*map(place, arrays[:3]), *(jax.device_put(x, NamedSharding(mesh, P())) for x in arrays[3:])]
        else:
            arrays_ = [place(x) for x in arrays]
        with jax.set_mesh(mesh):
            out = fun({name: place(x) for name, x in tokens.items()}, arrays_)
        results.append([np.asarray(x) for x in out])
    back = np.argsort(order)
    for result in results:
        assert_matches(CASE, tuple(x[:, back] for x in result))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_scan_over_layers_of_remat(kind: AxisType):
    """A stack of residual layers against the same stack on one device."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 24, 4, 8)).astype("float32")
    weights = rng.normal(size=(3, 8, 8)).astype("float32") / 3

    def loss(weights, x):
        def layer(x, w):
            return x + ring_jax.dot_product_attention(x, x @ w, x, is_causal=True), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).sum()

    mesh = make_mesh((2, 2, 1, 2), kind)
    with jax.set_mesh(mesh):
        # On an Explicit mesh the carry has a sharding, which a layer must keep.
        x_placed = jax.device_put(x, NamedSharding(mesh, P("data", "sequence", "tensor")))
        got = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(weights, x_placed))

    def dense(weights, x):
        for w in weights:
            x = x + ring_jax.reference_attention(x, x @ w, x, is_causal=True)
        return (x**2).sum()

    want = jax.jit(jax.value_and_grad(dense))(weights, x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], atol=5e-5 * np.abs(want[1]).max())


def test_one_trace_for_many_calls():
    mesh = ring_jax.make_mesh(sequence=2)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(query, key, value):
        return jax.grad(lambda q: mesh_call(CASE, mesh)(q, key, value)[0].sum())(query)

    for seed in range(3):
        arrays = Case(ring=2, batch=2, num_heads=4, seed=seed).arrays()
        step(*arrays[:3])
    chex.clear_trace_counter()


def test_losses_that_are_constant_or_ignore_the_output():
    """Constant and symbolically zero cotangents."""
    mesh = ring_jax.make_mesh(sequence=2)
    query, key, value, *_ = CASE.arrays()
    attend = mesh_call(CASE, mesh)

    @jax.jit
    def slopes(query, key, value):
        ones = jax.grad(lambda v: attend(query, key, v)[0].sum())(value)
        ignored = jax.grad(lambda q: 0.0 * q.sum() + (attend(q, key, value)[0] * 0).sum())(query)
        return ones, ignored, jax.grad(lambda v: attend(query, key, v)[1].sum())(value)

    ones, ignored, of_lse = slopes(query, key, value)
    np.testing.assert_allclose(ones.sum(), CASE.batch * CASE.length * CASE.num_heads * CASE.value_dim, rtol=1e-5)
    assert not ignored.any() and not of_lse.any()


def test_a_learned_temperature():
    """A scalar used inside the mapped function, as an argument and by closure, with and without remat."""
    mesh = ring_jax.make_mesh(sequence=2)
    query, key, value, *_ = CASE.arrays()

    def loss(temperature, inside: bool):
        if not inside:
            return (mesh_call(CASE, mesh)(query * temperature, key, value)[0] ** 2).sum()
        spec = P(None, "sequence")
        local = jax.shard_map(
            lambda t, q, k, v: ring_jax.ring_attention(q * t, k, v, is_causal=True, layout="zigzag"),
            mesh=mesh,
            in_specs=(P(), spec, spec, spec),
            out_specs=spec,
        )
        return (jax.checkpoint(local)(temperature, query, key, value) ** 2).sum()

    want, got = (jax.jit(jax.grad(loss), static_argnums=1)(jnp.float32(1.3), inside) for inside in (False, True))
    assert abs(want) > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_gradients_are_linear_in_the_cotangent():
    mesh = ring_jax.make_mesh(sequence=2)
    query, key, value, dout, dlse = CASE.arrays()
    attend = mesh_call(Case(ring=2, kind="full", layout="zigzag"), mesh)
    vjp = jax.jit(lambda cotangents: jax.vjp(attend, query, key, value)[1](cotangents))
    first, second = (dout, dlse), (np.roll(dout, 1, 1), np.roll(dlse, 1, 1))
    both = jax.tree.map(lambda a, b: 0.7 * a - 0.2 * b, first, second)
    for x, a, b in zip(vjp(both), vjp(first), vjp(second), strict=True):
        np.testing.assert_allclose(x, 0.7 * a - 0.2 * b, atol=1e-5 * np.abs(a).max())


def test_two_runs_are_bitwise_equal():
    attend = ring_call(CASE, ring_jax.make_mesh(sequence=2))
    for a, b in zip(run(CASE, attend), run(CASE, attend), strict=True):
        np.testing.assert_array_equal(a, b)


def test_replicated_key_heads_inside_shard_map():
    """Keys that do not vary over an axis that the queries vary over: their gradient is the sum over it."""
    mesh = ring_jax.make_mesh(tensor=2, sequence=2)
    query, key, value, dout, _ = CASE.arrays()
    order = CASE.order

    def loss(query, key, value):
        spec, heads = P(None, "sequence"), P(None, "sequence", "tensor")
        local = functools.partial(ring_jax.ring_attention, is_causal=True, layout="zigzag")
        out = jax.shard_map(local, mesh=mesh, in_specs=(heads, spec, spec), out_specs=heads)(query, key, value)
        return (out * dout[:, order]).sum()

    def dense(query, key, value):
        key, value = jnp.tile(key, (1, 1, 2, 1)), jnp.tile(value, (1, 1, 2, 1))
        return (ring_jax.reference_attention(query, key, value, is_causal=True) * dout).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(x[:, order] for x in (query, key, value)))
    want = jax.jit(jax.grad(dense, argnums=(0, 1, 2)))(query, key, value)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x)[:, np.argsort(order)], y, atol=5e-5 * np.abs(y).max())
