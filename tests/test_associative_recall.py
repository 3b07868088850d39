"""Answers that lie more than a shard back are learned over the ring, and not where attention is cut at the shards."""

import numpy as np
import pytest
from test_step import _no_stored_programs  # noqa: F401

from examples.associative_recall import NUM_KEYS, NUM_VALUES, make_batch, make_config, train
from train.rows import IGNORE


@pytest.mark.parametrize(("num_shards", "seq_len"), [(4, 256), (8, 4096)])
def test_every_answer_lies_more_than_a_shard_back(num_shards: int, seq_len: int):
    config = make_config(num_shards, seq_len, batch_size=2)
    batch, shard = make_batch(config, (0, 0), cut=False), seq_len // num_shards
    tokens, targets = batch["tokens"], batch["targets"]
    is_value = tokens > NUM_KEYS
    for row, place in np.argwhere(targets != IGNORE):
        stated = np.flatnonzero((tokens[row, :-1] == tokens[row, place]) & is_value[row, 1:]) + 1
        assert len(stated) and place - stated.max() > shard
        assert (tokens[row, stated] == targets[row, place]).all()
    cut = make_batch(config, (0, 0), cut=True)
    np.testing.assert_array_equal(cut["segment_ids"][0], np.arange(seq_len) // shard + 1)
    np.testing.assert_array_equal(cut["targets"], targets)


def check(**sizes: int) -> tuple[float, float]:
    config = make_config(**sizes)
    whole, cut = (train(config, cut=cut) for cut in (False, True))
    assert whole > 0.99
    assert cut < 2 / NUM_VALUES
    return whole, cut


def test_recall_on_a_small_ring():
    check(num_shards=4, seq_len=256, batch_size=16, num_steps=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_recall_over_4096_tokens_on_a_ring_of_8(record_property):
    whole, cut = check()
    record_property("shown", f"associative recall: {whole:.2%} right, {cut:.2%} with attention cut at the shards")
