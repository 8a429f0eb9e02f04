"""Functions of NumPy and SciPy that a library of GPUs has, too: sorts, quantiles, FFTs, filters.

Each says for which dtypes and keywords the library gives what NumPy gives, and what shape and dtype
that has. A call becomes a `LibraryCall`; `devices.cuda.library_calls` makes it. Anything else is
refused, and is called with NumPy's arrays as ever.

In traces that allow no such calls each of these functions is refused, as any unknown one is.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from ..abstract import ConstantArray, LibraryCall, ViewedInput
from ..array import FUNCTIONS, TracedArray, as_traced, implements
from ..context import NOT_KNOWN, NotTraceable, current, made_in, refuse
from ..reduce import axes_of, reduced_shape
from ..registry import KNOWN
from . import medians  # noqa: F401  # whose quantiles of a few elements come first

FLOATS, NUMBERS = "fd", "fdFD"  # dtypes
#: Elements of the weights of a filter, and quantiles of a call, at most.
MOST_WEIGHTS, MOST_QUANTILES = 4096, 64
#: How SciPy's filters go on beyond the edges.
EDGES = ("reflect", "constant", "nearest", "mirror", "wrap")
STABLE = ("stable", "mergesort")  # kinds of sorts that leave equal elements in order


def _refuse(name: str) -> NotTraceable:
    return refuse(f"{name} is not element-wise or a reduction")


def _call(
    name: str,
    arrays: Sequence[TracedArray],
    options: dict[str, Any],
    shape: Sequence[int],
    dtype: Any,
    loose: bool = False,
) -> TracedArray:
    """The result of a call that the library can make."""
    context = current.get()
    context.in_library = True
    views = []
    for x in arrays:
        expr = x._expr
        if expr.op != "input" or made_in(expr):  # it is computed in the same task
            raise _refuse(name)
        number, view = expr.data
        views.append(ViewedInput(number, view, x.shape, x.dtype))
    given = tuple(sorted(options.items()))
    call = LibraryCall(name, tuple(views), given, tuple(shape), np.dtype(dtype), loose)
    return TracedArray(context.keep(call, call.dtype), call.shape)


def _input(name: str, a: Any, dtypes: str) -> TracedArray:
    """An array as a library takes it: of one of these dtypes, with axes and elements."""
    if not current.get().library:
        raise _refuse(name)
    x = as_traced(a)
    if x.dtype.char not in dtypes or not x.ndim or not x.size:
        raise _refuse(name)
    return x


# ------------------------------------------------------------------------------------------------
# Sorts.

#: NumPy sorts float16 with both zeros and NaN wrongly, and complex numbers by two keys.
SORTED = "?bhilqBHILQfd"


def _follow_sorts(name: str) -> None:
    what, word = name.removeprefix("arg"), f"numpy.{name}"
    indices = name.startswith("arg")

    def sort_of(
        a: Any, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: Any = None
    ) -> TracedArray:
        x = _input(word, a, SORTED)
        if order is not None or kind not in (None, "quicksort", "heapsort", *STABLE):
            raise _refuse(word)
        loose = indices and not (kind in STABLE or stable)
        return sorted_(x, axis, loose)

    def partition_of(
        a: Any, kth: Any, axis: Any = -1, kind: Any = "introselect", order: Any = None
    ) -> TracedArray:
        x = _input(word, a, SORTED)
        length = x.size if axis is None else x.shape[normalize_axis_index(axis, x.ndim)]
        every = kth if isinstance(kth, (tuple, list)) else (kth,)
        plain = all(type(k) is int and -length <= k < length for k in every)
        if order is not None or kind != "introselect" or not plain:
            raise _refuse(word)
        return sorted_(x, axis, True)

    def sorted_(x: TracedArray, axis: Any, loose: bool) -> TracedArray:
        shape = (x.size,) if axis is None else x.shape
        number = None if axis is None else normalize_axis_index(axis, x.ndim)
        return _call(word, [x], {"axis": number}, shape, np.intp if indices else x.dtype, loose)

    implements(name)(sort_of if what == "sort" else partition_of)


for _name in ("sort", "argsort", "partition", "argpartition"):
    _follow_sorts(_name)


# ------------------------------------------------------------------------------------------------
# Quantiles.

#: Elements of an array and weight of the second, for one quantile; None is the mean of both.
Rank = tuple[int, int, float | None]


def _follow_quantiles(name: str) -> None:
    """Quantiles of many elements: those of a few are kernels."""
    few, numpys, word = FUNCTIONS[getattr(np, name)], getattr(np, name), f"numpy.{name}"
    many = _long_median if name == "median" else _long_quantile

    @implements(name)
    @functools.wraps(few)
    def quantile_of(*args: Any, **kwargs: Any) -> Any:
        context = current.get()
        before = context.refused
        try:
            return few(*args, **kwargs)
        except NotTraceable:
            if not context.library:
                raise
            given = inspect.signature(numpys).bind(*args, **kwargs)
            given.apply_defaults()
            value = many(word, numpys, given.arguments)
            if value is None:
                raise
        context.refused = before
        return value


def _long_median(word: str, numpys: Any, given: dict[str, Any]) -> TracedArray | None:
    if given["out"] is not None:
        return None

    def ranks(n: int, dtype: Any) -> list[Rank]:
        return [((n - 1) // 2, n // 2, None)]

    return _of_lines(word, given, ranks, (), lambda a: numpys(a))


def _long_quantile(word: str, numpys: Any, given: dict[str, Any]) -> TracedArray | None:
    """By the method "linear", of quantiles that are known."""
    q = given["q"]
    if isinstance(q, TracedArray):
        raise refuse(f"{word} takes quantiles {NOT_KNOWN}")
    weak = type(q) in (int, float)
    if given["out"] is not None or given["method"] != "linear" or given["weights"] is not None:
        return None
    if not weak and type(q) not in (list, tuple, np.ndarray):
        return None
    wanted, most = np.asarray(q), 100 if word.endswith("percentile") else 1
    if wanted.dtype.kind not in "iuf" or wanted.ndim > 1 or wanted.size > MOST_QUANTILES:
        return None
    if not ((wanted >= 0) & (wanted <= most)).all():
        return None

    def ranks(n: int, dtype: Any) -> list[Rank]:
        # NumPy (2.4) has numbers of Python's, and percentages, in the dtype of the array
        part = np.true_divide(q, dtype.type(100)) if most == 100 else wanted
        index = (n - 1) * np.asarray(part, dtype if weak else None)
        last = index >= n - 1
        low = np.where(last, n - 1, np.floor(index)).astype(np.intp)
        weight = np.where(last, 0, index - low).ravel().tolist()
        high = np.where(last, n - 1, low + 1)
        return list(zip(low.ravel().tolist(), high.ravel().tolist(), weight, strict=True))

    if wanted.dtype.kind != "f" and most == 1:  # NumPy takes whole numbers for ranks
        return None
    return _of_lines(word, given, ranks, wanted.shape, lambda a: numpys(a, q))


def _of_lines(
    word: str,
    given: dict[str, Any],
    ranks: Callable[[int, Any], list[Rank]],
    front: tuple[int, ...],
    like: Callable[[Any], Any],
) -> TracedArray | None:
    """Quantiles along some axes; None of what NumPy makes a scalar."""
    x, axis = as_traced(given["a"]), given["axis"]
    if x.dtype.char not in FLOATS or not x.size:
        return None
    axes = axes_of(x, tuple(axis) if isinstance(axis, list) else axis)
    shape = (*front, *reduced_shape(x, axes, given["keepdims"]))
    if not axes or not shape:
        return None
    found = tuple(ranks(math.prod(x.shape[k] for k in axes), x.dtype))
    dtype = like(np.ones(2, x.dtype)).dtype
    return _call(word, [x], {"axes": axes, "ranks": found}, shape, dtype)


for _name in ("median", "quantile", "percentile"):
    _follow_quantiles(_name)


# ------------------------------------------------------------------------------------------------
# Fourier transforms.

_FFTS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")  # along one axis
_NORMS = (None, "backward", "ortho", "forward")


def _follow_fft(name: str, library: str) -> Callable[..., TracedArray]:
    """What stands for a function of `numpy.fft` or `scipy.fft`."""
    word, several = f"{library}.fft.{name}", name not in _FFTS
    kind = name if not several else name[:-1]  # without its 2 or n
    dtypes = FLOATS if kind in ("rfft", "ihfft") else NUMBERS

    def transform_axes(
        x: TracedArray, lengths: list[Any], axes: list[int], norm: Any
    ) -> TracedArray:
        """Transform along axes, the last one first, with these lengths of input or output."""
        shape = list(x.shape)
        for axis, n in zip(axes, lengths, strict=True):
            shape[axis] = x.shape[axis] if n is None else n
        last, n = axes[-1], lengths[-1]
        if kind in ("rfft", "ihfft"):
            shape[last] = shape[last] // 2 + 1
        elif kind in ("irfft", "hfft") and n is None:
            shape[last] = 2 * (x.shape[last] - 1)
        if norm not in _NORMS or min(shape) < 1:
            raise _refuse(word)
        dtype = np.result_type(x.dtype, np.complex64)
        if kind in ("irfft", "hfft"):
            dtype = np.zeros(0, dtype).real.dtype
        options: dict[str, Any] = {"norm": norm}
        if several:
            sizes = None if set(lengths) == {None} else tuple(lengths)
            options |= {"axes": tuple(axes), "s": sizes}
        else:
            options |= {"axis": last, "n": n}
        return _call(word, [x], options, shape, dtype)

    def checked_length(n: Any) -> int | None:
        if n is not None and (not isinstance(n, (int, np.integer)) or n < 1):
            raise _refuse(word)
        return None if n is None else int(n)

    def of_line(a: Any, n: Any = None, axis: Any = -1, norm: Any = None) -> TracedArray:
        x = _input(word, a, dtypes)
        return transform_axes(x, [checked_length(n)], [normalize_axis_index(axis, x.ndim)], norm)

    def of_block(a: Any, s: Any = None, axes: Any = None, norm: Any = None) -> TracedArray:
        x = _input(word, a, dtypes)
        if s is not None and axes is None:  # of which NumPy warns
            raise _refuse(word)
        every = list(range(x.ndim) if axes is None else normalize_axis_tuple(axes, x.ndim))
        lengths = [None] * len(every) if s is None else [checked_length(n) for n in s]
        if not every or len(lengths) != len(every):
            raise _refuse(word)
        return transform_axes(x, lengths, every, norm)

    only = {"out": None, "overwrite_x": False, "workers": None, "plan": None}
    default = {"axes": (-2, -1)} if name.endswith("2") else {}
    follow = of_block if several else of_line

    def fft_of(*args: Any, **kwargs: Any) -> Any:
        names = ("s", "axes", "norm") if several else ("n", "axis", "norm")
        rest = ("out",) if library == "numpy" else ("overwrite_x", "workers")
        given = dict(zip(("a", *names, *rest), args, strict=False))
        kwargs = {("a" if k == "x" else k): v for k, v in kwargs.items()}
        if len(args) > len(names) + len(rest) + 1 or given.keys() & kwargs.keys():
            raise _refuse(word)
        given = {**default, **given, **kwargs}
        for k, v in only.items():
            if given.pop(k, v) != v:
                raise _refuse(word)
        if given.keys() - {"a", *names} or "a" not in given:
            raise _refuse(word)
        return follow(**given)

    return fft_of


_BLOCK_FFTS = [f"{kind}{end}" for kind in _FFTS[:4] for end in "2n"]
for _name in (*_FFTS, *_BLOCK_FFTS):
    implements(f"fft.{_name}")(_follow_fft(_name, "numpy"))


# ------------------------------------------------------------------------------------------------
# SciPy's filters.

FILTERS = (
    "gaussian_filter", "uniform_filter", "convolve", "correlate", "convolve1d", "correlate1d",
    "maximum_filter", "minimum_filter", "median_filter", "sobel", "prewitt", "laplace",
)  # fmt: skip
#: Arguments that must be as they are where the caller says nothing.
_UNUSUAL = ("output", "footprint", "axes")


def _follow_filter(name: str, signature: inspect.Signature) -> Callable[..., TracedArray]:
    word = f"scipy.ndimage.{name}"

    def filter_of(*args: Any, **kwargs: Any) -> TracedArray:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        options = dict(given.arguments)
        x = _input(word, options.pop("input"), FLOATS)
        for k in _UNUSUAL:
            if options.pop(k, None) is not None:
                raise _refuse(word)
        arrays = [x]
        if "weights" in options:
            weights = options.pop("weights")
            if isinstance(weights, TracedArray):
                arrays.append(weights)
            else:
                options["weights"] = _constant(word, weights)
            numbers = weights.dtype.char in "bhilBHILfd" and weights.size
            if not numbers or weights.size > MOST_WEIGHTS:
                raise _refuse(word)
        options = {k: _plain_option(word, v) for k, v in options.items()}
        modes = options["mode"] if isinstance(options["mode"], tuple) else (options["mode"],)
        if not set(modes) <= set(EDGES) or not math.isfinite(options["cval"]):
            raise _refuse(word)
        if any(w > n for w, n in zip(_widths(name, x, options, arrays), x.shape, strict=True)):
            raise _refuse(word)
        return _call(word, arrays, options, x.shape, x.dtype)

    return filter_of


def _constant(word: str, weights: Any) -> Any:
    if type(weights) is not np.ndarray:
        raise _refuse(word)
    return ConstantArray.from_array(weights)


def _plain_option(word: str, value: Any) -> Any:
    """A number, a word or several; refuses anything else."""
    if value is None or type(value) in (int, float, bool, str, ConstantArray):
        return value
    if isinstance(value, np.generic):
        return _plain_option(word, value.item())
    if type(value) in (tuple, list):
        return tuple([_plain_option(word, v) for v in value])
    raise _refuse(word)


def _widths(
    name: str, x: TracedArray, options: dict[str, Any], arrays: list[TracedArray]
) -> Sequence[int]:
    """How many elements a filter reads along each axis: beyond those, libraries may differ."""

    def for_each_axis(value: Any) -> tuple[Any, ...]:
        out = value if isinstance(value, tuple) else (value,) * x.ndim
        if len(out) != x.ndim:
            raise _refuse(f"scipy.ndimage.{name}")
        return out

    if name == "gaussian_filter":
        sigmas, radii = for_each_axis(options["sigma"]), for_each_axis(options["radius"])
        found = [int(options["truncate"] * s + 0.5) if r is None else r
                 for s, r in zip(sigmas, radii, strict=True)]  # fmt: skip
        if min(sigmas) <= 0 or min(found) < 1:
            raise _refuse(f"scipy.ndimage.{name}")
        return [2 * r + 1 for r in found]
    if "size" in options:
        sizes = for_each_axis(options["size"])
        if None in sizes or min(sizes) < 1 or not all(type(n) is int for n in sizes):
            raise _refuse(f"scipy.ndimage.{name}")
        return sizes
    if name in ("sobel", "prewitt", "laplace"):
        return (3,) * x.ndim
    weights = arrays[1].shape if len(arrays) > 1 else options["weights"].shape
    if name.endswith("1d"):
        axis = normalize_axis_index(options["axis"], x.ndim)
        if len(weights) != 1:
            raise _refuse(f"scipy.ndimage.{name}")
        return [weights[0] if k == axis else 1 for k in range(x.ndim)]
    return for_each_axis(weights)


# ------------------------------------------------------------------------------------------------
# SciPy's functions are entered once SciPy's modules are there, which nobody imports for this.

_entered: set[str] = set()


def enter_scipy() -> None:
    """Enter functions of `scipy.ndimage` and `scipy.fft`, as far as they are imported."""
    for name, enter in (("scipy.ndimage", _enter_filters), ("scipy.fft", _enter_ffts)):
        module = sys.modules.get(name)
        if module is not None and name not in _entered:
            _entered.add(name)
            enter(module)


def _enter_filters(module: Any) -> None:
    for name in FILTERS:
        function = getattr(module, name, None)
        if function is not None:
            own = _follow_filter(name, inspect.signature(function))
            KNOWN[function] = _of_traced(function, own)


def _enter_ffts(module: Any) -> None:
    for name in (*_FFTS, *_BLOCK_FFTS):
        function = getattr(module, name, None)
        if function is not None:
            KNOWN[function] = _of_traced(function, _follow_fft(name, "scipy"))


def _of_traced(function: Any, own: Callable[..., TracedArray]) -> Callable[..., Any]:
    """A function that is SciPy's for arrays that are there, and `own` for traced ones."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(v, TracedArray) for v in (*args, *kwargs.values()))
        return (own if traced else function)(*args, **kwargs)

    return dispatch
