"""The loss, the dealing out of tokens, and the pipeline that feeds it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from ring_jax import make_mesh
from train.loss import cross_entropy, share_tokens
from train.pipeline import run_pipeline

V = 11


def one_hot_loss(logits: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
    """The same in float64 by one-hot rows; a target that is ignored has no row."""
    logits = logits.astype(np.float64)
    nats = np.log(np.exp(logits).sum(-1)) - (logits * (targets[..., None] == np.arange(V))).sum(-1)
    return float(nats[targets >= 0].sum()), int((targets >= 0).sum())


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, 8, V)).astype(np.float32) * 3


@pytest.mark.parametrize("ignore", [-1, -100])
def test_loss_equals_a_one_hot_sum(logits, ignore):
    targets = np.random.default_rng(1).integers(0, V, (2, 8)).astype(np.int32)
    targets[0, :3] = [0, V - 1, ignore]
    targets[1, 2:] = ignore
    loss_sum, count = cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    want_sum, want_count = one_hot_loss(logits, targets)
    assert (loss_sum.dtype, count.dtype, int(count)) == (jnp.float32, jnp.int32, want_count)
    assert float(loss_sum) == pytest.approx(want_sum, rel=1e-6)


def test_nan_at_ignored_positions_poisons_nothing(logits):
    targets = np.array([[1, 2, 3, 4, 0, -1, -1, -1]] * 2, np.int32)
    poisoned = logits.copy()
    poisoned[:, 5:] = np.nan
    value_and_grad = jax.value_and_grad(lambda x: cross_entropy(x, jnp.asarray(targets))[0])
    loss, grad = value_and_grad(jnp.asarray(poisoned))
    clean_loss, clean_grad = value_and_grad(jnp.asarray(logits))
    assert float(loss) == float(clean_loss)
    np.testing.assert_array_equal(grad, clean_grad)
    assert (np.asarray(grad[:, 5:]) == 0).all()


def test_no_targets_at_all(logits):
    targets = jnp.full((2, 8), -1)
    (loss, count), grad = jax.value_and_grad(lambda x: cross_entropy(x, targets), has_aux=True)(jnp.asarray(logits))
    assert (float(loss), int(count)) == (0.0, 0)
    assert (np.asarray(grad) == 0).all()


@pytest.mark.parametrize("num_tokens", [1, 8, 10])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2), (1, 3)])
def test_every_token_of_the_last_stage_goes_to_one_device(num_tokens, tensor, pipeline):
    mesh = make_mesh(tensor=tensor, pipeline=pipeline)
    # On the other stages there is something else, which must not leak, not even as NaN.
    x = np.full((pipeline, num_tokens, 1), np.nan, np.float32)
    x[-1, :, 0] = np.arange(num_tokens)
    targets = np.arange(num_tokens, dtype=np.int32)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("pipeline"), P()), out_specs=P(("pipeline", "tensor")))
    def share(x, targets):
        x, targets = share_tokens(x[0], targets)
        return jnp.concatenate([x, targets[:, None].astype(x.dtype)], axis=1)

    shared = np.asarray(jax.jit(share)(x, targets))
    assert len(shared) == -(-num_tokens // (tensor * pipeline)) * tensor * pipeline
    np.testing.assert_array_equal(shared[:num_tokens, 0], targets)
    np.testing.assert_array_equal(shared[:num_tokens, 1], targets)
    assert (shared[num_tokens:, 1] == -1).all()


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_pipeline_applies_every_stage_with_its_own_microbatch(stages, num_microbatches):
    """Stage s maps x to x * weight[s] + place: the order of the stages and the place of each piece both show."""
    mesh = make_mesh(pipeline=stages)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=stages).astype(np.float32)
    x = rng.normal(size=(num_microbatches, 2, 3)).astype(np.float32)
    place = rng.integers(0, 9, (num_microbatches, 2, 1)).astype(np.int32)

    def local(weight, x, place):
        out = run_pipeline(lambda x, place: x * weight[0] + place, x, place)
        is_last = jax.lax.axis_index("pipeline") == stages - 1
        return jax.lax.psum(jnp.where(is_last, jnp.sum(out**2), 0.0), "pipeline")

    def plain(weight, x):
        for s in range(stages):
            x = x * weight[s] + place
        return jnp.sum(x**2)

    specs = (P("pipeline"), P(), P())
    piped = jax.shard_map(
        lambda *args: jax.value_and_grad(local, (0, 1))(*args),
        mesh=mesh,
        in_specs=specs,
        out_specs=(P(), specs[:2]),
    )
    loss, grads = jax.jit(piped)(weight, x, place)
    want, want_grads = jax.value_and_grad(plain, (0, 1))(weight, x)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    jax.tree.map(lambda got, true: np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4), grads, want_grads)
