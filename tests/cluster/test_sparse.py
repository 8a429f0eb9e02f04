"""Sparse blocks on a cluster: sent between workers, and to the client as matrices."""

import dask.array as da
import numpy as np
import scipy.sparse
from distributed import Client, LocalCluster

import gpuscheduler
from gpuscheduler import sparse


def test_sparse_arrays_on_a_cluster():
    m = scipy.sparse.random_array((400, 300), density=0.1, format="csr", rng=0)
    v = np.arange(300.0)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices="cpu:2"),
    ):
        s = sparse.asarray(m, chunks=(50, 300))
        np.testing.assert_allclose((s @ da.from_array(v, chunks=100)).compute(), m @ v)
        np.testing.assert_allclose(s.sum(axis=0).compute(), m.sum(axis=0))
        np.testing.assert_allclose(float((s @ s.T).sum().compute()), (m @ m.T).sum())
        doubled = (s * 2).compute()
        assert type(doubled) is scipy.sparse.csr_array
        np.testing.assert_array_equal(doubled.toarray(), 2 * m.toarray())
        kept = s.persist()
        np.testing.assert_allclose((kept @ v).compute(), m @ v)
        raw = sparse.unwrap(kept)
        assert type(raw.compute()) is scipy.sparse.csr_array
