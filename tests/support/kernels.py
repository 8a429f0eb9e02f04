"""Kernels of all kinds, and arrays for them: what the readings of `expr.Kernel` are tested with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from gpuscheduler.ir.bins import Bins
from gpuscheduler.ir.expr import (
    REDUCTIONS,
    SCANS,
    Expr,
    Kernel,
    Reduction,
    View,
    constant,
    index,
    nodes,
    source,
)


def words(text):
    return text.split()


UFUNCS = words("""
add subtract multiply divide floor_divide remainder fmod power float_power negative positive
absolute fabs sign square sqrt cbrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan
arcsin arccos arctan arctan2 hypot sinh cosh tanh arcsinh arccosh arctanh deg2rad rad2deg floor
ceil trunc rint equal not_equal less less_equal greater greater_equal logical_and logical_or
logical_xor logical_not bitwise_and bitwise_or bitwise_xor invert left_shift right_shift maximum
minimum fmax fmin isnan isinf isfinite signbit copysign nextafter ldexp logaddexp logaddexp2
heaviside gcd lcm conjugate bitwise_count
""")
SPECIAL = words("erf erfc erfinv erfcinv gamma gammaln ndtr ndtri expit logit i0 i1 j0 j1 y0 y1")
CODES = "?bBhHilILqQefdFD"


def loops():
    """Every loop of every function that takes and gives numbers, as (name, in, out)."""
    for op in UFUNCS:
        for loop in dict.fromkeys(getattr(np, op).types):
            given, made = loop.split("->")
            if set(given + made) <= set(CODES) and len(made) == 1:
                yield op, given, made
    for op in SPECIAL:
        yield from ((op, t, t) for t in "fd")


def values(dtype, n=256, seed=0):
    """Ordinary and odd values of a type."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        odd = [info.min, info.max, 0, 1, 2, 3, info.max - 1, info.min + 1]
        out = rng.integers(-50 if dtype.kind == "i" else 0, 50, n).astype(dtype)
        wide = rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
        out = np.where(rng.random(n) < 0.3, wide, out)
        out[: len(odd)] = odd
        return rng.permutation(out)
    if dtype.kind == "c":
        real = np.empty(0, dtype).real.dtype
        out = np.empty(n, dtype)
        out.real, out.imag = values(real, n, seed), values(real, n, seed + 1)
        return out
    odd = [0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 0.5, 2.0, 1e-6, -3.0, 100.0]
    out = rng.normal(0, 2, n)
    out = np.where(rng.random(n) < 0.3, np.round(out), out)
    out[: len(odd)] = odd
    return rng.permutation(out).astype(dtype)


# ---- any kernel

PLAIN = words("f4 f8 i4 i8 f4 f8 u1 ? f2 c8")


LARGE = [(20_000,), (9001,), (3, 9000), (9000, 3), (6000, 4), (200, 150), (64, 64), (37, 129),
         (70, 16, 33), (2, 5, 3000), (300, 2, 20), (17, 256), (40, 41)]  # fmt: skip


@st.composite
def shapes(draw, most=3000):
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(LARGE))
    rank = draw(st.integers(0, 4))
    lengths = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 32, 33, 40, 64, 100, 1000])
    out = [draw(lengths) for _ in range(rank)]
    while math.prod(out) > most:
        k = int(np.argmax(out))
        out[k] = max(1, out[k] // 4)
    return tuple(out)


@st.composite
def views(draw, shape, size=None):
    """A view over a shape, and how many elements an array needs for it."""
    rank = len(shape)
    kind = draw(
        st.sampled_from(["plain", "plain", "plain", "broadcast", "turned", "sliced", "any"])
    )
    if kind == "plain":
        return View.contiguous(shape), math.prod(shape)
    if kind == "broadcast":
        keep = [draw(st.booleans()) for _ in shape]
        small = tuple(n if k else 1 for n, k in zip(shape, keep, strict=True))
        strides = View.contiguous(small).strides
        return (View(0, tuple(s if k else 0 for s, k in zip(strides, keep, strict=True))),
                math.prod(small))  # fmt: skip
    order = draw(st.permutations(range(rank))) if kind in ("turned", "any") else list(range(rank))
    steps = [draw(st.sampled_from([1, 2, -1, 3])) if kind in ("sliced", "any") else 1
             for _ in shape]  # fmt: skip
    ahead = [draw(st.sampled_from([0, 0, 1, 4])) if kind in ("sliced", "any") else 0
             for _ in shape]  # fmt: skip
    # an array of its own shape, of which an axis is cut and stepped through, then transposed
    whole = [n * abs(s) + a for n, s, a in zip(shape, steps, ahead, strict=True)]
    stride, strides, offset = 1, [0] * rank, 0
    for k in reversed(order):
        strides[k] = stride * steps[k]
        offset += stride * (ahead[k] if steps[k] > 0 else ahead[k] + (shape[k] - 1) * -steps[k])
        stride *= max(whole[k], 1)
    if 0 in shape:
        return View(0, tuple(strides)), 0
    return View(offset, tuple(strides)), stride


@st.composite
def expressions(draw, shape, arrays, sizes, depth=3, types=PLAIN):
    """An expression over a shape. The arrays that it reads join `arrays`, as types, and `sizes`."""
    dtype = np.dtype(draw(st.sampled_from(types)))
    return draw(_expression(shape, arrays, sizes, depth, dtype))


BINARY = {
    "b": ["logical_and", "bitwise_xor", "maximum"],
    "i": ["add", "subtract", "multiply", "maximum", "bitwise_and", "floor_divide", "remainder"],
    "u": ["add", "subtract", "multiply", "minimum", "bitwise_or", "floor_divide"],
    "f": ["add", "subtract", "multiply", "divide", "maximum", "fmin", "copysign"],
    "c": ["add", "subtract", "multiply"],
}
UNARY = {
    "b": ["logical_not"], "i": ["negative", "square", "absolute", "sign"],
    "u": ["square", "invert"], "c": ["conjugate", "square"],
    "f": ["negative", "sqrt", "floor", "square", "sign", "rint"],
}  # fmt: skip


def _smaller(dtype):
    return np.dtype(f"f{dtype.itemsize // 2}")


@st.composite
def _expression(draw, shape, arrays, sizes, depth, dtype):
    def more(t=dtype, d=depth - 1):
        return draw(_expression(shape, arrays, sizes, d, np.dtype(t)))

    kinds = ["input", "input", "constant", "index"]
    if depth:
        kinds += ["unary", "binary", "binary", "binary", "where", "cast", "parts", "shifted"]
    kind = draw(st.sampled_from(kinds))
    if kind == "input":
        known = [n for n, t in enumerate(arrays) if t == dtype]
        if known and draw(st.booleans()):
            n = draw(st.sampled_from(known))
        else:
            n = len(arrays)
            arrays.append(dtype)
            sizes.append(0)
        view, size = draw(views(shape))
        sizes[n] = max(sizes[n], size)
        return Expr("input", (), dtype, (n, view))
    if kind == "constant":
        value = draw(st.sampled_from([0, 1, 2, 3, 7]))
        return constant(bool(value) if dtype.kind == "b" else value, dtype)
    if kind == "index":
        view, _ = draw(views(shape))
        at = index(View(draw(st.sampled_from([0, 5, 2**40])), view.strides))
        small = Expr("remainder", (at, constant(97, "i8")), "i8")
        return small if dtype == np.int64 else Expr("cast", (small,), dtype)
    if kind == "unary":
        op = draw(st.sampled_from(UNARY[dtype.kind]))
        return Expr(op, (more(),), dtype)
    if kind == "binary":
        op = draw(st.sampled_from(BINARY[dtype.kind]))
        # a GPU gives no NaN that it computes a sign; those of our arrays have one
        two = more(), more(d=0 if op == "copysign" else depth - 1)
        if dtype.kind == "f" and op in ("maximum", "fmin"):  # which of 0 and -0 it is, is open
            two = tuple([Expr("add", (v, constant(0, dtype)), dtype) for v in two])
        return Expr(op, two, dtype)
    if kind == "where":
        other = draw(st.sampled_from(["f4", "i4", "f8"]))
        condition = Expr("less", (more(other, 1), more(other, 1)), "?")
        return Expr("where", (condition, more(), more()), dtype)
    if kind == "parts" and dtype.kind == "c":
        part = _smaller(dtype)
        return Expr("complex", (more(part), more(part)), dtype)
    if kind == "parts" and dtype.kind == "f" and dtype.itemsize >= 4:
        whole = np.dtype(f"c{2 * dtype.itemsize}")
        return Expr(draw(st.sampled_from(["real", "imag"])), (more(whole),), dtype)
    if kind == "shifted" and shape and 0 not in shape:
        return draw(_joined(shape, arrays, sizes, dtype))
    if dtype.kind in "fc":  # integers of these would be x86-64's own
        other = draw(st.sampled_from(["i4", "f4", "?", "f2"]))
        return Expr("cast", (more(other),), dtype)
    other = draw(st.sampled_from(["i4", "i8", "?", "u1"]))
    return more() if np.dtype(other) == dtype else Expr("cast", (more(other),), dtype)


@st.composite
def _joined(draw, shape, arrays, sizes, dtype):
    """Two arrays one behind the other along an axis; each is read where it is."""
    axis = draw(st.integers(0, len(shape) - 1))
    at = draw(st.integers(0, shape[axis]))
    parts = []
    for start, length in ((0, at), (at, shape[axis] - at)):
        own = (*shape[:axis], length, *shape[axis + 1 :])
        strides = View.contiguous(own).strides
        parts.append(Expr("input", (), dtype, (len(arrays), View(-start * strides[axis], strides))))
        arrays.append(dtype)
        sizes.append(math.prod(own))
    along = index(View(0, tuple(int(k == axis) for k in range(len(shape)))))
    condition = Expr("less", (along, constant(at, "i8")), "?")
    return Expr("where", (condition, *parts), dtype)


def _results(op, arg):
    """The types of a reduction's results, and of what is reduced."""
    real = np.empty(0, arg).real.dtype
    if op in ("sum", "prod"):
        wide = np.add.reduce(np.zeros(0, arg)).dtype
        return (wide,), wide
    if op in ("any", "all"):
        return (np.dtype(bool),), arg
    if op in ("argmin", "argmax"):
        return (np.dtype(np.int64), arg), arg
    if op == "moment":
        if arg.kind in "iub":
            return (np.dtype("f8"), np.dtype("f8")), np.dtype("f8")
        return (arg, real), arg
    return (arg,), arg


@st.composite
def kernels(draw):
    """A kernel, and arrays for it."""
    shape = draw(shapes())
    arrays, sizes = [], []
    kind = draw(st.sampled_from(["elements", "elements", "reduced", "reduced", "scanned"]))
    if kind == "elements":
        count = draw(st.integers(1, 2))
        outputs = tuple(draw(expressions(shape, arrays, sizes)) for _ in range(count))
        kernel = Kernel(shape, outputs)
    elif kind == "scanned" and shape:
        kernel = draw(_scanning(shape, arrays, sizes))
    else:
        kernel = draw(_reducing(shape, arrays, sizes))
    return kernel, filled(arrays, sizes, draw(st.integers(0, 3)))


@st.composite
def _reducing(draw, shape, arrays, sizes):
    axes = tuple(k for k in range(len(shape)) if draw(st.booleans()))
    if not axes and shape:
        axes = (len(shape) - 1,)
    kept = tuple(n for k, n in enumerate(shape) if k not in axes)
    empty = 0 in [shape[k] for k in axes]
    reductions = []
    for _ in range(draw(st.integers(1, 2))):
        arg = draw(expressions(shape, arrays, sizes, depth=2))
        allowed = ["sum", "prod", "any", "all", *([] if empty else ["moment"])]
        if not empty and arg.dtype.kind != "c":
            allowed += ["min", "max", "argmin", "argmax", "fmin", "fmax"]
        op = draw(st.sampled_from(allowed))
        types, takes = _results(op, np.zeros(0, arg.dtype).dtype)
        if arg.dtype != takes:
            arg = Expr("cast", (arg,), takes)
        if op == "prod" and takes.kind in "fc":
            arg = small(arg)
        reductions.append(Reduction(op, arg, types))
    results = [
        Expr("reduced", (), d, (j, r))
        for j, reduction in enumerate(reductions)
        for r, d in enumerate(reduction.dtypes)
    ]
    assert all(REDUCTIONS[r.op] == len(r.dtypes) for r in reductions)
    outputs = []
    for result in results:
        if draw(st.booleans()):
            other = draw(_expression(kept, arrays, sizes, 1, result.dtype))
            op = BINARY[result.dtype.kind][0]
            result = Expr(op, (result, other), result.dtype)
        outputs.append(result)
    return Kernel(shape, tuple(outputs), tuple(reductions), axes)


@st.composite
def _scanning(draw, shape, arrays, sizes):
    reductions = []
    for _ in range(draw(st.integers(1, 2))):
        arg = draw(expressions(shape, arrays, sizes, depth=2))
        op = draw(st.sampled_from(sorted(SCANS)))
        if arg.dtype.kind == "c" and SCANS[op] not in ("sum", "prod"):
            op = "cumsum"
        types, takes = _results(SCANS[op], np.zeros(0, arg.dtype).dtype)
        if arg.dtype != takes:
            arg = Expr("cast", (arg,), takes)
        if op == "cumprod" and takes.kind in "fc":
            arg = small(arg)
        reductions.append(Reduction(op, arg, types))
    outputs = []
    for j, reduction in enumerate(reductions):
        (dtype,) = reduction.dtypes
        result = Expr("reduced", (), dtype, (j, 0))
        if draw(st.booleans()):
            other = draw(_expression(shape, arrays, sizes, 1, dtype))
            result = Expr(BINARY[dtype.kind][0], (result, other), dtype)
        outputs.append(result)
    axis = draw(st.integers(0, len(shape) - 1))
    return Kernel(shape, tuple(outputs), tuple(reductions), (axis,))


def small(x):
    """No larger than 1: a product that overflows on its way to zero depends on the way."""
    if x.dtype.kind == "c":
        part = _smaller(x.dtype)
        one = small(Expr("real", (x,), part))
        return Expr("complex", (one, constant(0, part)), x.dtype)
    below = Expr("minimum", (x, constant(1, x.dtype)), x.dtype)
    return Expr("maximum", (below, constant(-1, x.dtype)), x.dtype)


def filled(arrays, sizes, seed):
    """Arrays of these types; now and then with odd values."""
    out = []
    for n, (dtype, size) in enumerate(zip(arrays, sizes, strict=True)):
        rng = np.random.default_rng(100 * seed + n)
        if seed == 3:
            x = values(dtype, max(size, 300), n)[:size]
        elif dtype.kind in "iub":
            x = rng.integers(0, 2 if dtype.kind == "b" else 9, size).astype(dtype)
        else:
            x = rng.normal(1, 1, size).astype(dtype)
            if dtype.kind == "c":
                x = x + 1j * rng.normal(0, 1, size).astype(dtype)
        out.append(np.ascontiguousarray(x.astype(dtype)))
    return out


def reduced(x, shape, axes, *ops):
    """Reductions of one expression."""
    parts = tuple(Reduction(op, x, _results(op, x.dtype)[0]) for op in ops)
    outputs = tuple(
        Expr("reduced", (), d, (j, r)) for j, p in enumerate(parts) for r, d in enumerate(p.dtypes)
    )
    return Kernel(shape, outputs, parts, axes)


def windows(shape, lengths, dtype="f4", across=()):
    """An expression of sliding windows of some `lengths`, by axis, and its shape.

    Each window also spans the axes `across`. The windows' axes come last.
    """
    strides = View.contiguous(shape).strides
    over = {**lengths, **{a: shape[a] for a in across}}
    kept = [n - over[a] + 1 if a in over else n for a, n in enumerate(shape)]
    view = View(0, (*strides, *[strides[a] for a in over]))
    return Expr("input", (), np.dtype(dtype), (0, view)), (*kept, *over.values())


#: Edges of bins: evenly spaced, as `numpy.histogram` makes them of a count, and not.
EDGES = {
    "even": np.linspace(-2, 2, 11), "one bin": np.array([-1.0, 1.0]),
    "many": np.linspace(0, 3, 301), "most": np.linspace(-4, 4, 10_001),
    "growing": np.geomspace(1e-3, 4, 40),
    "doubled": np.array([-1, 0, 0, 0.5, 0.5]), "tiny": np.linspace(1, 1 + 2**-20, 8),
    "far": np.linspace(-1e18, 1e18, 5),
}  # fmt: skip


#: Those of which weights are added up: there are fewer sums than counters. Of "more", several warps
#: have one table.
WEIGHED = {name: e for name, e in EDGES.items() if len(e) < 5000}
WEIGHED["more"] = np.linspace(-2, 2, 2501)


def scanned(x, shape, axis, *ops):
    """Scans of one expression."""
    parts = tuple(Reduction(op, x, _results(SCANS[op], x.dtype)[0]) for op in ops)
    outputs = tuple(Expr("reduced", (), p.dtypes[0], (j, 0)) for j, p in enumerate(parts))
    return Kernel(shape, outputs, parts, (axis,))


def histogram(shape, dtype, edges, strides=None):
    """How many of array 0's elements lie in each bin; `dtype` is that of the edges, too."""
    view = View(0, (0, *(strides or View.contiguous(shape).strides)))
    bins = Bins.from_edges(edges.astype(dtype))
    number = Expr("bin", (Expr("input", (), dtype, (0, view)),), np.int64, bins)
    counts = Reduction("histogram", number, (np.dtype(np.int64),))
    axes = tuple(range(1, len(shape) + 1))
    output = Expr("reduced", (), np.int64, (0, 0))
    return Kernel((len(bins), *shape), (output,), (counts,), axes)


def weighed(shape, dtype, edges, kind, strides=None):
    """What the weights, array 1 of type `kind`, of array 0's elements in each bin add up to."""
    plain = histogram(shape, dtype, edges, strides)
    (number,) = plain.reductions
    view = View(0, (0, *View.contiguous(shape).strides))
    weight = Expr("input", (), kind, (1, view))
    parts = [Expr("cast", (x,), "f8") if x.dtype != "f8" else x for x in (number.arg, weight)]
    sums = Reduction("histogram", Expr("complex", tuple(parts), "c16"), (np.dtype("f8"),))
    return replace(plain, outputs=(Expr("reduced", (), "f8", (0, 0)),), reductions=(sums,))


def sums_in_bins(x, edges, weights):
    """The same in extended precision, and what each bin's weights add up to without their signs."""
    where = np.searchsorted(edges, x, "right") - 1
    where[x == edges[-1]] = len(edges) - 2
    here = (where >= 0) & (where < len(edges) - 1)
    both = np.zeros((2, len(edges) - 1), np.longdouble)
    for sums, w in zip(both, (weights, np.abs(weights)), strict=True):
        np.add.at(sums, where[here], w[here].astype(np.longdouble))
    return both


def on_edges(count, edges, dtype, seed=0):
    """Numbers about bins: on edges, next to them, elsewhere, and none."""
    rng = np.random.default_rng(seed)
    near = rng.choice(edges, count).astype(dtype)
    low, high = float(edges[0]), float(edges[-1])
    spread = (rng.uniform(-1, 1, count) * (high - low) + (low + high) / 2).astype(dtype)
    if near.dtype.kind == "i":
        return np.where(rng.random(count) < 0.5, near, spread)
    beside = np.nextafter(near, rng.choice([-np.inf, np.inf], count).astype(dtype))
    odd = rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], dtype), count)
    return np.choose(rng.choice(4, count, p=[0.3, 0.2, 0.45, 0.05]), [near, beside, spread, odd])


def turned(n, shape, dtype):
    """Array number `n`, F-contiguous."""
    strides = tuple(reversed(View.contiguous(shape[::-1]).strides))
    return Expr("input", (), dtype, (n, View(0, strides)))


def call(op, *args, dtype=None):
    return Expr(op, args, dtype or args[0].dtype)


def extremes_of_negated(dtype, op):
    """Kernels of the least or the largest of negated numbers: along an axis, and of three."""
    shape = 6, 512
    x, y, z = (Expr("input", (), dtype, (n, View.contiguous(shape))) for n in range(3))
    least = call("negative", x)
    for axes in ((1,), (0,), (0, 1)):
        reduction = Reduction(op, least, (dtype,))
        yield Kernel(shape, (Expr("reduced", (), dtype, (0, 0)),), (reduction,), axes)
    other = {"min": "minimum", "max": "maximum"}[op]
    yield Kernel(shape, (call(other, call(other, least, y), z),))
    yield Kernel(shape, (call(other, z, call(other, y, least)),))
    yield Kernel(
        shape, (call(other, call(other, least, call("negative", y)), call("absolute", z)),)
    )


def same(got, want, kernel):
    """Equal up to rounding in the last places."""
    for a, b, out in zip(got, want, kernel.outputs, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b, err_msg=repr(out))
            continue
        if a.dtype.kind == "c":  # by parts: one may be infinite
            part = a.real.dtype
            a, b = a.reshape(-1).view(part), b.reshape(-1).view(part)
        # of the least precise that was computed on the way
        on_the_way = [n.dtype for n in nodes([out, *(r.arg for r in kernel.reductions)]) if n.args]
        types = [a.dtype, *(t for t in on_the_way if t.kind in "fc")]
        size = min(np.empty(0, t).real.itemsize for t in types)
        precision = {2: 4e-3, 4: 3e-5, 8: 1e-11}[size]
        scale = np.abs(np.where(np.isfinite(b), b, 0)).max(initial=1.0)
        np.testing.assert_allclose(a, b, rtol=precision, atol=precision * scale,
                                   err_msg=repr(out))  # fmt: skip


def quotients_and_roots(n):
    """A kernel of five float32 inputs of n elements that divides, inverts, and takes roots and
    logarithms.

    Some take what others gave: a vector of these is computed in stages.
    """
    x, y, z, w, u = (source(i, (n,), "f4") for i in range(5))
    first = call("divide", x, y), call("reciprocal", u), call("sqrt", z), call("log", w)
    then = call("divide", call("add", first[2], x), call("add", first[1], y))
    product = call("multiply", call("multiply", x, z), then)
    return Kernel((n,), (*first, then, call("log", then), product))


def any_floats(n, seed):
    """Inputs of `quotients_and_roots`: most are of usual size, some of any bits, some special."""
    rng = np.random.default_rng(seed)
    special = np.array([0, 1, 1e-45, 1e-38, 1.17549435e-38, 3.4028235e38, np.inf, np.nan], "f4")
    out = []
    for _ in range(5):
        anyhow = rng.integers(0, 2**32, n, "u4")
        usual = (anyhow & 0x807FFFFF) | rng.integers(100, 150, n).astype("u4") << 23
        x = np.where(rng.random(n) < 0.98, usual, anyhow).astype("u4").view("f4")
        at = rng.integers(0, n, n // 500)
        x[at] = rng.choice(special, len(at)) * rng.choice([1, -1], len(at)).astype("f4")
        out.append(x)
    return [*out[:2], *map(np.abs, out[2:4]), out[4]]


def wrong_of_quotients_and_roots(arrays, got):
    """Where `quotients_and_roots` gives other bits than IEEE 754.

    And by how many units in the last place its logarithms differ from those in float64.
    """
    x, y, z, w, u = arrays
    wrong, away = [], []

    def logarithm(a, b):
        with np.errstate(all="ignore"):
            exact = np.log(a.astype("f8"))
        fine = np.isfinite(exact) & (exact != 0)
        assert np.array_equal(b[~fine], exact[~fine].astype("f4"), equal_nan=True)
        unit = np.ldexp(1.0, np.frexp(exact[fine])[1] - 24)
        away.append(float(np.max(np.abs(b[fine] - exact[fine]) / unit, initial=0)))

    with np.errstate(all="ignore"):
        first = [x / y, 1 / u, np.sqrt(z)]
        then = (first[2] + x) / (first[1] + y)
        for a, b in zip([*first, then, x * z * then], [*got[:3], got[4], got[6]], strict=True):
            wrong.append(int(np.sum((a.view("u4") != b.view("u4")) & ~(np.isnan(a) & np.isnan(b)))))
    logarithm(w, got[3])
    logarithm(then, got[5])
    return wrong, max(away)


# ---- special values of complex operations

#: Parts of complex numbers, for operations of one number and of two, which see all pairs.
COMPLEX_PARTS = {
    1: [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, np.inf, -np.inf, np.nan, 1e-30, -1e30, 100.0],
    2: [0.0, -0.0, 1.0, -2.0, 0.5, np.inf, -np.inf, np.nan],
}


def complex_operations():
    """Every loop of every function of complex numbers, as (name, in, out)."""
    return [loop for loop in loops() if set(loop[1]) <= set("FD")]


def complex_operands(op, types):
    """All pairs of special parts, and of two arguments all pairs of these."""
    parts = COMPLEX_PARTS[len(types)]
    if op == "square":  # NumPy rounds once where the processor can do that
        parts = [p for p in parts if abs(p) not in (1e30, 1e-30)]
    each = np.empty(len(parts) ** 2, types[0])
    each.real, each.imag = (a.ravel() for a in np.meshgrid(parts, parts))
    return [np.ascontiguousarray(a.ravel()) for a in np.meshgrid(*[each] * len(types))]


def wrong_of_complex(given, got, want, rtol):
    """Where values of an operation are not NumPy's, as text. What C's standard (Annex G) leaves
    open may differ: the sign of an infinity beside NaN, and that of a zero where an argument is not
    finite."""
    finite = np.all([np.isfinite(a) for a in given], axis=0)
    least = np.finfo(np.empty(0, given[0].dtype).real.dtype).tiny
    right = np.ones(len(want), bool)
    parts = [(got, want, np.ones(len(want)))]
    if want.dtype.kind == "c":
        parts = [(got.real, want.real, want.imag), (got.imag, want.imag, want.real)]
    for a, b, other in parts:
        if b.dtype == bool:
            right &= a == b
            continue
        with np.errstate(all="ignore"):
            near = np.abs(a - b) <= rtol * np.abs(b) + least
        same_sign = np.signbit(a) == np.signbit(b)
        near = np.where(np.isinf(b), np.isinf(a) & (same_sign | np.isnan(other)), near)
        near = np.where((b == 0) & (a == 0), same_sign | ~finite, near)
        right &= np.where(np.isnan(b), np.isnan(a), near)
    return "\n".join(
        f"{', '.join(str(a[n]) for a in given)}: {got[n]}, NumPy has {want[n]}"
        for n in np.flatnonzero(~right)
    )
