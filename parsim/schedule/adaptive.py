"""The adaptive controller: after every window of training steps, keep the plan or take a better one.

A pure state machine: no clock, no input or output, no randomness. Equal observations give equal decisions, so the simulator's
scenarios and the real executor drive the same object, and every rank that is shown the same observations decides alike.

The rule (written for this project; the paper's Algorithm 1 says only that communication patterns "changed significantly"):
 1. The factors by which the machine differs from its profile are averaged exponentially over the windows.
 2. The plan is questioned when a factor has moved by more than `threshold` from where it was at the last planning, for
    `patience` windows in a row; at the end of an epoch, when it has moved by more than `epoch_threshold`.
 3. A new plan is taken when it is predicted at least `least_improvement` faster than the current one *under the same factors*
    (so that an error common to both predictions cancels), and saves over the steps left more than `margin` times what
    the switch costs.
 4. After a switch, `settle_windows` windows pass before the next one.

Leaves out: that a link nobody uses is not seen to recover (give such measurements as `probes`), the seconds that planning itself
takes, and any forecast: what was last seen is taken to last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from parsim.costs.corrected import (
    NO_CORRECTIONS,
    ClassSeconds,
    CommunicationClass,
    Corrections,
    averaged,
    learn,
)
from parsim.errors import CostError, PlanError, ScheduleError
from parsim.plan.plan import Plan
from parsim.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Attributes:
    smoothing: share of the old value in the moving average of a factor, 0 (only the last window counts) to below 1.
    threshold: relative change of a factor that questions the plan.
    patience: windows in a row that must exceed the threshold.
    epoch_threshold: relative change that is enough at the end of an epoch.
    least_share: communication that takes less than this share of the step cannot question the plan.
    least_improvement: least relative gain of step time worth a switch.
    margin: how many times its cost a switch must save over the steps left.
    settle_windows: windows after a switch in which there is no other.
    """

    smoothing: float = 0.9
    threshold: float = 0.15
    patience: int = 3
    epoch_threshold: float = 0.05
    least_share: float = 0.01
    least_improvement: float = 0.05
    margin: float = 1.0
    settle_windows: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ScheduleError(f"smoothing is the old value's share in an average: 0 <= smoothing < 1, got {self.smoothing}")
        if self.patience < 1 or self.settle_windows < 0:
            raise ScheduleError(
                f"patience ({self.patience}) must be at least 1 window and settle_windows ({self.settle_windows}) at least 0"
            )
        for name in ("threshold", "epoch_threshold", "least_share", "least_improvement", "margin"):
            if not getattr(self, name) >= 0:
                raise ScheduleError(f"{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one window of steps under the current plan has shown.

    Attributes:
        window: its number, rising from observation to observation. steps_left: training steps after it.
        step_s: mean seconds of a step. seconds: mean seconds per step by class of work.
        epoch_ended: the window ends an epoch.
        probes: factors (measured over the profile's seconds) of communication timed on purpose beside the training.
    """

    window: int
    steps_left: int
    step_s: float
    seconds: ClassSeconds
    epoch_ended: bool = False
    probes: Corrections = NO_CORRECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A planner's answer.

    Attributes:
        plan, step_s: the best plan under the corrections asked for, and its seconds per step under them.
        current_step_s: the current plan's, under the same corrections.
        expected: the best plan's seconds per step by class of work, under the *profile*.
    """

    plan: Plan
    step_s: float
    current_step_s: float
    expected: ClassSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Go on as before. `planned`: a planner was asked, so this decision took the seconds of a planning."""

    reason: str
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Go on with `plan`. Attributes: saving_s: over all steps left, before the switch's cost_s is taken off."""

    plan: Plan
    step_s: float
    saving_s: float
    cost_s: float
    reason: str


PlanFor = Callable[[Corrections, Plan], Choice]
"""The best plan under corrections, beside the current one. Raises ScheduleError or CostError where there is none."""

SwitchCost = Callable[[Plan, Plan], float]
"""Seconds that training stands still when it goes from one plan to another."""


@dataclass(frozen=True, kw_only=True)
class Controller:
    """State of the controller; `observe` returns the next one.

    Attributes:
        plan, expected: what is running, and the profile's seconds of its work by class.
        belief: averaged factors. reference: the belief at the last planning.
        streak: windows in a row beyond the threshold. last_window, last_switch: numbers of windows.
    """

    config: ControllerConfig
    plan_for: PlanFor
    switch_cost_s: SwitchCost
    plan: Plan
    expected: ClassSeconds
    belief: Corrections = NO_CORRECTIONS
    reference: Corrections = NO_CORRECTIONS
    streak: int = 0
    last_window: int | None = None
    last_switch: int | None = None
    switches: int = 0

    def observe(self, seen: Observation) -> tuple[Controller, Keep | Replan]:
        """Take in one window and decide.

        Raises:
            ScheduleError: windows out of order, a step time that is not above 0, or nothing observed that the plan does.
        """
        self._check(seen)
        learnt = learn(seen.seconds, self.expected)
        if not learnt:
            raise ScheduleError("the observation has no work of the current plan; build it from the current plan's own graph")
        config = self.config
        belief = averaged(averaged(self.belief, learnt, config.smoothing), seen.probes, config.smoothing)
        change, what = _largest_change(belief, self.reference, learnt, seen, config.least_share)
        streak = self.streak + 1 if change > config.threshold else 0
        state = replace(self, belief=belief, streak=streak, last_window=seen.window)
        moved = f"{what} by {100 * change:.0f}%" if what else "nothing"
        if streak >= config.patience:
            why = f"changed for {streak} windows: {moved}"
        elif seen.epoch_ended and change > config.epoch_threshold:
            why = f"changed at the epoch's end: {moved}"
        else:
            return state, Keep(reason=f"no lasting change (largest: {moved}; {streak} of {config.patience} windows)")
        if self.last_switch is not None and seen.window - self.last_switch <= config.settle_windows:
            settling = f"{seen.window - self.last_switch} of {config.settle_windows} windows since the last switch"
            return state, Keep(reason=f"{why}; but {settling}")
        if seen.steps_left <= 0:
            return state, Keep(reason=f"{why}; but no steps are left")
        return state._plan_again(seen, why)

    def _plan_again(self, seen: Observation, why: str) -> tuple[Controller, Keep | Replan]:
        """Ask the planner. Whatever it says was said of the present belief, which is the new reference."""
        considered = replace(self, reference=self.belief, streak=0)
        try:
            choice = self.plan_for(self.belief, self.plan)
        except (ScheduleError, CostError, PlanError) as error:
            return considered, Keep(reason=f"{why}; but planning failed: {error}", planned=True)
        now = f"measured step {format_seconds(seen.step_s)}, predicted {format_seconds(choice.current_step_s)}"
        if _same(choice.plan, self.plan):
            return considered, Keep(reason=f"{why}; {now}; the plan is still the best", planned=True)
        gain = 1 - choice.step_s / choice.current_step_s
        offer = f"{choice.plan.summary()} is predicted at {format_seconds(choice.step_s)} ({100 * gain:.1f}% less)"
        if gain < self.config.least_improvement:
            floor = f"below the {100 * self.config.least_improvement:g}% that a switch must gain"
            return considered, Keep(reason=f"{why}; {now}; {offer}: {floor}", planned=True)
        saving_s = (choice.current_step_s - choice.step_s) * seen.steps_left
        cost_s = self.switch_cost_s(self.plan, choice.plan)
        sums = (
            f"it saves {format_seconds(saving_s)} over the {seen.steps_left} steps left, the switch costs {format_seconds(cost_s)}"
        )
        if not saving_s > self.config.margin * cost_s:
            times = f", and must save {self.config.margin:g} times that" if self.config.margin != 1 else ""
            return considered, Keep(reason=f"{why}; {now}; {offer}; {sums}{times}", planned=True)
        switched = replace(
            considered, plan=choice.plan, expected=choice.expected, last_switch=seen.window, switches=self.switches + 1
        )
        reason = f"{why}; {now}; {offer}; {sums}"
        return switched, Replan(plan=choice.plan, step_s=choice.step_s, saving_s=saving_s, cost_s=cost_s, reason=reason)

    def _check(self, seen: Observation) -> None:
        if self.last_window is not None and seen.window <= self.last_window:
            raise ScheduleError(
                f"window {seen.window} was observed after window {self.last_window}; number the windows as they come"
            )
        if not (math.isfinite(seen.step_s) and seen.step_s > 0):
            raise ScheduleError(f"the mean step of window {seen.window} is {seen.step_s} s; it must be above 0")


def _largest_change(
    belief: Corrections, reference: Corrections, learnt: Corrections, seen: Observation, least_share: float
) -> tuple[float, str]:
    """The largest relative change of what was just seen and matters against the reference, and its name."""
    largest, name = 0.0, ""
    now = belief.factors()
    for key in {**learnt.factors(), **seen.probes.factors()}:
        if isinstance(key, CommunicationClass):
            if key not in seen.probes.factors() and seen.seconds[key] < least_share * seen.step_s:
                continue
            before, text = reference.communication_factor(key), str(key)
        else:
            before, text = reference.rank_factor(key), f"computation of rank {key}"
        change = abs(now[key] / before - 1)
        if change > largest:
            largest, name = change, f"{text} {'slower' if now[key] > before else 'faster'}"
    return largest, name


def _same(one: Plan, other: Plan) -> bool:
    """Equal but for the name of the family it was found in."""
    return replace(one, strategy="custom") == replace(other, strategy="custom")
