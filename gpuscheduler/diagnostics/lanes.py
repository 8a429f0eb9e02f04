"""What each device did in the latest seconds, in bins: read turn by turn, bounded in memory.

A run may have millions of steps, and a page has a thousand pixels. So the time of steps is added up
by device, bin and label as it is read, and a bin shows the label that took most of it.

Of runs that began before anybody looked, no turns were kept. There the state is sampled: the time
between two looks goes to the steps that were done in it, and to those under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ..plan.machine import HOST
from ..plan.step_table import step_table
from ..runtime.observe import Recorder, Row, RunRecord, TurnDecoder, decode_rows
from ..runtime.state import State

#: Seconds that lanes show.
WINDOW = 30.0
#: Bins of that time.
BINS = 600
#: Replays whose steps are read one by one at each look; others get the same shares of time.
REPLAYS = 4
#: Steps of a replay that is read one by one, at most.
MOST_STEPS = 5000
#: Labels that are kept apart; those beyond are shown as one.
LABELS = 64
OTHERS = "others"


class Bar(NamedTuple):
    """Bins of one place in a row that show the same label."""

    first: int  # bin
    bins: int  # how many
    label: str
    busy: float  # the part of that time in which steps ran, from 0 to 1


class LabelTotal(NamedTuple):
    """The steps with one label, since lanes are read."""

    label: str
    line: str
    seconds: float
    steps: int


class LaneReader:
    """Reads what a recorder has got since the last look.

    Times are ns of the recorder's clock. `peaks` are the most bytes of each place since then.
    """

    def __init__(self, recorder: Recorder, window: float = WINDOW, bins: int = BINS):
        self.recorder, self.bins = recorder, bins
        self.width = int(window * 1e9 / bins)  # ns of a bin
        self.since = recorder.clock()
        self.peaks: dict[int, int] = {}
        #: By place and bin: ns by label.
        self._busy: dict[int, dict[int, Counter[str]]] = {}
        #: By place: label, line and begin of the step that runs now.
        self._open: dict[int, tuple[str, str, int]] = {}
        self._seconds: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        self._lines: dict[str, str] = {}
        #: By run: what was read of it, and how many of its turns.
        self._decoders: dict[int, tuple[TurnDecoder, int]] = {}
        #: By run that is sampled: when it was looked at, in ns, and which steps were done then.
        self._sampled: dict[int, tuple[int, Any]] = {}
        self._replayed = 0  # number of the latest replay that was read
        self._shares: dict[int, list[tuple[int, str, int, int]]] = {}  # by tape

    # ---- reading

    def read(self) -> None:
        """Read all that is new, and forget what is older than the window."""
        now = self.recorder.clock()
        self.peaks, self._open = {}, {}
        replays: list[RunRecord] = []
        alive = set()
        for record in self.recorder.records(self.since):
            alive.add(record.number)
            if record.how == "replay":
                if record.is_over and record.number > self._replayed:
                    replays.append(record)
            elif record.table is not None and record.admitted:
                self._read_turns(record)
            elif record.table is None and not record.is_over:
                self._sample(record, now)
        self._read_replays(replays)
        for known in (self._decoders, self._sampled):
            for number in known.keys() - alive:
                del known[number]
        self.since = max(self.since, now - self.bins * self.width)
        first = self.since // self.width
        for lanes in self._busy.values():
            for old in [b for b in lanes if b < first]:
                del lanes[old]

    def _read_turns(self, record: RunRecord) -> None:
        table, state = record.table, record.state
        assert table is not None
        turns = record.turns.copy()
        total = record.dropped + len(turns)
        decoder, seen = self._decoders.get(record.number, (None, 0))
        if decoder is None or decoder.table is not table or total < seen:  # a run may begin anew
            decoder, seen = TurnDecoder(record, table), 0
        self._decoders[record.number] = decoder, total
        for turn in islice(turns, max(0, seen - record.dropped), None):
            decoder.read(turn)
            for place, used in zip(record.memories, turn.used, strict=False):
                self.peaks[place] = max(used, self.peaks.get(place, 0))
        for row in decoder.rows:
            self._add(row.place, row.label, row.line, row.begin, row.end)
        decoder.rows, decoder.copies = [], []
        if state is None:
            return
        for i in _under_way(state):  # the first of each place's queue runs now
            place = HOST if record.is_host else table.places[i]
            if place not in self._open:  # a turn is written when something has come back
                begin = decoder.launched.get(i, decoder.latest)
                begin = max(begin, decoder.free.get(table.places[i], 0))
                self._open[place] = table.label(i), table.line(i), begin

    def _sample(self, record: RunRecord, now: int) -> None:
        """Share the time since the last look among the steps that were done, and those begun."""
        state, plan = record.state, record.plan
        if state is None or plan is None:
            return
        table = step_table(state.plan)
        done = np.frombuffer(bytes(state.done), bool)
        begun, before = self._sampled.get(record.number, (now, done))
        if len(before) != len(done):  # it began anew, with another plan
            begun, before = now, done
        self._sampled[record.number] = now, done
        fresh = np.flatnonzero(done & ~before)
        shares: dict[int, dict[int, float]] = {}  # by place: predicted seconds by group
        for i in fresh.tolist():
            share = shares.setdefault(table.places[i], {})
            share[table.groups[i]] = share.get(table.groups[i], 0.0) + table.seconds[i] + 1e-9
            self._steps[table.label(i)] += 1
        first: set[int] = set()
        for i in _under_way(state):
            place = table.places[i]
            if place not in first:
                first.add(place)
                share = shares.setdefault(place, {})
                share[table.groups[i]] = share.get(table.groups[i], 0.0) + table.seconds[i] + 1e-9
        for place, share in shares.items():
            shown, at, every = HOST if record.is_host else place, begun, sum(share.values())
            for group, part in share.items():
                end = at + int((now - begun) * part / every)
                self._add(shown, table.labels[group], table.lines[group], at, end, steps=0)
                at = end

    def _read_replays(self, replays: list[RunRecord]) -> None:
        fresh = [r for r in replays if r.table is not None]
        for record in fresh[-REPLAYS:]:
            if record.table is not None and len(record.table) <= MOST_STEPS:
                rows = decode_rows(record)
                self._shares[id(record.tape)] = self._share(rows, record.admitted)
                for row in rows:
                    self._add(row.place, row.label, row.line, row.begin, row.end)
        for record in fresh[:-REPLAYS]:
            for place, label, begin, end in self._shares.get(id(record.tape), ()):
                self._add(place, label, "", record.admitted + begin, record.admitted + end)
        if replays:
            self._replayed = replays[-1].number
        if len(self._shares) > LABELS:
            self._shares.clear()

    @staticmethod
    def _share(rows: Iterable[Row], start: int) -> list[tuple[int, str, int, int]]:
        """Time of a replay by place and label, one after the other."""
        busy: Counter[tuple[int, str]] = Counter()
        for row in rows:
            busy[row.place, row.label] += row.end - row.begin
        at: dict[int, int] = {}
        out = []
        for (place, label), ns in busy.items():
            begin = at.get(place, 0)
            at[place] = begin + ns
            out.append((place, label, begin, begin + ns))
        return out

    def _add(self, place: int, label: str, line: str, begin: int, end: int, steps: int = 1) -> None:
        if label not in self._seconds and len(self._seconds) >= LABELS:
            label, line = OTHERS, ""
        self._seconds[label] += end - begin
        self._steps[label] += steps
        if line and label not in self._lines:
            self._lines[label] = line
        self._fill(self._busy.setdefault(place, {}), label, begin, end)

    def _fill(self, lanes: dict[int, Counter[str]], label: str, begin: int, end: int) -> None:
        width = self.width
        first = max(begin, self.since) // width
        for b in range(first, max(end, self.since) // width + 1):
            part = min(end, (b + 1) * width) - max(begin, b * width)
            if part > 0:
                lanes.setdefault(b, Counter())[label] += part

    def _with_open(self, now: int) -> dict[int, dict[int, Counter[str]]]:
        """What was read, and the steps that run now, as if they ended now."""
        out = dict(self._busy)
        for place, (label, _, begin) in self._open.items():
            lanes = {b: Counter(c) for b, c in out.get(place, {}).items()}
            self._fill(lanes, label, begin, now)
            out[place] = lanes
        return out

    # ---- what was read

    def bars(self, now: int) -> dict[int, list[Bar]]:
        """Bars of each place; bin 0 is the oldest of the window that ends at `now`."""
        first = now // self.width - self.bins + 1
        out: dict[int, list[Bar]] = {}
        for place, lanes in self._with_open(now).items():
            bars: list[Bar] = []
            for b in sorted(lanes):
                if b < first or not lanes[b]:
                    continue
                label, _ = lanes[b].most_common(1)[0]
                busy = min(1.0, round(sum(lanes[b].values()) / self.width, 1))
                last = bars[-1] if bars else None
                at = b - first
                if last and last.label == label and last.busy == busy and (
                    last.first + last.bins == at
                ):  # fmt: skip
                    bars[-1] = last._replace(bins=last.bins + 1)
                else:
                    bars.append(Bar(at, 1, label, busy))
            out[place] = bars
        return out

    def busy_parts(self, now: int, seconds: float = 1.0) -> dict[int, float]:
        """The part of the latest seconds in which each place ran steps."""
        count = max(1, int(seconds * 1e9 / self.width))
        last = now // self.width - 1  # the one before that under way
        return {
            place: min(1.0, sum(
                sum(lanes[b].values()) for b in range(last - count + 1, last + 1) if b in lanes
            ) / (count * self.width))
            for place, lanes in self._with_open(now).items()
        }  # fmt: skip

    def totals(self, most: int = 20) -> list[LabelTotal]:
        """The labels that took most time, the largest first."""
        seconds, now = Counter(self._seconds), self.recorder.clock()
        lines = dict(self._lines)
        for label, line, begin in self._open.values():
            seconds[label] += now - begin
            lines.setdefault(label, line)
        return [
            LabelTotal(label, lines.get(label, ""), ns / 1e9, self._steps[label])
            for label, ns in seconds.most_common(most)
        ]


def _under_way(state: State) -> list[int]:
    """The steps that are launched and not done, in the plan's order."""
    launched, done = bytes(state.launched), bytes(state.done)
    open_steps = np.frombuffer(launched, bool) & ~np.frombuffer(done, bool)
    return np.flatnonzero(open_steps).tolist()
