"""Trace a task on symbolic arrays, and judge whether the program is worth a kernel.

Tasks of one structure have one outcome, so each structure is traced once. The outcome says what the
task makes, why it stays as it is, or which program it becomes and what it offers to its readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ..codegen.cuda.kernel import why_not_generated
from ..frontend.captured import content
from ..frontend.graph import Graph
from ..ir import expr as ir_expr
from ..ir.expr import Out, Program, View
from ..tracing import context, trace
from ..tracing.abstract import (
    AbstractArray,
    KnownArray,
    LibraryCall,
    MaskedPoints,
    MatrixProductArray,
    ViewedInput,
)
from ..tracing.context import (
    CompressTrace,
    LibraryTrace,
    MatrixProductTrace,
    NotTraceable,
    OptionalTrace,
    ViewTrace,
)
from ..values import leaves, map_leaves, sizeof
from .inline import Offers, are_arrays
from .legality import (
    has_windows_over_edges,
    is_mosaic,
    operations_per_point,
    pays_as_kernel,
    reads_too_many_places,
    why_unreadable,
)
from .reads import Reads
from .recipe import Candidate, structure_words
from .source import (
    InlineSource,
    MatrixInput,
    MatrixProductTask,
    StructureNumbers,
    TraceOutcome,
    lend_source,
    renumber_borrowed,
    shared_arrays,
)
from .task import count_arrays


class SymbolicCall:
    """A task as a function of its own inputs, its producers' inputs and its draws."""

    def __init__(self, task: Candidate, dense: bool):
        self.recipe = task.recipe
        #: Arrays that functions read besides the arguments.
        self.captured = context.CapturedArrays(dense=dense)
        #: A structure for each of the recipe's names; an expression where it is inlined.
        self.arguments: list[Any] = []
        #: An expression for each of the recipe's draws.
        self.generated: list[Any] = []
        #: The sources among the arguments.
        self.borrowed: list[InlineSource] = []
        #: Arrays that the sources read.
        self.borrowed_arrays = 0
        #: Structures of the inputs that are not inlined.
        self.own = [s for n, (_, s) in enumerate(task.inputs) if n not in task.inlined]
        draws, shared = 0, shared_arrays(task.inlined.values())
        for source in task.recipe.draws:
            self.generated.append(lend_source(source, draws, 0))
            draws += len(source.positions)
        for n, (_, structure) in enumerate(task.inputs):
            if n in task.inlined:
                source = task.inlined[n]
                lent = lend_source(source, draws, self.borrowed_arrays, shared)
                self.arguments.append(lent)
                draws += len(source.positions)
                self.borrowed_arrays += count_arrays(source.expects)
                self.borrowed.append(source)
            else:
                self.arguments.append(structure)

    def as_function(self) -> Callable[..., Any]:
        """Return the task as a plain function, since methods are not traced."""
        recipe, count = self.recipe, len(self.arguments)

        def perform(*values: Any) -> Any:
            return recipe.perform(values[:count], values[count:])

        return perform

    def multiply(self, made: MatrixProductArray) -> MatrixProductTask | None:
        """Return a matrix product as a task, if the task does nothing else."""
        plain = not (self.borrowed or self.generated or self.captured.arrays)
        return _product_of_arguments(made, self.arguments) if plain else None

    def is_library_call(self, call: LibraryCall) -> bool:
        """Whether the task does nothing else than to call a function of a library."""
        plain = not (self.borrowed or self.generated or self.captured.arrays)
        return plain and all(isinstance(a, (AbstractArray, KnownArray)) for a in self.arguments)

    def input_structures(self, others: Iterable[Any] = ()) -> tuple[Any, ...]:
        """Return the structures of all inputs: own ones, `others`, and inputs of the sources."""
        return (*self.own, *others, *[s for source in self.borrowed for s in source.expects])


class TaskTracer:
    """Traces tasks, and decides which programs become kernels."""

    def __init__(
        self,
        graph: Graph,
        numbers: StructureNumbers,
        reads: Reads,
        offers: Offers | None,
        fewest: int,
        on_gpus: bool,
    ):
        self.graph, self.numbers, self.reads = graph, numbers, reads
        #: Writes offers to readers; None where tasks must not disappear into these.
        self.offers = offers
        #: Operations that a program must do for each element.
        self.fewest = fewest
        self.on_gpus = on_gpus

    def trace(self, task: Candidate) -> TraceOutcome:
        """Return what becomes of a task's structure."""
        call = SymbolicCall(task, self.on_gpus)
        is_copy, is_optional = False, False
        try:
            program = self._run(call)
        except ViewTrace as error:
            if call.captured.arrays:
                return TraceOutcome(None, str(error))
            if not (self.on_gpus and self._copies_view(error.result, call)):
                makes = map_leaves(self._array_of_view, error.result)
                number = self.numbers.number(structure_words(makes))
                return TraceOutcome(None, str(error), makes, number=number, view=error.result)
            program, is_copy = error.program, True
        except CompressTrace as error:
            return TraceOutcome(None, str(error), offer=self._offer_selection(error.masked, call))
        except OptionalTrace as error:
            program, is_optional = error.program, True
        except MatrixProductTrace as error:
            made = None if error.product is None else call.multiply(error.product)
            return TraceOutcome(None, str(error), operations=error.operations, product=made)
        except LibraryTrace as error:
            return self._library_outcome(error, call)
        except NotTraceable as error:
            culprit = call.recipe.step_of(error)
            return TraceOutcome(
                None, str(error), operations=error.operations, culprit=culprit,
                in_library=error.in_library,
            )  # fmt: skip
        program = self._simplify_windows(program, call)
        makes = self._structure_made_by(program)
        number = self.numbers.number(structure_words(makes))
        if reason := self._why_unfused(program, call, is_copy):
            made = None if is_optional else makes
            return TraceOutcome(None, reason, makes=made, number=number)
        program = renumber_borrowed(program, call.borrowed_arrays)
        self._note_values(call.captured.left)
        found = TraceOutcome(
            program, "", makes, self._count_bytes(program, makes), number,
            call.input_structures(call.captured.expected),
            pairs=self.reads.gives_pairs(call.recipe.task),
            beside=tuple(call.captured.arrays), or_none=is_optional,
        )  # fmt: skip
        if self.offers is not None and not is_optional:
            found.offer = self.offers.offer_result(found)
        if found.offer is not None and is_copy:  # each reader may as well read the whole
            found.offer.free = True
        return found

    def _library_outcome(self, error: LibraryTrace, call: SymbolicCall) -> TraceOutcome:
        assert error.call is not None
        # tables whose values are known count among the task's inputs, and not among a trace's
        numbers = [n for n, a in enumerate(call.arguments) if isinstance(a, AbstractArray)]
        views = [replace(v, array=numbers[v.array]) for v in error.call.arguments]
        made = replace(error.call, arguments=tuple(views))
        self._note_values(call.captured.left)
        makes = AbstractArray(made.shape, made.dtype)
        number = self.numbers.number(structure_words(makes))
        return TraceOutcome(None, str(error), makes, makes.nbytes, number, library=made)

    def _copies_view(self, seen: Any, call: SymbolicCall) -> bool:
        """Whether a kernel copies a view, in place of the function that takes it.

        It does so too where the function takes NumPy's arrays only, and would get those of GPUs.
        """
        if _is_copy(seen, call.arguments):
            return True
        return self.graph.resident and not call.recipe.takes_any_arrays()

    def _run(self, call: SymbolicCall) -> Program:
        """Trace a call; if that fails, once more with each constant array as an input."""
        try:
            return self._trace_with(call, call.captured)
        except NotTraceable as error:
            known = isinstance(error, (ViewTrace, CompressTrace, OptionalTrace, LibraryTrace))
            if known or error.in_library or not (call.captured.left or call.captured.wanted):
                raise
        call.captured = context.CapturedArrays(dense=self.on_gpus, every=True)
        return self._trace_with(call, call.captured)

    def _trace_with(
        self, call: SymbolicCall, captured: context.CapturedArrays, whole: bool = False
    ) -> Program:
        return trace.trace_function(
            call.as_function(), [*call.arguments, *call.generated], self.on_gpus, captured,
            matrices=call.multiply, whole=whole,
            library=call.is_library_call if self.graph.resident else None,
        )  # fmt: skip

    def _simplify_windows(self, program: Program, call: SymbolicCall) -> Program:
        """Trace again with `whole` windows, if a kernel would read too many places."""
        too_much = reads_too_many_places if self.on_gpus else has_windows_over_edges
        if any(map(too_much, program.kernels)):
            again = context.CapturedArrays(dense=self.on_gpus, every=call.captured.every)
            with suppress(NotTraceable):
                program = self._trace_with(call, again, whole=True)
                call.captured = again
        return program

    def _why_unfused(self, program: Program, call: SymbolicCall, is_copy: bool) -> str | None:
        """Return why a program does not become a kernel; None where it does."""
        if reason := why_unreadable(program):
            return reason
        if self.on_gpus and (
            reason := next(filter(None, map(why_not_generated, program.kernels)), None)
        ):
            return f"there is no kernel for {reason}"
        if self.on_gpus and any(map(reads_too_many_places, program.kernels)):
            return "it reads more places than the arguments of a kernel may name"
        if (
            not self.on_gpus
            and not call.generated
            and any(is_mosaic(k) or has_windows_over_edges(k) for k in program.kernels)
        ):
            return "it joins parts of arrays: NumPy does it faster than to choose"
        few = not is_copy and not call.generated and not call.borrowed
        if few and operations_per_point(program) < self.fewest and not pays_as_kernel(program):
            return "it is one operation: NumPy's own is as fast"
        return None

    def _count_bytes(self, program: Program, makes: Any) -> int:
        """Return the bytes of a program's value on its device."""

        def held_bytes(v: Any, array: Any) -> int:
            if isinstance(v, Out) and (self.on_gpus or not v.scalar):
                return int(array.nbytes)
            return 0 if self.on_gpus else sizeof(0.0 if isinstance(v, Out) else v)

        pairs = zip(leaves(program.result), leaves(makes), strict=True)
        return sum([held_bytes(*pair) for pair in pairs])

    @property
    def _has_scalars(self) -> bool:
        """Whether values are scalars where NumPy gives scalars: CuPy gives arrays there."""
        return self.graph.resident or not self.on_gpus

    def _structure_made_by(self, program: Program) -> Any:
        """Return the structure of a program's value."""
        dtypes: dict[int, Any] = {}
        for start, kernel in zip(program.starts, program.kernels, strict=True):
            dtypes.update({start + n: o.dtype for n, o in enumerate(kernel.outputs)})

        def structure(v: Any) -> Any:
            if not isinstance(v, Out):
                return v
            scalar = v.scalar and self._has_scalars
            return AbstractArray(v.shape, dtypes[v.array], scalar=scalar)

        return map_leaves(structure, program.result)

    def _array_of_view(self, v: Any) -> Any:
        """Return the structure of a view, or of a copy of it."""
        if not isinstance(v, ViewedInput):
            return v
        same = v.copied or ir_expr.is_contiguous(View(0, v.view.strides), v.shape)
        strides = None if same else v.view.strides
        return AbstractArray(v.shape, v.dtype, strides, v.scalar and self._has_scalars)

    def _offer_selection(self, masked: MaskedPoints, call: SymbolicCall) -> InlineSource | None:
        expects = call.input_structures()
        if self.offers is None or call.captured.arrays or not are_arrays(expects):
            return None
        self._note_values(call.captured.left)
        own = count_arrays(expects) - call.borrowed_arrays
        return self.offers.offer_selection(masked, expects, own)

    def _note_values(self, arrays: Iterable[Any]) -> None:
        """Note in the graph the arrays whose values are part of a program now."""
        for array in arrays:
            if id(array) not in self.graph.values:
                self.graph.values[id(array)] = array, content(array)


def _is_copy(seen: Any, arguments: list[Any]) -> bool:
    """Whether views are to be copied.

    They are where the task does so itself. So is a view of at most half of its array: then the
    array can be freed, and little goes to other devices.
    """
    wholes = [a for a in leaves(arguments) if isinstance(a, AbstractArray)]
    return all(
        v.copied or 2 * math.prod(v.shape) <= math.prod(wholes[v.array].shape)
        for v in leaves(seen)
        if isinstance(v, ViewedInput)
    )


def _product_of_arguments(
    product: MatrixProductArray, arguments: list[Any]
) -> MatrixProductTask | None:
    """Return a product of whole arguments, by their numbers; None for parts of them."""
    if not all(isinstance(a, AbstractArray) for a in arguments):
        return None
    sides = []
    for seen in (product.left, product.right):
        array = arguments[seen.array]
        strides = array.strides or View.contiguous(array.shape).strides
        long = [(n, s) for n, s in zip(array.shape, strides, strict=True) if n != 1]
        shown = [*zip(seen.shape, seen.view.strides, strict=True)]
        if seen.view.offset or shown not in (long, long[::-1]):
            return None
        sides.append(MatrixInput(seen.array, (long[0][0], long[1][0]), shown != long))
    left, right = sides
    return MatrixProductTask(left, right, np.result_type(product.left.dtype, product.right.dtype))
