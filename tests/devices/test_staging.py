"""Arrays go through small parts of a ring, by functions of C as CUDA's driver has them."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, c_int, c_uint64, c_void_p

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler.devices.cuda import staging
from gpuscheduler.runtime.gather import strips

DIFFERS = 42  # what the driver says where something is wrong


class Driver:
    """Copies late: only when an event is waited for, all that lies before it. What is written to a
    part before that comes out wrong."""

    def __init__(self, refuse=None):
        self.queue, self.events, self.done, self.copies = [], {}, 0, []
        self.refuse = refuse or {}
        self.functions = (
            CFUNCTYPE(c_int, c_uint64, c_uint64, c_uint64, c_uint64)(self.copy),
            CFUNCTYPE(c_int, c_uint64, c_uint64)(self.record),
            CFUNCTYPE(c_int, c_uint64)(self.wait),
        )
        self.calls = staging.DriverCalls(*[ctypes.cast(f, c_void_p).value for f in self.functions])

    def copy(self, to, source, nbytes, stream):
        assert stream == 7
        self.copies.append(nbytes)
        if len(self.copies) == self.refuse.get("copy"):
            return DIFFERS
        self.queue.append((to, source, nbytes))
        return 0

    def record(self, event, stream):
        self.events[event] = len(self.queue)
        return DIFFERS if len(self.queue) == self.refuse.get("record") else 0

    def wait(self, event):
        if self.refuse.get("wait"):
            return DIFFERS
        self.finish(self.events[event])
        return 0

    def finish(self, count=None):
        count = len(self.queue) if count is None else count
        for to, source, nbytes in self.queue[self.done : count]:
            ctypes.memmove(to, source, nbytes)
        self.done = max(self.done, count)


def sent(array, driver, part=64, parts=3, go_on=lambda: None):
    out = np.full(array.nbytes + 16, 77, "u1")
    ring = np.zeros(part * parts, "u1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "calls", lambda: driver.calls)
        said = staging.send(out.ctypes.data, array, ring, [*range(5, 5 + parts)], 7, go_on)
    driver.finish()
    assert (out[array.nbytes :] == 77).all()
    return out[: array.nbytes], said


SLICES = st.builds(
    slice, st.none() | st.integers(-12, 12), st.none() | st.integers(-12, 12),
    st.sampled_from([None, 1, 2, 3, -1, -2]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.data(), st.sampled_from(["u1", "i2", "f4", "c16"]), st.integers(1, 300), st.integers(1, 5)
)
def test_any_view_arrives_in_the_order_of_c(data, dtype, part, parts):
    shape = data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=4))
    whole = np.random.default_rng(0).integers(0, 256, np.prod(shape) * np.dtype(dtype).itemsize)
    array = whole.astype("u1").view(dtype).reshape(shape)
    array = array.transpose(data.draw(st.permutations(range(len(shape)))))
    array = array[tuple(data.draw(st.lists(SLICES, max_size=array.ndim)))]
    if data.draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape))
    driver = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "STEP", data.draw(st.sampled_from([50, 1000, 2**26])))
        out, said = sent(array, driver, part, parts)
    assert said == 0
    assert out.tobytes() == array.tobytes()
    assert not array.size or max(driver.copies) <= part
    assert sum(driver.copies) == array.nbytes


@pytest.mark.parametrize("refuse", [{"copy": 1}, {"copy": 4}, {"record": 2}, {"wait": True}])
def test_what_the_driver_says_comes_out(refuse):
    array = np.arange(1000, dtype="f4")
    _, said = sent(array, Driver(refuse))
    assert said == DIFFERS


def test_it_stops_between_two_steps(monkeypatch):
    monkeypatch.setattr(staging, "STEP", 256)
    asked = []

    def go_on():
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt

    driver = Driver()
    with pytest.raises(KeyboardInterrupt):
        sent(np.zeros(4000, "u1"), driver, go_on=go_on)
    assert sum(driver.copies) == 2 * 256


def test_which_arrays_go_so(monkeypatch):
    monkeypatch.setattr(staging, "calls", lambda: Driver().calls)
    x = np.zeros((8192, 4096), "f4")
    for array, so in (
        (x, True),
        (x[:, :2048], True),
        (x[::2], True),
        (x[:1023], False),  # less than 16 MiB
        (x.reshape(-1, 512)[:, :255], False),  # rows of 1,020 bytes
        (x[:, ::2], False),
        (x.T, False),
        (x[:0], False),
        (x.reshape(-1, 4, 2, 1024)[:, :2, :1], False),  # each strip has 16 KiB
        (x.reshape(2, 4096, 4096)[:, :512], True),  # two of 8 MiB
    ):
        assert staging.can_stage(array) is so
    monkeypatch.setattr(staging, "calls", lambda: None)
    assert not staging.can_stage(x)


@pytest.mark.parametrize("step", [1, 2, -1])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_strips_are_all_of_an_array_in_order(step, order):
    """Whatever its strides are: of one element seen many times, backwards, in another order."""
    base = np.arange(5 * 6 * 7, dtype="u2").reshape(5, 6, 7).transpose(order)
    rows = np.broadcast_to(base[:, :1], (base.shape[0], 4, base.shape[2]))
    planes = np.broadcast_to(base[:1], (3, *base.shape[1:]))
    for whole in (base, rows, planes, np.broadcast_to(base[:1, :1], (3, 4, base.shape[2]))):
        a = whole[::step, 1:, ::step]
        out = bytearray(a.nbytes)
        for from_, at, width, count, pitch in strips(a.shape, a.strides, a.itemsize):
            for n in range(count):
                row = ctypes.string_at(a.ctypes.data + from_ + n * pitch, width)
                out[at + n * width : at + (n + 1) * width] = row
        assert bytes(out) == a.tobytes()
