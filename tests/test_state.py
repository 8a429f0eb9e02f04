"""The decisions: stories on one screen each, then properties that hold for any run.

In the drawings time goes down, `0` and `1` are devices, H is the host; a value has 8 bytes.
"""

from __future__ import annotations

import dask
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuscheduler.machine import HOST
from gpuscheduler.plan import OutOfMemory
from gpuscheduler.pretend import ClockDevices
from gpuscheduler.state import (
    DEEP_WINDOW,
    LIGHT,
    WINDOW,
    Copied,
    Copy,
    Done,
    Failed,
    Free,
    Issued,
    Launch,
    NoRoom,
    State,
)
from tests.strategies import UnorderedDevices, cases, plan_of, thorough

PLENTY = (10**9, 10**9)


def state_of(plan, **options):
    return State(plan, check=True, **options)


def ran(step, nbytes=8):
    """The two events of a step that went well."""
    return Issued(step, nbytes), Done(step)


# ---- launching


def test_readers_are_launched_right_behind_what_they_read():
    """a - b - c, all on 0: the device runs in order, so nothing has to come back to the host."""
    state = state_of(plan_of(("a", "", 0), ("b", "a", 0), ("c", "b", 0), memory=PLENTY))
    assert state.start() == [Launch(0, 0), Launch(1, 0), Launch(2, 0)]
    assert state.handle(*ran(0)) == []
    assert state.handle(*ran(1)) == [Free(0, 0)]
    assert state.handle(*ran(2)) == [Free(1, 0)]
    state.validate_end()


def test_without_ahead_a_reader_waits_until_its_input_is_issued():
    """The same on a pool of threads, which run in any order: b cannot count on a before it is."""
    plan = plan_of(("a", "", 0), ("b", "a", 0), ("c", "b", 0), memory=PLENTY)
    state = state_of(plan, ahead=False)
    assert state.start() == [Launch(0, 0)]
    assert state.handle(Issued(0, 8)) == [Launch(1, 0)]
    assert state.handle(Done(0), Issued(1, 8)) == [Launch(2, 0)]


def test_a_reader_of_two_values_waits_for_the_one_from_elsewhere():
    """
    a0   b1        a is in 0's own queue, b must come over first: c is not launched before it
      \\ /         has, and d, which is behind it in the plan but needs nothing of it, is.
      c0   d0
    """
    plan = plan_of(("a", "", 0), ("b", "", 1), ("c", "ab", 0), ("d", "", 0), memory=PLENTY)
    state = state_of(plan)
    assert state.start() == [Launch(0, 0), Launch(3, 0), Launch(1, 1)]
    assert state.handle(Issued(1, 8)) == [Copy(1, 1, 0)]
    assert state.handle(Copied(1, 1, 0)) == [Launch(2, 0)]


def test_issued_wakes_readers_on_other_devices_and_done_releases_inputs():
    """a on 0, b on 1: the copy is queued behind a on the device, before the host hears of Done."""
    state = state_of(plan_of(("a", "", 0), ("b", "a", 1), memory=PLENTY))
    assert state.start() == [Launch(0, 0)]
    assert state.handle(Issued(0, 8)) == [Copy(0, 0, 1)]
    assert state.handle(Done(0)) == []  # a is being copied
    assert state.handle(Copied(0, 0, 1)) == [Launch(1, 1)]
    assert state.handle(Issued(1, 8)) == []  # b may be reading still
    assert state.handle(Done(1)) == [Free(0, 0), Free(0, 1)]
    state.validate_end()


def test_a_value_is_copied_once_for_all_readers_on_a_device():
    """a on 0; b and c on 1 wait for the same copy."""
    plan = plan_of(("a", "", 0), ("b", "a", 1), ("c", "a", 1), memory=PLENTY, wanted="bc")
    state = state_of(plan)
    state.start()
    assert state.handle(*ran(0)) == [Copy(0, 0, 1)]
    assert state.handle(Copied(0, 0, 1)) == [Launch(1, 1), Launch(2, 1)]
    assert state.handle(*ran(1)) == []
    assert state.handle(*ran(2)) == [Free(0, 0), Free(0, 1)]


def test_a_copy_comes_from_where_the_value_was_made():
    """a on 0 was copied to 1 for b; c on 2 takes it from 0 all the same: the plan counted on it."""
    plan = plan_of(("a", "", 0), ("b", "a", 1), ("c", "ab", 2), memory=(99, 99, 99))
    state = state_of(plan)
    state.start()
    state.handle(*ran(0))
    state.handle(Copied(0, 0, 1))
    assert state.handle(*ran(1)) == [Copy(0, 0, 2), Copy(1, 1, 2)]


# ---- windows


def test_only_a_window_of_steps_is_under_way():
    """Four roots: more under way than the device needs to be busy would only hold memory."""
    roots = [(k, "", 0) for k in "abcd"]
    state = state_of(plan_of(*roots, memory=PLENTY, wanted="abcd"), window=2, deep_window=3)
    assert state.start() == [Launch(0, 0), Launch(1, 0)]
    assert state.handle(Issued(0, 8)) == []  # a step is under way until it is done
    assert state.handle(Done(0)) == [Launch(2, 0)]


def test_small_values_get_a_deep_window():
    """Steps of a kind whose first value was small: the way to the device is what counts."""
    roots = [(k, "", 0) for k in "abcdef"]
    plan = plan_of(*roots, memory=PLENTY, wanted="abcdef", kinds="xxxxxx")
    state = state_of(plan, window=2, deep_window=4)
    assert state.start() == [Launch(0, 0), Launch(1, 0)]  # nothing is known yet
    assert state.handle(*ran(0)) == [Launch(2, 0), Launch(3, 0), Launch(4, 0)]  # four
    assert state.handle(*ran(1, LIGHT)) == [Launch(5, 0)]


def test_one_large_value_ends_the_deep_window_of_its_kind():
    roots = [(k, "", 0) for k in "abcdef"]
    plan = plan_of(*roots, memory=PLENTY, wanted="abcdef", kinds="xxxxxx")
    state = state_of(plan, window=2, deep_window=4)
    state.start()
    assert state.handle(Issued(0, LIGHT + 1), Issued(1, 8)) == []
    assert state.handle(Done(0)) == [Launch(2, 0)]


def test_the_default_windows():
    names = [chr(ord("a") + i) for i in range(WINDOW + 1)]
    state = state_of(plan_of(*[(k, "", 0) for k in names], memory=PLENTY, wanted=names))
    assert len(state.start()) == WINDOW < DEEP_WINDOW


# ---- memory


def test_reserve_all_or_nothing():
    """
    a1  b1   x0    c needs 24 bytes of 0, which has 24: while x is there, c must not take
      \\ /         8 for itself and 8 for a, and hold them against whoever could go on.
      c0
    """
    plan = plan_of(
        ("x", "", 0), ("y", "x", 1), ("a", "", 1), ("b", "", 1), ("c", "ab", 0), memory=(24, 99)
    )
    state = state_of(plan)
    state.start()
    assert state.handle(*ran(2), *ran(3)) == []
    assert state.used[0] == 8  # x, no more
    assert state.handle(Issued(0, 8)) == [Copy(0, 0, 1)]
    assert state.used[0] == 8
    assert state.handle(Done(0), Copied(0, 0, 1)) == [Launch(1, 1), Free(0, 0)] + [
        Copy(2, 1, 0),
        Copy(3, 1, 0),
    ]
    assert state.used[0] == 24


def test_the_value_needed_last_is_evicted_first():
    """
    a   b   c      three fit, and c's reader d comes next, then b's, then a's: so a goes,
    |   |   |      though it is the oldest, and so does b after it; never what is read at once.
    f   e   d
    """
    plan = plan_of(
        ("a", "", 0),
        ("b", "", 0),
        ("c", "", 0),
        ("d", "c", 0),
        ("e", "b", 0),
        ("f", "a", 0),
        memory=(24,),
        wanted="def",
    )
    state = state_of(plan, window=1)
    assert state.start() == [Launch(0, 0)]
    assert state.handle(*ran(0)) == [Launch(1, 0)]
    assert state.handle(*ran(1)) == [Launch(2, 0)]
    assert state.handle(*ran(2)) == [Copy(0, 0, HOST)]  # room for d
    assert state.handle(Copied(0, 0, HOST)) == [Free(0, 0), Launch(3, 0)]
    assert state.handle(*ran(3)) == [Free(2, 0), Launch(4, 0)]
    # e is wanted and never read again: it makes room for a, which is
    assert state.handle(*ran(4)) == [Free(1, 0), Copy(4, 0, HOST)]
    assert state.handle(Copied(4, 0, HOST)) == [Free(4, 0), Copy(0, HOST, 0)]


def test_a_result_that_nobody_reads_makes_room_before_anything_that_is_read():
    """a is read far ahead, r never again: r goes to the host (it is wanted), a stays."""
    plan = plan_of(
        ("a", "", 0), ("r", "", 0), ("b", "", 0), ("c", "ab", 0), memory=(24,), wanted="rc"
    )
    state = state_of(plan, window=1)
    state.start()
    state.handle(*ran(0))
    assert state.handle(*ran(1)) == [Launch(2, 0)]
    assert state.handle(*ran(2)) == [Copy(1, 0, HOST)]


def test_only_as_much_is_evicted_as_is_needed():
    """The one needed last is 8 bytes, as many as are missing: the others stay."""
    plan = plan_of(
        ("a", "", 0),
        ("b", "", 0),
        ("c", "", 0),
        ("d", "c", 0),
        ("e", "b", 0),
        ("f", "a", 0),
        memory=(24,),
        wanted="d",
    )
    state = state_of(plan, window=1)
    state.start()
    state.handle(*ran(0), *ran(1))
    assert state.handle(*ran(2)) == [Copy(0, 0, HOST)]


def test_an_eviction_under_way_counts_as_room_to_come():
    """
    r0   b0        c needs 16 of 0's 24 bytes. b is on its way out, which is enough: r, idle since
    |    c0        its copy to 1 arrived, must not go as well.
    x1   z0 (reads r)
    """
    plan = plan_of(
        ("r", "", 0),
        ("b", "", 0, 16),
        ("x", "r", 1),
        ("c", "", 0, 16),
        ("z", "r", 0, 0),
        memory=(24, 16),
        wanted="bxcz",
    )
    state = state_of(plan, window=2)
    assert state.start() == [Launch(0, 0), Launch(1, 0)]
    assert state.handle(Issued(0, 8)) == [Copy(0, 0, 1)]
    assert state.handle(Done(0)) == []  # r is being copied and b is being made: nothing can go
    assert state.handle(*ran(1, 16)) == [Copy(1, 0, HOST)]
    assert state.handle(Copied(0, 0, 1)) == [Launch(2, 1)]
    assert state.handle(Copied(1, 0, HOST)) == [Free(1, 0), Launch(3, 0), Launch(4, 0)]


def test_a_replica_is_dropped_without_a_copy():
    """
    a0 --> b1      a lives on 0 and on 1. When 1 needs room for c it lets go of its a:
      \\    |       the one on 0 is enough, and d fetches it again.
       \\   c1
        '- d1
    """
    plan = plan_of(
        ("a", "", 0), ("b", "a", 1), ("c", "b", 1, 16), ("d", "ac", 1, 0), memory=(99, 24)
    )
    state = state_of(plan, window=1)
    state.start()
    state.handle(*ran(0))
    state.handle(Copied(0, 0, 1))
    assert state.handle(*ran(1)) == [Free(0, 1), Launch(2, 1)]
    assert state.handle(*ran(2, 16)) == [Free(1, 1), Copy(0, 0, 1)]


def test_an_evicted_value_comes_back_and_leaves_the_host_in_the_end():
    """a goes to the host for c and comes back for d; then all of it is let go."""
    plan = plan_of(("a", "", 0), ("b", "", 0, 16), ("c", "b", 0, 16), ("d", "ac", 0), memory=(32,))
    state = state_of(plan, window=1)
    state.start()
    assert state.handle(*ran(0)) == [Launch(1, 0)]
    assert state.handle(*ran(1, 16)) == [Copy(0, 0, HOST)]
    assert state.handle(Copied(0, 0, HOST)) == [Free(0, 0), Launch(2, 0)]
    assert state.handle(*ran(2, 16)) == [Free(1, 0), Copy(0, HOST, 0)]
    assert state.handle(Copied(0, HOST, 0)) == [Launch(3, 0)]
    assert state.handle(*ran(3)) == [Free(0, HOST), Free(0, 0), Free(2, 0)]
    state.validate_end()


def test_outputs_stay():
    """b is wanted and nobody reads it; a is wanted and read: neither is let go."""
    plan = plan_of(("a", "", 0), ("b", "a", 0), memory=PLENTY, wanted="ab")
    state = state_of(plan)
    state.start()
    assert state.handle(*ran(0), *ran(1)) == []
    assert state.finished
    state.validate_end()
    assert state.where == [{0}, {0}]


# ---- results that are delivered to the host


def test_a_delivered_result_goes_to_the_host_when_it_is_done_and_leaves_the_device():
    plan = plan_of(("a", "", 0), memory=PLENTY, deliver="a")
    state = state_of(plan)
    state.start()
    assert state.handle(Issued(0, 8)) == []
    assert state.handle(Done(0)) == [Copy(0, 0, HOST)]
    assert not state.finished  # the caller wants it on the host
    assert state.handle(Copied(0, 0, HOST)) == [Free(0, 0)]
    assert state.finished
    state.validate_end()


def test_a_delivered_result_that_is_still_read_stays_for_its_reader():
    """a is delivered and b reads it: it would only have to come back."""
    plan = plan_of(("a", "", 0), ("x", "", 0), ("b", "ax", 0), memory=PLENTY, wanted="ab")
    plan.deliver = frozenset([0])
    state = state_of(plan, window=1)
    state.start()
    assert state.handle(*ran(0)) == [Copy(0, 0, HOST), Launch(1, 0)]
    assert state.handle(Copied(0, 0, HOST)) == []
    assert state.handle(*ran(1)) == [Launch(2, 0)]
    assert state.handle(*ran(2)) == [Free(0, 0), Free(1, 0)]
    state.validate_end()


# ---- refusals and wrong estimates


def test_a_refused_launch_is_tried_again_and_so_are_those_queued_behind_it():
    """a - b on 0. The allocator refuses a: b, in the queue behind it, has nothing to read."""
    state = state_of(plan_of(("a", "", 0, 4), ("b", "a", 0), memory=(48,)))
    assert state.start() == [Launch(0, 0), Launch(1, 0)]
    assert state.handle(NoRoom(0, 0, 32)) == [Launch(0, 0)]
    assert state.used[0] == 32 + 8
    assert state.handle(NoRoom(1, 0, 0)) == [Launch(1, 0)]
    assert state.handle(Issued(0, 32), Done(0)) == []
    assert state.handle(*ran(1)) == [Free(0, 0)]
    state.validate_end()


def test_after_a_refusal_a_step_waits_for_the_room_it_really_needs():
    """x holds 16 of 24 and is read by y: a turned out to need 16, so it waits for y."""
    plan = plan_of(("x", "", 0, 8), ("y", "x", 1), ("a", "", 0, 8), memory=(24, 99), wanted="a")
    state = state_of(plan)
    assert state.start() == [Launch(0, 0), Launch(2, 0)]
    assert state.handle(Issued(0, 16)) == [Copy(0, 0, 1)]
    assert state.handle(NoRoom(2, 0, 16), Done(0)) == []
    assert state.handle(Copied(0, 0, 1)) == [Launch(1, 1), Free(0, 0), Launch(2, 0)]


def test_a_reader_that_waits_for_a_copy_steps_back_when_its_other_input_is_refused():
    """
    a0   b1        c has reserved room and b is on its way, a is refused: c gives its room back
      \\ /         (or a might never get it), and takes it again when a is launched.
      c0
    """
    plan = plan_of(("a", "", 0), ("b", "", 1), ("x", "", 0, 16), ("c", "ab", 0), memory=(40, 99))
    state = state_of(plan)
    assert state.start() == [Launch(0, 0), Launch(2, 0), Launch(1, 1)]
    assert state.handle(*ran(1)) == [Copy(1, 1, 0)]
    assert state.used[0] == 40
    assert state.handle(NoRoom(0, 0, 24)) == []  # not beside x
    assert state.used[0] == 16 + 8  # x, and b on its way
    assert state.handle(Copied(1, 1, 0)) == []
    assert state.handle(*ran(2, 16)) == [Free(2, 0), Launch(0, 0), Launch(3, 0)]


def test_a_reader_in_the_heap_is_passed_over_while_its_input_is_not_queued():
    """
    p0   q1        r is in the heap, behind the window, as a is refused. s, ahead of a in the plan,
    |    |         takes all room, p's too: a has to wait for p to come back, and r for a.
    a0   s0
    |
    r0             s is small, so r's kind of step has a deep window by then: only a holds it up.
    """
    plan = plan_of(
        ("p", "", 0),
        ("q", "", 1),
        ("s", "q", 0, 56),
        ("a", "p", 0),
        ("r", "a", 0),
        memory=(64, 8),
        guessed="a",
        kinds="pqrar",
    )
    state = state_of(plan, window=1, deep_window=2)
    assert state.start() == [Launch(0, 0), Launch(1, 1)]
    assert state.handle(*ran(0)) == [Launch(3, 0)]
    assert state.handle(*ran(1)) == []
    assert state.handle(NoRoom(3, 0, 24)) == [Copy(0, 0, HOST)]
    assert state.handle(Copied(0, 0, HOST)) == [Free(0, 0), Copy(1, 1, 0)]
    assert state.handle(Copied(1, 1, 0)) == [Launch(2, 0)]
    freed = [Free(1, 0), Free(1, 1), Free(2, 0)]
    assert state.handle(*ran(2, 56)) == [*freed, Copy(0, HOST, 0)]
    assert state.handle(Copied(0, HOST, 0)) == [Launch(3, 0), Launch(4, 0)]


def test_a_refused_copy_is_tried_again():
    state = state_of(plan_of(("a", "", 0), ("b", "a", 1), memory=PLENTY))
    state.start()
    assert state.handle(*ran(0)) == [Copy(0, 0, 1)]
    assert state.handle(NoRoom(0, 1, 8)) == [Copy(0, 0, 1)]
    assert state.used == {HOST: 0, 0: 8, 1: 16}
    assert state.handle(Copied(0, 0, 1)) == [Launch(1, 1)]
    state.handle(*ran(1))
    state.validate_end()


def test_a_value_larger_than_estimated_is_counted_as_it_is():
    state = state_of(plan_of(("a", "", 0), memory=(8,), guessed="a"))
    state.start()
    state.handle(*ran(0, 20))
    assert state.used[0] == state.peak[0] == 20
    state.validate_end()


def test_a_guess_does_not_stop_a_run():
    """Nobody knows how large a is; the guess, 100 bytes, does not fit. So it is not believed."""
    state = state_of(plan_of(("a", "", 0, 100), memory=(10,), guessed="a"))
    assert state.start() == [Launch(0, 0)]
    state.handle(*ran(0, 3))
    state.validate_end()


def test_a_guess_is_believed_while_anything_is_under_way():
    """x will be gone soon: until then the guess for a, as much as there is, is not doubted."""
    plan = plan_of(("x", "", 0), ("y", "x", 1), ("a", "", 0, 24), memory=(24, 99), guessed="a")
    state = state_of(plan)
    assert state.start() == [Launch(0, 0)]
    assert state.handle(Issued(0, 8)) == [Copy(0, 0, 1)]
    assert state.handle(Done(0), Copied(0, 0, 1)) == [Launch(1, 1), Free(0, 0), Launch(2, 0)]


def test_known_sizes_that_cannot_fit_are_an_error_that_says_what_to_do():
    plan = plan_of(("a", "", 0, 1000), ("b", "a", 0, 2000), memory=(2500,))
    state = state_of(plan)
    assert state.start() == [Launch(0, 0)]
    with pytest.raises(OutOfMemory) as error:
        state.handle(*ran(0, 1000))
    text = str(error.value)
    for fact in ("'b'", "3,000 bytes", "device 0", "2,500 bytes", "smaller chunks", "memory_limit"):
        assert fact in text
    assert isinstance(error.value, MemoryError)


def test_a_guess_that_was_refused_is_no_guess_any_more():
    """a was let in on trust, and the allocator knows better: that is the end, with the number."""
    state = state_of(plan_of(("a", "", 0, 100), memory=(10,), guessed="a"))
    assert state.start() == [Launch(0, 0)]
    with pytest.raises(OutOfMemory, match="50 bytes on device 0"):
        state.handle(NoRoom(0, 0, 50))


def test_the_last_thing_under_way_may_leave_only_a_free():
    """
    x      x is let go by y's end, and then nothing is under way. Only now a guess must be doubted
    y  a   (a) or the error be raised: otherwise the run would wait for ever.
    """
    steps = ("x", "", 0), ("y", "x", 0), ("a", "y", 0, 100)
    state = state_of(plan_of(*steps, memory=(24,), guessed="a"))
    assert state.start() == [Launch(0, 0), Launch(1, 0)]
    assert state.handle(*ran(0)) == []
    assert state.handle(*ran(1)) == [Free(0, 0), Launch(2, 0)]

    state = state_of(plan_of(*steps, memory=(24,)))
    state.start()
    state.handle(*ran(0))
    with pytest.raises(OutOfMemory, match="108 bytes on device 0"):
        state.handle(*ran(1))


def test_out_of_memory_waits_for_what_is_under_way():
    """b does not fit beside x, which is running: that is no error yet, and it never becomes one."""
    plan = plan_of(("x", "", 0, 16), ("b", "", 0, 16), memory=(24,), wanted="xb")
    state = state_of(plan)
    assert state.start() == [Launch(0, 0)]
    assert state.handle(*ran(0, 16)) == [Copy(0, 0, HOST)]
    assert state.handle(Copied(0, 0, HOST)) == [Free(0, 0), Launch(1, 0)]


def test_failures_are_not_for_state():
    state = state_of(plan_of(("a", "", 0), memory=PLENTY))
    with pytest.raises(TypeError, match="not an event"):
        state.handle(Failed(0, ValueError()))


# ---- any graph, any machine, any order


def answers(case, devices):
    return [devices.value(case.plan.index[k]) for k in case.keys]


@thorough
@given(cases())
def test_any_run_gives_what_dask_gives_and_leaves_nothing_behind(case):
    """Wrong estimates, refusals, late and shuffled completion: only the values may not change."""
    devices = case.devices()
    state = case.run(devices)
    assert answers(case, devices) == list(dask.get(case.dsk, case.keys))
    assert {i for i, _ in devices.values} == set(case.plan.outputs)
    assert {i for i in case.plan.deliver if (i, HOST) not in devices.values} == set()
    state.validate_end()


@thorough
@given(cases(exact=True))
def test_true_estimates_are_never_refused(case):
    """An allocator that keeps to the limit never has to say no where the sizes were known."""
    devices = case.devices()
    devices.refuse = True
    state = case.run(devices)
    assert devices.refused == 0
    assert all(state.peak[d] <= m for d, m in enumerate(case.plan.machine.memory))
    assert answers(case, devices) == list(dask.get(case.dsk, case.keys))


@thorough
@given(cases(exact=True))
def test_memory_stays_below_the_limit_on_a_clock(case):
    """Counted by the devices, not by State: from the launch to the free."""
    clock = ClockDevices(case.plan, case.sizes)
    case.run(clock).validate_end()
    assert all(clock.peak[d] <= m for d, m in enumerate(case.plan.machine.memory))
    assert set(clock.exists) >= {(i, HOST) for i in case.plan.deliver}
    assert {i for i, _ in clock.exists} == set(case.plan.outputs)


@thorough
@given(cases(exact=True))
def test_with_room_for_all_each_value_crosses_a_link_once(case):
    """What the plan says will move is what moves; results for the host, once each, besides."""
    plan = case.plan
    plan.machine = plan_of(("a", "", 0), memory=(2**60,) * len(plan.machine.memory)).machine
    devices = case.devices()
    case.run(devices)
    between = {link: n for link, n in devices.moved.items() if HOST not in link and n}
    assert between == {link: n for link, n in plan.traffic().items() if n}
    home = sum(n for (_, dst), n in devices.moved.items() if dst == HOST)
    assert home == sum(case.sizes[i] for i in plan.deliver)
    assert not any(src == HOST for src, _ in devices.moved)


@thorough
@given(cases(exact=True, room=False))
def test_a_machine_too_small_by_one_byte_is_an_error_and_not_a_standstill(case):
    assume(max(case.plan.machine.memory) > 0)
    with pytest.raises(OutOfMemory, match="memory_limit"):
        case.run(case.devices())


@thorough
@given(cases(), st.integers(0, 2**32))
def test_the_same_events_give_the_same_instructions(case, seed):
    """Nothing that has no order (a set, an id, a hash) has a say."""
    logs = []
    for _ in range(2):
        case.rng.seed(seed)
        devices = case.devices()
        case.run(devices)
        logs.append(devices.log)
    assert logs[0] == logs[1]


@thorough
@given(cases())
def test_without_ahead_no_step_counts_on_the_order_of_the_queue(case):
    """As on a borrowed pool: `UnorderedDevices.launch` checks that all inputs are there."""
    case.ahead = False
    devices = UnorderedDevices(case.plan, case.rng, case.sizes, case.refuse)
    case.run(devices).validate_end()
    assert answers(case, devices) == list(dask.get(case.dsk, case.keys))
