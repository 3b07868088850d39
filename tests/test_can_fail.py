"""The suite can fail: with the ring broken on purpose, the comparison that every conformance case makes is red."""

import jax
import jax.numpy as jnp
import pytest
from attention_cases import Case, assert_matches, ring_call, run
from jax import lax

import ring_jax
from ring_jax import ring
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
    """dK and dV are the only float32 blocks that travel without their tokens."""
    hop = ring._Ring.hop
    monkeypatch.setattr(ring._Ring, "hop", lambda self, tree: tree if isinstance(tree, jax.Array) else hop(self, tree))
    with pytest.raises(AssertionError, match="dk: error"):
        check()


def test_backward_pass_from_the_own_blocks_lse(monkeypatch):
    backward = ring.backward
    monkeypatch.setattr(
        ring, "backward", lambda spec, inputs, out, lse, *rest: backward(spec, inputs, out, lse - 1, *rest)
    )
    with pytest.raises(AssertionError, match="dq: error"):
        check()


def test_mask_from_array_indices(monkeypatch):
    """Default positions counted from 0 on every shard."""
    monkeypatch.setattr(
        ring.layouts, "shard_positions", lambda layout, shard, length, n: jnp.arange(length) + 0 * shard
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
