"""The configuration of a model: sizes and numeric choices, and nothing about devices."""

import dataclasses
import math
from typing import Literal, get_args

from models.fields import is_count, wrong_types

type Remat = Literal["none", "layer", "attention", "offload"]

REMAT: tuple[str, ...] = get_args(Remat.__value__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies stretched for a context longer than a model was first trained on (Llama 3.1)."""

    factor: float = 1.0
    """What low frequencies are divided by; 1: no scaling."""
    low_freq_factor: float = 1.0
    """Frequencies that turn less often than this in the original context are divided by the whole factor."""
    high_freq_factor: float = 4.0
    """Those that turn more often than this stay; between the two the change is gradual."""
    original_max_position: int = 8192
    """The original context, in tokens."""

    def problems(self) -> list[str]:
        """Every rule that is broken, as `value, rule; fix`."""
        found = []
        if not 1 <= self.factor < math.inf:
            found.append(f"model.rope_scaling.factor={self.factor} must be at least 1 and finite; 1 means no scaling")
        low, high = self.low_freq_factor, self.high_freq_factor
        if not 0 < low < high < math.inf:
            found.append(
                f"model.rope_scaling.low_freq_factor={low} must be greater than 0 and less than "
                f"high_freq_factor={high}, which must be finite; Llama 3.1 uses 1 and 4"
            )
        if self.original_max_position < 1:
            found.append(
                f"model.rope_scaling.original_max_position={self.original_max_position} must be at least 1; "
                "Llama 3.1 uses 8192"
            )
        return found


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
    rope_scaling: RopeScaling = RopeScaling()
    """Change of the frequencies for long contexts."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head, too."""
    windows: tuple[int | None, ...] = ()
    """Sliding windows of the layers, in turn: a query sees that many positions before its own; None, and (): all."""
    attention_soft_cap: float | None = None
    """Attention scores become cap * tanh(scores / cap)."""
    final_soft_cap: float | None = None
    """The same for the logits."""
    mtp_depth: int = 1
    """Tokens ahead that each position predicts; from 2 on by residual blocks before the shared head."""
    mlp_chunk: int | None = None
    """Tokens of one pass through the MLP; less memory for its hidden layer, the same result. None: all at once."""
    dropout_rate: float = 0.0
    """Share of the activations that fall behind the embedding, attention and the MLP; in training only."""
    attention_dropout_rate: float = 0.0
    """Share of the attention probabilities that fall; in training only."""
    strategy: Literal["ring", "all_gather", "ulysses", "usp"] = "ring"
    """How the devices of the sequence axis share attention."""
    remat: Remat = "layer"
    """What the backward pass finds: everything but gathered weights; the input of each layer, the rest is computed
    again; with the output and statistics of attention, so that the ring does not turn again; these in host memory."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matmuls; parameters, norms, softmax statistics and the loss are float32 always."""

    @property
    def pattern(self) -> int:
        """Layers after which the windows begin again."""
        return max(1, len(self.windows)) if isinstance(self.windows, tuple) else 1

    @property
    def drops(self) -> bool:
        """Whether training drops anything."""
        return self.dropout_rate > 0 or self.attention_dropout_rate > 0

    def problems(self) -> list[str]:
        """Every rule that this configuration breaks on any mesh, as `value, rule; fix`."""
        wrong = wrong_types(self, "model.")
        found = [*wrong.values(), *self._size_problems()]
        if not any(name.startswith("model.rope_scaling") for name in wrong):
            found += self.rope_scaling.problems()
        for name, least in (("mtp_depth", 1), ("mlp_chunk", 1), ("windows", 0)):
            value = () if f"model.{name}" in wrong else getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and number < least:
                    found.append(f"model.{name} holds {number}, which must be at least {least}")
        for name, usual in (("rope_theta", "10000"), ("norm_eps", "1e-6")):
            value = None if f"model.{name}" in wrong else getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                found.append(f"model.{name}={value} must be greater than 0 and finite; {usual} is usual")
        for name in ("attention_soft_cap", "final_soft_cap"):
            cap = None if f"model.{name}" in wrong else getattr(self, name)
            if cap is not None and not 0 < cap < math.inf:
                found.append(f"model.{name}={cap} must be greater than 0 and finite; None means no cap")
        for name in ("dropout_rate", "attention_dropout_rate"):
            if f"model.{name}" not in wrong and not 0 <= getattr(self, name) < 1:
                found.append(f"model.{name}={getattr(self, name)} must be at least 0 and less than 1; 0 drops nothing")
        return found

    def _size_problems(self) -> list[str]:
        """Of the sizes that are ints; each rule for itself, where its own sizes are counts."""
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
        found = [
            f"model.{name}={value} must be at least 1; set it to a positive number"
            for name in sizes
            if isinstance(value := getattr(self, name), int) and value < 1
        ]
        if is_count(self.num_heads, self.num_kv_heads) and self.num_heads % self.num_kv_heads:
            fits = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            found.append(
                f"model.num_heads={self.num_heads} must be a multiple of model.num_kv_heads={self.num_kv_heads}, so "
                f"that every key/value head serves equally many query heads; choose num_kv_heads from {fits}"
            )
        if is_count(self.head_dim) and self.head_dim % 2:
            found.append(f"model.head_dim={self.head_dim} must be even for rotary embeddings; use {self.head_dim + 1}")
        if is_count(self.num_layers) and self.num_layers % self.pattern:
            found.append(
                f"model.num_layers={self.num_layers} must be a multiple of the {self.pattern} entries of "
                f"model.windows, which the layers take in turn; use a pattern of another length"
            )
        return found
