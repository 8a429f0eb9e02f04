"""What NVML tells of the GPUs: memory, utilisation, power, clocks, NVLink.

The package is nvidia-ml-py (`pynvml`). A device of CUDA is found by its UUID where it is a MIG
instance, else by its PCI bus id: so `CUDA_VISIBLE_DEVICES` and its order do not matter. What NVML
does not know of a device stays None, and one line of the log says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

from ...forks import new_lock

#: Links of NVLink that a GPU may have.
LINKS = 18
_logger = logging.getLogger("gpuscheduler.run")


class Sensors(NamedTuple):
    """What NVML reads of one device at one time."""

    used: int | None = None  # bytes, of all processes
    total: int | None = None  # bytes
    utilization: float | None = None  # the part of the last interval in which a kernel ran
    power: float | None = None  # watts
    power_limit: float | None = None  # watts
    temperature: int | None = None  # degrees Celsius
    clock: int | None = None  # MHz, of the multiprocessors
    clock_max: int | None = None  # MHz
    throttled: tuple[str, ...] = ()  # why the clock is lower than it could be


class DeviceFacts(NamedTuple):
    """What NVML knows of one device that rarely changes."""

    name: str = ""
    driver: str = ""
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    others: int | None = None  # bytes that other processes have on it
    nvlinks: tuple[int, ...] = ()  # the links that are up
    pcie_sent: int | None = None  # bytes per second, in the last 20 ms
    pcie_received: int | None = None  # bytes per second


class Nvml:
    """NVML for these devices of CUDA; `find` makes one."""

    def __init__(self, library: Any, devices: list[int], properties: Callable[[int], Any]):
        self._library, self._pid = library, os.getpid()
        self._lock = new_lock()
        self._logged: set[str] = set()
        self._handles = {d: self._find_handle(properties(d)) for d in dict.fromkeys(devices)}

    @classmethod
    def find(cls, devices: list[int], properties: Callable[[int], Any]) -> Nvml | None:
        """NVML, if the package and the library are there; else None, and a line of the log."""
        try:
            import pynvml
        except ImportError:
            _logger.debug("no NVML: the package nvidia-ml-py is not installed")
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            _logger.debug("no NVML: %s", error)
            return None
        return cls(pynvml, devices, properties)

    def _find_handle(self, found: Any) -> Any:
        """The handle of a device with these properties of CUDA; None where NVML has none."""
        lib = self._library
        if len(uuid := found.get("uuid") or b"") == 16:
            handle = self._ask("", lib.nvmlDeviceGetHandleByUUID, f"MIG-{UUID(bytes=bytes(uuid))}")
            if handle is not None:
                return handle
        numbers = [found.get(f"pci{part}ID") for part in ("Domain", "Bus", "Device")]
        if None in numbers:
            return None
        bus = "{:08x}:{:02x}:{:02x}.0".format(*numbers)
        return self._ask("the device", lib.nvmlDeviceGetHandleByPciBusId, bus.encode())

    def _ask(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of NVML returns; None where it fails, with one line of the log."""
        try:
            return function(*arguments)
        except (self._library.NVMLError, ValueError, TypeError) as error:
            if what and what not in self._logged:
                self._logged.add(what)
                _logger.debug("NVML does not tell %s: %s", what, error)
            return None

    def sensors(self, device: int) -> Sensors:
        """Read a device of CUDA."""
        handle, lib, ask = self._handles.get(device), self._library, self._ask
        if handle is None or self._pid != os.getpid():  # a forked child has to begin anew
            return Sensors()
        with self._lock:
            memory = ask("memory", lib.nvmlDeviceGetMemoryInfo, handle)
            rates = ask("utilisation", lib.nvmlDeviceGetUtilizationRates, handle)
            power = ask("power", lib.nvmlDeviceGetPowerUsage, handle)
            limit = ask("power limit", lib.nvmlDeviceGetEnforcedPowerLimit, handle)
            temperature = ask(
                "temperature", lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU
            )
            clock = ask("clock", lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_SM)
            most = ask("largest clock", lib.nvmlDeviceGetMaxClockInfo, handle, lib.NVML_CLOCK_SM)
            reasons = ask("throttling", lib.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return Sensors(
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            None if rates is None else rates.gpu / 100,
            None if power is None else power / 1000,
            None if limit is None else limit / 1000,
            temperature, clock, most, self._throttle_names(reasons),
        )  # fmt: skip

    def _throttle_names(self, reasons: int | None) -> tuple[str, ...]:
        lib, names = self._library, []
        for name, text in THROTTLING.items():
            bit = getattr(lib, f"nvmlClocksThrottleReason{name}", 0)
            if reasons and reasons & bit:
                names.append(text)
        return tuple(names)

    def facts(self, device: int) -> DeviceFacts:
        """What `gpuscheduler info` shows of a device beside its sensors; takes some 40 ms."""
        handle, lib, ask = self._handles.get(device), self._library, self._ask
        if handle is None or self._pid != os.getpid():
            return DeviceFacts()
        ecc = ask(
            "ECC errors", lib.nvmlDeviceGetTotalEccErrors, handle,
            lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC,
        )  # fmt: skip
        processes = ask("processes", lib.nvmlDeviceGetComputeRunningProcesses, handle)
        others = None
        if processes is not None:
            others = sum(p.usedGpuMemory or 0 for p in processes if p.pid != self._pid)
        links = [n for n in range(LINKS) if ask("", lib.nvmlDeviceGetNvLinkState, handle, n)]
        counters = lib.NVML_PCIE_UTIL_TX_BYTES, lib.NVML_PCIE_UTIL_RX_BYTES
        sent, received = (
            ask("PCIe", lib.nvmlDeviceGetPcieThroughput, handle, way) for way in counters
        )
        name = ask("name", lib.nvmlDeviceGetName, handle) or ""
        driver = ask("driver", lib.nvmlSystemGetDriverVersion) or ""
        return DeviceFacts(
            name if isinstance(name, str) else name.decode(),
            driver if isinstance(driver, str) else driver.decode(),
            ecc, others, tuple(links),
            None if sent is None else sent * 1000,  # they are in KB/s
            None if received is None else received * 1000,
        )  # fmt: skip


class PlaceSensors:
    """What NVML tells of the places of a scheduler; NVML is begun when somebody asks."""

    def __init__(self, devices: list[int], properties: Callable[[int], Any]):
        self._devices, self._properties = devices, properties
        self._found: list[Nvml | None] = []
        self._lock = new_lock()

    def _nvml(self) -> Nvml | None:
        with self._lock:
            if not self._found:
                self._found.append(Nvml.find(self._devices, self._properties))
        return self._found[0]

    def sensors(self) -> list[Sensors]:
        """What is read of each place's GPU now; nothing where there is no NVML."""
        nvml = self._nvml()
        return [Sensors() if nvml is None else nvml.sensors(d) for d in self._devices]

    def facts(self) -> list[DeviceFacts]:
        """What is known of each place's GPU; takes some 40 ms each."""
        nvml = self._nvml()
        return [DeviceFacts() if nvml is None else nvml.facts(d) for d in self._devices]


#: NVML's names of what lowers the clock, and what they mean.
THROTTLING = {
    "SwPowerCap": "power limit",
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "heat",
    "SwThermalSlowdown": "heat",
    "HwPowerBrakeSlowdown": "power brake",
}
