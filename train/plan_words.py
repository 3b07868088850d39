"""A plan in words: the best meshes as a table, where the time goes, why this one, and when the ring does not pay."""

from ring_jax import predictions
from ring_jax.hardware import Topology, kernel_efficiency
from ring_jax.links import axis_links
from ring_jax.predictions import Setting
from train.config import TrainConfig
from train.planning import USABLE, Candidate, Least, Search
from train.step_cost import attention_calls, default_efficiency

CAUSES = {
    "matmul": "matmuls",
    "attention": "attention",
    "recompute": "computed again",
    "ring": "attention's transfers that nothing hides",
    "weights": "weights gathered, gradients scattered",
    "tensor": "collectives of the tensor axis",
    "pipeline": "hops of the pipeline",
    "bubble": "waiting stages of the pipeline",
    "optimizer": "optimizer",
}
"""Parts of a `StepCost`, for people."""


def lines(
    config: TrainConfig, topology: Topology, found: Search, configured: Candidate | None, fallback: Least | None
) -> list[str]:
    """All that is printed."""
    hardware, data = topology.hardware, config.data
    shares = default_efficiency(topology)
    title = [
        f"{topology.name}: {topology.num_devices} devices of {hardware.hbm_bytes / 1e9:.0f} GB; a step is "
        f"{data.batch_size:,} {'row' if data.batch_size == 1 else 'rows'} of {data.seq_len:,} tokens; "
        f"{found.tried:,} plans tried",
        f"assumed: matmuls at {shares.matmul:.0%} of the peak, attention at {shares.attention_forward:.0%} forward and "
        f"{shares.attention_backward:.0%} backward, {USABLE:.0%} of the memory usable",
    ]
    if fallback is not None:
        return [*title, "", *_does_not_fit(config, topology, found, fallback)]
    best = found.fitting[0]
    return [
        *title,
        "",
        *table(found.fitting[:5]),
        "",
        *_breakdown(best),
        "",
        f"use {best.flags(config) or 'the configuration as it is'}",
        *_why(best, found.fitting, topology),
        *_ring(best, found.fitting, topology),
        *_as_configured(best, configured, config),
    ]


def table(plans: list[Candidate]) -> list[str]:
    """One line a plan."""
    head = ("data", "tensor", "pipeline", "sequence", "strategy", "layout", "remat", "pieces")
    rows: list[tuple[str, ...]] = [(*head, "step s", "tokens/s", "MFU", "GB")]
    for x in plans:
        config = x.config
        pieces = f"{config.num_microbatches}x{config.repeats}" if config.mesh.pipeline > 1 else ""
        pieces += f" +{config.accumulate}" if config.accumulate > 1 else ""
        strategy = config.model.strategy if config.mesh.sequence > 1 else "-"
        sizes = [str(size) for size in config.mesh.sizes().values()]
        rows.append(
            (
                *sizes,
                strategy,
                config.layout,
                config.model.remat,
                pieces.strip() or "1",
                f"{x.seconds:.3f}",
                f"{config.tokens_per_step / x.seconds:,.0f}",
                f"{x.mfu:.1%}",
                f"{x.memory.total / 1e9:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if any("x" in row[7] or "+" in row[7] for row in rows[1:]):
        text.append("pieces: microbatches x repeats of the pipeline, +pieces that are accumulated")
    return text


def _breakdown(plan: Candidate) -> list[str]:
    """Where the time and the memory of a plan go, largest first."""
    parts = sorted(plan.cost._asdict().items(), key=lambda x: -x[1])
    shares = [
        (CAUSES[name], seconds, seconds / plan.seconds) for name, seconds in parts if seconds > 5e-4 * plan.seconds
    ]
    return [
        "where a step's time goes:",
        *(f"  {name:<40} {seconds:>10.4f} s {share:>6.1%}" for name, seconds, share in shares),
        _memory_line(plan),
    ]


def _memory_line(plan: Candidate) -> str:
    memory = plan.memory
    return (
        f"memory: parameters, optimizer and batch {memory.state / 1e9:.2f} GB, gradients {memory.gradients / 1e9:.2f}, "
        f"activations kept {memory.saved / 1e9:.2f}, the layer that runs {memory.working / 1e9:.2f}"
    )


def _why(best: Candidate, plans: list[Candidate], topology: Topology) -> list[str]:
    """Against the next mesh, and what rematerialization buys."""
    found = []
    if len(plans) > 1:
        other = plans[1]
        more = {name: getattr(other.cost, name) - seconds for name, seconds in best.cost._asdict().items()}
        name = max(more, key=lambda name: more[name])
        if more[name] > 0:
            found.append(
                f"Why this mesh: the next best ({other.config.mesh}) takes {other.seconds / best.seconds - 1:.1%} "
                f"longer, most of it for {CAUSES[name]}."
            )
    room = USABLE * topology.hardware.hbm_bytes
    remat = {
        "none": "nothing is computed again, because all activations fit",
        "attention": "attention is kept, so that the ring does not turn again; more would not fit, or not pay",
        "layer": "layers are computed again, because no more activations fit",
        "offload": "attention is kept in host memory",
    }[best.config.model.remat]
    found.append(
        f"Why remat {best.config.model.remat}: {remat} ({best.memory.total / 1e9:.1f} of {room / 1e9:.1f} GB)."
    )
    return found


def _setting(plan: Candidate, topology: Topology) -> Setting:
    link = axis_links(topology, plan.config.mesh.sizes())["sequence"]
    return Setting(topology.hardware, link, kernel_efficiency(topology.hardware))


def _ring(best: Candidate, plans: list[Candidate], topology: Topology) -> list[str]:
    """Whether the ring pays in this plan, and where it does not."""
    call, setting = attention_calls(best.config)[0], _setting(best, topology)
    if best.config.mesh.sequence == 1:
        found = [_no_ring_needed(best, plans)]
    else:
        found = [_ring_against_others(best, topology, setting)]
    if setting.link.is_slow:
        found.append(
            f"The sequence axis is slow: {setting.link.words}; a hop goes at {setting.link.hop_rate() / 1e9:.1f} GB/s, "
            f"not at {setting.link.rate / 1e9:.0f}, since all wait for the slowest."
        )
    if best.config.mesh.sequence > 1:
        one = call._replace(batch=1, window=None)
        decoding = predictions.plan_cached(one, setting, 1)
        ring, stay = (decoding.option(name) for name in ("ring", "queries"))
        found.append(
            f"Decoding one sequence does not pay on the ring: {ring.total_s * 1e3:.2f} ms a layer and token against "
            f"{stay.total_s * 1e3:.2f} with keys left where they are."
        )
    return found


def _no_ring_needed(best: Candidate, plans: list[Candidate]) -> str:
    data = best.config.data
    text = f"Ring attention does not pay here: rows of {data.seq_len:,} tokens fit without cutting them"
    cut = next((x for x in plans if x.config.mesh.sequence > 1), None)
    if cut is None:
        return f"{text}, and no mesh with a sequence axis fits."
    return (
        f"{text}, and {data.batch_size} rows are enough for the data axis; the best mesh with a sequence axis "
        f"({cut.config.mesh}, {cut.config.model.strategy}) takes {cut.seconds / best.seconds - 1:.1%} longer."
    )


def _ring_against_others(best: Candidate, topology: Topology, setting: Setting) -> str:
    """The strategies on the mesh that was chosen, all else equal."""
    config, call = best.config, attention_calls(best.config)[0]
    local = config.data.seq_len // config.mesh.sequence
    options = {x.strategy: x for x in predictions.predict(call, setting)}
    ring = options["ring"]
    forward, backward = setting.hidden_length(call)
    hidden = (
        f"{local:,} tokens a device, and a hop is hidden from {forward:,.0f} forward and {backward:,.0f} backward "
        f"({setting.link.words})"
    )
    against = ", ".join(f"{name} {x.total_s / ring.total_s - 1:+.1%}" for name, x in options.items() if name != "ring")
    against = f"; other strategies against the ring, in time of attention: {against}" if against else ""
    if config.model.strategy == "ring":
        return f"Ring attention pays here: {hidden}{against}."
    return f"Ring attention does not pay on this mesh, {config.model.strategy} does: {hidden}{against}."


def _as_configured(best: Candidate, configured: Candidate | None, config: TrainConfig) -> list[str]:
    """How the configuration that was given does."""
    if configured is None:
        return [f"The configuration's own mesh ({config.mesh}) does not go with this machine."]
    text = f"As configured ({config.mesh}, {config.model.strategy}, remat {config.model.remat}): "
    text += f"{configured.seconds:.3f} s a step, MFU {configured.mfu:.1%}, {configured.memory.total / 1e9:.1f} GB"
    return [f"{text}; {configured.seconds / best.seconds:.2f} times the plan's step."]


def _does_not_fit(config: TrainConfig, topology: Topology, found: Search, fallback: Least) -> list[str]:
    smallest, room = found.smallest, USABLE * topology.hardware.hbm_bytes
    assert smallest is not None
    text = [
        f"nothing fits: the plan that holds least needs {smallest.memory.total / 1e9:.1f} GB a device, and "
        f"{room / 1e9:.1f} are usable ({smallest.flags(config) or 'the configuration as it is'})",
        _memory_line(smallest),
        "what would fit:",
    ]
    if fallback.topology and fallback.candidate:
        plan = fallback.candidate
        text.append(
            f"  --topology {fallback.topology.name} {plan.flags(config)}: {plan.memory.total / 1e9:.1f} GB a device, "
            f"{plan.seconds:.1f} s a step"
        )
    if fallback.seq_len:
        text.append(f"  --data.seq-len {fallback.seq_len}: the longest rows, by halves, that fit {topology.name}")
    if len(text) == 3:
        text.append("  nothing among the machines that are known; use a smaller model or shorter rows")
    return text
