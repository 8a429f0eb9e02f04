"""`math`, `cmath`, `complex`, `min` and `max`, on traced arrays.

Calls with numbers alone stay Python's.
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ..array import TracedArray, array_classes, as_traced, scalar_if_point
from ..bytecode import words
from ..compressed import CompressedArray
from ..context import current, refuse
from ..elementwise import complex_of
from ..registry import KNOWN, OF_NUMBERS, NumpyNamespace, scipy_special
from .statistics import result_type


def _of_numbers(python: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """`own` where an argument is an array, else Python's: its numbers change no type."""
    where = f"{python.__module__}.{python.__name__}"

    @functools.wraps(python)
    def choose_function(*args: Any, **kwargs: Any) -> Any:
        every = [v for a in args for v in (a if isinstance(a, (tuple, list)) else (a,))]
        known = [v for v in every if isinstance(v, TracedArray)]
        if any(v.dtype.kind == "c" for v in known) and python.__module__ != "cmath":
            raise refuse(f"it calls {where} with a complex number")
        if known and current.get().beside is not None:  # no mesh, whose points are numbers
            if python not in (min, max):  # which may be an error, and changes no type
                raise refuse(f"{where} gives a Python number: use NumPy's function")
            if any(v.shape for v in known):
                raise refuse(f"it calls {python.__name__} with an array")
        return own(*args, **kwargs) if known else python(*args, **kwargs)

    return choose_function


def _is_instance(value: Any, kinds: Any) -> bool:
    """Where all that the array may be when the task runs agrees on it."""
    if type(value) not in (TracedArray, CompressedArray):
        return isinstance(value, kinds)
    number, arrays = value.dtype.type, array_classes()
    if current.get().beside is None:  # a mesh: of points one by one, or of many at once
        python = {"f": np.float64, "c": np.complex128}.get(value.dtype.kind, number)
        may_be = [python, *arrays]
    elif value.ndim:
        may_be = arrays
    else:  # NumPy's scalars are 0-dimensional arrays of CuPy's, whose class is NumPy's by now
        may_be = [number] if value._scalar and len(arrays) == 1 else [number, *arrays]
    answers = {issubclass(k, kinds) for k in may_be}
    if len(answers) > 1:
        raise refuse("it asks for the type of an array")
    return answers.pop()


def _no_function(value: Any) -> None:
    """Refuse attributes of functions.

    The functions that a traced function finds are copies, without attributes that somebody may have
    set, or may set later.
    """
    if callable(value) and not isinstance(value, type):
        raise refuse("it asks for an attribute of a function")


def _attribute(value: Any, *name: Any) -> Any:
    _no_function(value)
    return getattr(value, *name)


def _has_attribute(value: Any, name: str) -> bool:
    if type(value) not in (TracedArray, CompressedArray):
        _no_function(value)
        return hasattr(value, name)
    answers = {hasattr(k, name) for k in array_classes()}
    if len(answers) > 1:
        raise refuse(f"it asks whether an array has .{name}")
    return answers.pop()


KNOWN[isinstance], KNOWN[hasattr], KNOWN[getattr] = _is_instance, _has_attribute, _attribute


def _minimum(a: Any, b: Any) -> Any:
    return np.where(np.less(b, a), b, a)  # of a NaN and a number, Python gives the first


def _maximum(a: Any, b: Any) -> Any:
    return np.where(np.greater(b, a), b, a)


def _best_of(choose: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return what `min` or `max` becomes; `choose` is it for two values."""

    def find_extreme(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise refuse(f"it calls Python's min or max with {', '.join(kwargs)}=")
        if len(args) < 2:
            raise refuse("it calls Python's min or max of one array: use .min() or .max()")
        types = {a.dtype for a in args if isinstance(a, TracedArray)}
        if current.get().beside is not None and types != {result_type(*args)}:
            raise refuse("it calls Python's min or max of values of several types")
        return scalar_if_point(functools.reduce(choose, args))

    return find_extreme


def _to_integer(rounding: Any) -> Callable[[Any], Any]:
    return lambda x: rounding(x).astype(np.int64) if as_traced(x).dtype.kind == "f" else x


def _logarithm(x: Any, base: Any = None) -> Any:
    return _log(x) if base is None else _log(x) / _log(base)


def _log(x: Any) -> Any:
    """Of a number of Python's it is one, and changes no type."""
    if isinstance(x, TracedArray):
        return np.log(x)
    with np.errstate(all="ignore"):
        return np.log(x if isinstance(x, complex) else float(x)).item()


def _distance(*coordinates: Any) -> Any:
    if len(coordinates) < 2:
        return abs(coordinates[0]) if coordinates else 0.0
    return functools.reduce(np.hypot, coordinates)


def _distance_between(p: Sequence[Any], q: Sequence[Any]) -> Any:
    return _distance(*[a - b for a, b in zip(p, q, strict=True)])


def _special_of(name: str) -> Callable[..., Any]:
    def call_special(*args: Any) -> Any:
        library = scipy_special()
        if library is None:
            raise refuse(f"it calls math.{name}, which SciPy would be needed for")
        return getattr(library, name)(*args)

    return call_special


#: NumPy's names for functions of Python's `math`.
_MATH_NAMES = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atan2": "arctan2", "atanh": "arctanh", "pow": "power", "degrees": "degrees",
    "radians": "radians", "gcd": "gcd", "lcm": "lcm",
    **{name: name for name in words(
        "cbrt copysign cos cosh exp exp2 expm1 fabs fmod isfinite isinf isnan ldexp log10 "
        "log1p log2 nextafter sin sinh sqrt tan tanh"
    )},
}  # fmt: skip
_MATH_OWN: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, numpys) for name, numpys in _MATH_NAMES.items()},
    "floor": _to_integer(np.floor), "ceil": _to_integer(np.ceil), "trunc": _to_integer(np.trunc),
    "log": _logarithm, "hypot": _distance, "dist": _distance_between,
    "gamma": _special_of("gamma"), "lgamma": _special_of("gammaln"),
    "erf": _special_of("erf"), "erfc": _special_of("erfc"),
}  # fmt: skip


def _as_complex(x: Any) -> Any:
    """A number of `cmath`'s, as precise as `x`."""
    if not isinstance(x, TracedArray):
        return complex(x)
    return x.astype(np.result_type(x.dtype, np.complex64 if x.dtype.kind in "fc" else complex))


def _complex_logarithm(*args: Any) -> Any:
    return _logarithm(*map(_as_complex, args))


def _of_complex(numpys: Any) -> Callable[[Any], Any]:
    return lambda z: numpys(_as_complex(z))


def _phase(z: Any) -> Any:
    z = _as_complex(z)
    return np.arctan2(z.imag, z.real)


def _polar(z: Any) -> tuple[Any, Any]:
    return abs(_as_complex(z)), _phase(z)


def _rect(r: Any, phi: Any) -> Any:
    turn = np.exp(1j * phi) if isinstance(phi, TracedArray) else cmath.rect(1, phi)
    return _number_of_parts(r * turn.real, r * turn.imag)


def _number_of_parts(real: Any = 0, imag: Any = 0) -> Any:
    """What `complex` makes of two numbers: `real + imag * 1j`."""
    if isinstance(real, str):
        raise refuse("it reads a number from text")
    given = [v.dtype for v in (real, imag) if isinstance(v, TracedArray)]
    for dtype in given:
        if dtype.kind not in "biufc":
            raise refuse(f"it makes a complex number of {dtype}")
    some = [t for t in given if t.kind != "b"]
    single = bool(some) and all(t in (np.float32, np.complex64) for t in some)
    wide = np.dtype(np.float32 if single else np.float64)

    def parts(v: Any) -> tuple[TracedArray, TracedArray]:
        v = as_traced(v)
        both = (v.real, v.imag) if v.dtype.kind == "c" else (v, as_traced(0.0))
        return both[0].astype(wide), both[1].astype(wide)

    (a, b), (c, d) = parts(real), parts(imag)
    whole, rest = a, c  # (a + bi) + (c + di) i
    if as_traced(imag).dtype.kind == "c":
        whole = a - d
    if as_traced(real).dtype.kind == "c":
        rest = b + c
    a, c = cast(list[TracedArray], np.broadcast_arrays(whole, rest))
    return scalar_if_point(complex_of(a, c, np.result_type(wide, np.complex64)))


class _TracedComplexType(type(complex)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, complex)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, complex)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known = any(isinstance(v, TracedArray) for v in (*args, *kwargs.values()))
        return (_number_of_parts if known else complex)(*args, **kwargs)


class TracedComplex(complex, metaclass=_TracedComplexType):
    """The type `complex` for functions of a mesh, whose numbers are arrays while traced."""

    dtype = np.dtype(complex)  # NumPy asks for it


_CMATH_NAMES = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atanh": "arctanh",
    **{name: name for name in words(
        "cos cosh exp isfinite isinf isnan log10 sin sinh sqrt tan tanh"
    )},
}  # fmt: skip
_CMATH_OWN: dict[str, Callable[..., Any]] = {
    **{name: _of_complex(getattr(np, numpys)) for name, numpys in _CMATH_NAMES.items()},
    "log": _complex_logarithm,
    "phase": _phase, "polar": _polar, "rect": _rect,
}  # fmt: skip
for _module, _functions in ((math, _MATH_OWN), (cmath, _CMATH_OWN)):
    OF_NUMBERS[_module] = NumpyNamespace(_module)
    for _name, _own in _functions.items():
        if hasattr(_module, _name):  # not in every version of Python
            KNOWN[getattr(_module, _name)] = _of_numbers(getattr(_module, _name), _own)
            OF_NUMBERS[_module].enter(_name, KNOWN[getattr(_module, _name)])
KNOWN[min] = _of_numbers(min, _best_of(_minimum))
KNOWN[max] = _of_numbers(max, _best_of(_maximum))
