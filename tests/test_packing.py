"""Packing: every token in exactly one row, little padding, and an index that needs lengths only."""

import collections
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.packing import pack


def rows_of(packing):
    return [packing.row(number) for number in range(packing.num_rows)]


def naive_best_fit(lengths, seq_len):
    """Room of every row when each rest goes into the fullest row that has room, the longest first."""
    rooms = []
    for size in sorted((length % seq_len for length in lengths if length % seq_len), reverse=True):
        fitting = [place for place, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda place: rooms[place])] -= size
        else:
            rooms.append(seq_len - size)
    return sorted(rooms)


@given(lengths=st.lists(st.integers(0, 90), max_size=60), seq_len=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_every_token_is_in_exactly_one_row_and_best_fit_is_best_fit(lengths, seq_len):
    packing = pack(lengths, seq_len)
    rows = rows_of(packing)
    seen = collections.Counter((p.document, p.start + i) for row in rows for p in row for i in range(p.length))
    assert seen == collections.Counter((d, i) for d, length in enumerate(lengths) for i in range(length))
    sizes = [sum(piece.length for piece in row) for row in rows]
    assert all(0 < size <= seq_len for size in sizes)
    num_full = sum(length // seq_len for length in lengths)
    assert all(row[0].length == seq_len and len(row) == 1 for row in rows[:num_full])
    assert sorted(seq_len - size for size in sizes[num_full:]) == naive_best_fit(lengths, seq_len)
    stated = packing.padding_share
    assert stated == pytest.approx(1 - sum(lengths) / (len(rows) * seq_len) if rows else 0.0, abs=1e-12)
    assert packing.num_split == sum(length > seq_len for length in lengths)


def test_the_example_of_the_module():
    rows = rows_of(pack([19, 5, 3, 2], 8))
    assert rows == [[(0, 0, 8)], [(0, 8, 8)], [(1, 0, 5), (0, 16, 3)], [(2, 0, 3), (3, 0, 2)]]


def test_a_row_that_is_not_there():
    with pytest.raises(IndexError, match="row 4 of 4"):
        pack([19, 5, 3, 2], 8).row(4)
    assert pack([], 8).num_rows == 0


def test_a_million_documents_take_seconds_and_hardly_any_padding():
    lengths = np.random.default_rng(0).lognormal(6.5, 1.2, 1_000_000).astype(int) + 1
    started = time.process_time()
    packing = pack(lengths, 8192)
    assert time.process_time() - started < 10
    assert packing.padding_share < 1e-4
