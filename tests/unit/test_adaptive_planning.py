"""Planners, observations and the cost of a switch, on the DGX-1 profile with a small model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.costs.observed import NO_RUN_CORRECTIONS, CommunicationClass, RunCorrections, class_of, task_durations_s
from parsim.errors import ScheduleError
from parsim.execute.train import mean_round_s
from parsim.model.optimizers import OPTIMIZERS
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.memory import RankMemory
from parsim.predict.problem import PlanningProblem
from parsim.search.adapt.controller import Keep, PlanChoice, Replan
from parsim.search.adapt.planning import (
    controller_for,
    expected_seconds,
    observation_of,
    pool_planner,
    priced,
    search_planner,
    side_by_side,
    switch_cost,
)
from parsim.search.families import FAMILIES
from parsim.search.search import search
from parsim.search.stages import balanced_plan
from parsim.work import SendRecv
from tests.machines import machine
from tests.models import chain_model

ELEMENTS = 2_000_000
PROBLEM = PlanningProblem(
    model=chain_model((4e9, 2e9, 6e9, 2e9), elements=ELEMENTS),
    cluster=machine(4),
    global_batch=64,
)
DP = next(iter(FAMILIES["dp"](PROBLEM)))
SINGLE = next(iter(FAMILIES["single"](PROBLEM)))
MP = balanced_plan(PROBLEM, "mp", Mesh(pp=4), microbatches=8, pipeline_order="1f1b")
HP = balanced_plan(PROBLEM, "hp", Mesh(pp=2, dp=2), microbatches=4, pipeline_order="gpipe")
POOL = [priced(PROBLEM, plan) for plan in (DP, MP, HP)]
FACTOR = st.floats(0.5, 20.0)


@pytest.mark.slow
@given(ranks=st.lists(FACTOR, min_size=4, max_size=4), links=FACTOR, pair=FACTOR)
@settings(max_examples=25, deadline=None)
def test_a_priced_plan_under_corrections_is_the_evaluation_of_the_corrected_problem(
    ranks: list[float], links: float, pair: float
) -> None:
    corrections = RunCorrections(
        ranks=tuple(enumerate(ranks)),
        communication=(
            (CommunicationClass("all_reduce", (0, 1, 2, 3)), links),
            (CommunicationClass("send_recv", (0, 1)), pair),
        ),
    )
    now = replace(PROBLEM, corrections=corrections)
    for entry in POOL:
        evaluated = evaluate(now, entry.plan, samples=0).result.step_s.median
        assert entry.step_s(corrections) == pytest.approx(evaluated, rel=1e-9)


@pytest.mark.parametrize("plan", [DP, MP, HP, SINGLE])
def test_a_run_as_predicted_teaches_nothing(plan: Plan) -> None:
    """The predicted timeline, read back task by task as a measured one would be, gives the expected seconds by class."""
    evaluation = evaluate(PROBLEM, plan, samples=0)
    seconds = task_durations_s(len(evaluation.graph.tasks), evaluation.timeline)
    observation = observation_of(evaluation.graph, np.stack([seconds, seconds]), window=0, step_s=0.1, steps_left=10)
    assert observation.seconds == pytest.approx(expected_seconds(PROBLEM, plan))
    controller, decision = controller_for(PROBLEM, plan).observe(observation)
    assert isinstance(decision, Keep)
    assert controller.belief.factors() == {key: pytest.approx(1.0) for key in controller.belief.factors()}


def test_steps_are_averaged_and_shapes_checked() -> None:
    evaluation = evaluate(PROBLEM, DP, samples=0)
    graph, size = evaluation.graph, len(evaluation.graph.tasks)
    ones = observation_of(graph, np.ones(size), window=0, step_s=1.0, steps_left=1).seconds
    mixed = observation_of(graph, [[0.5] * size, [1.5] * size], window=0, step_s=1.0, steps_left=1).seconds
    assert mixed == pytest.approx(ones)
    for wrong in (np.ones(size + 1), np.ones((0, size)), np.ones((1, 1, size))):
        with pytest.raises(ScheduleError, match=f"the graph has {size} tasks"):
            observation_of(graph, wrong, window=0, step_s=1.0, steps_left=1)
    with pytest.raises(ScheduleError, match="negative"):
        observation_of(graph, np.full(size, np.nan), window=0, step_s=1.0, steps_left=1)


def test_the_search_planner_answers_as_a_search_under_the_same_costs() -> None:
    slow = RunCorrections(communication=((CommunicationClass("all_reduce", (0, 1, 2, 3)), 400.0),))
    choice = search_planner(PROBLEM)(slow, DP)
    now = replace(PROBLEM, corrections=slow)
    found = search(now, samples=0).chosen
    assert found is not None
    assert choice.plan == found.result.plan
    assert choice.step_s == found.result.step_s.median
    assert choice.current_step_s == evaluate(now, DP, samples=0).result.step_s.median
    assert choice.expected == pytest.approx(expected_seconds(PROBLEM, choice.plan))
    assert choice.step_s < choice.current_step_s


def test_a_search_that_finds_nothing_is_a_reason_and_not_an_error() -> None:
    cramped = replace(PROBLEM, cluster=machine(4, memory_bytes=1 << 20))
    with pytest.raises(ScheduleError, match="no plan fits"):
        search_planner(cramped)(RunCorrections(), DP)


def test_a_pool_planner_takes_the_fastest_of_its_plans() -> None:
    plan_for = pool_planner(POOL)
    for factor in (1.0, 30.0, 3000.0):
        known = RunCorrections(communication=((CommunicationClass("all_reduce", (0, 1, 2, 3)), factor),))
        choice = plan_for(known, HP)
        steps = {entry.plan: entry.step_s(known) for entry in POOL}
        assert choice.step_s == steps[choice.plan] == min(steps.values())
        assert choice.current_step_s == steps[HP]
    with pytest.raises(ScheduleError, match="not in the pool of 3 plans"):
        plan_for(RunCorrections(), SINGLE)
    with pytest.raises(ScheduleError, match="at least one plan"):
        pool_planner([])


def test_a_switch_costs_what_ranks_receive_and_the_rebuilding() -> None:
    cost_s = switch_cost(PROBLEM, rebuild_s=2.0)
    assert cost_s(DP, replace(DP, microbatches=2)) == 2.0, "everybody has everything already"
    assert cost_s(DP, MP) == 2.0, "stages are parts of what each has"
    assert cost_s(DP, SINGLE) == 2.0
    one_component = ELEMENTS * (4 + OPTIMIZERS["sgd_momentum"].state_bytes_per_element)
    costs = PROBLEM.costs(4)

    def transfer_s(source: int, target: int, size_bytes: int) -> float:
        return costs.estimate(SendRecv(source=source, destination=target, size_bytes=size_bytes), source).median_s

    whole = 4 * one_component
    assert cost_s(SINGLE, DP) == pytest.approx(2.0 + sum(transfer_s(0, rank, whole) for rank in (1, 2, 3)))
    busy = dict.fromkeys(range(4), 0.0)
    for source, stage in enumerate(MP.stages):
        size_bytes = one_component * len([name for name in stage.components if name != "loss"])
        for rank in set(range(4)) - {source}:
            for end in (source, rank):
                busy[end] += transfer_s(source, rank, size_bytes)
    assert cost_s(MP, DP) == pytest.approx(2.0 + max(busy.values()))


def test_a_controller_on_a_real_search_moves_away_from_a_slow_network() -> None:
    """Four ranks whose collectives take 400 times as long; transfers are probed and as fast as ever."""
    controller = controller_for(PROBLEM, DP, rebuild_s=1.0)
    entry = POOL[0]
    work = {class_of(unit.work, unit.rank) for candidate in POOL for unit in candidate.compiled.columns.units}
    truth = RunCorrections(communication=((CommunicationClass("all_reduce", (0, 1, 2, 3)), 400.0),))
    probes = RunCorrections(
        communication=tuple((key, 1.0) for key in work if isinstance(key, CommunicationClass) and len(key.ranks) == 2)
    )
    decisions: list[Keep | Replan] = []
    for window in range(4):
        observation = observation_of(
            evaluate(PROBLEM, DP, samples=0).graph,
            entry.durations_s(truth),
            window=window,
            step_s=entry.step_s(truth),
            steps_left=100_000,
            probes=probes if decisions and isinstance(decisions[-1], Keep) and decisions[-1].probe else RunCorrections(),
        )
        controller, decision = controller.observe(observation)
        decisions.append(decision)
        if isinstance(decision, Replan):
            break
    assert isinstance(decisions[-1], Replan), decisions[-1].reason
    assert decisions[-1].plan.mesh != DP.mesh
    assert decisions[-1].step_s < entry.step_s(truth)


def test_what_passes_between_the_steps_of_a_window_is_no_part_of_them() -> None:
    """A planning of 5 s after the second step."""
    rounds = [(0.0, 9.0, 1), (10.0, 10.2, 1), (15.2, 15.6, 1)]
    assert mean_round_s(rounds, 2) == pytest.approx(0.3)
    assert mean_round_s(rounds, 0) == 0.0


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_plan_must_fit_beside_the_one_that_it_follows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a plan changes, a rank holds what both keep between steps: the weights of the new one come from the old one. A rank
    on the CPU also builds the whole model there."""
    problem = replace(PROBLEM, cluster=machine(4, kind=kind))
    memories = [PROBLEM.memory(plan) for plan in (DP, MP)]
    kept = ("parameters", "gradients", "optimizer_state", "buffers")
    beside = ("context", "communication", "allocator")
    whole = sum(parameter.size_bytes for parameter in PROBLEM.model.parameters)
    needed = max(
        sum(before.line(name) for name in kept)
        + max(whole if kind == "cpu" else 0, sum(after.line(name) for name in kept))
        + sum(after.line(name) for name in beside)
        + before.line("communication")
        for before, after in zip(*memories, strict=True)
    )
    assert whole == 4 * 4 * ELEMENTS
    limit = [needed]

    def limited(_: PlanningProblem, plan: Plan) -> tuple[RankMemory, ...]:
        return tuple(replace(memory, limit_bytes=limit[0]) for memory in memories[(DP, MP).index(plan)])

    monkeypatch.setattr(PlanningProblem, "memory", limited)
    faster = PlanChoice(plan=MP, step_s=0.5, current_step_s=1.0, expected={})
    assert side_by_side(problem, lambda *_: faster)(NO_RUN_CORRECTIONS, DP) is faster
    limit[0] = needed - 1
    with pytest.raises(ScheduleError, match=r"while the plan changes rank \d holds the weights and states of both"):
        side_by_side(problem, lambda *_: faster)(NO_RUN_CORRECTIONS, DP)
    same = PlanChoice(plan=replace(DP, strategy="custom"), step_s=1.0, current_step_s=1.0, expected={})
    assert side_by_side(problem, lambda *_: same)(NO_RUN_CORRECTIONS, DP) is same, "nothing changes"
