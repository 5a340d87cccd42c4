"""Lowering by templates: replicas, microbatches and equal components repeat the same tasks, so each kind is lowered once.

The passes write the tasks of one component for one phase of a microbatch of replica 0, for every kind of component
(`parsim.program.templates`). Their copies differ by names, ranks and task numbers alone, which is arithmetic on arrays. What
replicas share (gradient buckets, optimizer steps) is written once at the end. The result is the same program as `lower` makes,
task for task.

Where copies communicate inside components (cp, ep), a piece is no longer one copy's. Then one copy stands for its whole
team, or all tasks are made one by one.

With a Folding only the ranks that represent others are lowered. Their collectives with represented ranks keep the whole
group, on which the price depends, and their place in the queues.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np

from parsim.errors import GraphError
from parsim.model.model import Model
from parsim.numeric import Ints
from parsim.plans.pipeline import PIPELINE_ORDERS, pipeline_actions
from parsim.plans.plan import Plan
from parsim.program.columns import Columns, Folding, RaggedTable, Unit, Units, columns_of, unfolded
from parsim.program.lower import PASSES_AT_THE_END, lower
from parsim.program.passes.compute import add_component, add_loads, computations
from parsim.program.passes.rounds import add_round
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Draft, Origin, Resource, Task, TaskGraph, TaskKey
from parsim.work import Collective, Compute, Phase, SendRecv, Work

# Templates of computation: what a component does in one phase of a microbatch, lowered once for every kind of component.
#
# A *piece* is the tasks of a component in one phase of one microbatch of a replica, with the communication behind them.
# Pieces of components of one kind differ by names and ranks alone (`parsim.program.placed`). So the passes write the piece of
# the first component of a kind. What its tasks wait for is kept as a place in another piece. That is the piece of a component
# so many further on in the model, or, behind a value with many readers, of this very component.


class Awaited(NamedTuple):
    """A piece that tasks of another one wait for: of a phase (None: the loads of the same place on the pp axis), and of a
    component by its number in the model (`by_number`), or by how many components after that of the waiting piece."""

    phase: Phase | None
    component: int = 0
    by_number: bool = False


@dataclass(slots=True)
class LoweredPiece:
    """The piece of replica 0 and microbatch 0 of the first component of a kind, by its number in the model. waits: per piece
    that its tasks wait for, their places in this one and what each waits for in that one."""

    component: int
    draft: Draft
    waits: dict[Awaited, tuple[list[int], list[int]]] = field(default_factory=dict)


class _Place(NamedTuple):
    """Where a task is: in which piece that was lowered, and at what place of it."""

    phase: Phase
    component: int
    offset: int


class Pieces:
    """The pieces of a plan: which kinds there are, and what each waits for. kept: the ranks that are lowered; None: all.

    loads: per place on the pp axis the tasks that load a batch. sequences: per stage of the plan and phase of a microbatch the
    (phase, component) of its pieces, in order.
    """

    def __init__(self, layout: PlanIndex, kept: frozenset[int] | None) -> None:
        self._layout = layout
        self._kept = kept
        self._number = layout.model.component_index
        self._kinds = layout.kinds
        self.loads = {place: self._draft() for place in range(layout.plan.mesh.pp)}
        for place, draft in self.loads.items():
            add_loads(draft, layout, place, 0)
        self.sequences = {
            (stage, phase): [(task_phase, self._number[name]) for task_phase, name in computations(layout, stage, phase)]
            for stage in range(len(layout.plan.stages))
            for phase in PIPELINE_ORDERS[layout.plan.pipeline_order].phases
        }
        self._lowered: dict[tuple[Phase, int], Draft] = {}
        self._where: dict[TaskKey, _Place] = {}
        self._pieces: dict[tuple[Phase, int], LoweredPiece] = {}
        self._phases: dict[int, list[Phase]] = {}
        self._offsets: dict[TaskKey, int | None] = {}
        for phase, number in chain.from_iterable(self.sequences.values()):
            self._phases.setdefault(number, []).append(phase)
            kind = phase, self._kinds.of[number]
            if kind not in self._pieces:
                self._pieces[kind] = LoweredPiece(number, self._lower(phase, number))
        for (phase, _), piece in list(self._pieces.items()):
            self._resolve(phase, piece)

    def of(self, phase: Phase, component: int) -> LoweredPiece:
        """The piece that stands for that of a component (by number in the model)."""
        return self._pieces[phase, self._kinds.of[component]]

    def offset(self, phase: Phase, rank: int, name: str, part: Sequence[Hashable] = ()) -> int | None:
        """The place in its piece of a computation on a rank of replica 0; None: it is not lowered. part: of a component that
        runs in parts."""
        number = self._number[name]
        piece = self.of(phase, number)
        first, stage_of, mesh = (
            self._layout.model.components[piece.component].name,
            self._layout.stage_of,
            self._layout.plan.mesh,
        )
        there = rank + (stage_of[first] - stage_of[name]) * mesh.copies * mesh.tp
        place = phase, piece.component, there, *part
        if place not in self._offsets:
            key = (phase, there, first, 0, *part)
            self._offsets[place] = piece.draft.number(key) if key in piece.draft else None
        return self._offsets[place]

    def _draft(self) -> Draft:
        return Draft(world_size=self._layout.plan.world_size, ranks=self._kept)

    def _lower(self, phase: Phase, number: int) -> Draft:
        if (phase, number) not in self._lowered:
            self._lowered[phase, number] = draft = self._draft()
            add_component(draft, self._layout, 0, phase, self._layout.model.components[number].name, 0)
            for offset, key in enumerate(draft.numbers):
                self._where[key] = _Place(phase, number, offset)
        return self._lowered[phase, number]

    def _resolve(self, phase: Phase, piece: LoweredPiece) -> None:
        far = self._kinds.known_by_number(piece.component)
        for offset, (_, _, after) in enumerate(piece.draft.entries()):
            for key in after:
                awaited = self._awaited(key, piece.component, far)
                if awaited is not None:
                    offsets, earlier = piece.waits.setdefault(awaited[0], ([], []))
                    offsets.append(offset)
                    earlier.append(awaited[1])
                elif self._kept is None:  # else of a rank that another stands for: what that one does comes before, too
                    raise GraphError(f"task {offset} of {phase} of a component depends on {key}, which no pass added")

    def _awaited(self, key: TaskKey, waiting: int, far: frozenset[int]) -> tuple[Awaited, int] | None:
        if key[0] == "load":
            draft = self.loads[self._layout.stage_of[self._layout.model.components[waiting].name]]
            return (Awaited(None), draft.number(key)) if key in draft else None
        if isinstance(key[0], Phase):
            phase, rank, name, _, *part = key
            assert isinstance(phase, Phase)
            assert isinstance(rank, int)
            assert isinstance(name, str)
            number, offset = self._number[name], self.offset(phase, rank, name, part)
            return None if offset is None else (_awaited(phase, number, waiting, far), offset)
        # a conversion or transfer: where no piece that was lowered has it, one of a component at an end of its value does
        value = self._layout.model.value.get(str(key[1]))
        if key not in self._where and value is not None and value.producer is not None:
            is_far = self._kinds.is_far(value.name)  # then first readers are kinds of their own, so their pieces were lowered
            for name in (value.producer, *(() if is_far else self._layout.consumers[value.name])):
                for phase in self._phases[self._number[name]]:
                    self._lower(phase, self._number[name])
        if key not in self._where:
            return None
        place = self._where[key]
        return _awaited(place.phase, place.component, waiting, far), place.offset


def _awaited(phase: Phase, number: int, waiting: int, far: Iterable[int]) -> Awaited:
    return Awaited(phase, number, by_number=True) if number in far else Awaited(phase, number - waiting)


# The numbers that lowering gives to the tasks of copied pieces.


class TaskNumbers:
    """The numbers of tasks as `lower` gives them: place on the pp axis, replica, then the actions of its ranks. loads: int64
    [places, replicas], the first task that loads. count: of tasks."""

    def __init__(self, layout: PlanIndex, folding: Folding, pieces: Pieces) -> None:
        plan, count = layout.plan, len(layout.model.components)
        sizes = []
        self._block: dict[Phase, Ints] = {}
        self._inside: dict[Phase, Ints] = {}
        blocks = {pair: number for number, pair in enumerate(pieces.sequences)}
        for pair, sequence in pieces.sequences.items():
            inside = 0
            for phase, component in sequence:
                if phase not in self._block:
                    self._block[phase] = np.full(count, -1, dtype=np.int64)
                    self._inside[phase] = np.zeros(count, dtype=np.int64)
                self._block[phase][component] = blocks[pair]
                self._inside[phase][component] = inside
                inside += len(pieces.of(phase, component).draft)
            sizes.append(inside)
        replicas = np.arange(len(folding.replicas), dtype=np.int64)
        self._starts = np.zeros((len(blocks), len(replicas), plan.microbatches), dtype=np.int64)
        self.loads = np.zeros((plan.mesh.pp, len(replicas)), dtype=np.int64)
        self.count = 0
        for place in range(plan.mesh.pp):
            inside, rows = len(pieces.loads[place]), []
            for action in pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks):
                block = blocks[action.stage, action.phase]
                rows.append((block, action.microbatch, inside))
                inside += sizes[block]
            first = self.count + inside * replicas
            self.loads[place] = first
            if rows:
                block_of, microbatch, begin = np.array(rows, dtype=np.int64).T
                self._starts[block_of, :, microbatch] = begin[:, None] + first
            self.count += inside * len(replicas)

    def of(self, phase: Phase, components: Ints) -> Ints:
        """int64 [components, replicas, microbatches]: the first tasks of their pieces."""
        starts: Ints = self._starts[self._block[phase][components]] + self._inside[phase][components][:, None, None]
        return starts

    def by_microbatch(self, phase: Phase, component: int, replica: int) -> tuple[Ints, int]:
        """Where the blocks of a component begin, int64 [microbatches], and how far in them its pieces do; of a lowered replica
        by number."""
        return self._starts[self._block[phase][component], replica], int(self._inside[phase][component])


def lower_columns(
    plan: Plan,
    model: Model,
    layout: PlanIndex | None = None,
    folding: Folding | None = None,
    *,
    mixing_round: int = 0,
    local: bool = False,
) -> Columns:
    """The program of one step as columns. folding: which ranks stand for which (None: each for itself). layout, mixing_round,
    local: as `lower` takes them, and raises."""
    layout = layout or PlanIndex(plan, model)
    folding = folding or unfolded(plan.mesh)
    rule = plan.synchronisation
    if not folding.has_whole_teams or rule.is_stale or rule.participation < 1 or rule.combines_first:
        return columns_of(lower(plan, model, layout, mixing_round=mixing_round, local=local))
    kept = frozenset(folding.ranks) if folding.is_folded else None
    end = _end_of_step(layout, kept, None if local else mixing_round)
    return _Expansion(layout, folding, Pieces(layout, kept), end).columns(
        None if folding.is_folded else lambda: lower(plan, model, layout, mixing_round=mixing_round, local=local)
    )


def _end_of_step(layout: PlanIndex, kept: frozenset[int] | None, mixing_round: int | None) -> Draft:
    """What follows the microbatches, and the round of that number behind it."""
    end = Draft(world_size=layout.plan.world_size, ranks=kept)
    for add in PASSES_AT_THE_END:
        add(end, layout)
    if mixing_round is not None:
        add_round(end, layout, mixing_round)
    return end


T = TypeVar("T")


class _Copies(NamedTuple):
    """The copies of a piece (None: of the loads of a place): the components that have it, where they run, and int64
    [components, replicas, microbatches] the first tasks of the copies."""

    draft: Draft
    piece: LoweredPiece | None
    components: tuple[int, ...]
    places: tuple[int, ...]
    starts: Ints


class _Expansion:
    def __init__(self, layout: PlanIndex, folding: Folding, pieces: Pieces, end: Draft) -> None:
        self._layout = layout
        self._plan = layout.plan
        self._folding = folding
        self._pieces = pieces
        self._numbers = TaskNumbers(layout, folding, pieces)
        self._end = end
        self._count = self._numbers.count
        self._resources: dict[Resource, int] = {}
        self._edges: list[tuple[Ints, Ints]] = []
        self._uses: list[tuple[Ints, Ints]] = []
        self._unit = np.zeros(self._count + len(end), dtype=np.int64)
        self._copies: list[_Copies] = []
        self._kinds: list[Unit] = []
        self._kind: list[Ints] = []
        self._rows: dict[tuple[Hashable, ...], tuple[list[int], int]] = {}
        mesh = self._plan.mesh
        self._place = [layout.stage_of[component.name] for component in layout.model.components]
        self._step = mesh.copies * mesh.tp  # from the ranks of a place to those of the next
        self._steps = [replica * mesh.tp for replica in folding.replicas]
        self._replica_row = {replica: row for row, replica in enumerate(folding.replicas)}

    def columns(self, view: Callable[[], TaskGraph] | None) -> Columns:
        for place, draft in self._pieces.loads.items():
            if len(draft):
                self._copy(draft, None, (place,), (place,), self._numbers.loads[place][None, :, None])
        alike: dict[tuple[Phase, int], list[int]] = {}
        for sequence in self._pieces.sequences.values():
            for phase, component in sequence:
                alike.setdefault((phase, self._pieces.of(phase, component).component), []).append(component)
        for (phase, first), components in alike.items():
            piece = self._pieces.of(phase, first)
            if len(piece.draft):
                starts = self._numbers.of(phase, np.array(components, dtype=np.int64))
                places = tuple(self._place[component] for component in components)
                self._copy(piece.draft, piece, tuple(components), places, starts)
                self._wait(piece, np.array(components, dtype=np.int64), places, starts)
        self._finish()
        n = len(self._unit)
        uses = _table(self._uses, n)
        dependencies = _table(self._edges, n)
        self._uses.clear()  # what makes tasks later needs no pairs
        self._edges.clear()
        return Columns(
            world_size=self._plan.world_size,
            resources=tuple(self._resources),
            uses=uses,
            issued=uses.inverted(len(self._resources)),
            dependencies=dependencies,
            unit=self._unit,
            units=Units(tuple(self._kinds), np.concatenate([np.zeros(0, dtype=np.int64), *self._kind]), self._units),
            tasks=self._tasks,
            view=view,
        )

    def _copy(
        self, draft: Draft, piece: LoweredPiece | None, components: tuple[int, ...], places: tuple[int, ...], starts: Ints
    ) -> None:
        """Units and queues of the copies of a piece (None: of the loads of a place). Units of one place are of one kind."""
        home, size = places[0] if piece is None else self._place[piece.component], len(draft)
        count = len(self._steps) * size
        shapes = {place: len(self._kinds) + number * count for number, place in enumerate(dict.fromkeys(places))}
        names = dict(zip(reversed(places), reversed(components), strict=True))
        queues: dict[Resource, int] = {}
        using, used = [], []
        for offset, (_, resources, _) in enumerate(draft.entries()):
            for resource in resources:
                using.append(offset)
                used.append(queues.setdefault(resource, len(queues)))
        table = np.empty((len(places), len(self._steps), len(queues)), dtype=np.int64)
        for place in shapes:
            moves = [(place - home) * self._step + step for step in self._steps]
            numbers = [[self._resource(_moved_resource(resource, move)) for resource in queues] for move in moves]
            table[[number for number, other in enumerate(places) if other == place]] = numbers
            renamed = None if piece is None else self._layout.model.components[names[place]].name
            self._kinds += self._units_at(draft, place - home, renamed)
        first = sum(map(len, self._kind))
        inside = np.arange(count, dtype=np.int64)
        self._kind.append((np.array([shapes[place] for place in places], dtype=np.int64)[:, None] + inside).ravel())
        units = first + np.arange(len(places) * count, dtype=np.int64).reshape(len(places), len(self._steps), 1, size)
        self._unit[starts[..., None] + np.arange(size, dtype=np.int64)] = units
        _add_pairs(self._uses, starts[..., None] + np.array(using, dtype=np.int64), table[:, :, None, used])
        self._copies.append(_Copies(draft, piece, components, places, starts))

    def _wait(self, piece: LoweredPiece, components: Ints, places: Sequence[int], starts: Ints) -> None:
        for awaited, (offsets, earlier) in piece.waits.items():
            if awaited.phase is None:
                before = self._numbers.loads[list(places)][:, :, None]
            elif awaited.by_number:
                before = self._numbers.of(awaited.phase, np.array([awaited.component]))
            else:
                before = self._numbers.of(awaited.phase, components + awaited.component)
            _add_pairs(self._edges, starts[..., None] + np.array(offsets), before[..., None] + np.array(earlier))

    def _finish(self) -> None:
        """Buckets, optimizer steps and what follows them: one task each. What many tasks have in common is looked at once."""
        queues, awaited = _Rows(), _Rows()
        units: dict[Hashable, int] = {}
        same: dict[tuple[int, int], int] = {}
        begin, firsts = len(self._kinds), dict[int, int]()
        unit_of, queues_of, awaited_of = list[int](), list[int](), list[int]()

        def numbered(resources: Iterable[Resource]) -> list[int]:
            return [self._resource(queue) for queue in resources]

        for number, entry in enumerate(self._end.entries()):
            first = firsts.setdefault(id(entry), number)
            if first < number:  # many have all in common
                unit_of.append(unit_of[first])
                queues_of.append(queues_of[first])
                awaited_of.append(awaited_of[first])
                continue
            work, resources, after = entry
            unit = same.get((id(work), id(resources)))
            if unit is None:
                like: Hashable = work
                if isinstance(work, Collective):  # buckets of the same ranks share one tuple: thousands are not compared
                    like = work.operation, id(work.group), work.size_bytes, work.packed, work.visits
                unit = same[id(work), id(resources)] = units.setdefault((like, resources[0].rank), len(units))
                if unit == len(self._kinds) - begin:
                    self._kinds.append(Unit(work, resources[0].rank))
            unit_of.append(unit)
            queues_of.append(queues.of(resources, numbered))
            awaited_of.append(awaited.of(after, self._numbers_of))
        self._unit[self._count :] = np.array(unit_of, dtype=np.int64) + sum(map(len, self._kind))
        self._kind.append(np.arange(begin, len(self._kinds), dtype=np.int64))
        self._uses.append(queues.pairs(np.array(queues_of, dtype=np.int64), self._count))
        self._edges.append(awaited.pairs(np.array(awaited_of, dtype=np.int64), self._count))
        waits = self._end.waits()
        waiting, before = (self._numbers_of(map(itemgetter(end), waits)) for end in range(2))
        self._edges.append((np.array(waiting, dtype=np.int64), np.array(before, dtype=np.int64)))

    def _numbers_of(self, keys: Iterable[TaskKey]) -> list[int]:
        """The numbers of tasks at the end, and of computation of any kept replica and any microbatch."""
        numbers, find, rows = list[int](), self._end.numbers.get, self._rows
        for key in keys:
            number = find(key)
            if number is not None:
                numbers.append(self._count + number)
                continue
            task = key[:3] + key[4:]  # whatever the microbatch
            row = rows.get(task)
            if row is None:
                row = rows[task] = self._row_of(*task)
            microbatch = key[3]
            assert isinstance(microbatch, int)
            numbers.append(row[0][microbatch] + row[1])
        return numbers

    def _row_of(self, phase: Hashable, rank: Hashable, name: Hashable, *part: Hashable) -> tuple[list[int], int]:
        """The first tasks, by microbatch, of the pieces of a computation of a kept rank, and its place in the piece."""
        assert isinstance(phase, Phase)
        assert isinstance(rank, int)
        assert isinstance(name, str)
        plan = self._plan
        first = plan.mesh.rank(stage=plan.stage_of_rank(rank), replica=0, shard=plan.shard_of_rank(rank))
        offset = self._pieces.offset(phase, first, name, part)
        if offset is None:
            raise GraphError(f"{phase} of {name} on rank {rank} is not a task of the program")
        component, replica = self._layout.model.component_index[name], self._replica_row[plan.replica_of_rank(rank)]
        starts, inside = self._numbers.by_microbatch(phase, component, replica)
        return starts.tolist(), inside + offset

    def _units(self) -> tuple[Unit, ...]:
        """Every unit by itself, with the names of its own component."""
        units: list[Unit] = []
        for copies in self._copies:
            home = copies.places[0] if copies.piece is None else self._place[copies.piece.component]
            for component, place in zip(copies.components, copies.places, strict=True):
                name = None if copies.piece is None else self._layout.model.components[component].name
                units += self._units_at(copies.draft, place - home, name)
        return (*units, *self._kinds[len(self._kinds) - len(self._kind[-1]) :])

    def _units_at(self, draft: Draft, places: int, name: str | None) -> list[Unit]:
        """The units of a draft so many places further on, replica by replica; `name`: of the component there."""
        entries = [(work, resources[0].rank) for work, resources, _ in draft.entries()]
        moves = [places * self._step + step for step in self._steps]
        return [Unit(moved_work(work, move, name), rank + move) for move in moves for work, rank in entries]

    def _tasks(self, columns: Columns, numbers: Ints) -> list[Task]:
        return [
            Task(
                index=number,
                work=columns.units[columns.unit[number]].work,
                resources=tuple(columns.resources[resource] for resource in columns.uses.row(number)),
                dependencies=tuple(sorted(columns.dependencies.row(number).tolist())),
                origin=origin,
            )
            for number, origin in zip(numbers.tolist(), self._origins(numbers), strict=True)
        ]

    def _origins(self, numbers: Ints) -> Iterator[Origin]:
        """Of each task: that of its draft, in the copy that begins last before it."""
        made = [(copies, *place) for copies in self._copies for place in np.ndindex(copies.starts.shape)]
        first = np.concatenate([*(copies.starts.ravel() for copies in self._copies), [self._count]])
        order = np.argsort(first, kind="stable")
        copy = order[np.searchsorted(first[order], numbers, side="right") - 1]
        end = list(self._end.origins())
        drafted: dict[tuple[int, int], list[Origin]] = {}
        for number, offset in zip(copy.tolist(), (numbers - first[copy]).tolist(), strict=True):
            if number == len(made):
                yield end[offset]
                continue
            copies, place, row, microbatch = made[number]
            origins = drafted.setdefault((id(copies), place), [])
            if not origins:
                origins += (self._origin(origin, copies, copies.components[place]) for origin in copies.draft.origins())
            in_step = None if origins[offset].microbatch is None else microbatch
            yield replace(origins[offset], replica=self._folding.replicas[row], microbatch=in_step)

    def _origin(self, origin: Origin, copies: _Copies, component: int) -> Origin:
        """The origin in a copy, whose component, values and place on the pp axis have other names."""
        if copies.piece is None:
            return origin
        first, copy = (self._layout.model.components[number] for number in (copies.piece.component, component))
        names = dict(zip((*first.inputs, *first.outputs), (*copy.inputs, *copy.outputs), strict=True))
        return replace(
            origin,
            stage=origin.stage + self._place[component] - self._place[copies.piece.component],
            component=None if origin.component is None else copy.name,
            value=None if origin.value is None else names[origin.value],
        )

    def _resource(self, resource: Resource) -> int:
        return self._resources.setdefault(resource, len(self._resources))


class _Rows:
    """Numbers by the identity of an object that many tasks of a draft have in common."""

    def __init__(self) -> None:
        self._number: dict[int, int] = {}
        self._rows: list[list[int]] = []

    def of(self, shared: T, row: Callable[[T], list[int]]) -> int:
        """Which row the object has; `row` makes that of one that has none yet."""
        number = self._number.get(id(shared))
        if number is None:
            number = self._number[id(shared)] = len(self._rows)
            self._rows.append(row(shared))
        return number

    def pairs(self, of_task: Ints, first: int) -> tuple[Ints, Ints]:
        """(task, number) for all numbers of tasks in a row, from which row each task has; `first` is the number of the first
        task."""
        table = RaggedTable.from_rows(self._rows)
        counts = np.diff(table.offsets)[of_task]
        ends = np.cumsum(counts)
        inside = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(ends - counts, counts)
        tasks = np.repeat(np.arange(first, first + len(of_task), dtype=np.int64), counts)
        return tasks, table.values[np.repeat(table.offsets[of_task], counts) + inside]


def _add_pairs(pairs: list[tuple[Ints, Ints]], rows: Ints, values: Ints) -> None:
    """`values` may have one replica or microbatch for all of the rows'."""
    pairs.append((rows.ravel(), (values if values.shape == rows.shape else np.broadcast_to(values, rows.shape)).ravel()))


def _table(pairs: list[tuple[Ints, Ints]], n: int) -> RaggedTable:
    rows, values = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return RaggedTable.from_pairs(rows, values, n)


def _moved_resource(resource: Resource, step: int) -> Resource:
    """The queue on the rank `step` further on; `pp>3` names a rank of the same replica, which moves too."""
    if not step:
        return resource
    axis, peer = resource.stream[:3], resource.stream[3:]
    stream = f"{axis}{int(peer) + step}" if axis in ("pp>", "pp<") else resource.stream
    return Resource(resource.rank + step, stream)


def moved_work(work: Work, step: int, component: str | None = None) -> Work:
    """The work on the ranks `step` further on, and of computation that of another component (None: the same)."""
    if isinstance(work, Compute):
        return work if component in (None, work.component) else replace(work, component=component)
    if not step:
        return work
    match work:
        case Collective():
            return replace(work, group=tuple(rank + step for rank in work.group))
        case SendRecv():
            return replace(work, source=work.source + step, destination=work.destination + step)
    return work
