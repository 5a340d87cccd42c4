"""A program as the arrays that the compiled kernels read, made once and kept by whoever simulates it often.

No numba here: a graph whose list order already runs (every edge points backward) is compiled by numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from parsim.arrays import Ints
from parsim.engines.deadlock import stuck_error
from parsim.graph.columns import Columns, RaggedTable, columns_of
from parsim.graph.taskgraph import TaskGraph

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

    @property
    def size(self) -> int:
        """Number of tasks."""
        return self.columns.size

    @property
    def graph(self) -> TaskGraph:
        """The program as tasks, made when first asked for."""
        return self.columns.graph

    @property
    def dependencies(self) -> RaggedTable:
        """Per task, without the issue orders."""
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

    Raises:
        GraphError: the dependencies form a cycle (printed).
        DeadlockError: the issue orders and dependencies together form one (the grid of resources is printed).
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
    rows, used = columns.uses.row_numbers, columns.uses.values
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
