"""What watches the steps of a run: measures for the metrics, heartbeat, profile, alarms, and when to go back.

What always holds: watching changes nothing about training. With the alarms off or silent, a run gives the same losses
to the bit; and whether it goes back is decided from the losses and the list of checkpoints, so every process of a run
decides alike. The loop calls, in this order: `fetch` (a batch ahead), `begin`, `end`, `judge`, and
`phase` round everything that is no step.
"""

import collections
import contextlib
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from train import distributed, flops, metrics, rollback
from train.alarms import AlarmLog, SpikeAlarm
from train.config import TrainConfig
from train.heartbeat import HEARTBEAT_FILE, Heartbeat
from train.memory import used_bytes
from train.positions import PositionCurve
from train.profiling import PROFILE_FOLDER, Profiler, parse_steps
from train.unwritten import Unwritten


class _Fetched(NamedTuple):
    """A batch on the host, in natural order, and what is known of it."""

    batch: dict[str, np.ndarray]
    key: str
    counts: flops.BatchCounts
    """Of the whole step, over all processes."""


class Watcher:
    """Context round the steps of one run."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: pathlib.Path,
        *,
        mesh: Mesh,
        step: int,
        say: Callable[[str], object],
        data_state: Mapping[str, int] | None = None,
        writes: bool = True,
        unwritten: Unwritten | None = None,
    ):
        """Watch a run that has done `step` steps.

        Args:
          config: the run's.
          run_dir: where its files are.
          mesh: the devices whose speed and memory are measured.
          step: steps done so far.
          say: prints a line.
          data_state: position in the data after `step`; None: no batch before it can be passed over.
          writes: whether this process is the one of the run that writes files.
          unwritten: counts what cannot be written.
        """
        self._config, self._run_dir, self._step = config, run_dir, step
        self._devices = list(mesh.devices.flat)
        self.devices = f"{len(self._devices)} x {self._devices[0].device_kind}"
        """How many devices of which kind."""
        self._peak = flops.peak_flops(self._devices)
        self._unwritten = unwritten or Unwritten(say)
        self._alarms = AlarmLog(run_dir, say=say, writes=writes, unwritten=self._unwritten)
        self._alarms.forget_after(step)
        self._say = say if writes else lambda _: None
        self._spikes = SpikeAlarm(config.watch.spike_z)
        self._skips = rollback.SkipList(run_dir / rollback.SKIPPED_FILE, writes=writes, unwritten=self._unwritten)
        self._heartbeat = Heartbeat(
            run_dir / HEARTBEAT_FILE if writes else None,
            step=step,
            stall_factor=config.watch.stall_factor,
            on_stall=lambda at, text: self._alarms.raise_alarm("stall", at, text),
            unwritten=self._unwritten,
        )
        self._profiler = Profiler(run_dir / PROFILE_FOLDER, config.watch.profile, unwritten=self._unwritten)
        if config.watch.profile and parse_steps(config.watch.profile)[-1] <= step:
            self._say(f"profile={config.watch.profile!r}: these steps are done already, so no trace is written")
        self.curve = PositionCurve(config.data.seq_len)
        """Loss by position of the last evaluation, where the eval step gives it."""
        self._fetched: _Fetched | None = None
        self._current: _Fetched | None = None
        self._skipped: dict[int, dict[str, np.ndarray]] = {}
        """Batches of the steps that were skipped one after another, by step."""
        self._wait_s, self._num_ended = 0.0, 0
        self._in_a_row, self._passed = 0, 0
        """Steps skipped one after another, and those of them at whose end the run ended, to go on after them."""
        self._remember(metrics.read_rows(run_dir), step)
        self._recent: collections.deque[tuple[int, str]] = collections.deque(
            maxlen=self._in_a_row + config.watch.max_skipped_in_a_row + 1
        )
        """(step, key) of the last batches, all that a return may pass over."""
        self._remember_batches(step, data_state)

    def __enter__(self) -> "Watcher":
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._heartbeat)
        self._stack.enter_context(self._profiler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """What the run does meanwhile, for the heartbeat and the profile."""
        before = self._heartbeat.phase
        self._heartbeat.beat(name)
        with jax.profiler.TraceAnnotation(name):
            yield
        self._heartbeat.beat(before)

    def pulse(self) -> None:
        """The phase that runs gets somewhere, which is no stall however long it takes."""
        self._heartbeat.pulse()

    def fetch(self, data: Any) -> dict[str, np.ndarray]:
        """The batch of the step after the one that runs, passing over what is on the list of bad batches."""
        started = time.perf_counter()
        with jax.profiler.TraceAnnotation("data"):
            batch, key = self._skips.draw(data)
        self._wait_s = time.perf_counter() - started
        self._fetched = _Fetched(batch, key, self._count(data))  # while the devices work
        return batch

    def _count(self, data: Any) -> flops.BatchCounts:
        """What is work in the rows that were drawn last, in all processes: their lengths follow from their numbers."""
        end, size = data.get_state()["next_row"], self._config.data
        rows = [data.rows.segments(number) for number in range(end - size.batch_size, end)]
        return flops.count_rows(self._config.model, rows, size.seq_len)

    def begin(self, step: int) -> None:
        """Step `step` is about to be dispatched, on the batch that was fetched last."""
        assert self._fetched is not None, "fetch comes first"
        self._current, self._wait_s = self._fetched, 0.0
        self._recent.append((step, self._current.key))
        self._profiler.before(step)
        self._heartbeat.beat("step" if self._num_ended else "compile")

    def end(self, step: int, measured: Mapping[str, Any], step_time: float) -> dict[str, Any]:
        """Step `step` is done and measured; returns what to add to its row of metrics."""
        self._profiler.after(step)
        self._heartbeat.stepped(step, step_time, compiled=self._num_ended == 0)
        self._num_ended += 1
        assert self._current is not None, "begin comes first"
        counts = self._current.counts
        work = flops.model_flops(self._config.model, counts)
        row: dict[str, Any] = {
            "param_norm": float(measured["param_norm"]),
            "model_flops": work,
            "bubble": float(measured["bubble"]),
            "data_wait_s": self._wait_s,
            "padding_share": counts.padding_share,
            "skipped": float(measured["skipped"]),
        }
        if self._peak:
            row["mfu"] = work / step_time / self._peak
        if memory := used_bytes(self._devices):
            row["peak_memory_bytes"] = memory
        return row

    def judge(
        self, step: int, row: Mapping[str, Any], checkpoints: pathlib.Path, *, settle: Callable[[], Any] = lambda: None
    ) -> int | None:
        """Look at the loss of a step. Returns the first bad step if the run is to return to a checkpoint before it.

        `settle` waits for a save in flight, so that all processes find the same checkpoints.
        """
        loss = row["loss"]
        score = self._spikes.add(step, loss)
        self._count_skipped(step, bool(row["skipped"]))
        first_bad = None
        if score is not None:
            text = f"loss {loss:.4f} is {score:.1f} robust deviations above the steps before"
            self._alarms.raise_alarm("loss_spike", step, text, loss=loss, score=score)
            first_bad = step
        if self._too_many():  # in the same step, where the gradient norm alone is not finite
            what = f"loss={loss} and grad_norm={row['grad_norm']}, {self._in_a_row} steps in a row not finite"
            self._alarms.raise_alarm("not_finite", step, f"{what}; {self._save_skipped(step)}")
            first_bad = step - self._in_a_row + 1
        return None if first_bad is None else self._first_bad_to_return_to(first_bad, checkpoints, settle)

    def too_many_skipped(self) -> str:
        """Why a run ends whose steps are skipped one after another, as many as the configuration allows; else empty.
        Their state is the one before them, which is worth a checkpoint."""
        if not self._too_many():
            return ""
        return (
            f"{self._in_a_row} steps in a row were skipped because loss or gradient norm was not finite, and "
            f"max_skipped_in_a_row={self._config.watch.max_skipped_in_a_row}; look at the batches saved in "
            f"{self._run_dir}, then go on after them with --resume, lower --optimizer.learning-rate, or add --rollback"
        )

    def went_back(self, first_bad_step: int, bad_step: int, step: int, data_state: Mapping[str, int]) -> None:
        """The run stands after `step`, at `data_state`; the batches from before `first_bad_step` on are passed over."""
        bad = [(at, key) for at, key in self._recent if at >= first_bad_step - 1]
        self._skips.add(bad)
        self._remember_batches(step, data_state)
        self._spikes.forget_after(step)
        self._in_a_row, self._passed, self._fetched = 0, 0, None
        self._skipped.clear()
        text = f"back to the checkpoint of step {step}; {len(bad)} batches from step {bad[0][0]} on are passed over"
        self._alarms.raise_alarm("rollback", bad_step, text, to_step=step)

    def summary(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """What goes into `summary.json`: alarms, skipped steps, shares; medians over the steps."""
        found: dict[str, Any] = {
            "alarms": self._alarms.counts(),
            "skipped_steps": sum(bool(row.get("skipped")) for row in rows),
            "skipped_batches": len(self._skips),
            "not_written": dict(self._unwritten.counts),
        }
        for name in ("mfu", "padding_share"):
            if values := [row[name] for row in rows if row.get(name) is not None]:
                found[name] = statistics.median(values)
        return found

    def _too_many(self) -> bool:
        return self._in_a_row - self._passed >= self._config.watch.max_skipped_in_a_row

    def _count_skipped(self, step: int, skipped: bool) -> None:
        if not skipped:
            self._in_a_row, self._passed = 0, 0
            self._skipped.clear()
            return
        self._in_a_row += 1
        if self._current is not None:
            self._skipped[step] = self._current.batch

    def _first_bad_to_return_to(
        self, first_bad: int, checkpoints: pathlib.Path, settle: Callable[[], Any]
    ) -> int | None:
        """`first_bad`, if the configuration asks for returns and one is possible, as process 0 sees it."""
        watch = self._config.watch
        if not watch.rollback:
            return None
        if problem := settle():
            self._say(f"{problem}; the run goes on")
        problem = ""
        if self._alarms.counts()["rollback"] >= watch.max_rollbacks:
            problem = f"no return to a checkpoint: max_rollbacks={watch.max_rollbacks} is reached"
        elif rollback.last_good_step(checkpoints, first_bad) is None:
            problem = f"no return: {checkpoints} holds none of step {first_bad - 2} or before"
        if problem := distributed.from_main(problem):
            self._say(problem)
            return None
        return first_bad

    def _save_skipped(self, step: int) -> str:
        """Write the batches of the skipped steps up to `step` for a look; returns words for where they are."""
        process = f"_process_{jax.process_index()}" if jax.process_count() > 1 else ""
        written = []
        for at, batch in self._skipped.items():
            path = self._run_dir / f"bad_batch_step_{at}{process}.npz"
            with self._unwritten.attempt(path.name):
                np.savez(path, allow_pickle=False, **batch)
                written.append(path.name)
        since = step - (self._in_a_row - self._passed) + 1
        before = ", ".join(str(at) for at in range(since, step + 1) if at not in self._skipped)
        missing = f"; not those of step {before}: the run was resumed after them" if before else ""
        if not written:
            return f"their batches could not be saved{missing}"
        return f"batches saved in {self._run_dir}: {', '.join(written)}{missing}"

    def _remember(self, rows: list[dict[str, Any]], step: int) -> None:
        """Take up the losses of the steps before, so that a resumed run raises the alarms that it would have raised."""
        for row in rows:
            if row["step"] <= step:
                loss = math.nan if row.get("loss") is None else row["loss"]
                self._spikes.add(row["step"], loss)
                self._count_skipped(row["step"], bool(row.get("skipped")))
                if self._too_many():  # the run ended here
                    self._passed = self._in_a_row

    def _remember_batches(self, step: int, data_state: Mapping[str, int] | None) -> None:
        """Take up the batches before `step`: the next one may show that they were to blame."""
        self._recent.clear()
        if data_state is not None:
            keys = self._skips.last_keys(
                data_state, batch_size=self._config.data.batch_size, num=self._recent.maxlen or 0
            )
            self._recent.extend(reversed([(step - ago, key) for ago, key in enumerate(keys)]))
