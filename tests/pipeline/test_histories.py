"""What somebody may do with a few arrays in an afternoon, in any order.

Compute them again and again, persist them, write to their inputs and results, and change the
functions that make them. Each value is compared with NumPy's of that moment.
"""

import gc
import random
from itertools import count, product

import dask
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.pipeline import compile

SIDE = 12
CHUNKS = [(4, 4), (6, 6), (12, 4), (4, 12), (5, 7)]


class History:
    """Arrays, and for each what gives NumPy's answer. `array` brings values to where the arrays of
    graphs are, `host` fetches them; `elsewhere` is another scheduler than that of the history."""

    def __init__(self, seed, array=np.copy, host=np.asarray, elsewhere=None):
        self.rng, self.array, self.host = random.Random(seed), array, host
        self.elsewhere = elsewhere
        numbers = np.random.default_rng(seed)
        self.sources = [self.both(numbers.random((SIDE, SIDE))) for _ in range(3)]
        self.weights = self.both(numbers.random(SIDE))
        self.space, self.changes, self.names = {"K": 2.0}, [], count()
        exec("def scaled(b): return b * K + 1", self.space)
        self.pairs = [self.source(*s) for s in self.sources]

    def both(self, values):
        return self.array(values), values.copy()

    def source(self, ours, theirs):
        """Its blocks are parts of the array itself: `from_array` would copy NumPy's."""
        name, chunks = f"source-{next(self.names)}", self.rng.choice(CHUNKS)
        chunks = da.core.normalize_chunks(chunks, ours.shape)
        slices = da.core.slices_from_chunks(chunks)
        keys = product([name], *map(range, map(len, chunks)))
        blocks = {k: ours[s] for k, s in zip(keys, slices, strict=True)}
        return da.Array(blocks, name, chunks, meta=ours[:0, :0]), lambda: theirs

    def function(self):
        """One with a variable around it, and a default."""
        k = 2.0

        def change():
            nonlocal k
            if self.rng.random() < 0.5:
                k = float(self.rng.randrange(4))
            else:
                f.__defaults__ = (self.rng.randrange(4),)

        def f(b, n=1):
            return b * k + n

        self.changes = [*self.changes[-4:], change]
        return f

    def operation(self):
        """What makes a pair of two."""
        f, scaled, (w, v) = self.function(), self.space["scaled"], self.weights
        k, axis = self.rng.randrange(3), self.rng.randrange(2)
        chunks = self.rng.choice([*CHUNKS, -1])

        def blocks(ours, theirs=None):
            numpys = theirs or ours
            return lambda x, y, a, b: (x.map_blocks(ours, dtype="f8"), lambda: numpys(a()))

        return self.rng.choice([
            blocks(f),
            blocks(f),
            blocks(scaled),
            blocks(lambda b: f(b) - scaled(b)),
            blocks(lambda b: b * w[k] + w[3], lambda b: b * v[k] + v[3]),
            lambda x, y, a, b: (x + y, lambda: a() + b()),
            lambda x, y, a, b: ((x - y).T * 2 + k, lambda: (a() - b()).T * 2 + k),
            lambda x, y, a, b: (x + y.mean(axis=axis), lambda: a() + b().mean(axis=axis)),
            lambda x, y, a, b: (da.exp(-(x**2)), lambda: np.exp(-(a() ** 2))),
            lambda x, y, a, b: (da.cumsum(x, axis) / 9, lambda: np.cumsum(a(), axis) / 9),
            lambda x, y, a, b: (x + x @ y[:, 0] / 9, lambda: a() + a() @ b()[:, 0] / 9),
            lambda x, y, a, b: (x.rechunk(chunks), a),
            lambda x, y, a, b: (
                da.concatenate([x[1:], y[:1]]), lambda: np.concatenate([a()[1:], b()[:1]])
            ),
        ])  # fmt: skip

    def compared(self, x, now):
        got = x.compute()
        np.testing.assert_allclose(self.host(got), now(), rtol=1e-7, atol=1e-9)
        return got

    # ---- what may be done

    def step(self):
        act = self.rng.choice([
            self.operate, self.operate, self.compute, self.compute, self.persist, self.alike,
            self.rebuild, self.write_source, self.write_result, self.change, self.change, self.drop,
        ])  # fmt: skip
        act(self.rng.randrange(len(self.pairs)), self.rng.choice(self.pairs))

    def operate(self, n, other):
        (x, a), (y, b) = self.pairs[n], other
        self.pairs.append(self.operation()(x, y, a, b))

    def alike(self, n, other):
        operation = self.operation()
        some = self.rng.sample(self.pairs, 2)
        same = [self.kept(*self.pairs[n], other) for _ in range(3)]  # persisted in several ways
        for x, a in some + same + same[:1]:
            y, now = operation(x, other[0], a, other[1])
            for _ in range(self.rng.choice([1, 3])):
                self.compared(y, now)

    def rebuild(self, n, other):
        """The same on the very same arrays, several times; things may change in between."""
        x, now = self.kept(*self.pairs[n], other)
        operation = self.operation()
        for _ in range(5):
            y, then = operation(x, other[0], now, other[1])
            self.compared(y, then)
            if self.rng.random() < 0.4:
                self.rng.choice([self.changes[-1], lambda: self.write_source(n, other)])()
                self.compared(y, then)

    def compute(self, n, other):
        for _ in range(3):
            self.compared(*self.pairs[n])

    def persist(self, n, other):
        self.pairs[n] = self.kept(*self.pairs[n], other)

    def kept(self, x, now, other):
        """Under another name: two values of one name would be one to Dask."""
        value = now().copy()
        x = x.map_blocks(lambda b: b + 0, dtype="f8", token=f"kept-{next(self.names)}")
        way = self.rng.choice(["with another", "alone", "as arrays", "elsewhere"])
        if way == "with another":
            (x, _) = dask.persist(x, other[0].sum())
        elif way == "elsewhere" and self.elsewhere is not None:
            x = x.persist(scheduler=self.elsewhere.get)
        else:
            x = x.persist()
        if way == "as arrays":  # each on the device where it is
            x = x.persist(scheduler="sync")
        return x, lambda: value

    def write_source(self, n, other):
        row, factor = self.rng.randrange(SIDE), self.rng.random()
        for pair in (self.sources[n % 3], self.weights):
            for array in pair:
                array[row] *= factor

    def write_result(self, n, other):
        self.compared(*self.pairs[n])[...] = -77
        self.compared(*self.pairs[n])
        self.compared(*other)

    def change(self, n, other):
        latest = self.pairs[-3:]
        for pair in latest:
            self.compared(*pair)
        self.space["K"] = float(n)
        for change in self.changes:
            change()
        for pair in latest:
            self.compared(*pair)

    def drop(self, n, other):
        if n > 2:
            del self.pairs[n]
            gc.collect(0)


def options(seed):
    rng = random.Random(seed)
    limit = rng.choice([None, 8_000, 16_000])  # a block is 1152 bytes at most
    out = {"memory_limit": limit, "fuse": rng.random() < 0.8, "check": rng.random() < 0.3}
    return {**out, "timeline": rng.random() < 0.3}  # which follows no tape


@pytest.mark.parametrize("seed", range(12))
def test_any_history(seed, monkeypatch):
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    some = options(seed)
    elsewhere = Scheduler("cpu:1", fuse_least=0, memory_limit=some["memory_limit"])
    history = History(seed, elsewhere=elsewhere)
    with Scheduler(f"cpu:{1 + seed % 3}", fuse_least=0, **some):
        for step in range(40):
            history.step()
            if step == 30:
                elsewhere.close()  # what it has persisted stays
                history.elsewhere = None
        for pair in history.pairs:
            history.compared(*pair)
