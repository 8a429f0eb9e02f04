"""Any task on the device of your choice: `dask.annotate(device=k)`.

Each device gets one long simulation of its own; the last task reads all of them.
"""

import dask
import numpy as np

import gpuscheduler

STEPS = 200_000


@dask.delayed
def walk(seed):
    """How far a random walk gets from where it began."""
    return np.abs(np.random.default_rng(seed).choice([-1, 1], STEPS).cumsum()).max()


with gpuscheduler.Scheduler() as scheduler:
    walks = []
    for device in scheduler.hardware.machine.devices:
        with dask.annotate(device=device):
            walks.append(walk(device))
    farthest = dask.delayed(max)(walks).compute()
    print(f"the farthest of {len(walks)} walks of {STEPS:,} steps got to {farthest}")
