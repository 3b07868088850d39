"""Where the processes of a save meet: one that failed ends it for all, at once, and the next save is a new one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from train.save_barrier import PeerFailed, SaveBarrier


class Service:
    """What processes share: keys and barriers, as the client of `jax.distributed` gives them."""

    def __init__(self, num_processes):
        self.values, self._num, self._lock, self._barriers = {}, num_processes, threading.Lock(), {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_delete(self, prefix):
        for key in [key for key in self.values if key.startswith(f"{prefix}/")]:
            del self.values[key]

    def key_value_dir_get(self, prefix):
        return [pair for pair in list(self.values.items()) if pair[0].startswith(f"{prefix}/")]

    def wait_at_barrier(self, name, timeout_ms):
        with self._lock:
            barrier = self._barriers.setdefault(name, threading.Barrier(self._num))
        barrier.wait(timeout_ms / 1000)


@pytest.fixture
def processes():
    service = Service(3)
    return [SaveBarrier(service, process=process) for process in range(3)], service


def saves(processes, *keys):
    """What each process gets from waiting for its keys, one after another, in a new save: ok or the error's name."""

    def save(process, own):
        process.begin()
        outcomes = []
        for key in own:
            try:
                process(key=key, timeout_ms=10_000)
                outcomes.append("ok")
            except Exception as error:
                outcomes.append(type(error).__name__)
        return outcomes

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(save, processes, keys))


def test_all_write_and_all_pass(processes):
    assert saves(processes[0], *[["begin", "written", "committed", "end"]] * 3) == [["ok"] * 4] * 3


def test_one_that_fails_ends_the_save_for_all_and_the_next_is_a_new_one(processes):
    keys = [["begin", "written", "committed", "end"], ["begin", "end", "end 2"], ["begin", "written", "committed"]]
    assert saves(processes[0], *keys) == [["ok", *["PeerFailed"] * (len(own) - 1)] for own in keys]
    assert saves(processes[0], *[["begin", "written"]] * 3) == [["ok"] * 2] * 3


def test_the_second_thread_of_a_save_that_failed_does_not_pass(processes):
    """It would commit a checkpoint of which a part is missing."""
    (one, *others), _ = processes
    for process in (one, *others):
        process.begin()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(one, key="end", timeout_ms=10_000)
        rest = [pool.submit(other, key="written", timeout_ms=10_000) for other in others]
        for future in (first, *rest, pool.submit(one, key="written", timeout_ms=10_000)):
            with pytest.raises(PeerFailed):
                future.result()


def test_what_old_saves_left_in_the_service_is_removed(processes):
    for _ in range(9):
        saves(processes[0], *[["begin", "written"]] * 3)
    assert len(processes[1].values) <= 3 * 2
