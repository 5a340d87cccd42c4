"""Simulated training on a machine that changes: tables of step times, policies, and the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from experiments.adaptive.scenario import (
    Disturbance,
    Path,
    PoolCourse,
    TuningScenario,
    best_static,
    course_of,
    disturbed,
    drive,
    oracle,
    stay,
)
from parsim.errors import ScheduleError
from parsim.predict.evaluate import evaluate
from parsim.search.adapt.controller import Controller, ControllerConfig, Keep, Replan
from parsim.search.adapt.planning import pool_planner, priced, switch_cost
from tests.unit.test_adaptive_planning import DP, HP, MP, PROBLEM

POOL = [priced(PROBLEM, plan) for plan in (DP, MP, HP)]
COST = switch_cost(PROBLEM, rebuild_s=1.0)
SLOW_LINK = Disturbance(factor=3000.0, first=10, end=35, link=("gpu0", "gpu3"))
QUIET = TuningScenario(name="quiet", windows=60, steps_per_window=200, windows_per_epoch=20)
SLOW = replace(QUIET, name="slow", disturbances=(SLOW_LINK,), probe_s=0.5, epoch_probes=True, planning_s=0.5)


def controlled(course: PoolCourse, config: ControllerConfig | None = None) -> Path:
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
