"""Collections on other files than an earlier one are not planned again, and read their own."""

from __future__ import annotations

import gc
import operator
import weakref

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler

h5py = pytest.importorskip("h5py")
xr = pytest.importorskip("xarray")
zarr = pytest.importorskip("zarr")

SHAPE, CHUNKS = (12, 10), (4, 5)


class Reader:
    """A user's array whose blocks are read when they are wanted."""

    def __init__(self, values):
        self._values = values
        self.shape, self.dtype, self.ndim = values.shape, values.dtype, values.ndim

    def __getitem__(self, where):
        return self._values[where]


class Files:
    """Makes arrays in files, each in a new one."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def _path(self):
        self.count += 1
        return f"{self.folder}/{self.count}"

    def memmap(self, values):
        made = np.memmap(self._path(), values.dtype, "w+", shape=values.shape)
        made[...] = values
        return made

    def fortran(self, values):
        made = np.memmap(self._path(), values.dtype, "w+", shape=values.shape, order="F")
        made[...] = values
        return made

    def every_other(self, values):
        twice = np.repeat(np.repeat(values, 2, axis=0), 2, axis=1)
        return self.memmap(twice)[::2, ::2]

    def hdf5(self, values):
        return h5py.File(self._path(), "w").create_dataset("a", data=values)

    def zarr(self, values):
        return zarr.create_array(self._path(), data=values, chunks=CHUNKS)

    def reader(self, values):
        return Reader(values)

    def memory(self, values):
        return values

    def open(self, kind, values, inline=False):
        """Values in a file, as an array of Dask's."""
        if kind == "xarray":
            path = self._path()
            encoding = {"a": {"chunks": CHUNKS}}
            whole = xr.Dataset({"a": (("x", "y"), values)})
            whole.to_zarr(path, consolidated=False, encoding=encoding)
            chunks = dict(zip("xy", CHUNKS, strict=True))
            return xr.open_zarr(path, chunks=chunks, consolidated=False).a.data
        made = getattr(self, kind)(values)
        return da.from_array(made, chunks=CHUNKS, inline_array=inline)


KINDS = ["memmap", "fortran", "every_other", "hdf5", "zarr", "reader", "xarray"]


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def table(seed, dtype="f8", shape=SHAPE):
    return np.random.default_rng(seed).integers(1, 100, shape).astype(dtype)


def check_rounds(files, kind, inline):
    """Rounds on files of a kind have their own values, at first and again."""
    before = []
    for seed in range(3):
        values = table(seed)
        x = files.open(kind, values, inline)
        before.append(((x + values[0]).mean(axis=0), (values + values[0]).mean(axis=0)))
        for made, want in before:
            np.testing.assert_allclose(made.compute(), want)


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_alike_files_are_planned_once(files, planned, kind, fuse, inline):
    with Scheduler("cpu:2", check=True, fuse=fuse, fuse_least=0):
        check_rounds(files, kind, inline)
    if kind != "reader" or not inline:  # such a task would keep its plan, and this the task
        assert len(planned) == 1


@pytest.mark.parametrize("kind", ["hdf5", "zarr", "reader"])  # Dask copies memory maps
def test_files_that_change_are_read_again(files, kind):
    values = table(0) if kind == "reader" else getattr(files, kind)(table(0))
    source = Reader(values) if kind == "reader" else values
    x = da.from_array(source, chunks=CHUNKS)
    with Scheduler("cpu:2", fuse_least=0):
        for n in range(3):
            values[...] = table(n)
            np.testing.assert_array_equal((x * 2).sum(axis=1).compute(), table(n).sum(axis=1) * 2)
            again = da.from_array(source, chunks=CHUNKS, name=False)
            np.testing.assert_array_equal((again * 2).sum(axis=1).compute(), 2 * table(n).sum(1))


def test_no_plan_keeps_a_file(files):
    with Scheduler("cpu:2", fuse_least=0):
        alive = []
        for n in range(3):
            source = Reader(table(n))
            alive.append(weakref.ref(source))
            (da.from_array(source, chunks=CHUNKS) + 1).sum().compute()
            del source
        gc.collect()
        assert [ref() is None for ref in alive] == [True] * 3


def branch(block, source):
    """What this does depends on what is in a file."""
    return block + 1 if source[0, 0] > 50 else block * 2


@pytest.mark.parametrize("fuse_least", [0, None])
@pytest.mark.parametrize("kind", ["memmap", "hdf5", "zarr", "reader"])
@pytest.mark.parametrize("way", ["argument", "delayed", "keyword"])
def test_functions_that_get_files_see_their_own(files, kind, way, fuse_least):
    options = {} if fuse_least is None else {"fuse_least": fuse_least}
    with Scheduler("cpu:2", **options):
        for n in range(4):
            values = table(n)
            values[0, 0] = 100 * (n % 2)
            source, x = getattr(files, kind)(values), da.from_array(table(9), chunks=CHUNKS)
            if way == "argument":
                y = x.map_blocks(branch, source, dtype="f8", meta=np.empty((0, 0)))
            elif way == "keyword":
                y = x.map_blocks(branch, source=source, dtype="f8", meta=np.empty((0, 0)))
            else:
                given = dask.delayed(source)
                y = x.map_blocks(branch, given, dtype="f8", meta=np.empty((0, 0)))
            want = branch(table(9), values)
            np.testing.assert_array_equal(y.compute(), want)
            np.testing.assert_array_equal((y + 1).sum(axis=0).compute(), (want + 1).sum(axis=0))


def test_what_is_stored_into_a_file_is_read_from_it(files):
    """Steps that write are no part of a template: they may write what others read."""
    with Scheduler("cpu:2", fuse_least=0):
        for n in range(3):
            source, target = files.memmap(table(n)), files.zarr(np.zeros(SHAPE))
            x = da.from_array(source, chunks=CHUNKS)
            stored = da.store(x + 1, target, return_stored=True, compute=n < 2)
            np.testing.assert_array_equal((stored * 2).compute(), (table(n) + 1) * 2)
            np.testing.assert_array_equal(target[...], table(n) + 1)


EXPRESSIONS = {
    "add": lambda x, y: x + y,
    "mean": lambda x, y: (x * 2 - y).mean(axis=0),
    "slices": lambda x, y: (x[1:, ::2] + y[:-1, 1::2]).sum(axis=1),
    "rows": lambda x, y: x[[0, 5, 3]] * y.max(),
    "product": lambda x, y: x @ y.T,
    "where": lambda x, y: da.where(x > y, x, 0),
    "blocks": lambda x, y: x.map_blocks(np.sort, axis=0, dtype=x.dtype) + y,
    "as it is": lambda x, y: da.concatenate([x, y]),
}


@st.composite
def histories(draw):
    """An expression, and rounds of two files of some kinds, dtypes and shapes."""
    kinds = st.sampled_from([*KINDS, "memory"])
    rounds, kind = [], (draw(kinds), draw(kinds))
    dtype, shape = "f8", SHAPE
    for _ in range(draw(st.integers(2, 4))):
        change = draw(st.sampled_from(["no", "no", "kind", "dtype", "shape"]))
        if change == "kind":
            kind = (draw(kinds), draw(kinds))
        elif change == "dtype":
            dtype = draw(st.sampled_from(["f8", "f4", "i4", ">i4", "u1"]))
        elif change == "shape":
            shape = draw(st.sampled_from([SHAPE, (12, 12), (9, 10)]))
        rounds.append((kind, dtype, shape, draw(st.booleans())))
    return draw(st.sampled_from(sorted(EXPRESSIONS))), rounds


def check_history(files, history, scheduler):
    """Each round has the values of its own files, and so has the one before, again."""
    name, rounds = history
    before = []
    with scheduler:
        for n, (kinds, dtype, shape, same) in enumerate(rounds):
            values = [table(2 * n + k, dtype, shape) for k in range(2)]
            x, y = map(files.open, kinds, values)
            if same:
                y, values[1] = x, values[0]
            due = EXPRESSIONS[name](*[da.from_array(v, chunks=CHUNKS) for v in values])
            before.append((EXPRESSIONS[name](x, y), due))
            for made, due in before[-2:]:
                got, want = made.compute(), due.compute(scheduler="sync")
                assert operator.eq(got.dtype, want.dtype)
                np.testing.assert_allclose(got, want, rtol=1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories(), st.booleans())
def test_any_history_of_files(tmp_path_factory, history, fuse):
    files = Files(tmp_path_factory.mktemp("files"))
    check_history(files, history, Scheduler("cpu:2", check=True, fuse=fuse, fuse_least=0))
