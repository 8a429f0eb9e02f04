"""Which device functions are long enough to be called and not inlined."""

from __future__ import annotations

import re

from . import tuning

# ---- functions that are called

#: Long functions: their arguments, and their instructions for float and for double, as compiled for
#: compute capability 9.0; 0 where they are short.
LONG = {
    "acos": (1, 0, 134), "acosh": (1, 82, 255), "asin": (1, 0, 71), "asinh": (1, 80, 275),
    "atan2": (2, 66, 140), "atanh": (1, 0, 177), "cos": (1, 92, 68), "cosh": (1, 0, 65),
    "cyl_bessel_i0": (1, 63, 193), "cyl_bessel_i1": (1, 65, 196), "erf": (1, 0, 82),
    "erfc": (1, 0, 171), "erfcinv": (1, 0, 445), "erfinv": (1, 0, 287), "expit_of": (1, 0, 85),
    "expm1": (1, 0, 78), "fmod": (2, 76, 258), "j0": (1, 154, 374), "j1": (1, 156, 373),
    "log": (1, 0, 87), "log10": (1, 0, 90), "log1p": (1, 0, 149), "log2": (1, 0, 90),
    "log_add_exp": (2, 98, 426), "log_add_exp2": (2, 90, 422), "log_gamma": (1, 227, 182),
    "logit_of": (1, 0, 114), "normcdf": (1, 62, 187), "normcdfinv": (1, 0, 453),
    "pow": (2, 93, 101), "quotient_of": (2, 136, 356), "remainder_of": (2, 86, 272),
    "sin": (1, 90, 68), "sinh": (1, 0, 133), "tan": (1, 90, 107), "tanh": (1, 0, 103),
    "tgamma": (1, 170, 616), "y0": (1, 368, 907), "y1": (1, 396, 941),
}  # fmt: skip
#: The same of complex numbers.
LONG_COMPLEX = {
    "complex_arccos": (1, 603, 1141), "complex_arccosh": (1, 614, 1161),
    "complex_arcsin": (1, 600, 1144), "complex_arcsinh": (1, 600, 1144),
    "complex_arctan": (1, 425, 1035), "complex_arctanh": (1, 425, 1035),
    "complex_cos": (1, 245, 486), "complex_cosh": (1, 238, 480), "complex_exp": (1, 166, 326),
    "complex_expm1": (1, 314, 326), "complex_log": (1, 191, 442), "complex_log1p": (1, 145, 289),
    "complex_power": (2, 640, 1040), "complex_sign": (1, 109, 155), "complex_sin": (1, 253, 520),
    "complex_sinh": (1, 245, 515), "complex_sqrt": (1, 151, 205), "complex_tan": (1, 392, 565),
    "complex_tanh": (1, 390, 560), "one_over": (1, 82, 113), "over": (2, 126, 168),
}  # fmt: skip
#: Name -> instructions, type, and how many numbers it takes.
_LENGTHS = {
    name + suffix: (length, wrap.format(real), takes)
    for table, wrap in ((LONG, "{}"), (LONG_COMPLEX, "Complex<{}>"))
    for name, (takes, *lengths) in table.items()
    for suffix, real, length in zip(("f", ""), ("float", "double"), lengths, strict=True)
    if length
}
_CALLS = re.compile(r"\b(\w+)\(")


def length_of(text: str) -> int:
    """The instructions of the long functions that a text has.

    >>> length_of("const float v2 = sinf(v1);"), length_of("const float v2 = v1 * v1;")
    (90, 0)
    """
    return sum(_LENGTHS.get(name, (0, "", 0))[0] for name in _CALLS.findall(text))


def mark_called_functions(text: str, copies: int) -> tuple[str, str]:
    """Mark the functions that are called instead of inlined, the longest first.

    `text` is compiled `copies` times over. Returns it, and the marked functions. With the
    compiler's fast mathematics functions are short and stay inlined.

    >>> mark_called_functions("double y = sin(x);", 4)
    ('double y = sin(x);', '')
    >>> text, functions = mark_called_functions("double y = tgamma(x) + sin(x);", 8)
    >>> text
    'double y = called_tgamma(x) + sin(x);'
    >>> print(functions.splitlines()[-1])
    __device__ CALLED double called_tgamma(double x) { return tgamma(x); }
    """
    found: dict[str, int] = {}
    for name in _CALLS.findall(text):
        if name in _LENGTHS:
            found[name] = found.get(name, 0) + copies * _LENGTHS[name][0]
    total, lines = sum(found.values()), []
    for name, length in sorted(found.items(), key=lambda x: (-x[1], x[0])):
        if total <= tuning.MOST_INSTRUCTIONS:
            break
        total -= length
        _, kind, takes = _LENGTHS[name]
        names = ["x", "y"][:takes]
        given = ", ".join(f"{kind} {n}" for n in names)
        body = f"return {name}({', '.join(names)});"
        lines.append(f"__device__ CALLED {kind} called_{name}({given}) {{ {body} }}")
        text = re.sub(rf"\b{name}\(", f"called_{name}(", text)
    if not lines:
        return text, ""
    how = ("#if __USE_FAST_MATH__", "#define CALLED __forceinline__", "#else",
           "#define CALLED __noinline__", "#endif")  # fmt: skip
    return text, "\n".join([*how, *lines])
