"""Tasks that are kernels, and tasks that pick out what a mask selects.

Each is called like any Dask task, with the values that it reads, and then computes with NumPy. The
executors of devices look inside instead and run the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.array import reductions as dask_reductions

from ..codegen.cpu import evaluate as cpu_evaluate
from ..codegen.cuda.kernel import generate
from ..errors import NotGenerated
from ..frontend.compiled_task import CompiledCall, literal
from ..frontend.graph import NUMPY, RESIDENT, is_on_gpus
from ..frontend.task import (
    KernelDescription,
    Launcher,
    OwnTask,
    TaskDescription,
    describe,
)
from ..ir.expr import PLACEHOLDER, Expr, Kernel, Out, Program, constant
from ..ir.regions import bytes_touched
from ..tracing.abstract import AbstractArray, KnownArray
from ..tracing.context import ValueIfThere
from ..values import FunctionSet, leaves, map_leaves

if TYPE_CHECKING:
    from typing_extensions import Self

Key = Any
Values = dict[Any, Any]
#: Dask's functions that return records of a value and its place for NumPy arrays.
PAIRING = FunctionSet(dask_reductions.arg_chunk, dask_reductions.arg_combine)


class KernelTask(OwnTask):
    """A task that is a program for a device, and computes with NumPy when called."""

    __slots__ = ("expects", "key", "kind", "names", "original", "positions", "program")
    launches_only = kernels_only = True

    #: The task as it was, with its producers: for values that are not as expected.
    original: Callable[[Values], Any]

    def __init__(
        self,
        key: Key,
        program: Program,
        names: tuple[Key, ...],
        expects: tuple[Any, ...],
        positions: tuple[int, ...],
        kind: str | None,
        original: Callable[[Values], Any],
    ):
        self.key, self.program = key, program
        #: The keys of the values that the task reads.
        self.names = names
        #: The structure of each of these values: an `AbstractArray`, or containers of some.
        self.expects = expects
        #: What stands for the program's placeholders in this block.
        self.positions = positions
        #: Type of the arrays that the task makes, where it reads none.
        self.kind = kind
        self.original = original

    def arrays(self, values: Values, copy: type[Any] | None = None) -> list[Any] | None:
        """Return the arrays that the task reads; None where any value is not as expected.

        Containers and numbers are compared, too: a collection may call a block an array while its
        task gives a tuple. Arrays of the type `copy` are copied if only their strides differ.
        """
        out: list[Any] = []
        for name, foreseen in zip(self.names, self.expects, strict=True):
            value = values[name]
            if type(foreseen) is not AbstractArray:
                if not collect_arrays(value, foreseen, copy, out):
                    return None
                continue
            array = match_array(value, foreseen, copy)
            if array is None:
                return None
            out.append(array)
        return out

    def inputs(self) -> Iterator[tuple[Key, list[AbstractArray | None]]]:
        """Yield the key of each input, and the structures of its leaves: None for non-arrays."""
        for name, structure in zip(self.names, self.expects, strict=True):
            yield name, expected_structures(structure)

    def with_program(self, program: Program) -> KernelTask:
        """Return the same task with another program."""
        return KernelTask(
            self.key, program, self.names, self.expects, self.positions, self.kind, self.original
        )  # fmt: skip

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.original,)

    def with_parts(self, *parts: Any) -> KernelTask:
        (original,) = parts
        return KernelTask(
            self.key, self.program, self.names, self.expects, self.positions, self.kind, original
        )  # fmt: skip

    def with_originals(self, change: Callable[[Any], Any]) -> KernelTask:
        return self.with_parts(change(self.original))

    @property
    def kernels(self) -> tuple[KernelTask, ...]:
        return (self,)

    @property
    def work_identity(self) -> Any:
        return self.program

    def launch(self, launcher: Launcher, values: Values) -> Any:
        return launcher.run(self, values)

    def describe(self) -> TaskDescription:
        kernels = tuple([describe_kernel(k) for k in self.program.kernels])
        return TaskDescription(
            "kernel" if len(kernels) == 1 else f"{len(kernels)} kernels", kernels
        )

    @property
    def on_device(self) -> bool:
        """Whether GPUs make the value, where there are GPUs."""
        return bool(self.names) or self.makes_on_device

    @property
    def makes_on_device(self) -> bool:
        """Whether GPUs make the value even of a task that reads nothing."""
        return is_on_gpus(self.kind)

    @property
    def is_resident(self) -> bool:
        """Whether GPUs compute arrays of NumPy's: functions that are called get these as such."""
        return self.kind == RESIDENT

    @property
    def copies(self) -> bool:
        """Whether the task only copies parts of its inputs."""
        return all(r.op == "input" for k in self.program.kernels for r in k.roots)

    @property
    def touched_bytes(self) -> int:
        return sum([bytes_touched(k) for k in self.program.kernels])

    @property
    def array(self) -> tuple[tuple[int, ...], Any] | None:
        """Shape and dtype of the value, if it is the only array of one kernel."""
        kernels, result = self.program.kernels, self.program.result
        if len(kernels) != 1 or len(kernels[0].outputs) != 1 or type(result) is not Out:
            return None
        if result.scalar or result.shape != kernels[0].output_shape:
            return None
        return result.shape, kernels[0].outputs[0].dtype

    def __call__(self, values: Values, out: Any = None) -> Any:
        """Return the value, computed with NumPy.

        A program writes it to `out`, if given: an array with the shape and dtype of `self.array`.
        """
        arrays = self.arrays(values, np.ndarray)
        if arrays is not None:  # what NumPy computed without axes, it gives as a scalar
            arrays = [np.asarray(a) if isinstance(a, np.generic) else a for a in arrays]
        if arrays is None or not all(type(a) is np.ndarray for a in arrays):
            return self.original(values)
        if not arrays and self.kind not in (NUMPY, RESIDENT):
            return self.original(values)
        words = {placeholder(n): constant(p, np.int64) for n, p in enumerate(self.positions)}

        def evaluate(kernel: Kernel, every: list[Any]) -> Iterable[Any]:
            return cpu_evaluate.evaluate(kernel, every, words=words, out=out)

        # a kernel warns of nothing, on any device
        with np.errstate(all="ignore"):
            return compute_program(self.program, evaluate, arrays)

    def __repr__(self) -> str:
        n = len(self.program.kernels)
        return f"<KernelTask {self.key!r}: {n} kernel{'s'[: n != 1]}>"


class HolderTask(OwnTask):
    """A task that has a kernel task in it, `fused`, and makes something else of its value."""

    __slots__ = ("fused", "key")

    fused: KernelTask

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.fused,)

    @property
    def original(self) -> Any:
        return self.fused.original

    def with_originals(self, change: Callable[[Any], Any]) -> Self:
        return self.with_parts(self.fused.with_originals(change))

    @property
    def kernels(self) -> tuple[KernelTask, ...]:
        return (self.fused,)


class OptionalTask(HolderTask):
    """A task whose value is an array of one element, or of none.

    `fused` makes the element, and whether there is one.
    """

    __slots__ = ()

    def __init__(self, fused: KernelTask):
        self.fused, self.key = fused, fused.key

    def with_parts(self, *parts: Any) -> OptionalTask:
        return OptionalTask(*parts)

    def launch(self, launcher: Launcher, values: Values) -> Any:
        return launcher.run_optional(self, values)

    def describe(self) -> TaskDescription:
        return TaskDescription("kernel of an optional value", self.fused.describe().kernels)

    def __call__(self, values: Values) -> Any:
        return self.extract_value(self.fused(values))

    @staticmethod
    def extract_value(made: Any) -> Any:
        """Return the value from what `fused` made; other values are returned as they are."""
        if type(made) is not ValueIfThere:
            return made
        return made.value if bool(made.there[0]) else made.value[:0]


class CompressTask(HolderTask):
    """A task whose value is what a mask selects.

    One kernel of `fused` counts the elements, and the other writes them. On CPU devices the
    original task runs.
    """

    __slots__ = ("columns",)

    def __init__(self, fused: KernelTask, columns: tuple[int, ...]):
        self.fused, self.key = fused, fused.key
        #: Shape of each element that the mask selects.
        self.columns = columns

    def __call__(self, values: Values) -> Any:
        return self.fused.original(values)

    def with_parts(self, *parts: Any) -> CompressTask:
        (fused,) = parts
        return CompressTask(fused, self.columns)

    def launch(self, launcher: Launcher, values: Values) -> Any:
        return launcher.compress(self, values)

    def describe(self) -> TaskDescription:
        return TaskDescription("kernels that compress", self.fused.describe().kernels)

    def __repr__(self) -> str:
        return f"<Picked {self.key!r}>"


def match_array(value: Any, foreseen: AbstractArray, copy: type[Any] | None) -> Any:
    """Return a value, perhaps as a copy; None if it is not the expected array."""
    if getattr(value, "shape", None) != foreseen.shape:
        return None
    if getattr(value, "dtype", None) != foreseen.dtype:
        return None
    if _is_laid_out(value, foreseen):
        return value
    return value.copy() if foreseen.strides is None and type(value) is copy else None


def collect_arrays(value: Any, foreseen: Any, copy: type[Any] | None, out: list[Any]) -> bool:
    """Append the arrays in containers to `out`, and return whether all is as expected."""
    if type(foreseen) is AbstractArray:
        array = match_array(value, foreseen, copy)
        out.append(array)
        return array is not None
    if type(foreseen) is KnownArray:  # a constant of the task itself
        return True
    if type(value) is not type(foreseen):
        return False
    if type(foreseen) is dict:
        if list(value) != list(foreseen):
            return False
        value, foreseen = value.values(), foreseen.values()
    elif not isinstance(foreseen, (tuple, list)):
        return bool(literal(value, []) == literal(foreseen, []))
    if len(value) != len(foreseen):
        return False
    return all(collect_arrays(v, f, copy, out) for v, f in zip(value, foreseen, strict=True))


def _is_laid_out(array: Any, foreseen: AbstractArray) -> bool:
    """Whether an array has the expected strides."""
    if foreseen.strides is None:
        flags = getattr(array, "flags", None)
        return flags is not None and bool(flags.c_contiguous)
    itemsize = foreseen.dtype.itemsize
    strides = getattr(array, "strides", None)
    if strides is None:
        return False
    return all(
        s == t * itemsize or n < 2
        for s, t, n in zip(strides, foreseen.strides, foreseen.shape, strict=True)
    )


def compute_program(
    program: Program,
    evaluate: Callable[[Kernel, list[Any]], Iterable[Any]],
    arrays: Sequence[Any],
    scalars: bool = True,
) -> Any:
    """Return the value of a program, given a function that evaluates a kernel.

    With `scalars`, 0-d results become NumPy scalars where NumPy would return these.
    """
    every = list(arrays)
    for kernel in program.kernels:
        every += evaluate(kernel, every)
    return fill_result(program, every, scalars)


def fill_result(program: Program, every: Sequence[Any], scalars: bool) -> Any:
    """Return the value of a program, given all of its arrays."""

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, Out):
            return leaf
        array = every[leaf.array]
        if array.shape != leaf.shape:
            array = array.reshape(leaf.shape)
        return array[()] if scalars and leaf.scalar else array

    return map_leaves(value, program.result)


@cache
def placeholder(n: int) -> Expr:
    """Return the constant that stands for position `n` of a block."""
    return constant(PLACEHOLDER + 2 * n, np.int64)


class PairsTask(OwnTask):
    """A task of Dask's argmin or argmax that returns two arrays instead of records.

    Programs return two arrays, and a reader may have blocks of either kind.
    """

    __slots__ = ("key", "task")

    def __init__(self, task: Callable[[Values], Any]):
        self.task = task
        self.key = getattr(task, "key", None)

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.task,)

    def with_parts(self, *parts: Any) -> PairsTask:
        return PairsTask(*parts)

    def describe(self) -> TaskDescription:
        return TaskDescription(f"{describe(self.task).words}, as two arrays")

    def __call__(self, values: Values) -> Any:
        value = self.task(values)
        if isinstance(value, np.ndarray) and value.dtype.names == ("vals", "arg"):
            return {name: value[name].copy() for name in value.dtype.names}
        return value


def task_function(task: Any) -> Any:
    """Return the function that a task calls; None for tasks without one."""
    return task.function if isinstance(task, CompiledCall) else getattr(task, "func", None)


class TaskWithProducers(OwnTask):
    """A task, and the producers that it computes first."""

    __slots__ = ("before", "key", "task")

    def __init__(self, task: Callable[[Values], Any], before: list[tuple[Key, Any]]):
        self.task, self.before = task, before
        self.key = getattr(task, "key", None)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.task, *[producer for _, producer in self.before]

    def with_parts(self, *parts: Any) -> TaskWithProducers:
        task, *producers = parts
        names = [name for name, _ in self.before]
        return TaskWithProducers(task, list(zip(names, producers, strict=True)))

    def describe(self) -> TaskDescription:
        words = [describe(task).words for _, task in self.before]
        return TaskDescription(f"{describe(self.task).words}, after {', '.join(words)}")

    def __call__(self, values: Values) -> Any:
        return self.task({**values, **{name: t(values) for name, t in self.before}})


def describe_kernel(kernel: Kernel) -> KernelDescription:
    """Say what a kernel does."""
    return KernelDescription(
        bytes_touched(kernel), kernel.operations(), lambda: cuda_source(kernel)
    )


def cuda_source(kernel: Kernel) -> str:
    """Return a kernel's CUDA text, or a comment that says why it has none."""
    try:
        return generate(kernel).source
    except NotGenerated as error:
        return f"// none: {error}"


def count_arrays(structures: tuple[Any, ...]) -> int:
    """Return the number of arrays in structures of values."""
    return sum([isinstance(leaf, AbstractArray) for leaf in leaves(structures)])


def expected_structures(structure: Any) -> list[AbstractArray | None]:
    """Return the arrays of a value's structure; None for each other leaf."""
    return [s if isinstance(s, AbstractArray) else None for s in leaves(structure)]
