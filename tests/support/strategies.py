"""Any graph, any machine, any order of completion: what the property tests draw from.

Also plans written by hand for the stories, and fakes that are harsher than those that ship.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import Any

from dask._task_spec import Task, TaskRef
from dask.array.core import finalize
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from gpuscheduler.frontend.lowering import from_dask, received_by_scheduler
from gpuscheduler.plan.build import make_plan
from gpuscheduler.plan.machine import DISK, ENDLESS, HOST, Machine
from gpuscheduler.plan.plan import Plan, Step
from gpuscheduler.runtime.events import Copied, Done, Issued, NoRoom
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.simulated import InOrderDevices, ShuffledDevices

#: `GPUSCHEDULER_EXAMPLES=100000 pytest tests/runtime/test_state.py` looks harder.
EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "75"))
#: A fresh search each time (no database), as long as it takes (the machine may be shared).
thorough = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

UNIT = 2**10  # bytes; sizes are 0 to 16 of these, and a window may hold up to 20 or so


# ---- plans by hand


def alter(plan: Plan, **facts: Any) -> None:
    """Change a plan in place, to make a test's odd plan; the package makes new ones."""
    for name, fact in facts.items():
        object.__setattr__(plan, name, fact)
    for name in ("short", "movable"):  # which depend on them
        vars(plan).pop(name, None)


def plan_of(*steps, memory, wanted=(), deliver=(), guessed=(), fixed=(), kinds=None, there=None):
    """A plan from `(name, "inputs", place)` or `(name, "inputs", place, nbytes)`, in this order.

    Names have one letter; values have 8 bytes unless told. `memory` is that of each device.
    `wanted` are the outputs (by default the last step), `guessed` those of unknown size, `fixed`
    the values of the graph that live on their device from the start, `there` those that are in the
    places it says, and may be moved; `kinds` gives each step a letter: the same letter, the same
    kind of step.
    """
    names, there = [name for name, *_ in steps], there or {}
    index = {name: i for i, name in enumerate(names)}
    out = []
    for i, (name, reads, place, *nbytes) in enumerate(steps):
        inputs = tuple(index[r] for r in reads)
        out.append(
            Step(
                key=name,
                task=Task(name, mix, i, *(TaskRef(r) for r in reads)),
                inputs=inputs,
                names=tuple(reads),
                sources=inputs,
                constants={},
                place=place,
                nbytes=nbytes[0] if nbytes else 8,
                known=name not in guessed,
                seconds=1e-3,
                kind=ord(kinds[i]) if kinds else i,
                fixed=name in fixed or name in there,
            )
        )
    outputs = tuple(index[k] for k in wanted or names[-1])
    machine = replace(Machine.uniform(len(memory)), memory=tuple(memory))
    delivered = frozenset(index[k] for k in deliver)
    places = {index[k]: frozenset(p) for k, p in there.items()}
    return Plan(out, outputs, machine, delivered, index=index, there=places)


def mix(key, *values):
    """A number that tells from which values, in which order, it was made."""
    return reduce(lambda h, v: (h * 1_000_003 + v) % (2**61 - 1), values, key + 1)


# ---- anything


@st.composite
def dags(draw, min_tasks=1, max_tasks=30):
    """A Dask graph of numbers, and the keys that are wanted of it."""
    n = draw(st.integers(min_tasks, max_tasks))
    rows = draw(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=n, max_size=n))
    dsk = {}
    for i, row in enumerate(rows):
        reads = dict.fromkeys(r % i for r in row) if i else ()
        dsk[i] = Task(i, mix, i, *(TaskRef(r) for r in reads))
    keys = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4, unique=True))
    return dsk, keys


@dataclass
class Case:
    """A run: what, on which machine, how deep, and in which order things come to an end."""

    dsk: dict
    keys: list
    plan: Plan
    sizes: list[int]  # true ones
    window: int
    deep_window: int
    ahead: bool
    refuse: bool  # whether the allocator keeps to the limit
    rng: object
    stuck: frozenset  # steps whose values no disk can hold

    @property
    def fixed(self):
        """Steps that are there from the start: values of the graph, and persisted chunks."""
        return {i for i, s in enumerate(self.plan.steps) if s.fixed}

    @property
    def rooted(self):
        """... and those of them that stay on their device."""
        return self.fixed.difference(self.plan.there)

    def run(self, devices):
        return run(self.plan, devices, None, self.window, self.deep_window, self.ahead, check=True)

    def devices(self):
        fake = LateDevices if self.ahead else UnorderedDevices
        devices = fake(self.plan, self.rng, self.sizes, self.refuse)
        devices.stuck = self.stuck
        return devices


@st.composite
def cases(draw, exact=False, room=True, stuck=False, full=False, persisted=True, apart=False):
    """Any run. With `exact` all sizes are known; with `room` every step fits by itself; with
    `persisted` some values are there from the start, in any place, and may be moved; devices that
    are `apart` have each their own memory.

    Without, some step misses one byte. With `stuck` the disk cannot hold some of the values; with
    `full` there is never room on the devices, seldom on the host, and often a refusal.
    """
    dsk, keys = draw(dags(min_tasks=15, max_tasks=40) if full else dags())
    if full:
        keys = list(dict.fromkeys([max(dsk), *keys]))
    devices = draw(st.integers(1, 2 if full else 8))
    shared = not apart and draw(st.booleans())
    plan = make_plan(from_dask(dsk, keys), Machine.uniform(devices, shared=shared))
    n = len(plan.steps)

    def each(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    size = st.integers(int(full), 16).map(lambda s: s * UNIT)
    sizes = each(size)
    guesses = sizes if exact or draw(st.booleans()) else each(size)
    if full and not exact:
        guesses = each(st.integers(0, 3).map(lambda s: s * UNIT))
    known = [True] * n if exact else each(st.booleans())
    if not exact and draw(st.booleans()):  # guesses beyond all measure, which stop nothing
        wild = each(st.booleans())
        guesses = [g if k or not w else 2**40 for g, k, w in zip(guesses, known, wild, strict=True)]
    for step, place, guess, k in zip(
        plan.steps, each(st.integers(0, devices - 1)), guesses, known, strict=True
    ):
        step.place, step.nbytes, step.known = place, guess, k
    for step, kind in zip(plan.steps, each(st.integers(0, 3)), strict=True):
        step.kind = kind
    if draw(st.booleans()):  # some that read files or write them
        for step, aside in zip(plan.steps, each(st.booleans()), strict=True):
            step.aside = aside
            step.again = aside and not step.inputs and draw(st.booleans())
    if draw(st.booleans()):
        for step, true, fixed in zip(plan.steps, sizes, each(st.booleans()), strict=True):
            if fixed and not step.inputs:  # the value is there, so its size is no secret
                step.fixed, step.nbytes, step.known = True, true, True
    fixed = [i for i, s in enumerate(plan.steps) if s.fixed]
    for i in fixed:
        plan.steps[i].aside = plan.steps[i].again = False
    chunks = {i for i in fixed if persisted and draw(st.booleans())}
    held, need = [0] * devices, [0] * devices
    most = [max(s.nbytes * s.known, true) for s, true in zip(plan.steps, sizes, strict=True)]
    for i, s in enumerate(plan.steps):
        if s.fixed:
            held[s.place] += 0 if shared or i in chunks else most[i]
            continue
        there = [
            j
            for j in s.inputs
            if plan.steps[j].fixed
            and j not in chunks
            and (shared or plan.steps[j].place == s.place)
        ]
        one = most[i] + sum(most[j] for j in s.inputs if j not in there)
        need[s.place] = max(need[s.place], one)
    if shared:
        need = [max(need), *[0] * (devices - 1)]
    if room:
        spare = st.integers(0, 20) if full else st.one_of(st.integers(0, 20), st.integers(0, 400))
        spare = spare.map(lambda s: s * UNIT)
        need = [n + draw(spare) for n in need] if not shared else [need[0] + draw(spare), *need[1:]]
    else:
        assume(any(need))
        need = [max(0, n - 1) for n in need]
    memory = tuple(h + n for h, n in zip(held, need, strict=True))
    little = st.integers(0, 40).map(lambda s: s * UNIT)
    host = draw(little if full else st.one_of(st.just(ENDLESS), little))
    alter(plan, machine=replace(plan.machine, memory=memory, host_memory=host))
    places = st.sets(st.sampled_from([DISK, 0] if shared else [DISK, HOST, 0]), min_size=1)
    alter(plan, there=_fitting({i: draw(places) for i in sorted(chunks)}, plan))
    alter(
        plan, deliver=frozenset(i for i in plan.outputs if i not in chunks and draw(st.booleans()))
    )
    return Case(
        dsk,
        keys,
        plan,
        sizes,
        window=draw(st.integers(1, 6)),
        deep_window=draw(st.sampled_from([1, 8, 64])),
        ahead=draw(st.booleans()),
        refuse=full or draw(st.booleans()),
        rng=draw(st.randoms(use_true_random=False)),
        stuck=frozenset(i for i in range(n) if stuck and draw(st.booleans())),
    )


def _fitting(wanted, plan):
    """Where chunks are at the start: places that were drawn, where 0 is home.

    A chunk for which its place has no room beside what stays there is on the disk.
    """
    machine, out = plan.machine, {}
    room = {p: machine.limit(p) for p in (DISK, HOST, *machine.memories)}
    for i, s in enumerate(plan.steps):
        if s.fixed and i not in wanted and not machine.shared:
            room[s.place] -= s.nbytes
    for i, places in wanted.items():
        s = plan.steps[i]
        there = {p if p < 0 else machine.memory_of(s.place) for p in places}
        out[i] = frozenset(p for p in there if room[p] >= s.nbytes) or frozenset({DISK})
        for p in out[i]:
            room[p] -= s.nbytes
    return out


# ---- harsher fakes


class StrictDevices(ShuffledDevices):
    """Counts refusals, keeps a log, and finds fault with what is superfluous."""

    def __init__(self, plan, rng, nbytes, refuse=False):
        super().__init__(plan, rng, nbytes, refuse)
        self.refused = 0  # times that memory was refused, or what was launched behind it
        self.log = []  # every verb, in order
        self.stuck = frozenset()  # steps whose values no disk can hold

    def launch(self, step, place):
        self.log.append(("launch", step, place))
        assert place == self.plan.steps[step].place
        assert not self.plan.steps[step].fixed, f"step {step} is a value of the graph: it is there"
        super().launch(step, place)

    def copy(self, step, src, dst):
        self.log.append(("copy", step, src, dst))
        assert (step, dst) not in self.values, f"step {step} is on {dst} already"
        coming = {(args[0], args[2]) for _, args in self.flying if len(args) == 3}
        assert (step, dst) not in coming, f"step {step} is on its way to {dst} already"
        super().copy(step, src, dst)

    def free(self, step, place):
        self.log.append(("free", step, place))
        s = self.plan.steps[step]
        home = self.memory_of(s.place)
        stays = s.fixed and step not in self.plan.there and home == place
        assert not stays, f"step {step} is the caller's: it stays"
        super().free(step, place)

    def _is_refused(self, step, place):
        return place == DISK and step in self.stuck or super()._is_refused(step, place)


class LateDevices(StrictDevices):
    """As a GPU: a step is `Issued` long before it is `Done`, and reads its inputs all that time.

    Between the two anything else may land: copies of its value, steps that were queued behind it.
    A copy is heard of long after it has come, maybe after the end of a step that reads it there.
    """

    def __init__(self, plan, rng, nbytes, refuse=False):
        super().__init__(plan, rng, nbytes, refuse)
        self.running = defaultdict(list)  # place -> steps that are issued, not done
        self.landed = []  # copies that were not reported yet

    def copy(self, step, src, dst):
        assert all((e.step, e.dst) != (step, dst) for e in self.landed)
        super().copy(step, src, dst)

    def free(self, step, place):
        here = [steps for p, steps in self.running.items() if self.memory_of(p) == place]
        for i in chain.from_iterable(here):
            assert step != i, f"step {step} freed before it is done"
            assert step not in self.plan.steps[i].inputs, f"step {step} freed while {i} reads it"
        for e in self.landed:
            assert step != e.step or place not in (e.src, e.dst), f"{e} is not known yet"
        super().free(step, place)

    def wait(self):
        late = [steps for _, steps in sorted(self.running.items()) if steps]
        late += [[e] for e in self.landed]
        choice = self.rng.randrange(len(late) + len(self._possible_arrivals()) or 1)
        if choice < len(late):
            first = late[choice].pop(0)
            if type(first) is Copied:
                self.landed.remove(first)
                return [first]
            return [Done(first)]
        (event,) = super().wait()
        if type(event) is Issued:
            done = self.events.pop()
            assert done == Done(event.step)
            self.running[self.plan.steps[event.step].place].append(event.step)
        elif type(event) is Copied and self.rng.random() < 0.5:
            self.landed.append(event)
            return self.wait()
        elif type(event) is NoRoom:
            self.refused += 1
        return [event]


class UnorderedDevices(StrictDevices):
    """As a pool of threads: steps on one place end in any order, so none may count on another."""

    def launch(self, step, place):
        for j in self.plan.steps[step].inputs:
            here = (j, self.memory_of(place)) in self.values
            assert here, f"step {step}: its input {j} is not on {place}"
        super().launch(step, place)

    def wait(self):
        events = super().wait()
        self.refused += type(events[0]) is NoRoom
        return events

    def _possible(self):
        return range(len(self.flying))


def graph_of(*collections, **options):
    """The `Graph` of a computation of these."""
    return from_dask(*received_by_scheduler(*collections, **options))


def scheduler_on(devices, log=None, memory=2**63 - 1):
    """A Dask `get` on devices that are not there, for collections; `log` gets the devices used."""

    def get(dsk, keys, **_):
        graph = from_dask(dsk, keys)
        plan = make_plan(graph, Machine.uniform(devices, memory=memory))
        fakes = InOrderDevices(plan)
        state = run(plan, fakes, check=True)
        state.validate_end()
        if log is not None:
            log.append((plan, fakes))

        def value(key):
            if isinstance(key, list):
                return [value(k) for k in key]
            target = graph.alias.get(key, key)
            if target in graph.gathers:
                return finalize(value(graph.gathers[target].blocks))
            return graph.data[target] if target in graph.data else fakes.value(plan.index[target])

        return value(keys)

    return get


__all__ = [
    "EXAMPLES",
    "HOST",
    "UNIT",
    "Case",
    "LateDevices",
    "UnorderedDevices",
    "cases",
    "dags",
    "graph_of",
    "mix",
    "plan_of",
    "received_by_scheduler",
    "scheduler_on",
    "thorough",
]
