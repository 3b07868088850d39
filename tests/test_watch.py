"""Spikes, skipped steps, returns to a checkpoint, restarts, in the real loop with a step that does what the test says.

The step is a counter: its loss is a function of the batch alone, so the order of the losses is that of the batches.
"""

import dataclasses
import functools
import gzip
import io
import json
import os
import pathlib
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from tiny_run import config, write_text

from ring_jax import make_mesh
from train import evaluation, finish, flops, loop, report, run_steps, watch
from train.alarms import SpikeAlarm, read_alarms
from train.checkpoint import read_newest_meta
from train.config import CheckpointConfig, DataConfig, MeshConfig, WatchConfig
from train.data import batches, load_corpus
from train.metrics import read_rows
from train.positions import loss_by_position, position_edges
from train.prefetch import Prefetch
from train.step import init_state

NUM_STEPS = 12
WATCH = WatchConfig(max_skipped_in_a_row=3)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("watch") / "text")


def tiny(text, run_dir, **changes):
    tiny_config = config(
        data=DataConfig(path=text, seq_len=64, batch_size=2, held_out_fraction=0.2),
        run_dir=str(run_dir),
        checkpoint=CheckpointConfig(every=2, keep=5),
        num_steps=NUM_STEPS,
        eval_every=4,
        watch=WATCH,
    )
    return dataclasses.replace(tiny_config, **changes)


def loss_of(tokens):
    """A loss near 4 that tells batches apart, whatever the layout."""
    return 4 + int(np.sum(np.asarray(tokens, np.int64) ** 3 % 9973)) % 99_991 / 1e6


def run_losses(run_config, num):
    """The losses of the first batches of a run."""
    data = batches(load_corpus(run_config.data).train, seq_len=64, batch_size=2, seed=run_config.seed)
    return [float(np.float32(loss_of(next(data)["tokens"]))) for _ in range(num)]


def fake_step(outcome):
    """(state, batch) -> counted state and measures; `outcome(loss)` may change loss and `skipped` of a batch."""
    count = jax.jit(lambda state: dataclasses.replace(state, step=state.step + 1))

    def step(state, batch):
        loss, skipped = outcome(float(np.float32(loss_of(batch["tokens"]))))
        measured = {"loss": loss, "grad_norm": 1.0, "param_norm": optax.tree.norm(state.params), "lr": 0.1}
        measured |= {"skipped": skipped, "bubble": 0.0}
        return count(state), {name: jnp.float32(value) for name, value in measured.items()}

    return lambda *_: step


def fake_eval(config, _mesh):
    """The batch's own loss, and the curve by position that the real step may give."""

    def step(_params, batch):
        valid = np.asarray(batch["targets"]) >= 0
        nats = np.where(valid, 3.0, np.nan).astype(np.float32)
        edges = position_edges(config.data.seq_len)
        sums, counts = loss_by_position(nats, np.asarray(batch["positions"]), valid, edges)
        return sums.sum(), counts.sum(), sums, counts

    return step


def run(run_config, outcome=lambda loss: (loss, 0.0), *, stop_after=None, draw=False):
    """(exit code, output); draws the pictures at the end only when asked, which takes a second."""
    output, plain = io.StringIO(), report.StepReporter.step

    def report_step(self, step, row):
        plain(self, step, row)
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    with (
        mock.patch.object(run_steps, "make_train_step", fake_step(outcome)),
        mock.patch.object(evaluation, "make_eval_step", fake_eval),
        mock.patch.object(finish, "continue_text", lambda *_, **__: np.zeros(4, np.int32)),
        mock.patch.object(watch, "SpikeAlarm", functools.partial(SpikeAlarm, min_history=4)),
        mock.patch.object(report.StepReporter, "step", report_step),
        mock.patch.object(finish.page, "save_report", finish.page.save_report if draw else mock.Mock()),
        mock.patch.object(finish, "save_loss_plot", mock.Mock()),
    ):
        console = Console(file=output, markup=False, emoji=False, highlight=False, soft_wrap=True)
        code = loop.train(loop.prepare(run_config, resume_command="again"), console)
    return code, output.getvalue()


def losses(run_dir):
    return [row["loss"] for row in read_rows(run_dir)]


def kinds(run_dir):
    return [(alarm["kind"], alarm["step"]) for alarm in read_alarms(run_dir)]


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def spike_at(run_config, number):
    """The outcome of a run in which batch `number` (from 1) has ten times its loss."""
    bad = run_losses(run_config, number)[-1]
    return lambda loss: (10 * loss if loss == bad else loss, 0.0)


@pytest.fixture(scope="module")
def returned(text, tmp_path_factory):
    """(run directory, output) of a run that met a spike at step 7 and went back by itself."""
    run_config = tiny(
        text, tmp_path_factory.mktemp("returned") / "run", watch=dataclasses.replace(WATCH, rollback=True)
    )
    code, output = run(run_config, spike_at(run_config, 7), draw=True)
    assert code == 0
    return run_config, output


def test_a_spike_without_rollback_is_an_alarm_only(text, tmp_path):
    run_config = tiny(text, tmp_path / "run")
    code, output = run(run_config, spike_at(run_config, 7))
    assert code == 0
    assert kinds(tmp_path / "run") == [("loss_spike", 7)]
    assert "alarm at step 7: loss 4" in output
    assert "alarms: 1 loss_spike; steps skipped: 0" in output
    expected = run_losses(run_config, NUM_STEPS)
    assert losses(tmp_path / "run") == [*expected[:6], pytest.approx(10 * expected[6]), *expected[7:]]
    assert summary(tmp_path / "run")["alarms"] == {"loss_spike": 1, "not_finite": 0, "stall": 0, "rollback": 0}


def test_a_return_passes_over_the_bad_batches_and_no_other(returned):
    run_config, output = returned
    run_dir = tmp = pathlib.Path(run_config.run_dir)
    of_batch = run_losses(run_config, NUM_STEPS + 2)
    assert losses(run_dir) == [*of_batch[:5], *of_batch[7:]], "6 and 7 are passed over; 5 came again and is the same"
    assert [row["step"] for row in read_rows(run_dir)] == list(range(1, NUM_STEPS + 1))
    assert kinds(run_dir) == [("loss_spike", 7), ("rollback", 7)]
    assert "back to the checkpoint of step 4; 2 batches from step 6 on are passed over" in output
    assert "2 batches" in (tmp / "report.html").read_text()
    assert summary(run_dir)["skipped_batches"] == 2
    assert [entry["step"] for entry in json.loads((run_dir / "skipped_batches.json").read_text())] == [6, 7]
    assert [path.name for path in (run_dir / "checkpoints_incomplete").iterdir()] == ["6"], (
        "6 was saved after the cause"
    )
    assert read_newest_meta(run_dir).step == NUM_STEPS


def test_the_curve_by_position_reaches_the_metrics(returned):
    rows = read_rows(pathlib.Path(returned[0].run_dir))
    curves = [(row["step"], row["held_out_loss_by_position"]) for row in rows if "held_out_loss_by_position" in row]
    assert [step for step, _ in curves] == [4, 8, 12]
    assert set(curves[-1][1].values()) == {3.0}
    assert list(curves[-1][1])[:4] == ["0", "1", "2", "4"]


@pytest.mark.parametrize("stop", [5, 6, 9])
def test_a_run_that_went_back_can_be_resumed_to_the_same_losses(returned, tmp_path, stop):
    """5: stopped before the spike was met; 6: just before, when the batch to blame is one of the time before; 9: after
    the return."""
    run_config = dataclasses.replace(returned[0], run_dir=str(tmp_path / "run"))
    outcome = spike_at(run_config, 7)
    assert run(run_config, outcome, stop_after=stop)[0] == 130
    assert run(dataclasses.replace(run_config, resume=True), outcome)[0] == 0
    assert losses(tmp_path / "run") == losses(pathlib.Path(returned[0].run_dir))


def nan_at(run_config, numbers):
    of_batch = run_losses(run_config, max(numbers))
    bad = {of_batch[number - 1] for number in numbers}
    return lambda loss: (float("nan"), 1.0) if loss in bad else (loss, 0.0)


def test_skipped_steps_are_counted_and_the_run_goes_on(text, tmp_path):
    run_config = tiny(text, tmp_path / "run")
    code, output = run(run_config, nan_at(run_config, [5, 6, 9]))
    assert code == 0
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows if row["skipped"]] == [5, 6, 9]
    assert [row["step"] for row in rows if row["loss"] is None] == [5, 6, 9]
    assert summary(tmp_path / "run")["skipped_steps"] == 3
    assert "steps skipped: 3" in output
    assert "1 skipped" in output
    assert kinds(tmp_path / "run") == []


def test_too_many_in_a_row_end_the_run_with_the_batch_saved(text, tmp_path):
    run_config = tiny(text, tmp_path / "run")
    with pytest.raises(FloatingPointError, match=r"3 steps in a row were skipped .*max_skipped_in_a_row=3.*--rollback"):
        run(run_config, nan_at(run_config, [5, 6, 7]))
    run_dir = tmp_path / "run"
    assert kinds(run_dir) == [("not_finite", 7)]
    assert [row["step"] for row in read_rows(run_dir)] == list(range(1, 8))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["2", "4", "6", "7"]
    assert len(list(run_dir.glob("bad_batch_step_*.npz"))) == 3
    for step in (5, 6, 7):
        with np.load(run_dir / f"bad_batch_step_{step}.npz") as saved:
            assert float(np.float32(loss_of(saved["tokens"]))) == run_losses(run_config, step)[-1]
            assert saved.keys() == {"tokens", "targets", "positions", "segment_ids"}
    assert json.loads((run_dir / "heartbeat.json").read_text())["phase"] == "failed: FloatingPointError"
    assert run(dataclasses.replace(run_config, resume=True), nan_at(run_config, [5, 6, 7]))[0] == 0
    assert losses(run_dir)[7:] == run_losses(run_config, NUM_STEPS)[7:], "it goes on after them"
    assert kinds(run_dir) == [("not_finite", 7)]


@pytest.mark.parametrize("stop", [None, 6])
def test_too_many_in_a_row_return_when_asked(text, tmp_path, stop):
    """Also when the run was stopped and resumed in the middle of them."""
    run_config = tiny(text, tmp_path / "run", watch=dataclasses.replace(WATCH, rollback=True))
    outcome = nan_at(run_config, [5, 6, 7])
    if stop:
        assert run(run_config, outcome, stop_after=stop)[0] == 130
        run_config = dataclasses.replace(run_config, resume=True)
    assert run(run_config, outcome)[0] == 0
    of_batch = run_losses(run_config, NUM_STEPS + 4)
    assert losses(tmp_path / "run") == [*of_batch[:3], *of_batch[7:]]
    assert kinds(tmp_path / "run") == [("not_finite", 7), ("rollback", 7)]


def test_a_return_needs_a_checkpoint_from_before_and_has_a_limit(text, tmp_path):
    watch_config = WatchConfig(max_skipped_in_a_row=1, rollback=True, max_rollbacks=1)
    run_config = tiny(text, tmp_path / "early", watch=watch_config)
    with pytest.raises(FloatingPointError, match="1 steps in a row were skipped"):
        run(run_config, nan_at(run_config, [3]))  # the checkpoint of step 2 is not known to be good
    assert kinds(tmp_path / "early") == [("not_finite", 3)]

    run_config = tiny(text, tmp_path / "twice", watch=watch_config)
    with pytest.raises(FloatingPointError, match="1 steps in a row were skipped"):
        run(run_config, nan_at(run_config, [6, 10]))
    assert [kind for kind, _ in kinds(tmp_path / "twice")] == ["not_finite", "rollback", "not_finite"]


def test_measures_of_a_step(text, tmp_path):
    """FLOPs by the formula from the batch's own documents, MFU against a known peak, memory where devices tell it."""
    run_config = tiny(text, tmp_path / "run", num_steps=3, watch=WatchConfig(profile="2:3"))
    with (
        mock.patch.object(flops, "peak_flops", lambda devices: 1e9 * len(devices)),
        mock.patch.object(watch, "used_bytes", lambda _: {"0": 5, "1": 7}),
    ):
        code, output = run(run_config)
    assert code == 0
    rows = read_rows(tmp_path / "run")
    data = batches(load_corpus(run_config.data).train, seq_len=64, batch_size=2, seed=0)
    for row in rows:
        batch = next(data)
        pairs = int((batch["positions"] + 1)[batch["segment_ids"] != 0].sum())  # a token sees those before and itself
        num_tokens = int((batch["segment_ids"] != 0).sum())
        assert row["model_flops"] == 6 * flops.matmul_params(run_config.model) * num_tokens + 12 * 2 * 2 * 8 * pairs
        assert row["mfu"] == pytest.approx(row["model_flops"] / row["step_time_s"] / 2e9)
        assert row["padding_share"] == pytest.approx(1 - num_tokens / 128)
        assert row["peak_memory_bytes"] == {"0": 5, "1": 7}
        assert 0 <= row["data_wait_s"] < row["step_time_s"] or row["step"] == 1
        assert row["bubble"] == 0
    leaves = jax.tree.leaves(init_state(run_config, make_mesh(sequence=2)).params)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves))
    assert rows[0]["param_norm"] == pytest.approx(norm, rel=1e-5)
    assert "MFU" in output
    assert "of the devices' peak" in output
    assert summary(tmp_path / "run")["mfu"] == sorted(row["mfu"] for row in rows)[1]
    (trace,) = (tmp_path / "run" / "profile").rglob("*.trace.json.gz")
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert (names.count("train"), names.count("data")) == (2, 1), "the last step reads no batch"


def test_measures_of_a_step_do_not_depend_on_who_read_its_rows(text, tmp_path):
    """A process has a part of the rows and counts them all."""
    data_config = DataConfig(path=text, seq_len=64, batch_size=4, held_out_fraction=0.2)
    corpus, found = load_corpus(data_config), []
    measured = {"param_norm": 1.0, "bubble": 0.0, "skipped": 0}
    for num_data, own in ((1, (0,)), (2, (0,)), (2, (1,)), (4, (1,)), (4, (0, 3))):
        run_config = tiny(text, tmp_path, data=data_config, mesh=MeshConfig(data=num_data))
        stream = batches(corpus, seq_len=64, batch_size=4, seed=0, data_indices=own, num_data=num_data)
        watcher = watch.Watcher(run_config, tmp_path, mesh=make_mesh(sequence=2), step=0, say=print, writes=False)
        with Prefetch(stream, num_batches=1) as ahead:
            steps = []
            for step in range(1, 4):
                assert len(watcher.fetch(ahead)["tokens"]) == 4 * len(own) // num_data
                watcher.begin(step)
                row = watcher.end(step, measured, 1.0)
                steps.append((row["model_flops"], row["padding_share"]))
        found.append(steps)
    assert len(set(found[0])) == 3, "steps differ"
    assert found == [found[0]] * 5


def test_the_devices_are_named(text, tmp_path):
    watcher = watch.Watcher(tiny(text, tmp_path), tmp_path, mesh=make_mesh(sequence=2), step=0, say=print)
    assert watcher.devices == "2 x cpu"


def test_steps_to_profile_that_are_done_already_are_said(text, tmp_path):
    said = []
    run_config = tiny(text, tmp_path, watch=WatchConfig(profile="2:3"))
    for step in (2, 3):
        watch.Watcher(run_config, tmp_path, mesh=make_mesh(sequence=2), step=step, say=said.append)
    assert said == ["profile='2:3': these steps are done already, so no trace is written"]


def test_the_bubble_is_said_at_the_start():
    lines = report._bubble_lines(config(mesh=MeshConfig(pipeline=2), num_microbatches=2))
    assert lines == [
        "  pipeline: each of 2 stages waits 33.3% of a step, (p - 1) / (v m + p - 1) with m = 2, v = 1; "
        "11.1% with 8 microbatches"
    ]
    assert report._bubble_lines(config(mesh=MeshConfig(pipeline=2), num_microbatches=8))[0].endswith(
        "with m = 8, v = 1"
    )
    assert report._bubble_lines(config()) == []


def test_a_run_that_died_in_its_first_save_starts_anew_with_the_same_flag(text, tmp_path):
    run_dir, run_config = tmp_path / "run", tiny(text, tmp_path / "run", resume=True)
    run_dir.mkdir()  # as a script does
    code, output = run(run_config, stop_after=1)
    assert code == 130
    assert f"--resume: {run_dir} holds no checkpoint yet, so the run starts at its first step" in output
    (run_dir / "checkpoints" / "1").rename(run_dir / "checkpoints" / "1.orbax-checkpoint-tmp-5")
    code, output = run(run_config)
    assert code == 0
    for part in (
        "holds no checkpoint yet",
        "1.orbax-checkpoint-tmp-5: an interrupted write, removed",
        "dropped 1 rows",
    ):
        assert part in output
    assert losses(run_dir) == run_losses(run_config, NUM_STEPS)
    assert not list((run_dir / "checkpoints").glob("*tmp*"))


def test_a_signal_in_the_last_evaluation_costs_that_only(text, tmp_path):
    def score(self, progress, *others):
        assert progress.step in self.store._manager.all_steps(), "the last step is saved before"
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, progress, *others)

    plain, run_dir = run_steps.Steps._score, tmp_path / "run"
    with mock.patch.object(run_steps.Steps, "_score", score):
        code, output = run(tiny(text, run_dir))
    assert code == 143
    assert f"stopped after step {NUM_STEPS} of {NUM_STEPS}, saved in {run_dir}/checkpoints" in output
    assert not (run_dir / "summary.json").exists()
    scored = {path.parent.parent.name for path in (run_dir / "checkpoints").glob("*/metrics/metrics")}
    assert scored == {"4", "8", str(NUM_STEPS)}, "the last step, too, may be the best"
    assert run(tiny(text, run_dir, resume=True))[0] == 0
    assert [row["step"] for row in read_rows(run_dir) if row.get("held_out_loss") == 3.0] == [4, 8, NUM_STEPS]
    assert summary(run_dir)["held_out_loss"] == 3.0


def test_all_processes_go_back_when_the_first_one_does(text, tmp_path, monkeypatch):
    """Another one may not see the checkpoint yet."""
    run_config = tiny(text, tmp_path, watch=dataclasses.replace(WATCH, rollback=True))
    watcher = watch.Watcher(run_config, tmp_path, mesh=make_mesh(sequence=2), step=7, say=print)
    for of_first, expected in (("", 7), ("no return", None)):
        monkeypatch.setattr("train.distributed.from_main", lambda _, answer=of_first: answer)
        assert watcher._first_bad_to_return_to(7, tmp_path / "absent", lambda: None) == expected
