"""Plans that are priced before a run: what they answer beside a search, and that they answer at once."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest

from parsim.costs.observed import CommunicationClass, RunCorrections
from parsim.errors import ScheduleError
from parsim.plans.plan import NONE, Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.adapt import planning as prepared
from parsim.search.adapt.planning import PricedPlan, likely, pool_planner, prepared_planner, prepared_pool, search_planner
from parsim.search.families import FAMILIES
from tests.machines import machine
from tests.models import chain_model

PROBLEM = PlanningProblem(
    model=chain_model((4e9, 2e9, 6e9, 2e9), elements=2_000_000),
    cluster=machine(2),
    global_batch=64,
    zero_stage=0,
    recompute=NONE,
)
DP = next(plan for plan in FAMILIES["dp"](PROBLEM) if plan.world_size == 2)
SLOW_LINK = RunCorrections(communication=((CommunicationClass("all_reduce", (0, 1)), 100.0),))
SLOW_RANK = RunCorrections(ranks=((0, 1.0), (1, 3.0)))


@cache
def pool() -> tuple[PricedPlan, ...]:
    return prepared_pool(PROBLEM, DP)


def test_the_pool_has_the_current_plan_and_only_plans_of_its_size_each_once() -> None:
    assert DP in {entry.plan for entry in pool()}
    assert {entry.plan.world_size for entry in pool()} == {2}
    programs = [replace(entry.plan, strategy="custom") for entry in pool()]
    assert len(set(programs)) == len(programs) > 1


@pytest.mark.slow
@pytest.mark.parametrize("state", [RunCorrections(), SLOW_LINK, SLOW_RANK])
def test_what_is_prepared_is_as_good_as_what_a_search_would_find(state: RunCorrections) -> None:
    """States between and beyond those that were searched."""
    choice = pool_planner(pool())(state, DP)
    found = search_planner(PROBLEM, ("adaptive",), world_size=2)(state, DP)
    now = replace(PROBLEM, corrections=state)
    own, best = (evaluate(now, plan, samples=0).result.step_s.median for plan in (choice.plan, found.plan))
    assert own <= 1.05 * best


def test_a_planning_takes_milliseconds_and_searches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared_planner(PROBLEM, DP)
    monkeypatch.setattr(prepared, "search", None)
    began = time.process_time()
    choice = made.plan_for(SLOW_RANK, DP)
    assert time.process_time() - began < 0.1
    assert choice.plan != DP
    assert 0 < made.planning_s < 2.0


def test_more_ranks_and_plans_that_do_not_fit_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_asked(problem: PlanningProblem, current: Plan) -> None:
        raise AssertionError("nothing is prepared for many ranks")

    wide = replace(PROBLEM, cluster=machine())
    eight = next(plan for plan in FAMILIES["dp"](wide) if plan.world_size == 8)
    cramped = replace(PROBLEM, cluster=machine(2, memory_bytes=1 << 20))
    with pytest.raises(ScheduleError, match="fits"):
        prepared_planner(cramped, DP).plan_for(SLOW_RANK, DP)
    monkeypatch.setattr(prepared, "prepared_pool", not_asked)
    assert prepared_planner(wide, eight).planning_s == prepared.SEARCH_S


def test_every_rank_in_turn_and_all_links_are_prepared_for() -> None:
    states = likely(3)
    assert not states[0]
    assert {state.communication_factor(CommunicationClass("send_recv", (0, 2))) for state in states[1:3]} == {4.0, 32.0}
    slow = [[factor for _, factor in state.ranks] for state in states[3:]]
    assert sorted(max(range(3), key=factors.__getitem__) for factors in slow) == [0, 0, 1, 1, 2, 2]


def test_a_corrected_problem_shares_what_does_not_depend_on_the_machine() -> None:
    problem = replace(PROBLEM)
    other = problem.corrected(SLOW_RANK)
    assert other == replace(PROBLEM, corrections=SLOW_RANK)
    assert other.layout(DP) is problem.layout(DP)
    assert other.memory(DP) is problem.memory(DP)
    slower = [evaluate(entry, DP, samples=0).result.step_s.median for entry in (problem, other)]
    assert slower[1] == evaluate(replace(PROBLEM, corrections=SLOW_RANK), DP, samples=0).result.step_s.median > slower[0]
