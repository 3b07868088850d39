"""Rows that see nothing, padding, and what may hide in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, assert_matches, gradients, ring_call, run

import ring_jax

PADDED = [
    Case(ring=ring, layout=layout, kind="restart") for ring, layout in ((1, "contiguous"), (4, "zigzag"), (3, None))
]


def results(case: Case, arrays, tokens):
    order, back = case.order, np.argsort(case.order)
    attend = ring_call(case, ring_jax.make_mesh(sequence=case.ring))
    tokens = {name: x[..., order] for name, x in tokens.items()}
    out = jax.jit(lambda t, a: gradients(attend, t, a))(tokens, [x[:, order] for x in arrays])
    return [np.asarray(x)[:, back] for x in out]


@pytest.mark.parametrize("poison", [1e4, np.nan, np.inf])
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_may_hold_anything(case: Case, poison: float):
    """Bitwise the same at real tokens, and exactly 0 at padding, whatever q, k, v and the cotangents hold there."""
    arrays, tokens = case.arrays(), case.tokens()
    pad = tokens["segment_ids"] == 0
    assert pad.any()
    poisoned = [np.where(pad.reshape(*pad.shape, *[1] * (x.ndim - 2)), np.float32(poison), x) for x in arrays]
    for clean, dirty in zip(results(case, arrays, tokens), results(case, poisoned, tokens), strict=True):
        np.testing.assert_array_equal(dirty, clean)
        assert np.all(np.where(np.isneginf(dirty), 0, dirty)[pad] == 0)
        assert np.isfinite(dirty[~pad]).all()


def test_padding_cotangents_reach_no_real_gradient():
    case = PADDED[1]
    arrays, tokens = list(case.arrays()), case.tokens()
    pad = (tokens["segment_ids"] == 0)[..., None]
    first = results(case, arrays, tokens)
    arrays[3], arrays[4] = np.where(pad[..., None], 7.0, arrays[3]), np.where(pad, -3.0, arrays[4])
    for a, b in zip(first, results(case, [x.astype("float32") for x in arrays], tokens), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_whole_rows_and_whole_shards_of_padding(layout: str):
    case = Case(ring=4, layout=layout, kind="restart", batch=3)
    segments = case.tokens()["segment_ids"].copy()
    segments[0] = 0
    segments[1, : case.length // 2] = 0
    arrays = case.arrays()
    out, lse, *slopes = results(case, arrays, {"segment_ids": segments, "positions": case.tokens()["positions"]})
    assert not out[0].any() and np.isneginf(lse[0]).all()
    assert not any(x[0].any() for x in slopes)
    assert all(np.isfinite(x).all() for x in (out, *slopes))
    alone = [x[2:] for x in arrays]
    tokens = {name: x[2:] for name, x in case.tokens().items()}
    for x, y in zip((out, lse, *slopes), results(case, alone, tokens), strict=True):
        np.testing.assert_array_equal(x[2:], y)


def test_first_block_is_foreign():
    """A device whose own block holds nothing that its queries may see: the running maximum starts from nothing."""
    case = Case(ring=4, layout="contiguous", kind="packed", batch=1, local=4)
    segments = np.tile(np.array([1, 1, 1, 1, 2, 2, 2, 2], np.int32), 2)[None]
    query_ids = np.roll(segments, 4, axis=1)
    query, key, value, *_ = case.arrays()
    want = ring_jax.reference_attention(query, key, value, segment_ids=(query_ids, segments))
    call = functools.partial(ring_jax.dot_product_attention, mesh=ring_jax.make_mesh(sequence=4))
    got = jax.jit(call)(query, key, value, segment_ids=(query_ids, segments))
    np.testing.assert_allclose(got, want, atol=5e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nan_and_inf_checks_stay_silent(dtype: str):
    case = Case(ring=2, layout="zigzag", kind="restart", dtype=dtype, value_dim=10, local=8)
    jax.config.update("jax_debug_nans", True)
    try:
        assert_matches(case, run(case, ring_call(case, ring_jax.make_mesh(sequence=2))))
    finally:
        jax.config.update("jax_debug_nans", False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_masked_row_under_checks_for_nan_and_inf(dtype: str):
    """Eight tokens, one of which sees nothing: the masked scores fit the dtype and reach no result."""
    mask = np.tril(np.ones((8, 8), bool)) & (np.arange(8) != 5)[:, None]
    mesh, rng = ring_jax.make_mesh(sequence=2), np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        x, dout = (jnp.asarray(rng.normal(size=(1, 8, 2, 4)), dtype) for _ in range(2))

        def slopes(attend, x, dout, **keywords):
            def loss(x):
                out = attend(x, x, x, mask=mask, **keywords)
                return (out * dout).astype(jnp.float32).sum(), out

            return jax.jit(jax.grad(loss, has_aux=True))(x)

        with jax.debug_nans(True), jax.debug_infs(True):
            got = slopes(ring_jax.dot_product_attention, x, dout, mesh=mesh, strategy="ring")
        wide = [y.astype(jnp.promote_types(dtype, jnp.float32)) for y in (x, dout)]
        want = slopes(ring_jax.reference_attention, *wide)
    limit = {"float64": 1e-12, "float32": 5e-6}.get(dtype, 2 * float(jnp.finfo(dtype).eps))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype and not np.isnan(b).any()
        np.testing.assert_allclose(np.asarray(a, b.dtype), b, atol=limit * max(1, np.abs(b).max()))
    assert not got[1][:, 5].any()


def test_checks_for_nan_outside_of_jit():
    """A call on a mesh is one program there, too."""
    x, mesh = jnp.ones((1, 4, 1, 4)), ring_jax.make_mesh(sequence=2)
    with jax.debug_nans(True):
        attend = functools.partial(ring_jax.dot_product_attention, mesh=mesh, strategy="ring", is_causal=True)
        slope = jax.grad(lambda value: attend(x, x, value).sum())(x)
    np.testing.assert_allclose(slope.sum(), 16, rtol=1e-6)


def test_float64_is_not_rounded():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(2, 16, 2, 4))
        call = {"is_causal": True, "return_residual": True}
        attend = functools.partial(ring_jax.dot_product_attention, **call, mesh=ring_jax.make_mesh(sequence=4))
        got = jax.jit(attend)(x, x, x)
        want = ring_jax.reference_attention(x, x, x, **call)
        assert got[0].dtype == got[1].dtype == jnp.float64
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-13)


def test_positions_of_any_size():
    """Adding a constant to all positions changes nothing: they are 32-bit integers on the whole way."""
    case = Case(ring=2, layout="contiguous", kind="causal", local=8, batch=2)
    query, key, value, *_ = case.arrays()
    call = functools.partial(ring_jax.dot_product_attention, is_causal=True, mesh=ring_jax.make_mesh(sequence=2))
    attend = jax.jit(lambda positions: call(query, key, value, positions=positions))
    want = jax.jit(call)(query, key, value)
    for base in (0, 250, 32_760, 65_530, 2**24 - 8, 2**31 - 17):
        np.testing.assert_array_equal(attend((np.arange(16) + base).astype(np.int32)), want)
