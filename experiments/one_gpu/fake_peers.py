"""One rank of a plan without its peers: are its tasks issued in the simulated order, and do they overlap as simulated?

The process group is torch's "fake" one: collectives and transfers return at once and leave their buffers as they are. A kernel
that only waits makes every task last. Launches, waits, events and streams are those of a GPU rank, so this is for issue order
and overlap only: weights mean nothing, and no time of a link or of a kernel is measured.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parsim.data import dataset_for
from parsim.data.samples import BatchOrder
from parsim.engines import static
from parsim.execute.cuda.driver import Driver
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.loading import Loader, Pin
from parsim.execute.mixing import MixingRounds, StaleStage, mean_groups
from parsim.execute.numerics import TorchNumerics
from parsim.execute.runtime import RankProgram, required_groups, room_waits
from parsim.execute.stage import StageReplica
from parsim.execute.streams import Operation, TaskTime
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan
from parsim.predict.breakdown import breakdown
from parsim.program.lower import lower, step_graphs
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import TaskGraph
from parsim.timeline import Span, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """What one rank needs to know of a run."""

    spec: ModelSpec
    model: Model
    plan: Plan
    dataset: str = "synthetic"
    optimizer: str = "adamw"
    learning_rate: float = 1e-2
    dtype: torch.dtype = torch.float32
    numerics: TorchNumerics | None = None


class FakeRank(NamedTuple):
    graph: TaskGraph
    program: RankProgram
    loader: Loader


@contextlib.contextmanager
def fake_rank(run: PlannedRun, rank: int, streams: CudaStreams[Any, Any], device: torch.device, pin: Pin) -> Iterator[FakeRank]:
    """`rank` of the plan in this process; `pin` as `Loader` takes it."""
    layout = PlanIndex(run.plan, run.model)
    graph = lower(run.plan, run.model)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.plan.world_size)
    try:
        mixes = run.plan.synchronisation.mixes
        graphs = [graph, *(step_graphs(layout) if mixes else ())]
        needed = [entry for step in graphs for entry in required_groups(step)] + mean_groups(layout)
        groups = {entry: dist.new_group(list(entry[1])) for entry in dict.fromkeys(needed)}
        stage = StageReplica(
            run.spec,
            layout,
            rank,
            optimizer=run.optimizer,
            learning_rate=run.learning_rate,
            dtype=run.dtype,
            seed=0,
            device=device,
            numerics=run.numerics,
        )
        data = dataset_for(run.spec, run.dataset, root=None, seed=0)
        order = BatchOrder(n=len(data), global_batch=run.plan.global_batch, seed=0)
        with contextlib.closing(Loader(data, order, layout, rank, dtype=run.dtype, device=device, pin=pin)) as loader:
            mixing = MixingRounds(stage, groups, lambda _: None, streams.used) if mixes else None
            stale = StaleStage(stage) if run.plan.synchronisation.kind == "stale" else None
            yield FakeRank(graph, RankProgram(graph, stage, streams, groups, mixing, stale), loader)
    finally:
        dist.destroy_process_group()


# --- tasks that last as long as they are told ---------------------------------------------------------------------------


class HeldStreams(CudaStreams[Any, Any]):
    """Behind what a task launches, a kernel that waits. Attributes: takes_s: by task."""

    def __init__(self, driver: Driver[Any, Any]) -> None:
        super().__init__(driver)
        self.takes_s: Mapping[int, float] = {}

    def _launch(self, task: int, stream: str, operation: Operation, on: Any) -> Any:
        def held() -> None:
            operation()
            self._driver.hold(self.takes_s[task])

        return super()._launch(task, stream, held, on)


def with_rooms(run: PlannedRun) -> TaskGraph:
    """The plan's graph, in which messages between stages also wait for the room that ranks make for them.

    Ranks wait so (`parsim.program.lifetimes`); simulations of plans leave it out.
    """
    graph = lower(run.plan, run.model)
    more = room_waits(graph, PlanIndex(run.plan, run.model))
    tasks = tuple(
        replace(task, dependencies=tuple(dict.fromkeys((*task.dependencies, *more.get(task.index, ())))))
        for task in graph.tasks
    )
    return replace(graph, tasks=tasks)


def own_part(graph: TaskGraph, rank: int) -> tuple[TaskGraph, tuple[int, ...]]:
    """The tasks of one rank as a graph, and the number of each in `graph`. Waiting for peers is then a part of a task."""
    kept = [task for task in graph.tasks if rank in task.ranks]
    place = {task.index: number for number, task in enumerate(kept)}
    tasks = tuple(
        replace(
            task,
            index=place[task.index],
            resources=tuple(resource for resource in task.resources if resource.rank == rank),
            dependencies=tuple(place[index] for index in task.dependencies if index in place),
        )
        for task in kept
    )
    own = [resource for resource in graph.issue_order if resource.rank == rank]
    orders = {resource: tuple(place[index] for index in graph.issue_order[resource]) for resource in own}
    return TaskGraph(tasks=tasks, world_size=graph.world_size, issue_order=orders), tuple(place)


def seen_by(part: TaskGraph, ends_s: Sequence[float]) -> list[float]:
    """How long each task of a rank lasts for that rank: from when it could begin there until it ends in a simulated step."""
    ready = [max((ends_s[before] for before in earlier), default=0.0) for earlier in part.predecessors()]
    return [end_s - ready_s for end_s, ready_s in zip(ends_s, ready, strict=True)]


# --- the comparison -----------------------------------------------------------------------------------------------------


Ends = Mapping[int, float]
"""Seconds from the start of the step, by the number of a task in the plan's graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedStep:
    """One step of one rank, as issued and as simulated from the lengths that its tasks had.

    Attributes: latest_s: the largest difference between when a task began and when it should have. hidden, simulated_hidden: of
        all communication, the share beside computation.
    """

    ends_s: Ends
    makespan_s: float
    latest_s: float
    hidden: float
    simulated_hidden: float

    @property
    def shares(self) -> tuple[float, float]:
        return self.hidden, self.simulated_hidden


def issued_step(
    run: PlannedRun, rank: int, driver: Driver[Any, Any], device: torch.device, pin: Pin, step_graph: TaskGraph, ends_s: Ends
) -> IssuedStep:
    """The second step of a rank, whose peers do their part when the simulated step of the graph `with_rooms` says so."""
    streams = HeldStreams(driver)
    part, numbers = own_part(step_graph, rank)
    with fake_rank(run, rank, streams, device, pin) as (_, program, loader):
        streams.takes_s = dict(zip(numbers, seen_by(part, [ends_s[number] for number in numbers]), strict=True))
        for step in range(2):  # the first one allocates; both load their own batch
            _, times = program.step(loader.batch(step))
    return compared(part, numbers, rank, times)


def compared(part: TaskGraph, numbers: Sequence[int], rank: int, times: Sequence[TaskTime]) -> IssuedStep:
    """A step beside its simulation; times: of every task of the rank."""
    place = {number: index for index, number in enumerate(numbers)}
    begin_s = min(entry.ready_s for entry in times)
    spans = sorted(
        (Span(place[entry.task], f"r{rank}.{entry.stream}", entry.ready_s - begin_s, entry.end_s - begin_s) for entry in times),
        key=lambda span: span.task,
    )
    assert [span.task for span in spans] == list(range(len(numbers))), "every task of the rank ran once"
    simulated = static.simulate(part, [span.duration_s for span in spans])
    starts = dict(zip(simulated.task.tolist(), simulated.start_s.tolist(), strict=True))
    return IssuedStep(
        ends_s={numbers[span.task]: span.end_s for span in spans},
        makespan_s=max(span.end_s for span in spans),
        latest_s=max(abs(span.start_s - starts[span.task]) for span in spans),
        hidden=_hidden(part, Timeline.from_spans(spans, "measured"), rank),
        simulated_hidden=_hidden(part, simulated, rank),
    )


def simulated_ends_s(graph: TaskGraph, durations_s: Sequence[float]) -> Ends:
    timeline = static.simulate(graph, durations_s)
    return dict(zip(timeline.task.tolist(), timeline.end_s.tolist(), strict=True))


def _hidden(part: TaskGraph, timeline: Timeline, rank: int) -> float:
    """0 where a rank communicates nothing."""
    (found,) = breakdown(part, timeline, ranks=(rank,))
    busy_s = found.communication_busy_s
    return (busy_s - found.exposed_communication_s) / busy_s if busy_s else 0.0


def drawn_durations_s(graph: TaskGraph, seed: int, *, least_s: float = 0.002, most_s: float = 0.008) -> list[float]:
    """Of every task: much longer than a host takes to issue it, and drawn, so that streams wait for one another both ways."""
    draw = random.Random(seed)
    return [draw.uniform(least_s, most_s) for _ in graph.tasks]
