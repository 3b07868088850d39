"""The update rule, its schedule, clipping and weight decay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models import ModelConfig, Transformer
from models.sharding import parameter_name
from train.config import OptimizerConfig
from train.optimizer import decay_mask, make_optimizer, make_schedule

CONFIG = OptimizerConfig(learning_rate=0.1, min_learning_rate_ratio=0.2, warmup_steps=4, clip_norm=1.0)


@pytest.fixture(scope="module")
def params():
    """A model of ones, whatever its initial values would be."""
    config = ModelConfig(
        vocab_size=8, num_layers=2, embed_dim=4, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=4, remat="none"
    )
    shapes = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)


def by_name(params) -> dict[str, np.ndarray]:
    return {parameter_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def test_schedule_ramps_up_and_decays_to_the_last_step():
    schedule = make_schedule(CONFIG, 10)
    rates = np.array([schedule(jnp.int32(step)) for step in range(10)])
    np.testing.assert_allclose(rates[:4], [0.025, 0.05, 0.075, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates[3 + 3], 0.02 + 0.08 * 0.5, rtol=1e-6)
    np.testing.assert_allclose(rates[9], 0.02, rtol=1e-6)
    assert (np.diff(rates[3:]) < 0).all()


@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_warmup_is_clamped_to_the_number_of_steps(num_steps):
    schedule = make_schedule(CONFIG, num_steps)
    rates = [float(schedule(step)) for step in range(num_steps)]
    np.testing.assert_allclose(rates, [0.1 * (step + 1) / num_steps for step in range(num_steps)], rtol=1e-6)


def test_without_warmup_the_first_step_decays_already():
    schedule = make_schedule(dataclasses.replace(CONFIG, warmup_steps=0), 2)
    np.testing.assert_allclose([float(schedule(0)), float(schedule(1))], [0.06, 0.02], rtol=1e-6)


def test_matrices_decay_and_norms_and_embeddings_do_not(params):
    mask = by_name(decay_mask(params))
    assert {name for name, decays in mask.items() if not decays} == {
        "embedding",
        "layers.attention_norm.scale",
        "layers.mlp_norm.scale",
        "final_norm.scale",
    }
    optimizer = make_optimizer(dataclasses.replace(CONFIG, weight_decay=0.5, warmup_steps=0), 1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    for name, update in by_name(updates).items():
        np.testing.assert_allclose(update, -0.02 * 0.5 if mask[name] else 0.0, rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.5, 1e9])
def test_sgd_moves_by_the_clipped_gradient(params, clip_norm):
    optimizer = make_optimizer(dataclasses.replace(CONFIG, name="sgd", clip_norm=clip_norm), 10)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    norm = float(np.sqrt(sum(leaf.size for leaf in jax.tree.leaves(params))))
    assert float(optax.tree.norm(params)) == pytest.approx(norm)
    for update in jax.tree.leaves(updates):
        np.testing.assert_allclose(update, -0.025 * min(1.0, clip_norm / norm), rtol=1e-6)


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"optimizer.name='adam' must be"):
        make_optimizer(dataclasses.replace(CONFIG, name="adam"), 10)
