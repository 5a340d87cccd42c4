"""The inputs of an adaptive controller: a planner, the cost of a switch, and observations made from timelines.

Two planners: `search_planner` searches all families anew under the corrections; `pool_planner` prices a list of plans that were
lowered before, in milliseconds, which is what thousands of simulated windows need.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from parsim.costs.estimate import OverlapFactors, medians_s
from parsim.costs.observed import (
    NO_RUN_CORRECTIONS,
    ClassSeconds,
    CommunicationClass,
    RunCorrections,
    WorkClass,
    class_of,
    class_seconds,
    task_durations_s,
)
from parsim.engines import static
from parsim.engines.program import mean_step_s
from parsim.engines.static import CompiledGraph, checked_slowdown
from parsim.errors import CostError, PlanError, ScheduleError
from parsim.model.model import Model
from parsim.numeric import Floats
from parsim.plans.plan import Plan
from parsim.predict.evaluate import REPEATED_STEPS, Evaluation, evaluate
from parsim.predict.memory import NOT_TENSORS
from parsim.predict.problem import PlanningProblem
from parsim.program.buckets import HeldParameter, hold
from parsim.program.taskgraph import TaskGraph
from parsim.search.adapt.controller import Controller, ControllerConfig, Observation, PlanChoice, PlanFor, SwitchCost
from parsim.search.families import FAMILIES
from parsim.search.search import search
from parsim.units import format_bytes, format_seconds
from parsim.work import SendRecv


def seconds_by_class(graph: TaskGraph, seconds: Floats) -> dict[WorkClass, float]:
    """Seconds per step of a graph's work by class.

    Args:
        graph: of the plan. seconds: float64 [tasks], such as `task_durations_s` reads off a Timeline.
    """
    return class_seconds(
        (task.work, task.resources[0].rank, taken) for task, taken in zip(graph.tasks, seconds.tolist(), strict=True)
    )


def observation_of(
    graph: TaskGraph,
    per_task_seconds: Floats | Sequence[Sequence[float]],
    *,
    window: int,
    step_s: float,
    steps_left: int,
    epoch_ended: bool = False,
    since_look: int = 0,
    early: bool = False,
    probes: RunCorrections = NO_RUN_CORRECTIONS,
) -> Observation:
    """An Observation of one window.

    Args:
        graph: of the plan that ran.
        per_task_seconds: float64 [tasks] or [steps, tasks], as `task_durations_s` reads them off a Timeline; steps are
            averaged.
            Of a collective or transfer it is the time from when its last rank was ready, without waiting.
        since_look: how many of the last steps no earlier observation held. early: as in `Observation`.

    Raises:
        ScheduleError: another number of tasks than the graph's, no step, or a time that is negative or not finite.
    """
    seconds = np.atleast_2d(np.asarray(per_task_seconds, dtype=np.float64))
    if seconds.ndim != 2 or seconds.shape[1] != len(graph.tasks) or not len(seconds):
        raise ScheduleError(
            f"per_task_seconds has shape {seconds.shape}, the graph has {len(graph.tasks)} tasks; give [steps, tasks]"
        )
    if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
        raise ScheduleError("per_task_seconds holds a negative or infinite time, or none (NaN); leave out steps not recorded")

    return Observation(
        window=window,
        steps_left=steps_left,
        step_s=step_s,
        seconds=seconds_by_class(graph, seconds.mean(axis=0)),
        epoch_ended=epoch_ended,
        steps=tuple(seconds_by_class(graph, taken) for taken in seconds[max(0, len(seconds) - since_look) :]),
        early=early,
        probes=probes,
    )


def expected_seconds(problem: PlanningProblem, plan: Plan) -> dict[WorkClass, float]:
    """The seconds per step of a plan's work by class under the problem's own costs, slowdown by overlap included."""
    return _class_seconds(evaluate(problem, plan, samples=0, fold=False))


def _class_seconds(evaluation: Evaluation) -> dict[WorkClass, float]:
    columns = evaluation.compiled.columns
    by_task = task_durations_s(columns.size, evaluation.timeline)
    by_unit = np.bincount(columns.unit, weights=by_task, minlength=len(columns.units))
    return class_seconds((unit.work, unit.rank, seconds) for unit, seconds in zip(columns.units, by_unit.tolist(), strict=True))


def controller_for(
    problem: PlanningProblem,
    plan: Plan,
    *,
    config: ControllerConfig | None = None,
    plan_for: PlanFor | None = None,
    rebuild_s: float = 0.0,
    planning_s: float = 0.0,
) -> Controller:
    """A controller at the start of a run of `plan`; left out: the tuned parameters, and `search_planner` over all families.

    Args:
        rebuild_s: seconds of a switch beside the moving of weights: process groups, graphs, first steps.
        planning_s: that training waits for a planning.
    """
    return Controller(
        config=config or ControllerConfig(),
        plan_for=plan_for or search_planner(problem),
        switch_cost_s=switch_cost(problem, rebuild_s),
        plan=plan,
        expected=expected_seconds(problem, plan),
        planning_s=planning_s,
    )


RESIDENT = ("parameters", "gradients", "optimizer_state", "buffers")
"""Lines of memory that lie there between steps."""


def side_by_side(problem: PlanningProblem, plan_for: PlanFor) -> PlanFor:
    """A planner whose plans fit beside the one that they follow: a rank that changes plan holds what both keep between steps.
    On a CPU it also builds the whole model meanwhile, of which it keeps its part; that of a GPU is built by its host.

    Raises ScheduleError where the plan that is chosen does not fit so.
    """

    def chosen(corrections: RunCorrections, current: Plan) -> PlanChoice:
        choice = plan_for(corrections, current)
        if choice.plan.program == current.program:
            return choice
        built = problem.model.parameter_bytes if problem.cluster.devices[0].type.kind == "cpu" else 0
        for before, after in zip(problem.memory(current), problem.memory(choice.plan), strict=True):
            kept, coming = (sum(entry.line(name) for name in RESIDENT) for entry in (before, after))
            beside = sum(after.line(name) for name in NOT_TENSORS) + before.line("communication")  # groups stay to the end
            needed = kept + max(coming, built) + beside
            if needed > after.limit_bytes:
                both = f"{format_bytes(needed)} of {format_bytes(after.limit_bytes)}"
                raise ScheduleError(
                    f"{choice.plan.summary()} is predicted at {format_seconds(choice.step_s)}, but while the plan changes rank "
                    f"{after.rank} holds the weights and states of both: {both}"
                )
        return choice

    return chosen


def search_planner(
    problem: PlanningProblem, strategies: Sequence[str] = tuple(FAMILIES), *, world_size: int | None = None
) -> PlanFor:
    """A planner that searches the families under the corrected costs, for plans on `world_size` ranks (None: on any)."""

    def plan_for(corrections: RunCorrections, current: Plan) -> PlanChoice:
        now = replace(problem, corrections=corrections)
        found = search(now, strategies, samples=0)
        results = [entry.result for entry in found.candidates]
        fitting = [result for result in results if result.fits and world_size in (None, result.plan.world_size)]
        if not fitting:
            refusal = f"no plan fits: {results[0].reason}" if world_size is None else f"no plan on {world_size} ranks fits"
            raise ScheduleError(refusal)
        best = fitting[0]
        return PlanChoice(
            plan=best.plan,
            step_s=best.step_s.median,
            current_step_s=evaluate(now, current, samples=0).result.step_s.median,
            expected=expected_seconds(problem, best.plan),
        )

    return plan_for


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedPlan:
    """A plan lowered and priced once, whose step under any corrections takes one pass of the static engine.

    Attributes:
        seconds: float64 [units], the problem's own medians per unit of work. classes: per unit.
    """

    plan: Plan
    compiled: CompiledGraph
    overlap: OverlapFactors
    seconds: Floats
    classes: tuple[WorkClass | None, ...]
    expected: ClassSeconds

    def durations_s(self, corrections: RunCorrections) -> Floats:
        """float64 [tasks]."""
        units = self.compiled.columns.units
        factors = np.array([corrections.factor(unit.work, unit.rank) for unit in units])
        durations: Floats = (self.seconds * factors)[self.compiled.columns.unit]
        return durations

    def step_s(self, corrections: RunCorrections) -> float:
        """The step that `evaluate` finds without noise of single ranks."""
        rows = self.durations_s(corrections)[None, :]
        return float(mean_step_s(self.compiled, rows, self.overlap, steps=REPEATED_STEPS)[0])

    def observed(self, durations_s: Floats) -> dict[WorkClass, float]:
        """Seconds per step by class when the tasks take `durations_s` (float64 [tasks]) each alone."""
        columns = self.compiled.columns
        if not checked_slowdown(self.overlap, columns.world_size).is_none:
            timeline = static.simulate(self.compiled, durations_s, overlap=self.overlap)
            durations_s = task_durations_s(columns.size, timeline)
        by_unit = np.bincount(columns.unit, weights=durations_s, minlength=len(columns.units))
        totals = np.bincount(self._class_numbers, weights=by_unit, minlength=len(self._class_names) + 1)
        return dict(zip(self._class_names, totals[:-1].tolist(), strict=True))

    @cached_property
    def _class_names(self) -> tuple[WorkClass, ...]:
        return tuple(dict.fromkeys(key for key in self.classes if key is not None))

    @cached_property
    def _class_numbers(self) -> NDArray[np.int64]:
        """Per unit the place of its class; those of no class come last."""
        place = {key: number for number, key in enumerate(self._class_names)}
        return np.array([len(place) if key is None else place[key] for key in self.classes], dtype=np.int64)


def priced(problem: PlanningProblem, plan: Plan) -> PricedPlan:
    """Raises ScheduleError for a plan that does not fit, else as `evaluate`."""
    evaluation = evaluate(problem, plan, samples=0, fold=False)
    if not evaluation.result.fits:
        raise ScheduleError(f"{plan.summary()} does not fit: {evaluation.result.warnings[0]}; leave it out of the pool")
    columns = evaluation.compiled.columns
    return PricedPlan(
        plan=plan,
        compiled=evaluation.compiled,
        overlap=evaluation.overlap,
        seconds=medians_s(evaluation.estimates),
        classes=tuple(class_of(unit.work, unit.rank) for unit in columns.units),
        expected=_class_seconds(evaluation),
    )


def pool_planner(pool: Sequence[PricedPlan]) -> PlanFor:
    """A planner that chooses among plans priced before; answers are remembered. The current plan must be one of them."""
    place = {priced_plan.plan: priced_plan for priced_plan in pool}
    if not place:
        raise ScheduleError("a pool planner needs at least one plan, got none; price the candidates of a search")

    @lru_cache(maxsize=4096)
    def steps_s(corrections: RunCorrections) -> dict[Plan, float]:
        return {plan: entry.step_s(corrections) for plan, entry in place.items()}

    def plan_for(corrections: RunCorrections, current: Plan) -> PlanChoice:
        if current not in place:
            raise ScheduleError(f"{current.summary()} is not in the pool of {len(place)} plans; add it")
        steps = steps_s(corrections)
        best = min(steps, key=lambda plan: steps[plan])
        return PlanChoice(plan=best, step_s=steps[best], current_step_s=steps[current], expected=place[best].expected)

    return plan_for


def switch_cost(problem: PlanningProblem, rebuild_s: float = 0.0) -> SwitchCost:
    """Prices a switch: every rank receives the weights and optimizer state it will need and does not hold.

    Transfers of one rank go one after the other, those of different ranks at once; the busiest rank sets the time. A parameter
    comes from the first rank that holds it (or any piece of it). Leaves out disks (a switch by checkpoint reads and writes
    files) and ZeRO, under which the optimizer state lies elsewhere than the weights.

    Args:
        rebuild_s: seconds beside the moving: process groups, graphs, first steps.
    """

    def cost_s(old: Plan, new: Plan) -> float:
        before, after = _holdings(old, problem.model), _holdings(new, problem.model)
        moved: dict[tuple[int, int], int] = {}
        for rank, wanted in after.items():
            held = before.get(rank, {})
            for name, part in wanted.items():
                own = held.get(name)
                if own is not None and (own == part or own.part is None):
                    continue
                source = next(other for other, parts in before.items() if name in parts and other != rank)
                size = part.size_bytes + problem.state_bytes_per_element(part.optimizer) * part.elements
                moved[source, rank] = moved.get((source, rank), 0) + size
        costs = problem.costs(max(old.world_size, new.world_size))
        busy: dict[int, float] = {}
        for (source, rank), size_bytes in moved.items():
            work = SendRecv(source=source, destination=rank, size_bytes=size_bytes)
            seconds = costs.estimate(work, rank).median_s
            for end in (source, rank):
                busy[end] = busy.get(end, 0.0) + seconds
        return rebuild_s + max(busy.values(), default=0.0)

    return cost_s


def _holdings(plan: Plan, model: Model) -> dict[int, dict[str, HeldParameter]]:
    """Per rank what it holds, by name of the parameter."""
    held: dict[int, dict[str, HeldParameter]] = {}
    for stage in plan.stages:
        for rank in stage.ranks:
            parts = held.setdefault(rank, {})
            shard = plan.shard_of_rank(rank)
            for name, placement in stage.placed():
                if placement.runs_on(shard):
                    component = model.component(name)
                    for parameter in component.parameters:
                        parts[parameter.name] = hold(component, placement, parameter, shard)
    return held


# A planner whose work is done before the training: plans are searched and priced for what may happen to the machine.
#
# During the run only factors on known prices change. So a planning is one pass of the static engine per plan (milliseconds),
# where a search takes seconds in which all ranks stand still.
#
# The machine that is prepared for: as the profile says; all communication `COMMUNICATION` times as slow; every rank in turn
# `RANK` times as slow. The best plan of every family is kept in each of these states, and one of them is the answer under
# any.
#
# Leaves out: plans that are good under none of these states; noise of single ranks, which searches price; and, in all states
# but the first, placements of single components, which take most of a search.


COMMUNICATION, RANK = (4.0, 32.0), (2.0, 5.0)
DISTRIBUTED = ("dp", "mp", "hp")
SEARCH_S = 2.0
"""Assumed seconds of a planning that searches, until the first has been timed."""
MOST_RANKS = 4
"""On more ranks there are more states than searches that one may wait for: a planning searches, as it is needed."""


def likely(world_size: int) -> tuple[RunCorrections, ...]:
    """The states of the machine that plans are prepared for."""
    ranks = range(world_size)
    everything = CommunicationClass("all_reduce", tuple(ranks))
    links = [RunCorrections(communication=((everything, factor),)) for factor in COMMUNICATION]
    slow = [
        RunCorrections(ranks=tuple((rank, factor if rank == one else 1.0) for rank in ranks))
        for factor in RANK
        for one in ranks
    ]
    return (NO_RUN_CORRECTIONS, *links, *slow)


def prepared_pool(problem: PlanningProblem, current: Plan, strategy: str = "adaptive") -> tuple[PricedPlan, ...]:
    """The current plan and the best ones, on as many ranks, under every likely state of the machine.

    Args:
        problem: of the run; plans keep its constraints. current: the plan that it begins with. strategy: the family to search.

    Raises:
        ScheduleError: the current plan does not fit. CostError, PlanError: it cannot be priced.
    """
    pool = {current.program: priced(problem, current)}
    for state in likely(current.world_size):
        families = DISTRIBUTED if strategy == "adaptive" and state != NO_RUN_CORRECTIONS else (strategy,)
        try:
            best = search(problem.corrected(state), families, samples=0).candidates
        except (ScheduleError, CostError, PlanError):
            continue  # the current plan can be priced: there is just nothing beside it
        for entry in best:
            plan = entry.result.plan
            if entry.result.fits and plan.world_size == current.world_size and plan.program not in pool:
                pool[plan.program] = priced(problem, plan)
    return tuple(pool.values())


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Attributes: plan_for: the planner. planning_s: that it takes, as a first planning was timed."""

    plan_for: PlanFor
    planning_s: float


def prepared_planner(problem: PlanningProblem, current: Plan, strategy: str = "adaptive") -> Prepared:
    """A planner that has its plans at hand, and has planned once.

    For more than `MOST_RANKS` ranks, or a plan that does not fit, every planning searches; its seconds are assumed.
    """
    searching = search_planner(problem, (strategy,), world_size=current.world_size)
    if current.world_size > MOST_RANKS:
        return Prepared(plan_for=searching, planning_s=SEARCH_S)
    try:
        planner = pool_planner(prepared_pool(problem, current, strategy))
    except ScheduleError:
        return Prepared(plan_for=searching, planning_s=SEARCH_S)
    planner(NO_RUN_CORRECTIONS, current)  # the engine is compiled at its first call
    began = time.perf_counter()
    planner(likely(current.world_size)[1], current)
    return Prepared(plan_for=planner, planning_s=time.perf_counter() - began)
