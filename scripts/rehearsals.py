"""Rehearse the presets on the machines that they are for, and write docs/rehearsals.md: `make rehearsals`.

Each is compiled by itself, one after another, in .venv-tpu or .venv-gpu; its output is kept in .cache/rehearsals, so
that `make rehearsals ARGS="NAME ..."` compiles only some anew.
"""

import dataclasses
import json
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEPT = ROOT / ".cache" / "rehearsals"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One rehearsal."""

    name: str
    title: str
    words: str
    """Of the command, after `rehearse`."""
    venv: str = ".venv-tpu"

    @property
    def command(self) -> str:
        return f"{self.venv}/bin/python -m train rehearse {self.words} --json"


CASES = (
    Case(
        name="8b-1m-v5p",
        title="Llama 3.1 8B, rows of 1,048,576 tokens, 128 v5p chips",
        words="configs/llama3_8b_1m.py --topology v5p:4x4x8",
    ),
    Case(
        name="8b-1m-h200",
        title="Llama 3.1 8B, rows of 1,048,576 tokens, 64 H200 in 8 hosts",
        words="configs/llama3_8b_1m.py --topology h200x8x8 --mesh.tensor 1 --mesh.sequence 64",
        venv=".venv-gpu",
    ),
    Case(
        name="70b-128k-v5p",
        title="Llama 3.1 70B, rows of 131,072 tokens, 512 v5p chips",
        words="configs/llama3_70b_128k.py --topology v5p:8x8x8 --mesh.data 8 --mesh.tensor 4 --mesh.sequence 16 "
        "--accumulate 1",
    ),
    Case(
        name="70b-128k-tpu7x",
        title="Llama 3.1 70B, rows of 131,072 tokens, 128 chips of tpu7x",
        words="configs/llama3_70b_128k.py --topology tpu7x:4x4x8 --mesh.tensor 4 --mesh.sequence 16 --accumulate 1",
    ),
    Case(
        name="70b-1m-v5e",
        title="Too large: Llama 3.1 70B, rows of 1,048,576 tokens, 256 v5e chips",
        words="configs/llama3_70b_1m.py --topology v5e:16x16 --mesh.sequence 32",
    ),
    Case(
        name="70b-1m-v5e-advised",
        title="The same with what was advised",
        words="configs/llama3_70b_1m.py --topology v5e:16x16 --mesh.sequence 32 --model.remat layer "
        "--model.mlp-chunk 4096",
    ),
)
_INTRODUCTION = """# Rehearsals

Written by `make rehearsals` (`scripts/rehearsals.py`). **Nothing here was measured on hardware.** Each train step was
compiled on a host without accelerators, by the compiler of the machine it is for. Memory, collectives and what they
hide behind are read from that program; step time, tokens/s and MFU are predicted from figures of the machine
(`train/forecast.py`).

    make setup-tpu      # or setup-gpu: the compiler for the machine, once
    .venv-tpu/bin/python -m train rehearse configs/llama3_8b_1m.py --topology v5p:4x4x8

| exit code | |
|---|---|
| 0 | it fits, and every hop of the ring is hidden |
| 2 | something that was typed is wrong, or the compiler is not installed |
| 3 | it does not fit: the output says what would take less, most effective first |
| 4 | it fits, and the ring's hops are exposed: one has no work beside it, or in all they cost 1 % of the step |

With `--json` the last line is one of JSON; `--dump-hlo PATH` writes the scheduled program.

- *Ring hops* are all permutes over `sequence` that the ring sends, each run counted: K with V, positions and segment
  ids forward, again where attention is computed again, and backward; dK with dV.
- The *last homecoming* of dK and dV, one for each layer and microbatch, comes after the last step of its ring. It is
  reported apart, with what it costs, and does not count as exposed.
- *Exposed ms* of a transfer: all of its time where nothing is scheduled meanwhile; else what it takes longer than the
  block of attention (a hop) or the matmuls (all others) that it hides behind.
- "Fits" is the compiler's word on a TPU, which refuses what does not; on a GPU it is the sum against the device's
  memory, of which JAX takes 75 % unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says more.
- Seconds of compiling are those of two cores that had other work, too.
- Not in the predicted time: the optimizer's memory traffic, tiles that a kernel computes in vain, the host, waiting.

"""


def rehearse(case: Case) -> str:
    """Its output, which is kept, too."""
    print(f"{case.title}\n  {case.command}", flush=True)
    done = subprocess.run(["nice", *shlex.split(case.command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 3, 4):
        raise SystemExit(f"exit code {done.returncode}\n{done.stderr[-3000:]}")
    text = f"{done.stdout}exit code {done.returncode}\n"
    print("  " + text.splitlines()[-1], flush=True)
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{case.name}.txt").write_text(text)
    return text


def read(text: str) -> dict:
    """The line of JSON of an output."""
    return json.loads(text.splitlines()[-2])


def row(case: Case, text: str) -> str:
    """A line of the table."""
    found, code = read(text), text.splitlines()[-1].removeprefix("exit code ")

    def figure(name: str, form: str, scale: float = 1) -> str:
        return "-" if found[name] is None else form.format(found[name] * scale)

    mesh = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1)
    cells = [
        case.title,
        mesh,
        "yes" if found["fits"] else "**no**",
        f"{figure('bytes_per_chip', '{:.1f}', 1e-9)} of {figure('hbm_bytes', '{:.1f}', 1e-9)}",
        figure("ring_hops", "{:,}"),
        figure("exposed_ring_hops", "{:,}"),
        f"{figure('homecoming_hops', '{:,}')}, {figure('homecoming_s', '{:.1f}', 1e3)} ms" if found["fits"] else "-",
        figure("exposed_s", "{:.2f}"),
        figure("step_time_s", "{:.1f}"),
        figure("tokens_per_s", "{:,.0f}"),
        figure("mfu", "{:.1%}"),
        figure("compile_s", "{:.0f}"),
        code,
    ]
    return "| " + " | ".join(cells) + " |"


def page(outputs: dict[str, str]) -> str:
    """docs/rehearsals.md"""
    cases = [case for case in CASES if case.name in outputs]
    head = (
        "| rehearsal | mesh | fits | GB a device | ring hops | exposed | last homecomings | exposed transfers, s | "
        "step, s | tokens/s | MFU | compiled in, s | exit |"
    )
    table = [head, "|" + "---|" * 13, *(row(case, outputs[case.name]) for case in cases)]
    parts = [_INTRODUCTION + "\n".join(table) + "\n"]
    for case in cases:
        # The JSON's figures are those of the table.
        lines = outputs[case.name].splitlines()
        body = "\n".join([f"$ {case.command}", *lines[:-2], lines[-1]])
        parts.append(f"\n## {case.title}\n\n```text\n{body}\n```\n")
    return "".join(parts)


def main(names: list[str]) -> None:
    known = {case.name: case for case in CASES}
    if unknown := set(names) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    outputs = {}
    for name, case in known.items():
        kept = KEPT / f"{name}.txt"
        if names and name not in names:
            if kept.exists():
                outputs[name] = kept.read_text()
            continue
        outputs[name] = rehearse(case)
        (ROOT / "docs" / "rehearsals.md").write_text(page(outputs))
    (ROOT / "docs" / "rehearsals.md").write_text(page(outputs))


if __name__ == "__main__":
    main(sys.argv[1:])
