"""CUDA source of `codegen.cuda.kernel` run on the host: compiled as C++, a thread is a fiber.

The fibers of a block take turns at each barrier, and it is an error when they wait at different
ones. Memory order and speed are not what a GPU's are; values are.
"""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

from gpuscheduler.codegen.cuda.device_library import HALF
from gpuscheduler.codegen.cuda.kernel import ONLY, generate
from gpuscheduler.codegen.cuda.operations import STORED

#: Bytes of the types that are stored.
SIZES = {kind: int(short[1:]) for short, kind in STORED.items()}
COMPILER = shutil.which("g++")
HALF_ON_HOST = """
static float half_value(unsigned short h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static unsigned short half_bits(float v) {
  _Float16 x = (_Float16)v; unsigned short h; memcpy(&h, &x, 2); return h;
}
static float half_round(float x) { return half_value(half_bits(x)); }
static float half_of_double(double x) { return (float)(_Float16)x; }
"""
ASSEMBLY = {
    'asm("{ .reg .b32 t; not.b32 t, %1; add.s32 %0, t, 1; }" : "=r"(y) : "r"(x));': (
        "y = (int)(~(unsigned)x + 1u);"
    ),
    'asm("{ .reg .b64 t; not.b64 t, %1; add.s64 %0, t, 1; }" : "=l"(y) : "l"(x));': (
        "y = (long long)(~(unsigned long long)x + 1ull);"
    ),
    'asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(d));': "r = coarse(1 / d);",
    'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));': "r = coarse_float(1 / no_small(x));",
    'asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));': "r = coarse_float(1 / no_small(b));",
    'asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));': (
        "y = coarse_float(1 / sqrtf(no_small(x)));"
    ),
    'asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(t));': "y = coarse(1 / sqrt(t));",
}
BEFORE = r"""
#include <math.h>
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
struct Place { unsigned x, y, z; };
static Place blockIdx, threadIdx;
static ucontext_t fibers[256];
static jmp_buf paused[256], scheduler;  // a jump takes no system call, which swapcontext does
static int waiting[256];  // 0 has not begun, 1 waits for all, 2 exchanges, -1 is done
static bool begun[256];  // fibers run one block's thread after the other
static unsigned current;
static inline void pause_at(int kind) {
  waiting[current] = kind;
  if (!_setjmp(paused[current])) _longjmp(scheduler, 1);
}
static void __attribute__((noinline)) go_on(unsigned t) {
  if (_setjmp(scheduler)) return;
  if (begun[t]) _longjmp(paused[t], 1);
  begun[t] = true;
  setcontext(&fibers[t]);
}
static inline void __syncthreads() { pause_at(1); }
static inline void __threadfence() {}
static inline void __syncwarp() { pause_at(2); }
static unsigned exchange[256];
static double exchanged[256];
static inline double __shfl_sync(unsigned, double v, int from) {
  exchanged[current] = v;
  pause_at(2);
  const double got = exchanged[(current & ~31u) + from];
  pause_at(2);
  return got;
}
static inline unsigned of_lane(unsigned v, int lane, bool there) {
  exchange[current] = v;
  pause_at(2);
  const unsigned got = there ? exchange[(current & ~31u) + lane] : v;
  pause_at(2);
  return got;
}
static inline unsigned __match_any_sync(unsigned, unsigned v) {
  exchange[current] = v;
  pause_at(2);
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (exchange[(current & ~31u) + lane] == v) same |= 1u << lane;
  pause_at(2);
  return same;
}
static inline unsigned __ballot_sync(unsigned, int holds) {
  const unsigned yes = __match_any_sync(~0u, holds != 0);
  return holds ? yes : ~yes;
}
static inline int __any_sync(unsigned, int holds) { return __ballot_sync(~0u, holds) != 0; }
static inline unsigned __shfl_down_sync(unsigned, unsigned v, int down) {
  const int lane = current & 31;
  return of_lane(v, lane + down, lane + down < 32);
}
static inline unsigned __shfl_sync(unsigned, unsigned v, int from, int lanes) {
  const int lane = current & 31;
  return of_lane(v, lane / lanes * lanes + from % lanes, true);
}
static inline unsigned __shfl_up_sync(unsigned, unsigned v, int up, int lanes) {
  const int lane = current & 31;
  return of_lane(v, lane - up, lane % lanes >= up);
}
template<class T> static T atomicAdd(T* p, T n) { const T old = *p; *p += n; return old; }
template<class T> static T atomicExch(T* p, T n) { const T old = *p; *p = n; return old; }
template<class T> static T __ldcg(const T* p) { return *p; }
template<class T, class U> static T same_bits(U u) { T t; memcpy(&t, &u, sizeof t); return t; }
static inline float __int_as_float(int x) { return same_bits<float>(x); }
static inline int __float_as_int(float x) { return same_bits<int>(x); }
static inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static inline double __hiloint2double(int high, int low) {
  return same_bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}
static inline int __double2hiint(double x) { return (int)(same_bits<long long>(x) >> 32); }
static inline int __double2loint(double x) { return (int)same_bits<long long>(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs(x); }
#define cospi cospi_
#define sinpi sinpi_
#define cospif cospif_
#define sinpif sinpif_
#define sincospi sincospi_
#define sincospif sincospif_
static inline double cospi(double x) { return (double)cosl(M_PIl * (long double)x); }
static inline double sinpi(double x) { return (double)sinl(M_PIl * (long double)x); }
static inline float cospif(float x) { return (float)cosl(M_PIl * (long double)x); }
static inline float sinpif(float x) { return (float)sinl(M_PIl * (long double)x); }
static inline void sincospi(double x, double* s, double* c) { *s = sinpi(x); *c = cospi(x); }
static inline void sincospif(float x, float* s, float* c) { *s = sinpif(x); *c = cospif(x); }
static inline double normcdf(double x) { return erfc(-x * M_SQRT1_2) / 2; }
static inline float normcdff(float x) { return (float)normcdf((double)x); }
extern "C" double cyl_bessel_i0(double), cyl_bessel_i1(double);
extern "C" float cyl_bessel_i0f(float), cyl_bessel_i1f(float);
static inline double coarse(double x) {  // as many digits as the hardware's approximations have
  return same_bits<double>(same_bits<long long>(x) & ~((1ll << 30) - 1));
}
// Hardware that has no subnormal numbers here, and is off by a unit in the last place.
static inline float no_small(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static inline float coarse_float(float x) {
  x = no_small(x);
  return x == 0 || !(fabsf(x) < 0x1p127f) ? x : same_bits<float>(same_bits<int>(x) ^ 1);
}
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
"""
#: What only C++'s library has, whose headers would take half of the time for each kernel.
BESSEL = """
#include <cmath>
extern "C" double cyl_bessel_i0(double x) {
  return x - x == 0 ? std::cyl_bessel_i(0.0, fabs(x)) : fabs(x);
}
extern "C" double cyl_bessel_i1(double x) {
  return x - x == 0 ? copysign(std::cyl_bessel_i(1.0, fabs(x)), x) : x;
}
extern "C" float cyl_bessel_i0f(float x) { return (float)cyl_bessel_i0(x); }
extern "C" float cyl_bessel_i1f(float x) { return (float)cyl_bessel_i1(x); }
"""
#: What Numba calls of CUDA's library: here it is the host's.
LIBDEVICE = "".join(
    f'extern "C" {kind} __nv_{name}{f}({kind} x) {{ return {host}{f}(x); }}\n'
    for kind, f in (("double", ""), ("float", "f"))
    for name, host in {
        **{n: n for n in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos",
                          "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sqrt", "asinh",
                          "acosh", "atanh", "cbrt",
                          "floor", "ceil", "trunc", "rint", "erf", "erfc", "tgamma", "lgamma",
                          "j0", "j1")},
        "fabs": "fabs",
    }.items()
) + "".join(
    f'extern "C" {kind} __nv_{name}{f}({kind} x, {kind} y) {{ return {name}{f}(x, y); }}\n'
    for kind, f in (("double", ""), ("float", "f"))
    for name in ("pow", "atan2", "hypot", "fmod", "copysign", "nextafter", "fmin", "fmax")
)  # fmt: skip
LIBDEVICE += """
extern "C" double __nv_powi(double x, int n) { return pow(x, n); }
extern "C" float __nv_powif(float x, int n) { return powf(x, n); }
extern "C" int __nv_isnand(double x) { return x != x; }
extern "C" int __nv_isnanf(float x) { return x != x; }
extern "C" int __nv_isinfd(double x) { return x == x && x - x != 0; }
extern "C" int __nv_isinff(float x) { return x == x && x - x != 0; }
extern "C" int __nv_finitef(float x) { return x - x == 0; }
extern "C" int __nv_isfinited(double x) { return x - x == 0; }
extern "C" long long __nv_llrint(double x) { return llrint(x); }
"""
POINTER = re.compile(r"(?<![\w\"])(?:[if]\d+|float|double|void|%\"[^\"]*\"|\{[^{}]*\})\*+")


def numba_on_host(call):
    """Numba's own code for a GPU as an object file of the host."""
    from llvmlite import binding

    from gpuscheduler.tracing import numba_cuda

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(opt=2, reloc="pic", codemodel="small")
    whole = None
    for text in numba_cuda.llvm(call, "sm_90"):
        text = re.sub(r'target (triple|datalayout) = ".*"', "", text)
        while text != (text := POINTER.sub("ptr", text)):  # LLVM's pointers have no types now
            pass
        module = binding.parse_assembly(text)
        module.triple = binding.get_default_triple()
        if whole is None:
            whole = module
        else:
            whole.link_in(module)
    whole.verify()
    return machine.emit_object(whole)


AFTER = r"""
static const void* argument;
static void thread() {
  for (;;) {
    NAME(*(const Items<MOST>*)argument);
    pause_at(-1);
  }
}
extern "C" __attribute__((visibility("default")))
int launch(const void* items, unsigned blocks, unsigned count, char* stacks) {
  argument = items;
  const size_t room = 1 << 16;
  for (unsigned t = 0; t < 256; ++t) {
    if (t) fibers[t] = fibers[0]; else getcontext(&fibers[0]);
    fibers[t].uc_stack.ss_sp = stacks + room * t;
    fibers[t].uc_stack.ss_size = room;
    fibers[t].uc_link = 0;
    makecontext(&fibers[t], thread, 0);
    begun[t] = false;
  }
  for (blockIdx.y = 0; blockIdx.y < count; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      memset(waiting, 0, sizeof waiting);
      for (unsigned alive = 256; alive;) {
        alive = 0;
        for (unsigned warp = 0; warp < 256; warp += 32)
          for (int kind = 2; kind == 2;) {  // lanes of a warp exchange as often as they like
            kind = 0;
            unsigned here = 0;
            for (unsigned t = warp; t < warp + 32; ++t) {
              if (waiting[t] < 0) continue;
              current = t;
              threadIdx.x = t;
              go_on(t);
              if (waiting[t] < 0) continue;
              ++here;
              if (kind && kind != waiting[t]) return 1;
              kind = waiting[t];
            }
            if (kind != 2) alive += here;
          }
      }
    }
  return 0;
}
"""


FLAGS = ["-std=gnu++17", "-O0", "-shared", "-fPIC", "-ffp-contract=off", "-w",
         "-fno-strict-aliasing", "-fno-gnu-unique", "-fvisibility=hidden", "-nostdlib",
         *(["-fuse-ld=gold"] if shutil.which("ld.gold") else [])]  # fmt: skip


def compiled(*arguments):
    done = subprocess.run([COMPILER, *FLAGS, *arguments], capture_output=True, text=True)
    assert not done.returncode, done.stderr


class Host:
    """Compiled sources, kept in a directory, which may be one of several processes: what one has
    compiled the others load."""

    def __init__(self, directory=None):
        self.directory = Path(directory or tempfile.mkdtemp())
        self.loaded = {}
        self.one_at_a_time = threading.Lock()  # stacks, and shared memory, which is static there
        self.stacks = ctypes.create_string_buffer(256 << 16)

    def function(self, made, one):
        """A kernel, of one item or of as many as its items have room for."""
        if (made.source, one) not in self.loaded:
            objects = [numba_on_host(call) for call in made.calls]
            text = made.source.replace(HALF.strip("\n"), HALF_ON_HOST)
            for asm, call in ASSEMBLY.items():
                text = text.replace(asm, call)
            name, most = (f"{made.name}_one", 1) if one else (made.name, made.most)
            after = AFTER.replace("NAME", name).replace("MOST", str(most))
            # threadIdx is what it is for the current fiber whenever a thread goes on
            text = text.replace("threadIdx.x", "current")
            only = f"#define {ONLY[one].removeprefix('-D')}\n"
            text = (LIBDEVICE if objects else "") + only + text + after
            self.loaded[made.source, one] = ctypes.CDLL(str(self.built(text, objects))).launch
        return self.loaded[made.source, one]

    def built(self, text, objects):
        """Text that follows BEFORE, and what it calls, as a library; the same has the same name."""
        name = hashlib.sha256(b"\0".join([BEFORE.encode(), text.encode(), *objects])).hexdigest()
        library = self.directory / f"{name[:20]}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=self.directory) as folder:
                source, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
                source.write_text(f'#include "{self.before()}"\n' + text)
                pieces = [Path(folder, f"{n}.o") for n in range(len(objects))]
                for piece, content in zip(pieces, objects, strict=True):
                    piece.write_bytes(content)
                if "cyl_bessel" in text:
                    pieces += self.kept("bessel.cpp", BESSEL, "-c"), "-lstdc++", "-lc"
                # shared memory is static there: each library is to have its own
                compiled("-nostdinc++", source, *pieces, "-lm", "-lgcc", "-o", made)
                made.replace(library)
        return library

    def before(self):
        """The header that each source begins with, which is what takes long: read once."""
        options = "-nostdinc++", "-x", "c++-header"
        return self.kept("before.h", BEFORE, *options).with_suffix("")

    def kept(self, name, text, *options):
        """What a text is compiled to, once for all processes, beside a copy of it."""
        stem, kind = name.split(".")
        stem += hashlib.sha256(text.encode()).hexdigest()[:20]
        made = self.directory / f"{stem}.{'h.gch' if kind == 'h' else 'o'}"
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=self.directory) as folder:
                source, new = Path(folder, name), Path(folder, "new")
                source.write_text(text)
                compiled(*options, source, "-o", new)
                source.replace(self.directory / f"{stem}.{kind}")
                new.replace(made)
        return made

    def run(self, kernels, arrays, one=False, **options):
        """The outputs of kernels of the same structure, launched together; `arrays` are those of
        each of them."""
        made = [generate(k, **options) for k in kernels]
        assert len({m.source for m in made}) == 1
        assert len(kernels) <= made[0].most
        items = np.zeros((1 if one else made[0].most, len(made[0].slots)), np.uint64)
        outs, alive = [], []
        for kernel, m, row, own in zip(kernels, made, items, arrays, strict=False):
            row[:] = m.slots
            for slot, n, offset in m.inputs:
                row[slot] = (own[n].ctypes.data + offset) % 2**64
            outs.append([])
            for slot, o in zip(m.outputs, kernel.outputs, strict=True):
                out = aligned(np.full(kernel.output_shape, 77, o.dtype))
                outs[-1].append(out)
                row[slot] = out.ctypes.data
            if m.scratch is not None:
                alive.append(np.full(m.scratch[1] // 8 + 1, 2**63 - 1, np.uint64))
                row[m.scratch[0]] = alive[-1].ctypes.data
            if m.counters is not None:
                alive.append(np.zeros(m.counters[1], np.uint32))
                row[m.counters[0]] = alive[-1].ctypes.data
        self.launched(made[0], items, max(m.blocks for m in made), len(kernels), one)
        assert not any(a.any() for a in alive if a.dtype == np.uint32)  # counters are left zero
        return outs

    def picked(self, made, arrays, outs):
        """A kernel that counts what a mask selects, or picks it out."""
        row = made.slots.copy()
        for slot, n, offset in made.inputs:
            row[slot] = arrays[n].ctypes.data + offset
        for slot, out in zip(made.outputs, outs, strict=True):
            row[slot] = out.ctypes.data
        self.launched(made, row.reshape(1, -1), made.blocks, 1, True)

    def launched(self, made, items, blocks, count, one):
        for slot, nbytes in vectors(made.source).items():
            assert not (items[:count, slot] % nbytes).any(), "a vector does not begin at a multiple"
        with self.one_at_a_time:
            failed = self.function(made, one)(
                items.ctypes.data_as(ctypes.c_void_p), blocks, count, self.stacks
            )
        assert not failed, "threads of a block wait at different barriers"


@functools.cache
def vectors(source):
    """The slots of pointers through which vectors are read or written, and the bytes of these."""
    found = {}
    for slot_of, pattern in (
        (
            r"const (\w+)\* const (\w+) = \(const .*\*\)S\((\d+)\)",
            r"\(const Vec<(.*), (\d+)>\*\)\((\w+) ",
        ),
        (
            r"([\w ]+)\* const (\w+) = \((?!const).*\*\)S\((\d+)\)",
            r"\*\(Vec<(.*), (\d+)>\*\)\((\w+) ",
        ),
    ):
        slots = {name: int(slot) for _, name, slot in re.findall(slot_of, source)}
        for kind, count, name in re.findall(pattern, source):
            size = SIZES.get(kind, 16)
            if name in slots:
                found[slots[name]] = min(16, size * int(count))
    return found


def aligned(array, shift=0):
    """A copy that begins `shift` bytes behind a multiple of 16."""
    room = np.empty(array.nbytes + 32 + shift, np.uint8)
    start = -room.ctypes.data % 16 + shift
    out = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out
