"""Sampling: a fixed window that slides, one compiled program, and a seed that determines the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_run import config

from models import Transformer
from train.data import Document, encode
from train.sample import _sample, choose_prompt, continue_text


@pytest.fixture(scope="module")
def model():
    return Transformer(config().model, rngs=nnx.Rngs(0))


def test_the_prompt_is_the_middle_of_the_longest_document():
    documents = [Document("a", encode("short")), Document("b", encode("0123456789"))]
    np.testing.assert_array_equal(choose_prompt(documents, length=4), encode("3456"))
    np.testing.assert_array_equal(choose_prompt(documents, length=100), encode("0123456789"))


def test_without_temperature_every_token_is_the_likeliest_after_the_window(model):
    prompt = np.asarray(encode("ring attention"), np.int32)
    sampled = continue_text(model, prompt, num_tokens=5, temperature=0.0)
    text = prompt
    for token in sampled:
        assert token == int(jnp.argmax(model(jnp.asarray(text[-len(prompt) :])[None])[0, -1]))
        text = np.append(text, token)


def test_the_seed_determines_the_sample_and_nothing_compiles_twice(model):
    prompt = np.asarray(encode("ring attention"), np.int32)
    compiled = _sample._cache_size()
    first, again, other = (continue_text(model, prompt, num_tokens=32, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert _sample._cache_size() == compiled + 1


def test_a_model_spread_over_a_mesh_is_gathered(model):
    prompt = np.asarray(encode("ring attention"), np.int32)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(model, jax.NamedSharding(mesh, jax.P()))
    np.testing.assert_array_equal(
        continue_text(spread, prompt, num_tokens=5), continue_text(model, prompt, num_tokens=5)
    )
