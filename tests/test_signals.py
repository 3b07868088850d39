"""The first signal asks for an end, the second one is an end, also while the main thread is busy outside Python."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from train.signals import StopRequest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Like a compilation, this one call leaves Python for a minute: no handler of Python's own runs before it is done.
BUSY = """
import hashlib
from train.signals import StopRequest
with StopRequest():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**8)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_only_asks(number, code, capfd):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.exit_code == code
    assert signal.getsignal(number) is before
    assert f"{number.name}: leaving after this step; once more stops at once" in capfd.readouterr().err


def test_a_process_that_cannot_go_on_makes_all_leave():
    with StopRequest(lambda own: max(own, 15)) as stop:  # another process got a signal, too
        stop.fail()
        assert not stop.requested
        stop.settle()
        assert stop.requested and stop.failed
    with StopRequest(lambda _: 1000) as other:
        other.settle()
        assert other.failed
    with StopRequest() as alone:
        alone.fail()
        assert alone.requested and alone.failed


def test_a_second_signal_ends_the_process_at_once():
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "\n"
        assert "once more stops at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
        assert "stopped at once" in process.stderr.read()
