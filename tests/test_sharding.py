"""Where logical names meet mesh axes."""

import dataclasses
import re

import jax
import pytest
from flax import nnx
from jax import P

from models import ModelConfig, Transformer
from models.sharding import (
    LOGICAL_AXES,
    RULES,
    ShardingRules,
    check_divisibility,
    make_rules,
    param_specs,
    parameter_name,
)

CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=4,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    remat="none",
    mtp_depth=2,
)


def abstract_model(config: ModelConfig = CONFIG) -> Transformer:
    return jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def test_every_parameter_has_a_spec_of_its_rank():
    model = abstract_model()
    specs = jax.tree_util.tree_leaves_with_path(param_specs(model))
    shapes = dict(jax.tree_util.tree_leaves_with_path(model))
    assert {parameter_name(path) for path, _ in specs} == set(LOGICAL_AXES)
    for path, spec in specs:
        assert len(spec) == len(shapes[path].shape)


def test_specs_cut_columns_then_rows_over_tensor_and_layers_over_pipeline():
    specs = param_specs(abstract_model())
    width, vocabulary = ("data", "sequence"), ("tensor", "pipeline")
    assert specs.layers.attention.query.get_value() == P("pipeline", width, "tensor", None)
    assert specs.layers.attention.output.get_value() == P("pipeline", "tensor", None, width)
    assert specs.layers.mlp.up.get_value() == P("pipeline", width, "tensor")
    assert specs.layers.mlp.down.get_value() == P("pipeline", "tensor", width)
    assert specs.layers.mlp_norm.scale.get_value() == P("pipeline", None)
    assert specs.embedding.get_value() == P(vocabulary, width)
    assert specs.unembedding.get_value() == P(width, vocabulary)


def test_weights_stay_whole_where_their_width_cannot_be_cut():
    rules = make_rules(CONFIG, {"data": 1, "sequence": 3})
    assert rules.spec("layers", "embed", "mlp") == P("pipeline", None, "tensor")
    assert make_rules(CONFIG, {"data": 2, "sequence": 4}) == RULES


def test_tied_model_has_no_second_table():
    names = {
        parameter_name(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(
            abstract_model(dataclasses.replace(CONFIG, tie_embeddings=True))
        )
    }
    assert names == set(LOGICAL_AXES) - {"unembedding"}


def test_one_mesh_axis_cannot_cut_an_array_twice():
    with pytest.raises(ValueError, match=r"'tensor' cuts both 'vocab' and 'embed'.*another rule"):
        param_specs(abstract_model(), ShardingRules(embed="tensor"))
    with pytest.raises(ValueError, match="'sequence' cuts both 'vocab' and 'embed'"):
        ShardingRules(vocab=("data", "sequence"), embed="sequence").spec("vocab", "embed")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"'head' is not a logical axis.*heads"):
        ShardingRules().spec("embed", "head")
    with pytest.raises(ValueError, match=r"'layers.bias' has no row in models.sharding.LOGICAL_AXES"):
        param_specs({"layers": {"bias": 0}})


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({"tensor": 8}, "model.num_heads=4 must be divisible by mesh.tensor=8"),
        ({"tensor": 4}, "model.num_kv_heads=2 must be divisible by mesh.tensor=4.*use mesh.tensor=2 or"),
        ({"tensor": 5}, "model.mlp_dim=24 must be divisible by mesh.tensor=5.*mesh.tensor=4 or model.mlp_dim=25"),
        ({"pipeline": 3}, "model.num_layers=4 must be divisible by mesh.pipeline=3.*mesh.pipeline=2 or"),
    ],
)
def test_sizes_that_a_mesh_cannot_cut(mesh, text):
    assert any(re.search(text, problem) for problem in check_divisibility(CONFIG, mesh))


def test_all_problems_are_listed_at_once():
    problems = check_divisibility(CONFIG, {"data": 7, "tensor": 5, "pipeline": 3, "sequence": 9})
    assert len(problems) == 5
    assert check_divisibility(CONFIG, {"data": 7, "tensor": 2, "pipeline": 4, "sequence": 9}) == []
    assert check_divisibility(CONFIG, {}) == []
    uneven = dataclasses.replace(CONFIG, num_heads=5, head_dim=3)
    own, found = uneven.problems(), check_divisibility(uneven, {"tensor": 7, "pipeline": 8})
    assert len(own) == 2 and found[:2] == own, "its own first, then those of the mesh"
    assert [problem.split("=")[0] for problem in found[2:]] == [
        f"model.{name}" for name in ("num_heads", "num_kv_heads", "mlp_dim", "num_layers", "vocab_size")
    ]
