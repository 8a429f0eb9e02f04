"""Host arrays that tasks begin by sending to their device.

They are copied beside the task, ahead of it, through pieces of pinned memory, or directly where
they are pinned.
"""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler.devices.cuda import (
    file_steps,
    staging,
)
from gpuscheduler.devices.cuda import pinned as cuda_pinned
from gpuscheduler.frontend import transfers
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.plan.batching import Batch
from gpuscheduler.runtime.threads import Team
from graphs._blocks import views

SIDE = 240


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfers, "LEAST_SENT", 1)
    monkeypatch.setattr(cuda_pinned, "PIECE_BYTES", 20_000)


@pytest.fixture(params=[1, 2**10, 2**40], ids=["any rows", "long rows", "by NumPy"])
def rows(request, monkeypatch):
    """Which arrays are staged by compiled code."""
    monkeypatch.setattr(staging, "LEAST_BYTES", 1)
    monkeypatch.setattr(staging, "LEAST_ROWS", 1)
    monkeypatch.setattr(staging, "LEAST_ROW", request.param)
    sends, calls = staging.can_stage, []
    monkeypatch.setattr(staging, "can_stage", lambda v: calls.append(found := sends(v)) or found)
    yield
    if calls:
        assert {1: all(calls), 2**40: not any(calls)}.get(request.param, True)


@pytest.fixture
def s():
    with gpuscheduler.Scheduler(devices="cuda:0,0", check=True) as scheduler:
        yield scheduler


@pytest.fixture(params=["pageable", "pinned"])
def memory(request):
    def array(a):
        if request.param == "pageable":
            return a
        out = cuda_pinned.PinnedBlocks().array(a.shape, a.dtype)
        out[...] = a
        return out

    return array


def numbers(dtype="f4", shape=(SIDE, SIDE)):
    a = np.random.default_rng(1).integers(-100, 100, shape)
    return a.astype(dtype)


def from_host(a, chunks):
    return views(a, chunks).to_backend("cupy")


def on_host(x):
    return x.to_backend("numpy").compute()


def sent_steps(s, x):
    return [step for step in s.plan(x).steps if step.sent]


@pytest.mark.parametrize("chunks", [(60, -1), (-1, 60), (60, 80), (SIDE, SIDE)])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", "?", "c16"])
def test_blocks_of_an_array(s, memory, rows, chunks, dtype):
    a = memory(numbers(dtype))
    x = from_host(a, chunks)
    assert len(sent_steps(s, x + x)) == x.npartitions
    np.testing.assert_array_equal(on_host(x + x), a + a)
    np.testing.assert_array_equal(on_host(x), a)
    moved = {link: n for link, n in s.last.traffic.items() if link[0] == -1}
    assert sum(moved.values()) == a.nbytes
    assert set(moved) <= {(-1, 0), (-1, 1)}


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[::-1],
        lambda a: a[:, ::2],
        lambda a: a[5:200:3, 7:],
        lambda a: np.broadcast_to(a[0], a.shape),
        lambda a: a.reshape(12, 20, 12, 20).transpose(2, 0, 3, 1),
    ],
)
def test_views(s, memory, rows, view):
    a = view(memory(numbers()))
    x = from_host(a, tuple(max(1, n // 3) for n in a.shape))
    np.testing.assert_array_equal(on_host(x * 2), a * 2)


def test_functions_that_bring_arrays_to_the_device(s):
    a = numbers()
    x = da.from_array(a, chunks=60)
    for send in (cupy.asarray, cupy.array):
        y = x.map_blocks(send, meta=cupy.empty((0, 0), "f4"))
        assert len(sent_steps(s, y * 3)) == 16
        np.testing.assert_array_equal(on_host(y * 3), a * 3)
    more = x.map_blocks(lambda b: cupy.asarray(b) + 1, meta=cupy.empty((0, 0), "f4"))
    assert not sent_steps(s, more)  # it does something else with it, too
    np.testing.assert_array_equal(on_host(more), a + 1)


def test_what_follows_is_fused():
    a = numbers()
    x = from_host(a, 60)
    with gpuscheduler.Scheduler(devices="cuda:0,0", fuse_least=0) as s:
        steps = s.plan((x * 2 + 1).sum()).steps
        assert len([t for t in steps if t.sent]) == 16
        assert all(t.sent or type(t.task) in (KernelTask, Batch) for t in steps)
        assert float((x * 2 + 1).sum().compute()) == (a * 2 + 1).sum()


def test_what_is_sent_and_then_sliced_is_on_the_device(s):
    a = numbers()
    y = from_host(a, 60)[10:50, ::2]
    assert len(sent_steps(s, y + 1)) == 4
    kinds = y.map_blocks(lambda b: cupy.full(b.shape, type(b) is cupy.ndarray), dtype=bool)
    assert on_host(kinds).all()
    assert type(y.compute()) is cupy.ndarray
    np.testing.assert_array_equal(on_host(y), a[10:50, ::2])


def test_the_order_of_elements_in_memory_stays(s):
    a = np.asfortranarray(numbers())
    x = views(a, (-1, 60)).to_backend("cupy")
    flat = x.map_blocks(lambda b: b.ravel("K")[None], chunks=(1, SIDE * 60), dtype="f4")
    np.testing.assert_array_equal(on_host(flat)[0], a.ravel("K"))


def test_rows_that_overlap(s, memory):
    a = np.lib.stride_tricks.sliding_window_view(memory(numbers("f8", (200,))), 50)
    np.testing.assert_array_equal(on_host(views(a, 40).to_backend("cupy") + 1), a + 1)


def test_a_block_that_some_read_on_the_host(s):
    a = numbers()
    x = da.from_array(a, chunks=60)
    on_device, there = x.to_backend("cupy").sum(), (x + 1).sum()
    got = dask.compute(on_device, there)
    assert float(got[0]) == a.sum()
    assert float(got[1]) == (a + 1).sum()


def test_persisted(s, memory):
    a = memory(numbers())
    p, before = from_host(a, 60).persist(), a.copy()
    a[...] = 7  # it is read when `persist` returns, wherever it is
    assert s._persisted.nbytes() == {0: a.nbytes // 2, 1: a.nbytes // 2}
    np.testing.assert_array_equal(on_host(p + 1), before + 1)


def test_little_memory(memory):
    """Blocks that have to leave are dropped, and sent again."""
    a = memory(numbers())
    block = 60 * 60 * 4
    with gpuscheduler.Scheduler(devices="cuda:0,0", memory_limit=7 * block, check=True) as s:
        x = from_host(a, 60)
        y = x + x.T
        for _ in range(2):
            np.testing.assert_array_equal(on_host(y), a + a.T)
            assert max(n for d, n in s.last.peak.items() if d >= 0) <= 7 * block
            assert s.last.spilled[-1] == 0


def test_results_that_do_not_fit(memory):
    """Blocks that are asked for are not dropped, but leave for the host."""
    a = memory(numbers())
    with gpuscheduler.Scheduler(devices="cuda:0,0", memory_limit=5 * 60 * 60 * 4, check=True) as s:
        p = from_host(a, 60).persist()
        np.testing.assert_array_equal(on_host(p + 1), a + 1)
        assert max(n for d, n in s._persisted.nbytes().items() if d >= 0) <= 5 * 60 * 60 * 4
        blocks = dask.compute(*from_host(a, 60).to_delayed().ravel())
        assert all(type(b) is cupy.ndarray for b in blocks)
        np.testing.assert_array_equal(blocks[-1].get(), a[180:, 180:])


@pytest.mark.parametrize("kind", ["memmap", "zarr", "h5py"])
def test_files(s, tmp_path, kind):
    a = numbers("f8")
    if kind == "memmap":
        np.save(tmp_path / "a.npy", a)
        source = np.load(tmp_path / "a.npy", mmap_mode="r")
    elif kind == "zarr":
        zarr = pytest.importorskip("zarr")
        source = zarr.open(str(tmp_path / "a.zarr"), mode="w", shape=a.shape, chunks=60, dtype="f8")
        source[...] = a
    else:
        file = pytest.importorskip("h5py").File(tmp_path / "a.h5", "w")
        source = file.create_dataset("a", data=a)
    x = da.from_array(source, chunks=60).to_backend("cupy")
    y = (x * 2 + 1).sum(axis=0)
    assert len(sent_steps(s, y)) == 16
    np.testing.assert_array_equal(on_host(y), (a * 2 + 1).sum(axis=0))
    np.testing.assert_array_equal(on_host(x), a)


def test_an_array_that_is_changed_by_what_is_made_of_it(s):
    a = numbers("f8")
    x = from_host(a, 60)
    expected = a * 2
    da.store((x * 2).to_backend("numpy"), a, lock=False)
    np.testing.assert_array_equal(a, expected)


def test_where_the_readers_are(s):
    a = numbers()
    with dask.annotate(device=1):
        x = from_host(a, 60) + 1
    assert {step.place for step in s.plan(x).steps} == {1}
    np.testing.assert_array_equal(on_host(x), a + 1)


def test_callbacks_see_tasks_as_they_are(s):
    a = numbers("f8")
    with_callback = []
    with dask.callbacks.Callback(pretask=lambda key, *_: with_callback.append(key)):
        np.testing.assert_array_equal(on_host(from_host(a, 60) + 1), a + 1)
    assert with_callback
    assert not any("-sent" in str(key) for key in with_callback)


def test_memory_that_the_allocator_refuses(s, monkeypatch):
    a = numbers("f8")
    real, refused = cupy.empty, []

    def empty(*args, **kwargs):
        if len(refused) < 3 and cupy.cuda.get_current_stream().ptr in incoming:
            refused.append(1)
            raise cupy.cuda.memory.OutOfMemoryError(8, 0)
        return real(*args, **kwargs)

    (team,) = s.hardware._teams[2].idle if s.hardware._teams else (None,)
    if team is None:
        (from_host(a, 60) + 1).persist()
        (team,) = s.hardware._teams[2].idle
    incoming = {lane.incoming.ptr for lane in team.lanes}
    monkeypatch.setattr(cupy, "empty", empty)
    np.testing.assert_array_equal(on_host(from_host(a, 60) + 1), a + 1)
    assert refused


def test_few_threads_send_what_is_pinned(s, memory, request, monkeypatch):
    """All that they do is launch. The first run finds out."""
    x, send, most = from_host(memory(numbers()), 60), Team.send_to_any, []

    def sending(team, job, argument, place=None, threads=None):
        most.append(threads)
        return send(team, job, argument, place, threads)

    (x + 1).sum().compute()
    monkeypatch.setattr(Team, "send_to_any", sending)
    (x + 1).sum().compute()
    pinned = request.node.callspec.params["memory"] == "pinned"
    assert most == [file_steps.FEWEST_FILES if pinned else None] * 16


def test_what_the_driver_refuses_is_said_and_nothing_is_lost(s, monkeypatch):
    """Of one block of an array, on its way."""
    monkeypatch.setattr(staging, "LEAST_BYTES", 1)
    monkeypatch.setattr(staging, "LEAST_ROWS", 1)
    a = numbers()
    x = from_host(a, (60, -1))
    send, calls = staging.send, []

    def refusing(*args):
        calls.append(args)
        return 1 if len(calls) == 2 else send(*args)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "send", refusing)
        with pytest.raises(cupy.cuda.driver.CUDADriverError) as caught:
            (x * 2).sum().compute()
    assert "while running" in caught.value.__notes__[0]
    np.testing.assert_array_equal(on_host(x * 2), a * 2)
    pieces = s.hardware.pieces[0]
    assert pieces.made == pieces._free.qsize() > 0
