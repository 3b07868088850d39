"""A byte-level transformer on Python's own sources, over all four mesh axes: the first run of a new clone.

Hardware: any CPU; the 8 devices of the mesh (tensor 2, pipeline 2, sequence 2) are simulated on its cores.
Expected on 2 cores: TBD.

    make quickstart
    python -m train run configs/quickstart.py --platform cpu
"""

from models.config import ModelConfig
from train.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """Two layers of width 128 on rows of 2048 bytes."""
    return TrainConfig(
        model=ModelConfig(
            vocab_size=256,
            num_layers=2,
            embed_dim=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            mlp_dim=384,
            rope_theta=100.0,  # in a few hundred steps only near tokens matter: most channels turn fast
            remat=False,
        ),
        mesh=MeshConfig(data=1, tensor=2, pipeline=2, sequence=2),
        data=DataConfig(seq_len=2048, batch_size=2, held_out_fraction=0.01),
        optimizer=OptimizerConfig(learning_rate=8e-3, warmup_steps=20),
        checkpoint=CheckpointConfig(every=100, keep=2),
        num_microbatches=2,
        num_steps=200,
        eval_every=50,
    )
