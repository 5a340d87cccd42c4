"""A training run as a program: steps with repeats, what they carry over, and counters where who comes first is served first.

Nothing is unrolled: a resource goes on to its first task of the next step when its last one of this step has ended. A
resource is issued in order, unless it is listed under `arrival`: then it is exclusive and serves its tasks first come, first
served, which only the dynamic engine can decide. The order it recorded replays in the static engine: `unrolled`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from parsim.errors import GraphError
from parsim.graph.task import Resource, Task
from parsim.graph.taskgraph import TaskGraph

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Steps of one graph.

    Attributes:
        durations_s: float64 [n] for every step, or [repeats, n], a row for each: what tasks take alone.
        carries: (task, task of the step before): the first waits for the second. In the first step of a program it waits for
            nothing; in the first of a later part the second is a task of the part before.
    """

    graph: TaskGraph
    durations_s: Floats
    repeats: int = 1
    carries: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        n = len(self.graph.tasks)
        if self.repeats < 1:
            raise GraphError(f"a part of a program needs repeats >= 1, got {self.repeats}")
        if self.durations_s.shape not in ((n,), (self.repeats, n)):
            raise GraphError(
                f"durations_s must have shape [{n}] or [{self.repeats}, {n}], got {list(self.durations_s.shape)}; "
                "one entry per task"
            )

    def row_s(self, repeat: int) -> Floats:
        """float64 [n]: what the tasks of one of its steps take."""
        row: Floats = self.durations_s if self.durations_s.ndim == 1 else self.durations_s[repeat]
        return row


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingProgram:
    """Parts, one after the other, over the same ranks.

    Attributes:
        arrival: resources that serve first come, first served; of several that come in one instant the one on the lowest rank,
            then the lowest number. A task waits for at most one such resource, holding its others.

    Raises GraphError: no part, parts over different numbers of ranks, an unknown arrival resource, a task that needs two of
    them or nothing else, or a carried dependency on a task that is not there.
    """

    parts: tuple[Part, ...]
    arrival: frozenset[Resource] = frozenset()

    def __post_init__(self) -> None:
        if not self.parts:
            raise GraphError("a program needs at least one part")
        sizes = {part.graph.world_size for part in self.parts}
        if len(sizes) > 1:
            raise GraphError(f"the parts of a program run on the same ranks, got world sizes {sorted(sizes)}")
        known = {resource for part in self.parts for resource in part.graph.resources}
        if unknown := sorted(self.arrival - known):
            raise GraphError(f"no task uses the arrival resource {unknown[0]}; the program has {_some(known)}")
        for number, part in enumerate(self.parts):
            for task in part.graph.tasks if self.arrival else ():
                shared = [resource for resource in task.resources if resource in self.arrival]
                if len(shared) > 1 or len(shared) == len(task.resources):
                    names = ", ".join(map(str, task.resources))
                    raise GraphError(
                        f"task {task.index} needs {names}, of which {len(shared)} serve by arrival; "
                        "give it one such resource at most, beside the stream that issues it"
                    )
            own = len(part.graph.tasks)
            before = len(self.parts[number - 1].graph.tasks) if number else own
            for later, earlier in part.carries:
                if not (0 <= later < own and 0 <= earlier < (before if part.repeats == 1 else min(before, own))):
                    raise GraphError(f"part {number} carries task {earlier} to {later}, but it has no such task")

    @property
    def world_size(self) -> int:
        return self.parts[0].graph.world_size

    @cached_property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """Per step its part and the repeat within it."""
        return tuple((number, repeat) for number, part in enumerate(self.parts) for repeat in range(part.repeats))

    @cached_property
    def first_number(self) -> tuple[int, ...]:
        """Per step, and for the end, the number of its first task when all are numbered through."""
        sizes = [0, *(len(self.parts[part].graph.tasks) for part, _ in self.steps)]
        return tuple(np.cumsum(sizes).tolist())

    def issued(self, resource: Resource) -> Iterator[tuple[int, int]]:
        """(step, task) in the order in which the resource issues them, from step to step."""
        for step, (part, _) in enumerate(self.steps):
            for task in self.parts[part].graph.issue_order.get(resource, ()):
                yield step, task


Served = Mapping[Resource, Sequence[tuple[int, int]]]
"""Per arrival resource the (step, task) it served, in that order."""


def unrolled(program: TrainingProgram, served: Served) -> tuple[TaskGraph, Floats]:
    """The whole program as one graph with the recorded orders, and its durations (float64 [tasks]): what replays a run."""
    first = program.first_number
    tasks: list[Task] = []
    for step, (number, _) in enumerate(program.steps):
        part, shift = program.parts[number], first[step]
        carried: dict[int, list[int]] = {}
        for later, earlier in part.carries if step else ():
            carried.setdefault(later, []).append(first[step - 1] + earlier)
        for task in part.graph.tasks:
            needs = (*(need + shift for need in task.dependencies), *carried.get(task.index, ()))
            tasks.append(
                Task(
                    index=task.index + shift,
                    work=task.work,
                    resources=task.resources,
                    dependencies=needs,
                    origin=task.origin,
                )
            )
    resources = dict.fromkeys(resource for part in program.parts for resource in part.graph.resources)
    order = {
        resource: tuple(
            first[step] + task for step, task in (served[resource] if resource in program.arrival else program.issued(resource))
        )
        for resource in resources
    }
    rows = [program.parts[number].row_s(repeat) for number, repeat in program.steps]
    durations: Floats = np.concatenate(rows)
    return TaskGraph(tasks=tuple(tasks), world_size=program.world_size, issue_order=order), durations


def _some(resources: set[Resource]) -> str:
    names = sorted(map(str, resources))
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
