"""One definition of right for every attention test: `oracle.attention` in float64, and how near a result must come.

Inputs are drawn in natural order with sizes that differ pairwise, so that a wrong reshape cannot pass. A case is put in
its layout, run on simulated devices, put back, and compared: outputs, lse, and the gradient of every array for a random
dense cotangent on both (also on rows that see nothing).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax import P

import ring_jax

FORWARD_TOLERANCE = 5e-6  # absolute, float32
GRADIENT_TOLERANCE = 5e-5  # relative to the largest true entry, float32
HALF_FACTOR = 1.5  # of the error that jax.nn.dot_product_attention makes in the same half precision on the same input


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. ``kind`` names the mask, see `tokens`."""

    ring: int = 1
    layout: str | None = "contiguous"
    kind: str = "causal"
    dtype: str = "float32"
    batch: int = 3
    local: int = 12
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 10
    value_dim: int = 14
    scale: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"

    @property
    def length(self) -> int:
        return self.local * self.ring

    @property
    def is_causal(self) -> bool:
        return self.kind not in ("full", "packed")

    @property
    def order(self) -> np.ndarray:
        """``array = natural[order]``."""
        if self.layout is None:
            return np.random.default_rng(self.seed + 1).permutation(self.length)
        return ring_jax.permutation(self.layout, self.length, self.ring)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Query, key, value and the cotangents of out and lse, in natural order, rounded to the case's dtype."""
        rng = np.random.default_rng(self.seed)
        rows = (self.batch, self.length)
        shapes = [
            (*rows, self.num_heads, self.head_dim),
            (*rows, self.num_kv_heads, self.head_dim),
            (*rows, self.num_kv_heads, self.value_dim),
            (*rows, self.num_heads, self.value_dim),
        ]
        arrays = [rng.normal(size=shape).astype(self.dtype) for shape in shapes]
        dlse = rng.normal(size=(*rows, self.num_heads)).astype("float32")
        # jax.nn.dot_product_attention, which half precision is measured against, has no gradient for its lse.
        return (*arrays, dlse if self.dtype == "float32" else 0 * dlse)

    def tokens(self) -> dict[str, np.ndarray]:
        """Keywords ``segment_ids`` and ``positions`` in natural order.

        full, causal: none. packed, packed_causal: documents of awkward lengths with padding between and behind them.
        restart: the same, positions from 0 in each document. shared: one row of ids for all batch rows.
        """
        if self.kind in ("full", "causal"):
            given = {"positions": np.arange(self.length, dtype=np.int32)} if self.layout is None else {}
            return given if self.is_causal else {}
        rows = [documents(self.length, self.local, self.seed + row) for row in range(self.batch)]
        segments, positions = (np.stack(x) for x in zip(*rows, strict=True))
        if self.kind == "shared":
            return {"segment_ids": segments[0], "positions": positions[0]}
        if self.kind == "restart":
            return {"segment_ids": segments, "positions": positions}
        if self.layout is None and self.is_causal:
            return {"segment_ids": segments, "positions": np.arange(self.length, dtype=np.int32)}
        return {"segment_ids": segments}


def documents(length: int, local: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and restarting positions of a packed row: lengths around a shard's, gaps of padding, ids unsorted."""
    rng = np.random.default_rng(seed)
    segments, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    ids, start = iter(rng.permutation(np.arange(1, length + 1))), int(rng.integers(0, 3))
    while start < length:
        size = min(int(rng.choice([1, 2, local - 1, local, local + 1, 2 * local + 1])), length - start)
        segments[start : start + size], positions[start : start + size] = next(ids), np.arange(size)
        start += size + int(rng.integers(0, 3))
    return segments, positions


def objective(attend: Callable[..., Any], tokens: dict[str, Any], query, key, value, dout, dlse):
    """A scalar that depends on every entry of out and of the finite part of lse."""
    out, lse = attend(query, key, value, **tokens)
    seen = jnp.where(jnp.isfinite(lse), lse, 0)
    total = jnp.sum(out.astype(lse.dtype) * dout.astype(lse.dtype)) + jnp.sum(seen * dlse.astype(lse.dtype))
    return total, (out, lse)


def gradients(attend: Callable[..., Any], tokens: dict[str, Any], arrays) -> tuple[Any, ...]:
    """Traceable: (out, lse, dq, dk, dv), the outputs as `jax.value_and_grad` sees them."""
    fun = functools.partial(objective, attend, tokens)
    (_, outputs), slopes = jax.value_and_grad(fun, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return *outputs, *slopes


def reference(case: Case) -> tuple[np.ndarray, ...]:
    """(out, lse, dq, dk, dv) in float64, natural order; no layout can change it."""
    return _reference(dataclasses.replace(case, layout="contiguous"))


@functools.cache
def _reference(case: Case) -> tuple[np.ndarray, ...]:
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    return oracle.attention(*case.arrays(), mask=dense_mask(case), scale=scale)


def dense_mask(case: Case) -> np.ndarray:
    """``[B, T, S]`` in natural order."""
    return oracle.dense_mask(case.batch, (case.length, case.length), case.is_causal, **case.tokens())


def ring_call(case: Case, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """`ring_attention` inside `shard_map` with ``check_vma=True``, a function of global arrays."""
    keywords = {"is_causal": case.is_causal, "layout": case.layout, "scale": case.scale, "return_residual": True}

    def attend(query, key, value, **tokens):
        spec = P(None, "sequence")
        token_specs = {name: P("sequence") if x.ndim == 1 else spec for name, x in tokens.items()}

        def local(query, key, value, tokens):
            return ring_jax.ring_attention(query, key, value, **tokens, **keywords)

        return jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec, token_specs), out_specs=spec)(
            query, key, value, tokens
        )

    return attend


def mesh_call(case: Case, mesh: jax.sharding.Mesh | None) -> Callable[..., Any]:
    """`dot_product_attention` on global arrays."""
    return functools.partial(
        ring_jax.dot_product_attention,
        is_causal=case.is_causal,
        layout=case.layout,
        scale=case.scale,
        return_residual=True,
        mesh=mesh,
    )


def run(case: Case, attend: Callable[..., Any]) -> tuple[np.ndarray, ...]:
    """(out, lse, dq, dk, dv) of ``attend``, back in natural order."""
    order = case.order
    arrays = [x[:, order] for x in case.arrays()]
    tokens = {name: x[..., order] for name, x in case.tokens().items()}
    result = jax.jit(lambda tokens, arrays: gradients(attend, tokens, arrays))(tokens, arrays)
    back = np.argsort(order)
    return tuple(np.asarray(x)[:, back] for x in result)


def assert_matches(case: Case, got: tuple[np.ndarray, ...]) -> None:
    """Compare with the float64 reference: dtypes, values, gradients, and the rows that see nothing."""
    want = reference(case)
    query, key, value, *_ = case.arrays()
    for x, primal in zip(got, (query, None, query, key, value), strict=True):
        assert x.dtype == (np.float32 if primal is None else primal.dtype)
    hidden = np.isneginf(want[1])
    np.testing.assert_array_equal(np.isneginf(got[1]), hidden)
    assert not np.any(got[0][hidden]), "a query that sees nothing must give exactly 0"
    assert not np.any(got[2][hidden]), "a query that sees nothing must get no gradient"
    if case.dtype == "float32":
        limits = [FORWARD_TOLERANCE, FORWARD_TOLERANCE, *3 * [GRADIENT_TOLERANCE]]
    else:
        limits = [HALF_FACTOR * x for x in half_errors(case)]
        limits[1] = 2e-5  # products of half-precision numbers are exact in float32: only the order of the sum differs
    for name, x, y, limit in zip(("out", "lse", "dq", "dk", "dv"), got, want, limits, strict=True):
        assert error(x, y, hidden) <= limit, f"{name}: error {error(x, y, hidden):.2e} over {limit:.2e}"


def error(got: np.ndarray, want: np.ndarray, hidden: np.ndarray) -> float:
    """Largest difference: absolute for out and lse (its finite rows), relative to the largest entry for gradients."""
    if got.ndim == 3:
        return float(np.abs(got[~hidden].astype("float64") - want[~hidden]).max(initial=0))
    return float(np.abs(got.astype("float64") - want).max() / (np.abs(want).max() or 1))


@functools.cache
def half_errors(case: Case) -> tuple[float, ...]:
    """Errors of `jax.nn.dot_product_attention` in the case's dtype on one device; (out, lse, dq, dk, dv).

    It has no float16 gradient on a CPU: there the dense reference stands in, which rounds its results once.
    """
    want = reference(case)
    hidden = np.isneginf(want[1])
    mask = jnp.asarray(dense_mask(case))[:, None]

    def attend(query, key, value):
        out, lse = jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=case.scale, implementation="xla", return_residual=True
        )
        seen = mask.any(-1)[:, 0, :, None]
        return jnp.where(seen[..., None], out, 0), jnp.where(seen, lse.astype(jnp.float32), -jnp.inf)

    tokens = {}
    if case.dtype == "float16":
        tokens = case.tokens()
        attend = functools.partial(
            ring_jax.reference_attention, is_causal=case.is_causal, scale=case.scale, return_residual=True
        )
    result = jax.jit(lambda arrays: gradients(attend, tokens, arrays))(case.arrays())
    return tuple(error(np.asarray(x), y, hidden) for x, y in zip(result, want, strict=True))
