"""The thread that makes batches ahead: the same batches, its position, its errors, its end."""

import itertools
import threading
import time

import pytest
from documents import assert_same_batch, make_documents

from train import prefetch
from train.data import batches
from train.prefetch import Prefetch


def stream(**changes):
    return batches(make_documents(), **{"seq_len": 16, "batch_size": 2, "seed": 3, **changes})


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_batches_and_positions_are_those_of_the_iterator(num_batches):
    plain = stream()
    with Prefetch(stream(), num_batches=num_batches) as ahead:
        assert ahead.get_state() == {"next_row": 0}
        for batch in itertools.islice(ahead, 20):
            assert_same_batch(batch, next(plain))
            assert ahead.get_state() == plain.get_state(), "not the position of what was made ahead"
    assert not threads()


@pytest.mark.parametrize("num_batches", [0, 2])
def test_the_end_is_the_end(num_batches):
    with Prefetch(stream(num_epochs=1), num_batches=num_batches) as ahead:
        assert len(list(ahead)) == len(list(stream(num_epochs=1)))
        assert list(ahead) == []


@pytest.mark.parametrize("num_batches", [0, 2])
def test_an_error_is_raised_where_its_batch_would_have_come(num_batches, monkeypatch):
    broken = stream()
    read = broken.rows.read

    def fail(numbers):
        wanted = list(numbers)
        if 6 in wanted:
            raise ValueError("the cache of tokens is damaged")
        return read(wanted)

    monkeypatch.setattr(broken.rows, "read", fail)
    with Prefetch(broken, num_batches=num_batches) as ahead:
        for _ in range(3):
            next(ahead)
        for _ in range(2):
            with pytest.raises(ValueError, match="the cache of tokens is damaged"):
                next(ahead)
        assert ahead.get_state() == {"next_row": 6}
    assert not threads()


def test_leaving_ends_a_thread_that_is_full_or_never_read():
    for num_read in (0, 1):
        with Prefetch(stream(), num_batches=2) as ahead:
            for _ in range(num_read):
                next(ahead)
            time.sleep(0.05)
            assert len(threads()) == 1
        assert not threads()
        ahead.close()
    with pytest.raises(RuntimeError, match="was closed"):
        for _ in range(9):
            next(ahead)


def test_the_wait_is_measured(monkeypatch):
    slow = stream()
    read = slow.rows.read
    monkeypatch.setattr(slow.rows, "read", lambda numbers: (time.sleep(0.1), read(numbers))[1])
    with Prefetch(slow, num_batches=1) as ahead:
        next(ahead)
        assert 0.02 < ahead.wait_s < 5
        time.sleep(0.5)
        next(ahead)
        assert ahead.wait_s < 0.05


def test_going_back_does_not_wait_for_a_slow_read(monkeypatch):
    """The thread that hangs is left behind, and when it ends it changes nothing."""
    slow, held, goes_on = stream(), threading.Event(), threading.Event()
    read = slow.rows.read

    def hang(numbers):
        wanted = list(numbers)
        if 4 in wanted and not held.is_set():
            held.set()
            assert goes_on.wait(20)
        return read(wanted)

    monkeypatch.setattr(slow.rows, "read", hang)
    monkeypatch.setattr(prefetch, "_JOIN_S", 0.05)
    plain = stream()
    with Prefetch(slow, num_batches=1) as ahead:
        next(ahead)
        assert held.wait(20)
        ahead.set_state({"next_row": 0})
        for number in range(6):
            assert_same_batch(next(ahead), next(plain))
            assert ahead.get_state() == plain.get_state()
            if number == 2:
                goes_on.set()
                time.sleep(0.05)
    for thread in threads():
        thread.join(20)
    assert not threads()
