"""The device under the microbenchmarks: a GPU timed by its events, or this host's processor by the wall clock.

A CPU has no queue: a call has ended when it returns, so the same programme runs on it without holds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from calibration.operand_pool import last_cache_bytes
from parsim.errors import ExecutionError
from parsim.execute.cuda.driver import DeviceClock, driver_of
from parsim.execute.processes.machine import memory_limit_bytes, processor_name


class UnsupportedError(ExecutionError):
    """This device cannot run a case, which is not a fault of the case: it is skipped, with the reason."""


class SpoiledProcessError(ExecutionError):
    """A case has left this process unfit for others, though the device is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """Attributes:
    clock: times work on the device. uuid: of a GPU, by which its driver knows it ("GPU-..."); "" of a CPU.
    cache_bytes: of the last cache in front of the device's memory. memory_bytes: of the device."""

    device: torch.device
    name: str
    cache_bytes: int
    memory_bytes: int
    clock: DeviceClock
    uuid: str = ""


class WallClock:
    """An `EventClock` of a CPU: an event is the time at which it was made."""

    queues = False

    def hold(self, seconds: float) -> None:
        """There is no queue to keep busy."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, event: float) -> bool:
        return event <= time.perf_counter()

    def synchronize(self) -> None:
        """Every call has ended when it returns."""

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start

    def host_s(self) -> float:
        return time.perf_counter()


def cuda_device(index: int = 0) -> MeasuredDevice:
    """A GPU, which becomes torch's current device.

    Raises: ExecutionError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ExecutionError("torch sees no CUDA device; use --device cpu, or a CUDA build of torch and a driver")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    driver = driver_of(device)
    assert driver is not None, f"{device} is a GPU"
    return MeasuredDevice(
        device=device,
        name=str(properties.name),
        cache_bytes=last_cache_bytes(device),
        memory_bytes=int(properties.total_memory),
        clock=driver,
        uuid=driver_uuid(str(getattr(properties, "uuid", ""))),
    )


def driver_uuid(told: str) -> str:
    """As the driver spells it. Args: told: by torch, which leaves out the kind of device."""
    return f"GPU-{told}" if told and not told.startswith(("GPU-", "MIG-")) else told


def cpu_device() -> MeasuredDevice:
    """This host's processor."""
    device = torch.device("cpu")
    return MeasuredDevice(
        device=device,
        name=processor_name(),
        cache_bytes=last_cache_bytes(device),
        memory_bytes=memory_limit_bytes(),
        clock=WallClock(),
    )


def open_device(kind: str) -> MeasuredDevice:
    """Args: kind: "cuda" or "cpu". Raises: ExecutionError for another one, or where torch sees no GPU."""
    if kind == "cuda":
        return cuda_device()
    if kind == "cpu":
        return cpu_device()
    raise ExecutionError(f"unknown device {kind!r}; use cuda or cpu")
