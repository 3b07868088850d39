"""One call of attention with any options, and its arrays: drawn at random in natural order, the same every time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from attention_cases import documents

import ring_jax

LAST_POSITION = 2**31 - 1


def prefix_lm(query, key, query_ids, key_ids):
    """Causal behind a prefix of three tokens that all see."""
    return (query >= key) | (key < 3)


def sparse_document(query, key, query_ids, key_ids):
    """Own document only, and of it not every key."""
    return (query_ids == key_ids) & ((key % 3 != 1) | (query == key))


def alibi(score, query, key, head, slopes):
    return score - slopes[head] * jnp.abs(query - key)


def relative_table(score, query, key, head, table):
    return score + table[head, jnp.clip(key - query, -4, 4) + 4]


def wave(score, query, key, head, amplitude, shift):
    """Not linear in the score, and with an integer argument."""
    return score + amplitude[head] * jnp.sin(score + shift[head])


MASK_FNS: dict[str, Callable[..., Any]] = {"prefix": prefix_lm, "document": sparse_document}
SCORE_FNS: dict[str, Callable[..., Any]] = {"alibi": alibi, "table": relative_table, "wave": wave}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """One call; the defaults turn every option off. Shapes of bias and mask name the dimensions that are not 1."""

    ring: int = 1
    data: int = 1
    tensor: int = 1
    strategy: str = "ring"
    schedule: tuple[tuple[str, Any], ...] = ()  # keywords of `ring_jax.Schedule`
    layout: str = "contiguous"  # or striped, zigzag; random, balanced: a permutation, with layout=None
    dtype: str = "float32"
    batch: int = 2
    length: int = 24
    key_length: int | None = None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    scale: float | None = None
    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    bias: str | None = None  # such as "BNTS", "NS", "T", "B", and "" for one number
    bias_holes: float = 0.0  # share of the bias that is finfo.min
    mask: str | None = None
    mask_fn: str | None = None
    score_fn: str | None = None
    dropout: float = 0.0
    tokens: str | None = None  # see `tokens`
    padding: str | None = None  # query, keys or both: lengths
    residual: bool = True
    seed: int = 0

    def __str__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed).replace(" ", "") or "default"

    @property
    def lengths(self) -> tuple[int, int]:
        return self.length, self.length if self.key_length is None else self.key_length

    @property
    def named_layout(self) -> str | None:
        return None if self.layout in ("random", "balanced") else self.layout

    @property
    def in_jax_nn(self) -> bool:
        """Whether `jax.nn.dot_product_attention` has all its options (its masks as one), but no gradient of lse."""
        more = self.soft_cap or self.sinks or self.score_fn or self.dropout or self.bias_holes
        return not more and self.head_dim == self.value_dim

    def shape(self, letters: str) -> tuple[int, ...]:
        sizes = {"B": self.batch, "N": self.num_heads, "T": self.length, "S": self.lengths[1]}
        return tuple(size if letter in letters else 1 for letter, size in sizes.items())

    def static(self) -> dict[str, Any]:
        """The keywords that are Python values; only those that are on, so that an option not built is not named."""
        given = {
            "scale": self.scale,
            "is_causal": self.is_causal or None,
            "local_window_size": self.window,
            "chunk_size": self.chunk,
            "logits_soft_cap": self.soft_cap,
            "mask_fn": MASK_FNS[self.mask_fn] if self.mask_fn else None,
            "score_fn": SCORE_FNS[self.score_fn] if self.score_fn else None,
            "dropout_rate": self.dropout or None,
            "return_residual": self.residual or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def placed(self) -> dict[str, Any]:
        """The keywords that say how it is run, apart from the mesh."""
        given = {"strategy": self.strategy, "layout": self.named_layout}
        return given | ({"schedule": ring_jax.Schedule(**dict(self.schedule))} if self.schedule else {})


def tokens(case: Options) -> dict[str, Any]:
    """``segment_ids`` and ``positions`` in natural order.

    packed: documents and padding, ids unsorted. restart: with positions of their own. shared: one row for the batch.
    hollow: the first batch row and half of the others is padding. pair: other ids for the queries than for the keys,
    some on one side only. offset: queries are later than keys. far: up to the largest position there is.
    """
    length, key_length = case.lengths
    given: dict[str, Any] = {}
    rows = [documents(length, max(2, length // 4), case.seed + row) for row in range(case.batch)]
    ids, restarts = (np.stack(x) for x in zip(*rows, strict=True))
    if case.tokens in ("packed", "restart"):
        given = {"segment_ids": ids}
    elif case.tokens == "shared":
        given = {"segment_ids": ids[0], "positions": restarts[0]}
    elif case.tokens == "hollow":
        ids = np.where((np.arange(length) < length // 2) | (np.arange(case.batch) == 0)[:, None], 0, ids)
        given = {"segment_ids": ids.astype(np.int32)}
    elif case.tokens == "pair":
        rng = np.random.default_rng(case.seed)
        query_ids = np.sort(rng.choice(np.array([0, 2, 5, 9], np.int32), (case.batch, length)))
        given = {"segment_ids": (query_ids, rng.choice(np.array([9, 2, 0, 7], np.int32), (case.batch, key_length)))}
    elif case.tokens in ("offset", "far"):
        first = LAST_POSITION + 1 - max(case.lengths) if case.tokens == "far" else 3
        pair = tuple(np.arange(n) + first for n in case.lengths)
        pair = pair if case.tokens == "far" else (pair[0], pair[1] - first)
        given = {"positions": tuple(x.astype(np.int32) for x in pair)}
    if case.tokens == "restart":
        given["positions"] = restarts
    if "positions" not in given and case.named_layout is None:
        given["positions"] = tuple(np.arange(n, dtype=np.int32) for n in case.lengths)
    return given


@functools.cache
def orders(case: Options) -> tuple[np.ndarray, np.ndarray]:
    """``array = natural[order]`` for queries and for keys."""
    if case.layout == "balanced":
        return _balanced(case)
    if case.layout != "random":
        query, key = (np.asarray(ring_jax.permutation(case.layout, n, case.ring)) for n in case.lengths)
        return query, key
    rng = np.random.default_rng(case.seed + 1)
    query, key = (rng.permutation(n) for n in case.lengths)
    return query, query if case.tokens in ("packed", "restart", "shared", "hollow") else key


def _balanced(case: Options) -> tuple[np.ndarray, np.ndarray]:
    """`ring_jax.balanced_permutation`, one order for queries and keys."""
    given = tokens(case)
    places = {"positions": given["positions"]} if not isinstance(given["positions"], tuple) else {}
    rules = {"is_causal": case.is_causal, "local_window_size": case.window, "chunk_size": case.chunk}
    sizes = {"seq_len": case.length, "num_shards": case.ring, "tile": 1}
    order = ring_jax.balanced_permutation(given.get("segment_ids"), **places, **rules, **sizes)
    return order, order


@functools.cache
def arrays(case: Options) -> tuple[dict[str, Any], dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    """(float arrays to differentiate, other traced arguments, cotangents of out and lse), in natural order.

    Of ``score_args`` the floats are among the first and the integers (``int_args``) among the second.
    """
    rng = np.random.default_rng(case.seed)
    length, key_length = case.lengths
    heads, kv_heads = case.num_heads, case.num_kv_heads
    shapes = {
        "query": (length, heads, case.head_dim),
        "key": (key_length, kv_heads, case.head_dim),
        "value": (key_length, kv_heads, case.value_dim),
    }
    floats: dict[str, Any] = {x: rng.normal(size=(case.batch, *s)).astype(case.dtype) for x, s in shapes.items()}
    dout = rng.normal(size=(case.batch, length, heads, case.value_dim)).astype(case.dtype)
    dlse = rng.normal(size=(case.batch, length, heads)).astype(np.float32)
    if case.bias is not None:
        bias = rng.normal(size=case.shape(case.bias)).astype(case.dtype)
        holes = rng.random(bias.shape) < case.bias_holes
        floats["bias"] = np.where(holes, jnp.finfo(case.dtype).min, bias).astype(case.dtype)
    if case.sinks:
        floats["sinks"] = rng.normal(size=heads).astype(np.float32)
    others: dict[str, Any] = tokens(case)
    if case.score_fn is not None:
        shape = (heads, 9) if case.score_fn == "table" else (heads,)
        floats["score_args"] = (np.float32(0.3) * rng.normal(size=shape).astype(np.float32),)
        others["int_args"] = (np.arange(heads, dtype=np.int32),) if case.score_fn == "wave" else ()
    if case.mask is not None:
        others["mask"] = rng.random(case.shape(case.mask)) < 0.7
    for side, name, n in (("query", "query_seq_lengths", length), ("keys", "key_value_seq_lengths", key_length)):
        if case.padding in (side, "both"):
            others[name] = np.array([n, *rng.integers(1, n, case.batch - 1)], np.int32)[::-1].copy()
    if case.dropout:
        others["dropout_seed"] = np.int32(case.seed + 11)
    unused = not case.residual or (case.dtype != "float32" and case.in_jax_nn)
    return floats, others, (dout, 0 * dlse if unused else dlse)
