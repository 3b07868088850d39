"""Dropout in the model: what falls is a function of seed, step, row, place and token, and nothing falls in evaluation.

That the same falls on every mesh and schedule is tested with everything else on, in `test_full_step.py`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model import CONFIG, make_model, run, run_sharded
from test_step import _no_stored_programs, packed_batch, walk  # noqa: F401
from tiny_run import config as tiny_config

import ring_jax
from models import ModelConfig
from models.dropout import drop_tokens, fold, row_words
from ring_jax import make_mesh
from train.config import MeshConfig
from train.state import init_state
from train.step import abstract_state, make_eval_step, make_train_step, place_batch

RATE = 0.3
DROPPING: dict[str, Any] = {"dropout_rate": RATE, "attention_dropout_rate": RATE}


@functools.cache
def kept(seed: int = 0, place: int = 0, positions: int = 0, segment: int = 1) -> np.ndarray:
    """[rows, tokens, features]: what stays of ones."""
    at, ids = jnp.arange(positions, positions + 64), jnp.full(64, segment, jnp.int32)
    dropped = drop_tokens(jnp.ones((4, 64, 33)), fold(row_words(seed, 4), place), at, ids, RATE)
    values = np.unique(np.asarray(dropped))
    np.testing.assert_allclose(values, [0, 1 / (1 - RATE)], rtol=1e-6)
    return np.asarray(dropped) > 0


def is_independent(a: np.ndarray, b: np.ndarray) -> bool:
    """Two sets agree as often as independent ones, within five deviations."""
    chance = RATE**2 + (1 - RATE) ** 2
    return abs(np.mean(a == b) - chance) < 5 * np.sqrt(chance * (1 - chance) / a.size)


def test_share_and_expectation():
    share = kept().mean()
    assert abs(share - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / kept().size)
    assert abs(share / (1 - RATE) - 1) < 0.03  # the mean of what is left is that of all


def test_bfloat16_keeps_the_expectation():
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (4, 64, 33)), jnp.bfloat16)
    dropped = np.asarray(drop_tokens(x, row_words(0, 4), jnp.arange(64), None, RATE), np.float64)
    stays = dropped > 0
    scale = dropped[stays].sum() / np.asarray(x, np.float64)[stays].sum()
    assert abs(scale * (1 - RATE) - 1) < 2e-4  # the factor rounded to bfloat16 would be off by 8e-4


def test_every_part_of_the_key_counts():
    base = kept()
    for other in (kept(seed=1), kept(seed=1 << 40), kept(place=1), kept(segment=2), kept(positions=1 << 20)):
        assert is_independent(base, other)
    assert is_independent(base[0], base[1]) and is_independent(base[:, 1:], base[:, :-1])
    assert is_independent(base[..., 1:], base[..., :-1])
    np.testing.assert_array_equal(kept(positions=1)[:, :-1], base[:, 1:])  # the token counts, not where it lies


def test_dropout_needs_a_seed_and_a_rate():
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    call = jax.jit(lambda model, seed: model(jnp.asarray(tokens), dropout_seed=seed))
    plain, model = run(make_model(), tokens), make_model(**DROPPING)
    np.testing.assert_array_equal(run(model, tokens), plain)
    first = call(model, 3)
    np.testing.assert_array_equal(call(model, 3), first)
    for other in (call(model, 4), *(call(make_model(**{name: RATE}), 3) for name in DROPPING)):
        assert np.abs(other - first).max() > 0.1 and np.abs(other - plain).max() > 0.1
    with pytest.raises(ValueError, match=r"the seed has shape \[2, 2\]"):
        model(jnp.asarray(tokens), dropout_seed=np.zeros((2, 2), np.uint32))


def test_default_positions_give_the_same_set_on_shards():
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    model = make_model(**DROPPING)
    want = run(model, tokens, dropout_seed=3)
    got = run_sharded(model, tokens, layout="zigzag", sequence=2, tensor=2, dropout_seed=3)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_rows_of_attention_may_have_seeds_of_their_own():
    """As a call for each row alone with its seed, on a mesh that cuts rows, heads and sequence."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 16, 4, 8)).astype(np.float32) for _ in range(3))
    seeds = np.array([[1, 2], [3, 4]], np.uint32)
    call = functools.partial(ring_jax.dot_product_attention, is_causal=True, dropout_rate=0.5)
    got = call(query, key, value, dropout_seed=seeds, mesh=make_mesh(data=2, tensor=2, sequence=2))
    for row in range(2):
        one = slice(row, row + 1)
        want = ring_jax.reference_attention(
            query[one], key[one], value[one], is_causal=True, dropout_rate=0.5, dropout_seed=seeds[row]
        )
        np.testing.assert_allclose(got[one], want, atol=5e-6)
    with pytest.raises(ValueError, match="has seeds for 3 rows, and there are 2; give one for each"):
        call(query, key, value, dropout_seed=np.zeros((3, 2), np.uint32))


# --- the train step ------------------------------------------------------------------------------------------------


@functools.cache
def steps() -> tuple[Any, ...]:
    """Configuration, mesh, batch, step, and the first state on the host."""
    model = dataclasses.replace(tiny_config().model, num_layers=1, **DROPPING)
    config = tiny_config(mesh=MeshConfig(data=2, sequence=2), model=model)
    mesh = make_mesh(**config.mesh.sizes())
    batch = place_batch({name: x[:2] for name, x in packed_batch(0).items()}, config, mesh)
    return config, mesh, batch, make_train_step(config, mesh), jax.device_get(init_state(config, mesh))


def place(state: Any, **changes: Any) -> Any:
    """A state of the host on the mesh; a step donates it."""
    config, mesh, *_ = steps()
    state = dataclasses.replace(state, **changes)
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, abstract_state(config, mesh))


def test_the_step_enters_and_resuming_repeats_it_to_the_bit():
    _, _, batch, step, start = steps()
    second, first = step(place(start), batch)
    saved = jax.device_get(second)
    _, other = step(place(start, step=np.int32(7)), batch)
    assert abs(float(other["loss"]) / float(first["loss"]) - 1) > 1e-4
    going_on, resumed = step(second, batch), step(place(saved), batch)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (going_on, resumed)))


def test_evaluation_drops_nothing():
    config, mesh, batch, _, start = steps()
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, **dict.fromkeys(DROPPING, 0.0)))
    params = jax.tree.unflatten(jax.tree.structure(abstract_state(plain, mesh).params), jax.tree.leaves(start.params))
    got, want = make_eval_step(config, mesh)(start.params, batch), make_eval_step(plain, mesh)(params, batch)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_what_falls_is_computed_again_not_kept():
    """Known before the loop over layers, the draws would be made there, for all layers, and stay."""
    config, mesh, *_ = steps()
    batch = {name: jax.ShapeDtypeStruct((2, 64), jnp.int32) for name in packed_batch(0)}
    program = make_train_step(config, mesh).trace(abstract_state(config, mesh), batch).jaxpr.jaxpr
    scans = [eqn for _, eqn in walk(program) if eqn.primitive.name == "scan"]
    assert scans
    for eqn in scans:
        assert not any(v.aval.dtype == bool and v.aval.ndim > 2 for v in eqn.outvars)


@pytest.mark.parametrize("name", list(DROPPING))
@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rates_out_of_range_are_refused(name: str, rate: float):
    sizes = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG)}
    problems = ModelConfig(**sizes | {name: rate}).problems()
    assert problems == [f"model.{name}={rate} must be at least 0 and less than 1; 0 drops nothing"]
