"""The chain of tasks that made the step as long as it was."""

from __future__ import annotations

from parsim.analyze.spans import rows_of
from parsim.engines.compile import AnyGraph, compile_graph
from parsim.errors import GraphError
from parsim.timeline import Timeline


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
