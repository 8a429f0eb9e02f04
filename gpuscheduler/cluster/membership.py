"""Which workers of a Dask cluster take part in an attachment, and what they tell of themselves.

A plug-in in the cluster's scheduler sends the plug-in of `worker_plugin` to all workers, also to
those that join later. Workers report to the cluster's scheduler; the client asks only this one, and
never waits for a worker.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dask import config

from ..forks import new_lock
from .answer import RemoteBlock

if TYPE_CHECKING:
    from distributed import Client

    from .worker_plugin import WorkerFacts

#: Seconds after which the cluster's scheduler is asked again which workers there are. Stages for a
#: worker that has left meanwhile run elsewhere.
MEET_EVERY = 0.5


def worker_label(who: str) -> str:
    """How error messages call a worker's address, or the cluster's scheduler."""
    return f"worker {who}" if "://" in who else who


def check_versions(client: Client) -> None:
    """Raise `RuntimeError` unless the cluster's scheduler has this version of the package.

    The message names every worker without it as well. Where the scheduler has it, workers report
    other versions themselves.
    """
    from .worker_plugin import version

    # of names that every Python knows: the package may not be there
    ask = (eval, "__import__('gpuscheduler').__version__")
    answers: dict[str, Any] = {}
    try:
        answers["the scheduler"] = client.run_on_scheduler(*ask)
    except Exception as error:
        answers["the scheduler"] = error
    if answers["the scheduler"] == version():
        return
    answers |= client.run(*ask, on_error="return")
    wrong = []
    for who, answer in answers.items():
        if isinstance(answer, Exception):
            wrong.append(f"{worker_label(who)} has no gpuscheduler ({answer})")
        elif answer != version():
            wrong.append(f"{worker_label(who)} has gpuscheduler {answer}")
    raise RuntimeError(
        f"{'; '.join(wrong)}; the client has gpuscheduler {version()}: install this version "
        "everywhere"
    )


def locate_values(client: Client, blocks: list[RemoteBlock], workers: tuple[str, ...]) -> None:
    """Note the worker and the bytes of the values of a user's own futures.

    Values that do not exist yet are spread evenly over the workers.
    """
    if not blocks:
        return
    there = client.who_has([b.future for b in blocks])
    nbytes = client.nbytes([k for k, held in there.items() if held], summary=False)
    for rank, block in enumerate(blocks):
        somewhere = workers[rank * len(workers) // len(blocks)]
        block.worker = next((a for a in there.get(block.key, ()) if a in workers), somewhere)
        block.nbytes = max(0, nbytes.get(block.key, 0))


class Membership:
    """The workers of a cluster that take part in one attachment."""

    def __init__(self, client: Client, settings: dict[str, Any], on_message: Callable[[Any], None]):
        self.client, self.settings = client, settings
        #: Called with each message of a worker, in the client's own thread.
        self.on_message = on_message
        #: Names everything of this attachment on the cluster: the topic, plug-ins and keys.
        self.name = ""
        #: What each worker that takes part tells of itself, by address.
        self.workers: dict[str, WorkerFacts] = {}
        #: Addresses of the workers that cannot take part; the user has been warned of each.
        self.left_out: set[str] = set()
        #: Pairs of addresses (owner, reader): the reader can read arrays on the owner's devices.
        self.near: set[tuple[str, str]] = set()
        #: When the cluster's scheduler was asked last, in seconds of `monotonic`.
        self.asked_at = 0.0
        self._asking = new_lock()

    def register(self) -> None:
        """Give the cluster the plug-ins, under a new name: an older one may still be ending."""
        from .worker_plugin import WorkerNode, begin

        if self.name:
            self.client.unsubscribe_topic(self.name)
        self.name = f"gpuscheduler-{uuid.uuid4().hex[:12]}"
        self.client.subscribe_topic(self.name, self.on_message)
        node = WorkerNode(self.name, self.settings)
        self.client.run_on_scheduler(begin, self.name, self.client.id, node)

    def unregister(self, function: Callable[..., Any]) -> None:
        """Call a function of `worker_plugin` in the cluster's scheduler, if that is still there."""
        if self.client.status == "running":
            with suppress(Exception):  # it may be on its way out
                self.client.unsubscribe_topic(self.name)
                self.client.run_on_scheduler(function, self.name)

    def addresses(self, strict: bool = False) -> list[str]:
        """The sorted addresses of the workers that take part, at most `MEET_EVERY` seconds old.

        With `strict`, raises `RuntimeError` for a worker that cannot, or where no worker is ready.
        """
        with self._asking:
            if not self.workers or monotonic() >= self.asked_at + MEET_EVERY:
                self.asked_at = monotonic()
                self._update(strict)
            return sorted(self.workers)

    def _update(self, strict: bool) -> None:
        """Ask the cluster's scheduler which workers there are."""
        from distributed.protocol.pickle import loads

        there = self._reports()
        if there is None:  # the connection was lost for a while: this client was taken for gone
            self.register()
            self.workers, self.left_out, self.near = {}, set(), set()
            there = self._reports() or {}
        for gone in set(self.workers) - set(there):
            del self.workers[gone]
        self.left_out &= set(there)
        why_not = {a: told for a, told in there.items() if isinstance(told, str)}
        if why_not and strict:
            raise RuntimeError("; ".join(why_not.values()))
        for address in sorted(set(why_not) - self.left_out):
            warnings.warn(f"{why_not[address]}; it takes no part", stacklevel=2)
        self.left_out |= set(why_not)
        # a worker without a report is not ready yet, and is looked for again next time
        new = {a: loads(told) for a, told in there.items() if isinstance(told, bytes)}
        self.workers |= new
        if new:
            self.find_near()
        if strict and not self.workers:
            raise RuntimeError(
                f"no worker is ready: {', '.join(there)}: their logs say why"
                if there
                else "the cluster has no workers: start some, and attach then"
            )

    def _reports(self) -> dict[str, bytes | str | None] | None:
        """The running workers: pickled facts of new ones, or the reason why one cannot take part.

        None where the cluster's scheduler does not know this attachment.
        """
        from .worker_plugin import members_of

        members = getattr(self.client.scheduler, members_of(self.name))
        return self.client.sync(members, known=list(self.workers))  # type: ignore[no-any-return]

    def ask(self, method: str, *args: Any, workers: list[str]) -> dict[str, Any]:
        """Call a method of `WorkerNode` on workers: results or exceptions, by address.

        A worker that has left is left out.
        """
        from .worker_plugin import ask

        return self.client.run_on_scheduler(ask, self.name, method, args, workers)  # type: ignore[no-any-return]

    def find_near(self) -> None:
        """Find out which workers can read each other's devices."""
        lending = {a: f.sample for a, f in self.workers.items() if f.sample is not None}
        machines = [s.machine for s in lending.values()]
        asked = [a for a, s in lending.items() if machines.count(s.machine) > 1]
        if not asked or not config.get("gpuscheduler.ipc", True):
            self.near = set()
            return
        answers = self.ask("find_readable", lending, workers=asked)
        self.near = {
            (source, reader)
            for reader, sources in answers.items()
            if not isinstance(sources, Exception)
            for source in sources
        }
