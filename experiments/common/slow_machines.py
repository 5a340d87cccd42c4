"""A machine that is not as its profile says, simulated: what validations see of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from parsim.costs.estimate import medians_s, rank_noise
from parsim.costs.observed import RunCorrections, without_updates
from parsim.engines import static
from parsim.engines.program import mean_step_s
from parsim.hardware.profile import Profile
from parsim.plans.plan import Plan
from parsim.predict.compare import aa_floor
from parsim.predict.evaluate import REPEATED_STEPS, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.adapt.observed import Updated, updated
from parsim.timeline import Timeline

STEPS, ROUNDS = 20, 5


@dataclass(frozen=True)
class Machine:
    """What really happens: the profile's durations times `factors`, with noise of tasks and of ranks."""

    problem: PlanningProblem
    plan: Plan
    factors: RunCorrections
    sigma: float = 0.03

    def steps(self, steps: int, seed: int) -> tuple[list[Timeline], list[float]]:
        """Timeline and seconds of each step."""
        base = replace(
            self.problem,
            cluster=replace(self.problem.cluster, profile=without_updates(self.problem.cluster.profile)),
            corrections=self.factors,
        )
        seen = evaluate(base, self.plan, samples=0, fold=False)
        columns, overlap = seen.compiled.columns, seen.overlap
        rng = np.random.default_rng(seed)
        medians = medians_s(seen.estimates)[columns.unit]
        ranks = np.where(columns.communicates, -1, columns.first_rank)
        rows = medians * np.exp(rng.normal(0, self.sigma, (steps, columns.size)))
        rows = rows * rank_noise(ranks, self.sigma / 2, steps, seed)
        times = mean_step_s(seen.compiled, rows, overlap, steps=REPEATED_STEPS)
        return [static.simulate(seen.compiled, row, overlap=overlap) for row in rows], times.tolist()


def after_run(machine: Machine, seed: int, floor: float | None = None) -> Updated:
    """The update that 20 steps lead to."""
    timelines, times = machine.steps(STEPS, seed)
    noise = aa_floor(np.array(times).reshape(ROUNDS, -1).tolist()).median if floor is None else floor
    graph = evaluate(machine.problem, machine.plan, samples=0, fold=False).graph
    return updated(
        machine.problem, machine.plan, graph, timelines, step_s=float(np.mean(times)), floor=noise, run="r", steps=STEPS
    )


def error(machine: Machine, profile: Profile) -> float:
    """Of the step predicted with `profile` against the mean of 200 new steps, without its sign."""
    problem = replace(machine.problem, cluster=replace(machine.problem.cluster, profile=profile))
    predicted = evaluate(problem, machine.plan, samples=0, fold=False).result.step_s.median
    return abs(predicted / float(np.mean(machine.steps(200, 10_000)[1])) - 1)
