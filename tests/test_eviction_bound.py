"""The fewest bytes that any eviction moves: beside all evictions there are, and beside ours."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given

from gpuscheduler.plan.machine import ENDLESS, HOST
from gpuscheduler.runtime.loop import run
from graphs import matmul, transpose_sum
from graphs.bench.eviction import Orderly, fewest, immovable, limited, traffic
from tests.support.strategies import alter, cases, plan_of, thorough

NAMES = "abcdefgh"


def small_plan(rng, devices, largest):
    """A plan with some values in any places, and steps that read up to two earlier values.

    Memory is little more than the steps need.
    """
    steps, there, fixed = [], {}, []
    count = rng.randint(1, 4)
    for i, name in enumerate(NAMES):
        place = rng.randrange(devices)
        reads = "" if i < count else rng.sample(NAMES[:i], min(i, rng.randint(0, 2)))
        steps.append((name, reads, place, rng.randint(1, largest)))
        if i < count and rng.random() < 0.2:
            fixed.append(name)
        elif i < count:
            there[name] = rng.choice([{HOST}, {HOST, place}, {place}])
    wanted = sorted(rng.sample(NAMES[count:], 2))
    memory = [0] * devices
    plan = plan_of(
        *steps, memory=memory, there=there, fixed=fixed, wanted=wanted, deliver=wanted[:1]
    )
    for s in plan.steps:
        need = s.nbytes + sum(plan.steps[j].nbytes for j in s.inputs)
        memory[s.place] = max(memory[s.place], need)
    for s in plan.steps:  # more than enough for what is there
        memory[s.place] += s.nbytes * s.fixed
    alter(plan, machine=replace(plan.machine, memory=tuple(memory)))
    return plan


def best(plan):
    """The same as `fewest`, in the plan's own order, from each choice of what to keep."""
    steps, n = plan.steps, [s.nbytes for s in plan.steps]
    order = [i for i, s in enumerate(steps) if not s.fixed]
    home = {(i, s.place) for i, s in enumerate(steps) if immovable(plan, i)}
    room = [
        most - sum(n[v] for v, p in home if p == d) for d, most in enumerate(plan.machine.memory)
    ]
    kept = {i for i, s in enumerate(steps) if s.fixed}.union(plan.outputs)
    last = [len(steps) if i in kept else max(r, default=-1) for i, r in enumerate(plan.readers)]
    found = {frozenset((i, p) for i, places in plan.there.items() for p in places): 0}
    for i in [*order, len(steps)]:
        step = steps[i] if i < len(steps) else None
        needs = set() if step is None else {(v, step.place) for v in (i, *step.inputs)} - home
        sent = {(i, HOST)} if i in plan.deliver else set()
        after = {}
        for contents, cost in found.items():
            come = sum(n[v] for v, _ in needs - contents if v != i) + sum(n[v] for v, _ in sent)
            stays = {c for c in contents if c[1] == HOST} | needs | sent
            loose = sorted(c for c in contents - stays if last[c[0]] >= i)
            for chosen in product((False, True), repeat=len(loose)):
                left = stays.union(c for c, keep in zip(loose, chosen, strict=True) if keep)
                held = [0] * len(room)
                for v, p in left:
                    held[p] += n[v] if p >= 0 else 0
                if step is not None and held[step.place] > room[step.place]:
                    continue
                somewhere = {v for v, _ in left | home}
                lost = {v for v, _ in loose} - somewhere  # but for the host
                state = frozenset(left | {(v, HOST) for v in lost})
                total = cost + come + sum(n[v] for v in lost)
                after[state] = min(total, after.get(state, total))
        found = after
    return min(found.values())


def order_of(plan):
    return [i for i, s in enumerate(plan.steps) if not s.fixed]


@pytest.mark.parametrize(("devices", "largest"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_no_choice_of_what_is_kept_moves_less(devices, largest):
    """The best choice moves as much in all of these plans, where values are equal.

    It need not in every plan: of unequal values a part may stay.
    """
    rng = random.Random(devices + largest)
    found = []
    for _ in range(100):
        plan = small_plan(rng, devices, largest)
        found.append((fewest(plan, order_of(plan)), best(plan)))
    assert all(least <= optimum + 1e-6 for least, optimum in found)
    if largest == 1:
        assert all(least >= optimum - 1e-6 for least, optimum in found)
    assert sum(least for least, _ in found) > 0.9 * sum(optimum for _, optimum in found)


def belady(reads, room):
    """Misses when what is needed last leaves."""
    held, misses = set(), 0
    for t, v in enumerate(reads):
        if v not in held:
            misses += 1
            if len(held) == room:
                held.remove(max(held, key=lambda w: (reads + [w]).index(w, t + 1)))
            held.add(v)
    return misses


def test_where_all_is_on_the_host_it_is_beladys_rule():
    """Steps of no bytes that read one value each of five, and three fit."""
    rng = random.Random(0)
    for _ in range(20):
        reads = [rng.choice("abcde") for _ in range(30)]
        steps = [(v, "", 0, 8) for v in "abcde"]
        steps += [(chr(ord("f") + t), v, 0, 0) for t, v in enumerate(reads)]
        plan = plan_of(*steps, memory=(24,), there=dict.fromkeys("abcde", {HOST}))
        assert fewest(plan, order_of(plan)) == pytest.approx(8 * belady(reads, 3))


def test_a_value_that_was_made_here_goes_and_comes_back():
    """a, b and c are made before a is read again, and two fit: 8 bytes out, 8 bytes in."""
    steps = ("a", "", 0), ("b", "", 0), ("c", "b", 0), ("d", "ac", 0, 0)
    assert traffic(plan_of(*steps, memory=(16,))) == (16, 16)
    assert traffic(plan_of(*steps, memory=(99,))) == (0, 0)


@thorough
@given(cases(exact=True))
def test_no_run_of_ours_moves_less(case):
    """Where the host has room and steps begin when they are reserved."""
    plan = case.plan
    assume(not plan.machine.shared)
    alter(plan, machine=replace(plan.machine, host_memory=ENDLESS))
    for s in plan.steps:
        s.aside = s.again = False
    # what waits for the disk begins after steps that were reserved behind it
    alter(plan, there={i: {max(p, HOST) for p in places} for i, places in plan.there.items()})
    clock = Orderly(plan)
    run(plan, clock, None, case.window, case.deep_window)
    least = fewest(plan, clock.order)
    assert sum(clock.traffic.values()) >= least * (1 - 1e-6) - 1e-3


@pytest.mark.filterwarnings("ignore::dask.array.PerformanceWarning")
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("workload", [transpose_sum, matmul], ids=["transpose_sum", "matmul"])
def test_ours_moves_little_more_than_the_best(workload, devices):
    """With a quarter of the working set, on inputs that are persisted."""
    plan = limited(workload, 8, devices, made=False)
    assert traffic(plan).ratio <= 1.2
