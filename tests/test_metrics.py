"""metrics.jsonl: one row per step, complete, in order, to the bit."""

import json
import math
import sys

import numpy as np
from disks import full_disk
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.writer import Event, SessionLog

from train.metrics import METRICS_FILE, MetricsLog, drop_rows_after, read_rows, write_json
from train.unwritten import Unwritten, standard_output


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
    write_json(tmp_path / "config.json", {"a": [1, 2, math.nan], "b": {"c": -math.inf}, "d": (True, None, "x", 0.5)})
    found = json.loads((tmp_path / "config.json").read_text(), parse_constant=lambda name: name)
    assert found == {"a": [1, 2, None], "b": {"c": None}, "d": [True, None, "x", 0.5]}


def test_the_last_row_can_be_amended_and_no_other(tmp_path):
    with MetricsLog(tmp_path, first_step=1) as log:
        log.amend(1, {"held_out_loss": 9.0})
        assert read_rows(tmp_path) == []
        for step in (1, 2):
            log.write(step, {"loss": float(step)})
        log.amend(2, {"held_out_loss": 0.5, "by": {"0": 1.0}})
        log.amend(1, {"held_out_loss": 0.7})
        log.write(3, {"loss": 3.0})
    last = {"step": 2, "loss": 2.0, "held_out_loss": 0.5, "by": {"0": 1.0}}
    assert read_rows(tmp_path) == [{"step": 1, "loss": 1.0}, last, {"step": 3, "loss": 3.0}]
    assert (2, "held_out_loss", 0.5) in scalars(tmp_path)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    with MetricsLog(tmp_path, first_step=4) as log:
        log.amend(3, {"held_out_loss": 1.0})
    assert len(read_rows(tmp_path)) == 3


def records(path):
    """The events of a file of TensorBoard, every checksum checked."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        length, check = data[at : at + 8], data[at + 8 : at + 12]
        assert int.from_bytes(check, "little") == masked_crc32c(length)
        end = at + 12 + int.from_bytes(length, "little")
        assert int.from_bytes(data[end : end + 4], "little") == masked_crc32c(data[at + 12 : end])
        yield Event.FromString(data[at + 12 : end])
        at = end + 4


def scalars(run_dir):
    """(step, name, value) of what TensorBoard shows: a mark of a start hides what has its step or a later one."""
    shown = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        events = list(records(path))
        assert events[0].file_version == "brain.Event:2"
        for event in events:
            if event.session_log.status == SessionLog.START:
                shown = [entry for entry in shown if entry[0] < event.step]
            shown += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return sorted(shown)


def test_tensorboard_shows_the_same_numbers_and_hides_what_came_twice(tmp_path):
    with MetricsLog(tmp_path, first_step=1) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": float(step), "bad": float("nan"), "by": {"0": 1.5, "1": math.inf}})
        assert log.rewind(1) == 2
        log.write(2, {"loss": 20.0})
    assert scalars(tmp_path) == [(1, "by/0", 1.5), (1, "loss", 1.0), (2, "loss", 20.0)]
    with MetricsLog(tmp_path, first_step=2) as log:  # as on resume from step 1
        log.write(2, {"loss": 21.0})
    assert scalars(tmp_path) == [(1, "by/0", 1.5), (1, "loss", 1.0), (2, "loss", 21.0)]


def test_tensorboard_hides_what_a_run_wrote_before_it_started_again_at_its_first_step(tmp_path):
    for loss in (1.0, 2.0):
        with MetricsLog(tmp_path, first_step=1) as log:
            log.write(1, {"loss": loss})
    assert scalars(tmp_path) == [(1, "loss", 2.0)]


def test_a_full_disk_costs_whole_rows_which_are_counted_and_said_once(tmp_path):
    said = []
    unwritten = Unwritten(said.append)
    with MetricsLog(tmp_path, first_step=1, unwritten=unwritten) as log:
        log.write(1, {"loss": 1.0})
        with full_disk((tmp_path / METRICS_FILE).stat().st_size + 10):
            for step in (2, 3):
                log.write(step, {"loss": 2.0})
        log.write(4, {"loss": 4.0})
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 4], "no half of row 2 swallows row 4"
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 2
    assert scalars(tmp_path) == [(1, "loss", 1.0), (4, "loss", 4.0)]
    assert unwritten.counts == {METRICS_FILE: 2, "tensorboard": 2}
    assert [line.split(" cannot be written")[0] for line in said] == [METRICS_FILE, "tensorboard"]
    assert unwritten.summary() == "not written: metrics.jsonl (2 times), tensorboard (2 times)"


def test_a_line_that_a_killed_process_left_half_written_swallows_no_other(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{"step": 2, "lo')
    with MetricsLog(tmp_path, first_step=2) as log:
        log.write(2, {"loss": 0.5})
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]


def test_a_full_disk_under_the_log_of_a_run_ends_nothing(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        print("before")
        output = standard_output()
        with full_disk(8):
            print("lost", "x" * 50, file=output, flush=True)
        print("after", file=output, flush=True)
        output.close()
    text = (tmp_path / "log").read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
