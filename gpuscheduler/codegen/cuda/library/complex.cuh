/// Complex numbers, after NumPy's loops and the formulas of C's standard. Division is Smith's.

//@ Complex
template<class T> struct alignas(2 * sizeof(T)) Complex { T x, y; };

//@ times~ times_real~
__device__ __forceinline__ Complex<Real> times~(Complex<Real> a, Complex<Real> b) {
  return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};
}
__device__ __forceinline__ Complex<Real> times_real~(Complex<Real> a, Real b) {
  return {a.x * b, a.y * b};
}

//@ over~
__device__ Complex<Real> over~(Complex<Real> a, Complex<Real> b) {
  const Real x = fabs~(b.x), y = fabs~(b.y);
  if (x >= y) {
    if (x == 0 && y == 0) return {a.x / x, a.y / x};
    const Real r = b.y / b.x, s = (Real)1 / (b.x + b.y * r);
    return {(a.x + a.y * r) * s, (a.y - a.x * r) * s};
  }
  const Real r = b.x / b.y, s = (Real)1 / (b.y + b.x * r);
  return {(a.x * r + a.y) * s, (a.y * r - a.x) * s};
}

//@ one_over~
__device__ Complex<Real> one_over~(Complex<Real> a) {
  if (fabs~(a.y) <= fabs~(a.x)) {
    const Real r = a.y / a.x, d = a.x + a.y * r;
    return {1 / d, -r / d};
  }
  const Real r = a.x / a.y, d = a.x * r + a.y;
  return {r / d, -1 / d};
}

//@ complex_exp~
__device__ Complex<Real> complex_exp~(Complex<Real> a) {
  if (a.y == 0) return {exp~(a.x), a.y};
  Real s, c;
  sincos~(a.y, &s, &c);
  if (is_infinite~(a.x) && a.x < 0 && !is_finite~(a.y)) return {0, copysign~((Real)0, a.y)};
  if (is_infinite~(a.x) && a.x > 0 && !is_finite~(a.y)) return {a.x, a.y - a.y};
  const Real big = sizeof(Real) == 4 ? (Real)88 : (Real)709;
  if (a.x > big && is_finite~(a.x)) {  // e to the a.x alone may be too much
    const Real half = exp~(a.x / 2);
    return {half * c * half, half * s * half};
  }
  const Real e = exp~(a.x);
  return {e * c, e * s};
}

//@ complex_log~
__device__ Complex<Real> complex_log~(Complex<Real> a) {
  Real x = fabs~(a.x), y = fabs~(a.y), m = x > y ? x : y, n = x > y ? y : x, r;
  if (m > (Real)0.5 && m < 2 && n < 2) {  // near the unit circle the logarithm is small
    r = log1p~((m - 1) * (m + 1) + n * n) / 2;
  } else {
    r = log~(hypot~(a.x, a.y));
  }
  return {r, atan2~(a.y, a.x)};
}

//@ complex_sqrt~
__device__ Complex<Real> complex_sqrt~(Complex<Real> a) {
  if (a.x == 0 && a.y == 0) return {0, a.y};
  if (is_infinite~(a.y)) return {fabs~(a.y), a.y};
  if (a.x != a.x) return {a.x, a.x};
  if (is_infinite~(a.x)) {
    const Real nan = a.y - a.y;
    return negative_bit~(a.x) ? Complex<Real>{fabs~(nan), copysign~(a.x, a.y)}
                              : Complex<Real>{a.x, copysign~(nan, a.y)};
  }
  const Real scale = (fabs~(a.x) > (Real)1e30 || fabs~(a.y) > (Real)1e30) ? (Real)0.25 : (Real)1;
  const Real x = a.x * scale, y = a.y * scale, back = scale == 1 ? (Real)1 : (Real)2;
  if (x >= 0) {
    const Real t = sqrt~((x + hypot~(x, y)) / 2);
    return {t * back, y / (2 * t) * back};
  }
  const Real t = sqrt~((-x + hypot~(x, y)) / 2);
  return {fabs~(y) / (2 * t) * back, copysign~(t, y) * back};
}

/// Infinities, NaNs and the signs of zeros follow C's standard, Annex G. One difference: in Annex G
/// sines and cosines of infinity times zero are NaN.
//@ half_exps~
__device__ __forceinline__ Complex<Real> half_exps~(Real x) {  // factors of half of e to the |x|
  const Real h = exp~(fabs~(x) / 2);  // e to the |x| alone may be too much
  return {h, h / 2};
}

//@ complex_sinh~
__device__ Complex<Real> complex_sinh~(Complex<Real> a) {
  if (a.y == 0) return {sinh~(a.x), a.y};
  if (!is_finite~(a.y)) {
    const Real nan = a.y - a.y;
    return {a.x == 0 ? a.x : is_infinite~(a.x) ? fabs~(a.x) : nan, nan};
  }
  Real s, c;
  sincos~(a.y, &s, &c);
  if (fabs~(a.x) > (sizeof(Real) == 4 ? (Real)88 : (Real)709) && is_finite~(a.x)) {
    const Complex<Real> e = half_exps~(a.x);
    return {copysign~((Real)1, a.x) * (e.x * c) * e.y, e.x * s * e.y};
  }
  return {sinh~(a.x) * c, cosh~(a.x) * s};
}

//@ complex_cosh~
__device__ Complex<Real> complex_cosh~(Complex<Real> a) {
  if (a.y == 0) return {cosh~(a.x), a.x != a.x ? a.y : copysign~((Real)1, a.x) * a.y};
  if (!is_finite~(a.y)) {
    const Real nan = a.y - a.y;
    if (a.x == 0) return {nan, 0};
    return {is_infinite~(a.x) ? fabs~(a.x) : nan, nan};
  }
  Real s, c;
  sincos~(a.y, &s, &c);
  if (fabs~(a.x) > (sizeof(Real) == 4 ? (Real)88 : (Real)709) && is_finite~(a.x)) {
    const Complex<Real> e = half_exps~(a.x);
    return {e.x * c * e.y, copysign~((Real)1, a.x) * (e.x * s) * e.y};
  }
  return {cosh~(a.x) * c, sinh~(a.x) * s};
}

//@ complex_sin~ complex_cos~
__device__ Complex<Real> complex_sin~(Complex<Real> a) {
  const Complex<Real> w = complex_sinh~({-a.y, a.x});
  return {w.y, -w.x};
}
__device__ Complex<Real> complex_cos~(Complex<Real> a) {
  return complex_cosh~({-a.y, a.x});
}

//@ complex_tanh~
__device__ Complex<Real> complex_tanh~(Complex<Real> a) {  // Kahan's
  if (!is_finite~(a.y)) {
    const Real nan = a.y - a.y;
    if (is_infinite~(a.x)) return {copysign~((Real)1, a.x), copysign~((Real)0, a.y)};
    return {a.x == 0 ? a.x : nan, nan};
  }
  if (a.x != a.x) return {a.x, a.y == 0 ? a.y : a.x};
  const Real most = sizeof(Real) == 4 ? (Real)11 : (Real)22;
  if (fabs~(a.x) >= most && is_finite~(a.y)) {
    const Real e = exp~(-fabs~(a.x));
    return {copysign~((Real)1, a.x), 4 * sin~(a.y) * cos~(a.y) * e * e};
  }
  const Real t = tan~(a.y), beta = 1 + t * t, s = sinh~(a.x), rho = sqrt~(1 + s * s);
  const Real d = 1 + beta * s * s;
  return {beta * rho * s / d, t / d};
}

//@ complex_tan~
__device__ Complex<Real> complex_tan~(Complex<Real> a) {
  const Complex<Real> t = complex_tanh~({-a.y, a.x});
  return {t.y, -t.x};
}

/// Inverse functions after W. Kahan, "Branch cuts for complex elementary functions", 1987.
/// Infinities, NaNs and the signs of zeros follow C's standard, Annex G.
//@ half_pi ln2
constexpr double half_pi = 0x1.921fb54442d18p+0, ln2 = 0x1.62e42fefa39efp-1;

//@ is_large~
__device__ __forceinline__ bool is_large~(Complex<Real> a) {  // whose square a 1 does not change
  const Real most = sizeof(Real) == 4 ? (Real)1e7 : (Real)1e15;
  return fabs~(a.x) > most || fabs~(a.y) > most;
}

//@ log_of_large~
__device__ Complex<Real> log_of_large~(Complex<Real> a) {
  return {log~(hypot~(a.x / 4, a.y / 4)) + (Real)0x1.62e42fefa39efp+0, atan2~(a.y, a.x)};
}

//@ complex_arccos~
__device__ Complex<Real> complex_arccos~(Complex<Real> a) {
  if (a.x != a.x || a.y != a.y) {
    if (is_infinite~(a.x)) return {a.y + a.y, -fabs~(a.x)};
    if (is_infinite~(a.y)) return {a.x + a.x, -a.y};
    if (a.x == 0) return {(Real)half_pi, a.y + a.y};
    return {a.x + a.y, a.x + a.y};
  }
  if (is_large~(a)) {
    const Complex<Real> w = log_of_large~(a);
    const Real y = w.x + (Real)ln2;
    return {fabs~(w.y), negative_bit~(a.y) ? y : -y};
  }
  const Complex<Real> m = complex_sqrt~({1 - a.x, -a.y}), p = complex_sqrt~({1 + a.x, a.y});
  const Real y = asinh~(p.x * m.y - p.y * m.x);
  return {2 * atan2~(m.x, p.x), y == 0 ? copysign~(y, -a.y) : y};
}

//@ complex_arcsinh~
__device__ Complex<Real> complex_arcsinh~(Complex<Real> a) {
  if (a.x != a.x || a.y != a.y) {
    if (is_infinite~(a.x)) return {a.x, a.y + a.y};
    if (is_infinite~(a.y)) return {a.y, a.x + a.x};
    if (a.y == 0) return {a.x + a.x, a.y};
    return {a.x + a.y, a.x + a.y};
  }
  if (is_large~(a)) {
    const Complex<Real> w = log_of_large~({fabs~(a.x), fabs~(a.y)});
    return {copysign~(w.x + (Real)ln2, a.x), copysign~(w.y, a.y)};
  }
  // i times the arcsine of -i a
  const Complex<Real> m = complex_sqrt~({1 - a.y, a.x}), p = complex_sqrt~({1 + a.y, -a.x});
  const Real x = asinh~(m.y * p.x - m.x * p.y);
  return {copysign~(x, a.x), atan2~(a.y, m.x * p.x - m.y * p.y)};
}

//@ complex_arccosh~
__device__ Complex<Real> complex_arccosh~(Complex<Real> a) {
  const Complex<Real> w = complex_arccos~(a);
  if (w.x != w.x && w.y != w.y) return {w.y, w.x};
  if (w.x != w.x) return {fabs~(w.y), w.x};
  if (w.y != w.y) return {w.y, a.x == 0 ? w.x : w.y};
  return {fabs~(w.y), copysign~(w.x, a.y)};
}

//@ complex_arctanh~
__device__ Complex<Real> complex_arctanh~(Complex<Real> a) {
  const Real x = fabs~(a.x), y = fabs~(a.y);
  if (a.y == 0 && x <= 1) return {atanh~(a.x), a.y};
  if (a.x == 0) return {a.x, atan~(a.y)};
  if (a.x != a.x || a.y != a.y) {
    if (is_infinite~(a.x)) return {copysign~((Real)0, a.x), a.y + a.y};
    if (is_infinite~(a.y)) return {copysign~((Real)0, a.x), copysign~((Real)half_pi, a.y)};
    return {a.x + a.y, a.x + a.y};
  }
  if (is_large~(a)) {  // the real part of 1 / a
    if (is_infinite~(x) || is_infinite~(y))
      return {copysign~((Real)0, a.x), copysign~((Real)half_pi, a.y)};
    const Real m = x > y ? x : y, u = x / m, v = y / m;
    return {copysign~(u / (u * u + v * v) / m, a.x), copysign~((Real)half_pi, a.y)};
  }
  Real s, t;
  if (x == 1) {
    s = y < 1 ? log~(sqrt~(sqrt~(4 + y * y)) / sqrt~(y)) : log1p~(4 / y / y) / 4;
    t = ((Real)half_pi + atan~(y / 2)) / 2;
  } else {
    s = log1p~(4 * x / ((1 - x) * (1 - x) + y * y)) / 4;
    t = atan2~(2 * y, (1 - x) * (1 + x) - y * y) / 2;
  }
  return {copysign~(s, a.x), copysign~(t, a.y)};
}

//@ complex_arcsin~
__device__ Complex<Real> complex_arcsin~(Complex<Real> a) {  // with the two parts exchanged
  const Complex<Real> w = complex_arcsinh~({a.y, a.x});
  return {w.y, w.x};
}

//@ complex_arctan~
__device__ Complex<Real> complex_arctan~(Complex<Real> a) {  // with the two parts exchanged
  const Complex<Real> w = complex_arctanh~({a.y, a.x});
  return {w.y, w.x};
}

//@ complex_expm1~ complex_log1p~
__device__ Complex<Real> complex_expm1~(Complex<Real> a) {
  const Real s = sin~(a.y / 2);
  return {expm1~(a.x) * cos~(a.y) - 2 * s * s, exp~(a.x) * sin~(a.y)};
}
__device__ Complex<Real> complex_log1p~(Complex<Real> a) {
  return {log~(hypot~(a.x + 1, a.y)), atan2~(a.y, a.x + 1)};
}

/// C's product: a number with one infinite part is infinite, even if the other part is NaN
/// (Annex G.5.1).
//@ times_in_c~
__device__ Complex<Real> times_in_c~(Complex<Real> a, Complex<Real> b) {
  const Complex<Real> r = times~(a, b);
  if (r.x == r.x || r.y == r.y) return r;
  const Real zero = 0;
  bool again = false;
  if (is_infinite~(a.x) || is_infinite~(a.y)) {
    a = {copysign~((Real)is_infinite~(a.x), a.x), copysign~((Real)is_infinite~(a.y), a.y)};
    if (b.x != b.x) b.x = copysign~(zero, b.x);
    if (b.y != b.y) b.y = copysign~(zero, b.y);
    again = true;
  }
  if (is_infinite~(b.x) || is_infinite~(b.y)) {
    b = {copysign~((Real)is_infinite~(b.x), b.x), copysign~((Real)is_infinite~(b.y), b.y)};
    if (a.x != a.x) a.x = copysign~(zero, a.x);
    if (a.y != a.y) a.y = copysign~(zero, a.y);
    again = true;
  }
  if (!again && (is_infinite~(a.x * b.x) || is_infinite~(a.y * b.y) || is_infinite~(a.x * b.y) ||
                 is_infinite~(a.y * b.x))) {
    if (a.x != a.x) a.x = copysign~(zero, a.x);
    if (a.y != a.y) a.y = copysign~(zero, a.y);
    if (b.x != b.x) b.x = copysign~(zero, b.x);
    if (b.y != b.y) b.y = copysign~(zero, b.y);
    again = true;
  }
  if (!again) return r;
  const Real endless = -log~(zero);
  return {endless * (a.x * b.x - a.y * b.y), endless * (a.x * b.y + a.y * b.x)};
}

//@ complex_power~
__device__ Complex<Real> complex_power~(Complex<Real> a, Complex<Real> b) {
  if (b.x == 0 && b.y == 0) return {1, 0};
  if (a.x == 0 && a.y == 0) {
    if (b.x > 0) return {0, 0};
    const Real nan = (a.x - a.x) / (a.x - a.x);
    return {nan, nan};
  }
  if (b.y == 0 && b.x == rint~(b.x) && fabs~(b.x) < 100) {
    const int n = (int)fabs~(b.x);
    Complex<Real> r = {1, 0}, p = a;
    if (n == 1) r = a;
    else if (n == 2) r = times~(a, a);
    else if (n == 3) r = times~(a, times~(a, a));
    else {
      for (int mask = 1;;) {
        if (n & mask) r = times~(r, p);
        mask <<= 1;
        if (n < mask) break;
        p = times~(p, p);
      }
    }
    return b.x < 0 ? over~({1, 0}, r) : r;
  }
  return complex_exp~(times_in_c~(b, complex_log~(a)));
}

//@ complex_less~ complex_less_equal~ complex_isnan~
__device__ __forceinline__ bool complex_less~(Complex<Real> a, Complex<Real> b) {
  return (a.x < b.x && a.y == a.y && b.y == b.y) || (a.x == b.x && a.y < b.y);
}
__device__ __forceinline__ bool complex_less_equal~(Complex<Real> a, Complex<Real> b) {
  return (a.x < b.x && a.y == a.y && b.y == b.y) || (a.x == b.x && a.y <= b.y);
}
__device__ __forceinline__ bool complex_isnan~(Complex<Real> a) {
  return a.x != a.x || a.y != a.y;
}

//@ complex_sign~
__device__ Complex<Real> complex_sign~(Complex<Real> a) {
  const Real m = hypot~(a.x, a.y);
  if (m == 0) return {0, 0};
  if (is_infinite~(m)) {
    if (is_infinite~(a.x) && is_infinite~(a.y)) return {a.x - a.x, a.x - a.x};
    return {is_infinite~(a.x) ? copysign~((Real)1, a.x) : (Real)0,
            is_infinite~(a.y) ? copysign~((Real)1, a.y) : (Real)0};
  }
  return {a.x / m, a.y / m};
}
