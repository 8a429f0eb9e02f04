"""The cut is as cheap as the best of all divisions."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler.plan.min_cut import Division
from tests.support.strategies import EXAMPLES

SECONDS = st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0]) | st.floats(0, 10)


@st.composite
def divisions(draw):
    count = draw(st.integers(1, 6))
    division = Division()
    for _ in range(count):
        gpu = draw(st.none() | SECONDS)
        host = draw(SECONDS if gpu is None else st.none() | SECONDS)
        division.add(gpu, host)
    for a in range(count):
        for b in range(count):
            if a != b and draw(st.booleans()):
                division.down[a, b] = draw(SECONDS)
        if draw(st.booleans()):
            division.up[a] = draw(SECONDS)
    return division


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(divisions())
def test_the_cut_is_as_cheap_as_any_division(division):
    every = map(list, product([False, True], repeat=len(division.gpu)))
    least = min(map(division.seconds, every))
    found = division.seconds(division.assign())
    assert found == pytest.approx(least, abs=1e-9)


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(divisions(), st.data())
def test_what_moving_one_group_adds(division, data):
    on_gpus = [
        host is None or (gpu is not None and data.draw(st.booleans()))
        for gpu, host in zip(division.gpu, division.host, strict=True)
    ]
    before = division.seconds(on_gpus)
    for n, more in enumerate(division.moving_seconds(on_gpus)):
        other = [here != (n == k) for k, here in enumerate(on_gpus)]
        assert before + more == pytest.approx(division.seconds(other), abs=1e-9)


def test_many_groups_are_divided_at_once():
    """Chains of kernels and called functions, read by one group at the end."""
    division = Division()
    end = division.add(0.1, 0.3)
    for chain in range(60):
        last = division.add(None, 0.0)
        division.up[last] = 0.01
        for n in range(5):
            group = division.add(None if n == 2 else 0.001 * chain, 0.03)
            division.down[last, group] = 0.001
            division.up[group] = 0.002
            last = group
        division.down[last, end] = 0.001
    on_gpus = division.assign()
    assert on_gpus[end]
    assert 0 < sum(on_gpus) < len(on_gpus)
    # no single group is better off on the other side
    best = division.seconds(on_gpus)
    for n in range(len(on_gpus)):
        other = [here != (n == k) for k, here in enumerate(on_gpus)]
        assert division.seconds(other) >= best - 1e-9


def test_a_group_without_a_side_is_refused():
    with pytest.raises(ValueError, match="group 0"):
        Division([None], [None]).assign()
