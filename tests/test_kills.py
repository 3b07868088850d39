"""SIGKILL at any moment, inside a save too: what a resumed run writes is to the bit what an unbroken one writes."""

import json
import pathlib
import random
import subprocess
import sys
import time

import pytest
from jobs import PATIENCE, ROOT, TINY, environment, losses
from tiny_run import write_text

NUM_STEPS = 30
WAIT = 240 * PATIENCE  # seconds for what takes 10 on an idle machine


def command(text, run_dir, *more):
    flags = ["--data.path", text, "--num-steps", NUM_STEPS, "--checkpoint.every", 1, "--eval-every", 7]
    words = [sys.executable, "-m", "train", "run", TINY, *flags, "--platform", "cpu", "--run-dir", run_dir, *more]
    return list(map(str, words))


def finish(text, run_dir, *more):
    done = subprocess.run(
        command(text, run_dir, *more), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stderr
    return json.loads((run_dir / "summary.json").read_text())["held_out_loss"]


def is_saving(run_dir):
    return any((run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def newest(run_dir):
    """Step of the newest complete checkpoint."""
    folder = run_dir / "checkpoints"
    return (
        max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0) if folder.exists() else 0
    )


def kill(text, run_dir, *more, delay, inside_a_save):
    """Start the run, let it make a checkpoint, and kill it after `delay` seconds more; whether a save was cut."""
    with subprocess.Popen(
        command(text, run_dir, *more), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        first, deadline = newest(run_dir), time.monotonic() + WAIT
        while newest(run_dir) <= first and process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                pytest.fail(f"no checkpoint after {WAIT} s")
            time.sleep(0.002)
        time.sleep(delay)
        while inside_a_save and process.poll() is None and not is_saving(run_dir):
            pass
        process.kill()
    return is_saving(run_dir)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    text = write_text(folder / "text")
    return text, losses_and_score(text, folder / "unbroken")


def losses_and_score(text, run_dir, *more):
    return finish(text, run_dir, *more), losses(run_dir)


def kill_and_compare(unbroken, folder, moments):
    text, expected = unbroken
    cut, more = 0, []
    for index, delay in enumerate(moments):
        run_dir = folder / "run"
        cut += kill(text, run_dir, *more, delay=delay, inside_a_save=index % 2 == 0)
        more = ["--resume"]
        if index % 4 == 3 or index == len(moments) - 1:  # a run is killed up to four times before it may end
            assert losses_and_score(text, run_dir, "--resume") == expected
            run_dir.rename(pathlib.Path(f"{run_dir}.{index}"))
            more = []
    return cut


def test_two_kills_one_of_them_inside_a_save(unbroken, tmp_path):
    assert kill_and_compare(unbroken, tmp_path, [0.02, 0.15]) >= 1


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_is_started_again_by_the_same_command(unbroken, tmp_path):
    text, expected = unbroken
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for moment in ("config.json", "checkpoints/*.orbax-checkpoint-tmp*"):
        with subprocess.Popen(
            command(text, run_dir, "--resume", "--checkpoint.every", 20), cwd=ROOT, env=environment(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            deadline = time.monotonic() + WAIT
            while not any(run_dir.glob(moment)) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.0005)
            process.kill()
        assert any(run_dir.glob(moment))
        assert newest(run_dir) == 0
    assert losses_and_score(text, run_dir, "--resume") == expected


SEED, KILLS, GROUP = 7, 20, 4
CHOOSER = random.Random(SEED)
MOMENTS = [CHOOSER.uniform(0, 0.6) for _ in range(KILLS)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, KILLS, GROUP))
def test_twenty_kills_at_random_moments(unbroken, tmp_path, first, record_property):
    cut = kill_and_compare(unbroken, tmp_path, MOMENTS[first : first + GROUP])
    record_property("shown", f"kills {first + 1} to {first + GROUP} of {KILLS}, seed {SEED}: {cut} inside a save")
    assert cut >= 1
