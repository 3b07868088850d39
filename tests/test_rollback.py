"""The way back: which checkpoint is good, and which batches are passed over."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest
from test_watch import NUM_STEPS, WATCH, kinds, losses, nan_at, run, run_losses, spike_at, tiny
from tiny_run import write_text

from train import run_steps
from train.alarms import read_alarms
from train.checkpoint import CheckpointError
from train.config import DataConfig
from train.data import batches, load_corpus
from train.errors import SaveError
from train.rollback import SkipList, batch_key, last_good_step

ROLLBACK = dataclasses.replace(WATCH, rollback=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("rollback") / "text")


def num_batches(run_dir):
    """Steps whose batch was saved for a look."""
    return sorted(int(path.stem.rsplit("_", 1)[1]) for path in pathlib.Path(run_dir).glob("bad_batch_step_*.npz"))


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


# What orbax leaves behind when tensorstore finds damage: callbacks into an event loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_return_that_cannot_be_made_takes_no_checkpoint_away(text, tmp_path, monkeypatch):
    def go_back(self, *others):
        for step in (2, 4):
            shutil.rmtree(folder / str(step) / "meta")
        plain(self, *others)

    plain, folder = run_steps.Steps._go_back, tmp_path / "run" / "checkpoints"
    run_config = tiny(text, tmp_path / "run", watch=ROLLBACK)
    outcome = spike_at(run_config, 7)
    with monkeypatch.context() as patch:
        patch.setattr(run_steps.Steps, "_go_back", go_back)
        with pytest.raises(SaveError, match=r"before step 7: .*none of step 5 or before \(found 4: .*2: .*Later ones"):
            run(run_config, outcome)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4", "6"]
    assert run(dataclasses.replace(run_config, watch=WATCH, resume=True), outcome)[0] == 0
    assert losses(tmp_path / "run")[:6] == run_losses(run_config, 6)


@pytest.mark.parametrize("rollback", [False, True])
def test_a_spike_in_the_step_that_fills_the_limit_of_skipped_ones_hides_nothing(text, tmp_path, rollback):
    """The gradient norm of 7 is not finite, its loss is."""
    run_config = tiny(text, tmp_path / "run", watch=ROLLBACK if rollback else WATCH)
    of_batch, plain = run_losses(run_config, NUM_STEPS + 4), nan_at(run_config, [5, 6])

    def outcome(loss):
        return (10 * loss, 1.0) if loss == of_batch[6] else plain(loss)

    if rollback:
        assert run(run_config, outcome)[0] == 0
        assert losses(tmp_path / "run") == [*of_batch[:3], *of_batch[7:]]
    else:
        with pytest.raises(FloatingPointError, match="3 steps in a row were skipped"):
            run(run_config, outcome)
    assert kinds(tmp_path / "run") == [("loss_spike", 7), ("not_finite", 7), ("rollback", 7)][: 3 if rollback else 2]
    assert num_batches(tmp_path / "run") == [5, 6, 7]


def test_a_run_that_ended_for_skipped_steps_goes_on_after_them(text, tmp_path):
    """It ends again when as many more are skipped, and a return then passes over all of them."""
    run_dir, run_config = tmp_path / "run", tiny(text, tmp_path / "run")
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        run(run_config, nan_at(run_config, range(5, 11)))
    shutil.copytree(run_dir, tmp_path / "few")
    few = dataclasses.replace(run_config, run_dir=str(tmp_path / "few"), resume=True)
    assert run(few, nan_at(few, range(5, 10)))[0] == 0
    assert kinds(tmp_path / "few") == [("not_finite", 7)]

    back = dataclasses.replace(run_config, watch=ROLLBACK, resume=True)
    assert run(back, nan_at(back, range(5, 11)))[0] == 0
    of_batch = run_losses(run_config, NUM_STEPS + 7)
    assert losses(run_dir) == [*of_batch[:3], *of_batch[10:]]
    assert kinds(run_dir) == [("not_finite", 7), ("not_finite", 10), ("rollback", 10)]
    assert num_batches(run_dir) == [5, 6, 7, 8, 9, 10]


def test_batches_of_before_a_restart_are_said_not_to_be_saved(text, tmp_path):
    run_config = tiny(text, tmp_path / "run")
    outcome = nan_at(run_config, [5, 6, 7])
    assert run(run_config, outcome, stop_after=6)[0] == 130
    with pytest.raises(FloatingPointError):
        run(dataclasses.replace(run_config, resume=True), outcome)
    assert num_batches(tmp_path / "run") == [7]
    assert "not those of step 5, 6: the run was resumed after them" in read_alarms(tmp_path / "run")[0]["text"]
