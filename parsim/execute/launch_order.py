"""One order for the launches of all ranks, in which every task of a step comes behind all that it waits for, on any rank.

NCCL's kernels wait for data, and CUDA promises for no two streams that they run at the same time. So NCCL asks that every rank
gives its communications in the same order, over whatever communicators. Each rank launches its tasks in this order, computation
too. Then no rank waits for ever even where a GPU runs one thing after the other: where streams share a queue, or loading a
kernel waits until the device is idle. Nor does it where the host waits for its peers, as at the first collective of every
communicator, which connects them. The first task in the order that has not ended can always run.

A launch is early: a task stands behind about as many others as separate it from the beginning of the step. Streams still run at
the same time where the device lets them.

Source: NCCL's user guide, "Using multiple NCCL communicators concurrently"; CUDA programming guide, "Lazy Loading".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parsim.errors import ExecutionError
from parsim.execute.relaxed.scripts import RankTasks
from parsim.execute.rooms.transfers import transfer_rooms
from parsim.graph.plan_index import PlanIndex
from parsim.graph.taskgraph import TaskGraph, in_order
from parsim.work import OptimizerStep


def launch_order(graph: TaskGraph, layout: PlanIndex) -> list[int]:
    """The numbers of all tasks of all ranks; the same on every rank.

    Whatever follows no update comes before all updates. With a scaled loss, ranks agree in their first one, and their hosts
    wait for one another there.

    Args:
        graph: of one step. layout: of its plan.

    Raises:
        ExecutionError: tasks wait for one another.
    """
    before = graph.predecessors()
    for index, awaited in room_waits(graph, layout).items():
        before[index].extend(awaited)
    order = in_order(before)
    if len(order) < len(graph.tasks):
        raise ExecutionError(
            f"{len(graph.tasks) - len(order)} tasks of the step wait for one another; this is a fault of parsim"
        )
    late: set[int] = set()
    for index in order:
        if isinstance(graph.tasks[index].work, OptimizerStep) or not late.isdisjoint(before[index]):
            late.add(index)
    return [*(index for index in order if index not in late), *(index for index in order if index in late)]


def room_waits(graph: TaskGraph, layout: PlanIndex) -> Mapping[int, Sequence[int]]:
    """What messages between stages, and computations, also wait for: room, or that what was sent before has left.

    Args:
        graph: of one step. layout: of its plan.
    """
    if layout.plan.mesh.pp == 1:
        return {}
    tasks: list[RankTasks] = [[] for _ in range(graph.world_size)]
    for task in graph.tasks:
        for rank, stream in {resource.rank: resource.stream for resource in reversed(task.resources)}.items():
            tasks[rank].append((task, stream, ()))
    found: dict[int, list[int]] = {}
    for rank, own in enumerate(tasks):
        for index, awaited in transfer_rooms(own, layout, rank).awaited.items():
            found.setdefault(index, []).extend(awaited)
    return found
