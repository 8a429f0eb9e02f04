"""Clusters that are not there: how a computation's cost grows with the cluster, and does not."""

from __future__ import annotations

import dask.array as da
import pytest

from gpuscheduler import OutOfMemory, simulate
from gpuscheduler.cluster import simulate as cluster_simulate
from graphs import haversine_mesh, matmul, transpose_sum


@pytest.mark.filterwarnings("ignore::dask.array.PerformanceWarning")
@pytest.mark.parametrize(
    ("build", "side"),
    [(transpose_sum.build, 1024), (matmul.build, 2048), (haversine_mesh.build_sum, 1024)],
)
def test_the_number_of_cluster_tasks_does_not_grow_with_the_chunks(build, side):
    few, many = (simulate(build(32768, n), workers=4, devices=8) for n in (4096, side))
    assert many.steps > 2 * few.steps
    assert many.tasks <= 1.5 * few.tasks


def test_aligned_work_takes_as_long_on_twice_the_cluster_with_twice_the_data():
    def on(workers):
        x = da.ones((workers * 2**20, 64), chunks=(2**16, 64))
        return simulate((x + 1).sum(axis=1), workers=workers, devices=4)

    small, large = on(2), on(4)
    assert small.traffic == large.traffic == {}
    assert max(large.busy) == pytest.approx(max(small.busy), rel=0.01)


def test_a_slower_network_and_a_slower_scheduler_take_longer():
    x = transpose_sum.build(16384, 2048)
    fast = simulate(x, workers=4, devices=2, network=10e9, task_seconds=0.0)
    slow = simulate(x, workers=4, devices=2, network=1e9, task_seconds=0.0)
    into_each = [sum(n for (_, w), n in slow.traffic.items() if w == to) for to in range(4)]
    assert slow.seconds > fast.seconds
    assert max(into_each) / 1e9 < slow.seconds < 3 * max(into_each) / 1e9
    many = simulate(x, workers=4, devices=2, network=10e9, task_seconds=1.0)
    assert many.tasks < many.seconds < many.tasks + 1  # the scheduler is the bound


def test_memory_is_that_of_the_fullest_device():
    x = da.random.default_rng(0).random((4096, 4096), chunks=512)
    result = simulate((x @ x), workers=2, devices=2)
    assert max(result.peak) >= x.nbytes / 4
    with pytest.raises(OutOfMemory):
        simulate(x @ x, workers=2, devices=2, memory=2**20)


def test_a_cluster_of_none_is_refused():
    with pytest.raises(ValueError, match="0 workers of 8 devices"):
        simulate(da.ones(4), workers=0)


def test_what_is_sent_while_others_go_on_hides_behind_them(monkeypatch):
    """Two GPUs that make a matrix and add its transpose, with a network about as fast."""
    monkeypatch.setattr(cluster_simulate, "WAY_SECONDS", 0.0)
    x = da.random.default_rng(0).random((8192, 8192), chunks=512)

    def seconds(ahead):
        monkeypatch.setattr("gpuscheduler.cluster.stages.AHEAD_SECONDS", ahead)
        options = {"workers": 2, "devices": 1, "network": 5e11, "task_seconds": 0.0}
        return simulate((x + x.T).sum(), **options).seconds

    assert seconds(0.0) < 0.9 * seconds(float("inf"))
