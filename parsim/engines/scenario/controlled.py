"""Training under a scenario with a controller in the loop: after every window of steps it may change the plan.

The controller is a value handed in; this module knows its protocol and nothing of plans. A step is simulated once for every
state of the machine in which something runs. A window moves from change to change of the machine, not from task to task. With
jitter every window is simulated anew. Where a link that is down stops the step, the window waits until the link is back.

Leaves out: a change of the machine within a step (the step in which it falls is still the old one), and failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from parsim.costs.estimate import OverlapFactors
from parsim.engines.dynamic import run_program
from parsim.engines.program import by_step, steps_in_a_row
from parsim.engines.scenario.scenario import Scenario, check_places, conditions_for, jittered_s
from parsim.errors import ScenarioError, StandstillError
from parsim.hardware.cluster import Cluster
from parsim.numeric import Floats
from parsim.program.columns import Columns

STEPS_SIMULATED = 4
"""Steps in a row whose mean stands for a step of a state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunnableStep:
    """One way to train a step: its graph, and float64 [tasks] of seconds that its tasks take alone on the quiet machine."""

    name: str
    columns: Columns
    durations_s: Floats
    overlap: OverlapFactors = field(default_factory=OverlapFactors)


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowSeen:
    """What a window has shown.

    Attributes:
        number: counted from 0. steps_left: after it. step_s: the mean. task_s: float64 [tasks], mean seconds of every task from
            when all it needs is ready.
        probed: what was asked for with the last decision: other runnables, and float64 [tasks] of one step of each.
    """

    number: int
    running: RunnableStep
    steps_left: int
    step_s: float
    task_s: Floats
    epoch_ended: bool = False
    probed: tuple[tuple[RunnableStep, Floats], ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """Go on, and try one step of each of `of` at the end of the next window, which takes `cost_s`."""

    of: tuple[RunnableStep, ...]
    cost_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """Go on with `to`, after `cost_s` in which training stands still."""

    to: RunnableStep
    cost_s: float
    reason: str


class WindowController(Protocol):
    """Whatever decides after a window. It may keep state, and must depend only on the windows it receives."""

    def observe(self, seen: WindowSeen) -> Change | Probe | None:
        """A change, a wish to know more, or None to go on as before."""


@dataclass(frozen=True, kw_only=True)
class Controlled:
    """Attributes: total_s: steps, probes and changes. window_s, names: per window, its steps and what ran.
    changes: (after which window, why)."""

    total_s: float
    window_s: tuple[float, ...]
    names: tuple[str, ...]
    changes: tuple[tuple[int, str], ...]


def run_controlled(
    first: RunnableStep,
    controller: WindowController,
    scenario: Scenario,
    cluster: Cluster,
    *,
    windows: int,
    steps_per_window: int,
    windows_per_epoch: int | None = None,
) -> Controlled:
    """Train so many windows from the scenario's `start_s` on. The same arguments give the same result.

    Raises ScenarioError for fewer than one window or step, a rank or link that is not there, or a link that is down
    for good (StandstillError); else as `run_program`.
    """
    if windows < 1 or steps_per_window < 1:
        raise ScenarioError(f"a controlled run needs windows >= 1 and steps_per_window >= 1, got {windows}, {steps_per_window}")
    check_places(scenario, cluster.size, cluster)
    machine = _Machine(scenario, cluster)
    running, now_s = first, scenario.start_s
    window_s: list[float] = []
    names: list[str] = []
    changes: list[tuple[int, str]] = []
    probe: Probe | None = None
    for window in range(windows):
        seconds, task_s = machine.window(running, now_s, steps_per_window)
        now_s += seconds
        window_s.append(seconds)
        names.append(running.name)
        probed = tuple((entry, machine.step(entry, now_s)[1]) for entry in probe.of) if probe else ()
        now_s += probe.cost_s if probe else 0.0
        decision = controller.observe(
            WindowSeen(
                number=window,
                running=running,
                steps_left=(windows - window - 1) * steps_per_window,
                step_s=seconds / steps_per_window,
                task_s=task_s,
                epoch_ended=windows_per_epoch is not None and (window + 1) % windows_per_epoch == 0,
                probed=probed,
            )
        )
        probe = decision if isinstance(decision, Probe) else None
        if isinstance(decision, Change):
            running = decision.to
            now_s += decision.cost_s
            changes.append((window, decision.reason))
    return Controlled(total_s=now_s - scenario.start_s, window_s=tuple(window_s), names=tuple(names), changes=tuple(changes))


class _Machine:
    """The cluster in its scenario, and the steps that were simulated on it."""

    def __init__(self, scenario: Scenario, cluster: Cluster) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._known: dict[tuple[int, Scenario], tuple[RunnableStep, float, Floats]] = {}
        self._rng = np.random.default_rng(scenario.seed)
        self._varied = bool(scenario.jitter.compute_sigma or scenario.jitter.communication_sigma)

    def window(self, running: RunnableStep, now_s: float, steps: int) -> tuple[float, Floats]:
        """Seconds of so many steps from now on, and the mean seconds of their tasks."""
        begun_s = now_s
        total: Floats = np.zeros(running.columns.size)
        left = steps
        while left:
            until_s = next((time for time in self._scenario.change_times_s if time > now_s), math.inf)
            try:
                step_s, task_s = self.step(running, now_s)
            except StandstillError:
                if math.isinf(until_s):
                    raise
                now_s = until_s
                continue
            count = left if math.isinf(until_s) or step_s == 0 else min(left, max(1, math.ceil((until_s - now_s) / step_s)))
            now_s += count * step_s
            total += count * task_s
            left -= count
        return now_s - begun_s, total / steps

    def step(self, running: RunnableStep, now_s: float) -> tuple[float, Floats]:
        """Seconds of a step in the state of the machine at a time, and those of its tasks."""
        now = self._scenario.at(now_s)
        key = id(running), now
        if key in self._known:
            return self._known[key][1:]
        columns = running.columns
        rows = jittered_s(running.durations_s, columns, now.jitter, self._rng, STEPS_SIMULATED)
        program = steps_in_a_row(columns, running.overlap, steps=STEPS_SIMULATED)
        reduced = now.model_copy(
            update={"stragglers": tuple(entry for entry in now.stragglers if entry.rank < columns.world_size)}
        )
        conditions = conditions_for(reduced, columns, self._cluster)
        done = run_program(program, by_step(rows), varying=True, overlap=running.overlap, conditions=conditions, record=True)
        step_s = done.makespan_s / STEPS_SIMULATED
        task_s: Floats = (done.end_s - done.start_s).reshape(STEPS_SIMULATED, columns.size).mean(axis=0)
        if not self._varied:
            self._known[key] = running, step_s, task_s
        return step_s, task_s
