"""The workloads in JAX, sharded over GPUs: `python -m graphs.bench.jax_peers COUNT ... [--small]`.

One process for JAX alone, so that its memory goes with it. Each line it prints is JSON: workload,
number of GPUs, milliseconds (the best of several after one more), and the value, where it is one
number. Sizes are those of `sizes`, as ours. Arrays are sharded by rows
(`jax.sharding.NamedSharding`); `jit` partitions the rest. Numbers of float32 are multiplied at
JAX's highest precision.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("JAX_ENABLE_X64", "1")

from .sizes import GENERATED, SIZES, SMALL_GENERATED, SMALL_SIZES

#: Rows and columns of the blocks in which random numbers are made and added up.
BLOCK = 10_000


def best(f: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Milliseconds of the fastest call, and its value."""
    import jax

    value = jax.block_until_ready(f())
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        value = jax.block_until_ready(f())
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times), value


def cases(count: int, small: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of each workload on the first `count` devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sizes = SMALL_SIZES if small else SIZES
    generated = SMALL_GENERATED if small else GENERATED
    mesh = Mesh(jax.devices()[:count], ("rows",))
    rows = NamedSharding(mesh, PartitionSpec("rows"))

    def random(shape: tuple[int, ...], number: int, kind: str) -> Any:
        draw = getattr(jax.random, kind)
        made = jax.jit(lambda k: draw(k, shape, jnp.float32), out_shardings=rows)
        return jax.block_until_ready(made(jax.random.key(number)))

    def gauss_sum(x: Any) -> Any:
        return jnp.exp(jnp.float32(-0.5) * ((x - jnp.float32(0.1)) / jnp.float32(2)) ** 2).sum()

    x = random(sizes["gauss_sum"](count), 1, "normal")
    f = jax.jit(gauss_sum)
    yield "gauss_sum", partial(f, x)
    g = jax.jit(lambda x: (x - x.mean(0)) / x.std(0), out_shardings=rows)
    yield "standardize", partial(g, x)
    del x

    def normal_cdf(d: Any) -> Any:
        k = 1 / (1 + 0.2316419 * jnp.abs(d))
        series = jnp.float32(1.330274429) * k
        for c in (-1.821255978, 1.781477937, -0.356563782, 0.31938153):
            series = (series + c) * k
        tail = series * 0.39894228 * jnp.exp(-0.5 * d * d)
        return jnp.where(d > 0, 1 - tail, tail)

    def black_scholes(s: Any, k: Any, t: Any) -> Any:
        spread = 0.3 * jnp.sqrt(t)
        d1 = (jnp.log(s / k) + (0.02 + 0.3**2 / 2) * t) / spread
        d2 = d1 - spread
        return s * normal_cdf(d1) - k * jnp.exp(-0.02 * t) * normal_cdf(d2)

    n = sizes["black_scholes"](count)
    options = [random((n,), 7 + i, "uniform") for i in range(3)]
    scaled = jax.jit(lambda s, k, t: (5 + 25 * s, 1 + 99 * k, 0.25 + 9.75 * t))(*options)
    del options
    h = jax.jit(black_scholes, out_shardings=rows)
    yield "black_scholes", partial(h, *scaled)
    del scaled

    side, steps = sizes["heat_stencil"](count)

    def heat(u: Any) -> Any:
        for _ in range(steps):
            beside = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
            u = jnp.float32(0.2) * beside + jnp.float32(0.2) * u
        return u

    u = random((side, side), 10, "uniform")
    i = jax.jit(heat, out_shardings=rows)
    yield "heat_stencil", partial(i, u)
    del u
    n = sizes["transpose_sum"](count)
    m = random((n, n), 3, "uniform")
    j = jax.jit(lambda x: (x + x.T).sum())
    yield "transpose_sum", partial(j, m)
    del m
    n = sizes["matmul"](count)
    a = random((n, n), 4, "uniform")
    k = jax.jit(lambda x: jnp.matmul(x, x, precision="highest"), out_shardings=rows)
    yield "matmul", partial(k, a)
    del a

    def mesh_sum(n: int) -> Any:
        lat = jax.lax.with_sharding_constraint(jnp.linspace(29.0, 31.0, n), rows)[:, None]
        lon = jnp.linspace(99.0, 101.0, n)[None, :]
        h, r = 0.008726645, 0.01745329
        scale = jnp.cos(r * lat) * jnp.cos(r * 30.0)
        v = jnp.sin(h * (30.0 - lat)) ** 2 + scale * jnp.sin(h * (101.0 - lon)) ** 2
        return jnp.arctan2(v, 1 - v).sum()

    points = jax.jit(mesh_sum, static_argnums=0)
    yield "haversine_mesh", partial(points, generated["haversine_mesh"])

    side = min(BLOCK, generated["random_slice_sum"])
    blocks = (generated["random_slice_sum"] // side) ** 2
    each = -(-blocks // count)

    def part(number: Any) -> Any:
        def add(i: Any, total: Any) -> Any:
            key = jax.random.fold_in(jax.random.key(6), number * each + i)
            x = 10 + jax.random.normal(key, (side, side), jnp.float64)
            return total + jnp.where(number * each + i < blocks, (x + 1)[::2, ::2].sum(), 0.0)

        return jax.lax.fori_loop(0, each, add, 0.0)

    numbers = jax.device_put(jnp.arange(count), rows)
    spread = jax.jit(
        jax.shard_map(
            lambda n: part(n[0])[None], mesh=mesh, in_specs=PartitionSpec("rows"),
            out_specs=PartitionSpec("rows"), check_vma=False,
        )
    )  # fmt: skip
    yield "random_slice_sum", lambda: spread(numbers).sum()


def main() -> None:
    """Print a line of JSON for each workload and number of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", type=int, nargs="+", metavar="COUNT")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="names of workloads, with commas between them")
    asked = parser.parse_args()
    try:
        import jax
    except ImportError:
        sys.exit("JAX is not installed")
    print(json.dumps({"jax": jax.__version__, "device": jax.devices()[0].device_kind}), flush=True)
    only = set(filter(None, asked.only.split(",")))
    for count in asked.counts:
        for name, f in cases(count, asked.small):
            if only and name not in only:
                continue
            try:
                ms, value = best(f, 3 if name == "random_slice_sum" else 9)
                row: dict[str, Any] = {"workload": name, "gpus": count, "ms": ms}
                if not getattr(value, "ndim", 1):
                    row["value"] = float(value)
            except Exception as error:
                row = {"workload": name, "gpus": count, "error": str(error)[:200]}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
