"""The same question on a machine that computes faster or slower than while it was calibrated, as the probe finds it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from parsim.costs.corrected import Corrections
from parsim.hardware.profile import Profile
from parsim.schedule.problem import Problem


def slowness(profile: Profile, probe_s: Sequence[Sequence[float]]) -> float | None:
    """How many times as long computation takes as while the profile was measured; None where one of the two did not probe.

    Args:
        probe_s: what the probe (`parsim.execute.probe`) took, per rank and round. Of each rank the median counts.
    """
    known = None if profile.noise is None else profile.noise.probe_s
    found = [statistics.median(seconds) for seconds in probe_s if seconds]
    return None if known is None or not found else statistics.mean(found) / known


def at_speed(problem: Problem, factor: float) -> Problem:
    """All computation takes `factor` times as long, on top of what has been observed; communication and loading stay.

    Leaves out that ranks may differ: the probe of one core says little of one task, that of all of them more.

    Raises CostError for a factor that is not a finite number above 0.
    """
    before = problem.corrections
    ranks = tuple((rank, before.rank_factor(rank) * factor) for rank in range(problem.cluster.size))
    return replace(problem, corrections=Corrections(ranks=ranks, phases=before.phases, communication=before.communication))


def differs(profile: Profile, factor: float) -> bool:
    """Whether the machine is further from its speed of then than the profile's intervals count on: by two deviations."""
    return profile.noise is not None and abs(math.log(factor)) > 2 * profile.noise.drift_sigma
