"""The configuration: every rule between its fields is reported at once, with value, rule and fix."""

import ast
import dataclasses
import inspect
import json
import pathlib
import re

import numpy as np
import pytest
from jaxtyping import config as jaxtyping_config
from tiny_run import config

from models import config as model_config
from train import advice
from train import config as train_config
from train.checks import validate
from train.config import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    MeshConfig,
    OptimizerConfig,
    SourceConfig,
    clamp_warmup,
    differing_fields,
    nearest,
    to_json,
)

REPLACE = dataclasses.replace


def test_a_good_configuration_passes():
    validate(config(), 2)
    validate(config(mesh=MeshConfig(data=2, tensor=2, pipeline=2, sequence=2), data=DataConfig(seq_len=64)), 16)


@pytest.mark.parametrize(
    ("changes", "num_devices", "value", "rule", "fix"),
    [
        (
            {"mesh": MeshConfig(sequence=4)},
            8,
            "data 1 x tensor 1 x pipeline 1 x sequence 4 = 4 devices",
            "exactly the 8 devices that there are",
            "--platform cpu",
        ),
        ({"data": DataConfig(seq_len=66)}, 2, "seq_len=66", "divisible by 4", "--data.seq-len 68"),
        (
            {"data": DataConfig(seq_len=65), "layout": "contiguous"},
            2,
            "seq_len=65",
            "divisible by 2",
            "--data.seq-len 66",
        ),
        ({"mesh": MeshConfig(tensor=4)}, 4, "num_heads=2", "divisible by mesh.tensor=4", "use mesh.tensor=2"),
        ({"mesh": MeshConfig(pipeline=3)}, 3, "num_layers=2", "divisible by mesh.pipeline=3", "num_layers=3"),
        ({"mesh": MeshConfig(data=4)}, 4, "batch_size=2", "divisible by mesh.data=4", "--data.batch-size 4"),
        ({"num_microbatches": 4}, 2, "batch_size=2", "num_microbatches=4", "--data.batch-size 4"),
        ({"model": REPLACE(config().model, num_kv_heads=3)}, 2, "num_heads=2", "multiple", "num_kv_heads"),
        (
            {"model": REPLACE(config().model, vocab_size=100)},
            2,
            "vocab_size=100",
            "at least 256",
            "--model.vocab-size 256",
        ),
        ({"layout": "zigzga"}, 2, "layout='zigzga'", "one of contiguous, striped, zigzag", "did you mean 'zigzag'?"),
        ({"optimizer": OptimizerConfig(name="adam")}, 2, "'adam'", "one of adamw, sgd", "did you mean 'adamw'?"),
        (
            {"data": DataConfig(seq_len=64, path="a", sources=(SourceConfig(path="b"),))},
            2,
            "data.path='a'",
            "must be left out where data.sources names 1 sources",
            "add it to them",
        ),
        (
            {"data": DataConfig(seq_len=64, sources=(SourceConfig(path="b"), SourceConfig(path="c", weight=-1.0)))},
            2,
            "data.sources.1.weight=-1.0",
            "greater than 0",
            "take the source (c) out",
        ),
        (
            {"data": DataConfig(seq_len=64, on_error="ignore", long_documents="split")},
            2,
            "data.on_error='ignore'",
            "one of raise, skip",
            "",
        ),
        (
            {"data": DataConfig(seq_len=64, tokenizer="no.json")},
            2,
            "data.tokenizer='no.json'",
            "cannot be read",
            "makes one",
        ),
        ({"num_steps": 0}, 2, "num_steps=0", "at least 1", "--num-steps 1"),
        ({"mesh": MeshConfig(sequence=0)}, 2, "mesh.sequence=0", "at least 1", "--mesh.sequence 1"),
        ({"data": DataConfig(seq_len=64, batch_size=-2)}, 2, "batch_size=-2", "at least 1", "--data.batch-size 1"),
        ({"optimizer": OptimizerConfig(learning_rate=float("nan"))}, 2, "learning_rate=nan", "finite", "1e-3"),
        ({"optimizer": OptimizerConfig(clip_norm=0.0)}, 2, "clip_norm=0.0", "greater than 0", "1.0"),
        ({"optimizer": OptimizerConfig(b2=1.0)}, 2, "b2=1.0", "less than 1", "0.95"),
        ({"checkpoint": CheckpointConfig(every=0)}, 2, "checkpoint.every=0", "at least 1", "--checkpoint.every 1"),
        ({"eval_every": -1}, 2, "eval_every=-1", "at least 0", "--eval-every 0"),
        ({"seed": -1}, 2, "seed=-1", "at least 0", "--seed 0"),
        ({"run_dir": "gs://b/run"}, 2, "run_dir='gs://b/run'", "must be a folder of this machine", "mount the store"),
        (
            {"distributed": DistributedConfig(num_processes=2)},
            2,
            "processes 2",
            "must be given together",
            "--process-id",
        ),
        (
            {"mesh": MeshConfig(data=8), "data": DataConfig(seq_len=64, batch_size=1)},
            8,
            "batch_size=1",
            "divisible by mesh.data=8",
            "use --data.batch-size 8, or --mesh.data 1 --mesh.sequence 8, which",
        ),
        (
            {"mesh": MeshConfig(sequence=2, tensor=8), "data": DataConfig(seq_len=1001)},
            16,
            "seq_len=1001",
            "divisible by 4",
            "use --data.seq-len 1008",
        ),
    ],
)
def test_a_problem_names_value_rule_and_fix(changes, num_devices, value, rule, fix):
    with pytest.raises(ValueError, match="in the configuration") as caught:
        validate(config(**changes), num_devices, device_kind="NVIDIA H200", environment={})
    message = str(caught.value)
    assert value in message
    assert rule in message
    assert fix in message


TYPES = [
    ("model", "windows", 4096, "a tuple, each entry an int or None; write (4096,)"),
    ("model", "windows", [8, None], "a tuple, each entry an int or None; write (8, None)"),
    ("model", "windows", (8.0, "4"), "write (8, 4)"),
    ("model", "mlp_chunk", "4096", "an int or None; write 4096"),
    ("model", "num_layers", None, "an int; write 1, say"),
    ("model", "num_layers", 2.0, "an int; write 2"),
    ("model", "mlp_dim", 32.5, "an int; write 32, say"),
    ("model", "num_heads", True, "an int; write 1"),
    ("model", "attention_soft_cap", "30", "a number or None; write 30.0"),
    ("model", "rope_scaling", None, "a RopeScaling; write RopeScaling(...)"),
    ("model", "remat", None, "one of none, layer, attention, offload"),
    ("mesh", "tensor", "2", "an int; write 2"),
    ("data", "batch_size", 4.0, "an int; write 4"),
    ("data", "seq_len", float("inf"), "an int; write 2048, say"),
    ("data", "path", pathlib.PurePosixPath("a/b"), "a string or None; write 'a/b'"),
    ("data", "sources", ("a",), "a SourceConfig; write SourceConfig(...)"),
    ("data", "sources", (SourceConfig(path="a", weight="1"),), "a number; write 1.0"),
    ("optimizer", "learning_rate", "1e-3", "a number; write 0.001"),
    ("optimizer", "name", None, "one of adamw, sgd"),
    ("watch", "rollback", "yes", "True or False; write False, say"),
    ("watch", "rollback", 1, "True or False; write True"),
    ("watch", "profile", 10, "a string or None; write None, say"),
    ("distributed", "num_processes", "2", "an int or None; write 2"),
    ("", "eval_every", None, "an int; write 50, say"),
    ("", "layout", ["zigzag"], "a string; write 'zigzag', say"),
    ("", "run_dir", pathlib.PurePosixPath("runs/a"), "a string or None; write 'runs/a'"),
    ("", "num_steps", np.int64(3), "an int; write 3"),
]


@pytest.fixture
def _as_users_run_it():
    """Without the run-time type checker of the test suite, which would refuse a model before."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(("section", "name", "value", "rest"), TYPES, ids=str)
def test_a_value_of_another_type_is_one_more_problem(section, name, value, rest):
    """It is in the list, and the other problems too: another type keeps nothing from being checked."""
    broken = config(layout="zigzga")
    changed = REPLACE(getattr(broken, section), **{name: value}) if section else value
    broken = REPLACE(broken, **{section or name: changed})
    with pytest.raises(ValueError, match="in the configuration") as caught:
        validate(broken, 2, environment={})
    lines = str(caught.value).splitlines()
    (line,) = [line for line in lines if rest in line]
    assert line.startswith(f"  - {section}{'.' if section else ''}{name}")
    assert len(lines) == 2 + (name != "layout"), lines


@pytest.mark.parametrize("section", ["model", "mesh", "data", "watch"])
def test_a_section_that_is_none(section):
    broken = REPLACE(config(eval_every="3"), **{section: {"seed": 3}})
    with pytest.raises(ValueError, match=r"^2 problems") as caught:
        validate(broken, 2)
    assert f"{section}={{'seed': 3}} must be a " in str(caught.value) and "eval_every='3'" in str(caught.value)


def leaves_of(config, prefix=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves_of(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


NUMBERS = [name for name, value in leaves_of(config()) if type(value) is float]
NUMBERS += ["model.attention_soft_cap", "model.final_soft_cap"]


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_may_be_nan(name):
    with pytest.raises(ValueError, match=rf"{re.escape(name.split('.')[-1])}=nan.* must be"):
        validate(advice.apply(config(), {name: float("nan")}), 2)


def test_all_problems_are_listed_at_once():
    broken = config(
        mesh=MeshConfig(tensor=3, sequence=2),
        data=DataConfig(seq_len=66, batch_size=3),
        num_microbatches=2,
        num_steps=0,
    )
    with pytest.raises(ValueError, match="in the configuration") as caught:
        validate(broken, 8)
    message = str(caught.value)
    assert message.startswith("8 problems")
    for part in (
        "mesh data 1",
        "seq_len=66",
        "batch_size=3",
        "num_steps=0",
        "num_heads=2",
        "num_kv_heads=2",
        "mlp_dim=32",
    ):
        assert part in message


def test_a_mismatch_names_the_devices():
    with pytest.raises(ValueError, match=r"exactly the 8 devices that there are \(NVIDIA H200\)"):
        validate(config(), 8, device_kind="NVIDIA H200")


def test_warmup_is_clamped_to_the_run():
    assert clamp_warmup(config(num_steps=1)).optimizer.warmup_steps == 1
    assert clamp_warmup(config()) == config()


def test_json_holds_every_field_and_differences_are_named_with_both_values():
    saved = to_json(config())
    assert json.loads(json.dumps(saved)) == saved
    assert differing_fields(saved, to_json(config())) == []
    changed = to_json(config(model=REPLACE(config().model, embed_dim=32), seed=3))
    assert differing_fields(saved, changed) == [
        "model.embed_dim: 16 in the checkpoint, 32 in this run",
        "seed: 0 in the checkpoint, 3 in this run",
    ]
    del changed["seed"]
    assert differing_fields(saved, changed)[-1] == "seed: 0 in the checkpoint, (absent) in this run"


def test_nearest_name():
    assert nearest("rnu", ["run", "plan"]) == "; did you mean 'run'?"
    assert nearest("xyz", ["run", "plan"]) == ""


def test_every_field_is_documented_and_the_tree_is_small():
    leaves = 0
    for module in (train_config, model_config):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                fields = [place for place, line in enumerate(node.body) if isinstance(line, ast.AnnAssign)]
                leaves += len(fields)
                for place in fields:
                    after = node.body[place + 1]
                    is_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    assert is_docstring, f"{node.name}.{node.body[place].target.id}"
    assert leaves <= 92  # seven of them: dropout, and the rotary scaling of Llama 3.1
