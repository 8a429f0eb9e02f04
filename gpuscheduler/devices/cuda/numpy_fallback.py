"""Run tasks written for NumPy that CuPy refuses, with copied arguments.

Called again with copies, on the device of NumPy's arrays, or on the host of CuPy's.

CuPy computes with no array of the host (a table, weights, edges) beside its own: `MovedCall` brings
these to the device. What it does not do at all NumPy does: `HostCall` is the other way around.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_not
from types import CodeType, FunctionType
from typing import Any

import cupy
import numpy as np
from dask.array.dispatch import to_cupy_dispatch

from ...algorithms.sparse_block import DASK_MATMUL, SparseBlock, multiply_chunks
from ...frontend.graph import is_plain
from ...frontend.rebuild import like_function, swap_parts
from ...frontend.task import members_of
from ...frontend.transfers import is_sender
from ...fusion.task import KernelTask
from ...sparse_parts import arrays_of, library_of, rebuild
from ...tracing.purity import is_users
from ...values import deep_leaves, leaves, map_deep_leaves, map_leaves

Values = dict[Any, Any]
Task = Callable[[Values], Any]
Bring = Callable[[Any], Any]

#: Bytes that a resident kernel touches to be worth a copy of inputs that are all on the host.
LEAST_MOVED = 2**16
#: What CuPy raises for arrays of the host, and NumPy for arrays of CuPy's.
SAID = (TypeError, NotImplementedError, AttributeError, ValueError)
#: What is in such errors, where it is not CuPy's own code that raises them.
SAYING = "cupy", "__array_ufunc__", "__array_function__", "for 'numpy.ndarray' objects"
#: Functions and methods that write to an array that they are given.
WRITERS = {
    "at", "copyto", "fill", "itemset", "partition", "place", "put", "put_along_axis", "putmask",
    "resize", "setfield", "shuffle", "sort",
}  # fmt: skip


class LaunchFailed(RuntimeError):
    """The package's own code failed on the way to a kernel; no task, nor CuPy, did.

    Such an error never makes a task run another way.
    """


def own_failure(error: BaseException) -> LaunchFailed:
    """What to raise for an error of the package's own code."""
    return LaunchFailed(
        f"gpuscheduler's own code has failed, neither the task nor CuPy: {type(error).__name__}: "
        f"{error}. Please report this; meanwhile Scheduler(fuse=False) may do without that code"
    )


class OwnCode:
    """Marks errors inside as errors of the package's own code.

    Errors of a task, or of operations in its stead, must not come from inside.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, SAID):
            raise own_failure(error) from error


class _WritesCaptured(Exception):
    """A function writes to variables around it, which another function would not."""


def may_concern_host_array(error: BaseException) -> bool:
    """Whether an error may be for an array of the host."""
    return type(error) is not ValueError or "numpy.ndarray" in str(error)


def move_values(values: Values) -> Values | None:
    """Values with host arrays copied to the current device, as kernels read them.

    None where all or none of the arrays are on the host.
    """
    every = [v for value in values.values() for v in deep_leaves(value)]
    if not any(isinstance(v, cupy.ndarray) for v in every) or not any(map(_is_of_host, every)):
        return None
    return {k: map_deep_leaves(_copy_to_device, v) for k, v in values.items()}


def move_for_kernel(fused: KernelTask, values: Values) -> Values | None:
    """Values as a kernel task reads them on the current device; None where the host computes it.

    Of a resident task that the host computes, all inputs are on the host and there is little to do.
    """
    if not fused.is_resident:
        return move_values(values)
    every = [v for value in values.values() for v in leaves(value)]
    on_host = any(_is_of_host(v) or _is_plain_scalar(v) for v in every)
    if not on_host:
        return None
    if fused.touched_bytes < LEAST_MOVED and not any(isinstance(v, cupy.ndarray) for v in every):
        return None
    return {k: map_leaves(_copy_number_to_device, v) for k, v in values.items()}


def call_unfused(fused: KernelTask, function: Task, values: Values) -> partial[Any]:
    """What computes a kernel task without its kernels: a resident one with arrays of the host."""
    return partial(_call_with_numpy if fused.is_resident else _call_with_values, function, values)


def _call_with_values(function: Task, values: Values) -> Any:
    return function(values)


def _call_with_numpy(function: Task, values: Values) -> Any:
    return function({k: map_leaves(_copy_to_host, v) for k, v in values.items()})


def is_cupy_refusal(error: BaseException) -> bool:
    """Whether CuPy raised an error, or NumPy for an array of CuPy's."""
    of = getattr(error, "obj", None)  # which has no such attribute
    if isinstance(of, cupy.ndarray) or _is_cupys(getattr(of, "__name__", "")):
        return True
    if any(word in str(error) for word in SAYING):
        return True
    at = error.__traceback__
    while at is not None:
        if _is_cupys(at.tb_frame.f_globals.get("__name__", "")):
            return True
        at = at.tb_next
    return False


def _is_cupys(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in ("cupy", "cupyx")


class MovedCall:
    """A task and its values, with host arrays copied to the current device.

    Arrays are looked for in values, arguments, and variables that functions capture.
    """

    def __init__(self, task: Task, values: Values):
        self._known: dict[int, Any] = {}
        self._copies: list[tuple[Any, Any]] = []
        self._there = False  # whether some arrays are on a device, or brought to one
        self._writes = False  # whether a function may write to one of these
        self._around = False  # whether what is looked at is the task's own
        self._sparse = any(type(v) is SparseBlock for v in values.values())
        self._multiplies = False  # whether it multiplies CuPy's arrays by sparse blocks
        self.values = {k: map_deep_leaves(self._swap, v) for k, v in values.items()}
        self._around = True
        self.task: Task = task
        if not members_of(task):  # whose members are programs, and have no arrays
            self.task = swap_parts(task, self._swap, self._known)

    def return_if_moved(self) -> MovedCall | None:
        return self if self._multiplies or (self._there and self._copies) else None

    def has_written(self) -> bool:
        """Whether the task has written to a copy: nobody would see it."""
        return self._writes and any(
            _have_different_bits(copy, _copy_to_device(v)) for v, copy in self._copies
        )

    def _swap(self, it: Any) -> Any:
        if self._is_moved(it):
            return self._copy_of(it)
        if self._sparse and it is DASK_MATMUL:
            self._multiplies = True
            return multiply_chunks
        if library_of(type(it)) is not None:  # one that a task has captured
            before = arrays_of(it)
            arrays = [self._swap(a) for a in before]
            return rebuild(it, arrays) if any(map(is_not, arrays, before)) else it
        if it is to_cupy_dispatch:
            self._there = True
            return _send_once
        if isinstance(it, cupy.ndarray) or (callable(it) and is_sender(it)):
            self._there = True
            return it
        return self._function(it) if type(it) is FunctionType else it

    def _copy_of(self, it: Any) -> Any:
        if id(it) not in self._known:
            copy = self._copy(it)
            self._copies.append((it, copy))
            self._known[id(it)] = it, copy
            self._known[id(copy)] = copy, copy  # which stays as it is
        return self._known[id(it)][1]

    def _copy(self, it: Any) -> Any:
        return _copy_to_device(it)

    def _is_moved(self, it: Any) -> bool:
        return _is_of_host(it)

    def _function(self, f: FunctionType) -> Any:
        """A function that reads arrays among the variables of its module."""
        if not is_users(f):
            return f
        steps = list(_steps(f.__code__))
        around = f.__code__.co_freevars  # what an inner function shares with this one is its own
        if any(s.opname == "STORE_GLOBAL" for s in steps) or any(
            s.opname == "STORE_DEREF" and s.argval in around for s in steps
        ):
            raise _WritesCaptured
        self._writes = self._writes or any(map(_may_write, steps))
        space = f.__globals__
        arrays = {n: space[n] for n in f.__code__.co_names if self._is_moved(space.get(n))}
        copies = {n: self._copy_of(it) for n, it in arrays.items()}
        if all(copies[n] is it for n, it in arrays.items()):
            return f
        space = {**space, **copies}
        out = like_function(f, space, f.__defaults__, f.__closure__, f.__kwdefaults__, vars(f))
        return swap_parts(out, self._swap, self._known)


class HostCall(MovedCall):
    """A task and its values, with arrays of the device copied to the host by `bring`.

    With `again`, after a failed call, captured host arrays are copied as well: writes to any copy
    were made before.
    """

    def __init__(self, task: Task, values: Values, again: bool, bring: Bring):
        self._again, self._bring = again, bring
        self._sends = False  # whether it brings arrays to a device itself
        super().__init__(task, values)

    def return_if_moved(self) -> HostCall | None:
        there = self._sends or any(isinstance(it, cupy.ndarray) for it, _ in self._copies)
        return self if there else None

    def has_written(self) -> bool:
        return any(_have_different_bits(copy, self._copy(it)) for it, copy in self._copies)

    def _swap(self, it: Any) -> Any:
        if callable(it) and is_sender(it):
            self._sends = True
            return np.array  # a copy, as that on a device is
        if type(it) is FunctionType and self._again and is_users(it):
            self._look_at_helpers(it, {id(it)})
        return super()._swap(it)

    def _is_moved(self, it: Any) -> bool:
        copied_too = self._again and self._around and _is_of_host(it)
        return copied_too or type(it) is cupy.ndarray

    def _copy(self, it: Any) -> Any:
        return self._bring(it) if isinstance(it, cupy.ndarray) else it.copy()

    def _look_at_helpers(self, f: FunctionType, seen: set[int]) -> None:
        """Functions that are called by name get no copies of what is around them."""
        for name in f.__code__.co_names:
            helper = f.__globals__.get(name)
            if type(helper) is not FunctionType or id(helper) in seen or not is_users(helper):
                continue
            seen.add(id(helper))
            around = map(helper.__globals__.get, helper.__code__.co_names)
            if any(isinstance(it, np.ndarray | cupy.ndarray) for it in around) and any(
                map(_may_write, _steps(helper.__code__))
            ):
                raise _WritesCaptured
            self._look_at_helpers(helper, seen)


def move_task(task: Task, values: Values) -> MovedCall | None:
    """The task with all its arrays on the current device.

    None where all or none are there, or where the copy would mean something else.
    """
    try:
        return MovedCall(task, values).return_if_moved()
    except _WritesCaptured:
        return None


def move_to_host(
    task: Task, values: Values, again: bool, bring: Bring = cupy.asnumpy
) -> HostCall | None:
    """The task with all its arrays on the host; `again` after a call that failed.

    None where no array is on a device, or where the copy would mean something else.
    """
    try:
        return HostCall(task, values, again, bring).return_if_moved()
    except _WritesCaptured:
        return None


def send_value(value: Any) -> Any:
    """A value that was made on the host, with its arrays on the current device."""
    return map_deep_leaves(_copy_to_device, value)


def _send_once(value: Any) -> Any:
    """Send a value as Dask does, which refuses what is on a device already."""
    return value if isinstance(value, cupy.ndarray) else to_cupy_dispatch(value)


def _is_of_host(value: Any) -> bool:
    return type(value) is np.ndarray and is_plain(value.dtype)


def _is_plain_scalar(value: Any) -> bool:
    return isinstance(value, np.generic) and is_plain(value.dtype)


def _copy_number_to_device(value: Any) -> Any:
    return cupy.asarray(value) if _is_plain_scalar(value) else _copy_to_device(value)


def _copy_to_host(value: Any) -> Any:
    if not isinstance(value, cupy.ndarray):
        return value
    turned = value.flags.f_contiguous and not value.flags.c_contiguous
    return cupy.asnumpy(value.T).T if turned else cupy.asnumpy(value)


def _copy_to_device(value: Any) -> Any:
    """A copy on the current device; what is seen many times over there is copied once."""
    if not _is_of_host(value):
        return value
    if not value.size or 0 not in value.strides:
        return cupy.asarray(value)
    once = value[tuple([slice(1) if s == 0 else slice(None) for s in value.strides])]
    return cupy.broadcast_to(cupy.asarray(once), value.shape)


def _have_different_bits(a: Any, b: Any) -> bool:
    """Whether two arrays of one type differ in any bit."""
    xp = cupy if isinstance(a, cupy.ndarray) else np
    kind = np.uint8 if a.nbytes % 8 else np.uint64
    a, b = (xp.ascontiguousarray(v).reshape(-1).view(np.uint8).view(kind) for v in (a, b))
    return bool((a != b).any())


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _steps(inner)


def _may_write(step: dis.Instruction) -> bool:
    """Whether it may write to an array: of which, is not told."""
    if step.opname in ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"):
        return True
    if step.opname.startswith("INPLACE") or (step.opname == "BINARY_OP" and "=" in step.argrepr):
        return True
    said = step.argval
    return said in WRITERS if type(said) is str else type(said) is tuple and "out" in said
