"""Draws from all combinations of options: a sample in which every pair of values meets, and a hypothesis strategy."""

import dataclasses
import itertools
import random
from typing import Any

from hypothesis import strategies as st
from option_inputs import Options

# Field -> values; the first turns it off or is the plainest. Pairs of sizes are one field, so that they fit together.
DOMAINS: dict[str, tuple[Any, ...]] = {
    "strategy": ("ring", "all_gather", "ulysses", "usp"),
    "layout": ("contiguous", "striped", "zigzag", "random", "balanced"),
    "ring": (1, 2, 3, 4, 8),
    "mesh": ((1, 1), (2, 1), (1, 2)),  # data, tensor
    "schedule": (
        (),
        (("two_directions", True),),
        (("inner_size", 2),),
        (("rotate", "keys"),),
        (("rotate", "queries"),),
        (("gradient_dtype", "bfloat16"),),
        (("rotate", "queries"), ("two_directions", True)),
        (("ulysses_size", 2),),
    ),
    "dtype": ("float32", "bfloat16"),
    "lengths": ((48, None), (24, None), (16, 48), (48, 16), (37, None), (29, 11)),
    "heads": ((4, 2), (4, 4), (4, 1), (8, 2), (8, 8)),
    "value_dim": (8, 12),
    "scale": (None, 0.8),
    "is_causal": (False, True),
    "window": (None, (0, 0), 0, (3, 0), (2, 5), 4, (1000, 1000)),
    "chunk": (None, 1, 5),
    "soft_cap": (None, 5.0, 0.5),
    "sinks": (False, True),
    "bias": (None, "BNTS", "NS", "TS", "B", "NT"),
    "bias_holes": (0.0, 0.3),
    "mask": (None, "BNTS", "TS", "BS", "NT"),
    "mask_fn": (None, "prefix", "document"),
    "score_fn": (None, "alibi", "table", "wave"),
    "dropout": (0.0, 0.3),
    "tokens": (None, "packed", "restart", "shared", "pair", "offset", "far", "hollow"),
    "padding": (None, "query", "keys", "both"),
    "residual": (True, False),
}
# Fields of which no value is the usual one: all are equally likely.
_EVEN = ("strategy", "layout", "ring", "lengths", "heads")


def make(choice: dict[str, Any], seed: int) -> Options:
    """A case from one value per field; what cannot be said together is changed to the nearest that can."""
    choice = dict(choice)
    (data, tensor), (length, key_length), (num_heads, num_kv_heads) = map(choice.pop, ("mesh", "lengths", "heads"))
    schedule, strategy, ring = (choice.pop(name) for name in ("schedule", "strategy", "ring"))
    if strategy not in ("ring", "usp"):
        schedule = ()
    if "ulysses_size" in dict(schedule):
        strategy = "usp"
    if {"ulysses_size", "inner_size"} & set(dict(schedule)) and ring not in (4, 8):
        ring = 4
    if num_kv_heads % tensor:
        tensor = 1
    # Most of what Ulysses would refuse is of no use; some of it shows that it is refused.
    if strategy == "ulysses" and (num_heads // tensor) % ring and seed % 4:
        ring = 2
    if choice["bias"] is None:
        choice["bias_holes"] = 0.0
    tokens = choice.pop("tokens")
    if key_length is not None:
        if tokens in ("packed", "restart", "shared", "hollow"):
            tokens = "pair"
        if choice["layout"] == "balanced":
            choice["layout"] = "random"
    if choice["layout"] in ("random", "balanced"):
        choice["padding"] = None  # lengths count places of the natural order, of which the call knows nothing
    if choice["layout"] == "balanced":
        tokens = "packed" if tokens in ("pair", "offset", "far") else tokens
        length = 48  # of whole tiles on every shard
    sizes = {"length": length, "key_length": key_length, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    run = {"ring": ring, "data": data, "tensor": tensor, "strategy": strategy, "schedule": schedule}
    return Options(**sizes, **run, **choice, tokens=tokens, seed=seed)


def values(case: Options) -> list[tuple[str, Any]]:
    """(field, value) for every field of `DOMAINS` that is a field of `Options`, and the grouped ones."""
    grouped = {
        "mesh": (case.data, case.tensor),
        "lengths": (case.length, case.key_length),
        "heads": (case.num_heads, case.num_kv_heads),
    }
    return [(name, grouped[name] if name in grouped else getattr(case, name)) for name in DOMAINS]


def sample(seed: int, count: int) -> list[Options]:
    """``count`` cases, the same for the same seed; each the one of 24 draws that shows most pairs of values first."""
    rng = random.Random(seed)
    met: set[Any] = set()
    cases = []
    for index in range(count):
        draws = [make(_draw(rng), 1000 * seed + index) for _ in range(24)]
        pairs = [set(itertools.combinations(values(case), 2)) for case in draws]
        best = max(range(len(draws)), key=lambda i: len(pairs[i] - met))
        met |= pairs[best]
        cases.append(draws[best])
    return cases


def _draw(rng: random.Random) -> dict[str, Any]:
    """An option is off more often than on: where nearly all is hidden, little is tested."""

    def one(name: str, domain: tuple[Any, ...]) -> Any:
        return rng.choice(domain) if name in _EVEN or rng.random() < 0.4 else domain[0]

    return {name: one(name, domain) for name, domain in DOMAINS.items()}


def coverage(cases: list[Options]) -> tuple[float, list[tuple[str, Any]]]:
    """Share of all pairs of values of two fields that meet in a case, and the values that appear in none."""
    met = {pair for case in cases for pair in itertools.combinations(values(case), 2)}
    every = [[(name, value) for value in domain] for name, domain in DOMAINS.items()]
    total = sum(len(a) * len(b) for a, b in itertools.combinations(every, 2))
    seen = {value for case in cases for value in values(case)}
    return len(met) / total, [value for domain in every for value in domain if value not in seen]


def cases() -> st.SearchStrategy[Options]:
    """For property tests; shrinks towards options that are off."""

    def one(name: str, domain: tuple[Any, ...]) -> st.SearchStrategy[Any]:
        on = st.sampled_from(domain)
        return on if name in _EVEN else st.booleans().flatmap(lambda chosen: on if chosen else st.just(domain[0]))

    choices = st.fixed_dictionaries({name: one(name, domain) for name, domain in DOMAINS.items()})
    return st.builds(make, choices, st.integers(0, 99))


def off(case: Options, *fields: str) -> Options:
    """The case with some of its fields at their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    return dataclasses.replace(case, **{name: defaults[name] for name in fields})
