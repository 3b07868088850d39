import jax
import pytest

import ring_jax


def test_axes_sizes_and_order():
    mesh = ring_jax.make_mesh(data=2, tensor=2, pipeline=1, sequence=4)
    assert mesh.axis_names == ("data", "tensor", "pipeline", "sequence")
    assert mesh.devices.shape == (2, 2, 1, 4)
    ids = [d.id for d in mesh.devices[0, 0, 0]]
    assert ids == list(range(ids[0], ids[0] + 4)), "ring neighbors must be neighbors on the machine"


def test_one_device():
    assert ring_jax.make_mesh().size == 1


def test_given_devices():
    devices = jax.devices()[4:6]
    assert list(ring_jax.make_mesh(sequence=2, devices=devices).devices.flat) == devices


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"sequence": 64}, r"sequence 64 needs 64 devices, but there are 16 \(cpu\); simulate more"),
        ({"tensor": 0}, "at least 1; got data 1, tensor 0"),
        ({"sequence": 2, "devices": "three"}, r"needs 2 devices, but there are 3 \(cpu\); change the sizes"),
    ],
)
def test_meshes_that_do_not_fit(axes, message):
    if axes.get("devices"):
        axes["devices"] = jax.devices()[:3]
    with pytest.raises(ValueError, match=message):
        ring_jax.make_mesh(**axes)
