"""The table of graphs/bench/numpy_arrays.py at a small size: every way gives what NumPy gives."""

import pytest

pytest.importorskip("cupy")

from graphs.bench import mixed, numpy_arrays

pytestmark = pytest.mark.gpu
ROWS = [
    "--only",
    "std of columns,x + 1 to host,sort of rows,Dask's svd,lstsq,solve,cholesky,sort,median,unique",
]


def test_every_way_of_the_table_gives_numpys_results(capsys):
    small = ["--gib", "0.0005", "--small-gib", "0.0002", "--seconds", "1"]
    wrong = numpy_arrays.table([*small, "--threads", "2", "--devices", "cuda:0", *ROWS])
    print(capsys.readouterr().out)
    assert wrong == []


def test_the_table_of_mixed_programs(capsys):
    pytest.importorskip("scipy")
    small = ["--gib", "0.0005", "--seconds", "0", "--only", "sort of rows,kernels-unknown-kernels"]
    assert mixed.table(["--devices", "cuda:0", *small]) == []
    said = capsys.readouterr().out
    assert "GPU" in said or "on the host" in said
    assert "sort of rows" in said
