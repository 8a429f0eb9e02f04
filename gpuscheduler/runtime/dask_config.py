"""Override Dask's configuration while a scheduler is in use, and restore it.

Several may have set it, and they may end in any order; `dask.config.set` puts back what there was
when it began, even where that has ended meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import dask.threaded
from dask import config
from dask.base import get_scheduler

from ..forks import new_rlock

_ABSENT = object()
_lock = new_rlock()
_current: list[ConfigOverride] = []  # in the order in which they were set


class Place(Protocol):
    """Where values are set."""

    def get(self, name: str, default: Any, /) -> Any: ...

    def update(self, values: Mapping[str, Any], /) -> None: ...

    def pop(self, name: str, default: Any, /) -> Any: ...


class _Configuration:
    """Dask's."""

    def get(self, name: str, default: Any) -> Any:
        return config.get(name, default)

    def update(self, values: Mapping[str, Any]) -> None:
        config.set(values)

    def pop(self, name: str, default: Any) -> Any:
        return config.pop(name, default)


_configuration = _Configuration()


class ConfigOverride:
    """Values in Dask's configuration, or in another place, until it ends.

    Then it says what it said before, or what it would say had this one never been set, if others
    have been set over it.

    >>> first, second = ConfigOverride({"colour": "red"}), ConfigOverride({"colour": "blue"})
    >>> first.end()
    >>> config.get("colour")
    'blue'
    >>> second.end()
    >>> config.get("colour", "none")
    'none'
    """

    def __init__(self, values: Mapping[str, Any], place: Place = _configuration):
        self.values, self.place = dict(values), place
        with _lock:
            self._before = {name: place.get(name, _ABSENT) for name in values}
            place.update(self.values)
            _current.append(self)

    def end(self) -> None:
        """Restore the values from before; a second call does nothing."""
        with _lock:
            if self not in _current:
                return
            later = [s for s in _current[_current.index(self) + 1 :] if s.place is self.place]
            _current.remove(self)
            for name, value in self.values.items():
                over = next((s for s in later if name in s.values), None)
                if over is None:
                    self._take_back(name)
                elif over._before[name] == value:
                    over._before[name] = self._before[name]

    def keep(self, *names: str) -> None:
        """End for all but these names."""
        with _lock:
            for name in self.values.keys() - {*names}:
                self._take_back(name)
                del self.values[name]

    def value_before(self, name: str) -> Any:
        """The configuration's value from before, None if there was none."""
        value = self._before[name]
        return None if value is _ABSENT else value

    def replacement(self) -> Any:
        """The scheduler that runs graphs where Dask's configuration names one that has ended.

        That happens when a client of `distributed`, made meanwhile, restored it on closing. None in
        any other case.
        """
        with _lock:
            if self in _current or config.get("scheduler", None) != self.values["scheduler"]:
                return None
            self._take_back("scheduler")
        return get_scheduler() or dask.threaded.get

    def _take_back(self, name: str) -> None:
        """Restore a value from before, where the place still has the one set here."""
        if self.place.get(name, _ABSENT) != self.values[name]:
            return
        value = self._before[name]
        if value is _ABSENT or (value == "dask.distributed" and not _has_client()):
            self.place.pop(name, None)
        else:
            self.place.update({name: value})


def _has_client() -> bool:
    if "distributed" in sys.modules:
        from distributed import Client

        with suppress(ValueError):
            return Client.current(allow_global=True) is not None
    return False
