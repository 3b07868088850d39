"""Write docs/options.md from the tables of `ring_jax.options`; ``--check`` says whether the committed page is stale.

The values with which a combination is refused come from the refusal's own test, tried on `VALUES`. A refusal that none
of them meets raises: the page cannot lose one.
"""

import argparse
import inspect
import itertools
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ring_jax import layouts, options  # noqa: E402
from ring_jax.options import Schedule  # noqa: E402

PAGE = ROOT / "docs" / "options.md"
SOME = object()  # an array or a function

SCHEDULES = (
    Schedule(two_directions=True),
    Schedule(inner_size=2),
    Schedule(ulysses_size=2),
    *(Schedule(rotate=name) for name in options.ROTATIONS[1:]),
    *(Schedule(gradient_dtype=name) for name in options.GRADIENT_DTYPES[1:]),
    Schedule(tile_size=128),
    *(Schedule(two_directions=True, rotate=name) for name in options.ROTATIONS[1:]),
)
VALUES: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "local_window_size": (3,),
    "chunk_size": (8,),
    "dropout_rate": (0.1,),
    "layout": (None, *layouts.LAYOUTS),
    "strategy": options.STRATEGIES,
    "implementation": options.IMPLEMENTATIONS,
    "schedule": SCHEDULES,
}
"""Option -> values to try, the plainest first; an option that is not here takes an array or a function."""

TOP = """# Options of attention

Written from the tables in `ring_jax/options.py` by `make docs`; do not edit it here.

The keywords of `ring_jax.dot_product_attention`. Those of `ring_attention`, `all_gather_attention`, `ulysses_attention`
and `usp_attention` (inside `shard_map`) are the same without `strategy`, and so are those of the adapters, as far as
their own interfaces have them. Shapes and types are in the docstrings.
"""

REFUSED = """## Refused combinations

A combination that is not in this table is verified; one that is raises `NotImplementedError` before any device work.
`ring_jax.supports(**keywords)` gives the reason as a string, or `None`.
"""

SCHEDULE = """## `schedule=ring_jax.Schedule(...)`

How a ring runs. No field changes what is computed: only traffic, the order of sums, and the precision in which
gradients travel.
"""

VERIFIED = """## How combinations are verified

`tests/test_options.py` compares out, lse and the gradient of every float array, for a random dense cotangent, with
dense attention in float64 NumPy (`tests/oracle.py`): every option alone, on one device and on a ring of four, where it
must also change the result; edges; and a sample of all combinations in which every value appears and more than 97 % of
the pairs of values meet. `make test-all` runs the sample, and prints its seed and the number of calls that were
verified and refused.
"""

SIZES = """## Sizes that are refused at the call

`supports` does not see sizes. The call raises `ValueError`, with the sizes that fit, before any device work:

| where | must hold |
| --- | --- |
| every call | N is a multiple of K |
| a mesh | the batch is a multiple of the batch axes; N is a multiple of the head axis, and K is, or divides it |
| `strategy="ulysses"` | N on one device of the head axis is a multiple of the sequence axis |
| `strategy="usp"` | `ulysses_size` divides the sequence axis, and N on one device of the head axis |
| `Schedule(inner_size=...)` | it divides the places of the ring: the sequence axis, in USP divided by `ulysses_size` |
| `Schedule(two_directions=True)` inside `shard_map` | the keys of a shard are even; zigzag: a multiple of 4 |
| zigzag inside `shard_map` | the local length is even |

`dot_product_attention` takes any sequence length: padding is internal. A multiple of the sequence axis (zigzag: of
twice that) saves a copy. Inside `shard_map` nothing is padded.

What no call can check: with a named `layout` and `segment_ids`, one array of `positions` must differ inside a segment
as the layout's own indices do. A shift for each document keeps that, another order does not. Blocks that a window or
chunk cannot reach are left out on that promise; for positions that break it pass `layout=None`. Positions without
`segment_ids` are not trusted: they may restart, and no block is left out.
"""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _shown(name: str, values: list[Any]) -> str:
    """Code for an option, with the values with which it is refused."""
    if SOME in values or name not in VALUES or len(VALUES[name]) == 1:
        return f"`{name}`"
    return " or ".join(f"`{name}={_code(value)}`" for value in values)


def _code(value: Any) -> str:
    if isinstance(value, Schedule):
        default = Schedule()._asdict()
        fields = (f"{name}={_code(x)}" for name, x in value._asdict().items() if x != default[name])
        return f"Schedule({', '.join(fields)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _refused_values(refusal: options.Refusal) -> list[list[Any]]:
    """For each option of a refusal, the values with which it applies; of schedules only those with fewest fields."""
    plain = {name: default for name, (default, _) in options.OPTIONS.items()}
    domains = [VALUES.get(name, (SOME,)) for name in refusal.options]
    found = [
        values
        for values in itertools.product(*domains)
        if refusal.applies(plain | dict(zip(refusal.options, values, strict=True)))
    ]
    if not found:
        raise AssertionError(f"no value of VALUES meets the refusal of {refusal.options}: {refusal.reason}")
    fewest = min(_fields(values) for values in found)
    found = [values for values in found if _fields(values) == fewest]
    return [list(dict.fromkeys(column)) for column in zip(*found, strict=True)]


def _fields(values: tuple[Any, ...]) -> int:
    """Fields of the schedule among some values that are not at their default."""
    return sum(sum(a != b for a, b in zip(x, Schedule(), strict=True)) for x in values if isinstance(x, Schedule))


def _refusals() -> list[tuple[str, ...]]:
    """(options, reason), options that are refused for one reason in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for refusal in options.REFUSALS:
        names = zip(refusal.options, _refused_values(refusal), strict=True)
        shown = sorted((_shown(*pair) for pair in names), key=lambda text: "=" in text)
        rows.setdefault((refusal.reason, *shown[1:]), []).append(shown[0])
    return [(" with ".join((" or ".join(first), *rest)), reason) for (reason, *rest), first in rows.items()]


def _schedule_fields() -> list[tuple[str, ...]]:
    """(field, default, meaning) from the docstring of `Schedule`."""
    text = inspect.getdoc(Schedule) or ""
    found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text.split("Attributes:\n")[1], re.M)
    meanings = {name: re.sub(r"\s+", " ", meaning).replace("``", "`") for name, meaning in found}
    return [(f"`{name}`", f"`{_code(x)}`", meanings[name]) for name, x in Schedule()._asdict().items()]


def page() -> str:
    """The whole page."""
    keywords = [(f"`{name}`", f"`{_code(default)}`", text) for name, (default, text) in options.OPTIONS.items()]
    parts = [
        TOP + "\n" + _table(("keyword", "default", "what it does"), keywords),
        REFUSED + "\n" + _table(("combination", "why, and what to do"), _refusals()),
        SCHEDULE + "\n" + _table(("field", "default", "meaning"), _schedule_fields()),
        VERIFIED,
        SIZES,
    ]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/options.md from the tables in ring_jax/options.py.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale; run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
