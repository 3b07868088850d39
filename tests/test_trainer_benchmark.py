"""The benchmark of the trainer runs and says what it says it compares."""

import json
import subprocess
import sys

import pytest
from jobs import ROOT, environment
from tiny_run import write_text

from benchmarks import trainer


def test_a_tiny_run(tmp_path):
    path = tmp_path / "rows.json"
    size = ["--seq-len", "64", "--width", "32", "--steps", "4", "--save-every", "1", "--repeats", "1"]
    where = ["--text", write_text(tmp_path / "text"), "--meshes", "1,2,2,2", "--json", path]
    command = [sys.executable, "-m", "benchmarks.trainer", *size, *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    one, eight = found["steps"]
    assert (one["mesh"], eight["mesh"]) == ([1, 1, 1, 1], [1, 2, 2, 2])
    assert one["ratio"] == 1
    assert eight["ratio"] == pytest.approx(one["cpu_s"] / eight["cpu_s"])
    assert eight["floor_s"] == one["floor_s"] > 0
    assert 0 < eight["floor_fraction"] < one["floor_fraction"] < 1
    assert eight["tokens_per_cpu_s"] == pytest.approx(4 * 64 / eight["cpu_s"])
    assert 0 < found["data_wait"] < 1
    assert {"save_added_wall", "save_added_cpu", "load", "load_after"} <= found.keys()
    for part in ("1,2,2,2", "wait%", "save%", "load of the machine"):
        assert part in done.stdout


def test_meshes_are_of_8_devices():
    assert trainer.parse([]).meshes == trainer.MESHES
    with pytest.raises(SystemExit):
        trainer.parse(["--meshes", "1,1,1,4"])
