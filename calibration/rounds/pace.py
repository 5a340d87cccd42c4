"""Measurements as if the cores had always been as fast, from how fast they were beside each (`turns.paced`).

A core of a shared machine flips between speeds every few seconds (`parsim.execute.processes.speed_probe`). Times of a
fast and of a slow period can be compared and added after each is divided by the speed factor measured next to it.

With a GPU there are two speed factors. The GPU's scales its computation. The host's scales the host's work: queueing, what
lies between tasks, loading, and the rest of a step. What links carry goes at neither.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.rounds.request import entries_of
from parsim.program.taskgraph import parse_work
from parsim.work import LoadBatch

PACE = "pace_s"
"""Where an entry says how fast the cores, or the GPUs, were: [before, after] it."""

HOST_PACE = "host_pace_s"
"""And how fast the core was that queued for a GPU."""

TIMES: Mapping[str, Sequence[str]] = {
    "sweeps": ("seconds", "gap_s", "rest_s", "wall_s", "cpu_s", "load_again_s"),
    "optimizers": ("seconds",),
    "operators": ("seconds",),
    "collectives": ("seconds",),
    "overlap": ("communication_s",),
    "resume": ("seconds",),
}
"""What the pace lengthens, by kind of entry; shards are compared with what ran beside them."""

GPU_TIMES: Mapping[str, Sequence[str]] = {
    "sweeps": ("seconds",),
    "optimizers": ("seconds",),
    "operators": ("seconds",),
    "resume": ("seconds",),
}
"""What the pace of a GPU lengthens; of a step's tasks those that compute."""

HOST_TIMES: Mapping[str, Sequence[str]] = {
    "sweeps": ("issue_s", "gap_s", "rest_s", "wall_s", "cpu_s", "load_again_s"),
    "optimizers": ("issue_s",),
}
"""What the pace of the host lengthens beside a GPU; of a step's tasks those that load."""

PacedEntry = dict[str, Any]


class Pace(NamedTuple):
    """How fast the cores were over a calibration.

    Attributes:
        alone_s, together_s: mean, of one rank alone and with a rank on every core.
        probe_reliability: the share of a probe's difference (of its logarithm) that holds for the measurement next to it,
            from 0 (noise) to 1. Where probes before and after correlate by r, that of their mean is 2 r / (1 + r)
            (Spearman-Brown).
    """

    alone_s: float
    together_s: float
    probe_reliability: float = 1.0


def usual_pace(raw: Mapping[str, Any], key: str = PACE) -> Pace | None:
    """From the whole training steps, which run all through the calibration; None where nobody looked.

    Args: key: PACE or HOST_PACE.
    """
    looks = [(sweep["ranks_active"], *sweep[key]) for _, sweep in entries_of(raw, "sweeps") if key in sweep]
    if not looks:
        return None
    table = np.array(looks, dtype=np.float64)
    active, paces = table[:, 0], table[:, 1:]
    alone, together = (paces[active == level] for level in (active.min(), active.max()))
    return Pace(float(alone.mean()), float(together.mean()), _probe_reliability(np.log(together)))


def _probe_reliability(looks: NDArray[np.float64]) -> float:
    """Args: looks: float64 [looks, 2], logarithms before and after."""
    before, after = looks.T
    if len(looks) < 2 or before.std() == 0 or after.std() == 0:
        return 1.0
    together = max(0.0, float(np.corrcoef(before, after)[0, 1]))
    return 2 * together / (1 + together)


def at_one_pace(
    raw: Mapping[str, Any], usual: Pace | None, host: Pace | None = None, *, on_gpu: bool = False
) -> Mapping[str, Any]:
    """The raw points as if everything had gone at its usual pace (of the cores or GPUs, and of the cores that queue for these);
    where nobody looked, as they are.

    A probe's deviation from the usual speed is weighted by its reliability, which is low on a machine that is busy with other
    work.
    """
    if usual is None and host is None:
        return raw
    times = GPU_TIMES if on_gpu else TIMES
    loads = _loading_tasks(raw) if on_gpu else {}

    def steady(kind: str, entry: PacedEntry) -> PacedEntry:
        device, hosts = _factor(entry, PACE, usual), _factor(entry, HOST_PACE, host) if on_gpu else 1.0
        found = {key: _scaled(entry[key], device) for key in times.get(kind, ()) if key in entry}
        if on_gpu:
            found |= {key: _scaled(entry[key], hosts) for key in HOST_TIMES.get(kind, ()) if key in entry}
        for place in loads.get((entry["model"], entry["samples"]), ()) if kind == "sweeps" and on_gpu else ():
            found["seconds"][place] = hosts * entry["seconds"][place]
        return {**entry, **found}

    kinds = {*times, *HOST_TIMES}
    ranks = [
        {kind: [steady(kind, entry) for entry in found] if kind in kinds else found for kind, found in rank.items()}
        for rank in raw["ranks"]
    ]
    return {**raw, "ranks": ranks}


def _factor(entry: PacedEntry, key: str, usual: Pace | None) -> float:
    """What brings the times of an entry to the usual pace; 1 where nobody looked."""
    if usual is None or key not in entry:
        return 1.0
    then_s = usual.alone_s if entry.get("ranks_active") == 1 else usual.together_s
    return float((then_s / statistics.mean(entry[key])) ** usual.probe_reliability)


def _loading_tasks(raw: Mapping[str, Any]) -> dict[tuple[int, int], list[int]]:
    """By (model, samples): the places of the tasks that load a batch, which the host does."""
    return {
        (case["model"], case["samples"]): [
            place for place, text in enumerate(case["tasks"]) if isinstance(parse_work(text), LoadBatch)
        ]
        for case in raw.get("cases", ())
    }


def _scaled(value: Any, factor: float) -> Any:
    return [_scaled(part, factor) for part in value] if isinstance(value, list) else value * factor
