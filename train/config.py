"""The configuration of a run: frozen dataclasses, every field documented where it is. `train.checks` checks them."""

import dataclasses
import json
import math
from typing import Annotated, Any, Literal

import tyro

from models.config import ModelConfig
from models.fields import nearest as nearest
from ring_jax.layouts import LAYOUTS

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
    """A document longer than a row: split into pieces that are segments of their own, or refuse (with on_error skip:
    leave out and count)."""
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
    """Weight of the losses of the tokens further ahead (model.mtp_depth), meaned over the depths; divided, as all of
    the objective, by the number of next-token targets."""


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
    """Pieces that each data shard's rows are cut into, so that the pipeline stages work at the same time; without a
    pipeline `accumulate` takes less memory."""
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
    """Continue from the last complete checkpoint of the run directory, or start where it has none yet."""
    platform: Platform = "auto"
    """auto: the accelerator, if there is one. cpu: CPU devices, simulated when the mesh needs more than there are."""

    @property
    def tokens_per_step(self) -> int:
        """Global batch in tokens: rows x length."""
        return self.data.batch_size * self.data.seq_len


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The resolved configuration as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differing_fields(
    saved: dict[str, Any], current: dict[str, Any], prefix: str = "", *, where: str = "the checkpoint"
) -> list[str]:
    """Lines `field: value in {where}, value in this run` for every leaf in which two configurations differ."""
    lines = []
    for name in sorted(saved.keys() | current.keys()):
        old, new = saved.get(name, "(absent)"), current.get(name, "(absent)")
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differing_fields(old, new, f"{prefix}{name}.", where=where)
        elif old != new:
            lines.append(f"{prefix}{name}: {old} in {where}, {new} in this run")
    return lines


def clamp_warmup(config: TrainConfig) -> TrainConfig:
    """The configuration with warmup_steps <= num_steps."""
    if config.optimizer.warmup_steps <= config.num_steps:
        return config
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, warmup_steps=config.num_steps))
