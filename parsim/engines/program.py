"""A training run as repeated task graphs: each repeated graph is written once, and no engine unrolls it.

    Program = parts in order, each a task graph that runs some times in a row

Two things carry over between repeats. Each resource goes on where it stopped (its frontier), so a rank that is done early
begins its next repeat early. And values carry dependencies from task to task. A part lists the tasks after which a value
is ready (`makes`) and the tasks that wait for it (`reads`). A reader waits for the latest repeat that made the value, in
any part.

A resource has one of two disciplines. `issue`, the usual one: it runs its tasks in the written order, repeat after repeat.
`arrival`: it is exclusive and serves first come, first served. Only the dynamic engine can decide that order; what it recorded
replays in the static engine and the executor (`unrolled`).

Two readers: `dynamic.run_program`, with arrival, slowdown and conditions, and `unrolled`, which writes the whole run out as one
graph. Both give the same seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.costs.estimate import OverlapFactors
from parsim.engines import static
from parsim.engines.static import CompiledGraph
from parsim.errors import GraphError
from parsim.numeric import Ints
from parsim.program.columns import Columns
from parsim.program.taskgraph import HOST, Resource, Task, TaskGraph, outlasts

Carried = Mapping[str, tuple[int, ...]]
"""Value -> numbers of tasks."""

Served = Mapping[Resource, Sequence[tuple[int, int]]]
"""Per arrival resource the (step, task) it served, in that order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A task graph that runs `repeat` times.

    Attributes:
        makes: value -> tasks; it is there when all of them have ended. reads: value -> tasks that wait for it.
            A value that was never made is there from the beginning.

    Raises GraphError: fewer than one repeat, or a value that names no task or one that the graph does not have.
    """

    graph: TaskGraph
    repeat: int = 1
    makes: Carried = field(default_factory=dict)
    reads: Carried = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise GraphError(f"a part of a program runs at least once, got repeat {self.repeat}; leave it out instead")
        for value, tasks in chain(self.makes.items(), self.reads.items()):
            if not tasks:
                raise GraphError(f"the value {value!r} names no task; leave it out, or name who makes or reads it")
            for task in tasks:
                if not 0 <= task < len(self.graph.tasks):
                    raise GraphError(
                        f"the value {value!r} names task {task}, but the part has tasks 0 to {len(self.graph.tasks) - 1}"
                    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Parts in order; one may come several times.

    arrival: resources that serve first come, first served; of several that come in one instant the one on the lowest rank, then
    the lowest number. A task waits for at most one such resource, holding its others.

    Raises GraphError: no part, parts over different numbers of ranks, an unknown arrival resource, or a task that needs two of
        them or nothing else.
    """

    parts: tuple[Part, ...]
    arrival: frozenset[Resource] = frozenset()

    def __post_init__(self) -> None:
        if not self.parts:
            raise GraphError("a program needs at least one part")
        sizes = sorted({part.graph.world_size for part in self.parts})
        if len(sizes) > 1:
            raise GraphError(f"the parts of a program run on the same ranks, got world sizes {sizes}")
        if unknown := sorted(self.arrival - set(self.resources)):
            listed = sorted(map(str, self.resources))
            some = ", ".join(listed[:12]) + (", ..." if len(listed) > 12 else "")
            raise GraphError(f"no task uses the arrival resource {unknown[0]}; the program has {some}")
        for task in chain.from_iterable(part.graph.tasks for part in self.unlike_parts if self.arrival):
            shared = [resource for resource in task.resources if resource in self.arrival]
            if len(shared) > 1 or len(shared) == len(task.resources):
                names = ", ".join(map(str, task.resources))
                raise GraphError(
                    f"task {task.index} needs {names}, of which {len(shared)} serve by arrival; "
                    "give it one such resource at most, beside the stream that issues it"
                )

    @property
    def world_size(self) -> int:
        return self.parts[0].graph.world_size

    @property
    def unlike_parts(self) -> tuple[Part, ...]:
        """Every part once."""
        return tuple({id(part): part for part in self.parts}.values())

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """Every resource that some task holds, once."""
        return tuple(dict.fromkeys(resource for part in self.unlike_parts for resource in part.graph.resources))

    @cached_property
    def steps(self) -> tuple[Part, ...]:
        """The part of step t. Its memory grows with the repeats."""
        return tuple(part for part in self.parts for _ in range(part.repeat))

    @cached_property
    def first_number(self) -> tuple[int, ...]:
        """Per step, and for the end, the number of its first task when all are numbered through."""
        return tuple(np.cumsum([0, *(len(part.graph.tasks) for part in self.steps)]).tolist())

    def issued(self, resource: Resource) -> Iterator[tuple[int, int]]:
        """(step, task) in the order in which the resource issues them, from step to step."""
        for step, part in enumerate(self.steps):
            for task in part.graph.issue_order.get(resource, ()):
                yield step, task


def unrolled(program: Program, served: Served | None = None) -> TaskGraph:
    """The whole run as one graph, task after task: for readers that know no repeats, and as the oracle of the tests.

    `served`: the order that `dynamic.run_program` recorded; GraphError where that of an arrival resource is missing.
    """
    if missing := sorted(program.arrival - set(served or ())):
        raise GraphError(
            f"{missing[0]} serves by arrival: the order is known once the dynamic engine has run the program; pass `served`"
        )
    tasks: list[Task] = []
    made: dict[str, tuple[int, ...]] = {}
    for part in program.steps:
        waits = waiting_tasks(part.reads)
        first = len(tasks)
        for task in part.graph.tasks:
            carried = chain.from_iterable(made.get(value, ()) for value in waits.get(task.index, ()))
            needs = (*(first + other for other in task.dependencies), *carried)
            tasks.append(replace(task, index=first + task.index, dependencies=tuple(dict.fromkeys(needs))))
        made |= {value: tuple(first + index for index in makers) for value, makers in part.makes.items()}
    first_number = program.first_number
    orders = {
        resource: tuple(
            first_number[step] + task
            for step, task in (served[resource] if served and resource in program.arrival else program.issued(resource))
        )
        for resource in program.resources
    }
    return TaskGraph(tasks=tuple(tasks), world_size=program.world_size, issue_order=orders)


def waiting_tasks(reads: Carried) -> dict[int, list[str]]:
    """Task -> the values it waits for."""
    waits: dict[int, list[str]] = {}
    for value, tasks in reads.items():
        for task in tasks:
            waits.setdefault(task, []).append(value)
    return waits


# Steps in a row, as the executor runs them: a rank begins a step when all its tasks of the step before have ended.
#
# So the parameters that ZeRO gathers at a step's end are there before the next step reads them. A rank that is done early does
# not wait for the others. Loading may run ahead (`OverlapFactors.loads_ahead`), and messages of merging in turn may outlast a
# step (`parsim.program.taskgraph.outlasts`).


def mean_step_s(
    compiled: CompiledGraph, durations_s: ArrayLike, overlap: OverlapFactors, *, steps: int, unit: Ints | None = None
) -> NDArray[np.float64]:
    """The mean of several steps in a row, for every row of durations: float64 [S] seconds. Arguments as of `step_times_s`.
    Leaves out failures and changes of the machine between steps."""
    together = waiting_together(compiled.columns, overlap)
    return static.step_times_s(compiled, durations_s, steps=steps, overlap=overlap, unit=unit, together=together)


def waiting_together(columns: Columns, overlap: OverlapFactors) -> Ints:
    """int64 [resources]: a number that is equal for those that begin a step together: all of a rank, except what runs ahead
    (loading, where `overlap` says so) or outlasts it."""
    groups = np.array(columns.resource_rank, dtype=np.int64)
    if overlap.loads_ahead:
        loads = np.array([resource.stream == HOST for resource in columns.resources], dtype=np.bool_)
        groups = np.where(loads, groups + columns.world_size, groups)
    alone = np.flatnonzero([outlasts(resource) for resource in columns.resources])
    groups[alone] = 2 * columns.world_size + np.arange(len(alone))
    return groups


def carried_by_steps(columns: Columns, overlap: OverlapFactors) -> tuple[Carried, Carried]:
    """What `waiting_together` says, as values of a Program (`Part.makes` and `Part.reads`): one value per group."""
    ends: dict[int, tuple[list[int], list[int]]] = {}
    for resource, number in enumerate(waiting_together(columns, overlap).tolist()):
        if outlasts(columns.resources[resource]):
            continue  # its own order carries it on
        issued = columns.issued.row(resource)
        if len(issued):
            first, last = ends.setdefault(number, ([], []))
            first.append(int(issued[0]))
            last.append(int(issued[-1]))
    made = {f"step {number}": tuple(dict.fromkeys(last)) for number, (_, last) in ends.items()}
    read = {f"step {number}": tuple(dict.fromkeys(first)) for number, (first, _) in ends.items()}
    return made, read


def steps_in_a_row(columns: Columns, overlap: OverlapFactors, *, steps: int) -> Program:
    makes, reads = carried_by_steps(columns, overlap)
    return Program(parts=(Part(graph=columns.graph, repeat=steps, makes=makes, reads=reads),))
