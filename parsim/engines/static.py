"""A program as the arrays that the compiled kernels read, and the static engine, which simulates them.

No numba here: a graph whose list order already runs (every edge points backward) is compiled by numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parsim.costs.estimate import OverlapFactors
from parsim.errors import DeadlockError, GraphError
from parsim.numeric import Ints
from parsim.program.columns import Columns, RaggedTable, columns_of
from parsim.program.taskgraph import Resource, TaskGraph, in_order, work_text
from parsim.timeline import Timeline

OTHER, COMPUTING, COMMUNICATING = 0, 1, 2


class GraphArrays(NamedTuple):
    """What the compiled kernels read. Numbers of tasks, and of resources as the columns number them.

    Attributes:
        order: int64 [n], a topological order of `before`.
        before: per task its dependencies and the task issued just before it on each of its resources (may repeat).
        after: the inverse of `before`; empty but in `CompiledGraph.with_rates`, as are `kind` and `ranks`.
        resources: per task the resources it holds. heads: those on which it is issued first.
        last: int64 [R], the task issued last; -1 if the resource issues none.
        kind: int64 [n]: COMPUTING (holds a compute stream and is not a communication), COMMUNICATING or OTHER.
        ranks: per task the ranks on which it computes or communicates (none for OTHER).
    """

    order: Ints
    before: RaggedTable
    after: RaggedTable
    resources: RaggedTable
    heads: RaggedTable
    last: Ints
    kind: Ints
    ranks: RaggedTable


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledGraph:
    """A program ready to be simulated often."""

    columns: Columns
    arrays: GraphArrays

    @cached_property
    def with_rates(self) -> GraphArrays:
        """The arrays with those that only simulations need in which tasks slow one another."""
        kind, ranks = _classify(self.columns)
        return self.arrays._replace(after=self.arrays.before.inverted(self.size), kind=kind, ranks=ranks)

    @cached_property
    def position(self) -> Ints:
        """int64 [n]: where in the order each task is."""
        position = np.empty(self.size, dtype=np.int64)
        position[self.arrays.order] = np.arange(self.size)
        return position

    @property
    def size(self) -> int:
        return self.columns.size

    @property
    def graph(self) -> TaskGraph:
        return self.columns.graph

    @property
    def dependencies(self) -> RaggedTable:
        return self.columns.dependencies

    def resources_of_cores(self, core: Ints) -> RaggedTable:
        """Per core the resources of its ranks. `core`: int64 [world_size], of every rank."""
        columns = self.columns
        count = int(core.max(initial=-1)) + 1
        return RaggedTable.from_pairs(core[columns.resource_rank], np.arange(len(columns.resources), dtype=np.int64), count)


AnyGraph = TaskGraph | Columns | CompiledGraph
"""What engines and analyses take: compile it once to use it often."""


def compile_graph(program: AnyGraph) -> CompiledGraph:
    """Arrays of a program; one that is already compiled is returned as it is.

    Raises GraphError: the dependencies form a cycle (printed). DeadlockError: the issue orders and dependencies together form
    one (the grid of resources is printed).
    """
    if isinstance(program, CompiledGraph):
        return program
    columns = columns_of(program) if isinstance(program, TaskGraph) else program
    n, issued = columns.size, columns.issued
    before = _before(columns.dependencies, issued, n)
    used = np.flatnonzero(np.diff(issued.offsets))
    last = np.full(len(columns.resources), -1, dtype=np.int64)
    last[used] = issued.values[issued.offsets[used + 1] - 1]
    arrays = GraphArrays(
        order=_topological_order(columns, before),
        before=before,
        after=_empty(n),
        resources=columns.uses,
        heads=RaggedTable.from_pairs(issued.values[issued.offsets[used]], used, n),
        last=last,
        kind=np.zeros(n, dtype=np.int64),
        ranks=_empty(n),
    )
    return CompiledGraph(columns=columns, arrays=arrays)


def _empty(n: int) -> RaggedTable:
    return RaggedTable(np.zeros(n + 1, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _before(dependencies: RaggedTable, issued: RaggedTable, n: int) -> RaggedTable:
    """Dependency edges and, on every resource, the edge from each task to the next."""
    same_resource = np.diff(issued.row_numbers) == 0
    earlier, later = issued.values[:-1][same_resource], issued.values[1:][same_resource]
    return RaggedTable.from_pairs(
        np.concatenate([dependencies.row_numbers, later]), np.concatenate([dependencies.values, earlier]), n
    )


def _classify(columns: Columns) -> tuple[Ints, RaggedTable]:
    """Kind of every task, and the ranks on which it computes (by its compute streams) or communicates (by any stream)."""
    rows, used = columns.use_tasks, columns.uses.values
    counts = columns.communicates[rows] | columns.resource_computes[used]
    kind = np.full(columns.size, OTHER, dtype=np.int64)
    kind[rows[columns.resource_computes[used]]] = COMPUTING
    kind[columns.communicates] = COMMUNICATING
    ranks, of_task = columns.resource_rank[used[counts]], rows[counts]
    again = np.zeros(len(ranks), dtype=np.bool_)  # a task with two streams on one rank counts there once
    again[1:] = (of_task[1:] == of_task[:-1]) & (ranks[1:] == ranks[:-1])
    return kind, RaggedTable.from_pairs(of_task[~again], ranks[~again], columns.size)


def _topological_order(columns: Columns, before: RaggedTable) -> Ints:
    n = columns.size
    if bool(np.all(before.values < before.row_numbers)):
        return np.arange(n, dtype=np.int64)
    from parsim.engines.kernels import topological_order

    order: Ints = topological_order(np.diff(before.offsets), before.inverted(n))
    if len(order) < n:
        raise stuck_error(columns.graph, set(order.tolist()))
    return order


# The checked inputs of both engines besides the graph, and the Timeline both return.


def checked_durations_s(
    program: TaskGraph | Columns,
    durations_s: ArrayLike,
    *,
    dimensions: int,
    unit: Ints | None = None,
    step: int | None = None,
) -> NDArray[np.float64]:
    """`durations_s` as contiguous float64 of shape [n] or [S, n]; with `unit`, int64 [n], the column of each task, [S, units].

    Raises GraphError for another shape, or for a negative or non-finite entry (of which task, which value, in which `step`).
    """
    array = np.ascontiguousarray(durations_s, dtype=np.float64)
    n = len(program.tasks) if isinstance(program, TaskGraph) else program.size
    if unit is not None:
        if array.ndim != 2 or unit.shape != (n,):
            raise GraphError(
                f"durations_s must have shape [samples, units] and unit [{n}], got {list(array.shape)} and {list(unit.shape)}"
            )
        if n and not 0 <= int(unit.min()) <= int(unit.max()) < array.shape[1]:
            raise GraphError(f"unit names columns {unit.min()} to {unit.max()}, durations_s has 0 to {array.shape[1] - 1}")
    elif array.ndim != dimensions or array.shape[-1] != n:
        wanted = f"[{n}]" if dimensions == 1 else f"[samples, {n}]"
        raise GraphError(f"durations_s must have shape {wanted}, one entry per task, got {list(array.shape)}")
    if bool(((array >= 0) & (array < np.inf)).all()):
        return array
    by_task = array if unit is None else array[:, unit]
    bad = np.argwhere(~((by_task >= 0) & (by_task < np.inf)))
    if len(bad):  # else of units that no task has
        place = tuple(bad[0].tolist())
        graph = program if isinstance(program, TaskGraph) else program.graph
        where = f" in sample {place[0]}" if dimensions == 2 else "" if step is None else f" in step {step}"
        raise GraphError(
            f"{describe_task(graph, place[-1])} has duration {by_task[place]} s{where}; "
            "durations must be finite and >= 0: check the cost of this work"
        )
    return array


class Slowdown(NamedTuple):
    """How what runs at once slows one another.

    Attributes:
        compute, communication: factors while the other side runs on the same core.
        core: int64 [world_size], the core of each rank, numbered from 0.
        divided: what communicates at once on a core slows one another.
    """

    compute: float
    communication: float
    core: Ints
    divided: bool = False

    @property
    def is_none(self) -> bool:
        """Whether nothing ever slows anything."""
        return self.compute == self.communication == 1.0 and not self.shares_cores and not self.divided

    @property
    def shares_cores(self) -> bool:
        return bool((np.bincount(self.core) > 1).any())


def checked_slowdown(overlap: OverlapFactors | None, world_size: int) -> Slowdown:
    """Factors 1.0 and a core for every rank for None. Raises GraphError unless both factors are finite and >= 1, and every
    rank has a core (if any has)."""
    own = np.arange(world_size, dtype=np.int64)
    if overlap is None:
        return Slowdown(1.0, 1.0, own)
    factors = float(overlap.compute), float(overlap.communication)
    if not all(math.isfinite(factor) and factor >= 1 for factor in factors):
        raise GraphError(
            f"overlap factors must be finite and >= 1 (1 = no slowdown), got compute {factors[0]}, communication {factors[1]}"
        )
    if not overlap.core_of_rank:
        return Slowdown(*factors, own, overlap.communications_share)
    if len(overlap.core_of_rank) < world_size:
        raise GraphError(f"core_of_rank names the cores of {len(overlap.core_of_rank)} ranks; the graph has {world_size}")
    _, core = np.unique(np.array(overlap.core_of_rank[:world_size], dtype=np.int64), return_inverse=True)
    return Slowdown(*factors, np.asarray(core, dtype=np.int64).reshape(world_size), overlap.communications_share)


def simulated_timeline(columns: Columns, start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> Timeline:
    """One row per task and resource, task by task, from start and end per task (float64 [n])."""
    rows = columns.use_tasks
    return Timeline(
        source="simulated",
        resources=tuple(map(str, columns.resources)),
        task=rows,
        resource=columns.uses.values,
        start_s=start_s[rows],
        end_s=end_s[rows],
    )


# The static engine: an array program over issue-ordered graphs, exact and fast.
#
# Same-instant rule (both engines): each resource runs its tasks in issue order. A task starts when its dependencies have ended
# and it is at the head of every resource it needs, which are then all free. It holds them all until it ends. So what happens in
# one instant never depends on which event is looked at first.
#
# Without slowdown the schedule is the longest path over dependencies and issue orders: start = max(ends before), end = start +
# duration. With overlap factors the engine follows the rates from instant to instant. While a rank computes and communicates at
# once, its computation runs at rate 1 / compute and its communication at 1 / communication. A collective or a transfer runs at
# the rate of its slowest rank. Ranks that share a core slow one another as if they were one rank, and k of them that compute at
# once run at 1 / k each (processor sharing).
#
# Leaves out: links shared by several transfers, and decisions at run time (see the dynamic engine).


def simulate(graph: AnyGraph, durations_s: ArrayLike, *, overlap: OverlapFactors | None = None) -> Timeline:
    """The Timeline of one step that starts at 0 with every resource free.

    Args:
        graph: compile it once (`compile_graph`) to simulate it often. durations_s: float64 [n], seconds each task takes alone.
        overlap: slowdown while one rank computes and communicates at once; None for none.

    Raises:
        GraphError: a cycle of dependencies; durations of the wrong shape, negative or not finite; factors below 1.
        DeadlockError: issue orders that wait for one another.
    """
    compiled = compile_graph(graph)
    slowdown = checked_slowdown(overlap, compiled.columns.world_size)
    durations = checked_durations_s(compiled.columns, durations_s, dimensions=1)
    from parsim.engines import kernels

    start, end = np.zeros(compiled.size), np.zeros(compiled.size)
    floor = np.zeros(len(compiled.arrays.last))
    if slowdown.is_none:
        kernels.run_plain(compiled.arrays, durations, floor, start, end)
    else:
        on_core = compiled.resources_of_cores(slowdown.core)
        kernels.run_with_overlap(compiled.with_rates, slowdown, on_core, durations, floor, start, end)
    return simulated_timeline(compiled.columns, start, end)


def step_times_s(
    graph: AnyGraph,
    durations_s: ArrayLike,
    *,
    steps: int = 1,
    overlap: OverlapFactors | None = None,
    unit: NDArray[np.int64] | None = None,
    together: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """float64 [S]: the mean step of `steps` repeats of the graph, for every row of `durations_s` (float64 [S, n]).

    Args:
        unit: int64 [n], the column of `durations_s` (then float64 [S, units]) each task has, for tasks that share durations.
        together: int64 [resources], a number >= 0 for each: those of one number begin a repeat when all of them have ended the
            one before (`parsim.engines.program`); None: each by itself.

    All resources are free at 0. The result is the end of the very last task divided by `steps`; `steps=1` gives the makespan.
    Nothing but its own queue (and those `together` with it) holds a resource back between repeats, so a resource that is done
    early begins the next repeat early. The fill and drain of the whole run are divided among the steps. Nothing is unrolled:
    only the resources' frontiers are carried over. Memory: 64 n bytes at most beside the arguments and the compiled graph.

    Leaves out: dependencies between tasks of different repeats beyond issue order, the slowdown (`overlap`) between tasks of
    different repeats. Also noise from step to step: a row holds for all its repeats.

    Raises GraphError for steps < 1, else as `simulate`.
    """
    if steps < 1:
        raise GraphError(f"steps must be >= 1, got {steps}")
    compiled = compile_graph(graph)
    slowdown = checked_slowdown(overlap, compiled.columns.world_size)
    column = np.empty(0, dtype=np.int64) if unit is None else np.ascontiguousarray(unit, dtype=np.int64)
    durations = checked_durations_s(compiled.columns, durations_s, dimensions=2, unit=None if unit is None else column)
    from parsim.engines import kernels

    on_core = compiled.resources_of_cores(slowdown.core)
    groups = np.arange(len(compiled.arrays.last)) if together is None else np.ascontiguousarray(together, dtype=np.int64)
    arrays = compiled.arrays if slowdown.is_none else compiled.with_rates
    ends: NDArray[np.float64]
    if slowdown.is_none and len(durations) > 1:
        ends = kernels.last_ends_of_rows(arrays, durations, column, steps, groups)
    else:
        ends = kernels.last_ends(arrays, slowdown, on_core, slowdown.is_none, durations, column, steps, groups)
    return ends / steps


# --- a graph that cannot run to its end: the cycle, and what each rank waits for --------------------------------------


_RANKS_SHOWN = 16
_REASONS_SHOWN = 12
_CYCLE_SHOWN = 12


def stuck_error(graph: TaskGraph, finished: Set[int]) -> GraphError:
    """The error for a run that ended with only `finished` done: GraphError if dependencies alone form a cycle, else
    DeadlockError with the grid of resources and their head tasks, what every blocked head waits for, and the cycle."""
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
    """A cycle among `stuck`, each of which has a stuck predecessor: each task waits for the next, the last for the first."""
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
