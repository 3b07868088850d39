"""Programs compiled for GPUs that are not here: every kernel compiles, every hop hides, nothing moved is copied.

They need XLA's compiler for CUDA (``make setup-gpu``, then ``.venv-gpu/bin/python -m pytest`` with this file) and are
skipped without it. Nothing is run: what is read is the scheduled program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import Mesh, NamedSharding

import ring_jax
from ring_jax import inspection, pods, travel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


@functools.cache
def mesh_of(name: str) -> Mesh:
    try:
        devices = pods.devices(pods.find(name))
    except pods.MissingCompilerError as error:
        pytest.skip(str(error))
    return Mesh(np.array(devices), ("sequence",))


def compile_for(
    name: str, length: int, heads: tuple[int, int, int, int], *, options=None, dtype="bfloat16", **keywords
):
    """A call and its gradient: query and key/value heads, sizes of keys and of values."""
    mesh = mesh_of(name)
    options = ring_jax.compiler_options(mesh) if options is None else options
    num_heads, num_kv_heads, head, value_head = heads
    sharding = NamedSharding(mesh, P(None, "sequence"))
    shapes = (num_heads, head), (num_kv_heads, head), (num_kv_heads, value_head), (num_heads, value_head)
    arrays = [jax.ShapeDtypeStruct((1, length, *shape), dtype, sharding=sharding) for shape in shapes]
    attend = functools.partial(ring_jax.dot_product_attention, mesh=mesh, layout="zigzag", strategy="ring", **keywords)

    def both(query, key, value, dout):
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(dout)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(both).trace(*arrays).lower(lowering_platforms=("cuda",)).compile(options)
    return ring_jax.inspect(compiled, mesh)


def exposed(report: inspection.Report) -> list[inspection.Collective]:
    """Hops behind which nothing is computed, but for the gradients' last one."""
    hops = report.select("collective-permute", "sequence")
    assert sum(x.runs for x in hops) >= 7 + 7 + 7, hops
    return [x for x in hops if not x.hidden and travel.HOMECOMING not in x.scope]


@pytest.mark.parametrize("kernel", ["cudnn", "pallas_gpu", "xla"])
def test_every_hop_is_hidden_and_nothing_is_copied(kernel: str):
    report = compile_for("h200x8", 65_536, (32, 8, 128, 128), is_causal=True, implementation=kernel)
    assert exposed(report) == [] and report.copies == 0, str(report)
    assert (report.kernels > 0) == (kernel != "xla")


def test_one_collective_at_a_time_leaves_a_hop_exposed_and_one_step_a_trip_copies(monkeypatch):
    """What the test above would miss, were the flag or the form of the loop lost."""
    call = functools.partial(compile_for, "h200x8", 65_536, (32, 8, 128, 128), is_causal=True)
    assert exposed(call(implementation="pallas_gpu", options={})) != []
    monkeypatch.setattr(travel, "_steps_a_trip", lambda: 1)
    assert call(implementation="cudnn").copies > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100x8", "h200x8"])
@pytest.mark.parametrize("heads", [(4, 2, 64, 64), (4, 2, 256, 256), (4, 4, 192, 128)], ids=str)
@pytest.mark.parametrize("kernel", ["cudnn", "pallas_gpu"])
def test_head_sizes(kernel: str, heads: tuple[int, int, int, int], name: str):
    assert compile_for(name, 16_384, heads, is_causal=True, implementation=kernel).kernels >= 16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_mask_of_pallas_gpu(dtype: str):
    ids = jnp.zeros((1, 16_384), jnp.int32)
    report = compile_for(
        "h200x8",
        16_384,
        (4, 2, 128, 128),
        dtype=dtype,
        is_causal=True,
        local_window_size=(8000, 0),
        chunk_size=12_000,
        logits_soft_cap=30.0,
        segment_ids=ids,
        positions=ids,
        implementation="pallas_gpu",
    )
    assert report.kernels >= 16
