"""What goes from process to process together is a few buffers, and arrives as it was."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from dask.sizeof import sizeof

from gpuscheduler.cluster.transport import SMALL, Bundle, off_device, put_back
from gpuscheduler.cluster.wire import OffDevice


def sent(cargo):
    """As `distributed` sends it: arrays out of band. What arrives, and the buffers."""
    buffers = []
    text = pickle.dumps(cargo, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=[bytearray(b.raw()) for b in buffers]), buffers, text


VALUES = [
    np.arange(5),
    np.ones((3, 4), order="F"),
    np.ones((4, 6))[::2, ::3],
    np.array(["a", None], dtype=object),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.array(["2001-01-01"], dtype="M8[D]"),
    np.ma.masked_array([1, 2], [True, False]),
    np.empty((0, 3), "f4"),
    np.array(3.5),
    np.float32(2),
    np.arange(SMALL),
    np.broadcast_to(np.arange(4.0), (100_000, 4)),
    {"total": np.ones(4), "n": (np.ones(2), [3, "x"])},
    None,
    "text",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_arrive_as_they_were(value):
    arrived, _, _ = sent(Bundle({("x", 0): value}))
    got = arrived.values["x", 0]
    assert type(got) is type(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        np.testing.assert_array_equal(got, value, strict=True)
    elif isinstance(value, dict):
        np.testing.assert_array_equal(got["total"], value["total"])
        np.testing.assert_array_equal(got["n"][0], value["n"][0])
        assert got["n"][1] == [3, "x"]
    else:
        assert np.array_equal(got, value)


def test_many_small_arrays_are_one_buffer():
    cargo = Bundle({("x", i): np.full(10, i) for i in range(1000)})
    arrived, buffers, _ = sent(cargo)
    assert sum(b.raw().nbytes > 0 for b in buffers) == 1
    assert all((arrived.values["x", i] == i).all() for i in range(1000))
    arrived.values["x", 3][:] = 7  # they may be written to
    assert (arrived.values["x", 4] == 4).all()


def test_what_only_repeats_is_sent_once():
    _, buffers, text = sent(Bundle({"x": np.broadcast_to(np.float64(1), (1000, 1000))}))
    assert sum(b.raw().nbytes for b in buffers) + len(text) < 2000


def test_a_part_shares_the_values():
    cargo = Bundle({"a": np.ones(3), "b": np.ones(4)})
    assert cargo.take(["b"]).values["b"] is cargo.values["b"]
    assert sizeof(cargo) == 7 * 8


def test_what_was_on_a_device_is_put_back():
    value = {"x": [OffDevice(np.ones(2)), 5]}
    assert [leaf.nbytes for leaf in off_device(value)] == [16]
    assert put_back(value, lambda a: a.tolist()) == {"x": [[1.0, 1.0], 5]}
