"""`python -m train rehearse`: compile the train step for a machine that is not here, and say how it would go there.

What always holds: the program is the one that `train run` would start there, made by the same `make_train_step` and
compiled by that machine's own compiler; nothing is allocated and nothing runs. Bytes, collectives and what they hide
behind are read from it; times are predicted from its figures (`train.forecast`).
"""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh

import ring_jax
from models.sharding import weight_notes
from ring_jax import planner, pods
from ring_jax.planner import find_hardware
from ring_jax.pods import Pod
from train import advice
from train.advice import Refusal
from train.checks import validate
from train.config import TrainConfig
from train.forecast import Forecast, forecast, state_bytes
from train.step import abstract_batch, abstract_state, make_train_step
from train.unwritten import writable

DOES_NOT_FIT = 3
"""Exit code: the step takes more memory than a device has."""
EXPOSED = 4
"""Exit code: it fits, and hops of the ring, other than the last homecoming of dK and dV, are waited for."""

FIGURES = (
    "bytes_per_chip", "hbm_bytes", "params_bytes", "optimizer_bytes", "temporary_bytes", "activation_bytes",
    "ring_hops", "exposed_ring_hops", "exposed_ring_s", "homecoming_hops", "homecoming_s", "sent_bytes", "exposed_s",
    "step_time_s", "mfu", "tokens_per_s", "model_flops",
)  # fmt: skip
"""Keys of `--json`, besides topology, mesh, seq_len, fits and compile_s. A chip of tpu7x counts as its two devices."""

type Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compile the train step for a machine that is not here. Exit code 3: it does not fit, 4: a ring hop is exposed."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """The run."""
    topology: str
    """The machine: v5p:4x4x8, v5e:16x16, h200x8x16 (GPUs of a host x hosts), cpu:8."""
    json: bool = False
    """Print one line of JSON last."""
    dump_hlo: str | None = None
    """File to write the scheduled program to."""


def command(arguments: Arguments, say: Say) -> int:
    """Rehearse and print; the exit code.

    Raises:
      ValueError: the topology is not known, or the configuration does not go with it.
      pods.MissingCompilerError: the compiler for it is not installed.
    """
    # Before anything else: no device of this host is touched but its CPU.
    jax.config.update("jax_platforms", "cpu")
    config, pod = arguments.config, pods.find(arguments.topology)
    check(config, pod)
    dump = None if arguments.dump_hlo is None else writable("--dump-hlo", arguments.dump_hlo)
    devices = pods.devices(pod)
    mesh = ring_jax.make_mesh(**config.mesh.sizes(), devices=devices)
    say(f"compiling the step of mesh {config.mesh} for {pod.name}: {len(devices)} x {devices[0].device_kind}")
    for line in warnings(config, pod, mesh):
        say(f"warning: {line}")
    started = time.perf_counter()
    compiled = compile_step(config, pod, mesh)
    seconds = time.perf_counter() - started
    say(f"compiled in {seconds:.0f} s")
    if isinstance(compiled, Refusal):
        return _refused(config, pod, mesh, compiled, seconds, arguments, say)
    if dump is not None:
        dump.write_text(compiled.as_text())
        say(f"wrote the scheduled program to {dump}")
    found = forecast(config, pod, mesh, compiled, abstract_state(config, mesh))
    for line in found.lines():
        say(line)
    if not found.fits:
        for line in advice.advise(config, pod, found.memory.total, found.memory.hbm):
            say(line)
    if arguments.json:
        say(json.dumps(to_json(config, pod, found, seconds)))
    return DOES_NOT_FIT if not found.fits else EXPOSED if found.waits else 0


def check(config: TrainConfig, pod: Pod) -> None:
    """Refuse a mesh that is not the machine's size, and all else that a run would refuse, but for its data."""
    if min(config.mesh.sizes().values()) >= 1 and config.mesh.num_devices != pod.num_devices:
        raise ValueError(_mesh_problem(config, pod))
    validate(advice.without_data(config), config.mesh.num_devices)


def _mesh_problem(config: TrainConfig, pod: Pod) -> str:
    mesh, count = config.mesh, pod.num_devices
    others = mesh.num_devices // mesh.sequence
    fix = f"change the --mesh.* sizes so that their product is {count}"
    other = dataclasses.replace(config, mesh=dataclasses.replace(mesh, sequence=max(1, count // others)))
    if count % others == 0 and advice.is_valid(other):
        fix += f" (with --mesh.sequence {count // others} it is)"
    return f"mesh {mesh} = {mesh.num_devices} devices, but topology {pod.name} has {count}; {fix}, or the topology"


def warnings(config: TrainConfig, pod: Pod, mesh: Mesh) -> list[str]:
    """What is legal and slow or large: a ring that leaves its host, or whose hops share a link; whole weights."""
    found, hardware = weight_notes(config.model, config.mesh.sizes()), find_hardware(pod.kind)
    if config.mesh.sequence == 1:
        return found
    if hardware and pod.network_bytes and pods.crosses_hosts(mesh, "sequence"):
        model, length = config.model, config.data.seq_len // config.mesh.sequence
        sizes = planner.Sizes(
            config.mesh.sequence, model.num_heads, model.num_kv_heads, length,
            planner.itemsize(model.compute_dtype), balanced_causal=config.layout == "zigzag",
        )  # fmt: skip
        needed = max(planner.hidden_length(sizes, hardware._replace(link_bytes=pod.network_bytes)))
        found.append(
            f"the ring crosses hosts: its hops go at {pod.network_bytes / 1e9:.0f} GB/s instead of "
            f"{hardware.hop_bytes / 1e9:.0f}, and take {hardware.hop_bytes / pod.network_bytes:.0f} times as long; at "
            f"full speed a step of {needed:,.0f} tokens a device would hide them, and here are {length:,} (a ring of "
            f"{pod.shape[1]} or fewer, dividing {pod.shape[1]}, stays in a host)"
        )
    load = pods.link_load(pod, mesh, "sequence")
    if load > 1:
        found.append(
            f"neighbors on the ring are not neighbors on the machine: {load} messages share a link, and a hop takes "
            f"{load} times as long; mesh sizes that are products of the sides {'x'.join(map(str, pod.shape))} avoid it"
        )
    return found


def compile_step(config: TrainConfig, pod: Pod, mesh: Mesh) -> Any:
    """The compiled step, or the `Refusal` of a compiler that found no room for it."""
    step: Any = make_train_step(config, mesh)
    traced = step.trace(abstract_state(config, mesh), abstract_batch(config, mesh))
    lowered = traced.lower(lowering_platforms=({"gpu": "cuda"}.get(pod.platform, pod.platform),))
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = advice.read_refusal(str(error))
        if refusal is None:
            raise
        return refusal


def _refused(
    config: TrainConfig, pod: Pod, mesh: Mesh, refusal: Refusal, seconds: float, arguments: Arguments, say: Say
) -> int:
    """Say what the compiler said, and what would fit."""
    hardware = find_hardware(pod.kind)
    available = refusal.available or (int(hardware.hbm_bytes) if hardware else None)
    say(f"does not fit: {refusal.message}")
    params, optimizer = state_bytes(abstract_state(config, mesh))
    say(f"of it parameters {params / 1e9:.2f} GB, optimizer {optimizer / 1e9:.2f} GB")
    for line in advice.advise(config, pod, refusal.used, available):
        say(line)
    if arguments.json:
        say(json.dumps(to_json(config, pod, None, seconds) | {"bytes_per_chip": refusal.used, "hbm_bytes": available}))
    return DOES_NOT_FIT


def to_json(config: TrainConfig, pod: Pod, found: Forecast | None, seconds: float) -> dict[str, Any]:
    """What `--json` prints; figures are null where the step does not compile or the device's are not known."""
    asked = {"topology": pod.name, "mesh": config.mesh.sizes(), "seq_len": config.data.seq_len}
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    if found is not None:
        memory = found.memory
        figures |= {
            "bytes_per_chip": memory.total,
            "hbm_bytes": memory.hbm,
            "params_bytes": memory.params,
            "optimizer_bytes": memory.optimizer,
            "temporary_bytes": memory.temporaries,
            "activation_bytes": round(memory.activations),
            "ring_hops": found.hops,
            "exposed_ring_hops": found.exposed_hops,
            "exposed_ring_s": found.exposed_ring_s,
            "homecoming_hops": found.homecomings,
            "homecoming_s": found.homecoming_s,
            "sent_bytes": found.report.sent_bytes(),
            "exposed_s": found.exposed_s,
            "step_time_s": found.step_s,
            "mfu": found.mfu,
            "tokens_per_s": found.tokens_per_s,
            "model_flops": found.model_flops,
        }
    return asked | {"fits": found is not None and found.fits, "compile_s": round(seconds, 1)} | figures
