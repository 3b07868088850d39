"""Model FLOPs and MFU: the arithmetic that the model needs for a batch, whatever the program does beside it.

What always holds: the count depends on the model and the batch alone, never on the mesh, the schedule,
rematerialization or the tiles that a kernel runs. Only tokens that are not padding count, and only the (query, key)
pairs that the mask lets through: a causal document of n tokens has n (n + 1) / 2 of them. So padding, recomputation and
bubbles lower the MFU, as they should. For one step, forward and backward:

    6 * (parameters in matmuls) * tokens  +  12 * layers * heads * head_dim * pairs

A matmul costs 2 FLOPs for each weight and token, and twice that backward. A pair costs 2 H for its score and 2 H for
its value in every head and layer, and twice that backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from models.config import ModelConfig
from ring_jax.costs import pipeline_bubble as pipeline_bubble
from ring_jax.hardware import find_hardware


class BatchCounts(NamedTuple):
    """What of a batch is work."""

    num_tokens: int
    """Tokens that are not padding."""
    num_slots: int
    """Places for tokens: rows x length."""
    num_pairs: int
    """(query, key) pairs that the causal mask lets through inside the documents."""

    @property
    def padding_share(self) -> float:
        """Share of the places that hold padding."""
        return 1 - self.num_tokens / self.num_slots if self.num_slots else 0.0


def count_batch(segment_ids: np.ndarray, *, window: int | None = None) -> BatchCounts:
    """Tokens and visible pairs of packed rows.

    Args:
      segment_ids: [rows, T] in natural order; 0 is padding, tokens of one document share an id in their row.
      window: keys before itself that a query may see; None: all of its document.
    """
    sizes = _sizes(segment_ids)
    return BatchCounts(int(sizes.sum()), segment_ids.size, _num_pairs(sizes, window))


def count_for(model: ModelConfig, segment_ids: np.ndarray) -> BatchCounts:
    """`count_batch` with the mean of the pairs over the layers' windows."""
    return _count_sizes(model, _sizes(segment_ids), segment_ids.size)


def count_rows(model: ModelConfig, rows: Sequence[Sequence[int]], seq_len: int) -> BatchCounts:
    """`count_for` of rows that are known by the lengths of their segments: no batch is needed."""
    return _count_sizes(model, np.array([length for row in rows for length in row], np.int64), len(rows) * seq_len)


def _count_sizes(model: ModelConfig, sizes: np.ndarray, num_slots: int) -> BatchCounts:
    windows = model.windows or (None,)
    pairs = [_num_pairs(sizes, window) for window in windows]
    return BatchCounts(int(sizes.sum()), num_slots, round(sum(pairs) / len(windows)))


def _sizes(segment_ids: np.ndarray) -> np.ndarray:
    """Tokens of every segment of a batch, and some zeros."""
    if not segment_ids.size:
        return np.zeros(0, np.int64)
    rows, widest = len(segment_ids), int(segment_ids.max()) + 1
    ids = segment_ids.astype(np.int64) + np.arange(rows)[:, None] * widest
    return np.bincount(ids.reshape(-1), minlength=rows * widest).reshape(rows, widest)[:, 1:]


def _num_pairs(sizes: np.ndarray, window: int | None) -> int:
    """(query, key) pairs that are visible in segments of these sizes."""
    seen = sizes if window is None else np.minimum(sizes, window + 1)
    return int((seen * (seen + 1) // 2 + (sizes - seen) * seen).sum())


def matmul_params(model: ModelConfig) -> int:
    """Parameters that every token is multiplied with: the layers' matrices and the head, not the embedding table."""
    attention = model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.embed_dim * model.mlp_dim
    further = (model.mtp_depth - 1) * model.embed_dim * (model.embed_dim + model.vocab_size)
    return model.num_layers * (attention + mlp) + model.embed_dim * model.vocab_size + further


def num_params(model: ModelConfig) -> int:
    """All parameters; equal to the sizes of the arrays of a `Transformer`.

    Example:
      >>> num_params(
      ...     ModelConfig(
      ...         vocab_size=128_256,
      ...         num_layers=32,
      ...         embed_dim=4096,
      ...         num_heads=32,
      ...         num_kv_heads=8,
      ...         head_dim=128,
      ...         mlp_dim=14_336,
      ...     )
      ... )
      8030261248
    """
    table = 0 if model.tie_embeddings else model.embed_dim * model.vocab_size
    norms = (2 * model.num_layers + 1) * model.embed_dim
    shared = (model.mtp_depth - 1) * model.embed_dim * model.vocab_size  # the head, once for each token ahead
    return matmul_params(model) - shared + table + norms


def model_flops(model: ModelConfig, counts: BatchCounts) -> float:
    """FLOPs of one train step, forward and backward, by the closed form above."""
    per_pair = 12 * model.num_layers * model.num_heads * model.head_dim
    return float(6 * matmul_params(model) * counts.num_tokens + per_pair * counts.num_pairs)


def peak_flops(devices: Sequence[jax.Device]) -> float | None:
    """FLOP/s of all devices together, bfloat16 without sparsity; None where a device's kind is not in the table."""
    known = [find_hardware(device.device_kind) for device in devices]
    return sum(hardware.flops for hardware in known if hardware) if known and all(known) else None
