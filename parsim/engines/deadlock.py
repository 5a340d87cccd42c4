"""The error for a graph that cannot run to its end: the cycle, and what each rank waits for."""

from __future__ import annotations

from collections.abc import Sequence, Set

from parsim.errors import DeadlockError, GraphError
from parsim.program.taskgraph import Resource, TaskGraph, in_order, work_text

_RANKS_SHOWN = 16
_REASONS_SHOWN = 12
_CYCLE_SHOWN = 12


def stuck_error(graph: TaskGraph, finished: Set[int]) -> GraphError:
    """The error for a run that ended with only `finished` done, since no further task can ever start.

    Returns:
        GraphError if dependencies alone form a cycle, else DeadlockError: the grid of resources and their head tasks,
        what every blocked head waits for, and the cycle.
    """
    dependencies = [list(task.dependencies) for task in graph.tasks]
    never = set(range(len(dependencies))) - set(in_order(dependencies))
    if never:
        cycle = _find_cycle(dependencies, never)
        return GraphError(
            f"tasks depend on one another in a cycle: {_cycle_text(graph, cycle)}; remove one of these dependencies"
        )
    stuck = {task.index for task in graph.tasks} - finished
    cycle = _find_cycle(graph.predecessors(), stuck)
    lines = [
        f"deadlock: issue orders wait for one another, {len(stuck)} of {len(graph.tasks)} tasks can never start",
        *_grid(graph, finished),
        *_reasons(graph, finished),
        f"cycle: {_cycle_text(graph, cycle)}",
        "issue the tasks that share ranks in one common order on all their resources, or give them streams of their own",
    ]
    return DeadlockError("\n".join(lines))


def describe_task(graph: TaskGraph, index: int) -> str:
    """`task 3 (forward layer1 x16 on r0.compute)`."""
    task = graph.tasks[index]
    return f"task {index} ({work_text(task.work)} on {' '.join(map(str, task.resources))})"


def _find_cycle(before: Sequence[Sequence[int]], stuck: Set[int]) -> list[int]:
    """A cycle among `stuck`, in the order in which tasks wait: each one waits for the next, the last for the first.

    Every stuck task has a stuck predecessor, so walking from one to the next must come back.
    """
    place: dict[int, int] = {}
    path: list[int] = []
    task = min(stuck)
    while task not in place:
        place[task] = len(path)
        path.append(task)
        task = next(earlier for earlier in before[task] if earlier in stuck)
    return path[place[task] :]


def _cycle_text(graph: TaskGraph, cycle: Sequence[int]) -> str:
    shown = [describe_task(graph, task) for task in cycle[:_CYCLE_SHOWN]]
    if len(cycle) > _CYCLE_SHOWN:
        shown.append(f"... {len(cycle) - _CYCLE_SHOWN} more ...")
    return " waits for ".join([*shown, f"task {cycle[0]}"])


def _heads(graph: TaskGraph, finished: Set[int]) -> dict[Resource, int | None]:
    """Per resource the first task not finished."""
    return {
        resource: next((task for task in order if task not in finished), None) for resource, order in graph.issue_order.items()
    }


def _grid(graph: TaskGraph, finished: Set[int]) -> list[str]:
    """One line per rank, one cell per stream: its head task, marked * when blocked, or `done`."""
    heads = _heads(graph, finished)
    streams = sorted({resource.stream for resource in heads})
    ranks = sorted({resource.rank for resource in heads})
    rows = [["rank", *streams]]
    for rank in ranks[:_RANKS_SHOWN]:
        row = [str(rank)]
        for stream in streams:
            resource = Resource(rank, stream)
            head = heads.get(resource)
            row.append("" if resource not in heads else "done" if head is None else f"*{head} {_short_work(graph, head)}")
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(ranks) > _RANKS_SHOWN:
        lines.append(f"... {len(ranks) - _RANKS_SHOWN} more ranks")
    return [*lines, "(* = blocked head of its resource)"]


def _short_work(graph: TaskGraph, index: int) -> str:
    text = work_text(graph.tasks[index].work)
    return text if len(text) <= 28 else text[:25] + "..."


def _reasons(graph: TaskGraph, finished: Set[int]) -> list[str]:
    """What each blocked head still waits for."""
    heads = _heads(graph, finished)
    lines: list[str] = []
    for index in dict.fromkeys(head for head in heads.values() if head is not None):
        task = graph.tasks[index]
        needs = [f"task {dependency} to end" for dependency in task.dependencies if dependency not in finished]
        needs += [
            f"{resource}, where task {heads[resource]} is first" for resource in task.resources if heads[resource] != index
        ]
        lines.append(f"{describe_task(graph, index)} needs {'; '.join(needs)}")
    if len(lines) > _REASONS_SHOWN:
        lines = [*lines[:_REASONS_SHOWN], f"... {len(lines) - _REASONS_SHOWN} more blocked tasks"]
    return lines
