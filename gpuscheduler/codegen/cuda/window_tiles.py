"""Choose the tile of window results that a block of threads makes.

What costs least, of what there is room for. No device, and no text: `kernel` writes that.

Windows slide along rows, in which elements lie one behind the other, and perhaps down columns.

- `RowTile`: all that the block's windows reach lies in shared memory, each point computed once. A
  thread makes some results along a row of it.
- `ColumnTile`: a thread puts together what lies in its column of some windows, one below the other,
  straight from memory. That lies in shared memory then, and is put together along rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

#: Threads of a block.
THREADS = 256
#: Bytes of shared memory.
MOST_SHARED = 48 * 1024
#: Elements of a window of which all that is taken in may be under way at once: with nine, a sum
#: took longer than one by one.
MOST_AT_ONCE = 8
#: Results of a thread down a column, and along a row, of boxes; of moments, which need more
#: registers. Measured.
TALL, SIDE = {False: (12, 8, 6, 4, 2), True: (4, 2)}, {False: (8, 4, 2), True: (4, 2)}
#: Words that a thread has for all steps of windows that it holds at once, and for those parts of
#: its results that they do not all share.
BOX_WORDS, SLIDING_WORDS = 48, 128

T = TypeVar("T", bound="RowTile")


@dataclass(frozen=True, slots=True)
class WindowShape:
    """How many results there are along a row, rows of these, and how often all that; how far a
    window reaches along a row, down a column, and elsewhere; bytes of a result; and whether moments
    are among what is reduced."""

    along: int
    rows: int
    planes: int
    window: int
    down: int
    deep: int
    made: int
    moments: bool


@dataclass(frozen=True, slots=True)
class RowTile:
    """How many results a thread makes along a row, of how many columns and rows of results, how
    many columns of points are read, and the windows' lengths.

    >>> pane = RowTile(4, 32, 32, 36, 5, 3)
    >>> pane.high, pane.pitch, pane.made_pitch
    (34, 45, 40)
    """

    some: int
    columns: int
    rows: int
    wide: int
    window: int
    down: int

    @property
    def high(self) -> int:
        """Rows of points that are read."""
        return self.rows + self.down - 1

    @property
    def pitch(self) -> int:
        """From one row to the next in shared memory. There is an element between those of one
        thread and the next, so that the lanes of a warp read from different banks."""
        return self.wide + -(-self.wide // self.some)

    @property
    def made_pitch(self) -> int:
        """The same of results."""
        return self.columns // self.some * (self.some + 1)

    def fits(self, rows: int, held: int, made: int) -> bool:
        """Whether so many rows of something fit into shared memory beside the results, given the
        bytes of each."""
        room = rows * self.pitch * held + self.rows * self.made_pitch * made
        return 64 + room <= MOST_SHARED

    def tiles(self, windows: WindowShape) -> int:
        """How many of these there are."""
        across = -(-windows.along // self.columns)
        return across * -(-windows.rows // self.rows) * windows.planes


@dataclass(frozen=True, slots=True)
class ColumnTile(RowTile):
    """A pane whose threads have a column each: how many results of it, one below the other."""

    tall: int


def too_few(tiles: int, processors: int) -> bool:
    """Whether processors would have nothing to do."""
    return tiles < processors


def pane(windows: WindowShape, held: int, processors: int) -> RowTile | None:
    """The pane that costs least, given the bytes of what is reduced of a point."""
    # all of a thread's results share something, or nothing at all; moments need a first value
    most = windows.window if windows.moments else windows.window + 1

    def found() -> Iterable[tuple[float, RowTile]]:
        for some in (16, 8, 4, 2):
            for across in (256, 128, 64, 32, 16, 8):
                columns = across * some
                wide = columns + windows.window - 1
                this = RowTile(some, columns, THREADS // across, wide, windows.window, windows.down)
                tiles = this.tiles(windows)
                few = too_few(tiles, processors) and some > 2
                if some > most or few or not this.fits(this.high, held, windows.made):
                    continue
                # what is read and computed once takes several times as long as what is taken again
                taken = columns * this.rows * (some + windows.window - 1) // some * windows.down
                yield tiles * (this.wide * this.high * 8 + taken), this

    return _least(found())


def box(
    windows: WindowShape, held: int, words: int, reads: int, processors: int
) -> ColumnTile | None:
    """The box that costs least, given the bytes of all that lies in a column, the words of it that
    a thread has in registers, and what it takes to read and compute a point."""
    joins = words * (3 if windows.moments else 1)

    def has_room(many: int, reach: int) -> bool:
        """Whether a thread may make so many results one behind the other."""
        if reach <= MOST_AT_ONCE:
            return (many + reach - 1) * words <= BOX_WORDS
        most = reach if windows.moments else reach + 1
        power = many & (many - 1) == 0
        return power and many <= most and 2 * (many - 1) * words <= SLIDING_WORDS

    def effort(many: int, reach: int, takes: float) -> float:
        """Of each result: what is taken in, and put together."""
        joined = reach - 1 if reach <= MOST_AT_ONCE else 3
        return takes * (many + reach - 1) / many + joins * joined

    def found() -> Iterable[tuple[float, ColumnTile]]:
        for tall in TALL[windows.moments]:
            for some in SIDE[windows.moments]:
                if not (has_room(tall, windows.down) and has_room(some, windows.window)):
                    continue
                for wide in (256, 128, 64, 32):
                    rows, left = tall * (THREADS // wide), wide - windows.window + 1
                    columns = (
                        left // 8 * 8 or left // some * some
                    )  # whole sectors, if there are any
                    this = ColumnTile(some, columns, rows, wide, windows.window, windows.down, tall)
                    if columns <= 0 or not this.fits(rows, held, windows.made):
                        continue
                    tiles = this.tiles(windows)
                    if too_few(tiles, processors) and (tall > 4 or windows.deep > 1):
                        continue
                    first = effort(tall, windows.down, reads * windows.deep) + 2 * joins
                    then = effort(some, windows.window, 2 * joins) + 8
                    yield tiles * rows * (wide * first + columns * then), this

    return _least(found())


def _least(found: Iterable[tuple[float, T]]) -> T | None:
    """The first of those that cost least."""
    best = min(found, key=itemgetter(0), default=None)
    return best and best[1]
