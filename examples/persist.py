"""Make the data once, leave it on the devices, ask it several questions."""

import dask.array as da

import gpuscheduler

with gpuscheduler.Scheduler():
    x = da.random.standard_normal((4000, 1000), chunks=(500, 1000)).persist()
    print(f"mean {float(x.mean().compute()):+.4f}")
    print(f"standard deviation {float(x.std().compute()):.4f}")
    print(f"share above 2: {float((x > 2).mean().compute()):.4f}")
    print(f"largest column mean {float(x.mean(axis=0).max().compute()):.4f}")
