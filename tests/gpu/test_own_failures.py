"""An error of the package's own code on the way to a kernel is raised as itself.

Were it taken for a refusal by CuPy, the host would compute each block, with a wrong reason.
"""

import warnings

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da

import gpuscheduler
from gpuscheduler.devices.cuda import (
    host_steps,
    kernel_code,
    kernels,
)
from gpuscheduler.devices.cuda.numpy_fallback import SAID, LaunchFailed
from gpuscheduler.fusion.task import KernelTask, OptionalTask

pytestmark = pytest.mark.gpu

A = np.arange(1.0, 65.0).reshape(8, 8)
WEIGHTS = np.arange(8.0)


def x():
    return da.from_array(cupy.asarray(A), chunks=(4, 8), asarray=False)


def weighted(block):
    """CuPy refuses it, as it reads an array of NumPy's beside its own."""
    return block * WEIGHTS


def of_numpy(block):
    """CuPy has no such function."""
    if isinstance(block, cupy.ndarray):
        raise NotImplementedError("cupy does not do this")
    return block + 1


def mapped(f):
    return x().map_blocks(f, dtype="f8", meta=cupy.empty((0, 0)))


PROGRAMS = {
    "one": (lambda: x()[:4] * 2 + 1, lambda: A[:4] * 2 + 1),
    "several": (lambda: (x().rechunk(2).persist() * 2 + 1).sum(), lambda: (A * 2 + 1).sum()),
    "picked": (lambda: x()[x() > 20], lambda: A[A > 20]),
    "one or none": (lambda: x()[x() > 20].max(), lambda: A[A > 20].max()),
    "mixed": (lambda: mapped(weighted), lambda: A * WEIGHTS),
    "of the host": (lambda: mapped(of_numpy), lambda: A + 1),
}
KERNELS = ("one", "several", "picked", "one or none")
#: Those that are functions, which must not be traced here.
CALLED = "mixed", "of the host"
#: Parts of the way, and the programs that go it.
PARTS = {
    "arrays": (KernelTask, "arrays", KERNELS),
    "prepared": (kernel_code.KernelCode, "get_prepared", KERNELS),
    "launch": (kernels.Kernels, "_launch", ("one", "one or none")),
    "start": (kernels.Kernels, "_start", ("one", "picked")),
    "launch all": (kernels.Kernels, "_launch_all", ("several",)),
    "queue": (kernels, "queue", ("several",)),
    "batch pointers": (kernels, "batch_pointers", ("several",)),
    "found": (OptionalTask, "extract_value", ("one or none",)),
    "moved": (host_steps, "move_task", ("mixed",)),
    "at home": (host_steps, "move_to_host", ("of the host",)),
    "sent": (host_steps, "send_value", ("of the host",)),
}


def refuse_as_cupy(kind):
    """Raise an error from a frame of CuPy's, as where it is called with what it does not take."""
    if kind is ValueError:
        cupy.ndarray((1,), "O")  # no such type
    if kind is TypeError:
        cupy.ndarray((), "f8") + np.ones(3)
    raise kind("cupy was called in a wrong way")


def computed(lazy):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*runs on the host", RuntimeWarning)
        value = lazy.compute()
    return value.get() if isinstance(value, cupy.ndarray) else np.asarray(value)


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize(
    ("part", "program"), [(part, name) for part, (*_, names) in PARTS.items() for name in names]
)
def test_error_in_the_launch_path_is_raised_as_the_packages_own(part, program, kind, monkeypatch):
    holder, name, _ = PARTS[part]
    make, want = PROGRAMS[program]
    real, calls, error = getattr(holder, name), [0], None

    def fails(*args, **kwargs):
        calls[0] += 1
        refuse_as_cupy(kind)

    with gpuscheduler.Scheduler("cuda:0", fuse=program not in CALLED, fuse_least=0):
        lazy = make()
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "'of_numpy' runs on the host", RuntimeWarning)
            patch.setattr(holder, name, staticmethod(fails) if holder is OptionalTask else fails)
            with pytest.raises(LaunchFailed, match="own code has failed") as caught:
                lazy.compute()
            error = caught.value
        assert calls[0]
        assert kind.__name__ in str(error)
        assert isinstance(error.__cause__, kind)
        assert any("while running" in note and "device 0" in note for note in error.__notes__)
        assert getattr(holder, name) is real
        np.testing.assert_allclose(computed(lazy), want())


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_cupy_refuses_is_computed_in_another_way(program):
    make, want = PROGRAMS[program]
    with gpuscheduler.Scheduler("cuda:0", fuse=program not in CALLED, fuse_least=0):
        lazy = make()
        for _ in range(3):
            np.testing.assert_allclose(computed(lazy), want())
