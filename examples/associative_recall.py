"""Associative recall over shards: `python -m examples.associative_recall`, on 8 simulated devices.

A row's first shard states, over and over, which value goes with each key. From the third shard on keys are asked for,
and the answer is never shown: every answer lies more than a shard's length back.

    shard 0                          shard 1       shard 2 ...
    k3 v1 k0 v4 k1 v1 k2 v7 k1 v1    . . . . . .   . k1 . . . k0 . k2 . .
    targets: none                    none          . v1 . . . v4 . v7 . .

A model whose attention crosses shards learns it. The same model with attention cut at the shards (segment ids that
change there) cannot do better than to guess one of the values.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import P

from models import ModelConfig
from ring_jax import make_mesh
from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.rows import IGNORE
from train.state import init_state, state_specs
from train.step import BATCH_SPEC, make_train_step, place_batch

NUM_KEYS, NUM_VALUES, SPACING = 4, 8, 8
MODEL = ModelConfig(
    vocab_size=1 + NUM_KEYS + NUM_VALUES,
    num_layers=2,
    embed_dim=64,
    num_heads=1,
    num_kv_heads=1,
    head_dim=32,
    mlp_dim=64,
    rope_theta=1e12,  # most channels hardly turn: keys are found by what they are, however far away
    windows=(1, None),  # the first layer shows each value the key before it, the second finds the key
)


def make_config(num_shards: int = 8, seq_len: int = 4096, batch_size: int = 8, num_steps: int = 120) -> TrainConfig:
    """The run: all devices on the ring, rows cut into contiguous shards."""
    return TrainConfig(
        model=MODEL,
        mesh=MeshConfig(sequence=num_shards),
        data=DataConfig(seq_len=seq_len, batch_size=batch_size),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20, b2=0.99, weight_decay=0.0),
        layout="contiguous",
        num_steps=num_steps,
    )


def make_batch(config: TrainConfig, seed: tuple[int, ...], *, cut: bool) -> dict[str, np.ndarray]:
    """Fresh rows; with `cut`, every shard is a segment of its own, and no token sees another shard's."""
    rng, rows, length = np.random.default_rng(seed), config.data.batch_size, config.data.seq_len
    shard = length // config.mesh.sequence
    tokens = np.zeros((rows, length), np.int32)  # 0 fills
    targets = np.full((rows, length), IGNORE, np.int32)
    for row in range(rows):
        values = 1 + NUM_KEYS + rng.integers(0, NUM_VALUES, NUM_KEYS)
        keys = rng.permuted(np.tile(np.arange(NUM_KEYS), (shard // 2 // NUM_KEYS, 1)), axis=1).reshape(-1)
        stated = np.stack([1 + keys, values[keys]], 1).reshape(-1)
        tokens[row, : len(stated)] = stated
        places = rng.choice(np.arange(2 * shard, length), (length - 2 * shard) // SPACING, replace=False)
        asked = rng.integers(0, NUM_KEYS, len(places))
        tokens[row, places], targets[row, places] = 1 + asked, values[asked]
    positions = np.broadcast_to(np.arange(length), (rows, length))
    segment_ids = 1 + positions // shard if cut else np.ones_like(positions)
    return {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segment_ids}


@functools.cache
def make_functions(config: TrainConfig) -> tuple[jax.sharding.Mesh, Callable[..., Any], Callable[..., jax.Array]]:
    """The mesh, the train step, and the function (params, batch) -> targets with the largest logit of their place."""
    mesh = make_mesh(**config.mesh.sizes())

    def count(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        given = {name: batch[name] for name in ("positions", "segment_ids")}
        right = params(batch["tokens"], **given, layout=config.layout).argmax(-1) == batch["targets"]
        return jax.lax.psum(right.sum(), ("data", "sequence"))

    specs = state_specs(config).params, BATCH_SPEC
    count_right = jax.jit(jax.shard_map(count, mesh=mesh, in_specs=specs, out_specs=P()))
    return mesh, make_train_step(config, mesh), count_right


def train(config: TrainConfig, *, cut: bool, every: int = 0) -> float:
    """Train from scratch; returns the share of fresh questions that are answered right."""
    mesh, step, count_right = make_functions(config)
    state = init_state(config, mesh)
    for number in range(config.num_steps):
        state, measured = step(state, place_batch(make_batch(config, (0, number), cut=cut), config, mesh))
        if every and (number + 1) % every == 0:
            print(f"step {number + 1}: loss {float(measured['loss']):.4f}", flush=True)
    right = total = 0
    for number in range(4):
        batch = make_batch(config, (1, number), cut=cut)
        right += int(count_right(state.params, place_batch(batch, config, mesh)))
        total += int((batch["targets"] != IGNORE).sum())
    return right / total


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    config = make_config()
    whole, cut = (train(config, cut=cut, every=25) for cut in (False, True))
    print(f"right: {whole:.2%}; with attention cut at the shards: {cut:.2%}; by chance: {1 / NUM_VALUES:.2%}")


if __name__ == "__main__":
    main()
