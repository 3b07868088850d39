"""A run that takes seconds, to test everything around the model; also a configuration file: `run tests/tiny_run.py`."""

import dataclasses
import pathlib
import random
from typing import Any

from models.config import ModelConfig
from train.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, TrainConfig

WORDS = "ring attention keeps queries at home while keys and values travel round the sequence axis".split()


def config(**changes: Any) -> TrainConfig:
    """The tiny run, with some fields changed."""
    tiny = TrainConfig(
        model=ModelConfig(
            vocab_size=256, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
        ),
        mesh=MeshConfig(sequence=2),
        data=DataConfig(seq_len=64, batch_size=2, held_out_fraction=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        checkpoint=CheckpointConfig(every=2, keep=2),
        num_steps=6,
        eval_every=3,
        eval_batches=2,
    )
    return dataclasses.replace(tiny, **changes)


def write_text(folder: pathlib.Path) -> str:
    """Put a few documents of words into the folder; returns its path, for `data.path`."""
    folder.mkdir(parents=True)
    chooser = random.Random(0)
    for index in range(16):
        words = chooser.choices(WORDS, k=chooser.randint(4, 120))
        (folder / f"document_{index}.txt").write_text(" ".join(words))
    return str(folder)
