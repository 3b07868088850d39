"""All options of attention in one case, and one function that says whether the library is right about it: `check`.

Arrays are drawn in natural order, put into the case's layout, run through `dot_product_attention` on simulated devices
under `jax.jit`, put back, and compared with `oracle.attend`: out, lse, and the gradient of every float array for a
random dense cotangent. `option_samples` draws cases.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from attention_cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, HALF_FACTOR
from option_inputs import SCORE_FNS, Options, arrays, orders

import ring_jax

# The true gradient can be 0 (a row that sees one key only): then the absolute error of a forward value is allowed.
SMALLEST = FORWARD_TOLERANCE / GRADIENT_TOLERANCE
BFLOAT16_STEP = 2.0**-8


def visible(case: Options, others: dict[str, Any] | None = None) -> np.ndarray:
    """``[B, N, T, S]`` in natural order; ``others`` replaces those of `arrays`."""
    given = (arrays(case)[1] if others is None else others) | case.static()
    names = ("is_causal", "local_window_size", "chunk_size", "mask_fn", "mask", "segment_ids", "positions")
    names += ("query_seq_lengths", "key_value_seq_lengths")
    rules = {name: given[name] for name in names if name in given}
    return oracle.visible(case.batch, case.num_heads, case.lengths, **rules)


def solve(case: Options, floats: dict[str, Any], others: dict[str, Any], cotangents) -> oracle.Results:
    """The truth, in float64 and natural order; no layout, mesh or strategy enters."""
    given: dict[str, Any] = {name: x for name, x in floats.items() if name != "score_args"}
    if case.score_fn is not None:
        given |= {"score_fn": SCORE_FNS[case.score_fn], "score_args": (*floats["score_args"], *others["int_args"])}
    return oracle.attend(
        **given,
        dout=cotangents[0],
        dlse=cotangents[1],
        mask=visible(case, others),
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        positions=others.get("positions"),
        logits_soft_cap=case.soft_cap,
        keep=kept(case, others),
        rate=case.dropout,
    )


@functools.cache
def expected(case: Options) -> oracle.Results:
    return solve(case, *arrays(case))


def kept(case: Options, others: dict[str, Any]) -> np.ndarray | None:
    """What dropout keeps, in natural order; None without dropout."""
    if not case.dropout:
        return None
    at, of = oracle.token_pair(others.get("positions"), case.batch, case.lengths)
    ids = others.get("segment_ids")
    if ids is None and case.padding:  # lengths are ids: 1 for what is real
        ids = tuple(np.ones(n, np.int32) for n in case.lengths)
    segments = None if ids is None else oracle.token_pair(ids, case.batch, case.lengths)[0].copy()
    places = {"query_positions": at.copy(), "key_positions": of.copy(), "query_segments": segments}
    seed = others["dropout_seed"]
    return np.asarray(ring_jax.dropout.keep_mask(seed, case.dropout, num_heads=case.num_heads, **places))


def moved(case: Options, values: dict[str, Any], *, back: bool = False) -> dict[str, Any]:
    """Named arrays from natural order into the layout, or back again."""
    query, key = (np.argsort(x) for x in orders(case)) if back else orders(case)

    def move(name: str, x: Any) -> Any:
        if name in ("query", "dout", "out", "lse"):
            return x[:, query]
        if name in ("key", "value"):
            return x[:, key]
        if name in ("bias", "mask"):
            x = x[:, :, query] if x.shape[2] > 1 else x
            return x[..., key] if x.shape[3] > 1 else x
        if name in ("segment_ids", "positions"):
            return (x[0][..., query], x[1][..., key]) if isinstance(x, tuple) else x[..., query]
        return x

    return {name: move(name, x) for name, x in values.items()}


def slopes(attend: Callable[..., Any], floats: dict[str, Any], others: dict[str, Any], cotangents) -> Any:
    """Traceable: ((out, lse or None), gradients of ``floats``)."""

    def objective(floats):
        keywords = floats | others
        if "score_args" in keywords:
            keywords["score_args"] = (*keywords["score_args"], *keywords.pop("int_args"))
        result = attend(keywords.pop("query"), keywords.pop("key"), keywords.pop("value"), **keywords)
        out, lse = result if isinstance(result, tuple) else (result, None)
        wide = jnp.promote_types(out.dtype, jnp.float32)
        total = jnp.sum(out.astype(wide) * cotangents[0].astype(wide))
        if lse is not None:
            total += jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) * cotangents[1].astype(wide))
        return total, (out, lse)

    (_, outputs), found = jax.value_and_grad(objective, has_aux=True)(floats)
    return outputs, found


def run(case: Options, attend: Callable[..., Any], given: Any = None) -> dict[str, Any]:
    """out, lse and the gradient of every float array of ``attend``, in natural order; ``given`` replaces `arrays`."""
    floats, others, (dout, dlse) = arrays(case) if given is None else given
    cotangents = moved(case, {"dout": dout, "lse": dlse})
    program = jax.jit(functools.partial(slopes, attend))
    (out, lse), found = program(moved(case, floats), moved(case, others), tuple(cotangents.values()))
    found = {"out": out} | ({} if lse is None else {"lse": lse}) | found
    return moved(case, jax.tree.map(np.asarray, found), back=True)


def mesh_call(case: Options) -> Callable[..., Any]:
    mesh = ring_jax.make_mesh(sequence=case.ring, data=case.data, tensor=case.tensor)
    return functools.partial(ring_jax.dot_product_attention, mesh=mesh, **case.static(), **case.placed())


def local_call(case: Options) -> Callable[..., Any]:
    """The strategy's own function inside `shard_map`; token arrays and q, k, v are cut, all else is on every device."""
    mesh = ring_jax.make_mesh(sequence=case.ring)
    attend = getattr(ring_jax, f"{case.strategy}_attention")
    keywords = case.static() | {name: x for name, x in case.placed().items() if name != "strategy"}

    def call(query, key, value, **given):
        spec, names = jax.P(None, "sequence"), ("segment_ids", "positions")
        tokens = {name: jax.P(*spec[2 - jnp.ndim(x) :]) for name, x in given.items() if name in names}
        specs = {name: tokens.get(name, jax.P()) for name in given}

        def local(query, key, value, given):
            return attend(query, key, value, **given, **keywords)

        in_specs = (spec, spec, spec, specs)
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec)(query, key, value, given)

    return call


def error(name: str, got: np.ndarray, want: np.ndarray) -> float:
    """Absolute, in units of the entry where that is above 1, for out and lse; of the largest entry for gradients."""
    if name in ("out", "lse"):
        got, want = got[np.isfinite(want)], want[np.isfinite(want)]
        return float((np.abs(got - want) / np.maximum(1, np.abs(want))).max(initial=0))
    return float(np.abs(got - want).max() / max(SMALLEST, np.abs(want).max()))


def wanted(case: Options) -> dict[str, Any]:
    """What `run` must give."""
    names = {"out", *arrays(case)[0]} | ({"lse"} if case.residual else set())
    return {name: x for name, x in expected(case)._asdict().items() if name in names}


def errors(case: Options, got: dict[str, Any]) -> dict[str, float]:
    """Name -> error; ``score_args`` count as their worst."""
    want = wanted(case)
    found = {}
    for name, x in got.items():
        pairs = zip(x, want[name], strict=True) if name == "score_args" else ((x, want[name]),)
        found[name] = max(error(name, a.astype(np.float64), b) for a, b in pairs)
        if name == "bias":  # sums of many gradients cancel: softmax does not see what all scores have in common
            terms = case.batch * case.num_heads * math.prod(case.lengths) / x.size
            found[name] /= max(1, terms**0.5 / 10)
    return found


def limits(case: Options, names) -> dict[str, float]:
    """How far each result may be from the truth."""
    exact = {name: FORWARD_TOLERANCE if name in ("out", "lse") else GRADIENT_TOLERANCE for name in names}
    if case.dtype != "float32":
        half = half_errors(dataclasses.replace(case, ring=1, data=1, tensor=1, strategy="ring", schedule=()))
        # What is not rounded to half precision need not be nearer than in float32; one number is rounded by chance.
        rounded_once = BFLOAT16_STEP + GRADIENT_TOLERANCE
        least = exact | {"lse": 2e-5} | ({"bias": rounded_once} if "bias" in exact else {})
        exact = {name: max(HALF_FACTOR * half[name], least[name]) for name in names}
    if dict(case.schedule).get("gradient_dtype") == "bfloat16":  # one rounding a hop
        exact |= {name: exact[name] + case.ring * BFLOAT16_STEP / 2 for name in ("query", "key", "value")}
    return exact


def _jax_nn(case: Options, query, key, value, bias=None, **tokens):
    mask = jnp.asarray(visible(case))
    out, lse = jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=case.scale, implementation="xla", return_residual=True
    )
    seen = mask.any(-1).transpose(0, 2, 1)
    out, lse = jnp.where(seen[..., None], out, 0), jnp.where(seen, lse.astype(jnp.float32), -jnp.inf)
    return (out, lse) if case.residual else out


@functools.cache
def half_errors(case: Options) -> dict[str, float]:
    """Errors of a dense computation in the case's dtype: `jax.nn` where it has the options, else the reference."""
    attend = functools.partial(ring_jax.reference_attention, **case.static())
    if case.in_jax_nn:
        attend = functools.partial(_jax_nn, case)
    (out, lse), found = jax.jit(functools.partial(slopes, attend))(*arrays(case))
    found = {"out": out} | ({} if lse is None else {"lse": lse}) | found
    return errors(case, jax.tree.map(np.asarray, found))


def assert_matches(case: Options, got: dict[str, Any]) -> None:
    """Compare with the truth: names, dtypes, shapes, rows that see nothing, values."""
    want, floats = wanted(case), arrays(case)[0]
    assert set(got) == set(want)
    primals = floats | {"out": arrays(case)[2][0], "lse": arrays(case)[2][1]}
    for x, primal in zip(jax.tree.leaves(got), jax.tree.leaves({name: primals[name] for name in got}), strict=True):
        assert (x.dtype, x.shape) == (primal.dtype, primal.shape)
    hidden = ~np.isfinite(expected(case).lse)
    if case.residual:
        np.testing.assert_array_equal(np.isneginf(got["lse"]), hidden)
    assert not np.any(got["out"][hidden]), "a query that sees nothing must give exactly 0"
    assert not np.any(got["query"][hidden]), "a query that sees nothing must get no gradient"
    found, allowed = errors(case, got), limits(case, want)
    wrong = [f"{x}: error {found[x]:.2e} over {allowed[x]:.2e}" for x in found if not found[x] <= allowed[x]]
    assert not wrong, f"{case}: {', '.join(wrong)}"


def check(case: Options) -> str:
    """ "verified", or "refused: reason"; AssertionError for a wrong result or a refusal without a reason.

    When `supports` gives a reason, the call must raise NotImplementedError with that text. When it gives none, only
    what it cannot know (sizes against the mesh) may still be refused, with a text that names an option.
    """
    floats, others, _ = arrays(case)
    keywords = {x: y for x, y in (floats | others).items() if x not in ("query", "key", "value", "int_args")}
    if case.score_fn is not None:
        keywords["score_args"] = (*floats["score_args"], *others["int_args"])
    keywords |= case.static() | case.placed()
    reason = ring_jax.supports(**keywords)
    names = [*(keywords.keys() - {"layout"}), *dict(case.schedule), case.strategy]  # any length fits any layout
    orders(case)
    try:
        got = run(case, mesh_call(case))
    except (NotImplementedError, ValueError) as refusal:
        text = str(refusal)
        if reason is not None:
            assert isinstance(refusal, NotImplementedError), f"{case}: {text}"
            assert reason in text, f"{case}: supports says {reason!r}, the call says {text!r}"
        elif not re.search(rf"\b({'|'.join(names)})\b", text):
            raise
        return f"refused: {text}"
    assert reason is None, f"{case}: supports says {reason!r}, but the call runs"
    assert_matches(case, got)
    return "verified"
