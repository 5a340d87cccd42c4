"""The belief about how long a change lasts, and what the controller makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from parsim.errors import ScheduleError
from parsim.search.adapt.controller import Controller, ControllerConfig, Keep, Lasting, Replan
from tests.adaptive_toy import Toy, ToyPlan, seen

CHATTY = ToyPlan(0, 1.0, 0.5)
QUIET = ToyPlan(1, 1.6, 0.1)
STEPS = 10
"""Of a window."""
WINDOWS = 200
BEYOND = 1_000_000
"""Steps of the run after the windows that are looked at."""
CONFIG = ControllerConfig(smoothing=0.9, threshold=0.15, patience=2, settle_windows=0, ask_probes=False)

known = st.builds(
    Lasting,
    tail=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]),
    ended=st.integers(0, 5),
    steps=st.integers(1, 1000),
)


@given(known, st.integers(1, 500), st.integers(0, 2000))
def test_the_mean_is_the_area_below_the_chance_of_lasting(lasting: Lasting, lasted: int, left: int) -> None:
    shape, scale = lasting.tail + lasting.ended, lasting.steps + lasted
    area, _ = quad(lambda steps: (1 + steps / scale) ** -shape, 0, left, limit=200)
    assert lasting.expected_steps(lasted, left) == pytest.approx(area, rel=1e-6, abs=1e-9)
    assert lasting.ends_within(lasted, left) == pytest.approx(1 - (1 + left / scale) ** -shape, abs=1e-9)


def test_it_is_the_posterior_of_exponential_durations() -> None:
    """Rates drawn from the posterior, and remaining steps from the rates: the chance comes out as the closed form has it."""
    rng = np.random.default_rng(0)
    lasting, lasted = Lasting(tail=2.0, ended=3, steps=120), 30
    rates = rng.gamma(lasting.tail + lasting.ended, 1 / (lasting.steps + lasted), 400_000)
    remaining = rng.exponential(1 / rates)
    assert lasting.ends_within(lasted, 20) == pytest.approx((remaining < 20).mean(), abs=3e-3)
    assert lasting.expected_steps(lasted, 20) == pytest.approx(np.minimum(remaining, 20).mean(), rel=5e-3)


@given(known, st.integers(1, 500), st.integers(1, 2000))
def test_what_has_lasted_longer_is_expected_to_last_longer_and_never_beyond_the_run(
    lasting: Lasting, lasted: int, left: int
) -> None:
    steps = lasting.expected_steps(lasted, left)
    assert 0 < steps <= left
    assert lasting.expected_steps(2 * lasted, left) >= steps
    assert lasting.expected_steps(lasted, 2 * left) >= steps


def test_without_a_tail_it_lasts_until_one_has_ended() -> None:
    fresh = Lasting(tail=0.0)
    assert (fresh.expected_steps(3, 100), fresh.ends_within(3, 100)) == (100.0, 0.0)
    assert fresh.with_ended(10).expected_steps(3, 10_000) < 100


def test_tail_two_expects_as_much_again() -> None:
    assert Lasting(tail=2.0).expected_steps(40, 10**9) == pytest.approx(40, rel=1e-6)


@pytest.mark.parametrize("tail", [-1.0, float("nan"), float("inf")])
def test_a_tail_is_a_number_from_zero(tail: float) -> None:
    with pytest.raises(ScheduleError, match="duration_tail"):
        ControllerConfig(duration_tail=tail)


def course_of(
    toy: Toy, config: ControllerConfig, disturbed: set[int], *, factor: float = 4.0
) -> tuple[float, list[Keep | Replan], Controller]:
    """Seconds of a run in which communication is slow in some windows, all links being seen, and every decision."""
    controller, decisions, total_s = toy.controller(config), [], 0.0
    for window in range(WINDOWS):
        slow = factor if window in disturbed else 1.0
        running = toy.toy_of(controller.plan)
        total_s += STEPS * running.step_s(toy.truth(communication=slow))
        left = (WINDOWS - window - 1) * STEPS + BEYOND
        controller, decision = controller.observe(seen(running, window, communication=slow, steps_left=left))
        decisions.append(decision)
        total_s += decision.cost_s if isinstance(decision, Replan) else 0.0
    return total_s, decisions, controller


def with_foresight_s(toy: Toy, disturbed: set[int], *, factor: float = 4.0) -> float:
    """The fastest course of two plans: a dynamic programme over the windows."""
    first, other = toy.plans
    best = {first: 0.0, other: float("inf")}
    for window in range(WINDOWS):
        truth = toy.truth(communication=factor if window in disturbed else 1.0)
        best = {plan: seconds + STEPS * plan.step_s(truth) for plan, seconds in best.items()}
        best = {plan: min(best[plan], best[second] + toy.cost_s) for plan, second in ((first, other), (other, first))}
    return min(best.values())


def test_a_change_is_answered_once_it_has_cost_what_the_two_switches_cost() -> None:
    """The slow link costs 1 s a step; the switch and the way back 45 s each: 90 steps or so, 10 windows."""
    toy = Toy((CHATTY, QUIET), cost_s=45.0)
    _, decisions, _ = course_of(toy, CONFIG, set(range(20, WINDOWS)))
    answered = next(window for window, decision in enumerate(decisions) if isinstance(decision, Replan))
    assert 27 <= answered <= 30
    switch = decisions[answered]
    assert isinstance(switch, Replan)
    assert "while the change should last" in switch.reason
    assert "the way back" in switch.reason
    waited = [decision for decision in decisions[:answered] if "waits for the change to last" in decision.reason]
    assert [decision.planned for decision in waited if isinstance(decision, Keep)] == [True] + [False] * (len(waited) - 1)


def test_what_is_soon_over_is_not_answered() -> None:
    toy = Toy((CHATTY, QUIET), cost_s=45.0)
    _, decisions, _ = course_of(toy, CONFIG, set(range(20, 24)))
    assert not any(isinstance(decision, Replan) for decision in decisions)
    _, decisions, _ = course_of(toy, replace(CONFIG, duration_tail=0.0), set(range(20, 24)))
    assert any(isinstance(decision, Replan) for decision in decisions)


def test_what_was_there_from_the_first_window_lasts() -> None:
    toy = Toy((CHATTY, QUIET), cost_s=45.0)
    _, decisions, controller = course_of(toy, CONFIG, set(range(WINDOWS)))
    assert isinstance(decisions[1], Replan)
    assert controller.switches == 1


def test_it_learns_that_changes_are_short() -> None:
    """After many short changes, one that lasts is waited for longer than the first would have been."""
    toy = Toy((CHATTY, QUIET), cost_s=30.0)
    fresh = course_of(toy, CONFIG, set(range(120, WINDOWS)))[1]
    blips = {window for first in range(10, 110, 10) for window in range(first, first + 3)}
    taught = course_of(toy, CONFIG, blips | set(range(120, WINDOWS)))[1]
    first, later = (next(n for n, entry in enumerate(some) if isinstance(entry, Replan)) for some in (fresh, taught))
    assert first < later


@pytest.mark.slow
@given(st.integers(1, 100), st.sampled_from([1.0, 10.0, 45.0, 120.0]))
def test_one_change_of_any_length_costs_at_most_two_switches_and_the_noticing(length: int, cost_s: float) -> None:
    """Ski rental: whatever the length, at most twice what knowing it costs, beside the windows that noticing takes."""
    toy = Toy((CHATTY, QUIET), cost_s=cost_s)
    disturbed = set(range(20, 20 + length))
    lost_s = course_of(toy, CONFIG, disturbed)[0] - with_foresight_s(toy, disturbed)
    noticing_s = 2 * (CONFIG.patience + 1) * STEPS * 1.0
    assert lost_s <= 2 * cost_s + noticing_s + 1e-6
