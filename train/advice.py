"""A step that does not fit: what the compiler said, in a line, and what would make it fit, most effective first.

What always holds: every piece of advice is a configuration that `validate` lets pass; its memory is the estimate of
`train.memory`, its activations scaled to what the compiler found for the step that was refused.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ring_jax.pods import Pod
from train.checks import validate
from train.config import TrainConfig
from train.memory import estimate_memory


class Refusal(NamedTuple):
    """A compiler found no room for a program."""

    message: str
    used: int | None
    """Bytes on a device that it would take, where the compiler says."""
    available: int | None
    """Bytes that there are, as the compiler counts them."""


type Change = dict[str, Any]
"""Dotted names of fields of a `TrainConfig` and their values."""


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read_refusal(text: str) -> Refusal | None:
    """What a compiler's error says about memory; None where it is another error.

    Example:
      >>> read_refusal("RESOURCE_EXHAUSTED: ... HLO temporaries (31.50G) exceeds available HBM (15.75G).").message
      'the compiler needs 33.8 GB of a device, which has 16.9 GB'
    """
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    size = r"\(?([\d.]+)([KMGT]?)i?B?\)?"
    found = re.search(rf"{size} exceeds available HBM {size}", text) or re.search(rf"Used {size} of {size} hbm", text)
    if not found:
        return Refusal(text.splitlines()[0][:300], None, None)
    used, available = (round(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    return Refusal(
        f"the compiler needs {used / 1e9:.1f} GB of a device, which has {available / 1e9:.1f} GB", used, available
    )


def advise(config: TrainConfig, pod: Pod, used: int | None, available: int | None) -> list[str]:
    """Lines that say what would take less, in order of effect; the last says the least that fits, if there is such."""
    if available is None:
        return []
    predict = scaled_estimate(config, used)
    now = used or predict(config)
    changes = sorted((predict(apply(config, change)), flags(change), why) for change, why in _changes(config))
    lines = []
    for size, words, why in changes:
        if size < 0.99 * now:
            lines.append(f"  {words}: about {size / 1e9:.1f} GB, {_verdict(size, available)}; {why}")
    title = f"what would take less than {now / 1e9:.1f} GB, most effective first (estimates; a device has "
    lines = [f"{title}{available / 1e9:.1f} GB):", *lines] if lines else []
    return [*lines, _least(config, pod, predict, available)]


def _verdict(size: float, available: int) -> str:
    if size > available:
        return "not enough alone"
    # Seen with libtpu 0.0.50: where memory is nearly full, every transfer of the step becomes synchronous.
    return "fits" if size < 0.9 * available else "fits with little room, which may leave transfers exposed"


def scaled_estimate(config: TrainConfig, used: int | None) -> Callable[[TrainConfig], float]:
    """Estimate of the bytes on a device, its activations scaled by what the compiler found for `config`."""
    estimate = estimate_memory(config)
    scale = max(0.2, (used - estimate.state) / (estimate.saved + estimate.working)) if used else 1.0

    def predict(other: TrainConfig) -> float:
        found = estimate_memory(other)
        return found.state + scale * (found.saved + found.working)

    return predict


def flags(change: Change) -> str:
    """As on the command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())


def apply(config: Any, change: Change) -> Any:
    """The configuration with dotted fields changed."""
    for name, value in change.items():
        field, _, rest = name.partition(".")
        inner = apply(getattr(config, field), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{field: inner})
    return config


def without_data(config: TrainConfig) -> TrainConfig:
    """For `validate`, where no text need be at hand: what concerns the data left out."""
    data = dataclasses.replace(config.data, path=None, sources=(), tokenizer="bytes", end_token="")
    return dataclasses.replace(config, data=data)


def is_valid(config: TrainConfig) -> bool:
    """Whether it could be trained, whatever its data."""
    try:
        validate(without_data(config), config.mesh.num_devices)
    except ValueError:
        return False
    return True


def _changes(config: TrainConfig) -> list[tuple[Change, str]]:
    """Single changes for the same machine, each with what it does."""
    sizes = config.mesh.sizes()
    found: list[tuple[Change, str]] = [({"model.remat": "layer"}, "layers are computed again")]
    pieces = config.num_microbatches * config.accumulate
    for count in (2, 4, 8, 16, 32):
        if config.data.batch_size % (sizes["data"] * pieces * count) == 0:
            found.append(({"accumulate": config.accumulate * count}, "rows one after another, the same step"))
    for more, less in (("tensor", "sequence"), ("pipeline", "sequence"), ("sequence", "data"), ("tensor", "data")):
        if sizes[less] % 2 == 0:
            changed = {f"mesh.{more}": sizes[more] * 2, f"mesh.{less}": sizes[less] // 2}
            found.append((changed, "the same devices, cut otherwise"))
            if less == "data":  # twice the rows on each, of which half at a time
                found.append((changed | {"accumulate": 2 * config.accumulate}, "longer rings, rows one after another"))
    if config.num_microbatches > 1 and config.mesh.pipeline == 1:  # one stage: they need not be in flight together
        found.append(({"num_microbatches": 1, "accumulate": pieces}, "rows one after another, the same step"))
    if config.model.mlp_chunk is None:
        found.append(({"model.mlp_chunk": 4096}, "the MLP's hidden layer in pieces"))
    if config.loss.chunk > 256:
        found.append(({"loss.chunk": 256}, "fewer logits at a time"))
    return [(change, why) for change, why in found if is_valid(apply(config, change))]


def _least(config: TrainConfig, pod: Pod, predict: Callable[[TrainConfig], float], available: int) -> str:
    """The fewest devices, in doublings of the ring, with which the estimate fits, after what these many allow."""
    for doublings in range(11):
        chosen: Change = {"mesh.sequence": config.mesh.sequence * 2**doublings} if doublings else {}
        start = apply(config, chosen)
        if not is_valid(start):
            break
        for change, _ in sorted(_changes(start), key=lambda found: predict(apply(start, found[0]))):
            now, found = predict(apply(config, chosen)), apply(config, chosen | change)
            # Of the changes that name the same field, the first is the best; together they might be another mesh.
            if now > available and predict(found) < now and not (chosen.keys() - {"mesh.sequence"}) & change.keys():
                if is_valid(found) and found.mesh.num_devices == start.mesh.num_devices:
                    chosen = chosen | change
        found = apply(config, chosen)
        if predict(found) <= available:
            count = found.mesh.num_devices
            devices = f"{count} devices" + (f" instead of {pod.num_devices}" if doublings else "")
            return f"the least that would fit: {flags(chosen)} on {devices}, about {predict(found) / 1e9:.1f} GB each"
    return f"nothing that would fit was found; a shorter row takes less: --data.seq-len {config.data.seq_len // 2}"
