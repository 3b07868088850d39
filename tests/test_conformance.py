"""The conformance suite: every ring size, layout, mask, dtype and head grouping against dense attention in float64."""

import functools

import jax
import numpy as np
import pytest
from attention_cases import Case, assert_matches, dense_mask, gradients, mesh_call, ring_call, run

import ring_jax

RINGS = (1, 2, 3, 4, 8)
LAYOUTS = ("contiguous", "striped", "zigzag", None)
KINDS = ("full", "causal", "packed", "packed_causal", "restart", "shared")
HEADS = ((6, 6), (6, 2), (6, 1))

GRID = [
    Case(ring=ring, layout=layout, kind=kind, seed=index)
    for index, (ring, layout, kind) in enumerate((r, y, k) for r in RINGS for y in LAYOUTS for k in KINDS)
    # Without positions in the rule a layout can change the tiles only, and one device has one layout.
    if not (kind in ("full", "packed") and layout in ("striped", None)) and not (ring == 1 and layout == "striped")
]
GROUPED = [
    Case(ring=ring, layout="zigzag", num_heads=num_heads, num_kv_heads=num_kv_heads, batch=batch, kind=kind)
    for ring in (1, 3)
    for num_heads, num_kv_heads in HEADS
    for batch, kind in ((1, "causal"), (3, "restart"))
]
HALF = [
    Case(ring=ring, layout=layout, kind=kind, dtype=dtype, value_dim=10, local=16, seed=ring)
    for dtype in ("bfloat16", "float16")
    for ring in (1, 3, 8)
    for layout, kind in (("contiguous", "full"), ("striped", "causal"), ("zigzag", "restart"))
    if dtype == "bfloat16" or ring == 3
]
SCALED = [Case(ring=3, layout="zigzag", scale=scale) for scale in (0.02, 1.0)]
ODD = [
    Case(ring=ring, layout=layout, kind="restart", local=local, head_dim=24, value_dim=40, batch=1)
    for ring, local in ((5, 6), (6, 2), (7, 6), (7, 1), (5, 37))
    for layout in ("contiguous", "striped", "zigzag")
    if layout != "zigzag" or local % 2 == 0
]


@pytest.mark.parametrize("case", GRID + GROUPED + HALF + SCALED + ODD, ids=str)
def test_ring_attention(case: Case):
    mesh = ring_jax.make_mesh(sequence=case.ring)
    assert_matches(case, run(case, ring_call(case, mesh)))


@pytest.mark.parametrize(
    "case",
    [
        Case(ring=ring, layout=layout, kind=kind, dtype=dtype, value_dim=10, batch=2)
        for ring, layout, kind, dtype in (
            (1, "contiguous", "causal", "float32"),
            (2, "zigzag", "restart", "float32"),
            (3, "striped", "packed_causal", "float32"),
            (4, "contiguous", "full", "float32"),
            (4, None, "restart", "float32"),
            (4, "zigzag", "shared", "bfloat16"),
            (8, "zigzag", "causal", "float32"),
        )
    ],
    ids=str,
)
def test_dot_product_attention(case: Case):
    mesh = ring_jax.make_mesh(sequence=case.ring, data=2 if case.ring < 8 else 1)
    assert_matches(case, run(case, mesh_call(case, mesh)))


@pytest.mark.parametrize("kind", KINDS)
def test_dot_product_attention_without_a_mesh(kind: str):
    case = Case(kind=kind, local=24)
    assert_matches(case, run(case, mesh_call(case, None)))


@pytest.mark.parametrize("kind", KINDS)
def test_one_hot_values_show_exactly_the_visible_keys(kind: str):
    """With q = k = 0 and V one-hot, row t is 1/n on its n visible keys: sets are compared, not floats."""
    case = Case(ring=4, layout="zigzag", kind=kind, batch=2, local=6, num_heads=1, num_kv_heads=1, value_dim=24)
    order = case.order
    tokens = {name: x[..., order] for name, x in case.tokens().items()}
    zero = np.zeros((2, 24, 1, 10), np.float32)
    one_hot = np.broadcast_to(np.eye(24, dtype=np.float32)[order], (2, 24, 24))[:, :, None]
    attend = ring_call(case, ring_jax.make_mesh(sequence=4))
    out, _ = jax.jit(lambda tokens: attend(zero, zero, one_hot, **tokens))(tokens)
    out = np.asarray(out)[:, np.argsort(order), 0]
    mask = dense_mask(case)
    np.testing.assert_array_equal(out > 0, mask)
    np.testing.assert_allclose(out, mask / np.maximum(mask.sum(-1, keepdims=True), 1), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["zigzag", None])
def test_value_under_value_and_grad_is_that_of_the_plain_forward(layout: str | None, kind: str):
    """A causal mask that vanishes under differentiation would leave the forward pass right and the loss wrong."""
    case = Case(ring=3, layout=layout, kind=kind)
    order = case.order
    arrays = [x[:, order] for x in case.arrays()]
    tokens = {name: x[..., order] for name, x in case.tokens().items()}
    attend = ring_call(case, ring_jax.make_mesh(sequence=3))
    plain = jax.jit(lambda arrays, tokens: attend(*arrays, **tokens))(arrays[:3], tokens)
    under = jax.jit(lambda arrays, tokens: gradients(attend, tokens, arrays))(arrays, tokens)
    for x, y in zip(plain, under, strict=False):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("lengths", [(8, 24), (24, 8)], ids=str)
def test_query_and_key_lengths_that_differ(lengths: tuple[int, int]):
    """A query block that is the tail of a longer context, with positions of its own for each side."""
    length, key_length = lengths
    case = Case(ring=2, local=max(lengths) // 2, batch=2)
    query, key, value, *_ = case.arrays()
    query, key, value = query[:, :length], key[:, :key_length], value[:, :key_length]
    positions = (np.arange(length, dtype=np.int32) + max(0, key_length - length), np.arange(key_length, dtype=np.int32))
    mask = np.broadcast_to(positions[0][:, None] >= positions[1], (2, *lengths))
    scores = np.einsum("btkgh,bskh->bkgts", query.reshape(2, length, 2, 3, 10), key) / np.sqrt(10)
    weights = np.where(mask[:, None, None], np.exp(scores), 0)
    want = np.einsum("bkgts,bskh->btkgh", weights / weights.sum(-1, keepdims=True), value).reshape(2, length, 6, 14)
    call = functools.partial(ring_jax.dot_product_attention, is_causal=True, mesh=ring_jax.make_mesh(sequence=2))
    np.testing.assert_allclose(jax.jit(call)(query, key, value, positions=positions), want, atol=5e-6)
