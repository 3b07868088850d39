"""`python -m train plan`: which mesh, strategy, layout, microbatches and rematerialization to train with on a machine.

What always holds: every plan is a configuration that `train.checks.validate` would let pass on that machine, with the
model, the rows and their length as they were given; what is searched does not change what is computed. Times and bytes
are those of `train.step_cost`: closed forms, before anything is compiled. `python -m train rehearse` compiles.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import tyro

from models.sharding import check_divisibility
from ring_jax.hardware import HARDWARE, Topology, parse_topology
from ring_jax.layouts import required_multiple
from ring_jax.links import axis_links
from train.checks import validate
from train.config import MESH_AXES, MeshConfig, TrainConfig
from train.step_cost import (
    Efficiency,
    StepCost,
    StepMemory,
    predict_memory,
    predict_step,
    predicted_mfu,
    strategy_fits,
)
from train.unwritten import writable

USABLE = 0.9
"""Share of a device's memory that a plan may fill: the estimate needs room, and so does the allocator."""
DOES_NOT_FIT = 3
"""Exit code: no plan fits the memory of the machine."""
REMAT = ("none", "attention", "layer")
STRATEGIES = ("ring", "all_gather", "ulysses", "usp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Search for the fastest way to train this model on a machine. Exit code 3: nothing fits."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """The run; its mesh, strategy, layout, microbatches and remat are what is searched."""
    topology: str
    """The machine: v5p:4x4x8, v5e:16x16, tpu7x:4x4x4, h200x8x16 (GPUs of a host x hosts)."""
    json: bool = False
    """Print one line of JSON last."""
    picture: str | None = None
    """File to draw step time, memory and strategies against the length of the rows into (PNG)."""


class Candidate(NamedTuple):
    """A configuration and what it is predicted to take."""

    config: TrainConfig
    cost: StepCost
    memory: StepMemory
    mfu: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.cost.total

    def settings(self) -> dict[str, Any]:
        """What was searched, by the names of the command line."""
        config = self.config
        return {
            **{f"mesh.{axis}": size for axis, size in config.mesh.sizes().items()},
            "model.strategy": config.model.strategy,
            "layout": config.layout,
            "model.remat": config.model.remat,
            "num_microbatches": config.num_microbatches,
            "repeats": config.repeats,
            "accumulate": config.accumulate,
        }

    def to_dict(self, given: TrainConfig) -> dict[str, Any]:
        """Plain data."""
        return {
            "settings": self.settings(),
            "flags": self.flags(given),
            "step_time_s": self.seconds,
            "tokens_per_s": self.config.tokens_per_step / self.seconds,
            "mfu": self.mfu,
            "seconds": self.cost._asdict(),
            "bytes_per_device": self.memory._asdict() | {"total": self.memory.total},
        }

    def flags(self, given: TrainConfig) -> str:
        """The options that make the given configuration this one."""
        before = Candidate(given, self.cost, self.memory, 0.0).settings()
        names = {name.replace("_", "-"): value for name, value in self.settings().items() if value != before[name]}
        return " ".join(f"--{name} {value}" for name, value in names.items())


class Search(NamedTuple):
    """What a search found."""

    fitting: list[Candidate]
    """The best of each mesh, fastest first."""
    smallest: Candidate | None
    """The one that holds least, of all; None where no mesh can be used."""
    tried: int


def search(config: TrainConfig, topology: Topology, efficiency: Efficiency | None = None) -> Search:
    """Try everything that the machine and the sizes allow.

    Args:
      config: model, rows, their length, optimizer. Its mesh, strategy, layout, microbatches and remat are replaced.
      topology: the machine. efficiency: of kernels; None: `train.step_cost.default_efficiency`.
    """
    room = USABLE * topology.hardware.hbm_bytes
    best: dict[MeshConfig, Candidate] = {}
    smallest, tried = None, 0
    for option in _options(config, topology):
        memory = predict_memory(option)
        tried += 1
        fits = memory.total <= room
        if not fits and smallest is not None and memory.total >= smallest.memory.total:
            continue
        cost = predict_step(option, topology, efficiency)
        found = Candidate(option, cost, memory, predicted_mfu(option, topology, cost.total))
        if smallest is None or memory.total < smallest.memory.total:
            smallest = found
        if fits and (option.mesh not in best or found.seconds < best[option.mesh].seconds):
            best[option.mesh] = found
    return Search(sorted(best.values(), key=lambda x: x.seconds), smallest, tried)


def predict(config: TrainConfig, topology: Topology, efficiency: Efficiency | None = None) -> Candidate:
    """The configuration as it is given; ValueError where its mesh does not go with the machine."""
    cost = predict_step(config, topology, efficiency)
    return Candidate(config, cost, predict_memory(config), predicted_mfu(config, topology, cost.total))


def _options(config: TrainConfig, topology: Topology) -> Iterator[TrainConfig]:
    """Configurations of the same step, in all the ways that the sizes allow."""
    for mesh in _meshes(config, topology):
        for strategy, layout, remat, (pieces, repeats, accumulate) in itertools.product(
            STRATEGIES if mesh.sequence > 1 else ("ring",),
            _layouts(config, mesh),
            dict.fromkeys((*REMAT, config.model.remat)),
            _pieces(config, mesh),
        ):
            chosen: dict[str, Any] = {"strategy": strategy, "remat": remat}
            option = dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, **chosen),
                mesh=mesh,
                layout=layout,
                num_microbatches=pieces,
                repeats=repeats,
                accumulate=accumulate,
            )
            if strategy_fits(option):
                yield option


def _meshes(config: TrainConfig, topology: Topology) -> Iterator[MeshConfig]:
    """Meshes of all devices that the model, the rows and the links allow."""
    data = config.data
    for sizes in _factors(topology.num_devices, len(MESH_AXES)):
        mesh = MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True)))
        if data.batch_size % mesh.data or data.seq_len % mesh.sequence or not _layouts(config, mesh):
            continue
        if data.seq_len // mesh.sequence % mesh.tensor or check_divisibility(config.model, mesh.sizes()):
            continue
        try:
            axis_links(topology, mesh.sizes())
        except ValueError:
            continue
        yield mesh


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product of so many factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)


def _layouts(config: TrainConfig, mesh: MeshConfig) -> list[str]:
    """Zigzag, which balances; contiguous, which sends less under short windows; where the length allows."""
    wanted = ["zigzag", "contiguous"] if any(config.model.windows) else ["zigzag"]
    wanted = list(dict.fromkeys((*wanted, config.layout))) if mesh.sequence > 1 else [config.layout]
    return [name for name in wanted if config.data.seq_len % required_multiple(name, mesh.sequence) == 0]


def _pieces(config: TrainConfig, mesh: MeshConfig) -> list[tuple[int, int, int]]:
    """(microbatches, repeats, accumulate) that cut a data shard's rows evenly."""
    rows, stages = config.data.batch_size // mesh.data, mesh.pipeline
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    if stages == 1:
        return [(1, 1, accumulate) for accumulate in divisors]
    pattern = max(1, len(config.model.windows))
    found = []
    for pieces in divisors:
        for repeats in range(1, min(8, config.model.num_layers // (stages * pattern)) + 1):
            if config.model.num_layers % (stages * repeats * pattern) or (repeats > 1 and pieces % stages):
                continue
            found += [(pieces, repeats, n) for n in divisors if rows // pieces % n == 0]
    return found


class Least(NamedTuple):
    """What would fit where nothing does."""

    topology: Topology | None
    """The smallest machine for these rows, of the same kind if there is one."""
    candidate: Candidate | None
    """The plan for it."""
    seq_len: int | None
    """The longest rows, by halves, for this machine."""


def least(config: TrainConfig, topology: Topology) -> Least:
    """The smallest machine that these rows fit, and the longest rows that fit this one."""
    machine, plan = None, None
    for other in _larger(topology):
        if found := search(config, other).fitting:
            machine, plan = other, found[0]
            break
    length = config.data.seq_len // 2
    while length >= 1024:
        shorter = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=length))
        if search(shorter, topology).fitting:
            return Least(machine, plan, length)
        length //= 2
    return Least(machine, plan, None)


def _larger(topology: Topology) -> Iterator[Topology]:
    """Machines of the same kind with more devices, as far as they are sold; then of other kinds with more memory."""
    kind, count = topology.hardware, topology.num_devices
    others = sorted(set(HARDWARE.values()) - {kind}, key=lambda x: x.hbm_bytes)
    more = [x for x in others if x.platform == kind.platform and x.hbm_bytes > kind.hbm_bytes]
    yield from (x for x in machines(kind.name) if x.num_devices > count)
    for other in more:
        yield from (x for x in machines(other.name) if x.num_devices >= count // 2)


def machines(name: str) -> list[Topology]:
    """Sizes of one kind, doubling: TPU slices up to 256 chips in two dimensions or 4,096 in three; up to 512 hosts."""
    hardware = next(x for x in HARDWARE.values() if x.name == name)
    if hardware.platform == "gpu":
        per_host = min(8, hardware.domain) if hardware.domain <= 8 else 4
        return [parse_topology(f"{name}x{per_host}x{2**n}") for n in range(10)]
    shape, found = [2, 2, 1][: hardware.torus_dims], []
    while max(shape) <= 16:
        found.append(parse_topology(f"{name}:{'x'.join(map(str, sorted(shape)))}"))
        shape[shape.index(min(shape))] *= 2
    return found


def command(arguments: Arguments, say: Callable[[str], None]) -> int:
    """Plan and print; the exit code.

    Raises:
      ValueError: the topology is not known, or the configuration cannot be trained on any mesh.
    """
    from train import plan_words  # it needs what is above

    config, topology = arguments.config, parse_topology(arguments.topology)
    check(config)
    picture = None if arguments.picture is None else writable("--picture", arguments.picture)
    found = search(config, topology)
    if not found.tried:
        model, data = config.model, config.data
        raise ValueError(
            f"no mesh of {topology.num_devices} devices ({topology.name}) divides heads {model.num_heads} and "
            f"{model.num_kv_heads}, layers {model.num_layers}, {data.batch_size} rows and {data.seq_len} tokens; use a "
            f"--data.seq-len that is a multiple of {2 * topology.num_devices}"
        )
    configured = given(config, topology)
    fallback = None if found.fitting else least(config, topology)
    for line in plan_words.lines(config, topology, found, configured, fallback):
        say(line)
    if picture is not None:
        from train import plan_picture  # matplotlib: a second that others need not wait

        plan_picture.save(picture, config, topology)
        say(f"picture: {picture}")
    if arguments.json:
        say(json.dumps(_as_data(config, topology, found, configured, fallback)))
    return 0 if found.fitting else DOES_NOT_FIT


def check(config: TrainConfig) -> None:
    """Refuse all that a run would refuse, but for the mesh and its pieces, which are searched, and the data."""
    words = 512 if config.data.tokenizer != "bytes" else 0
    plain = dataclasses.replace(config.data, tokenizer="bytes", path=None, sources=())
    model = dataclasses.replace(config.model, vocab_size=max(config.model.vocab_size, words))
    one = dataclasses.replace(
        config, mesh=MeshConfig(), num_microbatches=1, repeats=1, accumulate=1, data=plain, model=model
    )
    validate(one, 1)


def given(config: TrainConfig, topology: Topology) -> Candidate | None:
    """The prediction for the configuration itself; None where it does not go with the machine."""
    try:
        plain = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="bytes", sources=()))
        validate(plain, topology.num_devices)
        return predict(config, topology)
    except ValueError:
        return None


def _as_data(
    config: TrainConfig, topology: Topology, found: Search, configured: Candidate | None, fallback: Least | None
) -> dict[str, Any]:
    best = found.fitting[0] if found.fitting else None
    data: dict[str, Any] = {
        "topology": topology.name,
        "devices": topology.num_devices,
        "seq_len": config.data.seq_len,
        "batch_size": config.data.batch_size,
        "fits": best is not None,
        "hbm_bytes": topology.hardware.hbm_bytes,
        "usable": USABLE,
        "tried": found.tried,
        "plans": [x.to_dict(config) for x in found.fitting[:5]],
        "smallest": found.smallest and found.smallest.to_dict(config),
        "configured": configured and configured.to_dict(config),
    }
    if fallback:
        data["least"] = {
            "topology": fallback.topology and fallback.topology.name,
            "plan": fallback.candidate and fallback.candidate.to_dict(config),
            "seq_len": fallback.seq_len,
        }
    return data
