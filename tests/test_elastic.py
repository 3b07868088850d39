"""A run that goes on elsewhere: on another mesh, after damage, after a batch that gives NaN; nothing lost or twice."""

import dataclasses
import json
import shutil
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import test_watch
from documents import assert_same_batch, expected_pieces, pieces_in
from jax import lax
from test_loop import losses, run, tiny
from test_step import _no_stored_programs  # noqa: F401
from tiny_run import write_text

import train.step
from train import watch
from train.config import CheckpointConfig, MeshConfig
from train.data import load_corpus
from train.metrics import read_rows

MESHES = {"(1, 2, 2, 2)": (1, 2, 2, 2), "(2, 2, 1, 1)": (2, 2, 1, 1), "(1, 1, 1, 8)": (1, 1, 1, 8), "one": (1, 1, 1, 1)}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("elastic") / "text")


def on(sizes):
    return MeshConfig(**dict(zip(("data", "tensor", "pipeline", "sequence"), sizes, strict=True)))


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


class Seen:
    """The batches of the steps, the last one where a step came twice."""

    def __init__(self):
        self.batches = {}
        self._plain = watch.Watcher.begin

    def __enter__(self):
        def begin(watcher, step):
            self._plain(watcher, step)
            self.batches[step] = watcher._current.batch

        self._patch = mock.patch.object(watch.Watcher, "begin", begin)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    """A run of 4 steps on (1, 2, 2, 2): its directory."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    run_config = tiny(text, run_dir, mesh=on((1, 2, 2, 2)), num_steps=4, checkpoint=CheckpointConfig(every=4))
    assert run(run_config)[0] == 0
    return run_dir


@pytest.fixture(scope="module")
def went_on(text, saved, tmp_path_factory):
    """The same, with two more steps on the same mesh: directory and batches."""
    return go_on(text, saved, tmp_path_factory.mktemp("went_on"), (1, 2, 2, 2))


def go_on(text, saved, folder, sizes):
    shutil.copytree(saved, folder / "run")
    with Seen() as seen:
        assert run(tiny(text, folder / "run", mesh=on(sizes), num_steps=6, resume=True))[0] == 0
    return folder / "run", seen.batches


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_another_mesh_scores_the_same_and_reads_the_same(text, saved, went_on, tmp_path, name):
    shutil.copytree(saved, tmp_path / "scored" / "run")
    (tmp_path / "scored" / "run" / "summary.json").unlink()
    assert run(tiny(text, tmp_path / "scored" / "run", mesh=on(MESHES[name]), num_steps=4, resume=True))[0] == 0
    scores = [summary(place)["held_out_loss"] for place in (tmp_path / "scored" / "run", saved)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)

    (tmp_path / "more").mkdir()
    run_dir, batches = go_on(text, saved, tmp_path / "more", MESHES[name])
    assert batches.keys() == went_on[1].keys() == {5, 6}
    for step, batch in batches.items():
        assert_same_batch(batch, went_on[1][step])
    np.testing.assert_allclose(np.array(losses(run_dir)), np.array(losses(went_on[0])), rtol=1e-5)


# What orbax leaves behind when tensorstore finds damage: callbacks into an event loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_truncated_newest_checkpoint_costs_its_steps_only(text, tmp_path):
    run_dir, run_config = tmp_path / "run", tiny(text, tmp_path / "run")
    assert run(run_config)[0] == 0
    expected, score = losses(run_dir), summary(run_dir)["held_out_loss"]
    for path in (run_dir / "checkpoints" / "6" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-100])
    code, output = run(dataclasses.replace(run_config, resume=True))
    assert code == 0
    assert f"moved to {run_dir}/checkpoints_incomplete" in output
    assert "checkpoint 6: incomplete or damaged" in output
    assert "continuing after step 4" in output
    assert losses(run_dir) == expected
    assert summary(run_dir)["held_out_loss"] == score


@pytest.mark.slow
def test_one_batch_that_gives_nan_leaves_no_trace_but_its_row(text, tmp_path):
    """The real step; the run goes on as if the batch had not been there."""
    plain_sums, plain_fetch, marked = train.step.loss_sums, watch.Watcher.fetch, 255  # no byte of the text

    def sums(params, batch, config):
        found = plain_sums(params, batch, config)
        bad = lax.pmax(jnp.any(batch["tokens"] == marked).astype(jnp.float32), ("data", "sequence"))
        return found._replace(objective=found.objective * jnp.where(bad > 0, jnp.nan, 1.0))

    def rows_of(name, change):
        """Metrics of a run whose third batch is changed."""
        drawn = []

        def fetch(watcher, data):
            drawn.append(plain_fetch(watcher, data))
            return change(drawn[-1], watcher, data) if len(drawn) == 3 else drawn[-1]

        with mock.patch.object(watch.Watcher, "fetch", fetch), mock.patch.object(train.step, "loss_sums", sums):
            assert run(tiny(text, tmp_path / name))[0] == 0
        return read_rows(tmp_path / name)

    rows = rows_of("nan", lambda batch, *_: batch | {"tokens": np.full_like(batch["tokens"], marked)})
    assert [row["skipped"] for row in rows] == [0, 0, 1, 0, 0, 0]
    assert summary(tmp_path / "nan")["skipped_steps"] == 1
    without = rows_of("without", lambda _, watcher, data: plain_fetch(watcher, data))
    assert [row["loss"] for row in rows if not row["skipped"]] == [row["loss"] for row in without][:5]


def test_every_document_is_seen_once_over_stops_kills_and_meshes(text, tmp_path):
    """One epoch in five pieces; the step is a counter."""
    run_config = test_watch.tiny(text, tmp_path / "run")
    documents = load_corpus(run_config.data).train
    num_rows = load_corpus(run_config.data).parts[0].packing(64).num_rows
    assert num_rows % 2 == 0
    run_config = dataclasses.replace(run_config, num_steps=num_rows // 2)
    with Seen() as seen:
        for stop, sizes, is_killed in ((2, (1, 1, 1, 2), False), (4, (2, 1, 1, 2), True), (5, (1, 1, 2, 1), False)):
            more = {"mesh": on(sizes), "resume": stop > 2}
            assert test_watch.run(dataclasses.replace(run_config, **more), stop_after=stop)[0] == 130
            if is_killed:  # before it could save
                shutil.rmtree(tmp_path / "run" / "checkpoints" / str(stop))
        more = {"mesh": on((2, 1, 1, 1)), "resume": True}
        assert test_watch.run(dataclasses.replace(run_config, **more))[0] == 0
    assert seen.batches.keys() == set(range(1, num_rows // 2 + 1))
    assert pieces_in(seen.batches.values()) == expected_pieces(documents, 64)
