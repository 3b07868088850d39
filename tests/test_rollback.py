"""The way back: which checkpoint is good, and which batches are passed over."""

import numpy as np
import pytest
from tiny_run import write_text

from train.checkpoint import CheckpointError
from train.config import DataConfig
from train.data import batches, load_corpus
from train.rollback import SkipList, batch_key, last_good_step


def test_the_list_of_batches_outlives_the_process_and_the_iterator(tmp_path):
    data = DataConfig(path=write_text(tmp_path / "text"), seq_len=64, batch_size=2, held_out_fraction=0.2)
    corpus = load_corpus(data)

    def start():
        return batches(corpus.train, seq_len=64, batch_size=2, seed=0)

    data, states, drawn = start(), [], []
    for _ in range(8):
        drawn.append(next(data)["tokens"])
        states.append(data.get_state())
    assert len({batch_key(state) for state in states}) == 8
    SkipList(tmp_path / "skipped.json").add([(3, batch_key(states[2])), (4, batch_key(states[3]))])
    skips, data = SkipList(tmp_path / "skipped.json"), start()
    data.set_state(states[0])
    for expected in (1, 4, 5):
        batch, key = skips.draw(data)
        np.testing.assert_array_equal(batch["tokens"], drawn[expected])
        assert key == batch_key(states[expected])
    assert batch_key(b"state") != batch_key(b"another")
    (tmp_path / "skipped.json").write_text("")
    with pytest.raises(CheckpointError, match=r"skipped\.json is damaged .*put back a copy of it, or delete it"):
        SkipList(tmp_path / "skipped.json")


def test_which_checkpoint_is_good(tmp_path):
    assert last_good_step(tmp_path / "absent", 9) is None
    for name in ("2", "4", "6", "8.orbax-checkpoint-tmp-1"):
        (tmp_path / name).mkdir()
    assert [last_good_step(tmp_path, first_bad) for first_bad in (3, 4, 7, 8, 100)] == [None, 2, 4, 6, 6]
