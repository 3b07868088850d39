"""The one place where the fields of a configuration are checked together.

What always holds: a `TrainConfig` that `validate` lets pass can be trained on the mesh it names. Everything that a
user can get wrong is reported before any device is touched, all problems at once, each with its value, its rule and
the fix.
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from models.config import ModelConfig
from models.fields import is_count, nearest, wrong_types
from models.sharding import check_divisibility
from ring_jax.layouts import LAYOUTS, required_multiple
from train import profiling
from train.cluster import find_cluster
from train.config import (
    MESH_AXES,
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    SourceConfig,
    TrainConfig,
    WatchConfig,
)
from train.tokenizer import load_tokenizer, size_problem


def validate(
    config: TrainConfig, num_devices: int | None, *, device_kind: str = "", environment: Mapping[str, str] | None = None
) -> None:
    """Check the fields against each other and against the devices.

    Args:
      config: the resolved configuration.
      num_devices: devices that there are; the mesh must use all of them. None: not known yet.
      device_kind: their name, for the message.
      environment: that of a process about to join its job; None: no job is joined.

    Raises:
      ValueError: lists every problem, each with its value, its rule and the fix.
    """
    wrong = wrong_types(config)
    if not all(isinstance(getattr(config, name), cls) for name, cls in _SECTIONS.items()):
        raise _refusal(list(wrong.values()))  # no section, no fields to check
    problems = [
        *(problem for name, problem in wrong.items() if not name.startswith("model.")),  # those: `_check_model`
        *_check_numbers(config, wrong),
        *_check_layout(config, wrong),
        *_check_mesh(config.mesh, num_devices, device_kind),
        *_check_rows(config),
        *_check_sources(config.data, wrong),
        *_check_model(config, wrong),
        *_check_run(config, wrong, environment),
    ]
    if problems:
        raise _refusal(problems)


def _refusal(problems: list[str]) -> ValueError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ValueError("\n".join([f"{count} in the configuration:", *(f"  - {problem}" for problem in problems)]))


_SECTIONS = {
    "model": ModelConfig,
    "mesh": MeshConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
    "watch": WatchConfig,
    "distributed": DistributedConfig,
    "loss": LossConfig,
}


# Name of a field -> (rule in words, the rule, a value that keeps it). Numbers of the model: `ModelConfig.problems`.
_COUNT = ("at least 1", lambda value: value >= 1, "1")
_POSITIVE = ("greater than 0 and finite", lambda value: 0 < value < math.inf)
_NUMBERS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    **{f"mesh.{axis}": _COUNT for axis in MESH_AXES},
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
    "watch.spike_z": (*_POSITIVE, "8 (1e9: no alarm)"),
    "watch.stall_factor": ("greater than 1 and finite", lambda value: 1 < value < math.inf, "20 (1e9: no alarm)"),
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


def _check_numbers(config: TrainConfig, wrong: Collection[str]) -> list[str]:
    """Every number on its own."""
    problems = []
    for name, (rule, holds, example) in _NUMBERS.items():
        value = operator.attrgetter(name)(config)
        if name not in wrong and not holds(value):
            flag = name.removeprefix("watch.").replace("_", "-")
            problems.append(f"{name}={value} must be {rule}; for example --{flag} {example}")
    return problems


def _check_layout(config: TrainConfig, wrong: Collection[str]) -> list[str]:
    """Its name: the other names are out of lists that are part of their types."""
    if "layout" in wrong or config.layout in LAYOUTS:
        return []
    return [f"layout={config.layout!r} must be one of {', '.join(LAYOUTS)}{nearest(config.layout, LAYOUTS)}"]


def _check_mesh(mesh: MeshConfig, num_devices: int | None, device_kind: str) -> list[str]:
    """The mesh uses every device."""
    if num_devices is None or not is_count(*mesh.sizes().values()) or mesh.num_devices == num_devices:
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
    if is_count(rows, data, pieces, accumulate) and rows % (data * pieces * accumulate):
        more = f" x accumulate={accumulate}" if accumulate > 1 else ""
        problems.append(
            f"data.batch_size={rows} must be divisible by mesh.data={data} x num_microbatches={pieces}{more}; "
            f"use --data.batch-size {_round_up(rows, data * pieces * accumulate)}{_longer_rings(config)}"
        )
    seq_len, sequence = config.data.seq_len, config.mesh.sequence
    if is_count(seq_len, sequence) and config.layout in LAYOUTS:
        multiple = required_multiple(config.layout, sequence)
        every = math.lcm(multiple, sequence * tensor) if is_count(tensor) else multiple
        if seq_len % multiple:
            problems.append(
                f"data.seq_len={seq_len} must be divisible by {multiple} (layout {config.layout!r} with "
                f"mesh.sequence={sequence}); use --data.seq-len {_round_up(seq_len, every)}"
            )
        elif seq_len % every:
            problems.append(
                f"data.seq_len={seq_len} must be divisible by mesh.sequence={sequence} x mesh.tensor={tensor}, because "
                f"tensor shards share the tokens between blocks; use --data.seq-len {_round_up(seq_len, every)}"
            )
    return problems + _check_repeats(config)


def _longer_rings(config: TrainConfig) -> str:
    """A mesh of as many devices whose data axis these rows can be cut over, if it suits the rest; or nothing."""
    mesh, rows, pieces = config.mesh, config.data.batch_size, config.num_microbatches * config.accumulate
    if rows % pieces or not is_count(mesh.sequence, mesh.tensor, config.data.seq_len) or config.layout not in LAYOUTS:
        return ""
    data = math.gcd(mesh.data, rows // pieces)
    sequence = mesh.sequence * mesh.data // data
    every = math.lcm(required_multiple(config.layout, sequence), sequence * mesh.tensor)
    if config.data.seq_len % every or _ulysses_problem(config, sequence):
        return ""
    return f", or --mesh.data {data} --mesh.sequence {sequence}, which cuts rows over more devices instead"


def _check_repeats(config: TrainConfig) -> list[str]:
    """The circular schedule: layers in equal groups, microbatches in groups of as many as there are stages."""
    stages, repeats, layers = config.mesh.pipeline, config.repeats, config.model.num_layers
    if not is_count(stages, repeats, layers, config.num_microbatches) or repeats == 1:
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
    elif (layers // (stages * repeats)) % config.model.pattern:
        problems.append(
            f"model.windows has {config.model.pattern} entries, which must divide the "
            f"{layers // (stages * repeats)} layers of a group; use fewer repeats"
        )
    if stages > 1 and config.num_microbatches % stages:
        problems.append(
            f"num_microbatches={config.num_microbatches} must be divisible by mesh.pipeline={stages} where repeats is "
            f"more than 1; use --num-microbatches {_round_up(config.num_microbatches, stages)}"
        )
    return problems


def _check_sources(data: DataConfig, wrong: Collection[str]) -> list[str]:
    """Sources, where there are several."""
    problems = []
    sources = data.sources if isinstance(data.sources, tuple) else ()
    if sources and data.path is not None:
        problems.append(
            f"data.path={data.path!r} must be left out where data.sources names {len(sources)} sources; add it to "
            "them, or take them out"
        )
    for index, source in enumerate(sources):
        if not isinstance(source, SourceConfig) or f"data.sources.{index}.weight" in wrong:
            continue
        if not 0 < source.weight < math.inf:
            problems.append(
                f"data.sources.{index}.weight={source.weight} must be greater than 0 and finite; take the source "
                f"({source.path}) out if it is not to be read"
            )
    return problems


def _check_model(config: TrainConfig, wrong: Collection[str]) -> list[str]:
    """The model's own sizes; heads, MLP columns and layers over the tensor and pipeline axes; every token has an id."""
    model, data = config.model, config.data
    problems = check_divisibility(model, {axis: n for axis, n in config.mesh.sizes().items() if is_count(n)})
    if problem := _ulysses_problem(config, config.mesh.sequence):
        problems.append(problem)
    if is_count(model.vocab_size) and not {"data.tokenizer", "data.end_token"} & set(wrong):
        try:
            size = load_tokenizer(data.tokenizer, data.end_token).size
        except ValueError as error:
            return [*problems, str(error)]
        if problem := size_problem(data.tokenizer, size, model.vocab_size):
            problems.append(problem)
    return problems


def _ulysses_problem(config: TrainConfig, sequence: int) -> str | None:
    """Why Ulysses cannot exchange heads for the tokens of so many devices."""
    heads, tensor = config.model.num_heads, config.mesh.tensor
    if config.model.strategy != "ulysses" or not is_count(heads, tensor, sequence) or not (heads // tensor) % sequence:
        return None
    return (
        f"model.strategy='ulysses' exchanges heads for sequence, so the {heads // tensor} query heads of a tensor "
        f"shard must be divisible by mesh.sequence={sequence}; use --model.strategy usp or ring"
    )


def _check_run(config: TrainConfig, wrong: Collection[str], environment: Mapping[str, str] | None) -> list[str]:
    """Where the run is written, which steps are traced, and how its processes find each other."""
    problems = []
    if "run_dir" not in wrong and "://" in (config.run_dir or ""):
        problems.append(
            f"run_dir={config.run_dir!r} must be a folder of this machine; mount the store (gcsfuse, s3fs) and name "
            "the folder where it is mounted"
        )
    if "watch.profile" not in wrong and is_count(config.num_steps):
        problems += profiling.problems(config.watch.profile, config.num_steps)
    if environment is not None and not any(name.startswith("distributed.") for name in wrong):
        try:
            find_cluster(config.distributed, environment)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
