"""Thread and process pools that callers hand to a computation.

Of `concurrent.futures` it reads `_max_workers`, as Dask does, and `_threads` and
`_executor_manager_thread`; of `multiprocessing.pool` `_pool`, `_result_handler` and
`_maxtasksperchild` (seen in Python 3.10 to 3.14). Runs nothing by itself.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing.pool
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, InvalidStateError
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakKeyDictionary

from dask.local import SynchronousExecutor

from ..cpython_private import (
    executor_size,
    executor_threads,
    pool_is_open,
    pool_processes,
    pool_recycles,
)


class _Nobodys:
    """A placeholder for a class of pools that this Python does not have."""


#: Seconds between two checks of whether a pool still works on its tasks.
PATIENCE = 0.5
#: Classes of pools, subclasses first, and whether they run tasks in this process.
KINDS: tuple[tuple[type, bool], ...] = (
    (multiprocessing.pool.ThreadPool, True),
    (multiprocessing.pool.Pool, False),
    (concurrent.futures.ProcessPoolExecutor, False),
    (getattr(concurrent.futures, "InterpreterPoolExecutor", _Nobodys), False),
    (concurrent.futures.ThreadPoolExecutor, True),
    (SynchronousExecutor, True),
)

#: The pools whose threads run the calling code.
inside: ContextVar[tuple[Any, ...]] = ContextVar("inside", default=())


class CallersPool(Executor):
    """A pool of the caller's, and the tasks of this computation that it has not done yet.

    >>> with concurrent.futures.ThreadPoolExecutor(2) as threads:
    ...     pool = CallersPool(threads)
    ...     pool.submit(abs, -3).result(), pool.runs_here(), pool
    (3, True, <CallersPool ThreadPoolExecutor of 2>)
    """

    def __init__(self, pool: Any, num_workers: int | None = None):
        self.pool = pool
        self._given: set[Future[Any]] = set()
        self._processes: set[Any] = set()  # of multiprocessing, that have been seen
        workers = executor_size(pool)
        if isinstance(pool, multiprocessing.pool.Pool):
            workers = len(pool_processes(pool))
        elif not callable(getattr(pool, "submit", None)):
            raise TypeError(
                f"pool={pool!r} is no pool: give an executor of concurrent.futures or a pool of "
                "multiprocessing, or None for the scheduler's own threads"
            )
        if not isinstance(workers, int) or workers < 1:
            workers = num_workers or os.cpu_count() or 1
        self._max_workers = workers  # where Dask looks for it

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a task to the pool, of either module, and return its future."""
        if isinstance(self.pool, multiprocessing.pool.Pool):
            future: Future[Any] = Future()
            self._processes.update(pool_processes(self.pool))
            done = partial(_settle, future.set_result)
            failed = partial(_settle, future.set_exception)
            try:
                self.pool.apply_async(fn, args, kwargs, done, failed)
            except ValueError:  # the pool does not run any more
                if why := self.why_broken():  # ... and has left what it was given before
                    raise BrokenExecutor(why) from None
                raise
        else:
            future = self.pool.submit(fn, *args, **kwargs)
        self._given.add(future)
        future.add_done_callback(self._given.discard)
        return future

    def is_ours(self) -> bool:
        """Whether the calling code is itself a task that this pool runs."""
        return any(pool is self.pool for pool in inside.get())

    def runs_here(self) -> bool:
        """Whether the pool runs tasks in this process, where all memory is shared."""
        for kind, here in KINDS:
            if isinstance(self.pool, kind):
                return here
        try:
            known = _asked.get(self.pool)
        except TypeError:  # it cannot be a key, or not be watched
            known = None
        if known is None:
            known = self._has_answered()
            with suppress(TypeError):
                _asked[self.pool] = known
        return known

    def _has_answered(self) -> bool:
        question = _Question()
        future = self.submit(question)
        while True:
            try:
                future.result(PATIENCE)
            except NotYet:
                if future.done():  # it is the pool's own answer
                    raise
                if why := self.why_broken():
                    raise BrokenExecutor(why) from None
            else:
                return question.here

    def why_broken(self) -> str:
        """Say why the pool will never do its tasks; "" where nothing is known to be wrong."""
        if not self._given:
            return ""
        pool, why = self.pool, ""
        if isinstance(pool, multiprocessing.pool.Pool):
            recycled = pool_recycles(pool)
            self._processes.update(pool_processes(pool))
            ends = [p.exitcode for p in self._processes if isinstance(p, BaseProcess)]
            ends = [e for e in ends if e is not None and not (e == 0 and recycled)]
            if not pool_is_open(pool):
                why = "it was terminated, or made in another process"
            elif ends:
                why = f"a process of it has ended with exit code {ends[0]}"
        else:
            threads = executor_threads(pool)
            if threads and not any(t.is_alive() for t in threads):
                why = "its threads have ended, or it was made in another process"
        return f"{self._name()} does nothing any more: {why}" if why and self._given else ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the pool by a thread, which fails tasks that the pool will never do."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(PATIENCE):
                if why := self.why_broken():
                    for future in list(self._given):
                        _settle(future.set_exception, BrokenExecutor(why))

        thread = threading.Thread(target=watch, name="gpuscheduler-pool", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _name(self) -> str:
        return f"pool={type(self.pool).__name__} of {self._max_workers}"

    def __repr__(self) -> str:
        return f"<CallersPool {type(self.pool).__name__} of {self._max_workers}>"


class _Question:
    """A task that finds out whether a pool runs in this process: it is pickled for others."""

    def __init__(self) -> None:
        self.here = False

    def __call__(self) -> None:
        self.here = True

    def __reduce__(self) -> Any:
        return partial, (bool,)


_asked: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _settle(tell: Callable[[Any], None], answer: Any) -> None:
    """Tell a future, unless somebody has told it already."""
    with suppress(InvalidStateError):
        tell(answer)
