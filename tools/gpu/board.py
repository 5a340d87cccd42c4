"""Clocks, power and temperature of a GPU as its driver tells them: read, never set.

From NVML where the Python package nvidia-ml-py is installed, else from nvidia-smi, else nothing, with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SAMPLE_EVERY_S = 0.25
FIELDS = {
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "sm_clock_hz": "clocks.sm",
    "sm_clock_max_hz": "clocks.max.sm",
    "memory_clock_hz": "clocks.mem",
    "temperature_c": "temperature.gpu",
}
"""Our name: that of nvidia-smi."""

SUMMARISED = ("power_w", "sm_clock_hz", "temperature_c", "power_capped")
POWER_CAP = 0x4
"""Among NVML's reasons for a lower clock: the limit of power. `power_capped` is 1 where it holds, else 0; NVML alone tells."""

BoardReading = dict[str, float]
Reader = Callable[[], BoardReading]


def find_reader(uuid: str = "") -> tuple[Reader | None, str]:
    """A function that reads the board now, and where it reads; None and the reason where nothing tells.

    uuid: of the GPU ("GPU-..."); "": the driver's first. CUDA numbers the GPUs that it may see, by their speed; the driver
    numbers all of them, by their slots.
    """
    reader, why_not = _nvml_reader(uuid)
    if reader is not None:
        return reader, "NVML"
    if shutil.which("nvidia-smi") is None:
        return None, f"{why_not}; no nvidia-smi"
    reading = _smi_reading(uuid)
    return (lambda: _smi_reading(uuid), "nvidia-smi") if reading else (None, f"{why_not}; nvidia-smi tells nothing")


def _nvml_reader(uuid: str) -> tuple[Reader | None, str]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, "no package nvidia-ml-py"
    try:
        nvml.nvmlInit()
        several = bool(uuid) and nvml.nvmlDeviceGetCount() > 1
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid) if several else nvml.nvmlDeviceGetHandleByIndex(0)
    except nvml.NVMLError as error:
        return None, f"NVML: {error}"
    asked: Mapping[str, Callable[[], float]] = {
        "power_w": lambda: 1e-3 * nvml.nvmlDeviceGetPowerUsage(handle),
        "power_limit_w": lambda: 1e-3 * nvml.nvmlDeviceGetEnforcedPowerLimit(handle),
        "sm_clock_hz": lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "sm_clock_max_hz": lambda: 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_hz": lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    }

    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    if reasons is not None:
        asked = {**asked, "power_capped": lambda: float(bool(reasons(handle) & POWER_CAP))}

    def read() -> BoardReading:
        found: BoardReading = {}
        for name, ask in asked.items():
            with contextlib.suppress(nvml.NVMLError):  # a virtual machine's driver tells some of them only
                found[name] = float(ask())
        return found

    return read, ""


def _smi_reading(uuid: str) -> BoardReading:
    command = ["nvidia-smi", f"--id={uuid or 0}", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_smi(done.stdout) if done.returncode == 0 else {}


def parse_smi(text: str) -> BoardReading:
    """One line of numbers in the order of FIELDS; missing values ("[N/A]") are left out. Clocks come in MHz."""
    found: BoardReading = {}
    for name, cell in zip(FIELDS, text.strip().split(","), strict=False):
        with contextlib.suppress(ValueError):
            found[name] = float(cell) * (1e6 if name.endswith("_hz") else 1.0)
    return found


class BoardWatch:
    """Reads the board every quarter of a second while it is open.

    Attributes: readings. source: where they come from, or why there are none.
    """

    def __init__(self, reader: Reader | None, source: str, *, every_s: float = SAMPLE_EVERY_S) -> None:
        self.source = source
        self.readings: list[BoardReading] = []
        self._reader = reader
        self._every_s = every_s
        self._stop = threading.Event()

    @contextlib.contextmanager
    def open(self) -> Iterator[BoardWatch]:
        if self._reader is None:
            yield self
            return
        self.readings.append(self._reader())
        thread = threading.Thread(target=self._watch, args=(self._reader,), name="board", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
            self.readings.append(self._reader())

    def _watch(self, reader: Reader) -> None:
        while not self._stop.wait(self._every_s):
            self.readings.append(reader())

    def summary(self) -> dict[str, Any]:
        """Least, median and most of power, clock and temperature; `absent` with the reason where nothing was read."""
        if not any(self.readings):
            return {"absent": self.source}
        return {"source": self.source, "readings": len(self.readings), **summarised(self.readings)}


def summarised(readings: Sequence[BoardReading]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in SUMMARISED:
        values = [reading[name] for reading in readings if name in reading]
        if values:
            found[name] = {"least": min(values), "median": statistics.median(values), "most": max(values)}
    return found
