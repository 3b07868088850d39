"""A plan as a picture: step time by cause and memory against the length of the rows, and where strategies cross.

What always holds: every length has as many tokens in a step as the configuration, or one row where that is longer, and
shows the best plan for it; a length that nothing fits is a gap.
"""

import dataclasses
import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ring_jax import costs
from ring_jax.hardware import Topology, kernel_efficiency
from ring_jax.links import single_link
from train.config import TrainConfig
from train.plan_words import CAUSES
from train.planning import USABLE, Candidate, search
from train.step_cost import attention_calls

LENGTHS = tuple(2**n for n in range(13, 23))
_MEMORY = {
    "state": "parameters, optimizer, batch",
    "gradients": "gradients",
    "saved": "activations kept",
    "working": "the layer that runs",
}


def save(path: pathlib.Path, config: TrainConfig, topology: Topology, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Draw the picture (PNG)."""
    plans = {length: plan for length in lengths if (plan := best_for(config, topology, length))}
    figure = Figure(figsize=(16, 5), dpi=120, layout="constrained")
    time, memory, strategies = figure.subplots(1, 3)
    _time(time, plans)
    _memory(memory, plans, topology)
    _crossover(strategies, config, topology)
    figure.suptitle(f"{topology.name}: plans by closed forms, nothing measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def best_for(config: TrainConfig, topology: Topology, length: int) -> Candidate | None:
    """The best plan for rows of this length; None where none fits."""
    rows = max(1, config.tokens_per_step // length)
    data = dataclasses.replace(config.data, seq_len=length, batch_size=rows)
    found = search(dataclasses.replace(config, data=data), topology).fitting
    return found[0] if found else None


def _label(length: int) -> str:
    return f"{length // 2**20}M" if length >= 2**20 else f"{length // 2**10}K"


def _ticks(axes: Axes, plans: dict[int, Candidate]) -> None:
    """The mesh under each length."""
    names = []
    for length, plan in plans.items():
        sizes = {axis: size for axis, size in plan.config.mesh.sizes().items() if size > 1}
        names.append("\n".join([_label(length), *(f"{axis[0]}{size}" for axis, size in sizes.items())]))
    axes.set_xticks(range(len(plans)), names, fontsize=8)
    axes.set_xlabel("tokens in a row, and the mesh of the plan (d: data, s: sequence, ...)")


def _stack(axes: Axes, plans: dict[int, Candidate], parts: dict[str, list[float]]) -> None:
    below = [0.0] * len(plans)
    for label, values in parts.items():
        if any(values):
            axes.bar(range(len(plans)), values, bottom=below, label=label)
            below = [a + b for a, b in zip(below, values, strict=True)]
    _ticks(axes, plans)
    axes.grid(alpha=0.3, axis="y")


def _time(axes: Axes, plans: dict[int, Candidate]) -> None:
    """Shares of a step; above each, the seconds for a million tokens, since long rows make steps of more tokens."""
    parts = {
        label: [getattr(plan.cost, name) / plan.seconds for plan in plans.values()] for name, label in CAUSES.items()
    }
    _stack(axes, plans, parts)
    for place, plan in enumerate(plans.values()):
        seconds = plan.seconds * 1e6 / plan.config.tokens_per_step
        axes.text(place, 1.01, f"{seconds:.3g} s", ha="center", fontsize=8)
    axes.set(ylabel="share of a step; seconds for a million tokens", title="Where the time goes", ylim=(0, 1.45))
    if plans:
        axes.legend(fontsize=8, ncols=2, loc="upper left")


def _memory(axes: Axes, plans: dict[int, Candidate], topology: Topology) -> None:
    parts = {label: [getattr(plan.memory, name) / 1e9 for plan in plans.values()] for name, label in _MEMORY.items()}
    _stack(axes, plans, parts)
    room = topology.hardware.hbm_bytes / 1e9
    axes.axhline(room, color="black", linewidth=1, label=f"a device's {room:.0f} GB")
    axes.axhline(USABLE * room, color="gray", linestyle="--", label=f"usable, {USABLE:.0%}")
    axes.set(ylabel="GB on a device", title="Memory", ylim=(0, 1.4 * room))
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _crossover(axes: Axes, config: TrainConfig, topology: Topology) -> None:
    """Attention's time over its work alone, on so many devices as heads can be exchanged over, at most 8."""
    model, hardware = config.model, topology.hardware
    count = max(n for n in range(1, 9) if model.num_heads % n == 0)
    forward, backward = kernel_efficiency(hardware)
    rates = hardware.flops * forward, hardware.flops * backward
    call = attention_calls(config)[0]._replace(
        batch=1, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, window=None, layout="zigzag"
    )
    lengths = [2**n for n in range(8, 18)]
    slow = "line" if topology.platform == "tpu" else "network"
    for kind, style in (("fast", "-"), (slow, "--")):
        link = single_link(hardware, count, kind)
        for color, strategy in enumerate(("ring", "all_gather", "ulysses")):
            timings = [costs.attention_time(call._replace(seq_len=n * count), strategy, link, rates) for n in lengths]
            ratios = [timing.total / sum(timing.compute) for timing in timings if timing is not None]
            axes.plot(lengths, ratios, style, color=f"C{color}", marker=".", label=f"{strategy}, {link.words}")
    axes.set(xlabel="tokens a device", ylabel="time of attention over its matmuls alone", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_title(f"Attention over {count} devices, {call.num_heads}:{call.num_kv_heads} heads")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
