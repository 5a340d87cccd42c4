"""The model of the race, and its fixed plans."""

from __future__ import annotations

from pathlib import Path

from experiments.adaptive.disturbing import RANKS, RATE_BYTES_PER_S, SLOW_RANK, THROTTLE
from parsim.costs.observed import CommunicationClass, RunCorrections
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import NONE, Plan
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.search.adapt.planning import pool_planner, prepared_pool
from parsim.search.search import search
from parsim.work import Collective

WAYS = ("adaptive", "start", "other")
BATCH = 1024
SPEC = ModelSpec(name="experiments.adaptive.network:narrow", input_shape=(1, 16, 16), loss="cross_entropy")


def problem_on(profile: Path) -> PlanningProblem:
    """What the plans are for. Args: profile: of the two ranks."""
    return PlanningProblem(
        model=load_model(SPEC),
        cluster=cluster_from_profile(load_profile(str(profile)), RANKS),
        global_batch=BATCH,
        zero_stage=0,
        recompute=NONE,
    )


def fixed_plans(problem: PlanningProblem, kinds: list[str]) -> dict[str, Plan]:
    """`start`: the best for the machine as it is. `other KIND`: the best under the disturbance, from the first step on."""
    start = next(
        entry.result.plan
        for entry in search(problem, ("adaptive", "dp", "mp"), samples=0).candidates
        if entry.result.plan.world_size == RANKS
    )
    planner = pool_planner(prepared_pool(problem, start))
    return {"start": start, **{f"other {kind}": planner(disturbed(problem, start, kind), start).plan for kind in kinds}}


def disturbed(problem: PlanningProblem, plan: Plan, kind: str) -> RunCorrections:
    """What a disturbance makes of the profile: a throttled rank, or all communication as slow as what the plan sends."""
    if kind == "throttled":
        return RunCorrections(ranks=tuple((rank, THROTTLE if rank == SLOW_RANK else 1.0) for rank in range(RANKS)))
    sent = [work for task in lower(plan, problem.model).tasks if isinstance(work := task.work, Collective)]
    usual_s = sum(problem.costs(RANKS).estimate(work, 0).median_s for work in sent)
    shaped_s = sum(work.size_bytes for work in sent) / RATE_BYTES_PER_S
    every = CommunicationClass("all_reduce", tuple(range(RANKS)))
    return RunCorrections(communication=((every, max(1.0, shaped_s / usual_s)),))
