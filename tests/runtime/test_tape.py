"""Tapes: what a run does where everything fits, written down and followed."""

from __future__ import annotations

from dataclasses import replace

import dask
from hypothesis import given

from gpuscheduler.errors import OutOfMemory
from gpuscheduler.plan.machine import Machine
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.simulated import InOrderDevices
from gpuscheduler.runtime.tape import by_turns, interleave_orders, record_tape
from tests.support.strategies import alter, cases, plan_of, thorough


class Watched(InOrderDevices):
    """Devices that count bytes, and look at what a tape says beside its verbs."""

    def __init__(self, plan):
        super().__init__(plan, {i: s.nbytes for i, s in enumerate(plan.steps)})
        self.peak = dict.fromkeys(plan.machine.devices, 0)
        self.left = set()
        self._count()

    def _count(self):
        for d in self.peak:
            held = sum(self.nbytes[i] for i, place in self.values if place == d)
            self.peak[d] = max(self.peak[d], held)

    def launch(self, step, place):
        assert place == self.plan.steps[step].place
        assert (step, place) not in self.values
        super().launch(step, place)
        self._count()

    def copy(self, step, src, dst):
        assert (step, dst) not in self.values
        super().copy(step, src, dst)
        self._count()

    def free(self, step, place):
        assert step not in self.plan.outputs
        assert not self.plan.steps[step].fixed
        assert self.plan.steps[step].place == place
        assert not any(i == step for i, p in self.values if p != place), "others have copies of it"
        super().free(step, place)
        self.left.add(step)

    def follow(self, tape):
        came = set()  # replicas that nobody waited for yet
        for place, orders in tape.orders:
            for verb, step, others in orders:
                if verb == "fetch":
                    came.add((step, place))
                elif verb == "launch":
                    replicas = {(j, place) for j in self.plan.steps[step].inputs} & came
                    assert {(j, place) for j in others} == replicas
                    came -= replicas
        return super().follow(tape)


def follow(plan):
    tape = record_tape(plan)
    assert tape is not None
    devices = Watched(plan)
    assert devices.follow(tape)
    return tape, devices


@thorough
@given(cases(exact=True, persisted=False))
def test_a_tape_does_what_the_run_does(case):
    plan = case.plan
    tape = record_tape(plan)
    hard = plan.deliver or plan.machine.shared or any(s.aside for s in plan.steps)
    if tape is None:
        alter(plan, machine=replace(plan.machine, memory=(2**62,) * len(plan.machine.devices)))
        assert hard or record_tape(plan) is not None  # it was the memory that did not suffice
        return
    assert not hard
    devices = Watched(plan)
    devices.follow(tape)
    wanted = dask.get(case.dsk, case.keys)
    assert [devices.value(plan.index[k]) for k in case.keys] == list(wanted)
    launched = {i for i, s in enumerate(plan.steps) if not s.fixed}
    assert {i for i, _ in devices.values} | devices.left >= launched
    # what is counted is all there ever was
    for d, most in devices.peak.items():
        assert most <= tape.peak[d] <= plan.machine.memory[d]
    # and bytes over links are those of a run
    reference = InOrderDevices(plan, dict(enumerate(s.nbytes for s in plan.steps)))
    run(plan, reference, check=True)
    assert devices.traffic == reference.traffic
    assert tape.footprint(1.0, {0: 5}).peak[0] == tape.peak[0] + 5


def test_values_of_one_device_go_when_they_were_read_and_crossing_ones_stay():
    steps = [("a", "", 0, 100), ("b", "a", 0, 10), ("c", "b", 1, 10), ("d", "c", 1, 1)]
    plan = plan_of(*steps, memory=(1000, 1000), wanted="d")
    tape, devices = follow(plan)
    verbs = [(place, verb, step) for place, orders in tape.orders for verb, step, _ in orders]
    assert (0, "free", 0) in verbs
    assert (1, "free", 2) in verbs
    assert (0, "free", 1) not in verbs  # device 1 may be reading it still
    # device 0 counts b twice, as it stays; device 1 its copy
    assert tape.peak == {0: 120, 1: 31}
    assert devices.peak == {0: 110, 1: 21}


def test_there_is_no_tape_where_something_would_have_to_leave():
    steps = [("a", "", 0, 60), ("b", "", 0, 60), ("c", "ab", 0, 8), ("d", "ac", 0, 8)]
    for memory, fits in ((128, True), (127, False)):
        plan = plan_of(*steps, memory=(memory,), wanted="d")
        assert (record_tape(plan) is not None) is fits


def test_there_is_no_tape_for_results_on_the_host_nor_beside_files():
    steps = [("a", "", 0), ("b", "a", 0)]
    assert record_tape(plan_of(*steps, memory=(100,), deliver="b")) is None
    plan = plan_of(*steps, memory=(100,))
    plan.steps[0].aside = True
    assert record_tape(plan) is None
    plan = plan_of(*steps, memory=(100,))
    alter(plan, machine=Machine.uniform(1, shared=True))
    assert record_tape(plan) is None


def test_a_step_that_can_never_fit_has_no_tape():
    plan = plan_of(("a", "", 0, 60), memory=(59,))
    assert record_tape(plan) is None
    try:
        run(plan, InOrderDevices(plan))
    except OutOfMemory:
        return
    raise AssertionError("the run has to say so")


def test_every_device_gets_one_order_before_any_gets_two():
    plan = plan_of(*[(c, "", n % 2) for n, c in enumerate("abcdefgh")], memory=(100, 100))
    todo = [[("launch", i, d) for i in range(8) if i % 2 == d] for d in range(2)]
    given = [
        (place, [step for _, step, _ in orders]) for place, orders in interleave_orders(plan, todo)
    ]
    assert given == [(0, [0]), (1, [1]), (0, [2, 4]), (1, [3, 5]), (0, [6]), (1, [7])]


def test_copies_come_from_the_next_device_first_with_what_reads_them_behind():
    steps = [(c, "", n) for n, c in enumerate("abcd")]
    steps += [("x", "b", 2), ("y", "d", 2), ("z", "c", 2)]
    plan = plan_of(*steps, memory=(100,) * 4, wanted="xyz")
    todo = [("fetch", 1, 1), ("launch", 4, 2), ("fetch", 3, 3), ("launch", 5, 2), ("launch", 6, 2)]
    turned = by_turns(plan, 2, todo)
    # of its own first, then from device 3, then from device 1, which is three further
    assert [step for _, step, _ in turned] == [6, 3, 5, 1, 4]
    free = [*todo, ("free", 0, 2)]
    assert by_turns(plan, 2, free) == free  # what makes room keeps its place


def test_a_copy_is_waited_for_once_and_its_source_counted_once():
    """a is read twice on device 1 and once on device 2."""
    steps = [("a", "", 0, 100), ("b", "a", 1, 1), ("c", "ab", 1, 1), ("d", "a", 2, 1)]
    plan = plan_of(*steps, memory=(1000,) * 3, wanted="cd")
    tape, _ = follow(plan)
    launches = {step: waits for _, o in tape.orders for v, step, waits in o if v == "launch"}
    assert launches == {0: (), 1: (0,), 2: (), 3: (0,)}
    assert tape.peak[0] == 200  # once as it is made, once as it stays


def test_what_a_run_needs_beside_results_that_nobody_reads():
    """a and b are there together, then c beside b, then d: of 8 bytes each."""
    steps = ("a", "", 0), ("b", "", 0), ("c", "ab", 0), ("d", "b", 0)
    tape = record_tape(plan_of(*steps, memory=(1000,), wanted="cd"))
    assert tape.unread == (2, 3)
    assert tape.peak_without_unread == {0: 16}
    assert tape.peak == {0: 32}
    assert tape.footprint(0.0, {0: 5}, {0: 40}).peak[0] == 45
