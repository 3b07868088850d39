"""Every Pallas kernel, interpreted on the CPU, against dense attention in float64: same cases, same tolerances for all.

A kernel is added to `KERNELS`. Tiles are small here, so that a block has several: live, dead, cut by the mask, whole.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import option_cases
import pytest
from jax.experimental.pallas import tpu as pltpu
from option_cases import assert_matches, error, mesh_call, run
from option_inputs import Options, arrays

from ring_jax import masks, options, sharded
from ring_jax.kernels import interpret, pallas_tpu, pallas_tpu_parts, registry, xla
from ring_jax.kernels.protocol import Call, Cotangents, Gradients
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores
from ring_jax.masks import Rules, Tokens
from ring_jax.mesh import Target

KERNELS = ("pallas_tpu", "pallas_gpu")
TILES = (("tile_size", 8),)
RING = {"ring": 4, "layout": "zigzag", "length": 64, "schedule": TILES, "value_dim": 12}
THREE = {"ring": 3, "length": 48}
CASES = {
    "full": Options(length=24, schedule=TILES),
    "causal": Options(length=24, schedule=TILES, is_causal=True, num_kv_heads=4, value_dim=12),
    "one tile": Options(length=12, is_causal=True, num_kv_heads=1),
    "zigzag": Options(**RING, is_causal=True),
    "contiguous, packed": Options(**RING | {"layout": "contiguous"}, is_causal=True, tokens="packed"),
    "striped, restart": Options(
        **RING | {"layout": "striped", "ring": 3, "length": 48}, is_causal=True, tokens="restart"
    ),
    "no layout": Options(**RING | {"layout": "random"} | THREE, is_causal=True),
    "rows of padding": Options(**RING, tokens="hollow", is_causal=True, sinks=True),
    "other lengths": Options(**RING | {"ring": 3, "length": 24}, key_length=48, tokens="pair", window=(20, 20)),
    "uneven": Options(**RING | {"ring": 3, "length": 37, "schedule": ()}, is_causal=True, padding="both"),
    "window, sinks, cap": Options(**RING, is_causal=True, window=(13, 0), soft_cap=3.0, sinks=True, num_kv_heads=1),
    "chunks": Options(**RING, chunk=12, window=(5, 9)),
    "queries travel": Options(**RING | {"schedule": (*TILES, ("rotate", "queries"))}, is_causal=True, tokens="restart"),
    "two directions": Options(**RING | {"schedule": (("tile_size", 4), ("two_directions", True))}, is_causal=True),
    "all-gather": Options(**RING, strategy="all_gather", is_causal=True, tokens="restart"),
    "ulysses": Options(**RING, strategy="ulysses", is_causal=True, data=2),
    "bfloat16": Options(length=24, schedule=TILES, dtype="bfloat16", is_causal=True),
    "bfloat16, zigzag": Options(**RING | {"value_dim": 8, "dtype": "bfloat16"}, is_causal=True),
    "bfloat16, packed": Options(
        **RING | {"value_dim": 8, "dtype": "bfloat16", "ring": 3, "length": 48}, tokens="packed"
    ),
    "bfloat16, sinks": Options(**RING | {"dtype": "bfloat16"}, is_causal=True, sinks=True, soft_cap=5.0),
}
FAST = ("causal", "contiguous, packed", "other lengths", "window, sinks, cap", "bfloat16, packed")
SLOW = {
    f"{layout}, {tokens}, {dtype}, {ring}": Options(
        ring=ring,
        layout=layout,
        length=16 * ring,
        schedule=TILES,
        is_causal=True,
        tokens=tokens,
        dtype=dtype,
        seed=ring,
    )
    for layout in ("contiguous", "striped", "zigzag")
    for tokens in (None, "packed", "restart", "hollow")
    for dtype in ("float32", "bfloat16")
    for ring in (1, 3, 4)
    if layout != "striped" or ring > 1
} | {name: case for name, case in CASES.items() if name not in FAST}


def attend(case: Options, kernel: str) -> dict[str, Any]:
    with interpret.kernels():
        return run(case, functools.partial(mesh_call(case), implementation=kernel))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("kernel", KERNELS)
def test_case(kernel: str, name: str):
    assert_matches(CASES[name], attend(CASES[name], kernel))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("kernel", KERNELS)
def test_slow_case(kernel: str, name: str):
    assert_matches(SLOW[name], attend(SLOW[name], kernel))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_errors_do_not_grow_with_the_ring(kernel: str):
    """bfloat16, N = 2, 4, 8 devices: the largest error of each gradient within 10 %."""
    case = Options(**RING | {"value_dim": 8, "dtype": "bfloat16"}, is_causal=True)
    found = []
    for ring in (2, 4, 8):
        case = dataclasses.replace(case, ring=ring, length=64)
        found.append(option_cases.errors(case, attend(case, kernel)))
    for name in ("out", "query", "key", "value"):
        each = [x[name] for x in found]
        assert max(each) <= 1.1 * min(each), (name, each)


POISONED = {
    "causal": (Options(**RING, is_causal=True), lambda at: at >= 41),
    "window": (Options(length=24, schedule=TILES, window=(3, 2)), lambda at: at == 13),
    "segments": (Options(length=24, schedule=TILES, tokens="shared"), lambda at: (at >= 6) & (at < 13)),
}


@pytest.mark.parametrize("name", ["causal", *(pytest.param(x, marks=pytest.mark.slow) for x in ("window", "segments"))])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_hidden_may_hold_anything(kernel: str, name: str):
    """NaN and Inf in queries, keys and values that the other rows do not see: those are as without."""
    case, choose = POISONED[name]
    floats, others, (dout, dlse) = arrays(case)
    bad = choose(np.arange(case.length))
    clean = ~bad & ~(option_cases.visible(case) & bad).any((1, 3))
    assert clean.any() and bad.any()
    dout, dlse = dout * clean[..., None, None], dlse * clean[..., None]
    want = option_cases.solve(case, floats, others, (dout, dlse))._asdict()
    poison = {name: x.copy() for name, x in floats.items()}
    for x in poison.values():
        x[:, bad] = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), x[:, bad].shape)
    with interpret.kernels():
        call = functools.partial(mesh_call(case), implementation=kernel)
        got = run(case, call, (poison, others, (dout, dlse)))
    rows = {"out": clean, "lse": clean, "query": clean, "key": ~bad[None], "value": ~bad[None]}
    for name, x in got.items():
        here = np.broadcast_to(rows[name], x.shape[:2])
        assert error(name, x[here].astype(np.float64), want[name][here]) <= option_cases.limits(case, [name])[name], (
            name
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_document_of_nan_that_the_loss_reads(kernel: str):
    """Its gradients are NaN, those of the other documents of a tile are as without."""
    case = Options(length=24, schedule=TILES, tokens="packed", soft_cap=3.0, seed=3)
    floats, others, cotangents = arrays(case)
    bad = others["segment_ids"] == others["segment_ids"].max(1, keepdims=True)
    want = option_cases.solve(case, floats, others, cotangents)._asdict()
    poison = {name: np.where(bad[..., None, None], np.float32(np.nan), x) for name, x in floats.items()}
    with interpret.kernels():
        got = run(case, functools.partial(mesh_call(case), implementation=kernel), (poison, others, cotangents))
    for name, x in got.items():
        limit = option_cases.limits(case, [name])[name]
        assert error(name, x[~bad].astype(np.float64), want[name][~bad]) <= limit, name
    assert np.isnan(got["key"][bad]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_under_vmap_and_checkpoint(kernel: str):
    case = Options(length=24, schedule=TILES, is_causal=True, tokens="packed")
    floats, others, _ = arrays(case)
    call = functools.partial(mesh_call(case), implementation=kernel, **others)

    def loss(arrays):
        return jnp.sum(jax.checkpoint(lambda x: call(x["query"], x["key"], x["value"])[0])(arrays) ** 2)

    pairs = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), floats)
    with interpret.kernels():
        got = jax.jit(jax.vmap(jax.grad(loss)))(pairs)
    call = functools.partial(mesh_call(case), implementation="xla", **others)
    want = jax.jit(jax.vmap(jax.grad(loss)))(pairs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("by_key", [False, True])
def test_tpu_work_list_has_every_live_pair_once(by_key: bool):
    """The grid of the TPU kernels is this list: what is not in it is neither read nor computed."""
    index = jnp.arange(64, dtype=jnp.int32)[None]
    tokens, rules = Tokens(index % 40, 1 + index // 40), Rules(is_causal=True)
    queries, keys = Queries(jnp.zeros((1, 1, 1, 1, 64, 8)), tokens), Keys(jnp.zeros((1, 1, 1, 64, 16)), tokens)
    work = pallas_tpu_parts.work_list(queries, keys, rules, (8, 16), by_key)
    bounds = [masks.tile_bounds(tokens, 64, size) for size in (8, 16)]
    live = np.asarray(masks.tile_live(*bounds, rules))
    whole = np.asarray(masks.tile_whole(*bounds, rules))
    assert 0 < live.sum() < live.size and whole.any()
    if by_key:
        live, whole = live.swapaxes(1, 2), whole.swapaxes(1, 2)
    codes = work.codes[: int(work.count)]
    places = list(zip(*(np.asarray(x) for x in work.place(codes)), strict=True))
    assert places == [tuple(x) for x in np.argwhere(live)]
    kinds = [pallas_tpu_parts.WHOLE if whole[place] else pallas_tpu_parts.MASKED for place in places]
    assert work.kind(codes).tolist() == kinds
    ends = [work.ends(work.codes, jnp.int32(step)) for step in range(len(codes))]
    outer = [place[:2] for place in places]
    assert [bool(first) for first, _ in ends] == [n == 0 or x != outer[n - 1] for n, x in enumerate(outer)]
    assert [bool(last) for _, last in ends] == [x != y for x, y in zip(outer, [*outer[1:], None], strict=True)]


ANY = [Rules(), Rules(is_causal=True), Rules(window=(5, 2)), Rules(chunk_size=5), Rules(True, (9, 9), 7)]


@pytest.mark.parametrize("rules", ANY, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_whole_tiles_hide_nothing(seed: int, rules: Rules):
    """`tile_whole` may say no for a tile in which all is visible, never yes for one in which something is hidden."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(-1, 2, (2, 32))).astype(np.int32) if seed % 2 else None
    positions = rng.integers(0, 4, (2, 1)) + np.arange(32) - (8 if seed % 3 else 0)
    sides = [
        Tokens(jnp.asarray(x, jnp.int32) if rules.read_positions else None, None if ids is None else jnp.asarray(ids))
        for x in (positions, np.arange(32) + 0 * positions)
    ]
    whole = np.asarray(masks.tile_whole(*(masks.tile_bounds(x, 32, 4) for x in sides), rules))
    shown = masks.visible(*sides, rules)
    shown = np.ones((1, 32, 32), bool) if shown is None else np.asarray(shown)
    every = shown.reshape(len(shown), 8, 4, 8, 4).all((2, 4))
    assert not (whole & ~every).any()
    assert (whole == every).mean() > 0.9


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_tpu_copies_of_dq_are_in_order(mode: str):
    """The backward kernel on a simulated TPU memory: copies run at once, or at the last moment; races are detected."""
    rng = np.random.default_rng(0)
    q, dout = (jnp.asarray(rng.normal(size=(1, 1, 1, 2, 32, 8)), jnp.float32) for _ in range(2))
    kv = jnp.asarray(rng.normal(size=(1, 1, 1, 32, 16)), jnp.float32)
    lse, delta = (jnp.asarray(rng.normal(size=(1, 1, 1, 2, 32)), jnp.float32) for _ in range(2))
    tokens, scores = Tokens(jnp.arange(32, dtype=jnp.int32)[None], None), Scores(0.5, rules=Rules(is_causal=True))
    sums, cotangents = Gradients(q, kv, None, ()), Cotangents(dout, lse + 4, delta, None)
    given = sums, Queries(q, tokens), cotangents, Keys(kv, tokens), Pairs(), scores, (8, 8)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)):
        got = pallas_tpu.backward_block(*given)
        jax.block_until_ready(got)
    want = xla.backward_block(*given)
    np.testing.assert_allclose(got.query, want.query, atol=2e-5)
    np.testing.assert_allclose(got.keys, want.keys, atol=2e-5)


CALL = Call(
    **{"platform": "tpu", "device_kind": "TPU v5 lite", "dtype": jnp.dtype("bfloat16"), "head_sizes": (128, 128)},
    **{"lengths": (8192, 8192), "scores": Scores(1.0), "layout": "zigzag", "default_positions": True},
    **{"has_segments": False, "has_bias": False, "has_mask": False, "strategy": "ring"},
    **{"two_directions": False, "tile_size": None, "return_lse": True},
)
REFUSED = {
    "no bias": {"has_bias": True},
    "no mask$": {"has_mask": True},
    "no mask_fn": {"scores": Scores(1.0, rules=Rules(mask_fn=lambda *x: x[0] >= x[1]))},
    "no score_fn": {"scores": Scores(1.0, score_fn=lambda s, *_: s)},
    "no dropout_rate": {"scores": Scores(1.0, dropout_rate=0.1)},
    "not in float16": {"dtype": jnp.dtype("float16")},
    "128 query heads of 128 for a key/value head": {"group": 128},
    "a block of 8200 tokens is no multiple of 128; pad": {"lengths": (8192, 8200)},
    "a block of 64 tokens": {"lengths": (128, 128), "two_directions": True},
    "tile_size=100 must be a multiple of 128": {"tile_size": 100},
    "tile_size=384 must be .* divides the 8192 tokens": {"tile_size": 384},
}


def test_more_pairs_of_tiles_than_a_list_holds(monkeypatch):
    """Then the keys of a block are taken in parts, here one tile of three after another."""
    monkeypatch.setattr(pallas_tpu_parts, "MOST_PAIRS", 6)
    counts, plain = [], pallas_tpu_parts.work_list
    monkeypatch.setattr(
        pallas_tpu_parts, "work_list", lambda *x, **y: counts.append(x[1].kv.shape[3]) or plain(*x, **y)
    )
    case = Options(length=24, schedule=TILES, is_causal=True, tokens="packed", seed=5)
    assert_matches(case, attend(case, "pallas_tpu"))
    assert counts and set(counts) == {8}, counts


@pytest.mark.parametrize("reason", REFUSED)
def test_tpu_refusals(reason: str):
    """What the kernel lacks goes to the one that has it, with the reason; asked for by name it raises with both."""
    call = CALL._replace(**REFUSED[reason])
    chosen = registry.choose(None, call)
    assert chosen.name == "xla" and re.search(reason, chosen.passed_over[0])
    with pytest.raises(NotImplementedError, match=f"{reason}.*use implementation='xla'".replace("$", "")):
        registry.choose("pallas_tpu", call)


def test_tpu_kernel_is_chosen_on_tpu_and_refused_elsewhere():
    assert registry.choose(None, CALL) == registry.choose("pallas_tpu", CALL) == ("pallas_tpu", ())
    here = CALL._replace(platform="cpu", device_kind="cpu")
    with pytest.raises(NotImplementedError, match=r"pallas_tpu.*these devices are cpu.*use implementation='xla'"):
        registry.choose("pallas_tpu", here)


@pytest.mark.parametrize(
    ("strategy", "local", "tile", "kernel"),
    [
        ("ring", 64, None, "xla"),
        ("ulysses", 64, None, "pallas_tpu"),  # a block of 512
        ("usp", 64, None, "pallas_tpu"),  # of 256
        ("all_gather", 64, None, "xla"),  # 64 queries
        ("ulysses", 128, 384, "xla"),  # 384 divides no block of 1024
        ("ulysses", 192, 256, "pallas_tpu"),  # but 256 one of 1536
        ("all_gather", 128, 384, "xla"),
        ("all_gather", 256, 512, "pallas_tpu"),
    ],
)
@pytest.mark.parametrize("is_local", [False, True])
def test_a_kernel_is_judged_by_the_blocks_it_gets(is_local: bool, strategy: str, local: int, tile, kernel: str):
    """Of 8 devices with 8 heads: an exchange of heads makes them longer, a gather makes those of keys."""
    shape = (1, local * (1 if is_local else 8), 8, 128)
    x = jax.ShapeDtypeStruct(shape, "bfloat16")
    keywords = {name: default for name, (default, _) in options.OPTIONS.items()}
    keywords["schedule"] = options.Schedule(tile_size=tile)

    def settled(x):
        inputs = sharded.make_inputs(x, x, x, keywords, 8 if is_local else 1)
        spec = sharded.make_spec(x, x, keywords, "sequence", strategy, (8, 8))
        chosen.append(sharded.settle_kernel(spec, None, inputs, Target("tpu", "TPU v5p"), 8, is_local).kernel)

    chosen: list[str] = []
    jax.eval_shape(settled, x)
    assert chosen == [kernel]


@pytest.mark.parametrize(
    ("length", "chunk", "tile"), [(8192, 4096, 512), (768, 384, 384), (640, 320, 128), (24, 12, 24)]
)
def test_tpu_tiles(length: int, chunk: int, tile: int):
    assert pallas_tpu.tile_size(length, chunk) == tile
