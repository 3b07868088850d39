"""Checkpoints: the saved bits come back on any mesh, and what is half-written or foreign is said to be so."""

import dataclasses
import errno
import gc
import os
import shutil
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from disks import full_disk
from tiny_run import config, write_text

from ring_jax import make_mesh
from train import checkpoint, distributed, reading
from train.checkpoint import CheckpointError, CheckpointStore, Meta, read_newest_meta
from train.config import DataConfig, MeshConfig, to_json
from train.data import batches, load_corpus
from train.errors import TryAgainError
from train.step import abstract_state, init_state, make_train_step, place_batch

FINGERPRINT = "0123456789abcdef"


def meta(step, run=None, **changes):
    run = run or config()
    return Meta(step=step, data_state={"next": step}, config=to_json(run), text_fingerprint=FINGERPRINT, **changes)


def mesh_of(run):
    return make_mesh(**run.mesh.sizes())


def host(state):
    return jax.tree.leaves(jax.device_get(state))


def assert_same_bits(state, expected):
    for got, want in zip(host(state), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run directory with checkpoints of the steps 2 and 4, and the bits of their arrays."""
    run_dir = tmp_path_factory.mktemp("run")
    run = config(mesh=MeshConfig(tensor=2, pipeline=2, sequence=2))
    state = init_state(run, mesh_of(run))
    store = CheckpointStore(run_dir, keep=2)
    bits = {}
    for step in (1, 2, 4):
        state = dataclasses.replace(state, step=jax.device_put(np.int32(step), state.step.sharding))
        store.save(state, meta(step, run))
        bits[step] = host(state)
    store.close()
    return run_dir, bits


@pytest.fixture
def run_dir(saved, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("sizes", [(1, 2, 2, 2), (2, 1, 2, 1), (1, 1, 1, 1), (1, 1, 1, 3)])
def test_the_saved_bits_come_back_on_any_mesh_in_its_shardings(saved, sizes):
    run = config(mesh=MeshConfig(**dict(zip(("data", "tensor", "pipeline", "sequence"), sizes, strict=True))))
    abstract = abstract_state(run, mesh_of(run))
    store = CheckpointStore(saved[0], keep=2)
    state, restored, passed_over = store.restore(abstract)
    store.close()
    assert_same_bits(state, saved[1][4])
    assert (restored.step, restored.data_state, passed_over) == (4, {"next": 4}, [])
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert got.sharding == want.sharding
        assert got.dtype == want.dtype


def test_the_first_step_after_a_restore_does_not_compile_again(tmp_path):
    run = config(data=DataConfig(path=write_text(tmp_path / "text"), seq_len=64, batch_size=2))
    mesh, corpus = mesh_of(run), load_corpus(run.data)
    data = batches(corpus.train, seq_len=64, batch_size=2, seed=0)
    step = make_train_step(run, mesh)
    state, _ = step(init_state(run, mesh), place_batch(next(data), run, mesh))
    state, _ = step(state, place_batch(next(data), run, mesh))
    store = CheckpointStore(tmp_path / "run", keep=2)
    store.save(state, dataclasses.replace(meta(2, run), data_state=data.get_state()))
    batch = next(data)
    unbroken = host(step(state, place_batch(batch, run, mesh)))

    restored, found, _ = store.restore(abstract_state(run, mesh))
    store.close()
    compiled = step._cache_size()
    again = batches(corpus.train, seq_len=64, batch_size=2, seed=0)
    again.set_state(found.data_state)
    assert_same_bits(step(restored, place_batch(next(again), run, mesh)), unbroken)
    assert step._cache_size() == compiled == 1


def test_the_newest_are_kept_and_a_saved_step_is_not_saved_again(saved, tmp_path):
    folders = sorted(path.name for path in (saved[0] / "checkpoints").iterdir())
    assert folders == ["2", "4"]
    store = CheckpointStore(saved[0], keep=2)
    store.save(init_state(config(), mesh_of(config())), meta(4))
    state, _, _ = store.restore(abstract_state(config(), mesh_of(config())))
    store.close()
    assert_same_bits(state, saved[1][4])


def _remove_meta(folder):
    shutil.rmtree(folder / "meta")


def _remove_arrays(folder):
    shutil.rmtree(folder / "state")


def _cut_arrays(folder):
    for path in sorted((folder / "state").rglob("d/*")):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _break_json(folder):
    (folder / "meta" / "metadata").write_text('{"step": 4, "data_st')


def _empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


# What orbax leaves behind when tensorstore finds damage: callbacks into an event loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", [_remove_meta, _remove_arrays, _cut_arrays, _break_json, _empty_folder])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(saved, run_dir, damage):
    damage(run_dir / "checkpoints" / "4")
    run = config()
    store = CheckpointStore(run_dir, keep=2)
    state, found, passed_over = store.restore(abstract_state(run, mesh_of(run)))
    assert found.step == 2
    assert_same_bits(state, saved[1][2])
    assert len(passed_over) == 1
    assert passed_over[0].startswith("4: incomplete or damaged")
    assert (run_dir / "checkpoints_incomplete" / "4").is_dir()
    store.save(state, meta(4))  # the step can be saved again
    store.close()
    assert read_newest_meta(run_dir).step == 4


def test_an_interrupted_write_is_removed(saved, run_dir):
    (run_dir / "checkpoints" / "4").rename(run_dir / "checkpoints" / "4.orbax-checkpoint-tmp")
    run = config()
    store = CheckpointStore(run_dir, keep=2)
    assert read_newest_meta(run_dir).step == 2
    assert store.remove_interrupted() == ["4.orbax-checkpoint-tmp: an interrupted write, removed"]
    state, _, passed_over = store.restore(abstract_state(run, mesh_of(run)))
    store.close()
    assert_same_bits(state, saved[1][2])
    assert passed_over == []
    assert sorted(path.name for path in run_dir.rglob("checkpoints*/*")) == ["2"]


def test_an_interrupted_first_checkpoint_is_none_and_damaged_ones_are_a_clear_error(run_dir):
    shutil.rmtree(run_dir / "checkpoints" / "2")
    (run_dir / "checkpoints" / "4").rename(run_dir / "checkpoints" / "4.orbax-checkpoint-tmp")
    store = CheckpointStore(run_dir, keep=2)
    assert read_newest_meta(run_dir) is None
    assert store.is_empty()
    store.close()
    (run_dir / "checkpoints" / "3").mkdir()
    store = CheckpointStore(run_dir, keep=2)
    assert not store.is_empty()
    for call in (lambda: read_newest_meta(run_dir), lambda: store.restore(abstract_state(config(), mesh_of(config())))):
        with pytest.raises(CheckpointError, match=r"no complete checkpoint.*3: incomplete.*start without --resume"):
            call()
    store.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        PermissionError(errno.EACCES, "Permission denied"),
        MemoryError("no room"),
        ValueError('ABORTED: Error reading "a/b": Failed to open: Stale file handle'),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_checkpoint_that_cannot_be_read_now_is_tried_again_and_never_moved(run_dir, monkeypatch, error):
    def fail(folder):
        calls.append(folder)
        raise error

    calls = []
    monkeypatch.setattr(reading, "_PAUSES_S", (0.0, 0.0))
    store = CheckpointStore(run_dir, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_read_meta", fail)
        for call in (
            lambda: read_newest_meta(run_dir),
            lambda: store.restore(abstract_state(config(), mesh_of(config()))),
        ):
            with pytest.raises(TryAgainError, match=rf"checkpoints/4 cannot be read .*{str(error)[-12:]}.*not mean"):
                call()
    assert len(calls) == 6
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "checkpoint_steps", fail)
        with pytest.raises(TryAgainError, match=r"checkpoints cannot be read"):
            read_newest_meta(run_dir)  # and does not start anew
    assert folders(run_dir) == ["2", "4"]
    store.close()
    assert not (run_dir / "checkpoints_incomplete").exists()


def io_error(*_, **__):
    raise OSError(errno.EIO, "Input/output error")


def fail_under(folder, plain):
    """A function of `os` that fails for paths in the folder, as on a disk that does not answer."""
    return lambda path, *more, **names: (io_error if str(path).startswith(str(folder)) else plain)(path, *more, **names)


def test_what_was_passed_over_is_kept_under_a_free_name_and_nothing_takes_its_place(run_dir, monkeypatch):
    store = CheckpointStore(run_dir, keep=2)
    aside = run_dir / "checkpoints_incomplete"
    (aside / "4").mkdir(parents=True)
    assert store.move_aside([2, 4]) == [f"moved to {aside}/2", f"moved to {aside}/4.1"]
    assert sorted(path.name for path in aside.iterdir()) == ["2", "4", "4.1"]
    assert folders(run_dir) == []
    for step in (6, 8):
        (run_dir / "checkpoints" / str(step)).mkdir()
    shutil.rmtree(aside)
    aside.touch()  # nothing can be moved there
    assert store.move_aside([6]) == [f"moved to {run_dir}/checkpoints/6.incomplete"]
    assert folders(run_dir) == ["6.incomplete", "8"]
    monkeypatch.setattr("pathlib.Path.rename", io_error)
    with pytest.raises(
        TryAgainError, match=r"checkpoints/8, whose step runs again, cannot be moved .*move it yourself"
    ):
        store.move_aside([8])
    assert folders(run_dir) == ["6.incomplete", "8"]
    store.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_ones_move_when_an_older_one_is_restored_and_the_lines_say_where(run_dir):
    run, aside = config(), run_dir / "checkpoints_incomplete"
    for step in (6, 8):
        (run_dir / "checkpoints" / str(step)).mkdir()
    store = CheckpointStore(run_dir, keep=4)
    with pytest.raises(CheckpointError, match=r"checkpoints holds none of step 1 or before$"):
        store.restore(abstract_state(run, mesh_of(run)), up_to=1)
    assert folders(run_dir) == ["2", "4", "6", "8"]
    _, found, lines = store.restore(abstract_state(run, mesh_of(run)))
    assert found.step == 4
    assert [line.split(",")[0] for line in lines] == ["8: incomplete or damaged", "6: incomplete or damaged"]
    assert [line.split("; ")[-1] for line in lines] == [f"moved to {aside}/8", f"moved to {aside}/6"]
    store.close()
    for step in (2, 4):
        _remove_meta(run_dir / "checkpoints" / str(step))
    store = CheckpointStore(run_dir, keep=4)
    with pytest.raises(CheckpointError, match=r"4: incomplete.*2: incomplete") as caught:
        store.restore(abstract_state(run, mesh_of(run)))
    assert "moved" not in str(caught.value)
    assert folders(run_dir) == ["2", "4"]
    store.close()


def test_all_processes_wait_until_they_see_the_same_checkpoints(run_dir, monkeypatch):
    """This one still sees checkpoint 4, which process 0 has moved away."""
    seen = []
    store = CheckpointStore(run_dir, keep=2)
    monkeypatch.setattr(distributed, "from_main", lambda _: [2])
    monkeypatch.setattr(checkpoint, "time", types.SimpleNamespace(sleep=seen.append))
    with pytest.raises(TryAgainError, match="still sees other checkpoints than process 0"):
        store._reload()
    assert sum(seen) >= 60
    checkpoint.time.sleep = lambda _: shutil.rmtree(run_dir / "checkpoints" / "4")
    store._reload()
    assert store._steps() == [2]
    store.close()


def test_an_old_checkpoint_that_cannot_be_read_is_no_crash(run_dir, monkeypatch):
    monkeypatch.setattr(ocp.JsonCheckpointHandler, "restore", io_error)
    with pytest.raises(
        TryAgainError, match=r"run/checkpoints cannot be read .*Input/output error.*again with --resume"
    ):
        CheckpointStore(run_dir, keep=2)


def test_a_store_that_does_not_answer_costs_a_checkpoint(tmp_path, monkeypatch):
    state, store = init_state(config(), mesh_of(config())), CheckpointStore(tmp_path, keep=2)
    monkeypatch.setattr(ocp.CheckpointManager, "save", io_error)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail_under(tmp_path / "checkpoints", os.stat))
        assert store.save(state, meta(1)).startswith("checkpoint of step 1 not written: OSError: [Errno 5]")
    monkeypatch.setattr(CheckpointStore, "_open", io_error)
    assert store.save(state, meta(2)).startswith("checkpoint of step 2 not written: OSError: [Errno 5]")
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)  # then the others wait in `_open` for this one
    with pytest.raises(TryAgainError, match="checkpoints cannot be read or written"):
        store.save(state, meta(3))


def test_a_held_out_loss_that_is_not_finite_is_never_the_best(tmp_path):
    state, store = init_state(config(), mesh_of(config())), CheckpointStore(tmp_path, keep=1, keep_best=1)
    for step, loss in ((1, float("nan")), (2, 1.0), (3, float("inf")), (4, float("nan")), (5, 2.0)):
        assert store.save(state, meta(step), held_out_loss=loss) is None
    assert store.close() is None
    assert folders(tmp_path) == ["2", "5"]


def folders(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_best_by_held_out_loss_stays(tmp_path):
    state, store = init_state(config(), mesh_of(config())), CheckpointStore(tmp_path, keep=2, keep_best=1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, None), (6, None)):
        assert store.save(state, meta(step), held_out_loss=loss) is None
    assert store.close() is None
    assert folders(tmp_path) == ["2", "5", "6"]
    (tmp_path / "checkpoints" / "5" / "metrics").mkdir()
    (tmp_path / "checkpoints" / "5" / "metrics" / "metrics").write_text('{"held_out_l')  # damaged later
    for step, loss, kept in ((7, 1.5, ["2", "6", "7"]), (8, 0.5, ["7", "8"])):
        reopened = CheckpointStore(tmp_path, keep=2, keep_best=1)  # the losses are on disk, too
        reopened.save(state, meta(step), held_out_loss=loss)
        reopened.close()
        assert folders(tmp_path) == kept


def test_a_save_is_of_its_own_step_though_the_state_is_donated(tmp_path):
    state, store = init_state(config(), mesh_of(config())), CheckpointStore(tmp_path, keep=2)
    big = jax.device_put(np.arange(2**24, dtype=np.float32))
    state = dataclasses.replace(state, opt_state=(state.opt_state, big))
    expected = host(state)
    advance = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    store.save(state, meta(1))
    for _ in range(10):
        state = advance(state)
    jax.block_until_ready(state)
    assert_same_bits(store.restore(abstract)[0], expected)
    store.close()


# What orbax leaves behind when a write fails: futures whose error nobody asked for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_one_checkpoint_and_keeps_those_before(tmp_path):
    state, store = init_state(config(), mesh_of(config())), CheckpointStore(tmp_path, keep=2, keep_best=0)
    for step in (1, 2):
        store.save(state, meta(step))
    store.settle()
    with full_disk():
        problem = store.save(state, meta(3)) or store.settle()
        assert problem.startswith("checkpoint of step 3 not written: ")
        assert "File too large" in problem
        assert store.failure == problem
        # A thread of orbax may still write into what failed; that goes with the next success.
        assert [name for name in folders(tmp_path) if name.isdigit()] == ["1", "2"]
    assert store.save(state, meta(4)) is None
    assert store.close() is None
    assert (store.failure, store.num_failures) == (None, 1)
    assert folders(tmp_path) == ["2", "4"]
    assert read_newest_meta(tmp_path).step == 4
    del store
    gc.collect()  # what orbax left behind belongs to this test, not to one that runs later


def test_a_store_that_is_gone_is_reported(tmp_path):
    state, store = init_state(config(), mesh_of(config())), CheckpointStore(tmp_path / "run", keep=2)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file where the folder was")
    problem = store.save(state, meta(1)) or store.settle()
    assert problem.startswith("checkpoint of step 1 not written: ")
    assert store.num_failures == 1
