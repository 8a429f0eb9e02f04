"""NVML: which device it is, and what is done about what it does not tell."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from gpuscheduler.devices.cuda.nvml import DeviceFacts, Nvml, PlaceSensors, Sensors

UUID = bytes(range(16))


class FakeNvml:
    """A library with two GPUs, the second of which knows little."""

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwThermalSlowdown = 64

    class NVMLError(Exception):
        pass

    def __init__(self, mig=None, fails=False):
        self.mig, self.fails = mig, fails

    def nvmlInit(self):
        if self.fails:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.mig:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        known = {b"00000000:1b:00.0": "first", b"00000001:c3:00.0": "second"}
        if bus not in known:
            raise self.NVMLError("Not Found")
        return known[bus]

    def __getattr__(self, name):
        answers = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 * 2**30, total=140 * 2**30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=20),
            "nvmlDeviceGetPowerUsage": 612_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 58,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 4 | 64,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=1, usedGpuMemory=2**30),
                SimpleNamespace(pid=-1, usedGpuMemory=None),
            ],
            "nvmlDeviceGetName": b"NVIDIA H200",
            "nvmlSystemGetDriverVersion": "570.86.15",
        }
        if not name.startswith("nvml") or name.startswith("nvmlClocks"):
            raise AttributeError(name)

        def function(handle=None, *arguments):
            if name == "nvmlDeviceGetNvLinkState":
                return int(handle == "first" and arguments[0] < 4)
            if name == "nvmlDeviceGetPcieThroughput":
                return 5000 + arguments[0]
            if handle == "second" or name not in answers:
                raise self.NVMLError("Not Supported")
            return answers[name]

        return function


PROPERTIES = [
    {"uuid": UUID, "pciDomainID": 0, "pciBusID": 0x1B, "pciDeviceID": 0},
    {"uuid": b"short", "pciDomainID": 1, "pciBusID": 0xC3, "pciDeviceID": 0},
    {},
]


def nvml(monkeypatch, devices, **kwargs):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(**kwargs))
    return Nvml.find(devices, PROPERTIES.__getitem__)


def test_a_device_is_found_by_its_bus_whatever_its_number(monkeypatch):
    found = nvml(monkeypatch, [1, 0, 0])
    assert found.sensors(0) == Sensors(
        3 * 2**30, 140 * 2**30, 0.97, 612.5, 700.0, 58, 1755, 1980, ("power limit", "heat")
    )
    facts = found.facts(0)
    assert facts == DeviceFacts(
        "NVIDIA H200", "570.86.15", 0, 2**30, (0, 1, 2, 3), 5_000_000, 5_001_000
    )


def test_an_instance_of_mig_is_found_by_its_uuid(monkeypatch):
    found = nvml(monkeypatch, [0], mig="MIG-00010203-0405-0607-0809-0a0b0c0d0e0f")
    assert found._handles == {0: "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f"}


def test_what_a_device_does_not_tell_is_empty_and_said_once(monkeypatch, caplog):
    found = nvml(monkeypatch, [0, 1, 2])
    with caplog.at_level(logging.DEBUG, "gpuscheduler"):
        for _ in range(3):
            assert found.sensors(1) == Sensors()
            assert found.sensors(2) == Sensors()  # NVML has no such device
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == len(set(said)) > 5
    assert all("NVML does not tell" in text for text in said)
    assert found.facts(1).ecc_errors is None
    assert found.facts(2) == DeviceFacts()


def test_places_are_read_in_order_and_nvml_begins_when_somebody_asks(monkeypatch):
    places = PlaceSensors([1, 0, 0], PROPERTIES.__getitem__)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert [s.clock for s in places.sensors()] == [None, 1755, 1755]
    assert [f.name for f in places.facts()] == ["", "NVIDIA H200", "NVIDIA H200"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nothing = PlaceSensors([0], PROPERTIES.__getitem__)
    assert (nothing.sensors(), nothing.facts()) == ([Sensors()], [DeviceFacts()])


def test_a_forked_child_reads_nothing(monkeypatch):
    found = nvml(monkeypatch, [0])
    monkeypatch.setattr("os.getpid", lambda: -5)
    assert found.sensors(0) == Sensors()
    assert found.facts(0) == DeviceFacts()


@pytest.mark.parametrize("how", ["no package", "no driver"])
def test_without_nvml_there_is_a_line_of_the_log(monkeypatch, caplog, how):
    with caplog.at_level(logging.DEBUG, "gpuscheduler"):
        if how == "no package":
            monkeypatch.setitem(sys.modules, "pynvml", None)
            assert Nvml.find([0], PROPERTIES.__getitem__) is None
        else:
            assert nvml(monkeypatch, [0], fails=True) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("no NVML: ")


def test_the_real_package_has_what_is_asked_of_it():
    """Names that are looked up in NVML's package, of which one that is gone would go unnoticed."""
    pynvml = pytest.importorskip("pynvml")
    import inspect
    import re

    from gpuscheduler.devices.cuda import nvml as module

    names = set(re.findall(r"lib\w*\.((?:nvml|NVML)\w+)", inspect.getsource(module)))
    assert len(names) > 15
    assert all(hasattr(pynvml, name) for name in names)
    reasons = [f"nvmlClocksThrottleReason{name}" for name in module.THROTTLING]
    assert all(hasattr(pynvml, name) for name in reasons)
