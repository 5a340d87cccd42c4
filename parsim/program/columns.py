"""A program as columns, read by the simulator and the scheduler; made from a TaskGraph or directly from a plan.

Tasks that do the same work on the same rank are one *unit*, priced once. A `Folding` says which ranks stand for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, SupportsIndex, TypeVar, overload

import numpy as np

from parsim.numeric import Bools, Ints
from parsim.plans.mesh import Mesh
from parsim.program.taskgraph import COMPUTE, Resource, Task, TaskGraph
from parsim.work import OFFLOADED, LoadBatch, SendRecv, Work, is_communication

T = TypeVar("T")


class RaggedTable(NamedTuple):
    """Rows of varying length in one array: row i is `values[offsets[i]:offsets[i + 1]]`."""

    offsets: Ints
    values: Ints

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> RaggedTable:
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        values = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        return cls(_offsets(lengths), values)

    @classmethod
    def from_pairs(cls, rows: Ints, values: Ints, count: int) -> RaggedTable:
        """`values[k]` belongs to row `rows[k]` < count; the order within a row is kept."""
        return cls(_offsets(np.bincount(rows, minlength=count)), values[stable_order(rows, count)])

    @property
    def row_numbers(self) -> Ints:
        """For every value the row it stands in."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int64), np.diff(self.offsets))

    def inverted(self, count: int) -> RaggedTable:
        """Row v lists the rows of this table that hold v, for v < count."""
        return RaggedTable.from_pairs(self.values, self.row_numbers, count)

    def row(self, number: int) -> Ints:
        return self.values[self.offsets[number] : self.offsets[number + 1]]


def stable_order(numbers: Ints, count: int) -> Ints:
    """The stable order of numbers < count, 16 bits at a time: numpy sorts those by counting, wider ones by comparing."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    if count > 2**16:
        order = order[stable_order((numbers >> 16)[order], ((count - 1) >> 16) + 1)]
    return order


def _offsets(lengths: Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class Unit(NamedTuple):
    """Work that some tasks have in common, and the first of the ranks that do it. resumes: it is computation that goes on after
    its rank has waited for communication (`Columns.resuming`)."""

    work: Work
    rank: int
    resumes: bool = False


class Units(Sequence[Unit]):
    """The units of a program, in their order. Of many that differ by the name of a component alone each is made when asked for.

    kinds: units that cost what others do; one of each kind. kind: int64 [units], the kind of each. make: all units.
    """

    def __init__(self, kinds: tuple[Unit, ...], kind: Ints, make: Callable[[], tuple[Unit, ...]]) -> None:
        self.kinds = kinds
        self.kind = kind
        self._make = make

    @classmethod
    def of(cls, units: Iterable[Unit]) -> Units:
        every = tuple(units)
        return cls(every, np.arange(len(every), dtype=np.int64), lambda: every)

    def each(self, of_kinds: Sequence[T]) -> list[T]:
        return [of_kinds[number] for number in self.kind.tolist()]

    @cached_property
    def _every(self) -> tuple[Unit, ...]:
        return self._make()

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, number: SupportsIndex) -> Unit: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Unit, ...]: ...
    def __getitem__(self, number: SupportsIndex | slice) -> Unit | tuple[Unit, ...]:
        return self._every[number]

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._every)


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Attributes:
    resources: in numbered order. uses: per task the numbers of its resources. issued: per resource its tasks, in issue order.
    dependencies: per task. unit: int64 [n], the number of each task's work in `units`.
    tasks: makes some tasks, by their numbers. view: makes the TaskGraph (None: of all these tasks). Both for people and for the
        executor. Neither holds the columns, which are freed with the last reference to them.
    """

    world_size: int
    resources: tuple[Resource, ...]
    uses: RaggedTable
    issued: RaggedTable
    dependencies: RaggedTable
    unit: Ints
    units: Units
    tasks: Callable[[Columns, Ints], Sequence[Task]]
    view: Callable[[], TaskGraph] | None = None

    @property
    def size(self) -> int:
        return len(self.unit)

    @cached_property
    def graph(self) -> TaskGraph:
        if self.view is not None:
            return self.view()
        return TaskGraph(tasks=tuple(self.select(np.arange(self.size))), world_size=self.world_size)

    def select(self, numbers: Ints) -> Sequence[Task]:
        return self.tasks(self, numbers)

    @cached_property
    def use_tasks(self) -> Ints:
        """For every value of `uses` its task."""
        return self.uses.row_numbers

    @cached_property
    def resource_rank(self) -> Ints:
        return np.array([resource.rank for resource in self.resources], dtype=np.int64)

    @cached_property
    def resource_computes(self) -> Bools:
        return np.array([resource.stream == COMPUTE for resource in self.resources], dtype=np.bool_)

    def is_work(self, test: Callable[[Work], bool]) -> Bools:
        """bool [n]: which tasks' work passes the test (asked once per kind of unit, so not of the names of components)."""
        return np.array([test(unit.work) for unit in self.units.kinds], dtype=np.bool_)[self.units.kind[self.unit]]

    @cached_property
    def communicates(self) -> Bools:
        return self.is_work(is_communication)

    @cached_property
    def loads(self) -> Bools:
        return self.is_work(lambda work: isinstance(work, LoadBatch))

    @cached_property
    def transfers(self) -> Bools:
        return self.is_work(lambda work: isinstance(work, SendRecv))

    @cached_property
    def offloads(self) -> Bools:
        return self.is_work(lambda work: isinstance(work, OFFLOADED))

    @cached_property
    def pipelined(self) -> Bools:
        """bool [world_size]: which ranks have a peer in a pipeline."""
        pipelined = np.zeros(self.world_size, dtype=np.bool_)
        pipelined[self.resource_rank[self.uses.values[self.transfers[self.use_tasks]]]] = True
        return pipelined

    def resuming(self) -> Columns:
        """This program, in which units know whether their tasks resume computation: depend on communication."""
        rows = self.dependencies.row_numbers
        waits = np.zeros(self.size, dtype=np.bool_)
        waits[rows[self.communicates[self.dependencies.values]]] = True
        waits &= ~self.communicates & ~self.loads
        keys, numbers = np.unique(2 * self.unit + waits, return_inverse=True)
        units = tuple(self.units[key // 2]._replace(resumes=bool(key % 2)) for key in keys.tolist())
        return replace(self, unit=np.asarray(numbers, dtype=np.int64).reshape(self.size), units=Units.of(units))

    @cached_property
    def first_rank(self) -> Ints:
        return self.resource_rank[self.uses.values[self.uses.offsets[:-1]]]


def columns_of(graph: TaskGraph) -> Columns:
    number = {resource: place for place, resource in enumerate(graph.resources)}
    units: dict[Unit, int] = {}
    unit = [units.setdefault(Unit(task.work, task.resources[0].rank), len(units)) for task in graph.tasks]
    return Columns(
        world_size=graph.world_size,
        resources=graph.resources,
        uses=RaggedTable.from_rows([[number[resource] for resource in task.resources] for task in graph.tasks]),
        issued=RaggedTable.from_rows([graph.issue_order[resource] for resource in graph.resources]),
        dependencies=RaggedTable.from_rows([task.dependencies for task in graph.tasks]),
        unit=np.array(unit, dtype=np.int64),
        units=Units.of(units),
        tasks=lambda _, numbers: [graph.tasks[number] for number in numbers.tolist()],
        view=lambda: graph,
    )


# A folding: which ranks of a plan are simulated, and for whom each stands. `parsim.predict.folding` finds it by prices.


@dataclass(frozen=True, kw_only=True)
class Folding:
    """replica_of: per replica the one that stands for it (the first of its kind). shards: the tp ranks that are simulated: all,
    or the first for all. is_exact: False where copies that communicate inside components (cp, ep) do not pay alike, or replicas
    gossip where leaf switches differ: no program, and for `parsim.predict.folding` alone."""

    mesh: Mesh
    replica_of: tuple[int, ...]
    shards: tuple[int, ...]
    is_exact: bool = True

    @property
    def is_folded(self) -> bool:
        return len(self.replicas) < self.mesh.copies or len(self.shards) < self.mesh.tp

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The simulated ones, ascending."""
        return tuple(sorted(set(self.replica_of)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(
            self.mesh.rank(stage=stage, replica=replica, shard=shard)
            for stage in range(self.mesh.pp)
            for replica in self.replicas
            for shard in self.shards
        )

    @property
    def has_whole_teams(self) -> bool:
        """Whether copies that communicate inside components are simulated as one, or there are none."""
        team = self.mesh.team
        return all(len(set(self.replica_of[first : first + team])) == 1 for first in range(0, self.mesh.copies, team))

    def stands_for(self, rank: int) -> int:
        """The simulated rank that stands for `rank`."""
        mesh = self.mesh
        shard, replica, stage = rank % mesh.tp, rank // mesh.tp % mesh.copies, rank // (mesh.tp * mesh.copies)
        return mesh.rank(stage=stage, replica=self.replica_of[replica], shard=shard if len(self.shards) == mesh.tp else 0)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """For how many ranks each of `ranks` stands, itself included."""
        copies = {replica: self.replica_of.count(replica) for replica in self.replicas}
        shards = self.mesh.tp // len(self.shards)
        return tuple(copies[rank // self.mesh.tp % self.mesh.copies] * shards for rank in self.ranks)


def unfolded(mesh: Mesh) -> Folding:
    return Folding(mesh=mesh, replica_of=tuple(range(mesh.copies)), shards=tuple(range(mesh.tp)))
