"""How a kernel's work is divided among blocks and threads."""

from __future__ import annotations

from dataclasses import replace

from . import tuning
from .loop_space import power_above, power_below
from .schedule import Schedule


def divide_work(schedule: Schedule) -> Schedule:
    """Decide what one thread has at a time, and whether a whole block goes along a row."""
    if schedule.across >= 0:
        schedule = replace(schedule, times=4)  # of the 32 × 32 points of a tile
    if schedule.kernel.is_histogram:
        return replace(schedule, wide=True, held=1)
    if not schedule.reducing or schedule.pane is not None:
        return replace(schedule, held=1)
    held = 1 if schedule.rows and not schedule.sliding else schedule.width
    if schedule.scanning or schedule.sliding:
        return replace(schedule, held=held)
    wide = schedule.rows and is_wide(schedule)
    return replace(schedule, held=held, wide=wide)


def limit_blocks(schedule: Schedule, units: int) -> int:
    """The blocks of a launch, for so many blocks' work."""
    return max(1, min(units, schedule.processors * tuning.WAVES))


def share_results(schedule: Schedule, results_: int) -> tuple[int, int, int, int]:
    """Decide how a reduction is divided among blocks and lanes.

    Returns how many results a block makes at a time, lanes for each, how many blocks share
    them, and how many steps each block does.
    """
    rows = schedule.rows
    steps = schedule.steps()
    if schedule.across >= 0:
        steps = schedule.tile_count("r")
        share = max(1, min(steps // 2, schedule.processors * tuning.SHARED_WAVES // 2))
        return 1, tuning.THREADS, share, 0
    if rows and not schedule.wide:
        lanes = max(power_above(-(-steps // tuning.LANE_STEPS)), min(8, power_above(steps)))
        lanes = min(lanes, 32)
        return tuning.THREADS // lanes, lanes, 1, max(steps, 1)
    if rows:
        room = schedule.processors * tuning.ROW_WAVES // max(results_, 1)
        often = min(2 * schedule.times, 8)  # steps of a thread, at least
        share = max(1, min(room, -(-steps // (tuning.THREADS * often))))
        long = -(-max(steps, 1) // share)
        long = -(-long // tuning.THREADS) * tuning.THREADS
        return 1, tuning.THREADS, max(1, -(-steps // long)), long
    if results_ >= 32:
        lanes = min(tuning.LANES, power_below(max(steps // 4, 1)))
        side = tuning.THREADS // lanes
        while side > 32 and side // 2 >= results_:
            side, lanes = side // 2, lanes * 2
    else:
        side = power_above(max(results_, 1))
        lanes = tuning.THREADS // side
    groups = max(1, -(-results_ // side))
    slots = schedule.processors * tuning.COLUMN_WAVES
    room = slots // groups or _divide_evenly(groups, slots)
    share = max(1, min(room, -(-steps // (lanes * tuning.COLUMN_STEPS))))
    long = -(-max(steps, 1) // share)
    return side, lanes, max(1, -(-steps // long)), long


def is_wide(schedule: Schedule) -> bool:
    """Whether a whole block, not a warp, goes along a row."""
    steps = schedule.steps()
    return schedule.across >= 0 or (
        steps > tuning.WIDE_STEPS and -(-schedule.points // 8) < schedule.processors * 8
    )  # fmt: skip


def _divide_evenly(groups: int, slots: int) -> int:
    """Choose parts of each group: of `slots` at a time, the last are no small rest."""
    waste = {n: -groups * n % slots / (groups * n) for n in range(1, 5)}
    most = tuning.EMPTY_PART
    return min(waste, key=lambda n: (waste[n] > most, waste[n] if waste[n] > most else n))
