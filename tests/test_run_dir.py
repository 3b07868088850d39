"""The folder of a run: whose it is, whether it can be written, and one run at a time in it."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
from disks import full_disk
from jobs import ROOT

from train import run_dir
from train.errors import RunDirError, TryAgainError
from train.run_dir import check_run_dir, make_run_dir, sole_writer


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(run_dir, "_HERE_S", 0.0)
    monkeypatch.setattr(run_dir, "_LEASE_S", 0.0)


def test_whose_folder_it_is(tmp_path):
    for name, content in (("empty", ()), ("locked", ("lock", ".probe_1")), ("mine", ("config.json",)), ("saved", ())):
        (tmp_path / name).mkdir()
        for file in content:
            (tmp_path / name / file).touch()
    (tmp_path / "saved" / "checkpoints").mkdir()
    for name in ("absent", "empty", "locked"):
        check_run_dir(tmp_path / name, resume=False)
    for name in ("empty", "locked", "mine", "saved"):
        check_run_dir(tmp_path / name, resume=True)
    for name in ("mine", "saved"):
        with pytest.raises(RunDirError, match="already holds a run; continue it with --resume"):
            check_run_dir(tmp_path / name, resume=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(RunDirError, match=r"holds no checkpoints and no config\.json.*notes\.txt.*correct --run-dir"):
        check_run_dir(tmp_path / "other", resume=True)


def test_a_cache_of_tokens_in_the_folder_is_no_part_of_a_run(tmp_path, monkeypatch):
    (tmp_path / "run" / "cache" / "0123").mkdir(parents=True)
    for cache in ("run/cache", "run/cache/deeper", "run"):
        for resume in (False, True):
            check_run_dir(tmp_path / "run", resume=resume, cache=str(tmp_path / cache))
    with pytest.raises(RunDirError, match="already holds a run"):
        check_run_dir(tmp_path / "run", resume=False, cache=str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    check_run_dir(tmp_path / "run", resume=False, cache="run/cache")
    (tmp_path / "run" / "config.json").touch()
    for cache in ("run/cache", "run"):
        with pytest.raises(RunDirError, match="already holds a run"):
            check_run_dir(tmp_path / "run", resume=False, cache=cache)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match=r"file/run' cannot be written .*Not a directory.*--run-dir"):
        make_run_dir(tmp_path / "file" / "run")
    with full_disk(100), pytest.raises(RunDirError, match=r"cannot be written .*File too large"):
        make_run_dir(tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []

    def refuse(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    with pytest.raises(RunDirError, match=r"cannot be written .*Permission denied"):
        check_run_dir(tmp_path, resume=True)


def test_one_run_at_a_time(tmp_path):
    said = []
    with sole_writer(tmp_path, said.append):
        with (
            pytest.raises(
                RunDirError, match=rf"another run, process {os.getpid()} on .*\(kill {os.getpid()}\).*--run-dir"
            ),
            sole_writer(tmp_path, said.append),
        ):
            pass
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid(), "whoever only asks changes nothing"
    with sole_writer(tmp_path, said.append):
        pass
    assert said == []


def test_a_run_on_another_machine_is_waited_for_and_may_be_tried_again(tmp_path, monkeypatch):
    said = []
    with sole_writer(tmp_path, said.append):
        monkeypatch.setattr(run_dir, "_machine", lambda: "another")
        monkeypatch.setattr(run_dir, "_LEASE_S", 0.1)
        with pytest.raises(TryAgainError, match="is written by another run"), sole_writer(tmp_path, said.append):
            pass
    assert len(said) == 1
    assert "waiting up to" in said[0]


def test_no_room_for_the_name_in_the_lock_is_no_error(tmp_path):
    with full_disk(4), sole_writer(tmp_path, print):
        pass
    with sole_writer(tmp_path, print):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


HOLD = """
import pathlib, sys, time
from train.run_dir import sole_writer
with sole_writer(pathlib.Path(sys.argv[1]), print):
    print("ready", flush=True)
    time.sleep(100)
"""


def test_the_lock_of_a_process_that_died_keeps_nobody_away(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(RunDirError, match=f"process {other.pid} on "), sole_writer(tmp_path, print):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
    with sole_writer(tmp_path, print):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    said = []
    monkeypatch.setattr("fcntl.flock", refuse)
    with sole_writer(tmp_path, said.append):
        pass
    assert "without locks" in said[0] and "Operation not supported" in said[0]
