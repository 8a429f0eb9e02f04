"""The fusion pass: which tasks become one kernel, which stay tasks, and why.

Each story makes a Dask array, fuses its graph, and looks at the tasks. Then it computes the array
on CPU devices, too, and compares it with Dask's own value.
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref

import dask
import dask.array as da
import numpy as np
import pytest
from dask.callbacks import Callback

import gpuscheduler
from gpuscheduler import Scheduler
from gpuscheduler.codegen.cuda.kernel import generate
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.frontend.task import kernels_of
from gpuscheduler.fusion.fuser import MOST_READ, FusionPass
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.ir.expr import nodes
from gpuscheduler.pipeline import compile
from gpuscheduler.random import default_rng
from tests.support.strategies import graph_of, received_by_scheduler


@pytest.fixture(autouse=True)
def _fuse_single_operations(monkeypatch):
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)


def test_kernels_have_a_bounded_number_of_arguments(scheduler):
    """A tree of 1,000 blocks is not one kernel of 1,000 arguments."""
    x = da.from_array(np.arange(2000.0), chunks=2)
    graph = fused((x + 1).sum(split_every=4), near=lambda a, b: True)
    assert max(len(t.expects) for t in programs(graph)) < MOST_READ + 4
    assert len(programs(graph)) < 1000 + MOST_READ
    assert (x + 1).sum(split_every=4).compute() == np.arange(1, 2001.0).sum()


WEIGHTS = (1, 2, 3, 4, 5, 4, 3, 2, 1)


def smooth(b):
    rows = sum(w * np.roll(b, k, 0) for k, w in enumerate(WEIGHTS, -4))
    return sum(w * np.roll(rows, k, 1) for k, w in enumerate(WEIGHTS, -4)) / 625


def test_stencils_of_very_many_places_read_joined_neighbours():
    """81 places of nine blocks have no room among a kernel's arguments."""
    x = da.from_array(np.ones((300, 300), "f4"), chunks=100)
    y = da.map_overlap(smooth, x, depth=4, boundary="reflect", dtype="f4")
    every = [t.program.kernels for t in programs(FusionPass(graph_of(y), 0, on_gpus=True).fuse())]
    blocks = [kernels for kernels in every if len(kernels) > 1]
    assert len(blocks) == 9
    for first, second in blocks:
        assert len({n.data[0] for n in nodes(first.roots) if n.op == "input"}) >= 4
        assert len({n.data[0] for n in nodes(second.roots) if n.op == "input"}) == 1
        for kernel in (first, second):
            generate(kernel)


def stencil(u):
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]


@pytest.mark.parametrize("boundary", ["periodic", "nearest", "reflect", 0])
def test_stencils_are_kernels_on_gpus_and_tasks_on_cpus(scheduler, boundary):
    """To choose by position at each point takes NumPy longer than to put parts side by side."""
    values = np.random.default_rng(0).normal(size=(24, 30))
    u = da.from_array(values, chunks=(8, 10))
    for _ in range(2):
        u = da.map_overlap(stencil, u, depth=1, boundary=boundary, trim=False, dtype="f8",
                           meta=np.empty((0, 0)))  # fmt: skip
    np.testing.assert_allclose(u.compute(), u.compute(scheduler="sync"))
    for on_gpus in (True, False):
        fuser = FusionPass(graph_of(u), 0, on_gpus=on_gpus)
        stencils = [t for t in programs(fuser.fuse()) if len(t.names) > 2]
        assert bool(stencils) == on_gpus
        assert any("joins parts" in r for r in fuser.graph.reasons.values()) != on_gpus


@pytest.fixture
def scheduler():
    with Scheduler("cpu:2", check=True, fuse_least=0) as s:
        yield s


def fused(*collections, **options):
    return FusionPass(graph_of(*collections), **options).fuse()


def programs(graph):
    return [t for t in graph.tasks.values() if isinstance(t, KernelTask)]


def others(graph):
    return {k: t for k, t in graph.tasks.items() if not isinstance(t, KernelTask)}


def check(*collections, exact=True):
    """Compare the scheduler's values with Dask's."""
    got = dask.compute(*collections)
    want = dask.compute(*collections, scheduler="sync")
    for g, w in zip(got, want, strict=True):
        assert (type(g), g.dtype, g.shape) == (type(w), w.dtype, w.shape)
        (np.testing.assert_array_equal if exact else np.testing.assert_allclose)(g, w)


def array(n=8, chunk=4, dtype="f8"):
    return da.from_array(np.arange(n * n, dtype=dtype).reshape(n, n), chunks=chunk)


# ---- what becomes a kernel


def test_a_chain_is_one_kernel_for_each_block(scheduler):
    """x -> +1 -> *2 -> sin: four blocks, four programs of one kernel; x is read once."""
    y = np.sin((array() + 1) * 2)
    graph = fused(y)
    assert len(programs(graph)) == 4
    for p in programs(graph):
        (kernel,) = p.program.kernels
        assert (kernel.shape, kernel.reductions, kernel.inputs) == ((4, 4), (), (0,))
        assert str(kernel.outputs[0]) == "sin(multiply(add(input0, 1.0), 2.0))"
    check(y)


def test_blocks_of_one_structure_share_a_program():
    """Two structures: whole blocks and those at the edge."""
    graph = fused(array(10, 4) * 2 + 1)
    assert len({id(p.program) for p in programs(graph)}) == 4  # 4x4, 4x2, 2x4, 2x2
    assert len(programs(graph)) == 9


def test_a_reduction_is_a_kernel_for_each_block_and_for_each_step_of_its_tree(scheduler):
    """16 blocks, in twos along each axis: 16 + 4 + 1 programs, of which none is a copy."""
    x = array(16, 4)
    y = (x * x).sum(split_every=2)
    graph = fused(y)
    assert not {k: graph.reasons.get(k) for k in others(graph)}
    shapes = [k.shape for p in programs(graph) for k in p.program.kernels if k.reductions]
    assert shapes.count((4, 4)) == 16
    check(y, exact=False)


def test_generated_arrays_need_no_memory(scheduler):
    """arange, ones: computed in the reader, also in two of them."""
    x = da.arange(100, chunks=50) * 2.0
    y = x[:, None] + da.ones(100, chunks=50)
    graph = fused(y)
    assert len(programs(graph)) == len(graph.tasks) == 4
    assert not any(p.names for p in programs(graph))
    check(y)


def test_producer_of_one_reader_is_inlined(scheduler):
    """a -> b become one kernel. b has another shape, and so is in a layer of its own."""
    a = array() + 1
    b = a.T * 2 + a.T[:, ::-1]
    check(b)
    graph = fused((array() * 3)[::2].sum(axis=0))
    assert len(graph.tasks) == len(programs(graph)) == 6  # two columns: two blocks, and their sum


def test_several_producers_of_one_reader_are_inlined(scheduler):
    """Two blocks become one: what made them, of values of the graph, is done there, too."""
    x, y = array(8, (8, 4)) + 1, default_rng(0).random((8, 8), chunks=(8, 4)) * 2
    graph = fused((x * 2).rechunk(8) - 3)
    assert len(graph.tasks) == len(programs(graph)) == 1
    check((x * 2).rechunk(8) - 3)
    both = (x + y).rechunk(8)
    assert len(fused(both).tasks) == 1
    np.testing.assert_array_equal(both.compute(), x.compute() + y.compute())


def test_producer_of_two_readers_is_computed_once(scheduler):
    """Two readers in different layers want the values of `a`, so its task stays."""
    a = np.sqrt(da.from_array(np.arange(8.0), chunks=8) + 1)
    one, two = a[:4].sum(), (a * 2).rechunk(4)
    check(one, two)
    graph = fused(one, two)
    made = [p for p in programs(graph) if "sqrt" in str(p.program.kernels)]
    assert len(made) == 1


def test_wanted_values_are_not_inlined(scheduler):
    """A wanted value is stored anyway, so its reader reads it."""
    a = array(8, (8, 4)) + 1
    b = a.rechunk(8) * 2
    check(a, b)
    graph = fused(a, b)
    assert set(graph.outputs) <= set(graph.tasks)
    *made, last = graph.tasks
    assert graph.needs[last] == tuple(made)


# ---- what stays, and why


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda b: b[b > 3].max(keepdims=True) + b, "an error where that is nothing"),
        (lambda b: b + np.random.default_rng(0).random(b.shape), "random"),
        (lambda b: (print(end=""), b + 1)[1], "print"),
        (lambda b: b + int(b[0, 0]), "value"),
        (lambda b: b + np.linalg.det(b), "det"),
    ],
)
def test_untraceable_function_stays_a_task_with_a_reason(scheduler, function, why):
    x = array()
    y = x.map_blocks(function, dtype="f8", meta=x._meta)
    graph = fused(y)
    assert not programs(graph)
    assert graph.reasons
    for reason in graph.reasons.values():
        assert why in reason, reason
    check(y)


def printing(block):
    print(end="")
    return block * 3


def asking(block):
    return block * 3 if block.sum() > 0 else block * 4


def given(block, function):
    return function(block)


def with_block_info(block, block_info=None):
    print(end="")
    return block * block_info[0]["num-chunks"][0]


def twice_over(function):
    def both(x):
        x = x.map_blocks(function, dtype="f8", meta=x._meta)
        return (x * 2 + 1).map_blocks(function, dtype="f8", meta=x._meta)

    return both


def by(function, *args):
    return lambda x: x.map_blocks(function, *args, dtype="f8", meta=x._meta)


@pytest.mark.parametrize(
    "step",
    [
        by(printing), by(asking), by(given, printing), by(given, asking), by(with_block_info),
        by(np.sort), lambda x: da.fft.fft(x.rechunk((4, -1))).real, twice_over(printing),
        twice_over(asking),
    ],
)  # fmt: skip
@pytest.mark.parametrize("front", ["values", "followed", "one operation", "random"])
def test_untraceable_step_leaves_its_neighbours_kernels(scheduler, step, front):
    """x -> [+1 -> *2] -> ? -> [exp -> +1 -> sum]: Dask makes one task of all for each block.

    The steps behind the untraceable one become a kernel, and so do two or more steps before it.
    """
    x = array() / 70 + np.eye(8)
    if front == "values":
        x = da.from_array(x.compute(scheduler="sync"), chunks=4)
    elif front == "one operation":
        x = da.from_array(x.compute(scheduler="sync"), chunks=4) + 1
    elif front == "random":
        rng = default_rng(3)
        x = da.where(rng.random((8, 8), chunks=4) < 2, x, 0.0) * 2  # drawn, and of no consequence
    y = (da.exp(step(x) / 9) + 1).sum(axis=0)
    plan = scheduler.plan(y)
    kernels = [s.task for s in plan.steps if isinstance(s.task, KernelTask)]
    behind = [t for t in kernels if "exp" in str(t.program.kernels)]
    assert behind
    assert all(t.program.kernels[0].reductions for t in behind)
    if front == "followed":
        assert any("exp" not in str(t.program.kernels[0].outputs) for t in kernels)
    check(y, exact=False)
    check(y, exact=False)  # known by now
    with Scheduler("cpu:2", fuse_least=0, memory_limit="2 kiB") as s:
        np.testing.assert_allclose(y.compute(), y.compute(scheduler="sync"))
        assert s.last is not None


def padded(block):
    copy = block * 1
    other = np.pad(copy, 0)
    other += 1
    return copy


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i2", "u1", "c8"])
@pytest.mark.parametrize(
    "function",
    [
        lambda b: b * math.sqrt((b == b).sum()), lambda b: b * math.floor((b == b).sum() / 3),
        lambda b: b / math.hypot((b == b).sum(), 1) + b, lambda b: b + math.exp(abs(b).max() / 50),
        lambda b: min(b, 3), lambda b: max(b.real.sum(), b.real.max()) * b, lambda b: math.sqrt(b),
        lambda b: b + math.floor(b.real.max() + 3) ** 30 % 7,
        lambda b: b * math.log((b == 99).sum()), lambda b: b * math.exp(b.real.max() * 1e4),
        lambda b: np.where(b == 3, b, math.sqrt((b == b).sum())),
        lambda b: np.gradient(b, np.float64(0.5), axis=0), padded, lambda b: np.pad(b * 2, -1),
        lambda b: np.round(b / 3, np.int64(1)) * 2, lambda b: np.diff(b, n=-1) * 3 + 1,
        lambda b: np.take(b, -1, axis=0, mode="clip")[None] * 3 + b,
        lambda b: np.split(b, np.int64(3))[0] * 3 + 1,
    ],
)  # fmt: skip
def test_python_and_numpy_scalars_in_users_functions(scheduler, function, dtype):
    """Python's numbers do not change the dtype."""
    values = (np.arange(64).reshape(8, 8) % 7).astype(dtype)
    y = da.from_array(values, chunks=4).map_blocks(function, dtype=dtype, meta=values[:0, :0])
    results = []
    for run in ("sync", scheduler.get):
        try:
            results.append(y.compute(scheduler=run))
        except (TypeError, ValueError, OverflowError) as error:
            results.append((type(error), str(error)))
    want, got = results
    if isinstance(want, tuple):
        assert got == want
    else:
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        rtol = 1e-6 if want.dtype.char in "fF" else 2e-3 if want.dtype.char == "e" else 1e-12
        np.testing.assert_allclose(got, want, rtol=rtol)


@pytest.mark.parametrize("step", [by(printing), by(asking)])
def test_single_operation_stays_with_its_untraceable_neighbour(scheduler, step):
    """x -> +1 -> ? -> sum: two tasks of one operation each would be no faster than one task."""
    y = step(array() + 1).sum()
    assert len(fused(y).tasks) == len(scheduler.plan(y).steps)
    check(y)


def test_side_effects_happen_once_for_each_block(scheduler):
    seen = []

    def note(block):
        seen.append(block.shape)
        return block + 1

    x = array()
    y = x.map_blocks(note, dtype="f8", meta=x._meta)
    y.compute()
    assert seen == [(4, 4)] * 4


def test_a_lock_is_taken_for_each_block():
    class Lock:
        taken = 0

        def acquire(self):
            self.taken += 1

        def release(self):
            pass

    lock = Lock()
    x = da.from_array(np.arange(8.0), chunks=4, lock=lock) + 1
    with Scheduler("cpu:1", fuse_least=0):
        np.testing.assert_array_equal(x.compute(), np.arange(8.0) + 1)
    assert lock.taken == 2


def test_small_tasks_are_not_worth_a_kernel(monkeypatch):
    y = array() * 2 + 1
    graph = fused(y, least=2**20)
    assert not programs(graph)
    assert set(graph.reasons.values()) == {"it touches less than 1,048,576 bytes"}


def test_without_fusion_nothing_is_a_kernel():
    x = default_rng(0).random((8, 8), chunks=4)
    with Scheduler("cpu:2", fuse=False, fuse_least=0) as s:
        plan = s.plan(np.sin(x) * 2 + 1)
        assert not any(isinstance(step.task, KernelTask) for step in plan.steps)
        check(np.sin(array()) * 2)


# ---- values that are not as foreseen


@pytest.mark.parametrize(
    "made",
    [
        lambda b: b.astype("f4"),
        lambda b: np.asfortranarray(b),
        lambda b: b[:, :2],
        lambda b: b[::-1],
        lambda b: np.concatenate([b, b], axis=1),
    ],
)
def test_block_that_differs_from_its_collection_runs_unfused(scheduler, made):
    """The reader's kernel expects a C-contiguous float64 block of 4 by 4, so it runs unfused."""

    def odd(b):
        _ = open  # not followed: it names a builtin that opens files
        return made(b)

    x = array(8, 4)
    y = np.sin(x.map_blocks(odd, dtype="f8", meta=x._meta).rechunk((2, 4)) + 1)
    assert programs(fused(y))
    got, want = y.compute(), y.compute(scheduler="sync")
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(got, want)


def test_dtype_of_a_traced_function_wins_over_the_collections(scheduler):
    """Dask was told float32; the function gives float64. What is followed is what it gives."""
    x = array(4, 4, "f4")
    y = x.map_blocks(lambda b: b.astype("f8") / 3, dtype="f4", meta=np.empty((0, 0), "f4")) + 1
    got, want = y.compute(), y.compute(scheduler="sync")
    assert got.dtype == want.dtype == "f8"
    np.testing.assert_array_equal(got, want)


# ---- placement


def test_pinned_tasks_keep_their_device():
    with dask.annotate(device=1):
        x = array() * 2 + 1
    y = x.rechunk(8) * 2
    graph = fused(y)
    pinned = [k for k in graph.tasks if graph.pins.get(k) == 1]
    assert pinned
    assert all(isinstance(graph.tasks[k], KernelTask) for k in pinned)
    with Scheduler("cpu:2", fuse_least=0):
        check(y)


def test_a_small_part_of_a_block_stays_where_the_block_is(scheduler):
    """The halo of a stencil: the edge of a neighbour is cut off there, not the block sent here."""
    x = da.from_array(np.arange(64.0), chunks=16)
    y = da.map_overlap(lambda b: b[2:] + b[:-2], x * 2, depth=1, boundary="reflect", trim=False,
                       dtype="f8", meta=x._meta)  # fmt: skip
    got, want = y.compute(), y.compute(scheduler="sync")
    np.testing.assert_array_equal(got, want)


# ---- random numbers


def test_random_numbers_are_drawn_in_their_reader():
    x = default_rng(0).random((8, 8), chunks=4)
    graph = fused(x.sum())
    drawing = [p for p in programs(graph) if p.positions]
    assert len(drawing) == 4
    for p in drawing:
        assert not p.names
        assert p.program.kernels[0].reductions


def test_random_numbers_are_split_off_an_untraceable_chain(scheduler):
    x = default_rng(0).random((8, 8), chunks=4)

    def odd(b):
        _ = open  # not followed
        return b + 1

    y = x.map_blocks(odd, dtype="f8", meta=x._meta)
    graph = fused(y)
    assert len(programs(graph)) == 4
    assert len(graph.tasks) == 8
    np.testing.assert_array_equal(y.compute(), x.compute() + 1)


# ---- around the run


def test_callbacks_see_the_tasks_as_they_were(scheduler):
    y = ((array() + 1).rechunk(8) * 2).sum()
    seen, want = set(), set()
    with Callback(pretask=lambda key, dsk, state: seen.add(key)):
        y.compute()
    with Callback(pretask=lambda key, dsk, state: want.add(key)), dask.config.set(scheduler="sync"):
        y.compute(optimize_graph=True)
    assert len(seen) >= 4
    dsk, keys = received_by_scheduler(y)
    plain = from_dask(dsk, keys, started=lambda _: None)
    whole = FusionPass(from_dask(dsk, keys, started=lambda _: None), merge=False).fuse()
    assert list(plain.tasks) == list(whole.tasks)


def test_errors_of_users_functions_are_their_own(scheduler):
    def fails(block):
        if block.shape[0] == 4:
            raise KeyError("mine")
        return block

    x = array()
    y = x.map_blocks(fails, dtype="f8", meta=x._meta) + 1
    with pytest.raises(KeyError, match="mine") as error:
        y.compute()
    assert any("while running" in n for n in error.value.__notes__)
    assert any(f.name == "fails" for f in error.traceback)


def test_wrong_shapes_raise_numpys_error(scheduler):
    x = array()
    y = x.map_blocks(lambda b: b + np.ones(3), dtype="f8", meta=x._meta)
    with pytest.raises(ValueError, match="broadcast"):
        y.compute()


def test_persist_then_reuse(scheduler):
    x = (array() * 2 + 1).persist()
    check((x + x.T).sum(axis=0), x.mean(), exact=False)


def test_delayed_over_arrays_and_two_collections_together(scheduler):
    x = np.cos(array()) + 1
    total = dask.delayed(np.sum)(x)
    got, mean = dask.compute(total, x.mean())
    want = x.compute(scheduler="sync")
    np.testing.assert_allclose([got, mean], [want.sum(), want.mean()])


def test_a_kernel_gives_no_warnings(scheduler):
    """Kernels warn of nothing, on CPUs as on GPUs: they cannot know which operation met a NaN."""
    x = da.from_array(np.array([-1.0, 4.0]), chunks=2)
    with warnings.catch_warnings(record=True) as told:  # made errors, they would be heeded
        warnings.simplefilter("always")
        np.testing.assert_array_equal((np.sqrt(x) + 1).compute(), [np.nan, 3])
    assert told == []


def test_reductions_with_a_dtype_argument(scheduler):
    """`np.dtype("f8") == None` in NumPy: an early version took a float64 for no type at all."""
    x = da.from_array(np.arange(10, dtype="i8"), chunks=5)
    for f in (da.sum, da.mean, da.var, da.prod):
        check(f(x + 1, dtype=np.dtype("f8")), f(x + 1, dtype="f4"), exact=False)
    c = x.astype("c8") * (1 + 0.5j)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(da.var(c, dtype=np.dtype("f8")), exact=False)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("name", ["argmin", "argmax", "nanargmin", "nanargmax"])
def test_argmin_of_kernels_and_of_tasks_together(name, axis):
    """The last blocks are too small to be worth a program: Dask's own functions give records."""
    x = np.random.default_rng(5).random((400, 180))
    y = da.from_array(x, chunks=(190, 170)) * 2 + 1
    with Scheduler(devices="cpu:2", fuse_least=2**16) as scheduler:
        assert {type(s.task) is KernelTask for s in scheduler.plan(y).steps} == {True, False}
        got = getattr(da, name)(y, axis=axis).compute()
    np.testing.assert_array_equal(got, getattr(np, name)(x, axis=axis))


@pytest.mark.parametrize("function", [np.negative, lambda block: np.frombuffer(bytes(block))])
def test_tracing_leaves_no_reference_cycle_to_the_graph(function):
    """Neither where a task becomes a program nor where that is refused, midway."""
    x = (array() * 2).map_blocks(function, meta=np.ones((0, 0)))
    gc.collect()
    gc.disable()
    try:
        fuser = FusionPass(graph_of(x))
        fuser.fuse()
        gone = weakref.ref(fuser)
        del fuser
        assert gone() is None
    finally:
        gc.enable()


def test_operation_without_a_cuda_kernel_stays_a_task():
    """The plan knows it before the run; CPU devices use NumPy's function."""
    x = da.from_array(np.linspace(-1, 1, 64, dtype="f2"), chunks=16)
    for on_gpus in (True, False):
        fuser = FusionPass(graph_of(da.nextafter(x * 2, x) + 1), 0, on_gpus=on_gpus)
        assert bool(programs(fuser.fuse())) != on_gpus
        assert (
            any("no kernel for nextafter of float16" in r for r in fuser.graph.reasons.values())
            == on_gpus
        )


def test_scan_is_stored_once_for_several_readers(scheduler):
    """Otherwise each reader would scan and store all of it, to read its part."""
    x = da.from_array(np.random.default_rng(0).normal(size=(80, 40)), chunks=(40, 20)) * 2
    y = x.map_blocks(np.cumsum, axis=1, dtype="f8", meta=np.empty((0, 0)))
    for z, scans in (
        (y.rechunk((20, 20)), 4),
        ((y + 1).sum() + (y * 3).sum(), 4),
        (da.map_overlap(lambda b: b[1:] - b[:-1], y, depth=(1, 0), boundary="none",
                        trim=False, dtype="f8", meta=np.empty((0, 0))), 4),
        (y.mean(axis=0), 4),
        (da.diff(y), 4),
    ):  # fmt: skip
        found = programs(FusionPass(graph_of(z), 0, on_gpus=True).fuse())
        assert sum(k.is_scan for t in found for k in t.program.kernels) == scans
        np.testing.assert_allclose(z.compute(), z.compute(scheduler="sync"))


@pytest.mark.parametrize("last", [1, 2, 30])
def test_last_element_of_a_scan_is_split_off(scheduler, last):
    """Where the last block is thin, what comes before it disappears into its only reader."""
    x = da.from_array(np.ones((400 + last, 200)), chunks=(100, 100)) * 2
    graph = FusionPass(graph_of(da.cumsum(x, axis=0)), 0, 0, on_gpus=True).fuse()
    order = {key: n for n, key in enumerate(graph.tasks)}
    assert all(order[d] < order[key] for key in order for d in graph.needs.get(key, ()))


@pytest.mark.parametrize("devices", ["cpu:2", "cpu:1"])
def test_numpy_scalar_is_read_as_a_0d_array(devices):
    with Scheduler(devices):
        x = default_rng(5).normal(size=(1000, 1000), chunks=500)
        ones = da.ones((1000, 1000), chunks=500)
        drawn = x.compute()
        np.testing.assert_allclose((x - ones.mean()).compute(), drawn - 1)
        np.testing.assert_allclose((x * ones.max()).compute(), drawn)
        assert (x > ones.mean()).sum().compute() == (drawn > 1).sum()


@pytest.mark.parametrize(
    ("f", "is_program"),
    [
        (lambda x: x + 1, True),
        (lambda x: x[:100] + 1, False),  # its blocks are small
        (lambda x: x.sum(), False),
        (lambda x: x.max(axis=1), False),
        (lambda x: x.reshape(500, 2, 400, 2).sum(axis=(1, 3)), True),
        (lambda x: x.reshape(1000, 100, 8).max(axis=2), True),
        (lambda x: x.reshape(1000, 16, 50).max(axis=2), False),
        (lambda x: x.reshape(1000, 100, 8).cumsum(axis=2), False),
        (lambda x: x[None].sum(axis=0), True),
        (lambda x: x.T, False),
    ],
    ids=[
        "added",
        "small",
        "sum",
        "max",
        "squares",
        "short rows",
        "long",
        "scan",
        "few",
        "turned",
    ],
)
def test_single_operation_is_a_kernel_where_that_is_faster(monkeypatch, f, is_program):
    """Some operations make large arrays from few points each, or reduce short rows."""
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 2)
    a = np.random.default_rng(0).random((1000, 800))
    with gpuscheduler.Scheduler("cpu:2") as s:
        y = f(da.from_array(a, chunks=(500, 400)))
        assert any(type(step.task) is KernelTask for step in s.plan(y).steps) == is_program
        np.testing.assert_allclose(y.compute(), f(da.from_array(a)).compute(scheduler="sync"))


def test_small_parts_that_dask_copies_are_read_without_gaps():
    """Dask copies a part of at most half of a block, so that it does not keep the whole block."""
    x = da.from_array(np.arange(64.0).reshape(8, 8), chunks=4)
    y = x.rechunk((8, 2)).T + 1
    with Scheduler(devices="cpu:1", fuse_least=0) as s:
        kernels = [k for step in s.plan(y).steps for k in kernels_of(step.task)]
        read = [one for k in kernels for _, own in k.inputs() for one in own if one is not None]
        np.testing.assert_array_equal(y.compute(), y.compute(scheduler="sync"))
    assert {(one.shape, one.strides) for one in read} == {((4, 2), None)}
