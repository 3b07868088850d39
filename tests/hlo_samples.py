"""Programs in the forms of a TPU and a GPU, which a CPU's program never has.

Those of a TPU are cut from what libtpu 0.0.42.1 printed for a v5e; that of a GPU follows XLA's documents and tests.
"""

import textwrap


def hlo(text: str) -> str:
    """A scheduled program on 8 devices."""
    return "HloModule m, is_scheduled=true, num_partitions=8\n" + textwrap.dedent(text)


# A loop of 3 trips that no count is stated for, as on a TPU; one hop of bf16[1024,1024] behind a matmul.
TPU_RING = hlo("""
    %fused (p0: bf16[1024,1024]) -> bf16[1024,1024] {
      %p0 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
      ROOT %conv = bf16[1024,1024]{1,0:T(8,128)(2,1)} convolution(%p0, %p0), dim_labels=bf_io->bf
    }

    %body (s: (s32[], bf16[1024,1024], bf16[1024,1024], s32[])) -> (s32[], bf16[1024,1024], bf16[1024,1024], s32[]) {
      %s = (s32[]{:T(128)}, bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,1024]{1,0}, s32[]{:T(128)}) parameter(0)
      %i = s32[]{:T(128)} get-tuple-element(%s), index=0
      %kv = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%s), index=1
      %one = s32[]{:T(128)} get-tuple-element(%s), index=3
      %copy.6 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} copy(%kv)
      %start = (bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, \
u32[]{:S(2)}) collective-permute-start(%copy.6), channel_id=1, \
source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}, metadata={op_name="jit(f)/ppermute"}
      %next = s32[]{:T(128)} add(%i, %one)
      %fusion = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%copy.6), kind=kOutput, calls=%fused
      %done = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} collective-permute-done(%start)
      %late = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%done), kind=kOutput, calls=%fused
      ROOT %t = (s32[]{:T(128)}, bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, /*index=3*/s32[]{:T(128)}) \
tuple(%next, %done, %fusion, /*index=3*/%one)
    }

    %condition (s.1: (s32[], bf16[1024,1024], bf16[1024,1024], s32[])) -> pred[] {
      %limit = s32[]{:T(128)} constant(3)
      %s.1 = (s32[]{:T(128)}, bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, s32[]{:T(128)}) parameter(0)
      %i.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
      ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
    }

    ENTRY %main (x: bf16[1024,1024]) -> bf16[1024,1024] {
      %zero = s32[]{:T(128)} constant(0)
      %step = s32[]{:T(128)} constant(1)
      %x = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
      %copy.14 = s32[]{:T(128)} copy(%zero)
      %init = (s32[]{:T(128)}, bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, s32[]) tuple(%copy.14, %x, %x, %step)
      %while = (s32[]{:T(128)}, bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, s32[]{:T(128)}) while(%init), \
condition=%condition, body=%body
      ROOT %out = bf16[1024,1024]{1,0} get-tuple-element(%while), index=2
    }
""")

# A TPU's chain of fusions: the gather begins in the first, goes on within a matmul, and ends in the last.
TPU_CHAIN = hlo("""
    %begin (a: bf16[1024,1024]) -> (bf16[1024,1024], bf16[4096,1024], u32[]) {
      %a = bf16[1024,1024]{1,0} parameter(0)
      %all-gather.5 = bf16[4096,1024]{1,0} all-gather(%a), channel_id=1, \
replica_groups=mesh['data'=2,'sequence'=4] {'sequence'}, dimensions={0}, use_global_device_ids=true
      ROOT %call.1 = (bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.5), \
custom_call_target="AsyncCollectiveStart"
    }

    %async_collective_fusion.1 (b: bf16[1024,1024], c: u32[]) -> \
(bf16[1024,1024], bf16[1024,1024], bf16[4096,1024], u32[]) {
      %b = bf16[1024,1024]{1,0} parameter(0)
      %c = u32[]{:S(2)} parameter(1)
      %conv.1 = bf16[1024,1024]{1,0} convolution(%b, %b), dim_labels=bf_io->bf
      %all-gather.7 = bf16[4096,1024]{1,0} all-gather(%b), channel_id=1, \
replica_groups=mesh['data'=2,'sequence'=4] {'sequence'}, dimensions={0}, use_global_device_ids=true
      ROOT %r = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}, u32[]{:S(2)}) \
tuple(%conv.1, %b, %all-gather.7, %c)
    }

    %finish (d: bf16[1024,1024], e: u32[]) -> bf16[4096,1024] {
      %d = bf16[1024,1024]{1,0} parameter(0)
      %e = u32[]{:S(2)} parameter(1)
      %all-gather.9 = bf16[4096,1024]{1,0} all-gather(%d), channel_id=1, \
replica_groups=mesh['data'=2,'sequence'=4] {'sequence'}, dimensions={0}, use_global_device_ids=true
      ROOT %call.3 = bf16[4096,1024]{1,0} custom-call(%d, %all-gather.9, %e), custom_call_target="AsyncCollectiveDone"
    }

    ENTRY %main (x: bf16[1024,1024]) -> bf16[4096,1024] {
      %x = bf16[1024,1024]{1,0} parameter(0)
      %async-collective-start = (bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}, u32[]{:S(2)}) fusion(%x), kind=kCustom, \
calls=%begin
      %g0 = bf16[1024,1024]{1,0} get-tuple-element(%async-collective-start), index=0
      %g1 = u32[]{:S(2)} get-tuple-element(%async-collective-start), index=2
      %fusion.25 = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}, u32[]{:S(2)}) \
fusion(%g0, %g1), kind=kCustom, calls=%async_collective_fusion.1
      %g2 = bf16[1024,1024]{1,0} get-tuple-element(%fusion.25), index=1
      %g3 = u32[]{:S(2)} get-tuple-element(%fusion.25), index=3
      %async-collective-done = bf16[4096,1024]{1,0} fusion(%g2, %g3), kind=kCustom, calls=%finish
      ROOT %copy = bf16[4096,1024]{0,1} copy(%async-collective-done)
    }
""")

# A gather on a TPU's SparseCore: made ready, begun at the update, done after a matmul.
TPU_SPARSE_CORE = hlo("""
    %called_computation (p: bf16[1024,1024]) -> bf16[4096,1024] {
      %p = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
      ROOT %all-gather.4 = bf16[4096,1024]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, \
replica_groups=mesh['data'=2,'sequence'=4] {'sequence'}, dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(f)/mlp/all_gather"}
    }, execution_thread="sparsecore"

    ENTRY %main (x: bf16[1024,1024]) -> bf16[4096,1024] {
      %x = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
      %start = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), async_execution_thread="sparsecore", \
to_apply=%called_computation
      %early = bf16[1024,1024]{1,0} convolution(%x, %x), dim_labels=bf_io->bf
      %update = ((bf16[1024,1024]{1,0}), bf16[4096,1024]{1,0}) call-update(%start, %early)
      %conv = bf16[1024,1024]{1,0} convolution(%early, %x), dim_labels=bf_io->bf
      %done = bf16[4096,1024]{1,0} call-done(%update)
      ROOT %late = bf16[4096,1024]{1,0} convolution(%done, %conv), dim_labels=bf_io->bf
    }
""")

# A GPU's forms: starts whose shape holds operand and result, groups as an iota, a kernel, cuBLAS, a stated trip count.
GPU = hlo("""
    %add (l: f32[], r: f32[]) -> f32[] {
      %l = f32[] parameter(0)
      %r = f32[] parameter(1)
      ROOT %s = f32[] add(%l, %r)
    }

    %wrapped (w: f32[64,64]) -> f32[16,64] {
      %w = f32[64,64]{1,0} parameter(0)
      ROOT %reduce-scatter.1 = f32[16,64]{1,0} reduce-scatter(%w), channel_id=4, replica_groups=[2,4]<=[8], \
use_global_device_ids=true, dimensions={0}, to_apply=%add
    }

    %wide_body (t: (s32[], f32[64,64], f32[64,64])) -> (s32[], f32[64,64], f32[64,64]) {
      %t = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %k = f32[64,64]{1,0} get-tuple-element(%t), index=1
      %v = f32[64,64]{1,0} get-tuple-element(%t), index=2
      %cp-start = ((f32[64,64]{1,0}, f32[64,64]{1,0}), (f32[64,64]{1,0}, f32[64,64]{1,0})) \
collective-permute-start(%k, %v), channel_id=1, source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}, \
backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false}}
      %cp-done = (f32[64,64]{1,0}, f32[64,64]{1,0}) collective-permute-done(%cp-start)
      %k.1 = f32[64,64]{1,0} get-tuple-element(%cp-done), index=0
      %v.1 = f32[64,64]{1,0} get-tuple-element(%cp-done), index=1
      %copy.1 = f32[64,64]{1,0} copy(%v.1)
      ROOT %u = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(%i, %k.1, %copy.1)
    }

    %wide_condition (t.1: (s32[], f32[64,64], f32[64,64])) -> pred[] {
      %t.1 = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
      ROOT %yes = pred[] constant(true)
    }

    ENTRY %main (x: f32[64,64]) -> f32[64,64] {
      %x = f32[64,64]{1,0} parameter(0)
      %c0 = s32[] constant(0)
      %init = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(%c0, %x, %x)
      %while = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) while(%init), condition=%wide_condition, body=%wide_body, \
backend_config={"known_trip_count":{"n":"7"}}
      %ag-start = (f32[64,64]{1,0}, f32[256,64]{1,0}) all-gather-start(%x), channel_id=2, \
replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true, \
backend_config={"collective_backend_config":{"is_sync":false}}
      %gemm = (f32[64,64]{1,0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
      %fmha = (f32[64,64]{1,0}, u8[16]{0}) custom-call(%x, %x, %x), custom_call_target="__cudnn$fmhaSoftmax"
      %ag-done = f32[256,64]{1,0} all-gather-done(%ag-start)
      %ar-start = f32[64,64]{1,0} all-reduce-start(%x), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), \
use_global_device_ids=true, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
      %ar-done = f32[64,64]{1,0} all-reduce-done(%ar-start)
      %rs-start = ((f32[64,64]{1,0}), f32[16,64]{1,0}) async-start(%ar-done), calls=%wrapped
      %dot = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      %rs-update = ((f32[64,64]{1,0}), f32[16,64]{1,0}) async-update(%rs-start), calls=%wrapped
      %rs-done = f32[16,64]{1,0} async-done(((f32[64,64]{1,0}), f32[16,64]{1,0}) %rs-update), calls=%wrapped
      %a2a-start = ((f32[64,64]{1,0}), f32[64,64]{1,0}) all-to-all-start(f32[64,64]{1,0} %dot), channel_id=5, \
replica_groups={}, dimensions={0}
      ROOT %a2a-done = f32[64,64]{1,0} all-to-all-done(%a2a-start)
    }
""")

# How a TPU runs a reduce-scatter: a fusion around an all-reduce of the padded input. What adds has the name in JAX.
TPU_REDUCE_SCATTER = hlo("""
    HloModule jit_f, is_scheduled=true, num_partitions=8

    %add (a: f32[], b: f32[]) -> f32[] {
      %a = f32[] parameter(0), metadata={op_name="jit(f)/mlp/reduce_scatter"}
      %b = f32[] parameter(1)
      ROOT %sum = f32[] add(%a, %b)
    }

    %all-reduce-scatter.1 (input: f32[64,64]) -> f32[18,64] {
      %input = f32[64,64]{1,0} parameter(0)
      %zero = f32[] constant(0)
      %pad = f32[72,64]{1,0} pad(%input, %zero), padding=0_8x0_0
      %all-reduce = f32[72,64]{1,0} all-reduce(%pad), channel_id=1, replica_groups=[2,4]<=[8], \
use_global_device_ids=true, to_apply=%add
      %index = u32[] constant(0)
      ROOT %slice = f32[18,64]{1,0} dynamic-slice(%all-reduce, %index, %index), dynamic_slice_sizes={18,64}
    }

    ENTRY %main (x: f32[64,64]) -> f32[18,64] {
      %x = f32[64,64]{1,0} parameter(0)
      ROOT %fusion = f32[18,64]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
    }
""")
