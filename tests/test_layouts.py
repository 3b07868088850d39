import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ring_jax
from ring_jax import layouts

any_layout = st.sampled_from(layouts.LAYOUTS)


@given(any_layout, st.integers(1, 9), st.integers(1, 6))
@settings(deadline=None)
def test_permutation_round_trip_and_positions(layout: str, num_shards: int, blocks: int):
    length = layouts.required_multiple(layout, num_shards) * blocks
    order = ring_jax.permutation(layout, length, num_shards)
    assert sorted(order) == list(range(length))
    x = np.arange(2 * length * 3).reshape(2, length, 3)
    moved = ring_jax.to_layout(x, layout, num_shards)
    np.testing.assert_array_equal(moved, x[:, order])
    np.testing.assert_array_equal(ring_jax.from_layout(moved, layout, num_shards), x)
    local = length // num_shards
    for shard in range(num_shards):
        positions = layouts.shard_positions(layout, shard, local, num_shards)
        assert positions.dtype == jnp.int32
        np.testing.assert_array_equal(positions, order[shard * local : (shard + 1) * local])


def test_pictures_of_the_docstring():
    assert ring_jax.permutation("striped", 12, 3).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert ring_jax.permutation("zigzag", 12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert ring_jax.permutation("contiguous", 12, 3).tolist() == list(range(12))


def test_zigzag_on_one_shard_needs_nothing():
    assert ring_jax.permutation("zigzag", 7, 1).tolist() == list(range(7))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis_and_jax_arrays(axis: int):
    x = jnp.arange(64).reshape(8, 8)
    moved = ring_jax.to_layout(x, "zigzag", 2, axis=axis)
    np.testing.assert_array_equal(moved, np.take(np.asarray(x), ring_jax.permutation("zigzag", 8, 2), axis=axis))
    np.testing.assert_array_equal(ring_jax.from_layout(moved, "zigzag", 2, axis=axis), x)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize(("length", "shards"), [(1, 4), (13, 3), (15, 4), (1000, 8)])
def test_lengths_that_divide_nothing(layout: str, length: int, shards: int):
    """The order is that of the padded sequence without its padding, and slots say where each token belongs."""
    order = ring_jax.permutation(layout, length, shards)
    padded, slots = layouts.padded_slots(layout, length, shards)
    assert padded % layouts.required_multiple(layout, shards) == 0 and padded - length < 2 * shards
    full = ring_jax.permutation(layout, padded, shards)
    np.testing.assert_array_equal(order, full[full < length])
    np.testing.assert_array_equal(np.append(order, -1)[slots], np.where(full < length, full, -1))
    x = np.arange(length)
    np.testing.assert_array_equal(
        ring_jax.from_layout(ring_jax.to_layout(x, layout, shards, axis=0), layout, shards, axis=0), x
    )


@pytest.mark.parametrize(
    ("layout", "length", "message"),
    [
        ("zigzag", 1000, r"seq_len=1000 must be a positive multiple of 16.*zigzag layout; pad to 1008 or use layout"),
        ("striped", 12, r"seq_len=12 must be a positive multiple of 8.*pad to 16"),
        ("contiguous", 0, r"seq_len=0 must be a positive multiple of 8"),
    ],
)
def test_lengths_that_cannot_be_cut_evenly(layout: str, length: int, message: str):
    with pytest.raises(ValueError, match=message):
        layouts.check_length(layout, length, 8)


def test_no_tokens_and_unknown_names():
    with pytest.raises(ValueError, match="seq_len=0 must be at least 1"):
        ring_jax.permutation("contiguous", 0, 4)
    with pytest.raises(ValueError, match='did you mean "zigzag"'):
        ring_jax.permutation("zig-zag", 8, 2)
