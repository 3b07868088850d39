"""The drop-in for the package `ringattention`: its calls inside `shard_map`, against dense attention."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE
from jax import P
from jax.sharding import Mesh

from ring_jax import compat
from ring_jax.compat import blockwise_feedforward, ringattention

SHARDS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 4, 24, 4, 4, 6
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE, COTANGENT = jnp.asarray(RNG.normal(size=(4, 2, LENGTH, HEADS, HEAD_DIM)), jnp.float32)
BIAS = RNG.normal(size=(2, 1, 1, LENGTH)).astype("float32") * 3
SEGMENTS = np.array([[0] * 9 + [1] * 15, [2] * 7 + [-1] * 3 + [0] * 14], np.int32)
# As programs for that package pass it.
BLOCKWISE = {
    "deterministic": True,
    "dropout_rng": None,
    "attn_pdrop": 0.0,
    "query_chunk_size": 3,
    "key_chunk_size": 2,
    "policy": jax.checkpoint_policies.nothing_saveable,
    "dtype": jnp.float32,
    "precision": None,
    "prevent_cse": False,
}


def older_style(causal_block_size, *, check_vma=True, float32_logits=True, **changed):
    """The call as its README has it: sharded q, k, v; bias and segment ids whole on every device of the axis."""
    blockwise = BLOCKWISE | {"causal_block_size": causal_block_size} | changed
    rows = ("dp", "fsdp")
    shard = P(rows, "sp", "tp", None)

    def local(q, k, v, bias, segment_ids):
        return ringattention(q, k, v, bias, segment_ids, None, "sp", float32_logits, blockwise)

    return jax.shard_map(
        local,
        mesh=Mesh(np.array(jax.devices()[: 2 * SHARDS]).reshape(1, 2, 1, SHARDS), ("dp", "fsdp", "tp", "sp")),
        in_specs=(shard, shard, shard, P(rows, None, None, None), P(rows, None)),
        out_specs=shard,
        check_vma=check_vma,
    )


def dense(causal_block_size):
    """The older package's definition, with the bias added: 0 is a segment as any other."""

    def attend(q, k, v, bias, segment_ids):
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, k, precision="highest") / HEAD_DIM**0.5
        mask = jnp.ones((1, 1, LENGTH, LENGTH), bool)
        if causal_block_size is not None:
            block = jnp.arange(LENGTH) // causal_block_size
            mask &= block[:, None] >= block[None, :]
        if segment_ids is not None:
            mask &= (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        scores = scores if bias is None else scores + bias
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        return jnp.einsum("BNTS,BSNH->BTNH", weights, v, precision="highest")

    return attend


def run(attend, bias=None, segment_ids=None):
    """(out, gradients of q, k, v and, if there is one, the bias)."""

    def objective(arrays):
        out = attend(*arrays[:3], arrays[3], segment_ids)
        return jnp.sum(out * COTANGENT), out

    arrays = (QUERY, KEY, VALUE, bias)
    (_, out), slopes = jax.jit(jax.value_and_grad(objective, has_aux=True))(arrays)
    return out, jax.tree.leaves(slopes)


def assert_close(got, want):
    np.testing.assert_allclose(got[0], want[0], atol=FORWARD_TOLERANCE)
    for x, y in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(x, y, atol=GRADIENT_TOLERANCE * np.abs(y).max(), rtol=0)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("block", "packed"), [(None, False), (1, False), (4, False), (1, True), (5, True)])
def test_against_dense(block, packed: bool, check_vma: bool):
    """Blocks of 4 and 5 cross the shards of 6 tokens."""
    segment_ids = SEGMENTS if packed else None
    got = run(older_style(block, check_vma=check_vma), segment_ids=segment_ids)
    assert_close(got, run(dense(block), segment_ids=segment_ids))


@pytest.mark.parametrize(("block", "packed"), [(None, False), (1, True), (4, False)])
def test_bias_is_added_and_has_a_gradient(block, packed: bool):
    """The older package took the minimum with the causal mask, which drops whatever is positive."""
    segment_ids = SEGMENTS if packed else None
    want = run(dense(block), BIAS, segment_ids)
    assert len(want[1]) == 4
    assert_close(run(older_style(block), BIAS, segment_ids), want)


@pytest.mark.parametrize("block", [None, 1, 4])
def test_dropout(block):
    """Each key changes the result; on average nothing does."""
    keys = jax.random.split(jax.random.key(0), 100)

    def call(key):
        attend = older_style(block, deterministic=False, attn_pdrop=0.25, dropout_rng=key)
        return attend(QUERY, KEY, VALUE, None, None)

    outs = np.asarray(jax.jit(lambda keys: jax.lax.map(call, keys))(keys))
    want = np.asarray(dense(block)(QUERY, KEY, VALUE, None, None))
    assert np.abs(outs[0] - outs[1]).max() > 0.05
    error = np.abs(outs.mean(0) - want) / (outs.std(0) / len(keys) ** 0.5 + 1e-6)
    assert error.max() < 6
    same = older_style(block, attn_pdrop=0.25, dropout_rng=keys[0])  # deterministic
    np.testing.assert_allclose(jax.jit(same)(QUERY, KEY, VALUE, None, None), want, atol=FORWARD_TOLERANCE)


def test_dropout_draws_for_every_pair():
    """In blocks too: with scores 0 and one-hot values, row t is 1/n/(1 - rate) on the keys that stay."""
    one_hot = jnp.broadcast_to(jnp.eye(LENGTH)[:, None], (2, LENGTH, HEADS, LENGTH))
    attend = older_style(4, deterministic=False, attn_pdrop=0.5, dropout_rng=jax.random.key(3))
    out = np.asarray(jax.jit(attend)(0 * QUERY, 0 * KEY, one_hot, None, None))
    np.testing.assert_allclose(np.unique(out[:, -4:]), [0, 2 / LENGTH], rtol=1e-6)
    kept = out[:, -4:] > 0  # the last block of queries sees all keys
    assert (kept != kept[:, :1]).any() and (kept != kept[:, :, :1]).any()
    assert (kept[0] != kept[1]).any()  # rows on two devices
    blocks = kept.reshape(*kept.shape[:3], -1, 4)
    assert (blocks != blocks[..., :1]).any()


def test_fewer_key_heads_and_dtypes():
    half = [jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY[:, :, :2], VALUE[:, :, :2])]
    out = jax.jit(older_style(1, float32_logits=False))(*half, None, None)
    assert out.dtype == jnp.bfloat16
    wide = jax.jit(older_style(1))(*(x.astype(jnp.float32) for x in half[:2]), half[2], None, None)
    assert wide.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), wide.astype(jnp.float32), atol=0.02)
    repeated = [jnp.repeat(x.astype(jnp.float32), 2, axis=2) for x in half[1:]]
    want = dense(1)(half[0].astype(jnp.float32), *repeated, None, None)
    np.testing.assert_allclose(wide.astype(jnp.float32), want, atol=0.02)


def test_signatures():
    """Positional order of version 0.1.2."""
    names = "q k v attn_bias segment_ids cache_idx axis_name float32_logits blockwise_kwargs"
    assert list(inspect.signature(ringattention).parameters) == names.split()
    names = "feedforward inputs chunk_size static_argnums policy pre_remat"
    assert list(inspect.signature(blockwise_feedforward).parameters) == names.split()
    assert compat.ringattention_jax is ringattention


def call(**changed):
    defaults = {"attn_bias": None, "segment_ids": None, "cache_idx": None, "blockwise_kwargs": {"causal_block_size": 1}}
    arguments = defaults | changed
    return ringattention(QUERY, KEY, VALUE, axis_name="sequence", float32_logits=True, **arguments)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (NotImplementedError, "cache_idx", {"cache_idx": 3}),
        (NotImplementedError, "precision=HIGHEST", {"precision": jax.lax.Precision.HIGHEST}),
        (TypeError, "needs causal_block_size", {"blockwise_kwargs": {}}),
        (TypeError, 'did you mean "query_chunk_size"', {"q_chunk_size": 3}),
        (ValueError, "causal_block_size must be None or an integer", {"causal_block_size": 0}),
        (ValueError, "dropout_rng is needed", {"attn_pdrop": 0.1, "deterministic": False}),
        (ValueError, "attn_bias must have shape", {"attn_bias": jnp.zeros((2, 1, LENGTH, LENGTH))}),
        (ValueError, "segment_ids must have shape", {"segment_ids": jnp.ones((2, 6), jnp.int32)}),
    ],
    ids=lambda x: x.split()[0] if isinstance(x, str) else "",
)
def test_refusals(error, message: str, changed):
    direct = {k: v for k, v in changed.items() if k in inspect.signature(ringattention).parameters}
    blockwise = {k: v for k, v in changed.items() if k not in direct}
    if blockwise:
        direct["blockwise_kwargs"] = {"causal_block_size": 1} | blockwise
    with pytest.raises(error, match=message):
        call(**direct)


class FeedForward(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(20, name="up")(x)
        x = nn.Dropout(self.rate, deterministic=False)(x) if self.rate else x
        return nn.Dense(5, name="down")(jax.nn.gelu(x))


class Blockwise(nn.Module):
    chunk_size: int | None
    pre_remat: bool = True
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        feedforward = FeedForward(self.rate, name="mlp")
        if self.chunk_size is None:
            return feedforward(x)
        return blockwise_feedforward(feedforward, x, self.chunk_size, pre_remat=self.pre_remat)


@pytest.mark.parametrize("pre_remat", [True, False])
def test_blockwise_feedforward_of_linen(pre_remat: bool):
    """Same parameters, values and gradients as without chunks."""
    x = QUERY[..., 0]
    weights = jax.jit(Blockwise(None).init)(jax.random.key(0), x)
    chunked = Blockwise(8, pre_remat)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(chunked.init, jax.random.key(0), x))
    assert shapes == jax.tree.map(jnp.shape, weights)

    def slopes(model):
        return jax.jit(jax.value_and_grad(lambda w, x: (model.apply(w, x) ** 2).sum(), argnums=(0, 1)))(weights, x)

    for a, b in zip(*(jax.tree.leaves(slopes(model)) for model in (chunked, Blockwise(None))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_blockwise_feedforward_draws_dropout_in_every_step():
    model, x = Blockwise(4, rate=0.5), jnp.ones((1, 8, 4))
    weights = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    out = jax.jit(lambda key: model.apply(weights, x, rngs={"dropout": key}))(jax.random.key(2))
    assert np.abs(out[0, 0] - out[0, 1]).max() > 1e-3  # tokens 0 and 1 are in different steps


@pytest.mark.parametrize("pre_remat", [True, False])
def test_blockwise_feedforward_of_a_function(pre_remat: bool):
    """A step gets ``chunk_size`` tokens, T / chunk_size apart, as in the older package."""
    x = QUERY[..., 0]
    out = jax.jit(lambda x: blockwise_feedforward(lambda h: h - h.mean(1, keepdims=True), x, 8, pre_remat=pre_remat))(x)
    groups = x.reshape(2, 8, 3, HEADS)
    np.testing.assert_allclose(out, (groups - groups.mean(1, keepdims=True)).reshape(x.shape), atol=1e-6)
    with pytest.raises(ValueError, match="must be a multiple of chunk_size=7"):
        blockwise_feedforward(jnp.tanh, x, 7)
