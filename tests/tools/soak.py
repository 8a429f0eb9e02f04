"""Run mixed graphs with faults at random, for as long as you like.

Every value must be right; at the end memory, threads and files must be as at the start.

    python tests/tools/soak.py --minutes 30
    python tests/tools/soak.py --seconds 5 --seed 7     # the same faults in the same order
    python tests/tools/soak.py --minutes 10 --cuda      # on the GPUs

Faults: a task that raises, a task or a file that finds no memory, a file that ends half-way, a disk
that is full, a Ctrl-C at any moment, a device that fails at any of its verbs, and, on devices that
are not there, refused allocations in any order of events. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import dask
import dask.array as da
import dask.utils
import numpy as np
from dask._task_spec import Task, TaskRef

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuscheduler import Scheduler
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import DISK, Machine
from gpuscheduler.runtime.loop import run
from tests.runtime.test_faults import Faulty
from tests.support.strategies import LateDevices, UnorderedDevices, alter, mix

SIDE = 40
BLOCK = SIDE * SIDE * 8
#: Bytes by which the process may be larger at the end: what allocators keep, and nothing else.
SLACK = 2**25


class Fault(Exception):
    """What is injected."""


class Source:
    """An array in a file, of which some reads fail."""

    def __init__(self, array, rng, faults):
        self.array, self.rng, self.faults = array, rng, faults
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, index):
        self.faults.maybe(Fault("the file ends here"), 0.01)
        self.faults.maybe(MemoryError(), 0.01)
        return np.array(self.array[index])


class Faults:
    """Raises now and then, while it is on."""

    def __init__(self, rng):
        self.rng, self.on, self.seen = rng, False, Counter()

    def maybe(self, error, chance):
        if self.on and self.rng.random() < chance:
            self.seen[type(error).__name__] += 1
            raise error

    def opened(self, *args, **kwargs):
        """`open`, on a disk that is full now and then."""
        self.maybe(OSError(errno.ENOSPC, "No space left on device"), 0.02)
        return open(*args, **kwargs)


class Interrupt:
    """Ctrl-C after a moment, if the computation is still going on then."""

    def __init__(self):
        self.armed = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, *_):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def after(self, seconds):
        thread = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        thread.start()
        return thread


class Soak:
    def __init__(self, seed, folder, gpus=0):
        self.gpus = gpus
        self.rng = random.Random(seed)
        self.faults = Faults(self.rng)
        self.interrupt = Interrupt()
        self.folder = folder
        self.ran, self.failed = Counter(), Counter()

    # ---- on this machine's devices

    def arrays(self):
        """Some arrays: random ones, and one in a file; each with one that no device has."""
        n = self.rng.randint(2, 5)
        numbers = np.random.default_rng(self.rng.randrange(100)).random((n * SIDE, SIDE))
        seed, shape = self.rng.randrange(100), (n * SIDE, SIDE)
        with dask.config.set({"array.backend": "numpy"}):
            arrays = [
                da.from_array(Source(numbers, self.rng, self.faults), chunks=SIDE),
                da.random.default_rng(seed).random(shape, chunks=SIDE),
            ]
        return [(x.to_backend("cupy") if self.gpus else x, x) for x in arrays]

    def broken(self, block):
        self.faults.maybe(Fault("in a task"), 0.005)
        self.faults.maybe(MemoryError(), 0.02)
        return block + 1

    def step(self, arrays):
        """One more array, of those there are, and its twin. All numbers are positive, and none
        are taken from each other: they stay right to rounding."""
        operation = self.rng.choice(
            [
                lambda x, y: x + y,
                lambda x, y: x / x.mean(axis=0),
                lambda x, y: x[::-1] * 2,
                lambda x, y: (z := x @ (y.T @ x)) / z.mean(axis=0),
                lambda x, y: x.map_blocks(self.broken, meta=x._meta),
                lambda x, y: da.exp(-(x**2)) + y.sum(axis=0),
            ]
        )
        x, y = self.rng.choice(arrays), self.rng.choice(arrays)
        return tuple(operation(a, b) for a, b in zip(x, y, strict=True))

    def session(self):
        """A scheduler, and what somebody may do with it."""
        limit = self.rng.randint(8, 24) * BLOCK
        options = {
            "devices": f"cpu:{self.rng.randint(1, 3)}",
            "fuse": self.rng.random() < 0.5,
            "check": self.rng.random() < 0.5,
            "spill_directory": str(self.folder),
        }
        devices = int(options["devices"][-1])
        if self.gpus:
            ids = [str(self.rng.randrange(self.gpus)) for _ in range(devices)]
            options["devices"] = f"cuda:{','.join(ids)}"
            options["host_memory"] = self.rng.choice([0, limit // 2, 2**30])
        with Scheduler(memory_limit=limit // devices + 1, **options) as s:
            s.hardware.store.opened = self.faults.opened
            arrays = self.arrays()
            shape = arrays[0][0].shape
            for _ in range(self.rng.randint(3, 10)):
                x, twin = self.step(arrays)
                if x.shape != shape:
                    continue
                arrays.append((x, twin))
                if self.rng.random() < 0.4:
                    x = self.computed(s, x, twin, "persist")
                    if x is not None:
                        arrays[-1] = x, twin
                if self.rng.random() < 0.6:
                    self.computed(s, *arrays[-1], "compute")
                if self.rng.random() < 0.3:
                    self.stored(s, *arrays[-1])
                if len(arrays) > 5:
                    del arrays[self.rng.randrange(2, len(arrays))]
            del arrays, x

    def computed(self, s, x, twin, verb):
        """The value, if nothing came between; checked against Dask's own now and then."""
        self.faults.on = self.rng.random() < 0.7
        timer = None
        if self.rng.random() < 0.15:
            timer = self.interrupt.after(self.rng.random() * 0.03)
        out = None
        try:
            self.interrupt.armed = timer is not None
            out = getattr(x, verb)()
            self.interrupt.armed = False
        except KeyboardInterrupt:
            self.failed["KeyboardInterrupt"] += 1
        except (Fault, OSError, MemoryError) as error:
            self.failed[type(error).__name__] += 1
        finally:
            self.interrupt.armed = False
            self.faults.on = False
            if timer is not None:
                timer.join()
        self.ran[verb] += 1
        if out is not None:
            limit = s.hardware.machine.limit(0)
            assert s.last.peak[0] <= limit, f"{s} has a limit of {limit:,} bytes: {s.last}"
            if self.rng.random() < 0.3:
                want = twin.compute(scheduler="sync")
                got = out if verb == "compute" else out.compute()
                np.testing.assert_allclose(got.get() if self.gpus else got, want, rtol=1e-9)
        return out

    def stored(self, s, x, twin):
        target = np.lib.format.open_memmap(
            self.folder / "target.npy", mode="w+", shape=x.shape, dtype=x.dtype
        )
        x = x.to_backend("numpy")
        try:
            self.faults.on = True
            da.store(x, target, lock=False)
        except (Fault, OSError, MemoryError) as error:
            self.failed[type(error).__name__] += 1
        else:
            self.faults.on = False
            np.testing.assert_allclose(target, twin.compute(scheduler="sync"), rtol=1e-9)
        finally:
            self.faults.on = False
            os.unlink(self.folder / "target.npy")
        self.ran["store"] += 1

    # ---- on devices that are not there

    def pretended(self):
        """Any graph in little memory, with refusals and steps that fail, in any order of events."""
        rng = self.rng
        n = rng.randint(5, 40)
        dsk = {}
        for i in range(n):
            reads = dict.fromkeys(rng.randrange(i) for _ in range(rng.randint(0, 3))) if i else ()
            dsk[i] = Task(i, mix, i, *(TaskRef(r) for r in reads))
        keys = sorted({n - 1, rng.randrange(n)})
        devices, shared = rng.randint(1, 4), rng.random() < 0.5
        plan = make_plan(from_dask(dsk, keys), Machine.uniform(devices, shared=shared))
        sizes = [rng.randint(1, 16) for _ in plan.steps]
        for step, true in zip(plan.steps, sizes, strict=True):
            step.place = rng.randrange(devices)
            step.known = rng.random() < 0.5
            step.nbytes = true if step.known else rng.randint(0, 16)
            step.aside = rng.random() < 0.2
            step.again = step.aside and not step.inputs and rng.random() < 0.5
        need = max(sizes[i] + sum(sizes[j] for j in s.inputs) for i, s in enumerate(plan.steps))
        alter(
            plan,
            machine=Machine.uniform(
                devices,
                memory=need + rng.randint(0, 30),
                host_memory=rng.randint(0, 40),
                shared=shared,
            ),
        )
        ahead = rng.random() < 0.5
        fake = (LateDevices if ahead else UnorderedDevices)(plan, rng, sizes, refuse=True)
        verb = rng.choice(["launch", "copy", "free", "wait", None, None])
        broken = Faulty(fake, verb, rng.randint(0, 2 * n), event=False)
        try:
            state = run(plan, broken, None, rng.randint(1, 6), 64, ahead, check=True)
        except RuntimeError:
            if broken.failed is None:
                raise
            self.failed["pretended"] += 1
        else:
            state.validate_end()
            for key in keys:
                i = plan.index[key]
                values = [v for (step, p), v in fake.values.items() if step == i]
                assert set(values) == {dask.get(dsk, key)}
                assert values or DISK in state.where[i]
        self.ran["pretended"] += 1

    def once(self):
        dask.utils.key_split.cache_clear()  # it remembers 100,000 keys: 20 MiB that are not ours
        if self.rng.random() < 0.5:
            self.session()
        else:
            for _ in range(10):
                self.pretended()


def device_bytes(gpus):
    """What is in use on the GPUs when CuPy's pool has given back what nobody has."""
    if not gpus:
        return 0
    import cupy

    used = 0
    for n in range(gpus):
        with cupy.cuda.Device(n) as device:
            device.synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
            free, whole = cupy.cuda.runtime.memGetInfo()
            used += whole - free
    return used


def footprint(folder):
    """What this process holds: bytes of memory, threads, open files, files in the folder."""
    for _ in range(3):
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (
        int(facts["RssAnon"].split()[0]) * 1024,
        sorted(t.name for t in threading.enumerate()),
        Counter(map(opened_file, os.listdir("/proc/self/fd"))),
        sorted(p.name for p in folder.iterdir()),
    )


def opened_file(descriptor):
    """What an open file is, without the numbers that differ from one to the next."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").split(":[")[0]
    except OSError:  # the folder itself, which is closed by now
        return "/proc"


def settled(folder, threads):
    """The same, once threads that were abandoned in the middle of a task have ended."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found = footprint(folder)
        if found[1] == threads and not found[3]:
            break
        time.sleep(0.1)
    return footprint(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cuda", action="store_true")
    arguments = parser.parse_args()
    gpus = 0
    if arguments.cuda:
        import cupy

        gpus = cupy.cuda.runtime.getDeviceCount()
    seconds = arguments.minutes * 60 + arguments.seconds or 60
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds + 300, exit=True)  # it hangs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        soak = Soak(arguments.seed, folder, gpus)
        threads = footprint(folder)[1]
        begin = time.monotonic()
        first, said, held = None, begin, 0
        while (now := time.monotonic()) < begin + seconds:
            soak.once()
            if first is None and now > begin + seconds / 5:  # all that is loaded is loaded
                first, held = settled(folder, threads), device_bytes(gpus)
            if now > said + 60:
                said = now
                memory, *_ = footprint(folder)
                print(
                    f"{now - begin:.0f} s: {memory / 2**20:.1f} MiB, {dict(soak.ran)}", flush=True
                )
        last, holds = settled(folder, threads), device_bytes(gpus)
    if first is None:
        first, held = last, holds
    print(f"ran {dict(soak.ran)}; injected {dict(soak.faults.seen)}; failed {dict(soak.failed)}")
    for title, facts in (("before", first), ("after", last)):
        memory, names, files, left = facts
        counts = f"{len(names)} threads, {files.total()} open files"
        print(f"{title}: {memory / 2**20:.1f} MiB, {counts}, {left}")
    if gpus:
        print(f"on {gpus} GPUs: {held / 2**20:.1f} MiB before, {holds / 2**20:.1f} after")
    wrong = []
    if holds > held + SLACK:
        wrong.append(f"{(holds - held) / 2**20:.1f} MiB of memory are left on GPUs")
    if last[0] > first[0] + SLACK:
        wrong.append(f"{(last[0] - first[0]) / 2**20:.1f} MiB of memory are left")
    if last[1] != threads:
        wrong.append(f"threads are left: {last[1]}")
    if last[2].total() > first[2].total():
        wrong.append(f"open files are left: {dict(last[2] - first[2])}")
    if last[3]:
        wrong.append(f"files are left: {last[3]}")
    print("; ".join(wrong) or "nothing is left")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
