"""Where logical names meet mesh axes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import P, lax

from models import ModelConfig, Transformer
from models.collectives import gather_weight
from models.sharding import (
    LOGICAL_AXES,
    RULES,
    ShardingRules,
    check_divisibility,
    make_rules,
    param_specs,
    parameter_name,
    weight_notes,
)
from ring_jax import make_mesh

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


@pytest.mark.parametrize(
    ("data", "sequence", "axes", "note"),
    [
        (1, 3, None, "whole over data x sequence, 3 times what they need be"),
        (2, 3, ("data",), "whole over sequence, 3 times"),
        (4, 8, ("sequence",), "whole over data, 4 times"),
        (5, 3, None, "model.embed_dim=16 is not a multiple of mesh.data x mesh.sequence=15; use sizes"),
    ],
)
def test_weights_are_cut_over_what_divides_their_width(data, sequence, axes, note):
    mesh = {"data": data, "sequence": sequence}
    assert make_rules(CONFIG, mesh).spec("layers", "embed", "mlp") == P("pipeline", axes, "tensor")
    (line,) = weight_notes(CONFIG, mesh)
    assert note in line


def test_weights_are_cut_over_both_axes_where_these_divide_their_width():
    assert make_rules(CONFIG, {"data": 2, "sequence": 4}) == RULES and make_rules(CONFIG, {}) == RULES
    assert weight_notes(CONFIG, {"data": 2, "sequence": 4}) == weight_notes(CONFIG, {}) == []


def test_weights_that_one_axis_cuts_are_gathered_and_their_gradient_is_summed_over_both():
    """Two data shards hold half of 4 rows each, which three sequence shards do not divide."""
    rng = np.random.default_rng(0)
    weight, factors = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=(2, 3, 4, 8)).astype(np.float32)

    def local(weight, factors):
        def objective(weight):
            weight = lax.pcast(weight, ("tensor", "pipeline", "sequence"), to="varying")
            whole = gather_weight(weight, 0, 4, factors)
            return lax.psum(jnp.sum(whole * factors), ("data", "tensor", "pipeline", "sequence"))

        return jax.value_and_grad(objective)(weight)

    mesh = make_mesh(data=2, sequence=3)
    call = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data", "sequence")), out_specs=(P(), P("data")))
    value, grad = jax.jit(call)(weight, factors)
    np.testing.assert_allclose(value, (weight * factors).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, factors.sum((0, 1)), rtol=1e-5)


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
