"""A controller in simulated training: windows of steps on a machine that changes, against a fixed plan and an oracle.

The same Costs price the real course of events, with slower links in the topology and slower ranks, and the static engine
runs it. The controller observes it with noise. A plan's step in a window does not depend on earlier decisions. So a
scenario is a table of step times [windows, plans], and a policy is a path through it.

Leaves out: noise within a window, and steps that are interrupted by a change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from parsim.costs.observed import NO_RUN_CORRECTIONS, CommunicationClass, ComputeClass, RunCorrections, learn
from parsim.engines.program import mean_step_s
from parsim.errors import ScheduleError
from parsim.hardware.topology import Topology
from parsim.numeric import Floats
from parsim.plans.plan import Plan
from parsim.predict.evaluate import REPEATED_STEPS
from parsim.predict.problem import PlanningProblem
from parsim.search.adapt.controller import Controller, Keep, Observation, Replan, SwitchCost
from parsim.search.adapt.planning import PricedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """From window `first` up to, not including, window `end` (None: to the last), something takes `factor` times as long.

    Attributes:
        rank: whose computation is slow; None for links.
        link: the two ends ("gpu0", "gpu3") of the slow links; None (and no rank): all links.
    """

    factor: float
    first: int
    end: int | None = None
    rank: int | None = None
    link: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ScheduleError(f"a disturbance's factor must be finite and above 0, got {self.factor}")
        if self.rank is not None and self.link is not None:
            raise ScheduleError(f"a disturbance slows rank {self.rank} or link {self.link}, not both; use two disturbances")

    def active(self, window: int) -> bool:
        return self.first <= window and (self.end is None or window < self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningScenario:
    """Attributes:
    noise_sigma: relative spread of a window's seconds, drawn per window and rank; communication shares its ranks' draws.
    planning_s: seconds that training waits for whenever the planner is asked.
    probe_s: seconds at each epoch's end that time the communication of all candidate plans; None: there is no probing."""

    name: str
    windows: int
    steps_per_window: int
    windows_per_epoch: int
    disturbances: tuple[Disturbance, ...] = ()
    noise_sigma: float = 0.0
    planning_s: float = 0.0
    probe_s: float | None = None
    epoch_probes: bool = False

    def __post_init__(self) -> None:
        if min(self.windows, self.steps_per_window, self.windows_per_epoch) < 1:
            raise ScheduleError(
                f"scenario {self.name} needs at least 1 window, step per window and window per epoch, got {self.windows}, "
                f"{self.steps_per_window}, {self.windows_per_epoch}"
            )

    def active(self, window: int) -> tuple[Disturbance, ...]:
        return tuple(entry for entry in self.disturbances if entry.active(window))

    def epoch_ends(self, window: int) -> bool:
        return (window + 1) % self.windows_per_epoch == 0


def disturbed(problem: PlanningProblem, disturbances: Sequence[Disturbance]) -> PlanningProblem:
    """The problem on the machine as disturbed.

    Raises ScheduleError for a rank or link the machine has not, or for links where the profile prices communication without
    them (fits per group, as for gloo).
    """
    cluster = problem.cluster
    ranks = dict.fromkeys(range(cluster.size), 1.0)
    links = cluster.topology.links
    for entry in disturbances:
        if entry.rank is not None:
            if entry.rank not in ranks:
                raise ScheduleError(f"no rank {entry.rank} to disturb: the cluster has ranks 0 to {cluster.size - 1}")
            ranks[entry.rank] *= entry.factor
            continue
        if cluster.profile.communication.link_model is None:
            raise ScheduleError(f"profile {cluster.profile.name} prices communication by group, not by link; disturb ranks")
        ends = None if entry.link is None else set(entry.link)
        if ends is not None and not any(ends == {link.a, link.b} for link in links):
            raise ScheduleError(f"profile {cluster.profile.name} has no link {'-'.join(sorted(ends))}; name two joined devices")
        links = tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / entry.factor)
            if ends is None or ends == {link.a, link.b}
            else link
            for link in links
        )
    slow = any(factor != 1.0 for factor in ranks.values())
    return replace(
        problem,
        cluster=replace(cluster, topology=Topology(links=links)),
        corrections=RunCorrections(ranks=tuple(ranks.items())) if slow else problem.corrections,
    )


@dataclass(frozen=True, kw_only=True)
class PoolCourse:
    """One scenario with its noise, worked out for every plan of a pool.

    Attributes:
        step_s: float64 [windows, plans].
        state: int64 [windows], which state the machine is in. seconds: per plan float64 [states, units], each alone.
        shocks: float64 [windows, ranks, 2], standard normal: of computation and of communication.
    """

    scenario: TuningScenario
    pool: tuple[PricedPlan, ...]
    state: NDArray[np.int64]
    seconds: tuple[Floats, ...]
    shocks: Floats
    step_s: Floats

    @cached_property
    def place(self) -> dict[Plan, int]:
        return {entry.plan: number for number, entry in enumerate(self.pool)}

    @property
    def window_s(self) -> Floats:
        """float64 [windows, plans]: seconds of all steps of a window."""
        return self.step_s * self.scenario.steps_per_window

    def durations_s(self, window: int, plan: int) -> Floats:
        """float64 [tasks]: what the tasks of plan number `plan` take alone in a window."""
        entry = self.pool[plan]
        durations: Floats = _durations_s(
            entry, self.seconds[plan], self.state, self.shocks, self.scenario.noise_sigma, [window]
        )[0]
        return durations

    def observation(self, window: int, plan: int, *, probed: bool = False) -> Observation:
        """What the controller sees of a window under plan number `plan`."""
        scenario = self.scenario
        return Observation(
            window=window,
            steps_left=(scenario.windows - window - 1) * scenario.steps_per_window,
            step_s=float(self.step_s[window, plan]),
            seconds=self.pool[plan].observed(self.durations_s(window, plan)),
            epoch_ended=scenario.epoch_ends(window),
            probes=self.probe(window) if probed else NO_RUN_CORRECTIONS,
        )

    def probe(self, window: int) -> RunCorrections:
        """Factors of all communication of all plans of the pool, as timed in a window."""
        found: dict[CommunicationClass, float] = {}
        for number, entry in enumerate(self.pool):
            found.update(learn(entry.observed(self.durations_s(window, number)), entry.expected).communication)
        return RunCorrections(communication=tuple(found.items()))


def course_of(problem: PlanningProblem, scenario: TuningScenario, pool: Sequence[PricedPlan], seed: int) -> PoolCourse:
    """Price every window for every plan. Equal seeds give all plans the same noise. Raises as `disturbed`."""
    shocks = np.random.default_rng(seed).standard_normal((scenario.windows, problem.cluster.size, 2))
    states = [scenario.active(window) for window in range(scenario.windows)]
    machines = {active: disturbed(problem, active) for active in dict.fromkeys(states)}
    numbers = {active: number for number, active in enumerate(machines)}
    state = np.array([numbers[active] for active in states])
    seconds: list[Floats] = []
    step_s = np.empty((scenario.windows, len(pool)))
    for column, entry in enumerate(pool):
        units = entry.compiled.columns.units
        prices = [machine.price(units, entry.plan.mesh) for machine in machines.values()]
        seconds.append(np.array([[estimate.median_s for estimate in estimates] for estimates in prices]))
        durations = _durations_s(entry, seconds[-1], state, shocks, scenario.noise_sigma, range(scenario.windows))
        step_s[:, column] = mean_step_s(entry.compiled, durations, entry.overlap, steps=REPEATED_STEPS)
    return PoolCourse(scenario=scenario, pool=tuple(pool), state=state, seconds=tuple(seconds), shocks=shocks, step_s=step_s)


def _durations_s(
    entry: PricedPlan, seconds: Floats, state: NDArray[np.int64], shocks: Floats, sigma: float, windows: Sequence[int]
) -> Floats:
    """float64 [len(windows), tasks]: the seconds of each window's state with its noise, log-normal with mean 1."""
    rows = np.asarray(windows)
    loadings = _loadings(entry)
    exponent = shocks[rows, : entry.plan.world_size].reshape(len(rows), -1) @ loadings
    noise = np.exp(sigma * exponent - sigma**2 / 2 * loadings.any(axis=0))
    durations: Floats = (seconds[state[rows]] * noise)[:, entry.compiled.columns.unit]
    return durations


@lru_cache(maxsize=256)
def _loadings(entry: PricedPlan) -> Floats:
    """float64 [2 * ranks, units]: how much of each rank's two draws a unit takes; a group takes its ranks' in equal parts."""
    loadings = np.zeros((entry.plan.world_size, 2, len(entry.classes)))
    for unit, key in enumerate(entry.classes):
        match key:
            case ComputeClass():
                loadings[key.rank, 0, unit] = 1.0
            case CommunicationClass():
                loadings[list(key.ranks), 1, unit] = 1 / math.sqrt(len(key.ranks))
    return loadings.reshape(-1, len(entry.classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What a policy did and took.

    Attributes: plans: per window, numbers in the pool. total_s: training, planning, probing and switches.
        decisions: per window, of a controller.
    """

    plans: tuple[int, ...]
    total_s: float
    switches: int
    plannings: int = 0
    decisions: tuple[Keep | Replan, ...] = ()


def drive(course: PoolCourse, controller: Controller) -> Path:
    """Let a controller, which starts on one of the pool's plans, decide after every window. Raises as its `observe`."""
    scenario, window_s = course.scenario, course.window_s
    plan = course.place[controller.plan]
    plans: list[int] = []
    decisions: list[Keep | Replan] = []
    total_s, asked = 0.0, False
    for window in range(scenario.windows):
        plans.append(plan)
        total_s += float(window_s[window, plan])
        probed = scenario.probe_s is not None and (asked or (scenario.epoch_probes and scenario.epoch_ends(window)))
        controller, decision = controller.observe(course.observation(window, plan, probed=probed))
        decisions.append(decision)
        asked = isinstance(decision, Keep) and decision.probe
        if probed and scenario.probe_s is not None:
            total_s += scenario.probe_s
        if isinstance(decision, Replan):
            total_s += decision.cost_s
            plan = course.place[decision.plan]
        if decision.planned:
            total_s += scenario.planning_s
    return Path(
        plans=tuple(plans),
        total_s=total_s,
        switches=controller.switches,
        plannings=sum(entry.planned for entry in decisions),
        decisions=tuple(decisions),
    )


def stay(course: PoolCourse, plan: Plan) -> Path:
    """One plan from the first window to the last."""
    number = course.place[plan]
    return Path(plans=(number,) * course.scenario.windows, total_s=float(course.window_s[:, number].sum()), switches=0)


def best_static(course: PoolCourse) -> Path:
    """The one plan that turns out fastest over the whole scenario: chosen with hindsight, without a switch."""
    totals = course.window_s.sum(axis=0)
    return stay(course, course.pool[int(totals.argmin())].plan)


def oracle(course: PoolCourse, start: Plan, cost_s: SwitchCost) -> Path:
    """The fastest path of all that begin with `start`, known beforehand: a dynamic programme over windows and plans.

    It knows every window's noise and plans for nothing, so no controller can be faster.
    """
    plans = [entry.plan for entry in course.pool]
    costs = np.array([[0.0 if one == other else cost_s(one, other) for other in plans] for one in plans])
    window_s = course.window_s
    total = np.full(len(plans), np.inf)
    total[course.place[start]] = window_s[0, course.place[start]]
    came: list[NDArray[np.int64]] = []
    for window in range(1, course.scenario.windows):
        through = total[:, None] + costs
        came.append(through.argmin(axis=0))
        total = through.min(axis=0) + window_s[window]
    path = [int(total.argmin())]
    for before in reversed(came):
        path.append(int(before[path[-1]]))
    path.reverse()
    return Path(
        plans=tuple(path),
        total_s=float(total.min()),
        switches=sum(one != other for one, other in itertools.pairwise(path)),
    )
