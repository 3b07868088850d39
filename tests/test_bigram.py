"""The bigram baseline: fitted inside documents, scored on the model's own targets."""

import itertools
import math
import time

import numpy as np
import pytest

from train import bigram
from train.data import Document, encode, held_out_batches


def documents(*texts):
    return [Document(str(i), encode(text)) for i, text in enumerate(texts)]


def naive_bits_per_byte(train, held_out):
    """The same model with dictionaries and loops."""
    counts, totals = {}, {}
    for document in train:
        for pair in itertools.pairwise(document.tokens.tolist()):
            counts[pair] = counts.get(pair, 0) + 1
            totals[pair[0]] = totals.get(pair[0], 0) + 1
    bits = []
    for document in held_out:
        for pair in itertools.pairwise(document.tokens.tolist()):
            bits.append(-math.log2((counts.get(pair, 0) + 0.1) / (totals.get(pair[0], 0) + 25.6)))
    return sum(bits) / len(bits)


TRAIN = documents("abracadabra, said the bear", "a second text about bears", "x")
HELD_OUT = documents("the bear said abracadabra about a text", "Q", "zebra bears")


@pytest.mark.parametrize("seq_len", [1, 4, 7, 100])
def test_equals_the_naive_model_at_every_row_length(seq_len):
    expected = naive_bits_per_byte(TRAIN, HELD_OUT)
    assert bigram.bigram_bits_per_byte(TRAIN, HELD_OUT, seq_len=seq_len) == pytest.approx(expected, rel=1e-12)


def test_probabilities_sum_to_one():
    table = np.exp2(bigram.fit(TRAIN))
    assert table.shape == (256, 256)
    assert (table > 0).all()
    np.testing.assert_allclose(table.sum(axis=1), 1.0, rtol=1e-12)


def test_pairs_across_documents_are_not_counted():
    table = np.exp2(bigram.fit(documents("aa", "bb")))
    assert table[ord("a"), ord("b")] == pytest.approx(0.1 / 26.6)
    assert table[ord("a"), ord("a")] == pytest.approx(1.1 / 26.6)


def test_counting_in_chunks_loses_no_pair(monkeypatch):
    whole = bigram.fit(TRAIN)
    for chunk in (1, 2, 5):
        monkeypatch.setattr(bigram, "_CHUNK", chunk)
        np.testing.assert_array_equal(bigram.fit(TRAIN), whole)


def test_without_training_text_every_byte_costs_eight_bits():
    assert bigram.bigram_bits_per_byte([], HELD_OUT, seq_len=8) == pytest.approx(8.0)


def test_a_text_that_repeats_costs_almost_nothing():
    repeating = documents("ab" * 50_000)
    assert bigram.bigram_bits_per_byte(repeating, documents("ab" * 10), seq_len=8) < 0.01


def test_padding_and_ignored_targets_are_not_scored():
    """A batch of mostly padding has the score of its text alone."""
    table = bigram.fit(TRAIN)
    scores = [
        bigram.bits_per_byte(table, held_out_batches(HELD_OUT, seq_len=64, batch_size=batch_size))
        for batch_size in (1, 9)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-12)


def test_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match="no target"):
        bigram.bits_per_byte(bigram.fit(TRAIN), [])


def test_speed():
    rng = np.random.default_rng(0)
    large = [Document(str(i), rng.integers(0, 256, 100_000).astype(np.uint8)) for i in range(100)]
    start = time.process_time()
    score = bigram.bigram_bits_per_byte(large, large[:5], seq_len=2048)
    assert time.process_time() - start < 2
    assert score == pytest.approx(8.0, abs=0.1)
