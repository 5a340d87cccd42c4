"""The same question on a machine that is faster or slower than while it was calibrated, as the probe finds it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from parsim.costs.corrected import CommunicationClass, Corrections
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import Profile
from parsim.schedule.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How many times as long things take as while the profile was measured.

    Attributes: alone: computation of one rank alone. together: with a rank on every core. exchange: communication.
    """

    alone: float
    together: float
    exchange: float = 1.0

    def computing(self, ranks: int, profile: Profile) -> float:
        """Of computation of so many ranks on the machine of the profile; between one and all its cores in proportion."""
        cores = len(set(cluster_from_profile(profile).core_of_rank(len(profile.devices))))
        share = 0.0 if cores <= 1 else (min(ranks, cores) - 1) / (cores - 1)
        return self.alone + share * (self.together - self.alone)


def slowness(profile: Profile, alone_s: float | None, together_s: float | None, exchange_s: float | None) -> Slowness | None:
    """From what the probe takes now (`parsim.execute.probe.typical_speed`); None where one of the two did not probe."""
    known = None if profile.noise is None else profile.noise.probe
    if known is None or alone_s is None or together_s is None:
        return None
    exchange = 1.0 if exchange_s is None or known.exchange is None else exchange_s / known.exchange
    return Slowness(alone=alone_s / known.alone, together=together_s / known.together, exchange=exchange)


def at_speed(problem: Problem, found: Slowness, ranks: int) -> Problem:
    """Computation and communication of a plan of so many ranks take as many times as long, on top of what has been observed;
    loading stays. Leaves out that ranks may differ, and large messages from small ones.

    Raises CostError for a factor that is not a finite number above 0.
    """
    before, everyone = problem.corrections, range(problem.cluster.size)
    computing = found.computing(ranks, problem.cluster.profile)
    links = dict(before.communication) or {CommunicationClass("all_reduce", tuple(everyone)): 1.0}
    return replace(
        problem,
        corrections=Corrections(
            ranks=tuple((rank, before.rank_factor(rank) * computing) for rank in everyone),
            phases=before.phases,
            communication=tuple((key, factor * found.exchange) for key, factor in links.items()),
        ),
    )


def differs(profile: Profile, factor: float) -> bool:
    """Whether the machine is further from its speed of then than the profile's intervals count on: by two deviations."""
    return profile.noise is not None and abs(math.log(factor)) > 2 * profile.noise.drift_sigma
