"""Data-parallel steps without waiting: every worker merges its own update into one global model, in the order of arrival."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from parsim.arrays import Floats
from parsim.engines.dynamic import ProgramRun
from parsim.engines.program import Part, Program
from parsim.errors import ScenarioError
from parsim.graph.task import COMPUTE, Resource, Task
from parsim.graph.taskgraph import TaskGraph, in_order
from parsim.work import Collective, Mix, OptimizerStep

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
        found = [new for need in task.dependencies for new in ((kept[need],) if need in kept else through[need])]
        needs = tuple(dict.fromkeys(found))
        if len(task.ranks) > 1:
            through[index] = needs
            continue
        rank = task.ranks[0]
        own = tuple(need for need in needs if tasks[need].ranks[0] == rank)
        kept[index] = len(tasks)
        tasks.append(replace(task, index=len(tasks), dependencies=own))
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
