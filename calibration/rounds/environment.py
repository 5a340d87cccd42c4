"""The environment of a calibration: pinning, the state of the machine, warnings about it, and whether its GPUs can run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from calibration.fit.drift import other_share
from calibration.rounds.request import CalibrationRequest, entries_of
from parsim.app.doctor import CALIBRATE_ON_GPUS, Found, Gpu, commands_of, look
from parsim.errors import ConfigError
from parsim.execute.processes.launch import import_folders
from parsim.execute.processes.machine import CPU_INFO, describe_environment
from parsim.model.model import Model
from parsim.model.optimizers import OPTIMIZERS
from parsim.units import format_bytes, format_percent

SEEN_LAUNCHES = 0.1
"""Share of device times above which a warning reports that launches were not hidden."""
BUSY_SHARE, STOLEN_SHARE, CLOCK_CHANGE = 0.05, 0.02, 0.1
"""Warnings start at these values: share of the cores used by others, share taken by the host of a virtual machine,
relative change of a clock.
"""


# The state of the machine during a measurement: clocks, governor, load, time taken by others. Read, never changed. Linux tells
# all of it below /proc and /sys, a virtual machine only some; elsewhere most of it is left out.


PROC_STAT, CPUS = Path("/proc/stat"), Path("/sys/devices/system/cpu")
STAT_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def machine_state() -> dict[str, Any]:
    """Plain JSON: core_hz by core, governors (each once), virtual, load_average, ticks by kind since the machine's start.

    What the system does not tell is absent.
    """
    text = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    state = {
        "core_hz": core_clocks_hz(text),
        "governors": sorted({path.read_text().strip() for path in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor")}),
        "virtual": "hypervisor" in text,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "ticks": parse_ticks(PROC_STAT.read_text()) if PROC_STAT.is_file() else {},
    }
    return {key: value for key, value in state.items() if value not in ({}, [])}


def core_clocks_hz(cpu_info: str) -> dict[str, float]:
    """Clock of every core at this moment, from cpufreq where there is one, else from the text of /proc/cpuinfo."""
    clocks = {
        path.parts[-3].removeprefix("cpu"): 1e3 * float(path.read_text())
        for path in sorted(CPUS.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    }
    mhz = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", cpu_info, re.MULTILINE)
    return clocks or {str(number): 1e6 * float(clock) for number, clock in enumerate(mhz)}


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


def core_count(pinnings: Sequence[Mapping[str, Any]]) -> int:
    """How many cores the ranks have between them: of those that are not pinned (on a GPU, or where the system cannot), one
    each. `host` tells the cores of two hosts apart."""
    pinned = {(entry.get("host"), entry["core"]) for entry in pinnings if entry.get("core") is not None}
    return len(pinned) + sum(entry.get("core") is None for entry in pinnings)


def opening_line(environment: Mapping[str, Any], state: Mapping[str, Any], request: CalibrationRequest) -> str:
    """What will be measured on, for people, before it begins."""
    cores = environment["affinity"]
    if request.device == "cpu":
        pinned = f"rank r on core {', '.join(map(str, cores))} in turn, one thread each"
    else:
        pinned = f"rank r on GPU r, cores {', '.join(map(str, cores))} for all"
    load = state.get("load_average", [])
    said = f"load {load[0]:.2f}" if load else "load unknown"
    kind = "virtual machine, " if state.get("virtual") else ""
    version = environment["versions"].get("torch", "none")
    return f"{environment['processor']}, {kind}{pinned}; {clocks_text(dict(state))}; {said}; torch {version}"


def closing_line(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What the machine did meanwhile, for people."""
    stolen = stolen_share(dict(before), dict(after))
    return (
        f"at the end: {clocks_text(dict(after))}; stolen by the host {'unknown' if stolen is None else format_percent(stolen)}"
    )


def provenance_environment(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile keeps of it: plain JSON."""
    environment = raw["environment"]
    kept = {key: value for key, value in environment.items() if key not in ("versions", "load_average")}
    states = [{"before": before, "after": after} for before, after in raw.get("states", [])]
    stolen = [stolen_share(before, after) for before, after in raw.get("states", [])]
    shares = [share for share in stolen if share is not None]
    return {
        **kept,
        "ranks": [rank.get("pinning", {}) for rank in raw["ranks"]],
        "sessions": states,
        "stolen_share": max(shares, default=None),
        "other_share": other_share(raw),
        "seconds": sum(turn["seconds"] for turn in raw.get("turns", [])),
    }


def doubts(raw: Mapping[str, Any], request: CalibrationRequest) -> list[str]:
    """Warnings about the machine rather than about single points."""
    found = []
    share = other_share(raw)
    own_cores = core_count([rank.get("pinning", {}) for rank in raw["ranks"]]) == request.nproc
    if request.device == "cpu" and own_cores and share > BUSY_SHARE:
        found.append(f"other programs had {format_percent(share)} of the cores meanwhile; for a quiet machine, calibrate again")
    found += _of_gpus(raw)
    for before, after in raw.get("states", []):
        stolen = stolen_share(before, after)
        if stolen is not None and stolen > STOLEN_SHARE:
            found.append(
                f"the host of this virtual machine gave {format_percent(stolen)} of the cores' time to others meanwhile"
            )
        clocks = [max(state.get("core_hz", {}).values(), default=0.0) for state in (before, after)]
        if min(clocks) > 0 and max(clocks) > (1 + CLOCK_CHANGE) * min(clocks):
            found.append(f"the clock went from {1e-9 * clocks[0]:.2f} to {1e-9 * clocks[1]:.2f} GHz; times hold for neither")
    return found


def _of_gpus(raw: Mapping[str, Any]) -> list[str]:
    """Warnings if device times may contain the host's time, or if the device's memory could not be measured."""
    found = []
    for kind in ("sweeps", "operators"):
        hidden = [entry["hidden"] for _, entry in entries_of(raw, kind) if "hidden" in entry]
        seen = hidden.count(False) / len(hidden) if hidden else 0.0
        if seen > SEEN_LAUNCHES:
            what = {"sweeps": "training steps", "operators": "operators"}[kind]
            found.append(
                f"the host was too slow to queue {format_percent(seen)} of the {what} before the GPU began: their seconds may "
                "be those of launches; calibrate again on an idle host"
            )
    return found


ELEMENT_BYTES = {"fp64": 8, "bf16": 2}
"""Bytes of a weight; 4 in all other precisions."""

NEWER = (8, 0)
"""Compute capability from which on a GPU has TF32 and bfloat16 (Ampere)."""
NEWER_PRECISIONS = ("tf32", "bf16", "amp_bf16")

ROOM_SHARE = 0.8
"""Share of the free memory for models that are held; the rest is for activations and for what operators work on."""


LOOK = "import sys; from calibration.rounds.environment import keep_look; keep_look(sys.argv[1])"


def look_apart() -> Found:
    """What this machine has, asked in a process that ends: whoever asks a GPU for its memory holds some of it from then on.

    The process does not import the caller's script, as one of `multiprocessing` would: a script needs no `__main__` guard.
    Raises ConfigError: the process failed.
    """
    with TemporaryDirectory() as folder:
        kept = Path(folder, "found")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_folders())}
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(kept)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode or not kept.is_file():
            last = next(iter(done.stderr.strip().splitlines()[-1:]), f"it ended with {done.returncode}")
            raise ConfigError(f"a process that looks at this machine's GPUs failed: {last}; `parsim doctor` looks at them too")
        found = json.loads(kept.read_text(encoding="utf-8"))
    gpus = tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in found["gpus"])
    listed = {name: tuple(found[name]) for name in ("backends", "packages")}
    return Found(**{**found, **listed, "gpus": gpus})


def keep_look(path: str) -> None:
    """What `look_apart` asks for, written to a file: imports may print. Args: path: of the file."""
    Path(path).write_text(json.dumps(asdict(look(describe_environment()))), encoding="utf-8")


def check_gpus(request: CalibrationRequest, found: Found) -> None:
    """Raises ConfigError for a machine without GPUs that work, with fewer than ranks, or with GPUs that lack the precision."""
    (able,) = (check for check in commands_of(found) if check.name == CALIBRATE_ON_GPUS)
    if not able.ok:
        raise ConfigError(f"cannot calibrate with --device cuda: {able.found}; {able.fix}")
    if request.nproc > len(found.gpus):
        raise ConfigError(
            f"{request.nproc} ranks need a GPU each, this machine has {len(found.gpus)}; use --nproc {len(found.gpus)} or fewer"
        )
    old = next((gpu for gpu in found.gpus[: request.nproc] if gpu.capability < NEWER), None)
    if request.precision in NEWER_PRECISIONS and old is not None:
        raise ConfigError(
            f"{request.precision} needs compute capability {NEWER[0]}.{NEWER[1]}, a {old.name} has "
            f"{old.capability[0]}.{old.capability[1]}; measure fp32 or amp_fp16"
        )


def held_bytes(models: Sequence[Model], request: CalibrationRequest) -> int:
    """Memory of one rank from the first round to the last. It holds every model once per local batch, with its gradients
    and the states of every optimizer. It also holds the arrays for timing optimizers alone (twice a whole, and a half).

    Args: models: in the order of `request.measured_models`.
    """
    element = ELEMENT_BYTES.get(request.precision, 4)
    state, copy = (element, 0) if element >= 4 else (4, 4)  # half-precision weights have copies in fp32, which have the states
    states = [len(OPTIMIZERS[name].states) for name in request.optimizers]
    total = 0
    for model, (_, batches, _) in zip(models, request.measured_models, strict=True):
        own = model.parameter_count * element
        case = 2 * own + model.parameter_count * (copy + state * sum(states))
        total += case * len(batches) + 5 * own * sum(2 + count for count in states) // 2
    return total


def check_room(models: Sequence[Model], request: CalibrationRequest, found: Found) -> None:
    """Raises ConfigError where the models do not fit side by side."""
    needed, free = held_bytes(models, request), min(gpu.free_bytes for gpu in found.gpus[: request.nproc])
    if needed > ROOM_SHARE * free:
        raise ConfigError(
            f"the models, each at all its local batches, hold {format_bytes(needed)} while they are measured, and a GPU has "
            f"{format_bytes(free)} free; name fewer --batches, optimizers or models at once"
        )
