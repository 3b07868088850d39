"""The configuration of a model: sizes and numeric choices, and nothing about devices."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder transformer."""

    vocab_size: int
    """Number of token ids (V)."""
    num_layers: int
    """Decoder layers (L)."""
    embed_dim: int
    """Width of the residual stream (D)."""
    num_heads: int
    """Query heads (N)."""
    num_kv_heads: int
    """Key/value heads (K); each serves num_heads // num_kv_heads query heads."""
    head_dim: int
    """Size of one head (H); even, because rotary embeddings turn pairs of channels."""
    mlp_dim: int
    """Hidden width of the MLP (F)."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies; larger for longer contexts."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head, too."""
    remat: bool = True
    """Keep only the input of each layer for the backward pass and recompute the rest."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matmuls; parameters, norms, softmax statistics and the loss are float32 always."""

    def problems(self) -> list[str]:
        """Every rule that this configuration breaks on any mesh, as `value, rule; fix`."""
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
        found = [
            f"model.{name}={getattr(self, name)} must be at least 1; set it to a positive number"
            for name in sizes
            if getattr(self, name) < 1
        ]
        if found:
            return found
        if self.num_heads % self.num_kv_heads:
            fits = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            found.append(
                f"model.num_heads={self.num_heads} must be a multiple of model.num_kv_heads={self.num_kv_heads}, so "
                f"that every key/value head serves equally many query heads; choose num_kv_heads from {fits}"
            )
        if self.head_dim % 2:
            found.append(f"model.head_dim={self.head_dim} must be even for rotary embeddings; use {self.head_dim + 1}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            found.append(
                f'model.compute_dtype={self.compute_dtype!r} must be "float32" or "bfloat16"; choose one of them'
            )
        return found
