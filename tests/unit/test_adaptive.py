"""The controller, driven with plain values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parsim.costs.observed import NO_RUN_CORRECTIONS, CommunicationClass, RunCorrections
from parsim.errors import ScheduleError
from parsim.plans.plan import Plan
from parsim.search.adapt.controller import Controller, ControllerConfig, Keep, PlanChoice, Replan
from tests.adaptive_toy import Toy, ToyPlan, seen

CHATTY = ToyPlan(0, 1.0, 0.5)
QUIET = ToyPlan(1, 1.6, 0.1)
TOY = Toy((CHATTY, QUIET))
CONFIG = ControllerConfig(
    smoothing=0.9,
    threshold=0.15,
    patience=3,
    epoch_threshold=0.05,
    least_improvement=0.05,
    margin=1.0,
    settle_windows=2,
    duration_tail=0.0,
    ask_probes=False,
)


def windows(controller: Controller, first: int, count: int, **what: float) -> tuple[Controller, list[Keep | Replan]]:
    """Observe `count` windows that look alike under whatever plan is running."""
    decisions: list[Keep | Replan] = []
    for window in range(first, first + count):
        controller, decision = controller.observe(seen(TOY.toy_of(controller.plan), window, **what))  # type: ignore[arg-type]
        decisions.append(decision)
    return controller, decisions


def test_a_lasting_slowdown_is_answered_after_patience_windows_with_figures() -> None:
    controller, calm = windows(TOY.controller(CONFIG), 0, 5)
    assert all(isinstance(decision, Keep) and not decision.planned for decision in calm)
    controller, decisions = windows(controller, 5, 3, communication=4.0)
    assert [type(decision) for decision in decisions] == [Keep, Keep, Replan]
    switch = decisions[-1]
    assert isinstance(switch, Replan)
    assert switch.plan == controller.plan == QUIET.plan
    assert switch.step_s == pytest.approx(2.0)
    assert switch.saving_s == pytest.approx(10_000 * (3.0 - 2.0))
    assert switch.cost_s == 10.0
    for words in ("all_reduce over 0,1 300% longer", "for 3 windows", "33.3% less", "10000 steps left", "costs 10"):
        assert words in switch.reason


def test_a_short_spike_changes_nothing() -> None:
    controller, _ = windows(TOY.controller(CONFIG), 0, 5)
    controller, decisions = windows(controller, 5, 2, communication=10.0)
    controller, after = windows(controller, 7, 10)
    assert not any(isinstance(decision, Replan) or decision.planned for decision in decisions + after)


def test_the_average_is_the_mean_at_first_and_exponential_from_then_on() -> None:
    factors = [1.0 + 0.1 * np.sin(number) for number in range(30)]
    controller, expected = TOY.controller(CONFIG), 0.0
    for number, factor in enumerate(factors):
        weight = max(0.1, 1 / (number + 1))
        expected = (1 - weight) * expected + weight * factor
        controller, decision = controller.observe(seen(CHATTY, number, communication=factor))
        assert isinstance(decision, Keep)
        assert controller.belief.communication_factor(CHATTY.group) == pytest.approx(expected, rel=1e-12)
        assert controller.belief.rank_factor(0) == pytest.approx(1.0)


def test_after_a_change_the_average_forgets_what_was_before() -> None:
    controller, _ = windows(TOY.controller(CONFIG), 0, 20)
    for window, factor in enumerate((1.4, 1.6, 1.5), start=20):
        controller, _ = controller.observe(seen(CHATTY, window, communication=factor))
    assert controller.belief.communication_factor(CHATTY.group) == pytest.approx(1.5)
    assert controller.reference == controller.belief


def test_a_switch_must_save_more_than_its_cost_over_the_steps_left() -> None:
    for steps_left, switches in ((9, False), (11, True)):  # a step saves 1 s, a switch costs 10 s
        _, decisions = windows(TOY.controller(CONFIG), 0, 3, communication=4.0, steps_left=steps_left)
        assert isinstance(decisions[-1], Replan) == switches
    reluctant = replace(CONFIG, margin=2.0)
    for steps_left, switches in ((19, False), (21, True)):
        _, decisions = windows(TOY.controller(reluctant), 0, 3, communication=4.0, steps_left=steps_left)
        assert isinstance(decisions[-1], Replan) == switches
        assert switches or "must save 2 times that" in decisions[-1].reason


def test_with_no_steps_left_nobody_plans() -> None:
    _, decisions = windows(TOY.controller(CONFIG), 0, 4, communication=4.0, steps_left=0)
    assert all(isinstance(decision, Keep) and not decision.planned for decision in decisions)
    assert "no steps are left" in decisions[-1].reason


def test_a_gain_below_the_least_improvement_is_left_alone() -> None:
    greedy = replace(CONFIG, least_improvement=0.2)
    picky = replace(CONFIG, least_improvement=0.4)
    for config, switches in ((greedy, True), (picky, False)):
        _, decisions = windows(TOY.controller(config), 0, 3, communication=4.0)
        assert isinstance(decisions[-1], Replan) == switches
    assert "below the 40% that a switch must gain" in decisions[-1].reason


def test_a_change_that_cannot_save_its_planning_is_not_planned_for() -> None:
    """An epoch's end sees 6%: of 1.5 s over 100 steps that is at most 9 s, of which a planning of 30 s leaves nothing."""
    slow = replace(TOY.controller(CONFIG), planning_s=30.0)
    for steps_left, planned in ((100, False), (10_000, True)):
        decision = slow.observe(seen(CHATTY, 0, communication=1.06, epoch_ended=True, steps_left=steps_left))[1]
        assert isinstance(decision, Keep)
        assert decision.planned is planned
        assert ("planning takes 30 s" in decision.reason) is not planned


def test_no_second_switch_within_the_settling_windows() -> None:
    """Right after a switch the links recover: the way back waits until more than `settle_windows` have passed."""
    hasty = replace(CONFIG, patience=1)
    for settle in (0, 2, 5):
        controller, decisions = windows(TOY.controller(replace(hasty, settle_windows=settle)), 0, 1, communication=4.0)
        assert isinstance(decisions[-1], Replan)
        _, decisions = windows(controller, 1, settle + 3)
        back = [number for number, decision in enumerate(decisions, start=1) if isinstance(decision, Replan)]
        assert back == [settle + 1]
        assert all("after a switch" in decision.reason for decision in decisions[:settle])


def test_the_end_of_an_epoch_is_enough_for_a_smaller_change() -> None:
    close = Toy((ToyPlan(0, 1.0, 1.0), ToyPlan(1, 1.05, 0.85)), cost_s=1.0)
    config = replace(CONFIG, least_improvement=0.0)
    for epoch_ended, change, planned in ((True, 1.1, True), (False, 1.1, False), (True, 1.04, False)):
        controller = close.controller(config)
        controller, decision = controller.observe(seen(close.plans[0], 0, communication=change, epoch_ended=epoch_ended))
        assert isinstance(decision, Replan) == planned


def test_a_slow_rank_counts_as_well_as_a_slow_link() -> None:
    controller = TOY.controller(CONFIG)
    for window in range(3):
        controller, decision = controller.observe(seen(CHATTY, window, compute=(1.0, 1.4)))
    assert isinstance(decision, Keep)
    assert decision.planned
    assert "computation of rank 1 40% longer" in decision.reason
    assert "still the best" in decision.reason
    assert controller.belief.rank_factor(0) == pytest.approx(1.0)
    assert controller.belief.rank_factor(1) == pytest.approx(1.4)


def test_communication_that_weighs_nothing_cannot_question_the_plan() -> None:
    light = Toy((ToyPlan(0, 1.0, 0.001), QUIET))
    controller = light.controller(CONFIG)
    for window in range(5):
        controller, decision = controller.observe(seen(light.plans[0], window, communication=5.0))
        assert isinstance(decision, Keep)
        assert not decision.planned
    for window in range(5, 8):
        controller, decision = controller.observe(seen(light.plans[0], window, communication=900.0))
    assert isinstance(decision, Keep)
    assert decision.planned


def test_a_change_is_noticed_where_it_makes_communication_light() -> None:
    """A recovering link shrinks the seconds by which it was noticed."""
    slow = Toy((ToyPlan(0, 1.0, 0.002), QUIET))
    controller = slow.controller(CONFIG)
    for window in range(3):
        controller, decision = controller.observe(seen(slow.plans[0], window, communication=100.0))
    assert isinstance(decision, Keep)
    assert decision.planned
    for window in range(3, 6):
        controller, decision = controller.observe(seen(slow.plans[0], window))
    assert isinstance(decision, Keep)
    assert decision.planned
    assert "99% shorter" in decision.reason


def test_probes_are_asked_for_before_planning_and_overrule_what_would_be_inferred() -> None:
    """All that is seen is a slow all_reduce; a probe says whether the other plan's communication is slow as well."""
    toy = Toy((ToyPlan(0, 1.0, 0.5), ToyPlan(1, 1.1, 0.5)))
    for factor, switches in ((1.0, True), (4.0, False)):
        controller, asked = toy.controller(replace(CONFIG, ask_probes=True)), []
        for window in range(2):
            controller, decision = controller.observe(seen(toy.plans[0], window, communication=4.0))
            assert isinstance(decision, Keep)
            asked.append(decision.probe)
        assert asked == [False, True]
        probes = {toy.plans[1].group: factor}
        controller, decision = controller.observe(seen(toy.plans[0], 2, communication=4.0, probes=probes))
        assert isinstance(decision, Replan) == switches
        assert isinstance(decision, Replan) or decision.planned


def test_a_driver_that_cannot_probe_is_waited_for_only_where_the_planning_was_not_foreseen() -> None:
    asking = replace(CONFIG, ask_probes=True)
    _, decisions = windows(TOY.controller(asking), 0, 3, communication=4.0)
    assert [type(decision) for decision in decisions] == [Keep, Keep, Replan]
    _, decisions = windows(TOY.controller(replace(asking, patience=1)), 0, 2, communication=4.0)
    assert [type(decision) for decision in decisions] == [Keep, Replan]
    assert isinstance(decisions[0], Keep)
    assert decisions[0].probe
    assert "probed first" in decisions[0].reason


def test_a_question_of_an_epochs_end_is_answered_one_window_later() -> None:
    toy = Toy((ToyPlan(0, 1.0, 1.0), ToyPlan(1, 1.0, 0.5)))
    controller = toy.controller(replace(CONFIG, ask_probes=True))
    controller, decision = controller.observe(seen(toy.plans[0], 0, communication=1.1, epoch_ended=True))
    assert isinstance(decision, Keep)
    assert decision.probe
    controller, decision = controller.observe(seen(toy.plans[0], 1, communication=1.1, probes={toy.plans[1].group: 1.0}))
    assert isinstance(decision, Replan)
    assert "epoch's end" in decision.reason


def test_a_change_outdates_what_was_known_of_unused_links() -> None:
    """After the switch to QUIET its communication recovers: so must what is believed of CHATTY's, unseen since."""
    controller, decisions = windows(TOY.controller(CONFIG), 0, 3, communication=4.0)
    assert isinstance(decisions[-1], Replan)
    assert controller.plan == QUIET.plan
    controller, _ = windows(controller, 3, 4, communication=4.0)
    assert controller.belief.communication_factor(CHATTY.group) == pytest.approx(4.0)
    controller, decisions = windows(controller, 7, 3)
    assert isinstance(decisions[-1], Replan)
    assert controller.plan == CHATTY.plan


def test_what_was_inferred_wrongly_of_unused_links_costs_one_way_back() -> None:
    """CHATTY's communication is slow and QUIET's is not. What is seen of one is inferred of the other, until it was wrong."""
    controller, plans = TOY.controller(CONFIG), []
    for window in range(60):
        running = TOY.toy_of(controller.plan)
        controller, _ = controller.observe(seen(running, window, communication=4.0 if running is CHATTY else 1.0))
        plans.append(controller.plan)
    switches = [plan for plan, before in zip(plans[1:], plans, strict=False) if plan != before]
    assert switches == [QUIET.plan, CHATTY.plan, QUIET.plan]
    assert plans[30:] == [QUIET.plan] * 30
    assert controller.belief.communication_factor(CHATTY.group) == pytest.approx(4.0)
    assert controller.belief.communication_factor(QUIET.group) == pytest.approx(1.0)


def test_a_failed_planning_keeps_the_plan_and_says_why() -> None:
    def nothing_fits(corrections: RunCorrections, current: Plan) -> PlanChoice:
        raise ScheduleError("no plan fits: rank 0 by 3 GiB")

    controller = replace(TOY.controller(CONFIG), plan_for=nothing_fits)
    controller, decisions = windows(controller, 0, 3, communication=4.0)
    decision = decisions[-1]
    assert isinstance(decision, Keep)
    assert decision.planned
    assert "planning failed: no plan fits: rank 0 by 3 GiB" in decision.reason
    assert controller.plan == CHATTY.plan
    _, again = windows(controller, 3, 5, communication=4.0)
    assert not any(isinstance(entry, Replan) or entry.planned for entry in again), "one question is asked once"


def test_equal_observations_give_equal_decisions() -> None:
    rng = np.random.default_rng(1)
    factors = np.exp(0.05 * rng.standard_normal((60, 3)))
    factors[20:, 2] *= 6.0
    courses = []
    for _ in range(2):
        controller, decisions = TOY.controller(replace(CONFIG, patience=1, settle_windows=0)), []
        for window, (rank0, rank1, links) in enumerate(factors.tolist()):
            toy = TOY.toy_of(controller.plan)
            controller, decision = controller.observe(
                seen(toy, window, compute=(rank0, rank1), communication=links, steps_left=9_000 - window)
            )
            decisions.append(decision)
        courses.append((decisions, controller.belief, controller.tracks))
    assert courses[0] == courses[1]
    assert any(isinstance(decision, Replan) for decision in courses[0][0])


@pytest.mark.parametrize("sigma", [0.03, 0.08])
def test_noise_alone_does_not_make_it_flap(sigma: float) -> None:
    """At most one switch in 2,000 windows, and a planning in fewer than one window of 20, although the plans are 10% apart."""
    toy = Toy((ToyPlan(0, 1.0, 0.5), ToyPlan(1, 1.3, 0.35)), cost_s=0.0)
    switches = plannings = 0
    for seed in range(10):
        rng, controller = np.random.default_rng(seed), toy.controller(CONFIG)
        for window, (rank0, rank1, links) in enumerate(np.exp(sigma * rng.standard_normal((200, 3))).tolist()):
            observation = seen(
                toy.toy_of(controller.plan),
                window,
                compute=(rank0, rank1),
                communication=links,
                epoch_ended=window % 20 == 19,
            )
            controller, decision = controller.observe(observation)
            plannings += isinstance(decision, Replan) or decision.planned
        switches += controller.switches
    assert switches <= 1
    assert plannings < 100


def test_observe_leaves_the_controller_it_was_asked_of_alone() -> None:
    before = TOY.controller(CONFIG)
    after, _ = before.observe(seen(CHATTY, 0, communication=2.0))
    assert before.tracks == {}
    assert before.belief == NO_RUN_CORRECTIONS
    assert after.belief != before.belief


def test_bad_input() -> None:
    controller, _ = TOY.controller(CONFIG).observe(seen(CHATTY, 4))
    with pytest.raises(ScheduleError, match=r"window 4 was observed after window 4"):
        controller.observe(seen(CHATTY, 4))
    with pytest.raises(ScheduleError, match="must be above 0"):
        controller.observe(replace(seen(CHATTY, 5), step_s=0.0))
    stranger = {CommunicationClass("broadcast", (0, 1)): 1.0}
    with pytest.raises(ScheduleError, match="no work of the current plan"):
        controller.observe(replace(seen(CHATTY, 5), seconds=stranger))
    with pytest.raises(ScheduleError, match=r"0 <= smoothing < 1, got 1.0"):
        ControllerConfig(smoothing=1.0)
    with pytest.raises(ScheduleError, match="patience"):
        ControllerConfig(patience=0)
    with pytest.raises(ScheduleError, match="margin must be >= 0"):
        ControllerConfig(margin=-1.0)
