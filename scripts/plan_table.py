"""Predicted against compiled: the table of docs/performance.md. Takes minutes; run it as

    python scripts/plan_table.py

Train steps are compiled for simulated CPU devices, in float32, and their bytes on a device are read from the program.
"""

import dataclasses
import pathlib
import sys
from typing import NamedTuple

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from models import ModelConfig
from ring_jax import make_mesh
from train.config import MESH_AXES, DataConfig, LossConfig, MeshConfig, TrainConfig
from train.step import abstract_batch, abstract_state, make_train_step
from train.step_cost import predict_memory

MODEL = ModelConfig(vocab_size=512, num_layers=8, embed_dim=128, num_heads=8, num_kv_heads=4, head_dim=16, mlp_dim=256)
DEEP = dataclasses.replace(MODEL, num_layers=96, mlp_dim=64, num_heads=2, num_kv_heads=2)
WIDE = dataclasses.replace(MODEL, num_layers=2, embed_dim=1024, mlp_dim=4096, vocab_size=8192)
AHEAD = dataclasses.replace(MODEL, num_layers=2, vocab_size=32768)

CASES = {
    "43 M parameters, 128 tokens a device": (WIDE, "layer", (1, 2, 1, 4), 512, {}),
    "remat none": (MODEL, "none", (1, 1, 1, 4), 8192, {}),
    "remat none, tensor 2": (MODEL, "none", (1, 2, 1, 4), 8192, {}),
    "remat attention": (MODEL, "attention", (1, 1, 1, 4), 8192, {}),
    "remat layer": (MODEL, "layer", (1, 1, 1, 4), 8192, {}),
    "remat layer, 96 layers": (DEEP, "layer", (1, 1, 1, 4), 8192, {}),
    "remat none, pipeline 2": (MODEL, "none", (1, 1, 2, 2), 8192, {"num_microbatches": 2}),
    "32,768 words": (AHEAD, "layer", (1, 1, 1, 4), 2048, {}),
    "32,768 words, 4 tokens ahead": (dataclasses.replace(AHEAD, mtp_depth=4), "layer", (1, 1, 1, 4), 2048, {}),
}
"""What is in the table: model, remat, mesh (data, tensor, pipeline, sequence), length of two rows, other fields."""


class Compared(NamedTuple):
    """Bytes on a device: as predicted, and as compiled."""

    arguments: tuple[float, int]
    temporaries: tuple[float, int]


def compare(name: str) -> Compared:
    """Compile the step of a case."""
    model, remat, sizes, length, other = CASES[name]
    chosen: dict = {"remat": remat}
    config = TrainConfig(
        model=dataclasses.replace(model, **chosen),
        mesh=MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True))),
        data=DataConfig(seq_len=length, batch_size=2),
        loss=LossConfig(chunk=128),
        **other,
    )
    mesh = make_mesh(**config.mesh.sizes())
    given = abstract_state(config, mesh), abstract_batch(config, mesh)
    compiled = make_train_step(config, mesh).lower(*given).compile()
    memory, found = predict_memory(config), compiled.memory_analysis()
    predicted = memory.gradients + memory.saved + memory.working
    return Compared((memory.state, found.argument_size_in_bytes), (predicted, found.temp_size_in_bytes))


def table() -> str:
    """Markdown."""
    lines = [
        "| case | arguments, MB: predicted, compiled | temporaries, MB: predicted, compiled | ratio of sums |",
        "|---|---|---|---|",
    ]
    for name in CASES:
        found = compare(name)
        cells = [f"{predicted / 1e6:.2f}, {compiled / 1e6:.2f}" for predicted, compiled in found]
        share = sum(x[0] for x in found) / sum(x[1] for x in found)
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {share:.2f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 16)
    print(table())
