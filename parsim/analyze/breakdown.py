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

from parsim.analyze.spans import Rows, in_order, rows_of, union
from parsim.arrays import Bools, Floats, Ints
from parsim.engines.compile import AnyGraph, CompiledGraph, compile_graph
from parsim.errors import GraphError
from parsim.graph.columns import Columns, stable_order
from parsim.timeline import Timeline
from parsim.work import OFFLOADED


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
        """The sum of the categories."""
        return self.compute_s + self.load_s + self.host_s + self.exposed_communication_s + self.bubble_s + self.idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFractions:
    """Means over ranks: shares of the step, and the seconds of exposed communication."""

    communication_fraction: float
    communication_busy_fraction: float
    exposed_communication_s: float
    bubble_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kinds:
    """Per task: is it communication, a load, a transfer, work with the host; and is its rank one of a pipeline (per rank)."""

    communicates: Bools
    loads: Bools
    transfers: Bools
    pipelined: Bools
    offloads: Bools


def breakdown(
    graph: AnyGraph, timeline: Timeline, step_s: float | None = None, *, ranks: Sequence[int] | None = None
) -> tuple[RankBreakdown, ...]:
    """One RankBreakdown per rank of the graph, over the seconds 0 to `step_s`.

    Args:
        ranks: only these, in this order (None: all).
        timeline: simulated or measured, of this graph.
        step_s: length of the step; None for the timeline's makespan. Spans are cut to it.

    Raises GraphError for a timeline of another graph, or a step that is negative or not finite.
    """
    compiled = compile_graph(graph)
    if step_s is None:
        step_s = timeline.makespan_s
    if not 0 <= step_s < np.inf:
        raise GraphError(f"step_s must be finite and >= 0, got {step_s}")
    rows, kinds = rows_of(compiled.columns, timeline), _kinds(compiled.columns)
    last_end_s = min(timeline.makespan_s, step_s)
    position = np.empty(compiled.size, dtype=np.int64)
    position[compiled.arrays.order] = np.arange(compiled.size)
    issued = position[rows.task]
    order = np.arange(len(issued)) if in_order(issued) else np.argsort(issued, kind="stable")
    by_rank = order[stable_order(rows.rank[order], compiled.columns.world_size)]
    bounds = np.searchsorted(rows.rank[by_rank], np.arange(compiled.columns.world_size + 1))
    own_end = np.full(compiled.size, -np.inf)
    return tuple(
        _rank_breakdown(rank, compiled, rows, kinds, by_rank[bounds[rank] : bounds[rank + 1]], own_end, last_end_s, step_s)
        for rank in (range(compiled.columns.world_size) if ranks is None else ranks)
    )


def step_fractions(breakdowns: Sequence[RankBreakdown], weights: Sequence[int] | None = None) -> StepFractions:
    """Averages over ranks; zero for an empty step. `weights`: for how many ranks each stands (None: for itself)."""

    def mean(values: list[float]) -> float:
        return float(np.average(values, weights=weights)) if values else 0.0

    def mean_share(seconds: list[float]) -> float:
        return mean(
            [value / entry.step_s if entry.step_s > 0 else 0.0 for value, entry in zip(seconds, breakdowns, strict=True)]
        )

    exposed = [entry.exposed_communication_s for entry in breakdowns]
    return StepFractions(
        communication_fraction=mean_share(exposed),
        communication_busy_fraction=mean_share([entry.communication_busy_s for entry in breakdowns]),
        exposed_communication_s=mean(exposed),
        bubble_fraction=mean_share([entry.bubble_s for entry in breakdowns]),
    )


def _kinds(columns: Columns) -> _Kinds:
    pipelined = np.zeros(columns.world_size, dtype=np.bool_)
    rows = columns.uses.row_numbers
    pipelined[columns.resource_rank[columns.uses.values[columns.transfers[rows]]]] = True
    return _Kinds(
        communicates=columns.communicates,
        loads=columns.loads,
        transfers=columns.transfers,
        pipelined=pipelined,
        offloads=columns.is_work(lambda work: isinstance(work, OFFLOADED)),
    )


def _common_s(gap_start: Floats, gap_end: Floats, start: Floats, end: Floats) -> float:
    """Seconds that ascending, disjoint gaps and spans have in common."""
    if not len(start):
        return 0.0
    before = np.concatenate([[0.0], np.cumsum(end - start)])

    def covered(at: Floats) -> Floats:
        begun = np.searchsorted(start, at, side="right")
        last = np.maximum(begun - 1, 0)
        found: Floats = np.where(begun > 0, before[last] + np.minimum(at, end[last]) - start[last], 0.0)
        return found

    return float((covered(np.maximum(gap_end, gap_start)) - covered(gap_start)).sum())


def _rank_breakdown(
    rank: int,
    compiled: CompiledGraph,
    rows: Rows,
    kinds: _Kinds,
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

    start, end = np.clip(rows.start_s[own], 0, step_s), np.clip(rows.end_s[own], 0, step_s)
    communicates = kinds.communicates[rows.task[own]]
    computes = rows.compute_stream[own] & ~communicates
    compute_start, compute_end, first = union(start[computes], end[computes])
    comm_start, comm_end, _ = union(start[communicates], end[communicates])
    offloads = kinds.offloads[rows.task[own]]
    taken_start, taken_end = comm_start, comm_end  # what a gap is before it is a wait
    if offloads.any():
        taken_start, taken_end, _ = union(start[communicates | offloads], end[communicates | offloads])
    next_task = rows.task[own][computes][first]

    gap_start = np.concatenate([[0.0], compute_end])
    gap_end = np.concatenate([compute_start, [max(last_end_s, gap_start[-1])]])
    found = split_gaps(
        next_task,
        gap_start,
        gap_end,
        bool(kinds.pipelined[rank]),
        rows.task[own],
        rows.end_s[own],
        own_end,
        compiled.arrays.before,
        rows.task_end_s,
        kinds.loads,
        kinds.transfers,
        taken_start,
        taken_end,
    )
    exposed, load, bubble, idle, host, loaded_s = found.tolist()
    if offloads.any():
        offloaded = exposed - _common_s(gap_start, gap_end, comm_start, comm_end)
        exposed, host = exposed - offloaded, host + offloaded
    not_begun = max(0.0, min(float(start.min()), loaded_s)) if len(start) else 0.0
    load = max(0.0, load - not_begun)
    bubble, idle = (bubble + not_begun, idle) if kinds.pipelined[rank] else (bubble, idle + not_begun)
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
