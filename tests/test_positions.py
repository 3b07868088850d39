"""Loss by position: every target in one bucket, the same on every mesh, and adding up to the whole loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ring_jax import make_mesh
from ring_jax.layouts import to_layout
from train.positions import PositionCurve, loss_by_position, position_edges


def sample(rows=4, length=64):
    generator = np.random.default_rng(1)
    nats = generator.uniform(0, 6, (rows, length)).astype(np.float32)
    positions = np.stack([np.concatenate([np.arange(n), np.arange(length - n)]) for n in (10, 1, 40, 64)][:rows])
    valid = generator.random((rows, length)) < 0.8
    valid[1] = False
    nats[~valid] = np.nan
    return nats, positions.astype(np.int32), valid


def test_edges():
    assert position_edges(1) == (0, 1)
    assert position_edges(2) == (0, 1, 2)
    assert position_edges(8) == (0, 1, 2, 4, 8)
    assert position_edges(9) == (0, 1, 2, 4, 8, 9)
    assert len(position_edges(2**20)) == 22
    with pytest.raises(ValueError, match="seq_len=0 must be at least 1"):
        position_edges(0)


def test_sums_and_counts_are_those_of_a_histogram():
    nats, positions, valid = sample()
    edges = position_edges(64)
    sums, counts = jax.jit(loss_by_position, static_argnames="edges")(nats, positions, valid, edges=edges)
    expected, _ = np.histogram(positions[valid], edges)
    np.testing.assert_array_equal(counts, expected)
    expected, _ = np.histogram(positions[valid], edges, weights=nats[valid].astype(np.float64))
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert (sums.dtype, counts.dtype) == (jnp.float32, jnp.int32)


def test_no_target_is_lost_outside_the_edges():
    positions = np.array([[0, 3, 4, 99]], np.int32)
    sums, counts = loss_by_position(np.ones((1, 4), np.float32), positions, np.ones((1, 4), bool), (1, 2, 4))
    assert (list(sums), list(counts)) == ([1, 3], [1, 3])
    _, counts = loss_by_position(np.ones((1, 4), np.float32), positions, np.ones((1, 4), bool), (0, 8))
    assert list(counts) == [4]
    for edges in ((0,), (0, 4, 4), (4, 0)):
        with pytest.raises(ValueError, match="must increase"):
            loss_by_position(np.ones((1, 4), np.float32), positions, np.ones((1, 4), bool), edges)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("shape", [{"sequence": 4}, {"data": 2, "sequence": 2}, {"data": 4}])
def test_every_mesh_gives_the_same_curve(layout, shape):
    nats, positions, valid = sample()
    mesh, edges = make_mesh(**shape), position_edges(64)

    def local(nats, positions, valid):
        return jax.lax.psum(loss_by_position(nats, positions, valid, edges), ("data", "sequence"))

    spec = P("data", "sequence")
    arrays = [to_layout(array, layout, shape.get("sequence", 1)) for array in (nats, positions, valid)]
    sums, counts = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=P()))(*arrays)
    whole_sums, whole_counts = loss_by_position(nats, positions, valid, edges)
    np.testing.assert_array_equal(counts, whole_counts)
    np.testing.assert_allclose(sums, whole_sums, rtol=1e-6)


def test_the_curve_adds_up_to_the_loss():
    nats, positions, valid = sample()
    curve = PositionCurve(64)
    assert curve.row() == {}
    assert np.isnan(curve.mean())
    for rows in (slice(0, 1), slice(1, 2), slice(2, 4)):  # the second has no target at all
        curve.add(*loss_by_position(nats[rows], positions[rows], valid[rows], curve.edges))
    assert curve.counts.sum() == valid.sum()
    assert curve.mean() == pytest.approx(nats[valid].mean(dtype=np.float64), rel=1e-6)
    means = curve.row()["held_out_loss_by_position"]
    assert list(means) == ["0", "1", "2", "4", "8", "16", "32"]
    at = valid & (positions >= 8) & (positions < 16)
    assert means["8"] == pytest.approx(nats[at].mean(dtype=np.float64), rel=1e-6)
    curve.clear()
    curve.add(np.array([2.0] + [0] * 6), np.array([1] + [0] * 6))
    assert curve.means() == {"0": 2.0}, "a bucket without targets has no mean"
    with pytest.raises(ValueError, match="position_edges"):
        curve.add(np.zeros(3), np.zeros(3))
