"""Model FLOPs: the closed form against arrays, against masks counted pair by pair, and against published figures."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import Transformer
from models.config import ModelConfig
from ring_jax.masks import Rules, Tokens, visible
from train.flops import (
    BatchCounts,
    count_batch,
    count_for,
    count_rows,
    matmul_params,
    model_flops,
    num_params,
    peak_flops,
    pipeline_bubble,
)

TINY = ModelConfig(vocab_size=256, num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=40)
LLAMA_70B = ModelConfig(
    vocab_size=128_256, num_layers=80, embed_dim=8192, num_heads=64, num_kv_heads=8, head_dim=128, mlp_dim=28_672
)


def arrays(model):
    return jax.tree.leaves(jax.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_arrays(tied):
    model = dataclasses.replace(TINY, tie_embeddings=tied)
    leaves = arrays(model)
    assert num_params(model) == sum(leaf.size for leaf in leaves)
    norms, table = (2 * 3 + 1) * 16, 256 * 16
    assert matmul_params(model) == num_params(model) - norms - (0 if tied else table)


@pytest.mark.parametrize("window", [None, 0, 3, 100])
def test_visible_pairs_are_those_of_the_mask(window):
    generator = np.random.default_rng(0)
    segment_ids = np.sort(generator.integers(1, 6, (3, 40)), axis=1).astype(np.int32)
    segment_ids[0, 30:] = 0
    segment_ids[2] = 0
    positions = np.tile(np.arange(40, dtype=np.int32), (3, 1))
    tokens = Tokens(jnp.asarray(positions), jnp.asarray(segment_ids))
    rules = Rules(is_causal=True, window=None if window is None else (window, 0))
    counts = count_batch(segment_ids, window=window)
    assert counts.num_pairs == int(visible(tokens, tokens, rules).sum())
    assert (counts.num_tokens, counts.num_slots) == (70, 120)
    assert counts.padding_share == pytest.approx(50 / 120)


@pytest.mark.parametrize("windows", [(), (2, None, 5)])
def test_rows_by_their_lengths_count_like_the_batch(windows):
    model = dataclasses.replace(TINY, windows=windows)
    rows = [[3, 9, 1], [16], [], [7, 7]]
    ids = np.zeros((4, 16), np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    assert count_rows(model, rows, 16) == count_for(model, ids)
    assert count_rows(model, rows, 16).padding_share == pytest.approx(21 / 64)


def test_long_rows_do_not_overflow():
    length = 2**22
    counts = count_batch(np.ones((1, length), np.int32))
    assert counts.num_pairs == length * (length + 1) // 2
    assert count_batch(np.zeros((0, 8), np.int32)) == BatchCounts(0, 0, 0)
    assert count_batch(np.zeros((2, 8), np.int32)) == BatchCounts(0, 16, 0)


def test_the_form_agrees_with_a_compiled_model():
    """XLA's own count of a forward pass, a third of a step; its attention is a small part here."""
    model = dataclasses.replace(TINY, num_layers=1, embed_dim=128, mlp_dim=512)
    abstract = jax.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((1, 64), np.int32)
    analysis = jax.jit(lambda model, tokens: model(tokens)).lower(abstract, tokens).cost_analysis()
    ours = model_flops(model, count_batch(np.ones((1, 64), np.int32))) / 3
    assert ours == pytest.approx(analysis["flops"], rel=0.1)  # XLA counts norms, softmax and masked pairs, too


def test_a_published_figure():
    """Llama-3.1-70B at 131,072 tokens, 963 tokens/s on a chip: 408 TFLOP/s in weights (with the embedding table, which
    is no matmul: 1.5 %) and 496 in attention, 38.9 % of 2307 (`performance.md`, section 3.1)."""
    length = 131_072
    weights = model_flops(LLAMA_70B, BatchCounts(length, length, 0)) / length * 963 / 1e12
    attention = model_flops(LLAMA_70B, BatchCounts(0, length, length * (length + 1) // 2)) / length * 963 / 1e12
    assert weights == pytest.approx(408 * matmul_params(LLAMA_70B) / num_params(LLAMA_70B), rel=2e-3)
    assert attention == pytest.approx(496, rel=2e-3)
    assert (weights + attention) / 2307 == pytest.approx(0.389, abs=0.003)


def test_peak_by_device_kind():
    def devices(*kinds):
        return [SimpleNamespace(device_kind=kind) for kind in kinds]

    assert peak_flops(devices("NVIDIA H200")) == 9.89e14
    assert peak_flops(devices(*["TPU v5p"] * 4)) == 4 * 4.59e14
    assert peak_flops(devices("NVIDIA H200", "cpu")) is None
    assert peak_flops(devices("NVIDIA H100 80GB HBM3")) == 9.89e14
    for slower in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert peak_flops(devices(slower)) is None
    assert peak_flops(jax.devices()) is None
    assert peak_flops([]) is None


@pytest.mark.parametrize(
    ("stages", "pieces", "repeats", "bubble"),
    [(1, 4, 1, 0.0), (4, 4, 1, 0.4286), (8, 8, 1, 0.4667), (8, 32, 1, 0.1795), (8, 32, 2, 0.0986), (8, 32, 4, 0.0519)],
)
def test_the_bubble(stages, pieces, repeats, bubble):
    assert pipeline_bubble(stages, pieces, repeats) == pytest.approx(bubble, abs=5e-5)
