"""Alarms: spikes, not noise; one for each excursion; on disk at once."""

import json
import math

import numpy as np
import pytest

from train.alarms import AlarmLog, SpikeAlarm, read_alarms


def noisy(num, seed=0):
    """A loss that falls, with noise, as of a run."""
    generator = np.random.default_rng(seed)
    return 6 * np.exp(-np.arange(num) / 400) + 2 + generator.normal(0, 0.08, num)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_a_falling_loss_are_no_spike(seed):
    alarm = SpikeAlarm(8.0)
    assert [step for step, loss in enumerate(noisy(2000, seed)) if alarm.add(step, loss)] == []


def test_a_spike_is_one_alarm_and_a_second_one_another():
    losses = noisy(300)
    losses[100:104] += 3
    losses[200] += 3
    alarm = SpikeAlarm(8.0)
    scores = {step: score for step, loss in enumerate(losses) if (score := alarm.add(step, loss))}
    assert list(scores) == [100, 200]
    assert all(8 < score < 100 for score in scores.values())


def test_a_flat_loss_needs_more_than_a_ripple():
    alarm = SpikeAlarm(8.0)
    losses = [2.0] * 30 + [2.1] + [2.0] * 5 + [2.2]
    assert [step for step, loss in enumerate(losses) if alarm.add(step, loss)] == [36], "8 % of the median, at least"


def test_little_history_and_values_not_finite_do_not_count():
    alarm = SpikeAlarm(8.0, min_history=4)
    assert [alarm.add(step, loss) for step, loss in enumerate((1.0, 50.0, 1.0))] == [None] * 3
    alarm = SpikeAlarm(8.0, min_history=4)
    for step, loss in enumerate((1.0, math.nan, 1.1, math.inf, 0.9, 1.0)):
        assert alarm.add(step, loss) is None
    assert alarm.add(6, 30.0)
    alarm.forget_after(3)
    assert alarm.score(30.0) == 0, "three losses are left"


def test_an_alarm_is_said_written_and_counted(tmp_path):
    said = []
    log = AlarmLog(tmp_path, say=said.append)
    assert not list(tmp_path.iterdir())
    log.raise_alarm("loss_spike", 7, "loss 9", loss=9.0)
    with (tmp_path / "alarms.jsonl").open("a") as file:
        file.write('{"kind": "sta')  # killed while it wrote
    assert said == ["alarm at step 7: loss 9"]
    (alarm,) = read_alarms(tmp_path)
    assert (alarm["kind"], alarm["step"], alarm["loss"]) == ("loss_spike", 7, 9.0)
    again = AlarmLog(tmp_path, say=said.append)
    assert again.counts() == {"loss_spike": 1, "not_finite": 0, "stall": 0, "rollback": 0}
    assert json.loads((tmp_path / "alarms.jsonl").read_text().splitlines()[0])["text"] == "loss 9"


def test_a_resumed_run_forgets_the_alarms_of_steps_that_run_again(tmp_path):
    log = AlarmLog(tmp_path, say=lambda _: None)
    for kind, step in (("loss_spike", 7), ("rollback", 7), ("loss_spike", 5), ("stall", 6), ("not_finite", 6)):
        log.raise_alarm(kind, step, "")
    AlarmLog(tmp_path, say=print, writes=False).forget_after(5)
    assert len(read_alarms(tmp_path)) == 5
    again = AlarmLog(tmp_path, say=print)
    again.forget_after(5)
    kept = [("loss_spike", 7), ("rollback", 7), ("loss_spike", 5), ("stall", 6)]
    assert [(alarm["kind"], alarm["step"]) for alarm in read_alarms(tmp_path)] == kept
    assert again.alarms == read_alarms(tmp_path)


def test_a_process_that_does_not_write_counts_only(tmp_path):
    said = []
    log = AlarmLog(tmp_path, say=said.append, writes=False)
    log.raise_alarm("stall", 3, "no step")
    assert (said, list(tmp_path.iterdir()), log.counts()["stall"]) == ([], [], 1)
    AlarmLog(tmp_path / "absent", say=said.append).raise_alarm("stall", 3, "no step")
    assert "cannot be written" in said[-1]
