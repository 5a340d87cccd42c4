"""The controller, driven with plain values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.costs.costs import Costs, price
from parsim.costs.observed import (
    NO_RUN_CORRECTIONS,
    CommunicationClass,
    ComputeClass,
    RunCorrections,
    WorkClass,
    class_of,
    class_seconds,
    learn,
)
from parsim.errors import CostError, ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.problem import PlanningProblem
from parsim.search.adapt.controller import (
    Controller,
    ControllerConfig,
    Keep,
    Observation,
    PlanChoice,
    Replan,
    StepsInARow,
    after_steps,
)
from parsim.search.stages import balanced_plan
from parsim.work import Collective, Compute, LoadBatch, OptimizerStep, Phase, SendRecv, Work
from tests.adaptive_toy import Toy, ToyPlan, seen
from tests.models import chain_model

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


# A change so large that a few steps show it: the controller, driven step by step as a run drives it.

COSTLY_TOY = Toy((CHATTY, QUIET), cost_s=1.0)
WINDOW = 5
WITHOUT_PROBES = ControllerConfig(ask_probes=False)


def look(controller: Controller, number: int, factors: Sequence[float], *, fresh: int, left: int, early: bool) -> Observation:
    """Of a window's steps so far, `fresh` of them new. Args: factors: of communication, by step."""
    toy = COSTLY_TOY.toy_of(controller.plan)
    single = [seen(toy, 0, communication=factor).seconds for factor in factors[len(factors) - fresh :]]
    mean = seen(toy, number, communication=float(np.mean(factors)), steps_left=left)
    return replace(mean, steps=tuple(single), early=early)


def trained(
    factors: Sequence[float], *, config: ControllerConfig = WITHOUT_PROBES, window: int = WINDOW
) -> list[tuple[int, Keep | Replan]]:
    """What a run decides after which steps: looks at each window's end and wherever one was asked for.

    Args: factors: of communication, by step; until a change of plan.
    """
    controller, decisions = COSTLY_TOY.controller(config), []
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
    by_windows = trained(factors, config=replace(WITHOUT_PROBES, sudden=1e9))[-1]
    assert isinstance(by_windows[1], Replan)
    assert by_windows[0] - calm > WINDOW


def test_the_factor_is_that_of_the_slow_steps_alone() -> None:
    controller = COSTLY_TOY.controller(WITHOUT_PROBES)
    for number in range(4):
        controller, _ = controller.observe(look(controller, number, [1.0] * 5, fresh=5, left=200, early=False))
    controller, decision = controller.observe(look(controller, 4, [1.0, 1.0, 18.0, 20.0, 22.0], fresh=5, left=100, early=False))
    assert isinstance(decision, Replan)
    assert controller.reference.communication_factor(CHATTY.group) == pytest.approx(20.0)


@pytest.mark.parametrize(("calm", "left"), [(0, None), (1, 104), (2, 103)])
def test_what_was_there_from_the_first_step_on_has_no_beginning(calm: int, left: int | None) -> None:
    """So it lasts to the end. What began in the first window is a change like any other."""
    controller = COSTLY_TOY.controller(replace(WITHOUT_PROBES, least_improvement=1.0))
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
    controller = COSTLY_TOY.controller(WITHOUT_PROBES)
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
def test_bad_sudden_changes(fault: dict[str, float]) -> None:
    with pytest.raises(ScheduleError, match=r"sudden \(.*\) must be a factor above 1 and sudden_steps"):
        replace(WITHOUT_PROBES, **fault)


def test_early_looks_are_no_windows_to_settle_in() -> None:
    """Three early looks in the window after a switch do not end the settling: two whole windows must pass."""
    controller = replace(COSTLY_TOY.controller(WITHOUT_PROBES), last_switch=0, last_window=0)
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


# What a run teaches about costs, and how it changes prices.

MODEL = chain_model((4e9,) * 8, elements=2_000_000)
CLUSTER = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
FORWARD = Compute(component="c0", phase=Phase.FORWARD, samples=8)


def group(operation: str, *ranks: int) -> CommunicationClass:
    return CommunicationClass(operation, ranks)


def test_classes_of_work() -> None:
    assert class_of(FORWARD, 3) == ComputeClass(3, "c0", Phase.FORWARD)
    assert class_of(OptimizerStep(elements=5, tensors=1), 2) == ComputeClass(2, "", Phase.OPTIMIZER)
    assert class_of(Collective(operation="all_reduce", group=(2, 0, 1), size_bytes=8), 0) == group("all_reduce", 0, 1, 2)
    assert class_of(SendRecv(source=3, destination=1, size_bytes=8), 3) == group("send_recv", 3, 1)
    assert class_of(LoadBatch(samples=8, size_bytes=8), 0) is None
    assert [str(class_of(work, 1)) for work in (FORWARD, OptimizerStep(elements=5, tensors=1))] == [
        "forward c0 on rank 1",
        "optimizer on rank 1",
    ]
    assert str(group("send_recv", 3, 1)) == "send_recv 3>1"
    assert str(group("all_reduce", 0, 1)) == "all_reduce over 0,1"


def test_seconds_are_summed_by_class() -> None:
    transfer = SendRecv(source=0, destination=1, size_bytes=8)
    totals = class_seconds(
        [
            (FORWARD, 0, 1.0),
            (FORWARD, 1, 2.0),
            (FORWARD, 0, 3.0),
            (transfer, 0, 0.5),
            (LoadBatch(samples=1, size_bytes=1), 0, 9.0),
        ]
    )
    assert totals == {
        ComputeClass(0, "c0", Phase.FORWARD): 4.0,
        ComputeClass(1, "c0", Phase.FORWARD): 2.0,
        group("send_recv", 0, 1): 0.5,
    }


def test_a_ranks_factor_weighs_its_classes_by_their_seconds() -> None:
    """3 s of which 2 took 1.5 times as long, and 1 s as expected: 4/3. What only one side names teaches nothing."""
    long, short = ComputeClass(0, "a", Phase.FORWARD), ComputeClass(0, "b", Phase.FORWARD)
    unknown, free = ComputeClass(1, "a", Phase.FORWARD), group("all_reduce", 0)
    expected = {long: 2.0, short: 1.0, group("all_reduce", 0, 1): 0.5, free: 0.0}
    learnt = learn({long: 3.0, short: 1.0, unknown: 7.0, group("all_reduce", 0, 1): 2.0, free: 1.0}, expected)
    assert learnt == RunCorrections(ranks=((0, 4 / 3),), communication=((group("all_reduce", 0, 1), 4.0),))


def test_what_was_not_observed_is_inferred_from_slowest_link_and_median() -> None:
    known = RunCorrections(
        ranks=((0, 1.0), (1, 1.5), (2, 1.0)),
        communication=(
            (group("send_recv", 0, 1), 3.0),
            (group("send_recv", 1, 2), 1.1),
            (group("all_reduce", 2, 3, 4, 5), 2.0),
            (group("all_reduce", 2, 3, 4, 5, 6), 1.8),
        ),
    )
    assert [known.rank_factor(rank) for rank in (0, 1, 7)] == [1.0, 1.5, 1.0]
    assert known.communication_factor(group("send_recv", 1, 2)) == 1.1, "as observed"
    assert known.communication_factor(group("all_reduce", 0, 1, 2)) == 3.0, "as slow as the slowest transfer inside"
    assert known.communication_factor(group("send_recv", 3, 4)) == 1.8, "no slower than the fastest group around it"
    assert known.communication_factor(group("all_gather", 2, 3, 4, 5)) == 2.0, "another operation over the same ranks"
    assert known.communication_factor(group("send_recv", 6, 7)) == pytest.approx(1.9), "the median of all"
    assert NO_RUN_CORRECTIONS.communication_factor(group("send_recv", 6, 7)) == 1.0
    assert NO_RUN_CORRECTIONS.rank_factor(3) == 1.0
    assert not NO_RUN_CORRECTIONS


def test_equal_corrections_are_equal_values_in_any_order() -> None:
    one = RunCorrections(ranks=((1, 2.0), (0, 1.0)))
    other = RunCorrections(ranks=((0, 1.0), (1, 2.0)))
    one.communication_factor(group("send_recv", 0, 1))
    assert one == other
    assert hash(one) == hash(other)
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(CostError, match="rank 3 is"):
            RunCorrections(ranks=((3, factor),))


def test_costs_multiply_and_say_so() -> None:
    corrections = RunCorrections(
        ranks=((0, 1.0), (1, 1.25), (2, 1.0), (3, 1.0)), communication=((group("all_reduce", 0, 1, 2, 3), 3.0),)
    )
    plain, now = (Costs(model=MODEL, cluster=CLUSTER, corrections=entry) for entry in (NO_RUN_CORRECTIONS, corrections))
    reduce = Collective(operation="all_reduce", group=(0, 1, 2, 3), size_bytes=1 << 20)
    load = LoadBatch(samples=8, size_bytes=1 << 20)
    cases: list[tuple[Work, int, float]] = [(FORWARD, 0, 1.0), (FORWARD, 1, 1.25), (reduce, 0, 3.0), (load, 1, 1.0)]
    for work, rank, factor in cases:
        before, after = plain.estimate(work, rank), now.estimate(work, rank)
        assert after.median_s == pytest.approx(factor * before.median_s, rel=1e-12)
        assert after.parameters == before.parameters
        assert (after.detail == before.detail) == (factor == 1.0)
    assert "3 times that, as observed" in now.estimate(reduce, 0).detail


def test_a_price_is_not_shared_between_ranks_of_different_speed() -> None:
    corrections = RunCorrections(ranks=((0, 1.0), (1, 2.0), (2, 1.0), (3, 1.0)))
    costs = Costs(model=MODEL, cluster=CLUSTER, corrections=corrections)
    first, second, third = price([(FORWARD, 0), (FORWARD, 1), (FORWARD, 2)], costs)
    assert second.median_s == pytest.approx(2 * first.median_s)
    assert third is first
    assert costs.device_kind(0) == costs.device_kind(2) != costs.device_kind(1)


def test_a_slow_rank_gets_a_smaller_stage() -> None:
    problem = PlanningProblem(model=MODEL, cluster=CLUSTER, global_batch=64)
    slow = replace(problem, corrections=RunCorrections(ranks=((0, 1.0), (1, 1.0), (2, 3.0), (3, 1.0))))
    sizes = [
        [
            len(stage.components)
            for stage in balanced_plan(question, "mp", Mesh(pp=4), microbatches=8, pipeline_order="1f1b").stages
        ]
        for question in (problem, slow)
    ]
    assert sizes[1][2] < sizes[0][2]
    assert sum(sizes[1]) == sum(sizes[0])
