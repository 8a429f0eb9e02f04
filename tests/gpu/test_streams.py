"""The order of a run's work and its caller's, whichever devices and streams either uses.

Also values that tasks and graphs have on other devices than their own. The stand-in finds what is
not ordered; on GPUs, arrays are made behind work that takes a while.
"""

import functools
import importlib
import inspect
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from cupy.cuda import Device, Stream, runtime
from dask._task_spec import DataNode
from dask.delayed import Delayed

import gpuscheduler
from gpuscheduler.devices.choose import cuda_devices
from gpuscheduler.devices.cuda import (
    arrays,
    caller_order,
    copies,
    hardware,
)
from gpuscheduler.errors import OutOfMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    # CuPy's words where a function reads an array of another GPU: it may, and is slower
    pytest.mark.filterwarnings("ignore:The device where the array resides"),
]

STAND_IN = hasattr(cupy, "_device")
#: `GPUSCHEDULER_EXAMPLES=1000 pytest tests/gpu/test_streams.py` looks harder.
EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "40"))
N = 8 if STAND_IN else 1 << 22
WORK = 3 if STAND_IN else 200  # kernels before an array is there
REPEATS = 5
LAST = cuda_devices() - 1


def made(fill=1.0):
    """An array that is `fill` in the end, behind work that takes its device a while."""
    k = cupy.zeros(N)
    for _ in range(WORK):
        k += 1
    k *= fill / WORK
    return k


def host(value):
    return value.get() if isinstance(value, cupy.ndarray) else np.asarray(value)


def number(k, n=0):
    return float(cupy.asnumpy(k[-4:] + n).min())


class Holder:
    def __init__(self, k):
        self.k = k


CAPTURED = {
    "in a list": lambda k, n: dask.delayed(lambda v, n: number(v[0], n))([k], n),
    "in a dict": lambda k, n: dask.delayed(lambda v, n: number(v["k"], n))({"k": k}, n),
    "in a partial": lambda k, n: dask.delayed(functools.partial(number, k))(n),
    "in an attribute": lambda k, n: dask.delayed(lambda h, n: number(h.k, n))(Holder(k), n),
    "in a closure": lambda k, n: dask.delayed(lambda n: number(k, n))(n),
    "as an argument": lambda k, n: dask.delayed(number)(k, n),
    "as a block": lambda k, n: dask.delayed(number)(da.from_array(k, asarray=False), n),
}


class Streams:
    """The caller's own streams, one for each device, as the current ones."""

    def __init__(self, which=None):
        self.which = range(cuda_devices()) if which is None else which
        self.stack = ExitStack()

    def __enter__(self):
        here = runtime.getDevice()
        for d in self.which:
            runtime.setDevice(d)  # a stream is entered on its own device
            self.stack.enter_context(Stream(non_blocking=True))
        runtime.setDevice(here)

    def __exit__(self, *error):
        here = runtime.getDevice()
        for d in self.which:
            runtime.setDevice(d)
            runtime.deviceSynchronize()
        runtime.setDevice(here)
        self.stack.close()


def all_synchronized():
    for d in range(cuda_devices()):
        with Device(d):
            runtime.deviceSynchronize()


# ---- arrays that the caller makes, and tasks read


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own streams"])
@pytest.mark.parametrize("device", [0, LAST])
@pytest.mark.parametrize("way", CAPTURED)
def test_captured_array_is_read_when_it_is_made(way, device, own):
    """By tasks on every device, of which the run does not know what they read."""
    with gpuscheduler.Scheduler("cuda"), ExitStack() as stack:
        if own:
            stack.enter_context(Streams())
        for _ in range(REPEATS):
            with Device(device):
                k = made()
                tasks = [CAPTURED[way](k, n) for n in range(2 * cuda_devices())]
                got = dask.compute(*tasks)
            assert got == tuple(1.0 + n for n in range(len(tasks)))
            del k, tasks
            all_synchronized()


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own streams"])
@pytest.mark.parametrize("way", CAPTURED)
def test_captured_array_of_a_device_that_is_not_used(way, own):
    """The scheduler has no stream there; the caller has computed there and gone on elsewhere."""
    with gpuscheduler.Scheduler("cuda:0"), ExitStack() as stack:
        if own:
            stack.enter_context(Streams())
        for _ in range(REPEATS):
            with Device(LAST):
                k = made()
                task = CAPTURED[way](k, 1)
            assert dask.compute(task) == (2.0,)
            with Device(LAST):
                k.fill(-1)
            all_synchronized()


def test_device_without_a_context_is_left_alone(monkeypatch):
    """The caller can have no array there; to ask for its stream would make a context."""

    def state(device, flags, active):
        active._obj.value = device == LAST
        return 0

    with gpuscheduler.Scheduler("cuda:0") as s:
        monkeypatch.setattr(caller_order, "_context_state", lambda: state)
        assert s.hardware.in_use() == [0, LAST]
        assert [device for device, _ in s.hardware.callers_streams()] == [0, LAST]
        monkeypatch.setitem(hardware.LOST, LAST, "it does not answer")
        assert s.hardware.in_use() == [0]


@pytest.mark.real
def test_device_that_is_computed_on_has_a_context():
    cupy.zeros(1)
    assert caller_order._context_state() is not None
    assert caller_order.has_context(runtime.getDevice())


def test_captured_array_is_written_to_behind_the_tasks():
    with gpuscheduler.Scheduler("cuda"):
        x = da.ones((8, 8), chunks=4)
        k = made()[:1]
        lazy = x.map_blocks(lambda b: b + k, dtype="f8", meta=cupy.empty((0, 0)))
        for turn in range(REPEATS):
            k.fill(turn)
            (kept,) = dask.persist(lazy)
            k.fill(-1)
            assert float(kept.sum().compute()) == 64 * (turn + 1)


def test_captured_array_is_read_by_a_source():
    """In threads of their own, as whatever reads files."""

    class Source:
        shape, dtype, ndim = (32,), np.dtype("f8"), 1

        def __init__(self, k):
            self.k = k

        def __getitem__(self, where):
            return np.full(8, number(self.k))

    with gpuscheduler.Scheduler("cuda"), Streams():
        for _ in range(REPEATS):
            with Device(LAST):
                source = Source(made())
            x = da.from_array(source, chunks=8, asarray=False, meta=np.empty(0))
            np.testing.assert_array_equal(host(x.compute()), np.ones(32))
            all_synchronized()


@pytest.mark.filterwarnings("ignore:.*runs on the host:RuntimeWarning")
def test_captured_array_is_read_by_what_runs_on_the_host():
    def refused(n):
        if isinstance(k, cupy.ndarray):
            raise NotImplementedError("cupy has no such thing")
        return k[:4] + n

    with gpuscheduler.Scheduler("cuda"), Streams():
        for _ in range(REPEATS):
            with Device(LAST):
                k = made()
            got = dask.compute(*[dask.delayed(refused, pure=False)(n) for n in range(8)])
            assert [set(host(v).tolist()) for v in got] == [{1.0 + n} for n in range(8)]
            all_synchronized()


def test_array_of_the_host_that_another_thread_has_sent():
    """Its copy on a device is kept; that thread's stream may not have made it yet."""
    table, streams = np.arange(64.0), []
    with gpuscheduler.Scheduler("cuda") as s:

        def send():
            with Streams(), Device(LAST):
                streams.append(cupy.cuda.get_current_stream())
                s.hardware.device_copy(table, LAST)

        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        assert s.hardware.lent[LAST][streams[0].ptr] is streams[0]


# ---- what the caller does with results


@pytest.mark.parametrize("devices", ["cuda", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("form", ["whole", "blocks", "persisted", "sync", "another thread"])
def test_results_are_read_on_every_device(form, devices):
    """As soon as they are given, on streams of the caller's own, and let go of at once."""
    want = np.arange(64.0) * 2
    with gpuscheduler.Scheduler(devices), Streams():
        lazy = da.arange(64.0, chunks=16) * 2
        for turn in range(1, 2 * REPEATS):
            device = turn % cuda_devices()
            if form == "whole":
                every = whole_on(device, [lazy.compute()])
            elif form == "blocks":
                every = whole_on(device, list(dask.compute(*lazy.to_delayed().tolist())))
            else:
                kept = lazy.persist().to_delayed().tolist()
                if form == "another thread":
                    with ThreadPoolExecutor(1) as pool:
                        every = pool.submit(computed_there, device, kept).result()
                else:
                    scheduler = "sync" if form == "sync" else None
                    every = whole_on(device, list(dask.compute(*kept, scheduler=scheduler)))
                del kept
            np.testing.assert_array_equal(every, want)


def whole_on(device, blocks):
    """What blocks are, read on a device; they are let go of before."""
    with Device(device):
        got = [b * 1 for b in blocks]
        blocks.clear()
        return np.concatenate([host(b) for b in got])


def computed_there(device, kept):
    with Streams():
        return whole_on(device, list(dask.compute(*kept, scheduler="sync")))


# ---- values on other devices than their steps'


def total(values, n=0):
    return float(cupy.asnumpy(values).sum()) + n


def delayed_of_persisted(table):
    x = (da.from_array(table, chunks=8, asarray=False) + 1).persist()
    return [dask.delayed(total, pure=False)(x)]


def delayed_of_from_array(table):
    x = da.from_array(table, chunks=8, asarray=False).sum()
    return [dask.delayed(total, pure=False)(x, n) for n in range(3)]


def inlined(table):
    x = da.from_array(table, chunks=(5, 7), asarray=False, inline_array=True)
    return [x + x.T, (x @ x)[::3]]


def part_of_a_table(table):
    x = da.ones(32, chunks=8)
    x = x.map_blocks(lambda b: table[0, : b.shape[0]], dtype="f8", meta=cupy.empty(0))
    return [x + x[::-1]]


def part_with_gaps(table):
    x = da.ones(32, chunks=8)
    x = x.map_blocks(lambda b: table[::2, 1], dtype="f8", meta=cupy.empty(0))
    return [x + x[::-1], x]


def several_parts(table):
    def both(n):
        return {"a": table[n], "b": (table.T[n], n)}

    def added(first, second):
        return first["a"] + second["b"][0] + second["b"][1]

    parts = [dask.delayed(both)(n) for n in range(8)]
    return [dask.delayed(added)(parts[n], parts[-1 - n]) for n in range(8)]


def made_elsewhere(table):
    def elsewhere(n):
        with Device((runtime.getDevice() + 1) % cuda_devices()):
            return cupy.full(16, n)

    parts = [dask.delayed(elsewhere)(n) for n in range(8)]
    added = [dask.delayed(lambda a, b: a + b)(parts[n], parts[-1 - n]) for n in range(8)]
    return added + [dask.delayed(lambda a: a * 2)(p) for p in parts]


def given(value):
    """A value of a graph, as it is."""
    name = f"given-{id(value)}"
    return Delayed(name, {name: DataNode(name, value)})


def list_of_several_devices(table):
    with Device(LAST):
        other = cupy.full((16, 16), 3.0)
        runtime.deviceSynchronize()
    both = given([table, other])
    add = dask.delayed(lambda v, n: v[0][n] + v[1][n] + n)
    return [add(v, n) for v in (both, [table, other]) for n in range(4)]


def the_graphs_own(table):
    """Also where it is given to a graph as it is, on a device that no device string names."""
    dsk = {("a", n, 0): table[n * 4 : n * 4 + 4] for n in range(4)}
    x = da.Array(dsk, "a", ((4,) * 4, (16,)), meta=table[:0, :0])
    return [x + x[::-1], (x * 2).sum(axis=1)]


ELSEWHERE = [
    delayed_of_persisted, delayed_of_from_array, inlined, part_of_a_table, part_with_gaps,
    several_parts, made_elsewhere, list_of_several_devices, the_graphs_own,
]  # fmt: skip


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,1", "cuda:1", "cuda:1,0,1"])
@pytest.mark.parametrize("make", ELSEWHERE, ids=lambda f: f.__name__)
def test_array_of_another_gpu_is_a_tasks_value(make, devices, fuse):
    table = cupy.arange(256.0).reshape(16, 16)
    all_synchronized()
    with gpuscheduler.Scheduler(devices, fuse=fuse, check=True):
        every = make(table)
        want = [7] * 8 + [2 * n for n in range(8)]
        for _ in range(3):
            got = dask.compute(*every)
            if make is not made_elsewhere:  # CuPy by itself would not order that
                want = dask.compute(*every, scheduler="sync")
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(host(a), host(b))
            all_synchronized()
        (kept,) = dask.persist(every[0])
        np.testing.assert_allclose(host(kept.compute()), host(want[0]))


@pytest.mark.parametrize("form", ["argument", "value", "made"])
def test_array_of_another_gpu_that_is_too_large_for_this_one(form, monkeypatch):
    """It is an argument of a single task, in a value of the graph, or what a task has made."""
    with Device(1):
        table = cupy.arange(2.0**16)
        runtime.deviceSynchronize()
    moved, left = copies.copy_to_device, [100]

    def refuse(v, device, stream):
        if not isinstance(v, cupy.ndarray) or v.device.id == device:
            return v
        if not left[0]:
            return moved(v, device, stream)
        left[0] -= 1
        raise arrays.Refused(v.nbytes, 0, 0)

    monkeypatch.setattr(copies, "copy_to_device", refuse)
    with gpuscheduler.Scheduler("cuda:0"):
        here = cupy.zeros(1)
        if form == "argument":
            lazy = da.Array({("a", 0): table}, "a", ((2**16,),), meta=table[:0]) * 2
        elif form == "value":
            lazy = dask.delayed(lambda v: v[1] * 2)(given([here, table]))
        else:
            lazy = dask.delayed(lambda v: v * 2)(dask.delayed(lambda: table)())
        said = (
            "another GPU.*has no room for a copy.*: use"
            if form == "value"
            else "refused .* free it, use"
        )
        with pytest.raises(OutOfMemory, match=f"{said} smaller chunks"):
            lazy.compute()
        left[0] = form != "value"  # once is not for ever
        np.testing.assert_array_equal(host(lazy.compute()), np.arange(2.0**16) * 2)


def test_chunks_of_another_scheduler():
    """Its GPUs are other ones."""
    with gpuscheduler.Scheduler("cuda:1") as first:
        kept = (da.arange(64.0, chunks=16) * 2).persist()
        with gpuscheduler.Scheduler("cuda:0") as second:
            assert first.hardware.ids != second.hardware.ids
            for _ in range(3):
                np.testing.assert_array_equal(host((kept + 1).compute()), np.arange(64) * 2 + 1.0)
                assert float(dask.delayed(total)(kept).compute()) == 64 * 63


# ---- any program


class Program:
    """A random one, of which every array is on a random device, and every stream the caller's."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def choose(self, *some):
        return self.random.choice(some)

    def device(self):
        return self.random.randrange(cuda_devices())

    def devices(self):
        two = f"cuda:{','.join(map(str, self.random.sample(range(cuda_devices()), 2)))}"
        return self.choose("cuda", "cuda:0", "cuda:1", "cuda:1,1", two)

    def table(self):
        """An array of the caller's, which is in the making, and what it will be."""
        fill = float(self.random.randrange(1, 9))
        with Device(self.device()):
            k = made(fill)
        return k, fill

    def value(self, k, fill, n):
        """A task that has some array of a device as its value, and how much each element is."""
        there = self.device()

        def elsewhere(n):
            with Device(there):
                return cupy.full(4, float(n))

        holder, cell = Holder(k), [k]
        make, each = self.choose(
            (lambda n: k, fill),
            (lambda n: k[1:5], fill),
            (lambda n: k[::2], fill),
            (lambda n: (k, {"k": k[:3]})[1]["k"], fill),
            (lambda n: holder.k[:4] * n, fill * n),
            (lambda n: cell[0][:4] + n, fill + n),
            (elsewhere, n),
        )
        task = dask.delayed(make, pure=False)
        if self.random.random() < 0.3:
            with dask.annotate(device=0):
                return task(n), each
        return task(n), each

    def block(self, k, fill):
        """The same as blocks of an array."""
        how = self.choose("given", "inlined", "captured", "persisted")
        if how == "captured":
            x = da.ones(12, chunks=4)
            meta = cupy.empty(0)
            return x.map_blocks(lambda b: k[: len(b)], dtype="f8", meta=meta), fill
        with k.device:  # Dask copies it, on the current one
            x = da.from_array(k[:16], chunks=4, asarray=False, inline_array=how == "inlined")
        return (x.persist() if how == "persisted" else x), fill

    def run(self):
        fuse = self.choose(True, False)
        with gpuscheduler.Scheduler(self.devices(), fuse=fuse, check=True), ExitStack() as stack:
            if self.random.random() < 0.7:
                own = [d for d in range(cuda_devices()) if self.random.random() < 0.6]
                stack.enter_context(Streams(own))
            for _ in range(3):
                self.turn()

    def turn(self):
        tables = [self.table() for _ in range(2)]
        lazy, want = [], []
        for n in range(1, 6):
            a, b = self.value(*self.choose(*tables), n), self.value(*self.choose(*tables), n)
            kind = self.choose("alone", "both", "block", "number")
            if kind == "alone":
                lazy.append(a[0])
                want.append(a[1])
            elif kind == "both":
                lazy.append(dask.delayed(lambda a, b: a[:2] + b[:2], pure=False)(a[0], b[0]))
                want.append(a[1] + b[1])
            elif kind == "number":
                lazy.append(dask.delayed(lambda a: float(host(a[:2])[0]), pure=False)(a[0]))
                want.append(a[1])
            else:
                x, each = self.block(*self.choose(*tables))
                lazy.append(x[::-1] + x)
                want.append(2 * each)
        # Dask gives arrays behind other values, whatever the order in which they are asked for
        order = sorted(range(len(lazy)), key=lambda n: isinstance(lazy[n], da.Array))
        lazy, want = ([every[n] for n in order] for every in (lazy, want))
        with Device(self.device()):
            got = dask.compute(*lazy)
        results = []
        with Device(self.device()):
            for value in got:
                results.append(value * 1)
        same = {id(t) for t, _ in tables}
        aliases = any(id(v) in same for v in got)
        del got
        all_synchronized()  # `get` copies on the current stream of the current device
        with Device(self.device()):
            results = [host(r) for r in results]
        for result, each in zip(results, want, strict=True):
            np.testing.assert_allclose(result, np.full(result.shape, each))
        if not aliases:  # of which the copies above may still be read
            for k, _ in tables:
                with k.device:
                    k.fill(-1)


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_any_program_on_any_devices_and_streams(seed):
    Program(seed).run()


# ---- Dask's own tests


CUPY_PERCENTILES = importlib.import_module("dask.array.tests.test_cupy_percentile")


@pytest.mark.parametrize("devices", ["cuda", "cuda:0,1"])
@pytest.mark.parametrize(
    "name", [n for n in vars(CUPY_PERCENTILES) if n.startswith("test_percentile")]
)
def test_percentiles_of_dask_read_what_they_make_in_order(name, devices):
    """Each captures an array that it has just made, the percentages."""
    test = getattr(CUPY_PERCENTILES, name)
    if STAND_IN and "default_rng" in inspect.getsource(test):
        pytest.skip("the stand-in has no random numbers")
    with gpuscheduler.Scheduler(devices):
        for arguments in _cases(test) * REPEATS:
            test(**arguments)


def _cases(test):
    """What Dask's test is called with."""
    marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    if not inspect.signature(test).parameters:
        return [{}]
    (mark,) = marks
    names, values = mark.args
    return [{names: value} for value in values]


def test_leaving_a_stream_makes_the_one_entered_before_current():
    """Whatever stream was used meanwhile: so a task's stream is looked at right behind the task."""
    entered, used, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    with entered:
        used.use()
        with other:
            assert cupy.cuda.get_current_stream() == other
        assert cupy.cuda.get_current_stream() == entered


class OwnStreams:
    """A source that reads on streams of its own, which nobody else has."""

    shape, dtype, ndim = (64, 64), np.dtype("f8"), 2
    data = np.random.default_rng(5).random(shape)

    def __getitem__(self, where):
        return double_on_own_stream(self.data[where])


def double_on_own_stream(block):
    """Of which what is sent goes back to the stream's pool while a kernel reads it."""
    Stream(non_blocking=True).use()
    sent = cupy.asarray(block)
    return (sent + sent)[:, ::-1] + 0


def refuse_and_double(block):
    """Which CuPy refuses, and the host computes."""
    return double_on_own_stream(np.random.default_rng(0).permuted(block[None], axis=0)[0])


@pytest.mark.filterwarnings("ignore:.*runs on the host:RuntimeWarning")
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0", "cuda:0,1"])
@pytest.mark.parametrize("made", ["task", "refused", "source"])
def test_streams_that_tasks_leave_to_nobody(made, devices):
    """CUDA gives their handles to the next ones at once, and CuPy's pool their memory."""
    if "1" in devices and runtime.getDeviceCount() < 2:
        pytest.skip("it takes two devices")
    a, meta = OwnStreams.data, cupy.empty((0, 0))
    want = np.concatenate([2 * a[:, n : n + 16][:, ::-1] for n in range(0, 64, 16)], axis=1)
    with gpuscheduler.Scheduler(devices):
        x = da.from_array(a, chunks=(8, 16))
        if made == "task":
            y = x.map_blocks(double_on_own_stream, meta=meta)
        elif made == "refused":
            x = x.map_blocks(cupy.asarray, meta=meta).persist()
            y = x.map_blocks(refuse_and_double, meta=meta)
        else:
            y = da.from_array(OwnStreams(), chunks=(8, 16), asarray=False, meta=meta)
        y, want = (y * 3).sum(axis=1), (want * 3).sum(axis=1)
        for _ in range(4):
            np.testing.assert_allclose(cupy.asnumpy(y.compute()), want, rtol=1e-13)
