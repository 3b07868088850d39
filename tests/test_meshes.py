"""Meshes of any names, sizes and kinds of axes: right, or refused before any device work; never each device alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import ring_jax
from ring_jax.flax import attention_fn

pytestmark = pytest.mark.usefixtures("own_errors")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
QUERY, KEY = np.random.default_rng(0).normal(size=(2, 2, 16, 4, 8)).astype("float32")
KEY = KEY[:, :, :2]
ALIBI = {"score_fn": lambda s, q, k, head: s - 0.1 * (head + 1) * jnp.abs(q - k)}


def make_mesh(kinds=AUTO, **sizes: int) -> jax.sharding.Mesh:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(sizes)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def slopes(attend, mesh=None, *arrays, spec: P | None = None):
    """(out, gradients) of a call under a mesh, from arrays in this sharding."""
    arrays = arrays or (QUERY, KEY, KEY)

    def loss(*arrays):
        out = attend(*arrays)
        return (out**2).sum(), out

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    if mesh is None:
        (_, out), grads = program(*arrays)
    else:
        with jax.set_mesh(mesh):
            (_, out), grads = program(*(jax.device_put(x, NamedSharding(mesh, spec or P())) for x in arrays))
    return jax.tree.map(np.asarray, (out, *grads))


@functools.cache
def dense(length: int = 16, heads: int = 2, alibi: bool = False):
    keywords = {"is_causal": True} | (ALIBI if alibi else {})
    arrays = QUERY[:, :length], KEY[:, :length, :heads], KEY[:, :length, :heads]
    return slopes(functools.partial(ring_jax.reference_attention, **keywords), None, *arrays)


def assert_right(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5 * np.abs(b).max())


causal = functools.partial(ring_jax.dot_product_attention, is_causal=True)


@pytest.mark.parametrize("axis", [("host", "chip"), ("chip",), ["chip"], 3])
def test_a_ring_goes_round_one_axis(axis):
    mesh = make_mesh(host=2, chip=2)
    for call in (causal, attention_fn(is_causal=True, mesh=mesh, sequence_axis=axis)):
        keywords = {"mesh": mesh, "sequence_axis": axis} if call is causal else {}
        with pytest.raises(ValueError, match=r"sequence_axis=.* one mesh axis.*Schedule\(inner_size"):
            call(QUERY, KEY, KEY, **keywords)
    with pytest.raises(ValueError, match=r"axis_name=.* one mesh axis"):
        ring_jax.ring_attention(QUERY, KEY, KEY, axis_name=axis)
    if axis == 3:
        with pytest.raises(TypeError, match="batch_axis=3 must be the name of a mesh axis, a tuple of names"):
            causal(QUERY, KEY, KEY, mesh=mesh, batch_axis=axis)


def test_an_axis_of_vmap_is_none_of_the_mesh():
    """Shards of the sequence stacked and mapped over: each would see itself alone."""
    for call in (ring_jax.ring_attention, ring_jax.all_gather_attention, ring_jax.ulysses_attention):
        with pytest.raises(ValueError, match=r"axis_name='sequence' is an axis of jax.vmap here.*jax.shard_map"):
            jax.vmap(call, axis_name="sequence")(*(x[None] for x in (QUERY, KEY, KEY)))
    jax.eval_shape(jax.vmap(ring_jax.ring_attention, axis_name="rows"), *(x[None] for x in (QUERY, KEY, KEY)))


def test_a_mesh_of_other_names():
    mesh = make_mesh(dp=2, tp=2, sp=2)
    for call in (causal, attention_fn(is_causal=True)):
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match=r"the mesh has none of these axes, but dp 2, tp 2, sp"),
        ):
            call(QUERY, KEY, KEY)
    nobody = {"batch_axis": None, "head_axis": None, "sequence_axis": None}
    jax.eval_shape(functools.partial(causal, mesh=mesh, **nobody), QUERY, KEY, KEY)
    jax.eval_shape(functools.partial(causal, mesh=make_mesh(dp=1)), QUERY, KEY, KEY)


def test_a_layout_on_a_mesh_that_lacks_its_axis():
    mesh = make_mesh(data=2, sp=2)
    with pytest.raises(ValueError, match="layout='zigzag': the mesh has no sequence_axis='sequence', but data 2, sp 2"):
        causal(QUERY, KEY, KEY, mesh=mesh, layout="zigzag")
    for keywords in ({}, {"layout": "zigzag", "sequence_axis": None}, {"layout": "zigzag", "sequence_axis": "sp"}):
        jax.eval_shape(functools.partial(causal, mesh=mesh, **keywords), QUERY, KEY, KEY)
    jax.eval_shape(functools.partial(causal, mesh=make_mesh(data=2), layout="zigzag"), QUERY, KEY, KEY)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_a_layout_of_arrays_on_a_mesh_that_the_call_does_not_know(kind):
    """It was made for as many shards as that mesh has; the call would take it for the order of one."""
    cut = NamedSharding(make_mesh(kind, sequence=2), P(None, "sequence"))
    arrays = [jax.device_put(x, cut) for x in (QUERY, KEY, KEY)]
    for call in (causal, jax.jit(causal, static_argnames="layout"), ring_jax.ring_attention):
        with pytest.raises(ValueError, match=r"layout='zigzag': the mesh axis 'sequence' has size 2.*mesh= or under"):
            call(*arrays, layout="zigzag")
    with jax.set_mesh(cut.mesh), pytest.raises(ValueError, match=r"layout='striped': the mesh axis .* in shard_map"):
        ring_jax.ring_attention(QUERY, KEY, KEY, layout="striped")


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_names_of_ones_own(kind):
    """Rows over two axes, ALiBi by the head's number in the whole model."""
    mesh = make_mesh(kind, dp=1, fsdp=2, tp=2, sp=2)
    names = {"batch_axis": ("dp", "fsdp"), "head_axis": "tp", "sequence_axis": "sp"}
    call = functools.partial(causal, **names, **ALIBI)
    assert_right(slopes(call, mesh, spec=P(("dp", "fsdp"), "sp")), dense(alibi=True))


@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO, EXPLICIT), (AUTO, EXPLICIT, AUTO)], ids=str)
def test_explicit_and_automatic_axes_in_one_mesh(kinds):
    mesh = make_mesh(kinds, data=2, tensor=2, sequence=2)
    arrays = QUERY[:, :15], KEY[:, :15], KEY[:, :15]  # with padding
    assert_right(slopes(causal, mesh, *arrays), dense(15))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize(("heads", "sequence"), [(1, 1), (2, 2)])
def test_fewer_key_heads_than_shards_of_heads(heads: int, sequence: int, kind):
    """Each shard holds the head that its queries share; its gradient is the sum over them."""
    mesh, key = make_mesh(kind, data=1, tensor=4, sequence=sequence), KEY[:, :, :heads]
    assert_right(slopes(causal, mesh, QUERY, key, key), dense(heads=heads))


def test_shared_heads_are_not_expanded_on_a_device():
    """Of replicated keys a device takes its head: nothing is sent, and no array holds more than one."""
    mesh, key = make_mesh(tensor=4, sequence=1), KEY[:, :, :1]
    cut, whole = NamedSharding(mesh, P(None, None, "tensor")), NamedSharding(mesh, P())
    program = jax.jit(functools.partial(causal, mesh=mesh), in_shardings=(cut, whole, whole), out_shardings=cut)
    compiled = program.lower(QUERY, key, key).compile()
    assert ring_jax.inspect(compiled).collectives == ()
    assert "f32[2,16,4,8]" not in compiled.as_text()


def test_key_heads_that_the_shards_cannot_share():
    arrays = (np.ones((1, 4, n, 4), np.float32) for n in (12, 3, 3))
    with pytest.raises(
        ValueError, match=r"3 key/value heads .* tensor of size 4, or divide it; make that axis smaller"
    ):
        causal(*arrays, mesh=make_mesh(tensor=4))


@pytest.mark.parametrize("keywords", [ALIBI, {"dropout_rate": 0.5, "dropout_seed": 0}], ids=["score_fn", "dropout"])
def test_heads_that_would_be_counted_from_0_on_every_device(keywords):
    mesh, spec = make_mesh(dp=2, tp=2, sp=2), P("dp", "sp", "tp")

    def call(**names):
        local = functools.partial(ring_jax.ring_attention, axis_name="sp", is_causal=True, **names, **keywords)
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(QUERY, KEY, KEY)

    with pytest.raises(ValueError, match=rf"{next(iter(keywords))}: the query differs along mesh axis tp, .*head_axis"):
        call(batch_axis="dp")
    with pytest.raises(ValueError, match="mesh axis dp, "):
        call(head_axis="tp")
    got = call(batch_axis="dp", head_axis="tp")
    want = jax.jit(functools.partial(ring_jax.reference_attention, is_causal=True, **keywords))(QUERY, KEY, KEY)
    np.testing.assert_allclose(got, want, atol=5e-6)

    def outer(**names):
        inner = functools.partial(causal, sequence_axis="sp", **names, **keywords)
        specs = {"in_specs": P(None, None, "tp"), "out_specs": P(None, None, "tp"), "axis_names": {"tp"}}
        return jax.shard_map(inner, mesh=mesh, **specs)

    with pytest.raises(ValueError, match="mesh axis tp, "):
        jax.eval_shape(outer(batch_axis="dp"), QUERY, KEY, KEY)
    jax.eval_shape(outer(batch_axis="dp", head_axis="tp"), QUERY, KEY, KEY)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_a_global_call_where_every_axis_is_manual(kind):
    """A data-parallel step inside shard_map: nothing is left to cut, rows and heads keep their numbers."""
    mesh, spec = make_mesh(kind, data=2, tensor=2), P("data", None, "tensor")
    call = functools.partial(causal, **ALIBI)
    local = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    assert_right(slopes(local, mesh, spec=spec), dense(alibi=True))


def test_a_ring_with_automatic_axes_around_it():
    mesh, spec = make_mesh(data=2, tensor=2, sequence=2), P(None, "sequence")
    call = functools.partial(ring_jax.ring_attention, is_causal=True)
    local = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"sequence"})
    assert_right(slopes(local, mesh, spec=P("data", "sequence", "tensor")), dense())


def test_a_ring_with_explicit_axes_around_it():
    """Right where they cut nothing, refused where they do."""
    mesh, spec = make_mesh(EXPLICIT, data=2, sequence=2), P(None, "sequence")
    call = functools.partial(ring_jax.ring_attention, is_causal=True)
    local = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"sequence"})
    assert_right(slopes(local, mesh, spec=spec), dense())
    with pytest.raises(ValueError, match=r"mesh axis data is Explicit, not manual.*add it to the axis_names"):
        slopes(local, mesh, spec=P("data", "sequence"))


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)], ids=str)
def test_layouts_of_arrays_that_are_cut_by_type(kinds):
    """`jax.make_mesh` makes such axes: the library's own output goes back to natural order, still cut as it was."""
    mesh = jax.make_mesh((2, 2), ("sequence", "data"), axis_types=kinds, devices=jax.devices()[:4])
    names = P("data", "sequence") if kinds[1] == EXPLICIT else P(None, "sequence")
    call = functools.partial(causal, layout="zigzag")

    def step(query, key, value):
        moved = [ring_jax.to_layout(x, "zigzag", 2) for x in (query, key, value)]
        out = call(*moved)
        back = ring_jax.from_layout(out, "zigzag", 2)
        assert jax.typeof(back).sharding == jax.typeof(out).sharding
        return back

    assert_right(slopes(step, mesh, spec=names), dense())
    x = jax.device_put(QUERY, NamedSharding(mesh, names))
    for axis in (1, -3):
        moved = ring_jax.to_layout(x, "striped", 2, axis=axis)
        assert jax.typeof(moved).sharding == jax.typeof(x).sharding
        np.testing.assert_array_equal(moved, ring_jax.to_layout(QUERY, "striped", 2))
