"""The benchmark runs, compares what it says it compares, and counts the matmuls that cannot be avoided."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import attention, device

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_a_tiny_run(tmp_path):
    path = tmp_path / "rows.json"
    chosen = ["--lengths", "64", "--repeats", "1", "--masks", "causal_packed", "--heads", "8/2"]
    command = [sys.executable, "-m", "benchmarks.attention", *chosen, "--strategies", "ring", "usp", "--json", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    passes = list(attention.PASSES)
    assert [(x["strategy"], x["pass"]) for x in rows] == [(who, p) for who in ("jax.nn", "ring", "usp") for p in passes]
    for row in rows:
        assert row["strategy"] in done.stdout
        assert row["ratio"] == 1 or row["strategy"] != "jax.nn"
        assert min(row["ratio"], row["floor_fraction"], row["temporaries_bytes"]) > 0
        assert (row["sent_bytes"] > 0) == (row["strategy"] != "jax.nn")


@pytest.mark.parametrize("mask", attention.MASKS)
def test_the_floor_is_that_of_the_visible_pairs(mask):
    case = attention.Case(72, "float32", mask, "8/2", ())
    ids = np.ones((1, 72)) if case.segment_ids is None else case.segment_ids
    visible = ids[0][:, None] == ids[0]
    pairs = int((np.tril(visible) if case.is_causal else visible).sum())
    assert case.floor_flops("forward") == 2 * (2 * 64) * pairs * 8  # two matmuls
    assert case.floor_flops("forward_backward") == 7 * (2 * 64) * pairs * 8


def test_jax_nn_is_left_out_where_it_would_not_fit(capsys):
    case = attention.Case(16384, "bfloat16", "causal", "8/8", ("ring",))
    assert case.dense_bytes >= attention.DENSE_LIMIT
    row = {"strategy": "ring", "cpu_s": 2.0, "ratio": None, "floor_s": 0.5, "floor_fraction": 0.25}
    row |= {"matmul_flops_per_cpu_s": 1e11, "temporaries_bytes": 10**6, "sent_bytes": 10**6}
    attention.show(case, [row, row])
    assert "jax.nn left out: one array of its scores has 8.0 GiB" in capsys.readouterr().out


def test_what_runs():
    assert len(attention.plan(attention.parse([]))) == 12
    assert attention.plan(attention.parse(["--lengths", "64"])) == [
        attention.Case(64, "float32", "causal", "8/8", ("ring",))
    ]
    every = attention.plan(attention.parse(["--all", "--dtypes", "bfloat16"]))
    assert len(every) == 3 * 4 * 2
    assert {x.strategies for x in every} == {tuple(attention.STRATEGIES)}


def test_the_device_script_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "device.json"
    device.main(["--tiny", "--limit", "600", "--json", str(path)])
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert found["device"] == "cpu" and found["jax"] and found["left_out"] == []
    rows = {part: [x for x in found["rows"] if x["part"] == part] for part in device.PARTS}
    assert all(f"\n{part}\n" in printed and rows[part] for part in rows)
    assert {(x["mask"], x["kernel"]) for x in rows["errors"]} == {
        (mask, kernel) for mask in device.MASKS for kernel in ("pallas_gpu", "xla")
    }
    for row in rows["errors"]:
        assert max(row[name] for name in ("out", "dq", "dk", "dv")) < 0.01
        assert row["mask"] not in ("causal", "full") or max(row[f"{x}_over_jax_nn"] for x in ("out", "dq")) < 1.5
    assert all(min(row["forward_share"], row["forward_backward_share"]) > 0 for row in rows["ring"])


def test_the_device_script_names_what_it_needs(capsys):
    with pytest.raises(SystemExit):
        device.main([])
    assert "use --tiny here" in capsys.readouterr().err
