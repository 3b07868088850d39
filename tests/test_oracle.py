"""The extended oracle, against finite differences in float64 and against what each option must do by definition."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

BATCH, LENGTH, KEYS, HEADS, KV_HEADS, SIZE, VALUES = 2, 4, 5, 4, 2, 3, 2
STEP = 1e-5


def _wave(score, query, key, head, amplitude, shift):
    return score + amplitude[head] * jnp.sin(score + shift[head] + 0.1 * (query - key))


RNG = np.random.default_rng(3)
MASK = RNG.random((BATCH, HEADS, LENGTH, KEYS)) < 0.7
MASK[0, 1, 2] = False  # a row that sees nothing
OPTIONS = {
    "plain": {},
    "cap": {"logits_soft_cap": 0.7},
    "score_fn": {"score_fn": _wave, "score_args": (RNG.normal(size=HEADS), np.arange(HEADS, dtype=np.int32))},
    "sinks": {"sinks": RNG.normal(size=HEADS)},
    "dropout": {"keep": RNG.random(MASK.shape) < 0.6, "rate": 0.4},
    "mask": {"mask": MASK},
}
BIASES = ((BATCH, HEADS, LENGTH, KEYS), (1, HEADS, 1, KEYS), (1, 1, LENGTH, 1), (BATCH, 1, 1, 1))
for index, shape in enumerate(BIASES):
    OPTIONS[f"bias{index}"] = {"bias": RNG.normal(size=shape)}
OPTIONS["all"] = {name: value for options in OPTIONS.values() for name, value in options.items()}


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "query": (LENGTH, HEADS, SIZE),
        "key": (KEYS, KV_HEADS, SIZE),
        "value": (KEYS, KV_HEADS, VALUES),
        "dout": (LENGTH, HEADS, VALUES),
        "dlse": (LENGTH, HEADS),
    }
    return {name: rng.normal(size=(BATCH, *shape)) for name, shape in shapes.items()}


def _objective(given: dict) -> float:
    results = oracle.attend(**given)
    return (results.out * given["dout"]).sum() + (
        np.where(np.isfinite(results.lse), results.lse, 0) * given["dlse"]
    ).sum()


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_finite_differences(name: str):
    """In three directions for every array: a wrong factor, sign or sum in the backward pass shows in each of them."""
    given = _arrays() | {"mask": np.ones(MASK.shape, bool), "scale": 0.9} | OPTIONS[name]
    results = oracle.attend(**given)
    slopes = {x: getattr(results, x) for x in ("query", "key", "value", "bias", "sinks") if given.get(x) is not None}
    if results.score_args:
        slopes["score_args"] = results.score_args[0]
    rng = np.random.default_rng(1)
    for argument, slope in slopes.items():
        for _ in range(3):
            step = rng.normal(size=slope.shape)
            assert np.shape(given[argument][0] if argument == "score_args" else given[argument]) == slope.shape

            def moved(by: float, argument=argument, step=step) -> float:
                old = given[argument]
                new = (old[0] + by * step, *old[1:]) if argument == "score_args" else old + by * step
                return _objective(given | {argument: new})

            want = (moved(STEP) - moved(-STEP)) / (2 * STEP)
            np.testing.assert_allclose((slope * step).sum(), want, rtol=1e-6, atol=1e-8, err_msg=argument)


def test_a_sink_is_a_key_whose_value_is_zero():
    """One more key with score ``sink`` and value 0 gives the same out; the returned lse does not know it."""
    given, sinks = _arrays(), OPTIONS["sinks"]["sinks"]
    results = oracle.attend(**given, mask=MASK, scale=1.0, sinks=sinks)
    wide = {name: np.concatenate([given[name], 0 * given[name][:, :1]], axis=1) for name in ("key", "value")}
    mask = np.concatenate([MASK, MASK.any(-1, keepdims=True)], axis=-1)
    bias = np.zeros((1, HEADS, 1, KEYS + 1))
    bias[0, :, 0, -1] = sinks
    want = oracle.attend(**(given | wide), mask=mask, scale=1.0, bias=bias)
    np.testing.assert_allclose(results.out, want.out, atol=1e-14)
    np.testing.assert_array_equal(results.lse, oracle.attend(**given, mask=MASK, scale=1.0).lse)
    # Without the part of lse, whose normaliser is another one there.
    given["dlse"] = 0 * given["dlse"]
    results = oracle.attend(**given, mask=MASK, scale=1.0, sinks=sinks)
    want = oracle.attend(**(given | wide), mask=mask, scale=1.0, bias=bias)
    np.testing.assert_allclose(results.sinks, want.bias[0, :, 0, -1], atol=1e-14)
    np.testing.assert_allclose(results.key, want.key[:, :-1], atol=1e-14)


def test_rows_that_see_nothing():
    results = oracle.attend(**_arrays(), **({"scale": 1.0} | OPTIONS["all"]))
    assert not results.out[0, 2, 1].any() and np.isneginf(results.lse[0, 2, 1]) and not results.query[0, 2, 1].any()
    assert all(np.isfinite(x).all() for x in (results.out, *results[2:7], *results.score_args))


def test_lowest_bias_in_a_whole_row_is_uniform_over_the_visible_keys():
    """`finfo.min` takes part in the softmax: only a mask hides."""
    bias = np.zeros((1, 1, LENGTH, KEYS), np.float32)
    bias[..., 1, :] = np.finfo(np.float32).min
    results, arrays = oracle.attend(**_arrays(), mask=MASK, scale=1.0, bias=bias), _arrays()
    want = arrays["value"][0, MASK[0, 0, 1], 0].mean(0)
    np.testing.assert_allclose(results.out[0, 1, 0], want, atol=1e-14)


def _expected(**rules) -> np.ndarray:
    return oracle.visible(1, 1, (4, 4), **rules)[0, 0].astype(int)


def test_mask_rules_by_hand():
    one, pair = np.arange(4), (np.array([1, 1, 2, 0]), np.array([2, 1, 0, 1]))
    ahead = one[:, None] - one
    np.testing.assert_array_equal(_expected(is_causal=True, local_window_size=(1, 2)), (ahead >= 0) & (ahead <= 1))
    np.testing.assert_array_equal(_expected(local_window_size=(0, 2)), (ahead <= 0) & (ahead >= -2))
    np.testing.assert_array_equal(_expected(local_window_size=1), abs(ahead) <= 1)
    np.testing.assert_array_equal(_expected(local_window_size=(0, 0)), np.eye(4))
    chunks = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    np.testing.assert_array_equal(_expected(chunk_size=2), chunks)
    shifted = [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(_expected(chunk_size=2, positions=one + 3), shifted)
    np.testing.assert_array_equal(_expected(segment_ids=pair), [[0, 1, 0, 1], [0, 1, 0, 1], [1, 0, 0, 0], [0] * 4])
    short = _expected(query_seq_lengths=np.array([3]), key_value_seq_lengths=np.array([2]))
    np.testing.assert_array_equal(short, [[1, 1, 0, 0]] * 3 + [[0] * 4])
    prefix = _expected(mask_fn=lambda q, k, *_: (k <= q) | (k < 2))
    np.testing.assert_array_equal(prefix, (ahead >= 0) | (one < 2))
    np.testing.assert_array_equal(_expected(mask=np.eye(4, dtype=bool)[None, None], is_causal=True), np.eye(4))
    far = np.arange(4, dtype=np.int32) + np.int32(2**31 - 4)
    np.testing.assert_array_equal(_expected(positions=far, local_window_size=(1, 9)), ahead <= 1)
