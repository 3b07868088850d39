"""The configuration of a run: frozen dataclasses, and the one place where their fields are checked together.

What always holds: a `TrainConfig` that `validate` lets pass can be trained on the mesh it names. Everything that a
user can get wrong is reported before any device is touched, all problems at once, each with its value, its rule and
the fix.
"""

import dataclasses
import difflib
import json
import math
import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import tyro

from models.config import ModelConfig
from models.sharding import check_divisibility
from ring_jax.layouts import LAYOUTS, required_multiple
from train import profiling
from train.tokenizer import load_tokenizer, size_problem

type OptimizerName = Literal["adamw", "sgd"]
type Platform = Literal["auto", "cpu"]
type LongDocuments = Literal["split", "refuse"]
type OnError = Literal["raise", "skip"]
type ClusterKind = Literal["auto", "jax", "none"]

MESH_AXES = ("data", "tensor", "pipeline", "sequence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Size of every mesh axis. Their product is the number of devices."""

    data: int = 1
    """Copies of the model; each trains on its own rows of the batch."""
    tensor: int = 1
    """Devices that share the heads and the MLP columns of every layer."""
    pipeline: int = 1
    """Groups of consecutive layers; microbatches flow from one to the next."""
    sequence: int = 1
    """Devices on the attention ring; each holds 1/sequence of every row's tokens."""

    @property
    def num_devices(self) -> int:
        """Product of the axis sizes."""
        return math.prod(self.sizes().values())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes().items())

    def sizes(self) -> dict[str, int]:
        """Axis name to size, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One of several sources of text."""

    path: str
    """As `data.path`."""
    field: str = "text"
    """As `data.field`."""
    weight: float = 1.0
    """Its share of the rows is this weight over the sum of all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What text is read, as which tokens, and how it is cut into rows."""

    path: str | None = None
    """File, folder or fsspec address of text, JSON lines, Parquet, ArrayRecord. None: Python's own sources."""
    field: str = "text"
    """JSON lines: the field with the text; Parquet: the column."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources in place of `path`, mixed by their weights."""
    tokenizer: str = "bytes"
    """bytes, or the path of a Hugging Face tokenizer.json."""
    end_token: str = ""
    """Special token of that tokenizer at the end of every document; empty: none."""
    cache: str | None = None
    """Folder for tokenised documents. None: .cache/tokens, but text files as bytes stay in memory."""
    long_documents: LongDocuments = "split"
    """A document longer than a row: split into pieces that are segments of their own, or refuse."""
    on_error: OnError = "raise"
    """What cannot be read (damaged file, bad line, missing column): raise, or skip and count it."""
    seq_len: int = 2048
    """Tokens in a row, over all devices of the sequence axis."""
    batch_size: int = 4
    """Rows in one step, over all devices."""
    held_out_fraction: float = 0.05
    """Share of the documents that is never trained on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule: linear warmup, then cosine decay over the rest of the run."""

    name: OptimizerName = "adamw"
    """The update rule."""
    learning_rate: float = 3e-3
    """Peak learning rate, reached after the warmup."""
    min_learning_rate_ratio: float = 0.1
    """Learning rate at the last step, as a share of the peak."""
    warmup_steps: int = 20
    """Steps of linear warmup; more than num_steps is clamped to num_steps."""
    b1: float = 0.9
    """AdamW: decay of the first moment."""
    b2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    weight_decay: float = 0.1
    """AdamW: decoupled decay of the matrices; vectors (norm scales) do not decay."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is added to the next-token loss, and in which pieces it is computed."""

    chunk: int = 1024
    """Tokens whose logits exist at a time on a device."""
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over the vocabulary."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits."""
    mtp_weight: float = 0.3
    """Weight of the mean loss of the tokens further ahead (model.mtp_depth)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of the run is saved."""

    every: int = 50
    """Steps between checkpoints; one more is always written at the end."""
    keep: int = 2
    """Newest checkpoints that stay on disk."""
    keep_best: int = 1
    """Checkpoints with the lowest held-out loss that stay, too, of those that were saved at an evaluation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a job on many hosts find each other, and how long they wait."""

    cluster: ClusterKind = "auto"
    """auto: flags, else SLURM, Open MPI, JobSet, TPU variables; jax: all that JAX detects; none: one process."""
    coordinator_address: Annotated[str | None, tyro.conf.arg(prefix_name=False)] = None
    """HOST:PORT of process 0."""
    num_processes: Annotated[int | None, tyro.conf.arg(prefix_name=False)] = None
    """Processes in the job."""
    process_id: Annotated[int | None, tyro.conf.arg(prefix_name=False)] = None
    """Number of this process, from 0."""
    start_timeout: int = 300
    """Seconds in which all processes must have started."""
    heartbeat_timeout: int = 60
    """Seconds without a sign of life after which a process counts as lost, which ends the job."""
    stall_timeout: int = 1800
    """Seconds without progress of any process that end the job; longer than the slowest compilation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What is looked at while a run trains, and what follows from it."""

    profile: str | None = None
    """FIRST:LAST, both included: write a JAX trace of these steps into the run directory."""
    spike_z: float = 8.0
    """A loss so many robust deviations above those of the last steps is an alarm."""
    stall_factor: float = 20.0
    """A step that takes so many times the median of the last ones, and a minute at least, is an alarm."""
    max_skipped_in_a_row: int = 5
    """Steps in a row with a loss or gradient norm that is not finite, after which the run stops or goes back."""
    rollback: bool = False
    """Go back to the last good checkpoint on a loss spike or a loss that stays not finite; pass over those batches."""
    max_rollbacks: int = 3
    """Times that a run goes back; then a spike is only an alarm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a run."""

    model: ModelConfig
    """Architecture."""
    mesh: MeshConfig = MeshConfig()
    """Devices along each axis."""
    data: DataConfig = DataConfig()
    """Text and rows."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Update rule and schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    watch: Annotated[WatchConfig, tyro.conf.arg(name="")] = WatchConfig()
    """Alarms and profile; on the command line without a prefix, as --rollback."""
    distributed: DistributedConfig = DistributedConfig()
    """Processes on many hosts."""
    layout: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(LAYOUTS)}}}")] = "zigzag"
    """Order of a row's tokens over the sequence axis; zigzag gives every device the same causal work."""
    loss: LossConfig = LossConfig()
    """Terms of the loss."""
    num_microbatches: int = 1
    """Pieces that each data shard's rows are cut into, so that the pipeline stages work at the same time."""
    repeats: int = 1
    """Times that a microbatch goes round the pipeline (circular schedule): a smaller bubble, more hops. 1: GPipe."""
    accumulate: int = 1
    """Pieces of a step's rows that are worked on one after another, gradients summed: less memory, the same step."""
    num_steps: int = 100
    """Optimizer steps in the whole run (a resumed run counts from its first step)."""
    seed: int = 0
    """Determines the initial weights and the order of the data."""
    eval_every: int = 50
    """Steps between evaluations on held-out text; 0: only at the end."""
    eval_batches: int = 4
    """Held-out batches in an evaluation during the run; the one at the end reads all of them."""
    run_dir: str | None = None
    """Folder for everything the run writes. None: runs/<name of the config file>."""
    resume: bool = False
    """Continue from the last complete checkpoint of the run directory."""
    platform: Platform = "auto"
    """auto: the accelerator, if there is one. cpu: CPU devices, simulated when the mesh needs more than there are."""

    @property
    def tokens_per_step(self) -> int:
        """Global batch in tokens: rows x length."""
        return self.data.batch_size * self.data.seq_len


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The resolved configuration as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differing_fields(saved: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `field: saved value -> current value` for every leaf in which two configurations differ."""
    lines = []
    for name in sorted(saved.keys() | current.keys()):
        old, new = saved.get(name, "(absent)"), current.get(name, "(absent)")
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differing_fields(old, new, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name}: {old} in the checkpoint, {new} in this run")
    return lines


def nearest(name: str, choices: tuple[str, ...] | list[str]) -> str:
    """`, did you mean 'x'?` for the closest choice, or the empty string."""
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


def clamp_warmup(config: TrainConfig) -> TrainConfig:
    """The configuration with warmup_steps <= num_steps."""
    if config.optimizer.warmup_steps <= config.num_steps:
        return config
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, warmup_steps=config.num_steps))


def validate(config: TrainConfig, num_devices: int, *, device_kind: str = "") -> None:
    """Check the fields against each other and against the devices.

    Args:
      config: the resolved configuration.
      num_devices: devices that there are; the mesh must use all of them.
      device_kind: their name, for the message.

    Raises:
      ValueError: lists every problem, each with its value, its rule and the fix.
    """
    problems = [
        *_check_numbers(config),
        *_check_names(config),
        *_check_mesh(config.mesh, num_devices, device_kind),
        *_check_rows(config),
        *_check_sources(config.data),
        *_check_model(config),
        *profiling.problems(config.watch.profile, config.num_steps),
    ]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError("\n".join([f"{count} in the configuration:", *(f"  - {problem}" for problem in problems)]))


# Name of a field -> (rule in words, the rule, a value that keeps it). Numbers of the model: `ModelConfig.problems`.
_COUNT = ("at least 1", lambda value: value >= 1, "1")
_POSITIVE = ("greater than 0 and finite", lambda value: 0 < value < math.inf)
_NUMBERS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    **{f"mesh.{axis}": _COUNT for axis in MESH_AXES},
    "model.rope_theta": (*_POSITIVE, "10000"),
    "model.norm_eps": (*_POSITIVE, "1e-6"),
    "data.seq_len": _COUNT,
    "data.batch_size": _COUNT,
    "data.held_out_fraction": ("between 0 and 1", lambda value: 0 < value < 1, "0.05"),
    "optimizer.learning_rate": (*_POSITIVE, "1e-3"),
    "optimizer.min_learning_rate_ratio": ("between 0 and 1", lambda value: 0 <= value <= 1, "0.1"),
    "optimizer.warmup_steps": ("at least 0", lambda value: value >= 0, "0"),
    "optimizer.b1": ("at least 0 and less than 1", lambda value: 0 <= value < 1, "0.9"),
    "optimizer.b2": ("at least 0 and less than 1", lambda value: 0 <= value < 1, "0.95"),
    "optimizer.eps": (*_POSITIVE, "1e-8"),
    "optimizer.weight_decay": ("at least 0 and finite", lambda value: 0 <= value < math.inf, "0.1"),
    "optimizer.clip_norm": (*_POSITIVE, "1.0"),
    "checkpoint.every": _COUNT,
    "checkpoint.keep": _COUNT,
    "watch.spike_z": ("greater than 0", lambda value: value > 0, "8"),
    "watch.stall_factor": ("greater than 1", lambda value: value > 1, "20"),
    "watch.max_skipped_in_a_row": _COUNT,
    "watch.max_rollbacks": _COUNT,
    "checkpoint.keep_best": ("at least 0", lambda value: value >= 0, "1"),
    "distributed.start_timeout": _COUNT,
    "distributed.heartbeat_timeout": ("at least 2", lambda value: value >= 2, "60"),
    "distributed.stall_timeout": ("at least 2", lambda value: value >= 2, "1800"),
    "num_microbatches": _COUNT,
    "repeats": _COUNT,
    "accumulate": _COUNT,
    "loss.chunk": _COUNT,
    "loss.label_smoothing": ("at least 0 and less than 1", lambda value: 0 <= value < 1, "0.1"),
    "loss.z_loss": ("at least 0 and finite", lambda value: 0 <= value < math.inf, "1e-4"),
    "loss.mtp_weight": ("at least 0 and finite", lambda value: 0 <= value < math.inf, "0.3"),
    "num_steps": _COUNT,
    "seed": ("at least 0 and less than 2**32", lambda value: 0 <= value < 2**32, "0"),
    "eval_every": ("at least 0 (0: only at the end)", lambda value: value >= 0, "0"),
    "eval_batches": _COUNT,
}


def _check_numbers(config: TrainConfig) -> list[str]:
    """Every number on its own."""
    problems = []
    for name, (rule, holds, example) in _NUMBERS.items():
        value = operator.attrgetter(name)(config)
        if not holds(value):
            flag = name.removeprefix("watch.").replace("_", "-")
            problems.append(f"{name}={value} must be {rule}; for example --{flag} {example}")
    return problems


def _check_names(config: TrainConfig) -> list[str]:
    """Names out of a fixed list: the command line checks its own, a config file arrives here."""
    choices = {
        "layout": LAYOUTS,
        "optimizer.name": get_args(OptimizerName.__value__),
        "platform": get_args(Platform.__value__),
        "data.long_documents": get_args(LongDocuments.__value__),
        "data.on_error": get_args(OnError.__value__),
        "distributed.cluster": get_args(ClusterKind.__value__),
    }
    problems = []
    for name, known in choices.items():
        value = operator.attrgetter(name)(config)
        if value not in known:
            problems.append(f"{name}={value!r} must be one of {', '.join(known)}{nearest(str(value), known)}")
    return problems


def _check_mesh(mesh: MeshConfig, num_devices: int, device_kind: str) -> list[str]:
    """The mesh uses every device."""
    if min(mesh.sizes().values()) < 1 or mesh.num_devices == num_devices:
        return []
    kind = f" ({device_kind})" if device_kind else ""
    return [
        f"mesh {mesh} = {mesh.num_devices} devices must use exactly the {num_devices} devices that there are{kind}; "
        f"change the --mesh.* sizes so that their product is {num_devices}, or add --platform cpu, which simulates "
        f"{mesh.num_devices}"
    ]


def _check_rows(config: TrainConfig) -> list[str]:
    """Rows over the data axis and microbatches, tokens over the sequence axis."""
    problems = []
    rows, data, pieces = config.data.batch_size, config.mesh.data, config.num_microbatches
    accumulate, tensor = config.accumulate, config.mesh.tensor
    if min(rows, data, pieces, accumulate) >= 1 and rows % (data * pieces * accumulate):
        more = f" x accumulate={accumulate}" if accumulate > 1 else ""
        problems.append(
            f"data.batch_size={rows} must be divisible by mesh.data={data} x num_microbatches={pieces}{more}; "
            f"use --data.batch-size {_round_up(rows, data * pieces * accumulate)}"
        )
    seq_len, sequence = config.data.seq_len, config.mesh.sequence
    if min(seq_len, sequence) >= 1 and config.layout in LAYOUTS:
        multiple = required_multiple(config.layout, sequence)
        if seq_len % multiple:
            problems.append(
                f"data.seq_len={seq_len} must be divisible by {multiple} (layout {config.layout!r} with "
                f"mesh.sequence={sequence}); use --data.seq-len {_round_up(seq_len, multiple)}"
            )
        elif tensor >= 1 and (seq_len // sequence) % tensor:
            every = math.lcm(multiple, sequence * tensor)
            problems.append(
                f"data.seq_len={seq_len} must be divisible by mesh.sequence={sequence} x mesh.tensor={tensor}, because "
                f"tensor shards share the tokens between blocks; use --data.seq-len {_round_up(seq_len, every)}"
            )
    return problems + _check_repeats(config)


def _check_repeats(config: TrainConfig) -> list[str]:
    """The circular schedule: layers in equal groups, microbatches in groups of as many as there are stages."""
    stages, repeats, layers = config.mesh.pipeline, config.repeats, config.model.num_layers
    if min(stages, repeats, layers, config.num_microbatches) < 1 or repeats == 1:
        return []
    problems = []
    if stages == 1:
        problems.append(f"repeats={repeats} needs a pipeline; use --repeats 1, or mesh.pipeline of 2 or more")
    elif layers % (stages * repeats):
        fits = max(n for n in range(1, repeats + 1) if layers % (stages * n) == 0 or n == 1)
        problems.append(
            f"model.num_layers={layers} must be divisible by mesh.pipeline={stages} x repeats={repeats}; use "
            f"--repeats {fits}, or --model.num-layers {_round_up(layers, stages * repeats)}"
        )
    elif (layers // (stages * repeats)) % max(1, len(config.model.windows)):
        problems.append(
            f"model.windows has {len(config.model.windows)} entries, which must divide the "
            f"{layers // (stages * repeats)} layers of a group; use fewer repeats"
        )
    if stages > 1 and config.num_microbatches % stages:
        problems.append(
            f"num_microbatches={config.num_microbatches} must be divisible by mesh.pipeline={stages} where repeats is "
            f"more than 1; use --num-microbatches {_round_up(config.num_microbatches, stages)}"
        )
    return problems


def _check_sources(data: DataConfig) -> list[str]:
    """Sources, where there are several."""
    problems = []
    if data.sources and data.path is not None:
        problems.append(
            f"data.path={data.path!r} must be left out where data.sources names {len(data.sources)} sources; add it to "
            "them, or take them out"
        )
    for index, source in enumerate(data.sources):
        if not 0 < source.weight < math.inf:
            problems.append(
                f"data.sources.{index}.weight={source.weight} must be greater than 0 and finite; take the source "
                f"({source.path}) out if it is not to be read"
            )
    return problems


def _check_model(config: TrainConfig) -> list[str]:
    """The model's own sizes; heads, MLP columns and layers over the tensor and pipeline axes; every token has an id."""
    sizes = config.mesh.sizes()
    problems = check_divisibility(config.model, sizes if min(sizes.values()) >= 1 else {})
    if config.model.vocab_size >= 1:
        try:
            size = load_tokenizer(config.data.tokenizer, config.data.end_token).size
        except ValueError as error:
            return [*problems, str(error)]
        if problem := size_problem(config.data.tokenizer, size, config.model.vocab_size):
            problems.append(problem)
    return problems


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
