"""What a train step takes on a machine, predicted from sizes alone: seconds by cause, and bytes on a device.

    step  =  ticks * layers of a tick * (matmuls + attention + what is not hidden)  +  head  +  pipeline  +  optimizer

with v m + p - 1 ticks of the pipeline, each of L / (p v) layers on a microbatch. A layer runs once forward, once more
where the backward pass computes it again, and costs twice that backward; attention costs 5/2 of its forward backward.

What always holds: no device and no compilation is needed. What is assumed is in `Efficiency` and in
`ring_jax.hardware`; a ring's hops hide behind its steps, weights behind the layer but for the first that it needs, and
nothing hides the collectives of the tensor axis or the hops of the pipeline. `python -m train rehearse` compiles the
step and reads what the compiler made of it.
"""

import functools
from typing import NamedTuple

from models.sharding import WEIGHT_AXES, weight_axes
from ring_jax import costs
from ring_jax.costs import Timing, attention_memory, attention_time, make_call
from ring_jax.hardware import Topology, kernel_efficiency
from ring_jax.links import Link, axis_links, joined
from train.config import MeshConfig, TrainConfig
from train.flops import BatchCounts, model_flops
from train.memory import estimate_memory, state_bytes

MATMUL_EFFICIENCY = 0.6
"""Share of the peak that large matmuls reach. An assumption: with it, the kernels' shares and what the transfers below
cost, the prediction is near published MFU; see docs/performance.md."""


class Efficiency(NamedTuple):
    """Shares of the peak."""

    matmul: float
    attention_forward: float
    attention_backward: float


def default_efficiency(topology: Topology) -> Efficiency:
    """Matmuls at `MATMUL_EFFICIENCY`, attention at `ring_jax.hardware.KERNEL_EFFICIENCY`."""
    return Efficiency(MATMUL_EFFICIENCY, *kernel_efficiency(topology.hardware))


class StepCost(NamedTuple):
    """Seconds of one step by cause, on the device that works most."""

    matmul: float
    """Forward and backward of projections, MLP and head."""
    attention: float
    """Its kernels, forward and backward."""
    recompute: float
    """What the backward pass computes again."""
    ring: float
    """Exposed transfers of attention over the sequence axis, whatever the strategy."""
    weights: float
    """Exposed gathers of weights and scattering of their gradients, over data and sequence."""
    tensor: float
    """Collectives of the tensor axis."""
    pipeline: float
    """Hops between stages, and what the last stage sends to all."""
    bubble: float
    """Stages that wait."""
    optimizer: float
    """Reading and writing of the state."""

    @property
    def total(self) -> float:
        """The step."""
        return sum(self)


class StepMemory(NamedTuple):
    """Bytes on one device."""

    state: float
    """Parameters and optimizer state."""
    gradients: float
    saved: float
    """Activations kept for the backward pass."""
    working: float
    """Weights and activations of the layer that runs, or of the head and a chunk of logits: the larger."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class _Layer(NamedTuple):
    """One layer on one microbatch: seconds of each part, forward and backward together, per run."""

    matmul: float
    attention: float
    recompute: float
    ring: float
    weights: float
    tensor: float


@functools.cache
def _links(topology: Topology, mesh: MeshConfig) -> dict[str, Link]:
    return axis_links(topology, mesh.sizes())


@functools.cache
def _attention(call: costs.Call, strategy: str, link: Link, rates: tuple[float, float]) -> Timing | None:
    return attention_time(call, strategy, link, rates)


def attention_calls(config: TrainConfig) -> list[costs.Call]:
    """The calls of one microbatch on one device, one for each entry of the model's pattern of windows."""
    model, mesh = config.model, config.mesh
    call = make_call(
        seq_len=config.data.seq_len,
        num_heads=model.num_heads // mesh.tensor,
        num_kv_heads=model.num_kv_heads // mesh.tensor,
        head_dim=model.head_dim,
        batch=config.data.batch_size // (mesh.data * config.accumulate * config.num_microbatches),
        itemsize=_width(config),
        layout=config.layout,
    )
    return [call._replace(window=window) for window in config.model.windows or (None,)]


def strategy_fits(config: TrainConfig) -> bool:
    """Whether the heads of a device can be shared out as the strategy wants."""
    return costs.grid_of(attention_calls(config)[0], config.model.strategy, config.mesh.sequence) is not None


def predict_step(config: TrainConfig, topology: Topology, efficiency: Efficiency | None = None) -> StepCost:
    """Seconds of a step of this configuration on that machine.

    Args:
      config: its mesh has as many devices as the topology; `train.checks.validate` lets it pass.
      topology: as `ring_jax.hardware.parse_topology` makes it.
      efficiency: of kernels; None: `default_efficiency`.

    Raises:
      ValueError: the mesh cannot be laid on the topology.
    """
    efficiency = efficiency or default_efficiency(topology)
    model, mesh, hardware = config.model, config.mesh, topology.hardware
    links = _links(topology, mesh)
    layer = _layer_cost(config, topology, links, efficiency)
    useful = config.accumulate * config.num_microbatches * model.num_layers / mesh.pipeline
    waiting = config.accumulate * (mesh.pipeline - 1) * model.num_layers / (mesh.pipeline * config.repeats)
    matmul, attention, recompute, ring, weights, tensor = (useful * seconds for seconds in layer)
    head, logits_again, tables = _head_cost(config, topology, links, efficiency)
    width, tokens = _width(config), config.tokens_per_step / (mesh.data * mesh.sequence)
    # Of tokens: out of the embedding and into the head at each depth, and their gradients.
    ends = (2 + 2 * model.mtp_depth) * links["tensor"].gather(width * tokens * model.embed_dim)
    state = state_bytes(config)
    return StepCost(
        matmul=matmul + head,
        attention=attention,
        recompute=recompute + logits_again,
        ring=ring,
        weights=weights + tables,
        tensor=tensor + ends,
        pipeline=_pipeline_cost(config, links["pipeline"]),
        bubble=waiting * sum(layer),
        # Parameters and moments are read and written, the gradient is written and read.
        optimizer=2 * (2 * state.params + state.moments) / hardware.hbm_bandwidth,
    )


def _width(config: TrainConfig) -> int:
    return 2 if config.model.compute_dtype == "bfloat16" else 4


def _layer_cost(config: TrainConfig, topology: Topology, links: dict[str, Link], efficiency: Efficiency) -> _Layer:
    model, mesh, flops = config.model, config.mesh, topology.hardware.flops
    width, calls = _width(config), attention_calls(config)
    tokens = calls[0].batch * calls[0].seq_len / mesh.sequence
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    params = model.embed_dim * (heads + 3 * model.mlp_dim) / mesh.tensor
    forward = 2 * params * tokens / (flops * efficiency.matmul)
    again = model.remat != "none"
    turns = 2 if model.remat == "layer" else 1  # of the ring, forward
    rates = flops * efficiency.attention_forward, flops * efficiency.attention_backward
    timings = [_attention(call, model.strategy, links["sequence"], rates) for call in calls]
    if None in timings:
        raise ValueError(f"strategy {model.strategy} cannot share {calls[0].num_heads} heads over {mesh.sequence}")
    pattern = [timing for timing in timings if timing is not None]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    work = [mean([timing.compute[i] for timing in pattern]) for i in range(2)]
    waits = [mean([timing.exposed[i] for timing in pattern]) for i in range(2)]
    blocks = 4 * links["tensor"].gather(width * tokens * model.embed_dim)  # two gathers, two scatters
    return _Layer(
        matmul=3 * forward,
        attention=sum(work),
        recompute=(forward if again else 0) + (turns - 1) * work[0],
        ring=turns * waits[0] + waits[1],
        weights=_weight_waits(config, _weight_link(config, links), forward + work[0]),
        tensor=(3 if again else 2) * blocks,
    )


def _weight_link(config: TrainConfig, links: dict[str, Link]) -> Link:
    """Of the axes that cut the weights; of size 1 where none does."""
    axes = weight_axes(config.model.embed_dim, config.mesh.sizes())
    return joined(*(links[axis] for axis in axes)) if axes else links["data"]._replace(size=1)


def _weight_waits(config: TrainConfig, link: Link, layer_seconds: float) -> float:
    """What a layer waits for its weights, forward and backward, and for its gradients to be scattered.

    Forward the first matmul waits for its weights; the others hide behind the layer as far as it is long enough.
    Backward weights come again, and gradients leave in float32: all but the first and the last hide.
    """
    model, mesh = config.model, config.mesh
    if link.size == 1:
        return 0.0
    width = _width(config)
    query = model.embed_dim * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim / mesh.tensor
    down = model.embed_dim * model.mlp_dim / mesh.tensor
    whole = query + model.embed_dim * model.num_heads * model.head_dim / mesh.tensor + 3 * down
    gather, scatter = link.gather(width * whole), link.gather(4 * whole)
    forward = max(link.gather(width * query), gather - layer_seconds)
    backward = max(link.gather(width * down) + link.gather(4 * query), gather + scatter - 2 * layer_seconds)
    return forward + backward


def _head_cost(
    config: TrainConfig, topology: Topology, links: dict[str, Link], efficiency: Efficiency
) -> tuple[float, float, float]:
    """(matmuls, logits computed again, gathers of embedding and head): seconds of a step outside the layers."""
    model, mesh = config.model, config.mesh
    rate = topology.hardware.flops * efficiency.matmul
    tokens = config.tokens_per_step / (mesh.data * mesh.sequence)
    table = model.vocab_size * model.embed_dim / (mesh.tensor * mesh.pipeline)
    once = 2 * model.mtp_depth * table * tokens / rate
    link, axes = _weight_link(config, links), weight_axes(model.embed_dim, mesh.sizes())
    moved = 2 * link.gather(_width(config) * table) + 2 * link.gather(4 * table) if link.size > 1 else 0.0
    whole = [links[axis] for axis in WEIGHT_AXES if axis not in axes]
    # Over the other axes gradients are summed: scattered and gathered.
    summed = 2 * joined(*whole).gather(state_bytes(config).params) if whole else 0.0
    return 3 * once, once, config.accumulate * moved + summed


def _pipeline_cost(config: TrainConfig, link: Link) -> float:
    """A hop of a microbatch each tick, forward and backward; embedding and last stage go to all, and their gradients.

    All in the compute type but the gradient of the last stage, which is summed in float32.
    """
    model, mesh = config.model, config.mesh
    if mesh.pipeline == 1:
        return 0.0
    rows = _width(config) * config.tokens_per_step / (mesh.data * mesh.sequence * mesh.tensor) * model.embed_dim
    piece = rows / (config.num_microbatches * config.accumulate)
    ticks = config.repeats * config.num_microbatches + mesh.pipeline - 1
    sums = 6 * link.gather(rows) + 2 * link.gather(4 * rows / _width(config))
    return config.accumulate * 2 * ticks * link.hop(piece) + sums


def predict_memory(config: TrainConfig) -> StepMemory:
    """Bytes on a device at the peak of a step, by `train.memory`, and what the strategy holds more than a ring."""
    estimate, state = estimate_memory(config), state_bytes(config)
    held = [
        attention_memory(attention_calls(config)[0], strategy, config.mesh.sequence)
        for strategy in (config.model.strategy, "ring")
    ]
    more = max(0.0, held[0].backward - held[1].backward) if held[0] and held[1] else 0.0
    return StepMemory(
        state=state.params + state.moments + state.batch,
        gradients=state.params * (2 if config.accumulate > 1 else 1),  # a piece's, and the sum of those before
        saved=estimate.saved,
        working=estimate.working + more,
    )


def full_rows(config: TrainConfig) -> BatchCounts:
    """The most work that a batch can be: every row one document."""
    length, slots = config.data.seq_len, config.tokens_per_step
    pairs = []
    for window in config.model.windows or (None,):
        seen = length if window is None else min(length, window + 1)
        pairs.append(seen * (seen + 1) // 2 + (length - seen) * seen)
    return BatchCounts(slots, slots, round(config.data.batch_size * sum(pairs) / len(pairs)))


def predicted_mfu(config: TrainConfig, topology: Topology, seconds: float) -> float:
    """Model FLOPs of full rows over what all devices could do in that time."""
    peak = topology.num_devices * topology.hardware.flops
    return model_flops(config.model, full_rows(config)) / (seconds * peak)
