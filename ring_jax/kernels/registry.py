"""Which kernel computes the blocks of a call: the best of its platform that serves it, or the one asked for by name."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from ring_jax.kernels import cudnn, interpret, pallas_gpu, pallas_tpu, xla
from ring_jax.kernels.protocol import Call, Kernel
from ring_jax.kernels.tiles import Scores
from ring_jax.mesh import Target

logger = logging.getLogger("ring_jax")

KERNELS: dict[str, Kernel] = {
    "xla": cast(Any, xla),
    "pallas_tpu": cast(Any, pallas_tpu),
    "cudnn": cast(Any, cudnn),
    "pallas_gpu": cast(Any, pallas_gpu),
}
BEST_FIRST = {"tpu": ("pallas_tpu", "xla"), "gpu": ("cudnn", "pallas_gpu", "xla"), "cpu": ("xla",)}
"""Kernels of each platform, fastest first; the last one serves everything."""


class Chosen(NamedTuple):
    """A kernel, and why those that are faster do not serve."""

    name: str
    passed_over: tuple[str, ...]


def choose(implementation: str | None, call: Call) -> Chosen:
    """The kernel of a call.

    Raises:
      NotImplementedError: for a kernel asked for by name that does not serve the call; the message names one that does.
    """
    order = BEST_FIRST[call.platform]
    reasons = {name: _refuses(name, call) for name in (order if implementation is None else [implementation])}
    if implementation is None:
        reasons = {name: reason or _too_coarse(name, call) for name, reason in reasons.items()}
        best = next(name for name in order if reasons[name] is None)
        passed_over = tuple(f"{name}: {reasons[name]}" for name in order[: order.index(best)])
        return Chosen(best, passed_over)
    if reasons[implementation] is None:
        return Chosen(implementation, ())
    other = choose(None, call).name
    raise NotImplementedError(
        f"{implementation=}: {reasons[implementation]}; use implementation={other!r}, or None for the best that serves"
    )


def _refuses(name: str, call: Call) -> str | None:
    """The kernel's own reason, or that it is another platform's."""
    if name not in BEST_FIRST[call.platform] and not interpret.is_on():
        home = next(platform for platform, names in BEST_FIRST.items() if name in names)
        return f"it is a kernel for {home}, and these devices are {call.device_kind} ({call.platform})"
    return KERNELS[name].refuses(call)


def _too_coarse(name: str, call: Call) -> str | None:
    """Why a kernel that serves a call is not what None picks."""
    if name == "cudnn" and call.num_blocks > 1:
        return (
            "it rounds each block's part of dk and dv, so errors grow with the ring (2.3 times those of one call were "
            'seen); implementation="cudnn" takes it all the same'
        )
    return None


def report(chosen: Chosen) -> str:
    """Log the choice where a faster kernel was passed over (logger ``ring_jax``, level INFO); return its name."""
    if chosen.passed_over:
        logger.info("implementation: %s (%s)", chosen.name, "; ".join(chosen.passed_over))
    return chosen.name


def refuses_by_name(implementation: str, target: Target, scores: Scores, options: Mapping[str, Any]) -> str | None:
    """Why these options are refused of a kernel by name, as far as no array and no size decides; else None."""
    call = Call(
        *target,
        dtype=jnp.dtype("bfloat16"),
        head_sizes=(128, 128),
        lengths=(4096, 4096),
        scores=scores,
        layout=options["layout"],
        default_positions=options["positions"] is None,
        has_segments=any(
            options[name] is not None for name in ("segment_ids", "query_seq_lengths", "key_value_seq_lengths")
        ),
        has_bias=options["bias"] is not None,
        has_mask=options["mask"] is not None,
        strategy=options["strategy"],
        two_directions=bool(options["schedule"] and options["schedule"].two_directions),
        tile_size=options["schedule"] and options["schedule"].tile_size,
        return_lse=options["return_residual"],
    )
    try:
        choose(implementation, call)
    except NotImplementedError as refusal:
        return str(refusal)
    return None
