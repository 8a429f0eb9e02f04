"""The hardware as numbers: a test can invent any machine."""

from __future__ import annotations

from dataclasses import dataclass

HOST = -1
DISK = -2
ENDLESS = 2**63 - 1  # bytes

#: Seconds of a step before it moves a byte: Python, a launch, an event.
STEP_SECONDS = 10e-6


def place_name(place: int) -> str:
    """A place for people.

    >>> [place_name(p) for p in (1, HOST, DISK)]
    ['device 1', 'host', 'disk']
    """
    return {HOST: "host", DISK: "disk"}.get(place, f"device {place}")


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices, their memory and the links between them.

    >>> m = Machine.uniform(2, memory=10**9, peer=100e9)
    >>> m.devices
    range(0, 2)
    >>> m.copy_seconds(10**9, 0, 1)
    0.01001
    """

    memory: tuple[int, ...]  # bytes that values may take, per device
    peer: tuple[tuple[float, ...], ...]  # bytes/s from device (row) to device (column)
    host: tuple[float, ...]  # bytes/s between the host and each device
    host_memory: int = ENDLESS  # bytes that evicted values may take
    latency: float = 10e-6  # seconds before the first byte of a copy arrives
    bandwidth: float = 3e12  # bytes/s a kernel reads or writes in its own device's memory
    shared: bool = False  # True where all devices read the same memory, the host's
    disk: float = 1e9  # bytes/s to and from files
    flops: float = 50e12  # operations/s of real numbers in products of matrices
    #: Guess of a step's working memory before a step of its kind has run, in arrays of the largest
    #: size that it reads or makes. 0 on GPUs: they refuse memory, and the step runs again.
    arrays: int = 0

    @classmethod
    def uniform(
        cls,
        n: int,
        memory: int = ENDLESS,
        peer: float = 390e9,
        host: float = 55e9,
        host_memory: int = ENDLESS,
        latency: float = 10e-6,
        bandwidth: float = 3e12,
        shared: bool = False,
        arrays: int = 0,
        flops: float = 50e12,
    ) -> Machine:
        """`n` equal devices; the defaults are one H200's."""
        return cls(
            (memory,) * n,
            tuple((peer,) * n for _ in range(n)),
            (host,) * n,
            host_memory,
            latency,
            bandwidth,
            shared,
            flops=flops,
            arrays=arrays,
        )

    @property
    def devices(self) -> range:
        return range(len(self.memory))

    @property
    def memories(self) -> range:
        """The memories, each named by its first device; one where all devices share it."""
        return range(min(1, len(self.memory))) if self.shared else self.devices

    def memory_of(self, place: int) -> int:
        """The memory in which the values of a place are.

        >>> [Machine.uniform(2, shared=s).memory_of(1) for s in (False, True)]
        [1, 0]
        """
        return 0 if self.shared and place >= 0 else place

    def memory_name(self, memory: int) -> str:
        """A memory for people: what devices share is the host's.

        >>> [Machine.uniform(2, shared=s).memory_name(0) for s in (False, True)]
        ['device 0', 'the host, for all devices']
        """
        return "the host, for all devices" if self.shared and memory >= 0 else place_name(memory)

    def limit(self, memory: int) -> int:
        """Bytes that values may take in a memory. What devices share has the limits of all.

        >>> Machine.uniform(3, memory=100, shared=True).limit(0)
        300
        """
        if memory == DISK:
            return ENDLESS
        if memory == HOST:
            return self.host_memory
        return sum(self.memory) if self.shared else self.memory[memory]

    def copy_seconds(self, nbytes: int, src: int, dst: int) -> float:
        if DISK in (src, dst):
            return self.latency + nbytes / self.disk
        if src == dst or self.shared:
            return 0.0
        rate = self.peer[src][dst] if min(src, dst) >= 0 else self.host[max(src, dst)]
        return self.latency + nbytes / rate

    def step_seconds(self, nbytes: int) -> float:
        """The default cost model: a step takes as long as moving its inputs and output."""
        return STEP_SECONDS + nbytes / self.bandwidth

    def product_seconds(self, operations: float) -> float:
        """A step that multiplies matrices."""
        return STEP_SECONDS + operations / self.flops
