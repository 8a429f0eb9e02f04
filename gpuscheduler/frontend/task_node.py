"""What is known of one task of a graph, and views of one fact for all tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any, TypeVar

from dask._task_spec import DataNode

Key = Any
Task = Callable[[dict[Key, Any]], Any]
T = TypeVar("T")

NO_CONSTANTS: Mapping[Key, Any] = MappingProxyType({})


class TaskNode:
    """A task of a graph, and all that is known of it before the run.

    A fact takes memory only in nodes in which it is not the default.
    """

    #: The task: called with the values that it reads, by name.
    task: Task
    #: The tasks that it reads, by their own keys.
    needs: tuple[Key, ...]
    #: The names by which the task knows these.
    names: tuple[Key, ...]
    #: Values of the graph that it reads as they are, by name.
    constants: Mapping[Key, Any] = NO_CONSTANTS
    #: Where in the value of each task in `needs` lies what it reads; empty where it reads all.
    picks: tuple[tuple[int, ...], ...] = ()
    #: The device on which it has to run: a number, or a rule that gives one.
    pin: Any = None
    #: Bytes of its value, where the collection knows them.
    size: int | None = None
    #: What the collection says of its value.
    block: Any = None
    #: Whether it reads a file or writes one.
    aside: bool = False
    #: Whether its file can be read a second time: no task writes to it.
    again: bool = False
    #: Whether it sends an array of the host, or a block of a file, to a device at once.
    sent: bool = False
    #: Whether it does nothing but store a block.
    stores: bool = False
    #: Whether it stores a block to an array on a GPU, or among other operations.
    written: bool = False
    #: Whether its value is the array on a GPU that it has written to.
    lent: bool = False
    #: Why it is no kernel.
    why: str | None = None
    #: Operations, if it multiplies or factors matrices.
    operations: int = 0
    #: The matrices, if it is a product of two and nothing else.
    product: Any = None
    #: The call that it is, if it is one of a function that a library of GPUs has, and nothing else.
    library: Any = None

    def __init__(
        self,
        task: Task,
        needs: tuple[Key, ...] = (),
        names: tuple[Key, ...] | None = None,
        constants: Mapping[Key, Any] = NO_CONSTANTS,
    ):
        self.task, self.needs = task, needs
        self.names = needs if names is None else names
        if constants:
            self.constants = constants

    @property
    def is_data(self) -> bool:
        """Whether it is a value, and nothing has to run for it."""
        return isinstance(self.task, DataNode)

    def copy(self) -> TaskNode:
        """Return another node that says the same."""
        out = object.__new__(TaskNode)
        out.__dict__.update(self.__dict__)
        return out

    def facts(self) -> dict[str, Any]:
        """Return what it says beside its task and inputs, by name."""
        return {k: v for k, v in self.__dict__.items() if k not in ("task", "needs", "names")}

    def __repr__(self) -> str:
        return f"<Node of {self.task!r}>"


class FactView(Mapping[Key, T]):
    """One fact of all nodes that have it, by key; read only."""

    __slots__ = ("_default", "_fact", "_inner", "_nodes")

    def __init__(
        self, nodes: Mapping[Key, TaskNode], fact: str, inner: Mapping[Key, T] | None = None
    ):
        self._nodes, self._fact = nodes, fact
        self._default = getattr(TaskNode, fact, NO_CONSTANTS)
        #: The same fact of values that are inside tasks.
        self._inner: Mapping[Key, T] = inner or {}

    def __getitem__(self, key: Key) -> T:
        node = self._nodes.get(key)
        if node is None:
            return self._inner[key]
        value = getattr(node, self._fact)
        if value is self._default:
            raise KeyError(key)
        return value  # type: ignore[no-any-return]

    def get(self, key: Key, default: Any = None) -> Any:
        node = self._nodes.get(key)
        if node is None:
            return self._inner.get(key, default)
        value = getattr(node, self._fact)
        return default if value is self._default else value

    def __contains__(self, key: object) -> bool:
        node = self._nodes.get(key)
        if node is None:
            return key in self._inner
        return getattr(node, self._fact) is not self._default

    def __iter__(self) -> Iterator[Key]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __bool__(self) -> bool:
        fact, default = self._fact, self._default
        found = (getattr(node, fact) is not default for node in self._nodes.values())
        return bool(self._inner) or any(found)

    def as_dict(self) -> dict[Key, T]:
        """Return the facts as a dictionary of their own."""
        fact, default = self._fact, self._default
        own = {
            key: value
            for key, node in self._nodes.items()
            if (value := getattr(node, fact)) is not default
        }
        return {**own, **self._inner}

    def __repr__(self) -> str:
        return repr(self.as_dict())


def used_facts(nodes: Iterable[TaskNode]) -> set[str]:
    """Return the names of facts that are not the default in some node.

    Graphs without arrays have few: then the others are not looked up in every node.
    """
    used: set[str] = set()
    for node in nodes:
        said = node.__dict__
        if len(said) > 3:
            used.update(said)
    return used


class FlagView(Set[Key]):
    """The keys of the nodes that have a flag; read only."""

    __slots__ = ("_flag", "_nodes")

    def __init__(self, nodes: Mapping[Key, TaskNode], flag: str):
        self._nodes, self._flag = nodes, flag

    def __contains__(self, key: object) -> bool:
        node = self._nodes.get(key)
        return node is not None and getattr(node, self._flag)

    def __iter__(self) -> Iterator[Key]:
        flag = self._flag
        return (key for key, node in self._nodes.items() if getattr(node, flag))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        flag = self._flag
        return any(getattr(node, flag) for node in self._nodes.values())

    @classmethod
    def _from_iterable(cls, keys: Any) -> Any:
        return set(keys)

    def __repr__(self) -> str:
        return repr(set(self))
