"""What stands in for GPUs finds what it is for: order that is missing."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
fake = pytest.importorskip("cupy._device", reason="these are real GPUs")

from cupy.cuda import Device, Event, Stream, runtime

pytestmark = pytest.mark.gpu


def streams():
    return Stream(non_blocking=True), Stream(non_blocking=True)


def races(f, *words):
    with pytest.raises(fake.Race) as caught:
        f()
    assert len(fake.races) == 1
    fake.races.clear()
    assert all(w in str(caught.value) for w in words)


def pinned(nbytes):
    memory = cupy.cuda.PinnedMemory(nbytes)
    return np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8)


def test_reading_what_another_stream_makes_needs_an_event():
    a, b = streams()
    with a:
        x = cupy.arange(10.0)
    with b:
        races(lambda: x + 1, "read", "written", "nothing in between")
        b.wait_event(a.record())
        assert float((x + 1).sum()) == 55


def test_writing_what_another_stream_reads_needs_an_event():
    a, b = streams()
    x = cupy.arange(10.0)
    runtime.deviceSynchronize()
    with a:
        y = x + 1
    with b:
        races(lambda: x.fill(0), "written", "read")
        a.synchronize()
        x.fill(0)
    assert float(y.sum()) == 55


def test_memory_is_used_again_only_behind_its_readers():
    a, b = streams()
    with a:
        x = cupy.arange(1000.0)
        made = a.record()
    b.wait_event(made)
    with b:
        y = x + 1
    del x
    with a:
        races(lambda: cupy.zeros(1000))
        a.wait_event(b.record())
        cupy.zeros(1000)
    b.synchronize()
    assert float(y[0]) == 1


def test_what_goes_to_the_host_is_there_when_it_was_waited_for():
    stream, _ = streams()
    x = cupy.arange(100, dtype=np.uint8)
    runtime.deviceSynchronize()
    to = pinned(100)
    runtime.memcpyAsync(to.ctypes.data, x.data.ptr, 100, runtime.memcpyDeviceToHost, stream.ptr)
    assert not np.array_equal(to, x._a)
    stream.synchronize()
    np.testing.assert_array_equal(to, np.arange(100))


def test_a_stream_that_nobody_has_goes_when_its_work_is_over():
    a, b = streams()
    x = cupy.arange(100, dtype=np.uint8)
    runtime.deviceSynchronize()
    to, first = pinned(100), a.number
    runtime.memcpyAsync(to.ctypes.data, x.data.ptr, 100, runtime.memcpyDeviceToHost, a.ptr)
    with a:
        y = x + 1
    del a
    assert fake.of_number(first) is not None
    assert not np.array_equal(to, x._a)
    with b:
        races(lambda: y + 1, "read", "written")
    runtime.deviceSynchronize()
    np.testing.assert_array_equal(to, np.arange(100))
    before, made = len(fake.every_stream()), []
    for _ in range(10):
        with Stream(non_blocking=True) as c:
            made.append(x + 1)
            b.wait_event(c.record())
    b.synchronize()
    del c
    assert fake.of_number(first) is None
    b.record()
    assert list(b.clock) == [b.number]
    assert len(fake.every_stream()) <= before


def test_a_stream_gets_the_handle_of_one_that_is_gone_and_its_memory():
    """Before its work is over: so it is with CUDA and CuPy."""
    x = cupy.arange(100, dtype=np.uint8)
    runtime.deviceSynchronize()
    with Stream(non_blocking=True) as a:
        y = x + 1
    handle = a.ptr
    del a, y
    b = Stream(non_blocking=True)
    assert b.ptr == handle
    with b:
        races(lambda: x + 1, "written", "written")


def test_what_comes_from_the_host_stays_until_it_is_there():
    stream, _ = streams()
    x = cupy.zeros(100, np.uint8)
    runtime.deviceSynchronize()
    source = pinned(100)
    source[:] = 1
    runtime.memcpyAsync(x.data.ptr, source.ctypes.data, 100, runtime.memcpyHostToDevice, stream.ptr)
    source[:] = 2
    races(stream.synchronize, "pinned memory was written")


def test_rows_of_one_array_may_come_from_two_streams():
    a, b = streams()
    x = cupy.ones((4, 8), np.uint8)
    runtime.deviceSynchronize()
    to = pinned(64)
    kind, base = runtime.memcpyDeviceToHost, to.ctypes.data
    runtime.memcpy2DAsync(base, 16, x.data.ptr, 8, 8, 4, kind, a.ptr)
    runtime.memcpy2DAsync(base + 8, 16, x.data.ptr, 8, 8, 4, kind, b.ptr)
    races(lambda: runtime.memcpy2DAsync(base + 4, 16, x.data.ptr, 8, 8, 4, kind, b.ptr))
    runtime.deviceSynchronize()
    assert to.all()


def test_streams_and_events_are_of_their_device():
    with Device(1):
        there = Stream(non_blocking=True)
        event = Event()
    with pytest.raises(RuntimeError, match="device 1"):
        there.use()
    with pytest.raises(RuntimeError, match="another"):
        event.record()


def test_arrays_of_the_host_are_refused():
    with pytest.raises(TypeError, match="Unsupported type"):
        cupy.ones(3) + np.ones(3)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(cupy.ones(3))
