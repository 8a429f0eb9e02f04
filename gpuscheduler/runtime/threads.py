"""Worker threads that run what they are sent, in order.

They know no plan and no device. A run leases a team, one worker per device, and gives it back. A
run inside a task, or in another thread, leases another team, so no run waits for a thread that
waits for it. A team that is still busy when its run was given up (Ctrl-C, a failure elsewhere) is
retired: its threads end when what they run does, and the next run gets a fresh team.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from ..errors import DeviceLost
from ..forks import new_lock
from .loop import add_note
from .pools import CallersPool, inside

Job = Callable[[Any], None]  # called with what was sent with it
Raised = list[BaseException]
#: Seconds without any news after which it is asked whether the threads live.
PATIENCE = 0.5
#: Seconds after which it is asked again whether they are done.
LOOK_EVERY = 5e-5
#: What is said of an error that a job did not report itself.
BUG = "in a thread of gpuscheduler, outside of any task: a bug"


class Worker:
    """A daemon thread with an inbox. `setup` runs first in the thread, `teardown` last.

    `idle` runs while the inbox is empty, until it says that there was nothing to do. The thread
    does not hold its worker: it ends also when nobody else does, wherever a Ctrl-C came between.
    """

    def __init__(
        self,
        name: str,
        setup: Callable[[], None] | None = None,
        teardown: Callable[[], None] | None = None,
        idle: Callable[[], bool] | None = None,
    ):
        self._desk = _WorkerContext(setup, teardown, idle)
        self.sent = 0  # written by one thread only
        weakref.finalize(self, self._desk.inbox.put, None).atexit = False
        self.thread = threading.Thread(target=self._desk.work, name=name, daemon=True)
        self.thread.start()

    @property
    def finished_count(self) -> int:
        return self._desk.finished

    @property
    def is_busy(self) -> bool:
        return self.sent != self._desk.finished

    def send(self, context: Context, job: Job, argument: Any, raised: Raised | None = None) -> None:
        """Run a job on the thread; the job reports its own errors.

        An error that it raises is a bug: `raised` gets it, or it is printed where nobody waits.
        """
        self.sent += 1
        self._desk.inbox.put((context, job, argument, raised))

    def stop(self) -> None:
        """End after what has been sent."""
        self._desk.inbox.put(None)


class _WorkerContext:
    """The state that a worker's thread needs."""

    def __init__(
        self,
        setup: Callable[[], None] | None,
        teardown: Callable[[], None] | None,
        idle: Callable[[], bool] | None,
    ):
        self.setup, self.teardown, self.idle = setup, teardown, idle
        self.inbox: SimpleQueue[tuple[Context, Job, Any, Raised | None] | None] = SimpleQueue()
        self.finished = 0  # written by the thread only

    def work(self) -> None:
        if self.setup is not None:
            self.setup()
        get, empty, idle = self.inbox.get, self.inbox.empty, self.idle
        item = None
        while True:
            while idle is not None and empty() and idle():
                pass
            item = get()
            if item is None:
                break
            context, job, argument, raised = item
            try:
                context.run(job, argument)
            except BaseException as error:
                if raised is None:
                    traceback.print_exc()
                else:
                    raised.append(add_note(error, BUG))
            finally:
                # nothing of a run may live in a thread that waits for the next one
                del item, context, job, argument, raised
                self.finished += 1
        if self.teardown is not None:
            self.teardown()


def _do_nothing(_: Any) -> None: ...


class Team:
    """One worker for each device of a run."""

    def __init__(self, workers: list[Worker], lanes: Any = None, files: int = 1):
        self.workers = workers
        self.pid = os.getpid()
        self.files = files  # threads for each worker that read and write files, at most
        self.lanes = lanes  # what the hardware keeps for each of them
        self.aside: dict[str, Worker] = {}  # for what must not wait behind tasks
        self.contexts: list[Context] = []
        self.caller = Context()
        self.raised: Raised = []  # by jobs of this run
        #: What the hardware has prepared for runs that are like earlier ones of this team.
        self.replays: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def all_workers(self) -> list[Worker]:
        return [*self.workers, *self.aside.values()]

    @property
    def is_busy(self) -> bool:
        return any(w.is_busy for w in self.all_workers)

    @property
    def at_work(self) -> int:
        """Workers that have something to do; at least one."""
        return max(1, sum(w.is_busy for w in self.workers))

    def wait_until_idle(self, seconds: float) -> bool:
        """Whether all that was sent has been done, after so many seconds at most."""
        end = monotonic() + seconds
        while self.is_busy:
            if monotonic() > end:
                return False
            sleep(LOOK_EVERY)
        return True

    @property
    def is_alive(self) -> bool:
        return any(w.thread.is_alive() for w in self.all_workers)

    def find_loss(self) -> DeviceLost | None:
        """What to say where a worker's thread has ended with work left to do."""
        names = [w.thread.name for w in self.all_workers if w.is_busy and not w.thread.is_alive()]
        return None if not names else DeviceLost(
            f"the thread {names[0]} has ended in the middle of its work: something that a "
            "task called has ended it; the next computation gets new threads"
        )  # fmt: skip

    def begin(self) -> None:
        """Let tasks see the caller's context variables. A context serves one thread at a time."""
        self.caller = copy_context()
        self.contexts = [self.caller.copy() for _ in self.workers]
        self.raised = []

    def send(self, place: int, job: Job, argument: Any) -> None:
        self.workers[place].send(self.contexts[place], job, argument, self.raised)

    def send_last(self, place: int, job: Job, argument: Any) -> None:
        """Run a job that no run waits for."""
        self.workers[place].send(self.contexts[place], job, argument)

    def wake(self, place: int) -> None:
        """Make a worker look whether there is anything to wait for."""
        self.workers[place].send(Context(), _do_nothing, None)

    def send_aside(self, name: str, job: Job, argument: Any) -> None:
        """Run a job on a thread of this name, which is started when first needed.

        Only the run's thread may call this.
        """
        self._side_worker(name).send(Context(), job, argument, self.raised)

    def send_to_any(
        self,
        job: Job,
        argument: Any,
        place: int | None = None,
        most: int | None = None,
        kind: str = "files",
    ) -> None:
        """Run a job on one of a few threads of a kind.

        There are `most` threads for each device, or for all together where `place` is None. An idle
        thread gets the job, else a new one, else the one with least to do. Only the run's thread
        may call this.
        """
        count = self.files if most is None else most
        if place is None:
            names = [f"{kind}-{n}" for n in range(count * len(self.workers))]
        else:
            names = [f"{kind}-{place}-{n}" for n in range(count)]
        least, chosen = None, names[0]
        for name in names:
            worker = self.aside.get(name)
            waiting = 0 if worker is None else worker.sent - worker.finished_count
            if least is None or waiting < least:
                least, chosen = waiting, name
            if not waiting:
                break
        self._side_worker(chosen).send(self.caller.copy(), job, argument, self.raised)

    def _side_worker(self, name: str) -> Worker:
        if name not in self.aside:
            self.aside[name] = Worker(f"gpuscheduler-{name}")
        return self.aside[name]

    def stop(self) -> None:
        for w in self.all_workers:
            w.stop()

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else monotonic() + timeout
        for w in self.all_workers:
            if w.thread is not threading.current_thread():
                w.thread.join(None if deadline is None else max(0.0, deadline - monotonic()))


class BorrowedTeam:
    """A team of one device whose threads are the caller's own pool (Dask's `pool=`)."""

    def __init__(self, pool: CallersPool):
        self.pool, self.threads = pool, pool._max_workers
        self.is_busy = False
        self.at_work = self.threads
        self.raised: Raised = []

    def __len__(self) -> int:
        return 1

    def find_loss(self) -> BaseException | None:
        """What to say where the pool does nothing any more."""
        why = self.pool.why_broken()
        return BrokenExecutor(why) if why else None

    def begin(self) -> None:
        pass

    def send(self, place: int, job: Job, steps: list[Any]) -> None:
        for step in steps:
            self.send_to_any(job, [step])

    def send_aside(self, name: str, job: Job, argument: Any) -> None:
        self.send_to_any(job, argument)

    def send_to_any(self, job: Job, argument: Any, *where: Any) -> None:
        future = self.pool.submit(copy_context().run, self._run, job, argument)
        future.add_done_callback(self._note_end)

    def _run(self, job: Job, argument: Any) -> None:
        inside.set((*inside.get(), self.pool.pool))
        try:
            job(argument)
        except BaseException as error:
            self.raised.append(add_note(error, BUG))

    def _note_end(self, future: Future[Any]) -> None:
        """A job reports its own errors: others are the pool's, which has not run it."""
        if future.cancelled():
            why = f"{self.pool!r} was told to cancel what it was given"
            self.raised.append(BrokenExecutor(why))
        elif (error := future.exception()) is not None:
            self.raised.append(add_note(error, f"from {self.pool!r}, which has not run a task"))

    def stop(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass


class EventQueue:
    """What the threads of one run report to its loop, until the run is over.

    What they report later is dropped. It would wait for the garbage collector: an error holds the
    frames of its task, and these hold the queue.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[Any]] = SimpleQueue()
        self._closed = False

    def put(self, events: list[Any]) -> None:
        """Report events; any thread may call this."""
        self._queue.put(events)
        if self._closed:  # after the put: one that `close` has not seen sees what `close` has set
            self.take_pending()

    def wait(self, team: Team | BorrowedTeam) -> list[Any]:
        """All that a team's threads have reported, at least one event; waits for it.

        Raises `DeviceLost` where a thread has ended that had work left to do, and what a job raised
        instead of reporting it.
        """
        out: list[Any] = []
        while not out:
            try:
                out = self._queue.get(timeout=PATIENCE)
            except Empty:
                if team.raised:
                    raise team.raised.pop() from None
                if (lost := team.find_loss()) is not None:
                    raise lost from None
        out += self.take_pending()
        return out

    def empty(self) -> bool:
        """Whether there is nothing now."""
        return self._queue.empty()

    def take_pending(self) -> list[Any]:
        """All that there is by now."""
        out: list[Any] = []
        with suppress(Empty):
            while True:
                out += self._queue.get_nowait()
        return out

    def close(self) -> None:
        """Drop what there is, and what comes: the run is over."""
        self._closed = True
        self.take_pending()


class Teams:
    """The teams of one scheduler: leased to runs, at most a few kept idle."""

    def __init__(self, make: Callable[[], Team], keep: int = 4):
        self.make, self.keep = make, keep
        self.idle: list[Team] = []
        self.closed = False
        self.leased: list[Team] = []
        self.retired: list[Team] = []
        self._lock = new_lock()

    @contextmanager
    def lease(self) -> Iterator[Team]:
        with self._lock:
            team = self.idle.pop() if self.idle else None
            while team is not None and team.pid != os.getpid():  # its threads are its parent's
                team = self.idle.pop() if self.idle else None
        team = team or self.make()
        with self._lock:
            self.leased.append(team)
        clean = False
        try:
            yield team
            clean = True  # all that was sent is done, or is at its last line
        finally:
            with self._lock:
                self.leased.remove(team)
                team.contexts, team.caller, team.raised = [], Context(), []
                fit = (clean or not team.is_busy) and len(self.idle) < self.keep and not self.closed
                (self.idle if fit else self.retired).append(team)
                self.retired = [t for t in self.retired if t.is_alive]
            if not fit:
                team.stop()

    def close(self, patience: float = 0.5) -> None:
        """Stop and join every thread; one that is inside a task still ends when the task does."""
        with self._lock:
            self.closed = True
            idle, retired = self.idle, self.retired
            self.idle, self.retired = [], []
        for team in idle:
            team.stop()
        for team in idle:
            team.join()
        deadline = monotonic() + patience
        for team in retired:
            team.join(max(0.0, deadline - monotonic()))
