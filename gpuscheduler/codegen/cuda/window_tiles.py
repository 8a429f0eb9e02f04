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

from . import tuning

T = TypeVar("T", bound="RowTile")


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The sizes of a kernel that reduces sliding windows."""

    #: Results along a row.
    along: int
    #: Rows of results in a plane.
    rows: int
    #: Planes of results.
    planes: int
    #: Points of a window along a row.
    window: int
    #: Points of a window down a column.
    down: int
    #: Points of a window along all other axes.
    deep: int
    #: Bytes of a result.
    made: int
    #: Whether means or variances are among what is reduced.
    moments: bool


@dataclass(frozen=True, slots=True)
class RowTile:
    """A tile of window results, whose threads make consecutive results along a row.

    >>> pane = RowTile(4, 32, 32, 36, 5, 3)
    >>> pane.rows_read, pane.pitch, pane.made_pitch
    (34, 45, 40)
    """

    #: Results of a thread along a row.
    some: int
    #: Results of the tile along a row.
    columns: int
    #: Rows of results.
    rows: int
    #: Columns of points that are read.
    wide: int
    #: Points of a window along a row.
    window: int
    #: Points of a window down a column.
    down: int

    @property
    def rows_read(self) -> int:
        """Rows of points that are read."""
        return self.rows + self.down - 1

    @property
    def pitch(self) -> int:
        """Elements from one row to the next in shared memory.

        An element lies between the elements of one thread and the next, so that lanes of a warp
        read from different banks.
        """
        return self.wide + -(-self.wide // self.some)

    @property
    def made_pitch(self) -> int:
        """Elements from one row of results to the next in shared memory."""
        return self.columns // self.some * (self.some + 1)

    def fits(self, rows: int, held: int, made: int) -> bool:
        """Whether rows of points fit into shared memory beside the results.

        `held` and `made` are the bytes of a point and of a result.
        """
        room = rows * self.pitch * held + self.rows * self.made_pitch * made
        return 64 + room <= tuning.MOST_SHARED

    def tiles(self, windows: WindowShape) -> int:
        """How many tiles the results of these windows need."""
        across = -(-windows.along // self.columns)
        return across * -(-windows.rows // self.rows) * windows.planes


@dataclass(frozen=True, slots=True)
class ColumnTile(RowTile):
    """A tile whose threads reduce down a column each, before they reduce along rows."""

    #: Results of a thread, one below the other.
    tall: int


def too_few(tiles: int, processors: int) -> bool:
    """Whether there are fewer tiles than processors."""
    return tiles < processors


def pane(windows: WindowShape, held: int, processors: int) -> RowTile | None:
    """Choose the row tile of least cost; `held` is the bytes reduced of each point."""
    # all of a thread's results share something, or nothing at all; moments need a first value
    most = windows.window if windows.moments else windows.window + 1

    def row_tiles() -> Iterable[tuple[float, RowTile]]:
        for some in (16, 8, 4, 2):
            for across in (256, 128, 64, 32, 16, 8):
                columns = across * some
                wide = columns + windows.window - 1
                this = RowTile(
                    some, columns, tuning.THREADS // across, wide, windows.window, windows.down
                )
                tiles = this.tiles(windows)
                few = too_few(tiles, processors) and some > 2
                if some > most or few or not this.fits(this.rows_read, held, windows.made):
                    continue
                # what is read and computed once takes several times as long as what is taken again
                taken = columns * this.rows * (some + windows.window - 1) // some * windows.down
                yield tiles * (this.wide * this.rows_read * 8 + taken), this

    return _cheapest_tile(row_tiles())


def box(
    windows: WindowShape, held: int, words: int, reads: int, processors: int
) -> ColumnTile | None:
    """Choose the column tile of least cost, or None.

    `held` is the bytes reduced of a column, `words` the registers of a thread for them, and
    `reads` the cost to read and compute a point.
    """
    joins = words * (3 if windows.moments else 1)

    def has_room(many: int, reach: int) -> bool:
        """Whether a thread may make so many results one behind the other."""
        if reach <= tuning.MOST_AT_ONCE:
            return (many + reach - 1) * words <= tuning.BOX_WORDS
        most = reach if windows.moments else reach + 1
        power = many & (many - 1) == 0
        return power and many <= most and 2 * (many - 1) * words <= tuning.SLIDING_WORDS

    def effort(many: int, reach: int, takes: float) -> float:
        """Of each result: what is taken in, and put together."""
        joined = reach - 1 if reach <= tuning.MOST_AT_ONCE else 3
        return takes * (many + reach - 1) / many + joins * joined

    def column_tiles() -> Iterable[tuple[float, ColumnTile]]:
        for tall in tuning.TALL[windows.moments]:
            for some in tuning.SIDE[windows.moments]:
                if not (has_room(tall, windows.down) and has_room(some, windows.window)):
                    continue
                for wide in (256, 128, 64, 32):
                    rows, left = tall * (tuning.THREADS // wide), wide - windows.window + 1
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

    return _cheapest_tile(column_tiles())


def _cheapest_tile(found: Iterable[tuple[float, T]]) -> T | None:
    """The first of those that cost least."""
    best = min(found, key=itemgetter(0), default=None)
    return best and best[1]
