"""Many processes: one mesh, the losses of one process, and an end with a message when one of them is lost."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from jobs import PATIENCE, ROOT, TINY, Job, environment, losses
from tiny_run import write_text

from train import distributed
from train.watchdog import LOST, Judge, Sign

QUICK = ["--distributed.heartbeat-timeout", 6 * PATIENCE, "--distributed.start-timeout", 60 * PATIENCE]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("distributed") / "text")


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """Run directory of the same run in one process, on one mesh of 4 devices."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run_one(text, run_dir)
    return run_dir


def run_one(text, run_dir, *more):
    command = [
        sys.executable,
        "-m",
        "train",
        "run",
        TINY,
        "--platform",
        "cpu",
        "--data.path",
        text,
        "--run-dir",
        run_dir,
    ]
    command += ["--mesh.data", 2, *more]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done


def job(text, run_dir, *more, num_processes=2, **keywords):
    return Job(
        TINY,
        "--data.path",
        text,
        "--mesh.data",
        2,
        *QUICK,
        *more,
        num_processes=num_processes,
        run_dir=run_dir,
        **keywords,
    )


def assert_same_run(run_dir, alone):
    np.testing.assert_allclose(np.array(losses(run_dir)), np.array(losses(alone)), rtol=1e-5)
    got, want = (json.loads((place / "summary.json").read_text()) for place in (run_dir, alone))
    assert got["held_out_loss"] == pytest.approx(want["held_out_loss"], rel=1e-5)


def test_two_processes_train_as_one_does_and_one_alone_goes_on(text, tmp_path, alone):
    run_dir = tmp_path / "run"
    with job(text, run_dir) as two:
        two.wait_for_step(3, timeout=100)
        two.processes[1].send_signal(signal.SIGTERM)  # one gets the signal, both leave after the same step
        assert two.wait(timeout=60) == [143, 143], two.output()
        assert "stopped after step" in two.output(0)
        assert "step 1/6" not in two.output(1), "process 0 alone writes"
    done = run_one(text, run_dir, "--resume")
    assert "continuing after step" in done.stdout
    assert_same_run(run_dir, alone)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_the_losses_do_not_depend_on_the_number_of_processes(text, tmp_path, alone, num_processes):
    run_dir = tmp_path / "run"
    with job(text, run_dir, num_processes=num_processes) as many:
        assert many.wait(timeout=200) == [0] * num_processes, many.output()
    assert_same_run(run_dir, alone)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["4", "6"]
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(text, tmp_path, alone):
    run_dir = tmp_path / "run"
    run_one(text, run_dir, "--num-steps", 2, "--optimizer.warmup-steps", 2)
    (run_dir / "summary.json").unlink()
    steps = [4, 6]
    for num_processes, last in zip((4, 2), steps, strict=True):
        with job(text, run_dir, "--num-steps", last, "--resume", num_processes=num_processes) as many:
            assert many.wait(timeout=200) == [0] * num_processes, many.output()
    assert [step for step, _ in losses(run_dir)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_process_ends_the_job_and_a_restart_goes_on(text, tmp_path, alone, victim):
    run_dir = tmp_path / "run"
    others = [process for process in range(4) if process != victim]
    with job(text, run_dir, "--num-steps", 10**6, num_processes=4) as four:
        four.wait_for_step(5, timeout=150)
        four.processes[victim].kill()
        codes = four.wait(*others, timeout=30)
        for process, code in zip(others, codes, strict=True):
            if victim == 0 and code == -signal.SIGABRT:  # JAX's client was faster than the watchdog
                assert "This most likely indicates that another task died" in four.output(process)
            else:
                assert code == LOST, four.output()
                assert f"process {victim}" in four.output(process).split("error:")[-1]
    with job(text, run_dir, "--num-steps", 12, "--resume", num_processes=4) as again:
        assert again.wait(timeout=200) == [0] * 4, again.output()
    assert [step for step, _ in losses(run_dir)][-1] >= 12


LATE = """
import sys, time
sys.path.insert(0, {tests!r})
from tiny_run import config
if sys.argv[sys.argv.index("--process-id") + 1] == "0":
    from train import loop
    plain = loop.restore
    loop.restore = lambda *arguments: (time.sleep(20), plain(*arguments))[1]
"""


@pytest.mark.slow
def test_a_process_that_comes_late_to_a_resume_is_waited_for(text, tmp_path, alone):
    run_dir = tmp_path / "run"
    run_one(text, run_dir, "--num-steps", 4)
    (run_dir / "summary.json").unlink()
    (tmp_path / "late.py").write_text(LATE.format(tests=str(ROOT / "tests")))
    arguments = [tmp_path / "late.py", "--data.path", text, "--mesh.data", 2, *QUICK, "--resume"]
    with Job(*arguments, num_processes=2, run_dir=run_dir) as two:
        assert two.wait(timeout=240) == [0, 0], two.output()
    assert [step for step, _ in losses(run_dir)] == [1, 2, 3, 4, 5, 6]


LAGGING = """
import sys
sys.path.insert(0, {tests!r})
from tiny_run import config
if sys.argv[sys.argv.index("--process-id") + 1] == "1":
    from train.checkpoint import CheckpointStore
    CheckpointStore._steps = lambda self: []
"""


@pytest.mark.slow
def test_the_first_process_says_which_checkpoint_it_is(text, tmp_path, alone):
    run_dir = tmp_path / "run"
    run_one(text, run_dir, "--num-steps", 4)
    (tmp_path / "lagging.py").write_text(LAGGING.format(tests=str(ROOT / "tests")))
    arguments = [tmp_path / "lagging.py", "--data.path", text, "--mesh.data", 2, *QUICK, "--resume"]
    with Job(*arguments, num_processes=2, run_dir=run_dir) as two:
        assert two.wait(timeout=240) == [0, 0], two.output()
        assert "continuing after step 4" in two.output(0)
    assert [step for step, _ in losses(run_dir)] == [1, 2, 3, 4, 5, 6]


BLIND = """
import sys
sys.path.insert(0, {tests!r})
from tiny_run import config
if sys.argv[sys.argv.index("--process-id") + 1] == "1":
    from train import distributed
    distributed.wait_for = lambda path: False
"""


@pytest.mark.slow
def test_a_run_directory_that_a_process_does_not_share_is_refused(text, tmp_path):
    (tmp_path / "blind.py").write_text(BLIND.format(tests=str(ROOT / "tests")))
    with Job(
        tmp_path / "blind.py", "--data.path", text, "--mesh.data", 2, *QUICK, num_processes=2, run_dir=tmp_path / "run"
    ) as two:
        assert two.wait(timeout=120) == [2, 2], two.output()
    assert "process 1 cannot see what process 0 writes there" in two.output(0)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_process_ends_the_job(text, tmp_path, victim):
    run_dir = tmp_path / "run"
    with job(text, run_dir, "--num-steps", 10**6) as two:
        two.wait_for_step(3, timeout=100)
        two.processes[victim].send_signal(signal.SIGSTOP)
        assert two.wait(1 - victim, timeout=30) == [LOST], two.output()
        last = two.output(1 - victim).split("error:")[-1]
        assert f"process {victim}" in last
        assert "--resume" in last
        two.processes[victim].send_signal(signal.SIGCONT)  # awake again, it finds itself alone
        assert two.wait(victim, timeout=30) != [0]


SIGNALLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from tiny_run import config
if sys.argv[sys.argv.index("--process-id") + 1] == "1":
    from train import run_steps
    plain = run_steps.Steps._score
    def score(self, *others):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *others)
    run_steps.Steps._score = score
"""


@pytest.mark.slow
def test_a_signal_to_one_process_ends_the_last_evaluation_of_all(text, tmp_path, alone):
    run_dir = tmp_path / "run"
    (tmp_path / "signalled.py").write_text(SIGNALLED.format(tests=str(ROOT / "tests")))
    arguments = [tmp_path / "signalled.py", "--data.path", text, "--mesh.data", 2, *QUICK]
    with Job(*arguments, num_processes=2, run_dir=run_dir) as two:
        assert two.wait(timeout=200) == [143, 143], two.output()
        assert "stopped after step 6 of 6, saved in" in two.output(0)
    run_one(text, run_dir, "--resume")
    assert_same_run(run_dir, alone)


@pytest.mark.slow
def test_a_process_that_does_not_come_is_no_typing_error(text, tmp_path):
    with job(text, tmp_path / "run", "--distributed.start-timeout", 2, num_processes=1, of=2) as one:
        assert one.wait(timeout=60) == [LOST], one.output()
        assert "All processes must start within --distributed.start-timeout 2 s of each other" in one.output()


PATCHED = """
import os, sys, time
sys.path.insert(0, {tests!r})
from tiny_run import config
if "{victim}" in ("all", sys.argv[sys.argv.index("--process-id") + 1]):
    from train import run_steps
    class Short:
        def __init__(self, data):
            self.data, self.rows = data, data.rows
        def __next__(self):
            return {{name: array[:, :32] for name, array in next(self.data).items()}}
        def get_state(self):
            return self.data.get_state()
    plain, calls = run_steps._next_batch, []
    def patched(watch, data, *others):
        calls.append(1)
        if len(calls) == 4:
            {action}
        if len(calls) == 20:
            {later}
        return plain(watch, data, *others)
    run_steps._next_batch = patched
"""


def patched_job(tmp_path, text, *more, victim, action, later="pass", num_processes=2):
    """A job in which one process does something before it takes its fourth batch, and its twentieth."""
    path = tmp_path / "patched.py"
    path.write_text(PATCHED.format(tests=str(ROOT / "tests"), victim=victim, action=action, later=later))
    arguments = [path, "--data.path", text, "--mesh.data", 2, *QUICK, *more]
    return Job(*arguments, num_processes=num_processes, run_dir=tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_stalls_is_named(text, tmp_path, victim):
    more = ["--distributed.stall-timeout", 30 * PATIENCE]
    with patched_job(tmp_path, text, *more, victim=victim, action="data = (time.sleep(1000) for _ in [1])") as two:
        assert two.wait(timeout=120) == [LOST] * 2, two.output()
        for process in range(2):
            last = two.output(process).split("error:")[-1]
            assert re.search(r"no process got anywhere for \d+ s", last)
            assert re.search(rf"process {victim} in step 3, next batch", last), last


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_its_message(text, tmp_path):
    with patched_job(tmp_path, text, victim=1, action="raise OSError('the disk of host b is gone')") as two:
        assert two.wait(timeout=120) == [1, 1], two.output()
        for process in range(2):
            assert "OSError: the disk of host b is gone" in two.output(process).split("error:")[-1]
        assert "process 1 on" in two.output(0)
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir(), "all processes save the step that ran"


@pytest.mark.slow
def test_batches_of_another_shape_are_refused(text, tmp_path):
    action = "data = Short(data)"
    with patched_job(tmp_path, text, victim=1, action=action) as two:
        assert two.wait(timeout=120) == [1, 1], two.output()
        assert "must stay those of the first batch" in two.output(0)


@pytest.mark.slow
def test_processes_that_were_started_with_other_flags_are_named(text, tmp_path):
    with job(text, tmp_path / "run", each={1: ["--seed", 5]}) as two:
        assert two.wait(timeout=120) == [2, 2], two.output()
        for process in range(2):
            assert "seed: 5 here, 0 in process 0" in two.output(process)
            assert re.search(r"configuration of process 1 on \S+ must be that of process 0", two.output(process))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1", "all"])
def test_a_store_that_fails_for_some_time_costs_checkpoints_and_not_the_job(text, tmp_path, victim):
    more = ["--num-steps", 30, "--checkpoint.every", 2, "--distributed.stall-timeout", 60 * PATIENCE]
    disk = {"action": LIMIT.format(12_000), "later": LIMIT.format("resource.RLIM_INFINITY")}
    with patched_job(tmp_path, text, *more, victim=victim, **disk) as two:
        assert two.wait(timeout=240) == [0, 0], two.output()
    failed = re.findall(r"checkpoint of step (\d+) not written: process (\d): (.*)", two.output(0))
    assert {int(step) for step, _, _ in failed} >= {6, 8, 10, 12, 14, 16}, two.output()
    assert {process for _, process, _ in failed} <= ({"0", "1"} if victim == "all" else {victim})
    assert all("File too large" in reason for _, _, reason in failed), failed
    folders = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {"28", "30"} <= folders
    assert not [name for name in folders if "tmp" in name], "what failed saves left is cleared up"


class CountingWatchdog:
    moves = 0

    def at(self, phase, step):
        self.moves += 1


def test_a_long_read_gets_somewhere_as_long_as_bytes_move(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed._job, "watchdog", watchdog := CountingWatchdog())
    monkeypatch.setattr(distributed, "_LOOKS_EVERY_S", 0.02)
    with distributed.reading("text", 0):
        time.sleep(0.3)
        assert watchdog.moves == 1, "nothing is read: a stall"
        deadline = time.monotonic() + 20
        while watchdog.moves < 4 and time.monotonic() < deadline:
            (tmp_path / "file").write_bytes(bytes(2**20))
    assert watchdog.moves >= 4


def sign(**changes):
    return json.dumps(dataclasses.asdict(Sign(host="b", **changes)))


def test_who_is_silent_is_lost():
    judge = Judge(2, silence=10, stall=100, now=0.0)
    assert judge.verdict({0: sign(moves=1), 1: sign(step=7, phase="train step")}, 5.0) is None
    assert judge.verdict({0: sign(moves=2), 1: sign(step=7, phase="train step")}, 14.0) is None
    message, code = judge.verdict({0: sign(moves=3), 1: sign(step=7, phase="train step")}, 15.5)
    assert message.startswith("process 1 on b (last seen in step 7, train step) gave no sign of life for 10 s")
    assert code == LOST


def test_who_is_done_may_be_silent_and_who_never_came_is_lost():
    judge = Judge(2, silence=10, stall=100, now=0.0)
    assert judge.verdict({0: sign(moves=1), 1: sign(done=True)}, 1.0) is None
    assert judge.verdict({0: sign(moves=1), 1: sign(done=True)}, 90.0)[0].startswith("process 0")
    judge = Judge(2, silence=10, stall=100, now=0.0)
    assert judge.verdict({0: sign()}, 10.5)[0].startswith("process 1 gave no sign of life")


def test_a_stall_names_the_one_that_is_elsewhere():
    judge = Judge(3, silence=10, stall=20, now=0.0)
    for second in range(20):
        signs = {
            process: json.dumps({**json.loads(sign(step=3, phase="train step")), "beat": second}) for process in (0, 2)
        }
        signs[1] = json.dumps({**json.loads(sign(step=3, phase="next batch")), "beat": second})
        assert judge.verdict(signs, float(second)) is None
    for second in (20, 21):
        signs = {process: text.replace('"beat": 19', f'"beat": {second}') for process, text in signs.items()}
        found = judge.verdict(signs, float(second))
    assert found == (
        "no process got anywhere for 21 s: process 1 in step 3, next batch; processes 0, 2 in step 3, train step",
        LOST,
    )
