"""Which strategy to use: `choose_strategy` for ``strategy="auto"``, and `plan` for people: times, bytes, memory.

`choose_strategy` asks whether hops are hidden in the worst case, a kernel at the peak of the device. `plan` predicts
the time of every strategy at the rate that kernels were measured to reach. The forms are those of `ring_jax.costs`.
"""

import logging
from typing import Any, NamedTuple

import numpy as np

from ring_jax import costs, links, predictions, ulysses
from ring_jax.hardware import HARDWARE, Hardware, find_hardware, kernel_efficiency
from ring_jax.predictions import Option, Plan
from ring_jax.routes import Grid

__all__ = ["HARDWARE", "Choice", "Hardware", "Option", "Plan", "Sizes", "choose_strategy", "find_hardware"]
__all__ += ["hidden_length", "plan"]

logger = logging.getLogger("ring_jax")


class Choice(NamedTuple):
    """A strategy and why it was chosen."""

    strategy: str
    reason: str


class Sizes(NamedTuple):
    """One call on one device: heads after the tensor axis, tokens of the shard."""

    num_devices: int
    num_heads: int
    num_kv_heads: int
    local_length: int
    itemsize: int
    gradient_itemsize: int = 4
    balanced_causal: bool = False
    num_hops: int | None = None  # of the ring, where the mask needs fewer than all


def hidden_length(sizes: Sizes, hardware: Hardware, *, rate: float | None = None) -> tuple[float, float]:
    """(forward, backward) c_min: tokens of a shard from which a hop is hidden behind a step, see `costs.hidden_length`.

    ``rate`` is bytes/s of a hop; None: the best that the links can do, on TPU half of the keys each way.
    """
    return costs.hidden_length(
        kv_share=sizes.num_kv_heads / sizes.num_heads,
        itemsize=sizes.itemsize,
        gradient_itemsize=sizes.gradient_itemsize,
        flops=hardware.flops,
        rate=rate or hardware.hop_bytes,
        share=0.5 if sizes.balanced_causal else 1.0,
    )


def choose_strategy(sizes: Sizes, device_kind: str, gathered_bytes: float = 0.0) -> Choice:
    """What ``strategy="auto"`` takes, and why.

    The ring where its hops are hidden, or where its mask needs few of them; otherwise what sends least: Ulysses from
    N > 1 + heads / key-value heads devices on, if they divide the heads; or all-gather, one transfer instead of many,
    if K and V of the whole sequence take no more than a tenth of the memory.

    Args:
      sizes: of one call on one device. device_kind: as ``jax.Device.device_kind``.
      gathered_bytes: K and V of the whole sequence.

    Example:
      >>> choose_strategy(Sizes(8, 32, 8, 16384, 2, balanced_causal=True), "NVIDIA H100 80GB HBM3").strategy
      'ring'
      >>> choose_strategy(Sizes(8, 32, 8, 512, 2, balanced_causal=True), "NVIDIA H100 80GB HBM3").strategy
      'ulysses'

    Reference:
      Context Parallelism for Scalable Million-Token Inference, arXiv:2411.01783, section 3.4; DeepSpeed Ulysses,
      arXiv:2309.14509, section 3.2.
    """
    count = sizes.num_devices
    if count == 1:
        return Choice("ring", "one device on the sequence axis: nothing is sent")
    if sizes.num_hops is not None and sizes.num_hops < count - 1:
        return Choice("ring", f"the mask reaches {sizes.num_hops} of {count - 1} other shards: only those are sent")
    hardware = find_hardware(device_kind)
    if hardware is None:
        return Choice("ring", f"no figures for device kind {device_kind!r}: the ring holds least memory")
    needed = hidden_length(sizes, hardware, rate=hardware.link_bytes)[1]  # a plain ring goes one way
    if sizes.local_length >= needed:
        return Choice("ring", f"{sizes.local_length} tokens a device hide every hop (from {needed:.0f} on)")
    exposed = f"{sizes.local_length} tokens a device do not hide a hop (from {needed:.0f} on)"
    ring_bytes, divides = 2 * count * sizes.num_kv_heads, sizes.num_heads % count == 0
    ulysses_bytes = 2 * (sizes.num_heads + sent_heads(count, sizes.num_heads, sizes.num_kv_heads)) if divides else 0
    if divides and ulysses_bytes < ring_bytes:
        return Choice("ulysses", f"{exposed}, and Ulysses sends {ulysses_bytes / ring_bytes:.2f} of a ring's bytes")
    if gathered_bytes <= 0.1 * hardware.hbm_bytes:
        return Choice("all_gather", f"{exposed}, and all keys and values fit: one transfer instead of {count - 1}")
    return Choice("ring", f"{exposed}, but all keys and values ({gathered_bytes / 1e9:.1f} GB) would not fit well")


def sent_heads(count: int, num_heads: int, num_kv_heads: int) -> int:
    """Key/value heads that a device sends, copies counted, in Ulysses over ``count`` devices."""
    return ulysses.route_heads(Grid("", 1, 1, count), num_heads, num_kv_heads).sent.size


def report(choice: Choice) -> Choice:
    """Log a choice for ``strategy="auto"``, once for each traced call (logger ``ring_jax``, level INFO)."""
    logger.info("strategy auto: %s, %s", choice.strategy, choice.reason)
    return choice


def itemsize(dtype: Any) -> int:
    return int(np.dtype(dtype).itemsize)


def plan(
    *,
    seq_len: int,
    num_devices: int,
    hardware: str,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int = 0,
    value_dim: int = 0,
    batch: int = 1,
    dtype: Any = "bfloat16",
    gradient_dtype: Any = "float32",
    is_causal: bool = True,
    local_window_size: int | None = None,
    layout: str = "zigzag",
    link: str = "auto",
    two_directions: bool = False,
    new_tokens: int | None = None,
    efficiency: tuple[float, float] | None = None,
) -> Plan:
    """Predict time, bytes and memory of one attention call for every strategy, and say which to use.

        ring        sum over steps of max(work, hop), and the gradient's last hop home
        others      work + transfers

    Args:
      seq_len: tokens of the whole sequence. num_devices: on the sequence axis.
      hardware: "v5p", "h100", ... or a device kind (`HARDWARE`).
      num_heads, num_kv_heads: of one device of the tensor axis; 0 key/value heads are as many as heads.
      head_dim, value_dim: 0 for values is the same. batch: rows of one data shard.
      dtype: of Q, K, V. gradient_dtype: of dK and dV on the road.
      is_causal, local_window_size (keys before a query), layout: as in `dot_product_attention`.
      link: "fast", "line" (a TPU axis that does not close), "network" (between hosts); "auto": by the size.
      two_directions: half of the keys travel each way, see `Schedule`.
      new_tokens: queries at the end of the sequence, the rest being a cache: the tail of a prompt, or decoding (1).
      efficiency: (forward, backward) share of the peak that the kernel reaches; None: `hardware.KERNEL_EFFICIENCY`.

    Raises:
      ValueError: an unknown hardware, link or layout, sizes that do not divide; says which are known.

    Example:
      >>> call = dict(num_devices=8, num_heads=32, num_kv_heads=8, head_dim=128)
      >>> plan(seq_len=131072, hardware="h100", **call).strategy
      'ring'
      >>> plan(seq_len=8192, hardware="h100", **call).ring_pays
      False

    Reference:
      As `ring_jax.costs`; the test for ``new_tokens`` is algorithm 1 of arXiv:2411.01783.
    """
    device = named_hardware(hardware)
    if layout not in ("contiguous", "striped", "zigzag"):
        raise ValueError(f"{layout=} must be one of contiguous, striped, zigzag")
    multiple = num_devices * (2 if layout == "zigzag" and num_devices > 1 else 1)
    if num_devices < 1 or seq_len < 1 or seq_len % multiple:
        raise ValueError(
            f"{seq_len=} must be a positive multiple of {multiple} for {num_devices=} and {layout=}; "
            f"use {-(-max(seq_len, 1) // max(multiple, 1)) * max(multiple, 1)}"
        )
    if num_heads < 1 or num_heads % (num_kv_heads or num_heads):
        raise ValueError(f"{num_heads=} must be a positive multiple of {num_kv_heads=}")
    call = costs.make_call(
        seq_len=seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        batch=batch,
        itemsize=itemsize(dtype),
        gradient_itemsize=itemsize(gradient_dtype),
        is_causal=is_causal,
        window=local_window_size,
        layout=layout,
    )
    joined = links.single_link(device, num_devices, link)
    setting = predictions.Setting(device, joined, efficiency or kernel_efficiency(device), two_directions)
    if new_tokens is not None and new_tokens < seq_len:
        return predictions.plan_cached(call, setting, new_tokens)
    return predictions.decide(call, setting, predictions.predict(call, setting))


def named_hardware(name: str) -> Hardware:
    """Hardware by its short name or by the start of a device kind."""
    short = {hardware.name: hardware for hardware in HARDWARE.values()}
    found = short.get(name.lower()) or find_hardware(name)
    if found is None:
        raise ValueError(f"hardware={name!r} is not in the table; known: {', '.join(short)}, or a device kind")
    return found
