"""The hardware as numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuscheduler.plan.machine import HOST, STEP_SECONDS, Machine

MACHINE = Machine.uniform(3, memory=100, peer=1000.0, host=10.0, latency=0.5)


@pytest.mark.parametrize(
    ("src", "dst", "seconds"),
    [
        (0, 1, 0.5 + 100 / 1000),
        (0, HOST, 0.5 + 100 / 10),
        (HOST, 2, 0.5 + 100 / 10),
        (1, 1, 0.0),
        (HOST, HOST, 0.0),
    ],
)
def test_a_copy_costs_its_latency_and_its_bytes(src, dst, seconds):
    assert MACHINE.copy_seconds(100, src, dst) == pytest.approx(seconds)


def test_links_may_differ_by_direction():
    peer = ((0.0, 10.0, 1.0), (100.0, 0.0, 1.0), (1.0, 1.0, 0.0))
    machine = replace(MACHINE, peer=peer, latency=0.0)
    assert machine.copy_seconds(100, 0, 1) == 10
    assert machine.copy_seconds(100, 1, 0) == 1


def test_each_device_has_its_own_way_to_the_host():
    machine = replace(MACHINE, host=(10.0, 20.0, 40.0), latency=0.0)
    assert [machine.copy_seconds(40, d, HOST) for d in machine.devices] == [4, 2, 1]


def test_where_memory_is_shared_copies_are_free():
    machine = Machine.uniform(2, shared=True)
    assert machine.copy_seconds(10**9, 0, 1) == machine.copy_seconds(10**9, 1, HOST) == 0


def test_a_step_costs_something_even_if_it_moves_nothing():
    assert MACHINE.step_seconds(0) == STEP_SECONDS
    assert MACHINE.step_seconds(3 * 10**12) == pytest.approx(1 + STEP_SECONDS)


def test_a_product_of_matrices_costs_its_operations():
    assert replace(MACHINE, flops=1e3).product_seconds(5e3) == pytest.approx(5 + STEP_SECONDS)


def test_a_machine_is_a_value():
    assert Machine.uniform(2) == Machine.uniform(2) != Machine.uniform(3)
    assert len({Machine.uniform(2), Machine.uniform(2)}) == 1
