"""Llama 3.1 8B on rows of 1,048,576 tokens.

Hardware: 128 v5p chips (v5p-256: mesh tensor 4, sequence 32), or 128 H200 in 16 hosts with the second command.
Estimated memory (from sizes, by `train.memory`, not measured): about 11.1 GB on each chip, 11.2 GB with the second
mesh, with weights and optimizer state cut over all four axes.
Parameters: 8.03 billion. Tokens: 1,048,576 a step, one row. Of the 870 GFLOP for each token 825 are attention.
Compiled for these chips and for 8 hosts of H200: docs/rehearsals.md.

    python -m train run configs/llama3_8b_1m.py --data.path TEXT --data.tokenizer T.json
    python -m train run configs/llama3_8b_1m.py --data.path TEXT --data.tokenizer T.json \
        --mesh.tensor 2 --mesh.sequence 64
"""

import dataclasses

from configs import llama3_8b_128k
from models.config import RopeScaling
from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """The 128k preset with a longer row; public models of this length take a rope_theta of billions, unscaled."""
    shorter = llama3_8b_128k.config()
    return dataclasses.replace(
        shorter,
        model=dataclasses.replace(shorter.model, rope_theta=3.6e9, rope_scaling=RopeScaling()),
        mesh=MeshConfig(tensor=4, sequence=32),
        data=DataConfig(seq_len=1_048_576, batch_size=1),
        optimizer=OptimizerConfig(learning_rate=2e-5, min_learning_rate_ratio=0.1, warmup_steps=50),
        accumulate=1,
        num_steps=1000,
        eval_every=100,
        eval_batches=4,
    )
