"""The train step with everything on: the same losses, parameters and gradient norms on every mesh and schedule."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from test_step import MODEL, SGD, _no_stored_programs, packed_batch  # noqa: F401

from ring_jax import make_mesh
from train.config import MESH_AXES, DataConfig, LossConfig, MeshConfig, TrainConfig
from train.state import abstract_state, init_state, reorder_layers, schedule_order
from train.step import make_train_step, place_batch

LENGTH, B = 64, 16
FULL = dataclasses.replace(
    MODEL,
    windows=(24, None),
    attention_soft_cap=8.0,
    final_soft_cap=10.0,
    mtp_depth=2,
    mlp_chunk=24,
    dropout_rate=0.1,
    attention_dropout_rate=0.2,
    num_layers=16,
    num_heads=16,
    num_kv_heads=8,
    head_dim=4,
)
LOSS = LossConfig(chunk=48, label_smoothing=0.1, z_loss=1e-3, mtp_weight=0.5)
ONE = (1, 1, 1, 1)
# (data, tensor, pipeline, sequence), microbatches, repeats, and what else changes how, not what, is computed.
FAST = [
    ((1, 1, 2, 4), 2, 2, {"remat": "attention"}),
    ((2, 2, 2, 2), 1, 1, {"remat": "none"}),
]
POWERS = (1, 2, 4, 8)
EIGHT = [sizes for sizes in itertools.product(POWERS, repeat=4) if math.prod(sizes) == 8]
SIXTEEN = [(1, 1, 1, 16), (1, 2, 2, 4), (2, 2, 1, 4), (1, 2, 4, 2), (2, 1, 2, 4), (1, 1, 2, 8), (2, 2, 2, 2)]
SLOW = [(sizes, 2 if sizes[2] > 1 else 1, 1, {}) for sizes in EIGHT + SIXTEEN]
SLOW += [((1, 2, 2, 2), 2, 2, {}), ((1, 1, 4, 2), 4, 2, {}), ((2, 1, 4, 1), 4, 2, {}), ((1, 2, 2, 4), 2, 2, {})]
SLOW += [((1, 1, 1, 2), 2, 1, {"strategy": name}) for name in ("ulysses", "all_gather")]
SLOW += [((1, 1, 2, 2), 2, 1, {"strategy": "usp"})]
# A width that data x sequence does not divide: weights are whole there; another layout; what is kept in host memory.
SLOW += [((2, 1, 2, 4), 2, 1, {"embed_dim": 20, "layout": "striped"}), ((1, 2, 1, 2), 1, 1, {"remat": "offload"})]


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Rows with ever fewer documents, the last three with none: on some meshes that is a whole shard."""
    return packed_batch(seed, LENGTH, rows=B, shorter=5)


@functools.cache
def initial(embed_dim: int = FULL.embed_dim) -> Any:
    return jax.device_get(init_state(make_config(ONE, embed_dim=embed_dim), make_mesh()))


def make_config(
    sizes, num_microbatches: int = 1, repeats: int = 1, accumulate: int = 2, layout: str = "zigzag", **model: Any
) -> TrainConfig:
    return TrainConfig(
        model=dataclasses.replace(FULL, **model),
        mesh=MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True))),
        data=DataConfig(seq_len=LENGTH, batch_size=B),
        optimizer=dataclasses.replace(SGD, learning_rate=0.25),  # at 1.0 a rounding grows tenfold in three steps
        loss=LOSS,
        num_microbatches=num_microbatches,
        repeats=repeats,
        accumulate=accumulate,
        layout=layout,
        num_steps=10,
    )


def run(config: TrainConfig, steps: int) -> tuple[list[dict[str, float]], Any]:
    """Metrics of the steps, and the parameters after them in the natural order of layers."""
    mesh, order = make_mesh(**config.mesh.sizes()), schedule_order(config)
    natural = np.arange(config.model.num_layers)
    state = reorder_layers(initial(config.model.embed_dim), natural, order)
    # The configuration is part of the structure of a state.
    state = jax.tree.unflatten(jax.tree.structure(abstract_state(config, mesh)), jax.tree.leaves(state))
    step, metrics = make_train_step(config, mesh), []
    for seed in range(steps):
        batch = batch_of(seed)
        state, measured = step(state, place_batch(batch, config, mesh))
        metrics.append({name: float(value) for name, value in measured.items()})
    return metrics, reorder_layers(jax.device_get(state.params), order, natural)


@functools.cache
def truth(steps: int, embed_dim: int = FULL.embed_dim) -> tuple[list[dict[str, float]], Any]:
    return run(make_config(ONE, accumulate=1, embed_dim=embed_dim), steps)


def check(sizes, num_microbatches: int, repeats: int, changes: dict[str, Any], steps: int) -> None:
    config = make_config(sizes, num_microbatches, repeats, **changes)
    got, want = run(config, steps), truth(steps, config.model.embed_dim)
    for measured, expected in zip(got[0], want[0], strict=True):
        for name, value in expected.items():
            if name == "bubble":
                continue
            assert measured[name] == pytest.approx(value, rel=1e-5, abs=1e-12), name
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("sizes", "pieces", "repeats", "changes"), FAST, ids=str)
def test_meshes(sizes, pieces: int, repeats: int, changes):
    check(sizes, pieces, repeats, changes, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "pieces", "repeats", "changes"), SLOW, ids=str)
def test_every_factorisation(sizes, pieces: int, repeats: int, changes):
    check(sizes, pieces, repeats, changes, 10)


def test_every_term_of_the_loss_and_dropout_have_an_effect():
    """With one of them off the first gradient is another one."""
    whole = truth(3, FULL.embed_dim)[0][0]["grad_norm"]
    config = make_config(ONE, accumulate=1)
    off = [
        dataclasses.replace(config, loss=dataclasses.replace(LOSS, **{name: 0.0}))
        for name in ("label_smoothing", "z_loss", "mtp_weight")
    ]
    off += [
        dataclasses.replace(config, model=dataclasses.replace(FULL, **{name: off}))
        for name, off in (("final_soft_cap", None), ("dropout_rate", 0.0), ("attention_dropout_rate", 0.0))
    ]
    for other in off:
        assert abs(run(other, 1)[0][0]["grad_norm"] / whole - 1) > 1e-4
