"""A TaskGraph as arrays, made once and kept by whoever simulates it often.

No numba here: a graph whose list order already runs (every edge points backward) is compiled by numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.graph.task import COMPUTE
from parsim.graph.taskgraph import TaskGraph
from parsim.simulate.deadlock import stuck_error
from parsim.work import is_communication

Ints = NDArray[np.int64]

OTHER, COMPUTING, COMMUNICATING = 0, 1, 2


class Table(NamedTuple):
    """Rows of varying length in one array: row i is `values[offsets[i]:offsets[i + 1]]`."""

    offsets: Ints
    values: Ints

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Table:
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        values = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        return cls(_offsets(lengths), values)

    @classmethod
    def from_pairs(cls, rows: Ints, values: Ints, count: int) -> Table:
        """`values[k]` belongs to row `rows[k]` < count; the order within a row is kept."""
        order = np.argsort(rows, kind="stable")
        return cls(_offsets(np.bincount(rows, minlength=count)), values[order])

    @property
    def row_numbers(self) -> Ints:
        """For every value the row it stands in."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int64), np.diff(self.offsets))

    def inverted(self, count: int) -> Table:
        """Row v lists the rows of this table that hold v, for v < count."""
        return Table.from_pairs(self.values, self.row_numbers, count)


class GraphArrays(NamedTuple):
    """What the compiled kernels read. Numbers of tasks, and of resources in the order of `graph.resources`.

    Attributes:
        order: int64 [n], a topological order of `before`.
        before: per task its dependencies and the task issued just before it on each of its resources (may repeat).
        after: the inverse of `before`.
        resources: per task the resources it holds. heads: those on which it is issued first.
        last: int64 [R], the task issued last; -1 if the resource issues none.
        kind: int64 [n]: COMPUTING (holds a compute stream and is no communication), COMMUNICATING or OTHER.
        ranks: per task the ranks on which it computes or communicates (none for OTHER).
        rank_resources: per rank its resources.
    """

    order: Ints
    before: Table
    after: Table
    resources: Table
    heads: Table
    last: Ints
    kind: Ints
    ranks: Table
    rank_resources: Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledGraph:
    """`graph` as arrays; `dependencies` are those of each task, without the issue orders."""

    graph: TaskGraph
    arrays: GraphArrays
    dependencies: Table

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.arrays.order)


def compile_graph(graph: TaskGraph | CompiledGraph) -> CompiledGraph:
    """Arrays of `graph`; a graph that is already compiled is returned as it is.

    Raises:
        GraphError: the dependencies form a cycle (printed).
        DeadlockError: the issue orders and dependencies together form one (the grid of resources is printed).
    """
    if isinstance(graph, CompiledGraph):
        return graph
    n, streams = len(graph.tasks), graph.resources
    dependencies = Table.from_rows([task.dependencies for task in graph.tasks])
    issued = Table.from_rows([graph.issue_order[resource] for resource in streams])
    before = _before(dependencies, issued, n)
    after = before.inverted(n)
    used = np.flatnonzero(np.diff(issued.offsets))
    last = np.full(len(streams), -1, dtype=np.int64)
    last[used] = issued.values[issued.offsets[used + 1] - 1]
    kind, ranks = _classify(graph)
    arrays = GraphArrays(
        order=_topological_order(graph, before, after),
        before=before,
        after=after,
        resources=resource_table(graph),
        heads=Table.from_pairs(issued.values[issued.offsets[used]], used, n),
        last=last,
        kind=kind,
        ranks=ranks,
        rank_resources=Table.from_rows([[resource.rank] for resource in streams]).inverted(graph.world_size),
    )
    return CompiledGraph(graph=graph, arrays=arrays, dependencies=dependencies)


def resource_table(graph: TaskGraph) -> Table:
    """Per task the numbers of its resources, in the order the task lists them."""
    number = {resource: place for place, resource in enumerate(graph.resources)}
    return Table.from_rows([[number[resource] for resource in task.resources] for task in graph.tasks])


def _offsets(lengths: Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _before(dependencies: Table, issued: Table, n: int) -> Table:
    """Dependency edges and, on every resource, the edge from each task to the next."""
    same_resource = np.diff(issued.row_numbers) == 0
    earlier, later = issued.values[:-1][same_resource], issued.values[1:][same_resource]
    return Table.from_pairs(
        np.concatenate([dependencies.row_numbers, later]), np.concatenate([dependencies.values, earlier]), n
    )


def _classify(graph: TaskGraph) -> tuple[Ints, Table]:
    """Kind of every task, and the ranks on which it computes (by its compute streams) or communicates (by any stream)."""
    kind = np.full(len(graph.tasks), OTHER, dtype=np.int64)
    ranks: list[tuple[int, ...]] = []
    for task in graph.tasks:
        if is_communication(task.work):
            kind[task.index] = COMMUNICATING
            ranks.append(task.ranks)
            continue
        computes_on = tuple(resource.rank for resource in task.resources if resource.stream == COMPUTE)
        if computes_on:
            kind[task.index] = COMPUTING
        ranks.append(computes_on)
    return kind, Table.from_rows(ranks)


def _topological_order(graph: TaskGraph, before: Table, after: Table) -> Ints:
    n = len(graph.tasks)
    if bool(np.all(before.values < before.row_numbers)):
        return np.arange(n, dtype=np.int64)
    from parsim.simulate.kernels import topological_order

    order: Ints = topological_order(np.diff(before.offsets), after)
    if len(order) < n:
        raise stuck_error(graph, set(order.tolist()))
    return order
