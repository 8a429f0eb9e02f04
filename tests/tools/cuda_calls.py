"""Write down each CUDA call of many programs on the stand-in, to compare two versions of the code.

    PYTHONPATH=tests/support/fake_cuda:. python tests/tools/cuda_calls.py calls.txt [--only WORD]

Two runs of one version give the same file. A change that only moves code gives the same file, too:

    git worktree add ../before main && cd ../before && ... cuda_calls.py ../before.txt
    diff before.txt calls.txt

Have both trees at one path in turn, by a symbolic link: Dask's tokens have the names of files.
Where a program differs, look at it with --only in both: threads of earlier ones may have read the
clock.

Streams, events and memory have numbers in the order in which a program makes them. To be
repeatable, one thread works at a time: where the loop waits, a random worker does its next job, as
the seed of the program draws. A clock that counts its readings takes the place of time.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})


class Clock:
    """Seconds that pass by being read."""

    def __init__(self):
        self.now, self.tick = 0, 1000  # ns

    def nanoseconds(self):
        self.now += self.tick
        return self.now

    def seconds(self):
        return self.nanoseconds() / 1e9


clock = Clock()
real_monotonic = time.monotonic
if __name__ == "__main__":  # before others import what the clock says
    time.perf_counter = time.monotonic = clock.seconds
    time.perf_counter_ns = time.monotonic_ns = clock.nanoseconds

import cupy
import dask
import dask.array as da
import numpy as np
from cupy import _device as fake
from cupy.cuda import cublas, runtime
from dask import delayed
from dask.callbacks import Callback

from gpuscheduler.runtime import threads

# ---- one thread at a time

#: Seconds that a job may take before the tool gives up.
PATIENCE = 20


class Turns:
    """Whose turn it is: the loop's thread gives one worker a turn for one job."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.desks = []
        self.over = False

    def join(self, desk):
        desk.go, desk.back, desk.runs = threading.Semaphore(0), threading.Semaphore(0), False
        self.desks.append(desk)

    def ready(self):
        return [d for d in self.desks if not d.runs and (not d.inbox.empty() or _has_idle_work(d))]

    def give(self):
        """Let a worker do one job; False where none has any."""
        ready = self.ready()
        if ready:
            self.give_to(self.rng.choice(ready))
        return bool(ready)

    def give_to(self, desk):
        desk.runs = True
        desk.go.release()
        assert desk.back.acquire(timeout=PATIENCE), "a job waits for another one"
        desk.runs = False

    def end(self):
        """Let all threads run from now on."""
        self.over = True
        for desk in list(self.desks):
            desk.go.release()


def _has_idle_work(desk):
    return desk.idle is not None and bool(desk.idle.__self__.queued)


turns = Turns(0)
_make_worker, _make_desk = threads.Worker.__init__, threads._WorkerContext.__init__


def _begin_worker(self, *args):
    _make_worker(self, *args)
    desk, join = self._desk, self.thread.join
    desk.thread = self.thread

    def give_turns(timeout=None):
        """A thread that is waited for has its turns before."""
        while not desk.turns.over and desk in desk.turns.desks and not desk.inbox.empty():
            desk.turns.give_to(desk)
        join(timeout)

    self.thread.join = give_turns


def _begin_desk(self, *args):
    _make_desk(self, *args)
    self.turns = turns
    turns.join(self)


def _work(self):
    """`_WorkerContext.work`, a job each time that it is this thread's turn."""
    turns = self.turns
    self.go.acquire()
    if self.setup is not None:
        self.setup()
    while True:
        if not self.inbox.empty() or self.turns.over:
            if self.turns.over and self.idle is not None:
                while self.inbox.empty() and self.idle():
                    pass
            item = self.inbox.get()
            if item is None:
                break
            context, job, argument, raised = item
            try:
                context.run(job, argument)
            except BaseException as error:
                if raised is not None:
                    raised.append(threads.add_note(error, threads.BUG))
            finally:
                del item, context, job, argument, raised
                self.finished += 1
        elif self.idle is not None:
            self.idle()
        if not self.turns.over:
            self.back.release()
            self.go.acquire()
    if self.teardown is not None:
        self.teardown()
    turns.desks.remove(self)  # a worker that nobody has any more is told to stop, again
    self.back.release()


def _wait_for_events(self, team):
    out = []
    while not out:
        if not self.empty():
            for _ in range(turns.rng.choice((0, 0, 1, 4))):
                turns.give()
            out = self.take_pending()
            break
        if team.raised:
            raise team.raised.pop() from None
        assert turns.give(), "the loop waits, and nobody works"
    return out


def _wait_until_idle(team, seconds):
    """An earlier run has been cleared away, or not yet."""
    if turns.rng.random() < 0.7:
        while turns.give():
            pass
    return not team.is_busy


threads.Worker.__init__ = _begin_worker
threads._WorkerContext.__init__ = _begin_desk
threads._WorkerContext.work = _work
threads.EventQueue.wait = _wait_for_events
threads.Team.wait_until_idle = _wait_until_idle

import gpuscheduler
from gpuscheduler.devices.cuda import result_rooms
from gpuscheduler.frontend import transfers as frontend_transfers
from graphs._blocks import views
from tests.fusion import test_fusion_properties as properties
from tests.support.host_kernels import kernels_on_host

# ---- the calls


class Log:
    """The lines of one program."""

    def __init__(self):
        self.lines, self.numbers, self.on = [], {}, False
        self.counts = {"event": itertools.count(), "memory": itertools.count()}

    def begin(self):
        self.lines, self.numbers, self.on = [], {}, True

    def name(self, kind, thing):
        """A thing's name; things of a kind are counted as they are met."""
        mine = self.numbers.setdefault(kind, {})
        return f"{kind}{mine.setdefault(thing, len(mine))}"

    def stream(self, stream):
        return f"{self.name('stream', stream.number)}@{stream.device_id}"

    def event(self, event):
        if not hasattr(event, "_name"):
            event._name = next(self.counts["event"])
        return self.name("event", event._name)

    def memory(self, memory):
        if not hasattr(memory, "_name"):
            memory._name = next(self.counts["memory"])
        return self.name("memory" if memory.device >= 0 else "pinned", memory._name)

    def address(self, address):
        memory = fake.memory_at(address)
        return "host" if memory is None else f"{self.memory(memory)}+{address - memory.ptr}"

    def word(self, word):
        """An argument of a kernel: where it is an address, one that other processes would have."""
        if fake.memory_at(word) is not None:
            return self.address(word)
        return "beside" if 2**40 < word < 2**48 else word  # from where an index begins at -1

    def __call__(self, *words):
        if self.on:
            self.lines.append(f"{threading.current_thread().name}: {' '.join(map(str, words))}")


log = Log()


def patched(owner, name, words, after=False):
    """Log each call of a function, before it is made, or after with what it returns."""
    real = getattr(owner, name)

    def called(*args, **kwargs):
        if not after:
            log(*words(*args, **kwargs))
            return real(*args, **kwargs)
        result = real(*args, **kwargs)
        log(*words(result, *args, **kwargs))
        return result

    setattr(owner, name, called)


def patch_calls(host):
    """Log what the stand-in is called for."""
    s, e, m, a = log.stream, log.event, log.memory, log.address
    stream, event, memory = fake.Stream, fake.Event, fake.Memory
    patched(stream, "__init__", lambda r, x, *args, **k: ("make", s(x), args, k), True)
    patched(stream, "use", lambda x: ("use", s(x)))
    patched(stream, "__enter__", lambda x: ("enter", s(x)))
    patched(stream, "__exit__", lambda x, *_: ("exit", s(x)))
    patched(stream, "wait_event", lambda x, y: ("wait", s(x), e(y)))
    patched(event, "__init__", lambda r, x, *args, **k: ("make", e(x), args, k), True)
    patched(event, "record", lambda x, y=None: ("record", e(x), s(y or fake.current_stream())))
    for kind, name in ((stream, s), (event, e)):
        done = fake.Timed.done.fget

        def look(x, done=done, name=name):
            found = done(x)
            log("done?", name(x), found)
            return found

        kind.done = property(look)
        kind.synchronize = fake.Timed.synchronize
        patched(kind, "synchronize", lambda x, name=name: ("synchronize", name(x)))
    patched(memory, "read", lambda x, y: ("read", m(x), s(y)))
    patched(memory, "write", lambda x, y: ("write", m(x), s(y)))

    def allocate(result, pool, nbytes):
        of = log.name("stream", result.memory.stream)
        return "allocate", pool.device, nbytes, m(result.memory), of

    patched(fake.Pool, "allocate", allocate, after=True)
    patched(fake.Pool, "back", lambda p, x, n: ("free", p.device, n, m(x)))
    patched(fake.Pool, "free_all_blocks", lambda p: ("free all blocks", p.device))
    patched(fake.PinnedMemory, "__init__", lambda r, x, n, *_: ("pin", n, m(x.memory)), True)
    patched(runtime, "setDevice", lambda d: ("device", d))
    patched(runtime, "deviceSynchronize", lambda: ("synchronize", fake.here.device))
    patched(runtime, "hostRegister", lambda p, n, f: ("register", n))

    def by(pointer):
        return s(runtime._stream(pointer) if pointer else fake.null())

    def copy(to, source, nbytes, kind, x):
        return "copy", a(to), a(source), nbytes, kind, by(x)

    def copy_to_peer(to, device, source, other, nbytes, x):
        return "copy to peer", a(to), device, a(source), other, nbytes, by(x)

    def copy_rows(to, pitch, source, source_pitch, width, rows, kind, x):
        return "copy rows", a(to), pitch, a(source), source_pitch, width, rows, kind, by(x)

    patched(runtime, "memcpyAsync", copy)
    patched(runtime, "memcpyPeerAsync", copy_to_peer)
    patched(runtime, "memcpy2DAsync", copy_rows)
    patched(runtime, "memcpy3DAsync", lambda p, x: ("copy planes", by(x)))
    patched(runtime, "memsetAsync", lambda to, v, n, x: ("set", a(to), v, n, by(x)))
    patched(cublas, "create", lambda: ("create cuBLAS",))
    patched(cublas, "destroy", lambda h: ("destroy cuBLAS",))

    def multiply(name, handle, *args):
        return name, args[:5], a(args[6]), a(args[8]), a(args[11])

    for name in ("sgemm", "dgemm", "cgemm", "zgemm"):
        patched(cublas, name, partial(multiply, name))

    def launch(made, items, blocks, count, one):
        return "launch", _digest(made.source), blocks, made.threads, count, one, *map(
            log.word, items[:count].ravel().tolist()
        )  # fmt: skip

    patched(host, "launched", launch)


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- the programs

SIDE, BLOCKS = 64, 4
X = np.random.default_rng(0).random((SIDE, SIDE))
NAMES = [
    "black_scholes", "gauss_sum", "heat_stencil", "hillshade", "logistic_step", "matmul",
    "random_slice_sum", "standardize", "tall_skinny_svd", "transpose_sum",
]  # fmt: skip
DEVICES = ["cuda:0", "cuda:0,0", "cuda:0,1"]


def on_gpu(values, chunks=SIDE // BLOCKS):
    return da.from_array(values, chunks=chunks).map_blocks(cupy.asarray)


def sent(values, chunks=SIDE // BLOCKS):
    """An array of the host, which the scheduler sends."""
    return views(values, (chunks,) * values.ndim).to_backend("cupy")


def given(values, name, chunks=SIDE // BLOCKS):
    """An array whose blocks are in the graph, and views of one array of a device."""
    chunks = da.core.normalize_chunks(chunks, values.shape)
    keys = itertools.product([name], *map(range, map(len, chunks)))
    blocks = dict(
        zip(keys, map(values.__getitem__, da.core.slices_from_chunks(chunks)), strict=True)
    )
    return da.Array(blocks, name, chunks, meta=values[:0, :0])


@contextmanager
def constants(**values):
    """Other values for constants of the modules for GPUs, wherever these are."""
    before = []
    for name, module in list(sys.modules.items()):
        for constant in values if name.startswith("gpuscheduler.devices.cuda.") else ():
            if hasattr(module, constant):
                before.append((module, constant, getattr(module, constant)))
                setattr(module, constant, values[constant])
    try:
        yield
    finally:
        for module, constant, value in before:
            setattr(module, constant, value)


def workload(name, devices, **options):
    """A workload of `graphs`: once, again by its plan, and by its launch tape."""
    module = __import__(f"graphs.{name}", fromlist=["build"])
    with scheduler(devices, **options):
        x = module.build(module.SMALL, xp="cupy")
        for _ in range(4):
            dask.compute(x)


def expression(seed, devices, **options):
    """Any expression, by Hypothesis."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as of_seed
    from hypothesis import strategies as st

    drawn = []

    @of_seed(seed)
    @settings(max_examples=4, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def draw(data):
        drawn.append(data.draw(properties.expressions()))

    def to_gpu(values, chunks):
        meta = cupy.zeros((0,) * values.ndim, values.dtype)
        return da.from_array(values, chunks=chunks).map_blocks(cupy.asarray, meta=meta)

    before = properties.KINDS, properties.from_values
    properties.KINDS, properties.from_values = ["array"], to_gpu
    try:
        draw()
        with scheduler(devices, fuse_least=0, **options):
            for arrays in drawn:
                for _ in range(3):
                    try:
                        dask.compute(*arrays)
                    except Exception as error:
                        log("failed", type(error).__name__)
    finally:
        properties.KINDS, properties.from_values = before


def history(seed, devices):
    """Arrays that are persisted, computed and changed, in any order."""
    from tests.pipeline.test_histories import History, options

    mine = History(seed, cupy.asarray, cupy.asnumpy)
    with scheduler(devices, **options(seed)):
        for _ in range(20):
            mine.step()


def spilling(devices, blocks, host_blocks, folder, **options):
    """Values that leave devices, for the host and the disk, and come back; sources in files."""
    file = Path(folder, "x.npy")
    np.save(file, X)
    block = X.nbytes // BLOCKS**2
    options = {"memory_limit": blocks * block, "fuse": False, "check": True, **options}
    with scheduler(devices, spill_directory=str(folder), **options) as s:
        machine = s.hardware.machine
        s.hardware.machine = replace(machine, host_memory=host_blocks * block)
        x = on_gpu(np.load(file, mmap_mode="r"))
        y = da.from_array(X, chunks=SIDE // BLOCKS).to_backend("cupy")
        b = ((x + y) / 2 - 0.5).persist()
        for _ in range(2):
            dask.compute((b @ b.T).sum(), (b + b.T).to_backend("numpy"))
        da.exp(b).sum(axis=0).compute()
        file_and_host = on_gpu(np.load(file, mmap_mode="r")) + sent(X)
        file_and_host.sum(axis=0).compute()
        results = dask.compute(*(b + 1).to_delayed().ravel(), *file_and_host.to_delayed().ravel())
        log("results", sum(float(r.sum()) for r in results))


def refusals(devices):
    """An allocator that refuses memory."""
    with scheduler(devices, fuse=False):
        x = on_gpu(X)
        x.sum().compute()
        pool = cupy.get_default_memory_pool()
        pool.set_limit(16 * X.nbytes // BLOCKS**2 + 2**14)
        try:
            for _ in range(2):
                try:
                    (x @ x.T + x).sum(axis=0).compute()
                except Exception as error:
                    log("failed", type(error).__name__)
        finally:
            pool.set_limit(0)
        x.mean().compute()


def on_host(devices):
    """What CuPy refuses: tasks with arrays of NumPy's, and tasks of the host."""

    def refused(block):
        return np.random.default_rng(0).permuted(block[..., None], axis=-1)[..., 0]

    weights = np.arange(SIDE // BLOCKS) + 1.0
    meta = cupy.empty((0, 0))
    with scheduler(devices):
        x = on_gpu(X)
        y = da.map_blocks(refused, x, dtype="f8", meta=meta)
        z = da.map_blocks(lambda b: np.multiply(b, weights), y, dtype="f8", meta=meta)
        for _ in range(3):
            dask.compute(z.sum(axis=0), y + x.T)


def faults(devices):
    """A task that fails, values on other devices, results that other threads read, callbacks."""

    def fails(block):
        raise ValueError("on purpose")

    with scheduler(devices):
        x = on_gpu(X)
        for _ in range(2):
            try:
                x.map_blocks(fails, dtype="f8", meta=cupy.empty((0, 0))).sum().compute()
            except ValueError:
                log("failed")
        with Callback(posttask=lambda *_: None):
            (x + 1).sum(axis=1).compute()
        with dask.annotate(device=0):
            made = delayed(lambda: (cupy.arange(200.0), {"a": cupy.ones((20, 20)).T[::2]}))()
        with dask.annotate(device=len(devices.split(",")) - 1):
            used = delayed(lambda v: v[0].sum() + v[1]["a"].sum())(made)
        for _ in range(2):
            dask.compute(used, made)
        with cupy.cuda.Device(1):
            elsewhere = cupy.ones((SIDE, SIDE))
            w = da.from_array(elsewhere, chunks=SIDE // 2, asarray=False)
        for _ in range(3):
            (w + 1).compute()
        small = on_gpu(X, 4)
        for _ in range(3):
            dask.compute(small.sum(axis=0), small + 1, small.max())
        (small.to_backend("numpy") + 1).compute()


def tapes(devices):
    """Kernels alone: runs that end ahead of them, that wait for them, and that cross much."""
    with scheduler(devices) as s:
        x = given(cupy.asarray(X), "x")
        y = on_gpu(X).persist()
        for crossed in (2**26, 0):
            with constants(CROSSED=crossed, SPIN=1e-4):
                for z in (x + x.T, (y @ y.T).sum(axis=0), y - y.mean(axis=0)):
                    for _ in range(5):
                        dask.compute(z * (2 + crossed))
                    for _ in range(3):
                        dask.compute((z * (3 + crossed)).to_backend("numpy"))
        s.hardware.staged = {(a, b) for a in range(3) for b in range(3) if a != b}
        for _ in range(4):
            dask.compute(y + y.T, (y @ y).sum())


def streams(devices):
    """Tasks that choose streams and devices, and values that lie elsewhere or in parts."""

    def own_stream():
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        return stream

    def chooses(block):
        own_stream().use()
        return block * 2

    def enters(block):
        with own_stream() as stream:
            out = block.T + 1
        cupy.cuda.get_current_stream().wait_event(stream.record())
        return out

    def part(block):
        return cupy.zeros((2**20,))[: len(block)].reshape(1, -1) + 0 * block[:1, :1]

    def small_part(block):
        return cupy.zeros((2**20,))[: len(block)].reshape(1, -1)

    with scheduler(devices):
        x, meta = on_gpu(X), cupy.empty((0, 0))
        for f in (chooses, enters):
            for _ in range(2):
                (x.map_blocks(f, dtype="f8", meta=meta) + x.T).sum(axis=0).compute()
        for f in (part, small_part):
            for _ in range(2):
                y = x.map_blocks(f, chunks=((1,) * BLOCKS, x.chunks[1]), dtype="f8", meta=meta)
                y.sum(axis=0).compute()
        with cupy.cuda.Device(2):
            elsewhere = given(cupy.asarray(X), "elsewhere")
        for _ in range(3):
            (elsewhere + x).sum(axis=1).compute()
        pair = delayed(lambda a, b: (a + 1, [b * 2, b]))(*x.to_delayed().ravel()[:2])
        kept = pair.persist()
        dask.compute(kept[0], kept[1])
        first = dask.persist(pair[1])[0]
        dask.compute(first[0], first[1])
        in_order = da.from_array(np.asfortranarray(X), chunks=BLOCKS).to_backend("cupy")
        dask.compute(in_order + x, sent(np.asfortranarray(X)) + 1)


def timed(devices):
    """Runs whose steps are measured."""
    with scheduler(devices, timeline=True):
        x = on_gpu(X)
        for _ in range(4):
            dask.compute((x + 1).sum(axis=0), (x @ x.T).to_backend("numpy"))


def programs(folder):
    """All programs by name."""
    for devices in DEVICES:
        for name in NAMES:
            yield f"{name} on {devices}", partial(workload, name, devices)
        for name in ("matmul", "transpose_sum", "gauss_sum"):
            words = f"{name} in little memory on {devices}"
            yield words, partial(workload, name, devices, memory_limit="300 kB")
        for seed in range(12):
            yield f"expressions {seed} on {devices}", partial(expression, seed, devices)
        for seed in range(8):
            yield f"history {seed} on {devices}", partial(history, seed, devices)
        for blocks, host_blocks in itertools.product((5, 9), (0, 2, 40)):
            words = f"{blocks} blocks, {host_blocks} on the host, on {devices}"
            yield words, partial(spilling, devices, blocks, host_blocks, folder)
        for run in (refusals, on_host, faults, tapes, streams, timed):
            yield f"{run.__name__} on {devices}", partial(run, devices)


@contextmanager
def scheduler(devices, **options):
    with gpuscheduler.Scheduler(devices, **options) as made:
        made.hardware.kernels.code.compile_ahead = lambda *_: None  # threads that make no CUDA call
        try:
            yield made
        finally:  # what closing does waits for threads
            log.on = False
            turns.end()


def run(name, program, seed):
    """Run a program; returns its lines."""
    global turns
    turns = Turns(seed)
    fake.chance.seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    clock.now, clock.tick = 0, (1_000, 100_000, 20_000_000)[seed % 3]
    gc.collect()
    for stream in fake.every_stream():
        stream.synchronize()
    for device, pool in enumerate(fake.pools):
        with cupy.cuda.Device(device):
            pool.free_all_blocks()
    fake.races.clear()
    log.begin()
    try:
        program()
    except Exception as error:
        log.lines.append(f"ended by {type(error).__name__}: {error}")
    assert not fake.races, fake.races[0]
    for desk in list(turns.desks):
        desk.thread.join(PATIENCE)  # or it would read the next program's clock
    return log.lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--only", default="", help="programs whose name has this word")
    parser.add_argument("--libraries", help="where kernels compiled for the host are kept")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    gc.disable()  # it would free memory at any time
    dask.config.set(scheduler="sync")  # while Hypothesis draws
    frontend_transfers.LEAST_SENT = 1
    result_rooms.LEAST_WHOLE = 0
    folder = tempfile.mkdtemp()
    with open(given.file, "w") as out, kernels_on_host(given.libraries or folder, folder) as host:
        patch_calls(host)
        for seed, (name, program) in enumerate(programs(folder)):
            if given.only not in name:
                continue
            begin = real_monotonic()
            lines = run(name, program, seed)
            words = "\n".join(lines)
            took = real_monotonic() - begin
            print(f"{name}: {len(lines):,} calls, {_digest(words)}, {took:.1f} s", flush=True)
            out.write(f"==== {name}\n{words}\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
