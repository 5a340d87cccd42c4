"""The dynamic engine: a discrete-event simulation on SimPy.

Same-instant rule (both engines): each resource runs its tasks in issue order. A task starts when its dependencies have ended
and it is at the head of every resource it needs, which are then all free. It holds them all until it ends. So what happens in
one instant never depends on which event is looked at first.

Every task is a countdown of what blocks it, then a timer; every resource an in-order queue that hands its turn on when
its head ends. While one rank computes and communicates at once (`overlap`), its computation runs at rate 1 / compute and
its communication at 1 / communication. A collective or a transfer runs at the rate of its slowest rank. Ranks on one core
share it. Under `conditions` (a scenario) stragglers and links slow tasks too (`Paces`). Tasks that are not slowed match the
static engine bit for bit.

Programs add repeats, whose steps open and close one after the other. They also add resources that serve by arrival.
Requests of one instant are ordered after everything else of that instant has happened.

Leaves out: failures, which stop whole steps and belong to `parsim.engines.whole_run`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import simpy
from numpy.typing import ArrayLike

from parsim.costs.estimate import OverlapFactors
from parsim.engines.program import Part, Program, Served, waiting_tasks
from parsim.engines.scenario import Conditions, Flow, Lane, Scenario, max_min_rates
from parsim.engines.static import (
    AnyGraph,
    Slowdown,
    checked_durations_s,
    checked_slowdown,
    describe_task,
    simulated_timeline,
    stuck_error,
)
from parsim.errors import StandstillError
from parsim.numeric import Floats
from parsim.program.columns import Columns, columns_of
from parsim.program.taskgraph import COMPUTE, Resource, Task, TaskGraph
from parsim.timeline import Timeline
from parsim.work import Collective, SendRecv, is_communication


class Instants:
    """A SimPy environment whose instants have an end: first those who came are lined up, then paces are set."""

    def __init__(self) -> None:
        self.environment = simpy.Environment()
        self._line_up: list[Callable[[], None]] = []
        self._set_paces: list[Callable[[], None]] = []
        self._armed = False

    def line_up(self, action: Callable[[], None]) -> None:
        """Do `action` when nothing else is left in this instant; it may start tasks."""
        self._line_up.append(action)
        self._arm()

    def set_paces(self, action: Callable[[], None]) -> None:
        """Do `action` when nobody is left to line up either."""
        self._set_paces.append(action)
        self._arm()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self.environment.timeout(0).callbacks.append(lambda _: self._look())

    def _look(self) -> None:
        self._armed = False
        if self.environment.peek() > self.environment.now:
            due = self._line_up or self._set_paces
            actions = due.copy()
            due.clear()
            for action in actions:
                action()
        if self._line_up or self._set_paces:
            self._arm()


class Counter:
    """A resource that serves one task at a time, first come first served. Those who come in one instant are lined up by
    rank, then step, then task."""

    def __init__(self, instants: Instants, serve: Callable[[tuple[int, int]], None]) -> None:
        self.served: list[tuple[int, int]] = []
        self._instants = instants
        self._serve = serve
        self._line: deque[tuple[int, int]] = deque()
        self._come: list[tuple[int, tuple[int, int]]] = []
        self._busy = False

    def ask(self, key: tuple[int, int], rank: int) -> None:
        if not self._come:
            self._instants.line_up(self._line_up)
        self._come.append((rank, key))

    def leave(self) -> None:
        self._busy = False
        self._next()

    def _line_up(self) -> None:
        self._line.extend(key for _, key in sorted(self._come))
        self._come.clear()
        self._next()

    def _next(self) -> None:
        if self._line and not self._busy:
            self._busy = True
            key = self._line.popleft()
            self.served.append(key)
            self._serve(key)


# How slowly every running task goes, moment by moment: overlap, stragglers, and links that change or are shared.
#
# A task is so many seconds of work; with slowness f it takes f times as long. Computation and loading are as slow as the
# slowest rank they run on; communication first spends its latency, then moves its bytes as fast as its lanes let it. On top,
# whatever overlaps on a core slows as the overlap factors say, and computations on one core share it evenly. Slowness changes
# once per instant, after everything that starts or ends in it. A task whose slowness changes gets a new timer for its remaining
# work. A task whose slowness stays 1 matches the static engine bit for bit.


StepTask = tuple[int, int]
"""A step, and a task of it."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """Attributes:
    left_s: of work, at `since_s`. own: the slowness its ranks impose. slowness: as it goes, with its lanes.
    cores: on which it slows, or is slowed by, others (one that several of its ranks share comes several times).
    changes: of slowness so far; timed: after how many of them the end of its latency was last foretold.
    """

    left_s: float
    since_s: float
    communicates: bool
    ranks: tuple[int, ...]
    cores: tuple[int, ...]
    flow: Flow | None
    own: float = 1.0
    slowness: float = 1.0
    moving: bool = False
    changes: int = 0
    timed: int = -1


class Paces:
    """The slowness of all tasks of one simulation, which reports the tasks that start and end, and has a timer for each."""

    def __init__(self, simulation: _Run, slowdown: Slowdown, conditions: Conditions) -> None:
        self._simulation = simulation
        self._environment = simulation.instants.environment
        self._slowdown = slowdown
        self._core: list[int] = slowdown.core.tolist()
        self._conditions = conditions
        self._active: list[tuple[dict[StepTask, int], dict[StepTask, int]]] = [({}, {}) for _ in self._core]
        self._running: dict[StepTask, _Running] = {}
        self._moving: dict[StepTask, Flow] = {}
        self._doubtful: dict[StepTask, None] = {}
        self._waiting = False
        for time in conditions.change_times_s:
            self._environment.timeout(time).callbacks.append(lambda _: self._doubt(self._running))

    def started(self, key: StepTask, task: Task, duration_s: float) -> None:
        communicates = is_communication(task.work)
        computes = tuple(dict.fromkeys(resource.rank for resource in task.resources if resource.stream == COMPUTE))
        running = _Running(
            left_s=duration_s,
            since_s=self._environment.now,
            communicates=communicates,
            ranks=task.ranks,
            cores=tuple(self._core[rank] for rank in (task.ranks if communicates else computes)),
            flow=self._conditions.flows.get(task.work) if isinstance(task.work, Collective | SendRecv) else None,
        )
        self._running[key] = running
        self._doubt((key,))
        for core in running.cores:
            here = self._active[core][communicates]
            here[key] = here.get(key, 0) + 1
            self._doubt_core(core)

    def ended(self, key: StepTask) -> None:
        running = self._running.pop(key)
        self._doubtful.pop(key, None)
        for core in running.cores:
            self._active[core][running.communicates].pop(key, None)
            self._doubt_core(core)
        if self._moving.pop(key, None) is not None:
            self._doubt(())

    @property
    def standing(self) -> dict[StepTask, tuple[Lane, ...]]:
        """The tasks that stand still, each with its lanes that have no bandwidth."""
        return {
            key: tuple(lane for lane in flow.loads if self._conditions.room(lane, self._now_s) == 0)
            for key, flow in self._moving.items()
            if self._running[key].slowness == math.inf
        }

    @property
    def _now_s(self) -> float:
        """In the scenario's time."""
        return float(self._environment.now) + self._conditions.scenario.start_s

    def _doubt_core(self, core: int) -> None:
        for side in self._active[core]:
            self._doubt(side)

    def _doubt(self, keys: dict[StepTask, _Running] | dict[StepTask, int] | tuple[StepTask, ...]) -> None:
        """The slowness of these tasks, and of whatever moves bytes, may change in this instant."""
        self._doubtful.update(dict.fromkeys(keys))
        if not self._waiting:
            self._waiting = True
            self._simulation.instants.set_paces(self._apply)

    def _apply(self) -> None:
        self._waiting = False
        for key in self._doubtful:
            running = self._running[key]
            running.own = self._own_slowness(key, running)
            if not running.moving:
                self._go(key, running, running.own)
                self._time_latency(key, running)
        self._doubtful.clear()
        for key, slowness in self._lane_slowness().items():
            self._go(key, self._running[key], slowness)

    def _own_slowness(self, key: StepTask, running: _Running) -> float:
        """What its ranks impose: what else runs on any of its cores, and the slowest straggler of a computation."""
        slowdown, factor = self._slowdown, 1.0
        for core in running.cores:
            overlaps = bool(self._active[core][not running.communicates])
            if not running.communicates:
                computing = sum(self._active[core][False].values())
                factor = max(factor, computing * (slowdown.compute if overlaps else 1.0))
            else:
                beside = slowdown.communication if overlaps else 1.0
                if slowdown.divided:
                    on_core = self._active[core][True]
                    beside *= sum(on_core.values()) / on_core[key]
                factor = max(factor, beside)
        if not running.communicates and self._conditions.scenario.stragglers:
            factor *= max(self._conditions.slowness(rank, self._now_s) for rank in running.ranks)
        return factor

    def _go(self, key: StepTask, running: _Running, slowness: float) -> None:
        """From now on with this slowness."""
        if slowness == running.slowness:
            return
        now = self._environment.now
        running.left_s = max(0.0, running.left_s - (now - running.since_s) / running.slowness)
        running.since_s, running.slowness, running.changes = now, slowness, running.changes + 1
        if slowness < math.inf:
            self._simulation.set_timer(key, running.left_s * slowness)
        else:
            self._simulation.stop_timer(key)

    def _time_latency(self, key: StepTask, running: _Running) -> None:
        """Communication that still spends its latency begins to move bytes when that has passed."""
        flow = running.flow
        if flow is None or running.timed == running.changes or flow.transfer_s == 0:
            return
        running.timed = changes = running.changes
        spent_s = (self._environment.now - running.since_s) / running.slowness
        latency_s = max(0.0, running.left_s - spent_s - flow.transfer_s) * running.slowness

        def move(_: object) -> None:
            if self._running.get(key) is running and running.changes == changes:
                running.moving = True
                self._moving[key] = flow
                self._doubt((key,))

        self._environment.timeout(latency_s).callbacks.append(move)

    def _lane_slowness(self) -> dict[StepTask, float]:
        """The slowness of every task that moves bytes."""
        if not self._moving:
            return {}
        conditions, now_s = self._conditions, self._now_s
        users: dict[Lane, int] = {}
        for flow in self._moving.values():
            for lane in flow.loads:
                users[lane] = users.get(lane, 0) + 1
        room = {lane: conditions.room(lane, now_s) for lane in users}
        alone: dict[StepTask, float] = {}
        for key, flow in self._moving.items():
            most = min(flow.room[lane] * room[lane] / share for lane, share in flow.loads.items())
            alone[key] = self._running[key].own * (flow.full_pace / most) if most > 0 else math.inf
        if not conditions.scenario.share_links or max(users.values()) == 1:
            return alone
        lanes = {lane: number for number, lane in enumerate(users)}
        loads, capacity = np.zeros((len(lanes), len(self._moving))), np.zeros(len(lanes))
        for column, flow in enumerate(self._moving.values()):
            for lane, share in flow.loads.items():
                loads[lanes[lane], column] = share
                capacity[lanes[lane]] = flow.room[lane] * room[lane]
        full = np.array([flow.full_pace for flow in self._moving.values()])
        limit = full / np.array([alone[key] for key in self._moving])
        rates = max_min_rates(loads, capacity, limit)
        return {
            key: alone[key] if rate == most else (pace / rate if rate > 0 else math.inf)
            for key, pace, rate, most in zip(self._moving, full.tolist(), rates.tolist(), limit.tolist(), strict=True)
        }


def simulate(
    graph: AnyGraph,
    durations_s: ArrayLike,
    *,
    overlap: OverlapFactors | None = None,
    conditions: Conditions | None = None,
) -> Timeline:
    """The Timeline of one step that starts at 0 with every resource free.

    Args:
        durations_s: float64 [n], seconds each task takes alone.
        overlap: slowdown while one rank computes and communicates at once; None for none.

    Raises:
        GraphError: a cycle of dependencies; durations of the wrong shape, negative or not finite; factors below 1.
        DeadlockError: issue orders that wait for one another. StandstillError: a link that is down for good stops the step.
    """
    columns = columns_of(graph) if isinstance(graph, TaskGraph) else graph if isinstance(graph, Columns) else graph.columns
    durations = checked_durations_s(columns, durations_s, dimensions=1)
    if not columns.size:
        return simulated_timeline(columns, np.zeros(0), np.zeros(0))
    program = Program(parts=(Part(graph=columns.graph),))
    done = run_program(program, [durations], overlap=overlap, conditions=conditions, record=True)
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
        return float(self.step_end_s.max())


def run_program(
    program: Program,
    durations_s: Sequence[ArrayLike],
    *,
    overlap: OverlapFactors | None = None,
    conditions: Conditions | None = None,
    record: bool = False,
) -> ProgramRun:
    """Simulate a program from 0, with every resource free.

    Args:
        durations_s: of every step what its tasks take alone, float64 [tasks of its part].
        record: keep start and end of every task.

    Raises as `simulate`.
    """
    rows_s = [
        checked_durations_s(part.graph, row, dimensions=1, step=step)
        for step, (part, row) in enumerate(zip(program.steps, durations_s, strict=True))
    ]
    run = _Run(program, rows_s, checked_slowdown(overlap, program.world_size), conditions, record)
    run.to_the_end()
    return ProgramRun(
        step_end_s=np.array(run.step_end_s),
        served={resource: tuple(counter.served) for resource, counter in run.counters.items()},
        start_s=np.array(run.start_s),
        end_s=np.array(run.end_s),
    )


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


class _Step:
    """A step under way. `blockers[i]` counts what task i still waits for: tasks that run or wait, queues it does not head."""

    def __init__(self, shape: _Shape, row_s: Floats) -> None:
        self.shape = shape
        self.durations_s: list[float] = row_s.tolist()
        self.blockers = list(shape.blockers)
        self.finished: set[int] = set()


class _Run:
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
        self._shapes = {id(part): _Shape(part, program.arrival) for part in program.unlike_parts}
        self._steps: dict[int, _Step] = {}
        self._closed: set[int] = {number for number, part in enumerate(program.steps) if not part.graph.tasks}
        self._makers: dict[str, list[int]] = {}  # per value that some part reads, the steps that make it, in order
        read = {value for part in program.unlike_parts for value in part.reads}
        for number, part in enumerate(program.steps):
            for value in read.intersection(part.makes):
                self._makers.setdefault(value, []).append(number)
        self._carried: dict[StepTask, list[StepTask]] = {}
        self._timers: dict[StepTask, object] = {}
        needed = not slowdown.is_none or conditions is not None
        self._paces = Paces(self, slowdown, conditions or Conditions(scenario=Scenario())) if needed else None
        self.counters = {
            resource: Counter(self.instants, self._start) for resource in program.resources if resource in program.arrival
        }
        # the tasks of each resource in issue order, step after step, behind the one that is at its head
        self._queues = {resource: program.issued(resource) for resource in program.resources if resource not in program.arrival}
        for queue in self._queues.values():
            self._unblock(next(queue, None))

    def to_the_end(self) -> None:
        """Raises DeadlockError or GraphError if it is never reached, StandstillError if a link that is down for good is why."""
        self.environment.run()
        if len(self._closed) == len(self._program.steps):
            return
        for (number, task), lanes in ({} if self._paces is None else self._paces.standing).items():
            names = ", ".join(sorted({"-".join(sorted((lane.source, lane.target))) for lane in lanes}))
            raise StandstillError(
                f"{describe_task(self._program.steps[number].graph, task)} never ends: bandwidth_factor = 0 on {names} to the "
                "end of the scenario; give the spell an until_s, or a factor above 0"
            )
        step = next(number for number in range(len(self._program.steps)) if number not in self._closed)
        finished = self._steps[step].finished if step in self._steps else set()
        raise stuck_error(self._program.steps[step].graph, finished)

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
            self._unblock(next(self._queues[resource], None))
        counter = step.shape.counter[task]
        if counter is not None:
            self.counters[counter].leave()
