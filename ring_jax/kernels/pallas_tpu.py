"""The block kernel for TPU, in Pallas: `forward_block` and `backward_block`, what they serve, and their tiles.

Both read and rewrite their sums in place (the softmax state; dQ, dK and dV): nothing is merged outside of a kernel and
nothing is copied. Masks come from positions and segment ids. Precision and what else was decided: docs/kernels.md.
"""

import jax.numpy as jnp

from ring_jax.kernels import interpret
from ring_jax.kernels.pallas_tpu_backward import backward_block
from ring_jax.kernels.pallas_tpu_forward import forward_block
from ring_jax.kernels.pallas_tpu_parts import MOST_ROWS
from ring_jax.kernels.protocol import Call
from ring_jax.mesh import target

__all__ = ["backward_block", "forward_block", "refuses", "tile_size"]

LANES = 128
TILES = {"TPU v5": 512, "TPU v5 lite": 512, "TPU v5p": 512, "TPU v6 lite": 512, "TPU7x": 512}
"""Tokens in a tile by device kind."""
OTHER_TILE = 512
MOST_BYTES = {"TPU v4": 3 * 2**20}
"""What the queries of a step, float32, with their values may take, by device kind; a step holds about five times that.
v4 gives a kernel 16 MiB."""
OTHER_BYTES = 10 * 2**20


def tile_size(length: int, chunk: int, num_heads: int = 1) -> int:
    """Tokens in a tile for ``length`` local tokens whose positions run in chunks of ``chunk``.

    The largest multiple of 128 up to the wanted size that divides the chunk, so that no tile straddles two zigzag
    chunks; else one that divides the length; else all of it.
    """
    wanted = TILES.get(target().device_kind, OTHER_TILE)
    for whole in (chunk, length):
        fits = [size for size in range(LANES, wanted + 1, LANES) if whole % size == 0 and length % size == 0]
        if fits:
            return max(fits)
    return length


def refuses(call: Call) -> str | None:
    """Why a call is not served: an option of another kernel, a dtype or a length without legal tiles, no TPU."""
    scores = call.scores
    options = {
        "mask_fn": scores.rules.mask_fn is not None,
        "score_fn": scores.score_fn is not None,
        "dropout_rate": scores.dropout_rate > 0,
        "bias": call.has_bias,
        "mask": call.has_mask,
    }
    given = [name for name, is_on in options.items() if is_on]
    if given:
        return f"it has no {given[0]}"
    if call.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 and bfloat16, not in {jnp.dtype(call.dtype).name}"
    size = max(min(tile_size(call.lengths[0], call.lengths[0]), MOST_ROWS // call.group), LANES)
    if 4 * call.group * size * sum(call.head_sizes) > MOST_BYTES.get(call.device_kind, OTHER_BYTES):
        return f"{call.group} query heads of {call.head_sizes[0]} for a key/value head do not fit the vector memory"
    if interpret.is_on():
        return None
    if call.platform != "tpu":
        return f"it runs on TPU, not on {call.platform}, but for ring_jax.kernels.interpret"
    lengths = call.lengths[0], call.lengths[1] // (1 + call.two_directions)
    for length in lengths:
        if length % LANES:
            return f"a block of {length} tokens is no multiple of {LANES}; pad the sequence"
        if call.tile_size is not None and (call.tile_size % LANES or length % min(call.tile_size, length)):
            rule = f"a multiple of {LANES} that divides the {length} tokens of a block"
            return f"tile_size={call.tile_size} must be {rule}"
    return None
