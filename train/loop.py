"""The training loop, from top to bottom: text, checkpoint, mesh, steps, and what is written at the end.

What always holds: everything that a user can get wrong is found by `prepare`, before any device work. After that a run
is a sequence of steps, and between two steps its whole state is a `Progress`, which is what a checkpoint holds. So a
run that was killed and resumed writes the same losses, to the bit, as one that never stopped (on the same mesh).
"""

import contextlib
import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from models.sharding import weight_notes
from ring_jax import make_mesh
from train import checkpoint, distributed, metrics, report
from train.bigram import bigram_bits_per_byte
from train.compatible import check_text
from train.config import TrainConfig, clamp_warmup, to_json
from train.data import DEFAULT_CACHE, batches, load_corpus, local_data_indices
from train.evaluation import BATCHES_AHEAD, make_evaluate
from train.finish import finish
from train.notes import notes
from train.prefetch import Prefetch
from train.reading import or_try_again
from train.resume import Progress, Run, check_saved, find_start, report_failure, restore
from train.rows import BatchIterator
from train.run_dir import CONFIG_FILE, check_run_dir, make_run_dir, sole_writer
from train.run_steps import Steps
from train.signals import StopRequest
from train.state import TrainState
from train.step import abstract_state, init_state
from train.unwritten import Unwritten
from train.watch import Watcher

_BASELINE_TOKENS = 2**26


def prepare(config: TrainConfig, *, resume_command: str) -> Run:
    """Everything that can be checked without device work; `train.checks.validate` comes before.

    Raises:
      ValueError: the run directory, the text or the checkpoint does not fit the configuration.
      TryAgainError: the checkpoint cannot be read.
    """
    run_dir = pathlib.Path(config.run_dir or "runs/unnamed").expanduser()
    check_run_dir(run_dir, resume=config.resume, cache=config.data.cache or DEFAULT_CACHE)
    make_run_dir(run_dir)
    said, meta = [*notes(config), *weight_notes(config.model, config.mesh.sizes())], None
    config = clamp_warmup(config)
    if config.resume:
        meta, changes = find_start(run_dir, config)
        said += changes
    with distributed.reading("text", 0):
        corpus = load_corpus(config.data, say=functools.partial(print, flush=True))
        if meta:
            check_text(meta, config, corpus.fingerprint)
    return Run(config=config, run_dir=run_dir, corpus=corpus, resume_command=resume_command, notes=said)


def train(run: Run, console: Console) -> int:
    """Run the steps that are left, then score, sample and sum up.

    Returns:
      The exit code: 0, or 130 or 143 when SIGINT or SIGTERM ended the run early, with a checkpoint.

    Raises:
      CheckpointError: no checkpoint could be restored.
      RunDirError: another run writes into the run directory, or has done so since `prepare`.
      SaveError: the last checkpoint or `summary.json` could not be written; everything else was done.
      JoinError: the processes of the job were not started alike.
      TryAgainError: the run directory cannot be read, or a run on another machine writes into it.
      FloatingPointError: too many steps in a row were skipped, because loss or gradient norm was not finite.
    """
    alone = sole_writer(run.run_dir, console.print) if distributed.is_main() else contextlib.nullcontext()
    with alone:
        if distributed.is_main():
            # While the text was read, another run may have come.
            check_run_dir(run.run_dir, resume=run.config.resume, cache=run.config.data.cache or DEFAULT_CACHE)
        return _train(run, console)


def _train(run: Run, console: Console) -> int:
    distributed.check_same("configuration", _fingerprint(run))  # before that, nothing but the lock is written
    shape = run.config.mesh
    mesh = make_mesh(data=shape.data, tensor=shape.tensor, pipeline=shape.pipeline, sequence=shape.sequence)
    abstract, bigram = abstract_state(run.config, mesh), _bigram(run)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
    report.introduce(console, run.config, run.corpus, num_params=num_params, bigram=bigram, notes=run.notes)

    distributed.check_shared(run.run_dir)
    unwritten, store, data = Unwritten(console.print), _open_store(run), _open_data(run, mesh)
    with or_try_again(f"run_dir={str(run.run_dir)!r}"):
        progress = _begin(run, mesh, store, data, abstract, console)
        if distributed.is_main():
            with unwritten.attempt(CONFIG_FILE):
                metrics.write_json(run.run_dir / CONFIG_FILE, to_json(run.config))
        watch = _watch(run, mesh, progress, console, unwritten)
    share = distributed.largest if distributed.num_processes() > 1 else None
    with StopRequest(share) as stop, watch, Prefetch(data, num_batches=BATCHES_AHEAD) as ahead:
        evaluate = make_evaluate(run.config, mesh, run.corpus, stop, watch.curve, watch.pulse)
        steps = Steps(run, mesh, ahead, store, evaluate, stop, watch, console, unwritten)
        try:
            held_out_loss = steps.run_to_the_end(progress)
        except FloatingPointError:  # raised on all processes alike
            report_failure(console, store.close(), is_last=True)
            raise
        except BaseException:  # what was saved before is worth keeping
            store.wait()
            raise
        with watch.phase("checkpoint"):
            problem = store.close()
        report_failure(console, problem, is_last=True)
        if held_out_loss is not None:
            with watch.phase("finish"):
                finish(
                    run,
                    console,
                    progress,
                    watch,
                    unwritten,
                    held_out_loss=held_out_loss,
                    bigram=bigram,
                    failed_checkpoints=store.num_failures,
                )
    _sum_up(run, console, progress, store, unwritten, is_stopped=held_out_loss is None)
    return stop.exit_code if held_out_loss is None else 0


def _watch(run: Run, mesh: Mesh, progress: Progress, console: Console, unwritten: Unwritten) -> Watcher:
    return Watcher(
        run.config,
        run.run_dir,
        mesh=mesh,
        step=progress.step,
        data_state=progress.data_state,
        say=console.print,
        writes=distributed.is_main(),
        unwritten=unwritten,
    )


def _sum_up(
    run: Run,
    console: Console,
    progress: Progress,
    store: checkpoint.CheckpointStore,
    unwritten: Unwritten,
    *,
    is_stopped: bool,
) -> None:
    """Say where a stopped run stands and what could not be written; raises `SaveError` where that matters."""
    if is_stopped:
        where = "" if store.failure else f", saved in {store.folder}"
        console.print(
            f"stopped after step {progress.step} of {run.config.num_steps}{where}\ncontinue with: {run.resume_command}"
        )
    if line := unwritten.summary():
        console.print(line)
    check_saved(store, unwritten)


def _bigram(run: Run) -> float:
    """Bits per byte of the model to beat."""
    corpus = run.corpus
    return bigram_bits_per_byte(
        corpus.as_bytes(corpus.train, max_tokens=_BASELINE_TOKENS),
        corpus.as_bytes(corpus.held_out, max_tokens=_BASELINE_TOKENS),
        seq_len=run.config.data.seq_len,
    )


def _open_store(run: Run) -> checkpoint.CheckpointStore:
    config = run.config
    return checkpoint.CheckpointStore(
        run.run_dir,
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        timeout=max(1, config.distributed.stall_timeout // 2),  # a store that hangs costs a checkpoint, not the run
    )


def _open_data(run: Run, mesh: Mesh) -> BatchIterator:
    """The rows of this process, from the first on."""
    data = run.config.data
    return batches(
        run.corpus,
        seq_len=data.seq_len,
        batch_size=data.batch_size,
        seed=run.config.seed,
        data_indices=local_data_indices(mesh),
        num_data=run.config.mesh.data,
    )


def _begin(
    run: Run,
    mesh: Mesh,
    store: checkpoint.CheckpointStore,
    data: BatchIterator,
    abstract: TrainState,
    console: Console,
) -> Progress:
    """A new state, or that of the last checkpoint, where there is one; `data` is put to its position."""
    if run.config.resume and (progress := restore(run, store, abstract, console)):
        data.set_state(progress.data_state)
        return progress
    return Progress(state=init_state(run.config, mesh), step=0, data_state=data.get_state())


def _fingerprint(run: Run) -> dict[str, Any]:
    """What has to be equal on all processes."""
    config = to_json(run.config)
    config["distributed"] = {**config["distributed"], "process_id": None}
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): v for path, v in jax.tree.leaves_with_path(config)}
    return {
        **flat,
        "text": run.corpus.fingerprint,
        "jax": jax.__version__,
        "run directory": str(run.run_dir.absolute()),
    }
