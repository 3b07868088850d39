"""Memory per device: what a backend reports, and an estimate for a configuration from its sizes alone.

What always holds: the estimate needs no device and no compilation, and it is an estimate: it counts arrays that must
exist, not what a compiler adds. It takes weights, gradients and optimizer state to be cut over all four mesh axes and
activations between blocks over `tensor`, too. The compiled step's
`memory_analysis()` tells the truth.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from train.config import TrainConfig
from train.flops import num_params

_STATE_BYTES = {"adamw": 16, "sgd": 8}  # float32: parameter, gradient, and Adam's two moments


class MemoryEstimate(NamedTuple):
    """Bytes on one device."""

    state: float
    """Parameters, gradients and optimizer state."""
    saved: float
    """What the backward pass needs of the forward pass: the input of every layer, of all rows in flight."""
    working: float
    """Weights and activations of the layer that runs, and a chunk of logits."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def estimate_memory(config: TrainConfig) -> MemoryEstimate:
    """What a train step keeps on each device at its peak, with rematerialized layers if `model.remat`."""
    model, mesh = config.model, config.mesh
    width = 2 if model.compute_dtype == "bfloat16" else 4
    state = _STATE_BYTES[config.optimizer.name] * num_params(model) / mesh.num_devices
    rows = config.data.batch_size / mesh.data
    tokens = rows * config.data.seq_len / mesh.sequence
    tokens /= config.accumulate
    piece = tokens / config.num_microbatches
    heads = model.head_dim * (model.num_heads + model.num_kv_heads)
    layer_params = model.embed_dim * (2 * heads + 3 * model.mlp_dim)
    # Query, key, value, output with their gradients and float32 sums of dQ, dK, dV; gate, up, product with gradients.
    inside, hidden = width * 4 * heads + 4 * heads, width * 6 * model.mlp_dim
    at_once = piece if model.mlp_chunk is None else min(piece, model.mlp_chunk)
    layer = (piece * inside + at_once * hidden) / mesh.tensor
    layer += piece * 2 * width * model.embed_dim  # inputs gathered over `tensor`, and gradients
    attention = width * model.head_dim * model.num_heads + 4 * model.num_heads  # out and lse
    everything = inside + (hidden if model.mlp_chunk is None else 0)
    kept = {"none": everything, "layer": 0, "attention": attention, "offload": 0}[model.remat] + width * model.embed_dim
    saved = tokens * kept * model.num_layers / mesh.pipeline / mesh.tensor
    weights = width * layer_params / mesh.tensor
    logits = 2 * 4 * min(config.loss.chunk, tokens) * model.vocab_size / mesh.tensor / mesh.pipeline
    return MemoryEstimate(state=state, saved=saved, working=layer + weights + logits)


def used_bytes(devices: Sequence[jax.Device]) -> dict[str, int]:
    """Peak bytes in use on each device of this process, by device id; empty where the backend does not tell (CPU)."""
    found = {}
    for device in devices:
        if device.process_index == jax.process_index() and (stats := device.memory_stats()):
            if "peak_bytes_in_use" in stats or "bytes_in_use" in stats:
                found[str(device.id)] = int(stats.get("peak_bytes_in_use", stats.get("bytes_in_use")))
    return found
