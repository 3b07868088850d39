"""Which kernel computes the blocks of a call: the best of its platform that serves it, or the one asked for by name."""

import logging
from typing import Any, NamedTuple, cast

from ring_jax.kernels import pallas_tpu, xla
from ring_jax.kernels.protocol import Call, Kernel

logger = logging.getLogger("ring_jax")

KERNELS: dict[str, Kernel] = {"xla": cast(Any, xla), "pallas_tpu": cast(Any, pallas_tpu)}
BEST_FIRST = {"tpu": ("pallas_tpu", "xla"), "gpu": ("xla",), "cpu": ("xla",)}
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
    reasons = {name: KERNELS[name].refuses(call) for name in (order if implementation is None else [implementation])}
    if implementation is None:
        best = next(name for name in order if reasons[name] is None)
        passed_over = tuple(f"{name}: {reasons[name]}" for name in order[: order.index(best)])
        return Chosen(best, passed_over)
    if reasons[implementation] is None:
        return Chosen(implementation, ())
    other = choose(None, call).name
    raise NotImplementedError(
        f"{implementation=}: {reasons[implementation]}; use implementation={other!r}, or None for the best that serves"
    )


def report(chosen: Chosen) -> str:
    """Log the choice where a faster kernel was passed over (logger ``ring_jax``, level INFO); return its name."""
    if chosen.passed_over:
        logger.info("implementation: %s (%s)", chosen.name, "; ".join(chosen.passed_over))
    return chosen.name
