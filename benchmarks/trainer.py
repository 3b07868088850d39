"""The train step on 8 simulated devices against the same step on one, and what data and checkpoints add to it.

    python -m benchmarks.trainer                                   # about 10 minutes on 2 cores
    python -m benchmarks.trainer --meshes 1,1,1,8 --json rows.json

The model, the documents and the optimizer are the same on every mesh; sizes of a mesh are data, tensor, pipeline,
sequence. What is compared is CPU-seconds of the whole process, since on few cores the wall clock is noisy: the best of
the repeats, in which all programs take turns. Only figures of one run can be compared.

    tokens/s  tokens of a step over its CPU-seconds, against those of the one device (ratio).
    floor%    100 floor over CPU-seconds; the floor are the matmuls of the model (`train.flops`: no recomputation, no
              padding) at the best rate of a large float32 matmul, which is measured beside the rest.
    wait%     share of the steps of a real run that its loop waits for the next batch: median over the steps.
    save%     what a checkpoint every --save-every steps adds to the seconds of the steps, its end waited for: median
              over pairs of as many steps without and with one.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import ring_jax
from models.config import ModelConfig
from train import flops, loop, metrics, platform
from train.checkpoint import CheckpointStore, Meta
from train.config import MESH_AXES, CheckpointConfig, DataConfig, MeshConfig, TrainConfig, to_json
from train.data import batches, load_corpus
from train.step import init_state, make_train_step, place_batch

NUM_DEVICES = 8
ONE = (1, 1, 1, 1)
MESHES = ((1, 1, 1, 8), (2, 1, 1, 4), (1, 2, 2, 2))
MATMUL_SIZES = (1024, 2048)


def make_config(options: argparse.Namespace, sizes: tuple[int, ...], **changes: Any) -> TrainConfig:
    """The run of the benchmark on one mesh."""
    width = options.width
    model = ModelConfig(
        vocab_size=256,
        num_layers=4,
        embed_dim=width,
        num_heads=max(2, width // 64),
        num_kv_heads=2,
        head_dim=min(64, width // 2),
        mlp_dim=3 * width,
    )
    config = TrainConfig(
        model=model,
        mesh=MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True))),
        data=DataConfig(path=options.text, seq_len=options.seq_len, batch_size=4),
        num_microbatches=2 if sizes[2] > 1 else 1,
        num_steps=options.steps,
        eval_every=0,
        checkpoint=CheckpointConfig(every=10**9),
    )
    return dataclasses.replace(config, **changes)


class Steps:
    """A compiled train step that goes on from its own state, on one batch."""

    def __init__(self, config: TrainConfig, batch: dict[str, np.ndarray]):
        mesh = ring_jax.make_mesh(**config.mesh.sizes(), devices=jax.devices()[: config.mesh.num_devices])
        self.config = config
        self.state = init_state(config, mesh)
        self._batch = place_batch(batch, config, mesh)
        self._step = make_train_step(config, mesh)

    def __call__(self) -> None:
        self.state, measured = self._step(self.state, self._batch)
        jax.block_until_ready((self.state, measured))


class Matmul:
    """A large one on one device, which may use all cores."""

    def __init__(self, size: int):
        self.flops, self._square = 2 * size**3, jnp.full((size, size), 1 / size, jnp.float32)
        self._compiled = jax.jit(jnp.matmul).lower(self._square, self._square).compile()

    def __call__(self) -> None:
        jax.block_until_ready(self._compiled(self._square, self._square))


def race(programs: dict[Any, Any], repeats: int) -> dict[Any, float]:
    """Best CPU time of the process for each; they take turns, after a round to compile and warm up."""
    best = dict.fromkeys(programs, float("inf"))
    for turn in range(repeats + 1):
        for key, program in programs.items():
            start = time.process_time()
            program()
            seconds = time.process_time() - start
            best[key] = min(best[key], seconds) if turn else best[key]
    return best


def measure_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the one device and for each mesh."""
    config = make_config(options, ONE)
    corpus = load_corpus(config.data)
    batch = next(batches(corpus, seq_len=options.seq_len, batch_size=config.data.batch_size, seed=0))
    steps = {sizes: Steps(make_config(options, sizes), batch) for sizes in (ONE, *options.meshes)}
    matmuls = {size: Matmul(size) for size in MATMUL_SIZES}
    best = race({**steps, **matmuls}, options.repeats)
    rate = max(matmul.flops / best[size] for size, matmul in matmuls.items())
    floor = flops.model_flops(config.model, flops.count_for(config.model, batch["segment_ids"])) / rate
    return [
        {
            "mesh": list(sizes),
            "cpu_s": best[sizes],
            "tokens_per_cpu_s": config.tokens_per_step / best[sizes],
            "ratio": best[ONE] / best[sizes],
            "floor_s": floor,
            "floor_fraction": floor / best[sizes],
            "matmul_flops_per_cpu_s": rate,
        }
        for sizes in steps
    ]


def measure_wait(options: argparse.Namespace) -> float:
    """Share of the steps of a real run on the first mesh that it waits for data."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(options, options.meshes[0], run_dir=f"{folder}/run")
        with open(os.devnull, "w") as nothing:
            loop.train(loop.prepare(config, resume_command=""), Console(file=nothing))
        rows = metrics.read_rows(pathlib.Path(folder, "run"))[
            2:
        ]  # the first compiles, the second has its batch already
    return statistics.median(row["data_wait_s"] / row["step_time_s"] for row in rows)


def measure_save(options: argparse.Namespace) -> dict[str, float]:
    """What checkpoints add, as a share of the steps between them, by the wall clock and in CPU-seconds."""
    config = make_config(options, options.meshes[0])
    corpus = load_corpus(config.data)
    batch = next(batches(corpus, seq_len=options.seq_len, batch_size=config.data.batch_size, seed=0))
    steps, added = Steps(config, batch), []
    steps()
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(pathlib.Path(folder), keep=2)
        for turn in range(options.repeats + 1):
            seconds = []
            for saves in (False, True):
                start = time.perf_counter(), time.process_time()
                if saves:
                    meta = Meta(step=turn, data_state={"next_row": 0}, config=to_json(config), text_fingerprint="")
                    store.save(steps.state, meta)
                for _ in range(options.save_every):
                    steps()
                if saves and (problem := store.settle()):
                    raise RuntimeError(problem)
                seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            added += [[after / before - 1 for before, after in zip(*seconds, strict=True)]] if turn else []
        store.close()
    wall, cpu = (statistics.median(values) for values in zip(*added, strict=True))
    return {"save_added_wall": wall, "save_added_cpu": cpu}


def parse(argv: list[str] | None) -> argparse.Namespace:
    summary, _, text = (__doc__ or "\n\n").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.trainer", description=summary, epilog=text, formatter_class=raw)
    parser.add_argument("--meshes", type=_sizes, nargs="+", metavar="D,T,P,S", default=MESHES)
    parser.add_argument("--text", help="folder of text; default: Python's own sources")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256, help="of the model; heads and MLP follow")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of the run that shows the waiting for data")
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="also write the figures here")
    options = parser.parse_args(argv)
    if min(options.seq_len, options.width, options.repeats, options.save_every) < 1 or options.steps < 3:
        parser.error("all numbers must be at least 1, --steps at least 3")
    return options


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(map(int, text.split(",")))
    if len(sizes) != len(MESH_AXES) or np.prod(sizes) != NUM_DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} must be four sizes whose product is {NUM_DEVICES}")
    return sizes


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    platform.prepare(NUM_DEVICES, "cpu")
    facts: dict[str, Any] = {"jax": jax.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    config = make_config(options, ONE)
    facts |= {"parameters": flops.num_params(config.model), "rows": config.data.batch_size, "length": options.seq_len}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    rows = measure_steps(options)
    print(
        f"matmul {rows[0]['matmul_flops_per_cpu_s'] / 1e9:.0f} GFLOP a CPU-second, floor {rows[0]['floor_s']:.3g} CPU-s"
    )
    print(f"{'data,tensor,pipeline,sequence':32}{'CPU-s':>8}{'tokens/s':>10}{'ratio':>7}{'floor%':>8}")
    for row in rows:
        name = ",".join(map(str, row["mesh"]))
        print(
            f"{name:32}{row['cpu_s']:8.3f}{row['tokens_per_cpu_s']:10.0f}{row['ratio']:7.2f}"
            f"{100 * row['floor_fraction']:8.1f}",
            flush=True,
        )
    wait, save = measure_wait(options), measure_save(options)
    print(f"wait% {100 * wait:.2f}")
    wall, cpu = 100 * save["save_added_wall"], 100 * save["save_added_cpu"]
    print(f"save% {wall:.2f} by the wall clock, {cpu:.2f} in CPU-seconds")
    facts["load_after"] = os.getloadavg()[0]
    print(f"load of the machine: {facts['load']:.1f} before, {facts['load_after']:.1f} after")
    if options.json:
        options.json.write_text(json.dumps(facts | {"steps": rows, "data_wait": wait, **save}, indent=2))


if __name__ == "__main__":
    main()
