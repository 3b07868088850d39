"""What a run is continued from, and when starting it anew would lose something."""

import dataclasses
import io

import pytest
from documents import write_folder
from rich.console import Console
from test_loop import tiny
from tiny_run import write_text

from train import loop
from train.checkpoint import CheckpointError
from train.config import DataConfig
from train.errors import SaveError, TryAgainError
from train.resume import check_saved, find_start
from train.unwritten import Unwritten


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("resume") / "text")


def fail(*_, **__):
    raise OSError(5, "Input/output error")


def console():
    return Console(file=io.StringIO())


def test_checkpoints_on_a_disk_that_is_not_mounted_are_missed(text, tmp_path):
    """And a run of which none could be written, whatever its metrics say, may start again."""
    run_dir, run_config = tmp_path / "run", tiny(text, tmp_path / "run")
    assert loop.train(loop.prepare(run_config, resume_command=""), console()) == 0
    steps = sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    run_config = dataclasses.replace(run_config, resume=True)
    assert find_start(run_dir, run_config)[0].step == steps[-1]
    (run_dir / "checkpoints").rename(tmp_path / "disk")
    with pytest.raises(CheckpointError, match="is gone; bring it back"):
        find_start(run_dir, run_config)
    (run_dir / "checkpoints").mkdir()
    with pytest.raises(
        CheckpointError, match=rf"had a checkpoint of step {steps[-1]}, but .* is empty or gone; bring it bac"
    ):
        find_start(run_dir, run_config)
    (run_dir / "newest_checkpoint").unlink()
    assert find_start(run_dir, run_config)[0] is None


def test_a_run_directory_that_does_not_answer_may_be_tried_again(text, tmp_path, monkeypatch):
    run_config = tiny(text, tmp_path / "run", resume=True)
    write_folder(tmp_path / "run", {"config.json": "{}"})
    with monkeypatch.context() as patch:
        patch.setattr("train.resume._read_config", fail)
        with pytest.raises(TryAgainError, match=r"run_dir='.*run' cannot be read .*Input/output error"):
            find_start(tmp_path / "run", run_config)
    (tmp_path / "run" / "config.json").unlink()
    prepared = loop.prepare(run_config, resume_command="")
    monkeypatch.setattr(loop, "Watcher", fail)
    with pytest.raises(TryAgainError, match=r"run_dir='.*run' cannot be read .*Input/output error"):
        loop.train(prepared, console())


def test_a_cache_of_tokens_may_lie_in_the_run_directory(text, tmp_path, monkeypatch):
    cache = str(tmp_path / "run" / "cache")
    data = DataConfig(path=text, seq_len=64, batch_size=2, held_out_fraction=0.2, cache=cache)
    prepared = loop.prepare(tiny(text, tmp_path / "run", data=data), resume_command="")
    assert (tmp_path / "run" / "cache").is_dir()
    monkeypatch.setattr(loop, "_train", lambda *_: 0)
    assert loop.train(prepared, console()) == 0


def test_a_run_without_any_checkpoint_is_told_what_resume_does(tmp_path):
    class Store:
        folder, failure, num_failures = tmp_path, "checkpoint of step 6 not written: no room", 3

    with pytest.raises(SaveError, match=r": none; make room or mend the store, and --resume starts at the first step$"):
        check_saved(Store(), Unwritten())
    (tmp_path / "4").mkdir()
    with pytest.raises(SaveError, match=r": 4; make room or mend the store, and --resume runs the steps after it"):
        check_saved(Store(), Unwritten())
