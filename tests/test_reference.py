"""The oracle itself, against NumPy loops, `jax.nn` and finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import Case, dense_mask, gradients, reference

import ring_jax

KINDS = ("full", "causal", "packed", "packed_causal", "restart", "shared")


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_against_loops(kind: str):
    case = Case(kind=kind, local=9, batch=2, seed=5)
    query, key, value, *_ = (x.astype("float64") for x in case.arrays())
    mask = dense_mask(case)
    group = case.num_heads // case.num_kv_heads
    out, lse, *_ = reference(case)
    for b, t, n in np.ndindex(*query.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        if not len(seen):
            assert not out[b, t, n].any() and np.isneginf(lse[b, t, n])
            continue
        scores = key[b, seen, n // group] @ query[b, t, n] / np.sqrt(case.head_dim)
        weights = np.exp(scores)
        np.testing.assert_allclose(out[b, t, n], weights @ value[b, seen, n // group] / weights.sum(), atol=1e-12)
        np.testing.assert_allclose(lse[b, t, n], np.log(weights.sum()), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_attention_against_the_oracle(kind: str):
    """Outputs and gradients in float64: both definitions are right only if they agree."""
    case = Case(kind=kind, local=9, batch=3, seed=5)
    with jax.enable_x64(True):
        attend = functools.partial(ring_jax.reference_attention, is_causal=case.is_causal, return_residual=True)
        got = jax.jit(lambda tokens, arrays: gradients(attend, tokens, arrays))(
            case.tokens(), [x.astype("float64") for x in case.arrays()]
        )
        for x, y in zip(got, reference(case), strict=True):
            assert x.dtype == jnp.float64
            np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_against_jax_nn(is_causal: bool):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 8, n, 4)), jnp.float32) for n in (6, 2, 2))
    want = jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)
    for got in (ring_jax.reference_attention, ring_jax.dot_product_attention):
        np.testing.assert_allclose(got(query, key, value, is_causal=is_causal), want, atol=1e-6)


def test_causal_with_two_lengths_is_that_of_jax_nn():
    """Without positions both sides count from 0: the top left corner, as `jax.nn` has it."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 2, 4)), jnp.float32)
    want = jax.nn.dot_product_attention(x[:, :3], x, x, is_causal=True)
    for got in (ring_jax.reference_attention, ring_jax.dot_product_attention):
        np.testing.assert_allclose(got(x[:, :3], x, x, is_causal=True), want, atol=1e-6)


def test_gradients_by_finite_differences():
    case = Case(kind="restart", local=7, batch=1, seed=2)
    arrays = [x.astype("float64") for x in case.arrays()]
    mask = dense_mask(case)

    def value(arrays):
        out, lse, *_ = oracle.attention(*arrays, mask=mask, scale=case.head_dim**-0.5)
        return (out * arrays[3]).sum() + (np.where(np.isinf(lse), 0, lse) * arrays[4]).sum()

    rng = np.random.default_rng(0)
    for side, slope in enumerate(reference(case)[2:]):
        for _ in range(6):
            index = tuple(int(rng.integers(n)) for n in slope.shape)
            moved = []
            for step in (1e-5, -1e-5):
                changed = [x.copy() for x in arrays]
                changed[side][index] += step
                moved.append(value(changed))
            np.testing.assert_allclose((moved[0] - moved[1]) / 2e-5, slope[index], atol=1e-8)
