"""Reading a compiled program: how often each collective runs, and what it moves.

The text of `compiled.as_text()` is a list of computations; a ``while`` names its body and, where XLA knows it, its trip
count. An instruction runs as often as the product of the trip counts around it.
"""

import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\([^\n]*\) -> [^\n]*)?\{$", re.M)
_COLLECTIVE = re.compile(
    r"= (?P<shape>\([^=]*?\)|\S+) "
    r"(?P<kind>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_CALLS = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"(f64|f32|bf16|f16|s64|s32|u32|s8|u8|pred)\[([\d,]*)\]")
_BYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}


class Collective(NamedTuple):
    """One collective instruction: ``dtype`` and bytes of what one device sends in one run, and how often it runs."""

    kind: str
    dtype: str
    num_bytes: int
    runs: int
    conditional: bool


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program, in the order of the text."""
    computations = _split(text)
    runs = {name: (0, False) for name in computations}
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)
    assert entry, "no entry computation"
    _visit(entry[1], 1, False, computations, runs)
    found = []
    for name, body in computations.items():
        for match in _COLLECTIVE.finditer(body):
            arrays = _ARRAY.findall(match["shape"])
            size = sum(_BYTES[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in arrays)
            found.append(Collective(match["kind"], arrays[0][0], size, *runs[name]))
    return found


def _split(text: str) -> dict[str, str]:
    starts = list(_COMPUTATION.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return {match[1]: text[match.end() : end] for match, end in zip(starts, ends, strict=True)}


def _visit(name: str, times: int, conditional: bool, computations: dict[str, str], runs: dict) -> None:
    runs[name] = (runs[name][0] + times, runs[name][1] or conditional)
    for line in computations[name].splitlines():
        trips = _TRIPS.search(line)
        inner = times * (int(trips[1]) if trips and " while(" in line else 1)
        branch = " conditional(" in line or (" while(" in line and not trips)
        called = _CALLS.findall(line)
        for group in _BRANCHES.findall(line):
            called += [x.strip().lstrip("%") for x in group.split(",")]
        for callee in called:
            if callee in computations:
                _visit(callee, inner, conditional or branch, computations, runs)
