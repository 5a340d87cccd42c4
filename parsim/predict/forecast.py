"""A plan in a scenario: its step under every state of the machine, and the whole run to the end of training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from parsim.costs.estimate import OverlapFactors, medians_s
from parsim.engines import dynamic
from parsim.engines.dynamic import ProgramRun
from parsim.engines.program import Part, Program, mean_step_s, steps_in_a_row
from parsim.engines.scenario import Run, Scenario, check_places, conditions_for, jittered_s, straggling
from parsim.engines.whole_run import (
    IntervalTimes,
    Training,
    WholeRun,
    course_of,
    daly_interval_s,
    interval_steps_of,
    interval_times,
    machine_mtbf_s,
    simulate_run,
    young_interval_s,
)
from parsim.errors import ScenarioError, StandstillError
from parsim.numeric import Floats
from parsim.predict.breakdown import breakdown
from parsim.predict.evaluate import REPEATED_STEPS, Evaluation, sampled_steps_s
from parsim.predict.problem import PlanningProblem
from parsim.program.taskgraph import COMPUTE, Resource, Task, TaskGraph, in_order
from parsim.work import Collective, Compute, Mix, OptimizerStep, Phase

JITTERED_STEPS = 32
"""Steps whose mean is taken where every step differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The machine between two changes (until_s None: to the end). slowdown: step_s over that of the quiet machine."""

    from_s: float
    until_s: float | None
    step_s: float
    slowdown: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """A plan in a scenario, prices and graph at hand."""

    problem: PlanningProblem
    evaluation: Evaluation
    scenario: Scenario

    def __post_init__(self) -> None:
        rule = self.evaluation.result.plan.synchronisation
        if rule.is_relaxed:
            raise ScenarioError(
                f"scenarios are for synchronous plans, and the plan has synchronisation {rule}; leave out the scenario, "
                "or plan.synchronisation"
            )
        check_places(self.scenario, self.evaluation.compiled.columns.world_size, self.problem.cluster)

    @cached_property
    def durations_s(self) -> Floats:
        """float64 [tasks], the medians."""
        durations: Floats = medians_s(self.evaluation.estimates)[self.evaluation.compiled.columns.unit]
        return durations

    def one_step(self) -> Evaluation:
        """The evaluation with the timeline and breakdown of one step at the scenario's start, one draw of its jitter."""
        compiled, scenario = self.evaluation.compiled, self.scenario
        rng = np.random.default_rng(scenario.seed)
        row = jittered_s(self.durations_s, compiled.columns, scenario.jitter, rng, 1)[0]
        conditions = conditions_for(scenario, compiled.columns, self.problem.cluster)
        timeline = dynamic.simulate(compiled, row, overlap=self._overlap, conditions=conditions)
        return replace(self.evaluation, timeline=timeline, breakdown=tuple(breakdown(compiled, timeline)))

    @property
    def _overlap(self) -> OverlapFactors:
        return self.evaluation.overlap

    @cached_property
    def states(self) -> tuple[State, ...]:
        """Every state of the machine in turn, with the mean step of a run that stays in it."""
        times = (0.0, *self.scenario.change_times_s)
        median_s = self.evaluation.result.step_s.median
        slowdowns: dict[Scenario, float] = {}
        states: list[State] = []
        for number, time in enumerate(times):
            now = self.scenario.at(time)
            if now not in slowdowns:
                slowdowns[now] = self._slowdown(now)
            until = times[number + 1] if number + 1 < len(times) else None
            states.append(State(from_s=time, until_s=until, step_s=median_s * slowdowns[now], slowdown=slowdowns[now]))
        return tuple(states)

    def _slowdown(self, now: Scenario) -> float:
        """The mean step under unchanging conditions over that of the quiet machine; inf: it stands still."""
        compiled, columns = self.evaluation.compiled, self.evaluation.compiled.columns
        jitter, asynchronous = self.scenario.jitter, self.scenario.asynchronous
        varied = bool(jitter.compute_sigma or jitter.communication_sigma)
        steps = JITTERED_STEPS if varied or asynchronous is not None else REPEATED_STEPS
        rows = jittered_s(self.durations_s, columns, jitter, np.random.default_rng(self.scenario.seed), steps)
        conditions = conditions_for(now, columns, self.problem.cluster)
        quiet_s = mean_step_s(compiled, self.durations_s[None, :], self._overlap, steps=steps)[0]
        if asynchronous is not None:
            program, rows = asynchronous_program(columns.graph, rows, asynchronous.merge_s)
            done = dynamic.run_program(program, list(rows), overlap=self._overlap, conditions=conditions, record=True)
            return float(columns.world_size / merges_per_s(program, done) / quiet_s)
        if conditions is None and not varied:
            return 1.0
        if conditions is not None and not varied and not conditions.flows:
            # Stragglers alone are longer durations, for which the static engine gives the dynamic one's times.
            longer = self.durations_s * straggling(columns, conditions)
            return float(mean_step_s(compiled, longer[None, :], self._overlap, steps=steps)[0] / quiet_s)
        program = steps_in_a_row(columns, self._overlap, steps=steps)
        try:
            done = dynamic.run_program(program, list(rows), overlap=self._overlap, conditions=conditions)
        except StandstillError:
            if self.scenario.at(np.inf) == now:
                raise
            return np.inf
        return float(done.makespan_s / steps / quiet_s)

    def training(self, run: Run) -> Training:
        """The steps of a whole run: a row per draw of the cost parameters, a column per state."""
        result = self.evaluation.result
        times = sampled_steps_s(self.evaluation, run.draws)
        step_s = (
            result.step_s.median
            * (times / self.evaluation.steady_s)[:, None]
            * np.array([state.slowdown for state in self.states])[None, :]
        )
        if run.loading_samples_per_s is not None:
            step_s = np.maximum(step_s, self.problem.global_batch / run.loading_samples_per_s)
        return Training(
            step_s=step_s,
            change_s=self.scenario.change_times_s,
            ranks=result.plan.world_size,
            nodes=len({device.node for device in self.problem.cluster.devices[: result.plan.world_size]}),
            computing_s=float(np.mean([rank.compute_s for rank in self.evaluation.breakdown])),
            warm_up_s=run.warm_up_steps * (run.warm_up_factor - 1) * result.step_s.median,
            start_s=run.start_s,
        )

    @property
    def write_s(self) -> float:
        """Seconds of a checkpoint: as stated, or the bytes of weights and optimizer state over the stated bandwidth."""
        checkpoints = self.scenario.checkpoints
        if checkpoints is None:
            return 0.0
        if checkpoints.write_bytes_per_s is None:
            return checkpoints.write_s or 0.0
        model = self.problem.model
        state = sum(self.problem.state_bytes_per_element(each.optimizer) * each.elements for each in model.parameters)
        return (model.parameter_bytes + state) / checkpoints.write_bytes_per_s

    def evaluation_s(self, run: Run) -> float:
        """Forward passes over the evaluation samples at the step's own rate: the forwards' share of its computation."""
        columns = self.evaluation.compiled.columns
        forward = columns.is_work(lambda work: isinstance(work, Compute) and work.phase is Phase.FORWARD)
        computes = columns.is_work(lambda work: isinstance(work, Compute))
        share = float(self.durations_s[forward].sum() / max(self.durations_s[computes].sum(), 1e-30))
        steps = run.evaluation_samples / self.problem.global_batch
        return steps * share * self.evaluation.result.step_s.median

    def whole_run(self, epochs: int) -> Forecast:
        """The run of the scenario's [run] table; `epochs` where the table names none.

        Raises ScenarioError without a [run] table, or for a run that does not get on.
        """
        run = self.scenario.run
        if run is None:
            raise ScenarioError("a whole run needs the table [run] in the scenario, with samples_per_epoch = ... at least")
        run = run.model_copy(update={"epochs": run.epochs or epochs})
        training = self.training(run)
        per_epoch = max(1, run.samples_per_epoch // self.problem.global_batch)
        checkpoints, failures = self.scenario.checkpoints, self.scenario.failures
        interval = None if checkpoints is None else interval_steps_of(checkpoints, self.evaluation.result.step_s.median)
        course = course_of(
            run,
            steps_per_epoch=per_epoch,
            interval_steps=interval,
            checkpoint_s=self.write_s,
            evaluation_s=self.evaluation_s(run),
        )
        done = simulate_run(course, training, failures, seed=self.scenario.seed)
        mtbf_s = machine_mtbf_s(failures, training.ranks, training.nodes)
        choice = None
        if checkpoints is not None and self.write_s > 0 and mtbf_s < np.inf:
            daly = daly_interval_s(self.write_s, mtbf_s)
            work_s = course.total_steps * self.evaluation.result.step_s.median
            candidates = [daly * 2 ** (power / 2) for power in range(-4, 5) if daly * 2 ** (power / 2) < 2 * work_s]
            times = interval_times(
                candidates or [work_s],
                run=run,
                training=training,
                failures=failures,
                steps_per_epoch=per_epoch,
                write_s=self.write_s,
                seed=self.scenario.seed,
            )
            choice = IntervalChoice(
                simulated=times,
                young_s=young_interval_s(self.write_s, mtbf_s),
                daly_s=daly,
                mtbf_s=mtbf_s,
                write_s=self.write_s,
            )
        return Forecast(run=run, steps=course.total_steps, whole=done, choice=choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    """The checkpoint interval by simulation and by formula."""

    simulated: IntervalTimes
    young_s: float
    daly_s: float
    mtbf_s: float
    write_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Attributes: run: with its epochs. steps: training steps of the run. choice: None without checkpoints or failures."""

    run: Run
    steps: int
    whole: WholeRun
    choice: IntervalChoice | None


# --- data-parallel steps without waiting ------------------------------------------------------------------------------
#
# Data-parallel steps without waiting: every worker merges its own update into one global model, in the order of arrival.


MERGE = Resource(0, "merge")
"""The global model: held by one worker's merge at a time."""


def asynchronous_program(graph: TaskGraph, rows_s: Floats, merge_s: float) -> tuple[Program, Floats]:
    """The step of a data-parallel plan with its collectives left out and one merge at the end of every worker's step.

    Args:
        rows_s: float64 [steps, n], of the synchronous graph's tasks, a row for each local step of every worker.
        merge_s: what a merge takes, the way there and back included.

    Returns:
        The program, and float64 [steps, tasks]: what its tasks take in every step.

    Raises ScenarioError if ranks share other work than the sums of gradients: workers that need one another cannot go on alone.
    """
    kept: dict[int, int] = {}
    through: dict[int, tuple[int, ...]] = {}
    tasks: list[Task] = []
    last: dict[int, int] = {}
    for task in graph.tasks:
        gradients = isinstance(task.work, Collective) and all(resource.stream == "dp" for resource in task.resources)
        if len(task.ranks) > 1 and not gradients:
            raise ScenarioError(
                "asynchronous workers need a plan in which every rank trains alone between merges: one stage and no tensor "
                'shards; set plan.strategy = "dp", or drop [asynchronous]'
            )
    for index in in_order(graph.predecessors()):
        task = graph.tasks[index]
        renumbered = (new for need in task.dependencies for new in ((kept[need],) if need in kept else through[need]))
        needs = tuple(dict.fromkeys(renumbered))
        if len(task.ranks) > 1:
            through[index] = needs
            continue
        rank = task.ranks[0]
        on_rank = tuple(need for need in needs if tasks[need].ranks[0] == rank)
        kept[index] = len(tasks)
        tasks.append(replace(task, index=len(tasks), dependencies=on_rank))
        if any(resource.stream == COMPUTE for resource in task.resources):
            last[rank] = kept[index]
    for rank, end in sorted(last.items()):
        resources = (Resource(rank, COMPUTE), MERGE)
        steps = [task.work for task in tasks if task.ranks[0] == rank and isinstance(task.work, OptimizerStep)]
        work = Mix(elements=sum(step.elements for step in steps), copies=2)
        tasks.append(Task(index=len(tasks), work=work, resources=resources, dependencies=(end,), origin=tasks[end].origin))
    made = TaskGraph(tasks=tuple(tasks), world_size=graph.world_size)
    rows = np.hstack([rows_s[:, list(kept)], np.full((len(rows_s), len(last)), merge_s)])
    return Program(parts=(Part(graph=made, repeat=len(rows)),), arrival=frozenset({MERGE})), rows


def merges_per_s(program: Program, done: ProgramRun) -> float:
    """Merges per second until the first worker has done all its steps: the rate while all are at work.

    `done` must have been recorded.
    """
    first = program.first_number
    ends = np.sort(done.end_s[[first[step] + task for step, task in done.served[MERGE]]])
    repeats = len(program.steps)
    counts: dict[int, int] = {}
    for number, (_, task) in enumerate(done.served[MERGE]):
        counts[task] = counts.get(task, 0) + 1
        if counts[task] == repeats:
            return float((ends <= ends[number]).sum() / ends[number])
    return len(ends) / float(ends[-1])
