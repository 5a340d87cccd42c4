"""Who holds which part of which parameter, and over which ranks its gradient is summed: gradient buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parsim.model.component import Component, Parameter, ParameterShard, share_of
from parsim.plans.placement import Placement
from parsim.plans.plan import Plan, holding


class HeldParameter(NamedTuple):
    """What one rank holds of a parameter: all of it, or piece `shard` of `ways` as `part` cuts it. `elements` are its own."""

    name: str
    elements: int
    element_bytes: int
    part: ParameterShard | None = None
    shard: int = 0
    ways: int = 1
    trainable: bool = True

    @property
    def size_bytes(self) -> int:
        return self.elements * self.element_bytes


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients summed together over `group` (all ranks that hold these very parameters, or pieces). Known by its number.

    Attributes:
        first: what tp rank 0 holds of the parameters, or of those in the same places of another shard's bucket.
        shard: the first tp rank of the group. elements, size_bytes: what every shard holds, the same for all.
    """

    number: int
    stages: tuple[int, ...]
    group: tuple[int, ...]
    first: tuple[HeldParameter, ...]
    shard: int
    elements: int
    size_bytes: int

    @cached_property
    def parameters(self) -> tuple[HeldParameter, ...]:
        """What the first rank of the group holds."""
        return tuple(_held_by(self.shard, entry) for entry in self.first) if self.shard else self.first

    @property
    def chunk_elements(self) -> int:
        """Of each rank's part when the bucket is divided over its group, padded to equal parts (ZeRO)."""
        return -(-self.elements // len(self.group))

    @property
    def padded_bytes(self) -> int:
        return self.chunk_elements * len(self.group) * self.first[0].element_bytes


def hold(component: Component, placement: Placement, parameter: Parameter, shard: int) -> HeldParameter:
    """What tp rank `shard` holds of a parameter of one of its components."""
    if placement.kind == "shard":
        for part in component.sharding(placement.rule).parameters:
            if part.name == parameter.name:
                ways = placement.ways
                return HeldParameter(
                    name=parameter.name,
                    elements=share_of(part.size, ways).of(parameter.elements),
                    element_bytes=parameter.element_bytes,
                    part=part,
                    shard=shard % ways,
                    ways=ways,
                    trainable=parameter.trainable,
                )
    return HeldParameter(parameter.name, parameter.elements, parameter.element_bytes, trainable=parameter.trainable)


def _held_by(shard: int, first: HeldParameter) -> HeldParameter:
    """What a tp rank holds, from what the first one does."""
    if first.part is None:
        return first
    return HeldParameter(
        first.name, first.elements, first.element_bytes, first.part, shard % first.ways, first.ways, first.trainable
    )


def alike(component: Component, placement: Placement, parameter: str, tp: int) -> tuple[tuple[int, ...], ...]:
    """The tp ranks that hold the parameter, grouped into those whose gradients add up.

    Batch-sharded: all together, each has seen other samples. Cut over `ways`: those with the same piece. Whole in a sharded
    component: all together, each has summands only. Replicated: each alone, since all have computed the same.
    """
    kind = holding(component, placement, parameter)[0]
    match kind:
        case "shard":
            ways = placement.ways
            return tuple(tuple(range(shard, tp, ways)) for shard in range(ways))
        case "replicate":
            return tuple((shard,) for shard in range(tp))
        case "place":
            return ((placement.shard,),)
    return (tuple(range(tp)),)


class _Open(NamedTuple):
    """A parameter on its way into a bucket: the component that decides how it is held, what tp rank 0 holds, its stages.

    `kind`: equal for parameters whose gradients are summed over the same ranks.
    """

    parameter: Parameter
    component: Component
    held: HeldParameter
    stages: tuple[int, ...]
    kind: tuple[object, ...]


class _Buckets:
    """Buckets as they are closed, one after the other."""

    def __init__(self, plan: Plan, placements: Mapping[str, Placement]) -> None:
        self.closed: list[Bucket] = []
        self._plan = plan
        self._placements = placements
        self._groups: dict[tuple[tuple[int, ...], tuple[int, ...], int, int], tuple[int, ...]] = {}
        self._shards: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}

    def fill(self, entries: Sequence[_Open]) -> None:
        """Parameters in the order in which their gradients are complete, into buckets of the plan's size."""
        open_by_kind: dict[tuple[object, ...], list[_Open]] = {}
        held_bytes: dict[tuple[object, ...], int] = {}
        for entry in entries:
            key = entry.kind
            open_by_kind.setdefault(key, []).append(entry)
            held_bytes[key] = held_bytes.get(key, 0) + entry.held.size_bytes
            if held_bytes[key] >= self._plan.bucket_bytes:
                self.close(open_by_kind.pop(key))
                held_bytes[key] = 0
        for rest in open_by_kind.values():
            self.close(rest)

    def close(self, entries: Sequence[_Open]) -> None:
        """One bucket for every set of ranks that holds these parameters, which are of one kind."""
        if not entries:
            return
        lead = entries[0]
        held = tuple(entry.held for entry in entries)
        elements, size_bytes = sum(entry.elements for entry in held), sum(entry.size_bytes for entry in held)
        for shards in self._shards_of(lead):
            for first_copy in range(lead.parameter.expert_ways):
                group = self._group(lead, shards, first_copy)
                self.closed.append(Bucket(len(self.closed), lead.stages, group, held, shards[0], elements, size_bytes))

    def _shards_of(self, lead: _Open) -> tuple[tuple[int, ...], ...]:
        if lead.kind not in self._shards:
            placement = self._placements[lead.component.name]
            self._shards[lead.kind] = alike(lead.component, placement, lead.parameter.name, self._plan.mesh.tp)
        return self._shards[lead.kind]

    def _group(self, lead: _Open, shards: tuple[int, ...], first_copy: int) -> tuple[int, ...]:
        """The ranks that sum a gradient: of every stage, each `ways`-th copy from the first on, and these shards."""
        mesh, ways = self._plan.mesh, lead.parameter.expert_ways
        place = (lead.stages, shards, first_copy, ways)
        if place not in self._groups:
            self._groups[place] = tuple(
                mesh.rank(stage=stage, replica=replica, shard=shard)
                for stage in lead.stages
                for replica in range(first_copy, mesh.copies, ways)
                for shard in shards
            )
        return self._groups[place]


def gradient_buckets(
    plan: Plan,
    components: Sequence[Component],
    placements: Mapping[str, Placement],
    holders: Mapping[str, tuple[int, ...]],
    *,
    frozen: bool = False,
) -> tuple[Bucket, ...]:
    """Buckets in the order their gradients are complete: backwards through each stage, those tied across stages last.

    Parameters held alike share buckets; a bucket is closed once it holds `bucket_bytes`. A parameter is ready when the
    *first* component that uses it has run its backward. Where buckets come and go with every microbatch (ZeRO 2 and 3) none
    holds parameters of two chunks. Frozen parameters have no gradients and are in none.

    Args:
        frozen: group the frozen parameters instead, by the ranks that hold them.
    """
    first: dict[tuple[str, int], Component] = {}
    parameters: dict[str, Parameter] = {}
    chunks: dict[str, dict[int, None]] = {}
    chunk_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.components}
    stage_of = {name: plan.stage_places[number] for name, number in chunk_of.items()}
    for component in components:
        for parameter in component.parameters:
            if parameter.trainable is frozen:
                continue
            parameters[parameter.name] = parameter
            chunks.setdefault(parameter.name, {})[chunk_of[component.name]] = None
            first.setdefault((parameter.name, stage_of[component.name]), component)
    buckets = _Buckets(plan, placements)

    def opened(name: str, component: Component, stages: tuple[int, ...]) -> _Open:
        parameter, placement = parameters[name], placements[component.name]
        held, kind = hold(component, placement, parameter, 0), holding(component, placement, name)
        return _Open(parameter, component, held, stages, (*kind[:2], parameter.expert_ways))

    for stage in range(plan.mesh.pp):
        runs: dict[tuple[int, ...], list[_Open]] = {}
        for name in reversed([name for name in parameters if holders[name] == (stage,)]):
            run = tuple(chunks[name]) if plan.zero_stage >= 2 else ()
            runs.setdefault(run, []).append(opened(name, first[name, stage], (stage,)))
        for entries in runs.values():
            buckets.fill(entries)
    tied: dict[tuple[int, ...], list[_Open]] = {}
    for name in parameters:
        stages = holders[name]
        if len(stages) > 1:
            tied.setdefault(stages, []).append(opened(name, first[name, stages[0]], stages))
    for entries in tied.values():
        kinds: dict[tuple[object, ...], list[_Open]] = {}
        for entry in entries:
            kinds.setdefault(entry.kind, []).append(entry)
        for rest in kinds.values():
            buckets.close(rest)
    return tuple(buckets.closed)
