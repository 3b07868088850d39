"""The train step: the same five steps on every mesh, one compilation, and no collective but those that are written."""

import collections
import dataclasses
import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P

from models import ModelConfig
from ring_jax import from_layout, make_mesh
from train.config import MESH_AXES, DataConfig, LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.flops import pipeline_bubble
from train.state import abstract_state, init_state, state_shardings
from train.step import make_eval_step, make_train_step, place_batch

B, T, V, NUM_STEPS = 4, 64, 88, 5
MODEL = ModelConfig(
    vocab_size=V, num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, rope_theta=500.0
)
# Plain SGD shows every gradient as it is, and the bound on the norm is one that every step exceeds.
SGD = OptimizerConfig(name="sgd", learning_rate=1.0, warmup_steps=2, clip_norm=0.5)
# Sizes in the order data, tensor, pipeline, sequence; and microbatches: fewer than, as many as, more than stages.
ONE = (1, 1, 1, 1)
MESHES = {
    (2, 1, 1, 1): 2,
    (1, 2, 1, 1): 1,
    (1, 1, 2, 1): 4,
    (1, 1, 1, 2): 1,
    (1, 2, 2, 2): 1,
    (2, 2, 2, 2): 2,
}


def make_config(sizes: tuple[int, ...], num_microbatches: int = 1, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=MODEL,
        mesh=MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True))),
        data=DataConfig(seq_len=T, batch_size=B),
        optimizer=SGD,
        num_microbatches=num_microbatches,
        num_steps=NUM_STEPS,
    )
    return dataclasses.replace(config, **changes)


def packed_batch(seed: int, length: int = T, *, rows: int = B, shorter: int = 9) -> dict[str, np.ndarray]:
    """Documents of odd lengths, and more padding, hence fewer targets, in every next row."""
    rng = np.random.default_rng(seed)
    batch = {name: np.zeros((rows, length), np.int32) for name in ("positions", "segment_ids")}
    batch["tokens"] = rng.integers(0, V, (rows, length)).astype(np.int32)
    batch["targets"] = np.full((rows, length), -1, np.int32)
    for row in range(rows):
        start, document, end = 0, 1, length - 3 - shorter * row
        while start < end:
            stop = min(end, start + int(rng.integers(1, 40)))
            batch["positions"][row, start:stop] = np.arange(stop - start)
            batch["segment_ids"][row, start:stop] = document
            batch["targets"][row, start : stop - 1] = batch["tokens"][row, start + 1 : stop]
            start, document = stop, document + 1
    return batch


@functools.cache
def initial_params() -> Any:
    return jax.device_get(init_state(make_config(ONE), make_mesh()).params)


def place_state(config: TrainConfig, mesh: jax.sharding.Mesh) -> Any:
    """A fresh state; its parameters are made once for all meshes and kinds of model (they are equal: see below)."""
    params = dict(jax.tree_util.tree_leaves_with_path(initial_params()))
    abstract = abstract_state(config, mesh)
    state = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract)
    placed = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(params[path], leaf.sharding), abstract.params
    )
    return dataclasses.replace(state, params=placed)


@functools.cache
def run(
    sizes: tuple[int, ...], num_microbatches: int = 1, length: int = T, **changes: Any
) -> tuple[list[dict[str, float]], Any]:
    """Metrics of five steps and the parameters after them."""
    config = make_config(sizes, num_microbatches, **changes)
    mesh = make_mesh(**config.mesh.sizes())
    step, state, metrics = make_train_step(config, mesh), place_state(config, mesh), []
    for seed in range(NUM_STEPS):
        state, measured = step(state, place_batch(packed_batch(seed, length), config, mesh))
        metrics.append({name: float(value) for name, value in measured.items()})
    return metrics, jax.device_get(state.params)


def assert_equal_runs(got: tuple[list, Any], want: tuple[list, Any]) -> None:
    for measured, expected in zip(got[0], want[0], strict=True):
        names = {"loss", "grad_norm", "param_norm", "lr", "num_targets", "skipped"}
        assert measured.keys() == expected.keys() == names | {"bubble"}
        for name in names:
            value = expected[name]
            assert measured[name] == pytest.approx(value, rel=1e-5), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), got[1], want[1])


@pytest.fixture(autouse=True, scope="module")
def _no_stored_programs():
    """Train steps are not written to the cache of compiled programs.

    A program that donates its state and was loaded from that cache ends the process with a segmentation fault on some
    meshes of CPU devices (seen with JAX 0.12.0.1 and sizes 1, 2, 1, 1; without donation, or freshly compiled, never).
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


# --- mesh equality -------------------------------------------------------------------------------------------------


def test_the_reference_run_learns_and_is_clipped():
    metrics, params = run(ONE)
    assert all(row["grad_norm"] > 2 * SGD.clip_norm for row in metrics)
    assert len({row["num_targets"] for row in metrics}) > 1
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (params, initial_params())), strict=True)]
    assert min(moved) > 1e-3  # every parameter moves by ten times the tolerance of the comparison


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_five_steps_are_equal_on_every_mesh(sizes):
    assert_equal_runs(run(sizes, MESHES[sizes]), run(ONE))
    for row in run(sizes, MESHES[sizes])[0]:
        assert row["bubble"] == pytest.approx(pipeline_bubble(sizes[2], MESHES[sizes]), abs=1e-7)


def test_five_steps_of_adam_with_tied_embeddings():
    """44 tokens on each data and sequence shard, in chunks of 10 at the head, so that the last one is filled up."""
    changes = {
        "length": 44,
        "loss": LossConfig(chunk=10),
        # Epsilon above the noise of float32, or Adam would turn rounding into steps of full size.
        "optimizer": OptimizerConfig(learning_rate=1e-2, eps=1e-3, warmup_steps=2, clip_norm=0.5),
        "model": dataclasses.replace(MODEL, tie_embeddings=True),
        "layout": "striped",
    }
    assert_equal_runs(run((2, 2, 2, 2), 2, **changes), run(ONE, **changes))


def test_gradient_norm_is_that_of_the_whole_gradient_before_clipping():
    config, mesh = make_config(ONE), make_mesh()
    batch = place_batch(packed_batch(0), config, mesh)

    def loss(model):
        logits = model(batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
        valid = batch["targets"] >= 0
        return jnp.sum(nats * valid) / jnp.sum(valid)

    value, grads = jax.jit(jax.value_and_grad(loss))(place_state(config, mesh).params)
    first = run(ONE)[0][0]
    assert first["loss"] == pytest.approx(float(value), rel=1e-5)
    norm = math.sqrt(sum(float(np.sum(np.float64(leaf) ** 2)) for leaf in jax.tree.leaves(grads)))
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_bfloat16_runs_on_a_mesh_and_stays_near_float32():
    config = make_config((1, 2, 2, 2), model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    mesh = make_mesh(**config.mesh.sizes())
    state, metrics = make_train_step(config, mesh)(
        place_state(config, mesh), place_batch(packed_batch(0), config, mesh)
    )
    for name, value in run(ONE)[0][0].items():
        if name == "bubble":
            continue
        assert float(metrics[name]) == pytest.approx(value, rel=2e-2), name
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


# --- one program ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    """Configuration, mesh, and the compiled train and evaluation steps of a mesh with every axis but data."""
    config = make_config((1, 2, 2, 2))
    mesh = make_mesh(**config.mesh.sizes())
    state, batch = abstract_state(config, mesh), place_batch(packed_batch(0), config, mesh)
    train_step = make_train_step(config, mesh).lower(state, batch).compile()
    return config, mesh, train_step, make_eval_step(config, mesh).lower(state.params, batch).compile()


def test_one_compilation_donated_state_and_stable_shardings(caplog):
    config = make_config((1, 1, 1, 2))
    mesh = make_mesh(**config.mesh.sizes())
    step, state, batch = make_train_step(config, mesh), place_state(config, mesh), packed_batch(0)
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        for _ in range(NUM_STEPS):
            before = state
            state, _ = step(before, place_batch(batch, config, mesh))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    compilations = [r for r in caplog.records if "Finished XLA compilation of jit(step)" in r.getMessage()]
    assert len(compilations) == 1
    jax.tree.map(
        lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(f"{leaf.sharding} {sharding}"),
        state,
        state_shardings(config, mesh),
    )
    assert int(state.step) == NUM_STEPS


def test_batch_without_targets_changes_nothing(compiled):
    config, mesh, train_step, eval_step = compiled
    batch = packed_batch(0)
    batch["targets"][:] = -1
    placed = place_batch(batch, config, mesh)
    state = place_state(config, mesh)
    loss_sum, count, *_ = eval_step(state.params, placed)
    assert (float(loss_sum), int(count)) == (0.0, 0)
    state, metrics = train_step(state, placed)
    assert {name: float(metrics[name]) for name in ("loss", "grad_norm", "num_targets")} == {
        "loss": 0.0,
        "grad_norm": 0.0,
        "num_targets": 0,
    }
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), initial_params())
    assert int(state.step) == 1


def test_evaluation_is_the_training_loss_and_takes_no_more_memory(compiled):
    config, mesh, train_step, eval_step = compiled
    placed = place_batch(packed_batch(0), config, mesh)
    state = place_state(config, mesh)
    loss_sum, count, *_ = eval_step(state.params, placed)
    _, metrics = train_step(state, placed)
    assert int(count) == int(metrics["num_targets"]) == (packed_batch(0)["targets"] >= 0).sum()
    assert float(loss_sum) / int(count) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert float(metrics["loss"]) == pytest.approx(run(ONE)[0][0]["loss"], rel=1e-5)
    temporaries = [step.memory_analysis().temp_size_in_bytes for step in (eval_step, train_step)]
    assert temporaries[0] <= temporaries[1]


def test_copies_of_a_parameter_stay_bitwise_equal(compiled):
    config, mesh, train_step, _ = compiled
    state, _ = train_step(place_state(config, mesh), place_batch(packed_batch(0), config, mesh))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        copies: dict[str, list[np.ndarray]] = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for same in copies.values():
            assert all(np.array_equal(same[0], other) for other in same[1:]), path


def test_no_mask_of_all_pairs_of_tokens_is_kept():
    """Neither from layer to layer nor from tick to tick, as happens when position-only values leave the loops."""
    config, length = make_config((1, 1, 2, 2), 2), 4096
    mesh = make_mesh(**config.mesh.sizes())
    batch = {name: jax.ShapeDtypeStruct((2, length), jnp.int32) for name in packed_batch(0)}
    step = make_train_step(config, mesh).lower(abstract_state(config, mesh), batch).compile()
    mask = (length // 2) * length  # bytes; 2 layers and 3 ticks on each device would keep 6 of them
    assert step.memory_analysis().temp_size_in_bytes < 2 * mask


# --- collectives, from the traced program --------------------------------------------------------------------------


def walk(jaxpr, path: tuple[str, ...] = ()):
    """Every equation with the names of the primitives that it is nested in."""
    for eqn in jaxpr.eqns:
        yield path, eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from walk(inner, (*path, eqn.primitive.name))


def trace(sizes: tuple[int, ...], num_microbatches: int, **changes: Any):
    config = make_config(sizes, num_microbatches, **changes)
    mesh = make_mesh(**config.mesh.sizes())
    batch = {name: jax.ShapeDtypeStruct((B, T), jnp.int32) for name in packed_batch(0)}
    return list(walk(make_train_step(config, mesh).trace(abstract_state(config, mesh), batch).jaxpr.jaxpr))


def axes_of(eqn) -> tuple[str, ...]:
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return (names,) if isinstance(names, str) else tuple(names)


def collectives(equations):
    kinds = ("psum", "ppermute", "all_gather", "reduce_scatter", "all_to_all", "pmax")
    return [(path, eqn) for path, eqn in equations if any(kind in eqn.primitive.name for kind in kinds)]


def test_collectives_are_those_that_are_written():
    equations = trace((2, 2, 2, 2), 2)
    weights, tokens, vocabulary = ("data", "sequence"), ("tensor",), {"tensor", "pipeline"}
    in_layers = collections.Counter()
    for path, eqn in collectives(equations):
        name, axes = eqn.primitive.name, axes_of(eqn)
        assert not {"cond", "while"} & set(path), f"{name} over {axes} depends on data: {path}"
        kind = next(kind for kind in ("ppermute", "all_gather", "reduce_scatter", "pmax", "psum") if kind in name)
        if kind == "ppermute":
            assert axes in (("pipeline",), ("sequence",))
            assert sorted(eqn.params["perm"]) == [(0, 1), (1, 0)]  # every device sends and receives
        elif kind in ("all_gather", "reduce_scatter"):
            assert axes in (weights, tokens), f"{name} over {axes}"
        elif "scan" in path:
            assert set(axes) <= vocabulary, f"{name} over {axes} in a loop"  # no gradient is summed in a loop
        if path.count("scan") >= 2 and kind != "ppermute":
            in_layers[kind, axes] += 1
    # A layer gathers 7 weights, forward and where it is recomputed; each comes back as one sum that is cut. Tokens are
    # gathered and summed twice each way and gathered twice more (recomputed); what needs no gradient is not repeated.
    assert in_layers["all_gather", weights] == 2 * 7
    assert in_layers["reduce_scatter", weights] == 7
    assert in_layers["all_gather", tokens] == 2 + 2 + 2
    assert in_layers["reduce_scatter", tokens] in (2 + 2, 2 + 2 + 1)


def test_kept_attention_is_not_run_again():
    """With what its backward pass needs kept, the recomputed layer does not turn the ring forward a second time."""

    def hops(remat: str) -> int:
        found = collectives(trace((1, 1, 1, 2), 1, model=dataclasses.replace(MODEL, remat=remat)))
        return sum("ppermute" in eqn.primitive.name and axes_of(eqn) == ("sequence",) for _, eqn in found)

    # Keys and values, their positions and ids: three arrays forward, three and the gradient backward.
    assert (hops("attention"), hops("offload"), hops("layer")) == (3 + 4, 3 + 4, 3 + 3 + 4)


def test_no_pipeline_hop_without_a_pipeline():
    found = collectives(trace(ONE, 1))
    assert not any("ppermute" in eqn.primitive.name for _, eqn in found)


def test_the_head_runs_on_each_token_once():
    """Each of the 4 devices of a data and sequence shard multiplies its tokens by 1/4 of the vocabulary: forward once,
    and backward once for the logits, once for dx, once for dW. No array holds all tokens by all of the vocabulary."""
    columns, tokens, d = V // 4, B * T // 4, MODEL.embed_dim
    sizes = [
        math.prod(eqn.outvars[0].aval.shape + eqn.invars[0].aval.shape + eqn.invars[1].aval.shape)
        for path, eqn in trace((2, 2, 2, 2), 2)
        if eqn.primitive.name == "dot_general"
        and columns in eqn.outvars[0].aval.shape + eqn.invars[0].aval.shape + eqn.invars[1].aval.shape
        and MODEL.mlp_dim // 2 not in eqn.outvars[0].aval.shape
    ]
    assert sizes == [(tokens * columns * d) ** 2] * 4


# --- state and batches ---------------------------------------------------------------------------------------------


def test_initial_state_is_the_same_on_every_mesh_and_as_announced():
    config = make_config((2, 2, 2, 2), optimizer=OptimizerConfig())
    mesh = make_mesh(**config.mesh.sizes())
    state = init_state(config, mesh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), initial_params())
    announced = abstract_state(config, mesh)
    assert jax.tree.structure(state) == jax.tree.structure(announced)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(announced), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)
    moments = state.opt_state[1][0]
    assert (
        moments.mu.layers.mlp.up.sharding.spec
        == moments.nu.layers.mlp.up.sharding.spec
        == P("pipeline", ("data", "sequence"), "tensor")
    )


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("sequence", [2, 4])
def test_placed_batch_is_a_permutation_that_keeps_positions_with_their_tokens(layout, sequence):
    config = make_config((2, 1, 1, sequence), layout=layout)
    mesh = make_mesh(**config.mesh.sizes())
    batch = {"tokens": np.arange(B * 16).reshape(B, 16), "positions": np.zeros((B, 16), np.int64)}
    batch["positions"][:, :10] = [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]
    placed = place_batch(batch, config, mesh)
    for name, array in placed.items():
        assert (array.dtype, array.sharding.spec) == (jnp.int32, P("data", "sequence"))
        np.testing.assert_array_equal(from_layout(np.asarray(array), layout, sequence), batch[name])
    moved = not np.array_equal(np.asarray(placed["tokens"]), batch["tokens"])
    assert moved == (layout != "contiguous")


def test_batches_that_the_mesh_cannot_cut_are_refused():
    config = make_config((2, 1, 1, 2), 2)
    mesh = make_mesh(**config.mesh.sizes())
    with pytest.raises(ValueError, match=r"'tokens'. has shape \(3, 64\).*rows a multiple of .* = 4"):
        place_batch({"tokens": np.zeros((3, 64), np.int32)}, config, mesh)
    with pytest.raises(ValueError, match="must be a positive multiple of 4"):
        place_batch({"tokens": np.zeros((4, 62), np.int32)}, config, mesh)
