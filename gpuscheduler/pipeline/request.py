"""What a caller asks of `get`: Dask's arguments, completed from Dask's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import dask.multiprocessing
import numpy as np
from dask import config
from dask.callbacks import local_callbacks

from ..runtime.dask_callbacks import DaskCallbacks
from ..runtime.pools import CallersPool
from .cache import build_expression


@dataclass(frozen=True, slots=True, eq=False)
class ComputeRequest:
    """The arguments of one `get` or `persist`."""

    dsk: Any
    keys: Any
    keep: bool  # whether results stay on the devices, as persisted chunks
    cache: MutableMapping[Any, Any] | None = None  # values by key, to read and to fill
    callbacks: Iterable[Any] | None = None
    num_workers: int | None = None
    pool: Any = None  # the caller's threads or processes, in place of the scheduler's
    rerun_exceptions_locally: bool | None = None

    @classmethod
    def read(cls, dsk: Any, keys: Any, keep: bool, arguments: dict[str, Any]) -> ComputeRequest:
        """Take the known arguments; ask Dask's configuration for those that are None."""
        known = {name: arguments.get(name) for name in _CONFIGURED}
        for name, value in known.items():
            if value is None:
                known[name] = config.get(name, None)
        if (n := known["num_workers"]) is not None and not _is_count(n):
            raise ValueError(f"num_workers={n!r}: use a whole number, or None for every device")
        return cls(dsk, keys, keep, callbacks=arguments.get("callbacks"), **known)

    def resolve_pool(self) -> ComputeRequest:
        """Wrap the caller's pool; one of this package becomes a number of workers.

        A task of a run would otherwise wait for the very thread that it runs in.
        """
        if self.pool is None:
            return self
        pool = CallersPool(self.pool, self.num_workers)
        if pool.is_ours():
            return replace(self, num_workers=pool._max_workers, pool=None)
        return replace(self, pool=pool)

    @contextmanager
    def run_callbacks(self) -> Iterator[DaskCallbacks | None]:
        """Yield Dask's active callbacks, if any, and tell them at the end how the run went."""
        with local_callbacks(self.callbacks) as active:
            callbacks = DaskCallbacks(active) if active else None
            try:
                yield callbacks
            except BaseException:
                if callbacks:
                    callbacks.finish(failed=True)
                raise
            if callbacks:
                callbacks.finish(failed=False)

    def compute_by_processes(self) -> Any:
        """Compute with `dask.multiprocessing.get` and the caller's pool, on no device.

        Values are pickled on their way to the processes and back.
        """
        pool: CallersPool = self.pool
        with pool.watch():
            return dask.multiprocessing.get(
                build_expression(self.dsk), self.keys, pool=pool, cache=self.cache,
                callbacks=self.callbacks, rerun_exceptions_locally=self.rerun_exceptions_locally,
            )  # fmt: skip


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and bool(value >= 0)


#: Arguments that Dask's configuration may have.
_CONFIGURED = ("cache", "num_workers", "pool", "rerun_exceptions_locally")
