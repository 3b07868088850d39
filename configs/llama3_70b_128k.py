"""Llama 3.1 70B on rows of 131,072 tokens.

Hardware: 256 v5p chips (v5p-512) or 256 H200 in 32 hosts (mesh data 4, tensor 8, sequence 8).
Estimated memory (from sizes, by `train.memory`, not measured): about 16.2 GB on each device, with weights and optimizer
state cut over all four axes.
Parameters: 70.6 billion. Tokens: 1,048,576 a step, 8 rows.
Compiled for v5p:8x8x8 and for tpu7x:4x4x8, with other meshes: docs/rehearsals.md.

    python -m train run configs/llama3_70b_128k.py --data.path TEXT --data.tokenizer T.json
"""

import dataclasses

from models.config import ModelConfig, RopeScaling
from train.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, TrainConfig, WatchConfig


def model() -> ModelConfig:
    """Sizes of Llama 3.1 70B. It was made for 131,072 tokens, by scaling its rotary frequencies."""
    return ModelConfig(
        vocab_size=128_256,
        num_layers=80,
        embed_dim=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=28_672,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0),
        norm_eps=1e-5,
        compute_dtype="bfloat16",
    )


def config() -> TrainConfig:
    """A key/value head for each of the 8 tensor devices; of an H200 host, NVLink joins the ring."""
    return TrainConfig(
        model=dataclasses.replace(model(), remat="attention"),
        mesh=MeshConfig(data=4, tensor=8, sequence=8),
        data=DataConfig(seq_len=131_072, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=6e-5, min_learning_rate_ratio=0.1, warmup_steps=200),
        checkpoint=CheckpointConfig(every=100, keep=3),
        watch=WatchConfig(rollback=True),
        accumulate=2,
        num_steps=4000,
        eval_every=200,
        eval_batches=8,
    )
