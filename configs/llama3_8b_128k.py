"""Llama 3.1 8B on rows of 131,072 tokens.

Hardware: 64 v5p chips (v5p-128: mesh data 2, tensor 4, sequence 8), or 64 H200 in 8 hosts with the second command.
Estimated memory (from sizes, by `train.memory`, not measured): about 7.7 GB on each chip, 7.8 GB with the
second mesh, with weights and optimizer state cut over all four axes.
Parameters: 8.03 billion. Tokens: 1,048,576 a step, 8 rows.

    python -m train run configs/llama3_8b_128k.py --data.path TEXT --data.tokenizer T.json
    python -m train run configs/llama3_8b_128k.py --data.path TEXT --data.tokenizer T.json \
        --mesh.data 1 --mesh.tensor 8 --mesh.sequence 8
"""

import dataclasses

from models.config import ModelConfig, RopeScaling
from train.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, TrainConfig, WatchConfig


def model() -> ModelConfig:
    """Sizes of Llama 3.1 8B. It was made for 131,072 tokens, by scaling its rotary frequencies."""
    return ModelConfig(
        vocab_size=128_256,
        num_layers=32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14_336,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0),
        norm_eps=1e-5,
        compute_dtype="bfloat16",
    )


def config() -> TrainConfig:
    """A chip holds 16,384 tokens of a row: its work on a block hides the hop of the next many times over."""
    return TrainConfig(
        model=dataclasses.replace(model(), remat="attention"),
        mesh=MeshConfig(data=2, tensor=4, sequence=8),
        data=DataConfig(seq_len=131_072, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-4, min_learning_rate_ratio=0.1, warmup_steps=200),
        checkpoint=CheckpointConfig(every=200, keep=3),
        watch=WatchConfig(rollback=True),
        accumulate=4,
        num_steps=4000,
        eval_every=200,
        eval_batches=8,
    )
