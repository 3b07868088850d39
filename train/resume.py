"""What a run was when it stopped, and how it goes on: from its last checkpoint, or back from trouble.

What always holds: between two steps the whole state of a run is a `Progress`, and a checkpoint holds one.
"""

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from train import checkpoint, distributed, metrics, rollback
from train.compatible import check_config, check_progress
from train.config import TrainConfig, to_json
from train.data import Corpus
from train.errors import SaveError
from train.pipeline import layer_order
from train.prefetch import Prefetch
from train.reading import or_try_again
from train.run_dir import CHECKPOINT_FOLDER, CONFIG_FILE, NEWEST_FILE, note_checkpoint
from train.state import TrainState, reorder_layers, schedule_order
from train.step import abstract_state
from train.unwritten import Unwritten
from train.watch import Watcher


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run that can start: its configuration is valid, its text is read, its directory is free or can be continued."""

    config: TrainConfig
    run_dir: pathlib.Path
    corpus: Corpus
    resume_command: str
    """What continues this run after it was stopped."""
    notes: list[str]
    """What the user should know about how the configuration was read."""


@dataclasses.dataclass
class Progress:
    """The whole state between two steps."""

    state: Any
    """A `TrainState`; None while another is restored in its place."""
    step: int
    data_state: Any
    """State of the data iterator after the batch of `step`."""


def find_start(run_dir: pathlib.Path, config: TrainConfig) -> tuple[checkpoint.Meta | None, list[str]]:
    """What a run that is continued goes on from, and what changed; None: it was stopped before its first checkpoint.

    Raises:
      CheckpointError: it belongs to another run, all of its checkpoints are damaged, or they are gone.
      TryAgainError: a checkpoint or a file of the run cannot be read.
    """
    meta = checkpoint.read_newest_meta(run_dir)
    if meta is not None:
        check_progress(meta, config)
        changes = check_config(meta.config, config, f"the checkpoint of step {meta.step}")
        return meta, [f"changed since the checkpoint: {line}" for line in changes]
    changes = []
    with or_try_again(f"run_dir={str(run_dir)!r}"):
        _check_not_gone(run_dir)
        if (run_dir / CONFIG_FILE).exists():
            saved = _read_config(run_dir / CONFIG_FILE)
            changes = check_config(saved, config, f"run_dir={str(run_dir)!r}", where=CONFIG_FILE)
    return None, [
        f"--resume: {run_dir} holds no checkpoint yet, so the run starts at its first step",
        *(f"changed since the run was started: {line}" for line in changes),
    ]


def _check_not_gone(run_dir: pathlib.Path) -> None:
    """Refuse to start at the first step where there were checkpoints."""
    path, folder = run_dir / metrics.METRICS_FILE, run_dir / CHECKPOINT_FOLDER
    if path.exists() and not folder.is_dir():
        raise checkpoint.CheckpointError(
            f"--resume: {run_dir} holds {path.name}, but its folder {folder.name} is gone; bring it back (is it on a "
            "disk that is not mounted?), or delete the folder of the run and start without --resume"
        )
    mark = run_dir / NEWEST_FILE
    if mark.exists() and not (folder.is_dir() and any(folder.iterdir())):
        raise checkpoint.CheckpointError(
            f"--resume: {run_dir} had a checkpoint of step {mark.read_text().strip()[:20]}, but its folder "
            f"{folder.name} is empty or gone; bring it back (is it on a disk that is not mounted?), or delete {mark} "
            "to start at the first step"
        )


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise checkpoint.CheckpointError(
            f"--resume: {path} is damaged ({error}); delete {path.parent}, which holds no checkpoint, or choose "
            "another --run-dir"
        ) from error


def restore(run: Run, store: checkpoint.CheckpointStore, abstract: TrainState, console: Console) -> Progress | None:
    """The last complete checkpoint, and the metrics as they were when it was written; None: there is none yet."""
    skipped = store.remove_interrupted()
    progress = None
    if not store.is_empty():
        state, meta, damaged = store.restore(abstract)
        skipped += damaged
        progress = Progress(state=in_this_order(run.config, state, meta), step=meta.step, data_state=meta.data_state)
    for line in skipped:
        console.print(f"checkpoint {line}")
    step = progress.step if progress else 0
    if progress and distributed.is_main():
        note_checkpoint(run.run_dir, step)
    console.print(
        f"continuing after step {step}, from {store.folder / str(step)}" if progress else "starting at the first step"
    )
    if distributed.is_main() and (dropped := metrics.drop_rows_after(run.run_dir, step)):
        console.print(f"dropped {dropped} rows of {metrics.METRICS_FILE} after step {step}: these steps run again")
    return progress


def in_this_order(config: TrainConfig, state: TrainState, meta: checkpoint.Meta) -> TrainState:
    """A restored state with its layers stacked as this run's pipeline wants them, whatever that of the saver was."""
    saved = layer_order(config.model.num_layers, meta.config["mesh"]["pipeline"], meta.config.get("repeats", 1))
    wanted = schedule_order(config)
    if (saved == wanted).all():
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(lambda state: reorder_layers(state, saved, wanted), out_shardings=shardings, donate_argnums=0)(state)


def go_back(
    progress: Progress,
    first_bad_step: int,
    *,
    mesh: Mesh,
    run: Run,
    data: Prefetch,
    store: checkpoint.CheckpointStore,
    log: metrics.MetricsLog,
    watch: Watcher,
    console: Console,
) -> None:
    """Put `progress`, the data and the metrics back to a checkpoint from before `first_bad_step`.

    Raises:
      SaveError: none of them can be read.
      TryAgainError: the store does not answer, or a later one cannot be moved.
    """
    bad_step = progress.step
    progress.state = None  # two states may not fit into memory
    try:
        restored = rollback.restore_before(store, abstract_state(run.config, mesh), first_bad_step)
    except checkpoint.CheckpointError as error:
        raise SaveError(
            f"no return to before step {first_bad_step}: {error}. Later ones stay where they are: mend the store, or "
            "go on from them with --resume and without --rollback, or start anew with another --run-dir"
        ) from error
    progress.state, meta, passed_over = restored
    for line in passed_over:
        console.print(f"passed over checkpoint {line}")
    progress.state = in_this_order(run.config, progress.state, meta)
    progress.step, progress.data_state = meta.step, meta.data_state
    data.set_state(meta.data_state)
    log.rewind(meta.step)
    watch.went_back(first_bad_step, bad_step, meta.step, meta.data_state)


def make_meta(run: Run, progress: Progress) -> checkpoint.Meta:
    return checkpoint.Meta(
        step=progress.step,
        data_state=progress.data_state,
        config=to_json(run.config),
        text_fingerprint=run.corpus.fingerprint,
        tokenizer=run.corpus.tokenizer.fingerprint,
    )


def check_saved(store: checkpoint.CheckpointStore, unwritten: Unwritten) -> None:
    """Raises `SaveError` when what a run is for is not on disk: its last checkpoint, its summary."""
    if store.failure:
        steps: list[int] | None = None
        with contextlib.suppress(OSError):  # the store is gone
            steps = checkpoint.checkpoint_steps(store.folder)
        newest = "unknown, it cannot be read" if steps is None else max(steps, default="none")
        way_on = "starts at the first step" if steps == [] else "runs the steps after it again"
        raise SaveError(
            f"the last {store.failure} ({store.num_failures} failed in this run). The newest complete one in "
            f"{store.folder}: {newest}; make room or mend the store, and --resume {way_on}"
        )
    if "summary.json" in unwritten.counts:
        raise SaveError("summary.json could not be written; the checkpoint is complete: --resume writes it again")


def report_failure(console: Console, problem: str | None, *, is_last: bool = False) -> None:
    """Say why a checkpoint was not written; after the `last` one the run makes no other attempt."""
    if problem:
        console.print(problem if is_last else f"{problem}; the run goes on and tries again at the next checkpoint")
