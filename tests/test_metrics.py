"""metrics.jsonl: one row per step, complete, in order, to the bit."""

import json

import numpy as np

from train.metrics import METRICS_FILE, MetricsLog, drop_rows_after, read_rows, write_json


def test_a_row_is_on_disk_at_once_and_reads_back_to_the_same_bits(tmp_path):
    value = float(np.float32(1) / np.float32(3))
    with MetricsLog(tmp_path, first_step=1) as log:
        log.write(1, {"loss": value, "lr": 1e-3})
        assert read_rows(tmp_path) == [{"step": 1, "loss": value, "lr": 1e-3}]
    assert np.float32(read_rows(tmp_path)[0]["loss"]).tobytes() == (np.float32(1) / np.float32(3)).tobytes()
    assert any(path.name.startswith("events.out.tfevents") for path in (tmp_path / "tensorboard").iterdir())


def test_a_value_that_is_not_finite_is_null_because_json_has_no_nan(tmp_path):
    with MetricsLog(tmp_path, first_step=1) as log:
        log.write(1, {"loss": float("nan")})
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1, "loss": null}\n'


def test_rows_after_a_step_are_dropped_and_a_cut_line_is_no_row(tmp_path):
    rows = [{"step": step, "loss": step / 3} for step in range(1, 6)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + '\n{"step": 6, "lo')
    assert read_rows(tmp_path) == rows
    assert drop_rows_after(tmp_path, 3) == 2
    assert read_rows(tmp_path) == rows[:3]
    with MetricsLog(tmp_path, first_step=4) as log:
        log.write(4, {"loss": 0.5})
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path) == []
    assert drop_rows_after(tmp_path, 3) == 0


def test_write_json(tmp_path):
    write_json(tmp_path / "config.json", {"a": [1, 2]})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": [1, 2]}
