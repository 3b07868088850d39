"""Memory per device: what a backend reports, and an estimate for a configuration from its sizes alone.

What always holds: the estimate needs no device and no compilation, and it is an estimate: it counts arrays that must
exist, not what a compiler adds. It takes activations between blocks to be cut over `tensor`, too. The compiled step's
`memory_analysis()` tells the truth.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from models.sharding import weight_axes
from ring_jax import costs
from train.config import TrainConfig


class MemoryEstimate(NamedTuple):
    """Bytes on one device."""

    state: float
    """Parameters, gradients and optimizer state."""
    saved: float
    """What the backward pass needs of the forward pass: the input of every layer, of all rows in flight."""
    working: float
    """Weights and activations of the layer that runs, or of the head and a chunk of logits: the larger."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def estimate_memory(config: TrainConfig) -> MemoryEstimate:
    """What a train step keeps on each device at its peak, with rematerialized layers if `model.remat`."""
    model, mesh = config.model, config.mesh
    width = 2 if model.compute_dtype == "bfloat16" else 4
    held = state_bytes(config)
    gradients = 1 if config.accumulate == 1 else 2  # those of a piece, and the sum over the pieces
    state = (1 + gradients) * held.params + held.moments
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
    exchanged, copied = _exchanged(config)
    kept = {"none": everything + copied, "layer": 0, "attention": attention + exchanged, "offload": 0}[model.remat]
    kept += width * model.embed_dim
    # In the bubble the pipeline's stages run on nothing, and keep it; a tick is put together before it joins the rest.
    stages = mesh.pipeline
    ticks = 1 + stages / (config.repeats * config.num_microbatches) if stages > 1 else 1
    saved = tokens * kept * ticks * model.num_layers / stages / mesh.tensor
    moving = 4 * width * tokens * model.embed_dim / mesh.tensor if stages > 1 else 0  # what enters and leaves
    moving += held.params if config.repeats > 1 else 0  # the layers in the order in which a stage runs them
    weights = (width + 4) * layer_params / mesh.tensor  # gathered, and their gradient before it is scattered
    working = max(layer + weights, _head_bytes(config, tokens)) + moving
    return MemoryEstimate(state=state, saved=saved, working=working)


def _head_bytes(config: TrainConfig, tokens: float) -> float:
    """What there is beside the kept activations when the loss of so many tokens turns.

    The columns of the head, gathered, and their gradient before it is scattered; a chunk of logits with its gradient;
    of every depth what enters its norm, in float32, too, and what leaves it, gathered over `tensor`, with gradients; of
    those from 2 on the block and its gradient, and of its product with the activations both factors of the silu.
    """
    model, mesh = config.model, config.mesh
    width = 2 if model.compute_dtype == "bfloat16" else 4
    d, depth, parts = model.embed_dim, model.mtp_depth, mesh.tensor * mesh.pipeline
    head = (width + 4) * d * model.vocab_size / parts
    logits = 2 * 4 * min(config.loss.chunk, tokens) * model.vocab_size / parts
    normed = tokens * d * (2 * width + (2 * width + (4 if width < 4 else 0)) / mesh.tensor)
    ahead = tokens * d * 2 * width / mesh.tensor + (width + 4) * d * d
    return head + logits + depth * normed + (depth - 1) * ahead


def _exchanged(config: TrainConfig) -> tuple[float, float]:
    """(all, those of which there is no other form): bytes a token of what Ulysses and USP keep beside out and lse.

    Query, key and value as they came out of the exchange, key/value heads perhaps in copies, and out before it.
    """
    model, mesh = config.model, config.mesh
    width = 2 if model.compute_dtype == "bfloat16" else 4
    heads = max(1, model.num_heads // mesh.tensor), max(1, model.num_kv_heads // mesh.tensor)
    sizes = {"seq_len": config.data.seq_len, "num_heads": heads[0], "num_kv_heads": heads[1]}
    call = costs.make_call(**sizes, head_dim=model.head_dim, layout=config.layout)
    grid = costs.grid_of(call, model.strategy, mesh.sequence)
    if grid is None or grid.ulysses == 1:
        return 0, 0
    keys = costs.place_call(call, grid).num_kv_heads * grid.ulysses * mesh.tensor
    entry = width * model.head_dim
    return entry * (2 * model.num_heads + 2 * keys), entry * (model.num_heads + 2 * (keys - model.num_kv_heads))


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
    sequence does not divide the width of the model, weights are whole on one of these axes, or both.
    """
    model, mesh = config.model, config.mesh
    width = model.embed_dim
    shards = math.prod(mesh.sizes()[axis] for axis in weight_axes(width, mesh.sizes()))
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
