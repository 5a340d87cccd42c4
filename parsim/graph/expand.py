"""Lowering by templates: every replica and microbatch repeats the same block of tasks, so each block is lowered once.

A block is what one stage does in one replica for one phase of one microbatch, with the communication behind it. The passes
write it for replica 0 and microbatch 0; its copies differ by ranks and task numbers alone, which is arithmetic on arrays. What
replicas share (gradient buckets, optimizer steps) is written once at the end. The result is the same program as `lower` makes,
task for task.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from parsim.errors import GraphError
from parsim.graph.columns import Columns, Ints, Table, Unit
from parsim.graph.draft import Draft, Key
from parsim.graph.layout import Layout
from parsim.graph.lower import PASSES_AT_THE_END, lower
from parsim.graph.passes.compute import add_action, add_loads
from parsim.graph.task import Resource
from parsim.model.model import Model
from parsim.plan.pipeline import pipeline_actions
from parsim.plan.plan import Plan
from parsim.work import Collective, Phase, SendRecv, Work

LOAD = "load"


class Place(NamedTuple):
    """A task of a template: which block, and where in it."""

    block: int
    offset: int


@dataclass(slots=True)
class _Block:
    """A template and the numbers of the first tasks of its copies: int64 [replicas, microbatches] (loads: one column)."""

    draft: Draft
    starts: Ints


def lower_columns(plan: Plan, model: Model, layout: Layout | None = None) -> Columns:
    """The program of one step as columns. Raises PlanError if the plan does not fit the model.

    Args:
        layout: of this plan and model, if there is one already.
    """
    layout = layout or Layout(plan, model)
    blocks = [
        _Block(draft, np.zeros((plan.mesh.dp, 1 if phase == LOAD else plan.microbatches), dtype=np.int64))
        for stage in range(plan.mesh.pp)
        for phase, draft in _templates(layout, stage).items()
    ]
    count = _number(plan, blocks)
    where = {key: Place(number, offset) for number, block in enumerate(blocks) for offset, key in enumerate(block.draft.keys())}
    end = Draft(world_size=plan.world_size)
    for add in PASSES_AT_THE_END:
        add(end, layout)
    return _Expansion(plan, blocks, where, end, count).columns(lambda: lower(plan, model))


def _templates(layout: Layout, stage: int) -> dict[str, Draft]:
    """Loads, forward and backward of a stage, for replica 0 and microbatch 0."""
    drafts = {name: Draft(world_size=layout.plan.world_size) for name in (LOAD, Phase.FORWARD.value, Phase.BACKWARD.value)}
    add_loads(drafts[LOAD], layout, stage, 0)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        add_action(drafts[phase.value], layout, stage, 0, phase, 0)
    return drafts


def _number(plan: Plan, blocks: list[_Block]) -> int:
    """Fill the blocks' starts as `lower` numbers tasks: stage, replica, then the stage's actions. Returns their count."""
    base = 0
    for stage in range(plan.mesh.pp):
        load, forward, backward = blocks[3 * stage : 3 * stage + 3]
        inside = len(load.draft)
        first: dict[Phase, list[int]] = {Phase.FORWARD: [0] * plan.microbatches, Phase.BACKWARD: [0] * plan.microbatches}
        sizes = {Phase.FORWARD: len(forward.draft), Phase.BACKWARD: len(backward.draft)}
        for action in pipeline_actions(plan.pipeline_order, stage, plan.mesh.pp, plan.microbatches):
            first[action.phase][action.microbatch] = inside
            inside += sizes[action.phase]
        replicas = base + inside * np.arange(plan.mesh.dp, dtype=np.int64)[:, None]
        load.starts[:] = replicas
        forward.starts[:] = replicas + np.array(first[Phase.FORWARD])
        backward.starts[:] = replicas + np.array(first[Phase.BACKWARD])
        base += inside * plan.mesh.dp
    return base


class _Expansion:
    """Copies of the blocks, put together."""

    def __init__(self, plan: Plan, blocks: list[_Block], where: dict[Key, Place], end: Draft, count: int) -> None:
        self._plan = plan
        self._blocks = blocks
        self._where = where
        self._end = end
        self._count = count
        self._resources: dict[Resource, int] = {}
        self._units: list[Unit] = []
        self._edges: list[tuple[Ints, Ints]] = []
        self._uses: list[tuple[Ints, Ints]] = []
        self._unit = np.zeros(count + len(end), dtype=np.int64)

    def columns(self, view: object) -> Columns:
        for block in self._blocks:
            self._copy(block)
        self._finish()
        n = len(self._unit)
        uses = _table(self._uses, n)
        return Columns(
            world_size=self._plan.world_size,
            resources=tuple(self._resources),
            uses=uses,
            issued=uses.inverted(len(self._resources)),
            dependencies=_table(self._edges, n),
            unit=self._unit,
            units=tuple(self._units),
            view=view,  # type: ignore[arg-type]
        )

    def _copy(self, block: _Block) -> None:
        dp = self._plan.mesh.dp
        for offset, (work, resources, after, _) in enumerate(block.draft.entries()):
            tasks = block.starts + offset
            flat = tasks.ravel()
            for resource in resources:
                numbers = np.array([self._resource(_moved_resource(resource, step)) for step in self._steps()], dtype=np.int64)
                self._uses.append((flat, np.repeat(numbers, tasks.shape[1])))
            first = len(self._units)
            self._units.extend(Unit(_moved_work(work, step), resources[0].rank + step) for step in self._steps())
            self._unit[tasks] = first + np.arange(dp, dtype=np.int64)[:, None]
            for key in after:
                if key not in self._where:
                    raise GraphError(f"task {offset} of a block depends on {key}, which no pass added")
                place = self._where[key]
                before = np.broadcast_to(self._blocks[place.block].starts + place.offset, tasks.shape)
                self._edges.append((flat, before.ravel()))

    def _finish(self) -> None:
        """Buckets, optimizer steps and what follows them: one task each."""
        for offset, (work, resources, after, _) in enumerate(self._end.entries()):
            task = self._count + offset
            self._uses.append(
                (np.full(len(resources), task), np.array([self._resource(entry) for entry in resources], dtype=np.int64))
            )
            self._unit[task] = len(self._units)
            self._units.append(Unit(work, resources[0].rank))
            self._edges.append((np.full(len(after), task), np.array(self._numbers(after), dtype=np.int64)))

    def _numbers(self, keys: Iterable[Key]) -> list[int]:
        """Of tasks at the end, and of backwards of any replica and microbatch."""
        mesh = self._plan.mesh
        found = []
        for key in keys:
            if key in self._end:
                found.append(self._count + self._end.number(key))
                continue
            phase, rank, name, microbatch = key
            assert isinstance(rank, int)
            assert isinstance(microbatch, int)
            stage, replica = self._plan.stage_of_rank(rank), self._plan.replica_of_rank(rank)
            first = mesh.rank(stage=stage, replica=0, shard=self._plan.shard_of_rank(rank))
            place = self._where[phase, first, name, 0]
            found.append(int(self._blocks[place.block].starts[replica, microbatch]) + place.offset)
        return found

    def _steps(self) -> range:
        """By how much ranks differ from those of replica 0."""
        mesh = self._plan.mesh
        return range(0, mesh.dp * mesh.tp, mesh.tp)

    def _resource(self, resource: Resource) -> int:
        return self._resources.setdefault(resource, len(self._resources))


def _table(pairs: list[tuple[Ints, Ints]], n: int) -> Table:
    rows = np.concatenate([rows for rows, _ in pairs]) if pairs else np.zeros(0, dtype=np.int64)
    values = np.concatenate([values for _, values in pairs]) if pairs else np.zeros(0, dtype=np.int64)
    return Table.from_pairs(rows, values, n)


def _moved_resource(resource: Resource, step: int) -> Resource:
    """The same queue of another replica; `pp>3` names a rank of its own replica."""
    match = re.fullmatch(r"(pp[<>])(\d+)", resource.stream)
    stream = f"{match[1]}{int(match[2]) + step}" if match else resource.stream
    return Resource(resource.rank + step, stream)


def _moved_work(work: Work, step: int) -> Work:
    if not step:
        return work
    match work:
        case Collective():
            return replace(work, group=tuple(rank + step for rank in work.group))
        case SendRecv():
            return replace(work, source=work.source + step, destination=work.destination + step)
    return work
