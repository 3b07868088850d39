"""What a compiled train step will do on a machine: memory, collectives and what they cost, step time, MFU.

What always holds: bytes, runs and what is scheduled between a start and its done are read from the program. Times are
predictions from figures of the machine, and say with what they were made:

    step  =  executed FLOPs / (devices * peak * efficiency) / (1 - pipeline bubble)  +  exposed transfers

Executed FLOPs are those of the model (`train.flops`), with what the backward pass computes again. A transfer that is
hidden costs what it takes longer than the block of attention, or the matmuls, that it hides behind; any other costs all
of its time.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import ring_jax
from ring_jax import pods
from ring_jax.inspection import Collective, Report
from ring_jax.planner import Hardware, find_hardware
from ring_jax.pods import Pod
from ring_jax.travel import HOMECOMING
from train.config import TrainConfig
from train.flops import count_for, matmul_params, model_flops, pipeline_bubble
from train.memory import estimate_memory

EFFICIENCY = {"tpu": 0.4, "gpu": 0.6}
"""Share of the peak that matmuls and attention kernels are taken to reach; published kernels at long blocks do."""


class Memory(NamedTuple):
    """Bytes on one device."""

    params: int
    optimizer: int
    arguments: int
    """Parameters, optimizer state and batch, as the compiler lays them out."""
    temporaries: int
    """Activations, gathered weights, gradients, buffers of transfers, and outputs in places of their own."""
    activations: float
    """Of the temporaries what the forward pass keeps for the backward pass, by the estimate of `train.memory`."""
    program: int
    hbm: int | None

    @property
    def total(self) -> int:
        """All that is there at once."""
        return self.arguments + self.temporaries + self.program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Equal collectives of a step, as one."""

    collective: Collective
    what: str
    """Where in the model, and in which pass."""
    runs: int
    seconds: float | None
    """All runs at the speed of the links; None where it is not known."""
    exposed_s: float | None
    """The part of it that computation waits for."""
    hidden: bool
    homecoming: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What `forecast` found."""

    report: Report
    memory: Memory
    transfers: tuple[Transfer, ...]
    hops: int
    """Hops of the ring on one device in one step."""
    exposed_hops: int
    """Of them, without the last homecomings, those with no computation between start and done."""
    exposed_ring_s: float | None
    """What of the time of the ring's hops, without the last homecomings, is exposed: of those that are hidden, what
    they take longer than the block of attention they hide behind."""
    homecomings: int
    """Last hops of dK and dV, one for each layer and microbatch: nothing of their layer's ring is left to hide them."""
    homecoming_s: float | None
    """What of their time is exposed."""
    model_flops: float
    executed_flops: float
    """On one device."""
    compute_s: float | None
    bubble: float
    exposed_s: float | None
    step_s: float | None
    tokens: int
    mfu: float | None
    efficiency: float | None

    @property
    def fits(self) -> bool:
        """Whether a device has the memory; taken to be so where its size is not known."""
        return self.memory.hbm is None or self.memory.total <= self.memory.hbm

    @property
    def waits(self) -> bool:
        """Whether the ring's hops are exposed: one has no work beside it, or together they cost 1 % of the step."""
        return bool(self.exposed_hops) or (self.exposed_ring_s or 0) > 0.01 * (self.step_s or math.inf)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all devices."""
        return self.step_s and self.tokens / self.step_s

    def lines(self) -> list[str]:
        """The same in words."""
        return [*_memory_lines(self.memory), "", *_transfer_lines(self.transfers), "", *_time_lines(self)]


def state_bytes(state: Any) -> tuple[int, int]:
    """(parameters, everything else) of an abstract state on one device."""

    def size(tree: Any) -> int:
        return sum(
            int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree)
        )  # fmt: skip

    return size(state.params), size((state.opt_state, state.step))


def forecast(config: TrainConfig, pod: Pod, mesh: Mesh, compiled: Any, state: Any) -> Forecast:
    """Read a compiled step and predict what it does.

    Args:
      config, mesh: what it was compiled from; pod: the machine. state: as `train.step.abstract_state`.
    """
    hardware, efficiency = find_hardware(pod.kind), EFFICIENCY.get(pod.platform)
    report = ring_jax.inspect(compiled, mesh)
    hops = [x for x in report.collectives if is_ring_hop(x)]
    last = _homecomings(hops)
    counts = count_for(config.model, np.ones((config.data.batch_size, config.data.seq_len), np.int8))
    executed = executed_flops(config, counts.num_tokens, counts.num_pairs) / config.mesh.num_devices
    block_s = None
    if hardware and efficiency:
        blocks = config.model.num_layers / config.mesh.pipeline * config.num_microbatches * config.accumulate
        forward = 4 * config.model.num_layers * config.model.num_heads * config.model.head_dim * counts.num_pairs
        forward /= config.mesh.num_devices * blocks * config.mesh.sequence
        block_s = forward / hardware.flops / efficiency
    rate = hardware.flops * efficiency if hardware and efficiency else None
    transfers = tuple(_transfers(report, hops, last, pod, mesh, hardware, block_s, rate))
    useful = model_flops(config.model, counts)
    bubble = pipeline_bubble(config.mesh.pipeline, config.num_microbatches, config.repeats)
    compute_s = executed / hardware.flops / efficiency if hardware and efficiency else None
    exposed_s = None if compute_s is None else sum(x.exposed_s or 0 for x in transfers)
    step_s = None if compute_s is None or exposed_s is None else compute_s / (1 - bubble) + exposed_s
    return Forecast(
        report=report,
        memory=_memory(compiled, state, hardware, estimate_memory(config).saved),
        transfers=transfers,
        hops=sum(x.runs for x in hops),
        exposed_hops=sum(x.runs for x in hops if not x.hidden and not _among(x, last)),
        exposed_ring_s=_exposed(transfers, [x for x in hops if not _among(x, last)], hardware),
        homecomings=sum(x.runs for x in last),
        homecoming_s=_exposed(transfers, last, hardware),
        model_flops=useful,
        executed_flops=executed,
        compute_s=compute_s,
        bubble=bubble,
        exposed_s=exposed_s,
        step_s=step_s,
        tokens=config.tokens_per_step,
        mfu=useful / step_s / config.mesh.num_devices / hardware.flops if step_s and hardware else None,
        efficiency=efficiency,
    )


def _exposed(transfers: Sequence[Transfer], those: Sequence[Collective], hardware: Hardware | None) -> float | None:
    if hardware is None:
        return None
    return sum(x.exposed_s or 0 for x in transfers if _among(x.collective, those))


def executed_flops(config: TrainConfig, tokens: int, pairs: int) -> float:
    """FLOPs of a step on all devices, with what the backward pass computes again: logits, scores, layers by `remat`.

    2 a weight and token forward, 4 backward, and for the head 2 more, whose logits are made again; 4 H a pair and head
    forward, 10 H backward, for a block's backward pass computes its scores again.
    """
    model = config.model
    head = model.mtp_depth * model.embed_dim * model.vocab_size
    layers = matmul_params(model) - head
    again, attention = {"none": (0, 0), "layer": (1, 1)}.get(model.remat, (1, 0))
    per_pair = model.num_layers * model.num_heads * model.head_dim * (14 + 4 * attention)
    return float((6 * matmul_params(model) + 2 * head + 2 * again * layers) * tokens + per_pair * pairs)


def is_ring_hop(x: Collective) -> bool:
    """Whether it moves a block round the ring: every device of the sequence axis sends to the one k further on.

    Not the permutes that a TPU's all-gathers and reduce-scatters are made of.
    """
    return x.kind == "collective-permute" and x.over("sequence") and x.shift is not None and "ppermute" in x.scope


def _homecomings(hops: Sequence[Collective]) -> list[Collective]:
    """The last hop of dK and dV in each backward pass, which the program names."""
    return [x for x in hops if HOMECOMING in x.scope]


def _among(x: Collective, found: Sequence[Collective]) -> bool:
    """Whether it is one of them; others may equal it."""
    return any(x is other for other in found)


def _memory(compiled: Any, state: Any, hardware: Hardware | None, activations: float) -> Memory:
    stats = compiled.memory_analysis()
    params, optimizer = state_bytes(state)
    arguments = stats.argument_size_in_bytes
    outside = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    # A TPU counts its on-chip memory among the temporaries, but not in the sum of allocations.
    allocated = getattr(stats, "total_allocation_bytes", 0) - arguments
    return Memory(
        params=params,
        optimizer=optimizer,
        arguments=arguments,
        temporaries=min(outside, allocated) if allocated > 0 else outside,
        activations=activations,
        program=stats.generated_code_size_in_bytes,
        hbm=int(hardware.hbm_bytes) if hardware else None,
    )


def _transfers(
    report: Report,
    hops: list[Collective],
    last: list[Collective],
    pod: Pod,
    mesh: Mesh,
    hardware: Hardware | None,
    block_s: float | None,
    rate: float | None,
) -> list[Transfer]:
    """All collectives; those that differ in nothing that is shown are one."""
    found: dict[tuple, Transfer] = {}
    for x in report.collectives:
        seconds = None if hardware is None else x.runs * transfer_seconds(x, pod, mesh, hardware)
        exposed = seconds
        if seconds is not None and block_s is not None and rate is not None and x.hidden:
            backward = "transpose(" in x.scope and "rematted_computation" not in x.scope
            if _among(x, hops):
                # A hop is hidden by one block of attention, whose backward pass is 2.5 times its forward pass.
                covered = x.runs * block_s * (2.5 if backward else 1)
            else:
                covered = seconds if x.hidden_kernels else x.runs * (x.hidden_flops or 0) / rate
            exposed = max(0.0, seconds - covered)
        key = x.kind, x.axes, x.bytes, x.dtype, describe(x.scope), x.hidden, _among(x, last)
        before = found.get(key)
        if before is not None:
            seconds = None if seconds is None or before.seconds is None else seconds + before.seconds
            exposed = None if exposed is None or before.exposed_s is None else exposed + before.exposed_s
        found[key] = Transfer(
            collective=x,
            what=describe(x.scope),
            runs=x.runs + (before.runs if before else 0),
            seconds=seconds,
            exposed_s=exposed,
            hidden=x.hidden,
            homecoming=_among(x, last),
        )
    return list(found.values())


def transfer_seconds(x: Collective, pod: Pod, mesh: Mesh, hardware: Hardware) -> float:
    """One run of a collective at the speed of the links.

    A TPU's hop uses one direction of a link, its all-gathers and sums both. GPUs of different hosts share the network.
    """
    if x.bytes == 0:
        return 0.0
    axes = [axis.split("[")[0] for axis in mesh.axis_names if x.axes is None or x.over(axis)]
    latency = hardware.latency
    if pod.platform == "gpu":
        outside = any(pods.crosses_hosts(mesh, axis) for axis in axes)
        return latency + x.bytes / (pod.network_bytes if outside and pod.network_bytes else hardware.hop_bytes)
    load = max((pods.link_load(pod, mesh, axis) for axis in axes), default=1)
    return latency + x.bytes * load / (hardware.hop_bytes / (2 if x.kind == "collective-permute" else 1))


_FRAMES = re.compile(r"^(jit\(.*\)|shard_map|while|body|cond|branch_\d+_fun|checkpoint|\w*eval_jaxpr|closed_call|)$")


def describe(scope: str) -> str:
    """``jit(step)/shard_map/transpose(jvp(pipeline))/while/body/layer/mlp/all_gather`` is "mlp, backward"."""
    parts = scope.split("/")
    passes = "again" if "rematted_computation" in scope else "backward" if "transpose(" in scope else "forward"
    parts = [part.rpartition(":")[2] for part in parts[:-1]]  # "reduce_scatter:mlp" names the primitive, too
    named = [re.sub(r"(transpose|jvp|vmap)\(|\)", "", part) for part in parts if not _FRAMES.match(part)]
    named = [name for name in named if name not in ("", "rematted_computation")]
    if not named:
        return "step" if scope else "-"
    return f"{named[-1]}, {passes}"


def _memory_lines(memory: Memory) -> list[str]:
    batch = max(0, memory.arguments - memory.params - memory.optimizer)
    rows = [
        ("parameters", memory.params),
        ("optimizer state", memory.optimizer),
        ("batch and padding", batch),
        ("temporaries", memory.temporaries),
        ("  of them activations kept (an estimate)", memory.activations),
        ("program", memory.program),
        ("together", memory.total),
    ]
    lines = ["memory of a device:", *(f"  {name:44} {size / 1e9:9.3f} GB" for name, size in rows)]
    if memory.hbm:
        verdict = "fits" if memory.total <= memory.hbm else "DOES NOT FIT"
        lines.append(f"  {'it has':44} {memory.hbm / 1e9:9.3f} GB: {verdict}, {memory.total / memory.hbm:.0%}")
    return lines


def _transfer_lines(transfers: Sequence[Transfer]) -> list[str]:
    rows: list[tuple[str, ...]] = [("collective", "axis", "where", "type", "MB", "runs", "GB", "ms", "exposed ms", "")]
    for x in transfers:
        axes = "?" if x.collective.axes is None else ",".join(x.collective.axes) or "-"
        size, total = x.collective.bytes / 1e6, x.runs * x.collective.bytes / 1e9
        times = ("-" if t is None else f"{t * 1e3:,.1f}" for t in (x.seconds, x.exposed_s))
        note = ("hidden" if x.hidden else "exposed") + (", homecoming" if x.homecoming else "")
        sizes = f"{size:,.3f}", f"{x.runs:,}", f"{total:,.2f}"
        rows.append((x.collective.kind, axes, x.what, x.collective.dtype, *sizes, *times, note))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 1, 2, 3, 9)
    lines = ["what a device sends in a step, at the speed of its links:"]
    for row in rows:
        cells = (x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _time_lines(found: Forecast) -> list[str]:
    verdict = "every one hidden" if not found.exposed_hops else f"{found.exposed_hops:,} EXPOSED"
    if not found.exposed_hops and found.exposed_ring_s:
        verdict = f"every one beside work, of which they take {found.exposed_ring_s * 1e3:.1f} ms LONGER in a step"
    cost = "" if found.homecoming_s is None else f", which cost {found.homecoming_s * 1e3:.1f} ms of a step"
    lines = [
        "no ring: nothing goes round the sequence axis"
        if not found.hops
        else f"ring: {found.hops:,} hops, {verdict}, beside {found.homecomings:,} last homecomings of dK and dV{cost}",
        f"FLOPs of a device: {found.executed_flops:.3e} by the closed form, of which the compiler shows "
        f"{found.report.flops:.3e} (loops of unknown length count once)",
    ]
    if found.step_s is None or found.compute_s is None or found.exposed_s is None or found.mfu is None:
        return [*lines, "no step time: the figures of this device are not known"]
    bubble = f", with a bubble of {found.bubble:.1%}" if found.bubble else ""
    return [
        *lines,
        f"predicted step: {found.step_s:.2f} s = {found.compute_s:.2f} s of computation at {found.efficiency:.0%} of "
        f"the peak{bubble} + {found.exposed_s:.3f} s of exposed transfers",
        f"predicted speed: {found.tokens_per_s:,.0f} tokens/s, MFU {found.mfu:.1%}",
    ]
