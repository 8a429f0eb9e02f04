"""No Ctrl-C, at whatever moment, leaves a file open."""

from __future__ import annotations

import dis
import gc
import os
import sys
from contextlib import suppress

import numpy as np
import pytest
from dask import config

from gpuscheduler import disk_cache
from gpuscheduler.diagnostics.snapshot_file import SnapshotFile
from gpuscheduler.runtime import spill

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="needs a list of the open files of this process"
)


class Interrupt:
    """Ctrl-C at the n-th moment at which Python handles signals in a package's code.

    Python handles them when a function begins, after a call and at the end of a loop's body.
    """

    def __init__(self, n):
        self.left = n
        self.latest = {}  # the instruction that each frame is in

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, arg):
        if os.path.basename(frame.f_code.co_filename) not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self.maybe()
        elif event == "opcode":
            latest = self.latest.get(frame, "")
            self.latest[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if latest.startswith("CALL") or latest in ("JUMP_BACKWARD", "JUMP_ABSOLUTE"):
                self.maybe()
        return self.trace

    def maybe(self):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


FILES = {
    "disk_cache.py",
    "spill.py",
    "snapshot_file.py",
    "contextlib.py",
    "test_descriptors.py",
}


def opened():
    spill._remove_forgotten()  # what the next store does
    return len(os.listdir("/proc/self/fd"))


def careless(folder):
    """What a Ctrl-C between the two lines leaves open."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fstat(handle)
    finally:
        os.close(handle)


def keep_and_read(folder):
    with config.set({"gpuscheduler.cache-directory": str(folder / "kernels")}):
        disk_cache.keep("a", b"code")
        assert disk_cache.read("a") == b"code"
        disk_cache.trim(disk_cache.directory())


def spill_and_close(folder):
    store = spill.SpillStore(str(folder))
    try:
        store.remove(store.write(np.ones(3), "x"))
    finally:
        store.close()


def remove_what_is_left(folder):
    left = folder / f"{spill.PREFIX}0-x"
    left.mkdir(exist_ok=True)
    (left / spill.LOCK).touch()
    spill.remove_abandoned(str(folder))


def write_snapshot(folder):
    SnapshotFile(folder / "snapshot").write(b"{}")


def files_left_open(work, folder):
    """The moments at which a Ctrl-C came, and by how many files more are open in the end."""
    work(folder)  # imports what it needs
    gc.collect()
    before = opened()
    for n in range(1, 5000):
        interrupt = Interrupt(n)
        with suppress(KeyboardInterrupt), interrupt:
            work(folder)
        interrupt.latest.clear()
        if interrupt.left > 0:
            gc.collect()
            return n - 1, opened() - before
    raise AssertionError("too many moments")


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "work", [keep_and_read, spill_and_close, remove_what_is_left, write_snapshot]
)
def test_no_interrupt_leaves_a_file_open(work, tmp_path):
    moments, left = files_left_open(work, tmp_path)
    assert moments > 3
    assert not left


def test_this_test_finds_one_that_is_left_open(tmp_path):
    assert files_left_open(careless, tmp_path)[1]
