"""Lowering by templates: every replica and microbatch repeats the same block of tasks, so each block is lowered once.

A block is the work of one stage in one replica for one phase of one microbatch, with the communication behind it. The
passes write it for replica 0 and microbatch 0; its copies differ by ranks and task numbers alone, which is arithmetic on
arrays. What replicas share (gradient buckets, optimizer steps) is written once at the end. The result is the same program
as `lower` makes, task for task.

Where copies communicate inside components (cp, ep), a block is no longer one copy's. Then one copy stands for its whole
team, or all tasks are made one by one.

With a Folding only the ranks that represent others are lowered. Their collectives with represented ranks keep the whole
group, on which the price depends, and their place in the queues.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from parsim.arrays import Ints
from parsim.errors import GraphError
from parsim.graph.columns import Columns, RaggedTable, Unit, columns_of
from parsim.graph.fold import Folding, unfolded
from parsim.graph.graph_builder import Draft, TaskKey
from parsim.graph.lower import PASSES_AT_THE_END, lower
from parsim.graph.passes.compute import add_action, add_loads, phases_of
from parsim.graph.passes.rounds import add_round
from parsim.graph.plan_index import PlanIndex
from parsim.graph.task import Origin, Resource, Task
from parsim.graph.taskgraph import TaskGraph
from parsim.model.model import Model
from parsim.plans.pipeline import pipeline_actions
from parsim.plans.plan import Plan
from parsim.work import Collective, Phase, SendRecv, Work


class TemplatePlace(NamedTuple):
    """A task of a template: which block, and where in it."""

    block: int
    offset: int


class _Part(NamedTuple):
    """What a block is a copy of: one phase of one of the plan's stages, or (phase None) the loads of a place on the pp axis."""

    stage: int
    phase: Phase | None


@dataclass(slots=True)
class _Block:
    """A template and the numbers of the first tasks of its copies: int64 [replicas, microbatches] (loads: one column)."""

    draft: Draft
    starts: Ints


def lower_columns(
    plan: Plan,
    model: Model,
    layout: PlanIndex | None = None,
    folding: Folding | None = None,
    *,
    mixing_round: int = 0,
    local: bool = False,
) -> Columns:
    """The program of one step as columns. Raises PlanError if the plan does not fit the model.

    Args:
        layout: of this plan and model, if there is one already.
        folding: which ranks stand for which (None: each for itself). mixing_round, local: as `lower` takes them.
    """
    layout = layout or PlanIndex(plan, model)
    folding = folding or unfolded(plan.mesh)
    rule = plan.synchronisation
    if not folding.has_whole_teams or rule.kind == "stale" or rule.participation < 1:
        return columns_of(lower(plan, model, layout, mixing_round=mixing_round, local=local))
    kept = frozenset(folding.ranks) if folding.is_folded else None
    blocks: dict[_Part, _Block] = {}
    for place in range(plan.mesh.pp):
        for part, draft in _templates(layout, place, kept).items():
            columns = 1 if part.phase is None else plan.microbatches
            blocks[part] = _Block(draft, np.zeros((len(folding.replicas), columns), dtype=np.int64))
    count = _number(plan, blocks)
    drafts = list(blocks.values())
    where = {
        key: TemplatePlace(number, offset)
        for number, block in enumerate(drafts)
        for offset, key in enumerate(block.draft.keys())
    }
    end = Draft(world_size=plan.world_size, ranks=kept)
    for add in PASSES_AT_THE_END:
        add(end, layout)
    if not local:
        add_round(end, layout, mixing_round)
    return _Expansion(plan, folding, drafts, where, end, count).columns(
        None if folding.is_folded else lambda: lower(plan, model, mixing_round=mixing_round, local=local)
    )


def _templates(layout: PlanIndex, place: int, kept: frozenset[int] | None) -> dict[_Part, Draft]:
    """Loads and every phase of every stage at a place on the pp axis, for replica 0 and microbatch 0."""
    plan = layout.plan
    drafts = {_Part(place, None): Draft(world_size=plan.world_size, ranks=kept)}
    add_loads(drafts[_Part(place, None)], layout, place, 0)
    for stage in plan.place_stages(place):
        for phase in phases_of(plan):
            drafts[_Part(stage, phase)] = draft = Draft(world_size=plan.world_size, ranks=kept)
            add_action(draft, layout, stage, 0, phase, 0)
    return drafts


def _number(plan: Plan, blocks: dict[_Part, _Block]) -> int:
    """Fill the blocks' starts as `lower` numbers tasks: place, replica, then the rank's actions. Returns their count."""
    base = 0
    for place in range(plan.mesh.pp):
        load = blocks[_Part(place, None)]
        inside = len(load.draft)
        for action in pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, plan.microbatches, plan.chunks):
            block = blocks[_Part(action.stage, action.phase)]
            block.starts[:, action.microbatch] = inside
            inside += len(block.draft)
        replicas = base + inside * np.arange(len(load.starts), dtype=np.int64)[:, None]
        load.starts[:] = replicas
        for stage in plan.place_stages(place):
            for phase in phases_of(plan):
                blocks[_Part(stage, phase)].starts += replicas
        base += inside * len(load.starts)
    return base


class _Expansion:
    """Copies of the blocks, put together."""

    def __init__(
        self, plan: Plan, folding: Folding, blocks: list[_Block], where: dict[TaskKey, TemplatePlace], end: Draft, count: int
    ) -> None:
        self._plan = plan
        self._folding = folding
        self._blocks = blocks
        self._where = where
        self._end = end
        self._count = count
        self._resources: dict[Resource, int] = {}
        self._units: list[Unit] = []
        self._edges: list[tuple[Ints, Ints]] = []
        self._uses: list[tuple[Ints, Ints]] = []
        self._unit = np.zeros(count + len(end), dtype=np.int64)
        self._rows: dict[tuple[Hashable, ...], list[int]] = {}
        self._replica_row = {replica: row for row, replica in enumerate(folding.replicas)}

    def columns(self, view: Callable[[], TaskGraph] | None) -> Columns:
        """`view`: makes the task graph; None: these columns as tasks."""
        for block in self._blocks:
            self._copy(block)
        self._finish()
        n = len(self._unit)
        uses = _table(self._uses, n)
        made = Columns(
            world_size=self._plan.world_size,
            resources=tuple(self._resources),
            uses=uses,
            issued=uses.inverted(len(self._resources)),
            dependencies=_table(self._edges, n),
            unit=self._unit,
            units=tuple(self._units),
            view=view or (lambda: self._graph(made)),
        )
        return made

    def _copy(self, block: _Block) -> None:
        steps = [replica * self._plan.mesh.tp for replica in self._folding.replicas]
        using: list[int] = []
        used: list[list[int]] = []
        units: list[int] = []
        waiting: dict[int, tuple[list[int], list[int]]] = {}
        for offset, (work, resources, after, _) in enumerate(block.draft.entries()):
            for resource in resources:
                using.append(offset)
                used.append([self._resource(_moved_resource(resource, step)) for step in steps])
            units.append(len(self._units))
            self._units.extend(Unit(moved_work(work, step), resources[0].rank + step) for step in steps)
            for key in after:
                if key not in self._where:
                    if self._folding.is_folded:  # of a rank that another stands for: what that one does comes before, too
                        continue
                    raise GraphError(f"task {offset} of a block depends on {key}, which no pass added")
                place = self._where[key]
                offsets, earlier = waiting.setdefault(place.block, ([], []))
                offsets.append(offset)
                earlier.append(place.offset)
        starts = block.starts[:, :, None]
        if units:
            numbers = np.array(units, dtype=np.int64) + np.arange(len(steps), dtype=np.int64)[:, None, None]
            self._unit[starts + np.arange(len(units), dtype=np.int64)] = numbers
        if using:
            _add_pairs(self._uses, starts + np.array(using, dtype=np.int64), np.array(used, dtype=np.int64).T[:, None, :])
        for other, (offsets, earlier) in waiting.items():
            before = self._blocks[other].starts[:, :, None] + np.array(earlier, dtype=np.int64)
            _add_pairs(self._edges, starts + np.array(offsets, dtype=np.int64), before)

    def _finish(self) -> None:
        """Buckets, optimizer steps and what follows them: one task each."""
        using: list[int] = []
        used: list[int] = []
        waiting: list[int] = []
        before: list[int] = []
        queues: dict[tuple[Resource, ...], list[int]] = {}
        for task, (work, resources, after, _) in enumerate(self._end.entries(), self._count):
            if resources not in queues:
                queues[resources] = [self._resource(entry) for entry in resources]
            using += [task] * len(resources)
            used += queues[resources]
            self._unit[task] = len(self._units)
            self._units.append(Unit(work, resources[0].rank))
            numbers = self._numbers(after)
            waiting += [task] * len(numbers)
            before += numbers
        for number, pair in zip((waiting, before), zip(*self._end.waits(), strict=True), strict=False):
            number += self._numbers(pair)
        self._uses.append((np.array(using, dtype=np.int64), np.array(used, dtype=np.int64)))
        self._edges.append((np.array(waiting, dtype=np.int64), np.array(before, dtype=np.int64)))

    def _numbers(self, keys: Iterable[TaskKey]) -> list[int]:
        """Of tasks at the end, and of computation of any kept replica and any microbatch."""
        found = []
        for key in keys:
            if key in self._end:
                found.append(self._count + self._end.number(key))
                continue
            phase, rank, name, microbatch, *part = key
            assert isinstance(rank, int)
            assert isinstance(microbatch, int)
            task = (phase, rank, name, *part)
            if task not in self._rows:
                self._rows[task] = self._row(phase, rank, name, part)
            found.append(self._rows[task][microbatch])
        return found

    def _row(self, phase: Hashable, rank: int, name: Hashable, part: Sequence[Hashable]) -> list[int]:
        """The numbers of a computation of a kept rank, by microbatch."""
        plan = self._plan
        stage, replica = plan.stage_of_rank(rank), plan.replica_of_rank(rank)
        first = plan.mesh.rank(stage=stage, replica=0, shard=plan.shard_of_rank(rank))
        place = self._where[(phase, first, name, 0, *part)]
        row: list[int] = (self._blocks[place.block].starts[self._replica_row[replica]] + place.offset).tolist()
        return row

    def _graph(self, columns: Columns) -> TaskGraph:
        """The same program as tasks, for people."""
        origins: dict[int, Origin] = {}
        for block in self._blocks:
            for offset, (_, _, _, origin) in enumerate(block.draft.entries()):
                for (row, microbatch), start in np.ndenumerate(block.starts):
                    number = None if origin.microbatch is None else microbatch
                    origins[int(start) + offset] = replace(origin, replica=self._folding.replicas[row], microbatch=number)
        for offset, (_, _, _, origin) in enumerate(self._end.entries()):
            origins[self._count + offset] = origin
        tasks = tuple(
            Task(
                index=index,
                work=columns.units[columns.unit[index]].work,
                resources=tuple(columns.resources[number] for number in columns.uses.row(index)),
                dependencies=tuple(sorted(columns.dependencies.row(index).tolist())),
                origin=origins[index],
            )
            for index in range(columns.size)
        )
        return TaskGraph(tasks=tasks, world_size=columns.world_size)

    def _resource(self, resource: Resource) -> int:
        return self._resources.setdefault(resource, len(self._resources))


def _add_pairs(pairs: list[tuple[Ints, Ints]], rows: Ints, values: Ints) -> None:
    """`values` may have one replica or microbatch for all of the rows'."""
    pairs.append((rows.ravel(), np.broadcast_to(values, rows.shape).ravel()))


def _table(pairs: list[tuple[Ints, Ints]], n: int) -> RaggedTable:
    rows = np.concatenate([rows for rows, _ in pairs]) if pairs else np.zeros(0, dtype=np.int64)
    values = np.concatenate([values for _, values in pairs]) if pairs else np.zeros(0, dtype=np.int64)
    return RaggedTable.from_pairs(rows, values, n)


def _moved_resource(resource: Resource, step: int) -> Resource:
    """The same queue of another replica; `pp>3` names a rank of the same replica."""
    if not step:
        return resource
    match = re.fullmatch(r"(pp[<>])(\d+)", resource.stream)
    stream = f"{match[1]}{int(match[2]) + step}" if match else resource.stream
    return Resource(resource.rank + step, stream)


def moved_work(work: Work, step: int) -> Work:
    """The same work of another replica.

    Args:
        work: of one replica. step: from a rank of that replica to the same place of the other one.
    """
    if not step:
        return work
    match work:
        case Collective():
            return replace(work, group=tuple(rank + step for rank in work.group))
        case SendRecv():
            return replace(work, source=work.source + step, destination=work.destination + step)
    return work
