"""A change so large that a few steps show it: the controller, driven step by step as a run drives it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.costs.observed import CommunicationClass, WorkClass
from parsim.errors import ScheduleError
from parsim.search.adapt.controller import Controller, ControllerConfig, Keep, Observation, Replan, StepsInARow, after_steps
from tests.adaptive_toy import Toy, ToyPlan, seen

CHATTY = ToyPlan(0, 1.0, 0.5)
QUIET = ToyPlan(1, 1.6, 0.1)
TOY = Toy((CHATTY, QUIET), cost_s=1.0)
WINDOW = 5
CONFIG = ControllerConfig(ask_probes=False)


def look(controller: Controller, number: int, factors: Sequence[float], *, fresh: int, left: int, early: bool) -> Observation:
    """Of a window's steps so far, `fresh` of them new. Args: factors: of communication, by step."""
    toy = TOY.toy_of(controller.plan)
    single = [seen(toy, 0, communication=factor).seconds for factor in factors[len(factors) - fresh :]]
    mean = seen(toy, number, communication=float(np.mean(factors)), steps_left=left)
    return replace(mean, steps=tuple(single), early=early)


def trained(
    factors: Sequence[float], *, config: ControllerConfig = CONFIG, window: int = WINDOW
) -> list[tuple[int, Keep | Replan]]:
    """What a run decides after which steps: looks at each window's end and wherever one was asked for.

    Args: factors: of communication, by step; until a change of plan.
    """
    controller, decisions = TOY.controller(config), []
    began = shown = due = 0
    for step in range(1, len(factors) + 1):
        ends = step % window == 0
        if not ends and step != due:
            continue
        own = factors[began:step]
        seen_now = look(controller, len(decisions), own, fresh=step - shown, left=len(factors) - step, early=not ends)
        controller, decision = controller.observe(seen_now)
        decisions.append((step, decision))
        if isinstance(decision, Replan):
            break
        shown, due = step, step + decision.look_after if decision.look_after else 0
        began = step if ends else began
    return decisions


@pytest.mark.parametrize("calm", range(20, 26))
def test_a_sudden_change_is_answered_after_three_to_five_steps(calm: int) -> None:
    """However it lies in the window. By windows alone it is six to ten steps."""
    factors = [1.0] * calm + [20.0] * 60
    step, decision = trained(factors)[-1]
    assert isinstance(decision, Replan)
    assert 3 <= step - calm <= WINDOW
    assert f"changed for {step - calm} steps: all_reduce over 0,1 1900% longer" in decision.reason
    by_windows = trained(factors, config=replace(CONFIG, sudden=1e9))[-1]
    assert isinstance(by_windows[1], Replan)
    assert by_windows[0] - calm > WINDOW


def test_the_factor_is_that_of_the_slow_steps_alone() -> None:
    controller = TOY.controller(CONFIG)
    for number in range(4):
        controller, _ = controller.observe(look(controller, number, [1.0] * 5, fresh=5, left=200, early=False))
    controller, decision = controller.observe(look(controller, 4, [1.0, 1.0, 18.0, 20.0, 22.0], fresh=5, left=100, early=False))
    assert isinstance(decision, Replan)
    assert controller.reference.communication_factor(CHATTY.group) == pytest.approx(20.0)


@pytest.mark.parametrize(("calm", "left"), [(0, None), (1, 104), (2, 103)])
def test_what_was_there_from_the_first_step_on_has_no_beginning(calm: int, left: int | None) -> None:
    """So it lasts to the end. What began in the first window is a change like any other."""
    controller = TOY.controller(replace(CONFIG, least_improvement=1.0))
    factors = [1.0] * calm + [20.0] * (5 - calm)
    controller, decision = controller.observe(look(controller, 0, factors, fresh=5, left=100, early=False))
    assert f"changed for {5 - calm} steps" in decision.reason
    assert controller.history is not None
    assert controller.history.since == left


def test_one_or_two_slow_steps_ask_for_an_early_look_and_change_nothing() -> None:
    for slow in (1, 2):
        decisions = trained([1.0] * (20 - slow) + [20.0] * slow + [1.0] * 40)
        assert not any(isinstance(decision, Replan) or decision.planned for _, decision in decisions)
        assert [step for step, _ in decisions if step % WINDOW] == [20 + 3 - slow]
        early = dict(decisions)[20 + 3 - slow]
        assert early.reason == "an early look: no sudden change for 3 steps"


def test_what_is_no_sudden_change_waits_for_its_windows() -> None:
    """2.9 times as long is below the factor of 3; a run of steps at 2.9 ends one at 20."""
    for late in ([2.9] * 60, [20.0, 20.0, 2.9] * 20):
        step, decision = trained([1.0] * 20 + late)[-1]
        assert isinstance(decision, Replan)
        assert step == 30
        assert "changed for 2 windows" in decision.reason


def test_a_change_for_the_better_is_as_sudden() -> None:
    run = after_steps(
        {},
        [seen(CHATTY, 0, communication=factor).seconds for factor in (0.3, 0.2, 4.0, 0.1)],
        CHATTY.expected,
        {CHATTY.group},
        lambda key: 1.0,
        3.0,
    )
    assert run == {CHATTY.group: StepsInARow(-1, pytest.approx(0.1))}


def test_an_early_look_leaves_the_averages_alone() -> None:
    controller = TOY.controller(CONFIG)
    for number in range(3):
        controller, _ = controller.observe(look(controller, number, [1.0, 1.1, 0.9, 1.0, 1.0], fresh=5, left=100, early=False))
    after, decision = controller.observe(look(controller, 3, [1.0, 9.0], fresh=2, left=98, early=True))
    assert isinstance(decision, Keep)
    assert decision.look_after == 2
    assert (after.tracks, after.last_left, after.history) == (controller.tracks, controller.last_left, controller.history)
    assert after.runs == {CHATTY.group: StepsInARow(1, pytest.approx(9.0))}


KEY = CommunicationClass("all_reduce", (0, 1))


@given(factors=st.lists(st.floats(0.01, 100.0), max_size=30), cuts=st.sets(st.integers(0, 30)), limit=st.floats(1.1, 10.0))
def test_runs_do_not_depend_on_where_the_looks_fall(factors: list[float], cuts: set[int], limit: float) -> None:
    """And equal what is counted from the end."""
    steps: list[dict[WorkClass, float]] = [{KEY: factor} for factor in factors]
    runs: dict[int | CommunicationClass, StepsInARow] = {}
    places = [0, *sorted(cut for cut in cuts if cut < len(steps)), len(steps)]
    for begin, end in itertools.pairwise(places):
        runs = after_steps(runs, steps[begin:end], {KEY: 1.0}, {KEY}, lambda key: 1.0, limit)
    sides = [1 if factor >= limit else -1 if factor * limit <= 1 else 0 for factor in factors]
    count = 0
    while count < len(sides) and sides[-1] and sides[-1 - count] == sides[-1]:
        count += 1
    assert runs.get(KEY, StepsInARow(0, 0.0)).steps == count * (sides[-1] if sides else 0)
    if count:
        assert runs[KEY].mean == pytest.approx(np.mean(factors[-count:]))
    else:
        assert not runs


@pytest.mark.parametrize("fault", [{"sudden": 1.0}, {"sudden": float("nan")}, {"sudden_steps": 0}])
def test_bad_input(fault: dict[str, float]) -> None:
    with pytest.raises(ScheduleError, match=r"sudden \(.*\) must be a factor above 1 and sudden_steps"):
        replace(CONFIG, **fault)


def test_early_looks_are_no_windows_to_settle_in() -> None:
    """Three early looks in the window after a switch do not end the settling: two whole windows must pass."""
    controller = replace(TOY.controller(CONFIG), last_switch=0, last_window=0)
    for number in (1, 2, 3):
        controller, kept = controller.observe(look(controller, number, [1.0, 4.0], fresh=1, left=90, early=True))
        controller = replace(controller, runs={})
        assert isinstance(kept, Keep)
    controller, kept = controller.observe(look(controller, 4, [20.0] * 5, fresh=5, left=85, early=False))
    assert isinstance(kept, Keep)
    assert "it is window 1 after a switch" in kept.reason
    controller, kept = controller.observe(look(controller, 5, [20.0] * 5, fresh=5, left=80, early=False))
    assert "it is window 2 after a switch" in kept.reason
    controller, switched = controller.observe(look(controller, 6, [20.0] * 5, fresh=5, left=75, early=False))
    assert isinstance(switched, Replan)
