"""The heartbeat: renewed without help of the main thread, whole, harmless; and the alarm when no step comes."""

import json
import time

import pytest

from train.heartbeat import Heartbeat

QUICK = {"stall_factor": 3.0, "period_s": 0.02}


def read(path):
    return json.loads(path.read_text())


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_file_is_renewed_while_the_main_thread_is_busy(tmp_path):
    path = tmp_path / "heartbeat.json"
    with Heartbeat(path, step=3, on_stall=lambda *_: None, **QUICK) as heartbeat:
        first = read(path)
        assert first["step"] == 3
        assert first["phase"] == "start"
        heartbeat.beat("compile")
        wait_until(lambda: read(path)["phase"] == "compile")
        time.sleep(0.1)  # busy
        busy = read(path)
        assert busy["time"] > busy["since"] + 0.05
        heartbeat.stepped(4, 0.1, compiled=True)
        wait_until(lambda: read(path)["step"] == 4)
    assert read(path)["phase"] == "ended"
    assert [found.name for found in tmp_path.iterdir()] == ["heartbeat.json"]


def test_a_second_passes_between_two_beats(tmp_path):
    path = tmp_path / "heartbeat.json"
    with Heartbeat(path, step=0, stall_factor=3.0, on_stall=lambda *_: None) as heartbeat:
        before = read(path)
        for step in range(50):
            heartbeat.stepped(step, 0.0, compiled=False)
        assert read(path) == before, "a beat costs no writing"


def test_the_end_of_a_failing_run_is_told(tmp_path):
    with pytest.raises(ZeroDivisionError), Heartbeat(tmp_path / "h.json", step=0, on_stall=print, **QUICK):
        raise ZeroDivisionError
    assert read(tmp_path / "h.json")["phase"] == "failed: ZeroDivisionError"


def test_a_disk_that_fails_does_not_harm_the_run(tmp_path):
    with Heartbeat(tmp_path / "absent" / "h.json", step=0, on_stall=print, **QUICK) as heartbeat:
        heartbeat.beat("compile")
        time.sleep(0.05)
        assert heartbeat._thread.is_alive()


def test_a_stall_is_one_alarm_with_the_place(tmp_path):
    alarms = []
    with Heartbeat(
        None, step=0, on_stall=lambda step, text: alarms.append((step, text)), stall_min_s=0.1, **QUICK
    ) as heartbeat:
        heartbeat.beat("compile")
        time.sleep(0.2)
        heartbeat.stepped(1, 5.0, compiled=True)
        heartbeat.stepped(2, 0.01, compiled=False)
        time.sleep(0.2)
        assert not alarms, "compiling is no stall, and two steps are no median"
        for step in (3, 4, 5):
            heartbeat.stepped(step, 0.01, compiled=False)
        heartbeat.beat("evaluate")
        time.sleep(0.2)
        assert not alarms, "an evaluation takes what it takes"
        heartbeat.beat("step")
        wait_until(lambda: alarms)
        time.sleep(0.1)
        assert len(alarms) == 1
        heartbeat.stepped(6, 0.01, compiled=False)
        wait_until(lambda: len(alarms) == 2)
    (step, text), (later, _) = alarms
    assert (step, later) == (5, 6)
    assert "median of the steps 0.01 s" in text
    assert "the program is in wait_until (" in text or "the program is in <lambda> (" in text


def test_a_checkpoint_that_hangs_is_an_alarm_and_an_evaluation_that_gets_on_is_none():
    alarms = []
    with Heartbeat(None, step=0, on_stall=lambda *alarm: alarms.append(alarm), stall_min_s=0.1, **QUICK) as heartbeat:
        for step in (1, 2, 3):
            heartbeat.stepped(step, 0.01, compiled=False)
        heartbeat.beat("evaluate")
        for _ in range(30):
            heartbeat.pulse()
            time.sleep(0.04)
        assert not alarms
        heartbeat.beat("checkpoint")
        wait_until(lambda: alarms)
    assert alarms[0][1].startswith("no end of the phase 'checkpoint' for 1 s")


def test_a_slow_step_within_the_limits_is_no_stall():
    alarms = []
    with Heartbeat(None, step=0, on_stall=lambda *alarm: alarms.append(alarm), stall_min_s=0.0, **QUICK) as heartbeat:
        for step in range(1, 6):
            heartbeat.stepped(step, 1.0, compiled=False)  # three times a second is far off
        time.sleep(0.15)
    assert alarms == []
