"""What has no effect in a configuration is said, and nothing is said of one where all has."""

import dataclasses

import pytest
from tiny_run import config

from models.config import RopeScaling
from train import notes as module
from train.config import (
    DataConfig,
    DistributedConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    SourceConfig,
    WatchConfig,
)
from train.notes import notes

REPLACE = dataclasses.replace
SGD = OptimizerConfig(name="sgd", warmup_steps=2)
ONE = MeshConfig(data=2)
CASES = [
    ({"optimizer": REPLACE(SGD, b1=0.8)}, "optimizer.b1=0.8 has no effect: optimizer.name='sgd' has neither"),
    ({"optimizer": REPLACE(SGD, b2=0.8)}, "optimizer.b2=0.8"),
    ({"optimizer": REPLACE(SGD, eps=1e-3)}, "optimizer.eps=0.001"),
    ({"optimizer": REPLACE(SGD, weight_decay=0.0)}, "optimizer.weight_decay=0.0"),
    (
        {"optimizer": OptimizerConfig(warmup_steps=6, min_learning_rate_ratio=0.0)},
        "optimizer.min_learning_rate_ratio=0.0 has no effect: the warmup lasts the whole run",
    ),
    ({"optimizer": OptimizerConfig(warmup_steps=7)}, "warmup_steps=7 is more than num_steps=6: clamped to 6"),
    ({"eval_every": 0, "eval_batches": 2}, "eval_batches=2 has no effect: the one evaluation is at the end"),
    ({"eval_every": 7, "eval_batches": 2}, "eval_batches=2 has no effect"),
    ({"loss": LossConfig(mtp_weight=0.5)}, "loss.mtp_weight=0.5 has no effect: model.mtp_depth=1"),
    (
        {"model": REPLACE(config().model, mlp_chunk=64)},
        "model.mlp_chunk=64 has no effect: a device has no more tokens of a microbatch than that",
    ),
    ({"loss": LossConfig(chunk=64)}, "loss.chunk=64 has no effect: a device has no more tokens at a time than that"),
    ({"loss": LossConfig(chunk=4096)}, "loss.chunk=4096 has no effect: a device has no more tokens at a time"),
    ({"watch": WatchConfig(max_rollbacks=1)}, "watch.max_rollbacks=1 has no effect: --rollback is off"),
    ({"data": DataConfig(field="body")}, "data.field='body' has no effect: without data.path"),
    (
        {"data": DataConfig(field="body", sources=(SourceConfig(path="a"), SourceConfig(path="b")))},
        "data.field='body' has no effect: each of data.sources",
    ),
    (
        {"data": DataConfig(sources=(SourceConfig(path="a", weight=2.0),))},
        "data.sources.0.weight=2.0 has no effect: there is one source only",
    ),
    ({"mesh": ONE, "layout": "striped"}, "layout='striped' has no effect: mesh.sequence=1 cuts no row"),
    ({"mesh": ONE, "model": REPLACE(config().model, strategy="usp")}, "model.strategy='usp' has no effect"),
    (
        {"model": REPLACE(config().model, rope_scaling=RopeScaling(high_freq_factor=8.0))},
        "model.rope_scaling.high_freq_factor=8.0 has no effect: model.rope_scaling.factor=1 scales nothing",
    ),
    (
        {"distributed": DistributedConfig(cluster="none", process_id=1)},
        "distributed.process_id=1 has no effect: distributed.cluster names another way",
    ),
    (
        {"mesh": ONE, "num_microbatches": 2, "accumulate": 3},
        "num_microbatches=2 without a pipeline keeps the activations of all rows for the backward pass; "
        "--num-microbatches 1 --accumulate 6 works",
    ),
]
GOOD = {
    "optimizer": REPLACE(SGD, name="adamw", b1=0.8, eps=1e-3, min_learning_rate_ratio=0.0),
    "loss": LossConfig(mtp_weight=0.5, chunk=63),
    "watch": WatchConfig(rollback=True, max_rollbacks=1),
    "data": DataConfig(path="a", field="body"),
    "layout": "striped",
    "model": REPLACE(config().model, strategy="usp", mtp_depth=2, mlp_chunk=31, rope_scaling=RopeScaling(factor=2.0)),
    "mesh": MeshConfig(sequence=2, pipeline=2),
    "num_microbatches": 2,
}


@pytest.mark.parametrize(("changes", "line"), CASES)
def test_what_has_no_effect_is_said(changes, line):
    (found,) = notes(config(**{"eval_batches": 4} | changes))
    assert line in found


def test_nothing_is_said_of_what_has_an_effect():
    assert notes(config()) == notes(config(**GOOD)) == []
    assert notes(config(eval_every=6, eval_batches=2)) == [], "it may make the last checkpoint the best"


def test_every_line_of_the_table_is_tested():
    said = " ".join(line for _, line in CASES)
    assert all(any(name in said for name in row.names) for row in module._UNUSED)
