"""Sums of products of matrices as one task, added up by cuBLAS in place.

Dask has a task for each product of a sum, and one task that adds the products up. Here one task has
cuBLAS add each product to the same matrix. Long sums are several such tasks, each of which adds to
the matrix of the one before. No product is stored, and there are fewer tasks to schedule.

The pass runs after placement: it adds up only products that one device makes. Tracing (`fuse`) has
found the tasks that multiply matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from dask.core import flatten

from ..codegen.cuda.skinny import INTEGERS
from ..cupy_private import compute_type
from ..frontend.graph import Graph
from ..frontend.task import Launcher, OwnTask, TaskDescription, describe
from ..fusion.source import MatrixInput
from ..fusion.task import KernelTask
from ..ir.expr import Expr, Kernel, Out, Program, View, canonical_view, is_zero, nodes, substitute
from ..ir.rewrite import renumber_arrays
from ..values import map_leaves
from .plan import Plan
from .skinny import is_skinny, multiply_skinny

Key = Any
Values = dict[Any, Any]

#: What one task reads is there at once: no more than this part of a device's memory, so that what
#: the next ones read can come meanwhile.
SHARE = 12
#: CuPy's numbers for "not decided" and "the type's own precision" (`COMPUTE_TYPE_TBD` and
#: `COMPUTE_TYPE_DEFAULT`).
DEFAULT = (0, 1)
#: cuBLAS's numbers of `CUBLAS_DEFAULT_MATH` and `CUBLAS_TF32_TENSOR_OP_MATH`.
DEFAULT_MATH, TF32_MATH = 0, 3
#: cuBLAS's functions, by the types of their matrices.
GEMM = {"f": "sgemm", "d": "dgemm", "F": "cgemm", "D": "zgemm"}
#: Products of one task: several tasks keep a device busy while the host goes on.
MOST = 16


class MatmulSumTask(OwnTask):
    """A task whose value is a sum of products of matrices, as an array of `shape`.

    `before` names the sum that it adds to. `fallback` is a name and the task of Dask's that reads
    the products: where blocks are not as planned, that task runs and gets the sum under the name.
    `precision` is "strict", or "tf32" for products with 11 significant bits of each element of
    single precision.
    """

    __slots__ = ("before", "dtype", "fallback", "key", "originals", "pairs", "precision", "shape")
    launches_only = True
    runs_on_host = False  # it runs its originals where it cannot multiply

    def __init__(
        self,
        key: Key,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        pairs: Sequence[tuple[MatrixInput, MatrixInput]],
        originals: Sequence[Callable[[Values], Any]],
        before: Key | None = None,
        fallback: tuple[Key, Callable[[Values], Any]] | None = None,
        precision: str = "strict",
    ):
        self.key, self.shape, self.dtype, self.precision = key, shape, dtype, precision
        self.before, self.fallback = before, fallback
        self.pairs, self.originals = tuple(pairs), tuple(originals)  # tasks of the single products

    def __call__(self, values: Values) -> Any:
        return self.multiply(values)

    def multiply(self, values: Values, handle: int | None = None) -> Any:
        """Compute the value, by this cuBLAS handle or the thread's own for the current device."""
        pairs = [tuple([_matrix(values[m.name], m, self.dtype) for m in p]) for p in self.pairs]
        before = None if self.before is None else values[self.before]
        can_multiply = all(_can_multiply(a, b, self.dtype) for a, b in pairs)
        if not can_multiply or not self._can_continue(before):
            total = reduce(np.add, [task(values) for task in self.originals])
            if before is not None:
                total = _reshape_array(total.shape, before) + total
            if self.fallback is not None:
                name, task = self.fallback
                return task({**values, name: total})
            return _reshape_array(self.shape, total)
        tf32 = self.precision == "tf32" and self.dtype.char in "fF"
        return _multiply_and_add(pairs, self.dtype, handle, before, tf32).reshape(self.shape)

    @property
    def parts(self) -> tuple[Any, ...]:
        return *self.originals, *(() if self.fallback is None else self.fallback[1:])

    def with_parts(self, *parts: Any) -> MatmulSumTask:
        originals, last = parts[: len(self.originals)], parts[len(self.originals) :]
        fallback = None if self.fallback is None else (self.fallback[0], *last)
        return MatmulSumTask(
            self.key, self.shape, self.dtype, self.pairs, originals, self.before, fallback,
            self.precision,
        )  # fmt: skip

    @property
    def operations(self) -> int:
        """Additions and multiplications of real numbers."""
        each = 8 if self.dtype.kind == "c" else 2
        return each * sum([math.prod(a.shape) * b.shape[not b.turned] for a, b in self.pairs])

    @property
    def traffic(self) -> int:
        """Bytes of the matrices and of the sum."""
        read = sum([math.prod(m.shape) for pair in self.pairs for m in pair])
        return int((read + math.prod(self.shape)) * self.dtype.itemsize)

    def launch(self, launcher: Launcher, values: Values) -> Any:
        return launcher.multiply(self, values)

    def describe(self) -> TaskDescription:
        n = len(self.pairs)
        return TaskDescription("matrix product" if n == 1 else f"sum of {n} matrix products")

    def _can_continue(self, before: Any) -> bool:
        """Whether products can be added to the sum `before`, or there is none."""
        if before is None:
            return True
        known = type(before).__module__.partition(".")[0] == "cupy" and before.dtype == self.dtype
        return known and before.size == math.prod(self.shape)

    def __repr__(self) -> str:
        return f"<Products {self.key!r}: {len(self.pairs)} added up>"


def _reshape_array(shape: tuple[int, ...], array: Any) -> Any:
    """Reshape an array that has as many elements; return any other as it is."""
    return array.reshape(shape) if array.size == math.prod(shape) else array


def _matrix(array: Any, foreseen: MatrixInput, dtype: np.dtype[Any]) -> Any:
    """Return a CuPy array as a matrix; None for other arrays, shapes and dtypes than foreseen."""
    if type(array).__module__.partition(".")[0] != "cupy":
        return None
    if array.dtype != dtype and array.dtype.char not in INTEGERS:
        return None
    if tuple([n for n in array.shape if n != 1]) != foreseen.shape:
        return None
    matrix = array.reshape(foreseen.shape)
    return matrix.T if foreseen.turned else matrix


def _can_multiply(left: Any, right: Any, dtype: np.dtype[Any]) -> bool:
    """Whether this module multiplies two matrices: both of `dtype`, or `is_skinny`."""
    if left is None or right is None:
        return False
    return left.dtype == right.dtype == dtype or is_skinny(left, right)


def _multiply_and_add(
    pairs: Sequence[Sequence[Any]],
    dtype: np.dtype[Any],
    handle: int | None = None,
    before: Any = None,
    tf32: bool = False,
) -> Any:
    """Return the sum of products of CuPy matrices, and of the sum `before` if there is one.

    Computes on the current device and stream.
    """
    import cupy
    from cupy.cuda import cublas

    total = cupy.empty((pairs[0][0].shape[0], pairs[0][1].shape[1]), dtype)
    if any(a.dtype != b.dtype for a, b in pairs):
        return _add_skinny(total, pairs, before)
    if before is not None:  # which may be on its way to the host
        total[...] = before.reshape(total.shape)
    if not _uses_default_precision(dtype):
        for n, (a, b) in enumerate(pairs):
            if n or before is not None:
                total += a @ b
            else:
                cupy.matmul(a, b, out=total)
        return total
    if handle is None:
        handle = cupy.cuda.get_cublas_handle()
    multiply = getattr(cublas, GEMM[dtype.char])
    if tf32:  # a setting of the handle, which nobody else uses meanwhile
        cublas.setMathMode(handle, TF32_MATH)
    one, scale = np.ones((), dtype), np.asarray(before is not None, dtype)
    rows, columns = total.shape
    for a, b in pairs:
        (a, turned_a, pitch_a), (b, turned_b, pitch_b) = _as_operand(a), _as_operand(b)
        # cuBLAS counts along columns first: these are b.T @ a.T, and make total.T
        multiply(
            handle, turned_b, turned_a, columns, rows, a.shape[1], one.ctypes.data, b.data.ptr,
            pitch_b, a.data.ptr, pitch_a, scale.ctypes.data, total.data.ptr, columns,
        )  # fmt: skip
        scale = one
    if tf32:
        cublas.setMathMode(handle, DEFAULT_MATH)
    return total


def _add_skinny(total: Any, pairs: Sequence[Sequence[Any]], before: Any) -> Any:
    """Write into `total` a sum of products, some of small integers, in double precision."""
    parts = [multiply_skinny(a, b) if a.dtype != b.dtype else a @ b for a, b in pairs]
    if before is not None:
        parts.insert(0, before.reshape(total.shape))
    total[...] = reduce(np.add, parts)
    return total


def _as_operand(matrix: Any) -> tuple[Any, int, int]:
    """Return a matrix as an operand of cuBLAS: the matrix, whether it is turned, its pitch.

    Its rows have no gaps, or its columns if it is turned. The pitch is the number of elements from
    one row, or column, to the next. Other matrices are copied.
    """
    (rows, columns), (down, along), size = matrix.shape, matrix.strides, matrix.itemsize
    for turned, (length, step, pitch) in enumerate(
        ((columns, along, down), (rows, down, along))  # of a row, of a column
    ):
        if step == size and pitch % size == 0 and pitch >= length * size:
            return matrix, turned, pitch // size
    import cupy

    return cupy.ascontiguousarray(matrix), 0, columns


def _uses_default_precision(dtype: np.dtype[Any]) -> bool:
    """Whether CuPy is set to multiply in the precision of the dtype itself."""
    return compute_type(dtype) in (None, *DEFAULT)


class OptionalTermsTask(OwnTask):
    """A task that reads a sum in place of its first term, and zeros for the other terms."""

    __slots__ = ("gone", "key", "task")

    def __init__(self, task: Callable[[Values], Any], gone: Mapping[Key, Key]):
        self.task, self.gone = task, dict(gone)  # the sum that has each term
        self.key = getattr(task, "key", None)

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.task,)

    def with_parts(self, *parts: Any) -> OptionalTermsTask:
        (task,) = parts
        return OptionalTermsTask(task, self.gone)

    def describe(self) -> TaskDescription:
        return TaskDescription(f"{describe(self.task).words}, of sums of its terms")

    def __call__(self, values: Values) -> Any:
        return self.task({**values, **{k: np.zeros_like(values[s]) for k, s in self.gone.items()}})


# ---- the passes


def recognise_matmul(graph: Graph, precision: str = "strict") -> None:
    """Replace each product of two matrices by a `MatmulSumTask`. Changes the graph.

    Such a task only launches kernels (`launches_only`).
    """
    for key, node in graph.nodes.items():
        if node.product is not None and node.block is not None and not node.picks:
            left, right, dtype = node.product
            task = MatmulSumTask(
                key, node.block.shape, dtype, [(left, right)], [node.task], precision=precision
            )
            graph.replace(key, task)


def accumulate_matmul(graph: Graph, plan: Plan) -> bool:
    """Replace products that one device adds up by one task; return whether any were.

    Changes the graph, and pins every task to its device in the plan.
    """
    if not graph.products:
        return False
    places = {s.key: s.place for s in plan.steps}
    collector = _SumCollector(graph, places, min(plan.machine.memory))
    for key, node in graph.nodes.items():
        if isinstance(node.task, KernelTask) and not node.picks:
            collector.visit(key, node.task)
    if not collector.new:
        return False
    collector.apply()
    graph.pin(places)
    return True


class _ProgramWithSums(NamedTuple):
    """A program that reads sums of products in place of the products."""

    groups: list[list[int]]  # numbers of the arrays that are added up, for each sum
    program: Program  # reads each sum in place of the first array of its group
    whole: bool  # whether the program only returns the sum, or its beginning


class _SumCollector:
    def __init__(self, graph: Graph, places: Mapping[Key, int], memory: int):
        self.graph, self.places = graph, places
        self.memory, self.room = memory, memory // SHARE
        self.readers = Counter([d for node in graph.nodes.values() for d in node.needs])
        gathered = [b for g in graph.gathers.values() for b in flatten(g.blocks)]
        self.kept = {*graph.outputs, *[graph.alias.get(b, b) for b in gathered]}
        #: Tasks in place of those that were there, and the names and keys that they read.
        self.new: dict[Key, tuple[Any, dict[Key, Key]]] = {}
        #: Why a sum is no kernel, and how many operations it does.
        self.facts: dict[Key, dict[str, Any]] = {}
        self.sums: dict[Key, list[Key]] = {}  # those that add up these products
        self.known: dict[Any, tuple[Program, _ProgramWithSums | None]] = {}

    def visit(self, key: Key, task: KernelTask) -> None:
        """Have a program read a sum of products that it would add up itself."""
        nodes, node = self.graph.nodes, self.graph.nodes[key]
        targets = dict(zip(node.names, node.needs, strict=True))
        numbers = _number_single_inputs(task)
        terms = {n: targets[k] for k, n in numbers.items() if self._is_term(targets.get(k))}
        if len(terms) < 2:
            return
        factors = max(map(self._bytes, terms.values()))
        most = max(1, min(MOST, self.room // factors))
        sums = max(nodes[d].block.nbytes for d in terms.values())
        if most < len(terms) and factors + 2 * sums > self.memory:
            return  # one that goes on from another has both there
        where = {n: (self.places[d], self._shape(d)) for n, d in terms.items()}
        words = id(task.program), tuple(where.items())
        if words not in self.known:
            self.known[words] = task.program, _replace_products(task.program, where)
        change = self.known[words][1]
        if change is None:
            return
        groups = [[terms[n] for n in group] for group in change.groups]
        name = {n: k for k, n in numbers.items()}
        if change.whole and self.places[groups[0][0]] == self.places[key]:
            shape = task.program.result.shape
            if math.prod(shape) == math.prod(nodes[groups[0][0]].block.shape):
                first, *more = [name[n] for n in change.groups[0]]
                fallback = first, OptionalTermsTask(task.original, dict.fromkeys(more, first))
                self._add_sums(key, shape, groups[0], most, fallback)
                return
        for keys in groups:
            self._add_sums(keys[0], nodes[keys[0]].block.shape, keys, most)
        gone = {name[n]: name[group[0]] for group in change.groups for n in group[1:]}
        left = {k: d for k, d in targets.items() if k not in gone}
        self.new[key] = _drop_inputs(task, change.program, gone), left

    def _is_term(self, key: Key) -> bool:
        """Whether a key is a product that only one task reads, and no result."""
        node = self.graph.nodes.get(key)
        if node is None or node.product is None or node.block is None or node.picks:
            return False
        return self.readers[key] == 1 and key not in self.kept

    def _shape(self, key: Key) -> tuple[int, int]:
        """Rows and columns of a product."""
        left, right, _ = self.graph.nodes[key].product
        return left.shape[left.turned], right.shape[not right.turned]

    def _bytes(self, key: Key) -> int:
        left, right, dtype = self.graph.nodes[key].product
        return int((math.prod(left.shape) + math.prod(right.shape)) * dtype.itemsize)

    def _add_sums(
        self,
        key: Key,
        shape: tuple[int, ...],
        members: list[Key],
        most: int,
        fallback: tuple[Key, Callable[[Values], Any]] | None = None,
    ) -> None:
        """Make the tasks of one sum, each for at most `most` products; the last one is `key`.

        Each task adds to the sum of the one before.
        """
        nodes = self.graph.nodes
        count = -(-len(members) // most)
        ends = [k * len(members) // count for k in range(count + 1)]
        before = None
        for begin, end in pairwise(ends):
            some = [nodes[k] for k in members[begin:end]]
            name = key if end == len(members) else members[end]
            products = [node.product for node in some]
            task = MatmulSumTask(
                name, shape, products[0].dtype, [(p.left, p.right) for p in products],
                [node.task for node in some], before, fallback if end == len(members) else None,
                getattr(some[0].task, "precision", "strict"),
            )  # fmt: skip
            read = {n: d for m in some for n, d in zip(m.names, m.needs, strict=True)}
            if before is not None:
                read[before] = before
            self.new[name] = task, read
            operations = sum([node.operations for node in some])
            self.facts[name] = {"operations": operations, "why": nodes[members[0]].why}
            self.sums[name] = members[:end]
            before = name

    def apply(self) -> None:
        """Put the new tasks into the graph, each sum in the place of its last term."""
        graph = self.graph
        order = {k: n for n, k in enumerate(graph.nodes)}
        gone = {k for members in self.sums.values() for k in members}
        last: dict[Key, list[Key]] = {}
        for key, members in self.sums.items():
            if key in gone:
                last.setdefault(max(members, key=order.__getitem__), []).append(key)
        keys = [k for key in graph.nodes for k in (last.get(key, ()) if key in gone else (key,))]
        for key, (task, read) in self.new.items():
            graph.replace(key, task)
            graph.rewire(key, tuple(read), tuple(read.values()))
            if key in gone:  # a sum under the key of one of its terms
                graph.note(key, product=None)
            graph.note(key, **self.facts.get(key, {}))
        for key in gone.difference(self.sums):
            graph.drop(key)
        graph.reorder(keys)


def _number_single_inputs(task: KernelTask) -> dict[Key, int]:
    """Number the inputs that are one array of the task's program, and are read once."""
    out, n = {}, 0
    times = Counter(task.names)  # what has disappeared into it may read the same
    for name, foreseen in task.inputs():
        if len(foreseen) == 1 and foreseen[0] is not None and times[name] == 1:
            out[name] = n
        n += sum(e is not None for e in foreseen)
    return out


def _replace_products(program: Program, where: Mapping[int, Any]) -> _ProgramWithSums | None:
    """Return the program with sums of products in place of the products.

    Products are replaced that are on one device and have one shape, as `where` says. None where it
    adds up no two of these.
    """
    read = Counter(
        [n.data[0] for k in program.kernels for n in set(nodes(k.roots)) if n.op == "input"]
    )
    terms = {n for n in where if read[n] == 1}
    every: list[list[int]] = []
    kernels = []
    for kernel in program.kernels:
        new: dict[int, Expr] = {}
        for node, leaves in _sums(kernel, terms):
            groups = _group_terms([leaf.data[0] for leaf in leaves], where)
            every += [g for g in groups if len(g) > 1]
            leaf_of = {leaf.data[0]: leaf for leaf in leaves}
            firsts = [leaf_of[g[0]] for g in groups]
            new[id(node)] = reduce(lambda a, b: Expr("add", (a, b), a.dtype), firsts)
        kernels.append(kernel.with_roots(substitute(kernel.roots, new)))
    if not every:
        return None
    gone = {n for group in every for n in group[1:]}
    left = [n for n in range(program.inputs) if n not in gone]
    number = {old: new for new, old in enumerate(left)}

    def renumber(n: int) -> int:
        return number[n] if n < program.inputs else n - len(gone)

    result = map_leaves(
        lambda v: replace(v, array=renumber(v.array)) if isinstance(v, Out) else v, program.result
    )
    changed = tuple([renumber_arrays(k, renumber) for k in kernels])
    return _ProgramWithSums(
        every, Program(len(left), changed, result), _returns_input(changed, result)
    )


def _sums(kernel: Kernel, terms: Container[int]) -> Iterator[tuple[Expr, list[Expr]]]:
    """Yield each sum in a kernel, and the arrays that it adds up, in the order of the additions.

    Each array is as large as the sum, and nothing else reads it.
    """
    every = nodes(kernel.roots)
    uses = Counter([id(a) for n in every for a in n.args] + [id(r) for r in kernel.roots])
    parts: dict[int, list[Expr]] = {}
    for node in every:
        if node.op == "input" and node.data[0] in terms:
            parts[id(node)] = [node]
        elif node.op == "add" and id(node.args[0]) in parts and is_zero(node.args[1]):
            if uses[id(node.args[0])] == 1:
                parts[id(node)] = parts[id(node.args[0])]
        elif node.op == "add" and all(id(a) in parts and uses[id(a)] == 1 for a in node.args):
            a, b = (parts[id(a)] for a in node.args)
            if a[0].data[1] == b[0].data[1] and a[0].dtype == b[0].dtype == node.dtype:
                parts[id(node)] = [*a, *b]
    inside = {id(a) for n in every if id(n) in parts for a in n.args}
    for node in every:
        if id(node) not in inside and len(parts.get(id(node), ())) > 1:
            yield node, parts[id(node)]


def _group_terms(terms: Sequence[int], where: Mapping[int, Any]) -> list[list[int]]:
    """Group terms by what `where` says of them: their device and shape.

    >>> _group_terms([3, 4, 5, 6], {3: 0, 4: 1, 5: 0, 6: 0})
    [[3, 5, 6], [4]]
    """
    places: dict[Any, list[int]] = {}
    for n in terms:
        places.setdefault(where[n], []).append(n)
    return list(places.values())


def _returns_input(kernels: Sequence[Kernel], result: Any) -> bool:
    """Whether a program returns the only array that it reads, or its beginning."""
    if len(kernels) != 1 or type(result) is not Out or result.scalar or kernels[0].reductions:
        return False
    shape, (root, *more) = kernels[0].shape, kernels[0].outputs
    if more or root.op != "input" or kernels[0].strides is not None:
        return False
    return canonical_view(root.data[1], shape) == canonical_view(View.contiguous(shape), shape)


def _drop_inputs(task: KernelTask, program: Program, gone: Mapping[Key, Key]) -> KernelTask:
    """Return a task without some inputs: its program reads their sum in place of another input."""
    every = zip(task.names, task.expects, strict=True)
    left = [(name, structure) for name, structure in every if name not in gone]
    return KernelTask(
        task.key, program, tuple([name for name, _ in left]),
        tuple([structure for _, structure in left]),
        task.positions, task.kind, OptionalTermsTask(task.original, gone),
    )  # fmt: skip
