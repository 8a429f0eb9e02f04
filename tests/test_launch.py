"""What of compiling and keeping kernels needs no GPU. tests/gpu launches them."""

import warnings

import numpy as np
import pytest
from dask import config

pytest.importorskip("cupy")

from gpuscheduler import launch
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


def test_machine_code_is_kept_from_process_to_process(folder):
    cubin = launch.compiled(source(), ARCH)
    assert launch._from_disk(source(), ARCH) is None
    launch._to_disk(source(), ARCH, cubin)
    assert launch._from_disk(source(), ARCH) == cubin
    assert launch._from_disk(source(), "sm_80") is None
    assert folder.stat().st_mode & 0o077 == 0  # nobody else writes code that we run


def test_a_file_that_is_not_whole_counts_for_nothing(folder):
    launch._to_disk(source(), ARCH, launch.compiled(source(), ARCH))
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert launch._from_disk(source(), ARCH) is None


def test_a_disk_that_cannot_be_written_does_not_matter(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with config.set({"gpuscheduler.cache-directory": str(tmp_path / "file" / "kernels")}):
        launch._to_disk(source(), ARCH, b"code")
        assert launch._from_disk(source(), ARCH) is None


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
    launch._to_disk(text, ARCH, fast, fast_math=True)
    assert launch._from_disk(text, ARCH) is None
    assert launch._from_disk(text, ARCH, fast_math=True) == fast
