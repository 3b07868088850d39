"""Attention on 8 simulated devices against `jax.nn.dot_product_attention` on one device, and against the floor.

    python -m benchmarks.attention                                # a selection, 10 to 15 minutes on 2 cores
    python -m benchmarks.attention --lengths 8192 --masks full    # other options: their first values, strategy ring
    python -m benchmarks.attention --all [--lengths 4096]         # other options: all their values; hours

Batch 1, head size 64, zigzag order. Packed: 8 documents of uneven lengths by segment ids, for jax.nn by a dense mask.
What is compared is CPU-seconds of the whole process, since on few cores the wall clock is noisy: the best of the
repeats, in which all programs of a case take turns, so that noise hits each. Only figures of one case can be compared.

    ratio     CPU-seconds over those of jax.nn. Forward + backward is the gradient of sum(out * cotangent), 7 matmuls;
              jax.nn keeps the scores and need not compute out, which leaves 5.
    floor%    100 floor over CPU-seconds: 100 is a program that does the matmuls of the visible pairs of tokens and no
              more, 4 H FLOPs a pair and head forward, 14 H forward + backward, at the best rate of a large matmul in
              that dtype, which is measured beside the rest.
    temp      temporaries of a device, from the compiled program.
    sent      bytes that a device sends in one run, from the compiled program.

Balance between devices shows in none of them; the contract tests read it from the program.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ring_jax
from train import platform

NUM_DEVICES, HEAD_DIM = 8, 64
LENGTHS = (4096, 8192, 16384)
DTYPES = ("float32", "bfloat16")
MASKS = ("causal", "full", "causal_packed", "full_packed")
HEADS = ("8/8", "8/2")  # query heads / key-value heads
STRATEGIES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "all_gather": {"strategy": "all_gather"},
    "ulysses": {"strategy": "ulysses"},
    "usp": {"strategy": "usp"},
    "ring_two_directions": {"strategy": "ring", "schedule": ring_jax.Schedule(two_directions=True)},
}
FOUR = tuple(STRATEGIES)[:4]
PASSES = {"forward": 4 * HEAD_DIM, "forward_backward": 14 * HEAD_DIM}  # matmul FLOPs of a visible pair and query head
DOCUMENTS = (5, 1, 3, 8, 2, 6, 4, 7)  # lengths of the documents, relative to each other
DENSE_LIMIT = 8 * 2**30  # jax.nn is left out from here on: its backward pass keeps three arrays of scores
MATMUL_SIZES = (1024, 2048)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # between two forward passes: no test, but slips of the benchmark show


class Case(NamedTuple):
    """One input, and what is run on it."""

    length: int
    dtype: str
    mask: str
    heads: str
    strategies: tuple[str, ...]

    @property
    def is_causal(self) -> bool:
        return self.mask.startswith("causal")

    @property
    def is_packed(self) -> bool:
        return self.mask.endswith("packed")

    @property
    def num_heads(self) -> tuple[int, int]:
        num_heads, num_kv_heads = map(int, self.heads.split("/"))
        return num_heads, num_kv_heads

    @property
    def documents(self) -> np.ndarray:
        """Their lengths; a single one where nothing is packed."""
        ends = np.cumsum(DOCUMENTS) * self.length // sum(DOCUMENTS)
        return np.diff(ends, prepend=0) if self.is_packed else np.array([self.length])

    @property
    def segment_ids(self) -> np.ndarray | None:
        """``[1, T]``, from 1 on."""
        if not self.is_packed:
            return None
        return np.repeat(np.arange(len(DOCUMENTS), dtype=np.int32) + 1, self.documents)[None]

    def floor_flops(self, name: str) -> int:
        """Matmul FLOPs that a pass cannot do without."""
        pairs = sum(n * (n + 1) // 2 if self.is_causal else n * n for n in self.documents.tolist())
        return PASSES[name] * pairs * self.num_heads[0]

    @property
    def dense_bytes(self) -> int:
        """Of one array of scores, which jax.nn keeps in float32."""
        return 4 * self.num_heads[0] * self.length**2

    def __str__(self) -> str:
        return f"{self.length} tokens, {self.dtype}, {self.mask}, heads {self.heads}"


class Program(NamedTuple):
    """A compiled program with its arguments."""

    compiled: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return jax.block_until_ready(self.compiled(*self.arguments))


def compile_passes(attend: Callable[..., Any], arrays: tuple[Any, ...]) -> dict[str, Program]:
    """Both passes of ``attend(query, key, value, who_sees)``; arrays: query, key, value, who_sees, cotangent."""

    def loss(query, key, value, who_sees, cotangent):
        return (attend(query, key, value, who_sees) * cotangent).sum()

    functions = {"forward": (attend, arrays[:4]), "forward_backward": (jax.grad(loss, argnums=(0, 1, 2)), arrays)}
    return {name: Program(jax.jit(f).lower(*x).compile(), x) for name, (f, x) in functions.items()}


def dense_attention(query, key, value, mask, *, is_causal: bool):
    """The call that people have now."""
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, implementation="xla")


def matmuls(dtype: str) -> dict[tuple[str, str], Program]:
    """Large ones on one device, which may use all cores."""
    squares = [jnp.full((n, n), 1 / n, dtype) for n in MATMUL_SIZES]
    return {("matmul", str(len(x))): Program(jax.jit(jnp.matmul).lower(x, x).compile(), (x, x)) for x in squares}


def compile_case(case: Case, mesh: jax.sharding.Mesh) -> dict[tuple[str, str], Program]:
    """(strategy or "jax.nn", pass) -> program."""
    rng = np.random.default_rng(0)
    counts = (case.num_heads[0], case.num_heads[1], case.num_heads[1], case.num_heads[0])
    arrays = [jnp.asarray(rng.normal(size=(1, case.length, n, HEAD_DIM)), case.dtype) for n in counts]
    ids = case.segment_ids
    programs = {}
    if case.dense_bytes < DENSE_LIMIT:
        mask = None if ids is None else jnp.asarray(ids[:, None, :, None] == ids[:, None, None, :])
        attend = functools.partial(dense_attention, is_causal=case.is_causal)
        passes = compile_passes(attend, (*arrays[:3], mask, arrays[3]))
        programs |= {("jax.nn", name): program for name, program in passes.items()}
    sharding = jax.NamedSharding(mesh, jax.P(None, "sequence"))
    order = [*arrays[:3], ids, arrays[3]]
    order = [x if x is None else ring_jax.to_layout(jnp.asarray(x), "zigzag", NUM_DEVICES) for x in order]
    sharded = tuple(jax.device_put(order, sharding))
    for strategy in case.strategies:

        def attend(query, key, value, segment_ids, keywords=STRATEGIES[strategy]):
            keywords = keywords | {"is_causal": case.is_causal, "segment_ids": segment_ids, "mesh": mesh}
            return ring_jax.dot_product_attention(query, key, value, layout="zigzag", **keywords)

        programs |= {(strategy, name): program for name, program in compile_passes(attend, sharded).items()}
    return programs


def check_alike(case: Case, programs: dict[tuple[str, str], Program]) -> None:
    """Raise RuntimeError where a strategy does not compute what jax.nn does (or what the first one does)."""
    want = None
    for (who, name), program in programs.items():
        if name != "forward":
            continue
        out = program()
        out = np.asarray(out if who == "jax.nn" else ring_jax.from_layout(out, "zigzag", NUM_DEVICES), np.float32)
        want = out if want is None else want
        error = np.abs(out - want).max()
        if not error <= TOLERANCE[case.dtype]:
            raise RuntimeError(f"{case}: {who} differs by {error:.2g}; at most {TOLERANCE[case.dtype]} is rounding")


def race(programs: dict[tuple[str, str], Program], repeats: int) -> dict[tuple[str, str], float]:
    """Best CPU time of the process for each; they take turns, after a round to warm up."""
    best = dict.fromkeys(programs, float("inf"))
    for turn in range(repeats + 1):
        for key, program in programs.items():
            start = time.process_time()
            program()
            seconds = time.process_time() - start
            best[key] = min(best[key], seconds) if turn else best[key]
    return best


def measure(case: Case, mesh: jax.sharding.Mesh, repeats: int) -> list[dict[str, Any]]:
    """A row for each strategy and pass; ``ratio`` is None where jax.nn was left out."""
    programs = compile_case(case, mesh)
    check_alike(case, programs)
    best = race(programs | matmuls(case.dtype), repeats)
    rate = max(2 * n**3 / best["matmul", str(n)] for n in MATMUL_SIZES)
    rows = []
    for (who, name), program in programs.items():
        report = ring_jax.inspect(program.compiled, None if who == "jax.nn" else mesh)
        dense, floor = best.get(("jax.nn", name)), case.floor_flops(name) / rate
        row = {"length": case.length, "dtype": case.dtype, "mask": case.mask, "heads": case.heads, "strategy": who}
        row |= {"pass": name, "cpu_s": best[who, name], "ratio": dense and best[who, name] / dense}
        row |= {"floor_s": floor, "floor_fraction": floor / best[who, name], "matmul_flops_per_cpu_s": rate}
        rows.append(row | {"temporaries_bytes": report.temporaries, "sent_bytes": report.sent_bytes()})
    return rows


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    """Print the table of one case."""
    rate = rows[0]["matmul_flops_per_cpu_s"] / 1e9
    floors = " and ".join(f"{x['floor_s']:.3g}" for x in rows[:2])
    print(f"\n{case}: matmul {rate:.0f} GFLOP a CPU-second, floor {floors} CPU-seconds")
    if case.dense_bytes >= DENSE_LIMIT:
        sizes = f"{case.dense_bytes / 2**30:.1f} GiB, and the limit is {DENSE_LIMIT / 2**30:.0f}"
        print(f"jax.nn left out: one array of its scores has {sizes}; no ratios")
    columns = f"{'CPU-s':>8}{'ratio':>7}{'floor%':>8}{'temp MB':>9}{'sent MB':>9}"
    print(f"{'':20}{'forward':>41}   {'forward + backward':>41}")
    print(f"{'':20}{columns}   {columns}")
    for who in dict.fromkeys(x["strategy"] for x in rows):
        cells = []
        for x in rows:
            if x["strategy"] == who:
                ratio = "-" if x["ratio"] is None else f"{x['ratio']:.2f}"
                sizes = f"{x['temporaries_bytes'] / 1e6:9.1f}{x['sent_bytes'] / 1e6:9.1f}"
                cells.append(f"{x['cpu_s']:8.3f}{ratio:>7}{100 * x['floor_fraction']:8.1f}{sizes}")
        print(f"{who:20}{'   '.join(cells)}", flush=True)


def plan(options: argparse.Namespace) -> list[Case]:
    """What to run: the product of what was asked for, or the default selection."""
    given = (options.lengths, options.dtypes, options.masks, options.heads)
    if options.all or options.strategies or any(given):
        every = (LENGTHS, DTYPES, MASKS, HEADS)
        axes = [asked or (full if options.all else full[:1]) for asked, full in zip(given, every, strict=True)]
        strategies = tuple(options.strategies or (STRATEGIES if options.all else ["ring"]))
        return [Case(*x, strategies) for x in itertools.product(*axes)]
    return [
        *(Case(4096, dtype, "causal", heads, FOUR) for heads in HEADS for dtype in DTYPES),
        *(Case(4096, dtype, mask, "8/8", ("ring",)) for dtype in DTYPES for mask in MASKS[1:]),
        Case(4096, "float32", "causal_packed", "8/2", ("ring",)),
        Case(8192, "float32", "causal", "8/8", FOUR),
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    summary, _, text = (__doc__ or "\n\n").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.attention", description=summary, epilog=text, formatter_class=raw)
    parser.add_argument("--all", action="store_true", help="all values of every option that is left out")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T", help=f"tokens; all: {LENGTHS}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--masks", nargs="+", choices=MASKS)
    parser.add_argument("--heads", nargs="+", choices=HEADS, help="query heads / key-value heads")
    parser.add_argument("--strategies", nargs="+", choices=tuple(STRATEGIES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="also write the rows here, after each case")
    options = parser.parse_args(argv)
    for name, values in (("--lengths", options.lengths or ()), ("--repeats", [options.repeats])):
        if any(x < 1 for x in values):
            parser.error(f"{name} must be at least 1")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    platform.prepare(NUM_DEVICES, "cpu")
    mesh = ring_jax.make_mesh(sequence=NUM_DEVICES)
    facts = {"jax": jax.__version__, "cores": os.cpu_count(), "devices": NUM_DEVICES, "repeats": options.repeats}
    cases, rows = plan(options), []
    print(f"{', '.join(f'{name} {x}' for name, x in facts.items())}; {len(cases)} cases")
    print("ratio: CPU-seconds over those of jax.nn on one device; floor%: of them, what matmuls of visible pairs need")
    for case in cases:
        found = measure(case, mesh, options.repeats)
        show(case, found)
        rows += found
        if options.json:
            options.json.write_text(json.dumps(facts | {"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
