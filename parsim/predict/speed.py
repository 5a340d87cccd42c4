"""A plan's step at the speed that the machine had during a run (`parsim.hardware.speed_factor`)."""

from __future__ import annotations

import numpy as np

from parsim.costs.uncertainty.draws import medians_s
from parsim.hardware.speed_factor import SpeedFactor
from parsim.predict.evaluate import Evaluation, unsteady_step_s
from parsim.predict.planning_problem import PlanningProblem
from parsim.work import ClipGradients, Compute, Mix, OptimizerStep


def step_at_speed(problem: PlanningProblem, evaluation: Evaluation, speed: SpeedFactor) -> float:
    """Seconds of the mean step of an evaluated plan, not folded, with the measured speed of its ranks.

    It is the mean over moments. In each moment a rank's tasks are multiplied by its factor, and communication by the mean
    factor of its ranks. On GPUs the factor is the GPU's: it changes computation, but neither communication, nor loading, nor
    tasks that wait for the host to queue them.

    Args:
        problem, evaluation: of one plan.
        speed: of every rank, from `parsim.hardware.speed_factor.speed_beside`.

    Returns:
        Seconds, with the noise of single ranks that the speed does not explain. Leaves out that some work depends less on the
        speed than other, and the profile's interval.
    """
    slow = speed.by_rank
    noise, compiled = problem.cluster.profile.noise, evaluation.compiled
    columns = compiled.columns
    by_use = slow[columns.resource_rank[columns.uses.values]]
    counts = np.diff(columns.uses.offsets)
    factors = np.add.reduceat(by_use, columns.uses.offsets[:-1], axis=0).T / counts
    on_gpu = problem.cluster.devices[0].type.kind == "cuda"
    if on_gpu:
        paced = np.array(
            [
                isinstance(unit.work, Compute | OptimizerStep | ClipGradients | Mix) and not entry.host_bound
                for unit, entry in zip(columns.units, evaluation.estimates, strict=True)
            ]
        )
        factors = np.where(paced[columns.unit], factors, 1.0)
    times = medians_s(evaluation.estimates)[columns.unit] * factors
    sigma = 0.0 if noise is None or noise.probe is None else noise.probe.rank_sigma
    between_s = problem.costs(columns.world_size).between_steps_s
    return unsteady_step_s(compiled, times, evaluation.overlap, sigma) + between_s * (1.0 if on_gpu else speed.mean)
