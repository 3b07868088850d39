"""Checkpoints: everything that a run needs to go on as if it had never stopped.

What always holds: a checkpoint is complete or it does not count (orbax writes into a temporary folder and renames it),
and it holds the parameters, the optimizer state, the step, the position in the data, the resolved configuration and a
fingerprint of the text. Arrays are stored whole, by name, and are restored straight into the shardings of the run that
asks for them, so the mesh and the number of processes may change between save and restore. Restored bits are the saved
bits, and nothing of a checkpoint is unpickled or executed: arrays and JSON.

A save copies the arrays to the host and returns; a thread writes them while the run goes on. So a failure (a full disk,
a store that is gone) shows at the next save or at the end. It costs that checkpoint, not the run: it is counted and
reported, older checkpoints stay until a newer one is complete, and the next save tries again. In a job of many
processes a save fails for all when it fails for one (`train.save_barrier`), and the job goes on like that, too.

A restore passes over a checkpoint whose content is damaged. One that cannot be read for another reason (a store that
does not answer, no permission, no memory) is good, as far as anyone knows: it stays, and the restore fails. What was
passed over is moved out of the way (`train.set_aside`) when an older one is restored, and else stays.

    <run directory>/checkpoints/120/state    arrays by tree path: params/..., opt_state/..., step
                                    meta     JSON: step, data_state, config, text_fingerprint, tokenizer, jax_version
                                    metrics  JSON: held_out_loss, where the run was evaluated at this step
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from train import distributed
from train.errors import TryAgainError
from train.reading import DAMAGED, UNREADABLE, first_line, or_try_again, try_to_read
from train.run_dir import CHECKPOINT_FOLDER, note_checkpoint
from train.save_barrier import cause, most_telling
from train.set_aside import set_aside
from train.state import TrainState

SET_ASIDE_FOLDER = "checkpoints_incomplete"
_METRIC = "held_out_loss"
_WRITE_TIMEOUT = 900
_ALIKE_WITHIN_S = 90  # NFS may show for a minute what is gone


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
    tokenizer: str = ""
    """Fingerprint of its tokenizer; empty in checkpoints of before it was saved."""


class CheckpointError(ValueError):
    """There is nothing to continue, or it belongs to another run."""


class CheckpointStore:
    """The checkpoints of one run directory; in a job of many processes, all make the same calls."""

    num_failures: int
    """Checkpoints that could not be written."""
    failure: str | None
    """Why the newest one could not be written, and nothing once a later one could."""

    def __init__(self, run_dir: pathlib.Path, *, keep: int, keep_best: int = 0, timeout: int = _WRITE_TIMEOUT):
        """Open the run directory's checkpoints; the folder is made where there is none.

        Args:
          run_dir: the run directory.
          keep: newest checkpoints that stay.
          keep_best: checkpoints with the lowest held-out loss that stay, too.
          timeout: seconds after which a write that does not end has failed.

        Raises:
          TryAgainError: they cannot be listed, or the folder cannot be made.
        """
        self.folder = run_dir.absolute() / CHECKPOINT_FOLDER
        self.num_failures, self.failure = 0, None
        self._set_aside = run_dir.absolute() / SET_ASIDE_FOLDER
        self._writing: int | None = None
        self._barrier = distributed.save_barrier()
        self._keep, self._keep_best, self._timeout = keep, keep_best, timeout
        with or_try_again(f"the checkpoints in {self.folder}"):
            self._drop_damaged_metrics()
            self._manager = self._open()

    def _drop_damaged_metrics(self) -> None:
        """They only tell which checkpoint is the best, and one that is damaged keeps the manager from being opened."""
        for path in self.folder.glob("*/metrics/metrics") if distributed.is_main() else ():
            with contextlib.suppress(OSError):
                try:
                    float(json.loads(path.read_bytes())[_METRIC])
                except (ValueError, KeyError, TypeError):
                    shutil.rmtree(path.parent)
        distributed.check_same("losses of the checkpoints", {})

    def _open(self) -> ocp.CheckpointManager:
        best = policies.BestN(
            get_metric_fn=lambda found: -found[_METRIC], n=self._keep_best, keep_checkpoints_without_metrics=False
        )
        return ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(self._keep), best]),
                create=True,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(
                    timeout_secs=self._timeout,
                    barrier_sync_fn=self._barrier,
                    # Alone, a folder that cannot be made is an error at once. Among many processes only process 0 would
                    # see it, and leave the others at the next barrier; made in the background, all of them time out.
                    create_directories_asynchronously=distributed.num_processes() > 1,
                ),
            ),
        )

    def _reopen(self) -> None:
        """After a failed save: the manager would report other errors of it at the next one, which would fail, too.

        Raises:
          TryAgainError: this process of several cannot open the store, where the others wait for it.
        """
        if distributed.any_process(not os.path.isdir(self.folder)):  # False where it does not answer, too
            return  # nothing can be opened; saves go on failing until the store is back
        with contextlib.suppress(Exception):
            self._manager.close()
        self._clear_up()
        try:
            with or_try_again(f"the checkpoints in {self.folder}"):
                self._manager = self._open()
        except TryAgainError:
            if distributed.num_processes() > 1:
                raise  # alone, the closed one fails in its place, and after it comes another attempt

    def save(self, state: TrainState, meta: Meta, *, held_out_loss: float | None = None) -> str | None:
        """Begin to write one checkpoint; when it is complete, those that are neither new nor best are removed.

        The arrays may be donated as soon as this returns. Does nothing when this step is saved already.

        Returns:
          Why the save before this one, or the beginning of this one, failed.
        """
        problem = self.settle()
        if distributed.from_main(meta.step in self._manager.all_steps()):  # one that lags behind would not join in
            return problem
        values = {**dataclasses.asdict(meta), "jax_version": jax.__version__}
        items = {"state": ocp.args.StandardSave(_by_name(state)), "meta": ocp.args.JsonSave(values)}
        is_known = held_out_loss is not None and math.isfinite(held_out_loss)  # what is not finite is not the best
        metrics = {_METRIC: held_out_loss} if is_known else None
        if metrics:  # the manager reads them when it is opened, but writes them for another way to choose the best only
            items["metrics"] = ocp.args.JsonSave(metrics)
        arguments = ocp.args.Composite(**items)
        self._writing = meta.step
        begun = self._probe()
        if begun is None:
            if self._barrier:
                self._barrier.begin()
            begun = self._try(lambda: self._manager.save(meta.step, args=arguments, metrics=metrics, force=True))
        return "; ".join(filter(None, (problem, begun))) or None

    def settle(self) -> str | None:
        """Wait until the save in flight is complete or has failed; returns why it failed, once."""
        if self._writing is None:
            return None
        problem = self._try(self._manager.wait_until_finished)
        if problem is None:
            if distributed.is_main():
                note_checkpoint(self.folder.parent, self._writing)
            self._writing, self.failure = None, None
            if self.num_failures:
                self._clear_up()
        return problem

    def wait(self) -> None:
        """Let the save in flight end, without a word to the other processes: for one that leaves alone, in error."""
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()

    def is_empty(self) -> bool:
        """Whether there is no checkpoint, complete or damaged."""
        return not distributed.from_main(self._steps())

    def remove_interrupted(self) -> list[str]:
        """Remove what a killed run was still writing, which is worth nothing; returns a line for each."""
        names = distributed.from_main(_interrupted(self.folder))
        self._clear_up()
        return [f"{name}: an interrupted write, removed" for name in names]

    def restore(self, abstract: TrainState, *, up_to: float = math.inf) -> tuple[TrainState, Meta, list[str]]:
        """The newest complete checkpoint, in the shardings of `abstract`, and a line for everything passed over.

        What was passed over is then taken out of the way (`move_aside`), so that the run can save those steps again.

        Raises:
          CheckpointError: there is no complete checkpoint of step `up_to` or before; all stay where they are.
          TryAgainError: one cannot be read, for another reason than its content.
        """
        names = _by_name(abstract)
        self.settle()
        skipped: dict[int, str] = {}
        for step in (step for step in distributed.from_main(self._steps()) if step <= up_to):
            folder = self.folder / str(step)
            found, outcome, problem = None, UNREADABLE, "another host of the job does not see it"
            if distributed.num_processes() == 1 or distributed.wait_for(folder):
                with distributed.reading("checkpoint", step):
                    read = functools.partial(_read_all, folder, names)
                    found, outcome, problem = try_to_read(read)
            worst = distributed.largest(outcome)
            if worst == UNREADABLE:
                raise TryAgainError(_unreadable(folder, most_telling(distributed.gather(problem))))
            if worst == DAMAGED or found is None:
                skipped[step] = f"{step}: incomplete or damaged, {problem or 'as another process found'}"
                continue
            meta, arrays = found
            became = self.move_aside(list(skipped))
            lines = [f"{line}; {words}" for line, words in zip(skipped.values(), became, strict=True)]
            leaves = [arrays[name] for name in names]
            return jax.tree.unflatten(jax.tree.structure(abstract), leaves), meta, lines
        if up_to < math.inf:
            raise CheckpointError(f"{self.folder} holds none of step {up_to} or before{_found(skipped.values())}")
        raise CheckpointError(_nothing_to_resume(self.folder, skipped.values()))

    def close(self) -> str | None:
        """Wait for the save in flight and release the folder; returns why that save failed."""
        problem = self.settle()
        self._manager.close()
        return problem

    def _steps(self) -> list[int]:
        return sorted(self._manager.all_steps(), reverse=True)

    def _try(self, work: Callable[[], Any]) -> str | None:
        """Do a part of a save; when it fails on any process, count it, clear up and say why."""
        problem = ""
        try:
            work()
        except Exception as error:  # whatever a store makes of a failed write
            problem = first_line(cause(error))
        reasons = distributed.gather(problem) if distributed.any_process(bool(problem)) else []
        if not reasons:
            return None
        self.num_failures += 1
        self.failure = f"checkpoint of step {self._writing} not written: {most_telling(reasons)}"
        self._writing = None
        self._reopen()
        return self.failure

    def _probe(self) -> str | None:
        """Among many processes: why one of them cannot write a small file into the store, before they begin to wait for
        each other."""
        if not self._barrier:
            return None
        path = self.folder / f".probe_{jax.process_index()}"

        def write() -> None:
            try:
                path.write_bytes(bytes(4096))
            finally:
                path.unlink(missing_ok=True)

        return self._try(write)

    def _clear_up(self) -> None:
        """Remove what failed saves left; a thread of orbax may still add to it, so it is done again after a success."""
        for name in _interrupted(self.folder) if distributed.is_main() else ():
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def move_aside(self, steps: Collection[int]) -> list[str]:
        """Take checkpoints out of the way, into `checkpoints_incomplete`; words for what became of each.

        Raises:
          TryAgainError: one cannot be moved, or a process goes on seeing it.
        """
        if not steps:
            return []
        became = set_aside(self.folder, steps, self._set_aside)
        self._reload()
        return became

    def _reload(self) -> None:
        """Read the list of checkpoints anew until it is the same in all processes: one that still sees a step that is
        gone would not save it again, and leave the others alone in that save.

        Raises:
          TryAgainError: it stays another one.
        """
        for _ in range(_ALIKE_WITHIN_S):
            with or_try_again(f"the checkpoints in {self.folder}"):
                self._manager.reload()
            steps = self._steps()
            if not distributed.any_process(steps != distributed.from_main(steps)):
                return
            time.sleep(1)
        raise TryAgainError(
            f"{self.folder}: after {_ALIKE_WITHIN_S} s a process still sees other checkpoints than process 0; start "
            "again with --resume"
        )


def read_newest_meta(run_dir: pathlib.Path) -> Meta | None:
    """What the newest readable checkpoint holds beside its arrays; no device is needed and nothing is changed.

    Returns:
      None where there is no checkpoint at all, but for interrupted writes.

    Raises:
      CheckpointError: all of them are damaged.
      TryAgainError: one cannot be read, for another reason than its content.
    """
    folder, skipped = run_dir.absolute() / CHECKPOINT_FOLDER, []
    steps, _, problem = try_to_read(functools.partial(checkpoint_steps, folder))
    if steps is None:
        raise TryAgainError(_unreadable(folder, problem))
    for step in reversed(steps):
        found, outcome, problem = try_to_read(functools.partial(_read_meta, folder / str(step)))
        if outcome == UNREADABLE:
            raise TryAgainError(_unreadable(folder / str(step), problem))
        if found is not None:
            return found
        skipped.append(f"{step}: incomplete or damaged, {problem}")
    if skipped:
        raise CheckpointError(_nothing_to_resume(folder, skipped))
    return None


def checkpoint_steps(folder: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order.

    Raises:
      OSError: there is a folder, and it cannot be looked into.
    """
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []


def _by_name(state: TrainState) -> dict[str, Any]:
    """Leaves by tree path: plain names outlive the classes that hold the arrays."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _read_all(folder: pathlib.Path, names: dict[str, Any]) -> tuple[Meta, dict[str, Any]]:
    return _read_meta(folder), _read_arrays(folder, names)


def _read_arrays(folder: pathlib.Path, names: dict[str, Any]) -> dict[str, Any]:
    """Not by orbax's manager, which waits for the other processes: where one fails, the rest would wait for ever."""
    return ocp.StandardCheckpointHandler().restore(epath.Path(folder) / "state", args=ocp.args.StandardRestore(names))


def _read_meta(folder: pathlib.Path) -> Meta:
    values = ocp.JsonCheckpointHandler().restore(epath.Path(folder) / "meta")
    known = {field.name: field.default for field in dataclasses.fields(Meta)}
    return Meta(
        **{
            name: values[name] if default is dataclasses.MISSING else values.get(name, default)
            for name, default in known.items()
        }
    )


def _interrupted(folder: pathlib.Path) -> list[str]:
    """Names of the folders that a killed run was still writing."""
    return sorted(path.name for path in folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))


def _unreadable(folder: pathlib.Path, reason: str) -> str:
    return (
        f"the checkpoint {folder} cannot be read ({reason}), which does not mean that it is damaged; mend the store "
        "and start again with --resume, or move that folder away to continue from the checkpoint before it"
    )


def _nothing_to_resume(folder: pathlib.Path, skipped: Collection[str]) -> str:
    return (
        f"--resume: {folder} holds no complete checkpoint{_found(skipped)}, so there is nothing to continue; delete "
        f"{folder.parent} or choose another --run-dir, and start without --resume"
    )


def _found(skipped: Collection[str]) -> str:
    return f" (found {'; '.join(skipped)})" if skipped else ""
