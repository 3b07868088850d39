"""The loop: what a run writes, and that stopping it anywhere changes nothing but the time it takes."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import shutil
import signal
import time
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from disks import full_disk
from rich.console import Console
from tiny_run import config, write_text

from ring_jax import make_mesh
from train import evaluation, loop, report, run_steps
from train.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig
from train.data import Document, load_corpus
from train.errors import RunDirError, SaveError
from train.evaluation import make_evaluate
from train.metrics import read_rows
from train.run_dir import sole_writer
from train.signals import StopRequest
from train.step import init_state, make_train_step
from train.tokenizer import train_tokenizer

ROW = {"step", "loss", "tokens_per_s", "step_time_s", "grad_norm", "lr"}
ROW |= {"param_norm", "model_flops", "bubble", "data_wait_s", "padding_share", "skipped"}  # train.watch


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("loop") / "text")


def tiny(text, run_dir, **changes):
    data = DataConfig(path=text, seq_len=64, batch_size=2, held_out_fraction=0.2)
    return config(**{"data": data, "run_dir": str(run_dir)} | changes)


def run(run_config):
    """(exit code, output) of a run, which compiles its step at most once."""
    output, steps = io.StringIO(), []
    console = Console(file=output, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def make_and_remember(*arguments):
        steps.append(make_train_step(*arguments))
        return steps[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_steps, "make_train_step", make_and_remember)
        code = loop.train(loop.prepare(run_config, resume_command="python -m train run tiny --resume"), console)
    assert [step._cache_size() <= 1 for step in steps] == [True]
    return code, output.getvalue()


def losses(run_dir):
    return [(row["step"], row["loss"]) for row in read_rows(run_dir)]


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """(run directory, output) of a run that nothing stopped."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    code, output = run(tiny(text, run_dir))
    assert code == 0
    return run_dir, output


def test_a_run_writes_everything_it_promises(unbroken):
    run_dir, _ = unbroken
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        "checkpoints", "config.json", "heartbeat.json", "lock", "loss.png", "metrics.jsonl", "newest_checkpoint",
        "report.html", "summary.json", "tensorboard",
    }  # fmt: skip
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any(path.name.startswith("events.out.tfevents") for path in (run_dir / "tensorboard").iterdir())
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["4", "6"]
    assert json.loads((run_dir / "config.json").read_text())["model"]["embed_dim"] == 16

    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row.keys() - {"held_out_loss", "held_out_loss_by_position"} == ROW for row in rows)
    assert [row["step"] for row in rows if "held_out_loss" in row] == [3, 6]
    assert all(np.float32(row["loss"]) == row["loss"] for row in rows), "a loss is a float32, to the last bit"

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() == {
        "step", "held_out_loss", "held_out_bits_per_byte", "bigram_bits_per_byte", "tokens_per_s", "num_params",
        "failed_checkpoints", "alarms", "skipped_steps", "skipped_batches", "padding_share", "not_written",
    }  # fmt: skip
    assert summary["step"] == 6
    assert summary["held_out_loss"] == rows[-1]["held_out_loss"]
    assert summary["held_out_bits_per_byte"] == pytest.approx(summary["held_out_loss"] / np.log(2))


def test_a_run_says_what_it_does(unbroken):
    _, output = unbroken
    for part in (
        "sequence",
        "parameters: 13,",
        "global batch = 2 rows x 64 = 128 tokens",
        "held out",
        "to beat:",
        "step 1/6  loss",
        "tokens/s",
        "s/step",
        "ETA",
        "continued by the model",
        "the bigram's",
        "alarms: none; steps skipped: 0",
    ):
        assert part in output


def test_the_loss_falls(unbroken):
    values = [loss for _, loss in losses(unbroken[0])]
    assert values[-1] < values[0]


def stop_after(run_config, last_step, number=signal.SIGINT):
    """Run until a signal arrives while a step is reported."""
    plain_step = report.StepReporter.step

    def step(self, step, row):
        plain_step(self, step, row)
        if step == last_step:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.StepReporter, "step", step)
        return run(run_config)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_and_the_run_continues_bit_for_bit(text, tmp_path, unbroken, number, code):
    run_dir = tmp_path / "run"
    stopped, output = stop_after(tiny(text, run_dir), 3, number)
    assert stopped == code
    assert f"stopped after step 3 of 6, saved in {run_dir}/checkpoints" in output
    assert "continue with: python -m train run tiny --resume" in output
    assert not (run_dir / "summary.json").exists()

    finished, output = run(tiny(text, run_dir, resume=True))
    assert finished == 0
    assert "continuing after step 3" in output
    assert losses(run_dir) == losses(unbroken[0])
    bits = [json.loads((place / "summary.json").read_text())["held_out_loss"] for place in (run_dir, unbroken[0])]
    assert bits[0] == bits[1]


def test_rows_after_the_checkpoint_are_dropped_and_written_again(text, tmp_path, unbroken):
    run_dir = tmp_path / "run"
    run_config = tiny(text, run_dir, checkpoint=CheckpointConfig(every=4, keep=2))
    stop_after(run_config, 5)
    shutil.rmtree(run_dir / "checkpoints" / "5")  # as if the process had been killed before it saved
    code, output = run(dataclasses.replace(run_config, resume=True))
    assert code == 0
    assert "dropped 1 rows of metrics.jsonl after step 4" in output
    assert losses(run_dir) == losses(unbroken[0])


def test_a_finished_run_can_be_resumed_and_only_scores_again(unbroken, text, tmp_path):
    shutil.copytree(unbroken[0], tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    code, _ = run(tiny(text, tmp_path / "run", resume=True))
    assert code == 0
    assert losses(tmp_path / "run") == losses(unbroken[0])
    old, new = (json.loads((place / "summary.json").read_text()) for place in (unbroken[0], tmp_path / "run"))
    assert new == old


def test_resume_on_another_mesh_goes_on_with_the_same_losses(unbroken, text, tmp_path):
    run_dir = tmp_path / "run"
    stop_after(tiny(text, run_dir), 3)
    code, output = run(tiny(text, run_dir, mesh=MeshConfig(data=2), resume=True))
    assert code == 0
    assert "changed since the checkpoint: mesh.data: 1 in the checkpoint, 2 in this run" in output
    np.testing.assert_allclose(np.array(losses(run_dir)), np.array(losses(unbroken[0])), rtol=1e-5)


def test_the_held_out_loss_is_the_mean_over_all_targets(text, tmp_path):
    run_config = tiny(text, tmp_path)
    mesh, corpus = make_mesh(sequence=2), load_corpus(run_config.data)
    state = init_state(run_config, mesh)
    held_out_loss = make_evaluate(run_config, mesh, corpus, StopRequest())(state, None)

    model = jax.device_put(jax.device_get(state.params), jax.devices()[0])  # the same model on one device, no mesh
    log_probabilities = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens[None])[0]))
    total = count = 0
    for document in corpus.held_out:
        for start in range(0, len(document), 64):
            tokens = np.zeros(64, np.int32)  # what follows the text cannot change what comes before
            piece, targets = document.tokens[start : start + 64], document.tokens[start + 1 : start + 65]
            tokens[: len(piece)] = piece
            scores = np.asarray(log_probabilities(model, jnp.asarray(tokens)), np.float64)
            total -= scores[np.arange(len(targets)), targets].sum()
            count += len(targets)
    assert count % 128, "the last batch is not full"
    assert held_out_loss == pytest.approx(total / count, rel=1e-5)


def test_an_evaluation_reads_on_until_there_is_a_target(monkeypatch):
    """A document of one token has no target, and here only one of six rows is none of these."""
    seen = []

    def eval_step(params, batch):
        seen.append(int((batch["targets"] >= 0).sum()))
        return 3.0 * seen[-1], seen[-1]

    monkeypatch.setattr(evaluation, "make_eval_step", lambda *_: eval_step)
    monkeypatch.setattr(evaluation, "place_batch", lambda batch, *_, **__: batch)
    run_config, state = config(data=DataConfig(seq_len=64, batch_size=1)), types.SimpleNamespace(step=0, params=None)
    single = [Document(f"{index}", np.zeros(1, np.uint8)) for index in range(5 * 64)]

    def evaluate(documents, num_batches):
        seen.clear()
        corpus: Any = types.SimpleNamespace(held_out=documents)
        return make_evaluate(run_config, make_mesh(sequence=2), corpus, StopRequest())(state, num_batches)

    whole = [*single, Document("long", np.zeros(64, np.uint8))]
    assert evaluate(whole, 1) == 3.0
    assert seen[0] == 0 and seen[-1] == 63 and sum(seen) == 63, "on to the one that has some, and no further"
    assert evaluate(whole, None) == 3.0 and sorted(seen) == [0] * 5 + [63]
    assert math.isnan(evaluate(single, 1)) and seen == [0] * 5


def test_a_used_directory_needs_resume_and_resume_needs_a_run(text, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    for name, resume, message in (
        ("used", False, "already holds a run; continue it with --resume, choose another --run-dir"),
        ("used/notes.txt", False, "is a file; name a folder"),
        ("used", True, r"holds no checkpoints and no config\.json, so there is nothing to continue"),
        ("absent", True, "does not exist, so there is nothing to continue; correct --run-dir"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.prepare(tiny(text, tmp_path / name, resume=resume), resume_command="")


def test_what_cannot_be_continued_is_refused_before_the_text_is_read(unbroken, text, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "load_corpus", lambda *_, **__: pytest.fail("the text was read"))
    changed = dataclasses.replace(config().model, embed_dim=32)
    for changes, message in (
        ({"model": changed}, "model.embed_dim: 16 in the checkpoint, 32 in this run"),
        ({"num_steps": 5}, "num_steps=5 must be at least 6"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.prepare(tiny(text, unbroken[0], resume=True, **changes), resume_command="")
    shutil.copytree(unbroken[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match=r"holds metrics\.jsonl, but its folder checkpoints is gone; bring it back"):
        loop.prepare(tiny(text, tmp_path / "run", resume=True), resume_command="")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"had a checkpoint of step 6, but its folder checkpoints is empty or gone"):
        loop.prepare(tiny(text, tmp_path / "run", resume=True), resume_command="")
    (tmp_path / "run" / "newest_checkpoint").unlink()
    with pytest.raises(
        ValueError, match=r"run_dir=.*run' belongs to another run(.|\n)*embed_dim: 16 in config\.json, 32"
    ):
        loop.prepare(tiny(text, tmp_path / "run", resume=True, model=changed), resume_command="")


def test_two_runs_do_not_write_into_one_folder(text, tmp_path, monkeypatch):
    monkeypatch.setattr("train.run_dir._HERE_S", 0.0)
    first, second = (loop.prepare(tiny(text, tmp_path / "run"), resume_command="") for _ in range(2))
    with sole_writer(first.run_dir, print), pytest.raises(RunDirError, match="is written by another run"):
        loop.train(second, Console(file=io.StringIO()))
    (first.run_dir / "config.json").touch()  # the first was quick: it is over
    with pytest.raises(RunDirError, match="already holds a run"):
        loop.train(second, Console(file=io.StringIO()))


def test_a_long_warmup_is_clamped_and_said_so(text, tmp_path):
    run_config = tiny(text, tmp_path / "run", optimizer=OptimizerConfig(warmup_steps=50))
    prepared = loop.prepare(run_config, resume_command="")
    assert prepared.config.optimizer.warmup_steps == 6
    assert prepared.notes == ["optimizer.warmup_steps=50 is more than num_steps=6: clamped to 6"]


def test_whole_weights_are_said_so(text, tmp_path):
    prepared = loop.prepare(tiny(text, tmp_path / "run", mesh=MeshConfig(data=2, sequence=3)), resume_command="")
    (note,) = prepared.notes
    assert note.startswith("weights, gradients and optimizer state are whole over sequence, 3 times")


def test_a_run_on_tokens_scores_bytes_and_continues_its_rows(text, tmp_path):
    """A tokenizer and a cache; stopped, and continued with the same rows; scored per byte of text."""
    texts = [path.read_bytes() for path in sorted(pathlib.Path(text).iterdir())]
    size = train_tokenizer(texts, vocab_size=300, out=tmp_path / "t.json")
    data = DataConfig(
        path=text, tokenizer=str(tmp_path / "t.json"), end_token="<|endoftext|>", cache=str(tmp_path / "cache"),
        seq_len=64, batch_size=2, held_out_fraction=0.2,
    )  # fmt: skip
    model = dataclasses.replace(config().model, vocab_size=size)
    whole, stopped = (config(data=data, model=model, run_dir=str(tmp_path / name)) for name in ("whole", "stopped"))
    assert run(whole)[0] == 0
    assert stop_after(stopped, 3)[0] == 130
    assert run(dataclasses.replace(stopped, resume=True))[0] == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    summary = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    bytes_per_token = load_corpus(data).bytes_per_token
    assert bytes_per_token > 1.5
    expected = summary["held_out_loss"] / np.log(2) / bytes_per_token
    assert summary["held_out_bits_per_byte"] == pytest.approx(expected)
    assert summary["bigram_bits_per_byte"] < 8


def test_a_run_whose_last_checkpoint_fails_does_all_else_and_says_so(text, tmp_path, unbroken, monkeypatch):
    def fail(self, step, **keywords):
        if step >= 4:
            raise OSError(28, "No space left on device")
        return plain(self, step, **keywords)

    plain = ocp.CheckpointManager.save
    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    with pytest.raises(
        SaveError, match=r"step 6 not written: OSError: .*No space left.*2 failed.*: 2; make room"
    ) as caught:
        run(tiny(text, tmp_path / "run"))
    assert "--resume runs the steps after it again" in str(caught.value)
    assert losses(tmp_path / "run") == losses(unbroken[0])
    assert (tmp_path / "run" / "summary.json").exists()
    monkeypatch.undo()
    code, output = run(tiny(text, tmp_path / "run", resume=True))
    assert code == 0
    assert "continuing after step 2" in output
    assert losses(tmp_path / "run") == losses(unbroken[0])


# What orbax leaves behind when a write fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lasts", [True, False])
def test_a_full_disk_ends_no_run_and_what_it_costs_is_counted(text, tmp_path, unbroken, lasts):
    """From step 3 on, to the end or up to step 5."""
    plain, disk = report.StepReporter.step, contextlib.ExitStack()

    def step(self, step, row):
        plain(self, step, row)
        if step == 3:
            while not (run_dir / "checkpoints" / "2").exists():  # its save runs beside the steps
                time.sleep(0.01)
            disk.enter_context(full_disk(10))
        elif step == 5 and not lasts:
            disk.close()

    output, run_dir = io.StringIO(), tmp_path / "run"
    console = Console(file=output, markup=False, emoji=False, highlight=False, soft_wrap=True)
    prepared = loop.prepare(tiny(text, run_dir), resume_command="")
    with mock.patch.object(report.StepReporter, "step", step), disk:
        if lasts:
            with pytest.raises(SaveError, match=r"step 6 not written.*The newest complete one in .*: 2; make room"):
                loop.train(prepared, console)
        else:
            assert loop.train(prepared, console) == 0
    rows = losses(unbroken[0])
    assert losses(run_dir) == [row for row in rows if row[0] not in ((3, 4, 5, 6) if lasts else (3, 4))]
    for name in ("metrics.jsonl", "tensorboard", "heartbeat.json"):
        said = output.getvalue().count(f"{name} cannot be written")
        # The heartbeat writes by the clock: steps 3 to 5 may lie between two beats, the end of a run never.
        assert said == 1 or (said == 0 and name == "heartbeat.json" and not lasts)
    assert "checkpoint of step 4 not written" in output.getvalue()
    of_last = [line for line in output.getvalue().splitlines() if "step 6 not written" in line]
    assert len(of_last) == lasts and not any("tries again" in line for line in of_last)
    assert f"metrics.jsonl ({4 if lasts else 2} times)" in output.getvalue()
    assert (run_dir / "summary.json").exists() is not lasts
    if not lasts:
        assert json.loads((run_dir / "summary.json").read_text())["failed_checkpoints"] == 1
    assert run(tiny(text, run_dir, resume=True))[0] == 0
    assert [step for step, _ in losses(run_dir)] == ([1, 2, 3, 4, 5, 6] if lasts else [1, 2, 5, 6])
    assert [loss for _, loss in losses(run_dir)][-1] == rows[-1][1]
    score = [json.loads((place / "summary.json").read_text())["held_out_loss"] for place in (run_dir, unbroken[0])]
    assert score[0] == score[1]
