"""What a run is continued from, and when starting it anew would lose something."""

import io
import json
import shutil

import pytest
from rich.console import Console
from test_loop import tiny
from tiny_run import write_text

from train import loop
from train.checkpoint import CheckpointError
from train.config import DataConfig, to_json
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
    """A checkpoint is due every 2 steps: a run killed in its first save has done 2, or left an interrupted write."""
    run_dir, run_config = tmp_path / "run", tiny(text, tmp_path / "run", resume=True)
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps(to_json(run_config)))
    rows = [json.dumps({"step": step}) for step in (1, 2, 3)]
    (run_dir / "metrics.jsonl").write_text("\n".join(rows[:2]) + "\n")
    assert find_start(run_dir, run_config)[0] is None
    (run_dir / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(CheckpointError, match=r"reaches step 3 and checkpoint\.every=2, .*is empty; bring.*or delete"):
        find_start(run_dir, run_config)
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    (run_dir / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir()
    assert find_start(run_dir, run_config)[0] is None
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(CheckpointError, match="is gone; bring it back"):
        find_start(run_dir, run_config)


def test_a_run_directory_that_does_not_answer_may_be_tried_again(text, tmp_path, monkeypatch):
    run_config = tiny(text, tmp_path / "run", resume=True)
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("train.metrics.read_rows", fail)
        with pytest.raises(TryAgainError, match=r"run_dir='.*run' cannot be read .*Input/output error"):
            find_start(tmp_path / "run", run_config)
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


def test_a_run_without_any_checkpoint_is_not_told_to_resume(tmp_path):
    class Store:
        folder, failure, num_failures = tmp_path, "checkpoint of step 6 not written: no room", 3

    with pytest.raises(SaveError, match=r": none; make room or mend the store, and start anew with another --run-dir$"):
        check_saved(Store(), Unwritten())
    (tmp_path / "4").mkdir()
    with pytest.raises(SaveError, match=r": 4; make room or mend the store, and --resume runs the steps after it"):
        check_saved(Store(), Unwritten())
