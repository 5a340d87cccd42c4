"""How much a controller can lose against standing still when nothing is noisy.

In the toy world steps are linear in the factors and what is inferred of other plans is exact. Then a switch is never a mistake
by itself: it loses against staying only when the machine changes again, until that is noticed, and by what its rule tolerates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parsim.search.adapt.controller import ControllerConfig, Keep, Replan
from tests.adaptive_toy import Toy, ToyPlan, seen

WINDOWS, STEPS = 60, 50
FACTORS = (1.0, 1.5, 2.5, 6.0)
"""All further apart than any threshold drawn."""


@dataclass(frozen=True)
class Outcome:
    """Seconds per window under the controller and standing still; costs of switches by window."""

    under_s: list[float]
    staying_s: list[float]
    switched: dict[int, float]

    @property
    def total_s(self) -> float:
        return sum(self.under_s) + sum(self.switched.values())


def run(toy: Toy, config: ControllerConfig, states: list[tuple[float, float]], *, can_probe: bool) -> Outcome:
    controller = toy.controller(config)
    outcome = Outcome([], [], {})
    asked = False
    for window, (compute, links) in enumerate(states):
        truth = toy.truth(compute=compute, communication=links)
        current = toy.toy_of(controller.plan)
        outcome.under_s.append(STEPS * current.step_s(truth))
        outcome.staying_s.append(STEPS * toy.plans[0].step_s(truth))
        probes = {entry.group: links for entry in toy.plans} if asked and can_probe else {}
        observation = seen(
            current,
            window,
            compute=compute,
            communication=links,
            steps_left=STEPS * (WINDOWS - window - 1),
            epoch_ended=window % 15 == 14,
            probes=probes,
        )
        controller, decision = controller.observe(observation)
        asked = isinstance(decision, Keep) and decision.probe
        if isinstance(decision, Replan):
            outcome.switched[window] = decision.cost_s
    return outcome


SECONDS = st.floats(0.1, 3.0)
PLANS = st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=4)
CONFIGS = st.builds(
    ControllerConfig,
    smoothing=st.sampled_from((0.0, 0.5, 0.9)),
    threshold=st.sampled_from((0.05, 0.15, 0.25)),
    patience=st.integers(1, 5),
    epoch_threshold=st.sampled_from((0.02, 0.05)),
    least_share=st.just(0.0),
    least_improvement=st.sampled_from((0.0, 0.05, 0.2)),
    margin=st.sampled_from((1.0, 2.0)),
    settle_windows=st.integers(0, 4),
    ask_probes=st.booleans(),
)
STATE = st.tuples(st.sampled_from(FACTORS), st.sampled_from(FACTORS))


@pytest.mark.slow
@given(
    plans=PLANS, config=CONFIGS, cost_s=st.floats(0.0, 500.0), state=STATE, first=st.integers(0, WINDOWS), probe=st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_after_one_lasting_change_it_never_loses_against_staying(
    plans: list[tuple[float, float]],
    config: ControllerConfig,
    cost_s: float,
    state: tuple[float, float],
    first: int,
    probe: bool,
) -> None:
    """Without averaging: an epoch's end may otherwise ask for a plan while the average is half way to the new state."""
    config = replace(config, smoothing=0.0)
    toy = Toy(tuple(ToyPlan(number, *entry) for number, entry in enumerate(plans)), cost_s=cost_s)
    outcome = run(toy, config, [(1.0, 1.0)] * first + [state] * (WINDOWS - first), can_probe=probe)
    assert outcome.total_s <= sum(outcome.staying_s) + 1e-6


@example(
    plans=[(2.5, 0.5), (3.0, 0.375)],
    config=ControllerConfig(
        smoothing=0.0,
        patience=3,
        epoch_threshold=0.02,
        least_share=0.0,
        least_improvement=0.0,
        margin=1.0,
        settle_windows=0,
        ask_probes=False,
    ),
    cost_s=0.0,
    states=[(1.0, 6.0)],
    length=14,
    probe=False,
)
@given(
    plans=PLANS,
    config=CONFIGS,
    cost_s=st.floats(0.0, 500.0),
    states=st.lists(STATE, min_size=1, max_size=3),
    length=st.integers(12, 25),
    probe=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_after_every_change_it_loses_at_most_a_switch_the_delay_and_what_its_rule_tolerates(
    plans: list[tuple[float, float]],
    config: ControllerConfig,
    cost_s: float,
    states: list[tuple[float, float]],
    length: int,
    probe: bool,
) -> None:
    """Per change (and the start, which may not be on the best plan): one switch's cost, and `margin` times that where the
    way back does not pay; for the windows until it is noticed, the excess itself; and otherwise the relative gain below
    `least_improvement`.
    """
    toy = Toy(tuple(ToyPlan(number, *entry) for number, entry in enumerate(plans)), cost_s=cost_s)
    course = [state for state in [(1.0, 1.0), *states, (1.0, 1.0)] for _ in range(length)][:WINDOWS]
    course += [(1.0, 1.0)] * (WINDOWS - len(course))
    outcome = run(toy, config, course, can_probe=probe)
    changes = [window for window in range(1, WINDOWS) if course[window] != course[window - 1]]
    delay = config.patience + config.ask_probes + config.settle_windows + 1
    excess = [max(0.0, under - staying) for under, staying in zip(outcome.under_s, outcome.staying_s, strict=True)]
    noticing = {window for change in changes for window in range(change, min(change + delay, WINDOWS))}
    unnoticed = sum(excess[window] for window in noticing)
    tolerated = config.least_improvement / (1 - config.least_improvement) * sum(outcome.staying_s)
    per_change = (1 + config.margin) * cost_s
    bound = unnoticed + tolerated + (len(changes) + 1) * per_change
    assert outcome.total_s - sum(outcome.staying_s) <= bound + 1e-6
