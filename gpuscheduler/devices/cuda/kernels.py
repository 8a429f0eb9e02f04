"""Compile kernels once per structure, load them once per device, and launch them.

Kernels compiled once per structure, loaded once per device, launched with one argument. Compiled
code is kept on disk, so that the next process compiles nothing.

It imports CuPy, as `cuda` does, which has the devices and streams; this has the kernels.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
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
from ...fusion.task import CompressTask, KernelTask, compute_program
from ...ir.expr import PLACEHOLDER, Out, Program, is_placeholder
from ...ir.hoist import hoist_invariants, split_kernels
from ...ir.loop_tiling import tile_program
from ...ir.split_scans import split_scan
from ...plan.batching import SMALL, Batch
from ...tracing import numba_cuda
from ...values import leaves
from .launch import (
    ALIGNED,
    MOST_PROGRAMS,
    Aligned,
    PreparedKernel,
    PreparedProgram,
    SmallArrayRoom,
    Workspace,
    all_on_device,
    argument_rows,
    batch_pointers,
    batch_value,
    begin_arguments,
    copy_program,
    queue,
)
from .numpy_fallback import SAID, call_unfused, move_for_kernel, move_values, own_failure

#: The compiler's options, by whether its fast mathematics is asked for.
OPTIONS = {
    False: ("-std=c++17", "-default-device", "--fmad=false"),
    True: ("-std=c++17", "-default-device", "--use_fast_math"),
}
#: What makes of a source a piece to link, not machine code.
TO_LINK = ("-dlto", "--relocatable-device-code=true")


class CompileFailed(Exception):
    """The compiler's own words."""


class Kernels:
    """The kernels of a scheduler, compiled and loaded.

    With `fast_math` they are faster, and less exact than NumPy.
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
        self._strided: dict[tuple[int, tuple[int, ...]], tuple[Program, Program]] = {}
        self._broken: dict[int, Program] = {}
        self._lock = new_rlock()

    def run(
        self,
        fused: KernelTask,
        values: dict[Any, Any],
        device: int,
        work: Workspace,
        into: Any = None,
    ) -> Any:
        """Compute a fused task on the current device and stream.

        With `into`, the task's only array is written there, with the strides of `into`. Raises
        `LaunchFailed` for failures here, and not for those in operations of a task.
        """
        try:
            value = self._run(fused, values, device, work, into)
        except SAID as error:
            raise own_failure(error) from error
        return value() if type(value) is partial else value

    def _run(
        self,
        fused: KernelTask,
        values: dict[Any, Any],
        device: int,
        work: Workspace,
        into: Any = None,
    ) -> Any:
        """The value of a fused task; a `partial` that gives it where that takes no kernel."""
        program = fused.program
        if self.is_broken(program):
            return call_unfused(fused, fused.original, values)
        arrays = fused.arrays(values, cupy.ndarray)
        if arrays is None or not all_on_device(arrays, device):
            there = move_for_kernel(fused, values)
            if there is None:
                return call_unfused(fused, fused, values)
            return self._run(fused, there, device, work, into)
        if not arrays and not fused.makes_on_device:
            return call_unfused(fused, fused, values)
        pointers = [a.data.ptr for a in arrays]
        writes = into is None or not into.data.ptr % 16
        aligned = writes and not any(p % 16 for p in pointers)
        try:
            ready = self.get_prepared(program, device, (aligned, writes), single=True)
        except (CompileFailed, NotGenerated) as error:
            self._give_up(fused, error)
            return call_unfused(fused, fused.original, values)
        steps = iter(ready.kernels)
        room = SmallArrayRoom(ready.small) if ready.small else None

        def evaluate(_: Any, every: list[Any]) -> list[Any]:
            kernel = next(steps)
            target = into if kernel is ready.kernels[-1] else None
            return self._launch(kernel, pointers, fused.positions, work, room, target)

        return compute_program(ready.program, evaluate, arrays, scalars=False)

    def pick(self, task: CompressTask, values: dict[Any, Any], device: int, work: Workspace) -> Any:
        """Select elements by a mask, on the current device and stream.

        Waits until the number of elements is known. Raises `LaunchFailed` as `run` does.
        """
        try:
            value = self._pick(task, values, device, work)
        except SAID as error:
            raise own_failure(error) from error
        return value() if type(value) is partial else value

    def _pick(
        self, task: CompressTask, values: dict[Any, Any], device: int, work: Workspace
    ) -> Any:
        fused = task.fused
        program = fused.program
        if self.is_broken(program):
            return call_unfused(fused, task, values)
        arrays = fused.arrays(values, cupy.ndarray)
        if arrays is None or not all_on_device(arrays, device):
            there = move_for_kernel(fused, values)
            if there is None:
                return call_unfused(fused, task, values)
            return self._pick(task, there, device, work)
        pointers = [a.data.ptr for a in arrays]
        aligned = not any(p % 16 for p in pointers)
        try:
            counting, writing = self.get_prepared(
                program, device, (aligned, True), single=True
            ).kernels
        except (CompileFailed, NotGenerated) as error:
            self._give_up(fused, error)
            return call_unfused(fused, task, values)
        counts = cupy.empty(counting.generated.units, np.uint32)
        self._start(counting, pointers, fused.positions, [counts.data.ptr], work)
        ends = cupy.cumsum(counts, dtype=np.int64)
        dtype, itemsize = writing.outputs[1][2], writing.outputs[1][2].itemsize
        out = cupy.empty((int(ends[-1]), *task.columns), dtype)
        if out.size:
            first = out.data.ptr
            columns = [first + n * itemsize for n in range(len(writing.outputs) - 1)]
            self._start(writing, pointers, fused.positions, [ends.data.ptr, *columns], work)
        return out

    def _start(
        self,
        kernel: PreparedKernel,
        pointers: list[int],
        positions: tuple[int, ...],
        outs: list[int],
        work: Workspace,
    ) -> None:
        """Launch a kernel for a single item that reads and writes there."""
        made = kernel.generated
        slots = made.slots.copy()
        for slot, n, offset in made.inputs:
            slots[slot] = pointers[n] + offset
        for slot, pointer in zip(made.outputs, outs, strict=True):
            slots[slot] = pointer
        for slot, n in kernel.positions:
            slots[slot] = positions[n]
        if made.scratch is not None:
            slots[made.scratch[0]] = work.scratch_at(made.scratch[1])
        if made.counters is not None:
            slots[made.counters[0]] = work.counters_at(made.counters[1])
        kernel.function((made.blocks, 1, 1), (made.threads, 1, 1), (slots.view(kernel.void)[0],))

    def run_batch(
        self,
        batch: Batch,
        values: dict[Any, Any],
        device: int,
        work: Workspace,
        remember: bool = True,
    ) -> Any:
        """Compute alike tasks with one launch for each kernel of their program.

        Returns a tuple of values, or an array of them. Without `remember`, the arrays differ from
        those of the plan's other runs. Raises `LaunchFailed` as `run` does.
        """
        try:
            value = self._run_batch(batch, values, device, work, remember)
        except SAID as error:
            raise own_failure(error) from error
        return value() if type(value) is partial else value

    def _run_batch(
        self, batch: Batch, values: dict[Any, Any], device: int, work: Workspace, remember: bool
    ) -> Any:
        first = batch.members[0]
        known = batch.ready.get((device, id(self))) if remember else None
        if known is not None:
            ready, inputs, begun = known
        else:
            inputs, aligned = batch_pointers(batch, values, device)
            if (
                inputs is None
                or self.is_broken(first.program)
                or (not first.names and not first.makes_on_device)
            ):
                values = values if first.is_resident else move_values(values) or values
                return partial(self._run_each, batch, values, device, work)
            try:
                ready = self.get_prepared(first.program, device, (aligned, True), single=False)
            except (CompileFailed, NotGenerated) as error:
                self._give_up(first, error)
                return partial(self._run_each, batch, values, device, work)
            positions = [f.positions for f in batch.members]
            begun = [begin_arguments(kernel, inputs, positions) for kernel in ready.kernels]
            if batch.fixed and remember:
                batch.ready[device, id(self)] = ready, inputs, begun
        pointers = [list(p) for p in inputs]
        room = SmallArrayRoom(ready.small, len(pointers)) if ready.small else None
        made = [
            self._launch_all(kernel, slots, pointers, work, room)
            for kernel, slots in zip(ready.kernels, begun, strict=True)
        ]
        return batch_value(ready.program, [out for outputs in made for out in outputs])

    def _run_each(
        self, batch: Batch, values: dict[Any, Any], device: int, work: Workspace
    ) -> tuple[Any, ...]:
        return tuple([self.run(f, values, device, work) for f in batch.members])

    def _launch_all(
        self,
        kernel: PreparedKernel,
        begun: Any,
        pointers: list[list[int]],
        work: Workspace,
        room: SmallArrayRoom | None,
    ) -> list[Any]:
        """Launch a kernel for several items; each output is a list or an array of all.

        `begun` holds the arguments that are known before.
        """
        made, count = kernel.generated, len(pointers)
        slots = begun.copy()
        for slot, n, offset in made.inputs:
            if n >= kernel.given:  # the results of kernels before this one
                slots[:count, slot] = [p[n] + offset for p in pointers]
        outputs: list[Any] = []
        for (slot, shape, dtype), nbytes in zip(kernel.outputs, kernel.sizes, strict=True):
            out: Any
            if nbytes > SMALL:  # each is let go of by itself
                out = [cupy.ndarray(shape, dtype) for _ in range(count)]
                places = [a.data.ptr for a in out]
            else:
                every = count, *shape
                size = count * nbytes
                out = cupy.ndarray(every, dtype) if room is None else room.array(every, dtype, size)
                begin = out.data.ptr
                places = [begin + i * nbytes for i in range(count)]
            for p, place in zip(pointers, places, strict=True):
                p.append(place)
            slots[:count, slot] = places
            outputs.append(out)
        queue(kernel, slots, begun, count, work)
        return outputs

    def _launch(
        self,
        kernel: PreparedKernel,
        pointers: list[int],
        positions: tuple[int, ...],
        work: Workspace,
        room: SmallArrayRoom | None,
        into: Any,
    ) -> list[Any]:
        outputs = []
        for (slot, shape, dtype), nbytes in zip(kernel.outputs, kernel.sizes, strict=True):
            if into is not None and slot == kernel.outputs[-1][0]:
                out = into
            elif room is not None:
                out = room.array(shape, dtype, nbytes)
            else:
                out = cupy.ndarray(shape, dtype)
            outputs.append(out)
        places = [out.data.ptr for out in outputs]
        self._start(kernel, pointers, positions, places, work)
        pointers += places
        return outputs

    def copy(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
        pairs: list[tuple[int, int]],
        device: int,
    ) -> bool:
        """Copy C-contiguous arrays of one shape to places with these strides, in bytes.

        `pairs` are the addresses of targets and sources. Returns False where no kernel does it.
        """
        row = shape[-1] * itemsize
        unit = math.gcd(8, row, *strides[:-1], *itertools.chain(*pairs))
        program = copy_program((*shape[:-1], row // unit), (*strides[:-1], unit), unit)
        writes = not any(place % 16 for _, place in pairs)
        aligned = writes and not any(place % 16 for place, _ in pairs)
        try:
            (kernel,) = self.get_prepared(program, device, (aligned, writes), single=False).kernels
        except (CompileFailed, NotGenerated):
            return False
        slots = argument_rows(kernel, [()] * len(pairs))
        for slot, _, offset in kernel.generated.inputs:
            slots[: len(pairs), slot] = [pair[0] + offset for pair in pairs]
        slots[: len(pairs), kernel.outputs[0][0]] = [pair[1] for pair in pairs]
        queue(kernel, slots, slots, len(pairs), Workspace())
        return True

    # ---- once per program and device

    def with_strides(self, program: Program, strides: tuple[int, ...]) -> Program:
        """The same program, of one kernel, which writes with these strides."""
        found = self._strided.get((id(program), strides))
        if found is None:
            if len(self._strided) >= MOST_PROGRAMS:
                self._strided.clear()
            kernels = (replace(program.kernels[0], strides=strides),)
            found = program, replace(program, kernels=kernels)
            self._strided[id(program), strides] = found
        return found[1]

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
                    if self._find_code(made, arch, single) is None:
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
        found = self._find_code(made, arch, single)
        if found is None:
            begin = perf_counter()
            found = compile_kernel(made.source, arch, made.calls, self.fast_math, single)
            self.note("compile", kernel=made.name, seconds=round(perf_counter() - begin, 3))
            with self._counting:
                self.compiled += 1
            disk_cache.keep(
                _code_words(made.source, arch, made.calls, self.fast_math, single), found
            )
            self._cubins[made.source, arch, single] = found
        return found

    def _find_code(self, made: KernelSource, arch: str, single: bool) -> bytes | None:
        """Machine code that is here, or on disk."""
        key = made.source, arch, single
        if key not in self._cubins:
            found = disk_cache.read(
                _code_words(made.source, arch, made.calls, self.fast_math, single)
            )
            if found is None:
                return None
            self._cubins[key] = found
        return self._cubins[key]

    def is_broken(self, program: Program) -> bool:
        """Whether it has no kernels that could be had."""
        return id(program) in self._broken

    def _give_up(self, fused: KernelTask, error: Exception) -> None:
        with self._lock:
            if id(fused.program) in self._broken:
                return
            self._broken[id(fused.program)] = fused.program
        said = f"{fused.key!r} is computed operation by operation, as its kernel was not to be had"
        logging.getLogger("gpuscheduler.kernels").warning("%s: %s", said, error)
        warnings.warn(f"{said}: {error}", RuntimeWarning, stacklevel=2)


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


def _code_words(
    source: str, arch: str, calls: Sequence[DeviceCall], fast_math: bool, single: bool
) -> tuple[Any, ...] | None:
    """What decides what machine code it becomes; None where that cannot be said."""
    words = source, arch, OPTIONS[fast_math], ONLY[single], nvrtc.getVersion()
    if not calls:
        return words
    if not all(c.function.lasting for c in calls):
        return None
    digests = [c.function.digest for c in calls]  # what the symbols in the source stand for
    return *words, digests, TO_LINK, numba_cuda.LINK[fast_math], numba_cuda.version()
