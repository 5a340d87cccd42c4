"""Gossip as a task graph: rounds of local steps and messages over the links of W_t, in the vocabulary every engine reads.

adapt_combine: forward, backward, update; then each worker's weights go over its links, and the next forward waits for those it
takes. combine_adapt: the weights of the round's beginning travel while it computes, and the update waits for them. all_reduce:
the synchronous step, gradients of all in one collective before the update. A message begins once both ends are there.

The vocabulary has no word for the local sum sum_j W_ij x_j (a pass over k+1 copies of the weights): it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parsim.algorithms.graphs import Matrix
from parsim.errors import AlgorithmError, near_matches
from parsim.graph.task import COMPUTE, Origin, Resource, Task
from parsim.graph.taskgraph import TaskGraph
from parsim.work import Collective, Compute, OptimizerStep, Phase, SendRecv, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipModel:
    """The model as a round needs it: one component's name, its parameters, the samples of a worker's batch."""

    elements: int
    samples: int
    name: str = "model"
    element_bytes: int = 4

    @property
    def size_bytes(self) -> int:
        """|w|."""
        return self.elements * self.element_bytes


def gossip_program(
    combination: str, graph: Callable[[int], Matrix], model: GossipModel, *, workers: int, rounds: int
) -> TaskGraph:
    """`rounds` rounds of one local step each, by a row of ROUNDS; worker i is rank i.

    Raises:
        AlgorithmError: an unknown combination, fewer than one worker or round, or a matrix of another size.
    """
    if combination not in ROUNDS:
        raise AlgorithmError(f"unknown combination {combination!r}{near_matches(combination, ROUNDS)}")
    if workers < 1 or rounds < 1:
        raise AlgorithmError(f"a program needs workers >= 1 and rounds >= 1, got {workers} and {rounds}")
    draft = _Draft(model, workers)
    for t in range(rounds):
        matrix = graph(t)
        if matrix.shape != (workers, workers):
            raise AlgorithmError(f"{workers} workers need a mixing matrix [{workers}, {workers}], got {list(matrix.shape)}")
        ROUNDS[combination](draft, t, (matrix != 0) & ~np.eye(workers, dtype=bool))
    return TaskGraph(tasks=tuple(draft.tasks), world_size=workers)


def gossip_durations_s(
    program: TaskGraph, *, step_s: Callable[[int, int], float], exchange_s: float, forward_share: float = 1.0 / 3.0
) -> NDArray[np.float64]:
    """Seconds of every task: a (worker, round) step splits into forward and backward, exchanges are alike, updates free."""

    def seconds(work: Work, origin: Origin) -> float:
        match work:
            case Compute(phase=phase):
                share = forward_share if phase is Phase.FORWARD else 1.0 - forward_share
                return share * step_s(origin.replica or 0, origin.microbatch or 0)
            case SendRecv() | Collective():
                return exchange_s
            case _:
                return 0.0

    return np.array([seconds(task.work, task.origin) for task in program.tasks])


@dataclass(slots=True)
class _Draft:
    """The program so far; `ready[i]`: what worker i's next step waits for."""

    model: GossipModel
    workers: int
    tasks: list[Task] = field(default_factory=list)
    ready: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.ready = [()] * self.workers

    def step(self, worker: int, t: int) -> int:
        """Forward and backward of worker's batch of round t; the backward's index."""
        origin = Origin(stage=0, replica=worker, component=self.model.name, microbatch=t)
        made = 0
        for phase, needs in ((Phase.FORWARD, self.ready[worker]), (Phase.BACKWARD, ())):
            work = Compute(component=self.model.name, phase=phase, samples=self.model.samples)
            made = self.add(work, [Resource(worker, COMPUTE)], needs or ((made,) if phase is Phase.BACKWARD else ()), origin)
        return made

    def update(self, worker: int, t: int, needs: Sequence[int]) -> int:
        origin = Origin(stage=0, replica=worker, microbatch=t)
        return self.add(OptimizerStep(elements=self.model.elements, tensors=1), [Resource(worker, COMPUTE)], needs, origin)

    def messages(self, t: int, links: NDArray[np.bool_], ready: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """One message per link, once both ends are ready; what arrives at each worker."""
        arriving: list[tuple[int, ...]] = [()] * self.workers
        for to, sender in np.argwhere(links).tolist():
            work = SendRecv(source=sender, destination=to, size_bytes=self.model.size_bytes)
            ends = [Resource(sender, f"pp>{to}"), Resource(to, f"pp<{sender}")]
            origin = Origin(stage=0, replica=to, microbatch=t)
            arriving[to] += (self.add(work, ends, [*ready[sender], *ready[to]], origin),)
        return arriving

    def add(self, work: Work, resources: Sequence[Resource], needs: Sequence[int], origin: Origin) -> int:
        index = len(self.tasks)
        self.tasks.append(
            Task(index=index, work=work, resources=tuple(resources), dependencies=tuple(dict.fromkeys(needs)), origin=origin)
        )
        return index


def _adapt_combine(draft: _Draft, t: int, links: NDArray[np.bool_]) -> None:
    updated = [(draft.update(worker, t, [draft.step(worker, t)]),) for worker in range(draft.workers)]
    arriving = draft.messages(t, links, updated)
    draft.ready = [own + came for own, came in zip(updated, arriving, strict=True)]


def _combine_adapt(draft: _Draft, t: int, links: NDArray[np.bool_]) -> None:
    arriving = draft.messages(t, links, draft.ready)
    draft.ready = [(draft.update(worker, t, [draft.step(worker, t), *arriving[worker]]),) for worker in range(draft.workers)]


def _all_reduce(draft: _Draft, t: int, links: NDArray[np.bool_]) -> None:
    computed = [draft.step(worker, t) for worker in range(draft.workers)]
    needs = computed
    if draft.workers > 1:
        everyone = tuple(range(draft.workers))
        work = Collective(operation="all_reduce", group=everyone, size_bytes=draft.model.size_bytes)
        streams = [Resource(worker, "dp") for worker in everyone]
        needs = [draft.add(work, streams, computed, Origin(stage=0, microbatch=t))] * draft.workers
    draft.ready = [(draft.update(worker, t, [needs[worker]]),) for worker in range(draft.workers)]


ROUNDS: dict[str, Callable[[_Draft, int, NDArray[np.bool_]], None]] = {
    "adapt_combine": _adapt_combine,
    "all_reduce": _all_reduce,
    "combine_adapt": _combine_adapt,
}
