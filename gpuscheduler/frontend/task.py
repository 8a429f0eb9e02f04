"""The interface of this package's own kinds of tasks, and its defaults for Dask's tasks.

Dask's tasks are called with the values that they read, by key; so are ours. The functions here take
tasks of either origin, and give the default for Dask's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from typing_extensions import Self

Key = Any
Values = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class KernelDescription:
    """What one kernel of a task does."""

    #: Bytes that it reads and writes.
    nbytes: int
    #: Arithmetic operations.
    operations: int
    #: Returns its CUDA text, or a comment that says why it has none.
    source: Callable[[], str]


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """What a task is, for people and reports."""

    #: In a few words: "kernel", "batch of 16 kernels", "call of add".
    words: str
    #: What its kernels do; empty for tasks without kernels.
    kernels: tuple[KernelDescription, ...] = ()


class Launcher(Protocol):
    """How a device computes the kinds of tasks that launch something."""

    def run(self, task: Any, values: Values) -> Any:
        """Compute one kernel task."""

    def run_optional(self, task: Any, values: Values) -> Any:
        """Compute a task whose value may be nothing."""

    def run_batch(self, task: Any, values: Values) -> Any:
        """Compute alike kernel tasks at once."""

    def compress(self, task: Any, values: Values) -> Any:
        """Compute what a mask selects."""

    def multiply(self, task: Any, values: Values) -> Any:
        """Compute a sum of products of matrices."""

    def call_library(self, task: Any, values: Values) -> Any:
        """Call a function of a library of GPUs."""

    def call_portable(self, task: Any, values: Values) -> Any:
        """Call a task of the array library with arrays of the device."""


class OwnTask:
    """A task that is not Dask's. Each kind says only in what it differs from these defaults."""

    __slots__ = ()

    #: Whether GPUs compute it by launches alone: nothing waits, and no code of the user runs.
    launches_only: ClassVar[bool] = False
    #: Whether these launches are of kernels that this package has generated.
    kernels_only: ClassVar[bool] = False
    #: Whether the host may compute it where CuPy refuses to.
    runs_on_host: ClassVar[bool] = True

    #: Whether only the host computes it, with NumPy's values: `call` in place of calling it.
    host_only: ClassVar[bool] = False

    #: Whether its value, made on the host, goes to a device.
    sends: bool
    #: The key of its value; None where it is a part of a task that has one.
    key: Key

    def __call__(self, values: Values) -> Any:
        """Return the value, given the values of what it reads by key."""
        raise NotImplementedError

    # ---- what it is made of

    @property
    def parts(self) -> tuple[Any, ...]:
        """Tasks, functions and arguments in it: all that may hold data."""
        raise NotImplementedError

    def with_parts(self, *parts: Any) -> Self:
        """Return a task of its kind with other parts, in the order of `parts`."""
        raise NotImplementedError

    @property
    def sequence(self) -> Sequence[tuple[Key, Any]]:
        """Tasks that it runs one after the other, each with the key of its value."""
        return ((self.key, self),)

    @property
    def members(self) -> Sequence[Any]:
        """Tasks whose values it returns as a tuple; empty where its value is its own."""
        return ()

    @property
    def original(self) -> Any:
        """The task before fusion; itself where it was not fused."""
        return self

    def with_originals(self, change: Callable[[Any], Any]) -> Self:
        """Return the same task with other tasks behind its kernels."""
        return self

    @property
    def data(self) -> tuple[Any, ...]:
        """Values of one run that it holds beside its parts."""
        return ()

    def with_data(self, data: tuple[Any, ...]) -> Self:
        """Return the same task for another run's data; it remembers nothing of the last run."""
        return self

    # ---- what it does

    @property
    def kernels(self) -> tuple[Any, ...]:
        """The kernel tasks that it consists of."""
        return ()

    @property
    def array(self) -> tuple[tuple[int, ...], Any] | None:
        """Shape and dtype of a value that it can write in place; None where it cannot."""
        return None

    @property
    def touched_bytes(self) -> int | None:
        """Bytes that it reads and writes; None where only the sizes of values tell."""
        return None

    @property
    def on_device(self) -> bool:
        """Whether GPUs make the value, where there are GPUs, whatever the task reads."""
        return False

    @property
    def work_identity(self) -> Any:
        """An object that tasks which do the same have in common."""
        return type(self)

    def knows_inputs(self) -> bool:
        """Whether a device knows where the inputs are, without being handed them."""
        return False

    def launch(self, launcher: Launcher, values: Values) -> Any:
        """Compute the value on a device."""
        return self(values)

    def call(self, values: Values, bring: Callable[[Any], Any]) -> Any:
        """Compute the value on the host; `bring` copies a device's array there."""
        raise NotImplementedError

    def describe(self) -> TaskDescription:
        """Say what the task is, and what its kernels do."""
        raise NotImplementedError


class WrappingTask(OwnTask):
    """A task that computes another one: elsewhere, or with values of other libraries."""

    __slots__ = ()
    #: The other task.
    task: Any

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.task,)

    @property
    def original(self) -> Any:
        return original_of(self.task)

    @property
    def work_identity(self) -> Any:
        return work_identity_of(self.task)

    def describe(self) -> TaskDescription:
        return describe(self.task)


# ---- of tasks of either origin


def sequence_of(task: Any) -> Sequence[tuple[Key, Any]]:
    """Return the tasks that a task runs one after the other, with the keys of their values."""
    return task.sequence if isinstance(task, OwnTask) else ((task.key, task),)


def members_of(task: Any) -> Sequence[Any]:
    """Return the tasks whose values a task returns as a tuple; empty for most."""
    return task.members if isinstance(task, OwnTask) else ()


def kernels_of(task: Any) -> tuple[Any, ...]:
    """Return the kernel tasks that a task consists of; empty for tasks without kernels."""
    return task.kernels if isinstance(task, OwnTask) else ()


def original_of(task: Any) -> Any:
    """Return the task before fusion; itself where it was not fused."""
    return task.original if isinstance(task, OwnTask) else task


def bytes_touched_by(task: Any) -> int | None:
    """Return the bytes that a task reads and writes; None where only sizes of values tell."""
    return task.touched_bytes if isinstance(task, OwnTask) else None


def launches_only(task: Any) -> bool:
    """Return whether GPUs compute a task by launches alone."""
    return isinstance(task, OwnTask) and task.launches_only


def kernels_only(task: Any) -> bool:
    """Return whether GPUs compute a task by launches of generated kernels alone."""
    return isinstance(task, OwnTask) and task.kernels_only


def host_only(task: Any) -> bool:
    """Return whether only the host computes a task, with NumPy's values."""
    return isinstance(task, OwnTask) and task.host_only


def work_identity_of(task: Any) -> Any:
    """Return an object that tasks which do the same have in common."""
    if isinstance(task, OwnTask):
        return task.work_identity
    function = getattr(task, "func", None)
    return type(task) if function is None else function


def describe(task: Any) -> TaskDescription:
    """Say what a task is, and what its kernels do.

    >>> from operator import add
    >>> from dask._task_spec import Task
    >>> describe(Task("x", add, 1, 2)).words
    'call of add'
    """
    if isinstance(task, OwnTask):
        return task.describe()
    function = getattr(task, "func", None)
    if function is None:
        return TaskDescription("value")
    return TaskDescription(f"call of {function_name(function)}")


def function_name(function: Any) -> str:
    """Return a function's name for people: of partial functions, that of what they call."""
    while hasattr(function, "func") and not hasattr(function, "__name__"):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
