"""Options under the transforms of a trainer, on Auto and Explicit meshes, nested, and with replication unchecked.

What options add to q, k and v are arrays that are shared between devices: a bias without rows, sinks, arguments of a
score function. Their gradients are sums over devices, and a transform that loses one of the sums is right for q, k, v.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType
from option_cases import assert_matches, errors, limits, local_call, run, solve
from option_inputs import Options, arrays
from test_transforms import make_mesh, remat, scan

import ring_jax

CASE = Options(layout="zigzag", length=24, sinks=True, bias="NS", score_fn="table", dropout=0.3, tokens="restart")
CASE = dataclasses.replace(CASE, is_causal=True, window=(11, 0), soft_cap=5.0, value_dim=12, seed=11)
MESHES = {"(2, 2, 1, 2)": (2, 2, 1, 2), "(1, 1, 2, 3)": (1, 1, 2, 3)}  # data, tensor, pipeline, sequence


def call(case: Options, mesh, **placed):
    keywords = case.static() | {name: x for name, x in case.placed().items() if name != "strategy"} | placed
    return functools.partial(ring_jax.dot_product_attention, mesh=mesh, **keywords)


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ring", AxisType.Auto),
        ("ring", AxisType.Explicit),
        ("all_gather", AxisType.Explicit),
        pytest.param("usp", AxisType.Explicit),
        pytest.param("all_gather", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param("usp", AxisType.Auto, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_meshes_with_axes_that_share(strategy: str, shape: str, kind: AxisType):
    case = dataclasses.replace(CASE, ring=MESHES[shape][3], num_kv_heads=4, num_heads=12 if strategy == "usp" else 4)
    with jax.set_mesh(make_mesh(MESHES[shape], kind)):
        assert_matches(case, run(case, call(case, None, strategy=strategy)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("transform", [remat, scan], ids=["remat", "scan"])
def test_transforms_of_an_uneven_length(transform, kind: AxisType):
    """23 tokens on three devices: padded inside."""
    case = dataclasses.replace(CASE, ring=3, length=23)
    with jax.set_mesh(make_mesh((2, 2, 1, 3), kind)):
        assert_matches(case, run(case, transform(call(case, None))))


def test_vmap_over_everything():
    case = dataclasses.replace(CASE, ring=2)
    attend = call(case, ring_jax.make_mesh(sequence=2))

    def twice(*positional, **keywords):
        both = jax.tree.map(
            lambda x: np.stack([x, x]) if isinstance(x, np.ndarray) else jax.numpy.stack([x, x]), keywords
        )
        seed = both.pop("dropout_seed")[0]
        moved = tuple(jax.numpy.stack([x, x]) for x in positional)
        out = jax.vmap(lambda p, k: attend(*p, **k, dropout_seed=seed))(moved, both)
        return jax.tree.map(lambda x: x[1], out)

    assert_matches(case, run(case, twice))


@pytest.mark.parametrize("check_vma", [True, False])
def test_nested_in_a_map_over_rows(check_vma: bool):
    """`shard_map` over `data` outside, the mesh-level call inside: dropout still counts rows of the whole batch."""
    case = dataclasses.replace(CASE, ring=2)
    mesh = ring_jax.make_mesh(data=2, sequence=2)
    inner = call(case, None)

    def outer(query, key, value, **keywords):
        rows = P("data")
        specs = {name: rows if name in ("segment_ids", "positions") else P() for name in keywords}

        def body(query, key, value, keywords):
            return inner(query, key, value, **keywords)

        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(rows, rows, rows, specs),
            out_specs=rows,
            axis_names={"data"},
            check_vma=check_vma,
        )
        return mapped(query, key, value, keywords)

    with jax.set_mesh(mesh):
        assert_matches(case, run(case, outer))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_inside_a_map_that_checks_nothing(strategy: str, monkeypatch):
    """check_vma=False: no types to go by, the same sums."""
    case = dataclasses.replace(CASE, ring=2, strategy=strategy)
    shard_map = jax.shard_map
    monkeypatch.setattr(jax, "shard_map", lambda *a, **k: shard_map(*a, **k, check_vma=False))
    assert_matches(case, run(case, local_call(case)))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "usp"])
def test_float64_is_kept_on_the_road(strategy: str):
    case = dataclasses.replace(CASE, ring=4, score_fn=None, dropout=0.0, strategy=strategy)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, arrays(case))
        attend = call(case, ring_jax.make_mesh(sequence=4), strategy=strategy)
        assert max(errors(case, run(case, attend, wide)).values()) < 1e-12


def test_queries_that_vary_less_than_keys_outside():
    """Inside a map over rows, one set of queries for all of them: its gradient is their sum."""
    mesh, rng = ring_jax.make_mesh(data=2, sequence=2), np.random.default_rng(0)
    query, key = (rng.normal(size=(n, 8, 2, 4)).astype(np.float32) for n in (2, 4))
    inner = functools.partial(ring_jax.dot_product_attention, is_causal=True)

    def loss(query, key):
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "axis_names": {"data"}}
        return jax.shard_map(lambda q, k: inner(q, k, k), mesh=mesh, **specs)(query, key).sum()

    def plain(query, key):
        return ring_jax.reference_attention(query[jax.numpy.array([0, 1, 0, 1])], key, key, is_causal=True).sum()

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss, argnums=(0, 1)))(query, key)
    want = jax.jit(jax.grad(plain, argnums=(0, 1)))(jax.numpy.asarray(query), key)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_lse_alone():
    """A z-loss: the gradient comes through the log-sum-exp only."""
    case = dataclasses.replace(CASE, ring=2)
    floats, others, (dout, dlse) = arrays(case)
    given = floats, others, (0 * dout, dlse)
    got = run(case, call(case, ring_jax.make_mesh(sequence=2)), given)
    want = solve(case, *given)._asdict()
    for name, limit in limits(case, got).items():
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            seen = np.isfinite(b)
            assert np.abs(a[seen] - b[seen]).max() <= limit * max(1, np.abs(b[seen]).max()), name
