"""A plan's step at the speed that the machine had during a run (`parsim.hardware.speed_factor`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Ints
from parsim.costs.estimate import Estimate
from parsim.costs.uncertainty.draws import medians_s
from parsim.graph.columns import Columns
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
    noise = problem.cluster.profile.noise
    on_gpu = problem.cluster.devices[0].type.kind == "cuda"
    sigma = 0.0 if noise is None or noise.probe is None else noise.probe.rank_sigma
    between_s = problem.costs(evaluation.compiled.columns.world_size).between_steps_s * (1.0 if on_gpu else speed.mean)
    period = evaluation.period
    if period is None:
        compiled = evaluation.compiled
        times = _slowed_s(compiled.columns, evaluation.estimates, compiled.columns.unit, speed, on_gpu)
        return unsteady_step_s(compiled, times, evaluation.overlap, sigma) + between_s
    times = _slowed_s(period.cycle.columns, period.estimates, period.unit, speed, on_gpu)
    cycle_s = unsteady_step_s(period.cycle, times, period.overlap, sigma / math.sqrt(period.steps))
    local_s = 0.0
    if period.local is not None:
        alone = _slowed_s(period.local.columns, period.estimates, period.local_unit, speed, on_gpu)
        local_s = unsteady_step_s(period.local, alone, period.overlap, 0.0)
    return float(period.mean_s(np.array(cycle_s), np.array(local_s))) + between_s


def _slowed_s(
    columns: Columns, estimates: Sequence[Estimate], unit: Ints, speed: SpeedFactor, on_gpu: bool
) -> NDArray[np.float64]:
    """float64 [moments, tasks]: seconds of every task at the speed of its ranks."""
    slow = speed.by_rank
    by_use = slow[columns.resource_rank[columns.uses.values]]
    counts = np.diff(columns.uses.offsets)
    factors = np.add.reduceat(by_use, columns.uses.offsets[:-1], axis=0).T / counts
    if on_gpu:
        paced = np.array(
            [isinstance(own.work, Compute | OptimizerStep | ClipGradients | Mix) for own in columns.units], dtype=np.bool_
        )[columns.unit]
        bound = np.array([entry.host_bound for entry in estimates], dtype=np.bool_)[unit]
        factors = np.where(paced & ~bound, factors, 1.0)
    times: NDArray[np.float64] = medians_s(estimates)[unit] * factors
    return times
