"""The folder of a run: free or its own, writable, and written by one run at a time.

What always holds: two live runs never write into one folder, where the file system has locks (`flock`). Process 0
holds the lock of the file `lock` from before the first write to the end. The kernel gives it back when the process
dies, however that comes, so a run that was killed keeps no restart away; what the file says is for messages only. A
host that dies with a lock on a network file system keeps it until the server notices, which is waited for.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import time
import uuid
from collections.abc import Callable, Generator
from typing import IO, Any

from train.errors import RunDirError, TryAgainError

LOCK_FILE = "lock"
CONFIG_FILE = "config.json"
CHECKPOINT_FOLDER = "checkpoints"
NEWEST_FILE = "newest_checkpoint"
_OF_A_RUN = {CONFIG_FILE, CHECKPOINT_FOLDER, "metrics.jsonl"}
_PROBES = (".probe_", ".seen_by_all_")
_HERE_S = 3.0  # for a process of this machine that is on its way out
_LEASE_S = 120.0  # after which an NFS server has given up on a host that is gone (90 s by default)


def check_run_dir(run_dir: pathlib.Path, *, resume: bool, cache: str | None = None) -> None:
    """A new run needs a free directory; one that is continued needs its own, or an empty one.

    Args:
      run_dir: the directory.
      resume: whether the run is continued.
      cache: folder for tokenised documents, which may lie in the directory and is no part of a run.

    Raises:
      RunDirError: it is neither, or cannot be looked into.
    """
    try:
        exists, is_folder = os.path.lexists(run_dir), run_dir.is_dir()
        names = {path.name for path in run_dir.iterdir()} if is_folder else set()
        if cache is not None:
            names -= _names_of_cache(names, run_dir.resolve(), pathlib.Path(cache).expanduser().resolve())
    except OSError as error:
        raise RunDirError(_unusable(run_dir, error)) from error
    if exists and not is_folder:
        raise RunDirError(f"run_dir={str(run_dir)!r} is a file; name a folder with --run-dir")
    used = {name for name in names if name != LOCK_FILE and not name.startswith(_PROBES)}
    if used and not resume:
        raise RunDirError(
            f"run_dir={str(run_dir)!r} already holds a run; continue it with --resume, choose another --run-dir, "
            "or delete the folder"
        )
    if resume and not exists:
        raise RunDirError(
            f"--resume: run_dir={str(run_dir)!r} does not exist, so there is nothing to continue; correct --run-dir, "
            "or start without --resume (with it, a run may start at its first step in an empty folder)"
        )
    if used and not used & {CONFIG_FILE, CHECKPOINT_FOLDER}:
        raise RunDirError(
            f"--resume: run_dir={str(run_dir)!r} holds no checkpoints and no {CONFIG_FILE}, so there is nothing to "
            f"continue ({', '.join(sorted(used)[:3])} are not of a run); correct --run-dir"
        )


def _names_of_cache(names: set[str], run_dir: pathlib.Path, cache: pathlib.Path) -> set[str]:
    """Of the names in a run directory, those that lead to the cache of tokens."""
    if not cache.is_relative_to(run_dir):
        return set()
    inside = cache.relative_to(run_dir).parts
    return (set(inside[:1]) if inside else names) - _OF_A_RUN


def note_checkpoint(run_dir: pathlib.Path, step: int) -> None:
    """Write down that there is a checkpoint: when its folder is a disk that is not mounted, nothing else tells."""
    with contextlib.suppress(OSError):
        (run_dir / NEWEST_FILE).write_text(f"{step}\n")


def make_run_dir(run_dir: pathlib.Path) -> None:
    """Make the folder and write into it, before any work that would be lost.

    Raises:
      RunDirError: that is not possible.
    """
    probe = run_dir / f"{_PROBES[0]}{uuid.uuid4().hex}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise RunDirError(_unusable(run_dir, error)) from error


@contextlib.contextmanager
def sole_writer(run_dir: pathlib.Path, say: Callable[[str], object]) -> Generator[None]:
    """Be the only run that writes into the folder.

    Raises:
      RunDirError: a live process of this machine does.
      TryAgainError: one of another machine does, or that machine died a moment ago.
    """
    try:
        file = (run_dir / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunDirError(_unusable(run_dir, error)) from error
    with file:
        try:
            _wait_for(file, run_dir, say)
        except OSError as error:
            say(f"{run_dir} is on a file system without locks ({error}): a second run in it would not be noticed")
        else:
            with contextlib.suppress(OSError):  # no room; then the next one cannot name this process
                file.truncate(0)
                os.write(file.fileno(), json.dumps(_me()).encode())  # a buffer would be written again when it is closed
        yield


def _wait_for(file: IO[str], run_dir: pathlib.Path, say: Callable[[str], object]) -> None:
    started, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(file)
            is_here, who = holder.get("machine") == _machine(), f"{holder.get('pid', '?')} on {holder.get('host', '?')}"
            if time.monotonic() - started > (_HERE_S if is_here else _LEASE_S):
                message = (
                    f"run_dir={str(run_dir)!r} is written by another run, process {who}; wait for its end or stop it "
                    f"(kill {holder.get('pid', 'PID')}), or choose another --run-dir"
                )
                raise (RunDirError if is_here else TryAgainError)(message) from None
            if not is_here and not said:
                say(f"{run_dir} is locked by process {who}; waiting up to {_LEASE_S:.0f} s for its end")
                said = True
            time.sleep(0.2)
        else:
            return


def _me() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine()}


def _machine() -> str:
    """This machine since it was started. Not its name, which a new machine of a cluster takes over from a dead one."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _read(file: IO[str]) -> dict[str, Any]:
    """What the holder wrote; nothing where it could not."""
    try:
        file.seek(0)
        found = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _unusable(run_dir: pathlib.Path, error: OSError) -> str:
    return (
        f"run_dir={str(run_dir)!r} cannot be written ({error}); name a folder with --run-dir that can be made and "
        "written, or make room on its disk"
    )
