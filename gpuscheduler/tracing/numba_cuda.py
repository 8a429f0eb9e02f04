"""Compile a Python function of numbers to device code and link it into a kernel.

No GPU is needed.

Numba reads the function; NVVM makes of it a piece that a kernel's machine code takes in when both
are linked, so that nothing is left of the call. No other module knows Numba's compiler.

What a function means here is what it means in Python, except:

- where it raises, or returns None, its result is NaN, or 0 if that is an integer or a bool;
- division by zero, and functions of `math` outside their domain, raise nothing: floats become
  infinite or NaN, integers 0, as in NumPy;
- integers have 64 bits, and unsigned ones of 64 bits become float64 beside others; a result is cast
  to the type that was asked for;
- NumPy's functions take and give single numbers: float32 for float32, else float64.

Products and sums are rounded one by one (no fused multiply-add), as on a CPU.
"""

from __future__ import annotations

import cmath
import math
import types as python
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import disk_cache
from ..codegen.cuda.nodes import DeviceCall
from ..codegen.cuda.operations import FUNCTIONS
from ..forks import new_rlock
from ..gc_control import of_things_that_stay
from ..numba_private import device_capability
from .bytecode import names_read, narrow_module, replace_globals
from .numba_cpu import DECIDES_CODE, numbered_apart, python_function, reason, versions

#: What nvJitLink and NVVM shall do. The linker's `-fma` alone decides for all that is linked, the
#: kernel's own text too, whatever that was compiled with.
LINK = {
    False: ("-lto", "-O3", "-fma=0"),
    True: ("-lto", "-O3", "-fma=1", "-ftz=1", "-prec-div=0", "-prec-sqrt=0"),
}
#: Of what Numba has compiled: the function's name, and the text of each module.
NAME_AND_TEXTS = attrgetter("fndesc.llvm_func_name", "library.llvm_strs")
NVVM = {"opt": 3, "fma": 0, "gen-lto": None}
INSTALL = 'pip install "gpuscheduler[cuda12]", or cuda13, brings it'


class NoDeviceCode(Exception):
    """The function cannot be compiled: which one, for which types, where in it, and why."""


def compile_call(call: DeviceCall, arch: str) -> bytes:
    """LTO-IR that defines `call.symbol` for an architecture such as ``sm_90``.

    The function takes a pointer to the result and the arguments, a complex one as two parts, and
    returns 0 unless it raised.
    """
    with _one_at_a_time:  # kernels that are compiled together may call the same
        return _find_or_compile(call, arch)


_one_at_a_time = new_rlock()


@lru_cache(1024)
def _find_or_compile(call: DeviceCall, arch: str) -> bytes:
    words = None
    if call.function.lasting:
        types = call.part, call.args, call.gives
        words = "LTO-IR", call.symbol, call.function.digest, types, arch, NVVM, version()
    found = disk_cache.read(words)
    if found is None:
        with of_things_that_stay():
            _numba()
            every = "numba.cuda.core.bytecode", "numba.core.bytecode"
            apart = False not in [numbered_apart(n) for n in every if find_spec(n)]
            found = _compile_with_numba(call, arch)
        if apart:
            disk_cache.keep(words, found)
    return found


def _compile_with_numba(call: DeviceCall, arch: str) -> bytes:
    numba = _numba()
    capability = _capability(arch)
    texts = llvm(call, arch)
    try:
        return bytes(numba.compile_ir(texts, arch=f"compute_{capability}", **NVVM))
    except Exception as error:
        raise NoDeviceCode(f"{_title(call)}: {_first_line(error)}") from error


def llvm(call: DeviceCall, arch: str) -> list[str]:
    """The same as LLVM's text."""
    numba = _numba()
    capability = _capability(arch)
    digits = int(capability[:-1]), int(capability[-1])
    functions = _RebuiltFunctions(numba, call)
    try:
        with numba.lock, device_capability(_numba().dispatcher, digits):
            made = numba.compile(
                functions.entry(),
                numba.types[call.gives],
                tuple(numba.types[a] for a in call.args),
                cc=digits,
                lto=True,
                abi="numba",
                nvvm_options=NVVM,
            )
            name, texts = NAME_AND_TEXTS(made)  # the name is another in each process
            return [t.replace(f'"{name}"', f'"{call.symbol}"') for t in texts]
    except NoDeviceCode:
        raise
    except Exception as error:
        own = [f"{n} calls itself, which a GPU's code cannot; " for n in functions.recursive[:1]]
        raise NoDeviceCode(f"{_title(call)}: {''.join(own)}{reason(error)}") from error


def link(pieces: Sequence[bytes], arch: str, fast_math: bool = False) -> bytes:
    """Machine code of LTO-IR: a kernel's first, and what it calls."""
    linker = _numba().nvjitlink
    options = [f"-arch={arch}", *LINK[fast_math]]
    handle = linker.create(len(options), options)
    try:
        for n, piece in enumerate(pieces):
            linker.add_data(handle, linker.InputType.LTOIR, piece, len(piece), f"piece {n}")
        linker.complete(handle)
        out = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, out)
        return bytes(out)
    except linker.nvJitLinkError as error:
        log = bytearray(linker.get_error_log_size(handle))
        linker.get_error_log(handle, log)
        words = log.decode(errors="replace").strip("\0\n ")
        raise NoDeviceCode(f"linking for {arch}: {error}. {words}") from error
    finally:
        linker.destroy(handle)


#: Files that decide which device code is made of a function.
DECIDES_DEVICE_CODE = (
    *DECIDES_CODE,
    Path(__file__),
    *sorted((Path(__file__).parents[1] / "codegen" / "cuda").glob("*.*")),
    *sorted((Path(__file__).parents[1] / "codegen" / "cuda" / "library").glob("*.cuh")),
)


@cache
def version() -> str:
    """What the same function may become other code by: the compilers, and this module."""
    packages = "numba", "numba-cuda", "llvmlite", "cuda-bindings", "numpy"
    libraries = "nvidia-nvjitlink-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink", "nvidia-nvvm"
    return versions([*packages, *libraries], DECIDES_DEVICE_CODE)


# ---- Numba


@cache
def _numba() -> SimpleNamespace:
    """The parts of Numba and of CUDA's Python that are used here, imported when first needed."""
    try:
        nvjitlink = import_module("cuda.bindings.nvjitlink")
        nvjitlink.version()
        inside = ("compiler", "core.compiler_lock", "cudadrv.nvvm", "extending")
        compiler, locks, nvvm, extending = (import_module(f"numba.cuda.{n}") for n in inside)
        types = import_module("numba.types")
        words = {"f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"}
        words |= {f"{k}{n}": f"{'u' * (k == 'u')}int{8 * n}" for k in "iu" for n in (1, 2, 4, 8)}
        numbers = {short: getattr(types, word) for short, word in words.items()}
        return SimpleNamespace(
            compile=compiler.compile_cuda, compile_ir=nvvm.compile_ir, nvjitlink=nvjitlink,
            lock=locks.global_compiler_lock, overload=extending.overload,
            cuda=import_module("numba.cuda"), libdevice=import_module("numba.cuda.libdevice"),
            dispatcher=import_module("numba.cuda.dispatcher"),
            kinds=types, types=numbers | {"b1": types.boolean},
        )  # fmt: skip
    except Exception as error:  # a library that is not there has exceptions of its own
        raise NoDeviceCode(
            f"Python functions need numba-cuda, NVVM and nvJitLink on a GPU ({INSTALL}): "
            f"{_first_line(error)}"
        ) from error


def _capability(arch: str) -> str:
    """
    >>> _capability("sm_90")
    '90'
    """
    return arch.removeprefix("sm_").rstrip("af")


# ---- what Numba is given


class _RebuiltFunctions:
    """Functions rebuilt for the GPU, each once.

    The code is the same. The modules, NumPy functions and user's functions that its names mean are
    not.
    """

    def __init__(self, numba: SimpleNamespace, call: DeviceCall) -> None:
        self.numba, self.call = numba, call
        self.substitutes = _substitutes()
        self.devices: dict[int, Any] = {}
        self.recursive: list[str] = []  # names of functions that mention themselves
        self.entered: set[int] = set()

    def entry(self) -> Any:
        """What is compiled: a function of exactly these arguments, and of one result."""
        part = "" if self.call.part is None else f"[{self.call.part:d}]"
        names = ", ".join(f"x{n}" for n in range(len(self.call.args)))
        space = {"inner": self.device(self.call.function.python)}
        return eval(f"lambda {names}: inner({names}){part}", space)

    def device(self, function: Any) -> Any:
        """A function that other device functions can call; itself where it is asked for within."""
        if id(function) not in self.devices:
            if id(function) in self.entered:
                self.recursive.append(function.__name__)
                return function
            self.devices[id(function)] = self.numba.cuda.jit(device=True, forceinline=True)(
                self.rebuild_function(function)
            )
        return self.devices[id(function)]

    def rebuild_function(self, function: Any) -> Any:
        if not isinstance(function, python.FunctionType):
            raise NoDeviceCode(f"{_title(self.call)}: {function!r} is no Python function")
        names = names_read(function.__code__)
        self.entered.add(id(function))
        out = replace_globals(function, lambda value: self.value(value, names))
        self.entered.discard(id(function))
        return out

    def value(self, value: Any, names: set[str]) -> Any:
        """What a value is to be on the GPU. Of a module that is what the function may ask for."""
        found = self.substitutes.get(_key(value))
        if found is not None:
            return found
        function = python_function(value)
        if function is not None:
            return self.device(function)
        if isinstance(value, python.ModuleType) and not value.__name__.startswith("numba"):
            return narrow_module(value, names, self.value)
        return value


def _key(value: Any) -> Any:
    """A ufunc by its name, so that SciPy's need not be imported; others by what they are."""
    import numpy as np

    if isinstance(value, np.ufunc):
        return value.__name__
    return id(value)


# ---- NumPy's functions, and those of `math` that Numba reads otherwise than Python

_WHOLE = {"floor", "ceil", "trunc", "rint"}  # of an integer, that integer


@cache
def _substitutes() -> dict[Any, Any]:
    """By `_key`: functions that Numba can compile for a GPU."""
    import numpy as np

    numba = _numba()
    out: dict[Any, Any] = {}
    for name, real in FUNCTIONS.items():
        one = getattr(numba.libdevice, real, None)
        if one is not None:
            out[name] = _of_libdevice(name, real, numba)
    out["gammaln"] = _of_libdevice("gammaln", "lgamma", numba)
    for name, function in _python_sources(out).items():
        out[name] = numba.cuda.jit(device=True, forceinline=True)(function)
    for name in ("abs", "where", "clip", "real", "imag", "angle", "round", "around", "sinc"):
        out[id(getattr(np, name))] = out[_SAME.get(name, name)]
    for name in ("floor", "ceil", "trunc", "log"):
        out[id(getattr(math, name))] = out[f"math.{name}"]
    out[id(cmath.exp)] = numba.cuda.jit(device=True, forceinline=True)(_complex_exp)
    for name in ("exp2", "cbrt"):  # of Python 3.11
        if hasattr(math, name):
            out[id(getattr(math, name))] = out[name]
    return out


def _complex_exp(z: Any) -> Any:
    """Return the exponential of a complex number, as C does.

    Numba's own computes a sine and a cosine for each of three cases, which doubles the time to
    link.
    """
    x, y = z.real, z.imag
    size, c, s = math.exp(x), math.cos(y), math.sin(y)
    real, imag = size * c, size * s
    if x - x != 0:  # infinite, or NaN
        if x != x:
            real, imag = x, (x if y != 0 else y)
        elif y - y != 0:
            real, imag = (x, y - y) if x > 0 else (size, size)
        elif x > 0:
            real, imag = (c * x if c != 0 else c), (s * x if s != 0 else s)
    return complex(real, imag)


_SAME = {"abs": "absolute", "round": "rint", "around": "rint"}


def _of_libdevice(name: str, real: str, numba: SimpleNamespace) -> Any:
    """Return the function of CUDA's own library, for float64, and with an f behind it for float32.

    Some are known of complex numbers, too.
    """
    double, single = getattr(numba.libdevice, real), getattr(numba.libdevice, f"{real}f")
    other = getattr(cmath, {"arctan": "atan"}.get(name, name.replace("arc", "a")), None)
    kinds = numba.kinds
    two = name in _BINARY

    def stub(x: Any) -> Any: ...

    def stub_of_two(x: Any, y: Any) -> Any: ...

    def choose_function(x: Any) -> Any:
        if isinstance(x, kinds.Complex):
            return (lambda x: other(x)) if other else None
        if x == kinds.float32:
            return lambda x: single(x)
        if isinstance(x, kinds.Integer) and name in _WHOLE:
            return lambda x: x
        return lambda x: double(float(x))

    def chosen_of_two(x: Any, y: Any) -> Any:
        if isinstance(x, kinds.Complex) or isinstance(y, kinds.Complex):
            return None
        if x == y == kinds.float32:
            return lambda x, y: single(x, y)
        return lambda x, y: double(float(x), float(y))

    function: Any = stub_of_two if two else stub
    choose: Any = chosen_of_two if two else choose_function
    function.__name__ = function.__qualname__ = name
    choose.__annotations__ = {}  # Numba wants those of what is chosen, which has none
    numba.overload(function)(choose)
    return function


_BINARY = {"arctan2", "hypot", "fmod", "copysign", "nextafter", "fmax", "fmin"}


def _python_sources(known: dict[Any, Any]) -> dict[str, Callable[..., Any]]:
    """Those that are a line of Python."""
    floor, ceil, trunc = known["floor"], known["ceil"], known["trunc"]
    exp, log, log2, exp2, log1p = (known[n] for n in ("exp", "log", "log2", "exp2", "log1p"))
    pi, e = math.pi, math.log2(math.e)

    def log_of_base(x: Any, base: Any = math.e) -> Any:
        return log(x) if base == math.e else log(x) / log(base)

    def maximum(x: Any, y: Any) -> Any:
        return x if x >= y or x != x else y

    def minimum(x: Any, y: Any) -> Any:
        return x if x <= y or x != x else y

    def sign(x: Any) -> Any:
        return 1 if x > 0 else (-1 if x < 0 else (0 if x == 0 else x))

    def gcd(x: Any, y: Any) -> Any:
        return math.gcd(x, y)

    def lcm(x: Any, y: Any) -> Any:
        return 0 if x == 0 or y == 0 else abs(x) // math.gcd(x, y) * abs(y)

    def log_add_exp(x: Any, y: Any) -> Any:
        return x + math.log(2.0) if x == y else max(x, y) + log1p(exp(-abs(x - y)))

    def log_add_exp2(x: Any, y: Any) -> Any:
        return x + 1.0 if x == y else max(x, y) + e * log1p(exp2(-abs(x - y)))

    return {
        "math.floor": lambda x: int(floor(x)), "math.ceil": lambda x: int(ceil(x)),
        "math.trunc": lambda x: int(trunc(x)), "math.log": log_of_base,
        "absolute": lambda x: abs(x), "fabs": lambda x: abs(float(x)), "square": lambda x: x * x,
        "positive": lambda x: x, "negative": lambda x: -x, "reciprocal": lambda x: 1 / x,
        "sign": sign, "add": lambda x, y: x + y, "subtract": lambda x, y: x - y,
        "multiply": lambda x, y: x * y, "divide": lambda x, y: x / y,
        "floor_divide": lambda x, y: x // y, "remainder": lambda x, y: x % y,
        "power": lambda x, y: x**y, "float_power": lambda x, y: float(x) ** float(y),
        "maximum": maximum, "minimum": minimum, "where": lambda c, x, y: x if c else y,
        "clip": lambda x, low, high: low if x < low else (high if x > high else x),
        "equal": lambda x, y: x == y, "not_equal": lambda x, y: x != y,
        "less": lambda x, y: x < y, "less_equal": lambda x, y: x <= y,
        "greater": lambda x, y: x > y, "greater_equal": lambda x, y: x >= y,
        "logical_and": lambda x, y: bool(x) and bool(y),
        "logical_or": lambda x, y: bool(x) or bool(y),
        "logical_xor": lambda x, y: bool(x) != bool(y), "logical_not": lambda x: not x,
        "bitwise_and": lambda x, y: x & y, "bitwise_or": lambda x, y: x | y,
        "bitwise_xor": lambda x, y: x ^ y, "invert": lambda x: ~x,
        "left_shift": lambda x, y: x << y, "right_shift": lambda x, y: x >> y,
        "isnan": lambda x: x != x, "isfinite": lambda x: x - x == 0,
        "isinf": lambda x: x == x and x - x != 0,
        "signbit": lambda x: math.copysign(1.0, x) < 0,
        "deg2rad": lambda x: x * (pi / 180), "rad2deg": lambda x: x * (180 / pi),
        "radians": lambda x: x * (pi / 180), "degrees": lambda x: x * (180 / pi),
        "conjugate": lambda x: x.conjugate(), "real": lambda x: x.real, "imag": lambda x: x.imag,
        "angle": lambda x: math.atan2(x.imag, x.real), "gcd": gcd, "lcm": lcm,
        "heaviside": lambda x, y: x if x != x else (y if x == 0 else (0.0 if x < 0 else 1.0)),
        "logaddexp": log_add_exp, "logaddexp2": log_add_exp2,
        "ldexp": lambda x, n: math.ldexp(x, n),
        "sinc": lambda x: 1.0 if x == 0 else math.sin(pi * x) / (pi * x),
        "expit": lambda x: 1 / (1 + exp(-x)), "logit": lambda x: log(x / (1 - x)),
    }  # fmt: skip


# ---- what is said when it fails


def _title(call: DeviceCall) -> str:
    types = ", ".join(_type_word(a) for a in call.args)
    what = "" if call.part is None else f", result {call.part}"
    return f"{call.function.name}({types}) -> {_type_word(call.gives)}{what} has no device code"


def _type_word(short: str) -> str:
    import numpy as np

    return np.dtype("?" if short == "b1" else short).name


def _first_line(error: BaseException) -> str:
    return next((x for x in str(error).splitlines() if x.strip()), type(error).__name__)
