"""Every option alone, sampled combinations of all, poison in what is hidden, and the edges: right, or refused."""

import collections
import dataclasses
import functools

import hypothesis
import jax
import numpy as np
import option_cases
import pytest
from attention_cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE
from option_cases import BFLOAT16_STEP, assert_matches, check, error, expected, local_call, mesh_call, run
from option_inputs import Options, arrays
from option_samples import DOMAINS, cases, coverage, sample

import ring_jax

ONE, FOUR = {"length": 24}, {"length": 32, "ring": 4, "layout": "zigzag"}
EFFECTS = {
    "is_causal": {"is_causal": True},
    "scale": {"scale": 1.1},
    "local_window_size": {"window": (3, 1)},
    "chunk_size": {"chunk": 5},
    "logits_soft_cap": {"soft_cap": 1.0},
    "sinks": {"sinks": True},
    "bias": {"bias": "BNTS"},
    "bias-of-keys": {"bias": "NS"},
    "mask": {"mask": "BNTS"},
    "mask_fn": {"mask_fn": "prefix"},
    "score_fn": {"score_fn": "table"},
    "score_fn-with-integers": {"score_fn": "wave"},
    "dropout_rate": {"dropout": 0.3},
    "segment_ids": {"tokens": "packed"},
    "positions": {"tokens": "offset", "is_causal": True},
    "seq_lengths": {"padding": "both"},
}


@pytest.mark.parametrize("placed", [ONE, FOUR], ids=["one-device", "ring-of-4"])
@pytest.mark.parametrize("name", EFFECTS)
def test_an_option_alone(name: str, placed):
    """It changes the result, and to the right one."""
    plain = Options(**placed, value_dim=12, is_causal=name == "positions", seed=1)
    case = dataclasses.replace(plain, **EFFECTS[name])
    assert np.abs(expected(case).out - expected(plain).out).max() > 1e-2
    assert check(case) == "verified"


def test_window_sinks_soft_cap_groups_and_documents_together():
    case = Options(
        ring=4, layout="zigzag", length=48, window=(7, 0), is_causal=True, sinks=True, soft_cap=5.0, num_heads=8
    )
    case = dataclasses.replace(case, num_kv_heads=2, tokens="restart", value_dim=12, seed=4)
    assert check(case) == "verified"


@pytest.mark.parametrize("case", sample(5, 12), ids=lambda case: f"seed={case.seed}")
def test_reference_attention(case: Options):
    """Dense attention in float64 agrees with the oracle to the last digits: neither is right without the other."""
    case = dataclasses.replace(case, dtype="float32")  # the inputs; float64 below
    floats, others, cotangents = arrays(case)
    attend = functools.partial(ring_jax.reference_attention, **case.static())
    with jax.enable_x64(True):
        floats = jax.tree.map(lambda x: x.astype(np.float64), floats)
        program = jax.jit(functools.partial(option_cases.slopes, attend))
        (out, lse), found = jax.tree.map(np.asarray, program(floats, others, cotangents))
    found = {"out": out} | ({} if lse is None else {"lse": lse}) | found
    assert max(option_cases.errors(case, found).values()) < 1e-12


@pytest.mark.parametrize("strategy", DOMAINS["strategy"])
@hypothesis.settings(
    max_examples=3,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.generate],  # to shrink would take hours
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(case=cases())
@pytest.mark.timeout(900)
def test_any_combination(strategy: str, case: Options):
    if dict(case.schedule).keys() & {"ulysses_size"} or strategy not in ("ring", "usp"):
        case = dataclasses.replace(case, schedule=())
    check(dataclasses.replace(case, strategy=strategy))


SEED, COUNT, PARTS = 2025, 240, 12


def test_sample_shows_every_value_and_nearly_every_pair():
    share, missing = coverage(sample(SEED, COUNT))
    assert not missing
    assert share > 0.97, f"{share:.1%} of the pairs of values"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_sample(part: int, record_property):
    """All failures of a part are shown, not the first only; and how many calls were verified and refused."""
    results, failures = collections.Counter(), []
    for case in sample(SEED, COUNT)[part::PARTS]:
        try:
            results[check(case)] += 1
        except Exception as failure:
            failures.append(f"{case}\n    {type(failure).__name__}: {str(failure)[:500]}")
        jax.clear_caches()
    refused = {reason: count for reason, count in results.items() if reason != "verified"}
    counts = f"{results['verified']} verified, {sum(refused.values())} refused, {len(failures)} failed"
    reasons = "".join(f"\n  {count} x {reason}" for reason, count in refused.items())
    record_property("shown", f"sample seed={SEED} count={COUNT} part {part + 1}/{PARTS}: {counts}{reasons}")
    assert not failures, "\n".join(failures)
    assert results["verified"] >= 2 * sum(refused.values()), "too much is refused for the sample to say anything"


SCHEDULES = {
    "two directions": {"schedule": (("two_directions", True),), "window": (40, 0)},
    "two levels": {"schedule": (("inner_size", 2),), "ring": 6, "is_causal": True, "tokens": "restart"},
    "two levels, skipping": {"schedule": (("inner_size", 2),), "ring": 8, "layout": "contiguous", "window": (9, 0)},
    "queries travel": {"schedule": (("rotate", "queries"),), "ring": 3, "score_fn": "alibi", "dropout": 0.3},
    "queries travel, halo": {"schedule": (("rotate", "queries"),), "layout": "contiguous", "window": (7, 2)},
    "bfloat16 gradients": {"schedule": (("gradient_dtype", "bfloat16"),), "is_causal": True},
    "two by two": {"strategy": "usp", "schedule": (("ulysses_size", 2),), "bias": "BNTS", "sinks": True},
    "all at once": {
        "strategy": "usp",
        "schedule": (("two_directions", True), ("inner_size", 2), ("ulysses_size", 2)),
        "ring": 8,
        "length": 64,
        "tokens": "restart",
        "is_causal": True,
    },
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str):
    case = Options(**{"ring": 4, "layout": "zigzag", "length": 48, "value_dim": 12, "seed": 8} | SCHEDULES[name])
    assert check(case) == "verified"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [x for x in DOMAINS["schedule"] if x], ids=str)
def test_schedules_with_options(schedule):
    strategy = "usp" if "ulysses_size" in dict(schedule) else "ring"
    case = Options(ring=4, layout="zigzag", length=48, schedule=schedule, strategy=strategy, is_causal=True, sinks=True)
    case = dataclasses.replace(case, score_fn="alibi", dropout=0.3, tokens="restart", seed=2)
    if dict(schedule).get("rotate") != "queries":
        case = dataclasses.replace(case, bias="BNTS", mask="NT")
    elif "two_directions" in dict(schedule):
        assert check(case).startswith("refused: ")
        return
    assert check(case) == "verified"


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_inside_shard_map(strategy: str):
    """With `shard_map` written by the caller: what is on every device gets the sum of its gradients."""
    case = Options(ring=2, layout="zigzag", strategy=strategy, sinks=True, score_fn="table", dropout=0.3, window=(9, 0))
    case = dataclasses.replace(case, tokens="restart", soft_cap=5.0, is_causal=True, seed=6)
    assert_matches(case, run(case, local_call(case)))


TWO = (("two_directions", True),)
EDGES = {
    "window of one key": Options(**FOUR, window=(0, 0)),
    "window of one key, as one number": Options(**FOUR, window=0, tokens="offset"),
    "chunk of one token": Options(ring=4, layout="striped", chunk=1, sinks=True),
    "one token a shard": Options(ring=8, layout="striped", length=8, is_causal=True, window=(3, 0)),
    "one token a shard, heads exchanged": Options(ring=4, length=3, strategy="ulysses", bias="BNTS", mask="NT"),
    "one token a shard, some heads exchanged": Options(ring=4, length=4, strategy="usp", bias="TS", mask="BTS"),
    "one token a shard, one row for all": Options(ring=4, length=4, strategy="ulysses", bias="NS", mask="S"),
    "two tokens a shard": Options(ring=4, layout="zigzag", length=8, chunk=5, bias="TS"),
    "shards and rows of padding": Options(ring=4, tokens="hollow", is_causal=True, bias="BNTS", sinks=True),
    "ids on one side only, unsorted": Options(ring=3, layout="striped", key_length=36, tokens="pair", window=(20, 20)),
    "largest positions": Options(**FOUR, tokens="far", window=(2, 5), chunk=7, score_fn="alibi", dropout=0.3),
    "largest positions, huge window": Options(ring=2, tokens="far", window=(LAST := 2**31 - 1, LAST), is_causal=True),
    "rows of lowest bias": Options(bias="BT", bias_holes=0.5, is_causal=True),
    "rows of lowest bias, ring": Options(**FOUR, bias="BNTS", bias_holes=0.8, window=(2, 0), num_kv_heads=4),
    "uneven, 3": Options(ring=3, layout="zigzag", length=37, is_causal=True, bias="BNTS", mask="NT", dropout=0.3),
    "uneven, 5": Options(ring=5, layout="striped", length=23, tokens="packed", window=(6, 2), sinks=True),
    "uneven, 7": Options(ring=7, length=41, key_length=29, padding="both", score_fn="table", mask_fn="document"),
    "uneven, two directions": Options(ring=3, layout="zigzag", length=15, schedule=TWO, is_causal=True, bias="BNTS"),
    "one device, two directions": Options(length=15, schedule=TWO, is_causal=True),
    "uneven, no layout": Options(ring=3, layout="random", length=25, tokens="restart", is_causal=True, chunk=5),
    "one query": Options(ring=4, length=1, key_length=26, bias="BNTS", sinks=True),
}


@pytest.mark.parametrize("name", EDGES)
def test_edge(name: str):
    assert check(EDGES[name]) == "verified"


@pytest.mark.parametrize("rows", [4, 1])
def test_one_token_a_shard_inside_shard_map(rows: int):
    """A bias ``[N, 1, S]`` on a device with one query: its own row of four, or the row of all."""
    rng = np.random.default_rng(rows)
    x, dout = (rng.normal(size=(1, 4, 4, 8)).astype(np.float32) for _ in range(2))
    bias = rng.normal(size=(4, rows, 4)).astype(np.float32)
    spec, cut = jax.P(None, "sequence"), jax.P(None, "sequence" if rows > 1 else None)
    local = jax.shard_map(
        ring_jax.ulysses_attention,
        mesh=ring_jax.make_mesh(sequence=4),
        in_specs=(*3 * (spec,), cut),
        out_specs=spec,
    )

    def gradient(attend):
        return jax.jit(jax.value_and_grad(lambda bias: (attend(x, x, x, bias) * dout).sum()))(bias)

    for got, want in zip(gradient(local), gradient(ring_jax.reference_attention), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_positions_by_the_keys_documents():
    """Queries in documents 1, 2 see keys in documents 2, 1: live pairs lie where one order of both has none."""
    case = Options(ring=4, layout="contiguous", length=16, window=(2, 0), seed=5)
    floats, others, cotangents = arrays(case)
    ids = np.repeat(np.array([1, 2], np.int32), 8)
    others = others | {"segment_ids": (ids, 3 - ids), "positions": np.tile(np.arange(8, dtype=np.int32), 2)}
    want = option_cases.solve(case, floats, others, cotangents)._asdict()
    got = run(case, mesh_call(case), (floats, others, cotangents))
    for name, limit in option_cases.limits(case, got).items():
        assert error(name, got[name], want[name]) <= limit, name


def solve_exactly(case: Options, floats, others, cotangents):
    """The truth for arrays of any dtype."""
    wide = jax.tree.map(lambda x: x.astype(np.float64), floats)
    return option_cases.solve(case, wide, others, cotangents)._asdict()


def assert_rounded_once(got, want):
    """Entry by entry: as near as float32 comes, and the one rounding of those that are in half precision."""
    for name, x in got.items():
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(want[name]), strict=True):
            seen = np.isfinite(b)
            allowed = FORWARD_TOLERANCE if name in ("out", "lse") else GRADIENT_TOLERANCE * np.abs(b[seen]).max()
            allowed += np.abs(b[seen]) * (BFLOAT16_STEP if a.dtype == "bfloat16" else 0)
            assert (np.abs(a[seen].astype(np.float64) - b[seen]) <= allowed).all(), name


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_what_devices_share_are_rounded_once(inside: bool):
    case = Options(ring=8, length=64, bias="NS", sinks=True, score_fn="table", is_causal=True, seed=7)
    floats, others, cotangents = arrays(case)
    shared = {name: floats[name] for name in ("bias", "sinks", "score_args")}
    floats = floats | jax.tree.map(lambda x: x.astype("bfloat16"), shared)
    attend = local_call(case) if inside else mesh_call(dataclasses.replace(case, data=2))
    got = run(case, attend, (floats, others, cotangents))
    assert all(x.dtype == "bfloat16" for x in (got["bias"], got["sinks"], *got["score_args"]))
    assert_rounded_once(got, solve_exactly(case, floats, others, cotangents))


FAR = {"positions": np.arange(0, 2400, 100, dtype=np.int32)}
SLOPES = np.array([0.01, 0.02, 0.005, 0.03], np.float32)


def test_half_precision_arguments_far_away():
    """Slopes in bfloat16 times distances of up to 2,300: scores in bfloat16 would be off by a tenth."""
    case = Options(length=24, score_fn="alibi", seed=9)
    floats, others, cotangents = arrays(case)
    given = floats | {"score_args": (SLOPES.astype("bfloat16"),)}, others | FAR, cotangents
    want = solve_exactly(case, *given)
    assert_rounded_once(run(case, mesh_call(case), given), want)
    assert_rounded_once(run(case, functools.partial(ring_jax.reference_attention, **case.static()), given), want)


@pytest.mark.parametrize(("dtype", "of_args"), [(np.float64, np.float32), (np.float32, np.float64)])
def test_arguments_of_another_width_under_x64(dtype, of_args):
    """The wider of both counts for what the function computes; each gradient has the dtype of its array."""
    case = Options(length=24, score_fn="alibi", seed=9)
    floats, others, cotangents = arrays(case)
    floats = {name: x.astype(dtype) for name, x in floats.items() if name != "score_args"}
    given = floats | {"score_args": (SLOPES.astype(of_args),)}, others | FAR, cotangents
    want = solve_exactly(case, *given)
    with jax.enable_x64(True):
        got = run(case, mesh_call(case), given)
    assert (got["out"].dtype, got["score_args"][0].dtype) == (dtype, of_args)
    assert_rounded_once(got, want)
    if dtype == np.float64:
        assert error("out", got["out"], want["out"]) < 1e-12


POISONED = {
    "causal": (Options(is_causal=True), lambda at: at >= 13),
    "window": (Options(window=(3, 2)), lambda at: at == 13),
    "chunk": (Options(chunk=5), lambda at: at == 13),
    "mask_fn": (Options(mask_fn="document"), lambda at: at % 3 == 1),
    "mask": (Options(mask="TS", sinks=True), lambda at: at == 13),
    "padding": (Options(padding="both"), lambda at: at >= 20),
    "segments": (Options(tokens="shared", soft_cap=5.0), lambda at: (at >= 6) & (at < 13)),
}


@pytest.mark.parametrize("placed", [ONE, FOUR, None], ids=["one-tile", "ring-of-4", "reference"])
@pytest.mark.parametrize("kind", POISONED)
def test_poison_in_what_is_hidden(kind: str, placed):
    """NaN and Inf in some queries, keys and values, and no loss on the rows that see them: the rest is as without."""
    case, choose = POISONED[kind]
    case = dataclasses.replace(case, **placed or ONE, seed=3)
    floats, others, (dout, dlse) = arrays(case)
    bad = choose(np.arange(case.length))
    if kind == "mask":  # hidden from all
        others = others | {"mask": others["mask"] & ~bad}
    if kind == "padding":
        others = others | {name: np.array([20, 9], np.int32) for name in ("query_seq_lengths", "key_value_seq_lengths")}
    seen = option_cases.visible(case, others)
    clean = ~bad & ~(seen & bad).any((1, 3))  # [B, T]: rows that see no poison, for no head
    assert clean.any(1).all() and (seen.any((1, 3)) & clean).any(), "the case must leave something to test"
    dout, dlse = dout * clean[..., None, None], dlse * clean[..., None]
    want = option_cases.solve(case, floats, others, (dout, dlse))._asdict()
    poison = {name: x.copy() for name, x in floats.items()}
    for name in ("query", "key", "value"):
        poison[name][:, bad] = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), poison[name][:, bad].shape)
    got = run(case, mesh_call(case), (poison, others, (dout, dlse)))
    rows = {"out": clean, "lse": clean, "query": clean, "key": ~bad[None], "value": ~bad[None]}
    wrong = []
    for name, x in got.items():
        here = np.broadcast_to(rows[name], x.shape[:2]) if name in rows else ...
        limit = option_cases.limits(case, [name])[name]
        if not error(name, x[here].astype(np.float64), want[name][here]) <= limit:
            share = 1 - np.isfinite(x[here]).mean()
            wrong.append(f"{name}: {share:.0%} not finite" if share else f"{name} is wrong")
    assert not wrong, ", ".join(wrong)


@pytest.mark.parametrize("filling", [np.nan, 3e38], ids=str)
@pytest.mark.parametrize("placed", [ONE, FOUR], ids=["one-tile", "ring-of-4"])
def test_poison_with_a_loss_on_all_rows(placed, filling: float):
    """One document holds NaN, cotangents too, or numbers whose products overflow: the others' gradients are right."""
    case = Options(**placed, tokens="packed", soft_cap=5.0, sinks=True, seed=3)
    floats, others, (dout, dlse) = arrays(case)
    ids = others["segment_ids"]
    bad = ids == ids.max(1, keepdims=True)
    assert bad.any(1).all() and (~bad & (ids != 0)).any(1).all()
    want = option_cases.solve(case, floats, others, (dout, dlse))._asdict()
    poison = floats | {x: np.where(bad[..., None, None], filling, floats[x]) for x in ("query", "key", "value")}
    poison = jax.tree.map(lambda x: x.astype(np.float32), poison)
    dout = np.where(bad[..., None, None], np.float32(np.nan if np.isnan(filling) else 1), dout)
    got = run(case, mesh_call(case), (poison, others, (dout, dlse)))
    for name in ("out", "lse", "query", "key", "value"):
        limit = option_cases.limits(case, [name])[name]
        assert error(name, got[name][~bad].astype(np.float64), want[name][~bad]) <= limit, name
    assert np.isnan(got["key"][bad]).any(-1).all(), "the loss has this gradient"
