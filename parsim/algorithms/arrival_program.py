"""Resources that serve in order of arrival, and commutative merging as a program that uses one.

Everywhere else a resource issues its tasks in a written order. A global model that workers merge into is exclusive and serves
whoever comes first, so its order depends on seconds: `served_by_arrival` finds it by simulation and writes it down. The graph
it returns is like any other: both engines give it the same seconds, and an executor can follow the recorded order.

Since a fast worker may merge a second time before a slow one's first, repeats overlap on such a resource: a program with one is
written out before it is served.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import ArrayLike

from parsim.algorithms.gossip_program import GossipModel
from parsim.algorithms.program import Part, Program
from parsim.errors import AlgorithmError
from parsim.graph.task import COMPUTE, Origin, Resource, Task
from parsim.graph.taskgraph import TaskGraph
from parsim.work import Compute, Mix, OptimizerStep, Phase, Work

MERGE = Resource(0, "merge")
"""The global model, on rank 0."""

END, ASK = 0, 1


def served_by_arrival(graph: TaskGraph, durations_s: ArrayLike, arrival: Collection[Resource]) -> TaskGraph:
    """The graph with the order in which the `arrival` resources served their tasks as their issue order.

    A task asks when its dependencies have ended and it heads all its other resources, which it holds from then on; asked
    resources serve one task at a time, the first that asked first, of those that ask in one instant the lowest number.

    Args:
        durations_s: [tasks], seconds; they decide the order and are not kept.

    Raises:
        AlgorithmError: durations of another shape, negative or not finite; an arrival resource that no task uses; tasks that
            wait for one another.
    """
    seconds = np.asarray(durations_s, dtype=np.float64)
    if seconds.shape != (len(graph.tasks),) or not (np.isfinite(seconds).all() and (seconds >= 0).all()):
        raise AlgorithmError(
            f"serving by arrival needs finite seconds >= 0 for each of {len(graph.tasks)} tasks, got {list(seconds.shape)}"
        )
    if unknown := [str(resource) for resource in arrival if resource not in graph.issue_order]:
        known = ", ".join(map(str, list(graph.issue_order)[:8]))
        raise AlgorithmError(f"no task uses {', '.join(unknown)}; the graph's resources begin with {known}")
    queues = _Queues(graph, seconds.tolist(), frozenset(arrival))
    queues.run()
    if queues.ended < len(graph.tasks):
        raise AlgorithmError(
            f"{len(graph.tasks) - queues.ended} of {len(graph.tasks)} tasks wait for one another; simulate the graph in issue "
            "order to see which"
        )
    order = {it: tuple(queues.served[it]) if it in queues.served else issued for it, issued in graph.issue_order.items()}
    return TaskGraph(tasks=graph.tasks, world_size=graph.world_size, issue_order=order)


class _Queues:
    """The simulation: `blockers[i]` counts dependencies that have not ended and issue-ordered queues that i does not head."""

    def __init__(self, graph: TaskGraph, seconds: Sequence[float], arrival: frozenset[Resource]) -> None:
        self._tasks, self._seconds = graph.tasks, seconds
        self._issued = {it: deque(order) for it, order in graph.issue_order.items() if it not in arrival}
        self._waiting: dict[Resource, deque[int]] = {it: deque() for it in arrival}
        self.served: dict[Resource, list[int]] = {it: [] for it in arrival}
        self._dependents: list[list[int]] = [[] for _ in graph.tasks]
        self._blockers = [0] * len(graph.tasks)
        self._events: list[tuple[float, int, int]] = []
        self.ended = 0
        for task in graph.tasks:
            needs = set(task.dependencies)
            self._blockers[task.index] = len(needs) + sum(it not in arrival for it in task.resources)
            for need in needs:
                self._dependents[need].append(task.index)
            if self._blockers[task.index] == 0:
                heapq.heappush(self._events, (0.0, ASK, task.index))
        for order in self._issued.values():
            self._unblock(order[0], 0.0)

    def run(self) -> None:
        while self._events:
            now_s, kind, task = heapq.heappop(self._events)
            if kind == ASK:
                for it in self._tasks[task].resources:
                    if it in self._waiting:
                        self._waiting[it].append(task)
                self._start(task, now_s)
            else:
                self._end(task, now_s)

    def _unblock(self, task: int, now_s: float) -> None:
        self._blockers[task] -= 1
        if self._blockers[task] == 0:
            heapq.heappush(self._events, (now_s, ASK, task))

    def _start(self, task: int, now_s: float) -> None:
        """Start if it is the first in every queue that it waits in."""
        queues = [it for it in self._tasks[task].resources if it in self._waiting]
        if all(self._waiting[it][0] == task for it in queues):
            for it in queues:
                self.served[it].append(task)
            heapq.heappush(self._events, (now_s + self._seconds[task], END, task))

    def _end(self, task: int, now_s: float) -> None:
        self.ended += 1
        for later in self._dependents[task]:
            self._unblock(later, now_s)
        freed = []
        for it in self._tasks[task].resources:
            queue = self._issued.get(it, self._waiting.get(it))
            assert queue is not None
            queue.popleft()
            if queue and it in self._issued:
                self._unblock(queue[0], now_s)
            elif queue:
                freed.append(queue[0])
        for first in dict.fromkeys(freed):
            self._start(first, now_s)


def merge_program(model: GossipModel, *, workers: int, epochs: int, steps: int = 1) -> Program:
    """Commutative merging: every worker trains an epoch, then merges its weights into the global model, and again.

    A repeat is one epoch of each worker: `steps` batches forward and backward as one task each, the updates, and the merge, a
    Mix of two on MERGE and on the worker. Unroll it and serve it by arrival (`[MERGE]`).

    Leaves out: the transfers to and from the global model; put their seconds into the merge's.

    Raises:
        AlgorithmError: fewer than one worker, epoch or step.
    """
    if min(workers, epochs, steps) < 1:
        raise AlgorithmError(f"merging needs workers, epochs and steps >= 1, got {workers}, {epochs} and {steps}")
    tasks: list[Task] = []
    makes, reads = {}, {}
    for worker in range(workers):
        first = len(tasks)
        reads[f"weights {worker}"] = (first,)
        origin = Origin(stage=0, replica=worker, microbatch=0)
        samples, names = steps * model.samples, model.components
        epoch: list[Work] = [Compute(component=name, phase=Phase.FORWARD, samples=samples) for name in names]
        epoch += [Compute(component=name, phase=Phase.BACKWARD, samples=samples) for name in reversed(names)]
        epoch.append(OptimizerStep(elements=steps * model.elements, tensors=steps * model.tensors))
        epoch.append(Mix(elements=model.elements, copies=2))
        for work in epoch:
            where = (Resource(worker, COMPUTE), *([MERGE] if isinstance(work, Mix) else []))
            needs = (len(tasks) - 1,) if len(tasks) > first else ()
            tasks.append(Task(index=len(tasks), work=work, resources=where, dependencies=needs, origin=origin))
        makes[f"weights {worker}"] = (len(tasks) - 1,)
    graph = TaskGraph(tasks=tuple(tasks), world_size=workers)
    return Program(parts=(Part(graph=graph, repeat=epochs, makes=makes, reads=reads),))
