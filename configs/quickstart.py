"""A byte-level transformer on Python's own sources, over three mesh axes at once: the first run of a new clone.

Hardware: any CPU; the 8 devices of the mesh (tensor 2, pipeline 2, sequence 2) are simulated on its cores.
Estimated memory (from sizes, by `train.memory`, not measured): about 0.04 GB for each of them.
Expected on 2 cores: about 0.3 s a step, 3.5 minutes in all; held-out text at about 3.2 bits per byte, 0.3 below a
bigram model.

    make quickstart
    python -m train run configs/quickstart.py --platform cpu
"""

from models.config import ModelConfig
from train.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """Two layers of width 128 on rows of 2048 bytes.

    One row a step: in so short a run the number of documents seen counts, not the tokens of each step.
    """
    return TrainConfig(
        model=ModelConfig(
            vocab_size=256,
            num_layers=2,
            embed_dim=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            mlp_dim=384,
            rope_theta=100.0,  # in a few hundred steps only near tokens matter: most channels turn fast
            remat="none",
        ),
        mesh=MeshConfig(data=1, tensor=2, pipeline=2, sequence=2),
        data=DataConfig(seq_len=2048, batch_size=1, held_out_fraction=0.01),
        optimizer=OptimizerConfig(learning_rate=5e-3, min_learning_rate_ratio=0.02, warmup_steps=20),
        checkpoint=CheckpointConfig(every=200, keep=2),
        num_steps=640,
        eval_every=160,
    )
