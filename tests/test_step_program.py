"""The compiled train step: memory that falls with the mesh, and traffic that is what the formulas say.

Compiled only, never run; what is read is exact on any machine.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_step import MODEL, ONE, SGD, B, T, axes_of, collectives, make_config, packed_batch, trace, walk

from models import ModelConfig
from models.config import REMAT
from ring_jax import inspect, make_mesh
from train.config import MESH_AXES, DataConfig, LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.step import abstract_batch, abstract_state, init_state, make_eval_step, make_train_step, place_batch

WIDE = dataclasses.replace(MODEL, embed_dim=64, mlp_dim=192, head_dim=16, vocab_size=128)


def compile_step(sizes: tuple[int, ...], length: int, rows: int = 2, model: ModelConfig = WIDE, **changes: Any):
    config = TrainConfig(
        model=model,
        mesh=MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True))),
        data=DataConfig(seq_len=length, batch_size=rows),
        **({"optimizer": SGD, "num_steps": 10} | changes),
    )
    mesh = make_mesh(**config.mesh.sizes())
    given = abstract_state(config, mesh), abstract_batch(config, mesh)
    return make_train_step(config, mesh).lower(*given).compile(), mesh


def test_memory_is_constant_where_tokens_a_device_are():
    """1,024 tokens a device. The weights are small here: what a device holds of them falls with the ring."""
    found = [compile_step((1, 1, 1, n), 1024 * n, 1)[0].memory_analysis() for n in (4, 8, 16)]
    temporaries = [x.temp_size_in_bytes for x in found]
    assert max(temporaries) <= 1.05 * min(temporaries), temporaries
    arguments = [x.argument_size_in_bytes for x in found]
    assert arguments == sorted(arguments, reverse=True), arguments


@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (1, 2, 2, 2), (2, 2, 2, 2)], ids=str)
def test_weights_and_optimizer_fall_with_every_axis(sizes):
    """Arguments of the step: parameters and the two moments of Adam, cut over all axes (norm scales are not)."""

    def arguments(sizes) -> int:
        compiled, _ = compile_step(sizes, 64, 4, optimizer=OptimizerConfig())
        return compiled.memory_analysis().argument_size_in_bytes

    whole, cut = arguments((1, 1, 1, 1)), arguments(sizes)
    assert cut <= 1.1 * whole / math.prod(sizes), (whole, cut)


def test_the_logits_of_a_large_vocabulary_never_appear():
    """131,072 words and 2,048 tokens: logits of 1 GiB; a chunk of 256 tokens has 128 MiB, on 4 devices 32."""
    model = dataclasses.replace(MODEL, vocab_size=131072)
    compiled, _ = compile_step((1, 2, 1, 2), 2048, 1, model, loss=LossConfig(chunk=256))
    logits = 2048 * 131072 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 4
    shapes = _float_shapes(compiled.as_text())
    assert any(kind == "f32" for kind, _ in shapes)
    size, largest = max((math.prod(map(int, dims.split(","))), f"{kind}[{dims}]") for kind, dims in shapes)
    assert size * 4 <= logits / 16, f"{largest} is the largest"


def _float_shapes(text: str) -> set[tuple[str, str]]:
    """(type, dimensions) of all arrays of floating-point numbers in a program, of any width."""
    return set(re.findall(r"\b(b?f\d\w*)\[([\d,]+)\]", text))


def test_logits_of_any_type_would_be_seen():
    text = "%a = bf16[2048,131072]{1,0} dot(f8e4m3fn[8,4] %b, f32[2] %c, s32[9,9] %d), f64[]"
    assert _float_shapes(text) == {("bf16", "2048,131072"), ("f8e4m3fn", "8,4"), ("f32", "2")}


def precisions(equations) -> set:
    return {eqn.params["precision"] for _, eqn in equations if eqn.primitive.name == "dot_general"}


def test_float32_is_multiplied_as_float32():
    """Every product of the step, of an evaluation and of the model alone; a TPU's default is bfloat16, a GPU's TF32."""
    highest = {(jax.lax.Precision.HIGHEST,) * 2}
    config = make_config(ONE)
    mesh, batch = make_mesh(), {name: jax.ShapeDtypeStruct((B, T), jnp.int32) for name in packed_batch(0)}
    params = abstract_state(config, mesh).params
    assert precisions(trace(ONE, 1)) == highest
    assert precisions(walk(make_eval_step(config, mesh).trace(params, batch).jaxpr.jaxpr)) == highest
    assert precisions(walk(jax.make_jaxpr(lambda model, x: model(x))(params, batch["tokens"]).jaxpr)) == highest
    chunked = abstract_state(make_config(ONE, model=dataclasses.replace(MODEL, mlp_chunk=24)), mesh).params
    slope = jax.make_jaxpr(jax.grad(lambda model, x: model(x).sum()))(chunked, batch["tokens"])  # by a caller
    assert precisions(walk(slope.jaxpr)) == highest
    half = trace(ONE, 1, model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    assert not precisions(half) & highest


@pytest.mark.parametrize("remat", REMAT)
def test_gathered_weights_are_gathered_again(remat):
    """A layer's 7, forward and once more backward, whatever else is kept."""
    found = collectives(trace((2, 2, 2, 2), 2, model=dataclasses.replace(MODEL, remat=remat)))
    weights = [
        eqn
        for path, eqn in found
        if path.count("scan") >= 2 and "all_gather" in eqn.primitive.name and axes_of(eqn) == ("data", "sequence")
    ]
    assert len(weights) == 2 * 7


@pytest.mark.parametrize("windows", [(), (None, 24)])
@pytest.mark.parametrize("sizes", [ONE, (1, 1, 1, 2)], ids=str)
def test_no_form_of_a_weight_is_kept_for_the_backward_pass(sizes, windows):
    """Neither gathered, nor cast, nor cut out of the stack: where everything else is, no loop stacks one a layer.

    Its gradient leaves the loop in groups, one for each trip.
    """
    model = dataclasses.replace(MODEL, remat="none", compute_dtype="bfloat16", windows=windows)
    layers = abstract_state(make_config(ONE, model=model), make_mesh()).params.layers
    whole = [leaf.shape[1:] for leaf in jax.tree.leaves(layers) if leaf.ndim > 2]
    cut = {tuple(n // sizes[3] if n == MODEL.embed_dim else n for n in shape) for shape in whole}
    loops = [eqn for _, eqn in trace(sizes, 1, model=model) if eqn.primitive.name == "scan"]
    stacked = {v.aval.shape[1:] for eqn in loops for v in eqn.outvars}
    assert any(shape[-1:] == (MODEL.mlp_dim,) for shape in stacked), "activations are"
    assert not stacked & {*whole, *cut}


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_the_layers_of_a_turn_are_not_kept_tick_by_tick(remat):
    """Of a circular pipeline: 2 turns of 4 microbatches in 9 ticks, which run the same weights again and again."""
    model = dataclasses.replace(MODEL, remat=remat)
    layers = abstract_state(make_config(ONE, model=model), make_mesh()).params.layers
    whole = {leaf.shape[1:] for leaf in jax.tree.leaves(layers) if leaf.ndim > 2}
    loops = [eqn for _, eqn in trace((1, 1, 2, 1), 4, model=model, repeats=2) if eqn.primitive.name == "scan"]
    stacked = {v.aval.shape for eqn in loops for v in eqn.outvars if v.aval.shape[:1] == (9,)}
    assert any(shape[-1:] == (MODEL.embed_dim,) for shape in stacked), "activations are"
    assert not [shape for shape in stacked for weight in whole if shape[-len(weight) :] == weight]


def test_gradients_are_summed_over_devices_once_a_step():
    """Each device sums its own over the pieces of `accumulate` first."""
    found = collectives(trace((2, 1, 1, 2), 1, accumulate=2))
    sums = [(path, eqn) for path, eqn in found if "psum" in eqn.primitive.name and "data" in axes_of(eqn)]
    assert sum(any(v.aval.ndim for v in eqn.invars) for _, eqn in sums) >= 3, "those of the norm scales"
    for path, eqn in sums:
        assert not {"scan", "while"} & set(path) or not any(v.aval.ndim for v in eqn.invars)


@pytest.mark.slow
def test_attention_in_the_memory_of_the_host_is_the_same():
    """Two steps on four devices: not a bit differs from what keeps it on the device."""

    def run(remat: str) -> list[Any]:
        config = make_config((2, 1, 1, 2), model=dataclasses.replace(MODEL, remat=remat))
        mesh = make_mesh(**config.mesh.sizes())
        state, step, found = init_state(config, mesh), make_train_step(config, mesh), []
        for seed in range(2):
            state, metrics = step(state, place_batch(packed_batch(seed), config, mesh))
            found.append(metrics)
        return jax.device_get([found, jax.tree.leaves(state)])

    kept, moved = (jax.tree.leaves(run(remat)) for remat in ("attention", "offload"))
    assert all((a == b).all() for a, b in zip(kept, moved, strict=True))


def layer_matrices(model: ModelConfig) -> int:
    attention = model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    return attention + 3 * model.embed_dim * model.mlp_dim


@pytest.mark.parametrize("sizes", [(1, 2, 1, 4), (2, 1, 1, 4), (2, 2, 1, 2)], ids=str)
def test_traffic_of_weights_and_gradients_is_that_of_the_formula(sizes):
    """Over g = data * sequence devices, for each weight of n entries on a tensor shard, (g - 1) / g of its bytes:
    gathered forward and once more where a layer is recomputed; its gradient summed and cut once, in float32."""
    data, tensor, _, sequence = sizes
    compiled, mesh = compile_step(sizes, 64)
    found, group = inspect(compiled, mesh), data * sequence
    layers = WIDE.num_layers * layer_matrices(WIDE) // tensor
    tables = 2 * WIDE.vocab_size * WIDE.embed_dim // tensor
    part = 4 * (group - 1) / group
    on_weights = [x for x in found.collectives if x.participants == group and (x.axes or ("",))[0] != "tensor"]

    def sent(kind: str) -> float:
        return sum(x.bytes * x.runs for x in on_weights if x.kind == kind)

    assert sent("all-gather") == part * (2 * layers + tables)
    assert sent("reduce-scatter") == part * (layers + tables)


@pytest.mark.parametrize("depth", [1, 3])
def test_activations_cross_the_pipeline_once_a_tensor_shard(depth):
    """All-reduces over the stages: the rows of the embedding and what the last stage has, each way, and of each only
    the tokens of one tensor shard, however many tokens ahead are predicted."""
    model = dataclasses.replace(WIDE, mtp_depth=depth)
    compiled, mesh = compile_step((1, 2, 2, 2), 64, model=model, num_microbatches=2)
    found = [x for x in inspect(compiled, mesh).collectives if x.axes == ("pipeline",) and x.kind == "all-reduce"]
    tokens = 2 * 64 // 2 // 2 * WIDE.embed_dim * 4  # bytes; sent by two stages: 2 (p - 1) / p times
    large = [x.bytes * x.runs for x in found if x.bytes >= tokens / 2]
    assert len(large) == 4
    assert 4 * tokens <= sum(large) <= 4.1 * tokens, large


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 1, 4), (1, 2, 1, 1), (1, 1, 2, 2), (2, 1, 2, 1)], ids=str)
def test_nothing_is_sent_over_an_axis_of_size_one(sizes):
    compiled, mesh = compile_step(sizes, 64, 4)
    found = inspect(compiled, mesh)
    assert all(x.participants > 1 or x.bytes == 0 for x in found.collectives)
    assert all(x.kind == "all-reduce" for x in found.collectives if x.participants == 1), "XLA keeps sums over one only"
    if sizes[3] > 1:  # K and V go round; activations are never gathered along the sequence
        permutes = [x for x in found.collectives if x.kind == "collective-permute" and x.axes == ("sequence",)]
        assert permutes
