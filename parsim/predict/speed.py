"""What a profile says of a step at the pace of the cores meanwhile, as the probe (`parsim.execute.processes.speed_probe`)
finds it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from parsim.costs.uncertainty.draws import medians_s
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.pace import pace_s as pace_of_profile
from parsim.hardware.profile import Profile
from parsim.predict.evaluate import Evaluation, unsteady_step_s
from parsim.predict.planning_problem import PlanningProblem
from parsim.work import Compute, Mix, OptimizerStep

FloatArray = NDArray[np.float64]


def slowness(profile: Profile, pace_s: FloatArray, ranks: int) -> FloatArray | None:
    """How many times as long things took on each rank as at the pace of the profile, float64 [ranks, rounds]; None where one
    of the two did not probe.

    Args:
        pace_s: float64 [cores, rounds], of the first rank on each core that the plan uses.

    Against the pace with one rank alone, or with a rank on every core; between the two in proportion.
    """
    then_s = pace_of_profile(profile, len(pace_s))
    if then_s is None or not pace_s.size:
        return None
    core_of_rank = np.array(cluster_from_profile(profile).core_of_rank(ranks))
    found: FloatArray = pace_s[core_of_rank % len(pace_s)] / then_s
    return found


def step_at_pace(problem: PlanningProblem, evaluation: Evaluation, slow: FloatArray) -> float:
    """Seconds of the mean step of an evaluated plan, not folded, with its ranks as slow as they were: the mean over rounds, in
    each of which every rank's tasks take as many times as long, and communication the mean over its ranks. On GPUs the pace is
    theirs: it changes what they compute, but neither communication, nor loading, nor what waits for the host to queue it.

    Args:
        slow: float64 [ranks, rounds], from `slowness`.

    The noise of single ranks is what the pace leaves of it. Leaves out that some work depends less on the pace than other, and
    the profile's interval.
    """
    noise, compiled = problem.cluster.profile.noise, evaluation.compiled
    columns = compiled.columns
    by_use = slow[columns.resource_rank[columns.uses.values]]
    counts = np.diff(columns.uses.offsets)
    factors = np.add.reduceat(by_use, columns.uses.offsets[:-1], axis=0).T / counts
    on_gpu = problem.cluster.devices[0].type.kind == "cuda"
    if on_gpu:
        paced = np.array(
            [
                isinstance(unit.work, Compute | OptimizerStep | Mix) and not entry.host_bound
                for unit, entry in zip(columns.units, evaluation.estimates, strict=True)
            ]
        )
        factors = np.where(paced[columns.unit], factors, 1.0)
    times = medians_s(evaluation.estimates)[columns.unit] * factors
    sigma = 0.0 if noise is None or noise.probe is None else noise.probe.rank_sigma
    between_s = problem.costs(columns.world_size).between_steps_s
    return unsteady_step_s(compiled, times, evaluation.overlap, sigma) + between_s * (1.0 if on_gpu else float(slow.mean()))


def differs(profile: Profile, factor: float) -> bool:
    """Whether the machine is further from its pace of then than the profile's intervals count on: by two deviations."""
    return profile.noise is not None and abs(math.log(factor)) > 2 * profile.noise.drift_sigma
