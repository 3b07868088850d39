"""What a configuration holds that has no effect, or another than may be meant: said when a run starts.

What always holds: an option that is changed from its default and that the rest of the configuration leaves without
effect is named, with the reason. It is no error: the run is what it would be without it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from models.config import RopeScaling
from train.config import LossConfig, TrainConfig


class _Unused(NamedTuple):
    names: tuple[str, ...]
    """Dotted fields."""
    holds: Callable[[TrainConfig], bool]
    """Whether they have no effect."""
    because: str


def _tokens_at_once(config: TrainConfig) -> float:
    """Of a device: those of a piece of its rows, all microbatches together."""
    return config.data.batch_size * config.data.seq_len / (config.mesh.data * config.mesh.sequence * config.accumulate)


_UNUSED = (
    _Unused(
        ("optimizer.b1", "optimizer.b2", "optimizer.eps", "optimizer.weight_decay"),
        lambda config: config.optimizer.name == "sgd",
        "optimizer.name='sgd' has neither moments nor decay",
    ),
    _Unused(
        ("optimizer.min_learning_rate_ratio",),
        lambda config: config.optimizer.warmup_steps >= config.num_steps,
        "the warmup lasts the whole run",
    ),
    _Unused(
        ("eval_batches",),
        lambda config: not 0 < config.eval_every <= config.num_steps,
        "the one evaluation is at the end and reads all held-out text",
    ),
    _Unused(("loss.mtp_weight",), lambda config: config.model.mtp_depth == 1, "model.mtp_depth=1 predicts none ahead"),
    _Unused(
        ("model.mlp_chunk",),
        lambda config: (config.model.mlp_chunk or 0) >= _tokens_at_once(config) / config.num_microbatches,
        "a device has no more tokens of a microbatch than that",
    ),
    _Unused(
        ("loss.chunk",),
        lambda config: min(config.loss.chunk, LossConfig().chunk) >= _tokens_at_once(config),
        "a device has no more tokens at a time than that, nor than the default",
    ),
    _Unused(("watch.max_rollbacks",), lambda config: not config.watch.rollback, "--rollback is off"),
    _Unused(("data.field",), lambda config: bool(config.data.sources), "each of data.sources names a field of its own"),
    _Unused(
        ("data.field",),
        lambda config: config.data.path is None and not config.data.sources,
        "without data.path the text is Python's own sources",
    ),
    _Unused(("data.sources.0.weight",), lambda config: len(config.data.sources) == 1, "there is one source only"),
    _Unused(("layout", "model.strategy"), lambda config: config.mesh.sequence == 1, "mesh.sequence=1 cuts no row"),
    _Unused(
        tuple(f"model.rope_scaling.{field.name}" for field in dataclasses.fields(RopeScaling)[1:]),
        lambda config: config.model.rope_scaling.factor == 1,
        "model.rope_scaling.factor=1 scales nothing",
    ),
    _Unused(
        ("distributed.coordinator_address", "distributed.num_processes", "distributed.process_id"),
        lambda config: config.distributed.cluster != "auto",
        "distributed.cluster names another way to find the processes; auto takes the flags",
    ),
)


def notes(config: TrainConfig) -> list[str]:
    """A line for each of them; of a configuration that `train.checks.validate` lets pass."""
    found = []
    for names, holds, because in _UNUSED:
        for name in names if holds(config) else ():
            value, default = _value_and_default(config, name)
            if value != default:
                found.append(f"{name}={value!r} has no effect: {because}")
    pieces = config.num_microbatches
    if pieces > 1 and config.mesh.pipeline == 1:
        found.append(
            f"num_microbatches={pieces} without a pipeline keeps the activations of all rows for the backward pass; "
            f"--num-microbatches 1 --accumulate {pieces * config.accumulate} works on as many rows at a time and keeps "
            "theirs only"
        )
    if config.optimizer.warmup_steps > config.num_steps:
        found.append(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} is more than num_steps={config.num_steps}: "
            f"clamped to {config.num_steps}"
        )
    return found


def _value_and_default(config: TrainConfig, name: str) -> tuple[Any, Any]:
    *sections, last = name.split(".")
    section: Any = config
    for part in sections:
        section = section[int(part)] if part.isdigit() else getattr(section, part)
    return getattr(section, last), next(field.default for field in dataclasses.fields(section) if field.name == last)
