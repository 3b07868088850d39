"""Checkpoints: everything that a run needs to go on as if it had never stopped.

What always holds: a checkpoint is complete or it does not count (orbax writes into a temporary folder and renames it),
and it holds the parameters, the optimizer state, the step, the position in the data, the resolved configuration and a
fingerprint of the text. Arrays are stored whole, by name, and are restored straight into the shardings of the run that
asks for them, so the mesh may change between save and restore. Restored bits are the saved bits.

    <run directory>/checkpoints/120/state    arrays by tree path: params/..., opt_state/..., step
                                    meta     JSON: step, data_state, config, text_fingerprint, jax_version
"""

import base64
import dataclasses
import pathlib
import shutil
from collections.abc import Collection, Iterable
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.config import TrainConfig, differing_fields, to_json
from train.state import TrainState

CHECKPOINT_FOLDER = "checkpoints"
SET_ASIDE_FOLDER = "checkpoints_incomplete"

# What cannot change between save and resume: what was learned, and which text comes next. The rest can (the mesh, the
# layout, microbatches, rematerialization, the learning rate, the number of steps): it alters how the next steps go.
_FIXED = ("model.", "data.", "seed", "optimizer.name")
_FREE = ("model.remat", "model.compute_dtype", "data.cache", "data.on_error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """What a checkpoint holds beside its arrays."""

    step: int
    """Optimizer steps that were done."""
    data_state: Any
    """`get_state()` of the data iterator after the batch of that step."""
    config: dict[str, Any]
    """Resolved configuration of the run that saved it."""
    text_fingerprint: str
    """Fingerprint of the text that the run reads."""


class CheckpointError(ValueError):
    """There is nothing to continue, or it belongs to another run."""


class CheckpointStore:
    """The checkpoints of one run directory."""

    def __init__(self, run_dir: pathlib.Path, *, keep: int):
        """Open the run directory's checkpoints; the folder is made where there is none."""
        self.folder = run_dir.absolute() / CHECKPOINT_FOLDER
        self._set_aside = run_dir.absolute() / SET_ASIDE_FOLDER
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False),
        )

    def save(self, state: TrainState, meta: Meta) -> None:
        """Write one checkpoint and remove the oldest beyond `keep`; does nothing when this step is saved already."""
        if meta.step in self._manager.all_steps():
            return
        values = {**dataclasses.asdict(meta), "data_state": _pack(meta.data_state), "jax_version": jax.__version__}
        self._manager.save(
            meta.step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(_by_name(state)), meta=ocp.args.JsonSave(values)),
        )

    def read_meta(self) -> Meta:
        """What the newest readable checkpoint holds beside its arrays; no device is needed.

        Raises:
          CheckpointError: there is no complete checkpoint.
        """
        skipped = [f"{name}: an interrupted write" for name in self._interrupted()]
        for step in self._steps():
            try:
                return self._meta(step)
            except Exception as error:  # whatever a damaged file makes of the reader
                skipped.append(_damaged(step, error))
        raise CheckpointError(self._nothing_to_resume(skipped))

    def restore(self, abstract: TrainState) -> tuple[TrainState, Meta, list[str]]:
        """The newest complete checkpoint, in the shardings of `abstract`, and a line for everything passed over.

        What was passed over is moved to `checkpoints_incomplete`, so that the run can save those steps again.

        Raises:
          CheckpointError: there is no complete checkpoint.
        """
        names = _by_name(abstract)
        skipped = {name: f"{name}: an interrupted write" for name in self._interrupted()}
        for step in self._steps():
            try:
                meta = self._meta(step)
                arguments = ocp.args.Composite(state=ocp.args.StandardRestore(names))
                arrays = self._manager.restore(step, args=arguments)["state"]
            except Exception as error:  # whatever a damaged file makes of the reader
                skipped[str(step)] = _damaged(step, error)
                continue
            self._move_aside(skipped.keys())
            leaves = [arrays[name] for name in names]
            return jax.tree.unflatten(jax.tree.structure(abstract), leaves), meta, list(skipped.values())
        raise CheckpointError(self._nothing_to_resume(skipped.values()))

    def close(self) -> None:
        """Release the folder."""
        self._manager.close()

    def _steps(self) -> list[int]:
        return sorted(self._manager.all_steps(), reverse=True)

    def _meta(self, step: int) -> Meta:
        values = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        fields = {field.name: values[field.name] for field in dataclasses.fields(Meta)}
        return Meta(**{**fields, "data_state": _unpack(fields["data_state"])})

    def _interrupted(self) -> list[str]:
        """Names of the folders that a killed run was still writing."""
        return sorted(path.name for path in self.folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))

    def _move_aside(self, names: Iterable[str]) -> None:
        for name in names:
            self._set_aside.mkdir(exist_ok=True)
            shutil.rmtree(self._set_aside / name, ignore_errors=True)
            (self.folder / name).rename(self._set_aside / name)
        self._manager.reload()

    def _nothing_to_resume(self, skipped: Collection[str]) -> str:
        detail = f" (found {'; '.join(skipped)})" if skipped else ""
        return (
            f"--resume: {self.folder} holds no complete checkpoint{detail}, so there is nothing to continue; delete "
            f"{self.folder.parent} or choose another --run-dir, and start without --resume"
        )


def check_compatible(meta: Meta, config: TrainConfig, text_fingerprint: str) -> list[str]:
    """Refuse a checkpoint of another model or of other data; returns a line for every other field that changed.

    Raises:
      CheckpointError: names every field that must not change, its value in the checkpoint and its value in this run.
    """
    differences = differing_fields(meta.config, to_json(config))
    refused = [line for line in differences if line.startswith(_FIXED) and not line.startswith(_FREE)]
    if refused:
        raise CheckpointError(
            f"the checkpoint of step {meta.step} belongs to another run; these fields must be the same to continue:\n"
            + "\n".join(f"  - {line}" for line in refused)
            + "\nSet them to the values in the checkpoint, or start anew with another --run-dir and without --resume."
        )
    if meta.text_fingerprint != text_fingerprint:
        raise CheckpointError(
            f"the text changed since step {meta.step} was saved (fingerprint {meta.text_fingerprint[:12]} then, "
            f"{text_fingerprint[:12]} now), so the position in the data means nothing; bring back the text of "
            "--data.path (or the same Python version), or start anew with another --run-dir and without --resume"
        )
    return [line for line in differences if not line.startswith(("resume:", "run_dir:", "platform:"))]


def _by_name(state: TrainState) -> dict[str, Any]:
    """Leaves by tree path: plain names outlive the classes that hold the arrays."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _damaged(step: int, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0][:200]
    return f"{step}: incomplete or damaged, {type(error).__name__}: {reason}"


def _pack(data_state: Any) -> Any:
    return {"base64": base64.b64encode(data_state).decode()} if isinstance(data_state, bytes) else data_state


def _unpack(data_state: Any) -> Any:
    is_bytes = isinstance(data_state, dict) and data_state.keys() == {"base64"}
    return base64.b64decode(data_state["base64"]) if is_bytes else data_state
