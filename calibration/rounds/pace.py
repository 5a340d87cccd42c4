"""Measurements as if the cores had always been as fast, from how fast they were beside each (`calibration.rounds.speed_probe`).

A core of a shared machine flips between speeds every few seconds (`parsim.execute.processes.speed_probe`). What is measured
in a fast spell and what is measured in a slow one can be compared, and added up, once each is divided by the pace beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.rounds.raw_points import entries_of

PACE = "pace_s"
"""Where an entry says how fast the cores were: [before, after] it."""

TIMES: Mapping[str, Sequence[str]] = {
    "sweeps": ("seconds", "gap_s", "rest_s", "wall_s", "cpu_s", "load_again_s"),
    "optimizers": ("seconds",),
    "operators": ("seconds",),
    "collectives": ("seconds",),
    "overlap": ("communication_s",),
    "resume": ("seconds",),
}
"""What the pace lengthens, by kind of entry; shards are compared with what ran beside them."""

PacedEntry = dict[str, Any]


class Pace(NamedTuple):
    """Of the cores over a calibration.

    Attributes:
        alone_s, together_s: mean, of one rank alone and with a rank on every core.
        probe_reliability: which share of a probe's difference (of its logarithm) holds for the measurement beside it, from 0
            (noise) to 1. Where probes before and after correlate by r, that of their mean is 2 r / (1 + r) (Spearman-Brown).
    """

    alone_s: float
    together_s: float
    probe_reliability: float = 1.0


def usual_pace(raw: Mapping[str, Any]) -> Pace | None:
    """From the whole training steps, which run all through the calibration; None where nobody looked."""
    looks = [(sweep["ranks_active"], *sweep[PACE]) for _, sweep in entries_of(raw, "sweeps") if PACE in sweep]
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


def at_one_pace(raw: Mapping[str, Any], usual: Pace | None) -> Mapping[str, Any]:
    """The raw points as if the cores had gone at their usual pace; where nobody looked, as they are.

    Of how far a look is from the usual pace counts what it tells: on a machine that is busy with other things it tells little.
    """
    if usual is None:
        return raw

    def steady(kind: str, entry: PacedEntry) -> PacedEntry:
        if PACE not in entry or kind not in TIMES:
            return entry
        then_s = usual.alone_s if entry.get("ranks_active") == 1 else usual.together_s
        factor = (then_s / statistics.mean(entry[PACE])) ** usual.probe_reliability
        return {**entry, **{key: _scaled(entry[key], factor) for key in TIMES[kind] if key in entry}}

    ranks = [
        {kind: [steady(kind, entry) for entry in found] if kind in TIMES else found for kind, found in rank.items()}
        for rank in raw["ranks"]
    ]
    return {**raw, "ranks": ranks}


def _scaled(value: Any, factor: float) -> Any:
    return [_scaled(part, factor) for part in value] if isinstance(value, list) else value * factor
