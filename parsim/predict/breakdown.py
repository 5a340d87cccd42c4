"""Where the step of each rank went, seen from its compute stream; the categories sum to the step.

At every moment of the step a rank is in the first of these that holds:

    compute                a task on its compute stream runs (communication put on that stream does not count)
    exposed communication  own communication runs: a collective or transfer the rank takes part in
    load                   the next compute task waits for a LoadBatch, and the rank has begun its step
    bubble                 the next compute task waits for a pipeline peer: for a transfer that has not begun, since its
                           producer is not done, or directly for a task of another rank. Also: the rank of a pipeline has
                           no compute task left while other ranks still work, or would wait for a load but has not begun
                           its step (it may still be in the one before)
    idle                   it waits for anything else (a collective whose other ranks are not ready), or a rank without
                           pipeline peers has not begun its step, or has nothing left to compute
    host                   everything the next compute task needs has ended, and it has not started; and the time after
                           the last span of all ranks, when the step is longer than the timeline. Where the plan offloads:
                           also its copies to and from the host, and updates there, while nothing above runs but loads

"Next" is by time: the span of the compute stream that ends the gap; of several in one instant the first issued. Its
predecessors are its dependencies and the tasks issued just before it on its resources. A simulated timeline has no host
time within its makespan. A measured one may overlap spans on one stream, or show an end slightly after the start that
waited for it: such overlaps are cut, nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.engines.static import AnyGraph, CompiledGraph, checked_durations_s, compile_graph
from parsim.errors import GraphError
from parsim.model.component import Operator
from parsim.model.model import Model
from parsim.numeric import Floats, Ints
from parsim.plans.plan import Plan
from parsim.program.columns import Columns, stable_order
from parsim.program.taskgraph import COMPUTE
from parsim.timeline import Timeline

# Checked columns of a Timeline, and interval arithmetic on them.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows of a Timeline beside what the graph says of them.

    Attributes:
        task, rank: int64 [rows]. compute_stream: bool [rows]. start_s, end_s: float64 [rows].
        task_end_s: float64 [n], the last end of each task on any of its resources; 0 for a task without a row.
        seen: bool [n], the task has a row.
    """

    task: Ints
    rank: Ints
    compute_stream: NDArray[np.bool_]
    start_s: Floats
    end_s: Floats
    task_end_s: Floats
    seen: NDArray[np.bool_]


def rows_of(columns: Columns, timeline: Timeline) -> Rows:
    """Raises GraphError if the timeline names a task or a resource that the graph has not."""
    n = columns.size
    if len(timeline) and not 0 <= int(timeline.task.min()) <= int(timeline.task.max()) < n:
        wrong = int(timeline.task.min()) if timeline.task.min() < 0 else int(timeline.task.max())
        raise GraphError(f"the timeline has task {wrong}, the graph has tasks 0..{n - 1}; read a timeline with its own graph")
    by_name = {str(resource): resource for resource in columns.resources}
    unknown = [name for name in timeline.resources if name not in by_name]
    if unknown:
        raise GraphError(f"the timeline names resource {unknown[0]}, which the graph lacks; read a timeline with its own graph")
    resources = [by_name[name] for name in timeline.resources]
    ranks = np.array([resource.rank for resource in resources], dtype=np.int64)
    computes = np.array([resource.stream == COMPUTE for resource in resources], dtype=np.bool_)
    task_end_s, seen = np.full(n, -np.inf), np.zeros(n, dtype=np.bool_)
    np.maximum.at(task_end_s, timeline.task, timeline.end_s)
    seen[timeline.task] = True
    return Rows(
        task=timeline.task,
        rank=ranks[timeline.resource],
        compute_stream=computes[timeline.resource],
        start_s=timeline.start_s,
        end_s=timeline.end_s,
        task_end_s=np.where(seen, task_end_s, 0.0),
        seen=seen,
    )


def in_order(numbers: Floats | Ints) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def _by_start_and_end(start: Floats, end: Floats) -> Ints:
    """The stable order by start, then end. Spans of a timeline are nearly sorted, which a stable sort by one number uses."""
    if in_order(start) and in_order(end):
        return np.arange(len(start))
    order = np.argsort(start, kind="stable")
    later = end[order]
    tied = start[order[1:]] == start[order[:-1]]
    return np.lexsort((end, start)) if bool((tied & (later[1:] < later[:-1])).any()) else order


def union(start: Floats, end: Floats) -> tuple[Floats, Floats, Ints]:
    """The disjoint intervals that cover what `start`..`end` cover, sorted, and the place of the first span of each.

    Of equal spans the one listed first counts as first. Intervals that touch are merged; a span of no length on its own
    stays an interval.
    """
    if not len(start):
        return start, end, np.empty(0, dtype=np.int64)
    order = _by_start_and_end(start, end)
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], reach[last], order[first]


def covered_until(start: Floats, end: Floats, times: Floats) -> Floats:
    """For each time the seconds before it that the disjoint, sorted intervals cover."""
    if not len(start):
        return np.zeros_like(times)
    total = np.concatenate([[0.0], np.cumsum(end - start)])
    begun = np.searchsorted(start, times, side="right")
    running = np.maximum(begun - 1, 0)
    inside = np.minimum(times, end[running]) - start[running]
    covered: Floats = np.where(begun > 0, total[running] + inside, 0.0)
    return covered


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBreakdown:
    """Seconds of one rank's step by category; `communication_busy_s` counts hidden communication too and is not a category."""

    rank: int
    compute_s: float
    load_s: float
    host_s: float
    exposed_communication_s: float
    bubble_s: float
    idle_s: float
    communication_busy_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.load_s + self.host_s + self.exposed_communication_s + self.bubble_s + self.idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFractions:
    """Means over ranks: shares of the step, and the seconds of exposed communication."""

    communication_fraction: float
    communication_busy_fraction: float
    exposed_communication_s: float
    bubble_fraction: float


def breakdown(
    graph: AnyGraph, timeline: Timeline, step_s: float | None = None, *, ranks: Sequence[int] | None = None
) -> tuple[RankBreakdown, ...]:
    """One RankBreakdown per rank of the graph, over the seconds 0 to `step_s`.

    Args:
        timeline: simulated or measured, of this graph.
        step_s: length of the step; None for the timeline's makespan. Spans are cut to it.
        ranks: only these, in this order (None: all).

    Raises GraphError for a timeline of another graph, or a step that is negative or not finite.
    """
    compiled = compile_graph(graph)
    if step_s is None:
        step_s = timeline.makespan_s
    if not 0 <= step_s < np.inf:
        raise GraphError(f"step_s must be finite and >= 0, got {step_s}")
    rows = rows_of(compiled.columns, timeline)
    last_end_s = min(timeline.makespan_s, step_s)
    issued = compiled.position[rows.task]
    order = np.arange(len(issued)) if in_order(issued) else np.argsort(issued, kind="stable")
    by_rank = order[stable_order(rows.rank[order], compiled.columns.world_size)]
    bounds = np.searchsorted(rows.rank[by_rank], np.arange(compiled.columns.world_size + 1))
    own_end = np.full(compiled.size, -np.inf)
    return tuple(
        _rank_breakdown(rank, compiled, rows, by_rank[bounds[rank] : bounds[rank + 1]], own_end, last_end_s, step_s)
        for rank in (range(compiled.columns.world_size) if ranks is None else ranks)
    )


def step_fractions(breakdowns: Sequence[RankBreakdown], weights: Sequence[int] | None = None) -> StepFractions:
    """Averages over ranks; zero for an empty step. `weights`: for how many ranks each stands (None: for itself)."""

    def mean(values: list[float]) -> float:
        return float(np.average(values, weights=weights)) if values else 0.0

    def mean_share(seconds: list[float]) -> float:
        return mean([value / rank.step_s if rank.step_s > 0 else 0.0 for value, rank in zip(seconds, breakdowns, strict=True)])

    exposed = [rank.exposed_communication_s for rank in breakdowns]
    return StepFractions(
        communication_fraction=mean_share(exposed),
        communication_busy_fraction=mean_share([rank.communication_busy_s for rank in breakdowns]),
        exposed_communication_s=mean(exposed),
        bubble_fraction=mean_share([rank.bubble_s for rank in breakdowns]),
    )


def _rank_breakdown(
    rank: int,
    compiled: CompiledGraph,
    rows: Rows,
    own: Ints,
    own_end: Floats,
    last_end_s: float,
    step_s: float,
) -> RankBreakdown:
    """`own`: the rows of this rank, first issued first. `own_end`: float64 [n], minus infinity before and after.

    Each gap between compute spans is cut where the waits for load, for peers and for anything else end. A need that ran on this
    rank ended when its own rows did; any other when its last row anywhere did.
    """
    from parsim.engines.kernels import split_gaps

    columns = compiled.columns
    start, end = np.clip(rows.start_s[own], 0, step_s), np.clip(rows.end_s[own], 0, step_s)
    communicates = columns.communicates[rows.task[own]]
    computes = rows.compute_stream[own] & ~communicates
    compute_start, compute_end, first = union(start[computes], end[computes])
    comm_start, comm_end, _ = union(start[communicates], end[communicates])
    offloads = columns.offloads[rows.task[own]]
    taken_start, taken_end = comm_start, comm_end  # what a gap is before it is a wait
    if offloads.any():
        taken_start, taken_end, _ = union(start[communicates | offloads], end[communicates | offloads])
    next_task = rows.task[own][computes][first]

    gap_start = np.concatenate([[0.0], compute_end])
    gap_end = np.concatenate([compute_start, [max(last_end_s, gap_start[-1])]])
    waits = split_gaps(
        next_task,
        gap_start,
        gap_end,
        bool(columns.pipelined[rank]),
        rows.task[own],
        rows.end_s[own],
        own_end,
        compiled.arrays.before,
        rows.task_end_s,
        columns.loads,
        columns.transfers,
        taken_start,
        taken_end,
    )
    exposed, load, bubble, idle, host, loaded_s = waits.tolist()
    if offloads.any():
        ends = (covered_until(comm_start, comm_end, at) for at in (np.maximum(gap_end, gap_start), gap_start))
        offloaded = exposed - float(np.subtract(*ends).sum())
        exposed, host = exposed - offloaded, host + offloaded
    not_begun = max(0.0, min(float(start.min()), loaded_s)) if len(start) else 0.0
    load = max(0.0, load - not_begun)
    bubble, idle = (bubble + not_begun, idle) if columns.pipelined[rank] else (bubble, idle + not_begun)
    return RankBreakdown(
        rank=rank,
        compute_s=float((compute_end - compute_start).sum()),
        load_s=load,
        host_s=host + step_s - float(gap_end[-1]),
        exposed_communication_s=exposed,
        bubble_s=bubble,
        idle_s=idle,
        communication_busy_s=float((comm_end - comm_start).sum()),
    )


# FLOP of a step as MFU and HFU count them.
#
# Model FLOP are those of the products, convolutions and attention scores of one forward and one backward (twice the forward).
# Every key counts, causal or not. That is PaLM's 6N + 12LHQT per token (Chowdhery et al. 2022, appendix B) and Megatron's
# formula without recomputation (Narayanan et al. 2021, equation 3). N is what a token visits: the active experts, and no
# embedding table. Hardware FLOP add the forwards that a plan runs again.
# Leaves out: norms, activations, the optimizer, and routing.


COUNTED = ("matmul", "convolution", "attention")
BACKWARD = {"": 2.0, "input": 1.0, "weight": 1.0, "none": 0.0}
"""Times its forward, by what its backward computes."""


def model_flop(model: Model, *, causal: bool = False) -> float:
    """FLOP of one sample, forward and backward once; frozen operators count what their backward computes.

    `causal`: count half the scores where a query sees no later key, as Llama 3 and NeMo do.
    """
    return sum(
        (0.5 if causal and operator.function == "causal" else 1.0)
        * (1.0 + BACKWARD[operator.gradients])
        * operator.forward_flop
        * operator.count
        for component in model.components
        for operator in component.operators
        if operator.kind in COUNTED
    )


def recomputed_flop(model: Model, plan: Plan) -> float:
    """FLOP of one sample in the forwards that a plan runs a second time."""
    runs: list[tuple[Operator, int]] = []
    for name in plan.recomputed:
        runs += [(operator, operator.count) for operator in model.component(name).operators]
    for name in plan.recomputed_by_operator:
        component = model.component(name)
        if component.selective is not None:
            runs += [(component.operators[number], count) for number, count in component.selective.operators]
    return sum(operator.forward_flop * count for operator, count in runs if operator.kind in COUNTED)


def tokens_per_sample(model: Model) -> int:
    """Tokens of a sample of a language model, of an encoder and a decoder the encoder's; 0 for other models.

    They are the rows that an embedding reads from an input of token numbers. One number per sample is a class or a time step.
    """
    inputs = {
        name: model.value[name].bytes_per_sample
        for name in model.inputs
        if name in model.value and not model.value[name].differentiable
    }
    for component in model.components:
        for operator in component.operators:
            rows = dict(operator.shape).get("rows", 0)
            if rows > 1 and operator.kind == "embedding" and any(inputs.get(name) == 8 * rows for name in component.inputs):
                return rows
    return 0


# Lower bounds of the step that hold for any order of the same tasks.


def lower_bound_s(graph: AnyGraph, durations_s: ArrayLike) -> float:
    """Seconds: the larger of the busiest resource's total work and the longest path of dependencies.

    Holds for every issue order and every slowdown >= 1, since a resource does one thing at a time and a task waits for its
    dependencies. Leaves out that a resource also waits (pipeline fill). `durations_s`: float64 [n], seconds each task takes
    alone. Raises GraphError as the engines do.
    """
    compiled = compile_graph(graph)
    durations = checked_durations_s(compiled.columns, durations_s, dimensions=1)
    if not compiled.size:
        return 0.0
    from parsim.engines.kernels import longest_path

    path = longest_path(compiled.arrays.order, compiled.dependencies, durations, np.zeros(compiled.size))
    return max(busiest_resource_s(compiled, durations), float(path))


def busiest_resource_s(graph: AnyGraph, durations_s: ArrayLike) -> float:
    """Seconds of work of the resource that has most: what the *mean* of many steps cannot go below either.

    One step alone cannot beat its longest path, but consecutive steps overlap (a batch is loaded while the last step
    computes), so the path bounds no mean. Arguments and errors as for `lower_bound_s`.
    """
    compiled = compile_graph(graph)
    durations = checked_durations_s(compiled.columns, durations_s, dimensions=1)
    if not compiled.size:
        return 0.0
    columns = compiled.columns
    return float(np.bincount(columns.uses.values, weights=durations[columns.use_tasks]).max())


# The chain of tasks that made the step as long as it was.


def critical_path(graph: AnyGraph, timeline: Timeline) -> tuple[int, ...]:
    """Task numbers from a task that waited for nothing to the one that ended last.

    It walks back from the last end. A task's predecessor is the dependency, or the task issued just before it on one of
    its resources, that ended last. Ties go to the lowest number. On a simulated timeline each task starts exactly when
    its predecessor ends, so the spans of the path add up to the makespan. A measured timeline may have gaps, which are
    host time or clock error. An empty timeline has an empty path.

    Raises GraphError for a timeline of another graph, or one that lacks a task.
    """
    compiled = compile_graph(graph)
    rows = rows_of(compiled.columns, timeline)
    if not compiled.size:
        return ()
    if not rows.seen.all():
        missing = int((~rows.seen).argmax())
        raise GraphError(f"the timeline has no row for task {missing}; a critical path needs every task of the graph")
    before = compiled.arrays.before
    task = int(rows.task_end_s.argmax())
    path = [task]
    while before.offsets[task] < before.offsets[task + 1]:
        forerunners = before.values[before.offsets[task] : before.offsets[task + 1]].tolist()
        task = max(forerunners, key=lambda earlier: (rows.task_end_s[earlier], -earlier))
        path.append(task)
    return tuple(reversed(path))
