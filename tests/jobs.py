"""Jobs of several real processes on this machine, which form one mesh of CPU devices."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = str(ROOT / "tests" / "tiny_run.py")
PATIENCE = int(os.environ.get("TEST_PATIENCE", "1"))
"""What time limits of real processes are multiplied with: more than 1 on a machine that does other work."""


class Job:
    """`num_processes` runs of the same command; a context manager that leaves no process behind."""

    def __init__(
        self,
        *arguments: Any,
        num_processes: int,
        run_dir: pathlib.Path,
        each: dict[int, list[str]] = {},  # noqa: B006
        of: int | None = None,
    ):
        """Start them, `of` so many when some never come; `each` has more arguments for single processes."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        self.run_dir = run_dir
        common = [*arguments, "--platform", "cpu", "--run-dir", run_dir, "--coordinator-address", address]
        self.logs = [run_dir.parent / f"{run_dir.name}.{process}.log" for process in range(num_processes)]
        self.processes = []
        for process, log in enumerate(self.logs):
            own = ["--num-processes", of or num_processes, "--process-id", process, *each.get(process, [])]
            command = [sys.executable, "-m", "train", "run", *map(str, [*common, *own])]
            started = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
            )
            # Through a pipe: a test may forbid its processes to write to files.
            threading.Thread(target=_copy, args=(started.stdout, log), daemon=True).start()
            self.processes.append(started)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def wait(self, *members: int, timeout: float) -> list[int]:
        """Exit codes of these processes, all of them by default; fails when they have not ended in time."""
        deadline = time.monotonic() + PATIENCE * timeout
        chosen = members or range(len(self.processes))
        return [self.processes[process].wait(max(0.1, deadline - time.monotonic())) for process in chosen]

    def wait_for_step(self, step: int, *, timeout: float) -> None:
        """Return when the metrics have this step."""
        deadline = time.monotonic() + PATIENCE * timeout
        while len(rows(self.run_dir)) < step:
            assert all(process.poll() is None for process in self.processes), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def output(self, process: int | None = None) -> str:
        """What one process said, or all."""
        logs = self.logs if process is None else [self.logs[process]]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs if log.exists())


def _copy(source: Any, log: pathlib.Path) -> None:
    with log.open("wb", buffering=0) as output:
        while piece := source.read1(65536):
            output.write(piece)
    source.close()


def environment() -> dict[str, str]:
    """A step that donates its state may not come from the cache of compiled programs, see `test_step`."""
    return {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}


def rows(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """Complete rows of the metrics."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def losses(run_dir: pathlib.Path) -> list[tuple[int, float]]:
    """(step, loss) of every row."""
    return [(row["step"], row["loss"]) for row in rows(run_dir)]
