"""Plans that are closer to the choice than a measurement can tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parsim.errors import PlanError
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.planning_problem import PlanningProblem

TIE = 0.035
"""Of the step. Two measurements of one program differ by so much in the median (the A/A floor of `experiments/this_machine`).
So a single run of each would not show which of two closer plans is faster."""


def is_tie(step_s: float, best_s: float) -> bool:
    """Whether a step is at most `TIE` longer than the best one. Seconds."""
    return step_s <= best_s * (1 + TIE)


def simpler_tie(problem: PlanningProblem, chosen: Evaluation) -> Evaluation | None:
    """The simplest plan on the mesh of the choice that fits and ties with it; None where the choice is as simple.

    Simpler means: no ZeRO, and buckets as PyTorch's DDP has them. Keys that the question gives stay.

    Args:
        problem: model, cluster and batch. chosen: the evaluation of the plan that the search chose for it.
    """
    for plan in _simpler(problem, chosen.result.plan):
        try:
            found = evaluate(problem, plan, samples=0, reason="simpler than the choice")
        except PlanError:  # the rules of this plan forbid the variant, as gathering ahead does without ZeRO
            continue
        if found.result.fits and is_tie(found.result.step_s.median, chosen.result.step_s.median):
            return found
    return None


def _simpler(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The simplest first."""
    is_free = not isinstance(problem.zero_stage, int) and problem.constraints.dp_shard in (None, plan.mesh.dp)
    stages = [0, plan.zero_stage] if plan.zero_stage and is_free else [plan.zero_stage]
    sizes = [plan.bucket_bytes]
    if problem.constraints.bucket_bytes is None and plan.bucket_bytes != DEFAULT_BUCKET_BYTES:
        sizes.insert(0, DEFAULT_BUCKET_BYTES)
    for stage in stages:
        for size in sizes:
            if (stage, size) != (plan.zero_stage, plan.bucket_bytes):
                mesh = plan.mesh if stage else plan.mesh.undivided()
                yield replace(plan, mesh=mesh, zero_stage=stage, bucket_bytes=size)
