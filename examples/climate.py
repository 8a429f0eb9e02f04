"""Anomalies of a temperature by xarray, unchanged: climatology, standard scores, rolling means.

The program makes a Zarr store of daily temperatures, opens it lazily and computes. Nothing in
`scores` knows of GPUs: with any, blocks are read on the host, kernels run on GPUs, and what xarray,
Zarr and matplotlib get are NumPy arrays.

`python examples/climate.py scores.png --days 730 --size 36`
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import xarray as xr

import gpuscheduler


def temperatures(days, size):
    """Daily temperatures in kelvin over `days` and a globe of `size` × 2 `size` cells, float32."""
    time = np.datetime64("2020-01-01", "ns") + np.arange(days) * np.timedelta64(1, "D")
    lat, lon = np.linspace(-87.5, 87.5, size), np.arange(2 * size) * 180.0 / size
    season = np.cos(2 * np.pi * np.arange(days) / 365.25)[:, None, None]
    mean = 300 - 40 * np.sin(np.radians(lat))[:, None] ** 2
    noise = np.random.default_rng(0).standard_normal((days, size, 2 * size))
    values = mean - 12 * season * np.sin(np.radians(lat))[:, None] + 2 * noise
    coordinates = {"time": time, "lat": lat, "lon": lon}
    return xr.DataArray(values.astype("f4"), coordinates, ("time", "lat", "lon"), "t2m")


def scores(t2m):
    """Rolling means over five days of how many standard deviations each day is from its month."""
    climatology = t2m.groupby("time.month").mean("time")
    anomalies = t2m.groupby("time.month") - climatology
    return (anomalies / t2m.std("time")).rolling(time=5).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", nargs="?", help="a .png file of the last day's scores")
    parser.add_argument("--days", type=int, default=730)
    parser.add_argument("--size", type=int, default=36)
    parser.add_argument("--devices", default=None)
    given = parser.parse_args()
    with TemporaryDirectory() as folder, gpuscheduler.Scheduler(given.devices) as scheduler:
        source, target = Path(folder) / "t2m.zarr", Path(folder) / "scores.zarr"
        made = temperatures(given.days, given.size)
        blocks = {"chunks": (given.days, given.size // 2, given.size)}
        made.to_dataset().to_zarr(source, consolidated=False, encoding={"t2m": blocks})
        t2m = xr.open_zarr(source, consolidated=False).t2m.persist()
        z = scores(t2m).chunk(time=-1)  # Zarr wants chunks of one length
        z.to_dataset(name="z").to_zarr(target, consolidated=False)
        written = xr.open_zarr(target, consolidated=False).z
        last = z.isel(time=-1).load()
        print(f"{scheduler}")
        print(f"scores of {z.sizes['time']} days: {type(last.values).__name__}, from "
              f"{float(last.min()):.2f} to {float(last.max()):.2f}")  # fmt: skip
        error = float(abs(written - scores(made)).max())
        print(f"largest difference from NumPy: {error:.1e}")
        if given.picture:
            from matplotlib.figure import Figure

            figure = Figure(figsize=(7, 3.5), layout="constrained")
            last.plot(ax=figure.subplots(), cmap="RdBu_r")
            figure.savefig(given.picture, dpi=120)


if __name__ == "__main__":
    main()
