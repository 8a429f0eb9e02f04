"""Show how far runs are: in a terminal, in a notebook, or in the log.

A thread reads counts of the runs under way, ten times a second while there are any. No run waits
for it. In a notebook the display is HTML, which needs no widgets.
"""

from __future__ import annotations

import html
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..plan.step_table import StepTable, step_table
from ..runtime.observe import Recorder, RunRecord
from ..runtime.under_way import RunUnderWay, runs_under_way
from .log import logger

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from ..runtime.state import State

#: Seconds after which a run is shown.
AFTER = 1.0
#: Seconds between two looks.
EVERY = 0.1
#: Seconds between two lines of the log, where there is no screen.
LOG_EVERY = 30.0
#: Layers of a run that are shown: those with most steps left.
LAYERS = 3
#: Runs that are shown: the oldest.
RUNS = 4


class LayerLeft(NamedTuple):
    """A layer of a run, and how many of its steps are not done."""

    name: str
    left: int
    total: int


class ProgressRow(NamedTuple):
    """How far a run is."""

    number: int
    done: int  # steps
    total: int  # steps
    part: float  # of the predicted time, from 0 to 1; of the steps, where nothing is predicted
    elapsed: float  # seconds
    remaining: float | None  # seconds, as far as known
    layers: tuple[LayerLeft, ...] = ()

    def __str__(self) -> str:
        left = "" if self.remaining is None else f", {format_duration(self.remaining)} left"
        if not self.total:
            return f"run {self.number}: planning"
        return f"run {self.number}: {self.done:,} of {self.total:,} steps{left}"


def format_duration(seconds: float) -> str:
    """A duration for people.

    >>> format_duration(0.3), format_duration(75), format_duration(3700)
    ('0.3 s', '1:15', '1:01:40')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class RunMeter:
    """Reads how far a run is; what the plan predicts is read once."""

    def __init__(self, run: RunUnderWay):
        self.run = run
        self._table: StepTable | None = None

    def _read_table(self, table: StepTable) -> None:
        self._table = table
        made = np.frombuffer(bytes(table.fixed), np.uint8) == 0
        self._seconds = np.where(made, np.array(table.seconds, float), 0.0)
        layers: dict[str, int] = {}
        of = {group: layers.setdefault(name, len(layers)) for group, name in table.labels.items()}
        self._layer = np.array([of[group] for group in table.groups], np.intp)
        self._names = list(layers)
        self._totals = np.bincount(self._layer[made], minlength=len(layers)).tolist()

    def _open_steps(self, state: State) -> Any:
        """Which steps are not done, as an array; first reads the plan, if it is another one."""
        if (table := step_table(state.plan)) is not self._table:
            self._read_table(table)
        return np.frombuffer(bytes(state.done), np.uint8) == 0

    def layers(self) -> list[LayerLeft]:
        """The layers with steps that are not done, in the plan's order; none without a state."""
        state = self.run.state if isinstance(self.run, RunRecord) else None
        if state is None:
            return []
        open_steps = self._open_steps(state)
        left = np.bincount(self._layer[open_steps], minlength=len(self._names))
        return [
            LayerLeft(name, n, total)
            for name, n, total in zip(self._names, left.tolist(), self._totals, strict=True)
            if n
        ]

    def read(self) -> ProgressRow:
        """How far the run is now."""
        run = self.run
        total, elapsed = run.steps, run.seconds
        done = total - run.steps_left
        state = run.state if isinstance(run, RunRecord) else None  # a cluster has none here
        if state is None:
            part = done / total if total else 0.0
            remaining = elapsed * (1 - part) / part if part else None
            return ProgressRow(run.number, done, total, part, elapsed, remaining)
        open_steps = self._open_steps(state)
        every = float(self._seconds.sum())
        part = done / total if total else 0.0
        if every > 0:
            part = 1 - float(self._seconds[open_steps].sum()) / every
        layers = tuple(sorted(self.layers(), key=lambda layer: -layer.left)[:LAYERS])
        remaining = elapsed * (1 - part) / part if part > 0 else None
        return ProgressRow(run.number, done, total, part, elapsed, remaining, layers)


# ---- where rows are shown


class Screen(Protocol):
    """Where rows are shown."""

    def show(self, rows: list[ProgressRow]) -> None:
        """Show the runs under way."""

    def finish(self, lines: list[str]) -> None:
        """Take the display away, and leave a line for each run that was shown."""


class TerminalScreen:
    """Rich's live display, a bar for each run."""

    def __init__(self, console: Console):
        self.console = console
        self.live: Live | None = None

    def show(self, rows: list[ProgressRow]) -> None:
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for row in rows:
            left = "" if row.remaining is None else f"{format_duration(row.remaining)} left"
            bar = ProgressBar(total=1.0, completed=row.part, width=32)
            count = f"{row.done:,} of {row.total:,} steps" if row.total else "planning"
            table.add_row(f"run {row.number}", bar, f"{row.part:4.0%}", count, left)
            for layer in row.layers:
                counts = f"{layer.left:,} of {layer.total:,} left"
                table.add_row("", f"  {layer.name[:30]}", "", counts, style="dim")
        if self.live is None:
            self.live = Live(table, console=self.console, auto_refresh=False, transient=True)
            self.live.start()
        self.live.update(table, refresh=True)

    def finish(self, lines: list[str]) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
        for line in lines:
            self.console.print(line, highlight=False)


class NotebookScreen:
    """An HTML display of IPython, which is updated in place."""

    def __init__(self, display: Callable[..., Any]):
        self.display = display
        self.handle: Any = None

    def show(self, rows: list[ProgressRow]) -> None:
        self._put("".join(map(self._row, rows)))

    @staticmethod
    def _row(row: ProgressRow) -> str:
        layers = "".join(
            f"<br><small>&emsp;{html.escape(f.name)}: {f.left:,} of {f.total:,} left</small>"
            for f in row.layers
        )
        bar = f"<progress value='{row.part:.3f}' max='1' style='width:20em'></progress>"
        return f"<div>{bar} {html.escape(str(row))}{layers}</div>"

    def _put(self, text: str) -> None:
        data = {"text/html": text, "text/plain": ""}
        if self.handle is None:
            self.handle = self.display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)

    def finish(self, lines: list[str]) -> None:
        self._put("<br>".join(map(html.escape, lines)))
        self.handle = None


class LogScreen:
    """A line of the log for each run, now and then."""

    def __init__(self, every: float = LOG_EVERY, clock: Callable[[], float] = monotonic):
        self.every, self.clock = every, clock
        self.next: float | None = None

    def show(self, rows: list[ProgressRow]) -> None:
        now = self.clock()
        if self.next is None:
            self.next = now + self.every
        elif now >= self.next:
            self.next = now + self.every
            for row in rows:
                logger("run").info("%s", row)

    def finish(self, lines: list[str]) -> None:
        self.next = None
        for line in lines:
            logger("run").info("%s", line)


def find_screen() -> Screen:
    """The screen of this process: a notebook's, the terminal of standard error, else the log."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

        return NotebookScreen(display)
    return TerminalScreen(console) if console.is_terminal else LogScreen()


# ---- the display


class ProgressDisplay:
    """Shows the runs under way, from a second after they began; a context manager.

    `recorder` is that of the scheduler whose runs are shown; None for every scheduler.
    """

    def __init__(
        self,
        recorder: Recorder | None = None,
        after: float = AFTER,
        every: float = EVERY,
        screen: Screen | None = None,
    ):
        self.recorder, self.after, self.every = recorder, after, every
        self.screen = screen
        self._inbox: SimpleQueue[Any] = SimpleQueue()  # runs that have begun; None ends the thread
        self._thread: threading.Thread | None = None
        self._pid = 0

    def start(self) -> None:
        """Begin to show runs."""
        if self._thread is None:
            self.screen = self.screen or find_screen()
            self._pid = os.getpid()
            self._thread = threading.Thread(
                target=self._work, name="gpuscheduler-progress", daemon=True
            )
            self._thread.start()
            runs_under_way.woken = (*runs_under_way.woken, self._wake)
            for run in runs_under_way.runs(self.recorder):
                self._wake(run)

    def stop(self) -> None:
        """Take the display away."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():  # a forked child has no such thread
            return
        runs_under_way.woken = tuple(w for w in runs_under_way.woken if w != self._wake)
        self._inbox.put(None)
        if thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> ProgressDisplay:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _wake(self, run: RunUnderWay) -> None:
        if self.recorder is not None and run.recorder is not self.recorder:
            return
        # many small runs leave one word, unless each is to be shown
        if self.after <= 0 or self._inbox.empty():
            self._inbox.put(run)

    def _work(self) -> None:
        while (run := self._inbox.get()) is not None:
            if not self._show_runs(run):
                return

    def _show_runs(self, begun: Any) -> bool:
        """Show runs until there are none; False where the display is to end."""
        meters: dict[int, RunMeter] = {}
        shown: dict[int, Any] = {id(begun): begun} if self.after <= 0 else {}
        goes_on = True
        assert self.screen is not None
        while goes_on and (runs := runs_under_way.runs(self.recorder)):
            long_runs = [r for r in runs if r.seconds >= self.after][:RUNS]
            if long_runs:
                shown.update({id(r): r for r in long_runs})
                rows = [meters.setdefault(id(r), RunMeter(r)).read() for r in long_runs]
                self.screen.show(rows)
            try:
                begun = self._inbox.get(timeout=self.every)
                goes_on = begun is not None
                if begun is not None and self.after <= 0:
                    shown[id(begun)] = begun
            except Empty:
                continue
        if shown:
            self.screen.finish([self._last_line(r) for r in shown.values()])
        return goes_on

    @staticmethod
    def _last_line(run: RunUnderWay) -> str:
        took = format_duration(run.seconds)
        if run.is_over and not run.error:
            return f"run {run.number}: {run.steps:,} steps in {took}"
        return f"run {run.number}: {'failed' if run.is_over else 'goes on'} after {took}"


def progress(after: float = AFTER) -> ProgressDisplay:
    """Show how far the runs of every scheduler of this process are, while the context lasts.

    Shows a bar for each run that takes longer than `after` seconds (0 for all), the layers with
    most steps left, and the time that is left: the plan's prediction, corrected by how long the
    part that is done has taken. In a terminal it is drawn on standard error, in a notebook below
    the cell; elsewhere it is a line of the log ``gpuscheduler.run`` (INFO) each 30 s. Runs are not
    slowed: nothing is waited for. A run that follows a launch tape is known to be done only as a
    whole.

    >>> import gpuscheduler, dask.array as da
    >>> with gpuscheduler.progress(), gpuscheduler.Scheduler("cpu:2"):
    ...     int(da.arange(10, chunks=5).sum().compute())
    45
    """
    return ProgressDisplay(after=after)
