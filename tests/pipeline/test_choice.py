"""GPUs or the host: what runs took decides between the two, and one try is enough."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler.pipeline.choice import GPU, HOST, SLOWER, Choice
from gpuscheduler.plan.host_cost import GpuWork, HostWork

SECONDS = st.floats(1e-4, 10)


def runs(choice, took, count):
    """The sides of so many runs, of which each takes the seconds of its side."""
    sides = []
    for _ in range(count):
        sides.append(choice.side)
        choice.note(choice.side, took[choice.side])
    return sides


def test_a_side_that_is_as_foreseen_stays():
    choice = Choice(GPU, "", 0.1, 0.3, learns=True)
    assert set(runs(choice, {GPU: 0.15, HOST: 9.0}, 10)) == {GPU}


def test_a_slow_side_has_the_other_tried():
    choice = Choice(GPU, "", 0.1, 0.3, learns=True)
    assert runs(choice, {GPU: 1.0, HOST: 0.3}, 6) == [GPU, GPU, HOST, HOST, HOST, HOST]


def test_the_other_side_is_left_again_where_it_is_slower():
    choice = Choice(GPU, "", 0.1, 0.3, learns=True)
    assert runs(choice, {GPU: 1.0, HOST: 5.0}, 6) == [GPU, GPU, HOST, HOST, GPU, GPU]


def test_a_fixed_side_learns_nothing():
    choice = Choice(GPU, "as asked", 0.1, 0.3)
    assert set(runs(choice, {GPU: 9.0, HOST: 0.1}, 10)) == {GPU}


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from([GPU, HOST]))
def test_it_settles_on_a_side_that_is_not_much_slower(gpu, host, took_gpu, took_host, side):
    choice = Choice(side, "", gpu, host, learns=True)
    took = {GPU: took_gpu, HOST: took_host}
    sides = runs(choice, took, 20)
    assert len(set(sides[10:])) == 1
    assert sum(a != b for a, b in zip(sides, sides[1:], strict=False)) <= 2
    if len(choice.took) == 2:
        assert took[sides[-1]] <= SLOWER * min(took.values())


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 8))
def test_more_work_takes_longer(nbytes, tasks, gpus):
    gpu = GpuWork(nbytes, tasks, tasks, nbytes, 0, nbytes)
    assert gpu.seconds(gpus, 3e12, 1e-5) >= gpu.seconds(gpus + 1, 3e12, 1e-5) > -1
    host = HostWork(nbytes / 1e9, nbytes, tasks)
    assert host.seconds(1) >= host.seconds(16)
