"""What goes into the adaptive controller, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parsim.costs.feedback.run_corrections import NO_RUN_CORRECTIONS, ClassSeconds, RunCorrections
from parsim.errors import ScheduleError
from parsim.plans.plan import Plan
from parsim.schedule.live.durations import history


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Attributes:
    smoothing: share of the old value in the moving average of a factor, 0 (only the last window counts) to below 1.
    threshold: relative change of a factor that questions the plan.
    patience: windows in a row that must exceed the threshold.
    sudden: how many times as long, or as short, a factor must have become to question the plan after `sudden_steps` steps in a
        row. Three times three steps are as much evidence (the sum of logarithms) as 1.4 times two windows of five.
    epoch_threshold: relative change that is enough at the end of an epoch.
    least_share: communication that takes less than this share of the step cannot question the plan.
    least_improvement: least relative gain of step time worth a switch.
    margin: how many times its cost a switch must save over the steps left.
    settle_windows: windows after a switch in which there is no other.
    duration_tail: how soon changes are expected to pass (`durations.Lasting`); 0: never.
    ask_probes: before planning, ask for probes of communication the plan does not use; a driver that cannot probe may lose
        a window by it.
    """

    smoothing: float = 0.9
    threshold: float = 0.4
    patience: int = 2
    sudden: float = 3.0
    sudden_steps: int = 3
    epoch_threshold: float = 0.05
    least_share: float = 0.01
    least_improvement: float = 0.1
    margin: float = 1.0
    settle_windows: int = 2
    duration_tail: float = 2.0
    ask_probes: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ScheduleError(f"smoothing is the old value's share in an average: 0 <= smoothing < 1, got {self.smoothing}")
        if self.patience < 1 or self.settle_windows < 0:
            raise ScheduleError(
                f"patience ({self.patience}) must be at least 1 window and settle_windows ({self.settle_windows}) at least 0"
            )
        if not self.sudden > 1 or self.sudden_steps < 1:
            raise ScheduleError(
                f"sudden ({self.sudden}) must be a factor above 1 and sudden_steps ({self.sudden_steps}) at least 1"
            )
        for name in ("threshold", "epoch_threshold", "least_share", "least_improvement", "margin"):
            if not getattr(self, name) >= 0:
                raise ScheduleError(f"{name} must be >= 0, got {getattr(self, name)}")
        history(self.duration_tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one window of steps under the current plan has shown.

    Attributes:
        window: its number, rising from observation to observation. steps_left: training steps after it.
        step_s: mean seconds of a step. seconds: mean seconds per step by class of work.
        epoch_ended: the window ends an epoch.
        steps: seconds by class of each step since the last look, in order; empty where single steps are not known.
        early: a look before the window's end, that an earlier decision asked for. Only sudden changes are judged by it.
        probes: factors (measured over the profile's seconds) of communication timed on purpose beside the training. Of what
            the plan uses itself, the training's own seconds count instead.
    """

    window: int
    steps_left: int
    step_s: float
    seconds: ClassSeconds
    epoch_ended: bool = False
    steps: Sequence[ClassSeconds] = ()
    early: bool = False
    probes: RunCorrections = NO_RUN_CORRECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
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
    """Go on as before.

    Attributes:
        planned: a planner was asked, so this decision took the seconds of a planning.
        probe: the plan is in question: time the communication of other plans and give it with the next observation (with
            none, the controller infers it).
        look_after: steps after which an early look would tell whether a change has begun; 0: not before the window's end.
    """

    reason: str
    planned: bool = False
    probe: bool = False
    look_after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Go on with `plan`.

    Attributes:
        saving_s: as long as the change is expected to last, before the switch's cost_s is taken off.
        planned: a planner was asked now; False: the offer had waited.
    """

    plan: Plan
    step_s: float
    saving_s: float
    cost_s: float
    reason: str
    planned: bool = True


PlanFor = Callable[[RunCorrections, Plan], PlanChoice]
"""The best plan under corrections, beside the current one. Raises ScheduleError or CostError where there is none."""

SwitchCost = Callable[[Plan, Plan], float]
"""Seconds that training stands still when it goes from one plan to another."""
