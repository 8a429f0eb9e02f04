"""The contract of our own kinds of tasks: each kind is called, described and made again."""

from __future__ import annotations

import importlib
from functools import partial
from operator import add, mul

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import DataNode, Task, TaskRef

import gpuscheduler
from gpuscheduler.frontend.compiled_task import Chain, CompiledCall
from gpuscheduler.frontend.rebuild import swap_parts
from gpuscheduler.frontend.task import (
    OwnTask,
    WrappingTask,
    bytes_touched_by,
    describe,
    kernels_of,
    kernels_only,
    launches_only,
    members_of,
    original_of,
    sequence_of,
    work_identity_of,
)
from gpuscheduler.fusion.horizontal import SequentialTasks, TupleItemKey
from gpuscheduler.fusion.library_task import LibraryTask, NumpyTask
from gpuscheduler.fusion.portable import PortableTask
from gpuscheduler.fusion.residency import HostTask
from gpuscheduler.fusion.source import LibraryInputs, MatrixInput
from gpuscheduler.fusion.task import (
    CompressTask,
    HolderTask,
    KernelTask,
    OptionalTask,
    PairsTask,
    TaskWithProducers,
)
from gpuscheduler.ir.expr import Expr, Kernel, Out, Program, View, source
from gpuscheduler.pipeline.comparable import ArraySlot
from gpuscheduler.pipeline.template import FilledTask
from gpuscheduler.plan.batching import Batch
from gpuscheduler.plan.matmul import MatmulSumTask, OptionalTermsTask
from gpuscheduler.tracing.abstract import AbstractArray, LibraryCall
from tests.test_structure import MODULES

TABLE, OTHER = np.arange(4.0), np.arange(4.0) + 100
X = np.full(4, 3.0)
VALUES = {"x": X, "y": X + 1, "s": X.reshape(2, 2), "t": X.reshape(2, 2) + 1}


def add_table(table=TABLE, key="a"):
    """A task of Dask that adds an array to `x`."""
    return Task(key, add, TaskRef("x"), DataNode(None, table))


def kernel_task(table=TABLE, key="a"):
    """A kernel that doubles `x`; the task behind it adds an array to it."""
    x = source(0, (4,), "f8")
    kernel = Kernel((4,), (Expr("add", (x, x), np.float64),))
    program = Program(1, (kernel,), Out(1, (4,), False))
    expects = (AbstractArray((4,), np.dtype("f8")),)
    return KernelTask(key, program, ("x",), expects, (), "numpy.ndarray", add_table(table, key))


def product(table=TABLE):
    matrices = [MatrixInput(name, (2, 2), False) for name in ("s", "t")]
    original = Task("m", add, TaskRef("s"), DataNode(None, table.reshape(2, 2)))
    ended = "m", Task("m", partial(add, 1), TaskRef("m"))
    pair = [tuple(matrices)]
    return MatmulSumTask("m", (2, 2), np.dtype("f8"), pair, [original], None, ended)


def sort_task(table=TABLE):
    call = LibraryCall("numpy.sort", (), (), (4,), np.dtype("f8"))
    inputs = LibraryInputs(call, ("x",), (AbstractArray((4,), np.dtype("f8")),))
    return LibraryTask("l", inputs, HostTask("l", add_table(table, "l"), {}, table.nbytes))


#: A task of each kind, made with an array in it.
MAKE = {
    CompiledCall: lambda t=TABLE: CompiledCall("c", lambda a, b: a + b, (TaskRef("x"), t)),
    Chain: lambda t=TABLE: Chain([("a", add_table(t)), ("b", Task("b", mul, TaskRef("a"), 2))]),
    KernelTask: kernel_task,
    OptionalTask: lambda t=TABLE: OptionalTask(kernel_task(t)),
    CompressTask: lambda t=TABLE: CompressTask(kernel_task(t), ()),
    PairsTask: lambda t=TABLE: PairsTask(add_table(t)),
    TaskWithProducers: lambda t=TABLE: TaskWithProducers(
        Task("z", mul, TaskRef("a"), 2), [("a", add_table(t))]
    ),
    SequentialTasks: lambda t=TABLE: SequentialTasks("z", [add_table(t), add_table(t, "b")]),
    Batch: lambda t=TABLE: Batch(
        TupleItemKey(("a", "b")), [kernel_task(t), kernel_task(t, "b")], True
    ),
    MatmulSumTask: product,
    OptionalTermsTask: lambda t=TABLE: OptionalTermsTask(
        Task("z", lambda p, q, r: p + q + r, TaskRef("x"), TaskRef("gone"), t), {"gone": "y"}
    ),
    HostTask: lambda t=TABLE: HostTask("a", add_table(t), {}, t.nbytes),
    LibraryTask: sort_task,
    NumpyTask: lambda t=TABLE: NumpyTask(HostTask("a", add_table(t), {}, t.nbytes)),
    PortableTask: lambda t=TABLE: PortableTask("a", add_table(t)),
    FilledTask: lambda t=TABLE: FilledTask(Task("a", add, TaskRef("x"), ArraySlot(0)), [t]),
}
ABSTRACT = {HolderTask, WrappingTask}
KINDS = list(MAKE)


def kinds(base=OwnTask):
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def shown(value):
    """A value that can be compared."""
    return [np.asarray(v).tolist() for v in (value if isinstance(value, tuple) else (value,))]


def unfused(task):
    """What the original tasks of a task return, with the arrays that lie in them."""
    members = members_of(task)
    if members:
        return [unfused(member) for member in members]
    return shown(original_of(task)(VALUES))


def test_every_kind_of_task_has_an_example():
    for file in MODULES:
        if file.split("/")[0] in ("frontend", "tracing", "fusion", "plan", "pipeline"):
            importlib.import_module(f"gpuscheduler.{file.replace('/', '.')}")
    assert {k for k in kinds() if k.__module__.startswith("gpuscheduler.")} == set(MAKE) | ABSTRACT


@pytest.mark.parametrize("kind", KINDS)
def test_task_has_a_key_and_is_called_with_values(kind):
    task = MAKE[kind]()
    assert isinstance(task, kind)
    assert task.key is not None
    assert len(shown(task(VALUES))) >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_task_made_of_its_own_parts_computes_the_same(kind):
    task = MAKE[kind]()
    again = task.with_parts(*task.parts)
    assert type(again) is kind
    assert again.key == task.key
    assert shown(again(VALUES)) == shown(task(VALUES))
    assert unfused(again) == unfused(task)
    assert describe(again).words == describe(task).words


@pytest.mark.parametrize("kind", KINDS)
def test_array_in_a_task_is_swapped_for_another(kind):
    """Templates and the fallback to the host put other arrays into tasks."""

    def swap(it):
        return OTHER if it is TABLE else OTHER.reshape(2, 2) if is_view(it) else it

    def is_view(it):
        return isinstance(it, np.ndarray) and it.base is TABLE

    task = MAKE[kind]()
    other = swap_parts(task, swap, {})
    assert other is not task
    assert unfused(other) == unfused(MAKE[kind](OTHER))
    assert unfused(other) != unfused(task)


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not FilledTask])
def test_task_of_which_nothing_is_swapped_stays_itself(kind):
    task = MAKE[kind]()
    assert swap_parts(task, lambda it: it, {}) is task


@pytest.mark.parametrize("kind", KINDS)
def test_task_is_described_in_words(kind):
    description = describe(MAKE[kind]())
    assert description.words
    assert "object at 0x" not in description.words


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_with_kernels_tell_what_these_touch(kind):
    task = MAKE[kind]()
    kernels = kernels_of(task)
    assert all(isinstance(k, KernelTask) for k in kernels)
    described = describe(task).kernels
    assert len(described) == sum(len(k.program.kernels) for k in kernels)
    for kernel in described:
        assert kernel.nbytes == 64  # four numbers read and four written
        assert kernel.operations == 4
        assert "__global__" in kernel.source()
    assert (bytes_touched_by(task) is not None) == (
        kind in (KernelTask, Batch, HostTask, LibraryTask)
    )
    assert kernels_only(task) == (kind in (KernelTask, Batch))
    assert launches_only(task) == (kind in (KernelTask, Batch, MatmulSumTask))


def test_tasks_of_dask_have_the_defaults():
    task = Task("x", add, 1, 2)
    assert sequence_of(task) == (("x", task),)
    assert (members_of(task), kernels_of(task), bytes_touched_by(task)) == ((), (), None)
    assert original_of(task) is task
    assert work_identity_of(task) is add
    assert not launches_only(task)
    assert describe(DataNode("x", 1)).words == "value"
    assert describe(Task("x", partial(partial(add, 1)), 2)).words == "call of add"


def test_batches_of_one_program_are_alike():
    one, two = kernel_task(), kernel_task(key="b")
    two.program = one.program
    assert work_identity_of(Batch(TupleItemKey(("a",)), [one], True)) is work_identity_of(two)


def test_batch_for_other_data_remembers_nothing():
    batch = MAKE[Batch]()
    batch.ready["device"] = 1
    assert batch.knows_inputs()
    assert not batch.with_data(()).knows_inputs()


def test_array_behind_a_slot_is_brought_to_the_host():
    """A kernel of a plan from a template runs its original with arrays in slots."""
    task = kernel_task().with_originals(
        lambda _: FilledTask(Task("a", add, TaskRef("x"), ArraySlot(0)), [TABLE])
    )
    swapped = swap_parts(task, lambda it: OTHER if it is TABLE else it, {})
    assert shown(original_of(swapped)(VALUES)) == shown(X + OTHER)


def test_planned_steps_describe_themselves():
    x = da.ones((2000, 2000), chunks=1000)
    with gpuscheduler.Scheduler("cpu:2", fuse_least=0) as scheduler:
        plan = scheduler.plan((x * 2 + 1).sum())
    words = [describe(step.task).words for step in plan.steps]
    assert "kernel" in words
    assert all(words)


def test_views_of_kernels_are_contiguous():
    """The example kernel is the one that the test of bytes counts."""
    (kernel,) = kernel_task().program.kernels
    assert kernel.shape == (4,)
    assert View.contiguous((4,)).strides == (1,)
