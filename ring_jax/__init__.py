"""Exact attention over sequences too long for one device, in JAX."""

from ring_jax.attention import dot_product_attention
from ring_jax.balance import balanced_permutation, live_tiles
from ring_jax.core import ATTENTION
from ring_jax.inspection import inspect
from ring_jax.layouts import from_layout, permutation, to_layout
from ring_jax.mesh import compiler_options, make_mesh
from ring_jax.options import Schedule, supports
from ring_jax.planner import choose_strategy, plan
from ring_jax.reference import reference_attention
from ring_jax.sharded import all_gather_attention, ring_attention, ulysses_attention, usp_attention
from ring_jax.softmax import merge

__all__ = [
    "ATTENTION",
    "Schedule",
    "all_gather_attention",
    "balanced_permutation",
    "choose_strategy",
    "compiler_options",
    "dot_product_attention",
    "from_layout",
    "inspect",
    "live_tiles",
    "make_mesh",
    "merge",
    "permutation",
    "plan",
    "reference_attention",
    "ring_attention",
    "supports",
    "to_layout",
    "ulysses_attention",
    "usp_attention",
]
