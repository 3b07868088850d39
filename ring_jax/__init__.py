"""Exact attention over sequences too long for one device, in JAX."""

from ring_jax.attention import dot_product_attention
from ring_jax.layouts import from_layout, permutation, to_layout
from ring_jax.mesh import make_mesh
from ring_jax.options import supports
from ring_jax.reference import reference_attention
from ring_jax.ring import ring_attention
from ring_jax.softmax import merge

__all__ = [
    "dot_product_attention",
    "from_layout",
    "make_mesh",
    "merge",
    "permutation",
    "reference_attention",
    "ring_attention",
    "supports",
    "to_layout",
]
