"""What attention can do: one table of options, read by `supports`, by every entry point and by ``docs/options.md``.

Invariant 6: *a combination of options is verified, or refused with the reason and the fix; nothing is ignored.*
`OPTIONS` says what each keyword does, `REFUSALS` which combinations are refused and why. A keyword that is in a
signature and in neither table would be silently ignored: a test compares them.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Int

from ring_jax.closures import holds_tracer
from ring_jax.kernels import registry
from ring_jax.kernels.tiles import Scores
from ring_jax.layouts import LAYOUTS, check_layout, unknown_name
from ring_jax.masks import Rules
from ring_jax.mesh import target

_Ids = Int[Array | np.ndarray, "..."]
TokenIds = _Ids | tuple[_Ids, _Ids] | None
"""Segment ids or positions: one array for queries and keys alike, or a pair."""

_LARGEST = np.iinfo(np.int32).max

STRATEGIES = ("auto", "ring", "all_gather", "ulysses", "usp")
IMPLEMENTATIONS = ("xla", "pallas_tpu", "cudnn", "pallas_gpu")
ROTATIONS = ("auto", "keys", "queries")
GRADIENT_DTYPES = ("float32", "bfloat16")


class Schedule(NamedTuple):
    """How a ring runs; no choice changes what is computed, only rounding (``gradient_dtype``) and traffic.

    Attributes:
      two_directions: half of the keys travel each way round, about half the link time a step where links are full
        duplex. Needs an even number of keys a shard (zigzag: a multiple of 4).
      inner_size: devices in a fast group (a host, a slice) on an axis that spans two levels: keys go round inside a
        group first, so that the slow links carry one hop for each group, sent ``inner_size`` steps ahead.
      ulysses_size: devices that exchange heads for sequence in strategy ``"usp"``; None picks the largest that fits.
      rotate: in the backward pass, what travels: ``"keys"`` (K, V, dK, dV), ``"queries"`` (Q, dO, statistics, dQ), or
        ``"auto"``, whichever moves fewer bytes.
      gradient_dtype: dtype in which the travelling gradient is sent: ``"float32"`` (float64 for float64 arrays), or
        ``"bfloat16"`` for half the bytes; see docs/algorithm.md for the measured error.
      tile_size: tokens in a tile of the block kernel, for all strategies; None takes the kernel's own for the device.
        A Pallas kernel needs a divisor of the local length, and on TPU a multiple of 128.
    """

    two_directions: bool = False
    inner_size: int | None = None
    ulysses_size: int | None = None
    rotate: str = "auto"
    gradient_dtype: str = "float32"
    tile_size: int | None = None


OPTIONS: dict[str, tuple[Any, str]] = {
    "bias": (None, "added to the scores after scaling, broadcastable to [B, N, T, S]; has a gradient"),
    "mask": (None, "boolean, broadcastable to [B, N, T, S]; True attends"),
    "query_seq_lengths": (None, "tokens of each row that are real, [B]; the rest is padding"),
    "key_value_seq_lengths": (None, "the same for keys and values"),
    "scale": (None, "factor of the scores; None is 1/sqrt(H)"),
    "is_causal": (False, "a query sees keys at its own position and before"),
    "local_window_size": (None, "(left, right): positions seen beyond one's own; an int is both"),
    "chunk_size": (None, "a query sees its own chunk of positions only"),
    "segment_ids": (None, "attention stays inside a segment; 0 is padding"),
    "positions": (None, "positions of the tokens; None counts from 0 in the layout's order"),
    "logits_soft_cap": (None, "scores become cap * tanh(scores / cap)"),
    "sinks": (None, "[N]: a logit for each head that joins the normaliser, its probability dropped; has a gradient"),
    "mask_fn": (None, "mask_fn(q_pos, kv_pos, q_seg, kv_seg) -> bool"),
    "score_fn": (None, "score_fn(scores, q_pos, kv_pos, head, *score_args) -> scores"),
    "score_args": ((), "arrays for score_fn; float ones have gradients"),
    "dropout_rate": (0.0, "share of the probabilities that is dropped"),
    "dropout_seed": (None, "which are dropped: an int, an integer array, or a key of jax.random"),
    "strategy": ("auto", "how devices share the work: ring, all_gather, ulysses, usp; auto picks"),
    "layout": ("contiguous", "order of the sequence in all arrays: " + ", ".join(LAYOUTS) + "; None is any order"),
    "implementation": (None, "the kernel of one block; None picks the best that supports the call"),
    "schedule": (None, "ring_jax.Schedule: two directions, two levels, what travels"),
    "return_residual": (False, "also return the log-sum-exp, which has a gradient"),
}
"""Keyword -> (its default, what it does)."""

PLACEMENT = ("mesh", "batch_axis", "head_axis", "sequence_axis", "axis_name")
"""Keywords that say where a call runs: nothing to verify."""

READS_POSITIONS = ("is_causal", "local_window_size", "chunk_size", "mask_fn", "score_fn", "dropout_rate")


class Refusal(NamedTuple):
    """A combination that is refused: ``applies`` gets all keywords, ``reason`` is shown after the options' values."""

    options: tuple[str, ...]
    applies: Callable[[dict[str, Any]], bool]
    reason: str


def _given(*names: str) -> Callable[[dict[str, Any]], bool]:
    """All of these options are on."""
    return lambda options: all(is_on(name, options[name]) for name in names)


def _unordered(options: dict[str, Any]) -> bool:
    return options["layout"] is None and options["positions"] is None


def _schedule(name: str) -> Callable[[dict[str, Any]], bool]:
    """The schedule asks for this."""
    return lambda options: getattr(options["schedule"] or Schedule(), name) != getattr(Schedule(), name)


def _both(*tests: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda options: all(test(options) for test in tests)


def _strategy(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda options: options["strategy"] in names


REFUSALS: tuple[Refusal, ...] = (
    *(
        Refusal((name, "layout"), _both(_given(name), _unordered), "an unnamed order says nothing; pass positions")
        for name in READS_POSITIONS
    ),
    *(
        Refusal(
            (name, "layout"),
            lambda options, name=name: is_on(name, options[name]) and options["layout"] is None,
            "lengths count in the layout's order, and this one has no name; mark the padding with segment id 0",
        )
        for name in ("query_seq_lengths", "key_value_seq_lengths")
    ),
    *(
        Refusal(
            ("schedule", "strategy"),
            _both(_schedule(name), _strategy("all_gather", "ulysses")),
            f'{name} is about a ring, and this strategy has none; use strategy="ring" or "usp"',
        )
        for name in ("two_directions", "inner_size", "rotate")
    ),
    Refusal(
        ("schedule", "strategy"),
        _both(_schedule("ulysses_size"), _strategy("auto", "ring", "all_gather", "ulysses")),
        'ulysses_size is about strategy="usp" alone',
    ),
    Refusal(
        ("schedule", "strategy"),
        _both(_schedule("gradient_dtype"), _strategy("ulysses")),
        "no gradient of Ulysses travels unfinished; leave gradient_dtype alone",
    ),
    *(
        Refusal(
            ("schedule", name),
            lambda options, name=name: (
                is_on(name, options[name]) and (options["schedule"] or Schedule()).rotate == "queries"
            ),
            'its rows stay where they are; use rotate="keys" or "auto"',
        )
        for name in ("bias", "mask")
    ),
    Refusal(
        ("schedule",),
        lambda options: (options["schedule"] or Schedule())[:4:3] == (True, "queries"),
        'two_directions splits the keys, so they must travel; use rotate="keys" or "auto"',
    ),
)


def is_on(name: str, value: Any) -> bool:
    """True unless ``value`` is what the option has when it is left out."""
    default = OPTIONS[name][0]
    if value is None or isinstance(value, (bool, int, float, tuple, str, np.generic)):
        return value is not None and bool(value != default)
    return True


def supports(**keywords: Any) -> str | None:
    """Say whether a combination of keywords of `dot_product_attention` is verified.

    Args:
      **keywords: any keywords of `dot_product_attention` or `ring_attention`, with the values to be used.

    Returns:
      None when the test suite verifies the combination against the float64 reference; otherwise the reason why the
      call would be refused, as a string that names the options: also for a keyword or a name that does not exist.
      Arrays and sizes (a length, a number of heads) are not judged here: the call itself raises for them. A kernel
      named by ``implementation`` is judged for the devices of ``mesh``, or those that are here.

    Example:
      >>> supports(is_causal=True, layout="zigzag", local_window_size=(4, 0)) is None
      True
      >>> supports(layout=None, is_causal=True)
      'is_causal=True, layout=None: an unnamed order says nothing; pass positions'
    """
    for name in keywords:
        if name not in OPTIONS and name not in PLACEMENT:
            return f"{unknown_name('keyword', name, tuple(OPTIONS))}"
    given = {name: keywords.get(name, default) for name, (default, _) in OPTIONS.items()}
    try:
        check(**given)
    except (TypeError, ValueError, NotImplementedError) as refusal:
        return str(refusal)
    if given["implementation"] is None:
        return None
    cap, chunk = given["logits_soft_cap"], chunk_of(given["chunk_size"])
    rules = Rules(given["is_causal"], window_of(given["local_window_size"]), chunk, given["mask_fn"])
    scores = Scores(1.0, cap, rules, given["score_fn"], given["dropout_rate"])
    return registry.refuses_by_name(given["implementation"], target(keywords.get("mesh")), scores, given)


def refusal_of(options: dict[str, Any]) -> str | None:
    """The first row of `REFUSALS` that applies to a complete set of options, as a message."""
    for refusal in REFUSALS:
        if refusal.applies(options):
            return f"{', '.join(_shown(name, options[name]) for name in refusal.options)}: {refusal.reason}"
    return None


def _shown(name: str, value: Any) -> str:
    return f"{name}={value}" if value is None or isinstance(value, (str, numbers.Number, tuple)) else name


def check(**keywords: Any) -> None:
    """Raise for unknown names (ValueError), wrong kinds (TypeError), unverified combinations (NotImplementedError)."""
    schedule = keywords["schedule"]
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a ring_jax.Schedule; got {type(schedule).__name__}")
    if schedule is not None and not isinstance(schedule.two_directions, (bool, np.bool_)):
        raise TypeError(f"two_directions must be a Python bool; got {schedule.two_directions!r}")
    rotate, gradient_dtype = (schedule or Schedule())[3:5]
    names = [("rotate", rotate, ROTATIONS), ("gradient_dtype", gradient_dtype, GRADIENT_DTYPES)]
    names += [("strategy", keywords["strategy"], STRATEGIES)]
    implementation = keywords["implementation"]
    names += [("implementation", "xla" if implementation is None else implementation, IMPLEMENTATIONS)]
    for kind, value, known in names:
        if value not in known:
            raise ValueError(unknown_name(kind, value, known))
    if keywords["layout"] is not None:
        check_layout(keywords["layout"])
    for name in ("is_causal", "return_residual"):
        if not isinstance(keywords[name], (bool, np.bool_)):
            raise TypeError(f"{name} must be a Python bool, known when the function is traced; got {keywords[name]!r}")
    _check_numbers(keywords, schedule or Schedule())
    for name in ("mask_fn", "score_fn"):
        if keywords[name] is not None and not callable(keywords[name]):
            raise TypeError(f"{name} must be a function; got {type(keywords[name]).__name__}")
    if holds_tracer(keywords["score_fn"]):
        raise ValueError("score_fn closes over a traced array, which would get no gradient; pass it in score_args")
    if holds_tracer(keywords["mask_fn"]):
        fix = "close over NumPy arrays and numbers, or pass what is traced as mask, positions or segment_ids"
        raise ValueError(f"mask_fn closes over a traced array, which the backward pass would not know; {fix}")
    if not isinstance(keywords["score_args"], (tuple, list)):
        raise TypeError(f"score_args must be a tuple of arrays; got {type(keywords['score_args']).__name__}")
    if keywords["score_args"] and keywords["score_fn"] is None:
        raise ValueError("score_args are given, but no score_fn that would read them")
    if keywords["dropout_rate"] and keywords["dropout_seed"] is None:
        rule = "an int, an integer array or a key, another at every step"
        raise ValueError(f"dropout_rate={keywords['dropout_rate']} needs a dropout_seed ({rule})")
    reason = refusal_of(keywords)
    if reason is not None:
        raise NotImplementedError(reason)


def _check_numbers(keywords: dict[str, Any], schedule: Schedule) -> None:
    """Raise for static numbers that are traced, of another kind, or out of range."""
    scale = keywords["scale"]
    if scale is not None and not isinstance(scale, (numbers.Real, np.floating)):
        raise TypeError(f"scale must be a Python number; got {scale!r}. Multiply the query by a learned temperature")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite; None means 1/sqrt(head size)")
    cap, rate = keywords["logits_soft_cap"], keywords["dropout_rate"]
    for name, value in (("logits_soft_cap", cap), ("dropout_rate", rate)):
        if not isinstance(value, (numbers.Real, np.floating)) and (value is not None or name == "dropout_rate"):
            raise TypeError(f"{name} must be a Python number, known when the function is traced; got {value!r}")
    if cap is not None and not 0 < cap < np.inf:
        raise ValueError(f"logits_soft_cap={cap} must be positive and finite; None means no cap")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate={rate} must lie in [0, 1)")
    window_of(keywords["local_window_size"])
    sizes = (("chunk_size", keywords["chunk_size"]), ("inner_size", schedule.inner_size))
    for name, value in (*sizes, ("ulysses_size", schedule.ulysses_size), ("tile_size", schedule.tile_size)):
        if value is None:
            continue
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a Python int, known when the function is traced; got {value!r}")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1; None means no limit")


def window_of(value: Any) -> tuple[int, int] | None:
    """``local_window_size`` as (left, right); raise for anything but one or two Python ints that are not negative."""
    if value is None:
        return None
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in pair):
        rule = "a Python int or a pair (left, right) of them, known when the function is traced"
        raise TypeError(f"local_window_size must be {rule}; got {value!r}")
    if min(pair) < 0:
        rule = "not be negative; a side without a limit takes the sequence length"
        raise ValueError(f"local_window_size={value!r} must {rule}")
    return min(int(pair[0]), _LARGEST), min(int(pair[1]), _LARGEST)


def chunk_of(value: int | None) -> int | None:
    """``chunk_size``; None for one that no position reaches the end of, as none fits 32 bits."""
    return None if value is None or value > _LARGEST else int(value)
