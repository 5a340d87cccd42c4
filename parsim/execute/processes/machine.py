"""The machine that ranks run on: what it is, and whether a profile was measured on it.

Loads no torch that is not loaded already, but for the names of GPUs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parsim.execute.processes.setup import available_cores, is_granted
from parsim.hardware.profile import Profile
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
CPU_INFO = Path("/proc/cpuinfo")


def describe_environment() -> dict[str, Any]:
    """Plain JSON: system, processor, cores, memory_bytes, affinity, whether communication may come first
    (`parsim.execute.processes.setup`), threads, versions, and GPUs if torch is loaded. Names no host, user or path, so that it
    can be published with a profile."""
    torch = sys.modules.get("torch")
    torch_state: dict[str, Any] = {"loaded": torch is not None}
    if torch is not None:
        torch_state |= {"threads": torch.get_num_threads(), "cuda": torch.cuda.is_available()}
        if torch_state["cuda"]:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            torch_state |= {"gpus": gpu_names(), "cuda_version": torch.version.cuda, "nccl_version": nccl}
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
        "torch": torch_state,
    }


def versions() -> dict[str, str]:
    """Python and the packages of PACKAGES that are installed, read from their metadata (nothing is imported)."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_package[package] = importlib.metadata.version(package)
    return by_package


def processor_name() -> str:
    """The processor's own name where the system tells it, else the architecture."""
    for line in CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else ():
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
        text = Path(name).read_text().strip() if Path(name).is_file() else ""
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


# Is this the machine, and the torch, that a profile was measured with? Asked where predictions are held against real runs.


def gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def is_measured(profile: Profile) -> bool:
    """Whether `parsim calibrate` made it: one from data sheets or papers is of no single machine."""
    return bool(profile.compute.components)


def is_from_here(profile: Profile) -> bool:
    """Whether the profile was measured on a machine with this processor and so many cores, or on these GPUs."""
    if not is_measured(profile):
        return False
    kinds = {profile.device_types[entry.type].kind for entry in profile.devices}
    if "cuda" in kinds:
        return {entry.type for entry in profile.devices} <= set(gpu_names())
    environment = describe_environment()
    return _processor(profile.provenance.machine) == (environment["processor"], environment["cores"])


def profile_differences(profile: Profile, environment: Mapping[str, Any], gpus: Sequence[str] | None = None) -> tuple[str, ...]:
    """What of this machine is not as it was when the profile was measured, one warning each; none for published profiles.
    Leaves out clocks, memory and other programs: `parsim calibrate` says what they were. gpus: their names (None: not
    asked)."""
    if not is_measured(profile):
        return ()
    then, again = profile.provenance, "predictions are for another machine, calibrate again"
    kinds = {profile.device_types[device.type].kind for device in profile.devices}
    processor, cores = _processor(then.machine)
    differences = []
    if "cpu" in kinds and processor != environment["processor"]:
        differences.append(f"on {processor}, this machine has {environment['processor']}: {again}")
    elif "cpu" in kinds and cores != environment["cores"]:
        differences.append(f"with {cores} cores, this machine has {environment['cores']}: {again}")
    had, has = (record.get("communication_priority") for record in (then.environment, environment))
    if "cpu" in kinds and None not in (had, has) and had != has:
        differences.append(
            f"{'with' if had else 'without'} priority for communication, this run has {'it' if has else 'none'}: it needs "
            f"root, CAP_SYS_NICE or `ulimit -r 1`; communication will be {'faster' if has else 'slower'} than predicted"
        )
    names = {device.type for device in profile.devices}
    if "cuda" in kinds and gpus is not None and not names <= set(gpus):
        here = ", ".join(sorted(set(gpus))) or "no GPU"
        differences.append(f"on {', '.join(sorted(names))}, this machine has {here}: {again}")
    torch_then, torch_now = then.versions.get("torch"), environment["versions"].get("torch")
    if torch_then != torch_now:
        differences.append(
            f"with torch {torch_then or 'unknown'}, here is {torch_now or 'none'}: times may differ, calibrate again to be sure"
        )
    return tuple(f"profile {profile.name} was measured {text}" for text in differences)


def differences_from_here(profile: Profile) -> tuple[str, ...]:
    """`profile_differences` from the machine this runs on, whose GPUs are asked for if the profile is of GPUs."""
    cuda = profile.device_types[profile.devices[0].type].kind == "cuda"
    gpus = gpu_names() if is_measured(profile) and cuda else None
    return profile_differences(profile, describe_environment(), gpus)


def _processor(machine: str) -> tuple[str, int | None]:
    """Processor and number of cores from `AMD EPYC, 2 cores, Linux 6`."""
    processor, _, rest = machine.partition(" cores,")
    name, _, cores = processor.rpartition(", ")
    return (name, int(cores)) if cores.isdigit() and rest else (machine, None)
