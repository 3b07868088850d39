"""Which devices a run gets: simulated ones on a CPU host, those that there are on an accelerator."""

import os
import types

import pytest

from train import platform


class FakeJax:
    """JAX before its first use, on a machine with these devices."""

    def __init__(self, devices, *, platforms=None, started=False):
        self.config = types.SimpleNamespace(jax_platforms=platforms, jax_num_cpu_devices=-1, update=self._update)
        self._devices, self.started = devices, started

    def _update(self, name, value):
        if name == "jax_num_cpu_devices" and self.started and value != self.config.jax_num_cpu_devices:
            raise RuntimeError("config should be updated before backends are initialized")
        setattr(self.config, name, value)

    def devices(self):
        self.started = True
        if self._devices is None:
            count = max(1, self.config.jax_num_cpu_devices)
            return [types.SimpleNamespace(platform="cpu", device_kind="cpu")] * count
        return self._devices


H200 = [types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")] * 4


@pytest.fixture
def fake(monkeypatch):
    def install(*arguments, **keywords):
        monkeypatch.setattr(platform, "jax", FakeJax(*arguments, **keywords))
        monkeypatch.setenv("XLA_FLAGS", "")
        return platform.jax

    return install


def test_a_cpu_host_simulates_what_the_mesh_needs(fake):
    jax = fake(None)
    assert platform.prepare(8, "auto") == platform.Devices(count=8, kind="cpu", simulated=True)
    assert len(jax.devices()) == 8


def test_one_device_is_not_simulated(fake):
    fake(None)
    assert platform.prepare(1, "auto") == platform.Devices(count=1, kind="cpu", simulated=False)


@pytest.mark.parametrize("needed", [1, 4, 8])
def test_an_accelerator_gives_the_devices_that_it_has(fake, needed):
    fake(H200)
    assert platform.prepare(needed, "auto") == platform.Devices(count=4, kind="NVIDIA H200", simulated=False)


def test_cpu_on_an_accelerator_simulates_and_starts_nothing(fake):
    jax = fake(H200)
    assert platform.prepare(8, "cpu") == platform.Devices(count=8, kind="cpu", simulated=True)
    assert jax.config.jax_platforms == "cpu"
    assert not jax.started


def test_a_process_that_has_used_its_devices_keeps_them(fake):
    fake([types.SimpleNamespace(platform="cpu", device_kind="cpu")] * 2, started=True)
    assert platform.prepare(8, "auto").count == 2


@pytest.mark.parametrize("kinds", [("device",), ("device", "unpinned_host")])
def test_offloading_needs_a_way_to_the_memory_of_the_host(monkeypatch, kinds):
    memories = [types.SimpleNamespace(kind=kind) for kind in kinds]
    chip = types.SimpleNamespace(device_kind="Some chip", addressable_memories=lambda: memories)
    monkeypatch.setattr(platform, "jax", types.SimpleNamespace(local_devices=lambda: [chip]))
    platform.check_remat("attention")
    message = f"model.remat='offload' keeps attention in pinned_host memory, and Some chip has only {', '.join(kinds)}"
    with pytest.raises(ValueError, match=f"{message}; use --model.remat attention"):
        platform.check_remat("offload")
    memories.append(types.SimpleNamespace(kind="pinned_host"))
    platform.check_remat("offload")


def test_collectives_get_time_and_limits_that_are_set_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=7 --xla_other=1")
    platform.lengthen_collective_timeouts()
    flags = os.environ["XLA_FLAGS"].split()
    assert "--xla_cpu_collective_timeout_seconds=7" in flags
    assert "--xla_other=1" in flags
    assert "--xla_cpu_collective_call_terminate_timeout_seconds=3600" in flags
    assert len(flags) == 4
