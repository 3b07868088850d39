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


@pytest.mark.parametrize(
    ("layout", "length", "shards", "message"),
    [
        (
            "zigzag",
            1000,
            8,
            r"seq_len=1000 must be a positive multiple of 16.*zigzag layout; pad to 1008 or use layout",
        ),
        ("striped", 10, 4, r"seq_len=10 must be a positive multiple of 4.*pad to 12"),
        ("contiguous", 0, 4, r"seq_len=0 must be a positive multiple of 4"),
        ("zigzag", 4, 4, r"pad to 8"),
        ("zig-zag", 8, 2, r'did you mean "zigzag"'),
    ],
)
def test_lengths_and_names_that_do_not_fit(layout: str, length: int, shards: int, message: str):
    with pytest.raises(ValueError, match=message):
        ring_jax.permutation(layout, length, shards)
