"""Python functions in kernels are compiled by Numba, linked, and run on the host.

There a kernel's text and Numba's code for a GPU are compiled for the host's processor.
"""

from __future__ import annotations

import cmath
import hashlib
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpuscheduler.codegen.cuda.kernel import generate
from gpuscheduler.errors import NotGenerated
from gpuscheduler.ir.expr import Expr, Kernel, View, constant, index, source
from gpuscheduler.tracing.numba_cpu import ScalarFunction
from tests.codegen.test_cuda_kernel import disassembler, nvrtc
from tests.support import kernels as k
from tests.support.cuda_on_host import COMPILER, Host, aligned

pytest.importorskip("cupy")
from gpuscheduler.devices.cuda import kernel_code
from gpuscheduler.tracing import numba_cuda

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed"
)
host_only = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


class Function:
    """A function and what it computes, as expressions have it."""

    lasting = False

    def __init__(self, python):
        self.python, self.name = python, python.__name__
        self.repeats = ScalarFunction(python).repeats
        code = python.__code__
        cells = [c.cell_contents for c in python.__closure__ or ()]
        cells = [c for c in cells if isinstance(c, int | float | complex)]
        words = repr((self.name, code.co_code, code.co_names, code.co_consts[:9], cells))
        words = re.sub(r" at 0x\w+", "", words)
        self.digest = hashlib.sha256(words.encode()).hexdigest()

    def __eq__(self, other):
        return isinstance(other, Function) and self.digest == other.digest

    def __hash__(self):
        return hash(self.digest)


def of(f, *args, dtype="f8", part=None):
    return Expr("call", args, dtype, (Function(f), part))


def lines(*types, n=64):
    return [source(i, (n,), t) for i, t in enumerate(types)]


# ---- functions of the kind that users write


def mandelbrot(x, y):
    zx = zy = 0.0
    n = 0
    while zx * zx + zy * zy <= 4.0 and n < 50:
        zx, zy = zx * zx - zy * zy + x, 2 * zx * zy + y
        n += 1
    return n


def zeta(s):
    total = 0.0
    for n in range(1, 30):
        total += 1.0 / n**s
    return total


def cubic(x):
    return x * x * x - 2 * x - 5


def newton(x):
    for _ in range(30):
        step = cubic(x) / (3 * x * x - 2)
        x -= step
        if abs(step) < 1e-14:
            break
    return x


def polar(x, y):
    return math.hypot(x, y), math.atan2(y, x)


# pytest would rewrite the assertion if it were the test's
CHECKED = """
def checked(x):
    if x < 0:
        raise ValueError("negative")
    assert x > 0.1
    return math.sqrt(x)
"""
exec(CHECKED)
checked = locals()["checked"]


def julia(z):
    c = complex(-0.4, 0.6)
    while abs(z) < 100:
        z = z * z + c
        if z.real > 1:
            break
    return z


def inside(x, y):
    return x * x + y * y < 1


def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def scaled_by(factor):
    def scaled(x):
        return factor * x if x > 0 else x

    return scaled


ORDINARY = {
    "loop": (mandelbrot, "f8 f8", "i8"), "for": (zeta, "f8", "f8"), "helper": (newton, "f8", "f8"),
    "complex": (julia, "c16", "c16"), "bool": (inside, "f8 f8", "?"), "int": (collatz, "u4", "i4"),
    "raises": (checked, "f8", "f8"), "closure": (scaled_by(2.5), "f8", "f8"),
    "narrow": (scaled_by(0.1), "f4", "f4"), "small": (inside, "i1 u2", "?"),
    "half": (julia, "c8", "c8"), "cast": (mandelbrot, "f4 f4", "f4"),
    "counted": (checked, "f8", "i4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def host(libraries):
    return Host(libraries)


def numbers(types, n=64):
    rng = np.random.default_rng(7)
    out = []
    for t in map(np.dtype, types):
        x = rng.integers(1, 60, n) if t.kind in "iu" else rng.normal(0, 1, n)
        out.append(aligned((x + 1j * rng.normal(0, 1, n) if t.kind == "c" else x).astype(t)))
    return out


def wanted(f, arrays, dtype):
    """The function's values by Python; where it raises, NaN or 0."""
    out = np.empty(len(arrays[0]), dtype)
    for n, row in enumerate(zip(*[a.tolist() for a in arrays], strict=True)):
        try:
            out[n] = f(*row)
        except (ValueError, AssertionError):
            out[n] = np.nan if out.dtype.kind in "fc" else 0
    return out


# ---- values


@host_only
@pytest.mark.parametrize("name", list(ORDINARY))
def test_a_function_gives_what_python_gives(host, name):
    f, types, gives = ORDINARY[name]
    arrays = numbers(k.words(types))
    kernel = Kernel((64,), (of(f, *lines(*k.words(types)), dtype=gives),))
    (got,) = host.run([kernel], [arrays])[0]
    want = wanted(f, arrays, gives)
    assert got.dtype == want.dtype
    rtol = 2e-5 if np.dtype(gives).char in "fF" else 1e-13
    np.testing.assert_allclose(got, want, rtol=rtol)
    if name == "raises":
        assert np.isnan(got).any()


@host_only
@pytest.mark.parametrize("code", ["c16", "c8"])
def test_complex_exponentials_are_those_of_cpu_devices(host, code):
    """To the bit where no rounding is involved: zeros, infinities and NaN, with their signs."""

    def exponential(z):
        return cmath.exp(z)

    parts = np.array([0.0, -0.0, 1.0, -2.5, 800.0, -800.0, np.inf, -np.inf, np.nan])
    z = np.empty((9, 9), code)
    z.real, z.imag = np.meshgrid(parts, parts, indexing="ij")
    z = aligned(z.ravel())
    dtype = np.dtype(code)
    kernel = Kernel((81,), (of(exponential, *lines(code, n=81), dtype=code),))
    (got,) = host.run([kernel], [[z]])[0]
    with np.errstate(all="ignore"):
        want = ScalarFunction(exponential).ufunc((dtype,), dtype)(z)
    for g, w in ((got.real, want.real), (got.imag, want.imag)):
        np.testing.assert_allclose(g, w, rtol=1e-6 if code == "c8" else 1e-14)
        np.testing.assert_array_equal(np.signbit(g[~np.isnan(g)]), np.signbit(w[~np.isnan(w)]))


@host_only
def test_each_item_of_a_tuple(host):
    arrays = numbers(["f8", "f8"])
    outputs = tuple(of(polar, *lines("f8", "f8"), part=part) for part in (0, 1))
    got = host.run([Kernel((64,), outputs)], [arrays])[0]
    np.testing.assert_allclose(got[0], np.hypot(*arrays), rtol=1e-14)
    np.testing.assert_allclose(got[1], np.arctan2(*arrays[::-1]), rtol=1e-14)


@host_only
def test_defaults_any_number_of_arguments_and_no_result(host):
    def shifted(x, by=2.0):
        return x + by

    def total(*numbers):
        return numbers[0] + numbers[1] * len(numbers)

    def upper(x):
        if x > 0:
            return x

    arrays = numbers(["f8", "f8"])
    x, y = lines("f8", "f8")
    got = host.run([Kernel((64,), (of(shifted, x), of(total, x, y), of(upper, x)))], [arrays])[0]
    np.testing.assert_array_equal(got[0], arrays[0] + 2)
    np.testing.assert_allclose(got[1], arrays[0] + arrays[1] * 2)
    np.testing.assert_array_equal(got[2], np.where(arrays[0] > 0, arrays[0], np.nan))


@host_only
def test_what_is_divided_by_zero_is_what_it_is_in_numpy(host):
    functions = {
        lambda x: 1 / x: "f8", lambda x: -1 / x: "f8", lambda x: x / x: "f8",
        lambda x: math.log(x): "f8", lambda x: 5 // int(x): "i8", lambda x: 5 % int(x): "i8",
    }  # fmt: skip
    outputs = [of(f, *lines("f8", n=8), dtype=t) for f, t in functions.items()]
    got = host.run([Kernel((8,), tuple(outputs))], [[aligned(np.zeros(8))]])[0]
    wanted = [math.inf, -math.inf, math.nan, -math.inf, 0, 0]
    np.testing.assert_array_equal(got, np.repeat(wanted, 8).reshape(6, 8))


@host_only
def test_integers_divide_as_in_python(host):
    def divided(a, b):
        return (a // b) * 1000 + (a % b) * 10 + a / b

    a, b = np.array([7, -7, 7, -7] * 16), np.array([2, 2, -2, -2] * 16)
    kernel = Kernel((64,), (of(divided, *lines("i8", "i8")),))
    (got,) = host.run([kernel], [[aligned(a), aligned(b)]])[0]
    np.testing.assert_array_equal(got, wanted(divided, [a, b], "f8"))


@host_only
def test_a_call_is_an_operation_like_any_other(host):
    """Beside other operations, in vectors, below reductions and of their results."""
    x, y = lines("f4", "f4", n=4096)
    both = of(scaled_by(0.5), k.call("add", x, y), dtype="f4")
    again = of(scaled_by(0.5), k.call("add", x, y), dtype="f4")
    body = k.call("multiply", both, k.call("exp", again))
    arrays = numbers(["f4", "f4"], 4096)
    total = arrays[0] + arrays[1]
    value = np.where(total > 0, total / 2, total)
    want = value * np.exp(value)
    made = generate(Kernel((4096,), (body,)))
    assert len(made.calls) == 1
    assert made.source.count("= of_f_") == 1  # equal calls are one
    assert "Vec<float, 4>" in made.source
    (got,) = host.run([Kernel((4096,), (body,))], [arrays])[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    kernel = k.reduced(body, (4096,), (0,), "sum", "max")
    last = of(scaled_by(-2.0), kernel.outputs[0], dtype="f8")
    kernel = Kernel(kernel.shape, (*kernel.outputs, last), kernel.reductions, kernel.axes)
    s, most, result = host.run([kernel], [arrays], processors=2)[0]
    np.testing.assert_allclose(s, want.sum(dtype="f8"), rtol=1e-5)
    np.testing.assert_allclose(most, want.max(), rtol=1e-5)
    np.testing.assert_allclose(result, -2 * s if s > 0 else s, rtol=1e-6)


@host_only
def test_a_call_is_made_only_where_its_array_is(host):
    """Two arrays one behind the other, each with a function of its own. Of what is not there a zero
    is at hand, for which this loop would have no end."""

    def counted(n):
        return collatz(n)

    a, b = numbers(["i8", "i8"], 40)
    a[:] = np.arange(1, 41)
    first = Expr("input", (), "i8", (0, View(0, (1,))))
    second = Expr("input", (), "i8", (1, View(-40, (1,))))
    here = Expr("less", (index(View(0, (1,))), constant(40, "i8")), "?")
    body = Expr("where", (here, of(counted, first, dtype="i8"), of(collatz, second, dtype="i8")),
                "i8")  # fmt: skip
    (got,) = host.run([Kernel((80,), (body,))], [[a, b]])[0]
    want = [collatz(int(n)) for n in (*a, *b)]
    np.testing.assert_array_equal(got, want)


@host_only
def test_indices_are_arguments_too(host):
    """A grid of points has no array at all."""
    at = [Expr("cast", (index(View(0, s)),), "f8") for s in ((1, 0), (0, 1))]
    x, y = (k.call("multiply", a, constant(0.05, "f8")) for a in at)
    kernel = Kernel((40, 30), (of(mandelbrot, x, y, dtype="i8"),))
    (got,) = host.run([kernel], [[]])[0]
    want = [[mandelbrot(i * 0.05, j * 0.05) for j in range(30)] for i in range(40)]
    np.testing.assert_array_equal(got, want)


# ---- NumPy's and math's functions

UNARY = k.words("""
sin cos tan exp sqrt log log2 log10 log1p expm1 exp2 sinh cosh tanh arcsin arccos arctan arcsinh
arctanh cbrt floor ceil trunc rint abs absolute fabs square sign negative reciprocal isnan isinf
isfinite signbit deg2rad degrees real imag angle conj sinc round
""")
BINARY = k.words("""
power hypot arctan2 fmod mod remainder floor_divide copysign maximum minimum fmax fmin logaddexp
heaviside add subtract divide less equal logical_and
""")


@host_only
@pytest.mark.parametrize("names", [UNARY, BINARY], ids=["one", "two"])
def test_functions_of_numpy_take_numbers(host, names):
    kinds = "f8" if names is UNARY else "f8 f8"
    outputs, want = [], []
    arrays = [aligned(np.abs(a) % 0.9 + 0.05) for a in numbers(k.words(kinds))]
    for name in names:
        space = {"np": np}
        args = "x" if names is UNARY else "x, y"
        exec(f"def use_{name}({args}): return np.{name}({args})", space)
        outputs.append(of(space[f"use_{name}"], *lines(*k.words(kinds))))
        want.append(getattr(np, name)(*arrays))
    got = host.run([Kernel((64,), tuple(outputs))], [arrays])[0]
    for name, a, b in zip(names, got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, err_msg=name)


@host_only
def test_functions_keep_float32_and_complex_numbers(host):
    def of_both(x, z):
        return np.exp(z) * np.sqrt(x) + np.abs(z)

    arrays = numbers(["f4", "c8"])
    arrays[0][:] = np.abs(arrays[0])
    kernel = Kernel((64,), (of(of_both, *lines("f4", "c8"), dtype="c8"),))
    (got,) = host.run([kernel], [arrays])[0]
    np.testing.assert_allclose(got, of_both(*arrays), rtol=1e-5)


@host_only
def test_functions_of_math(host):
    from math import sin as sine

    def much(x):
        whole = math.floor(x) + math.ceil(x) + math.trunc(x) + round(x)
        others = sine(x) + math.gamma(x + 2) + math.lgamma(x + 2) + math.erf(x) + math.erfc(x)
        return whole // 2 + others + math.log(x + 2, 3) + math.fabs(x) + math.log(x + 2)

    arrays = [aligned(np.linspace(-0.9, 3, 64))]
    (got,) = host.run([Kernel((64,), (of(much, *lines("f8")),))], [arrays])[0]
    np.testing.assert_allclose(got, wanted(much, arrays, "f8"), rtol=1e-12)


@host_only
def test_functions_of_scipy_and_of_numba(host):
    special = pytest.importorskip("scipy.special")
    import numba
    from numba import cuda

    @numba.njit
    def once(x):
        return x + 1

    @cuda.jit(device=True)
    def twice(x):
        return once(x) * 2

    def much(x):
        return special.erf(x) + special.gammaln(x + 1) + twice(x) + special.expit(x)

    arrays = [aligned(np.linspace(0.1, 3, 64))]
    (got,) = host.run([Kernel((64,), (of(much, *lines("f8")),))], [arrays])[0]
    x = arrays[0]
    want = special.erf(x) + special.gammaln(x + 1) + (x + 1) * 2 + special.expit(x)
    np.testing.assert_allclose(got, want, rtol=1e-12)


# ---- what cannot be compiled


def refused(f, *types, dtype="f8", part=None):
    made = generate(Kernel((64,), (of(f, *lines(*types), dtype=dtype, part=part),)))
    with pytest.raises(kernel_code.CompileFailed) as caught:
        kernel_code.compile_kernel(made.source, "sm_90", made.calls)
    return str(caught.value)


def test_a_failure_names_the_function_its_types_the_line_and_the_reason():
    def opened(x):
        y = x + 1
        return y + len(open("file").read())

    text = refused(opened, "f8")
    assert text.startswith("opened(float64) -> float64 has no device code: ")
    assert "open" in text.partition("code: ")[2]
    assert 'y + len(open("file").read())' in text
    assert "test_numba_cuda.py, line" in text
    assert len(text) < 500


def test_failures_of_other_kinds():
    def endless(x):
        return endless(x - 1) if x > 0 else x

    def inner(x):
        return x.nothing

    def outer(x):
        return inner(x)

    def several(x):
        return x, x

    assert "endless calls itself" in refused(endless, "f8")
    text = refused(outer, "f8")
    assert "nothing" in text
    assert "return x.nothing" in text
    assert "several(float64) -> float64 has no device code" in refused(several, "f8")
    assert "polar(float64, float64) -> float64, result 2" in refused(polar, "f8", "f8", part=2)
    assert "complex128" in refused(julia, "c16", dtype="f8")
    with pytest.raises(NotGenerated, match="zeta of float16"):
        generate(Kernel((64,), (of(zeta, *lines("f2"), dtype="f2"),)))


def test_a_compiler_that_is_not_there_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvjitlink", None)
    numba_cuda._numba.cache_clear()
    numba_cuda._find_or_compile.cache_clear()
    try:
        text = refused(zeta, "f8")
    finally:
        numba_cuda._numba.cache_clear()
    assert 'pip install "gpuscheduler[cuda12]"' in text


# ---- machine code


def code(kernel, arch="sm_90"):
    made = generate(kernel)
    return made, kernel_code.compile_kernel(made.source, arch, made.calls)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_functions_compile_and_link_for(arch):
    if int(arch[3:]) not in nvrtc().getSupportedArchs():
        pytest.skip(f"this compiler does not know {arch}")
    outputs = [of(f, *lines(*k.words(t)), dtype=gives) for f, t, gives in ORDINARY.values()]
    made, cubin = code(Kernel((64,), tuple(outputs)), arch)
    assert len(made.calls) == len(ORDINARY)
    assert cubin[:4] == b"\x7fELF"
    for name in (made.name, made.name + "_one"):
        assert f".text.{name}\0".encode() in cubin
    shape = (512, 1024)
    both = of(mandelbrot, source(0, shape, "f8"), k.turned(1, shape, "f8"), dtype="f8")
    code(k.reduced(both, shape, (0, 1), "sum", "moment"), arch)


def disassembled(cubin, tmp_path):
    (tmp_path / "k.cubin").write_bytes(cubin + b"\0")
    command = [disassembler(), tmp_path / "k.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_functions_that_share_what_they_call_are_linked_together():
    """What stands for NumPy's functions is compiled once, and comes with each piece."""

    def first(x):
        return np.sign(x) + np.exp(x) + math.log(x, 2) + cubic(x) + round(x, 2)

    def second(x):
        return np.sign(x) - np.exp(x) - math.log(x, 2) - cubic(x) - round(x, 2)

    (x,) = lines("f8")
    made, _ = code(Kernel((64,), (of(first, x), of(second, x))))
    assert len(made.calls) == 2


@pytest.mark.parametrize(
    ("f", "repeats"), [(mandelbrot, True), (newton, True), (scaled_by(0.1), False)]
)
def test_what_repeats_is_in_a_kernel_once(f, repeats):
    """Points side by side share their work on coordinates, but loops run one after the other.

    Two loops would be no faster than one, and take twice as long to compile.
    """
    coordinates = [index(View(0, s)) for s in ((0, 1), (1, 0))[: f.__code__.co_argcount]]
    x = [Expr("cast", (n,), "f8") for n in coordinates]
    made = generate(Kernel((64, 64), (of(f, *x),)))
    assert ("e < 2; ++e" in made.source) == (not repeats)


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize("name", list(ORDINARY))
def test_nothing_is_left_of_the_call(name, tmp_path):
    f, types, gives = ORDINARY[name]
    made, cubin = code(Kernel((4096,), (of(f, *lines(*k.words(types), n=4096), dtype=gives),)))
    text = disassembled(cubin, tmp_path)
    assert made.calls[0].symbol not in text
    assert not re.findall(r"\b(?:LDL|STL)\b", text)


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm")
def test_products_and_sums_are_rounded_one_by_one(tmp_path):
    """Neither in the function nor in the kernel's own text, as on a CPU."""
    x, y = lines("f8", "f8", n=4096)
    text = k.call("add", k.call("multiply", x, y), of(mandelbrot, x, y))
    _, cubin = code(Kernel((4096,), (text,)))
    found = disassembled(cubin, tmp_path)
    assert "DMUL" in found
    assert "DADD" in found
    assert "DFMA" not in found


def test_numba_and_the_linker_have_no_part_in_a_kernel_without_calls(monkeypatch):
    monkeypatch.setattr(numba_cuda, "_numba", None)
    (x,) = lines("f4")
    made, cubin = code(Kernel((64,), (k.call("exp", x),)))
    assert made.calls == ()
    assert cubin[:4] == b"\x7fELF"


def test_the_same_function_has_the_same_symbol_in_every_process():
    program = (
        "from tests.tracing.test_numba_cuda import *\n"
        "made = generate(Kernel((64,), (of(mandelbrot, *lines('f8', 'f8'), dtype='i8'),)))\n"
        "print(made.name, made.calls[0].symbol)"
    )
    root = Path(__file__).parents[1].parent
    out = {
        subprocess.run(
            [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True,
            env={"PYTHONPATH": str(root), "PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout
        for seed in "12"
    }  # fmt: skip
    made = generate(Kernel((64,), (of(mandelbrot, *lines("f8", "f8"), dtype="i8"),)))
    assert out == {f"{made.name} {made.calls[0].symbol}\n"}
    assert made.name.startswith("fused_mandelbrot_")


def test_code_of_another_function_is_another_file():
    def words(f):
        made = generate(Kernel((64,), (of(f, *lines("f8")),)))
        return kernel_code._cubin_key(made.source, "sm_90", made.calls, False, True)

    assert words(zeta) is None  # it is not known to be the same in another process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Function, "lasting", True)
        assert words(zeta) == words(zeta) != words(newton)


AGAIN = """
import sys
sys.modules["sparse"] = None  # Dask would import it, and it Numba
import hashlib, math
import numpy as np
from gpuscheduler.tracing import numba_cpu, numba_cuda
from gpuscheduler.codegen.cuda.nodes import DeviceCall

scale, text = float(sys.argv[1]), "x * 2 if x > 0 else x"
space = {"math": math}
exec(f"def helper(x):\\n    return {sys.argv[2]}\\ndef f(x):\\n    return helper(x) + K", space)
space["K"] = scale
function = numba_cpu.ScalarFunction(space["f"])
gives = function.results((np.dtype("f8"),))
call = DeviceCall("f_1", function, None, ("f8",), gives.str[1:])
piece = numba_cuda.compile_call(call, "sm_90")
known = [m for m in ("numba", "numba.cuda") if m in sys.modules]
print(gives, hashlib.sha256(piece).hexdigest(), *known)
"""


def test_another_process_compiles_nothing_and_needs_no_compiler(tmp_path):
    """But where the function, what it calls, or a number that it reads is another."""

    def run(*words):
        given = {**os.environ, "DASK_GPUSCHEDULER__CACHE_DIRECTORY": str(tmp_path)}
        command = [sys.executable, "-c", AGAIN, *words]
        out = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
        return out.stdout.split()

    first = run("1.5", "x * 2 if x > 0 else x")
    assert first[2:] == ["numba", "numba.cuda"]
    assert run("1.5", "x * 2 if x > 0 else x") == first[:2]
    for gives, other in (
        (first[0], ("2.5", "x * 2 if x > 0 else x")),
        ("float64", ("1.5", "x > 0")),
    ):
        found = run(*other)
        assert found[0] == gives
        assert found[1] != first[1]
        assert found[2:] == first[2:]


def test_fast_mathematics_is_linked_so():
    def quotient(x, y):
        return x / y if x < y else y / x

    (outputs,) = [(of(quotient, *lines("f4", "f4"), dtype="f4"),)]
    made = generate(Kernel((64,), outputs))
    exact, fast = (
        kernel_code.compile_kernel(made.source, "sm_90", made.calls, fast_math=f)
        for f in (False, True)
    )
    assert len(fast) < len(exact)
