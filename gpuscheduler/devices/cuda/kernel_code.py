"""Compile kernels once per structure, and load them once per device.

Compiled code is kept on disk, so that the next process compiles nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nvrtc
from cupy.cuda.function import Module

from ... import disk_cache
from ...codegen.cuda.kernel import ONLY, KernelSource, generate
from ...codegen.cuda.nodes import DeviceCall
from ...errors import NotGenerated
from ...forks import new_lock, new_rlock
from ...frontend.task import kernels_of, members_of
from ...ir.expr import PLACEHOLDER, Out, Program, is_placeholder
from ...ir.hoist import hoist_invariants, split_kernels
from ...ir.loop_tiling import tile_program
from ...ir.split_scans import split_scan
from ...plan.batching import SMALL
from ...tracing import numba_cuda
from ...values import leaves
from .launch import ALIGNED, MOST_PROGRAMS, Aligned, PreparedKernel, PreparedProgram

#: The compiler's options, by whether its fast mathematics is asked for.
OPTIONS = {
    False: ("-std=c++17", "-default-device", "--fmad=false"),
    True: ("-std=c++17", "-default-device", "--use_fast_math"),
}
#: What makes of a source a piece to link, not machine code.
TO_LINK = ("-dlto", "--relocatable-device-code=true")


class CompileFailed(Exception):
    """The compiler's own words."""


class KernelCode:
    """The code of a scheduler's kernels: their text, machine code, and modules on each device.

    It owns the modules, which stay loaded as long as it lives. Any thread may ask: a program is
    prepared under a lock, once for each device. Nothing here is queued on a stream.
    """

    def __init__(self, fast_math: bool = False) -> None:
        self.fast_math = bool(fast_math)
        self.compiled = 0  # sources that were compiled, not found
        #: Is told of each compilation.
        self.note: Callable[..., None] = lambda kind, **fields: None
        self._counting = new_lock()
        self._cubins: dict[tuple[str, str, bool], bytes] = {}
        self._loaded: dict[tuple[str, int, bool], Any] = {}
        self._texts: dict[
            tuple[int, int, Aligned], tuple[Program, Program, list[KernelSource]]
        ] = {}  # what was given, what is run, and its kernels
        self._prepared: dict[tuple[int, int, Aligned, bool], tuple[Program, PreparedProgram]] = {}
        self._lock = new_rlock()

    def compile_ahead(self, tasks: Iterable[Any], device: int) -> None:
        """Compile the kernels of new tasks, several at a time.

        A first run would compile them one after the other. Failures are met again at the launch.
        """
        arch = _arch(device)
        wanted = self._missing_kernels(tasks, device, arch)
        calls = dict.fromkeys([c for made, _ in wanted for c in made.calls])

        def functions() -> None:
            for call in calls:
                with suppress(Exception):
                    numba_cuda.compile_call(call, arch)

        def kernel(made: KernelSource, single: bool) -> None:
            with suppress(Exception):
                self._cubin(made, device, single)

        # Numba takes longest, and one processor: meanwhile others compile what needs no function
        work: list[Callable[[], None]] = [functions] if calls else []
        wanted.sort(key=lambda item: bool(item[0].calls))
        work += [partial(kernel, made, single) for made, single in wanted]
        if len(work) < 2:
            return
        with ThreadPoolExecutor(min(len(work), os.cpu_count() or 1)) as pool:
            for one in work:
                pool.submit(one)

    def _missing_kernels(
        self, tasks: Iterable[Any], device: int, arch: str
    ) -> list[tuple[KernelSource, bool]]:
        """Kernels of tasks that are neither here nor on disk, and whether for a single item."""
        seen: set[tuple[int, bool]] = set()
        missing: dict[tuple[str, bool], KernelSource] = {}
        for task in tasks:
            held, single = kernels_of(task), not members_of(task)
            if not held:
                continue
            first = held[0]
            if (id(first.program), single) in seen or (
                not first.names and not first.makes_on_device
            ):
                continue
            seen.add((id(first.program), single))
            if (id(first.program), device, ALIGNED, single) in self._prepared:
                continue
            with suppress(NotGenerated):
                for made in self._write_kernels(first.program, device, ALIGNED)[1]:
                    if (made.source, single) in missing:
                        continue
                    if self._find_cubin(made, arch, single) is None:
                        missing[made.source, single] = made
        return [(made, single) for (_, single), made in missing.items()]

    def _write_kernels(
        self, given: Program, device: int, aligned: Aligned
    ) -> tuple[Program, list[KernelSource]]:
        """The program as it is run, and its kernels' text."""
        key = id(given), device, aligned
        found = self._texts.get(key)
        if found is None or found[0] is not given:
            if len(self._texts) >= MOST_PROGRAMS:
                self._texts.clear()
            processors = cupy.cuda.Device(device).attributes["MultiProcessorCount"]
            program = given
            if not any(k.picks for k in given.kernels):  # these count points of the same parts
                program = tile_program(hoist_invariants(split_kernels(given, split_scan)))
            made = [generate(k, aligned[0], processors, aligned[1]) for k in program.kernels]
            found = self._texts[key] = given, program, made
        return found[1:]

    def get_prepared(
        self, given: Program, device: int, aligned: Aligned, single: bool
    ) -> PreparedProgram:
        """Its kernels: those that take a `single` item, or those that take many."""
        key = id(given), device, aligned, single
        found = self._prepared.get(key)
        if found is None:
            with self._lock:
                if len(self._prepared) >= MOST_PROGRAMS:
                    self._prepared.clear()
                program, made = self._write_kernels(given, device, aligned)
                # the shapes that results will have: what an array is reshaped to costs time
                shapes = {o.array: o.shape for o in leaves(program.result) if isinstance(o, Out)}
                kernels = [
                    self._prepare(k, text, device, single, start, shapes, program.inputs)
                    for k, text, start in zip(program.kernels, made, program.starts, strict=True)
                ]
                sizes = tuple([n for k in kernels for n in k.sizes])
                small = sizes if len(sizes) > 1 and max(sizes) <= SMALL else ()
                found = self._prepared[key] = given, PreparedProgram(program, kernels, small)
        return found[1]

    def _prepare(
        self,
        kernel: Any,
        made: KernelSource,
        device: int,
        single: bool,
        start: int,
        shapes: dict[int, Any],
        given: int,
    ) -> PreparedKernel:
        function = self._function(made, device, single)
        most = 1 if single else made.most
        outputs = tuple(
            (slot, shapes.get(start + n, kernel.output_shape), o.dtype)
            for n, (slot, o) in enumerate(zip(made.outputs, kernel.outputs, strict=True))
        )
        positions = tuple(
            (slot, (int(word) - PLACEHOLDER) // 2)
            for slot, word in enumerate(made.slots)
            if is_placeholder(int(word))
        )
        void = np.dtype((np.void, made.slots.nbytes * most))
        sizes = tuple([math.prod(shape) * dtype.itemsize for _, shape, dtype in outputs])
        return PreparedKernel(function, made, most, void, outputs, sizes, positions, given)

    def _function(self, made: KernelSource, device: int, single: bool) -> Any:
        key = made.source, device, single
        module = self._loaded.get(key)
        if module is None:
            with self._lock:  # another thread may have loaded it meanwhile
                module = self._loaded.get(key)
                if module is None:
                    module = Module()
                    module.load(self._cubin(made, device, single))
                    self._loaded[key] = module
        return module.get_function(made.name + "_one" if single else made.name)

    def _cubin(self, made: KernelSource, device: int, single: bool) -> bytes:
        arch = _arch(device)
        found = self._find_cubin(made, arch, single)
        if found is None:
            begin = perf_counter()
            found = compile_kernel(made.source, arch, made.calls, self.fast_math, single)
            self.note("compile", kernel=made.name, seconds=round(perf_counter() - begin, 3))
            with self._counting:
                self.compiled += 1
            disk_cache.keep(
                _cubin_key(made.source, arch, made.calls, self.fast_math, single), found
            )
            self._cubins[made.source, arch, single] = found
        return found

    def _find_cubin(self, made: KernelSource, arch: str, single: bool) -> bytes | None:
        """Return a kernel's machine code from memory or the disk cache; None if in neither."""
        key = made.source, arch, single
        if key not in self._cubins:
            found = disk_cache.read(
                _cubin_key(made.source, arch, made.calls, self.fast_math, single)
            )
            if found is None:
                return None
            self._cubins[key] = found
        return self._cubins[key]


def _arch(device: int) -> str:
    return f"sm_{cupy.cuda.Device(device).compute_capability}"


def compile_kernel(
    source: str,
    arch: str,
    calls: Sequence[DeviceCall] = (),
    fast_math: bool = False,
    single: bool | None = None,
) -> bytes:
    """Compile a kernel source for an architecture such as ``sm_90``.

    Returns machine code with the functions that it calls: of both of the source's kernels, or only
    of the kernel for a `single` item, or for many.
    """
    options = [f"-arch={arch}", *OPTIONS[fast_math]]
    if single is not None:
        options.append(ONLY[single])
    if not calls:
        return _translate(source, tuple(options), nvrtc.getCUBIN)
    try:
        kernel = _translate(source, (*options, *TO_LINK), nvrtc.getLTOIR)
        pieces = [numba_cuda.compile_call(call, arch) for call in calls]
        return numba_cuda.link([kernel, *pieces], arch, fast_math)
    except numba_cuda.NoDeviceCode as error:
        raise CompileFailed(str(error)) from error


def _translate(source: str, options: tuple[str, ...], result: Callable[[Any], bytes]) -> bytes:
    program = nvrtc.createProgram(source, "fused.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(result(program))
    except nvrtc.NVRTCError as error:
        raise CompileFailed(f"{error}: {nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def _cubin_key(
    source: str, arch: str, calls: Sequence[DeviceCall], fast_math: bool, single: bool
) -> tuple[Any, ...] | None:
    """Return the disk cache's key of a kernel; None where it calls a function that has no key."""
    words = source, arch, OPTIONS[fast_math], ONLY[single], nvrtc.getVersion()
    if not calls:
        return words
    if not all(c.function.lasting for c in calls):
        return None
    digests = [c.function.digest for c in calls]  # what the symbols in the source stand for
    return *words, digests, TO_LINK, numba_cuda.LINK[fast_math], numba_cuda.version()
