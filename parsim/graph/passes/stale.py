"""Decoupled stages: in one step every stage works on the batch that arrived in the step before, and waits for nobody in it.

The step is that of a pipeline of one microbatch without the waiting: what a transfer brings in step t is read in step t + 1.
So the forward of batch b on stage s runs in step b + s, and its backward in step b + 2 (K - 1) - s. The gradients of stage s
are 2 (K - 1 - s) steps late. Between steps a rank waits for its own transfers (`parsim.engines.steps`), and for no others.

Source: the schedule of fully decoupled training with delayed gradients ("fdg" of `parsim.algorithms.staleness`).
"""

from __future__ import annotations

from dataclasses import replace

from parsim.errors import PlanError
from parsim.graph.plan_index import PlanIndex
from parsim.graph.taskgraph import TaskGraph
from parsim.work import Compute, SendRecv


def without_arrivals(graph: TaskGraph, layout: PlanIndex) -> TaskGraph:
    """The graph of a step in which no computation waits for a transfer of the same step.

    Args:
        graph: of a pipeline step of one microbatch. layout: of its plan.

    Raises:
        PlanError: a value crosses more than one boundary of stages: its parts would come from different batches. Or stages
            share a parameter.
    """
    stage_of = layout.stage_of
    for value, readers in layout.consumers.items():
        maker = layout.model.value[value].producer
        if maker is None:
            continue
        far = [name for name in readers if stage_of[name] > stage_of[maker] + 1]
        if far:
            stages = f"from stage {stage_of[maker]} to stage {stage_of[far[0]]} ({far[0]})"
            raise PlanError(
                f"synchronisation stale: {value} goes {stages}, past a stage that works on another batch; use a model "
                "that is a chain, or fewer stages"
            )
    for bucket in layout.buckets:
        if len({layout.plan.stage_of_rank(rank) for rank in bucket.group}) > 1:
            raise PlanError(
                f"synchronisation stale: stages share {bucket.parameters[0].name}, whose gradients would come from different "
                "batches; untie it, or put what uses it on one stage"
            )
    transfers = {task.index for task in graph.tasks if isinstance(task.work, SendRecv)}
    tasks = tuple(
        replace(task, dependencies=tuple(other for other in task.dependencies if other not in transfers))
        if isinstance(task.work, Compute)
        else task
        for task in graph.tasks
    )
    return replace(graph, tasks=tasks)
