"""The state of the machine during a measurement: clocks, governor, load, time taken by others. Read, never changed.

Linux tells all of it below /proc and /sys, a virtual machine only some; elsewhere most of it is left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from parsim.units import format_percent

PROC_STAT, CPU_INFO, CPUS = Path("/proc/stat"), Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu")
STAT_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def machine_state() -> dict[str, Any]:
    """Plain JSON: core_hz by core, governors (each once), virtual, load_average, ticks by kind since the machine's start.

    What the system does not tell is absent.
    """
    text = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    state = {
        "core_hz": core_clocks_hz(text),
        "governors": governors(),
        "virtual": "hypervisor" in text,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "ticks": parse_ticks(PROC_STAT.read_text()) if PROC_STAT.is_file() else {},
    }
    return {key: value for key, value in state.items() if value not in ({}, [])}


def core_clocks_hz(cpu_info: str) -> dict[str, float]:
    """Clock of every core at this moment, from cpufreq where there is one, else from the text of /proc/cpuinfo."""
    found = {}
    for path in sorted(CPUS.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")):
        found[path.parts[-3].removeprefix("cpu")] = 1e3 * float(path.read_text())
    if found:
        return found
    clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", cpu_info, re.MULTILINE)
    return {str(number): 1e6 * float(clock) for number, clock in enumerate(clocks)}


def governors() -> list[str]:
    """How the system chooses clocks; empty where it does not say, as in most virtual machines."""
    return sorted({path.read_text().strip() for path in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor")})


def parse_ticks(stat: str) -> dict[str, int]:
    """Ticks of all cores together by kind, from the text of /proc/stat."""
    for line in stat.splitlines():
        name, *values = line.split()
        if name == "cpu":
            return {field: int(value) for field, value in zip(STAT_FIELDS, values, strict=False)}
    return {}


def stolen_share(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Share of the cores' time between two states that the host of this virtual machine gave to others; None: unknown."""
    ticks = [state.get("ticks", {}) for state in (before, after)]
    passed = float(sum(ticks[1].values()) - sum(ticks[0].values()))
    if passed <= 0 or any("steal" not in entry for entry in ticks):
        return None
    return float(ticks[1]["steal"] - ticks[0]["steal"]) / passed


def clocks_text(state: dict[str, Any]) -> str:
    """`clock 2.45 GHz, governor performance`; unknown values are named as unknown."""
    clocks = state.get("core_hz", {}).values()
    low, high = (f"{1e-9 * clock:.2f}" for clock in (min(clocks), max(clocks))) if clocks else ("", "")
    clock = "clock unknown" if not clocks else f"clock {low} GHz" if low == high else f"clocks {low} to {high} GHz"
    return f"{clock}, governor {'/'.join(state.get('governors', [])) or 'unknown'}"


def share_text(share: float | None) -> str:
    return "unknown" if share is None else format_percent(share)
