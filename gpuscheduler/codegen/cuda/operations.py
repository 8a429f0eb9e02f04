"""CUDA C++ text of each operation, with NumPy's meaning.

`operation` and `cast` give the text of one node. It calls CUDA's own mathematics, or functions
of the device library; a kernel carries only the pieces it needs.

Types have short codes here, kind and bytes: ``b1``, ``i4``, ``f2``, ``c16``. A float16 value is
held as a float that float16 can represent, and rounded after every operation, as NumPy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Code -> C++ type of a value in a register.
TYPES = {
    "b1": "bool", "i1": "signed char", "i2": "short", "i4": "int", "i8": "long long",
    "u1": "unsigned char", "u2": "unsigned short", "u4": "unsigned", "u8": "unsigned long long",
    "f2": "float", "f4": "float", "f8": "double",
    "c8": "Complex<float>", "c16": "Complex<double>",
}  # fmt: skip
#: Code -> C++ type in memory, where it is another.
STORED = TYPES | {"b1": "unsigned char", "f2": "unsigned short"}

#: What stands for no value: NaN, or zero where the type has none.
_NAN, _NANF = "__longlong_as_double(0x7ff8000000000000ll)", "__int_as_float(0x7fc00000)"
NOT_A_NUMBER = {short: f"({kind})0" for short, kind in TYPES.items()} | {
    "f2": _NANF, "f4": _NANF, "f8": _NAN,
    "c8": f"Complex<float>{{{_NANF}, {_NANF}}}", "c16": f"Complex<double>{{{_NAN}, {_NAN}}}",
}  # fmt: skip


def code(dtype: np.dtype[Any]) -> str | None:
    """
    >>> code(np.dtype("float16")), code(np.dtype("longdouble"))
    ('f2', None)
    """
    short = f"{dtype.kind}{dtype.itemsize}"
    return short if short in TYPES and dtype.isnative else None


# ---- operations

#: NumPy's and SciPy's names -> functions of real numbers in C, to which floats add an f.
FUNCTIONS = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh",
    "arctanh": "atanh", "arctan2": "atan2", "absolute": "fabs", "power": "pow",
    "float_power": "pow", "gamma": "tgamma", "gammaln": "log_gamma", "ndtr": "normcdf",
    "ndtri": "normcdfinv", "i0": "cyl_bessel_i0", "i1": "cyl_bessel_i1", "sign": "sign_of",
    "remainder": "remainder_of", "floor_divide": "quotient_of", "maximum": "larger",
    "minimum": "smaller", "heaviside": "step_of", "logaddexp": "log_add_exp",
    "logaddexp2": "log_add_exp2", "expit": "expit_of", "logit": "logit_of", "exprel": "exprel_of",
    "cube": "cube_of", "fourth": "fourth_of",
} | {
    name: name
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh",
        "cosh", "tanh", "sqrt", "cbrt", "floor", "ceil", "trunc", "rint", "fabs", "hypot", "fmod",
        "copysign", "nextafter", "fmax", "fmin", "erf", "erfc", "erfinv", "erfcinv", "j0", "j1",
        "y0", "y1",
    )
}  # fmt: skip
_COMPARISONS = {
    "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">",
    "greater_equal": ">=",
}  # fmt: skip
_MIXED = {
    "equal": "mixed_equal({0}, {1})", "not_equal": "!mixed_equal({0}, {1})",
    "less": "mixed_less({0}, {1})", "less_equal": "!mixed_less({1}, {0})",
    "greater": "mixed_less({1}, {0})", "greater_equal": "!mixed_less({0}, {1})",
}  # fmt: skip
_LOGICAL = {
    "logical_and": "{0} && {1}", "logical_or": "{0} || {1}", "logical_xor": "{0} != {1}",
    "logical_not": "!{0}",
}  # fmt: skip
_ALWAYS = {"isnan": "false", "isinf": "false", "isfinite": "true"}
_BOOLS = _LOGICAL | {
    "add": "{0} || {1}", "multiply": "{0} && {1}", "maximum": "{0} || {1}",
    "minimum": "{0} && {1}", "fmax": "{0} || {1}", "fmin": "{0} && {1}",
    "bitwise_or": "{0} || {1}", "bitwise_and": "{0} && {1}", "bitwise_xor": "{0} != {1}",
    "invert": "!{0}", "absolute": "{0}", "positive": "{0}", "conjugate": "{0}",
    "floor": "{0}", "ceil": "{0}", "trunc": "{0}",
}  # fmt: skip
_UNITS = {
    "deg2rad": ("(0.017453292519943295)", "(3.141592654f / 180.0f)"),
    "rad2deg": ("(57.29577951308232)", "(180.0f / 3.141592654f)"),
}  # fmt: skip
_REALS = {
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "divide": "{0} / {1}",
    "negative": "-{0}", "positive": "{0}", "conjugate": "{0}", "square": "{0} * {0}",
    "reciprocal": "1 / {0}", "isnan": "{0} != {0}",
}  # fmt: skip
#: What needs no rounding to float16, which its arguments are already.
_EXACT = frozenset({
    "negative", "positive", "conjugate", "absolute", "fabs", "sign", "floor", "ceil", "trunc",
    "rint", "maximum", "minimum", "fmax", "fmin", "copysign", "heaviside", "fmod",
})  # fmt: skip
_USUAL = {
    "divide": "usual_quotient", "reciprocal": "usual_inverse", "sqrt": "usual_root",
    "log": "usual_log",
}  # fmt: skip
_INTEGERS = {
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "negative": "0u - {0}",
    "square": "{0} * {0}",
}  # fmt: skip
_COMPLEX = {
    "add": "{{{0}.x + {1}.x, {0}.y + {1}.y}}", "subtract": "{{{0}.x - {1}.x, {0}.y - {1}.y}}",
    "multiply": "times~({0}, {1})", "divide": "over~({0}, {1})", "negative": "{{-{0}.x, -{0}.y}}",
    "positive": "{0}", "conjugate": "{{{0}.x, -{0}.y}}", "square": "times~({0}, {0})",
    "reciprocal": "one_over~({0})", "absolute": "hypot~({0}.x, {0}.y)",
    "equal": "{0}.x == {1}.x && {0}.y == {1}.y", "not_equal": "{0}.x != {1}.x || {0}.y != {1}.y",
    "isnan": "{0}.x != {0}.x || {0}.y != {0}.y",
    "isfinite": "is_finite~({0}.x) && is_finite~({0}.y)",
    "isinf": "is_infinite~({0}.x) || is_infinite~({0}.y)", "sign": "complex_sign~({0})",
    "rint": "{{rint~({0}.x), rint~({0}.y)}}",
    "exp2": "complex_exp~(times_real~({0}, (Real)0x1.62e42fefa39efp-1))",
    "log2": "times_real~(complex_log~({0}), (Real)0x1.71547652b82fep+0)",
    "log10": "times_real~(complex_log~({0}), (Real)0x1.bcb7b1526e50ep-2)",
    "power": "complex_power~({0}, {1})", "float_power": "complex_power~({0}, {1})",
    "less": "complex_less~({0}, {1})", "less_equal": "complex_less_equal~({0}, {1})",
    "greater": "complex_less~({1}, {0})", "greater_equal": "complex_less_equal~({1}, {0})",
    "maximum": "complex_isnan~({0}) || complex_less_equal~({1}, {0}) ? {0} : {1}",
    "minimum": "complex_isnan~({0}) || complex_less_equal~({0}, {1}) ? {0} : {1}",
    "fmax": "complex_isnan~({1}) || complex_less_equal~({1}, {0}) ? {0} : {1}",
    "fmin": "complex_isnan~({1}) || complex_less_equal~({0}, {1}) ? {0} : {1}",
} | {
    name: f"complex_{name}~({{0}})"
    for name in (
        "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh",
        "arcsin", "arccos", "arctan", "arcsinh", "arccosh", "arctanh",
    )
}  # fmt: skip
_ALIASES = {
    "true_divide": "divide", "mod": "remainder", "abs": "absolute", "conj": "conjugate",
    "bitwise_not": "invert", "degrees": "rad2deg", "radians": "deg2rad", "pow": "power",
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atan2": "arctan2", "atanh": "arctanh", "bitwise_invert": "invert",
    "bitwise_left_shift": "left_shift", "bitwise_right_shift": "right_shift",
}  # fmt: skip


def operation(op: str, types: Sequence[str], gives: str, args: Sequence[str]) -> str | None:
    """What computes one operation, of arguments that are names; None where there is nothing.

    >>> operation("add", ("f8", "f8"), "f8", ("x", "y"))
    'x + y'
    >>> operation("exp", ("f4",), "f4", ("x",)), operation("exp", ("f2",), "f2", ("x",))
    ('expf(x)', 'half_round(expf(x))')
    """
    op, kind = _ALIASES.get(op, op), types[0][0]
    if op in _LOGICAL:
        return _LOGICAL[op].format(*[f"({truth(t, a)})" for t, a in zip(types, args, strict=True)])
    if op == "ldexp":
        text = f"scaled{'' if gives == 'f8' else 'f'}({args[0]}, {args[1]})"
        return f"half_round({text})" if gives == "f2" else text
    if len(set(types)) > 1:
        mixed = set(types) == {"i8", "u8"} and op in _MIXED
        return _MIXED[op].format(*args) if mixed else None
    if op in _COMPARISONS and kind != "c":
        return f"{args[0]} {_COMPARISONS[op]} {args[1]}"
    if op in _ALWAYS and kind in "biu":
        return _ALWAYS[op]
    if kind == "b":
        return _BOOLS[op].format(*args) if op in _BOOLS and gives == "b1" else None
    if kind in "iu":
        return _integer_operation(op, types[0], gives, args)
    if kind == "f":
        return _float(op, types[0], gives, args)
    if op not in _COMPLEX:
        return None
    suffix, real = ("", "double") if types[0] == "c16" else ("f", "float")
    text = _COMPLEX[op].replace("~", suffix).replace("Real", real).format(*args)
    return TYPES[gives] + text if text.startswith("{") else text


def _integer_operation(op: str, short: str, gives: str, args: Sequence[str]) -> str | None:
    name = TYPES[short]
    wide = "unsigned long long" if short[1] == "8" else "unsigned"
    if op == "negative" and short[0] == "i":
        return f"({name})negated(({'long long' if short[1] == '8' else 'int'}){args[0]})"
    if op in _INTEGERS:
        words = [f"({wide}){a}" for a in args]
        return f"({name})({_INTEGERS[op].format(*words)})"
    if op in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        sign = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}[op]
        return f"({name})({args[0]} {sign} {args[1]})"
    if op in ("maximum", "fmax", "minimum", "fmin"):
        sign = ">=" if op in ("maximum", "fmax") else "<="
        return f"{args[0]} {sign} {args[1]} ? {args[0]} : {args[1]}"
    if op in (
        "floor_divide", "fmod", "remainder", "power", "left_shift", "right_shift", "gcd", "lcm"
    ):  # fmt: skip
        return f"int_{op}<{name}>({', '.join(args)})"
    (x, *_) = args
    if op == "divide" and gives == "f8":
        return f"(double){x} / (double){args[1]}"
    if op in ("positive", "conjugate", "floor", "ceil", "trunc"):
        return x
    if op == "invert":
        return f"({name})~{x}"
    if op == "absolute":
        return x if short[0] == "u" else f"{x} < 0 ? ({name})(0u - ({wide}){x}) : {x}"
    if op == "sign":
        return f"({name})(({x} > 0) - ({x} < 0))" if short[0] == "i" else f"({name})({x} > 0)"
    if op == "reciprocal":
        return cast("f8", short, f"(1.0 / (double){x})")
    if op == "bitwise_count":
        return f"(unsigned char)__popcll(int_size({x}))"
    return None


def _float(op: str, short: str, gives: str, args: Sequence[str]) -> str | None:
    f = "" if short == "f8" else "f"
    if op in ("isinf", "isfinite", "signbit"):
        name = {"isinf": "is_infinite", "isfinite": "is_finite", "signbit": "negative_bit"}[op]
        return f"{name}{f}({args[0]})"
    if op == "nextafter" and short == "f2":
        return None
    if op in _REALS:
        text = _REALS[op].format(*args)
    elif op in _UNITS:
        text = f"{args[0]} * {_UNITS[op][f == 'f']}"
    elif op == "log" and short == "f4":
        text = f"log_of({args[0]})"
    elif op in FUNCTIONS:
        text = f"{FUNCTIONS[op]}{f}({', '.join(args)})"
    else:
        return None
    return f"half_round({text})" if gives == "f2" and op not in _EXACT else text


def approximate_text(op: str, short: str, args: Sequence[str]) -> str | None:
    """A faster text of a quotient, inverse, root or logarithm, or None.

    It sets ``rare`` where its result must not be used.

    >>> approximate_text("true_divide", "f4", ("x", "y")), approximate_text("sqrt", "f8", ("x",))
    ('usual_quotient(x, y, rare)', None)
    """
    name = _USUAL.get(_ALIASES.get(op, op))
    return f"{name}({', '.join(args)}, rare)" if name and short == "f4" else None


def truth(short: str, x: str) -> str:
    """Whether a value is true."""
    if short == "b1":
        return x
    return f"{x}.x != 0 || {x}.y != 0" if short[0] == "c" else f"{x} != 0"


def cast(old: str, new: str, x: str) -> str:
    """Write the conversion of a value to another type.

    A real number that an integer type cannot hold becomes what it becomes on x86-64: the least
    int32 or int64, and the lowest bits of that in shorter types.
    """
    if old == new:
        return x
    if new == "b1":
        return truth(old, x)
    if new[0] == "c":
        part = "f4" if new == "c8" else "f8"
        if old[0] == "c":
            real = TYPES[part]
            return f"{TYPES[new]}{{({real}){x}.x, ({real}){x}.y}}"
        return f"{TYPES[new]}{{{cast(old, part, x)}, 0}}"
    if old[0] == "c":
        return cast("f4" if old == "c8" else "f8", new, f"{x}.x")
    if new == "f2":
        return f"half_of_double({x})" if old == "f8" else f"half_round((float){x})"
    if old[0] == "f" and new[0] in "iu":
        function = {"i8": "to_long", "u4": "to_long", "u8": "to_unsigned_long"}.get(new, "to_int")
        return f"({TYPES[new]}){function}({x})"
    return x if TYPES[old] == TYPES[new] else f"({TYPES[new]}){x}"


def load_value(short: str, x: str) -> str:
    """The value of what is in memory."""
    if short == "f2":
        return f"half_value({x})"
    return f"{x} != 0" if short == "b1" else x


def store_value(short: str, x: str) -> str:
    """What is written to memory."""
    return f"half_bits({x})" if short == "f2" else x


# ---- reductions


def accumulator(
    op: str, short: str, gives: str, name: str, scans: bool = False
) -> tuple[str, str] | None:
    """The structure that accumulates a reduction or scan, and the code of its values.

    `short` is the code of what is reduced, `gives` that of the first result. None where there is
    no such structure.
    """
    if op == "moment":
        if short[0] == "c":
            return f"typedef ComplexMoment {name};", short
        return f"typedef Moment {name};", "f8" if short[0] in "iub" else short
    if op in ("any", "all"):
        sign, start = ("||", "false") if op == "any" else ("&&", "true")
        return _simple_reducer(name, "bool", start, f"v {sign} x", f"v {sign} o.v"), "b1"
    if op in ("sum", "prod") and gives != "b1":
        return _sum_operation(op, gives, name, scans), gives
    if op in ("sum", "prod"):
        return accumulator("any" if op == "sum" else "all", short, gives, name)
    if op in ("argmin", "argmax"):
        return _argument(op, short, name), short
    extreme = {"min": "minimum", "max": "maximum"}.get(op, op)
    step = operation(extreme, (short, short), short, ("v", "x"))
    join = operation(extreme, (short, short), short, ("v", "o.v"))
    return _simple_reducer(
        name, TYPES[short], _neutral_value(op, short), str(step), str(join)
    ), short


def _neutral_value(op: str, short: str) -> str:
    """What gives way to any value, in a minimum or maximum."""
    least = op in ("max", "fmax")
    if short[0] == "c":
        part = _neutral_value(op, "f4" if short == "c8" else "f8")
        return f"{TYPES[short]}{{{part}, {part}}}"
    if short == "b1":
        return "false" if least else "true"
    if short[0] == "f":
        if op in ("fmax", "fmin"):
            bits = "0x7ff8000000000000ll" if short == "f8" else "0x7fc00000"
        elif short == "f8":
            bits = "(long long)0xfff0000000000000ull" if least else "0x7ff0000000000000ll"
        else:
            bits = "(int)0xff800000u" if least else "0x7f800000"
        return f"{'__longlong_as_double' if short == 'f8' else '__int_as_float'}({bits})"
    size = 8 * int(short[1])
    if short[0] == "u":
        return "0" if least else f"({TYPES[short]})~0ull"
    low = f"(1ull << {size - 1})"
    return f"({TYPES[short]}){low if least else f'({low} - 1)'}"


def _simple_reducer(name: str, kind: str, start: str, step: str, join: str) -> str:
    return f"""
struct alignas(8) {name} {{
  {kind} v;
  __device__ __forceinline__ void clear() {{ v = {start}; }}
  template<int N> __device__ __forceinline__ void take(const {kind} (&values)[N]) {{
    #pragma unroll
    for (int i = 0; i < N; ++i) {{ const {kind} x = values[i]; v = {step}; }}
  }}
  __device__ __forceinline__ void merge(const {name}& o) {{ v = {join}; }}
}};""".strip("\n")


def _sum_operation(op: str, gives: str, name: str, scans: bool) -> str:
    """Write the structure of sums and products.

    Floating-point numbers are accumulated as doubles; each thread first adds up the values that it
    has at hand in their own type.
    """
    kind, sign = TYPES[gives], "+" if op == "sum" else "*"
    if gives[0] in "iu":
        wide = f"unsigned {'long long' if gives[1] == '8' else 'int'}"
        step, join = (
            f"({kind})(({wide})v {sign} ({wide})x)",
            f"({kind})(({wide})v {sign} ({wide})o.v)",
        )
        return _simple_reducer(name, kind, str(int(op == "prod")), step, join)
    if gives[0] == "f":
        take = "v += (double)added(x);"
        if op == "prod":
            take = "for (int i = 0; i < N; ++i) v *= (double)x[i];"
        return f"""
struct alignas(8) {name} {{
  double v;
  __device__ __forceinline__ void clear() {{ v = {int(op == "prod")}; }}
  template<int N> __device__ __forceinline__ void take(const {kind} (&x)[N]) {{ {take} }}
  __device__ __forceinline__ void merge(const {name}& o) {{ v = v {sign} o.v; }}
}};""".strip("\n")
    step = "{v.x + (double)x[i].x, v.y + (double)x[i].y}"
    join = "{v.x + o.v.x, v.y + o.v.y}"
    member, none, count = "", "", ""
    if op == "prod":
        step = "times(v, Complex<double>{(double)x[i].x, (double)x[i].y})"
        join = "times(v, o.v)"
    if op == "prod" and scans:  # what comes first, as it is: NaN times one is NaN in both parts
        step = "n++ ? " + step + " : Complex<double>{(double)x[i].x, (double)x[i].y}"
        join = f"!o.n ? v : n ? {join} : o.v"
        member, none, count = "unsigned long long n;", "n = 0;", "n += o.n;"
    return f"""
struct alignas(16) {name} {{
  Complex<double> v;
  {member}
  __device__ __forceinline__ void clear() {{ v = {{{int(op == "prod")}, 0}}; {none} }}
  template<int N> __device__ __forceinline__ void take(const {kind} (&x)[N]) {{
    #pragma unroll
    for (int i = 0; i < N; ++i) v = {step};
  }}
  __device__ __forceinline__ void merge(const {name}& o) {{ v = {join}; {count} }}
}};""".strip("\n")


def _argument(op: str, short: str, name: str) -> str:
    """The first of the extremes; NaN is more extreme than all. `i` is negative for none yet."""
    kind, odd = TYPES[short], "{0} != {0}"
    if short[0] == "c":
        odd = f"complex_isnan{'f' if short == 'c8' else ''}({{0}})"
    beats = operation("less" if op == "argmin" else "greater", (short, short), "b1", ("x", "v"))
    equal = operation("equal", (short, short), "b1", ("x", "v"))
    return f"""
struct alignas({16 if short == "c16" else 8}) {name} {{
  long long i;
  {kind} v;
  __device__ __forceinline__ void clear() {{ i = -1; v = {{}}; }}
  __device__ __forceinline__ void see({kind} x, long long j) {{
    const bool none = {odd.format("x")}, before = {odd.format("v")};
    const bool same = none ? before : !before && ({equal});
    const bool better = none ? !before : !before && ({beats});
    if (i < 0 || better || (same && j < i)) {{ i = j; v = x; }}
  }}
  template<int N> __device__ __forceinline__ void take(
      const {kind} (&x)[N], long long first, long long step) {{
    #pragma unroll
    for (int k = 0; k < N; ++k) see(x[k], first + k * step);
  }}
  __device__ __forceinline__ void merge(const {name}& o) {{ if (o.i >= 0) see(o.v, o.i); }}
}};""".strip("\n")


def results(op: str, short: str, gives: Sequence[str], x: str) -> list[str]:
    """The results of a reduction, by what has accumulated in `x`."""
    if op == "moment":
        if short[0] == "c":
            return [cast("c16", gives[0], f"{x}.mean()"),
                    cast("f8", gives[1], f"({x}.real.m2() + {x}.imag.m2())")]  # fmt: skip
        return [cast("f8", gives[0], f"{x}.mean()"), cast("f8", gives[1], f"{x}.m2()")]
    if op in ("argmin", "argmax"):
        return [cast("i8", gives[0], f"{x}.i"), cast(short, gives[1], f"{x}.v")]
    held = short
    if op in ("any", "all") or (op in ("sum", "prod") and gives[0] == "b1"):
        held = "b1"
    elif op in ("sum", "prod"):
        held = {"f": "f8", "c": "c16"}.get(gives[0][0], gives[0])
    return [cast(held, gives[0], f"{x}.v")]
