"""The adaptive controller: after every window of training steps, keep the plan or take a better one.

A pure state machine: no clock, no input or output, no randomness. Equal observations give equal decisions, so the simulator's
scenarios and the real executor drive the same object, and every rank that is shown the same observations decides alike.

The rule (written for this project; the paper's Algorithm 1 says only that communication patterns "changed significantly"):
 1. Of every rank's computation and every class of communication the factor to the profile is averaged exponentially over
    the windows. A factor has changed if it deviates from the reference (the average at the last planning) by more than
    `threshold`, on one side, for `patience` windows in a row. Its average then starts anew from those windows.
 2. The plan is questioned when a factor has changed; and at the end of an epoch, when an average has moved by more than
    `epoch_threshold`. A change of communication outdates what was known of communication that the plan does not use.
 3. With `ask_probes`, measurements of such communication are asked for one window before a planning is due; where that could
    not be foreseen, the planning waits for one window.
 4. A new plan must pass two tests. It is predicted at least `least_improvement` faster than the current one *under the
    same factors*, so a common error cancels. And over the remaining steps it saves more than `margin` times the cost of
    the switch.
 5. After a switch, `settle_windows` windows pass before the next one.

Leaves out: the recovery of an unused link is not noticed, though a driver may give probes at any window. The seconds of
planning itself are not counted. There is no forecast: the last observed state is assumed to last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from parsim.costs.feedback.run_corrections import NO_RUN_CORRECTIONS, ClassSeconds, CommunicationClass, RunCorrections, learn
from parsim.errors import CostError, PlanError, ScheduleError
from parsim.plans.plan import Plan
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
    ask_probes: before planning, ask for probes of communication the plan does not use; a driver that cannot probe may lose
        a window by it.
    """

    smoothing: float = 0.9
    threshold: float = 0.4
    patience: int = 2
    epoch_threshold: float = 0.05
    least_share: float = 0.01
    least_improvement: float = 0.1
    margin: float = 1.0
    settle_windows: int = 2
    ask_probes: bool = True

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
        probes: factors (measured over the profile's seconds) of communication timed on purpose beside the training. Of what
            the plan uses itself, the training's own seconds count instead.
    """

    window: int
    steps_left: int
    step_s: float
    seconds: ClassSeconds
    epoch_ended: bool = False
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
    """

    reason: str
    planned: bool = False
    probe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Go on with `plan`. Attributes: saving_s: over all steps left, before the switch's cost_s is taken off."""

    plan: Plan
    step_s: float
    saving_s: float
    cost_s: float
    reason: str


PlanFor = Callable[[RunCorrections, Plan], PlanChoice]
"""The best plan under corrections, beside the current one. Raises ScheduleError or CostError where there is none."""

SwitchCost = Callable[[Plan, Plan], float]
"""Seconds that training stands still when it goes from one plan to another."""


FactorKey = int | CommunicationClass
"""A rank's computation, or a class of communication."""


class Track(NamedTuple):
    """What is known of one factor: its moving average over `windows`, and over the last |streak| windows, all beyond the
    threshold on one side (streak > 0: slower), the mean `recent`."""

    average: float
    windows: int
    streak: int = 0
    recent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Controller:
    """State of the controller; `observe` returns the next one.

    Attributes:
        plan, expected: what is running, and the profile's seconds of its work by class.
        tracks: what is known of every factor. reference: the averages at the last planning.
        question: why a planning is due with the next window. asked: probes were asked for with the last decision.
        last_window, last_switch: numbers of windows.
    """

    config: ControllerConfig
    plan_for: PlanFor
    switch_cost_s: SwitchCost
    plan: Plan
    expected: ClassSeconds
    tracks: Mapping[FactorKey, Track] = field(default_factory=dict)
    reference: RunCorrections = NO_RUN_CORRECTIONS
    question: str = ""
    asked: bool = False
    last_window: int | None = None
    last_switch: int | None = None
    switches: int = 0

    @property
    def belief(self) -> RunCorrections:
        """The averaged factors."""
        return RunCorrections(
            ranks=tuple((key, track.average) for key, track in self.tracks.items() if isinstance(key, int)),
            communication=tuple((key, track.average) for key, track in self.tracks.items() if not isinstance(key, int)),
        )

    def observe(self, seen: Observation) -> tuple[Controller, Keep | Replan]:
        """Take in one window and decide.

        Raises:
            ScheduleError: windows out of order, a step time that is not above 0, or nothing observed that the plan does.
        """
        self._check(seen)
        learnt = learn(seen.seconds, self.expected).factors()
        if not learnt:
            raise ScheduleError("the observation has no work of the current plan; build it from the current plan's own graph")
        probed = {key: factor for key, factor in seen.probes.factors().items() if key not in learnt}
        weighty = {key for key in learnt if self._weighs(key, seen)}
        fresh = {
            **{key: self._track(key, factor, key in weighty) for key, factor in learnt.items()},
            **{key: Track(average=factor, windows=1) for key, factor in probed.items()},
        }
        tracks = {**self.tracks, **fresh}
        why = self._why(tracks, learnt, weighty, probed, seen.epoch_ended)
        state = replace(self, tracks=tracks, last_window=seen.window, question="", asked=False)
        config = self.config
        if not why:
            soon = config.ask_probes and any(0 < config.patience - 1 <= abs(fresh[key].streak) for key in learnt)
            reason = f"no lasting change: {self._largest(tracks, weighty | probed.keys())}"
            return replace(state, asked=soon), Keep(reason=reason, probe=soon)
        since = config.settle_windows + 1 if self.last_switch is None else seen.window - self.last_switch
        if since <= config.settle_windows:
            soon = config.ask_probes and since == config.settle_windows
            reason = f"{why}; but it is window {since} after a switch, and {config.settle_windows} must pass"
            return replace(state, asked=soon), Keep(reason=reason, probe=soon)
        if seen.steps_left <= 0:
            return state, Keep(reason=f"{why}; but no steps are left")
        if config.ask_probes and not seen.probes and not self.asked:
            reason = f"{why}; other plans' communication is probed first"
            return replace(state, question=why, asked=True), Keep(reason=reason, probe=True)
        changed = any(not isinstance(key, int) and abs(tracks[key].streak) >= config.patience for key in learnt)
        if changed:
            kept = {key: track for key, track in tracks.items() if isinstance(key, int) or key in fresh}
            state = replace(state, tracks=kept)
        return state._plan_again(seen, why)

    def _before(self, key: FactorKey) -> float:
        """The factor that the last planning reckoned with."""
        return self.reference.rank_factor(key) if isinstance(key, int) else self.reference.communication_factor(key)

    def _weighs(self, key: FactorKey, seen: Observation) -> bool:
        """Whether a change of the factor can matter to the step: before it or after it."""
        if isinstance(key, int):
            return True
        seconds = max(seen.seconds[key], self.expected[key] * self._before(key))
        return seconds >= self.config.least_share * seen.step_s

    def _track(self, key: FactorKey, factor: float, weighty: bool) -> Track:
        """The track after one more window."""
        old = self.tracks.get(key, Track(average=factor, windows=0))
        change = factor / self._before(key) - 1
        streak, recent = 0, 0.0
        if weighty and abs(change) > self.config.threshold:
            side = 1 if change > 0 else -1
            going_on = old.streak * side > 0
            streak = old.streak + side if going_on else side
            recent = old.recent + (factor - old.recent) / abs(streak) if going_on else factor
        if abs(streak) >= self.config.patience:
            return Track(average=recent, windows=abs(streak), streak=streak, recent=recent)
        weight = max(1 - self.config.smoothing, 1 / (old.windows + 1))
        return Track(
            average=old.average + weight * (factor - old.average), windows=old.windows + 1, streak=streak, recent=recent
        )

    def _why(
        self,
        tracks: Mapping[FactorKey, Track],
        learnt: Iterable[FactorKey],
        weighty: Set[FactorKey],
        probed: Iterable[FactorKey],
        epoch_ended: bool,
    ) -> str:
        """Why the plan is in question, or nothing."""
        lasting = [key for key in learnt if abs(tracks[key].streak) >= self.config.patience]
        if lasting:
            windows = max(abs(tracks[key].streak) for key in lasting)
            return f"changed for {windows} window{'s' if windows > 1 else ''}: {self._largest(tracks, lasting)}"
        if self.question:
            return self.question
        if epoch_ended:
            moved = [key for key in weighty if self._moved(tracks, key) > self.config.epoch_threshold]
            moved += [key for key in probed if self._moved(tracks, key) > self.config.threshold]
            if moved:
                return f"changed by the epoch's end: {self._largest(tracks, moved)}"
        return ""

    def _moved(self, tracks: Mapping[FactorKey, Track], key: FactorKey) -> float:
        return abs(tracks[key].average / self._before(key) - 1)

    def _largest(self, tracks: Mapping[FactorKey, Track], keys: Iterable[FactorKey]) -> str:
        """The change of the factor among `keys` that has moved most, in words."""
        changes = {key: tracks[key].average / self._before(key) - 1 for key in sorted(keys, key=str)}
        key = max(changes, key=lambda name: abs(changes[name]), default=None)
        if key is None:
            return "nothing of weight was seen"
        what = f"computation of rank {key}" if isinstance(key, int) else str(key)
        return f"{what} {100 * abs(changes[key]):.0f}% {'longer' if changes[key] > 0 else 'shorter'}"

    def _plan_again(self, seen: Observation, why: str) -> tuple[Controller, Keep | Replan]:
        """Ask the planner. Its answer is about the present belief: that is the new reference, and streaks begin anew."""
        belief = self.belief
        tracks = {key: track._replace(streak=0, recent=0.0) for key, track in self.tracks.items()}
        considered = replace(self, reference=belief, tracks=tracks)
        try:
            choice = self.plan_for(belief, self.plan)
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
        saves = f"it saves {format_seconds(saving_s)} over the {seen.steps_left} steps left"
        sums = f"{saves}, the switch costs {format_seconds(cost_s)}"
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


def _same(one: Plan, other: Plan) -> bool:
    """Equal but for the name of the family it was found in."""
    return replace(one, strategy="custom") == replace(other, strategy="custom")
