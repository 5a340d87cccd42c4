"""Decoupled backpropagation as a program: the ticks of `staleness`, written in the vocabulary every engine reads.

S groups of K modules; agent (s, k) is rank s*K + k-1. Per tick an agent forwards, backwards (both read the weights of the
tick's beginning), averages its gradients with its peers and updates. With a barrier every tick waits for the exchange of
the tick before, as in the published implementations. Without one, an agent goes on as soon as its own inputs are there,
and transfers hide behind computation. Where one tick forwards through all modules (ddg), its delayed backwards begin when
the last forward has ended.

An epoch is three parts: the ticks that fill the modules, one full tick with as many repeats as there are, the ticks that drain.
What a tick hands to the next (activations, gradients, the barrier) is carried from repeat to repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parsim.algorithms.staleness import Decoupling, ModuleTimes, decoupling
from parsim.engines.program import Part, Program
from parsim.errors import AlgorithmError
from parsim.program.task import COMPUTE, Origin, Resource, Task
from parsim.program.taskgraph import TaskGraph
from parsim.work import Collective, Compute, OptimizerStep, Phase, SendRecv, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class TickModules:
    """The K modules as a program needs them.

    Attributes:
        names: of their components. elements: parameters of each. boundary_bytes: of one batch's value after each but the last.
        samples: in a group's batch. element_bytes: of a parameter.
    """

    names: tuple[str, ...]
    elements: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    samples: int
    element_bytes: int = 4

    def __post_init__(self) -> None:
        if not self.names or len(self.elements) != len(self.names) or len(self.boundary_bytes) != len(self.names) - 1:
            raise AlgorithmError(
                f"{len(self.names)} modules need as many element counts (got {len(self.elements)}) and one boundary less "
                f"(got {len(self.boundary_bytes)})"
            )


def tick_program(
    schedule: str, modules: TickModules, batches: int, *, groups: int = 1, replay: bool = False, barrier: bool = True
) -> Program:
    """All ticks of `batches` batches per group, drained at the end. A repeated task's microbatch is that of its first tick.

    Args:
        schedule: a row of DECOUPLINGS. replay: a delayed backward repeats its forward first (fr is ddg with replay).
        barrier: ticks begin together.

    Leaves out: loading, and the accumulation of gradients over ticks.
    """
    if batches < 1 or groups < 1:
        raise AlgorithmError(f"a program needs batches >= 1 and groups >= 1, got {batches} and {groups}")
    row = decoupling(schedule)
    span = row.span(len(modules.names))
    full = max(0, batches - span)
    spans = [(range(span), 1), (range(span, span + 1), full), (range(batches, batches + span), 1)]
    if full == 0:
        spans = [(range(batches + span), 1)]
    parts = []
    for ticks, repeat in spans:
        if ticks and repeat:
            draft = _Draft(modules, row, batches, groups, replay, barrier)
            for tick in ticks:
                draft.tick(tick)
            parts.append(draft.part(repeat))
    return Program(parts=tuple(parts))


def tick_durations_s(graph: TaskGraph, modules: TickModules, times: ModuleTimes) -> NDArray[np.float64]:
    """Seconds of every task of a part's graph: compute by `times`, transfers transfer_s, all_reduces reduce_s, updates none."""
    place = {name: number for number, name in enumerate(modules.names)}

    def seconds(work: Work) -> float:
        match work:
            case Compute(phase=Phase.FORWARD):
                return times.forward_s[place[work.component]]
            case Compute():
                return times.backward_s[place[work.component]]
            case SendRecv():
                return times.transfer_s
            case Collective():
                return times.reduce_s
            case _:
                return 0.0

    return np.array([seconds(task.work) for task in graph.tasks]) * (1.0 + times.overhead)


@dataclass(slots=True)
class _Draft:
    """A part so far, and which task made each value: keys (group, k, batch), k of the module that reads it.

    What the part needs and has not made was left by the tick before it.
    """

    modules: TickModules
    schedule: Decoupling
    batches: int
    groups: int
    replay: bool
    barrier: bool
    before: tuple[int, ...] | None = None
    reads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    values: dict[tuple[int, int, int], int] = field(default_factory=dict)
    gradients: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.modules.names)

    def part(self, repeat: int) -> Part:
        graph = TaskGraph(tasks=tuple(self.tasks), world_size=self.groups * self.count)
        makes: dict[str, tuple[int, ...]] = {} if self.before is None else {"barrier": self.before}
        for what, made in (("value", self.values), ("gradient", self.gradients)):
            for (group, k, _), task in made.items():
                if _name(what, group, k) in makes:
                    raise AlgorithmError(
                        f"schedule {self.schedule.name} keeps two batches waiting for module {k}; a tick hands over one: let "
                        "neighbouring modules work on a batch at most one tick apart"
                    )
                makes[_name(what, group, k)] = (task,)
        return Part(graph=graph, repeat=repeat, makes=makes, reads=self.reads)

    def tick(self, tick: int) -> None:
        first = len(self.tasks)
        every = range(1, self.count + 1)
        made = [task for k in every for task in self._forward(k, tick)]
        locked = self.schedule.forward_tick(self.count, self.count) == self.schedule.forward_tick(1, self.count)
        after = made[-self.groups :] if locked else []
        for k in [k for k in reversed(every) if self._backward(k, tick, after)]:
            self._update(k, tick)
        if self.barrier:
            self.before = tuple(task.index for task in self.tasks[first:] if not isinstance(task.work, Compute)) or self.before

    def _forward(self, k: int, tick: int) -> list[int]:
        """The forward of the batch that is due, on all groups; none where none is."""
        batch = tick - self.schedule.forward_tick(k, self.count)
        if not 0 <= batch < self.batches:
            return []
        made = []
        for group in range(self.groups):
            needs, left = self._taken("value", self.values, (group, k, batch)) if k > 1 else ([], [])
            made.append(self._compute(group, k, batch, Phase.FORWARD, needs, left))
            if k < self.count:
                self.values[group, k + 1, batch] = self._send(group, k, k + 1, batch, made[-1])
        return made

    def _backward(self, k: int, tick: int, after: Sequence[int]) -> bool:
        """The backward of the batch that is due, on all groups, a delayed one not before `after`; False where none is."""
        batch = tick - self.schedule.backward_tick(k, self.count)
        if not 0 <= batch < self.batches:
            return False
        delayed = self.schedule.delay(k, self.count) > 0
        for group in range(self.groups):
            needs, left = self._taken("gradient", self.gradients, (group, k, batch)) if k < self.count else ([], [])
            if delayed:
                needs += after
            if self.replay and delayed:
                self._compute(group, k, batch, Phase.FORWARD, after, [])
            made = self._compute(group, k, batch, Phase.BACKWARD, needs, left)
            if k > 1:
                self.gradients[group, k - 1, batch] = self._send(group, k, k - 1, batch, made)
        return True

    def _update(self, k: int, tick: int) -> None:
        ranks = tuple(group * self.count + k - 1 for group in range(self.groups))
        elements = self.modules.elements[k - 1]
        needs: tuple[int, ...] = ()
        if self.groups > 1:
            last = [self._last_compute(rank) for rank in ranks]
            work = Collective(operation="all_reduce", group=ranks, size_bytes=elements * self.modules.element_bytes)
            needs = (self._add(work, [Resource(rank, "dp") for rank in ranks], last, Origin(stage=k - 1, microbatch=tick)),)
        for group, rank in enumerate(ranks):
            origin = Origin(stage=k - 1, replica=group, microbatch=tick)
            self._add(OptimizerStep(elements=elements, tensors=1), [Resource(rank, COMPUTE)], needs, origin)

    def _last_compute(self, rank: int) -> int:
        """The last backward of a rank: what its gradient comes from."""
        return next(
            task.index
            for task in reversed(self.tasks)
            if isinstance(task.work, Compute) and task.work.phase is Phase.BACKWARD and task.ranks == (rank,)
        )

    @staticmethod
    def _taken(what: str, made: dict[tuple[int, int, int], int], key: tuple[int, int, int]) -> tuple[list[int], list[str]]:
        """The task that made a value, or the name under which the tick before left it."""
        return ([made.pop(key)], []) if key in made else ([], [_name(what, key[0], key[1])])

    def _compute(self, group: int, k: int, batch: int, phase: Phase, needs: Sequence[int], left: Sequence[str]) -> int:
        name = self.modules.names[k - 1]
        work = Compute(component=name, phase=phase, samples=self.modules.samples)
        origin = Origin(stage=k - 1, replica=group, component=name, microbatch=batch)
        index = self._add(work, [Resource(group * self.count + k - 1, COMPUTE)], [*needs, *(self.before or ())], origin)
        for name in (*left, *(["barrier"] if self.barrier and self.before is None else ())):
            self.reads[name] = (*self.reads.get(name, ()), index)
        return index

    def _send(self, group: int, k: int, to: int, batch: int, made: int) -> int:
        source, target = group * self.count + k - 1, group * self.count + to - 1
        boundary = min(k, to)
        work = SendRecv(source=source, destination=target, size_bytes=self.modules.boundary_bytes[boundary - 1])
        value = f"{self.modules.names[boundary - 1]}:0"
        origin = Origin(stage=k - 1, replica=group, microbatch=batch, value=value, gradient=to < k)
        return self._add(work, [Resource(source, f"pp>{target}"), Resource(target, f"pp<{source}")], [made], origin)

    def _add(self, work: Work, resources: Sequence[Resource], needs: Sequence[int], origin: Origin) -> int:
        index = len(self.tasks)
        self.tasks.append(Task(index=index, work=work, resources=tuple(resources), dependencies=tuple(needs), origin=origin))
        return index


def _name(what: str, group: int, k: int) -> str:
    """Of a value that one tick leaves to the next."""
    return f"{what} {group} {k}"
