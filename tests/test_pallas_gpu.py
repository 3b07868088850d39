"""The GPU kernel by itself: what it refuses, its tiles, the list of tiles; tests/test_kernels.py has the rest."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import documents
from option_cases import assert_matches, mesh_call, run
from option_inputs import Options
from test_cudnn import CALL

from ring_jax import masks
from ring_jax.kernels import interpret, pallas_gpu, registry
from ring_jax.kernels.tiles import Keys, Queries, Scores
from ring_jax.masks import Rules, Tokens

LENGTH = 75
RULES = [Rules(), Rules(is_causal=True), Rules(window=(20, 3)), Rules(chunk_size=30)]


def plan_of(rules: Rules, tiles: tuple[int, int], head: tuple[int, int] = (16, 16), dtype="bfloat16", backward=False):
    tokens = Tokens(None, None)
    query = Queries(jnp.zeros((2, 1, 2, 3, LENGTH, head[0]), dtype), tokens)
    keys = Keys(jnp.zeros((2, 1, 2, LENGTH, sum(head)), dtype), tokens)
    return pallas_gpu._plan(query, keys, Scores(1.0, rules=rules), tiles, backward)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(
    "rules", [Rules(), Rules(is_causal=True), Rules(window=(20, 3)), Rules(chunk_size=30)], ids=str
)
@pytest.mark.parametrize("longest", [pallas_gpu.LONG_LIST, 1])
def test_the_list_has_every_live_tile_once_and_those_without_a_mask_first(longest, rules, by_key, monkeypatch):
    """Two ways to make it: for few tiles by counting, for many by sorting."""
    monkeypatch.setattr(pallas_gpu, "LONG_LIST", longest)
    plan = plan_of(rules, (16, 32))
    assert plan.tiles == (16, 32) and plan.lengths == (80, 96)
    rows = [documents(LENGTH, 30, seed) for seed in (0, 1)]
    ids, at = (jnp.stack([jnp.asarray(row[i]) for row in rows]) for i in (0, 1))
    tokens = Tokens(at if rules.read_positions else None, ids)
    sides = [pallas_gpu._marks(tokens, rules, length) for length in plan.lengths]
    order, full, live = (np.asarray(x) for x in pallas_gpu._lists(plan, *sides, by_key))
    bounds = [masks.tile_bounds(x.tokens, n, t) for x, n, t in zip(sides, plan.lengths, plan.tiles, strict=True)]
    want = np.asarray(masks.tile_live(*bounds, rules))
    seen = np.pad(np.asarray(masks.visible(tokens, tokens, rules)), ((0, 0), (0, 5), (0, 21)))
    tiles = seen.reshape(2, 5, 16, 3, 32).transpose(0, 1, 3, 2, 4)
    for row, i in np.ndindex(live.shape):
        listed = order[row, i, : live[row, i]].tolist()
        assert sorted(listed) == np.flatnonzero(want[row, :, i] if by_key else want[row, i]).tolist()
        for j in listed[: full[row, i]]:
            tile = tiles[row, j, i] if by_key else tiles[row, i, j]
            assert tile[: 16 if (j if by_key else i) < 4 else 11].all()  # rows of padding are cut off in the end


def test_tiles_shrink_with_the_head_and_are_powers_of_two():
    assert plan_of(Rules(), (96, 200)).tiles == (64, 64)
    assert plan_of(Rules(), (128, 128), (256, 256)).tiles == (32, 64)
    assert plan_of(Rules(), (8, 8), (100, 30)).tiles == (16, 16)
    assert plan_of(Rules(), (8, 8), (100, 30)).heads == (112, 32)
    assert min(plan_of(Rules(), (128, 128), (256, 256), "float32", backward=True).tiles) >= 16
    plan = plan_of(Rules(), (128, 128), (192, 80))
    assert plan.key_pieces == ((0, 128), (128, 64)) and plan.value_pieces == ((192, 64), (256, 16))


@pytest.mark.parametrize(("length", "chunk"), [(8192, 4096), (96, 96), (75, 75), (10, 5), (3, 3), (4096, 2048)])
def test_tile_size(length: int, chunk: int):
    size = pallas_gpu.tile_size(length, chunk)
    assert 16 <= size <= 128 and size & (size - 1) == 0
    assert chunk % size == 0 or chunk % 16


REFUSED = {
    "mask_fn": {"scores": Scores(1.0, rules=Rules(mask_fn=max))},
    "score_fn": {"scores": Scores(1.0, score_fn=max)},
    "dropout_rate": {"scores": Scores(1.0, dropout_rate=0.5)},
    "bias": {"has_bias": True},
    "mask": {"has_mask": True},
    "float64": {"dtype": "float64"},
    "head size 300": {"head_sizes": (300, 128)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_serve_goes_to_xla(reason: str):
    call = CALL._replace(**REFUSED[reason])
    with pytest.raises(NotImplementedError, match=f"{reason}.*use implementation='xla'"):
        registry.choose("pallas_gpu", call)
    assert registry.choose(None, call).name == "xla"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_sizes_are_padded_within(dtype: str):
    sizes, tokens = {"length": 37, "head_dim": 12, "value_dim": 12}, {"tokens": "packed", "window": (9, 0)}
    case = Options(**sizes, **tokens, is_causal=True, soft_cap=5.0, dtype=dtype)
    with interpret.kernels():
        got = run(case, functools.partial(mesh_call(case), implementation="pallas_gpu"))
    assert_matches(case, got)
