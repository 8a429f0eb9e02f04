"""Options are checked before anything starts, whoever said them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import yaml
from dask import config
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import Options, Scheduler, options
from gpuscheduler.options import MAY_BE

PACKAGE = Path(gpuscheduler.__file__).parent
NAMES = [f.name for f in fields(Options)]

#: By option, what it may be ...
RIGHT = {
    "devices": ["auto", "cpu", "cpu:1", " cpu:3 ", "cuda", "cuda:0,0", "cuda,cpu:3"],
    "memory_limit": [0.5, 1.0, "8 GiB", 2**30, 1e9, np.int64(2**20), np.float32(0.5), None],
    "window": [1, 4, np.int64(2)],
    "deep_window": [1, 64],
    "fuse": [True, False, 0, 1, np.True_],
    "fuse_least": [0, 2**20, None],
    "fast_math": [True, False],
    "matmul_precision": ["strict", "tf32"],
    "tall_qr": ["auto", "householder"],
    "numpy": ["auto", "gpu", "gpu-only", "host"],
    "host_memory": [0, 0.25, "1 GB", None],
    "spill_directory": ["here", Path("here"), None],
    "spill_compression": ["zlib", None],
    "plan_memory": [0, "256 MiB", 2**20, 0.1],
    "dashboard": ["top", False, ":8788", "0.0.0.0:0"],
    "progress": [True, False],
    "timeline": [True, False],
    "observe": ["counters", "steps", "device", "memory"],
    "check": [True, False],
}
#: ... and what it may not.
WRONG = {
    "devices": [
        "gpu",
        "cpu:0",
        "cpu:100000",
        "cpu:-1",
        "cuda:",
        "cuda:a",
        "",
        4,
        ["cpu"],
        "cpu,cuda",
        "cpu:2,cpu:2",
        "cuda,cpu:a",
        "cuda,cpu:99999",
        "auto,cpu:2",
    ],
    "memory_limit": [
        "",
        " ",
        "GiB",
        "much",
        0,
        -1,
        1.5,
        True,
        "-1 GiB",
        float("nan"),
        float("inf"),
        [1],
        {},
    ],
    "window": [0, -3, "a", "4", 1.5, True, [4]],
    "deep_window": [0, -1, "a", 2.0],
    "fuse": ["no", "yes", "False", 2, 1.0, []],
    "fuse_least": ["1 MB", -1, 0.5, True],
    "fast_math": ["no", 3],
    "matmul_precision": ["fast", True, None, 1],
    "tall_qr": ["cholesky", True, None],
    "numpy": ["cpu", None, True, "GPU"],
    "host_memory": ["much", -1, 1.5, True, float("nan")],
    "spill_directory": [3, True, ["here"]],
    "spill_compression": ["zip", True, 9, ["zlib"]],
    "plan_memory": ["much", -1, 1.5, True],
    "dashboard": ["page", "8788", ":99999", 8788, "a b:1", ["top"]],
    "progress": ["no", 2],
    "timeline": ["no", "trace.json"],
    "observe": ["all", True, 1, None],
    "check": ["no", 7],
}


def cases(table):
    return [pytest.param(n, v, id=f"{n}={v!r}") for n, values in table.items() for v in values]


def dashed(name):
    return name.replace("_", "-")


def test_each_option_has_right_and_wrong_values_here():
    assert list(RIGHT) == list(WRONG) == NAMES


@pytest.mark.parametrize(("name", "value"), cases(RIGHT))
def test_right_value_is_taken(name, value):
    read = Options.read(**{name: value})
    default = getattr(Options(), name)
    assert getattr(read, name) == (default if value is None else value)
    with config.set({f"gpuscheduler.{dashed(name)}": value}):
        assert Options.read() == read


@pytest.mark.parametrize(("name", "value"), cases(WRONG))
def test_wrong_value_is_an_error_that_names_the_option(name, value, monkeypatch):
    monkeypatch.setattr("gpuscheduler.devices.choose.find_hardware", None)  # nothing is started
    said = re.escape(f"{name}={value!r}")
    if value is not None:
        with pytest.raises(ValueError, match=f"^{said}: use "):
            Scheduler(**{"devices": "cpu:1", name: value})
        key = f"gpuscheduler.{dashed(name)}"
        with (
            config.set({key: value}),
            pytest.raises(ValueError, match=rf"^{said} \({key} in Dask's configuration\): use "),
        ):
            Scheduler()
    with pytest.raises(ValueError, match=f"^{said}: use "):
        Options(**{name: value})


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(),
    st.text(max_size=8), st.sampled_from(["auto", "cpu:2", "1 MB", "0.5", "zlib", "dask", "no"]),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.none()),
)  # fmt: skip


@given(st.sampled_from(NAMES), ANYTHING)
def test_any_value_is_taken_or_refused_by_name(name, value):
    try:
        read = Options.read(**{name: value})
    except ValueError as error:
        assert str(error).startswith(f"{name}=")  # noqa: PT017
    else:
        taken = getattr(read, name)
        assert taken == (getattr(Options(), name) if value is None else value)


@pytest.mark.parametrize(
    ("name", "value"),
    [c for c in cases(RIGHT) if c.values[0] not in ("devices", "spill_directory")],
)
def test_computation_with_each_right_value(name, value):
    with Scheduler("cpu:2", **{name: value}):
        x = da.arange(40, chunks=10)
        assert int((x + x[::-1]).sum().compute()) == 40 * 39


def test_number_of_cpu_devices_has_a_bound():
    assert Options(devices=f"cpu:{options.MOST_DEVICES}")
    with pytest.raises(ValueError, match=f"at most {options.MOST_DEVICES}"):
        Options(devices=f"cpu:{options.MOST_DEVICES + 1}")
    with pytest.raises(ValueError, match="devices="):
        Options(devices="cuda:" + ",".join("0" * (options.MOST_DEVICES + 1)))


# ---- Dask's configuration


def test_unknown_keys_of_the_configuration_are_one_warning():
    with (
        config.set({"gpuscheduler.devces": "cpu:1", "gpuscheduler.memory_limits": 1}),
        pytest.warns(UserWarning, match="unknown keys below gpuscheduler") as caught,
    ):
        Scheduler("cpu:1").close()
    (warning,) = caught
    assert "'devces' (did you mean 'devices'?)" in str(warning.message)
    assert "'memory-limits' (did you mean 'memory-limit'?)" in str(warning.message)
    assert warning.filename == __file__


def test_keys_may_be_written_with_underscores():
    with warnings.catch_warnings(), config.set({"gpuscheduler": {"fuse_least": 7}}):
        warnings.simplefilter("error")
        assert Options.read().fuse_least == 7


@pytest.mark.parametrize("section", ["cpu:1", ["devices"], 4])
def test_section_that_is_no_mapping_is_an_error(section):
    with config.set(gpuscheduler=section), pytest.raises(ValueError, match="use a mapping"):
        Scheduler()


def test_empty_section_is_none_at_all():
    with config.set(gpuscheduler=None):
        assert Options.read() == Options()


@pytest.mark.parametrize(("key", "value"), [("ipc", "no"), ("cache-directory", 3)])
def test_settings_that_are_no_options_are_checked_too(key, value):
    with config.set({f"gpuscheduler.{key}": value}), pytest.raises(ValueError, match="use "):
        Options.read()


def options_in_a_process(**environment):
    code = "import gpuscheduler; print(gpuscheduler.Options.read())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DASK_GPUSCHEDULER", "cpu:1", "gpuscheduler='cpu:1' in Dask's configuration"),
        ("DASK_GPUSCHEDULER__FUSE", "no", "fuse='no' (gpuscheduler.fuse in Dask's"),
        ("DASK_GPUSCHEDULER__DEVCES", "cpu:1", "'devces' (did you mean 'devices'?)"),
    ],
)
def test_environment_is_checked(name, value, message):
    """Also a section that is no mapping, which Dask would replace by our defaults."""
    assert message in options_in_a_process(**{name: value}).stderr


def test_environment_says_0_for_false():
    assert "fuse=False" in options_in_a_process(DASK_GPUSCHEDULER__FUSE="0").stdout


# ---- the files that are shipped


def shipped(name):
    return yaml.safe_load((PACKAGE / name).read_text(encoding="utf-8"))


def test_defaults_file_says_the_defaults():
    section = shipped("gpuscheduler.yaml")["gpuscheduler"]
    assert list(section) == [dashed(name) for name in MAY_BE]
    assert Options(**{name: section[dashed(name)] for name in NAMES}) == Options()
    for name in set(MAY_BE) - set(NAMES):
        options.check_option(name, section[dashed(name)])


def test_defaults_are_in_dasks_configuration():
    assert config.get("gpuscheduler.deep-window") == Options().deep_window
    assert shipped("gpuscheduler.yaml") in config.defaults


KINDS = {"integer": int, "number": float, "string": str, "boolean": bool, "null": type(None)}


def allows(schema, value):
    """What JSON schema says, as far as our schema uses it."""
    kinds = schema.get("type", list(KINDS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return (
        type(value) in [KINDS[k] for k in kinds]
        and (
            "enum" not in schema
            or any(type(v) is type(value) and v == value for v in schema["enum"])
        )
        and not (type(value) is int and value < schema.get("minimum", value))
        and (
            "pattern" not in schema
            or type(value) is not str
            or re.search(schema["pattern"], value) is not None
        )
    )


def test_schema_has_each_setting_and_says_what_it_is():
    schema = shipped("gpuscheduler-schema.yaml")["properties"]["gpuscheduler"]
    assert list(schema["properties"]) == [dashed(name) for name in MAY_BE]
    assert all(s["description"].strip() for s in schema["properties"].values())


@pytest.mark.parametrize(("name", "value"), [*cases(RIGHT), *cases(WRONG)])
def test_schema_takes_what_options_take(name, value):
    """As far as a schema can say it: numbers that mean nothing are strings or numbers too."""
    schema = shipped("gpuscheduler-schema.yaml")["properties"]["gpuscheduler"]["properties"]
    if type(value) not in KINDS.values():
        return
    right = MAY_BE[name][0](value)
    if right and not (value in (0, 1) and type(value) is int):  # as the environment says it
        assert allows(schema[dashed(name)], value)
    if not right and name not in ("memory_limit", "host_memory", "plan_memory", "devices"):
        assert not allows(schema[dashed(name)], value)


# ---- as Dask's scheduler


def test_scheduler_itself_is_what_dask_takes():
    with Scheduler("cpu:2") as s:
        x = da.arange(10, chunks=5)
        assert int(x.sum().compute(scheduler=s)) == 45
        kept = x.persist(scheduler=s)
        assert "persisted" in repr(s)
        assert int(kept.sum().compute(scheduler=s)) == 45
