"""What of compiling and keeping kernels needs no GPU. tests/gpu launches them."""

import importlib.util
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from dask import config

pytest.importorskip("cupy")

from gpuscheduler import disk_cache
from gpuscheduler.codegen.cuda.kernel import generate
from gpuscheduler.devices.cuda import kernel_code, launch
from gpuscheduler.devices.cuda.kernels import Kernels
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.ir.expr import Expr, View
from gpuscheduler.tracing import numba_cuda, trace
from gpuscheduler.tracing.abstract import AbstractArray
from gpuscheduler.tracing.array import apply_expression
from gpuscheduler.tracing.numba_cpu import ScalarFunction
from gpuscheduler.tracing.trace import trace_function

ARCH = "sm_90"


@pytest.fixture
def folder(tmp_path):
    with config.set({"gpuscheduler.cache-directory": str(tmp_path / "kernels")}):
        yield tmp_path / "kernels"


def source():
    program = trace_function(lambda x: x + 1, [AbstractArray((8,), np.dtype("f4"))])
    return generate(program.kernels[0]).source


def words(text, arch=ARCH, fast_math=False, single=True):
    return kernel_code._cubin_key(text, arch, (), fast_math, single)


def test_machine_code_is_kept_from_process_to_process(folder):
    cubin = kernel_code.compile_kernel(source(), ARCH, single=True)
    assert disk_cache.read(words(source())) is None
    disk_cache.keep(words(source()), cubin)
    assert disk_cache.read(words(source())) == cubin
    assert disk_cache.read(words(source(), "sm_80")) is None
    assert disk_cache.read(words(source(), single=False)) is None
    assert folder.stat().st_mode & 0o077 == 0  # nobody else writes code that we run


def test_only_the_kernel_that_is_wanted_is_compiled():
    made = generate(
        trace_function(lambda x: x + 1, [AbstractArray((8,), np.dtype("f4"))]).kernels[0]
    )
    names = made.name.encode() + b"\0", made.name.encode() + b"_one\0"
    for single, there in ((None, (True, True)), (True, (False, True)), (False, (True, False))):
        cubin = kernel_code.compile_kernel(made.source, ARCH, single=single)
        assert tuple(name in cubin for name in names) == there


def test_a_failed_compilation_has_the_compilers_words():
    with pytest.raises(kernel_code.CompileFailed, match="expected a"):
        kernel_code.compile_kernel("int main(", ARCH)


def test_a_kernel_that_is_not_to_be_had_is_said_once():
    kernels = Kernels()
    program = trace_function(lambda x: x + 1, [AbstractArray((8,), np.dtype("f4"))])
    fused = KernelTask("x", program, ("a",), (AbstractArray((8,), np.dtype("f4")),), (), None, dict)
    with pytest.warns(RuntimeWarning, match=r"'x' is computed operation by operation.*no such op"):
        kernels._give_up(fused, kernel_code.CompileFailed("no such op"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels._give_up(fused, kernel_code.CompileFailed("no such op"))
        assert kernels.run(fused, {"a": 7}, 0, launch.Workspace()) == {"a": 7}  # as it was


def test_fast_mathematics_is_other_code_and_kept_apart(folder):
    program = trace_function(lambda x, y: x / y * y + x, [AbstractArray((8,), np.dtype("f4"))] * 2)
    text = generate(program.kernels[0]).source
    exact, fast = (kernel_code.compile_kernel(text, ARCH, fast_math=f) for f in (False, True))
    assert len(fast) < len(exact)  # no slow path of a division
    disk_cache.keep(words(text, fast_math=True), fast)
    assert disk_cache.read(words(text)) is None
    assert disk_cache.read(words(text, fast_math=True)) == fast


# ---- before a first run


def halvings(x):
    n = 0
    while x > 1:
        x, n = x / 2, n + 1
    return n


@pytest.fixture
def tasks(monkeypatch):
    """Three kernels, of which two call the same function; on a device that is not there."""
    device = SimpleNamespace(attributes={"MultiProcessorCount": 132}, compute_capability="90")
    monkeypatch.setattr(kernel_code.cupy.cuda, "Device", lambda number: device)
    monkeypatch.setattr(kernel_code.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(trace, "why_impure", lambda function, **_: None)  # as of a mesh's own
    call = calling(halvings)
    return [
        fused(lambda x: apply_expression(call, [x]).sum()),
        fused(lambda x: apply_expression(call, [x]).max()),
        fused(lambda x: x + 1),
    ]


def calling(function):
    point = Expr("input", (), np.dtype("f8"), (0, View(0, ())))
    return Expr("call", (point,), np.dtype("i8"), (ScalarFunction(function), None))


def fused(f):
    x = AbstractArray((64, 64), np.dtype("f8"))
    return KernelTask("x", trace_function(f, [x]), ("a",), (x,), (), None, dict)


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="needs numba-cuda")
def test_a_first_run_compiles_each_function_once_and_the_next_process_nothing(
    folder, tasks, monkeypatch
):
    made = []

    def counted(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a: made.append(name) or real(*a))

    for module, name in (
        (numba_cuda, "_compile_with_numba"), (numba_cuda, "link"), (kernel_code, "_translate"),
    ):  # fmt: skip
        counted(module, name)
    first = kernel_code.KernelCode()
    first.compile_ahead(tasks, 0)
    assert sorted(made) == ["_compile_with_numba", *["_translate"] * 3, "link", "link"]
    assert first.compiled == 3
    first.compile_ahead(tasks, 0)
    numba_cuda._find_or_compile.cache_clear()
    for file in folder.iterdir():  # what was made of the function alone may be gone
        if file.read_bytes()[32:36] != b"\x7fELF":
            file.unlink()
    again = kernel_code.KernelCode()
    again.compile_ahead(tasks, 0)
    assert len(made) == 6
    assert again.compiled == 0


def test_kernels_without_functions_are_compiled_while_numba_works(folder, tasks, monkeypatch):
    """And those with are the last, so that no thread waits while there is other work."""
    plain, called, order = threading.Event(), threading.Event(), []

    def function(call, arch):
        assert called.is_set() or plain.wait(30)
        called.set()
        return b""

    def kernel(source, arch, calls, *others):
        order.append(bool(calls))
        if calls:
            function(*calls, arch)
        plain.set()
        return b""

    monkeypatch.setattr(numba_cuda, "compile_call", function)
    monkeypatch.setattr(kernel_code, "compile_kernel", kernel)
    kernels = kernel_code.KernelCode()
    other = calling(lambda x: halvings(x) + 1)  # which waits for the first, in the same thread
    kernels.compile_ahead([*tasks, fused(lambda x: apply_expression(other, [x]).sum())], 0)
    assert order == [False, True, True, True]
    assert kernels.compiled == 4
