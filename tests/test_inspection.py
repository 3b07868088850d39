"""What `inspect` reads from compiled programs, against totals worked out by hand.

Real programs run on 8 CPU devices, as ``data=2, sequence=4``; a block of one device is f32[8,16], 512 bytes.
"""

import json

import jax
import jax.numpy as jnp
import pytest
from hlo_samples import GPU, TPU_CHAIN, TPU_REDUCE_SCATTER, TPU_RING, TPU_SPARSE_CORE, hlo
from jax import P, lax

from ring_jax.inspection import KINDS, inspect

BLOCK = 8 * 16 * 4
MATMUL = 2 * 1024**3  # of the samples for TPU
ALL = P(("data", "sequence"))
RING = [(i, (i + 1) % 4) for i in range(4)]
CPU_MESH = jax.make_mesh((2, 4), ("data", "sequence"), devices=jax.devices()[:8])


def compile_on_eight(function, *, shape=(64, 16), mesh=CPU_MESH, spec=ALL):
    x = jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, spec))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(x).compile()


def only(report):
    assert len(report.collectives) == 1, report
    return report.collectives[0]


def loop(body, length: int):
    return lambda x: lax.scan(lambda x, _: (body(x), None), x, None, length=length)[0]


def hop(x):
    return lax.ppermute(x, "sequence", RING)


def test_permute_in_a_scan():
    report = inspect(compile_on_eight(loop(lambda x: hop(x) @ jnp.ones((16, 16)) + x, 5)), CPU_MESH)
    found = only(report)
    assert (found.kind, found.dtype, found.axes, found.shift) == ("collective-permute", "f32", ("sequence",), 1)
    assert (found.participants, found.bytes, found.runs, found.conditional) == (4, 512, 5, False)
    assert (found.asynchronous, found.hidden_flops, found.hidden) == (False, None, False)
    assert report.sent_bytes() == report.sent_bytes("collective-permute", "sequence") == 5 * 512
    assert report.count(axis="sequence") == 5
    assert report.count(axis="data") == report.count("all-gather") == 0
    assert report.flops == 5 * 2 * 8 * 16 * 16
    assert (report.arguments, report.outputs) == (512, 512)
    assert report.temporaries is not None
    assert (report.kernels, report.dynamic_loops) == (0, 0)


@pytest.mark.parametrize("stated", [True, False])
def test_nested_scans_multiply(stated: bool):
    text = compile_on_eight(loop(loop(hop, 3), 5)).as_text()
    assert text.count("known_trip_count") == 2
    report = inspect(text if stated else text.replace("known_trip_count", "other"))
    assert report.count() == 15
    assert report.sent_bytes() == 15 * BLOCK
    assert (only(report).conditional, report.dynamic_loops) == (False, 0)


@pytest.mark.parametrize(
    ("pairs", "axes", "shift", "participants"),
    [
        ([(i, (i - 1) % 4) for i in range(4)], "sequence", 3, 4),
        ([(i, (i + 2) % 4) for i in range(4)], "sequence", 2, 4),
        ([(0, 1), (1, 2), (2, 3)], "sequence", None, 4),
        ([(0, 1), (2, 3)], "sequence[2]", None, 2),
        ([(0, 1), (1, 0), (2, 3), (3, 2)], "sequence[2]", 1, 2),
    ],
)
def test_permutes_are_named(pairs, axes: str, shift: int | None, participants: int):
    report = inspect(compile_on_eight(lambda x: lax.ppermute(x, "sequence", pairs)), CPU_MESH)
    found = only(report)
    assert (found.axes, found.shift, found.participants, found.bytes) == ((axes,), shift, participants, BLOCK)
    assert report.count(axis="sequence") == report.count(axis=axes) == 1


def test_permute_without_a_mesh():
    found = only(inspect(compile_on_eight(hop)))
    assert (found.axes, found.shift, found.participants) == (None, 1, 4)


def test_permute_over_two_axes():
    pairs = [(i, (i + 1) % 8) for i in range(8)]
    found = only(inspect(compile_on_eight(lambda x: lax.ppermute(x, ("data", "sequence"), pairs)), CPU_MESH))
    assert (found.axes, found.shift, found.participants) == (("data", "sequence"), 1, 8)


def test_all_to_all():
    report = inspect(compile_on_eight(lambda x: lax.all_to_all(x, "sequence", 0, 1, tiled=True)), CPU_MESH)
    found = only(report)
    assert (found.kind, found.axes, found.participants) == ("all-to-all", ("sequence",), 4)
    assert found.bytes == 384  # three quarters of 512, though the CPU writes four operands and four results


def test_all_to_all_in_groups():
    groups = [[0, 1], [2, 3]]
    swap = compile_on_eight(lambda x: lax.all_to_all(x, "sequence", 0, 0, tiled=True, axis_index_groups=groups))
    found = only(inspect(swap, CPU_MESH))
    assert (found.axes, found.participants, found.bytes) == (("sequence[2]",), 2, 256)


@pytest.mark.parametrize(("axis", "size"), [("data", 2), ("sequence", 4), (("data", "sequence"), 8)])
def test_all_gather(axis, size: int):
    report = inspect(compile_on_eight(lambda x: lax.all_gather(x, axis, tiled=True)[:8]), CPU_MESH)
    found = only(report)
    assert (found.kind, found.participants, found.bytes) == ("all-gather", size, (size - 1) * 512)
    assert found.axes == ((axis,) if isinstance(axis, str) else axis)


def test_reduce_scatter():
    scatter = compile_on_eight(lambda x: lax.psum_scatter(x, "sequence", tiled=True))
    found = only(inspect(scatter, CPU_MESH))
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", ("sequence",), 384)


def test_all_reduce():
    found = only(inspect(compile_on_eight(lambda x: lax.psum(x, "sequence")), CPU_MESH))
    assert (found.kind, found.axes, found.bytes) == ("all-reduce", ("sequence",), 768)


def test_two_axes_are_told_apart():
    report = inspect(compile_on_eight(lambda x: hop(lax.psum(x, "data")) + lax.psum(x, ("data", "sequence"))), CPU_MESH)
    assert {(x.kind, x.axes) for x in report.collectives} == {
        ("collective-permute", ("sequence",)),
        ("all-reduce", ("data",)),
        ("all-reduce", ("data", "sequence")),
    }
    # Over data: 2 * 1/2 * 512; over both: 2 * 7/8 * 512; a hop: 512.
    assert report.sent_bytes(axis="data") == 512 + 896
    assert report.sent_bytes(axis="sequence") == 896 + 512
    assert report.sent_bytes("all-reduce") == 512 + 896
    assert report.count() == 3


def test_the_order_of_devices_does_not_matter():
    mesh = jax.sharding.Mesh(CPU_MESH.devices[::-1, ::-1].copy(), ("data", "sequence"))
    report = inspect(compile_on_eight(hop, mesh=mesh), mesh)
    assert (only(report).axes, only(report).shift) == (("sequence",), 1)


def test_conditional_counts_its_costliest_branch():
    def branches(x):
        return lax.cond(x[0, 0] > 0, lambda x: lax.psum(x @ x.T, "sequence") @ x, lambda x: x, x)

    report = inspect(compile_on_eight(branches))
    assert (only(report).runs, only(report).conditional) == (1, True)
    assert report.flops == 2 * (2 * 8 * 16 * 8)


def test_dynamic_loop():
    def until(x):
        return lax.while_loop(lambda x: x.sum() < 3, lambda x: hop(x) @ jnp.ones((16, 16)), x)

    report = inspect(compile_on_eight(until))
    assert (only(report).runs, only(report).conditional) == (1, True)
    assert (report.dynamic_loops, report.flops) == (1, 2 * 8 * 16 * 16)
    assert "lower bound" in str(report)


def test_batched_dot_and_convolution():
    dot = jax.jit(lambda a, b: jnp.einsum("bij,bkj->bik", a, b))
    assert inspect(dot.lower(jnp.ones((4, 8, 16)), jnp.ones((4, 32, 16))).compile()).flops == 2 * 4 * 8 * 32 * 16
    # Three taps over 10 places without padding: 8 places, 5 features in, 7 out.
    convolve = jax.jit(lambda x, w: lax.conv_general_dilated(x, w, (1,), "VALID"))
    assert inspect(convolve.lower(jnp.ones((2, 5, 10)), jnp.ones((7, 5, 3))).compile()).flops == 2 * 2 * 8 * 3 * 5 * 7


def test_nothing_to_report():
    report = inspect(jax.jit(jnp.sin).lower(1.0).compile())
    assert (report.collectives, report.sent_bytes(), report.count(), report.copies, report.flops) == ((), 0, 0, 0, 0)


def test_tpu_ring():
    report = inspect(TPU_RING, jax.sharding.AbstractMesh((2, 4), ("data", "sequence")))
    found = only(report)
    assert (found.axes, found.shift, found.runs, found.conditional) == (("sequence",), 1, 3, False)
    assert found.bytes == 1024 * 1024 * 2
    assert (found.asynchronous, found.hidden_flops, found.hidden) == (True, MATMUL, True)
    assert report.flops == 3 * 2 * MATMUL
    assert (report.copies, report.dynamic_loops, report.temporaries) == (3, 0, None)


def test_unscheduled_text_hides_nothing():
    found = only(inspect(TPU_RING.replace("is_scheduled=true, ", "")))
    assert (found.asynchronous, found.hidden_flops, found.hidden) == (True, None, False)


def test_tpu_chain_of_fusions_counts_once():
    report = inspect(TPU_CHAIN, CPU_MESH)
    found = only(report)
    assert (found.kind, found.axes, found.runs) == ("all-gather", ("sequence",), 1)
    assert found.bytes == 3 * 1024 * 1024 * 2
    assert (found.hidden_flops, report.flops, report.copies) == (MATMUL, MATMUL, 1)


def test_tpu_gather_on_a_sparse_core():
    report = inspect(TPU_SPARSE_CORE, CPU_MESH)
    found = only(report)
    assert (found.kind, found.axes, found.runs, found.asynchronous) == ("all-gather", ("sequence",), 1, True)
    assert found.bytes == 3 * 1024 * 1024 * 2
    assert found.hidden_flops == MATMUL, "of three matmuls one lies between what it reads and who reads it"
    assert found.scope == "jit(f)/mlp/all_gather"


def test_tpu_reduce_scatter():
    found = only(inspect(TPU_REDUCE_SCATTER, CPU_MESH))
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", ("sequence",), 72 * 64 * 4 * 3 // 4)
    assert found.scope == "jit(f)/mlp/reduce_scatter"


def test_scope_is_the_name_in_jax():
    def named(x):
        with jax.named_scope("ring"):
            return hop(x)

    assert only(inspect(compile_on_eight(named), CPU_MESH)).scope.endswith("/ring/ppermute")


def test_tpu_batched_dot():
    """A TPU's convolution for ``bij,bkj->bik`` reads one in four places of the window that it names."""
    text = hlo("""
        ENTRY %main (a: bf16[4,512,128], b: bf16[4,512,128]) -> bf16[4,512,512] {
          %a = bf16[4,512,128]{2,1,0} parameter(0)
          %b = bf16[4,512,128]{2,1,0} parameter(1)
          ROOT %conv = bf16[4,512,512]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, \
dim_labels=0bf_0oi->0bf
        }
    """)
    assert inspect(text).flops == 2 * 4 * 512 * 512 * 128


def test_gpu_forms():
    report = inspect(GPU, CPU_MESH)
    found = {x.kind: x for x in report.collectives}
    assert sorted(found) == sorted(KINDS)
    assert len(report.collectives) == len(KINDS)
    array, matmul = 64 * 64 * 4, 2 * 64**3
    assert {kind: (x.axes, x.participants, x.bytes, x.runs) for kind, x in found.items()} == {
        "collective-permute": (("data",), 2, 2 * array, 7),
        "all-gather": (("sequence",), 4, 3 * array, 1),
        "all-reduce": (("data",), 2, array, 1),
        "reduce-scatter": (("sequence",), 4, array * 3 // 4, 1),
        "all-to-all": (("data", "sequence"), 8, array * 7 // 8, 1),
    }
    assert {kind: (x.asynchronous, x.hidden_flops, x.hidden_kernels, x.hidden) for kind, x in found.items()} == {
        "collective-permute": (True, 0, 0, False),
        "all-gather": (True, matmul, 1, True),
        "all-reduce": (False, None, 0, False),
        "reduce-scatter": (True, matmul, 0, True),
        "all-to-all": (True, 0, 0, False),
    }
    assert found["collective-permute"].shift == 1
    assert not any(x.conditional for x in report.collectives)
    assert (report.flops, report.kernels, report.copies) == (2 * matmul, 1, 7)


def test_a_loop_between_start_and_done_hides():
    start = (
        "%before = (bf16[1024,1024], bf16[4096,1024]) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}"
    )
    text = TPU_RING.replace("  %while = ", f"  {start}\n  %while = ")
    text = text.replace("  ROOT %out", "  %after = bf16[4096,1024] all-gather-done(%before)\n  ROOT %out")
    gather = next(x for x in inspect(text).collectives if x.kind == "all-gather")
    assert (gather.hidden, gather.hidden_flops) == (True, 3 * 2 * MATMUL)


def test_a_loop_that_ends_on_an_argument_is_dynamic():
    report = inspect(TPU_RING.replace("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} parameter(1)"))
    assert (only(report).runs, only(report).conditional, report.dynamic_loops) == (1, True, 1)
    assert report.flops == 2 * MATMUL


@pytest.mark.parametrize(
    ("groups", "axes", "participants"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("[2,4]<=[8]", ("sequence",), 4),
        ("[4,2]<=[8]", ("sequence[2]",), 2),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("sequence[2]",), 2),
        ("[1,8]<=[8]", ("data", "sequence"), 8),
        ("{}", ("data", "sequence"), 8),
        ("{{0,5},{1,4},{2,7},{3,6}}", None, 2),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("data",), 2),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("data",), 2),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", ("sequence",), 4),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",), 2),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=(0,4,1,5,2,6,3,7) {'c'}", ("data",), 2),
    ],
)
def test_forms_of_groups(groups: str, axes: tuple[str, ...] | None, participants: int):
    text = hlo(f"""
        ENTRY main {{
          p = f32[8,128] parameter(0)
          ROOT r = f32[8,128] all-to-all(p), replica_groups={groups}, dimensions={{0}}
        }}
    """)
    found = only(inspect(text, CPU_MESH))
    assert (found.axes, found.participants) == (axes, participants)
    assert found.bytes == 4096 * (participants - 1) // participants


def test_table_and_plain_data():
    report = inspect(GPU, CPU_MESH)
    lines = str(report).splitlines()
    assert len(lines) == 1 + 5 + 3
    column = lines[0].index("axes")
    assert all(line[column - 1] == " " != line[column] for line in lines[:6])
    assert "262,144" not in lines[1]
    assert "229,376" in next(line for line in lines if line.startswith("collective-permute"))
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["collectives"][0]["kind"] in KINDS
    assert plain["flops"] == report.flops
    assert plain["sent_bytes"] == 7 * 32768 + 3 * 16384 + 16384 + 12288 + 14336


@pytest.mark.parametrize("wrong", [7, None, jnp.sin, jax.jit(jnp.sin)])
def test_other_things_are_refused(wrong):
    with pytest.raises(TypeError, match=r"is a \w+ without text; pass jax.jit\(f\).lower\(...\).compile\(\)"):
        inspect(wrong)


def test_other_text_is_refused():
    with pytest.raises(ValueError, match=r"begins with 'module @jit_sin.* no compiled HLO; pass"):
        inspect(jax.jit(jnp.sin).lower(1.0))
    with pytest.raises(ValueError, match="no ENTRY computation"):
        inspect("")
    with pytest.raises(ValueError, match="reads p, which the text does not define"):
        inspect("HloModule m\nENTRY main {\n  ROOT r = f32[8] all-gather(p), replica_groups={{0,1}}, dimensions={0}\n}")


def test_wrong_mesh_and_questions_are_refused():
    report = inspect(compile_on_eight(hop))
    with pytest.raises(ValueError, match=r"mesh=\{'sequence': 4\} has 4 devices, the program runs on 8"):
        inspect(compile_on_eight(hop), jax.sharding.AbstractMesh((4,), ("sequence",)))
    with pytest.raises(ValueError, match=r"axis='sequence' .*not known without a mesh: give one to inspect"):
        report.count(axis="sequence")
    with pytest.raises(ValueError, match=r"axis='sequense' must be an axis of the mesh \(data, sequence\)"):
        inspect(compile_on_eight(hop), CPU_MESH).sent_bytes(axis="sequense")
    with pytest.raises(ValueError, match="kind='permute' must be one of all-gather, "):
        report.count("permute")
