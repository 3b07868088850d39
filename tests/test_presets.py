"""The presets: each fits the mesh it names, has the size it names, and its docstring tells the truth."""

import dataclasses
import pathlib
import re
import runpy
import shlex

import jax
import pytest
from flax import nnx

from models import Transformer
from ring_jax.planner import HARDWARE
from train import cli
from train.checks import validate
from train.flops import num_params
from train.memory import estimate_memory
from train.notes import notes

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRESETS = {
    "quickstart": (459_392, 2_048),
    "gpt_125m_8k": (123_587_328, 8_192),
    "llama3_8b_128k": (8_030_261_248, 131_072),
    "llama3_8b_1m": (8_030_261_248, 1_048_576),
    "llama3_70b_128k": (70_553_706_496, 131_072),
    "llama3_70b_1m": (70_553_706_496, 1_048_576),
}


def read(name):
    names = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))
    return names["config"](), names["__doc__"]


def test_these_are_all():
    assert {path.stem for path in (ROOT / "configs").glob("*.py")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_sizes(name):
    config, _ = read(name)
    params, seq_len = PRESETS[name]
    abstract = jax.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == params == num_params(config.model)
    assert config.data.seq_len == seq_len


@pytest.mark.parametrize("name", PRESETS)
def test_every_command_fits_its_devices_and_its_memory(name, monkeypatch):
    """The commands of the docstring, in order, with the devices and the gigabytes that it names."""
    monkeypatch.chdir(ROOT)
    _, text = read(name)
    counts = {int(count) for count in re.findall(r"(\d+) (?:v5p|H200|devices)", text)}
    gigabytes = re.findall(r"(\d+\.\d+) GB", text)
    commands = re.findall(r"python -m train run (.+)", text)
    assert len(commands) == len(gigabytes) >= 1
    for command, memory in zip(commands, gigabytes, strict=True):
        path, *overrides = shlex.split(command)
        config = cli._read_config(path, overrides)
        assert (config.data.tokenizer == "bytes") == (config.model.vocab_size == 256), "128,256 ids are not bytes"
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="bytes"))
        validate(config, config.mesh.num_devices)
        assert counts == {config.mesh.num_devices}
        estimate = estimate_memory(config).total
        assert f"{estimate / 1e9:.{len(memory.partition('.')[2])}f}" == memory
        assert notes(config) == []
        assert estimate < 0.5 * HARDWARE["TPU v5p"].hbm_bytes, "an estimate needs room"


def test_memory_falls_as_the_mesh_grows():
    config, _ = read("llama3_8b_128k")
    estimate = estimate_memory(config)
    norms = (2 * 32 + 1) * 4096  # which are whole
    # Parameters, a piece's gradients and their sum, Adam's moments.
    assert estimate.state == 20 * ((8_030_261_248 - norms) / 64 + norms)
    # Of one row's 16,384 tokens, over 4 tensor devices, in 32 layers: their inputs, and attention's output (32 heads
    # of 128, as wide as the input) in bfloat16 with what rounding took from it, its statistics in float32.
    assert estimate.saved == 16_384 * (2 * 4096 * 3 + 32 * 4) * 32 / 4
    smaller = estimate_memory(cli._read_config(str(ROOT / "configs/llama3_8b_128k.py"), ["--mesh.sequence", "16"]))
    assert smaller.state == 20 * ((8_030_261_248 - norms) / 128 + norms)
    assert smaller.saved == estimate.saved / 2
    assert smaller.working < estimate.working
