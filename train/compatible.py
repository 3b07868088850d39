"""Whether a run may continue another one's checkpoint: what must be the same, and what may change.

What always holds: what was learned and which text comes next stay the same, and a refusal names every field, both
values and the fix. The configuration is compared before the text is read, which may take hours. Where the text lies may
change: its fingerprint tells whether it is the same.
"""

import dataclasses
import json
import re
from typing import Any

from train.checkpoint import CheckpointError, Meta
from train.config import TrainConfig, differing_fields, to_json
from train.tokenizer import load_tokenizer

# What cannot change between save and resume. The rest can (the mesh, the layout, microbatches, rematerialization, the
# learning rate, the number of steps): it alters how the next steps go.
_FIXED = ("model.", "data.", "seed", "optimizer.name")
_FREE = ("model.remat", "model.compute_dtype", "model.strategy", "model.mlp_chunk", "data.cache", "data.on_error")
_PLACES = re.compile(r"data\.(path|tokenizer|sources\.\d+\.path):")
_SILENT = ("resume:", "run_dir:", "platform:", "distributed.")


def check_config(saved: dict[str, Any], config: TrainConfig, what: str, *, where: str = "the checkpoint") -> list[str]:
    """Refuse the configuration of another model or of other data; returns a line for every other field that changed.

    Args:
      saved: the configuration of the run that is continued, as JSON.
      config: the one of this run.
      what: whose configuration was saved, in words.
      where: what it was saved in, in words.

    Raises:
      CheckpointError: names every field that must not change, its value there and its value in this run.
    """
    differences = differing_fields(_by_source(_with_defaults(saved, config)), _by_source(to_json(config)), where=where)
    refused = [line for line in differences if line.startswith(_FIXED) and not line.startswith(_FREE)]
    refused = [line for line in refused if not _PLACES.match(line)]
    if refused:
        raise CheckpointError(
            f"{what} belongs to another run; these fields must be the same to continue:\n"
            + "\n".join(f"  - {line}" for line in refused)
            + f"\nSet them to the values in {where}, or start anew with another --run-dir and without --resume."
        )
    return [line for line in differences if not line.startswith(_SILENT)]


def check_progress(meta: Meta, config: TrainConfig) -> None:
    """Refuse a run that ends before the checkpoint, and another tokenizer.

    Raises:
      CheckpointError: names the values and the fix.
    """
    if meta.step > config.num_steps:
        raise CheckpointError(
            f"num_steps={config.num_steps} must be at least {meta.step}, the steps that the checkpoint has done; "
            f"use --num-steps {meta.step} or more, or start anew with another --run-dir and without --resume"
        )
    data = config.data
    if meta.tokenizer and load_tokenizer(data.tokenizer, data.end_token).fingerprint != meta.tokenizer:
        before = meta.config["data"]["tokenizer"]
        raise CheckpointError(
            f"data.tokenizer={data.tokenizer!r} makes other tokens than the tokenizer of step {meta.step}, which was "
            f"{before!r} then; bring that file back, or start anew with another --run-dir and without --resume"
        )


def check_text(meta: Meta, config: TrainConfig, fingerprint: str) -> None:
    """Refuse another text.

    Raises:
      CheckpointError: says so.
    """
    if meta.text_fingerprint == fingerprint:
        return
    differences = differing_fields(_by_source(meta.config), _by_source(to_json(config)))
    places = "".join(f"; {line}" for line in differences if _PLACES.match(line))
    raise CheckpointError(
        f"the text changed since step {meta.step} was saved (fingerprint {meta.text_fingerprint[:12]} then, "
        f"{fingerprint[:12]} now{places}), so the position in the data means nothing; bring back the text of "
        "--data.path (or the same Python version), or start anew with another --run-dir and without --resume"
    )


def _by_source(config: dict[str, Any]) -> dict[str, Any]:
    """Sources by number, as on the command line, so that a difference in one names its field."""
    data = config.get("data", {})
    sources = {str(number): source for number, source in enumerate(data.get("sources", ()))}
    return {**config, "data": {**data, "sources": sources}}


def _with_defaults(saved: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """A saved configuration with the fields that its version did not have: their defaults are what it did."""
    known = to_json(TrainConfig(model=config.model))
    for field in dataclasses.fields(config.model):
        if field.default is dataclasses.MISSING:
            del known["model"][field.name]
        else:
            is_group = dataclasses.is_dataclass(field.default)
            known["model"][field.name] = dataclasses.asdict(field.default) if is_group else field.default

    def fill(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {name: fill(old[name], new[name]) for name in new if isinstance(old.get(name), dict)}
        return {**new, **old, **both}

    return fill(saved, json.loads(json.dumps(known)))
