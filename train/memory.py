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
    # Query, key, value, output with their gradients and float32 sums of dQ, dK, dV; gate, up, product with gradients,
    # and while the layer runs their activation and its gradient; norms and residual sums, and their gradients.
    inside, hidden = width * 4 * heads + 4 * heads, width * 6 * model.mlp_dim
    at_once = piece if model.mlp_chunk is None else min(piece, model.mlp_chunk)
    layer = piece * (inside + 6 * width * model.embed_dim) + at_once * (hidden + 2 * width * model.mlp_dim)
    layer = layer / mesh.tensor + piece * 2 * width * model.embed_dim  # inputs gathered over `tensor`, and gradients
    # Out and lse, and below float32 what rounding took from out.
    attention = (width if width == 4 else 2 * width) * model.head_dim * model.num_heads + 4 * model.num_heads
    rounded = 0 if width == 4 else width * model.head_dim * model.num_heads
    # The sum between attention and MLP, and what the two norms see in float32.
    sums = width * model.embed_dim * (1 if width == 4 else 5)
    everything = inside + rounded + sums + (hidden if model.mlp_chunk is None else 0)
    kept = {"none": everything, "layer": 0, "attention": attention, "offload": 0}[model.remat] + width * model.embed_dim
    # In the bubble the pipeline's stages run on nothing, and keep it; a tick is put together before it joins the rest.
    stages = mesh.pipeline
    ticks = 1 + stages / (config.repeats * config.num_microbatches) if stages > 1 else 1
    saved = tokens * kept * ticks * model.num_layers / stages / mesh.tensor
    moving = 4 * width * tokens * model.embed_dim / mesh.tensor if stages > 1 else 0  # what enters and leaves
    weights = (width + 4) * layer_params / mesh.tensor  # gathered, and their gradient before it is scattered
    logits = 2 * 4 * min(config.loss.chunk, tokens) * model.vocab_size / mesh.tensor / stages
    return MemoryEstimate(state=state, saved=saved, working=layer + weights + logits + moving)


class StateBytes(NamedTuple):
    """Bytes of what a step is called with, on one device, exactly (but for a few counters)."""

    params: int
    moments: int
    batch: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def state_bytes(config: TrainConfig) -> StateBytes:
    """Parameters, optimizer state and batch as they lie on a device: float32 weights, cut as `models.sharding` says.

    Matrices of layers are cut over all four axes, the vocabulary's too; norm scales over `pipeline` alone; where data x
    sequence does not divide the width of the model, weights are whole on these axes.
    """
    model, mesh = config.model, config.mesh
    width, shards = model.embed_dim, mesh.data * mesh.sequence
    shards = 1 if width % shards else shards
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    layers = model.num_layers * width * (heads + 3 * model.mlp_dim) // (shards * mesh.tensor * mesh.pipeline)
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * width // (shards * mesh.tensor * mesh.pipeline)
    norms = 2 * model.num_layers * width // mesh.pipeline + width
    params = 4 * (layers + tables + norms + (model.mtp_depth - 1) * width * width // shards)
    moments = {"adamw": 2, "sgd": 0}[config.optimizer.name] * params
    arrays = 3 + model.mtp_depth  # tokens, positions, segment ids, and targets for each depth
    batch = 4 * arrays * config.tokens_per_step // (mesh.data * mesh.sequence)
    return StateBytes(params, moments, batch)


def used_bytes(devices: Sequence[jax.Device]) -> dict[str, int]:
    """Peak bytes in use on each device of this process, by device id; empty where the backend does not tell (CPU)."""
    found = {}
    for device in devices:
        if device.process_index == jax.process_index() and (stats := device.memory_stats()):
            if "peak_bytes_in_use" in stats or "bytes_in_use" in stats:
                found[str(device.id)] = int(stats.get("peak_bytes_in_use", stats.get("bytes_in_use")))
    return found
