"""The steps of a run, one after another, and what comes between them: evaluations, checkpoints, a way back.

What always holds: between two steps the whole state of a run is a `Progress`. The next batch is read while the devices
work, where another step follows; one that cannot be read ends the run after the step that runs, which is saved. Nothing
of a step but its few measured numbers comes to the host.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from train import checkpoint, distributed, metrics, report
from train.config import TrainConfig
from train.data import local_data_indices
from train.prefetch import Prefetch
from train.reading import or_try_again
from train.resume import Progress, Run, go_back, make_meta, report_failure
from train.signals import StopRequest
from train.state import TrainState
from train.step import make_train_step, place_batch
from train.unwritten import Unwritten
from train.watch import Watcher


@dataclasses.dataclass(frozen=True)
class Steps:
    """What the steps of a run need."""

    run: Run
    mesh: Mesh
    data: Prefetch
    store: checkpoint.CheckpointStore
    evaluate: Callable[[TrainState, int | None], float | None]
    stop: StopRequest
    watch: Watcher
    console: Console
    unwritten: Unwritten

    def run_to_the_end(self, progress: Progress) -> float | None:
        """Advance `progress` to the last step or to a signal; returns the held-out loss after the last step.

        The last step is saved before all held-out text is read, which a signal may cut short: None, as before the last
        step. Then a resumed run only does that, and reads no batch.
        """
        config, watch, stop = self.run.config, self.watch, self.stop
        train_step = make_train_step(config, self.mesh)
        first_step, saved = progress.step + 1, None
        with (
            _open_log(self.run, first_step, self.unwritten) as log,
            report.StepReporter(self.console, first_step=first_step, num_steps=config.num_steps) as reporter,
        ):
            self._make_up_evaluation(progress, log, reporter)
            batch, problem = self._fetch(progress.step), None
            while progress.step < config.num_steps and not stop.requested:
                watch.begin(progress.step + 1)
                started = time.perf_counter()
                distributed.at("train step", progress.step + 1)
                progress.state, measured = train_step(progress.state, batch)
                progress.data_state = self.data.get_state()
                batch, problem = self._fetch_ahead(progress.step + 1)  # while the devices work
                distributed.at("waiting for the step's result", progress.step + 1)
                measured = jax.device_get(measured)
                step_time = time.perf_counter() - started
                stop.settle()

                progress.step += 1
                row = _row(config, measured, step_time) | watch.end(progress.step, measured, step_time)
                reporter.step(progress.step, row)
                first_bad_step = watch.judge(progress.step, row, self.store.folder, settle=self.store.settle)
                if first_bad_step is not None:
                    self._go_back(progress, first_bad_step, log)
                    saved = None
                    batch = None if stop.requested else self._fetch(progress.step)
                    continue
                held_out_loss = self._evaluate(progress, row, reporter)
                log.write(progress.step, row)
                too_many = watch.too_many_skipped()
                is_due = self._is_last(progress) or progress.step % config.checkpoint.every == 0
                if is_due or too_many or stop.requested:
                    self._save(progress, held_out_loss)
                    saved = progress.step
                if too_many:
                    raise FloatingPointError(f"{too_many} (checkpoints: {self.store.folder})")
            if saved != progress.step:
                self._save(progress, None)
            if stop.failed:  # that save is the last thing that all do together
                report_failure(self.console, self.store.settle(), is_last=True)
            if problem:
                raise problem
            if stop.failed:
                distributed.wait_for_the_verdict()
            return self._score(progress, log, reporter) if self._is_last(progress) else None

    def _fetch(self, step: int) -> Any:
        """The batch of the step after `step`; None after the last one."""
        if step == self.run.config.num_steps:
            return None
        return _next_batch(self.watch, self.data, self.run.config, self.mesh, step)

    def _fetch_ahead(self, step: int) -> tuple[Any, Exception | None]:
        """The same, or why it cannot be read; then all processes leave after `step`, which is saved before."""
        try:
            return self._fetch(step), None
        except Exception as error:
            self.stop.fail()
            return None, error

    def _is_last(self, progress: Progress) -> bool:
        return progress.step == self.run.config.num_steps

    def _evaluate(self, progress: Progress, row: dict[str, Any], reporter: report.StepReporter) -> float | None:
        """The held-out loss after this step, also put into its row of metrics; None where none is due."""
        if not self._is_evaluated(progress) or self.stop.failed:  # then its data may be gone, too, and a save is due
            return None
        with self.watch.phase("evaluate"):
            loss = self.evaluate(progress.state, self.run.config.eval_batches)
        if loss is not None:
            row |= {"held_out_loss": loss, **self.watch.curve.row()}
            if not self._is_last(progress):  # all held-out text comes next
                reporter.held_out(progress.step, loss)
        return loss

    def _is_evaluated(self, progress: Progress) -> bool:
        every = self.run.config.eval_every
        return every > 0 and progress.step % every == 0

    def _make_up_evaluation(self, progress: Progress, log: metrics.MetricsLog, reporter: report.StepReporter) -> None:
        """The evaluation of the step that a resumed run goes on from, where a signal cut it short."""
        if self._is_last(progress) or not self._is_evaluated(progress):
            return
        with or_try_again(f"run_dir={str(self.run.run_dir)!r}"):
            rows = metrics.read_rows(self.run.run_dir)
        lacks = bool(rows) and rows[-1]["step"] == progress.step and "held_out_loss" not in rows[-1]
        row: dict[str, Any] = {}
        if distributed.from_main(lacks) and self._evaluate(progress, row, reporter) is not None:
            log.amend(progress.step, row)

    def _score(self, progress: Progress, log: metrics.MetricsLog, reporter: report.StepReporter) -> float | None:
        """The loss of all held-out text after the last step, also put into its row of metrics."""
        with self.watch.phase("evaluate"):
            loss = self.evaluate(progress.state, None)
        if loss is not None:
            log.amend(progress.step, {"held_out_loss": loss, **self.watch.curve.row()})
            reporter.held_out(progress.step, loss)
        return loss

    def _save(self, progress: Progress, held_out_loss: float | None) -> None:
        distributed.at("checkpoint", progress.step)
        with self.watch.phase("checkpoint"):
            problem = self.store.save(progress.state, make_meta(self.run, progress), held_out_loss=held_out_loss)
        is_last = self._is_last(progress) or self.stop.requested or bool(self.watch.too_many_skipped())
        report_failure(self.console, problem, is_last=is_last)

    def _go_back(self, progress: Progress, first_bad_step: int, log: metrics.MetricsLog) -> None:
        with self.watch.phase("rollback"):
            go_back(
                progress,
                first_bad_step,
                mesh=self.mesh,
                run=self.run,
                data=self.data,
                store=self.store,
                log=log,
                watch=self.watch,
                console=self.console,
            )


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


def _open_log(run: Run, first_step: int, unwritten: Unwritten) -> Any:
    if not distributed.is_main():
        return distributed.Silent()
    return metrics.MetricsLog(run.run_dir, first_step=first_step, unwritten=unwritten)
