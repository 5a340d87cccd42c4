"""Planners, observations and the cost of a switch, on the DGX-1 profile with a small model."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.adaptive.scenario import (
    Disturbance,
    PoolCourse,
    TuningScenario,
    best_static,
    course_of,
    disturbed,
    drive,
    oracle,
    stay,
)
from experiments.adaptive.scenario import Path as PolicyPath
from parsim.app.functions import plan
from parsim.app.launch import run_spec
from parsim.app.train import adaptive_spec
from parsim.costs.observed import NO_RUN_CORRECTIONS, CommunicationClass, RunCorrections, class_of, task_durations_s
from parsim.errors import ExecutionError, ParsimError, ScheduleError
from parsim.execute.adaptive import Steering, problem_of
from parsim.execute.job import Job
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.train import mean_round_s
from parsim.model.optimizers import OPTIMIZERS
from parsim.plans.mesh import Mesh
from parsim.plans.plan import NONE, Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.memory import RankMemory
from parsim.predict.problem import PlanningProblem
from parsim.search.adapt import planning as prepared
from parsim.search.adapt.controller import Controller, ControllerConfig, Keep, PlanChoice, Replan
from parsim.search.adapt.planning import (
    PricedPlan,
    controller_for,
    expected_seconds,
    likely,
    observation_of,
    pool_planner,
    prepared_planner,
    prepared_pool,
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
from tests.quick import some_quick

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


# Simulated training on a machine that changes: tables of step times, policies, and the oracle.

COST = switch_cost(PROBLEM, rebuild_s=1.0)
SLOW_LINK = Disturbance(factor=3000.0, first=10, end=35, link=("gpu0", "gpu3"))
QUIET = TuningScenario(name="quiet", windows=60, steps_per_window=200, windows_per_epoch=20)
SLOW = replace(QUIET, name="slow", disturbances=(SLOW_LINK,), probe_s=0.5, epoch_probes=True, planning_s=0.5)


def controlled(course: PoolCourse, config: ControllerConfig | None = None) -> PolicyPath:
    start = POOL[0]
    controller = Controller(
        config=config or ControllerConfig(),
        plan_for=pool_planner(POOL),
        switch_cost_s=COST,
        plan=start.plan,
        expected=start.expected,
    )
    return drive(course, controller)


def test_windows_are_priced_as_the_disturbed_machine_is() -> None:
    rank = Disturbance(factor=2.0, first=3, rank=1)
    link = Disturbance(factor=50.0, first=5, end=7, link=("gpu0", "gpu3"))
    course = course_of(PROBLEM, replace(QUIET, windows=8, disturbances=(rank, link)), POOL, seed=0)
    for window, happening in ((0, ()), (3, (rank,)), (5, (rank, link)), (7, (rank,))):
        now = disturbed(PROBLEM, happening)
        for number, entry in enumerate(POOL):
            expected = evaluate(now, entry.plan, samples=0).result.step_s.median
            assert course.step_s[window, number] == pytest.approx(expected, rel=1e-9)


def test_a_slow_link_is_seen_by_those_who_use_it() -> None:
    link = Disturbance(factor=50.0, first=0, link=("gpu0", "gpu3"))
    course = course_of(PROBLEM, replace(QUIET, windows=1, disturbances=(link,)), POOL, seed=0)
    probes = course.probe(0)
    factors = {str(key): factor for key, factor in probes.communication}
    assert factors["all_reduce over 0,1,2,3"] > 2
    assert factors["send_recv 0>1"] == pytest.approx(1.0)


def test_noise_is_the_same_for_every_plan_of_a_seed_and_has_mean_one() -> None:
    noisy = replace(QUIET, windows=4000, noise_sigma=0.1)
    calm = course_of(PROBLEM, replace(QUIET, windows=1), POOL[:1], seed=0)
    one, again, other = (course_of(PROBLEM, noisy, POOL[:1], seed) for seed in (0, 0, 1))
    assert np.array_equal(one.step_s, again.step_s)
    assert not np.array_equal(one.step_s, other.step_s)
    usual = calm.durations_s(0, 0)
    unit = POOL[0].compiled.columns.unit
    noisy_tasks = [task for task in range(len(usual)) if usual[task] > 0 and POOL[0].classes[unit[task]] is not None]
    assert noisy_tasks
    ratios = np.stack([one.durations_s(window, 0)[noisy_tasks] / usual[noisy_tasks] for window in range(4000)])
    assert ratios.mean(axis=0) == pytest.approx(1.0, abs=0.01)
    assert ratios.std(axis=0) == pytest.approx(0.1, rel=0.1)


def test_on_a_quiet_machine_the_controller_stays_and_costs_nothing() -> None:
    course = course_of(PROBLEM, QUIET, POOL, seed=0)
    path = controlled(course)
    assert path.switches == path.plannings == 0
    assert path.total_s == pytest.approx(stay(course, DP).total_s)


def test_a_network_that_slows_and_recovers_is_followed() -> None:
    course = course_of(PROBLEM, SLOW, POOL, seed=0)
    path, best = controlled(course), oracle(course, DP, COST)
    assert path.switches == 2
    assert path.plans[0] == path.plans[-1] == 0
    assert path.plans[20] == best.plans[20] != 0
    assert best.total_s < path.total_s < min(stay(course, DP).total_s, best_static(course).total_s)
    spent = path.total_s - float(course.window_s[np.arange(60), list(path.plans)].sum())
    switches = [decision for decision in path.decisions if isinstance(decision, Replan)]
    probes = sum(decision.probe for decision in path.decisions if isinstance(decision, Keep)) + 3
    assert spent == pytest.approx(
        sum(decision.cost_s for decision in switches) + path.plannings * SLOW.planning_s + probes * 0.5
    )


@pytest.mark.slow
def test_the_oracle_is_the_best_of_all_paths() -> None:
    """Against every path through three plans and six windows."""
    course = course_of(
        PROBLEM,
        replace(QUIET, windows=6, noise_sigma=0.3, disturbances=(replace(SLOW_LINK, first=2, end=4),)),
        POOL,
        seed=3,
    )
    plans = [entry.plan for entry in POOL]
    for cost_s in (COST, lambda old, new: 0.0, lambda old, new: 1e9):
        best = oracle(course, DP, cost_s)
        totals = {
            (0, *rest): sum(float(course.window_s[window, plan]) for window, plan in enumerate((0, *rest)))
            + sum(cost_s(plans[a], plans[b]) for a, b in itertools.pairwise((0, *rest)) if a != b)
            for rest in itertools.product(range(3), repeat=5)
        }
        assert best.total_s == pytest.approx(min(totals.values()), rel=1e-12)
        assert totals[best.plans] == pytest.approx(best.total_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_beats_the_oracle(seed: int) -> None:
    course = course_of(PROBLEM, replace(SLOW, noise_sigma=0.08), POOL, seed=seed)
    best = oracle(course, DP, COST).total_s
    for path in (controlled(course), stay(course, DP)):
        assert best <= path.total_s * (1 + 1e-12)


def test_bad_scenarios() -> None:
    with pytest.raises(ScheduleError, match="no rank 9"):
        disturbed(PROBLEM, [Disturbance(factor=2.0, first=0, rank=9)])
    with pytest.raises(ScheduleError, match="no link gpu0-gpu5"):
        disturbed(PROBLEM, [Disturbance(factor=2.0, first=0, link=("gpu0", "gpu5"))])
    with pytest.raises(ScheduleError, match="not both"):
        Disturbance(factor=2.0, first=0, rank=1, link=("gpu0", "gpu1"))
    with pytest.raises(ScheduleError, match="finite and above 0"):
        Disturbance(factor=0.0, first=0)
    with pytest.raises(ScheduleError, match="at least 1 window"):
        replace(QUIET, windows=0)


# Plans that are priced before a run: what they answer beside a search, and that they answer at once.

SMALL_PROBLEM = PlanningProblem(
    model=chain_model((4e9, 2e9, 6e9, 2e9), elements=2_000_000),
    cluster=machine(2),
    global_batch=64,
    zero_stage=0,
    recompute=NONE,
)
SMALL_DP = next(plan for plan in FAMILIES["dp"](SMALL_PROBLEM) if plan.world_size == 2)
SLOW_PAIR = RunCorrections(communication=((CommunicationClass("all_reduce", (0, 1)), 100.0),))
SLOW_RANK = RunCorrections(ranks=((0, 1.0), (1, 3.0)))


@cache
def pool() -> tuple[PricedPlan, ...]:
    return prepared_pool(SMALL_PROBLEM, SMALL_DP)


def test_the_pool_has_the_current_plan_and_only_plans_of_its_size_each_once() -> None:
    assert SMALL_DP in {entry.plan for entry in pool()}
    assert {entry.plan.world_size for entry in pool()} == {2}
    programs = [replace(entry.plan, strategy="custom") for entry in pool()]
    assert len(set(programs)) == len(programs) > 1


@pytest.mark.slow
@pytest.mark.parametrize("state", [RunCorrections(), SLOW_PAIR, SLOW_RANK])
def test_what_is_prepared_is_as_good_as_what_a_search_would_find(state: RunCorrections) -> None:
    """States between and beyond those that were searched."""
    choice = pool_planner(pool())(state, SMALL_DP)
    found = search_planner(SMALL_PROBLEM, ("adaptive",), world_size=2)(state, SMALL_DP)
    now = replace(SMALL_PROBLEM, corrections=state)
    own, best = (evaluate(now, plan, samples=0).result.step_s.median for plan in (choice.plan, found.plan))
    assert own <= 1.05 * best


def test_a_planning_takes_milliseconds_and_searches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared_planner(SMALL_PROBLEM, SMALL_DP)
    monkeypatch.setattr(prepared, "search", None)
    began = time.process_time()
    choice = made.plan_for(SLOW_RANK, SMALL_DP)
    assert time.process_time() - began < 0.1
    assert choice.plan != SMALL_DP
    assert 0 < made.planning_s < 2.0


def test_more_ranks_and_plans_that_do_not_fit_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_asked(problem: PlanningProblem, current: Plan) -> None:
        raise AssertionError("nothing is prepared for many ranks")

    wide = replace(SMALL_PROBLEM, cluster=machine())
    eight = next(plan for plan in FAMILIES["dp"](wide) if plan.world_size == 8)
    cramped = replace(SMALL_PROBLEM, cluster=machine(2, memory_bytes=1 << 20))
    with pytest.raises(ScheduleError, match="fits"):
        prepared_planner(cramped, SMALL_DP).plan_for(SLOW_RANK, SMALL_DP)
    monkeypatch.setattr(prepared, "prepared_pool", not_asked)
    assert prepared_planner(wide, eight).planning_s == prepared.SEARCH_S


def test_every_rank_in_turn_and_all_links_are_prepared_for() -> None:
    states = likely(3)
    assert not states[0]
    assert {state.communication_factor(CommunicationClass("send_recv", (0, 2))) for state in states[1:3]} == {4.0, 32.0}
    slow = [[factor for _, factor in state.ranks] for state in states[3:]]
    assert sorted(max(range(3), key=factors.__getitem__) for factors in slow) == [0, 0, 1, 1, 2, 2]


def test_a_corrected_problem_shares_what_does_not_depend_on_the_machine() -> None:
    problem = replace(SMALL_PROBLEM)
    other = problem.corrected(SLOW_RANK)
    assert other == replace(SMALL_PROBLEM, corrections=SLOW_RANK)
    assert other.layout(SMALL_DP) is problem.layout(SMALL_DP)
    assert other.memory(SMALL_DP) is problem.memory(SMALL_DP)
    slower = [evaluate(entry, SMALL_DP, samples=0).result.step_s.median for entry in (problem, other)]
    assert (
        slower[1]
        == evaluate(replace(SMALL_PROBLEM, corrections=SLOW_RANK), SMALL_DP, samples=0).result.step_s.median
        > slower[0]
    )


# What the run file asks of plans holds for the plans that `--adaptive` changes to, through the file of the job.

PLACE = ProcessPlace(rank=0, world_size=2, local_rank=0, local_world_size=2, attempt=0)
STATES = (*likely(2), *(RunCorrections(ranks=((0, 1.0), (1, factor))) for factor in (0.2, 20.0)))


def job_of(folder: Path, settings: dict[str, object]) -> Job:
    """The job of `run --adaptive`, as the ranks read it."""
    pytest.importorskip("torch")
    given = {"cluster.devices": 2, "model.args": {"depth": 3, "width": 2048}, **settings}
    asked = plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=given).prediction
    asked.problem.model.save(folder / "model.json")
    run = run_spec(asked, "run", folder / "model.json")
    Job(output="", mode="train", runs=(run,), steps=9, adaptive=adaptive_spec(asked, 3)).save(folder / "job.json")
    return Job.load(folder / "job.json")


def plans_of(job: Job) -> set[Plan]:
    """All that the controller changes to as the machine changes."""
    run = job.runs[0]
    assert job.adaptive is not None
    controller = Steering(job.adaptive, run, job.steps, PLACE, built_s=0.0)._controller
    assert controller is not None
    return {controller.plan_for(state, run.plan).plan for state in STATES}


def placements(found: Plan) -> set[str]:
    return {str(placement) for stage in found.stages for _, placement in stage.placed()}


KEPT: dict[str, tuple[dict[str, object], Callable[[Plan], bool]]] = {
    "numbers": (
        {
            "plan.mesh": {"pp": 2},
            "plan.microbatches": 2,
            "plan.pipeline_order": "gpipe",
            "plan.bucket_bytes": 100_000,
            "plan.recompute": "full",
        },
        lambda found: (
            (found.mesh.pp, found.microbatches, found.pipeline_order, found.bucket_bytes, found.recompute)
            == (2, 2, "gpipe", 100_000, "full")
        ),
    ),
    "strategy": ({"plan.strategy": "dp"}, lambda found: placements(found) == {"batch"} and found.mesh.pp == 1),
    "forbid": ({"plan.forbid": {"*": ["place", "shard"]}}, lambda found: placements(found) <= {"batch", "replicate"}),
    "pin": ({"plan.pin": {"*": "replicate"}}, lambda found: placements(found) == {"replicate"}),
}


@pytest.mark.parametrize("key", some_quick(KEPT, *(name for name in KEPT if name != "forbid")))
def test_no_change_leaves_what_the_run_file_asks(key: str, tmp_path: Path) -> None:
    settings, keeps = KEPT[key]
    assert all(map(keeps, plans_of(job_of(tmp_path, settings))))


@pytest.mark.slow
def test_nor_does_a_planning_that_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_RANKS", 1)
    settings, keeps = KEPT["strategy"]
    assert all(map(keeps, plans_of(job_of(tmp_path, settings))))


@pytest.mark.slow
def test_a_free_run_would_leave_them(tmp_path: Path) -> None:
    """So that the test above can fail."""
    free = plans_of(job_of(tmp_path, {}))
    assert not [key for key, (_, keeps) in KEPT.items() if all(map(keeps, free))]


def test_a_plan_by_hand_is_where_the_training_begins(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"plan.strategy": "custom", "plan.mesh": {"pp": 2}, "plan.fit_probability": 0.9})
    assert job.adaptive is not None
    problem = problem_of(job.adaptive, job.runs[0])
    assert not problem.constraints.axes
    assert problem.fit_probability == 0.9
    assert (problem.zero_stage, problem.recompute) == (0, "none")  # of the plan: the file leaves them open


def test_what_takes_memory_beside_the_steps_is_known_when_planning_again(tmp_path: Path) -> None:
    beside: dict[str, object] = {"training.evaluation": {}, "training.no_weight_decay": ["bias"], "training.weight_decay": 0.1}
    job = job_of(tmp_path, {"plan.strategy": "dp", **beside})
    assert job.adaptive is not None
    problem = problem_of(job.adaptive, job.runs[0])
    assert (problem.scored, problem.update_calls) == ("weights", 2)


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Job:
    path = folder / "job.json"
    document = json.loads(path.read_text())
    change(document["adaptive"])
    path.write_text(json.dumps(document))
    return Job.load(path)


def update_asked(change: dict[str, object], adaptive: dict[str, Any]) -> None:
    adaptive["asked"].update(change)


CHANGES: tuple[dict[str, object], ...] = (
    {"zero_stage": 4},
    {"zero_stage": True},
    {"recompute": "all"},
    {"recompute": 3},
    {"constraints": {"microbatches": 10**5}},
    {"constraints": {"pp": 0}},
    {"constraints": {"pp": 1.5}},
    {"constraints": {"pipeline_order": "backwards"}},
    {"constraints": {"synchronisation": {"kind": "average"}}},
    {"capacity_factor": 0.5},
    {"pins": [["fc1", "everywhere"]]},
    {"pins": [["fc1"]]},
    {"pins": [[7, "batch"]]},
    {"forbids": [["fc1", "everything"]]},
    {"unknown": 1},
)


def test_a_changed_job_is_refused(tmp_path: Path) -> None:
    job_of(tmp_path, {"plan.strategy": "dp"})
    path = tmp_path / "job.json"
    written = path.read_text()
    for change in CHANGES:
        path.write_text(written)
        with pytest.raises(ParsimError):
            changed(tmp_path, partial(update_asked, change))
    path.write_text(written)
    with pytest.raises(ExecutionError, match="fit_probability"):
        changed(tmp_path, lambda adaptive: adaptive.update(fit_probability=1.5))


def test_a_pin_of_another_model_is_refused(tmp_path: Path) -> None:
    job_of(tmp_path, {"plan.strategy": "dp"})
    job = changed(tmp_path, partial(update_asked, {"pins": [["nowhere", "batch"]]}))
    assert job.adaptive is not None
    with pytest.raises(ExecutionError, match="'nowhere', which"):
        problem_of(job.adaptive, job.runs[0])
