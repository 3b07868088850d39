"""Which strategy to use: closed forms for what a hop costs against what a step computes, with hardware figures.

A hop is hidden when the block holds at least c_min tokens (D and B cancel):

    forward   c_min = (e / 2) (K / N) (F / W) / m          backward   c_min = ((e + e_g) / 5) (K / N) (F / W) / m

with F the matmul rate, W the bytes a second of a hop, e and e_g the bytes of an entry of K, V and of dK, dV, and m the
part of a block pair that is computed (1/2 for a balanced causal mask).
"""

import logging
from typing import Any, NamedTuple

import numpy as np

from ring_jax import ulysses
from ring_jax.hardware import HARDWARE, Hardware, find_hardware
from ring_jax.routes import Grid

__all__ = ["HARDWARE", "Choice", "Hardware", "Sizes", "choose_strategy", "find_hardware", "hidden_length"]

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


def hidden_length(sizes: Sizes, hardware: Hardware) -> tuple[float, float]:
    """(forward, backward) c_min: tokens of a shard from which a hop is hidden behind a step."""
    part = 0.5 if sizes.balanced_causal else 1.0
    ratio = sizes.num_kv_heads / sizes.num_heads * hardware.flops / hardware.hop_bytes / part
    return sizes.itemsize / 2 * ratio, (sizes.itemsize + sizes.gradient_itemsize) / 5 * ratio


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
    needed = hidden_length(sizes, hardware)[1]
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
