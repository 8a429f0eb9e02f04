"""Tasks that a library of GPUs computes: sorts, quantiles, FFTs and filters of NumPy's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..frontend.task import Launcher, OwnTask, TaskDescription, WrappingTask
from .source import LibraryInputs
from .task import Key, match_array

Values = dict[Key, Any]


class LibraryTask(OwnTask):
    """A task that calls a function of NumPy's or SciPy's, which a library of GPUs has, too.

    `on_host` is the same task for NumPy's arrays. It runs where the library refuses, or where
    values are not as foreseen.
    """

    __slots__ = ("inputs", "key", "on_host")

    def __init__(self, key: Key, inputs: LibraryInputs, on_host: Any):
        self.key, self.inputs = key, inputs
        #: A `HostTask`.
        self.on_host = on_host

    def __call__(self, values: Values) -> Any:
        return self.on_host(values)

    @property
    def call(self) -> Any:
        """The call, without the names of what it reads: a `LibraryCall`."""
        return self.inputs.call

    def arrays(self, values: Values, copy: type[Any]) -> list[Any] | None:
        """Return the arrays that the call's arguments are views of; None if not as foreseen."""
        pairs = zip(self.inputs.names, self.inputs.expects, strict=True)
        found = [match_array(values[name], foreseen, copy) for name, foreseen in pairs]
        return None if any(a is None for a in found) else found

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.on_host,)

    def with_parts(self, *parts: Any) -> LibraryTask:
        return LibraryTask(self.key, self.inputs, *parts)

    @property
    def original(self) -> Any:
        return self.on_host.original

    @property
    def work_identity(self) -> Any:
        return self.call

    @property
    def touched_bytes(self) -> int:
        made = math.prod(self.call.shape) * self.call.dtype.itemsize
        return int(sum([e.nbytes for e in self.inputs.expects]) + made)

    @property
    def traffic(self) -> int:
        """Bytes that the library reads and makes."""
        return self.touched_bytes

    @property
    def on_device(self) -> bool:
        return True

    def launch(self, launcher: Launcher, values: Values) -> Any:
        return launcher.call_library(self, values)

    def call_on_host(self, values: Values, bring: Callable[[Any], Any]) -> Any:
        """Call NumPy's or SciPy's own function; `bring` copies an array of a device to the host."""
        return self.on_host.call(values, bring)

    def describe(self) -> TaskDescription:
        return TaskDescription(f"{self.call.name} of a GPU")

    def __repr__(self) -> str:
        return f"<LibraryTask {self.key!r}: {self.call.name}>"


class NumpyTask(WrappingTask):
    """A task that is called with NumPy's arrays, wherever what it reads lies."""

    __slots__ = ("key", "task")

    def __init__(self, task: Any):
        self.task, self.key = task, getattr(task, "key", None)

    def __call__(self, values: Values) -> Any:
        return self.task.call(values, to_numpy)

    def with_parts(self, *parts: Any) -> NumpyTask:
        return NumpyTask(*parts)


def to_numpy(value: Any) -> Any:
    """Copy an array of CuPy's to the host; other values stay as they are."""
    if type(value).__module__.partition(".")[0] == "cupy" and hasattr(value, "get"):
        return value.get()
    return value
