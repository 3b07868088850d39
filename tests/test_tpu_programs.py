"""The ring compiled for TPUs that are not here: every hop behind a kernel or a matmul, nothing copied, working alarms.

Read from the scheduled programs that libtpu makes (`ring_jax.inspect`); without libtpu these tests are skipped.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import ring_jax
from ring_jax import pods, travel
from ring_jax.inspection import Report

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed here: `make test-tpu` runs this"
    ),
]
LOCAL = 8192  # blocks that lie in the chip's vector memory are scheduled otherwise, and hops of them exposed


def report(
    topology: str, kernel: str, backward: bool, heads: tuple[int, int] = (16, 8), head: int = 128, **keywords
) -> Report:
    """Causal zigzag attention in bfloat16 over all devices of a machine, compiled and read; forward and backward in
    one program with ``backward``."""
    devices = pods.devices(pods.find(topology))
    mesh = ring_jax.make_mesh(sequence=len(devices), devices=devices)
    keywords = {"is_causal": True, "layout": "zigzag", "dtype": "bfloat16"} | keywords
    spec, dtype = jax.NamedSharding(mesh, jax.P(None, "sequence")), keywords.pop("dtype")
    query, key = (jax.ShapeDtypeStruct((1, LOCAL * len(devices), n, head), dtype, sharding=spec) for n in heads)
    given = {}
    if keywords.pop("packed", False):
        given["segment_ids"] = jax.ShapeDtypeStruct(query.shape[:2], jnp.int32, sharding=spec)
    attend = functools.partial(
        ring_jax.dot_product_attention, strategy="ring", implementation=kernel, mesh=mesh, **keywords
    )

    def both(query, key, value, dout, given):
        return jax.vjp(lambda *arrays: attend(*arrays, **given), query, key, value)[1](dout)

    lowered = (
        jax.jit(both).trace(query, key, key, query, given)
        if backward
        else jax.jit(lambda q, k, v, given: attend(q, k, v, **given)).trace(query, key, key, given)
    )
    return ring_jax.inspect(lowered.lower(lowering_platforms=("tpu",)).compile(), mesh)


def assert_hidden(found: Report, size: int, backward: bool, copies: int = 0) -> None:
    """N - 1 hops of K and V in each pass and N - 1 of dK and dV, all but the last of these hidden; no copy a step."""
    hops = found.select("collective-permute", "sequence")
    assert found.count() == sum(x.runs for x in hops) == (3 if backward else 1) * (size - 1)
    exposed = [x for x in hops if not x.hidden and travel.HOMECOMING not in x.scope]
    assert not exposed, f"exposed: {exposed}"
    assert sum(x.runs for x in hops if travel.HOMECOMING in x.scope) == backward
    assert found.copies <= copies, f"{found.copies} copies of what is sent"


@pytest.mark.parametrize(
    ("topology", "kernel"),
    [
        ("v5e:2x4", "pallas_tpu"),
        *(
            pytest.param(topology, kernel, marks=pytest.mark.slow)
            for topology in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
            for kernel in ("pallas_tpu", "xla")
            if (topology, kernel) != ("v5e:2x4", "pallas_tpu")
        ),
    ],
)
def test_every_hop_is_hidden(topology: str, kernel: str):
    found = report(topology, kernel, backward=True)
    assert_hidden(found, 8, backward=True, copies=int(kernel == "xla"))
    assert (found.kernels, bool(found.flops)) == ((16, False) if kernel == "pallas_tpu" else (0, True))


PACKED = "documents, window, cap"
VARIANTS = {
    PACKED: {"packed": True, "local_window_size": (12_000, 0), "logits_soft_cap": 30.0},
    "chunks": {"chunk_size": 20_000},
    "float32": {"dtype": "float32"},
    "heads of 64": {"head": 64},
    "heads of 256": {"head": 256, "heads": (8, 4)},
    "one key head": {"heads": (32, 1)},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != PACKED else []) for name in VARIANTS]
)
def test_variant_compiles_and_is_hidden(name: str):
    """Segment ids, too, but for one hop of 32 kB on v5e; without `travel._in_order` most of theirs are exposed."""
    found = report("v5e:2x4", "pallas_tpu", True, **VARIANTS[name])
    hops = found.select("collective-permute")
    exposed = [x for x in hops if not x.hidden and travel.HOMECOMING not in x.scope]
    assert sum(x.runs for x in exposed) <= 1 and all(x.dtype == "s32" and x.bytes <= 2**15 for x in exposed), exposed
    runs = {dtype: sum(x.runs for x in hops if x.dtype == dtype) for dtype in ("s32", "bf16")}
    assert found.kernels and (name != PACKED or runs["s32"] == runs["bf16"] > 0)


def test_under_vmap_lists_of_tiles_differ():
    """Mapped segment ids make another list of tiles each: traced and lowered with types checked, forward and back."""
    devices = pods.devices(pods.find("v5e:2x2"))
    mesh = ring_jax.make_mesh(sequence=4, devices=devices)
    x, ids = jax.ShapeDtypeStruct((3, 1, 1024, 2, 128), "bfloat16"), jax.ShapeDtypeStruct((3, 1, 1024), jnp.int32)

    def attend(x, ids):
        return ring_jax.dot_product_attention(x, x, x, is_causal=True, mesh=mesh, segment_ids=ids)

    def gradient(x, ids):
        return jax.vjp(lambda y: attend(y, ids), x)[1](x)[0]

    for function in (attend, gradient):
        lowered = jax.jit(jax.vmap(function)).trace(x, ids).lower(lowering_platforms=("tpu",))
        assert "tpu_custom_call" in lowered.as_text()


def test_a_ring_in_series_is_caught(monkeypatch):
    """A hop that waits for the step before it: the right result, and all the time of the transfers on top."""

    def walk(grid, plan, two_directions, attend, carry, blocks):
        for offset in plan[0]:
            blocks = grid.hop(blocks, (0, min(offset, 1)))
            carry, blocks = lax.optimization_barrier((attend(carry, blocks, 0, jnp.array([offset])), blocks))
        return carry

    monkeypatch.setattr(travel, "walk", walk)
    found = report("v5e:2x2", "pallas_tpu", False)
    with pytest.raises(AssertionError, match="exposed"):
        assert_hidden(found, 4, backward=False)


def test_copies_are_caught(monkeypatch):
    """One step a trip of the loop: the block is copied at every step."""
    monkeypatch.setattr(travel, "_steps_a_trip", lambda: 1)
    found = report("v5e:2x2", "pallas_tpu", False)
    with pytest.raises(AssertionError, match="3 copies"):
        assert_hidden(found, 4, backward=False)


@pytest.mark.parametrize(
    "topology", ["v6e:2x4", *(pytest.param(x, marks=pytest.mark.slow) for x in ("v5p:2x2x2", "tpu7x:2x2x1"))]
)
def test_gathers_and_sums_of_weights_run_beside_the_matmuls(topology: str, monkeypatch):
    """The second weight is gathered behind the first matmul, and its gradient scattered behind that of the first; what
    nothing stands beside (the first gather, the last sum) is exposed. Without the options v6e hides nothing of it; the
    others hide this by themselves, but nothing of a whole train step."""
    devices = pods.devices(pods.find(topology))
    mesh = ring_jax.make_mesh(data=len(devices), devices=devices)

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ lax.all_gather(weight, "data", axis=0, tiled=True))
        return x.astype(jnp.float32).sum()

    specs = (jax.P("data"),) * 4, jax.P("data")
    grads = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=specs[0])
    weights = (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 4
    x = jax.ShapeDtypeStruct((4096 * len(devices), 4096), jnp.bfloat16)

    def exposed() -> tuple[int, int]:
        options = ring_jax.compiler_options(mesh)
        lowered = jax.jit(grads, compiler_options=options).trace(weights, x).lower(lowering_platforms=("tpu",))
        found = ring_jax.inspect(lowered.compile(), mesh)
        return tuple(
            sum(x.runs for x in found.select(kind, "data") if not x.hidden) for kind in ("all-gather", "reduce-scatter")
        )

    gathers, sums = exposed()
    assert gathers <= 1
    assert sums <= 1
    if topology == "v6e:2x4":
        monkeypatch.setenv("LIBTPU_INIT_ARGS", " ".join(f"--{name}=false" for name in ring_jax.compiler_options(mesh)))
        assert ring_jax.compiler_options(mesh) == {}
        assert exposed() == (4, 4)
