"""How often to write a checkpoint: the known formulas, and the simulated answer.

Young and Daly assume one machine that fails with exponential gaps of mean M (over all its parts). A checkpoint takes
`write_s` and stops the training, and a run has many intervals. Then the expected time of a run is M e^(R/M) (e^((t +
d)/M) - 1) per interval t of training (R restart, d write), exactly. Where that does not hold - few intervals, parts that
fail soonest after a repair, failures at known times - the best interval differs, and simulation finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from parsim.engines.dynamic import ProgramRun
from parsim.engines.program import Part, Program
from parsim.engines.scenario.scenario import Failures, Run
from parsim.engines.scenario.whole_run import Training, course_of, simulate_run
from parsim.errors import ScenarioError
from parsim.numeric import Floats
from parsim.program.taskgraph import COMPUTE, Resource, Task, TaskGraph, in_order
from parsim.work import Collective, Mix, OptimizerStep


def machine_mtbf_s(failures: Failures, ranks: int, nodes: int) -> float:
    """M: mean seconds between failures of the whole machine; inf where none is drawn."""
    means = ((failures.rank_mtbf_s, ranks), (failures.node_mtbf_s, nodes))
    rate = sum(count / mean for mean, count in means if mean is not None)
    return 1 / rate if rate else math.inf


def young_interval_s(write_s: float, mtbf_s: float) -> float:
    """sqrt(2 d M): the first-order optimum, for d much less than M."""
    _check(write_s, mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s)


def daly_interval_s(write_s: float, mtbf_s: float) -> float:
    """sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + 1/9 (d / 2M)) - d for d < 2M, else M: the higher-order optimum."""
    _check(write_s, mtbf_s)
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s


def expected_run_s(work_s: float, interval_s: float, write_s: float, restart_s: float, mtbf_s: float) -> float:
    """The expected seconds of `work_s` of training in equal intervals, each closed by a checkpoint, with exponential failures.

    Exact, failures while writing and restarting included. `work_s` must be a multiple of `interval_s` for it to be a run.
    """
    _check(write_s, mtbf_s)
    per_interval = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s)
    return work_s / interval_s * per_interval


def _check(write_s: float, mtbf_s: float) -> None:
    if not (write_s >= 0 and mtbf_s > 0):
        raise ScenarioError(f"a checkpoint takes write_s >= 0 and failures come mtbf_s > 0 apart, got {write_s} and {mtbf_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTimes:
    """Attributes:
    interval_s: whole steps of the median draw. mean_s: float64 [intervals] of the runs' seconds.
    error_s: float64 [intervals], the standard error of each mean's difference to that of the best: draws share their failures.
    """

    interval_s: Floats
    mean_s: Floats
    error_s: Floats

    @property
    def best(self) -> int:
        return int(self.mean_s.argmin())

    @property
    def best_interval_s(self) -> float:
        """Where a parabola through the best and its neighbours, over the logarithm of the interval, is lowest.

        Just the best where nothing is random: with failures at known times the mean jumps, and no curve fits it.
        """
        place = self.best
        if place in (0, len(self.mean_s) - 1) or not self.error_s.any():
            return float(self.interval_s[place])
        x, y = np.log(self.interval_s[place - 1 : place + 2]), self.mean_s[place - 1 : place + 2]
        curve = np.polyfit(x - x[1], y - y[1], 2)
        if curve[0] <= 0:
            return float(self.interval_s[place])
        return float(np.exp(x[1] + np.clip(-curve[1] / (2 * curve[0]), x[0] - x[1], x[2] - x[1])))


def interval_times(
    intervals_s: Sequence[float],
    *,
    run: Run,
    training: Training,
    failures: Failures,
    steps_per_epoch: int,
    write_s: float,
    seed: int,
) -> IntervalTimes:
    """Simulate the run under every interval, with the same failures for all. Raises as `simulate_run`."""
    if not intervals_s:
        raise ScenarioError("a choice of checkpoint interval needs at least one candidate")
    step_s = float(np.median(training.step_s.min(axis=1)))
    counts = sorted({max(1, round(interval / step_s)) for interval in intervals_s})
    totals = np.array(
        [
            simulate_run(
                course_of(run, steps_per_epoch=steps_per_epoch, interval_steps=count, checkpoint_s=write_s),
                training,
                failures,
                seed=seed,
            ).total_s
            for count in counts
        ]
    )
    mean_s = totals.mean(axis=1)
    beyond = totals - totals[mean_s.argmin()]
    return IntervalTimes(
        interval_s=np.array(counts) * step_s,
        mean_s=mean_s,
        error_s=np.asarray(beyond.std(axis=1) / np.sqrt(totals.shape[1])),
    )


def one_draw_many_times(training: Training, draws: int) -> Training:
    """Equal steps in each of `draws` runs: only failures differ."""
    return replace(training, step_s=np.repeat(training.step_s[:1], draws, axis=0))


# Data-parallel steps without waiting: every worker merges its own update into one global model, in the order of arrival.


MERGE = Resource(0, "merge")
"""The global model: held by one worker's merge at a time."""


def asynchronous_program(graph: TaskGraph, rows_s: Floats, merge_s: float) -> tuple[Program, Floats]:
    """The step of a data-parallel plan with its collectives left out and one merge at the end of every worker's step.

    Args:
        rows_s: float64 [steps, n], of the synchronous graph's tasks, a row for each local step of every worker.
        merge_s: what a merge takes, the way there and back included.

    Returns:
        The program, and float64 [steps, tasks]: what its tasks take in every step (`parsim.engines.program.by_step`).

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
