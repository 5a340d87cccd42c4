"""Gossip as a program: rounds of local steps and messages over the links of W_t, in the vocabulary every engine reads.

adapt_combine: forward, backward, update. Then each worker's weights go over its links, and the sum sum_j W_ij x_j waits for
those it takes. combine_adapt: the weights of the round's beginning travel while it computes, and the update waits for them.
all_reduce: the synchronous step, gradients of all in one collective before the update. A message begins once both ends are
there. Steps without an exchange (a period above 1) are steps alone.

A graph that repeats after p rounds is p rounds of tasks and a number of repeats, however long training is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parsim.algorithms.periods import Period, every_steps
from parsim.engines.program import Part, Program
from parsim.errors import AlgorithmError, near_matches
from parsim.model.model import Model
from parsim.numeric import Bools
from parsim.plans.mixing import Ada, Matrix, MixingGraph, ada_graphs
from parsim.program.task import COMPUTE, Origin, Resource, Task
from parsim.program.taskgraph import TaskGraph
from parsim.work import Collective, Compute, Mix, OptimizerStep, Phase, SendRecv, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipModel:
    """The model as a round needs it: its parameters, the samples of a worker's batch, its components in order.

    `tensors`: the arrays that the parameters come in, for the update's price.
    """

    elements: int
    samples: int
    components: tuple[str, ...] = ("model",)
    tensors: int = 1
    element_bytes: int = 4

    def __post_init__(self) -> None:
        if self.elements < 0 or self.samples < 1 or not self.components:
            raise AlgorithmError(
                f"a model in a program needs elements >= 0, samples >= 1 and a component, got {self.elements}, {self.samples} "
                f"and {len(self.components)}"
            )

    @property
    def size_bytes(self) -> int:
        """|w|."""
        return self.elements * self.element_bytes


def gossip_model(model: Model, samples: int) -> GossipModel:
    """A model of the zoo or a traced one, `samples` per worker and step, as programs of rounds need it."""
    return GossipModel(
        elements=model.parameter_count,
        samples=samples,
        components=tuple(component.name for component in model.components),
        tensors=len(model.parameters),
    )


def gossip_program(
    combination: str,
    graph: Callable[[int], Matrix],
    model: GossipModel,
    *,
    workers: int,
    rounds: int,
    period: Period | None = None,
) -> Program:
    """`rounds` exchanges and the local steps before them, by a row of ROUNDS; worker i is rank i.

    Args:
        graph: W of exchange t; a MixingGraph says itself after how many exchanges it repeats, any other function is written
            out, equal links one after another once.
        period: after which steps an exchange follows; None for each.

    Returns:
        A Program whose `parameters(t)` is W_t.

    Raises:
        AlgorithmError: an unknown combination, fewer than one worker or round, a matrix of another size, a period that never
            exchanges, or one above 1 with combine_adapt.
    """
    if combination not in ROUNDS:
        raise AlgorithmError(f"unknown combination {combination!r}{near_matches(combination, ROUNDS)}")
    if workers < 1 or rounds < 1:
        raise AlgorithmError(f"a program needs workers >= 1 and rounds >= 1, got {workers} and {rounds}")
    period = period or every_steps(1)
    if period.steps is None:
        raise AlgorithmError("a program of exchanges needs a period; without one there is nothing to repeat")
    if combination == "combine_adapt" and period.steps != 1:
        raise AlgorithmError("combine_adapt overlaps each step with an exchange: its period is every_steps(1)")
    cycle = graph.period if isinstance(graph, MixingGraph) else rounds
    writer = _Writer(ROUNDS[combination], model, workers)
    warm = min(period.warmup_steps, rounds)
    parts: list[Part | Program] = []
    if warm:
        parts += writer.rounds(graph, range(warm), 1)
    whole, rest = divmod(rounds - warm, cycle)
    if whole:
        inside = writer.rounds(graph, range(warm, warm + cycle), period.steps)
        parts += inside if whole == 1 else [Program(parts=tuple(inside), repeat=whole)]
    if rest:
        parts += writer.rounds(graph, range(warm + whole * cycle, rounds), period.steps)
    return Program(parts=tuple(parts), parameters=graph)


def ada_program(combination: str, ada: Ada, model: GossipModel, *, epochs: int, rounds_per_epoch: int) -> Program:
    """One lattice per epoch of a schedule that needs no measurement; epochs of equal k share their tasks."""
    graphs = ada_graphs(ada, epochs)
    writer = _Writer(ROUNDS[combination], model, ada.n)
    parts = [part for graph in graphs for part in writer.rounds(graph, range(1), 1, repeat=rounds_per_epoch)]
    return Program(parts=tuple(parts), parameters=lambda t: graphs[t // rounds_per_epoch](t))


def gossip_durations_s(
    graph: TaskGraph,
    *,
    step_s: Callable[[int, int], float],
    exchange_s: float,
    mix_s: float = 0.0,
    first_step: int = 0,
    forward_share: float = 1.0 / 3.0,
) -> NDArray[np.float64]:
    """Seconds of every task of a part: a (worker, step) splits into forward and backward, exchanges are alike, updates free.

    For one component; `program_costs` prices programs of real models.

    Args:
        first_step: the number of the part's first step, where `step_s` depends on it. mix_s: of a sum over neighbours.
    """

    def seconds(work: Work, origin: Origin) -> float:
        match work:
            case Compute(phase=phase):
                share = forward_share if phase is Phase.FORWARD else 1.0 - forward_share
                return share * step_s(origin.replica or 0, first_step + (origin.microbatch or 0))
            case SendRecv() | Collective():
                return exchange_s
            case Mix():
                return mix_s
            case _:
                return 0.0

    return np.array([seconds(task.work, task.origin) for task in graph.tasks])


class _Writer:
    """Makes parts, and each of them once."""

    def __init__(self, one_round: Callable[[_Draft, int, Bools], None], model: GossipModel, workers: int) -> None:
        self._one_round, self._model, self._workers = one_round, model, workers
        self._made: dict[tuple[bytes, int], Part] = {}

    def rounds(self, graph: Callable[[int], Matrix], wanted: range, steps: int, *, repeat: int = 1) -> list[Part | Program]:
        """A part per round, `steps` - 1 local steps before each; equal ones in a row are one part with repeats."""
        exchanges: list[tuple[Part, int]] = []
        for t in wanted:
            links = self._links(graph(t))
            part = self._part(links, repeat)
            count = exchanges.pop()[1] if exchanges and exchanges[-1][0] is part else 0
            exchanges.append((part, count + 1))
        made: list[Part | Program] = []
        for part, count in exchanges:
            if steps > 1:
                alone = self._part(None, steps - 1)
                made.append(Program(parts=(alone, part), repeat=count))
            else:
                made.append(part if count == 1 else Program(parts=(part,), repeat=count))
        return made

    def _links(self, matrix: Matrix) -> Bools:
        n = self._workers
        if matrix.shape != (n, n):
            raise AlgorithmError(f"{n} workers need a mixing matrix [{n}, {n}], got {list(matrix.shape)}")
        links: Bools = (matrix != 0) & ~np.eye(n, dtype=bool)
        return links

    def _part(self, links: Bools | None, repeat: int) -> Part:
        """One step of everyone and an exchange over links; None for the step alone."""
        key = (b"" if links is None else links.tobytes(), repeat)
        if key not in self._made:
            draft = _Draft(self._model, self._workers)
            if links is None:
                draft.ready = [(draft.update(worker, [draft.step(worker)]),) for worker in range(self._workers)]
            else:
                self._one_round(draft, self._workers, links)
            self._made[key] = draft.part(repeat, rounds=int(links is not None))
        return self._made[key]


@dataclass(slots=True)
class _Draft:
    """A part so far; `ready[i]`: what worker i's next step waits for, None for what the part before left."""

    model: GossipModel
    workers: int
    tasks: list[Task] = field(default_factory=list)
    ready: list[tuple[int, ...] | None] = field(init=False)
    reads: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ready = [None] * self.workers

    def part(self, repeat: int, rounds: int) -> Part:
        makes = {f"weights {worker}": after for worker, after in enumerate(self.ready) if after is not None}
        graph = TaskGraph(tasks=tuple(self.tasks), world_size=self.workers)
        return Part(graph=graph, repeat=repeat, makes=makes, reads=self.reads, rounds=rounds)

    def step(self, worker: int) -> int:
        """Forward and backward of worker's batch, component by component; the last backward's index."""
        forward = [(Phase.FORWARD, name) for name in self.model.components]
        made = -1
        for phase, name in forward + [(Phase.BACKWARD, name) for _, name in reversed(forward)]:
            work = Compute(component=name, phase=phase, samples=self.model.samples)
            origin = Origin(stage=0, replica=worker, component=name, microbatch=0)
            first = made < 0
            needs, weights = ([], [worker]) if first else ([made], [])
            made = self.add(work, [Resource(worker, COMPUTE)], needs, origin, weights=weights)
        return made

    def update(self, worker: int, needs: Sequence[int]) -> int:
        origin = Origin(stage=0, replica=worker, microbatch=0)
        work = OptimizerStep(elements=self.model.elements, tensors=self.model.tensors)
        return self.add(work, [Resource(worker, COMPUTE)], needs, origin)

    def mix(self, worker: int, arrived: Sequence[int], needs: Sequence[int]) -> int:
        """The sum over what worker holds and what arrived."""
        work = Mix(elements=self.model.elements, copies=1 + len(arrived))
        origin = Origin(stage=0, replica=worker, microbatch=0)
        return self.add(work, [Resource(worker, COMPUTE)], [*needs, *arrived], origin)

    def messages(self, links: Bools, ready: Sequence[Sequence[int] | None]) -> list[tuple[int, ...]]:
        """One message per link, once both ends are ready; what arrives at each worker."""
        arriving: list[tuple[int, ...]] = [()] * self.workers
        for to, sender in np.argwhere(links).tolist():
            work = SendRecv(source=sender, destination=to, size_bytes=self.model.size_bytes)
            ends = [Resource(sender, f"pp>{to}"), Resource(to, f"pp<{sender}")]
            origin = Origin(stage=0, replica=to, microbatch=0)
            needs = [task for end in (sender, to) for task in ready[end] or ()]
            given = [end for end in (sender, to) if ready[end] is None]
            arriving[to] += (self.add(work, ends, needs, origin, weights=given),)
        return arriving

    def add(
        self, work: Work, resources: Sequence[Resource], needs: Sequence[int], origin: Origin, weights: Sequence[int] = ()
    ) -> int:
        """A task; `weights`: the workers whose weights of the part before it reads."""
        index = len(self.tasks)
        for worker in weights:
            value = f"weights {worker}"
            self.reads[value] = (*self.reads.get(value, ()), index)
        self.tasks.append(
            Task(index=index, work=work, resources=tuple(resources), dependencies=tuple(dict.fromkeys(needs)), origin=origin)
        )
        return index


def _adapt_combine(draft: _Draft, workers: int, links: Bools) -> None:
    updated = [(draft.update(worker, [draft.step(worker)]),) for worker in range(workers)]
    arriving = draft.messages(links, updated)
    draft.ready = [
        (draft.mix(worker, arriving[worker], updated[worker]),) if arriving[worker] else updated[worker]
        for worker in range(workers)
    ]


def _combine_adapt(draft: _Draft, workers: int, links: Bools) -> None:
    arriving = draft.messages(links, draft.ready)
    for worker in range(workers):
        needs = [draft.step(worker)]
        if arriving[worker]:
            needs.append(draft.mix(worker, arriving[worker], ()))
        draft.ready[worker] = (draft.update(worker, needs),)


def _all_reduce(draft: _Draft, workers: int, links: Bools) -> None:
    computed = [draft.step(worker) for worker in range(workers)]
    needs = [[task] for task in computed]
    if workers > 1:
        everyone = tuple(range(workers))
        work = Collective(operation="all_reduce", group=everyone, size_bytes=draft.model.size_bytes)
        streams = [Resource(worker, "dp") for worker in everyone]
        needs = [[draft.add(work, streams, computed, Origin(stage=0, microbatch=0))]] * workers
    draft.ready = [(draft.update(worker, needs[worker]),) for worker in range(workers)]


ROUNDS: dict[str, Callable[[_Draft, int, Bools], None]] = {
    "adapt_combine": _adapt_combine,
    "all_reduce": _all_reduce,
    "combine_adapt": _combine_adapt,
}
