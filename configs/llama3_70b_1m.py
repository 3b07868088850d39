"""Llama 3.1 70B on rows of 1,048,576 tokens.

Hardware: 512 v5p chips (v5p-1024) or 512 H200 in 64 hosts (mesh tensor 8, sequence 64).
Estimated memory (from sizes, by `train.memory`, not measured): about 12.9 GB on each device, with weights and optimizer
state cut over all four axes.
Parameters: 70.6 billion. Tokens: 1,048,576 a step, one row. Of the 4,540 GFLOP for each token 4,123 are attention.

    python -m train run configs/llama3_70b_1m.py --data.path TEXT --data.tokenizer T.json
"""

import dataclasses

from configs import llama3_70b_128k
from models.config import RopeScaling
from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """The 128k preset with a longer row; public models of this length take a rope_theta of billions, unscaled."""
    shorter = llama3_70b_128k.config()
    return dataclasses.replace(
        shorter,
        model=dataclasses.replace(shorter.model, rope_theta=3.6e9, rope_scaling=RopeScaling()),
        mesh=MeshConfig(tensor=8, sequence=64),
        data=DataConfig(seq_len=1_048_576, batch_size=1),
        optimizer=OptimizerConfig(learning_rate=1e-5, min_learning_rate_ratio=0.1, warmup_steps=50),
        accumulate=1,
        num_steps=1000,
        eval_every=100,
        eval_batches=4,
    )
