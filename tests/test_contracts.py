"""What the compiled program does: hops, bytes, skipped tiles, memory. Exact on any machine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import documents
from jax import P
from jaxtyping import config as jaxtyping_config
from programs import BATCH, HEAD_DIM, KV_HEADS, compile_call

import ring_jax
from ring_jax import layouts, masks
from ring_jax.inspection import inspect
from ring_jax.kernels import protocol, tiles, xla
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores
from ring_jax.masks import Rules, Tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_forward_hops(size: int, dtype: str):
    local = 16
    found = inspect(compile_call(size, local, dtype=dtype, backward=False)).collectives
    assert {x.kind for x in found} <= {"collective-permute"}, "no all-gather of K or V, no other collective"
    assert not any(x.conditional for x in found)
    assert sum(x.runs for x in found) == size - 1
    # A CPU computes bfloat16 in float32 and may move it so: what counts is the number of elements.
    itemsize = 4 if found and found[0].dtype == "f32" else jnp.dtype(dtype).itemsize
    assert {x.bytes for x in found} <= {2 * itemsize * BATCH * KV_HEADS * HEAD_DIM * local}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_backward_hops(size: int):
    local = 16
    found = inspect(compile_call(size, local, backward=True)).collectives
    assert {x.kind for x in found} <= {"collective-permute"}
    assert not any(x.conditional for x in found)
    # N - 1 hops of K and V and N - 1 of dK and dV: the part of the own block stays at home.
    block = 2 * 4 * BATCH * KV_HEADS * HEAD_DIM * local
    assert sum(x.runs * x.bytes for x in found) == 2 * (size - 1) * block
    assert {x.bytes for x in found} <= {block, 2 * block}


def test_ids_and_positions_travel_with_the_keys():
    found = inspect(compile_call(4, 16, backward=False, packed=True)).collectives
    assert {x.kind for x in found} == {"collective-permute"}
    sent = sum(x.runs * x.bytes for x in found if x.dtype == "s32")
    assert sent == 3 * 2 * 4 * BATCH * 16


def live_tiles(layout: str, size: int, length: int, tokens: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """Score entries that each device computes, by the kernel's own tiles and skip predicate."""
    local = length // size
    tile = tiles.tile_size(local, layouts.chunk_length(layout, local, size))
    order = ring_jax.permutation(layout, length, size)
    positions = np.arange(length, dtype=np.int32) if tokens is None else tokens["positions"]
    segments = None if tokens is None else jnp.asarray(tokens["segment_ids"][order])[None]
    counts = []
    every = Tokens(jnp.asarray(positions[order])[None], segments)
    for device in range(size):
        mine = jax.tree.map(lambda x, i=device: x[:, i * local : (i + 1) * local], every)
        bounds = masks.tile_bounds(mine, local, tile), masks.tile_bounds(every, length, tile)
        counts.append(int(masks.tile_live(*bounds, Rules(is_causal=True)).sum()) * tile**2)
    return np.array(counts)


@pytest.mark.parametrize(("size", "length"), [(2, 2048), (4, 4096), (8, 4096), (8, 8192), (3, 6144)])
def test_causal_zigzag_work_is_near_ideal_and_even(size: int, length: int):
    counts = live_tiles("zigzag", size, length)
    assert counts.sum() <= 1.10 * length * (length + 1) / 2
    assert counts.max() <= 1.02 * counts.mean()


def test_contiguous_work_is_uneven():
    """The bound N / (2N - 1) of performance tables: the last device does nearly twice the mean."""
    counts = live_tiles("contiguous", 8, 4096)
    assert counts.max() > 1.7 * counts.mean()


def test_packed_work_is_skipped():
    length = 2048
    segments = np.repeat(np.arange(1, 17, dtype=np.int32), length // 16)
    positions = np.tile(np.arange(length // 16, dtype=np.int32), 16)
    counts = live_tiles("contiguous", 4, length, {"segment_ids": segments, "positions": positions})
    tile = tiles.tile_size(length // 4, length // 4)
    tiles_a_document = length // 16 // tile
    assert counts.sum() == 16 * tiles_a_document * (tiles_a_document + 1) // 2 * tile**2


def count_visits(monkeypatch) -> list[int]:
    """A list that gets an entry for each pair of tiles that a kernel works on."""
    visits = []
    mask = tiles.Tile.mask

    def counted(*arguments):
        jax.debug.callback(lambda: visits.append(1))
        return mask(*arguments)

    monkeypatch.setattr(tiles.Tile, "mask", counted)
    return visits


def test_a_ring_step_without_a_live_pair_does_no_matmul(monkeypatch):
    """Documents of one shard each: of N steps the kernel works in the first only, whatever arrives in the others."""
    visits, size, local = count_visits(monkeypatch), 4, 8
    ids = jnp.repeat(jnp.arange(1, size + 1), local)
    x = jnp.ones((1, local * size, 1, 4))
    mesh = ring_jax.make_mesh(sequence=size)
    counts = {}
    for name, given in (("one document", ids * 0 + 1), ("a document a shard", ids)):
        del visits[:]
        call = functools.partial(ring_jax.dot_product_attention, strategy="ring", segment_ids=given, mesh=mesh)
        jax.block_until_ready(jax.jit(call)(x, x, x))
        jax.effects_barrier()
        counts[name] = len(visits)
    assert counts == {"one document": size * size, "a document a shard": size}


@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_the_kernel_visits_exactly_the_live_tiles(kind: str, monkeypatch):
    """A counter inside the kernel against the predicate evaluated outside."""
    length, tile = 64, 8
    segments, positions = documents(length, 16, seed=3)
    tokens = Tokens(jnp.asarray(positions)[None], jnp.asarray(segments)[None])
    if kind == "causal":
        tokens = Tokens(jnp.arange(length, dtype=jnp.int32)[None], None)
    bounds = masks.tile_bounds(tokens, length, tile)
    live = int(masks.tile_live(bounds, bounds, Rules(is_causal=True)).sum())
    assert 0 < live < (length // tile) ** 2
    visits = count_visits(monkeypatch)
    x, zero = jnp.ones((1, 1, 1, 1, length, 4)), jnp.zeros((1, 1, 1, 1, length))
    queries, keys = Queries(x, tokens), Keys(jnp.ones((1, 1, 1, length, 8)), tokens)
    scores, sizes = Scores(1.0, rules=Rules(is_causal=True)), (tile, tile)
    carry = protocol.Carry(0 * x, zero + protocol.empty("float32"), zero)
    jax.block_until_ready(xla.forward_block(carry, queries, keys, Pairs(), scores, sizes))
    jax.effects_barrier()
    assert len(visits) == live
    sums, cotangents = protocol.Gradients(0 * x, 0 * keys.kv, None, ()), protocol.Cotangents(x, zero, zero, None)
    jax.block_until_ready(xla.backward_block(sums, queries, cotangents, keys, Pairs(), scores, sizes))
    jax.effects_barrier()
    assert len(visits) == 2 * live


def temporaries(size: int, local: int, backward: bool) -> int:
    return compile_call(size, local, backward=backward, heads=(4, 2), batch=1).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_constant_in_the_ring_size(backward: bool):
    """Temporaries per device at fixed T/N."""
    sizes = [temporaries(n, 512, backward) for n in (4, 8, 16)]
    assert max(sizes) <= 1.05 * min(sizes), sizes


@pytest.mark.parametrize("backward", [False, True])
def test_memory_falls_with_the_ring_size(backward: bool):
    """Temporaries per device at fixed T halve with twice the devices."""
    assert temporaries(8, 4096, backward) <= 0.55 * temporaries(4, 8192, backward)


def test_scan_over_layers_keeps_no_masks():
    """Values that depend on positions alone must not be computed once and kept: one mask for each tile, O(T*S)."""
    length, layers = 2048, 4
    mesh = ring_jax.make_mesh(sequence=2)

    def loss(x, scales, positions, packed):
        def layer(x, scale):
            attend = functools.partial(ring_jax.ring_attention, is_causal=True, layout="zigzag")
            given = {"positions": positions, "segment_ids": positions // 100 + 1} if packed else {}
            return x + attend(x * scale, x, x, **given), None

        return jax.lax.psum(jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, scales)[0]), "sequence")

    x = jax.ShapeDtypeStruct((1, length, 1, 8), "float32")
    scales = jax.ShapeDtypeStruct((layers,), "float32")
    positions = jax.ShapeDtypeStruct((length,), "int32")
    for packed in (False, True):
        specs = P(None, "sequence"), P(), P("sequence")
        fun = jax.shard_map(
            jax.grad(functools.partial(loss, packed=packed)), mesh=mesh, in_specs=specs, out_specs=specs[0]
        )
        used = jax.jit(fun).lower(x, scales, positions).compile().memory_analysis().temp_size_in_bytes
        # One mask of the local block is 1 MiB; what a layer needs here is far less.
        assert used < (length // 2) ** 2, used


def test_jaxtyping_is_on():
    assert not jaxtyping_config.jaxtyping_disable
