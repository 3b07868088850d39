"""What is wrapped round cuDNN's attention, on a mock of the same semantics: choice of blocks, merge, lse, delta."""

import dataclasses
import functools
from typing import Any

import cudnn_mock
import jax
import jax.numpy as jnp
import numpy as np
import option_cases
import pytest
from option_cases import assert_matches, mesh_call, run
from option_inputs import Options

from ring_jax.kernels import cudnn, interpret, registry
from ring_jax.kernels.protocol import Call
from ring_jax.kernels.tiles import Scores
from ring_jax.masks import Rules

RING = {"ring": 4, "layout": "zigzag", "length": 64, "value_dim": 16}
FAST = {
    "contiguous": Options(**RING | {"layout": "contiguous", "ring": 3, "length": 48}, is_causal=True),
    "zigzag, sinks": Options(**RING, is_causal=True, sinks=True, num_kv_heads=1, scale=0.6),
}
SLOW = {
    "one device": Options(is_causal=True),
    "full": Options(**RING | {"layout": "striped"}),
    "queries travel": Options(**RING | {"schedule": (("rotate", "queries"),)}, is_causal=True),
    "two directions": Options(**RING | {"schedule": (("two_directions", True),)}),
    "two levels": Options(**RING | {"schedule": (("inner_size", 2),)}, is_causal=True),
    "all-gather": Options(**RING, strategy="all_gather"),
    "ulysses": Options(**RING | {"layout": "contiguous", "ring": 2}, strategy="ulysses", is_causal=True),
    "usp": Options(**RING | {"layout": "contiguous"}, strategy="usp", is_causal=True),
    "wide batch": Options(**RING | {"ring": 2}, is_causal=True, data=2, residual=False),
}


@pytest.fixture(autouse=True)
def _mock(monkeypatch):
    cudnn_mock.install(monkeypatch)


def attend(case: Options) -> dict[str, Any]:
    with interpret.kernels():
        return run(case, functools.partial(mesh_call(case), implementation="cudnn"))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the compiler of jaxlib 0.11.2 for CPUs crashes on two of these programs"
)
@pytest.mark.parametrize("name", FAST)
def test_case(name: str):
    assert_matches(FAST[name], attend(FAST[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_slow_case(name: str):
    assert_matches(SLOW[name], attend(SLOW[name]))


@pytest.mark.slow
def test_half_precision_stays_near_one_call():
    """cuDNN rounds what each block gives; one device is the call that `jax.nn` makes on a GPU. Seen: dv 2.3 times."""
    case = Options(**RING | {"dtype": "bfloat16"}, is_causal=True)
    one, *rings = (option_cases.errors(x, attend(x)) for x in (dataclasses.replace(case, ring=n) for n in (1, 2, 4)))
    for found in rings:
        assert all(found[name] <= 3 * one[name] for name in ("out", "query", "key", "value")), (one, found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stand_in_has_our_delta(dtype: str):
    rng = np.random.default_rng(0)
    dout = jnp.asarray(rng.normal(size=(5, 40, 16)) * np.geomspace(1e-3, 1, 40)[:, None], dtype)
    delta = jnp.asarray(rng.normal(size=(5, 40)), jnp.float32) * jnp.abs(dout.astype(jnp.float32)).sum(-1)
    same, out = cudnn.stand_in(dout, delta)
    np.testing.assert_array_equal(same, dout)
    got = (np.asarray(dout, np.float64) * np.asarray(out, np.float64)).sum(-1)
    np.testing.assert_allclose(got, delta, rtol=1e-6)


def test_a_row_without_a_cotangent_of_its_output_keeps_the_gradient_of_its_lse():
    dout, out = cudnn.stand_in(jnp.zeros((3, 8), jnp.bfloat16), jnp.asarray([0.0, 2.5, -1e-4]))
    got = (np.asarray(dout, np.float64) * np.asarray(out, np.float64)).sum(-1)
    np.testing.assert_allclose(got, [0.0, 2.5, -1e-4], rtol=1e-6)
    assert np.abs(dout).max() <= 2.0**-40 and not dout[0].any()


def test_a_cotangent_of_one_entry():
    dout, out = cudnn.stand_in(jnp.eye(8, dtype="bfloat16")[:3], jnp.asarray([0.5, 2.0, -8.0]))
    np.testing.assert_array_equal((dout * out).sum(-1), [0.5, 2.0, -8.0])


CALL = Call(
    platform="gpu",
    device_kind="NVIDIA H200",
    dtype="bfloat16",
    head_sizes=(128, 128),
    lengths=(8192, 8192),
    scores=Scores(1.0, rules=Rules(is_causal=True)),
    layout="zigzag",
    default_positions=True,
    has_segments=False,
    has_bias=False,
    has_mask=False,
    strategy="ring",
    two_directions=False,
    tile_size=None,
    return_lse=True,
)
REFUSED = {
    "AMD Instinct MI300X has no cuDNN": {"device_kind": "AMD Instinct MI300X"},
    "bfloat16 and float16": {"dtype": "float64"},
    "at most 128 on NVIDIA A100": {"device_kind": "NVIDIA A100-SXM4-80GB", "head_sizes": (256, 256)},
    "no multiples of 8": {"head_sizes": (100, 100)},
    "differ, which takes Hopper": {"device_kind": "NVIDIA A100-SXM4-80GB", "head_sizes": (128, 64)},
    "local_window_size": {"scores": Scores(1.0, rules=Rules(True, (5, 0)))},
    "chunk_size": {"scores": Scores(1.0, rules=Rules(chunk_size=5))},
    "segment_ids": {"has_segments": True},
    "dense mask": {"has_mask": True},
    "mask_fn": {"scores": Scores(1.0, rules=Rules(mask_fn=max))},
    "logits_soft_cap": {"scores": Scores(1.0, soft_cap=5.0)},
    "dropout_rate": {"scores": Scores(1.0, dropout_rate=0.1)},
    "bias": {"has_bias": True},
    "return_residual with float16": {"dtype": "float16"},
    "tile_size": {"tile_size": 64},
    "positions were given": {"default_positions": False},
    "layout='striped'": {"layout": "striped"},
    "different lengths": {"lengths": (8192, 4096)},
    "all_gather": {"strategy": "all_gather"},
    "out of order": {"strategy": "ulysses"},
    "two_directions": {"two_directions": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_serve_goes_to_another_kernel(reason: str):
    call = CALL._replace(**REFUSED[reason])
    chosen = registry.choose(None, call)
    assert chosen.name in ("pallas_gpu", "xla") and reason in chosen.passed_over[0]
    with pytest.raises(NotImplementedError, match=f"{reason}.*use implementation='{chosen.name}'"):
        registry.choose("cudnn", call)


def test_the_best_of_each_platform_and_names_of_another():
    assert registry.choose(None, CALL) == ("cudnn", ())
    ring = registry.choose(None, CALL._replace(num_blocks=2))
    assert ring.name == "pallas_gpu" and "errors grow with the ring" in ring.passed_over[0]
    assert registry.choose("cudnn", CALL._replace(num_blocks=2)) == ("cudnn", ())
    assert registry.choose(None, CALL._replace(scores=Scores(1.0), strategy="all_gather", layout=None)).name == "cudnn"
    cpu = CALL._replace(platform="cpu", device_kind="cpu")
    assert registry.choose(None, cpu).name == "xla"
    for name in ("cudnn", "pallas_gpu"):
        with pytest.raises(NotImplementedError, match=f"'{name}': it is a kernel for gpu.*use implementation='xla'"):
            registry.choose(name, cpu)
