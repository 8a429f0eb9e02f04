"""Products of small integers with few columns: the CUDA text, run as C++ on the host."""

from __future__ import annotations

import ctypes
import re
import subprocess

import numpy as np
import pytest

from gpuscheduler.codegen.cuda import skinny
from gpuscheduler.codegen.cuda.skinny import make_geometry, make_source
from gpuscheduler.plan.skinny import is_skinny
from tests.support.cuda_on_host import AFTER, BEFORE, COMPILER, FLAGS

#: A warp's product of fragments: each lane shows what it has, and reads the others'.
MULTIPLY = r"""
static double shown[256][3][4];
static inline void multiply(double (&c)[2][2], const double (&a)[2][DEPTH],
                            const double (&b)[DEPTH]) {
  const unsigned lane = current & 31, warp = current & ~31u;
  for (int d = 0; d < DEPTH; ++d) {
    shown[current][0][d] = a[0][d]; shown[current][1][d] = a[1][d]; shown[current][2][d] = b[d];
  }
  pause_at(2);
  for (int t = 0; t < 2; ++t)
    for (int p = 0; p < 2; ++p)
      for (int d = 0; d < DEPTH; ++d)
        for (unsigned k = 0; k < 4; ++k)
          c[t][p] += shown[warp + lane / 4 * 4 + k][t][d] *
                     shown[warp + (lane % 4 * 2 + p) * 4 + k][2][d];
  pause_at(2);
}
"""
TYPES = """
struct uint2 { unsigned x, y; }; struct uint4 { unsigned x, y, z, w; };
struct Given { const void* x; long long pitch; const void* w; long long down, along; double* out;
               long long length, inner; int columns; long long share; };
"""


def on_host(folder, source, geometry, left, right):
    """A kernel's parts of sums, of matrices of NumPy's."""
    start = source.index("// c[0] and c[1] are")
    end = source.index("// Element n of words")
    text = source[:start] + MULTIPLY + source[end:]
    turned = geometry.kernel == "skinny_columns"
    call = "const Given& v = *(const Given*)argument; " + geometry.kernel
    call += "((const Integer*)v.x, v.pitch, (const FACTOR*)v.w, v.down, v.along, v.out, v.length, "
    call += "v.inner, v.columns, v.share)"
    after = re.sub(r"NAME\(.*\)", call.replace("\\", ""), AFTER)
    text = (TYPES + text + after).replace("threadIdx.x", "current")
    text = text.replace("256", "128") if turned else text  # fibers, of which are as many as threads
    path = folder / "kernel.cpp"
    before = BEFORE.replace("[256]", "[128]") if turned else BEFORE
    path.write_text(before + text)
    library = folder / "kernel.so"
    flags = ["-O1" if f == "-O0" else f for f in FLAGS]
    done = subprocess.run(
        [COMPILER, *flags, str(path), "-o", str(library), "-lm"], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr[:3000]

    class Given(ctypes.Structure):
        _fields_ = [
            ("x", ctypes.c_void_p), ("pitch", ctypes.c_longlong), ("w", ctypes.c_void_p),
            ("down", ctypes.c_longlong), ("along", ctypes.c_longlong), ("out", ctypes.c_void_p),
            ("length", ctypes.c_longlong), ("inner", ctypes.c_longlong),
            ("columns", ctypes.c_int), ("share", ctypes.c_longlong),
        ]  # fmt: skip

    length, inner = left.shape
    stored = left.T if turned else left
    out = np.full((geometry.blocks[1], length, right.shape[1]), np.nan)
    given = Given(
        stored.ctypes.data, stored.strides[0] // stored.itemsize, right.ctypes.data,
        right.strides[0] // right.itemsize, right.strides[1] // right.itemsize, out.ctypes.data,
        length, inner, right.shape[1], geometry.share,
    )  # fmt: skip
    stacks = ctypes.create_string_buffer(256 << 16)
    launch = ctypes.CDLL(str(library)).launch
    assert not launch(ctypes.byref(given), geometry.blocks[0], geometry.blocks[1], stacks)
    return out


@pytest.mark.skipif(COMPILER is None, reason="there is no g++ to compile kernels with")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("dtype", "factor", "length", "inner", "columns", "depth", "even"),
    [
        ("u1", "d", 300, 256, 20, 4, True),
        ("u1", "d", 270, 130, 20, 1, True),  # neither a whole warp of rows nor a whole step
        ("i1", "f", 40, 200, 8, 2, True),
        ("u2", "d", 260, 192, 24, 4, True),
        ("i2", "d", 33, 70, 1, 2, False),
        ("?", "f", 64, 128, 32, 4, False),
    ],
)
def test_kernels_multiply(
    tmp_path, monkeypatch, dtype, factor, length, inner, columns, depth, even, turned
):
    monkeypatch.setattr(skinny, "DEPTHS", dict.fromkeys(skinny.DEPTHS, depth))
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype)
    shape = (inner, length) if turned else (length, inner)
    if kind.kind == "b":
        stored = rng.random(shape) < 0.5
    else:
        limits = np.iinfo(kind)
        stored = rng.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)
    pitch = -(-shape[1] * kind.itemsize // 16) * 16 // kind.itemsize if even else shape[1] + 3
    room = np.zeros((shape[0], pitch), kind)
    room[:, : shape[1]] = stored
    stored = room[:, : shape[1]]
    left = stored.T if turned else stored
    right = rng.standard_normal((columns, inner)).astype(factor).T  # along columns in memory
    geometry = make_geometry(turned, length, inner, 1)
    aligned = even and room.ctypes.data % 16 == 0
    source = make_source(geometry.kernel, kind, factor, columns, aligned, 90)
    parts = on_host(tmp_path, source, geometry, left, right)
    want = left.astype("f8") @ right.astype("f8")
    np.testing.assert_allclose(parts.sum(axis=0), want, rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("length", [1, 255, 256, 5000, 10**7])
@pytest.mark.parametrize("inner", [1, 63, 64, 1000, 10**7])
def test_shares_cover_the_inner_axis_once(turned, length, inner):
    geometry = make_geometry(turned, length, inner, 132)
    across, shares = geometry.blocks
    assert across * 256 >= length > (across - 1) * 256
    assert shares * geometry.share >= inner > (shares - 1) * geometry.share
    assert geometry.share % skinny.STEP == 0


def test_what_counts_as_skinny():
    whole, few = np.ones((64, 40), "u1"), np.ones((40, 20))
    assert is_skinny(whole, few)
    assert is_skinny(few.T, whole.T)
    assert is_skinny(whole.astype("i2"), few.astype("f4"))
    assert not is_skinny(whole.astype("i4"), few)
    assert not is_skinny(whole, few.astype("c16"))
    assert not is_skinny(whole, np.ones((40, 33)))
    assert not is_skinny(few, few.T)
    assert not is_skinny(whole, whole.T)
