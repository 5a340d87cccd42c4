"""The dynamic engine: a discrete-event simulation on SimPy.

Same-instant rule (both engines): each resource runs its tasks in issue order. A task starts when its dependencies have ended
and it is at the head of every resource it needs, which are then all free. It holds them all until it ends. So what happens in
one instant never depends on which event is looked at first.

Every task is a countdown of what blocks it, then a timer; every resource an in-order queue that hands its turn on when
its head ends. While one rank computes and communicates at once (`overlap`), its computation runs at rate 1 / compute and
its communication at 1 / communication. A collective or a transfer runs at the rate of its slowest rank. Ranks on one core
share it. Under `conditions` (a scenario) stragglers and links slow tasks too: `parsim.engines.scenario.paces`. Tasks that
are not slowed match the static engine bit for bit.

Programs add repeats, whose steps open and close one after the other. They also add resources that serve by arrival.
Requests of one instant are ordered after everything else of that instant has happened.

Leaves out: failures, which stop whole steps and belong to `parsim.engines.scenario.whole_run`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from parsim.arrays import Floats
from parsim.costs.estimate import OverlapFactors
from parsim.engines.boundary import Slowdown, checked_durations_s, checked_slowdown, simulated_timeline
from parsim.engines.compile import AnyGraph
from parsim.engines.deadlock import describe_task, stuck_error
from parsim.engines.instants import Counter, Instants
from parsim.engines.program import DurationsOf, Part, Program, Served, durations_by_step_s, resources_of, waiting_tasks
from parsim.engines.scenario.conditions import Conditions
from parsim.engines.scenario.paces import Paces, StepTask
from parsim.errors import StandstillError
from parsim.graph.columns import Columns, columns_of
from parsim.graph.task import Resource
from parsim.graph.taskgraph import TaskGraph
from parsim.timeline import Timeline


def simulate(
    graph: AnyGraph,
    durations_s: ArrayLike,
    *,
    overlap: OverlapFactors | None = None,
    conditions: Conditions | None = None,
) -> Timeline:
    """The Timeline of one step that starts at 0 with every resource free.

    Args:
        graph: a TaskGraph or its compiled form. durations_s: float64 [n], seconds each task takes alone.
        overlap: slowdown while one rank computes and communicates at once; None for none.
        conditions: of the world; None for none.

    Raises:
        GraphError: a cycle of dependencies; durations of the wrong shape, negative or not finite; factors below 1.
        DeadlockError: issue orders that wait for one another.
        StandstillError: a link that is down for good stops the step.
    """
    columns = columns_of(graph) if isinstance(graph, TaskGraph) else graph if isinstance(graph, Columns) else graph.columns
    durations = checked_durations_s(columns, durations_s, dimensions=1)
    if not columns.size:
        return simulated_timeline(columns, np.zeros(0), np.zeros(0))
    program = Program(parts=(Part(graph=columns.graph),))
    done = run_program(program, lambda part, step: durations, overlap=overlap, conditions=conditions, record=True)
    return simulated_timeline(columns, done.start_s, done.end_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramRun:
    """What a program did.

    Attributes:
        step_end_s: float64 [steps], the end of the last task of each. served: what every arrival resource did, in order.
        start_s, end_s: float64 [tasks], numbered through the steps; empty if they were not to be recorded.
    """

    step_end_s: Floats
    served: Served
    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        """To the end of the last task."""
        return float(self.step_end_s.max())


def run_program(
    program: Program,
    durations_s: DurationsOf,
    *,
    varying: bool = False,
    overlap: OverlapFactors | None = None,
    conditions: Conditions | None = None,
    record: bool = False,
) -> ProgramRun:
    """Simulate a program from 0, with every resource free.

    Args:
        durations_s: what tasks take alone, asked once per part, unless `varying`: then for every step.
        overlap, conditions: as `simulate` takes them. record: keep start and end of every task.

    Raises as `simulate`.
    """
    rows_s = durations_by_step_s(program, durations_s, varying=varying)
    run = _Run(program, rows_s, checked_slowdown(overlap, program.world_size), conditions, record)
    run.to_the_end()
    return ProgramRun(
        step_end_s=np.array(run.step_end_s),
        served={resource: tuple(counter.served) for resource, counter in run.counters.items()},
        start_s=np.array(run.start_s),
        end_s=np.array(run.end_s),
    )


class _Queue:
    """The tasks of one resource in issue order, step after step; the first one that has not ended is the head."""

    def __init__(self, order: Iterator[StepTask]) -> None:
        self._order = order
        self.head = next(order, None)

    def advance(self) -> StepTask | None:
        """The head has ended; returns the next one."""
        self.head = next(self._order, None)
        return self.head


class _Shape:
    """What every step of a part has in common."""

    def __init__(self, part: Part, arrival: frozenset[Resource]) -> None:
        self.tasks = part.graph.tasks
        self.makes, self.readers = part.makes, waiting_tasks(part.reads)
        self.queued = [task.resources for task in self.tasks]
        self.counter: list[Resource | None] = [None] * len(self.tasks)
        for task in self.tasks if arrival else ():
            self.queued[task.index] = tuple(resource for resource in task.resources if resource not in arrival)
            self.counter[task.index] = next((resource for resource in task.resources if resource in arrival), None)
        self.blockers = [
            len(set(task.dependencies)) + len(queued) for task, queued in zip(self.tasks, self.queued, strict=True)
        ]
        self.dependents: list[list[int]] = [[] for _ in self.tasks]
        for task in self.tasks:
            for dependency in set(task.dependencies):
                self.dependents[dependency].append(task.index)


def _makers_of(program: Program) -> dict[str, list[int]]:
    """Per value that some part reads, the steps that make it, in order."""
    read = {value for part in program.walk_once() for value in part.reads}
    makers: dict[str, list[int]] = {}
    for number, part in enumerate(program.steps):
        for value in part.makes:
            if value in read:
                makers.setdefault(value, []).append(number)
    return makers


class _Step:
    """A step under way. `blockers[i]` counts what task i still waits for: tasks that run or wait, queues it does not head."""

    def __init__(self, shape: _Shape, row_s: Floats) -> None:
        self.shape = shape
        self.durations_s: list[float] = row_s.tolist()
        self.blockers = list(shape.blockers)
        self.finished: set[int] = set()


class _Run:
    """One simulation of a program."""

    def __init__(
        self, program: Program, rows_s: list[Floats], slowdown: Slowdown, conditions: Conditions | None, record: bool
    ) -> None:
        self.instants = Instants()
        self.environment = self.instants.environment
        self.step_end_s = [0.0] * len(program.steps)
        total = program.first_number[-1] if record else 0
        self.start_s, self.end_s = [0.0] * total, [0.0] * total
        self._record = record
        self._program = program
        self._rows_s = rows_s
        self._shapes = {id(part): _Shape(part, program.arrival) for part in program.walk_once()}
        self._steps: dict[int, _Step] = {}
        self._closed: set[int] = {number for number, part in enumerate(program.steps) if not part.graph.tasks}
        self._makers = _makers_of(program)
        self._carried: dict[StepTask, list[StepTask]] = {}
        self._timers: dict[StepTask, object] = {}
        needed = not slowdown.is_none or conditions is not None
        self._paces = Paces(self, slowdown, conditions or Conditions()) if needed else None
        resources = resources_of(program)
        self.counters = {resource: Counter(self.instants, self._start) for resource in resources if resource in program.arrival}
        self._queues = {resource: _Queue(program.issued(resource)) for resource in resources if resource not in program.arrival}
        for queue in self._queues.values():
            self._unblock(queue.head)

    def to_the_end(self) -> None:
        """Raises DeadlockError or GraphError if it is never reached, StandstillError if a link that is down for good is why."""
        self.environment.run()
        if len(self._closed) == len(self._program.steps):
            return
        if self._paces is not None:
            self._check_lanes(self._paces)
        step = next(number for number in range(len(self._program.steps)) if number not in self._closed)
        finished = self._steps[step].finished if step in self._steps else set()
        raise stuck_error(self._program.steps[step].graph, finished)

    def _check_lanes(self, paces: Paces) -> None:
        for (step, task), lanes in paces.standing.items():
            names = ", ".join(sorted({"-".join(sorted((lane.source, lane.target))) for lane in lanes}))
            graph = self._program.steps[step].graph
            raise StandstillError(
                f"{describe_task(graph, task)} never ends: bandwidth_factor = 0 on {names} to the end of the scenario; "
                "give the spell an until_s, or a factor above 0"
            )

    def _open(self, number: int) -> _Step:
        """The step, begun if it has not been: its first task has come to the head of some resource."""
        if number not in self._steps:
            shape = self._shapes[id(self._program.steps[number])]
            step = self._steps[number] = _Step(shape, self._rows_s[number])
            for later, values in shape.readers.items():
                makers = {maker for value in values for maker in self._unfinished_makers(value, number)}
                step.blockers[later] += len(makers)
                for maker in makers:
                    self._carried.setdefault(maker, []).append((number, later))
        return self._steps[number]

    def _unfinished_makers(self, value: str, number: int) -> list[StepTask]:
        """The tasks that step `number` waits for to read the value: those of the latest step before that makes it."""
        made = self._makers.get(value, [])
        place = bisect_left(made, number)
        if not place or made[place - 1] in self._closed:
            return []
        maker = made[place - 1]
        begun = self._steps.get(maker)
        tasks = self._shapes[id(self._program.steps[maker])].makes[value]
        return [(maker, task) for task in tasks if begun is None or task not in begun.finished]

    def _unblock(self, key: StepTask | None) -> None:
        if key is None:
            return
        number, task = key
        step = self._steps.get(number) or self._open(number)
        step.blockers[task] -= 1
        if step.blockers[task]:
            return
        counter = step.shape.counter[task]
        if counter is None:
            self._start(key)
        else:
            self.counters[counter].ask(key, step.shape.queued[task][0].rank)

    def _start(self, key: StepTask) -> None:
        number, task = key
        step = self._steps[number]
        if self._record:
            self.start_s[self._program.first_number[number] + task] = self.environment.now
        self.set_timer(key, step.durations_s[task])
        if self._paces:
            self._paces.started(key, step.shape.tasks[task], step.durations_s[task])

    def set_timer(self, key: StepTask, delay_s: float) -> None:
        """Task ends `delay_s` from now, unless another timer is set for it before."""
        timer = self.environment.timeout(delay_s)
        self._timers[key] = timer
        timer.callbacks.append(lambda event: self._end(key) if self._timers.get(key) is event else None)

    def stop_timer(self, key: StepTask) -> None:
        """Task stands still until a timer is set for it."""
        self._timers.pop(key, None)

    def _end(self, key: StepTask) -> None:
        number, task = key
        del self._timers[key]
        step = self._steps[number]
        if self._record:
            self.end_s[self._program.first_number[number] + task] = self.environment.now
        step.finished.add(task)
        if self._paces:
            self._paces.ended(key)
        if len(step.finished) == len(step.shape.tasks):
            self.step_end_s[number] = self.environment.now
            self._closed.add(number)
            del self._steps[number]
        for later in step.shape.dependents[task]:
            self._unblock((number, later))
        for waiting in self._carried.pop(key, ()):
            self._unblock(waiting)
        for resource in step.shape.queued[task]:
            self._unblock(self._queues[resource].advance())
        counter = step.shape.counter[task]
        if counter is not None:
            self.counters[counter].leave()
