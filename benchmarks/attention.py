"""Ring attention on simulated devices against `jax.nn.dot_product_attention` on one device, in one run.

    python -m benchmarks.attention [--lengths 4096 8192] [--dtype float32] [--repeats 3] [--json PATH]

Batch 1, 8 heads, head size 64, causal; the ring in zigzag order on 8 CPU devices of this process. What is compared is
CPU-seconds of the whole process (best of the repeats): on few cores the wall clock is noisy, and a ratio in one run is
the only figure that means something. Balance between devices does not show in it; the contract tests read that from the
program.
"""

import argparse
import functools
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import ring_jax

NUM_DEVICES, NUM_HEADS, HEAD_DIM = 8, 8, 64


def cpu_seconds(function, arguments, repeats: int) -> float:
    """Best CPU time of the process over some calls, after one to warm up."""
    jax.block_until_ready(function(*arguments))
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(function(*arguments))
        best = min(best, time.process_time() - start)
    return best


def measure(attend, arrays, repeats: int) -> dict[str, float]:
    """CPU-seconds and temporaries of the forward pass, and of the forward and backward pass together."""

    def loss(query, key, value, cotangent):
        return (attend(query, key, value) * cotangent).sum()

    forward = jax.jit(attend).lower(*arrays[:3]).compile()
    both = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    return {
        "forward": cpu_seconds(forward, arrays[:3], repeats),
        "forward_backward": cpu_seconds(both, arrays, repeats),
        "temporaries_mb": both.memory_analysis().temp_size_in_bytes / 1e6,
    }


def compare(length: int, dtype: str, is_causal: bool, repeats: int) -> dict[str, float]:
    """One row of the table."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, length, NUM_HEADS, HEAD_DIM)), dtype) for _ in range(4)]
    mesh = ring_jax.make_mesh(sequence=NUM_DEVICES)
    spec = jax.P(None, "sequence")
    place = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, spec))
    local = functools.partial(ring_jax.ring_attention, is_causal=is_causal, layout="zigzag")
    ring = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    sharded = [place(ring_jax.to_layout(x, "zigzag", NUM_DEVICES)) for x in arrays]
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="xla")
    ours, theirs = measure(ring, sharded, repeats), measure(dense, arrays, repeats)
    row: dict[str, float] = {"length": length}
    for name in ("forward", "forward_backward"):
        row[f"{name}_s"], row[f"{name}_jax_nn_s"] = ours[name], theirs[name]
        row[f"{name}_ratio"] = ours[name] / theirs[name]
    return row | {"temporaries_mb": ours["temporaries_mb"], "temporaries_jax_nn_mb": theirs["temporaries_mb"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows here")
    options = parser.parse_args()
    # Eight devices on few cores: one may reach a collective long after its peers.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    mask = "full" if options.full else "causal"
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {NUM_DEVICES} simulated devices, {options.dtype}, {mask}")
    print("CPU-seconds (ratio to jax.nn.dot_product_attention on one device)")
    rows = []
    for length in options.lengths:
        rows.append(row := compare(length, options.dtype, not options.full, options.repeats))
        print(
            f"{length:7d}  forward {row['forward_s']:6.2f} ({row['forward_ratio']:.2f})  "
            f"forward+backward {row['forward_backward_s']:6.2f} ({row['forward_backward_ratio']:.2f})  "
            f"temporaries {row['temporaries_mb']:.0f} MB a device ({row['temporaries_jax_nn_mb']:.0f} MB)",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
