"""The command line: clear errors with exit code 2, and a run that survives SIGKILL."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from tiny_run import write_text

from train import cli
from train.errors import RunDirError, SaveError, TryAgainError

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = str(ROOT / "tests" / "tiny_run.py")


def refused(capsys, *argv):
    """What is printed about arguments that must be refused."""
    code = cli.main([str(word) for word in argv])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == "" or captured.out.startswith(("simulating", "tokens: making"))
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["no command", "python -m train run CONFIG"]),
        (["rnu", TINY], ["unknown command 'rnu'", "did you mean 'run'?"]),
        (["run"], ["run needs a configuration file"]),
        (["run", "--num-steps", "3"], ["run needs a configuration file"]),
        (["run", "configs/quickstrat.py"], ["no such file", "did you mean 'configs/quickstart.py'?"]),
        (["run", TINY, "--mesh.sequence", "3"], ["seq_len=64", "divisible by 6", "--data.seq-len 66"]),
        (
            ["run", TINY, "--layout", "zigzga", "--num-steps", "0"],
            ["2 problems", "did you mean 'zigzag'?", "num_steps=0"],
        ),
        (["run", TINY, "--data.path", "no/such/folder"], ["data.path='no/such/folder' does not exist"]),
        (["run", TINY, "--run-dir", "no/such/run", "--resume"], ["'no/such/run' does not exist", "without --resume"]),
        (["run", TINY, "--run-dir", "Makefile/run"], ["run_dir='Makefile/run' cannot be written", "--run-dir"]),
        (["run", TINY, "--run-dir", "tests"], ["run_dir='tests' already holds a run", "--resume", "another --run-dir"]),
        *(
            ([command, TINY], [f"the command '{command}' is not built yet"])
            for command in cli.COMMANDS
            if command not in cli.BUILT
        ),
    ],
    ids=lambda value: " ".join(value).replace(TINY, "TINY") if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_refused_with_one_clear_message(capsys, monkeypatch, argv, parts):
    monkeypatch.chdir(ROOT)
    message = refused(capsys, *argv)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("value = 1", "must define config() -> TrainConfig, but it has none"),
        ("def config():\n    return {}", "but its config() returns dict"),
        ("import no_such_module", "fails: ModuleNotFoundError"),
        ("def config():\n    return 1 / 0", "fails: ZeroDivisionError"),
        ("def config(:", "fails: SyntaxError"),
    ],
)
def test_a_configuration_file_that_is_none(capsys, tmp_path, source, part):
    (tmp_path / "mine.py").write_text(source)
    assert part in refused(capsys, "run", tmp_path / "mine.py")


@pytest.mark.parametrize("command", [["run"], ["prepare"], ["plan"], ["rehearse"]], ids=" ".join)
def test_values_of_other_types_in_a_configuration_file_are_listed(capsys, tmp_path, command):
    changes = "{'mesh': None, 'eval_every': None, 'num_steps': '6'}"
    (tmp_path / "mine.py").write_text(f"import tiny_run\n\ndef config():\n    return tiny_run.config(**{changes})")
    message = refused(capsys, *command, tmp_path / "mine.py")
    for part in ("3 problems", "mesh=None must be a MeshConfig", "eval_every=None must be an int", "write 6"):
        assert part in message


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--num-stpes", "3"], "--num-steps"),
        (["--mesh.sequense", "2"], "--mesh.sequence"),
        (["--num-steps", "many"], "--num-steps"),
        (["--platform", "tpu"], "'auto'"),
    ],
)
def test_a_wrong_flag_gets_a_suggestion(capsys, argv, part):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", TINY, *argv])
    assert caught.value.code == 2
    assert part in capsys.readouterr().err


def test_prepare_makes_the_cache_that_a_run_uses(capsys, tmp_path):
    """Also with several sources, which a configuration file names."""
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": f"line {i} " * 20}) + "\n" for i in range(30)))
    (tmp_path / "mine.py").write_text(
        "import dataclasses, runpy\n"
        "from train.config import DataConfig, SourceConfig\n"
        "def config():\n"
        f"    tiny = runpy.run_path({TINY!r})['config']()\n"
        f"    sources = (SourceConfig(path={write_text(tmp_path / 'text')!r}, weight=3),\n"
        f"               SourceConfig(path={str(tmp_path / 'b.jsonl')!r}, field='body'))\n"
        "    return dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, sources=sources))\n"
    )
    words = ["prepare", str(tmp_path / "mine.py"), "--data.cache", str(tmp_path / "cache")]
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    assert output.count("tokens: making") == 2
    for part in ("text (75.00% of the rows)", "b.jsonl (25.00% of the rows)", "% padding", "rows an epoch"):
        assert part in output
    assert cli.main([*words, "--data.sources.1.weight", "1.0"]) == 0
    output = capsys.readouterr().out
    assert output.count("made before") == 2 and "making" not in output
    assert "b.jsonl (25.00% of the rows)" in output
    assert cli.main(["prepare", TINY, "--data.path", str(tmp_path / "text")]) == 0
    assert "text files as bytes stay in memory: nothing was written" in capsys.readouterr().out
    assert "line 1: no field 'text'; its fields are 'body'" in refused(
        capsys, "prepare", TINY, "--data.path", tmp_path / "b.jsonl", "--data.cache", tmp_path / "cache"
    )


@pytest.mark.parametrize(
    ("kind", "processes", "refused"), [("TPU v5p", 4, True), ("TPU v5p", 1, False), ("cpu", 4, False)]
)
def test_one_host_of_a_slice_is_no_job_of_its_own(monkeypatch, kind, processes, refused):
    monkeypatch.setattr("jax.process_count", lambda: processes)
    expected = pytest.raises(cli.UsageError, match=r"finds 4 processes .*this job has 1; add --distributed")
    with expected if refused else contextlib.nullcontext():
        cli._check_slice(kind)


@pytest.mark.parametrize(
    ("error", "code"), [(TryAgainError("late"), 75), (SaveError("full"), 1), (RunDirError("used"), 2)]
)
def test_what_ends_a_run_is_one_message_with_its_code(capsys, monkeypatch, tmp_path, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("train.loop.train", fail)
    text = write_text(tmp_path / "text")
    words = [
        "run",
        TINY,
        "--data.path",
        text,
        "--run-dir",
        str(tmp_path / "run"),
        "--mesh.sequence",
        "2",
        "--platform",
        "cpu",
    ]
    assert cli.main(words) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    assert "python -m train run" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", TINY, "--help"])
    assert caught.value.code == 0
    assert "Tokens in a row" in capsys.readouterr().out


def test_the_run_directory_is_named_after_the_configuration_and_fields_can_be_overridden():
    read = cli._read_config(TINY, ["--mesh.sequence", "4", "--checkpoint.every", "7", "--resume"])
    assert (read.run_dir, read.mesh.sequence, read.checkpoint.every, read.resume) == ("runs/tiny_run", 4, 7, True)
    assert cli._read_config(TINY, ["--run-dir", "elsewhere"]).run_dir == "elsewhere"


def test_the_command_that_continues_a_run_keeps_what_was_typed():
    assert cli._resume_command(["run", "a b.py", "--seed", "3", "--resume"]) == (
        "python -m train run 'a b.py' --seed 3 --resume"
    )


def steps(run_dir):
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def test_a_run_killed_with_sigkill_continues_bit_for_bit(run_cli, tmp_path):
    text = write_text(tmp_path / "text")
    shape = ["--mesh.tensor", 2, "--mesh.pipeline", 2, "--num-microbatches", 2]
    common = ["run", TINY, "--data.path", text, "--num-steps", 8, "--platform", "cpu", *shape]
    unbroken = run_cli(*common, "--run-dir", tmp_path / "unbroken")
    assert unbroken.returncode == 0, unbroken.stderr
    assert unbroken.stdout.startswith("simulating 8 devices on this host's CPU")

    command = [sys.executable, "-m", "train", *map(str, [*common, "--run-dir", tmp_path / "killed"])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 200
        while len(steps(tmp_path / "killed")) < 5:
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "summary.json").exists()

    resumed = run_cli(*common, "--run-dir", tmp_path / "killed", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing after step" in resumed.stdout
    expected = [(row["step"], row["loss"]) for row in steps(tmp_path / "unbroken")]
    assert [(row["step"], row["loss"]) for row in steps(tmp_path / "killed")] == expected
    assert [step for step, _ in expected] == list(range(1, 9))


def test_a_refusal_of_the_real_program_is_one_message(run_cli):
    result = run_cli("run", TINY, "--mesh.tensor", 3, timeout=120)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: 5 problems in the configuration:")
