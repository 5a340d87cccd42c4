"""A program simulated repeat by repeat, without being unrolled, in an engine that knows only one graph.

Each resource's frontier, and the time at which each value is there, are carried from repeat to repeat. Where they recur,
shifted by a constant, all further repeats are that constant later and are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.engines import static
from parsim.engines.program import DurationsOf, Part, Program, waiting_tasks
from parsim.engines.static import CompiledGraph, compile_graph
from parsim.errors import GraphError
from parsim.program.task import Origin, Resource, Task
from parsim.program.taskgraph import TaskGraph
from parsim.timeline import Timeline
from parsim.work import LoadBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramTimes:
    """When a program's repeats end.

    Attributes:
        end_s: float64 [repeats], the latest end of the tasks of each repeat and of all before. frontier_s: per resource.
        ready_s: per value, when the last one made was there. simulated: repeats that were, the others follow from them.
    """

    end_s: NDArray[np.float64]
    frontier_s: Mapping[Resource, float]
    ready_s: Mapping[str, float]
    simulated: int

    @property
    def makespan_s(self) -> float:
        return float(self.end_s[-1])


def simulate_program(
    program: Program,
    durations_s: DurationsOf,
    *,
    varying: bool = False,
    engine: Callable[[CompiledGraph, ArrayLike], Timeline] = static.simulate,
) -> ProgramTimes:
    """Run a program from a common start with every resource free.

    Args:
        durations_s: asked once per part, unless `varying`: then for every repeat, and every repeat is simulated.
        engine: `static.simulate` or `dynamic.simulate`.

    Leaves out: the slowdown of computation and communication that overlap across repeats.

    Raises:
        GraphError: durations of another shape, negative or not finite; a deadlock; a resource that serves by arrival.
    """
    if program.arrival:
        names = ", ".join(sorted(map(str, program.arrival)))
        raise GraphError(f"{names} serves by arrival, which only the dynamic engine decides: use dynamic.run_program")
    run = _Run(durations_s, varying, engine)
    run.program(program)
    return ProgramTimes(
        end_s=np.maximum.accumulate(np.array(run.ends)), frontier_s=run.frontier, ready_s=run.ready, simulated=run.simulated
    )


class _Opened:
    """A part with a task in front of each resource and value, as long as what came before: compiled once."""

    def __init__(self, part: Part) -> None:
        graph = part.graph
        self.resources = tuple(graph.issue_order)
        self.values = tuple(part.reads)
        self.offset = len(self.resources) + len(self.values)
        waits = waiting_tasks(part.reads)
        number = {value: len(self.resources) + place for place, value in enumerate(self.values)}
        held = [
            *self.resources,
            *(Resource(graph.tasks[part.reads[value][0]].ranks[0], f"carried {value}") for value in self.values),
        ]
        idle, origin = LoadBatch(samples=0, size_bytes=0), Origin(stage=0)
        tasks = [Task(index=i, work=idle, resources=(it,), dependencies=(), origin=origin) for i, it in enumerate(held)]
        for task in graph.tasks:
            needs = [number[value] for value in waits.get(task.index, ())]
            needs += [self.offset + other for other in task.dependencies]
            tasks.append(replace(task, index=self.offset + task.index, dependencies=tuple(needs)))
        order = {it: (i, *(self.offset + task for task in graph.issue_order.get(it, ()))) for i, it in enumerate(held)}
        self.compiled = compile_graph(TaskGraph(tasks=tuple(tasks), world_size=graph.world_size, issue_order=order))
        self.last = {it: indices[-1] for it, indices in graph.issue_order.items()}


class _Run:
    """The state between repeats: frontiers, values, and the ends so far."""

    def __init__(self, durations_s: DurationsOf, varying: bool, engine: Callable[[CompiledGraph, ArrayLike], Timeline]) -> None:
        self.ends: list[float] = []
        self.frontier: dict[Resource, float] = {}
        self.ready: dict[str, float] = {}
        self.simulated = 0
        self._durations_s, self._varying, self._engine = durations_s, varying, engine
        self._opened: dict[int, tuple[Part, _Opened]] = {}
        self._known: dict[int, NDArray[np.float64]] = {}

    def program(self, program: Program) -> None:
        parts = tuple(program.walk_once())

        def once() -> None:
            for part in program.parts:
                if isinstance(part, Program):
                    self.program(part)
                else:
                    self._repeated(part.repeat, partial(self._part, part), (part,))

        self._repeated(program.repeat, once, parts)

    def _repeated(self, repeat: int, once: Callable[[], None], parts: Sequence[Part]) -> None:
        """`once` so many times, or until the state recurs."""
        before: NDArray[np.float64] | None = None
        for done in range(1, repeat + 1):
            first = len(self.ends)
            once()
            now = self._state(parts) if not self._varying and done < repeat else None
            if now is not None and before is not None and _shifted(before, now):
                self._skip(repeat - done, float((now - before).max()), self.ends[first:], parts)
                return
            before = now

    def _state(self, parts: Sequence[Part]) -> NDArray[np.float64] | None:
        """Frontiers and values that the parts change; None where a value they only read is later than any frontier."""
        resources = dict.fromkeys(resource for part in parts for resource in part.graph.issue_order)
        made = dict.fromkeys(value for part in parts for value in part.makes)
        state = np.array([*(self.frontier[it] for it in resources), *(self.ready[value] for value in made)])
        given = [self.ready.get(value, 0.0) for part in parts for value in part.reads if value not in made]
        return None if not len(state) or max(given, default=0.0) > state.min() else state

    def _skip(self, repeats: int, shift_s: float, ends: Sequence[float], parts: Sequence[Part]) -> None:
        for number in range(1, repeats + 1):
            self.ends += [end + number * shift_s for end in ends]
        moved = repeats * shift_s
        for resource in dict.fromkeys(resource for part in parts for resource in part.graph.issue_order):
            self.frontier[resource] += moved
        for value in dict.fromkeys(value for part in parts for value in part.makes):
            self.ready[value] += moved

    def _part(self, part: Part) -> None:
        if id(part) not in self._opened:
            self._opened[id(part)] = part, _Opened(part)
        opened = self._opened[id(part)][1]
        if self._varying:
            durations = np.asarray(self._durations_s(part, len(self.ends)), dtype=np.float64)
        else:
            if id(part) not in self._known:
                self._known[id(part)] = np.asarray(self._durations_s(part, len(self.ends)), dtype=np.float64)
            durations = self._known[id(part)]
        begin = [self.frontier.get(resource, 0.0) for resource in opened.resources]
        begin += [self.ready.get(value, 0.0) for value in opened.values]
        timeline = self._engine(opened.compiled, np.concatenate([begin, durations]))
        end_s = np.zeros(opened.offset + len(part.graph.tasks))
        end_s[timeline.task] = timeline.end_s
        end_s = end_s[opened.offset :]
        self.frontier |= {resource: float(end_s[task]) for resource, task in opened.last.items()}
        self.ready |= {value: float(end_s[list(tasks)].max()) for value, tasks in part.makes.items()}
        self.ends.append(float(end_s.max(initial=0.0)))
        self.simulated += 1


def _shifted(before: NDArray[np.float64], now: NDArray[np.float64]) -> bool:
    """Whether all moved by the same seconds, to rounding."""
    moved = now - before
    return len(before) == len(now) and float(np.ptp(moved)) <= 8 * float(np.spacing(now.max()))
