"""How unsteady the machine was while it was measured: common factors of rounds, spread between ranks, other programs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.rounds.pace import Pace
from calibration.rounds.request import entries_of
from parsim.hardware.profile import Noise, ProbeSeconds
from parsim.numeric import Floats

MIN_DRIFT_SIGMA = 0.08
"""A calibration of a few minutes cannot see how the machine drifts from one hour to the next. Assumed until a history of
validations says better. On a 2-core virtual machine, means of 60 steps of one and the same program were taken again some ten
seconds later (2026-11-21). They lay between 34.5 and 42.5 ms and between 47.8 and 53.7 ms, relative deviations of about 8%."""

CASE_KEYS = ("model", "samples", "ranks_active", "optimizer")
PASSES = 20
MAD_TO_SIGMA = 1.4826
MEDIAN_ERROR = 1.2533
"""Standard error of the median of n normal values over that of their mean."""


class RoundTiming(NamedTuple):
    """Seconds of one item (whatever is measured again and again) in one round."""

    item: Hashable
    round: int
    seconds: float


class Drift(NamedTuple):
    """Attributes:
    factors: by round, by how much everything in it was slower (>1) or faster than on average; their mean is 1.
    sigma: relative spread of these factors, less what the noise of single measurements would make of them."""

    factors: Mapping[int, float]
    sigma: float

    def steady(self, seconds: float, number: int) -> float:
        """Seconds of round `number` as they would have been in an average one."""
        return seconds / self.factors.get(number, 1.0)


def robust_sigma(values: Sequence[float] | Floats) -> float:
    """Relative standard deviation by the median absolute deviation (1.4826 MAD / median); 0 for fewer than 3 values."""
    array = np.asarray(values, dtype=np.float64)
    centre = float(np.median(array))
    if len(array) < 3 or centre <= 0:
        return 0.0
    return float(MAD_TO_SIGMA * np.median(np.abs(array - centre)) / centre)


def estimate_drift(observations: Iterable[RoundTiming]) -> Drift:
    """Common factors of the rounds, where items and rounds multiply: seconds = item * factor of the round * noise.

    Two-way median polish of the logarithms, so that items that were not measured in every round count rightly and single slow
    measurements do not count. A round's factor is drawn towards 1 as far as noise alone explains it, by the ratio of the
    variance of the true factors to that of the found ones.

    Leaves out a drift that touches some items only: it stays in their own spread.
    """
    rows = list(observations)
    items = {item: number for number, item in enumerate(dict.fromkeys(row.item for row in rows))}
    rounds = {number: place for place, number in enumerate(sorted({row.round for row in rows}))}
    if len(rounds) < 2:
        return Drift(dict.fromkeys(rounds, 1.0), 0.0)
    logs = np.log([row.seconds for row in rows])
    item = np.array([items[row.item] for row in rows])
    place = np.array([rounds[row.round] for row in rows])
    usual, effects = np.zeros(len(items)), np.zeros(len(rounds))
    for _ in range(PASSES):
        usual = _medians(logs - effects[place], item, len(items))
        effects = _medians(logs - usual[item], place, len(rounds))
    rest = logs - usual[item] - effects[place]
    freedom = max(1, len(rows) - len(items) - len(rounds) + 1)
    noise = MAD_TO_SIGMA * float(np.median(np.abs(rest))) * math.sqrt(len(rows) / freedom)
    errors = (MEDIAN_ERROR * noise) ** 2 / np.bincount(place, minlength=len(rounds))
    true = max(0.0, float(np.var(effects, ddof=1)) - float(errors.mean()))
    kept = true / (true + errors) if true > 0 else np.zeros(len(rounds))
    factors = np.exp(kept * (effects - effects.mean()))
    factors /= factors.mean()
    return Drift({number: float(factors[place]) for number, place in rounds.items()}, math.sqrt(true))


def _medians(values: Floats, group: NDArray[np.int64], groups: int) -> Floats:
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(1, groups))
    return np.array([np.median(part) for part in np.split(values[order], ends)])


# --- of a calibration -------------------------------------------------------------------------------------------------


def computation_drift(raw: Mapping[str, Any]) -> Drift:
    """Drift of the measured steps: an item is a case (model, samples, active ranks, optimizer) on one rank."""
    return estimate_drift(
        RoundTiming((rank, *(sweep[key] for key in CASE_KEYS)), sweep["round"], sum(sweep["seconds"]))
        for rank, sweep in entries_of(raw, "sweeps")
    )


def noise_of(raw: Mapping[str, Any], usual: Pace | None, steady: Mapping[str, Any]) -> Noise:
    """What the profile says of it, whatever the pace was; the drift is no less than MIN_DRIFT_SIGMA, for what is slower than
    the calibration.

    Args: usual: the pace of the cores, None if nobody looked. steady: the points at that pace (`calibration.rounds.pace`).
    """
    sigma = computation_drift(raw).sigma
    return Noise(
        drift_sigma=max(MIN_DRIFT_SIGMA, sigma),
        measured_drift_sigma=sigma,
        rank_sigma=rank_sigma(raw),
        probe=probe_seconds(usual, steady),
        source="drift",
    )


def probe_seconds(usual: Pace | None, steady: Mapping[str, Any]) -> ProbeSeconds | None:
    """None if nobody looked at the pace."""
    if usual is None:
        return None
    return ProbeSeconds(alone=usual.alone_s, together=usual.together_s, rank_sigma=rank_sigma(steady))


def rank_sigma(raw: Mapping[str, Any]) -> float:
    """Relative spread of a rank's step against the other ranks' in the same step; 0 with one rank.

    Standard deviation over ranks of the logarithm of the step, pooled over all steps that ranks made side by side. Not a
    robust one: the rare slow step is what the others wait for. Leaves out which core is the slower one for long.
    """
    steps: dict[tuple[int, int, int, int], dict[int, list[float]]] = {}
    for number, sweep in entries_of(raw, "sweeps"):
        if sweep["ranks_active"] > 1:
            place = (sweep["model"], sweep["samples"], sweep["ranks_active"], sweep["round"])
            steps.setdefault(place, {}).setdefault(number, []).append(sum(sweep["seconds"]))
    deviations: list[float] = []
    for by_rank in steps.values():
        logs = np.log(np.array(list(zip(*by_rank.values(), strict=False))))
        if logs.ndim == 2 and logs.shape[1] > 1:
            deviations.extend(np.var(logs, axis=1, ddof=1).tolist())
    return float(np.sqrt(np.mean(deviations))) if deviations else 0.0


def other_share(raw: Mapping[str, Any]) -> float:
    """Share of the measured steps' wall time in which the rank did not have its core; 0 on an idle machine."""
    sweeps = [sweep for _, sweep in entries_of(raw, "sweeps")]
    return max(0.0, 1.0 - float(sum(sweep["cpu_s"] for sweep in sweeps)) / float(sum(sweep["wall_s"] for sweep in sweeps)))
