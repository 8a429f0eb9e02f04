"""`Scheduler` and `get` as a Dask user meets them, on CPU devices."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import types
from operator import add

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from dask import config, delayed
from dask._task_spec import Task
from dask.diagnostics import Profiler, ProgressBar

import gpuscheduler
from gpuscheduler import OutOfMemory, PlanError, Scheduler
from gpuscheduler.devices import choose
from gpuscheduler.gc_control import of_things_that_stay
from gpuscheduler.pipeline import compile


@pytest.fixture
def scheduler():
    with Scheduler("cpu:3", check=True) as s:
        yield s


def test_a_scheduler_is_dasks_default_inside_its_with_and_not_outside():
    before = config.get("scheduler", None)
    with Scheduler("cpu:2") as outer:
        assert config.get("scheduler") == outer.get
        with Scheduler("cpu:1") as inner:
            assert config.get("scheduler") == inner.get
        assert config.get("scheduler") == outer.get
    assert config.get("scheduler", None) == before


def test_by_name_and_by_function():
    x = da.arange(10, chunks=3)
    assert x.sum().compute(scheduler="gpu") == 45
    assert x.sum().compute(scheduler=gpuscheduler.get) == 45


def test_threads_are_joined_and_a_closed_scheduler_says_so():
    before = threading.active_count()
    with Scheduler("cpu:4") as s:
        da.ones(8, chunks=2).sum().compute()
        assert threading.active_count() >= before + 4
    assert threading.active_count() == before
    assert "closed" in repr(s)
    with pytest.raises(RuntimeError, match="closed"):
        s.get({"a": 1}, "a")
    with pytest.raises(RuntimeError, match="closed"), s:
        pass


@pytest.mark.parametrize(
    "name", ["gpu", "cpu:", "cpu:-1", "cuda:", "cuda:a", "cpu:1,2", "", [0, 1], 2]
)
def test_device_strings_that_make_no_sense(name):
    with pytest.raises(ValueError, match="devices="):
        Scheduler(name)


def test_no_devices_at_all():
    with pytest.raises(ValueError, match="at least one"):
        Scheduler("cpu:0")


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        (None, "no NVIDIA driver either: use devices='cpu', or install"),
        ((11, 4), "runs CUDA 11.4, which is too old: install one of CUDA 12 or later"),
        ((12, 8), "runs CUDA 12.8: pip install 'gpuscheduler[cuda12]'"),
        ((13, 1), "runs CUDA 13.1: pip install 'gpuscheduler[cuda13]'"),
        ((14, 0), "runs CUDA 14.0: pip install 'gpuscheduler[cuda13]'"),
    ],
)
@pytest.mark.parametrize("devices", ["cuda", "cuda:0", "cuda:0,0"])
def test_gpus_without_cupy_say_what_to_install(monkeypatch, devices, driver, remedy):
    """For the driver that is there."""
    monkeypatch.setattr(choose, "has_cupy", lambda: False)
    monkeypatch.setattr(choose, "driver_version", lambda: driver)
    with pytest.raises(RuntimeError, match=re.escape(remedy)) as caught:
        Scheduler(devices)
    assert str(caught.value).startswith(f"devices={devices!r} needs CuPy, which is not installed.")
    with Scheduler("auto") as s:
        assert s.hardware.kind == "cpu"


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        (None, "no NVIDIA driver: use devices='cpu', or install the driver"),
        ((12, 8), "driver runs CUDA 12.8: use devices='cpu', or see whether nvidia-smi lists"),
    ],
)
def test_gpus_that_cuda_does_not_find_say_what_to_do(monkeypatch, driver, remedy):
    """CUDA's own error says nothing of devices."""
    runtime = types.SimpleNamespace(CUDARuntimeError=ArithmeticError, getDeviceCount=lambda: 1 / 0)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(choose, "has_cupy", lambda: True)
    monkeypatch.setattr(choose, "driver_version", lambda: driver)
    with pytest.raises(RuntimeError, match=re.escape(remedy)) as caught:
        Scheduler("cuda:1")
    said = "devices='cuda:1' needs a GPU: division by zero. "
    assert str(caught.value).startswith(said)


def test_version_of_the_driver_is_one_that_cuda_has():
    found = choose.driver_version()
    assert found is None or (found[0] >= 11 and 0 <= found[1] < 100)


@pytest.mark.parametrize("limit", [0, -1, "many", 1.5, 0.0])
def test_memory_limits_that_make_no_sense(limit):
    with pytest.raises(ValueError, match="memory_limit"):
        Scheduler("cpu:1", memory_limit=limit)


def test_limits_of_the_hosts_memory():
    for limit in (-1, "many", 1.5):
        with pytest.raises(ValueError, match="host_memory"):
            Scheduler("cpu:1", host_memory=limit)
    assert Scheduler("cpu:1", host_memory=0).options.host_memory == 0


def test_memory_limits():
    half = Scheduler("cpu:2", memory_limit=0.5).hardware.machine.memory
    most = Scheduler("cpu:2").hardware.machine.memory
    assert 0.4 < half[0] / most[0] < 0.7
    assert Scheduler("cpu:2", memory_limit="1 kiB").hardware.machine.memory == (1024, 1024)


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="unknown option 'colour'.*devices"):
        Scheduler("cpu:1", colour="red")


def test_options_come_from_daskss_configuration():
    with config.set({"gpuscheduler.devices": "cpu:5", "gpuscheduler.memory-limit": "1 MiB"}):
        machine = Scheduler().hardware.machine
        assert machine.memory == (2**20,) * 5
        assert Scheduler("cpu:1").hardware.machine.memory == (2**20,)


def test_options_come_from_the_environment_and_from_yaml(tmp_path):
    (tmp_path / "gpuscheduler.yaml").write_text("gpuscheduler:\n  devices: cpu:3\n")
    code = "import gpuscheduler as g; print(g.Scheduler().hardware.machine.memory)"
    env = {
        **os.environ,
        "DASK_CONFIG": str(tmp_path),
        "DASK_GPUSCHEDULER__MEMORY_LIMIT": "4 MiB",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == str((4 * 2**20,) * 3)


def test_what_it_looks_like():
    s = Scheduler("cpu:2", memory_limit="2 GiB")
    assert repr(s) == "<Scheduler on 2 cpu devices, memory limit 2.00 GiB each>"
    assert s._repr_html_().count("<tr>") == 3
    assert repr(Scheduler("cpu:1", memory_limit="2 GiB")).count("device,") == 1


# ---- collections


def test_arrays(scheduler):
    x = np.random.default_rng(0).random((60, 50))
    a = da.from_array(x, chunks=(13, 17))
    np.testing.assert_array_equal((a + a[::-1]).compute(), x + x[::-1])
    np.testing.assert_allclose((a @ a.T).compute(), x @ x.T)
    np.testing.assert_allclose(a.var(axis=0).compute(), x.var(axis=0))
    total, doubled = dask.compute(a.sum(), a * 2)
    np.testing.assert_allclose(total, x.sum())
    np.testing.assert_array_equal(doubled, x * 2)


def test_a_result_is_a_copy_of_its_own(scheduler):
    x = np.zeros(10)
    result = da.from_array(x, chunks=5).compute()
    result[:] = 1
    assert not x.any()


def test_a_block_that_is_gathered_and_wanted_itself(scheduler):
    x = da.ones(8, chunks=4) + 1
    whole, block = dask.compute(x, x.to_delayed()[0])
    np.testing.assert_array_equal(whole, np.full(8, 2.0))
    np.testing.assert_array_equal(block, np.full(4, 2.0))


def test_values_that_will_not_be_measured(scheduler):
    class Odd:
        @property
        def nbytes(self):
            raise OSError("closed")

    assert isinstance(delayed(Odd)().compute(), Odd)
    loop = []
    loop.append(loop)
    assert delayed(lambda: loop)().compute() is loop


def test_chunks_of_unknown_shape(scheduler):
    x = np.arange(20)
    a = da.from_array(x, chunks=6)
    np.testing.assert_array_equal(a[a > 7].compute(), x[x > 7])


def test_masked_and_object_chunks(scheduler):
    masked = da.ma.masked_greater(da.arange(10, chunks=3), 6)
    assert masked.compute().mask.sum() == 3
    words = da.from_array(np.array(["a", "bb", "ccc"], dtype=object), chunks=2)
    assert list(words.compute()) == ["a", "bb", "ccc"]


def test_persist_and_go_on(scheduler):
    a = da.random.default_rng(0).random((40, 40), chunks=10)
    p = (a + 1).persist()
    np.testing.assert_array_equal((p * 2).compute(), (a + 1).compute() * 2)
    q, r = dask.persist(p.sum(), p[:5])
    np.testing.assert_array_equal(r.compute(), p.compute()[:5])
    np.testing.assert_allclose(q.compute(), p.compute().sum())


def test_delayed_and_bags(scheduler):
    @delayed
    def add(a, b=0):
        return a + b

    assert dask.compute(add(1, b=add(2, 3)), {"k": [add(1)]}) == (6, {"k": [1]})
    bag = db.from_sequence(range(100), npartitions=7)
    assert bag.map(lambda v: v % 3).frequencies().compute() == [(0, 34), (1, 33), (2, 33)]


def test_dataframes(scheduler):
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"k": np.arange(100) % 7, "v": np.arange(100.0)})
    lazy = dd.from_pandas(frame, npartitions=5)
    pd.testing.assert_series_equal(lazy.groupby("k").v.sum().compute(), frame.groupby("k").v.sum())
    pd.testing.assert_frame_equal(lazy[lazy.v > 50].compute(), frame[frame.v > 50])
    assert len(lazy.persist()) == 100


def test_expression_arrays(scheduler):
    expression_arrays = pytest.importorskip("dask_array")
    x = expression_arrays.ones((20, 20), chunks=5)
    assert float((x + x.T).sum().compute()) == 800


# ---- one run


def test_an_exception_keeps_its_type_and_names_key_and_device(scheduler):
    def broken(v):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        delayed(broken, name="broken")(1, dask_key_name="the-key").compute()
    notes = getattr(caught.value, "__notes__", [])
    assert any("'the-key'" in note and "device" in note for note in notes)
    assert "broken" in [frame.name for frame in caught.traceback]
    assert delayed(len)("abc").compute() == 3


def test_a_failure_does_not_wait_for_what_else_is_running():
    release, ended = threading.Event(), []

    def wait():
        release.wait(60)
        ended.append(True)

    def fail():
        raise KeyError("quick")

    with Scheduler("cpu:2") as s:
        with pytest.raises(KeyError, match="quick"):
            s.get({"slow": (wait,), "bad": (fail,)}, ["slow", "bad"])
        assert not ended
        assert s.get({"a": (len, "abc")}, "a") == 3
        release.set()


def test_a_step_that_can_never_fit_is_refused_before_anything_runs():
    ran = []
    with Scheduler("cpu:2", memory_limit="512 kiB"):
        x = da.ones((1024, 1024), chunks=512).map_blocks(
            lambda b: ran.append(1) or b, meta=np.empty((0, 0))
        )
        with pytest.raises(OutOfMemory, match=r"lambda.*2,097,152 bytes.*device 0.*1,048,576") as e:
            x.compute()
    assert "smaller chunks" in str(e.value)
    assert not ran


def test_what_a_task_says_of_memory_that_it_was_refused_is_not_lost():
    def refused(block):
        raise MemoryError("the table of stations has no end")

    x = da.ones((4, 4), chunks=2).map_blocks(refused, meta=np.empty((0, 0)))
    said = pytest.raises(OutOfMemory, match=r"refused.*MemoryError: the table of stations has")
    with Scheduler(devices="cpu:2") as s, said:
        s.get(x.dask, x.__dask_keys__())


def test_values_that_do_not_fit_together_are_moved_to_the_host_and_back():
    x = np.random.default_rng(0).random((256, 256))
    with Scheduler("cpu:2", memory_limit=5 * 64 * 64 * 8, check=True):
        a = da.from_array(x, chunks=64).map_blocks(np.copy)
        b = a - a.mean()
        np.testing.assert_allclose((b + b.T).compute(), (x - x.mean()) + (x - x.mean()).T)


def test_annotations_pin_tasks_to_devices(scheduler):
    def where(block=None):
        return threading.current_thread().name

    for device in range(3):
        with dask.annotate(device=device):
            one = delayed(where)()
            many = da.ones(6, chunks=2).map_blocks(
                lambda b: np.array([where()], dtype=object), dtype=object
            )
        assert one.compute().endswith(f"-{device}")
        assert {name[-1] for name in many.compute()} == {str(device)}


def test_a_pin_to_a_device_that_is_not_there(scheduler):
    with dask.annotate(device=7):
        x = delayed(len)("abc", dask_key_name="far")
    with pytest.raises(PlanError, match=r"'far'.*device=7.*0 to 2"):
        x.compute()


def test_callbacks(scheduler, capsys):
    x = da.random.default_rng(0).random((100, 100), chunks=20)
    with ProgressBar(dt=0.01), Profiler() as profile:
        x.sum().compute()
    assert "100%" in capsys.readouterr().out
    assert len(profile.results) >= 25


def test_context_variables_reach_the_tasks(scheduler):
    import contextvars

    name = contextvars.ContextVar("name", default="nobody")
    name.set("me")
    assert delayed(name.get, pure=False)().compute() == "me"


def test_gets_inside_tasks_and_in_many_threads(scheduler):
    def inner(n):
        return int(da.arange(n, chunks=3).sum().compute())

    assert dask.compute(*[delayed(inner)(n) for n in range(2, 20)]) == tuple(
        n * (n - 1) // 2 for n in range(2, 20)
    )
    results = []
    threads = [threading.Thread(target=lambda: results.append(inner(10))) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [45] * 16


def test_forked_children_make_threads_of_their_own():
    code = (
        "import os, gpuscheduler, warnings; warnings.simplefilter('ignore');"
        "assert gpuscheduler.get({'a': (len, 'abc')}, 'a') == 3; pid = os.fork();"
        "ok = gpuscheduler.get({'a': (len, 'abc')}, 'a') == 3;"
        "os._exit(0 if ok else 1) if pid == 0 else print(os.waitpid(pid, 0)[1])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert out.stdout.strip() == "0", out.stderr


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2", "cpu:4"])
def test_any_number_of_devices_gives_the_same_bits_as_dask(devices):
    x = da.random.default_rng(0).random((300, 200), chunks=(37, 41))
    y = ((x - x.mean(axis=0)) / x.std(axis=0)).T @ x
    want = y.compute(scheduler="sync")
    with Scheduler(devices):
        np.testing.assert_array_equal(y.compute(), want)


@pytest.mark.parametrize("random", [da.random, gpuscheduler.random])
def test_any_number_of_devices_gives_the_same_bits_as_one(random, monkeypatch):
    """Also where everything is fused: a program is the same whoever runs it."""
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    x = random.default_rng(0).random((300, 200), chunks=(37, 41))
    y = ((x - x.mean(axis=0)) / x.std(axis=0)).T @ x
    got = []
    for n in (1, 2, 4):
        with Scheduler(f"cpu:{n}", fuse_least=0):
            got.append(y.compute())
    np.testing.assert_array_equal(got[1], got[0])
    np.testing.assert_array_equal(got[2], got[0])


def test_leaving_by_an_exception_restores_too():
    before = config.get("scheduler", None)
    with contextlib.suppress(KeyError), Scheduler("cpu:1"):
        raise KeyError
    assert config.get("scheduler", None) == before


def test_what_a_mask_leaves_is_not_known_before_the_run():
    """Ten of a million numbers, where a quarter of a million fit: Dask says that all are left."""
    x = np.arange(2**20, dtype="f8")
    with Scheduler("cpu:1", memory_limit=2**21):
        a = da.from_array(x, chunks=2**19)
        assert a[a >= 2**20 - 10].compute().size == 10


# ---- garbage


def many(n=40_000):
    return {("a", i): Task(("a", i), add, i, 1) for i in range(n)}


def test_many_objects_are_aside_during_the_run_and_come_back():
    seen = []
    dsk = many()
    dsk["look"] = Task("look", lambda: seen.append(gc.get_freeze_count()))
    with Scheduler(devices="cpu:2") as s:
        s.get(dsk, list(dsk))
        assert seen[0] > 50_000
        assert not gc.get_freeze_count()
        dsk["fail"] = Task("fail", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            s.get(dsk, list(dsk))
        assert not gc.get_freeze_count()
        s.get({"look": dsk["look"]}, "look")
        assert seen[-1] == 0  # few are looked at as ever
    assert gc.isenabled()


def test_what_the_user_has_put_aside_stays_there():
    dsk = many()
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with Scheduler(devices="cpu:2") as s:
            s.get(dsk, list(dsk))
        assert gc.get_freeze_count() >= before - 1000  # some of it goes by itself
    finally:
        gc.unfreeze()


def test_threads_put_aside_and_take_back_what_is_theirs():
    dsk = many()
    with Scheduler(devices="cpu:2") as s:
        threads = [threading.Thread(target=s.get, args=(dsk, list(dsk))) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not gc.get_freeze_count()


def test_what_stays_is_among_the_oldest_objects_unseen():
    looks = []
    gc.callbacks.append(lambda phase, info: looks.append(phase))
    try:
        with of_things_that_stay():
            made = [[i] for i in range(50_000)]
        after = [[i] for i in range(500)]
    finally:
        gc.callbacks.pop()
    assert not looks
    del made, after
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_a_plan_says_why_steps_are_no_kernels():
    """Also that of a collection which is like one that was planned before."""
    x = da.from_array(np.random.default_rng(0).random((40, 40)), chunks=20)
    inv = "numpy.linalg.inv is not element-wise or a reduction"
    with Scheduler(devices="cpu:2", fuse_least=0) as s:
        for shift in (1, 2):
            y = (x * 2 + shift).map_blocks(np.linalg.inv, dtype=float, meta=np.empty((0, 0)))
            plan = s.plan(y, (x * 2 + shift) * 3)
            assert {plan.steps[i].key[0] for i, why in plan.why.items() if why == inv} == {y.name}
            assert f"  no kernel: 4 of inv: {inv}" in str(plan)
            assert len(plan.why) < len(plan.steps)
            y.compute()
