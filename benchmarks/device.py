"""Block kernels on one device: right, and how near a ring of N comes to one long call, without any communication.

    python -m benchmarks.device --json runs/device.json     # on a GPU: under 4 minutes
    python -m benchmarks.device --tiny                      # anywhere: small sizes, kernels interpreted on a CPU

Four parts, each a table:

    errors    bfloat16 calls against float64 on the host, causal, full, window, packed: the largest error of out, dq, dk
              and dv relative to the largest entry, and over that of jax.nn on the same device (causal and full).
    step      one train step of a small Llama, with its MFU.
    ring      what one device of a ring of N does in a call of N c tokens: c queries in zigzag order, N blocks of c
              keys, forward and backward, as a share of 1/N of one causal call of N c tokens through jax.nn (cuDNN on a
              GPU, else XLA). 100 % is a ring that costs nothing. Hops are not in it.
    tiles     pallas_gpu by tile sizes and warps.

What does not fit the device's memory or the time limit is named and left out.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import ring_jax
from models.config import ModelConfig
from ring_jax import layouts, softmax
from ring_jax.kernels import interpret, pallas_gpu, registry
from ring_jax.kernels.protocol import Carry, Cotangents, Gradients, empty
from ring_jax.kernels.tiles import Keys, Pairs, Queries, Scores
from ring_jax.masks import Rules, Tokens
from train import flops
from train.config import DataConfig, TrainConfig
from train.state import init_state
from train.step import make_train_step, place_batch


class Sizes(NamedTuple):
    """What is run."""

    tokens: int  # of the calls that are compared with float64
    heads: tuple[int, int]
    head: int
    chunks: tuple[int, ...]  # tokens of a device of the ring
    rings: tuple[int, ...]  # both in order of interest: a time limit cuts off what comes last
    tiles: tuple[pallas_gpu.Tiles, ...]
    repeats: int
    model: ModelConfig
    row: int


LLAMA = ModelConfig(
    vocab_size=32_768,
    num_layers=8,
    embed_dim=2048,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=7168,
    compute_dtype="bfloat16",
)
TINY_LLAMA = ModelConfig(
    vocab_size=256, num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64
)
TILES = tuple(
    pallas_gpu.Tiles(forward, backward, (warps, warps))
    for forward, backward, warps in (
        ((128, 64), (64, 64), 8),
        ((128, 128), (128, 64), 8),
        ((128, 64), (64, 32), 4),
        ((64, 64), (32, 64), 4),
    )
)
FULL = Sizes(1024, (8, 2), 128, (8192, 32768, 4096, 16384), (8, 4, 1), TILES, 3, LLAMA, 8192)
TINY = Sizes(48, (4, 2), 16, (32,), (2,), (pallas_gpu.Tiles((16, 32), (32, 16)),), 1, TINY_LLAMA, 64)
RING_HEADS = (32, 8)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "full": {},
    "window": {"is_causal": True, "local_window_size": (100, 0)},
    "packed": {"is_causal": True, "segment_ids": True},
}


def names(platform: str) -> tuple[str, ...]:
    """The kernels to look at: those of a GPU; elsewhere one of them, interpreted, and XLA."""
    return ("cudnn", "pallas_gpu") if platform == "gpu" else ("pallas_gpu", "xla")


@contextlib.contextmanager
def interpreted(platform: str) -> Iterator[None]:
    """Pallas kernels run in JAX's interpreter where there is no GPU."""
    with contextlib.nullcontext() if platform == "gpu" else interpret.kernels():
        yield


def normal(shape: tuple[int, ...], seed: int, dtype: str = "bfloat16") -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def seconds(fun: Callable[..., Any], arrays: tuple[Any, ...], repeats: int) -> float:
    """Of the fastest run, after one that compiles."""
    best = float("inf")
    for turn in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(fun(*arrays))
        best = min(best, time.perf_counter() - start) if turn else best
    return best


# ---------------------------------------------------------------- errors


def exact(arrays: tuple[np.ndarray, ...], mask: np.ndarray) -> tuple[np.ndarray, ...]:
    """(out, dq, dk, dv) of dense attention in float64, from arrays ``[T, N, H]`` and a mask ``[T, S]``."""
    query, key, value, dout = (np.moveaxis(x.astype(np.float64), 1, 0) for x in arrays)
    group, scale = len(query) // len(key), query.shape[-1] ** -0.5
    k, v = (np.repeat(x, group, 0) for x in (key, value))
    s = np.where(mask, scale * query @ np.swapaxes(k, 1, 2), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ v
    ds = scale * p * (dout @ np.swapaxes(v, 1, 2) - (dout * out).sum(-1, keepdims=True))
    dk, dv = (np.swapaxes(x, 1, 2) @ y for x, y in ((ds, query), (p, dout)))
    dk, dv = (x.reshape(len(key), group, *x.shape[1:]).sum(1) for x in (dk, dv))
    return tuple(np.moveaxis(x, 0, 1) for x in (out, ds @ k, dk, dv))


def errors_of(attend: Callable[..., Array], arrays: tuple[Array, ...], want: tuple[np.ndarray, ...]) -> list[float]:
    """Of out, dq, dk, dv, relative to the largest entry."""

    def both(query: Array, key: Array, value: Array, dout: Array):
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(dout)

    got = jax.jit(both)(*arrays)
    return [
        float(np.abs(np.asarray(x[0], np.float64) - y).max() / np.abs(y).max()) for x, y in zip(got, want, strict=True)
    ]


def measure_errors(sizes: Sizes, platform: str) -> Iterator[dict[str, Any]]:
    length, (num_heads, num_kv_heads) = sizes.tokens, sizes.heads
    counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    arrays = tuple(normal((1, length, n, sizes.head), seed) for seed, n in enumerate(counts))
    at = np.arange(length)
    ids = 1 + (at * 3 // length).astype(np.int32)
    for mask, keywords in MASKS.items():
        visible = (at[:, None] >= at) | (mask == "full")
        visible &= (at[:, None] - at <= 100) | (mask != "window")
        visible &= (ids[:, None] == ids) | (mask != "packed")
        keywords = keywords | ({"segment_ids": ids[None]} if mask == "packed" else {})
        want = exact(tuple(np.asarray(x[0]) for x in arrays), visible)
        plain = None
        if mask in ("causal", "full"):
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=mask == "causal")
            implementation = "cudnn" if platform == "gpu" else "xla"
            plain = errors_of(functools.partial(attend, implementation=implementation), arrays, want)
        for name in names(platform):
            if name == "cudnn" and mask in ("window", "packed"):
                continue
            with interpreted(platform):
                attend = functools.partial(ring_jax.dot_product_attention, implementation=name, **keywords)
                found = errors_of(attend, arrays, want)
            row = {"part": "errors", "mask": mask, "kernel": name}
            for i, what in enumerate(("out", "dq", "dk", "dv")):
                row |= {what: found[i], f"{what}_over_jax_nn": plain and found[i] / plain[i]}
            yield row


# ---------------------------------------------------------------- ring on one device


def blocks_of(name: str, c: int, ring: int, head: int, rank: int) -> tuple[Callable[..., Any], ...]:
    """(forward, backward) of one device of a ring: all blocks in the order in which they arrive."""
    kernel, (num_heads, kv_heads) = registry.KERNELS[name], RING_HEADS
    scores, group = Scores(head**-0.5, rules=Rules(is_causal=True)), num_heads // kv_heads
    tile = kernel.tile_size(c, layouts.chunk_length("zigzag", c, ring), num_heads)
    sources = (rank - jnp.arange(ring)) % ring

    def tokens(place: Array | int) -> Tokens:
        return Tokens(layouts.shard_positions("zigzag", place, c, ring)[None], None)

    def forward(query: Array, kv: Array) -> tuple[Array, Array]:
        shape = (1, 1, kv_heads, group, c)
        first = jnp.full(shape, empty("float32"), jnp.float32)
        carry = Carry(jnp.zeros((*shape, head), jnp.float32), first, jnp.zeros(shape, jnp.float32))

        def step(carry: Carry, block: tuple[Array, Array]):
            keys = Keys(block[0], tokens(block[1]))
            return kernel.forward_block(carry, Queries(query, tokens(rank)), keys, Pairs(), scores, (tile, tile)), None

        carry, _ = jax.lax.scan(step, carry, (kv, sources))
        return softmax.normalize(*carry)

    def backward(query: Array, kv: Array, dout: Array) -> tuple[Array, ...]:
        out, lse = forward(query, kv)
        cotangents = Cotangents(dout, lse, (dout.astype(out.dtype) * out).sum(-1), None)

        def step(dq: Array, block: tuple[Array, Array]):
            sums = Gradients(dq, jnp.zeros(block[0].shape, jnp.float32), None, ())
            queries, keys = Queries(query, tokens(rank)), Keys(block[0], tokens(block[1]))
            sums = kernel.backward_block(sums, queries, cotangents, keys, Pairs(), scores, (tile, tile))
            return sums.query, sums.keys

        return out, *jax.lax.scan(step, jnp.zeros(query.shape, jnp.float32), (kv, sources))

    return jax.jit(forward), jax.jit(backward)


def ring_arrays(c: int, ring: int, head: int) -> tuple[Array, ...]:
    """Query, keys and values of all blocks, dout."""
    num_heads, kv_heads = RING_HEADS
    shape = (1, 1, kv_heads, num_heads // kv_heads, c, head)
    return normal(shape, 0), normal((ring, 1, 1, kv_heads, c, 2 * head), 1), normal(shape, 2)


def long_call(length: int, head: int, platform: str, repeats: int) -> list[float]:
    """Seconds of one causal call, forward, and with its gradient."""
    arrays = tuple(normal((1, length, n, head), i) for i, n in enumerate((*RING_HEADS, RING_HEADS[1], RING_HEADS[0])))
    implementation = "cudnn" if platform == "gpu" else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)

    def both(query: Array, key: Array, value: Array, dout: Array):
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(dout)

    return [seconds(jax.jit(attend), arrays[:3], repeats), seconds(jax.jit(both), arrays, repeats)]


def measure_ring(sizes: Sizes, platform: str) -> Iterator[dict[str, Any]]:
    for ring in sizes.rings:
        for c in sizes.chunks:
            one = long_call(c * ring, sizes.head, platform, sizes.repeats)
            query, kv, dout = ring_arrays(c, ring, sizes.head)
            for name in names(platform):
                with interpreted(platform):
                    forward, backward = blocks_of(name, c, ring, sizes.head, ring // 2)
                    times = [seconds(forward, (query, kv), sizes.repeats)]
                    times += [seconds(backward, (query, kv, dout), sizes.repeats)]
                row = {"part": "ring", "c": c, "N": ring, "kernel": name}
                for what, mine, whole in zip(("forward", "forward_backward"), times, one, strict=True):
                    row |= {f"{what}_ms": 1e3 * mine, f"{what}_share": whole / ring / mine}
                yield row


def measure_tiles(sizes: Sizes, platform: str) -> Iterator[dict[str, Any]]:
    c, ring = sizes.chunks[0], min(4, sizes.rings[0])
    query, kv, dout = ring_arrays(c, ring, sizes.head)
    usual = dict(pallas_gpu.TILES)
    for tiles in sizes.tiles:
        try:
            pallas_gpu.TILES = {"": tiles}
            with interpreted(platform):
                forward, backward = blocks_of("pallas_gpu", c, ring, sizes.head, ring // 2)
                times = [seconds(forward, (query, kv), sizes.repeats)]
                times += [seconds(backward, (query, kv, dout), sizes.repeats)]
        finally:
            pallas_gpu.TILES = usual
        row = {"part": "tiles", "c": c, "N": ring, "forward": tiles.forward, "backward": tiles.backward}
        yield row | {"warps": tiles.warps, "forward_ms": 1e3 * times[0], "forward_backward_ms": 1e3 * times[1]}


# ---------------------------------------------------------------- train step


def measure_step(sizes: Sizes, platform: str) -> Iterator[dict[str, Any]]:
    config = TrainConfig(model=sizes.model, data=DataConfig(seq_len=sizes.row, batch_size=1), num_steps=10)
    device = jax.devices()[0]
    mesh = ring_jax.make_mesh(devices=[device])
    tokens = np.random.default_rng(0).integers(1, sizes.model.vocab_size, (1, sizes.row + 1), dtype=np.int32)
    ids = np.ones((1, sizes.row), np.int32)
    at = np.arange(sizes.row, dtype=np.int32)[None]
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": at, "segment_ids": ids}
    placed, state = place_batch(batch, config, mesh), init_state(config, mesh)
    step = make_train_step(config, mesh)
    best = float("inf")
    for turn in range(sizes.repeats + 1):
        start = time.perf_counter()
        state, metrics = step(state, placed)
        loss = float(metrics["loss"])
        best = min(best, time.perf_counter() - start) if turn else best
    work, peak = flops.model_flops(sizes.model, flops.count_for(sizes.model, ids)), flops.peak_flops([device])
    row = {"part": "step", "parameters": flops.num_params(sizes.model), "tokens": sizes.row, "step_ms": 1e3 * best}
    yield row | {"mfu": None if peak is None else work / best / peak, "loss": loss}


PARTS = {"errors": measure_errors, "step": measure_step, "ring": measure_ring, "tiles": measure_tiles}
ENDS = {"errors": 0.4, "step": 0.5, "ring": 0.85, "tiles": 1.0}
"""Shares of the time limit after which a part starts no further row."""


def facts() -> dict[str, Any]:
    """Device, versions and commit."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    device = jax.devices()[0]
    client = " ".join(device.client.platform_version.split())
    found = {"device": device.device_kind, "platform": device.platform, "runtime": client}
    return found | {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "commit": commit or None}


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else str(value).replace(" ", "")


def run(sizes: Sizes, parts: list[str], limit: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all parts, printed as they come, and what was left out with the reason."""
    start, rows, left_out = time.monotonic(), [], []
    platform = jax.devices()[0].platform
    for part in parts:
        header = None
        try:
            for row in PARTS[part](sizes, platform):
                cells = {name: value for name, value in row.items() if name != "part"}
                if header is None:
                    header = [name.replace("forward_backward", "f+b") for name in cells]
                    print(f"\n{part}\n" + "  ".join(f"{name:>15}" for name in header))
                print("  ".join(f"{shown(value):>15}" for value in cells.values()), flush=True)
                rows.append(row)
                if time.monotonic() - start > limit * ENDS[part]:
                    left_out.append(f"{part}: what follows its last row, past {limit * ENDS[part]:.0f} s")
                    break
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            left_out.append(f"{part}: what follows the last row, out of memory")
    return rows, left_out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--limit", type=float, default=200, metavar="SECONDS", help="start no further row after these")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="also write everything here")
    options = parser.parse_args(argv)
    if options.tiny:
        jax.config.update("jax_platforms", "cpu")
    found = facts()
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    if found["platform"] != "gpu" and not options.tiny:
        parser.error(f"the sizes are those of a GPU, and this is {found['device']}; use --tiny here")
    rows, left_out = run(TINY if options.tiny else FULL, options.parts, options.limit)
    for reason in left_out:
        print(f"left out: {reason}")
    if options.json:
        options.json.write_text(json.dumps(found | {"rows": rows, "left_out": left_out}, indent=2))


if __name__ == "__main__":
    main()
