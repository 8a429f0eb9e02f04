"""Random arrays whose numbers depend on the seed and their positions, and on nothing else.

`default_rng` makes a generator with the methods of `dask.array.random.Generator`. The same
collection gives the same numbers on every scheduler and device, and in any chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from importlib import import_module
from itertools import accumulate, product
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array.backends import array_creation_dispatch
from dask.array.core import Array, broadcast_shapes, normalize_chunks
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from .codegen.random_block import CUPY_GENERATOR, Argument, RandomArray, draw_block
from .dask_private import random_source, random_states, wrap_random_methods
from .ir.random import key_of

__all__ = ["Generator", "Philox", "default_rng"]


class Philox:
    """A bit generator of numbers by position: it holds nothing but its seed.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.

    Parameters
    ----------
    seed
        None, a number, numbers, a `numpy.random.SeedSequence`, or another `Philox`.
    library
        The module whose arrays the blocks are, ``"numpy"`` or ``"cupy"``. None: that of Dask's
        `array.backend`.

    >>> Philox(5) == Philox(5), Philox(5) == Philox(6)
    (True, False)
    """

    def __init__(self, seed: Any = None, library: str | None = None):
        if isinstance(seed, Philox):
            seed, library = seed._seed_seq, library or seed.library
        elif not isinstance(seed, np.random.SeedSequence):
            seed = np.random.SeedSequence(seed)
        self._seed_seq: np.random.SeedSequence = seed  # the name that Dask looks for
        if library is None:
            library = "cupy" if array_creation_dispatch.backend == "cupy" else "numpy"
        if library not in ("numpy", "cupy"):
            raise ValueError(f"Philox: library={library!r}: use 'numpy' or 'cupy'")
        self.library = library

    @property
    def seed_seq(self) -> np.random.SeedSequence:
        """The `numpy.random.SeedSequence` that it was made with."""
        return self._seed_seq

    def spawn(self, n_children: int) -> list[Philox]:
        """Return bit generators that are independent of this one and of each other."""
        return [Philox(child, self.library) for child in self._seed_seq.spawn(n_children)]

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        seed = self._seed_seq
        entropy = np.atleast_1d(np.asarray(seed.entropy, dtype=object)).tolist()
        return "Philox", entropy, tuple(seed.spawn_key), seed.pool_size, self.library

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Philox):
            return NotImplemented
        return self.__dask_tokenize__() == other.__dask_tokenize__()

    def __hash__(self) -> int:
        return hash(self._seed_seq.spawn_key)

    def __repr__(self) -> str:
        return f"Philox({self._seed_seq.entropy!r}, spawn_key={self._seed_seq.spawn_key})"


class Generator(da.random.Generator):
    """Draws random arrays by position: `dask.array.random.Generator` with a `Philox`.

    Each method makes an array from a seed of its own, so that no two arrays have the same numbers.
    Methods and arguments are those of Dask's generator, but for `choice`. The continuous
    distributions also take `dtype`, float64 or float32.

    >>> x = Generator(Philox(7)).normal(10, 1, size=(4, 3), chunks=2)
    >>> y = Generator(Philox(7)).normal(10, 1, size=(4, 3), chunks=(1, 3))
    >>> bool((x == y).all().compute())
    True
    """

    def __init__(self, bit_generator: Philox):
        super().__init__(bit_generator)  # type: ignore[no-untyped-call]

    @property
    def bit_generator(self) -> Philox:
        """The `Philox` that gives each array its seed."""
        found: Philox = self._bit_generator
        return found

    def spawn(self, n_children: int) -> list[Generator]:
        """Return generators that are independent of this one and of each other."""
        return [Generator(bits) for bits in self.bit_generator.spawn(n_children)]

    def shuffle(self, x: Any, axis: int = 0) -> None:
        """Change the order of a NumPy array's parts in place, as `numpy.random.Generator` does.

        Dask's `permutation` orders by this. Raises TypeError for other arrays.
        """
        if not isinstance(x, np.ndarray):
            raise TypeError(f"Generator.shuffle: {type(x).__name__}: use permutation for others")
        (seed,) = self.bit_generator.seed_seq.spawn(1)
        np.random.Generator(np.random.Philox(seed)).shuffle(x, axis)

    def choice(self, *args: Any, **kwargs: Any) -> Array:
        """Raise `NotImplementedError`: there is no choice by position."""
        raise NotImplementedError(
            "Generator.choice is not supported by position; draw with NumPy's generator: "
            "da.random.default_rng(numpy.random.PCG64(seed)).choice(...), "
            'then .to_backend("cupy") what it gives, for GPUs'
        )

    def __repr__(self) -> str:
        return f"Generator({self.bit_generator!r})"


def default_rng(seed: Any = None) -> Generator:
    """Return a generator that draws by position, for blocks of Dask's `array.backend`.

    Parameters
    ----------
    seed
        None, a number, numbers, a `numpy.random.SeedSequence`, a `Philox`, or a `Generator`, which
        is returned as it is.

    >>> x = default_rng(1).random(1000, chunks=100)
    >>> threads, ours = (x.sum().compute(scheduler=s) for s in ("threads", "gpu"))
    >>> abs(float(threads - ours)) < 1e-9
    True
    """
    if isinstance(seed, Generator):
        return seed
    return Generator(seed if isinstance(seed, Philox) else Philox(seed))


# ---- collections

#: What methods of `RandomState` alone are in terms of `Generator`'s.
_OF_RANDOM_STATE = {"random_sample", "randint", "random_integers", "tomaxint"}
#: Of methods whose draws are vectors, which parameter is a vector of that length.
_VECTOR_PARAMETERS = {"multinomial": 1, "multivariate_hypergeometric": 0}


def _in_terms_of_generator(
    method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return method and arguments of a `Generator` for those of a `RandomState`."""
    named = dict(kwargs)
    if method == "random_sample":
        return "random", tuple(args), named
    if method == "tomaxint":
        return "integers", (0, 2**63), named
    if method == "randint":
        return "integers", tuple(args), {**named, "dtype": np.dtype(named.get("dtype", int))}
    low, high = (*args, None)[:2]
    if high is None:
        low, high = 1, low
    return "integers", (low, high), {**named, "endpoint": True}


def _key_of(rng: Any, source: Any) -> int:
    """Return the key of the next array that a generator draws."""
    made = source.seed_seq.spawn(1) if isinstance(source, Philox) else random_states(rng, 1)
    return key_of(made[0])


def random_array(
    key: int,
    library: str,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: Any = None,
    chunks: Any = "auto",
    extra_chunks: tuple[Any, ...] = (),
) -> Array:
    """Return the array that a method of `Generator` or `RandomState` draws by position.

    Raises what NumPy's method raises for wrong arguments, and NotImplementedError for those that
    `library` has no way to draw.
    """
    method, named = name, dict(kwargs)
    if name in _OF_RANDOM_STATE:
        method, args, named = _in_terms_of_generator(name, args, named)
    if name in _VECTOR_PARAMETERS:  # each draw is a vector, which Dask says of one alone
        n = _VECTOR_PARAMETERS[name]
        vector = args[n].tolist() if isinstance(args[n], np.ndarray) else args[n]
        args, extra_chunks = (*args[:n], vector, *args[n + 1 :]), ((len(vector),),)
    if named.get("out") is None:
        named.pop("out", None)
    elif "out" in named:
        raise NotImplementedError(f"Generator.{name} cannot write to out=: leave it out")
    if size is not None and not isinstance(size, (tuple, list)):
        size = (size,)
    given = [a for a in (*args, *named.values()) if isinstance(a, (np.ndarray, Array))]
    shape = broadcast_shapes(*[a.shape for a in given], *([] if size is None else [size]))
    shape = tuple([int(n) for n in shape])
    grid = normalize_chunks(chunks, shape, dtype=named.get("dtype", np.float64))
    arrays: list[Array] = []

    def stands_for(value: Any) -> Any:
        if isinstance(value, (np.ndarray, Array)):
            whole = da.broadcast_to(da.asarray(value), shape, chunks=None)
            arrays.append(whole.rechunk(grid))
            return Argument(len(arrays) - 1)
        return tuple(value) if isinstance(value, list) else value

    array = RandomArray(
        method, key, shape, tuple([stands_for(a) for a in args]),
        tuple([(k, stands_for(a)) for k, a in named.items()]), library,
    )  # fmt: skip
    token = tokenize(array, grid, *[a.name for a in arrays])
    label = f"{name}-{token}"
    starts = [[0, *accumulate(axis)][:-1] for axis in grid]
    tail = (0,) * len(extra_chunks)
    tasks: dict[Any, Task] = {}
    for index, start, sides in zip(
        product(*[range(len(axis)) for axis in grid]), product(*starts), product(*grid), strict=True
    ):
        block = (label, *index, *tail)
        parts = [TaskRef((a.name, *index)) for a in arrays]
        tasks[block] = Task(block, draw_block, array, start, sides, *parts)
    meta = import_module(library).empty((0,) * (len(grid) + len(tail)), _dtype_of(array, arrays))
    graph = HighLevelGraph.from_collections(label, tasks, arrays)  # type: ignore[arg-type]
    return Array(graph, label, grid + extra_chunks, meta=meta)


def _dtype_of(array: RandomArray, arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return the dtype of what is drawn; raises errors for arguments that make no sense."""
    expr = array.expression((0,) * len(array.shape), 0)
    if expr is not None:
        return expr.dtype
    empty = [np.empty(0, a.dtype) for a in arrays]
    size = None if arrays else (0,) * len(array.shape)
    generator: Any = np.random.default_rng(0)
    if array.library != "numpy":
        generator = import_module(CUPY_GENERATOR).DeviceGenerator(
            np.random.SeedSequence(0), "numpy"
        )
    found: np.dtype[Any] = array.call(generator, size, empty).dtype
    return found


def _wrap(original: Any) -> Any:
    """Return Dask's function that makes random arrays, with those by position made here."""

    @wraps(original)
    def wrap_func(
        rng: Any, funcname: str, *args: Any, size: Any = None, chunks: Any = "auto",
        extra_chunks: tuple[Any, ...] = (), **kwargs: Any,
    ) -> Any:  # fmt: skip
        source = random_source(rng)
        library = source.library if isinstance(source, Philox) else None
        if library is None:  # a class, where the user named none
            library = getattr(source, "by_position", None)
        if library is None:
            return original(
                rng, funcname, *args, size=size, chunks=chunks, extra_chunks=extra_chunks, **kwargs
            )
        return random_array(
            _key_of(rng, source), library, funcname, args, kwargs, size, chunks, extra_chunks
        )

    return wrap_func


wrap_random_methods(_wrap)
