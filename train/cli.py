"""The command line: `python -m train run CONFIG [--a.b value]`.

CONFIG is a Python file with a function `config() -> TrainConfig`; every field of it can be overridden. Whatever is
wrong with what was typed gives one message on stderr and exit code 2, before any device work.
"""

import dataclasses
import os
import pathlib
import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import tyro
from rich.console import Console

from models.fields import wrong_types
from train import distributed, platform
from train.checks import validate
from train.cluster import find_cluster
from train.config import DataConfig, TrainConfig, nearest
from train.errors import DataError, RunDirError, SaveError, TryAgainError
from train.unwritten import standard_output
from train.watchdog import LOST

COMMANDS = (
    "run", "prepare", "tokenizer", "plan", "rehearse", "generate", "score", "evaluate", "import-hf", "export-hf"
)  # fmt: skip
BUILT = ("run", "prepare", "tokenizer", "plan", "rehearse")
_PROGRAM = "python -m train"
_USAGE = f"usage: {_PROGRAM} run CONFIG [--a.b value]; for example: {_PROGRAM} run configs/quickstart.py --num-steps 20"
_HELP = f"""{_USAGE}

  run CONFIG                                        train
  prepare CONFIG                                    read and tokenise the data of a run, before it
  tokenizer [CONFIG] --vocab-size N --out FILE      make a tokenizer.json from the training documents
  plan CONFIG --topology v5p:4x4x8                  the fastest mesh and strategy for a machine, by closed forms
  rehearse CONFIG --topology v5p:4x4x8              compile the train step for a machine that is not here

{_PROGRAM} COMMAND CONFIG --help lists every field of the configuration."""


FAILURES = (FloatingPointError, SaveError, DataError)
"""What ends a run that was asked for rightly: said in one message, exit code 1."""


class UsageError(Exception):
    """What was typed cannot be done; the message says why and what can."""


def main(argv: Sequence[str]) -> int:
    """Run one command.

    Returns:
      The exit code. 0: done. 1: too many steps in a row were skipped because the loss was not finite, a batch could not
      be read, or the last checkpoint or the summary could not be written. 2: something that was typed is wrong. 3: of a
      plan, nothing fits; of a rehearsal, the step does not fit. 4: of a rehearsal, a hop of the ring is exposed. 75:
      another process of the job was lost or came too late, or the run directory or a checkpoint cannot be read: the
      same command helps. 130, 143: ended early by SIGINT or SIGTERM, with a checkpoint.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    try:
        if argv and argv[0] == "tokenizer":
            return _make_tokenizer(argv[1:])
        path, overrides = _split(argv)
        if argv[0] == "plan":
            return _plan(path, overrides)
        if argv[0] == "rehearse":
            return _rehearse(path, overrides)
        config = _read_config(path, overrides, command=argv[0])
        if argv[0] == "prepare":
            return _prepare(config)
        return _run(config, resume_command=_resume_command(argv))
    except (UsageError, distributed.JoinError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TryAgainError as error:
        print(f"error: {error}", file=sys.stderr)
        return LOST
    except FAILURES as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first step; nothing was saved", file=sys.stderr)
        return 130


def _exit_code(error: BaseException) -> int:
    """Exit code of a process of a larger job that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, TryAgainError):
        return LOST
    return 2 if isinstance(error, (UsageError, distributed.JoinError)) else 1


def _split(argv: Sequence[str]) -> tuple[str, list[str]]:
    """(path of the configuration, overrides) of a `run` command."""
    if not argv:
        raise UsageError(f"no command; {_USAGE}")
    command, *rest = argv
    if command not in COMMANDS:
        raise UsageError(f"unknown command {command!r}{nearest(command, COMMANDS)}; {_USAGE}")
    if command not in BUILT:
        raise UsageError(f"the command {command!r} is not built yet; what is built: {', '.join(BUILT)}. {_USAGE}")
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"{command} needs a configuration file before its options; {_USAGE}")
    return rest[0], rest[1:]


def _read_config(path: str, overrides: list[str], *, command: str = "run") -> TrainConfig:
    """The configuration that the file's `config()` returns, with the overrides of the command line."""
    return tyro.cli(TrainConfig, default=_read_file(path), args=overrides, prog=f"{_PROGRAM} {command} {path}")


def _read_file(path: str) -> TrainConfig:
    """The configuration that the file's `config()` returns, with a run directory."""
    file = pathlib.Path(path)
    if not file.is_file():
        known = sorted(str(other) for other in pathlib.Path("configs").glob("*.py"))
        raise UsageError(
            f"{path!r} must be a configuration file, and no such file exists{nearest(path, known)}; "
            f"those in configs/: {', '.join(known) or 'none'}"
        )
    try:
        names = runpy.run_path(path)
        function = names.get("config")
        default = function() if callable(function) else None
    except Exception as error:  # it is the user's program
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"{path} fails: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from None
    if not isinstance(default, TrainConfig):
        found = f"its config() returns {type(default).__name__}" if callable(function) else "it has none"
        raise UsageError(f"{path} must define config() -> TrainConfig, but {found}; see configs/quickstart.py")
    if wrong_types(default):
        _check(default, None)  # tyro would guess
    if default.run_dir is None:
        default = dataclasses.replace(default, run_dir=f"runs/{file.stem}")
    return default


def _prepare(config: TrainConfig) -> int:
    """Tokenise the data of a run into its cache, without any device."""
    _check(config, None)
    from train.data import load_corpus

    try:
        corpus = load_corpus(config.data, say=_say)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(corpus.summary(config.data.seq_len))
    if not corpus.is_cached:
        print("text files as bytes stay in memory: nothing was written; --data.cache FOLDER makes a cache all the same")
    return 0


def _plan(path: str, overrides: list[str]) -> int:
    """Search for the fastest way to train on a machine, without any device."""
    from train import planning

    arguments = tyro.cli(
        planning.Arguments,
        default=planning.Arguments(config=_read_file(path), topology=tyro.MISSING),
        args=overrides,
        prog=f"{_PROGRAM} plan {path}",
    )
    try:
        return planning.command(arguments, _say)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _rehearse(path: str, overrides: list[str]) -> int:
    """Compile the train step for a machine that is not here."""
    default = _read_file(path)
    from ring_jax.pods import MissingCompilerError
    from train import rehearse

    arguments = tyro.cli(
        rehearse.Arguments,
        default=rehearse.Arguments(config=default, topology=tyro.MISSING),
        args=overrides,
        prog=f"{_PROGRAM} rehearse {path}",
    )
    try:
        return rehearse.command(arguments, _say)
    except (ValueError, MissingCompilerError) as error:
        raise UsageError(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TokenizerArguments:
    """Make a byte-level BPE tokenizer.json from the training documents."""

    data: DataConfig
    """What text it is made from."""
    vocab_size: int
    """Tokens in it."""
    out: str
    """The file to write."""


def _make_tokenizer(words: Sequence[str]) -> int:
    """Write a tokenizer made from the documents that a configuration, or the options alone, would train on."""
    named = bool(words) and not words[0].startswith("-")
    data = _read_file(words[0]).data if named else DataConfig()
    arguments = tyro.cli(
        _TokenizerArguments,
        default=_TokenizerArguments(data=data, vocab_size=tyro.MISSING, out=tyro.MISSING),
        args=words[1:] if named else words,
        prog=f"{_PROGRAM} tokenizer",
    )
    from train.data import documents_to_tokenise
    from train.tokenizer import train_tokenizer

    out = pathlib.Path(arguments.out).expanduser()
    try:
        texts = documents_to_tokenise(arguments.data, say=_say)
        size = train_tokenizer(texts, vocab_size=arguments.vocab_size, out=out)
    except ValueError as error:
        raise UsageError(str(error)) from None
    fewer = "" if size == arguments.vocab_size else f" (not {arguments.vocab_size:,}: the text has no more pairs)"
    print(f"wrote {out} with {size:,} tokens{fewer}; use --data.tokenizer {out} --model.vocab-size {size}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _run(config: TrainConfig, *, resume_command: str) -> int:
    """Check everything, then train."""
    # What needs no device comes first, so nothing is started in vain.
    _check(config, None, environment=os.environ)
    cluster = find_cluster(config.distributed, os.environ)
    with distributed.joined(cluster, config.distributed, platform=config.platform, exit_code=_exit_code):
        return _run_process(config, resume_command=resume_command)


def _run_process(config: TrainConfig, *, resume_command: str) -> int:
    """The part of the run that is this process's."""
    devices = platform.prepare(config.mesh.num_devices, config.platform, num_processes=distributed.num_processes())
    _check_slice(devices.kind)
    _check(config, devices.count, device_kind=devices.kind)
    try:
        platform.check_remat(config.model.remat)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if devices.simulated and distributed.is_main():
        print(f"simulating {devices.count} devices on this host's CPU (mesh {config.mesh})", flush=True)

    from train import checkpoint, loop  # orbax, grain and matplotlib: seconds, which a typing error need not cost

    try:
        run = loop.prepare(config, resume_command=resume_command)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        quiet = not distributed.is_main()
        plain = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
        return loop.train(run, Console(file=standard_output(), quiet=quiet, **plain))
    except (checkpoint.CheckpointError, RunDirError) as error:
        raise UsageError(str(error)) from None


def _check_slice(device_kind: str) -> None:
    """JAX on a host of a slice sees the others, though nobody joined them to a job; all would write as the first."""
    if device_kind == "cpu" or jax.process_count() == distributed.num_processes():
        return
    raise UsageError(
        f"JAX finds {jax.process_count()} processes behind the devices ({device_kind}), but this job has "
        f"{distributed.num_processes()}; add --distributed.cluster jax, or name the processes with "
        "--coordinator-address, --num-processes and --process-id"
    )


def _check(config: TrainConfig, num_devices: int | None, **known: Any) -> None:
    try:
        validate(config, num_devices, **known)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _resume_command(argv: Sequence[str]) -> str:
    """What was typed, with --resume."""
    return shlex.join(["python", "-m", "train", *(word for word in argv if word != "--resume"), "--resume"])
