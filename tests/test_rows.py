"""Rows by number: every token and target once, on any hosts, from any resume point; mixing; the held-out batches."""

import collections
import itertools
import json

import numpy as np
import pytest
from documents import MISSING, SEQ_LEN, assert_same_batch, expected_pieces, make_documents, pieces_in, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_jax import make_mesh
from train.data import Document, batches, deeper_targets, held_out_batches, rows_for
from train.rows import Interleave, Rows, local_data_indices, order_of
from train.step import _shard


@pytest.mark.parametrize("seq_len", [1, 7, SEQ_LEN, 64, 1000])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_epoch_holds_every_byte_and_target_exactly_once(seq_len, batch_size):
    documents = make_documents()
    epoch = list(batches(documents, seq_len=seq_len, batch_size=batch_size, seed=3, num_epochs=1))
    for batch in epoch:
        assert sorted(batch) == ["positions", "segment_ids", "targets", "tokens"]
        assert all(x.dtype == np.int32 and x.shape == (batch_size, seq_len) for x in batch.values())
    assert pieces_in(epoch) == expected_pieces(documents, seq_len)


@pytest.mark.parametrize("seq_len", [5, SEQ_LEN, 300])
def test_pairs_are_those_of_the_unpacked_documents(seq_len):
    """Splitting and packing lose no prediction and invent none."""
    documents = make_documents()
    expected = collections.Counter()
    for document in documents:
        expected.update(itertools.pairwise(document.tokens.tolist()))
    found = collections.Counter()
    for batch in batches(documents, seq_len=seq_len, batch_size=2, seed=0, num_epochs=1):
        scored = batch["targets"] != MISSING
        found.update(zip(batch["tokens"][scored].tolist(), batch["targets"][scored].tolist(), strict=True))
    assert found == expected


def test_token_zero_is_a_target_only_where_the_text_has_it():
    without = make_documents(low=1)
    for batch in batches(without, seq_len=SEQ_LEN, batch_size=3, seed=0, num_epochs=1):
        assert not (batch["targets"] == 0).any()
    having = [Document("zeros", np.zeros(SEQ_LEN + 4, np.uint8))]
    epoch = list(batches(having, seq_len=SEQ_LEN, batch_size=3, seed=0, num_epochs=1))
    assert sum((batch["targets"] == 0).sum() for batch in epoch) == SEQ_LEN + 3


def test_epochs_differ_in_order_and_each_is_complete():
    documents = make_documents([SEQ_LEN] * 20)
    rows = [
        piece
        for batch in batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=0, num_epochs=3)
        for piece in segments(batch)
    ]
    epochs = [rows[start : start + 20] for start in (0, 20, 40)]
    assert [collections.Counter(epoch) for epoch in epochs] == [expected_pieces(documents, SEQ_LEN)] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_endless_stream_loses_nothing_between_epochs():
    """Every row comes up once before any comes up again, also where an epoch ends inside a batch."""
    documents = make_documents()
    stream = batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=0)
    num_rows = stream.rows.num_rows
    assert num_rows % 2
    rows = [tuple(row) for batch in itertools.islice(stream, 2 * num_rows) for row in batch["tokens"].tolist()]
    for start in range(0, 4 * num_rows, num_rows):
        assert collections.Counter(rows[start : start + num_rows]) == collections.Counter(rows[:num_rows])
    seen = collections.Counter(piece for batch in itertools.islice(stream, num_rows) for piece in segments(batch))
    assert seen == {piece: 2 * count for piece, count in expected_pieces(documents, SEQ_LEN).items()}


def test_order_is_set_by_the_seed_alone():
    def first_batches(seed):
        other = batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=7)
        for batch in itertools.islice(batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=seed), 8):
            next(other)
            yield batch

    documents = make_documents()
    for first, second in zip(first_batches(5), first_batches(5), strict=True):
        assert_same_batch(first, second)
    tokens = {seed: np.stack([batch["tokens"] for batch in first_batches(seed)]) for seed in (0, 1, 2**40)}
    for one, other in itertools.combinations(tokens.values(), 2):
        assert not np.array_equal(one, other)


def test_seeds_do_not_share_epochs():
    """Seed 1 must not begin with the second epoch of seed 0."""
    documents = make_documents([SEQ_LEN] * 30)

    def order(seed):
        return [
            piece
            for batch in batches(documents, seq_len=SEQ_LEN, batch_size=1, seed=seed, num_epochs=2)
            for piece in segments(batch)
        ]

    assert order(0)[30:] != order(1)[:30]


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match=r"seed=-1 must not be negative"):
        batches(make_documents(), seq_len=4, batch_size=1, seed=-1)


def test_saved_state_continues_with_the_same_batches():
    """From every batch of three epochs, across their ends, and after JSON."""
    documents = make_documents()
    arguments = {"seq_len": SEQ_LEN, "batch_size": 2, "seed": 11}
    unbroken = batches(documents, **arguments)
    states, rest = [], []
    for _ in range(3 * unbroken.rows.num_rows // 2):
        states.append(json.dumps(unbroken.get_state()))
        rest.append(next(unbroken))
    assert states[:3] == ['{"next_row": 0}', '{"next_row": 2}', '{"next_row": 4}'], "the whole state is one number"
    for k, state in enumerate(states):
        restored = batches(documents, **arguments)
        next(restored)
        restored.set_state(json.loads(state))
        for expected in rest[k : k + 5]:
            assert_same_batch(next(restored), expected)


def test_state_of_another_version_is_refused():
    with pytest.raises(ValueError, match=r"must be .*next_row.*start anew"):
        batches(make_documents(), seq_len=4, batch_size=1, seed=0).set_state({"parent": 3})


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=30),
    seq_len=st.sampled_from([1, 7, SEQ_LEN]),
    seed=st.integers(0, 2**32 - 1),
    parts=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4)), min_size=1, max_size=8),
)
@settings(max_examples=40, deadline=None)
def test_an_epoch_is_exact_over_any_hosts_and_resume_points(lengths, seq_len, seed, parts):
    """Each part of the run has its own number of hosts, and ends after a number of steps: a kill and a resume."""
    documents = make_documents(lengths, seed=1)
    state, seen, position = {"next_row": 0}, [], 0
    num_rows = batches(documents, seq_len=seq_len, batch_size=12, seed=seed).rows.num_rows
    for num_data, num_steps in itertools.cycle(parts):
        hosts = [
            batches(
                documents,
                seq_len=seq_len,
                batch_size=12,
                seed=seed,
                num_epochs=1,
                data_indices=(index,),
                num_data=num_data,
            )
            for index in range(num_data)
        ]
        for host in hosts:
            host.set_state(state)
        for _ in range(num_steps):
            if position < num_rows:
                seen += [next(host) for host in hosts]
                position += 12
        states = [host.get_state() for host in hosts]
        assert states == [states[0]] * num_data, "every host has the same position"
        state = states[0]
        if position >= num_rows:
            break
    assert pieces_in(seen) == expected_pieces(documents, seq_len)


def test_hosts_together_read_what_one_host_reads():
    documents = make_documents()
    whole = next(batches(documents, seq_len=SEQ_LEN, batch_size=12, seed=5))
    for owners in ([(0,), (1,), (2,), (3,)], [(0, 2), (1, 3)], [(0, 1, 2), (3,)]):
        placed = {name: np.zeros_like(array) for name, array in whole.items()}
        for own in owners:
            batch = next(batches(documents, seq_len=SEQ_LEN, batch_size=12, seed=5, data_indices=own, num_data=4))
            rows = [row for index in own for row in rows_for(0, batch_size=12, data_index=index, num_data=4)]
            for name, array in batch.items():
                placed[name][rows] = array
        assert_same_batch(placed, whole)


def test_the_segments_of_a_row_are_known_without_reading_it():
    rows = Rows([(make_documents(), 2.0), (make_documents([3, 50, 4]), 1.0)], seq_len=SEQ_LEN, seed=2)
    for number in range(60):
        (ids,) = rows.read([number])["segment_ids"]
        assert rows.segments(number) == np.bincount(ids, minlength=1)[1:].tolist()


def test_rows_of_a_step():
    assert rows_for(0, batch_size=6) == range(0, 6)
    assert [rows_for(2, batch_size=6, data_index=index, num_data=3) for index in range(3)] == [
        range(12, 14), range(14, 16), range(16, 18)
    ]  # fmt: skip
    for bad in ({"data_index": 3, "num_data": 3}, {"num_data": 4}):
        with pytest.raises(ValueError, match="must divide batch_size=6"):
            rows_for(0, batch_size=6, **bad)


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_deeper_targets_are_those_of_the_documents(depth):
    documents = make_documents()
    expected = collections.Counter()
    for document in documents:
        tokens = [int(token) for token in document.tokens]
        for start in range(0, len(tokens), SEQ_LEN):
            piece = tokens[start : start + SEQ_LEN]
            following = [*tokens[start + 1 : start + 1 + len(piece)]]  # what the piece and its next token tell
            expected.update(
                (token, following[i + depth - 1])
                for i, token in enumerate(piece[: len(following)])
                if i + depth <= len(following)
            )
    found = collections.Counter()
    for batch in batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=0, num_epochs=1):
        targets = deeper_targets(batch, depth)
        assert targets.shape == batch["tokens"].shape
        scored = targets != MISSING
        found.update(zip(batch["tokens"][scored].tolist(), targets[scored].tolist(), strict=True))
    assert found == expected
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        deeper_targets(batch, 0)


def test_reading_the_state_does_not_move_the_iterator():
    documents = make_documents()
    watched, plain = (batches(documents, seq_len=SEQ_LEN, batch_size=2, seed=0) for _ in range(2))
    for _ in range(20):
        watched.get_state()
        assert_same_batch(next(watched), next(plain))


def test_batches_do_not_share_memory():
    stream = batches(make_documents(), seq_len=SEQ_LEN, batch_size=2, seed=0)
    first = next(stream)
    kept = {name: x.copy() for name, x in first.items()}
    for batch in itertools.islice(stream, 10):
        for x in batch.values():
            x[...] = -5
    assert_same_batch(first, kept)


def padding_share(some_batches) -> float:
    """Share of the token slots that hold padding, over all the batches given."""
    num_padding = num_slots = 0
    for batch in some_batches:
        num_padding += int(np.count_nonzero(batch["segment_ids"] == 0))
        num_slots += batch["segment_ids"].size
    return num_padding / num_slots if num_slots else 0.0


def test_padding_share():
    batch = {"segment_ids": np.array([[1, 1, 2, 0], [1, 0, 0, 0]])}
    full = {"segment_ids": np.ones((2, 4))}
    assert padding_share([batch]) == 0.5
    assert padding_share([batch, full]) == 0.25
    assert padding_share([]) == 0.0


def test_padding_is_small_on_documents_of_mixed_length():
    documents = make_documents(np.random.default_rng(0).integers(1, 2000, 300))
    stream = batches(documents, seq_len=256, batch_size=1, seed=0, num_epochs=1)
    assert stream.rows.padding_share < 0.002
    assert padding_share(stream) == pytest.approx(stream.rows.padding_share, rel=1e-12), "stated = measured"


# ---- held-out batches ----


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_held_out_batches_score_every_target_once_and_never_change(batch_size):
    documents = make_documents()
    held_out = held_out_batches(documents, seq_len=SEQ_LEN, batch_size=batch_size)
    first, second = list(held_out), list(held_out)
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert_same_batch(one, other)
    assert all(x.shape == (batch_size, SEQ_LEN) for batch in first for x in batch.values())
    assert pieces_in(first) == expected_pieces(documents, SEQ_LEN)
    num_targets = sum(int((batch["targets"] != MISSING).sum()) for batch in first)
    assert num_targets == sum(len(document) - 1 for document in documents)


def test_hosts_together_read_the_held_out_batches():
    documents = make_documents()
    whole = list(held_out_batches(documents, seq_len=SEQ_LEN, batch_size=4))
    parts = [
        list(held_out_batches(documents, seq_len=SEQ_LEN, batch_size=4, data_indices=own, num_data=4))
        for own in [(0, 2), (1,), (3,)]
    ]
    for batch, *own in zip(whole, *parts, strict=True):
        rows = [np.concatenate([part[name] for part in own]) for name in sorted(batch)]
        assert [len(array) for array in rows] == [4] * 4
        for name, array in zip(sorted(batch), rows, strict=True):
            np.testing.assert_array_equal(array, batch[name][[0, 2, 1, 3]])


def test_last_held_out_batch_is_filled_with_rows_of_padding():
    (batch,) = held_out_batches(make_documents([SEQ_LEN] * 3), seq_len=SEQ_LEN, batch_size=5)
    assert (batch["segment_ids"] != 0).any(axis=1).sum() == 3
    assert not batch["segment_ids"][3:].any()
    assert (batch["targets"][3:] == MISSING).all()


def test_the_order_is_the_same_for_good():
    """A checkpoint holds a row number only: another order in another version of a package would lose its place."""
    order, other = order_of(10, seed=5), order_of(10, seed=5, source=1)
    assert [order[n] for n in range(20)] == [7, 4, 9, 3, 1, 2, 5, 6, 0, 8, 5, 6, 7, 0, 8, 3, 9, 2, 4, 1]
    assert [other[n] for n in range(10)] == [3, 9, 4, 8, 1, 0, 6, 5, 7, 2]


# ---- mixing ----


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), start=st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_sources_are_mixed_evenly_and_each_is_read_in_order(weights, start):
    interleave = Interleave(weights)
    shares = np.array(weights) / sum(weights)
    found = [interleave.find(number) for number in range(start, start + 3000)]
    for source, share in enumerate(shares):
        ordinals = [ordinal for which, ordinal in found if which == source]
        assert ordinals == list(range(ordinals[0], ordinals[0] + len(ordinals))) if ordinals else True
        assert abs(len(ordinals) - 3000 * share) <= 3000 * 2e-4 + 2
        before = interleave.find(start)
        if before[0] == source:
            assert abs(before[1] - start * share) <= start * 2e-4 + 2


def test_a_source_of_a_tiny_weight_is_not_left_out():
    interleave = Interleave([1.0, 1e-9, 1e-9])
    assert interleave.counts.tolist() == [9998, 1, 1]
    assert {interleave.find(number)[0] for number in range(10_000)} == {0, 1, 2}


def test_each_source_of_a_mixture_is_exact_over_its_own_epochs():
    """Weights 3 and 1: while the small source has one epoch, the other has as many as it takes, each complete."""
    first, second = make_documents([SEQ_LEN] * 9, seed=1), make_documents([SEQ_LEN] * 5, seed=2)
    rows = Rows([(first, 3.0), (second, 1.0)], seq_len=SEQ_LEN, seed=4)
    of_first, of_second = [], []
    for number in range(5 * 4 * 9):
        (tokens,) = rows.read([number])["tokens"].tolist()
        (of_first if any(tokens == document.tokens.tolist() for document in first) else of_second).append(tuple(tokens))
    assert (len(of_first), len(of_second)) == (135, 45)
    for found, documents in ((of_first, first), (of_second, second)):
        texts = collections.Counter(tuple(document.tokens.tolist()) for document in documents)
        for start in range(0, len(found), len(documents)):
            assert collections.Counter(found[start : start + len(documents)]) == texts
    assert of_first[:9] != of_first[9:18]


def test_the_padding_of_a_mixture_is_that_of_its_rows():
    full, half = make_documents([SEQ_LEN] * 4), make_documents([SEQ_LEN // 2 + 1] * 4)
    rows = Rows([(full, 1.0), (half, 3.0)], seq_len=SEQ_LEN, seed=0)
    measured = padding_share([rows.read(range(4 * 4 * 4))])
    assert rows.padding_share == pytest.approx(measured, abs=1e-9)
    assert rows.padding_share == pytest.approx(0.75 * 7 / 16)


def test_a_process_places_the_rows_that_it_read():
    """What each device of a mesh (data 4, sequence 2) asks for, out of the rows of the process that holds it."""
    whole = np.arange(12 * 8).reshape(12, 8)
    for held in ((0, 1, 2, 3), (0, 2), (1, 3), (3,)):
        own = np.concatenate([whole[list(rows_for(0, batch_size=12, data_index=i, num_data=4))] for i in held])
        for index in held:
            for columns in (slice(0, 4), slice(4, 8), slice(None)):
                place = (slice(index * 3, index * 3 + 3), columns)
                np.testing.assert_array_equal(_shard(own, held, place), whole[place])
    np.testing.assert_array_equal(_shard(whole, (0,), (slice(None), slice(0, 4))), whole[:, :4])


def test_the_data_indices_of_one_process_are_all():
    assert local_data_indices(make_mesh(data=4, sequence=2)) == (0, 1, 2, 3)
