"""Programs of xarray's users, on small data: what they give with any scheduler is compared."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

DAYS, LAT, LON = 48, 4, 6
#: Blocks of 24 × 2 × 6 elements.
CHUNKS = {"time": 24, "lat": 2}


def temperatures(
    dtype: Any = "f4", gaps: bool = False, shape: tuple[int, int, int] = (DAYS, LAT, LON)
) -> xr.DataArray:
    """Daily temperatures over two months and a coarse globe, as NumPy has them."""
    random = np.random.default_rng(0)
    days, lat, lon = shape
    values = 280 + 10 * random.standard_normal(shape)
    if gaps:
        values[random.random(values.shape) < 0.1] = np.nan
    time = np.datetime64("2020-01-10", "ns") + np.arange(days) * np.timedelta64(1, "D")
    coordinates = {"time": time, "lat": np.linspace(-75, 75, lat), "lon": np.arange(lon) * 60.0}
    names = "time", "lat", "lon"
    return xr.DataArray(values.astype(dtype), coordinates, names, "t2m", {"units": "K"})


def whole(t: xr.DataArray) -> xr.DataArray:
    """Each point's times in one block."""
    return t.chunk(time=-1)


def over_time(function: Callable[..., Any], t: xr.DataArray, **kwargs: Any) -> Any:
    """A function of each block, along time."""
    return xr.apply_ufunc(
        function, whole(t), input_core_dims=[["time"]], dask="parallelized",
        output_dtypes=kwargs.pop("output_dtypes", [t.dtype]), **kwargs,
    )  # fmt: skip


def plotted(t: xr.DataArray) -> Any:
    """What matplotlib is given by three plots of xarray's."""
    from matplotlib.figure import Figure

    mesh = t.mean("time").plot(ax=Figure().subplots())
    (line,) = t[:, 0, 0].plot(ax=Figure().subplots())
    counts, _, _ = t.plot.hist(ax=Figure().subplots())
    figure = Figure()
    t[-1].plot(ax=figure.subplots())
    figure.savefig(io.BytesIO(), format="png")
    return np.asarray(mesh.get_array()), np.asarray(line.get_ydata()), counts


def changed(t: xr.DataArray) -> xr.DataArray:
    """What is written to by position and by coordinate."""
    out = t.copy()
    out[{"time": 3}] = 0
    out.loc[{"lat": slice(0, 80)}] = 1
    return out


def weights(t: xr.DataArray) -> Any:
    """Means by area."""
    return t.weighted(np.cos(np.radians(t.lat)))


def by_month(t: xr.DataArray) -> Any:
    return t.groupby("time.month")


def anomalies(t: xr.DataArray) -> xr.DataArray:
    return by_month(t) - by_month(t).mean("time")


def slopes(t: xr.DataArray) -> xr.DataArray:
    """A straight line through each point's times, point by point."""
    sizes = {"output_sizes": {"degree": 2}}
    return over_time(
        lambda b: np.polyfit(np.arange(b.size), b, 1), t, output_core_dims=[["degree"]],
        vectorize=True, output_dtypes=[float], dask_gufunc_kwargs=sizes,
    )  # fmt: skip


def spectra(t: xr.DataArray) -> xr.DataArray:
    sizes = {"output_sizes": {"frequency": t.sizes["time"] // 2 + 1}}
    return over_time(
        np.fft.rfft, t, output_core_dims=[["frequency"]], output_dtypes=["c8"],
        dask_gufunc_kwargs=sizes,
    )  # fmt: skip


def without_flox(function: Callable[[xr.DataArray], Any]) -> Callable[[xr.DataArray], Any]:
    def run(t: xr.DataArray) -> Any:
        with xr.set_options(use_flox=False):
            return dask.compute(function(t))

    return run


def points(t: xr.DataArray) -> xr.DataArray:
    """Two places of the globe."""
    return t.interp(lat=xr.DataArray([0.0, 10], dims="p"), lon=xr.DataArray([5.0, 50], dims="p"))


def dataset_mean(t: xr.DataArray) -> xr.Dataset:
    numbers = "lat", range(t.sizes["lat"])
    return t.to_dataset().assign(u=t.mean("lon"), n=numbers).mean("lat")


#: Programs of which each bit is NumPy's: they choose, compare, count and copy, or only call
#: functions.
EXACT: dict[str, Callable[[xr.DataArray], Any]] = {
    "values": lambda t: t.values,
    "arithmetic": lambda t: (t + 1) * 2 > -t,
    "where": lambda t: t.where(t > 280),
    "where with another": lambda t: xr.where(t > 280, t, 0),
    "where, dropped": lambda t: t.where(t.lat > 0, drop=True),
    "clip": lambda t: t.clip(270, 290),
    "isel": lambda t: t.isel(time=[3, 1, 20], lat=slice(None, None, -1)),
    "sel": lambda t: t.sel(time="2020-02"),
    "nearest": lambda t: t.sel(lat=10, method="nearest"),
    "places": lambda t: t.isel(time=xr.DataArray([1, 5], dims="p"), lat=("p", [0, 3])),
    "max, min": lambda t: (t.max("time"), t.min(("lat", "lon"))),
    "idxmax": lambda t: (whole(t).idxmax("time"), t.argmax("time")),
    "count": lambda t: t.where(t > 280).count("time"),
    "any": lambda t: ((t > 300).any("time"), bool((t > 0).all())),
    "median": lambda t: whole(t).median("time"),
    "quantile": lambda t: whole(t).quantile([0.1, 0.5], "time"),
    "shift, roll": lambda t: (t.shift(time=2), t.roll(lon=2), t.diff("time")),
    "pad": lambda t: t.pad(lat=1, mode="edge"),
    "concat": lambda t: xr.concat([t, t + 1], "time"),
    "combine": lambda t: t.where(t > 280).combine_first(t * 0),
    "stack": lambda t: t.stack(z=("lat", "lon")).unstack("z"),
    "transpose": lambda t: t.transpose("lon", "time", "lat") + 1,
    "changed": changed,
    "fillna": lambda t: t.where(t > 280).fillna(-1),
    "rolling max": lambda t: t.rolling(time=4).max(),
    "coarsen max": lambda t: t.coarsen(time=7, boundary="trim").max(),
    "resample max": lambda t: t.resample(time="10D").max(),
    "first": lambda t: by_month(t).first(),
    "sorted": lambda t: over_time(lambda b: np.sort(b), t, output_core_dims=[["time"]]),
    "range": lambda t: over_time(lambda b: b.max(-1) - b.min(-1), t),
    "slopes": slopes,
    "dataframe": lambda t: t.to_dataframe(),
    "dates": lambda t: (t.time.chunk(time=10).max(), t.time.chunk(time=10).where(t.lat[0] > 0)),
    "month of days": lambda t: t.time.chunk(time=10).dt.month,
}
#: Programs that are NumPy's up to rounding.
ROUNDED: dict[str, Callable[[xr.DataArray], Any]] = {
    "mean, sum": lambda t: (t.mean("time"), t.mean(), t.sum("time", min_count=3)),
    "std, var": lambda t: (t.std("time"), t.var("time", ddof=1)),
    "cumsum": lambda t: t.cumsum("time"),
    "groupby": lambda t: by_month(t).mean("time"),
    "groupby without flox": without_flox(lambda t: by_month(t).std("time")),
    "anomalies": anomalies,
    "anomalies without flox": without_flox(anomalies),
    "groups mapped": lambda t: by_month(t).map(lambda g: g - g.mean("time")),
    "bins": lambda t: t.groupby_bins("lat", [-90, 0, 90]).mean(),
    "resample": lambda t: t.resample(time="10D").mean(),
    "resample without flox": without_flox(lambda t: t.resample(time="10D").mean()),
    "rolling": lambda t: t.rolling(time=5).mean(),
    "rolling, centred": lambda t: t.rolling(time=5, center=True, min_periods=2).sum(),
    "rolling over areas": lambda t: t[:4].rolling(lat=3, lon=3, center=True).mean(),
    "rolling windows": lambda t: t.rolling(time=3).construct("w").std("w"),
    "coarsen": lambda t: t.coarsen(time=8, lat=2).mean(),
    "weighted": lambda t: (weights(t).mean(("lat", "lon")), weights(t).sum("lat")),
    "interp": lambda t: t.interp(lat=[-10.0, 0, 33.3], lon=[10.0, 20.0]),
    "interp at points": points,
    "gaps filled": lambda t: whole(t.where(t > 275)).interpolate_na("time"),
    "polyfit": lambda t: whole(t).polyfit("time", 1).polyfit_coefficients,
    "correlation": lambda t: xr.corr(t, t.shift(time=1), "time"),
    "dot": lambda t: (xr.dot(t, t, dim="time"), t.dot(t.lat)),
    "derivatives": lambda t: (t.differentiate("lon"), t.integrate("lat")),
    "map_blocks": lambda t: t.map_blocks(lambda b: b - b.mean("lon")),
    "two results": lambda t: over_time(
        lambda b: (b.mean(-1), b.std(-1)), t, output_core_dims=[[], []],
        output_dtypes=[t.dtype, t.dtype],
    ),
    "NumPy's functions": lambda t: np.maximum(np.sqrt(t), t.mean("time") / 20),
    "spectra": spectra,
    "a dataset": dataset_mean,
    "persisted": lambda t: (t + 1).persist().mean("time"),
    "a histogram": lambda t: da.histogram(t.data, 10, (250, 310))[0],
    "a plot": plotted,
}  # fmt: skip
PROGRAMS = EXACT | ROUNDED


def run(name: str, t: xr.DataArray) -> Any:
    """What the program gives, computed by Dask's present scheduler."""
    made = PROGRAMS[name](t)
    return dask.compute(*made) if type(made) is tuple else dask.compute(made)


def arrays(value: Any) -> Iterator[Any]:
    """The arrays in what a program gives, in order."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from arrays(part)
    elif isinstance(value, xr.Dataset):
        for name in sorted(value.variables, key=str):
            yield value[name].values
    elif isinstance(value, xr.DataArray):
        yield value.values
        for name in sorted(value.coords, key=str):
            yield value[name].values
    elif hasattr(value, "to_numpy"):
        yield value.to_numpy()
    else:
        yield value


def assert_same(got: Any, wanted: Any, exact: bool) -> None:
    """Assert the same types, dtypes and shapes, and the same bits or numbers up to rounding."""
    for a, b in zip(arrays(got), arrays(wanted), strict=True):
        assert type(a) is type(b)
        if not isinstance(b, np.ndarray):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if exact or b.dtype.kind not in "fc":
            np.testing.assert_array_equal(a, b)
        else:
            scale = float(np.nanmax(abs(b), initial=0)) if b.size else 0.0
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * scale)
