"""Pallas kernels on a machine without their accelerator: run by JAX's interpreter instead of compiled.

    with interpret.kernels():
        dot_product_attention(..., implementation="pallas_tpu")

For tests: slow, and exact as far as the kernel's own arithmetic goes. The switch is read while a call is traced and is
no part of the key under which `jax.jit` keeps programs, so a jitted function must be traced within it. Constants of a
kernel have no varying axes there, so `jax.shard_map` around such a call needs ``check_vma=False``.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_ON = contextvars.ContextVar("ring_jax_interpret", default=False)


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Interpret the Pallas kernels of all calls that are traced within."""
    token = _ON.set(True)
    try:
        yield
    finally:
        _ON.reset(token)


def is_on() -> bool:
    return _ON.get()
