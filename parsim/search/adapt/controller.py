"""The adaptive controller: after every window of training steps, keep the plan or take a better one.

A pure state machine: no clock, no input or output, no randomness. Equal observations give equal decisions, so the simulator's
scenarios and the real executor drive the same object, and every rank that is shown the same observations decides alike.

The rule (written for this project; the paper's Algorithm 1 says only that communication patterns "changed significantly"):
 1. Of every rank's computation and every class of communication the factor to the profile is averaged exponentially over
    the windows. A factor has changed if it deviates from the reference (the average at the last planning) by more than
    `threshold`, on one side, for `patience` windows in a row. So has one that is `sudden` times as long or as short for
    `sudden_steps` steps in a row (`after_steps`). Its average then starts anew from those windows or steps.
 2. The plan is questioned when a factor has changed; and at the end of an epoch, when an average has moved by more than
    `epoch_threshold`. A change of communication outdates what was known of communication that the plan does not use. One
    that was there when the communication was first seen does so once: the machine may have changed meanwhile. If it comes
    again, what had been inferred of that communication was wrong.
 3. With `ask_probes`, measurements of such communication are asked for one window before a planning is due; where that could
    not be foreseen, the planning waits for one window.
 4. A new plan must pass two tests. It is predicted at least `least_improvement` faster than the current one *under the
    same factors*, so a common error cancels. And over the remaining steps it saves more than `margin` times the cost of
    the switch, and of the way back where the change ends before the run.
 5. A change is expected to last as `Lasting` says. An offer that would pay only if it lasts longer waits, and is weighed
    again after every window of the same change. What was there from the first window on is not a change: it lasts to the end.
 6. Nothing is planned for a change that could not save the seconds of planning over the steps left.
 7. After a switch, `settle_windows` windows pass before the next one.

Leaves out: the recovery of an unused link is not noticed, though a driver may give probes at any window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from parsim.costs.observed import NO_RUN_CORRECTIONS, ClassSeconds, CommunicationClass, RunCorrections, learn
from parsim.errors import CostError, PlanError, ScheduleError
from parsim.plans.plan import Plan
from parsim.units import format_seconds

# How long a change of the machine is going to last, from how long it has lasted and how long earlier ones did.
#
# Durations of one kind of state (calm, or changed) are taken as exponential, at a rate θ of which little is known: the prior is
# θ^(tail - 1). States that have ended, and the one that is going on, make the posterior a gamma distribution. So the remaining
# steps R have a Lomax distribution: P(R > r) = (1 + r / seen)^-(tail + ended), `seen` the steps of all states of the kind.
#
# With nothing known yet and tail 2, a change that has lasted t steps is expected to last t more. A switch then pays once it
# would have saved its cost and that of the way back: the rule of ski rental, which loses at most as much again to whoever knows
# the future. With tail 1 it lasts t more with a chance of one half, and 0 expects it to last to the end.
#
# Leaves out: states that follow a timetable, and that long changes may have another cause than short ones.


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """What is known of the durations of one kind of state.

    Attributes:
        tail: of the prior; 0: a state lasts to the end, until one has ended. ended: how many have ended. steps: that those
            lasted, together.
    """

    tail: float
    ended: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tail) and self.tail >= 0):
            raise ScheduleError(f"duration_tail is an exponent of at least 0 (0: a change lasts to the end), got {self.tail}")

    def with_ended(self, lasted: int) -> Lasting:
        """After one more has ended. Args: lasted: its steps."""
        return replace(self, ended=self.ended + 1, steps=self.steps + lasted)

    def expected_steps(self, lasted: int, left: int) -> float:
        """How many of the `left` steps of the run a state that has lasted `lasted` steps is expected to go on for."""
        if not self.tail + self.ended:
            return float(left)
        scale, shape = self.steps + lasted, self.tail + self.ended
        if not scale:
            return 0.0
        if abs(shape - 1) < 1e-9:
            return scale * math.log1p(left / scale)
        return scale / (shape - 1) * -math.expm1((1 - shape) * math.log1p(left / scale))

    def ends_within(self, lasted: int, left: int) -> float:
        """The chance that a state that has lasted `lasted` steps ends within `left` more."""
        if not self.tail + self.ended:
            return 0.0
        scale = self.steps + lasted
        return -math.expm1(-(self.tail + self.ended) * math.log1p(left / scale)) if scale else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineHistory:
    """The states that a machine goes through: home (as the run began) and away from it. The clock is the steps left.

    Attributes:
        home, away: what is known of how long either lasts. is_away: where the machine is. since: steps left when that began;
            None: before the run, so that its end tells no duration.
        change: one that is noticed and not answered yet.
    """

    home: Lasting
    away: Lasting
    is_away: bool = False
    since: int | None = None
    change: MachineChange | None = None

    def noticed(self, change: MachineChange) -> MachineHistory:
        """The state that a change ends is over, unless the change was there from the first window on."""
        if change.since is None or self.since is None:
            return replace(self, change=change)
        return replace(self._ended(self.is_away, self.since - change.since), change=change)

    def passed(self, left: int) -> MachineHistory:
        """The noticed change was over with `left` steps left, before anything was done about it."""
        change = self.change
        if change is None or change.since is None:
            return replace(self, change=None)
        return replace(self._ended(change.is_away, change.since - left), change=None, since=left)

    def answered(self) -> MachineHistory:
        """The noticed change is the state that later ones are compared with."""
        change = self.change
        if change is None or change.since is None:
            return replace(self, change=None)
        return replace(self, change=None, is_away=change.is_away, since=change.since)

    def remaining(self, left: int) -> tuple[float, float]:
        """Steps that the noticed change is expected to go on for, and the chance that it ends before the run, `left` steps."""
        change = self.change
        if change is None or change.since is None:
            return float(left), 0.0
        known, lasted = self.away if change.is_away else self.home, change.since - left
        return known.expected_steps(lasted, left), known.ends_within(lasted, left)

    def _ended(self, is_away: bool, lasted: int) -> MachineHistory:
        if is_away:
            return replace(self, away=self.away.with_ended(lasted))
        return replace(self, home=self.home.with_ended(lasted))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineChange:
    """Attributes: since: steps left when it began; None: it was there in the first window. is_away: from home, or back."""

    since: int | None
    is_away: bool


def history(tail: float) -> MachineHistory:
    """Before the first window. Calm is expected to last until one that began in the run has ended.

    Args:
        tail: of the belief about states away from home (`Lasting`).
    """
    return MachineHistory(home=Lasting(tail=0.0), away=Lasting(tail=tail))


# A change so large that a few steps show it.
#
# Waiting for two windows is right for a change that noise could feign. One that makes communication twenty times as long is
# as certain after three steps, and every step that passes before the answer costs what the change costs.


FactorKey = int | CommunicationClass
"""A rank's computation, or a class of communication."""


class StepsInARow(NamedTuple):
    """The latest |steps| steps in a row, all beyond the limit on one side (steps > 0: slower). `mean`: of their factors."""

    steps: int
    mean: float


def after_steps(
    runs: Mapping[FactorKey, StepsInARow],
    steps: Sequence[ClassSeconds],
    expected: ClassSeconds,
    weighty: Set[FactorKey],
    before: Callable[[FactorKey], float],
    limit: float,
) -> dict[FactorKey, StepsInARow]:
    """The runs after some more steps; a factor whose last step was within the limit has none.

    Args:
        runs: before these steps. steps: seconds by class of each. expected: the profile's seconds by class.
        weighty: the factors that can matter. before: what a factor is compared with.
        limit: above 1; a step is beyond it with at least `limit` times the factor before, or at most 1 / `limit` of it.
    """
    runs_now = {key: run for key, run in runs.items() if key in weighty}
    for step in steps:
        factors = learn(step, expected).factors()
        for key in weighty:
            factor = factors.get(key)
            if factor is None:
                continue
            side = 1 if factor >= limit * before(key) else -1 if factor * limit <= before(key) else 0
            run = runs_now.pop(key, None)
            if side:
                going_on = run is not None and run.steps * side > 0
                count, mean = (run.steps, run.mean) if run is not None and going_on else (0, 0.0)
                runs_now[key] = StepsInARow(count + side, mean + (factor - mean) / (abs(count) + 1))
    return runs_now


# What goes into the adaptive controller, and what comes out of it.


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
    duration_tail: how soon changes are expected to pass (`Lasting`); 0: never.
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


class Track(NamedTuple):
    """What is known of one factor: its moving average over `windows`, and over the last |streak| windows, all beyond the
    threshold on one side (streak > 0: slower), the mean `recent`. `since`: steps left when the streak began; None: it was there
    when the factor was first seen."""

    average: float
    windows: int
    streak: int = 0
    recent: float = 0.0
    since: int | None = None


class Offer(NamedTuple):
    """A plan that pays only if the change of these factors lasts longer than is expected yet."""

    keys: Set[FactorKey]
    choice: PlanChoice


@dataclass(frozen=True, kw_only=True)
class Controller:
    """State of the controller; `observe` returns the next one.

    Attributes:
        plan, expected: what is running, and the profile's seconds of its work by class.
        tracks: what is known of every factor. reference: the averages at the last planning.
        question: why a planning is due with the next window. asked: probes were asked for with the last decision.
        last_window, last_switch: numbers of windows. last_left: steps left after the last window.
        early_looks: since the last switch; they have numbers, and are not windows.
        home: the factors that the run began with. history: which changes there were, and how long they lasted.
        offer: waits for the present change to have lasted. planning_s: that training waits for a planning.
        contradicted: communication whose first sight has once belied what had been inferred of it.
        runs: the latest steps in a row that were as far from the reference as a sudden change is.
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
    early_looks: int = 0
    last_left: int | None = None
    switches: int = 0
    home: RunCorrections = NO_RUN_CORRECTIONS
    history: MachineHistory | None = None
    offer: Offer | None = None
    planning_s: float = 0.0
    contradicted: Set[FactorKey] = frozenset()
    runs: Mapping[FactorKey, StepsInARow] = field(default_factory=dict)

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
        config = self.config
        runs = after_steps(self.runs, seen.steps, self.expected, weighty, self._before, config.sudden)
        sudden = self._sudden(runs)
        if seen.early and not sudden:
            reason = f"an early look: no sudden change for {config.sudden_steps} steps"
            state = replace(self, runs=runs, last_window=seen.window, early_looks=self.early_looks + 1)
            return state, Keep(reason=reason, look_after=self._look_after(runs))
        shown = sudden.keys() if seen.early else learnt.keys()
        fresh = {
            **{key: self._track(key, learnt[key], key in weighty) for key in shown if key not in sudden},
            **{key: self._sudden_track(key, run, seen) for key, run in sudden.items()},
            **{key: Track(average=factor, windows=1) for key, factor in probed.items()},
        }
        tracks = {**self.tracks, **fresh}
        lasting = {key for key in shown if abs(tracks[key].streak) >= config.patience}
        followed = self._follow(tracks, lasting, seen.steps_left)
        why = followed._why(tracks, lasting, sudden, weighty, probed, seen.epoch_ended)
        state = replace(
            followed,
            tracks=tracks,
            last_window=seen.window,
            last_left=seen.steps_left,
            question="",
            asked=False,
            runs=runs,
            early_looks=self.early_looks + seen.early,
        )
        if not why:
            soon = config.ask_probes and any(0 < config.patience - 1 <= abs(fresh[key].streak) for key in learnt)
            reason = f"no lasting change: {self._largest(tracks, weighty | probed.keys())}"
            return replace(state, asked=soon), Keep(reason=reason, probe=soon, look_after=self._look_after(runs))
        since = config.settle_windows + 1 if self.last_switch is None else seen.window - self.last_switch - self.early_looks
        if since <= config.settle_windows:
            soon = config.ask_probes and since == config.settle_windows
            reason = f"{why}; but it is window {since} after a switch, and {config.settle_windows} must pass"
            return replace(state, asked=soon), Keep(reason=reason, probe=soon)
        if seen.steps_left <= 0:
            return state, Keep(reason=f"{why}; but no steps are left")
        at_stake_s = self._most_moved(tracks, weighty | probed.keys()) * seen.step_s * seen.steps_left
        if at_stake_s <= config.margin * self.planning_s and not self.question and not self._waits_for(lasting):
            stake = f"{format_seconds(at_stake_s)} over the {seen.steps_left} steps left"
            reason = f"{why}; but that is at most {stake}, and planning takes {format_seconds(self.planning_s)}"
            return state, Keep(reason=reason)
        if config.ask_probes and not seen.probes and not self.asked and not state._waits_for(lasting):
            reason = f"{why}; other plans' communication is probed first"
            return replace(state, question=why, asked=True), Keep(reason=reason, probe=True)
        changing = (
            {key for key in learnt if tracks[key].streak} if seen.epoch_ended else set()
        )  # an epoch's end waits for nothing
        return state._outdated(lasting | changing, learnt.keys() | probed.keys())._plan_again(seen, why, lasting)

    def _sudden(self, runs: Mapping[FactorKey, StepsInARow]) -> dict[FactorKey, StepsInARow]:
        """The runs that are long enough, of factors that had not changed for long enough by their windows."""
        waiting = {key for key, track in self.tracks.items() if abs(track.streak) >= self.config.patience}
        return {key: run for key, run in runs.items() if abs(run.steps) >= self.config.sudden_steps and key not in waiting}

    def _look_after(self, runs: Mapping[FactorKey, StepsInARow]) -> int:
        """Steps until what has begun would be a sudden change; 0: nothing has."""
        begun = max((abs(run.steps) for run in runs.values()), default=0)
        return max(0, self.config.sudden_steps - begun) if begun else 0

    def _outdated(self, lasting: Set[FactorKey], fresh: Set[FactorKey]) -> Controller:
        """Without what was known of communication that this window did not show, where a change casts doubt on it."""
        changed = {key for key in lasting if not isinstance(key, int)}
        at_first_sight = {key for key in changed if self.tracks[key].since is None}
        if not changed - at_first_sight and at_first_sight <= self.contradicted:
            return self
        kept = {key: track for key, track in self.tracks.items() if isinstance(key, int) or key in fresh}
        return replace(self, tracks=kept, contradicted=self.contradicted | at_first_sight)

    def _follow(self, tracks: Mapping[FactorKey, Track], lasting: Set[FactorKey], left: int) -> Controller:
        """The course of the machine after one more window, in which these factors had changed for long enough."""
        now = self.history or history(self.config.duration_tail)
        if not lasting and now.change is not None:
            return replace(
                self, history=now.passed(left if self.last_left is None else self.last_left), offer=None, question=""
            )
        if lasting and now.change is None:
            began = [tracks[key].since for key in lasting]
            earliest = None if None in began else max(left for left in began if left is not None)
            now = now.noticed(MachineChange(since=earliest, is_away=any(self._is_away(tracks[key], key) for key in lasting)))
        return replace(self, history=now)

    def _is_away(self, track: Track, key: FactorKey) -> bool:
        """Whether a factor is far from what it was when the run began."""
        return abs(track.recent / _factor(self.home, key) - 1) > self.config.threshold

    def _before(self, key: FactorKey) -> float:
        """The factor that the last planning reckoned with."""
        return _factor(self.reference, key)

    def _weighs(self, key: FactorKey, seen: Observation) -> bool:
        """Whether a change of the factor can matter to the step: before it or after it."""
        if isinstance(key, int):
            return True
        seconds = max(seen.seconds[key], self.expected[key] * self._before(key))
        return seconds >= self.config.least_share * seen.step_s

    def _sudden_track(self, key: FactorKey, run: StepsInARow, seen: Observation) -> Track:
        """The track after a run of steps that is long enough."""
        count, patience = abs(run.steps), self.config.patience
        before = key in self.tracks or count < len(seen.steps)
        return Track(
            average=run.mean,
            windows=patience,
            streak=patience if run.steps > 0 else -patience,
            recent=run.mean,
            since=seen.steps_left + count if before else None,
        )

    def _track(self, key: FactorKey, factor: float, weighty: bool) -> Track:
        """The track after one more window."""
        old = self.tracks.get(key, Track(average=factor, windows=0))
        change = factor / self._before(key) - 1
        streak, recent, since = 0, 0.0, None
        if weighty and abs(change) > self.config.threshold:
            side = 1 if change > 0 else -1
            going_on = old.streak * side > 0
            streak = old.streak + side if going_on else side
            recent = old.recent + (factor - old.recent) / abs(streak) if going_on else factor
            since = old.since if going_on else self.last_left if old.windows else None
        if abs(streak) >= self.config.patience:
            return Track(average=recent, windows=abs(streak), streak=streak, recent=recent, since=since)
        weight = max(1 - self.config.smoothing, 1 / (old.windows + 1))
        average = old.average + weight * (factor - old.average)
        return Track(average=average, windows=old.windows + 1, streak=streak, recent=recent, since=since)

    def _why(
        self,
        tracks: Mapping[FactorKey, Track],
        lasting: Set[FactorKey],
        sudden: Mapping[FactorKey, StepsInARow],
        weighty: Set[FactorKey],
        probed: Iterable[FactorKey],
        epoch_ended: bool,
    ) -> str:
        """Why the plan is in question, or nothing."""
        if lasting:
            windows = max(abs(tracks[key].streak) for key in lasting)
            span = f"{windows} window{'s' if windows > 1 else ''}"
            if lasting <= sudden.keys():
                span = f"{max(abs(run.steps) for run in sudden.values())} steps"
            return f"changed for {span}: {self._largest(tracks, lasting)}"
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

    def _most_moved(self, tracks: Mapping[FactorKey, Track], keys: Iterable[FactorKey]) -> float:
        """The largest relative change: no step has become longer, or could be shorter, by more."""
        return max((self._moved(tracks, key) for key in keys), default=0.0)

    def _largest(self, tracks: Mapping[FactorKey, Track], keys: Iterable[FactorKey]) -> str:
        """The change of the factor among `keys` that has moved most, in words."""
        changes = {key: tracks[key].average / self._before(key) - 1 for key in sorted(keys, key=str)}
        key = max(changes, key=lambda name: abs(changes[name]), default=None)
        if key is None:
            return "nothing of weight was seen"
        what = f"computation of rank {key}" if isinstance(key, int) else str(key)
        return f"{what} {100 * abs(changes[key]):.0f}% {'longer' if changes[key] > 0 else 'shorter'}"

    def _plan_again(self, seen: Observation, why: str, lasting: Set[FactorKey]) -> tuple[Controller, Keep | Replan]:
        """Ask the planner. Its answer is about the present belief: that is the new reference, and streaks begin anew."""
        waiting = self._waits_for(lasting)
        considered = self._considered()
        try:
            choice = self.offer.choice if self.offer is not None and waiting else self.plan_for(self.belief, self.plan)
        except (ScheduleError, CostError, PlanError) as error:
            return considered, Keep(reason=f"{why}; but planning failed: {error}", planned=True)
        now = f"measured step {format_seconds(seen.step_s)}, predicted {format_seconds(choice.current_step_s)}"
        if choice.plan.program == self.plan.program:
            return considered, Keep(reason=f"{why}; {now}; the plan is still the best", planned=True)
        gain = 1 - choice.step_s / choice.current_step_s
        offer = f"{choice.plan.summary()} is predicted at {format_seconds(choice.step_s)} ({100 * gain:.1f}% less)"
        if gain < self.config.least_improvement:
            floor = f"below the {100 * self.config.least_improvement:g}% that a switch must gain"
            return considered, Keep(reason=f"{why}; {now}; {offer}: {floor}", planned=True)
        weighed = self._weighed(choice, seen.steps_left)
        reason = f"{why}; {now}; {offer}; {weighed.words}"
        if weighed.pays:
            switched = replace(
                considered,
                plan=choice.plan,
                expected=choice.expected,
                last_switch=seen.window,
                early_looks=0,
                switches=self.switches + 1,
            )
            return switched, Replan(
                plan=choice.plan,
                step_s=choice.step_s,
                saving_s=weighed.saving_s,
                cost_s=weighed.cost_s,
                reason=reason,
                planned=not waiting,
            )
        times = f", and must save {self.config.margin:g} times that" if self.config.margin != 1 else ""
        if weighed.would_pay:
            waits = replace(self, offer=Offer(frozenset(lasting), choice))
            return waits, Keep(reason=f"{reason}{times}; it waits for the change to last", planned=not waiting)
        return considered, Keep(reason=f"{reason}{times}", planned=not waiting)

    def _waits_for(self, lasting: Set[FactorKey]) -> bool:
        return self.offer is not None and self.offer.keys == lasting

    def _considered(self) -> Controller:
        """With the present belief as what later windows are compared with."""
        assert self.history is not None
        tracks = {key: track._replace(streak=0, recent=0.0, since=None) for key, track in self.tracks.items()}
        change = self.history.change
        home = self.belief if change is not None and change.since is None else self.home
        return replace(
            self, reference=self.belief, tracks=tracks, history=self.history.answered(), home=home, offer=None, runs={}
        )

    def _weighed(self, choice: PlanChoice, left: int) -> _Weighed:
        """What a switch saves while the change lasts, beside its cost and that of the way back."""
        assert self.history is not None
        steps, passes = self.history.remaining(left)
        gain_s, margin = choice.current_step_s - choice.step_s, self.config.margin
        cost_s = self.switch_cost_s(self.plan, choice.plan)
        back_s = passes * self.switch_cost_s(choice.plan, self.plan) if passes else 0.0
        span = f"{steps:.0f} of the {left} steps left, while the change should last" if passes else f"the {left} steps left"
        words = f"it saves {format_seconds(gain_s * steps)} over {span}, the switch costs {format_seconds(cost_s)}"
        return _Weighed(
            saving_s=gain_s * steps,
            cost_s=cost_s,
            pays=gain_s * steps > margin * (cost_s + back_s),
            would_pay=bool(passes) and gain_s * left > margin * cost_s,
            words=f"{words} and the way back {format_seconds(back_s)}" if passes else words,
        )

    def _check(self, seen: Observation) -> None:
        if self.last_window is not None and seen.window <= self.last_window:
            raise ScheduleError(
                f"window {seen.window} was observed after window {self.last_window}; number the windows in order"
            )
        if not (math.isfinite(seen.step_s) and seen.step_s > 0):
            raise ScheduleError(f"the mean step of window {seen.window} is {seen.step_s} s; it must be above 0")


class _Weighed(NamedTuple):
    """`would_pay`: if the change lasted to the end."""

    saving_s: float
    cost_s: float
    pays: bool
    would_pay: bool
    words: str


def _factor(corrections: RunCorrections, key: FactorKey) -> float:
    return corrections.rank_factor(key) if isinstance(key, int) else corrections.communication_factor(key)
