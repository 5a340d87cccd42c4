"""Checked columns of a Timeline, and interval arithmetic on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats, Ints
from parsim.errors import GraphError
from parsim.graph.columns import Columns
from parsim.graph.task import COMPUTE
from parsim.timeline import Timeline


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
    known = {str(resource): resource for resource in columns.resources}
    unknown = [name for name in timeline.resources if name not in known]
    if unknown:
        raise GraphError(f"the timeline names resource {unknown[0]}, which the graph lacks; read a timeline with its own graph")
    resources = [known[name] for name in timeline.resources]
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
    """Whether none is less than the one before it."""
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
