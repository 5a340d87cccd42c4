"""A controller in the loop of the dynamic engine: handed in as a value, on a machine that changes."""

from __future__ import annotations

import numpy as np
import pytest

from parsim.engines.scenario.controlled import Change, Controlled, RunnableStep, WindowSeen, run_controlled
from parsim.engines.scenario.scenario import Scenario, parse_scenario
from parsim.errors import ScenarioError, ScheduleError
from parsim.predict.evaluate import evaluate
from parsim.schedule.live.driver import AdaptiveWindows, runnable_of
from parsim.schedule.live.scenario import Disturbance, disturbed
from parsim.search.adapt.controller import Controller, ControllerConfig, Keep, Replan
from parsim.search.adapt.planning import pool_planner, priced, switch_cost
from tests.unit.test_adaptive_planning import DP, HP, MP, PROBLEM

POOL = [priced(PROBLEM, plan) for plan in (DP, MP, HP)]
COST = switch_cost(PROBLEM, rebuild_s=1.0)
RUNNABLE = {entry.plan: runnable_of(entry) for entry in POOL}


class Keeps:
    """A controller that only watches."""

    def __init__(self) -> None:
        self.seen: list[WindowSeen] = []

    def observe(self, seen: WindowSeen) -> Change | None:
        self.seen.append(seen)
        return None


def adaptive() -> AdaptiveWindows:
    controller = Controller(
        config=ControllerConfig(),
        plan_for=pool_planner(POOL),
        switch_cost_s=COST,
        plan=DP,
        expected=POOL[0].expected,
    )
    return AdaptiveWindows(controller, POOL, probe_s=0.5)


def play(controller: object, scenario: Scenario, *, first: RunnableStep = RUNNABLE[DP], windows: int = 40) -> Controlled:
    return run_controlled(
        first,
        controller,
        scenario,
        PROBLEM.cluster,
        windows=windows,
        steps_per_window=200,  # type: ignore[arg-type]
    )


def test_on_a_quiet_machine_nothing_changes() -> None:
    watching, deciding = Keeps(), adaptive()
    kept, controlled = play(watching, Scenario()), play(deciding, Scenario())
    assert kept == controlled
    assert not controlled.changes
    step_s = evaluate(PROBLEM, DP, samples=0).result.step_s.median
    assert kept.total_s == pytest.approx(40 * 200 * step_s, rel=1e-12)
    assert [seen.steps_left for seen in watching.seen] == [200 * left for left in range(39, -1, -1)]
    np.testing.assert_allclose(watching.seen[0].task_s, RUNNABLE[DP].durations_s, rtol=1e-9, atol=1e-12)


SLOW_LINK = '[[links]]\nbetween = ["gpu0", "gpu3"]\nbandwidth_factor = 0.0003\nfrom_s = {0}\n'


def test_a_slow_link_makes_it_change_and_that_pays() -> None:
    quiet = play(Keeps(), Scenario())
    scenario = parse_scenario(SLOW_LINK.format(quiet.total_s / 4))
    deciding = adaptive()
    stayed, controlled = play(Keeps(), scenario), play(deciding, scenario)
    assert stayed.total_s > 1.5 * quiet.total_s
    assert controlled.total_s < 0.8 * stayed.total_s
    assert len(controlled.changes) == 1
    after, reason = controlled.changes[0]
    assert after > 9, "the link slows after a quarter of the run, and three windows must agree"
    assert "longer" in reason
    replan = next(decision for decision in deciding.decisions if isinstance(decision, Replan))
    assert controlled.names[after + 1] == replan.plan.summary() != DP.summary()
    probes = sum(isinstance(decision, Keep) and decision.probe for decision in deciding.decisions)
    assert probes >= 1
    assert controlled.total_s == pytest.approx(sum(controlled.window_s) + replan.cost_s + 0.5 * probes)


def test_a_change_within_a_window_divides_its_steps() -> None:
    """Rank 1 is twice as slow from the middle of the second window on: that window lies between the two."""
    quiet = play(Keeps(), Scenario(), windows=1).total_s
    slow = play(Keeps(), parse_scenario("[[stragglers]]\nrank = 1\nfactor = 2.0"), windows=1).total_s
    text = f"[[stragglers]]\nrank = 1\nfactor = 2.0\nfrom_s = {1.5 * quiet}"
    windows = play(Keeps(), parse_scenario(text), windows=3).window_s
    assert windows[0] == pytest.approx(quiet, rel=1e-12)
    assert windows[1] == pytest.approx((quiet + slow) / 2, rel=0.01)
    assert windows[2] == pytest.approx(slow, rel=1e-12)


def test_a_link_that_is_down_for_a_while_is_waited_for() -> None:
    quiet = play(Keeps(), Scenario(), windows=3)
    text = SLOW_LINK.format(1.5 * quiet.window_s[0]).replace("0.0003", "0.0") + f"until_s = {1000.0}\n"
    waited = play(Keeps(), parse_scenario(text), windows=3)
    assert waited.window_s[1] > 1000 - 2 * quiet.window_s[0]
    assert waited.total_s == pytest.approx(1000 + 1.5 * quiet.window_s[0], rel=0.01)


def test_with_jitter_the_same_seed_gives_the_same_run() -> None:
    runs = [play(Keeps(), parse_scenario(f"seed = {seed}\n[jitter]\ncompute_sigma = 0.1"), windows=3) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len(set(runs[0].window_s)) == 3


@pytest.mark.parametrize("factor", [2.0, 10.0, 100.0])
def test_a_slow_link_costs_what_the_prices_of_the_slower_machine_say(factor: float) -> None:
    """The scenario player of the scheduler prices a machine with that link anew; here the flow over it is paced. They differ
    only where the library would take another protocol, so paced is never faster."""
    anew = evaluate(disturbed(PROBLEM, [Disturbance(factor=factor, first=0, link=("gpu0", "gpu3"))]), DP, samples=0)
    text = f'[[links]]\nbetween = ["gpu0", "gpu3"]\nbandwidth_factor = {1 / factor}\n'
    paced = play(Keeps(), parse_scenario(text), windows=1).total_s / 200
    assert paced == pytest.approx(anew.result.step_s.median, rel=0.03)


def test_bad_input() -> None:
    with pytest.raises(ScenarioError, match="windows >= 1 and steps_per_window >= 1, got 0, 200"):
        play(Keeps(), Scenario(), windows=0)
    with pytest.raises(ScheduleError, match="is not in the pool of 1 plans; add it"):
        AdaptiveWindows(adaptive()._controller, POOL[1:2])
    with pytest.raises(ScenarioError, match="no rank 77"):
        play(Keeps(), parse_scenario("[[stragglers]]\nrank = 77\nfactor = 2.0"))
