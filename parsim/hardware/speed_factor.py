"""The machine's speed factor: how many times as long the same work takes now as while the machine was calibrated.

It is the seconds of one fixed training step, the probe (`parsim.execute.processes.speed_probe`), now over those while
calibrating, of which the profile keeps the means of one rank alone and of a rank on every core (`noise.probe`); in between in
proportion to the ranks that compute at once. "Now" is one of two:

    since   `parsim calibrate --refresh PROFILE` measures again; the profile keeps it (`today`). One factor, which is the
            adjustment "speed factor" of every price (`parsim.costs.adjustments`)
    beside  `parsim validate` and `parsim demo` measure around every round, a training on cores around its steps. One factor per
            rank and round, relative to the last look that the profile keeps: a second prediction (`parsim.predict.evaluate`)

Leaves out: that some work depends less on the speed of the cores than other work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import ProbePace, Profile
from parsim.numeric import Floats
from parsim.units import format_percent


@dataclass(frozen=True, slots=True, eq=False)
class SpeedFactor:
    """How many times as long the same work takes as at the speed that a profile's prices have.

    Attributes: by_rank: float64 [ranks, moments], each above 0; one row and one column where it holds for all.
    """

    by_rank: Floats

    @classmethod
    def uniform(cls, factor: float) -> SpeedFactor:
        return cls(np.full((1, 1), factor))

    @property
    def mean(self) -> float:
        return float(self.by_rank.mean())

    @property
    def text(self) -> str:
        """For people: "12.0% longer", "8.0% less"."""
        return f"{format_percent(abs(self.mean - 1))} {'longer' if self.mean > 1 else 'less'}"

    def is_beyond(self, profile: Profile) -> bool:
        """Whether the machine is further from its calibrated speed than the profile's intervals count on: by two deviations."""
        return profile.noise is not None and abs(math.log(self.mean)) > 2 * profile.noise.drift_sigma


def speed_since(profile: Profile, active: int | None = None) -> SpeedFactor:
    """Since the calibration, by the last `parsim calibrate --refresh`; 1 where nobody looked. `active`: cores that compute
    at once (None: all)."""
    calibrated = None if profile.noise is None else profile.noise.probe
    if calibrated is None or profile.today is None:
        return SpeedFactor.uniform(1.0)
    return SpeedFactor.uniform(_seconds(profile, profile.today, active) / _seconds(profile, calibrated, active))


def speed_beside(profile: Profile, probe_s: Floats, ranks: int) -> SpeedFactor | None:
    """Beside a run, on each of its ranks; None where the run or the calibration did not probe. `probe_s`: float64 [cores,
    rounds], of the first rank on each core that the plan uses."""
    then_s = probe_seconds(profile, len(probe_s))
    if then_s is None or not probe_s.size:
        return None
    core_of_rank = np.array(cluster_from_profile(profile).core_of_rank(ranks))
    return SpeedFactor(probe_s[core_of_rank % len(probe_s)] / then_s)


def probe_seconds(profile: Profile, active: int | None = None) -> float | None:
    """Seconds of the probe at which everything takes what the prices say, with so many cores computing at once (None: all): by
    the last look that the profile keeps. None where it was never timed."""
    calibrated = None if profile.noise is None else profile.noise.probe
    return None if calibrated is None else _seconds(profile, profile.today or calibrated, active)


def _seconds(profile: Profile, pace: ProbePace, active: int | None) -> float:
    """In proportion to the active cores, from one alone to all together."""
    cores = len(set(cluster_from_profile(profile).core_of_rank(len(profile.devices))))
    if cores <= 1:
        return pace.alone
    share = 1.0 if active is None else min(1.0, (active - 1) / (cores - 1))
    return pace.alone + share * (pace.together - pace.alone)
