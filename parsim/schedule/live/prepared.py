"""A planner whose work is done before the training: plans are searched and priced for what may happen to the machine.

During the run only factors on known prices change. So a planning is one pass of the static engine per plan (milliseconds),
where a search takes seconds in which all ranks stand still.

The machine that is prepared for: as the profile says; all communication `COMMUNICATION` times as slow; every rank in turn
`RANK` times as slow. The best plan of every family is kept in each of these states, and one of them is the answer under any.

Leaves out: plans that are good under none of these states; noise of single ranks, which searches price; and, in all states but
the first, placements of single components, which take most of a search.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from parsim.costs.feedback.run_corrections import NO_RUN_CORRECTIONS, CommunicationClass, RunCorrections
from parsim.errors import CostError, PlanError, ScheduleError
from parsim.plans.plan import Plan
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.live.decisions import PlanFor
from parsim.schedule.live.planning import PricedPlan, pool_planner, priced, search_planner
from parsim.schedule.search import search

COMMUNICATION, RANK = (4.0, 32.0), (2.0, 5.0)
DISTRIBUTED = ("dp", "mp", "hp")
SEARCH_S = 2.0
"""Assumed seconds of a planning that searches, until the first has been timed."""
MOST_RANKS = 4
"""On more ranks there are more states than searches that one may wait for: a planning searches, as it is needed."""


def likely(world_size: int) -> tuple[RunCorrections, ...]:
    """The states of the machine that plans are prepared for.

    Args:
        world_size: ranks of the plans.
    """
    ranks = range(world_size)
    everything = CommunicationClass("all_reduce", tuple(ranks))
    links = [RunCorrections(communication=((everything, factor),)) for factor in COMMUNICATION]
    slow = [
        RunCorrections(ranks=tuple((rank, factor if rank == one else 1.0) for rank in ranks))
        for factor in RANK
        for one in ranks
    ]
    return (NO_RUN_CORRECTIONS, *links, *slow)


def prepared_pool(problem: PlanningProblem, current: Plan, strategy: str = "adaptive") -> tuple[PricedPlan, ...]:
    """The current plan and the best ones, on as many ranks, under every likely state of the machine.

    Args:
        problem: of the run; plans keep its constraints. current: the plan that it begins with. strategy: the family to search.

    Raises:
        ScheduleError: the current plan does not fit. CostError, PlanError: it cannot be priced.
    """
    found = {_program(current): priced(problem, current)}
    for state in likely(current.world_size):
        wanted = DISTRIBUTED if strategy == "adaptive" and state != NO_RUN_CORRECTIONS else (strategy,)
        try:
            best = search(problem.corrected(state), wanted, samples=0).candidates
        except (ScheduleError, CostError, PlanError):
            continue  # the current plan can be priced: there is just nothing beside it
        for entry in best:
            plan = entry.result.plan
            if entry.result.fits and plan.world_size == current.world_size and _program(plan) not in found:
                found[_program(plan)] = priced(problem, plan)
    return tuple(found.values())


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Attributes: plan_for: the planner. planning_s: that it takes, as a first planning was timed."""

    plan_for: PlanFor
    planning_s: float


def prepared_planner(problem: PlanningProblem, current: Plan, strategy: str = "adaptive") -> Prepared:
    """A planner that has its plans at hand, and has planned once.

    For more than `MOST_RANKS` ranks, or a plan that does not fit, every planning searches; its seconds are assumed.

    Args:
        problem, current, strategy: as `prepared_pool` takes them.
    """
    searching = search_planner(problem, (strategy,), world_size=current.world_size)
    if current.world_size > MOST_RANKS:
        return Prepared(plan_for=searching, planning_s=SEARCH_S)
    try:
        planner = pool_planner(prepared_pool(problem, current, strategy))
    except ScheduleError:
        return Prepared(plan_for=searching, planning_s=SEARCH_S)
    planner(NO_RUN_CORRECTIONS, current)  # the engine is compiled at its first call
    began = time.perf_counter()
    planner(likely(current.world_size)[1], current)
    return Prepared(plan_for=planner, planning_s=time.perf_counter() - began)


def _program(plan: Plan) -> Plan:
    """The plan whatever its family is called."""
    return replace(plan, strategy="custom")
