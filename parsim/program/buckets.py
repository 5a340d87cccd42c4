"""Who holds which part of which parameter, and over which ranks its gradient is summed: gradient buckets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from parsim.model.component import Component, Parameter, ParameterShard, share_of
from parsim.model.model import Model
from parsim.plans.layouts import Placement
from parsim.plans.plan import Plan, holding
from parsim.records import once


class HeldParameter(NamedTuple):
    """What one rank holds of a parameter: all of it, or piece `shard` of `ways` as `part` cuts it. `elements` are its own."""

    name: str
    elements: int
    element_bytes: float
    part: ParameterShard | None = None
    shard: int = 0
    ways: int = 1
    trainable: bool = True
    group: str = ""
    optimizer: str = ""

    @property
    def size_bytes(self) -> int:
        return round(self.elements * self.element_bytes)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients summed together over `group`: all ranks that hold these very parameters, or pieces. Known by its number. With
    sharding groups (`Mesh.dp_shard`) the group is that of one of them, and the sums of the others are still to be added.

    family: of the buckets of the same parameters. shard: the first tp rank of the group.
    """

    number: int
    family: BucketFamily
    shard: int
    group: tuple[int, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        return self.family.stages

    @property
    def first(self) -> tuple[HeldParameter, ...]:
        """What tp rank 0 holds of the parameters, or of those in the same places of another shard's bucket."""
        return self.family.first

    @property
    def elements(self) -> int:
        return self.family.elements

    @property
    def trainable(self) -> bool:
        """False: of frozen parameters, which ZeRO 3 divides and gathers, and which have no gradients."""
        return self.family.first[0].trainable

    @property
    def size_bytes(self) -> int:
        return self.family.size_bytes

    @property
    def chunk_elements(self) -> int:
        """Elements of each rank's part when the bucket is divided over its group, padded to equal parts (ZeRO)."""
        return -(-self.family.elements // len(self.group))

    @property
    def padded_bytes(self) -> int:
        return self.family.padded_bytes(len(self.group))

    @cached_property
    def parameters(self) -> tuple[HeldParameter, ...]:
        return tuple(held if held.part is None else held._replace(shard=self.shard % held.ways) for held in self.first)


Ranks = tuple[int, ...]


class BucketFamily(NamedTuple):
    """Buckets of the same parameters: one for every set of ranks that holds the same pieces of them.

    begin: number of the first one. groups: of each bucket the first tp rank, and the ranks; equal ones are one tuple. replicas:
    so many neighbours among the groups hold the same: one per sharding group.
    """

    begin: int
    stages: tuple[int, ...]
    groups: tuple[tuple[int, Ranks], ...]
    first: tuple[HeldParameter, ...]
    elements: int
    size_bytes: int
    replicas: int = 1

    def first_alike(self, place: int) -> int:
        """The place among the groups of the first that holds the same as the one at `place`."""
        return place - place % self.replicas

    def padded_bytes(self, ranks: int) -> int:
        """Bytes of a bucket in as many equal parts as it has ranks."""
        return round(-(-self.elements // ranks) * ranks * self.first[0].element_bytes)


class Buckets(Sequence[Bucket]):
    """The buckets of a plan by number, of families in their order. Each is made when somebody asks for it: most ranks are
    interchangeable with others. Those of frozen parameters begin behind the buckets of gradients."""

    def __init__(self, families: Sequence[BucketFamily]) -> None:
        self.families = tuple(families)
        self._begins = [family.begin for family in families]
        self._count = self._begins[-1] + len(families[-1].groups) - self._begins[0] if families else 0
        self._made: dict[int, Bucket] = {}

    def of(self, family: BucketFamily, place: int) -> Bucket:
        number = family.begin + place
        if number not in self._made:
            self._made[number] = Bucket(number, family, *family.groups[place])
        return self._made[number]

    def places(self, test: Callable[[Ranks], object]) -> list[tuple[BucketFamily, int]]:
        """The buckets whose ranks pass a test, unmade: family, and place among its groups. Each set of ranks is tested once."""
        passed = {number for number, group in self.groups.items() if test(group)}
        places: dict[int, list[int]] = {}
        for family in self.families:
            if id(family.groups) not in places:
                places[id(family.groups)] = [n for n, (_, group) in enumerate(family.groups) if id(group) in passed]
        return [(family, place) for family in self.families for place in places[id(family.groups)]]

    @cached_property
    def groups(self) -> dict[int, Ranks]:
        """The ranks of all buckets by their identity: buckets of the same ranks share one tuple."""
        distinct = {id(family.groups): family.groups for family in self.families}
        return {id(group): group for groups in distinct.values() for _, group in groups}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> Bucket: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Bucket, ...]: ...
    def __getitem__(self, number: int | slice) -> Bucket | tuple[Bucket, ...]:
        if isinstance(number, slice):
            return tuple(self[place] for place in range(*number.indices(self._count)))
        if not -self._count <= number < self._count:
            raise IndexError(f"bucket {number} of {self._count}")
        number = number % self._count + self._begins[0]
        family = self.families[bisect_right(self._begins, number) - 1]
        return self.of(family, number - family.begin)

    def __iter__(self) -> Iterator[Bucket]:
        return (self.of(family, place) for family in self.families for place in range(len(family.groups)))


BucketsByFamily = Mapping[int, Sequence[Bucket]]
"""Some buckets by the number of the first of their family."""


def by_family(buckets: Iterable[Bucket]) -> BucketsByFamily:
    families: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        families.setdefault(bucket.family.begin, []).append(bucket)
    return families


def hold(component: Component, placement: Placement, parameter: Parameter, shard: int) -> HeldParameter:
    """What tp rank `shard` holds of a parameter of one of its components."""
    name, elements, ways = parameter.name, parameter.elements, placement.ways
    parts = component.sharding(placement.rule).parameters if placement.kind == "shard" else ()
    part = next((part for part in parts if part.name == name), None)
    if part is None:
        shard, ways = 0, 1
    else:
        elements, shard = share_of(part.size, ways).of(elements), shard % ways
    updated = parameter.trainable, parameter.group, parameter.optimizer
    return HeldParameter(name, elements, parameter.element_bytes, part, shard, ways, *updated)


def alike(component: Component, placement: Placement, parameter: str, tp: int) -> tuple[tuple[int, ...], ...]:
    """The tp ranks that hold the parameter, grouped into those whose gradients add up. Batch-sharded: all together, each has
    seen other samples. Cut over `ways`: those with the same piece. Whole in a sharded component: all together, each has
    summands only. Replicated: each alone, since all have computed the same."""
    match holding(component, placement, parameter)[0]:
        case "shard":
            return tuple(tuple(range(shard, tp, placement.ways)) for shard in range(placement.ways))
        case "replicate":
            return tuple((shard,) for shard in range(tp))
        case "place":
            return ((placement.shard,),)
    return (tuple(range(tp)),)


class _Held(NamedTuple):
    """How the tp ranks of a component hold one of its parameters, and what tp rank 0 does. kind: equal for parameters whose
    gradients are summed over the same ranks of the same stages."""

    parameter: Parameter
    component: Component
    first: HeldParameter
    size_bytes: int
    kind: tuple[object, ...]


@once
def _held_by(model: Model, name: str, placement: Placement) -> Mapping[str, _Held]:
    component, by_name = model.component(name), dict[str, _Held]()
    for parameter in component.parameters:
        first = hold(component, placement, parameter, 0)
        is_cut = first.part is not None
        kind = ("shard", placement.ways) if is_cut else holding(component, placement, parameter.name)[:2]
        kind = (*kind, parameter.expert_ways, parameter.group, None if parameter.trainable else parameter.element_bytes)
        by_name[parameter.name] = _Held(parameter, component, first, first.size_bytes, kind)
    return by_name


class _Closed:
    """Families of buckets as they are closed, one after the other."""

    def __init__(self, plan: Plan, placements: Mapping[str, Placement], group_copies: int, begin: int) -> None:
        self.families: list[BucketFamily] = []
        self._plan = plan
        self._placements = placements
        self._group_copies = group_copies
        self._count = begin
        self._ranks: dict[tuple[object, ...], Ranks] = {}
        self._groups: dict[tuple[object, ...], tuple[tuple[int, Ranks], ...]] = {}

    def fill(self, parameters: Sequence[_Held], stages: tuple[int, ...]) -> None:
        """Parameters of stages in the order in which their gradients are complete, into buckets of the plan's size."""
        open_by_kind = dict[tuple[object, ...], list[_Held]]()
        bytes_by_kind: dict[tuple[object, ...], int] = {}
        for held in parameters:
            key = held.kind
            open_by_kind.setdefault(key, []).append(held)
            bytes_by_kind[key] = bytes_by_kind.get(key, 0) + held.size_bytes
            if bytes_by_kind[key] >= self._plan.bucket_bytes:
                self.close(open_by_kind.pop(key), stages, bytes_by_kind.pop(key))
        for key, rest in open_by_kind.items():
            self.close(rest, stages, bytes_by_kind[key])

    def close(self, parameters: Sequence[_Held], stages: tuple[int, ...], size_bytes: int) -> None:
        """One bucket for every set of ranks of the stages that holds these parameters, which are of one kind."""
        first = tuple([held.first for held in parameters])
        groups = self._groups_of(parameters[0], stages)
        elements, replicas = sum([one.elements for one in first]), self._plan.mesh.copies // self._group_copies
        self.families.append(BucketFamily(self._count, stages, groups, first, elements, size_bytes, replicas))
        self._count += len(groups)

    def _groups_of(self, lead: _Held, stages: tuple[int, ...]) -> tuple[tuple[int, Ranks], ...]:
        """By bucket the first tp rank and the ranks: in each stage each `expert_ways`-th copy of a sharding group, and these
        shards. Those of several sharding groups that hold the same are neighbours."""
        key = (lead.kind, stages)
        if key not in self._groups:
            placement, mesh = self._placements[lead.component.name], self._plan.mesh
            ways, groups = lead.parameter.expert_ways, []
            for shards in alike(lead.component, placement, lead.parameter.name, mesh.tp):
                begins = (copy + begin for copy in range(ways) for begin in range(0, mesh.copies, self._group_copies))
                for first_copy in begins:
                    end = first_copy // self._group_copies * self._group_copies + self._group_copies
                    ranks = tuple(
                        mesh.rank(stage=stage, replica=replica, shard=shard)
                        for stage in stages
                        for replica in range(first_copy, end, ways)
                        for shard in shards
                    )
                    groups.append((shards[0], self._ranks.setdefault((stages, shards, first_copy, ways), ranks)))
            self._groups[key] = tuple(groups)
        return self._groups[key]


def gradient_buckets(
    plan: Plan,
    model: Model,
    placements: Mapping[str, Placement],
    holders: Mapping[str, tuple[int, ...]],
    *,
    frozen: bool = False,
    begin: int = 0,
) -> Buckets:
    """Buckets in the order their gradients are complete: backwards through each stage, those tied across stages last.

    Parameters held alike and of one update group share buckets; a bucket is closed once it holds `bucket_bytes`. A parameter is
    ready when the *first* component that uses it has run its backward. Where buckets come and go with every microbatch (ZeRO 2
    and 3) none holds parameters of two chunks. Every sharding group has buckets of its own.

    frozen: group the frozen parameters instead; below ZeRO 3 by all ranks that hold them. begin: the first number.
    """
    chunk_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.components}
    places = plan.stage_places
    first: dict[tuple[str, int], _Held] = {}
    chunks: dict[str, dict[int, None]] = {}
    for component in model.components:
        chunk = chunk_of[component.name]
        for name, held in _held_by(model, component.name, placements[component.name]).items():
            if held.parameter.trainable is not frozen:
                chunks.setdefault(name, {})[chunk] = None
                first.setdefault((name, places[chunk]), held)
    whole = frozen and plan.zero_stage < 3
    closed = _Closed(plan, placements, plan.mesh.copies if whole else plan.mesh.group_copies, begin)
    by_stages: dict[tuple[int, ...], list[str]] = {}
    for name in chunks:
        by_stages.setdefault(holders[name], []).append(name)
    for stage in range(plan.mesh.pp):
        runs: dict[tuple[int, ...], list[_Held]] = {}
        for name in reversed(by_stages.get((stage,), [])):
            run = tuple(chunks[name]) if plan.zero_stage >= 2 else ()
            runs.setdefault(run, []).append(first[name, stage])
        for parameters in runs.values():
            closed.fill(parameters, (stage,))
    for stages, names in by_stages.items():
        kinds: dict[tuple[object, ...], list[_Held]] = {}
        for name in names if len(stages) > 1 else ():
            held = first[name, stages[0]]
            kinds.setdefault(held.kind, []).append(held)
        for parameters in kinds.values():
            closed.close(parameters, stages, sum([held.size_bytes for held in parameters]))
    return Buckets(closed.families)
