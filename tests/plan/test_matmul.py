"""Products that are added up are one task, planned as for GPUs and run on CPU devices.

Each product is computed there as its own task would have computed it.
"""

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.cli.commands import plan_of
from gpuscheduler.fusion.source import MatrixInput
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.plan import matmul
from gpuscheduler.plan.machine import Machine
from gpuscheduler.plan.matmul import MOST, MatmulSumTask

pytestmark = pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")
SIDE = 96
X, Y = np.random.default_rng(0).normal(size=(2, SIDE, SIDE))


def blocks(source, chunks=16):
    return da.from_array(source, chunks=chunks).map_blocks(np.array).persist()


def planned(x, devices=1, memory=10**10):
    """As it would be on GPUs that are not there."""
    plan = plan_of(x, Machine.uniform(devices, memory=memory))
    return plan, [s for s in plan.steps if adds_up(s.task)]


def adds_up(task):
    return type(task) is MatmulSumTask and len(task.pairs) > 1


PRODUCTS = pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x @ y,
        lambda x, y: (x @ y) * 2 + 1,
        lambda x, y: (x @ y).T[::2],
        lambda x, y: (x @ y).T,
        lambda x, y: (x @ y)[:8],
        lambda x, y: x @ y + y @ x,
        lambda x, y: x.T @ x,
        lambda x, y: (x @ y).sum(axis=0),
        lambda x, y: (x @ y) @ (y @ x),
    ],
    ids=[
        "matmul",
        "and more",
        "turned",
        "only turned",
        "begun",
        "two of them",
        "of its own",
        "summed",
        "again",
    ],
)


@PRODUCTS
def test_sums_of_products_are_numpys(like_gpus, f):
    z, want = f(blocks(X), blocks(Y)), f(X, Y)
    assert any(type(s.task) is MatmulSumTask for s in like_gpus.plan(z).steps)
    for _ in range(2):  # the second run has its plan
        np.testing.assert_allclose(z.compute(), want, rtol=1e-9, atol=1e-9)


@PRODUCTS
def test_sums_are_of_matrices_alone(like_gpus, f, monkeypatch):
    """As cuBLAS makes them: of the inputs that are named, in the shape that is said."""

    def multiply(task, values):
        total = 0 if task.before is None else values[task.before].reshape(-1)
        for pair in task.pairs:
            left, right = (values[m.name].reshape(m.shape) for m in pair)
            left, right = (v.T if m.turned else v for v, m in zip((left, right), pair, strict=True))
            total = total + (left @ right).reshape(-1)
        return total.reshape(task.shape)

    monkeypatch.setattr(MatmulSumTask, "__call__", multiply)
    z, want = f(blocks(X), blocks(Y)), f(X, Y)
    np.testing.assert_allclose(z.compute(), want, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_graph_of_products(data):
    """Random chunks and expressions; the values are those of Dask's own scheduler."""
    draw = data.draw
    cuts = [draw(st.integers(5, 40)) for _ in range(3)]
    x = da.from_array(X[:40, :30], chunks=(cuts[0], cuts[1]))
    y = da.from_array(Y[:30, :40], chunks=(cuts[1], cuts[2]))
    terms = [x @ y, (y @ x)[:, :30].sum() + x @ y, da.tensordot(x, y, axes=1), (y.T @ x.T).T]
    z = draw(st.sampled_from(terms))
    for _ in range(draw(st.integers(0, 2))):
        z = draw(
            st.sampled_from(
                [z + 1, z + draw(st.sampled_from(terms)), z.T, z[::-1], z - z.mean(axis=0), z @ z.T]
            )
        )
    part = draw(st.sampled_from(["all", "halves", "every other"]))
    if part == "halves":
        z = z[:20] * 2 + z[20:]
    elif part == "every other":
        z = z[::2] - z[1::2]
    devices = draw(st.integers(1, 3))
    with gpuscheduler.Scheduler(f"cpu:{devices}", fuse_least=0, check=True) as s:
        s.hardware.kind = "cuda"
        got = z.compute()
    np.testing.assert_allclose(got, z.compute(scheduler="sync"), rtol=1e-9, atol=1e-9)


def test_each_block_of_a_product_is_one_step():
    """Six by six blocks of six products each; the time of a step is that of its products."""
    plan, sums = planned(da.ones((6000, 6000), chunks=1000) @ da.ones((6000, 6000), chunks=1000))
    assert len(sums) == 36
    assert all(len(s.task.pairs) == 6 for s in sums)
    each = plan.machine.product_seconds(2 * 6 * 1000**3)
    assert all(s.seconds == pytest.approx(each) for s in sums)
    assert not any(
        type(s.task) is KernelTask and s.inputs for s in plan.steps
    )  # but blocks of ones


def chain(plan, step):
    """A step, and those before it that it goes on from."""
    while step.task.before is not None:
        yield step
        (step,) = [plan.steps[i] for i in step.inputs if plan.steps[i].key == step.task.before]
    yield step


def test_long_sums_are_of_several_steps():
    """Fifty products: four steps of sixteen at most, each of which goes on from the one before."""
    plan, sums = planned(da.ones((100, 5000), chunks=100) @ da.ones((5000, 100), chunks=100))
    assert not [s for s in plan.steps if s.inputs and s not in sums]  # no kernel adds them up
    assert [len(s.task.pairs) for s in sums] == [12, 13, 12, 13]
    assert max(len(s.task.pairs) for s in sums) <= MOST
    (last,) = plan.outputs
    assert [*chain(plan, plan.steps[last])] == sums[::-1]


def test_what_a_task_reads_is_a_small_part_of_the_memory():
    """Of six products, whose factors have 16 MB, three each; and one each."""
    x = da.ones((1000, 6000), chunks=1000)
    for memory, counts in ((12 * 50 * 10**6, [3, 3]), (12 * 16 * 10**6, [1] * 6)):
        plan, sums = planned(x @ x.T, memory=memory)
        sums = [s for s in plan.steps if type(s.task) is MatmulSumTask]
        assert [len(s.task.pairs) for s in sums] == counts
        (last,) = plan.outputs
        assert [*chain(plan, plan.steps[last])] == sums[::-1]


def test_sums_of_several_steps_in_little_memory():
    """Of forty products, where there is no room for twenty blocks; the values are NumPy's."""
    a, b = np.random.default_rng(0).normal(size=(2, 640, 16))
    with gpuscheduler.Scheduler("cpu:1", fuse_least=0, memory_limit=20 * 16**2 * 8) as s:
        s.hardware.kind = "cuda"
        x, y = blocks(a), blocks(b)
        for f in (lambda x, y: x.T @ y, lambda x, y: (x.T @ y) * 2 + 1):
            plan = s.plan(f(x, y))
            counts = [len(t.task.pairs) for t in plan.steps if type(t.task) is MatmulSumTask]
            assert counts == [1] * 40
            np.testing.assert_allclose(f(x, y).compute(), f(a, b), rtol=1e-9, atol=1e-9)
        with pytest.raises(gpuscheduler.OutOfMemory, match="needs"):
            da.concatenate([x, y], axis=1).rechunk(640).compute()


def test_terms_in_any_order():
    """A term that comes late in the graph may be added early.

    Each step is behind the sum that it goes on from.
    """
    with gpuscheduler.Scheduler("cpu:1", fuse_least=0, memory_limit=2**20, check=True) as s:
        s.hardware.kind = "cuda"
        parts = [blocks(X[:16, n : n + 16]) @ blocks(Y[n : n + 16, :16]) for n in (0, 16, 32)]
        for order in ((2, 0, 1), (1, 2, 0), (2, 1, 0)):
            z = sum(parts[n] for n in order[1:]) + parts[order[0]]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(matmul, "MOST", 1)
                np.testing.assert_allclose(z.compute(), X[:16, :48] @ Y[:48, :16])


def test_each_device_adds_up_what_it_makes():
    """Blocks of rows are on three devices; so are the products of their transposes with them."""
    _, sums = planned(da.ones((9000, 10), chunks=(1000, 10)).T @ da.ones((9000, 10)), 3)
    assert sorted({s.place for s in sums}) == [0, 1, 2]


def test_a_sum_elsewhere_is_of_what_was_added_up_here():
    """One matrix goes there, and no factor."""
    with dask.annotate(device=0):
        x, y = da.from_array(X, chunks=SIDE) + 1, da.from_array(Y, chunks=SIDE) + 1
        a, b = x @ y, y @ x
    with dask.annotate(device=1):
        total = a + b
    plan, (step,) = planned(total, 2)
    assert step.place == 0
    (last,) = plan.outputs
    assert plan.steps[last].place == 1
    assert len(plan.steps[last].inputs) == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: (a + b) * a,
        lambda a, b: (a + b) + (a + b).T,
        lambda a, b: a[:8] + b[8:],
        lambda a, b: a[::2] + b[1::2],
        lambda a, b: a + b.T,
    ],
    ids=["used again", "the sum again", "parts", "other parts", "turned"],
)
def test_sums_of_two_products(like_gpus, f):
    x, y = X[:16, :16], Y[:16, :16]
    p, q = blocks(x), blocks(y)
    z, want = f(p @ q, q @ p), f(x @ y, y @ x)
    np.testing.assert_allclose(z.compute(), want, rtol=1e-9, atol=1e-9)


def ones(*shape, chunks, dtype="f8"):
    return da.ones(shape, chunks=chunks, dtype=dtype)


OTHERS = {
    "other types": ones(60, 60, chunks=20, dtype="i4") @ ones(60, 60, chunks=20, dtype="i4"),
    "one product each": ones(60, 60, chunks=(20, 60)) @ ones(60, 60, chunks=(60, 20)),
    "vectors": ones(60, 60, chunks=20) @ ones(60, chunks=20),
    "stacks": ones(3, 60, 60, chunks=(3, 20, 20)) @ ones(3, 60, 60, chunks=(3, 20, 20)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_sum_of_products_stays(what):
    assert not planned(OTHERS[what])[1]


def test_products_that_are_wanted_themselves_stay():
    """Two products and their sum, all three of which the caller gets."""
    x = da.ones((400, 800), chunks=400)
    a, b = x[:, :400] @ x[:, :400].T, x[:, 400:] @ x[:, 400:].T
    whole = da.concatenate([a, b, a + b])
    assert not planned(whole)[1]
    np.testing.assert_array_equal(np.unique(whole.compute()), [400, 800])


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x, y, u, v: (x @ y)[:6] + u @ v,
        lambda m, x, y, u, v: ((x @ y)[:6] + u @ v).sum(axis=0),
        lambda m, x, y, u, v: (x @ y).ravel()[:24] + (u @ v).ravel(),
        lambda m, x, y, u, v: (x @ y)[:4].reshape(2, 8) + (u @ v)[:4].reshape(2, 8),
    ],
    ids=["a part", "summed", "flat", "as rows"],
)
def test_products_of_other_shapes_are_apart(f):
    """Of one only a part is added, which lies as all of the other does."""
    rng = np.random.default_rng(0)
    sources = [rng.normal(size=s) for s in ((10, 8), (8, 4), (6, 8), (8, 4))]
    with gpuscheduler.Scheduler("cpu:1", fuse_least=0, check=True) as s:
        s.hardware.kind = "cuda"
        chunks = [(len(a) if len(a) != 8 else 4, 4) for a in sources]
        arrays = [blocks(a, c) for a, c in zip(sources, chunks, strict=True)]
        z = f(da, *arrays)
        np.testing.assert_allclose(z.compute(), f(np, *sources))
        sums = [step.task for step in s.plan(z).steps if type(step.task) is MatmulSumTask]
        assert [len(t.pairs) for t in sums] == [2, 2]


@pytest.mark.parametrize("part", [np.s_[::2], np.s_[:8]], ids=["every other", "halves"])
def test_parts_of_the_same_products_are_added(part):
    """A task that reads two parts of one block reads each of its products twice."""
    rest = slice(1, None, 2) if part == np.s_[::2] else np.s_[8:]
    with gpuscheduler.Scheduler("cpu:1", fuse_least=0, check=True) as s:
        s.hardware.kind = "cuda"
        z, want = blocks(X[:, :32])[:16] @ blocks(Y[:32]), X[:16, :32] @ Y[:32]
        got = (z[part] * 2 + z[rest]).compute()
    np.testing.assert_allclose(got, want[part] * 2 + want[rest])


def test_blocks_of_another_type_than_is_said(like_gpus):
    """The products are computed one by one, and their reader in Dask's way.

    The terms of the sums that it reads are not there.
    """

    def narrow(block):
        return np.array(block.tolist(), "f4")

    x, y = (da.from_array(a, chunks=16).map_blocks(narrow, dtype="f8") for a in (X, Y))
    z = (x @ y) * 2 + 1
    assert [len(s.task.pairs) for s in like_gpus.plan(z).steps if type(s.task) is MatmulSumTask]
    np.testing.assert_allclose(z.compute(), (X.astype("f4") @ Y.astype("f4")) * 2 + 1, atol=1e-4)


def test_two_products_where_three_blocks_have_room():
    """No sum goes on from another there: it would be there together with what becomes of it."""
    x = da.ones((4000, 8000), chunks=4000)
    block = 4000**2 * 8
    for blocks_, going_on in ((3.1, 0), (3.9, 0), (4.1, 1)):
        plan = plan_of(x @ x.T, Machine.uniform(1, memory=int(blocks_ * block)))
        found = [
            s for s in plan.steps if type(s.task) is MatmulSumTask and s.task.before is not None
        ]
        assert len(found) == going_on


def short(source, chunks, rows):
    """An array whose blocks have fewer rows than it says."""

    def cut(block):
        return np.array(block.tolist())[:rows]

    return da.from_array(source, chunks=chunks).map_blocks(cut, dtype="f8", meta=X[:0, :0])


@pytest.mark.parametrize("most", [1, 16])
@pytest.mark.parametrize("f", [
    lambda: short(X[:12, :24], (12, 8), 2) @ blocks(Y[:24, :16], 8),
    lambda: (short(X[:12, :24], (12, 8), 2) @ blocks(Y[:24, :16], 8)) * 2,
    lambda: short(X[:4, :8], (4, 8), 1) @ blocks(Y[:8, :5]) + blocks(Y[:4, :8]) @ blocks(Y[:8, :5]),
], ids=["two of twelve rows", "twice", "one row is added to each of four"])  # fmt: skip
def test_blocks_of_fewer_rows_than_is_said(like_gpus, f, most, monkeypatch):
    """Dask gives what there is of them, without the axis that it adds up along."""
    monkeypatch.setattr(matmul, "MOST", most)
    z = f()
    np.testing.assert_allclose(z.compute(), z.compute(scheduler="sync"))


@pytest.mark.parametrize("terms", [1, 2])
def test_blocks_of_another_shape_than_is_said(terms):
    """The value is what the tasks themselves make, whatever its shape.

    It includes what was added up before, in whatever shape that was.
    """
    a, b = X[:3, :4], Y[:4, :5]
    foreseen = MatrixInput("a", (7, 4), False), MatrixInput("b", (4, 5), False)
    tasks = [lambda v: v["a"] @ v["b"]] * terms
    sums = MatmulSumTask("z", (7, 1, 5), np.dtype("f8"), [foreseen] * terms, tasks)
    np.testing.assert_allclose(sums({"a": a, "b": b}), terms * (a @ b))
    more = MatmulSumTask("z", (3, 1, 5), np.dtype("f8"), [foreseen] * terms, tasks, before="s")
    got = more({"a": a, "b": b, "s": np.ones((3, 1, 5))})
    np.testing.assert_allclose(got, 1 + terms * (a @ b)[:, None])


def test_groups_are_of_one_device():
    where = {0: 1, 1: 0, 2: 1, 3: 0, 4: 2}
    assert matmul._group_terms(range(5), where) == [[0, 2], [1, 3], [4]]


def test_another_collection_like_it_has_its_plan(like_gpus):
    """Only the data are others."""
    for seed in range(3):
        a, b = np.random.default_rng(seed).normal(size=(2, SIDE, SIDE))
        for f in (lambda x, y: x @ y, lambda x, y: (x @ y) * 2 + y):
            np.testing.assert_allclose(f(blocks(a), blocks(b)).compute(), f(a, b), atol=1e-9)
