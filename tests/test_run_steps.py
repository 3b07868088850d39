"""Between the steps: which batches are read, what an error or a signal there costs, and what the end needs."""

import dataclasses
import os
import shutil
import signal
import types
from unittest import mock

import pytest
import test_watch
from test_watch import NUM_STEPS, run, run_losses, summary, tiny
from tiny_run import write_text

from train import checkpoint, finish, run_steps
from train.errors import SaveError
from train.metrics import read_rows, write_json


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("run_steps") / "text")


def checkpoints(run_dir):
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())


def batches_fail(monkeypatch, *steps):
    """The batch after each of these steps cannot be read."""

    def fail(watch, data, run_config, mesh, step):
        if step in steps:
            raise ValueError("a document is damaged")
        return plain(watch, data, run_config, mesh, step)

    plain = run_steps._next_batch
    monkeypatch.setattr(run_steps, "_next_batch", fail)


def test_a_batch_that_cannot_be_read_costs_no_step(text, tmp_path, monkeypatch):
    run_dir, run_config = tmp_path / "run", tiny(text, tmp_path / "run")
    with monkeypatch.context() as patch:
        batches_fail(patch, 3)
        with pytest.raises(ValueError, match="a document is damaged"):
            run(run_config)
        assert checkpoints(run_dir) == [2, 3]
        with pytest.raises(ValueError, match="a document is damaged"):  # the first batch of this process
            run(dataclasses.replace(run_config, resume=True))
    assert checkpoints(run_dir) == [2, 3]
    assert run(dataclasses.replace(run_config, resume=True))[0] == 0
    assert test_watch.losses(run_dir) == run_losses(run_config, NUM_STEPS)


def test_the_step_before_a_batch_that_cannot_be_read_is_saved_first(text, tmp_path, monkeypatch):
    """Held-out text may be gone with it, and the disk of the checkpoints."""

    def evaluate(params, batch):
        raise AssertionError("evaluated")

    run_dir, run_config = tmp_path / "run", tiny(text, tmp_path / "run", eval_every=3)
    batches_fail(monkeypatch, 3)
    with monkeypatch.context() as patch:
        patch.setattr(test_watch, "fake_eval", lambda *_: evaluate)
        with pytest.raises(ValueError, match="a document is damaged"):
            run(run_config)
    assert checkpoints(run_dir) == [2, 3]
    shutil.rmtree(run_dir)
    said = []
    monkeypatch.setattr(run_steps, "report_failure", lambda console, problem, **how: said.append((problem, how)))
    monkeypatch.setattr(checkpoint.CheckpointStore, "settle", lambda store: "no room")
    with pytest.raises(ValueError, match="a document is damaged"):
        run(run_config)
    assert said[-1] == ("no room", {"is_last": True})


def test_no_batch_is_read_that_no_step_needs(text, tmp_path, monkeypatch):
    batches_fail(monkeypatch, NUM_STEPS)
    assert run(tiny(text, tmp_path / "run"))[0] == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert run(tiny(text, tmp_path / "run", resume=True))[0] == 0, "it only scores"
    assert summary(tmp_path / "run")["held_out_loss"] == 3.0


@pytest.mark.parametrize(("eval_batches", "is_cut"), [(2, False), (50, True)])
def test_a_signal_in_an_evaluation_costs_no_evaluation(text, tmp_path, monkeypatch, eval_batches, is_cut):
    """A short one is ended, a long one made up for when the run goes on."""
    signals = [signal.SIGTERM]

    def fake_eval(config, mesh):
        step = plain(config, mesh)

        def signalled(params, batch):
            if signals:
                os.kill(os.getpid(), signals.pop())
            return step(params, batch)

        return signalled

    plain = test_watch.fake_eval
    monkeypatch.setattr(test_watch, "fake_eval", fake_eval)
    run_dir, run_config = tmp_path / "run", tiny(text, tmp_path / "run", eval_batches=eval_batches)
    assert run(run_config)[0] == 143
    assert ("held_out_loss" in read_rows(run_dir)[-1]) is not is_cut
    assert (run_dir / "checkpoints" / "4" / "metrics").exists() is not is_cut
    code, output = run(dataclasses.replace(run_config, resume=True))
    assert code == 0
    assert ("step 4/12  held-out loss 3.0000" in output) is is_cut
    assert [row["step"] for row in read_rows(run_dir) if row.get("held_out_loss") == 3.0] == [4, 8, NUM_STEPS]


def test_rows_that_cannot_be_read_at_the_end_cost_the_summary(text, tmp_path):
    def fail(_):
        raise OSError(5, "Input/output error")

    run_config = tiny(text, tmp_path / "run")
    with (
        mock.patch.object(finish, "metrics", types.SimpleNamespace(read_rows=fail, write_json=write_json)),
        pytest.raises(SaveError, match=r"summary\.json could not be written; the checkpoint is complete: --resume"),
    ):
        run(run_config)
    assert run(dataclasses.replace(run_config, resume=True))[0] == 0
    assert summary(tmp_path / "run")["step"] == NUM_STEPS
