import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring_jax


def parts(cuts: list[slice], query, key, value):
    ids = np.zeros(key.shape[1], np.int32)
    for cut in cuts:
        mine = ids.copy()
        mine[cut] = 1
        yield ring_jax.reference_attention(
            query, key, value, segment_ids=(np.ones(query.shape[1], np.int32), mine), return_residual=True
        )


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, 12, 2, 5)), jnp.float32) for _ in range(3)]


def merged(pieces):
    pieces = list(pieces)
    out, lse = pieces[0]
    for other in pieces[1:]:
        out, lse = ring_jax.merge(out, lse, *other)
    return out, lse


def test_whole_from_parts_in_any_order(arrays):
    whole = ring_jax.reference_attention(*arrays, return_residual=True)
    pieces = list(parts([slice(0, 3), slice(3, 4), slice(4, 12), slice(5, 5)], *arrays))
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        for got, want in zip(merged(pieces[i] for i in order), whole, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6)


def test_identity_is_exact(arrays):
    out, lse = ring_jax.reference_attention(*arrays, return_residual=True)
    zero, none = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for pair in (ring_jax.merge(out, lse, zero, none), ring_jax.merge(zero, none, out, lse)):
        np.testing.assert_array_equal(pair[0], out)
        np.testing.assert_array_equal(pair[1], lse)
    out, lse = ring_jax.merge(zero, none, zero, none)
    assert not out.any() and jnp.isneginf(lse).all()


def test_gradients_of_merge_are_those_of_the_whole(arrays):
    """Differentiating through lse too: a merge that stops there has a right value and a wrong gradient."""

    def loss(attend):
        def call(*arrays):
            out, lse = attend(*arrays)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() + (lse**2).sum()

        return jax.jit(jax.grad(call, argnums=(0, 1, 2)))

    got = loss(lambda *x: merged(parts([slice(0, 5), slice(5, 12), slice(0, 0)], *x)))(*arrays)
    want = loss(lambda *x: ring_jax.reference_attention(*x, return_residual=True))(*arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5 * np.abs(b).max())


def test_rows_that_see_nothing_have_finite_gradients():
    zero, none = jnp.zeros((1, 2, 1, 3)), jnp.full((1, 2, 1), -jnp.inf)

    def loss(out_a, lse_a, out_b, lse_b):
        out, lse = ring_jax.merge(out_a, lse_a, out_b, lse_b)
        return out.sum() + jnp.where(jnp.isinf(lse), 0, lse).sum()

    for gradient in jax.grad(loss, argnums=(0, 1, 2, 3))(zero, none, zero, none):
        assert np.isfinite(gradient).all() and not gradient.any()


def test_a_log_sum_exp_that_is_nan_stays():
    """-inf would say that the row saw nothing."""
    out, lse = jnp.ones((1, 3, 1, 2)), jnp.array([[[jnp.nan], [0.0], [-jnp.inf]]])
    for other in (jnp.zeros_like(lse), jnp.full_like(lse, -jnp.inf)):
        for pair in (ring_jax.merge(out, lse, out, other), ring_jax.merge(out, other, out, lse)):
            np.testing.assert_array_equal(np.isnan(pair[1]).ravel(), [True, False, False])
            np.testing.assert_array_equal(np.isnan(pair[0]).all(-1).ravel(), [True, False, False])


def test_half_precision_outputs_keep_their_dtype():
    out, lse = jnp.ones((1, 2, 1, 3), jnp.bfloat16), jnp.zeros((1, 2, 1))
    merged_out, merged_lse = ring_jax.merge(out, lse, out, lse)
    assert merged_out.dtype == jnp.bfloat16 and merged_lse.dtype == jnp.float32
    np.testing.assert_allclose(merged_lse, np.log(2), rtol=1e-6)
