"""The suite can fail: with the ring broken on purpose, the comparison that every conformance case makes is red."""

import jax
import jax.numpy as jnp
import pytest
from attention_cases import Case, assert_matches, ring_call, run
from jax import lax

import ring_jax
from ring_jax import layouts, ring, travel
from ring_jax.kernels import xla

CASE = Case(ring=3, layout="zigzag", kind="causal")


def check() -> None:
    jax.clear_caches()
    assert_matches(CASE, run(CASE, ring_call(CASE, ring_jax.make_mesh(sequence=3))))


@pytest.fixture(autouse=True)
def _forget():
    yield
    jax.clear_caches()


def test_unbroken():
    check()


def test_keys_that_do_not_travel(monkeypatch):
    monkeypatch.setattr(lax, "ppermute", lambda tree, *_: tree)
    with pytest.raises(AssertionError, match="out: error"):
        check()


def test_gradients_that_do_not_come_home(monkeypatch):
    """Gradients are what `travel.tour` sends apart from the blocks: bare arrays, one for each track."""
    hop = travel._hop

    def forget(grid, blocks, move):
        return blocks if isinstance(blocks[0], jax.Array) else hop(grid, blocks, move)

    monkeypatch.setattr(travel, "_hop", forget)
    with pytest.raises(AssertionError, match="dk: error"):
        check()


def test_backward_pass_from_the_own_blocks_lse(monkeypatch):
    backward = ring.backward
    monkeypatch.setattr(ring, "backward", lambda problem, x: backward(problem, x._replace(lse=x.lse - 1)))
    with pytest.raises(AssertionError, match="dq: error"):
        check()


def test_mask_from_array_indices(monkeypatch):
    """Default positions counted from 0 on every shard."""
    monkeypatch.setattr(
        layouts, "shard_positions", lambda layout, shard, length, n: jnp.arange(length) + 0 * shard
    )
    with pytest.raises(AssertionError, match="out: error"):
        check()


def test_a_merge_that_forgets_to_rescale(monkeypatch):
    forward_block = xla.forward_block

    def forget(carry, *arguments, **keywords):
        new = forward_block(carry, *arguments, **keywords)
        return new._replace(total=new.total - carry.total)

    monkeypatch.setattr(xla, "forward_block", forget)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check()
