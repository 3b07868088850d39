"""`--profile 10:13`: which ranges are refused, and that the trace holds whole steps and the model's named scopes."""

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import pytest
from disks import full_disk
from tiny_run import config

from train import cli
from train.checks import validate
from train.config import WatchConfig
from train.profiling import Profiler, parse_steps, problems
from train.unwritten import Unwritten


@pytest.mark.parametrize(
    ("text", "rule", "fix"),
    [
        ("10", "must be FIRST:LAST", "--profile 10:13"),
        ("10-13", "must be FIRST:LAST", "--profile 10:13"),
        ("a:b", "must be FIRST:LAST", "--profile 10:13"),
        ("1:2:3", "must be FIRST:LAST", "--profile 10:13"),
        ("", "must be FIRST:LAST", "--profile 10:13"),
        ("-1:3", "must be FIRST:LAST", "--profile 10:13"),
        ("13:10", "1 <= FIRST <= LAST", "--profile 10:13"),
        ("0:3", "1 <= FIRST <= LAST", "--profile 1:3"),
        ("5:7", "within the num_steps=6", "--profile 5:6"),
        ("9:12", "within the num_steps=6", "--profile 6:6"),
    ],
)
def test_a_range_that_is_none_is_refused(text, rule, fix):
    (problem,) = problems(text, 6)
    assert f"profile={text!r}" in problem
    assert rule in problem
    assert problem.endswith(fix)
    with pytest.raises(ValueError, match="1 problem in the configuration"):
        validate(config(watch=WatchConfig(profile=text)), 2)


def test_ranges():
    assert list(parse_steps("3:3")) == [3]
    assert list(parse_steps("10:13")) == [10, 11, 12, 13]
    assert problems(None, 6) == problems("6:6", 6) == []


def test_the_flags_have_no_prefix():
    tiny = "tests/tiny_run.py"
    read = cli._read_config(tiny, ["--profile", "2:3", "--rollback", "--max-rollbacks", "5", "--spike-z", "6"])
    assert read.watch == WatchConfig(profile="2:3", rollback=True, max_rollbacks=5, spike_z=6.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spike_z": 0.0}, "watch.spike_z=0.0 must be greater than 0 and finite; for example --spike-z 8"),
        (
            {"spike_z": float("inf")},
            "watch.spike_z=inf must be greater than 0 and finite; for example --spike-z 8 (1e9",
        ),
        (
            {"stall_factor": 1.0},
            "watch.stall_factor=1.0 must be greater than 1 and finite; for example --stall-factor 20",
        ),
        ({"max_rollbacks": 0}, "watch.max_rollbacks=0 must be at least 1; for example --max-rollbacks 1"),
        (
            {"max_skipped_in_a_row": 0},
            "max_skipped_in_a_row=0 must be at least 1; for example --max-skipped-in-a-row 1",
        ),
    ],
)
def test_numbers_of_the_watch_are_checked(changes, message):
    broken = config(watch=dataclasses.replace(WatchConfig(), **changes))
    with pytest.raises(ValueError, match="1 problem") as caught:
        validate(broken, 2)
    assert message in str(caught.value)


def test_the_trace_holds_its_steps_and_scopes(tmp_path):
    @jax.jit
    def step(x):
        with jax.named_scope("a_named_scope"):
            return jnp.tanh(x @ x)

    x = jnp.eye(8)
    step(x)
    with Profiler(tmp_path, "2:3") as profiler:
        for number in (1, 2, 3, 4, 2, 3):  # the last ones come again, after a rollback
            profiler.before(number)
            with jax.profiler.TraceAnnotation("a_phase"):
                x = step(x).block_until_ready()
            profiler.after(number)
    (trace,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    numbers = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    assert sorted(numbers) == ["2", "3"]
    assert sum(event.get("name") == "a_phase" for event in events) == 2
    (profile,) = tmp_path.rglob("*.xplane.pb")
    assert b"a_named_scope" in profile.read_bytes()


def test_a_run_that_ends_early_still_writes_its_trace(tmp_path):
    with pytest.raises(ZeroDivisionError), Profiler(tmp_path, "1:9") as profiler:
        profiler.before(1)
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*.xplane.pb"))
    with Profiler(tmp_path / "none", None) as profiler:
        profiler.before(1)
        profiler.after(1)
    assert not (tmp_path / "none").exists()


def test_a_trace_on_a_full_disk_is_counted_and_ends_nothing(tmp_path):
    unwritten = Unwritten()
    with full_disk(10), Profiler(tmp_path, "1:1", unwritten=unwritten) as profiler:
        profiler.before(1)
        profiler.after(1)
    assert unwritten.counts == {"profile": 1}
