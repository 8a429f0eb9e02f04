"""What steps allocate, by line: sums that are those of a slow and simple count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler.runtime.allocations import AllocationLog
from tests.support.strategies import thorough

SITES = [None, (compile("a", "wave.py", "eval"), 3), (compile("b", "wave.py", "eval"), 5)]
MOVES = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(0, 1000), st.sampled_from(SITES), st.integers(0, 50)
    ),
    max_size=30,
)  # fmt: skip


@thorough
@given(MOVES)
def test_sums_are_those_of_a_count_by_hand(moves):
    """A name that is in use is freed, another one allocated."""
    log, alive, steps = AllocationLog(), {}, []
    for n, (name, nbytes, site, acquired) in enumerate(moves):
        if name in alive:
            log.free(name)
            del alive[name]
        else:
            log.allocate(name, nbytes, site, acquired)
            alive[name] = n
        steps.append(dict(alive))
    found = log.sum_up(4, 1)
    made = {n: moves[n] for step in steps for n in step.values()}
    kept = set(alive.values())
    assert (found.step, found.place) == (4, 1)
    assert {u.site for u in found.uses} == {site for _, _, site, _ in made.values()}
    for use in found.uses:
        mine = [m for m in made.values() if m[2] == use.site]
        assert use.times == len(mine)
        assert use.total == sum(nbytes for _, nbytes, _, _ in mine)
        assert use.acquired == sum(acquired for _, _, _, acquired in mine)
        assert use.largest == max(nbytes for _, nbytes, _, _ in mine)
        at_once = [sum(moves[n][1] for n in s.values() if moves[n][2] == use.site) for s in steps]
        assert use.most == max(at_once)
    working = [sum(moves[n][1] for n in s.values() if n not in kept) for s in steps]
    assert found.working_memory == max(working, default=0)


def test_what_was_there_before_the_step_is_nothing_of_it():
    log = AllocationLog()
    log.free(3)
    assert log.sum_up(0, 0).uses == ()
