"""The training loop, from top to bottom: text, checkpoint, mesh, steps, and what is written at the end.

What always holds: everything that a user can get wrong is found by `prepare`, before any device work. After that a run
is a sequence of steps, and between two steps its whole state is a `Progress`, which is what a checkpoint holds. So a
run that was killed and resumed writes the same losses, to the bit, as one that never stopped (on the same mesh).
"""

import functools
import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from ring_jax import make_mesh
from train import checkpoint, distributed, metrics, page, report
from train.bigram import bigram_bits_per_byte
from train.config import TrainConfig, clamp_warmup, to_json
from train.data import Corpus, batches, held_out_batches, load_corpus, local_data_indices
from train.plots import save_loss_plot
from train.positions import PositionCurve
from train.prefetch import Prefetch
from train.resume import (
    Progress,
    Run,
    check_run_dir,
    check_saved,
    go_back,
    make_meta,
    report_failure,
    restore,
)
from train.sample import choose_prompt, continue_text
from train.signals import StopRequest
from train.state import TrainState, reorder_layers, schedule_order
from train.step import abstract_state, init_state, make_eval_step, make_train_step, place_batch
from train.watch import Watcher

_BATCHES_AHEAD = 2
_LARGEST_SAMPLED = 2_000_000_000
_BASELINE_TOKENS = 2**26


def prepare(config: TrainConfig, *, resume_command: str) -> Run:
    """Everything that can be checked without device work; `train.checks.validate` comes before.

    Raises:
      ValueError: the run directory, the text or the checkpoint does not fit the configuration.
    """
    run_dir = pathlib.Path(config.run_dir or "runs/unnamed").expanduser()
    check_run_dir(run_dir, resume=config.resume)
    notes = []
    if clamp_warmup(config) != config:
        notes.append(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} is more than num_steps={config.num_steps}: "
            f"clamped to {config.num_steps}"
        )
        config = clamp_warmup(config)
    corpus = load_corpus(config.data, say=functools.partial(print, flush=True))
    if config.resume:
        meta = checkpoint.read_newest_meta(run_dir)
        changes = checkpoint.check_compatible(meta, config, corpus.fingerprint)
        notes += [f"changed since the checkpoint: {line}" for line in changes]
    return Run(config=config, run_dir=run_dir, corpus=corpus, resume_command=resume_command, notes=notes)


def train(run: Run, console: Console) -> int:
    """Run the steps that are left, then score, sample and sum up.

    Returns:
      The exit code: 0, or 130 or 143 when SIGINT or SIGTERM ended the run early, with a checkpoint.

    Raises:
      CheckpointError: no checkpoint could be restored.
      SaveError: the last checkpoint could not be written; everything else was done.
      JoinError: the processes of the job were not started alike.
      FloatingPointError: the loss is no longer finite, or too many steps in a row were skipped.
    """
    config, corpus, data_config = run.config, run.corpus, run.config.data

    # ------------------------------------------------------------------ what is trained on what
    distributed.check_same("configuration", _fingerprint(run))  # none writes before all found the directory as it was
    shape = config.mesh
    mesh = make_mesh(data=shape.data, tensor=shape.tensor, pipeline=shape.pipeline, sequence=shape.sequence)
    abstract = abstract_state(config, mesh)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
    bigram = bigram_bits_per_byte(
        corpus.as_bytes(corpus.train, max_tokens=_BASELINE_TOKENS),
        corpus.as_bytes(corpus.held_out, max_tokens=_BASELINE_TOKENS),
        seq_len=data_config.seq_len,
    )
    report.introduce(console, config, corpus, num_params=num_params, bigram=bigram, notes=run.notes)

    # ------------------------------------------------------------------ state: new, or from the last checkpoint
    run.run_dir.mkdir(parents=True, exist_ok=True)
    store = _open_store(run)
    data = batches(
        corpus,
        seq_len=data_config.seq_len,
        batch_size=data_config.batch_size,
        seed=config.seed,
        data_indices=local_data_indices(mesh),
        num_data=shape.data,
    )
    if config.resume:
        progress = restore(run, store, abstract, console)
        data.set_state(progress.data_state)
    else:
        progress = Progress(state=init_state(config, mesh), step=0, data_state=data.get_state())
    if distributed.is_main():
        metrics.write_json(run.run_dir / "config.json", to_json(config))

    # ------------------------------------------------------------------ steps
    share = distributed.largest if distributed.num_processes() > 1 else None
    writes = distributed.is_main()
    watch = Watcher(config, run.run_dir, mesh=mesh, step=progress.step, say=console.print, writes=writes)
    with StopRequest(share) as stop, watch, Prefetch(data, num_batches=_BATCHES_AHEAD) as ahead:
        evaluate = _make_evaluate(config, mesh, corpus, stop, watch.curve)
        try:
            held_out_loss = _run_steps(run, progress, mesh, ahead, store, evaluate, stop, watch, console)
        except FloatingPointError:  # raised on all processes alike
            report_failure(console, store.close())  # what was saved before is worth keeping
            raise
        if held_out_loss is None and not stop.requested:  # resumed after its last step
            with watch.phase("evaluate"):
                held_out_loss = evaluate(progress.state, None)
        with watch.phase("checkpoint"):
            problem = store.close()
        report_failure(console, problem)
        if held_out_loss is None:
            check_saved(store)
            console.print(
                f"stopped after step {progress.step} of {config.num_steps}, saved in {store.folder}\n"
                f"continue with: {run.resume_command}"
            )
            return stop.exit_code

        # -------------------------------------------------------------- what came out
        with watch.phase("finish"):
            _finish(run, console, progress, watch, held_out_loss=held_out_loss, bigram=bigram, num_params=num_params)
        check_saved(store)
    return 0


def _open_store(run: Run) -> checkpoint.CheckpointStore:
    config = run.config
    return checkpoint.CheckpointStore(
        run.run_dir,
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        timeout=max(1, config.distributed.stall_timeout // 2),  # a store that hangs costs a checkpoint, not the run
    )


def _run_steps(
    run: Run,
    progress: Progress,
    mesh: Mesh,
    data: Prefetch,
    store: checkpoint.CheckpointStore,
    evaluate: Callable[[TrainState, int | None], float | None],
    stop: StopRequest,
    watch: Watcher,
    console: Console,
) -> float | None:
    """Advance `progress` to the last step or to a signal; returns the held-out loss of the last step, over all text."""
    config = run.config
    train_step = make_train_step(config, mesh)
    first_step, held_out_loss = progress.step + 1, None
    with (
        _open_log(run, first_step) as log,
        report.StepReporter(console, first_step=first_step, num_steps=config.num_steps) as reporter,
    ):
        batch = _next_batch(watch, data, config, mesh, progress.step)
        while progress.step < config.num_steps and not stop.requested:
            watch.begin(progress.step + 1)
            started = time.perf_counter()
            distributed.at("train step", progress.step + 1)
            progress.state, measured = train_step(progress.state, batch)
            progress.data_state = data.get_state()
            batch = _next_batch(watch, data, config, mesh, progress.step + 1)  # while the devices work
            distributed.at("waiting for the step's result", progress.step + 1)
            measured = jax.device_get(measured)
            step_time = time.perf_counter() - started
            stop.settle()

            progress.step += 1
            is_last = progress.step == config.num_steps
            row = _row(config, measured, step_time) | watch.end(progress.step, measured, step_time)
            reporter.step(progress.step, row)
            if (first_bad_step := watch.judge(progress.step, row, store.folder, settle=store.settle)) is not None:
                with watch.phase("rollback"):
                    go_back(progress, first_bad_step, mesh=mesh, run=run, data=data, store=store, log=log, watch=watch)
                batch = _next_batch(watch, data, config, mesh, progress.step)
                continue
            if is_last or (config.eval_every and progress.step % config.eval_every == 0):
                with watch.phase("evaluate"):
                    held_out_loss = evaluate(progress.state, None if is_last else config.eval_batches)
                if held_out_loss is not None:
                    row |= {"held_out_loss": held_out_loss, **watch.curve.row()}
                    reporter.held_out(progress.step, held_out_loss)
            log.write(progress.step, row)
            if not row["skipped"]:
                _check_finite(row["loss"], progress.step, store.folder)
            watch.check_skipped(store.folder)
            if is_last or stop.requested or progress.step % config.checkpoint.every == 0:
                distributed.at("checkpoint", progress.step)
                loss = row.get("held_out_loss")
                with watch.phase("checkpoint"):
                    problem = store.save(progress.state, make_meta(run, progress), held_out_loss=loss)
                report_failure(console, problem)
        if progress.step < first_step:
            report_failure(console, store.save(progress.state, make_meta(run, progress)))
    return held_out_loss if progress.step == config.num_steps else None


def _row(config: TrainConfig, measured: dict[str, Any], step_time: float) -> dict[str, Any]:
    """What every row of metrics holds."""
    return {
        "loss": float(measured["loss"]),
        "tokens_per_s": config.tokens_per_step / step_time,
        "step_time_s": step_time,
        "grad_norm": float(measured["grad_norm"]),
        "lr": float(measured["lr"]),
    }


def _next_batch(watch: Watcher, data: Prefetch, config: TrainConfig, mesh: Mesh, step: int) -> Any:
    distributed.at("next batch", step)
    batch = watch.fetch(data)
    distributed.check_batch(batch)
    return place_batch(batch, config, mesh, data_indices=local_data_indices(mesh))


def _open_log(run: Run, first_step: int) -> Any:
    return metrics.MetricsLog(run.run_dir, first_step=first_step) if distributed.is_main() else distributed.Silent()


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


def _make_evaluate(
    config: TrainConfig, mesh: Mesh, corpus: Corpus, stop: StopRequest, curve: PositionCurve | None = None
) -> Callable[[TrainState, int | None], float | None]:
    """The function (state, number of batches, None for all) -> held-out loss, or None when a signal came in between.

    An eval step may return, after its loss and count, the global sums and counts of `loss_by_position`: these go into
    `curve`, which then holds the last evaluation.
    """
    eval_step = make_eval_step(config, mesh)
    held_out = held_out_batches(corpus.held_out, seq_len=config.data.seq_len, batch_size=config.data.batch_size)

    def evaluate(state: TrainState, num_batches: int | None) -> float | None:
        total, count = 0.0, 0  # over all targets of all batches: a batch with few targets weighs little
        if curve is not None:
            curve.clear()
        for batch in itertools.islice(held_out, num_batches):
            if stop.requested:
                return None
            distributed.at("evaluation", int(state.step))
            loss_sum, num_targets, *by_position = eval_step(state.params, place_batch(batch, config, mesh))
            total, count = total + float(loss_sum), count + int(num_targets)
            if by_position and curve is not None:
                curve.add(*by_position)
        return total / count

    return evaluate


def _check_finite(loss: float, step: int, checkpoints: pathlib.Path) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"loss={loss} at step {step} must be finite; lower --optimizer.learning-rate or lengthen "
            f"--optimizer.warmup-steps (the checkpoints in {checkpoints} are from before)"
        )


def _finish(
    run: Run,
    console: Console,
    progress: Progress,
    watch: Watcher,
    *,
    held_out_loss: float,
    bigram: float,
    num_params: int,
) -> None:
    """Score, picture, `summary.json`, `report.html`; at last a sample, where one device can hold the parameters."""
    distributed.at("summary and sample", progress.step)
    params = distributed.to_host(progress.state.params) if num_params <= _LARGEST_SAMPLED else None
    if not distributed.is_main():
        return
    rows = metrics.read_rows(run.run_dir)
    bits_per_byte = held_out_loss / math.log(2) / run.corpus.bytes_per_token
    save_loss_plot(
        run.run_dir / "loss.png", rows, bigram_bits_per_byte=bigram, bytes_per_token=run.corpus.bytes_per_token
    )
    summary = {
        "step": progress.step,
        "held_out_loss": held_out_loss,
        "held_out_bits_per_byte": bits_per_byte,
        "bigram_bits_per_byte": bigram,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
        "num_params": num_params,
        **watch.summary(rows),
    }
    metrics.write_json(run.run_dir / "summary.json", summary)
    page.save_report(run.run_dir, run.config, rows, summary, devices=watch.devices)
    decode, prompt = run.corpus.tokenizer.decode, choose_prompt(run.corpus.held_out)
    continuation = f"(no sample: {num_params:,} parameters are not gathered on one device)"
    if params is not None:
        params = reorder_layers(params, schedule_order(run.config), np.arange(run.config.model.num_layers))
        continuation = decode(continue_text(params, prompt, seed=run.config.seed))
    report.sum_up(console, summary, prompt=decode(prompt), continuation=continuation, run_dir=run.run_dir)
