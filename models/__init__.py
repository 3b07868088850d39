"""The models: a decoder transformer whose attention is `ring_jax`, used as a plain pytree."""

from models.config import ModelConfig, RopeScaling
from models.transformer import Transformer

__all__ = ["ModelConfig", "RopeScaling", "Transformer"]
