"""The environment of a calibration: pinning, the state of the machine meanwhile, and warnings about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calibration.fit.drift import other_share
from calibration.rounds.raw_points import entries_of
from calibration.rounds.request import CalibrationRequest
from parsim.execute.processes.machine import clocks_text, share_text, stolen_share
from parsim.units import format_percent

SEEN_LAUNCHES = 0.1
"""Share of device times above which a warning reports that launches were not hidden."""
BUSY_SHARE, STOLEN_SHARE, CLOCK_CHANGE = 0.05, 0.02, 0.1
"""Warnings start at these values: share of the cores used by others, share taken by the host of a virtual machine,
relative change of a clock.
"""


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
    return f"at the end: {clocks_text(dict(after))}; stolen by the host {share_text(stolen_share(dict(before), dict(after)))}"


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
