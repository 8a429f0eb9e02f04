"""What of compiling and keeping kernels needs no GPU. tests/gpu launches them."""

import warnings

import numpy as np
import pytest
from dask import config

pytest.importorskip("cupy")

from gpuscheduler import launch, shelf
from gpuscheduler.fuse import Fused
from gpuscheduler.kernel import generate
from gpuscheduler.trace import Abstract, follow

ARCH = "sm_90"


@pytest.fixture
def folder(tmp_path):
    with config.set({"gpuscheduler.cache-directory": str(tmp_path / "kernels")}):
        yield tmp_path / "kernels"


def source():
    program = follow(lambda x: x + 1, [Abstract((8,), np.dtype("f4"))])
    return generate(program.kernels[0]).source


def words(text, arch=ARCH, fast_math=False, single=True):
    return launch._words(text, arch, (), fast_math, single)


def test_machine_code_is_kept_from_process_to_process(folder):
    cubin = launch.compiled(source(), ARCH, single=True)
    assert shelf.found(words(source())) is None
    shelf.keep(words(source()), cubin)
    assert shelf.found(words(source())) == cubin
    assert shelf.found(words(source(), "sm_80")) is None
    assert shelf.found(words(source(), single=False)) is None
    assert folder.stat().st_mode & 0o077 == 0  # nobody else writes code that we run


def test_only_the_kernel_that_is_wanted_is_compiled():
    made = generate(follow(lambda x: x + 1, [Abstract((8,), np.dtype("f4"))]).kernels[0])
    names = made.name.encode() + b"\0", made.name.encode() + b"_one\0"
    for single, there in ((None, (True, True)), (True, (False, True)), (False, (True, False))):
        cubin = launch.compiled(made.source, ARCH, single=single)
        assert tuple(name in cubin for name in names) == there


def test_a_failed_compilation_has_the_compilers_words():
    with pytest.raises(launch.CompileFailed, match="expected a"):
        launch.compiled("int main(", ARCH)


def test_a_kernel_that_is_not_to_be_had_is_said_once():
    kernels = launch.Kernels()
    program = follow(lambda x: x + 1, [Abstract((8,), np.dtype("f4"))])
    fused = Fused("x", program, ("a",), (Abstract((8,), np.dtype("f4")),), (1,), (), None, dict)
    with pytest.warns(RuntimeWarning, match=r"'x' is computed operation by operation.*no such op"):
        kernels._give_up(fused, launch.CompileFailed("no such op"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels._give_up(fused, launch.CompileFailed("no such op"))
        assert kernels.run(fused, {"a": 7}, 0, launch.Workspace()) == {"a": 7}  # as it was


def test_fast_mathematics_is_other_code_and_kept_apart(folder):
    program = follow(lambda x, y: x / y * y + x, [Abstract((8,), np.dtype("f4"))] * 2)
    text = generate(program.kernels[0]).source
    exact, fast = (launch.compiled(text, ARCH, fast_math=f) for f in (False, True))
    assert len(fast) < len(exact)  # no slow path of a division
    shelf.keep(words(text, fast_math=True), fast)
    assert shelf.found(words(text)) is None
    assert shelf.found(words(text, fast_math=True)) == fast
