"""A GPT of 124 million parameters on rows of 8,192 tokens: the smallest run on real hardware.

Hardware: 8 H200 in one host (mesh data 8), or 8 v5p chips.
Estimated memory (from sizes, by `train.memory`, not measured): about 1.7 GB on each device.
Tokens: 524,288 a step, 10.5 billion in all.

    python -m train run configs/gpt_125m_8k.py --data.path TEXT --data.tokenizer T.json
"""

from models.config import ModelConfig
from train.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """Depth, width and heads of GPT-2 small, with this repository's blocks: RMSNorm, rotary embeddings, SwiGLU."""
    return TrainConfig(
        model=ModelConfig(
            vocab_size=50_304,  # GPT-2's 50,257 tokens, filled up to a multiple of 128
            num_layers=12,
            embed_dim=768,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            mlp_dim=2048,
            rope_theta=10_000.0,
            norm_eps=1e-5,
            tie_embeddings=True,
            compute_dtype="bfloat16",
        ),
        mesh=MeshConfig(data=8),
        data=DataConfig(seq_len=8192, batch_size=64),
        optimizer=OptimizerConfig(learning_rate=6e-4, min_learning_rate_ratio=0.1, warmup_steps=700),
        checkpoint=CheckpointConfig(every=1000, keep=3),
        accumulate=4,
        num_steps=20_000,
        eval_every=1000,
        eval_batches=16,
    )
