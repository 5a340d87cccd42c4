"""The machine of a measurement: processor, cores, memory, versions. Loads no torch that is not loaded already."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from parsim.execute.processes.pinning import available_cores
from parsim.execute.processes.priority import is_granted
from parsim.units import KIB, format_bytes

PACKAGES = (
    "parsim",
    "torch",
    "numpy",
    "scipy",
    "numba",
    "simpy",
    "cvxpy",
    "pydantic",
    "plotly",
    "scikit-learn",
    "transformers",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def describe_environment() -> dict[str, Any]:
    """Plain JSON: system, processor, cores, memory_bytes, affinity, whether communication may come first
    (`parsim.execute.processes.priority`), threads, versions, and GPUs if torch is loaded.

    Names no host, user or path, so that it can be published with a profile.
    """
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor_name(),
        "cores": os.cpu_count() or 1,
        "affinity": list(available_cores()),
        "memory_bytes": physical_memory_bytes(),
        "memory_limit_bytes": memory_limit_bytes(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "communication_priority": is_granted(),
        "thread_variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "versions": versions(),
        "torch": _torch_state(),
    }


def versions() -> dict[str, str]:
    """Python and the packages of PACKAGES that are installed, read from their metadata (nothing is imported)."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor_name() -> str:
    """The processor's own name where the system tells it, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def physical_memory_bytes() -> int:
    """Memory of the whole machine; 0 if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def memory_limit_bytes() -> int:
    """Memory this process may use: the cgroup's limit where there is one below the physical memory."""
    physical = physical_memory_bytes()
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        file = Path(name)
        if file.is_file():
            text = file.read_text().strip()
            if text.isdigit():
                return min(physical, int(text)) if physical else int(text)
    return physical


def resident_bytes() -> int:
    """Resident set of this process; 0 where /proc is not there."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.is_file() else 0


def forget_peak() -> bool:
    """Let `peak_resident_bytes` start anew; False where the system keeps no peak, or does not forget it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return peak_resident_bytes() > 0


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far, or since `forget_peak`; 0 where /proc does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:")), 0)


def machine_line(environment: dict[str, Any]) -> str:
    """`AMD EPYC, 2 cores, 23.4 GiB`."""
    return f"{environment['processor']}, {environment['cores']} cores, {format_bytes(environment['memory_bytes'])}"


def _torch_state() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {"loaded": False}
    state: dict[str, Any] = {"loaded": True, "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available()}
    if state["cuda"]:
        state["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        state["cuda_version"] = torch.version.cuda
        state["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    return state
