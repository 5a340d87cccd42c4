"""How long a change of the machine is going to last, from how long it has lasted and how long earlier ones did.

Durations of one kind of state (calm, or changed) are taken as exponential, at a rate θ of which little is known: the prior is
θ^(tail - 1). States that have ended, and the one that is going on, make the posterior a gamma distribution. So the remaining
steps R have a Lomax distribution: P(R > r) = (1 + r / seen)^-(tail + ended), `seen` the steps of all states of the kind.

With nothing known yet and tail 2, a change that has lasted t steps is expected to last t more. A switch then pays once it would
have saved its cost and that of the way back: the rule of ski rental, which loses at most as much again to whoever knows the
future. With tail 1 it lasts t more with a chance of one half, and 0 expects it to last to the end.

Leaves out: states that follow a timetable, and that long changes may have another cause than short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from parsim.costs.observed import ClassSeconds, CommunicationClass, learn
from parsim.errors import ScheduleError


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
