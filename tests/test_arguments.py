"""Arrays and functions as they come from a caller: taken as they are, or refused with the rule and the fix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring_jax
from ring_jax import dropout
from ring_jax.closures import holds_tracer

pytestmark = pytest.mark.usefixtures("own_errors")
QUERY, KEY = np.random.default_rng(0).normal(size=(2, 2, 8, 4, 6)).astype("float32")
KEY = KEY[:, :, :2]
attend = ring_jax.dot_product_attention


@pytest.mark.parametrize("call", [ring_jax.dot_product_attention, ring_jax.reference_attention])
@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("segment_ids", np.arange(8) + 2**32, ValueError, "must fit 32 bits.*got 4294967296 to 4294967303"),
        ("segment_ids", np.full(8, 2**31, np.uint32), ValueError, "must fit 32 bits"),
        ("positions", np.arange(8, dtype=np.uint64) + 2**31 - 4, ValueError, "must fit 32 bits.*Number them from 0"),
        ("positions", jnp.full(8, 2**31, jnp.uint32), ValueError, "must fit 32 bits"),
        ("positions", np.array([-1] * 7 + [2**31 - 1]), ValueError, "less than 2147483648 apart.*Count from 0"),
        ("query_seq_lengths", np.array([8, 2**32 + 1]), ValueError, "must fit 32 bits"),
        ("segment_ids", (np.ones(8, int), None), ValueError, "for both sides or for none.*ones for a side"),
        ("positions", (None, np.arange(8)), ValueError, "for both sides or for none.*arange"),
        ("segment_ids", [np.ones(8, int)] * 2, TypeError, "a list of arrays. Pass a tuple"),
        ("segment_ids", np.ones(8), TypeError, "must be integers; got float64 for the query. Cast to int32"),
    ],
)
def test_ids_and_positions_that_would_wrap_or_say_nothing(call, name, value, kind, message):
    with pytest.raises(kind, match=f"{name}.*{message}"):
        call(QUERY, KEY, KEY, is_causal=True, **{name: value})


def test_wide_integers_that_are_traced():
    with pytest.raises(TypeError, match=r"segment_ids must fit 32 bits.*got traced uint32.*astype\(jnp.int32\)"):
        jax.eval_shape(lambda ids: attend(QUERY, KEY, KEY, segment_ids=ids), jnp.ones(8, jnp.uint32))
    narrow = jnp.ones(8, jnp.uint16)
    jax.eval_shape(lambda ids: attend(QUERY, KEY, KEY, segment_ids=ids, positions=ids), narrow)


def test_wide_integers_that_fit():
    """The last position that there is, in any dtype: the same as the same distances from 0."""

    def call(places):
        window = {"is_causal": True, "local_window_size": (3, 0)}
        return jax.jit(lambda: attend(QUERY, KEY, KEY, positions=places, **window))()

    want = call(np.arange(8))
    for places in (np.arange(8, dtype=np.uint32) + 2**31 - 8, (np.arange(8) + 2**31 - 8).tolist()):
        np.testing.assert_array_equal(call(places), want)


def test_one_array_for_two_lengths():
    with pytest.raises(ValueError, match=r"segment_ids must have shape \[8\].*differ in length: pass a pair"):
        attend(QUERY[:, :4], KEY, KEY, segment_ids=np.ones(4, int))


@pytest.mark.parametrize("call", [ring_jax.dot_product_attention, ring_jax.reference_attention])
def test_numpy_arrays_and_lists_are_what_jax_makes_of_them(call):
    want = call(QUERY, KEY, KEY)
    np.testing.assert_array_equal(call(QUERY.astype("float64"), jnp.asarray(KEY), jnp.asarray(KEY)), want)
    np.testing.assert_array_equal(call(QUERY.tolist(), KEY.tolist(), KEY.tolist()), want)


@pytest.mark.parametrize(
    ("arrays", "kind", "message"),
    [
        ([jnp.asarray(x, jnp.float8_e4m3fn) for x in (QUERY, KEY, KEY)], TypeError, "got float8_e4m3fn. Cast it"),
        ((QUERY, KEY, "value"), TypeError, "value must be an array; got str"),
        ((QUERY, KEY[:, :, :0], KEY[:, :, :0]), ValueError, "no dimension may be empty"),
        ((QUERY[0], KEY[0], KEY[0]), ValueError, r"query must have 4 dimensions.*add the batch with x\[None\]"),
        ((QUERY, KEY[:1], KEY[:1]), ValueError, "one batch size.*Repeat the rows"),
    ],
)
def test_arrays_that_are_refused(arrays, kind, message):
    with pytest.raises(kind, match=message):
        attend(*arrays)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**40])
def test_a_chunk_that_no_position_reaches_the_end_of(size):
    places = np.arange(8) + (2**31 - 8 if size >= 2**31 else 0)
    call = functools.partial(attend, QUERY, KEY, KEY, positions=places)
    np.testing.assert_array_equal(call(chunk_size=size), call())
    assert ring_jax.supports(chunk_size=size, implementation="xla") is None


@pytest.mark.parametrize("name", ["", False, 0])
def test_a_kernel_that_has_no_name(name):
    with pytest.raises(ValueError, match=r"implementation=.* is not known"):
        attend(QUERY, KEY, KEY, implementation=name)


def test_score_args_that_are_no_arrays():
    with pytest.raises(TypeError, match=r"score_args must be a flat tuple of arrays; got dict.*jax.tree.leaves"):
        attend(QUERY, KEY, KEY, score_fn=lambda s, *_: s, score_args=({"slope": 1.0},))


class Slopes:
    """A function with a state, of which one part may be traced."""

    def __init__(self, slope):
        self.slope, self.fixed = slope, 2.0

    def traced(self, scores, *ids):
        return scores * self.slope

    def static(self, scores, *ids):
        return scores * self.fixed

    def __call__(self, scores, *ids):
        return self.traced(scores, *ids)


def test_where_a_traced_array_can_hide():
    def look(x):
        def default(scores, *ids, slope=x):
            return scores * slope

        def inner(scores, *ids):
            return x

        def recursive(scores, *ids):
            return late(scores) if ids else recursive(scores)

        slopes, box = Slopes(x), {"slope": [x]}
        hiding = {
            "default": default,
            "closure": lambda s, *_: s * box["slope"][0],
            "partial": functools.partial(lambda slope, s, *_: s * slope, x),
            "tree partial": jax.tree_util.Partial(lambda slope, s, *_: s * slope, x),
            "method": slopes.traced,
            "object": slopes,
            "closed-over object": lambda s, *_: s * slopes.slope,
            "another function": lambda s, *_: default(s),
            "one in a partial": functools.partial(inner),
            "compiled": jax.jit(lambda s, *_: s * x),
        }
        assert [name for name, fun in hiding.items() if not holds_tracer(fun)] == []
        fixed = np.ones(3)
        clean = [slopes.static, recursive, lambda s, *_: s * slopes.fixed, lambda s, *_: s * fixed[0], jnp.tanh, None]
        assert [fun for fun in clean if holds_tracer(fun)] == []
        late = default
        return x

    jax.eval_shape(look, jnp.ones(()))


@pytest.mark.parametrize("name", ["score_fn", "mask_fn"])
def test_functions_that_hold_traced_arrays_are_refused(name):
    def call(slope):
        return attend(QUERY, KEY, KEY, **{name: functools.partial(lambda x, *ids: ids[0] > x, slope)})

    with pytest.raises(ValueError, match=f"{name} closes over a traced array.*(score_args|positions or segment_ids)"):
        jax.eval_shape(call, jnp.ones(()))


def test_keys_of_four_words():
    """The usual kind on TPU; fresh ones hold two words twice, so that an exclusive or of the halves would be 0."""
    keys = [jax.random.key(seed, impl="rbg") for seed in (0, 1)]
    words = np.stack([dropout.as_words(key) for key in (*keys, *jax.random.split(keys[0]))])
    assert words.shape == (4, 2) and len(np.unique(words, axis=0)) == 4
    rows = dropout.as_words(jax.random.split(keys[0]))
    np.testing.assert_array_equal(rows, words[2:])
    attend(QUERY, KEY, KEY, dropout_rate=0.5, dropout_seed=keys[0])


@pytest.mark.parametrize("seed", [5, -7, 2**31, 2**32 - 1, 2**40 + 3, -(2**31) - 1, -(2**45), 2**63 - 1, 2**64 - 5])
def test_seeds_of_64_bits_are_those_of_the_same_int(seed: int):
    """Cut to 32 bits, 2^32 seeds would drop alike."""
    with jax.enable_x64(True):
        array = jnp.asarray(np.array(seed, np.int64 if seed < 2**63 else np.uint64))
        assert array.dtype.itemsize == 8
        np.testing.assert_array_equal(jax.jit(dropout.as_words)(array), dropout.as_words(seed))


def test_sizes_that_are_no_whole_numbers():
    with pytest.raises(ValueError, match="num_shards=0 must be at least 1"):
        ring_jax.permutation("zigzag", 8, 0)
    with pytest.raises(TypeError, match=r"seq_len must be a Python int; got 8.0"):
        ring_jax.permutation("zigzag", 8.0, 2)
    for name in ("seq_len", "num_shards", "tile"):
        with pytest.raises(ValueError, match=f"{name}=8.0 must be a whole number"):
            ring_jax.balanced_permutation(**({"seq_len": 16, "num_shards": 2, "tile": 2} | {name: 8.0}))
