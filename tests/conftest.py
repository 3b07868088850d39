"""The machine that every test sees: 16 CPU devices played by this host.

What always holds: the settings below are made before JAX starts a device, in this process and, through the environment,
in every process that a test starts. Fewer than 16 devices fail the suite instead of skipping the tests that need them.
A test that hangs, in compiled code too, ends its process after the time limit and shows the stacks of all threads.
"""

import faulthandler
import os
import pathlib
import platform
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUM_DEVICES = 16

# Devices are threads: on few cores one can reach a collective long after its peers, and XLA would end the process.
# These limits lie above the time limit of a test, so that a hang is reported as a failing test.
_COLLECTIVE_LIMITS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1200,
    "xla_cpu_collective_timeout_seconds": 1200,
}
# Programs here run for milliseconds and compile for seconds: LLVM at -O0 halves that. XLA's own passes, which decide
# what is computed, sent and kept, are the same.
_FAST_COMPILES = "--xla_backend_optimization_level=0"
_STDERR = pytest.StashKey[int]()


def _compilation_cache() -> pathlib.Path:
    """The folder of compiled programs for this JAX and this kind of processor: no other may load them."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return ROOT / ".cache" / f"jax-{jax.__version__}-{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def _set_up() -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    limits = [f"--{name}={seconds}" for name, seconds in _COLLECTIVE_LIMITS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([_FAST_COMPILES, *flags.split(), *limits])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compilation_cache())
    os.environ["MPLCONFIGDIR"] = str(ROOT / ".cache" / "matplotlib")
    # The workers of pytest share the cores already; a pool of threads for each of them would only make them wait.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    # Types and shapes are checked at every call; as for a type checker, an int is a float.
    conf = "beartype.BeartypeConf(is_pep484_tower=True)"
    install_import_hook(["ring_jax", "models"], f"beartype.beartype(conf={conf})")


_set_up()


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, {NUM_DEVICES} CPU devices"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # before pytest redirects it


# pytest-timeout's own watchdogs need the interpreter, which a hang in XLA may never give back, and under xdist their
# output is lost.
def pytest_timeout_set_timer(item: pytest.Item, settings) -> bool:
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[_STDERR])
    return True


def pytest_timeout_cancel_timer() -> bool:
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests recorded as `shown`: the workers of xdist have no terminal."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "shown" and report.when == "call":
                    terminalreporter.write_line(str(value))


@pytest.fixture(scope="session", autouse=True)
def _devices() -> None:
    if jax.device_count() != NUM_DEVICES:
        pytest.fail(f"{jax.device_count()} devices must be {NUM_DEVICES}: something used JAX before tests/conftest.py")


@pytest.fixture
def own_errors():
    """The library's own checks, as a user sees them: without the run-time type checker of the test suite."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_cli("run", path, "--num-steps", 2)` runs `python -m train` with these arguments, its output captured."""

    def run(*arguments: object, timeout: float = 240, **options) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "train", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options)

    return run
