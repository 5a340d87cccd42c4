"""A plan laid over its model: which rank runs each component, and which makes and reads each value, in which layout.

"Stage" here is a place on the pp axis, because the place decides which ranks exchange values. All chunks of a rank are
one stage here. Only the pipeline's actions (`Plan.stages`) distinguish them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

from parsim.errors import PlanError
from parsim.model.component import Component, InnerExchange, Value, narrow
from parsim.model.model import Model, layers_of
from parsim.plans.layouts import Placement, ValueAndGradientLayout, ValueLayout, conversion, input_ends, output_ends
from parsim.plans.pipeline import PIPELINE_ORDERS, check_order
from parsim.plans.plan import Plan, check_plan
from parsim.program.buckets import Bucket, BucketFamily, Buckets, BucketsByFamily, HeldParameter, gradient_buckets, hold
from parsim.work import OptimizerStep, Phase

# What indexes of plans have worked out and other plans of the same model do not change, kept on the Model.
#
# Most of an index follows from a part of the plan alone: from how the model is divided over ranks, from what is recomputed
# besides, or from how gradients are put into buckets. So a plan that differs in microbatches or ZeRO finds it there, and so
# does a question about another batch.


T = TypeVar("T")

MOST = 128
"""Divisions that a Model keeps: those that were asked for last."""

FollowsFrom = Literal["division", "recomputed", "buckets", "zero"]
"""What a result follows from: mesh, stages, placements and order; what is recomputed too; how buckets are filled; and the ZeRO
stage too."""


class Divisions:
    """The results of the indexes of a Model, by the part of a plan from which they follow."""

    def __init__(self) -> None:
        self._results: OrderedDict[Hashable, dict[Hashable, dict[str, object]]] = OrderedDict()

    def of(self, plan: Plan) -> dict[FollowsFrom, dict[str, object]]:
        """The results for a plan of the model that keeps this, by part of the plan and by name; whoever works something out
        puts it there."""
        division = plan.mesh, plan.pipeline_order, tuple([(stage.components, stage.placements) for stage in plan.stages])
        results = self._results.setdefault(division, {})
        self._results.move_to_end(division)
        if len(self._results) > MOST:
            self._results.popitem(last=False)
        in_microbatches = plan.zero_stage >= 2
        return {
            "division": results.setdefault((), {}),
            "recomputed": results.setdefault((plan.recompute, plan.repeated), {}),
            "buckets": results.setdefault((plan.bucket_bytes, in_microbatches), {}),
            "zero": results.setdefault((plan.bucket_bytes, in_microbatches, plan.zero_stage), {}),
        }

    def forget(self) -> None:
        self._results.clear()

    def __reduce__(self) -> tuple[type[Divisions], tuple[()]]:
        """Not sent to other processes."""
        return Divisions, ()


def shared(part: FollowsFrom) -> Callable[[Callable[[Any], T]], SharedProperty[T]]:
    """A property of an index that is worked out once for all plans of a Model that agree in a part: from which it follows, and
    from the Model, and nothing else."""
    return lambda work_out: SharedProperty(part, work_out)


class SharedProperty(Generic[T]):
    """See `shared`.

    Attributes: part: of the plan from which it follows. work_out: from an index.
    """

    def __init__(self, part: FollowsFrom, work_out: Callable[[Any], T]) -> None:
        self.part: FollowsFrom = part
        self.work_out = work_out
        self.__doc__ = work_out.__doc__

    def __set_name__(self, owner: type[object], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, index: None, owner: type[object]) -> SharedProperty[T]: ...
    @overload
    def __get__(self, index: PlanIndex, owner: type[object]) -> T: ...
    def __get__(self, index: PlanIndex | None, owner: type[object]) -> T | SharedProperty[T]:
        if index is None:
            return self
        results: dict[str, Any] = index.worked_out[self.part]
        if self._name not in results:
            results[self._name] = self.work_out(index)
        result: T = results[self._name]
        index.__dict__[self._name] = result  # the next one who asks this index does not come here
        return result


class Reading(NamedTuple):
    """Some components of one stage that read a value alike: in one layout, making its gradient in one layout."""

    stage: int
    ends: ValueAndGradientLayout
    components: tuple[str, ...]


@dataclass(frozen=True)
class PlanIndex:
    """A plan laid over its model: what lowering, memory and the executor ask. Raises PlanError if they do not match.

    offloaded: with `activation_offload`, bytes of a microbatch that are copied to the host behind each component's forward, on
    a rank that runs it (`parsim.predict.memory`); None: nobody has said.
    """

    plan: Plan
    model: Model
    offloaded: Mapping[str, int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        plan = self.plan
        check_plan(plan, self.model)
        check_order(plan.pipeline_order, plan.mesh.pp, plan.microbatches, plan.chunks)
        for value, reading, pieces in self._cuts if plan.is_mixed else ():
            if pieces is None:
                raise PlanError(
                    f"value {value.name} has no samples along dim 0, so {', '.join(reading.components)} cannot read it in "
                    f"another layout than {value.producer} makes it in; place them alike"
                )
            if plan.microbatch_samples % pieces:
                raise PlanError(
                    f"value {value.name} is cut into {pieces} pieces of the batch on its way to {reading.components[0]}, "
                    f"which a microbatch of {plan.microbatch_samples} samples does not divide into. Use fewer microbatches, "
                    f"or place {value.producer} and {reading.components[0]} the same way"
                )

    @cached_property
    def worked_out(self) -> dict[FollowsFrom, dict[str, object]]:
        """What indexes of the same model have worked out for plans that agree with this one, by what it follows from."""
        return self.model.remembered(Divisions).of(self.plan)

    def rank(self, stage: int, replica: int, shard: int = 0) -> int:
        return self.plan.mesh.rank(stage=stage, replica=replica, shard=shard)

    @shared("division")
    def placement(self) -> dict[str, Placement]:
        return {name: placement for stage in self.plan.stages for name, placement in stage.placed()}

    def runs_on(self, rank: int, component: str) -> bool:
        if self.stage_of[component] != self.plan.stage_of_rank(rank):
            return False
        return self.placement[component].runs_on(self.plan.shard_of_rank(rank))

    @shared("division")
    def shards_alike(self) -> bool:
        """Whether every component runs on all tp ranks: none is placed on one of them."""
        return all(placement.kind != "place" for placement in self.placement.values())

    def runners(self, component: str, replica: int) -> tuple[int, ...]:
        stage, tp = self.stage_of[component], self.plan.mesh.tp
        return tuple(self.rank(stage, replica, shard) for shard in range(tp) if self.placement[component].runs_on(shard))

    @shared("division")
    def _rank_components(self) -> dict[tuple[int, int], tuple[str, ...]]:
        return {
            (place, shard): tuple(
                name
                for number in self.plan.place_stages(place)
                for name, placement in self.plan.stages[number].placed()
                if placement.runs_on(shard)
            )
            for place in range(self.plan.mesh.pp)
            for shard in range(self.plan.mesh.tp)
        }

    def rank_components(self, rank: int) -> tuple[str, ...]:
        return self._rank_components[self.plan.stage_of_rank(rank), self.plan.shard_of_rank(rank)]

    def inside(self, component: str) -> InnerExchange | None:
        """What a rank exchanges while it runs the component; None: nothing, so it is one task."""
        if component not in self._inside:
            placement, every = self.placement[component], self.model.component(component)
            is_alone = every.inside is None
            self._inside[component] = None if is_alone else narrow(every, placement.rule, placement.ways).inside
        return self._inside[component]

    @shared("division")
    def _inside(self) -> dict[str, InnerExchange | None]:
        return {}

    def inner_group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks with which a rank exchanges keys and values (axis "cp") or tokens ("ep"): neighbouring copies."""
        plan, ways = self.plan, getattr(self.plan.mesh, axis)
        stage, copy, shard = plan.stage_of_rank(rank), plan.replica_of_rank(rank), plan.shard_of_rank(rank)
        return tuple(self.rank(stage, copy // ways * ways + place, shard) for place in range(ways))

    @cached_property
    def microbatch_samples(self) -> int:
        return self.plan.microbatch_samples

    def local_share(self, how: ValueLayout) -> float:
        """Bytes that a rank has of a value in a layout, as a share of the value of the whole microbatch."""
        if how not in self._shares:
            self._shares[how] = how.local_share(self.plan.mesh.tp)
        return self._shares[how]

    @shared("division")
    def _shares(self) -> dict[ValueLayout, float]:
        return {}

    def local_samples(self, component: str) -> int:
        """Samples of one microbatch each rank that runs the component sees."""
        tp = self.plan.mesh.tp
        return self.microbatch_samples * self.placement[component].batch_ways(tp) // tp

    @shared("division")
    def stage_of(self) -> dict[str, int]:
        """Place on the pp axis by component."""
        places = self.plan.stage_places
        return {name: places[number] for name, number in self.chunk_of.items()}

    @shared("division")
    def chunk_of(self) -> dict[str, int]:
        return {name: number for number, stage in enumerate(self.plan.stages) for name in stage.components}

    def gradient_phase(self, component: str) -> Phase:
        """The phase whose task hands on the gradients of the component's inputs."""
        return Phase.BACKWARD_INPUT if self.is_halved(component) else Phase.BACKWARD

    def weight_phase(self, component: str) -> Phase:
        """The phase whose task completes the gradients of the component's parameters: its last."""
        return Phase.BACKWARD_WEIGHT if self.is_halved(component) else Phase.BACKWARD

    def is_halved(self, component: str) -> bool:
        """Whether its backward runs in halves: if the order does so, and there is something to do in both."""
        return component in self._halved

    @shared("division")
    def _halved(self) -> frozenset[str]:
        if not PIPELINE_ORDERS[self.plan.pipeline_order].halves:
            return frozenset()
        return frozenset(
            component.name
            for component in self.model.components
            if component.name in self.differentiable
            and component.trainable_parameters
            and self.wants_input_gradient(component.name)
        )

    def recomputes(self, component: str) -> bool:
        """Whether its forward runs again before its backward, or a part of it."""
        return component in self._recomputed or component in self._by_operator

    def recomputes_by_operator(self, component: str) -> bool:
        return component in self._by_operator

    @shared("recomputed")
    def _recomputed(self) -> frozenset[str]:
        return self.plan.recomputed & self.differentiable

    @shared("recomputed")
    def _by_operator(self) -> frozenset[str]:
        """The components that keep less so, as they are placed."""
        names = set()
        for name in self.plan.recomputed_by_operator & self.differentiable:
            component, placement = self.model.component(name), self.placement[name]
            cut = placement.rule and placement.ways > 1
            if component.selective and (not cut or component.sharding(placement.rule).selective):
                names.add(name)
        return frozenset(names)

    def segment_of(self, component: str) -> tuple[str, ...]:
        """The components that are recomputed together with this one, those with a backward; none if it is not in a segment."""
        return self._segments.get(component, ())

    @shared("recomputed")
    def _segments(self) -> dict[str, tuple[str, ...]]:
        segments = (tuple(name for name in segment if name in self.differentiable) for segment in self.plan.repeated)
        return {name: segment for segment in segments for name in segment}

    def is_remade(self, value: str, reader: str) -> bool:
        """Whether a recomputed reader gets the value from the second forward of its own segment."""
        return self.model.value[value].producer in self.segment_of(reader)

    def wants_input_gradient(self, component: str) -> bool:
        """Whether its backward hands a gradient on."""
        values = (self.model.value[name] for name in self.model.component(component).inputs)
        return any(value.producer is not None and value.differentiable for value in values)

    @shared("division")
    def stage_of_value(self) -> dict[str, int | None]:
        """Stage that makes a value; None for the batch itself."""
        return {v.name: None if v.producer is None else self.stage_of[v.producer] for v in self.model.values}

    @property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        return self.model.readers

    @property
    def differentiable(self) -> frozenset[str]:
        return self.model.differentiable_components

    @shared("division")
    def source(self) -> dict[str, ValueAndGradientLayout]:
        """In what layout each value that a component makes is made, and in what layout its gradient is wanted there."""
        tp = self.plan.mesh.tp
        return {
            value: output_ends(component, self.placement[component.name], tp, number)
            for component in self.model.components
            for number, value in enumerate(component.outputs)
        }

    @shared("division")
    def _input_ends(self) -> dict[tuple[str, str], ValueAndGradientLayout]:
        tp = self.plan.mesh.tp
        return {
            (component.name, value): input_ends(component, self.placement[component.name], tp, number)
            for component in self.model.components
            for number, value in enumerate(component.inputs)
        }

    def reads_in(self, component: str, value: str) -> ValueAndGradientLayout:
        """The layouts of a value and its gradient at one of its readers."""
        return self._input_ends[component, value]

    @shared("division")
    def readings(self) -> dict[str, tuple[Reading, ...]]:
        """Per value its readers, grouped by stage and layouts, in execution order of the first of each group."""
        readings: dict[str, tuple[Reading, ...]] = {}
        for value, names in self.consumers.items():
            groups: dict[tuple[int, ValueAndGradientLayout], list[str]] = {}
            for name in names:
                groups.setdefault((self.stage_of[name], self.reads_in(name, value)), []).append(name)
            readings[value] = tuple(Reading(stage, ends, tuple(group)) for (stage, ends), group in groups.items())
        return readings

    def first_reader(self, value: str, reading: Reading) -> str:
        """The first component of a stage that reads a value in the layout of a reading, whatever gradient it makes."""
        alike = [
            other.components[0]
            for other in self.readings[value]
            if (other.stage, other.ends.value) == (reading.stage, reading.ends.value)
        ]
        return min(alike, key=self.model.component_index.__getitem__)

    @shared("division")
    def values_at(self) -> dict[int, tuple[str, ...]]:
        """Per place on the pp axis the values that are made or read there, in the order of the model."""
        values: dict[int, list[str]] = {place: [] for place in range(self.plan.mesh.pp)}
        for value in self.model.values:
            home = self.stage_of_value[value.name]
            for place in {reading.stage for reading in self.readings[value.name]} | ({home} if home is not None else set()):
                values[place].append(value.name)
        return {place: tuple(names) for place, names in values.items()}

    def batch_layouts(self, rank: int) -> dict[str, tuple[ValueLayout, ...]]:
        """The values of the batch that a rank's components read, and in which layouts."""
        stage, shard, tp = self.plan.stage_of_rank(rank), self.plan.shard_of_rank(rank), self.plan.mesh.tp
        batch: dict[str, tuple[ValueLayout, ...]] = {}
        for value in self.values_at[stage]:
            if self.stage_of_value[value] is None:
                here = [reading.ends.value for reading in self.readings[value] if reading.stage == stage]
                if layouts := dict.fromkeys(layout for layout in here if shard in layout.holders(tp)):
                    batch[value] = tuple(layouts)
        return batch

    def batch_ways(self, rank: int) -> int:
        """How many neighbouring tp ranks load the same samples: enough for all that this rank's components read."""
        layouts = [layout for several in self.batch_layouts(rank).values() for layout in several]
        ways = max((layout.ways for layout in layouts), default=1)
        nested = all(ways % layout.ways == 0 for layout in layouts)
        return ways if nested else self.plan.mesh.tp

    def completed_readings(self, stage: int, name: str) -> tuple[tuple[str, Reading], ...]:
        """The values, each with the reading, whose gradient is complete once the backward of `name` has run in `stage`."""
        completed = []
        for value in dict.fromkeys(self.model.component(name).inputs):
            if self.stage_of_value[value] is None or not self.model.value[value].differentiable:
                continue
            for reading in self.readings[value]:
                backward = [reader for reader in reading.components if reader in self.differentiable]
                if reading.stage == stage and backward[:1] == [name]:
                    completed.append((value, reading))
        return tuple(completed)

    @shared("division")
    def _cuts(self) -> tuple[tuple[Value, Reading, int | None], ...]:
        """Values that are cut on the way to a reading, and into how many pieces of the batch; None: it cannot be cut."""
        tp, cuts = self.plan.mesh.tp, list[tuple[Value, Reading, int | None]]()
        pairs = [(value, reading) for value in self.model.values for reading in self.readings[value.name]]
        for value, reading in pairs:
            if value.name not in self.source:
                continue
            made = self.source[value.name]
            hops = conversion(made.value, reading.ends.value, tp)
            if value.differentiable:
                hops = hops + conversion(reading.ends.gradient, made.gradient, tp)
            if value.batch_first and value.bytes_per_sample:
                pieces = max((tp // layout.ways for hop in hops for layout in (hop.source, hop.target)), default=1)
                if pieces > 1:
                    cuts.append((value, reading, pieces))
            elif any(hop.operation != "all_reduce" or hop.source.ways != tp for hop in hops):
                cuts.append((value, reading, None))  # no summands of a gradient that all ranks hold whole
        return tuple(cuts)

    @shared("recomputed")
    def kinds(self) -> ComponentKinds:
        """Which components differ by names and ranks alone."""
        return ComponentKinds(self)

    # --- who holds parameters and sums their gradients ------------------------------------------------------------

    @shared("division")
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Stages that hold a parameter, by its name: more than one if it is tied across stages."""
        stages: dict[str, dict[int, None]] = {}
        for component in self.model.components:
            for parameter in component.parameters:
                stages.setdefault(parameter.name, {})[self.stage_of[component.name]] = None
        return {name: tuple(numbers) for name, numbers in stages.items()}

    @shared("division")
    def _held(self) -> dict[tuple[int, int], tuple[HeldParameter, ...]]:
        return {}

    def rank_parameters(self, rank: int) -> tuple[HeldParameter, ...]:
        """What the rank holds of every parameter it has, each once."""
        place, shard = self.plan.stage_of_rank(rank), self.plan.shard_of_rank(rank)
        if (place, shard) not in self._held:
            held: dict[str, HeldParameter] = {}
            for name in self._rank_components[place, shard]:
                component = self.model.component(name)
                for parameter in component.parameters:
                    if parameter.name not in held:
                        held[parameter.name] = hold(component, self.placement[name], parameter, shard)
            self._held[place, shard] = tuple(held.values())
        return self._held[place, shard]

    @shared("buckets")
    def buckets(self) -> Buckets:
        return gradient_buckets(self.plan, self.model, self.placement, self.holders)

    @shared("zero")
    def frozen_buckets(self) -> Buckets:
        """The frozen parameters in buckets, numbered behind those of gradients."""
        begin = len(self.buckets)
        return gradient_buckets(self.plan, self.model, self.placement, self.holders, frozen=True, begin=begin)

    @shared("zero")
    def frozen(self) -> dict[int, tuple[HeldParameter, ...]]:
        """By rank the frozen parameters, or pieces, that lie whole on every holder, and of which it is the first."""
        frozen: dict[int, list[HeldParameter]] = {rank: [] for rank in range(self.plan.world_size)}
        for bucket in self.frozen_buckets:
            if not self.is_divided(bucket) and bucket.family.first_alike(place := bucket.number - bucket.family.begin) == place:
                frozen[bucket.group[0]] += bucket.parameters
        return {rank: tuple(parameters) for rank, parameters in frozen.items()}

    @shared("buckets")
    def same_pieces(self) -> dict[tuple[int, int, int], list[int]]:
        """By the identity of a family's groups, the ways its parameters are cut and a piece: the groups that hold the piece."""
        return {}

    @shared("buckets")
    def _rank_buckets(self) -> dict[int, tuple[Bucket, ...]]:
        return {}

    def rank_buckets(self, rank: int) -> tuple[Bucket, ...]:
        return self._of_rank(self.buckets, self._rank_buckets, rank)

    @shared("zero")
    def _rank_frozen(self) -> dict[int, tuple[Bucket, ...]]:
        return {}

    def gathered_buckets(self, rank: int) -> tuple[Bucket, ...]:
        """`rank_buckets`, and those of the frozen parameters that the rank has a part of (ZeRO 3)."""
        if self.plan.zero_stage < 3:
            return self.rank_buckets(rank)
        frozen = self._of_rank(self.frozen_buckets, self._rank_frozen, rank)
        return (*self.rank_buckets(rank), *filter(self.is_divided, frozen))

    @staticmethod
    def _of_rank(buckets: Buckets, known: dict[int, tuple[Bucket, ...]], rank: int) -> tuple[Bucket, ...]:
        if rank not in known:
            places = buckets.places(lambda group: rank in group)
            known[rank] = tuple([buckets.of(family, place) for family, place in places])
        return known[rank]

    def is_divided(self, bucket: Bucket) -> bool:
        """Whether the optimizer state of these parameters is spread over the group (ZeRO 1 and above)."""
        return self.zero_stage_of(bucket) >= 1

    def zero_stage_of(self, bucket: Bucket) -> int:
        return self.zero_stage(bucket.family, len(bucket.group))

    def zero_stage(self, family: BucketFamily, ranks: int) -> int:
        """The ZeRO stage of a bucket: that of `Plan.zero_stage`, but 0 if one rank holds the bucket alone, and at most 1 (the
        optimizer state) if several stages of the plan, or no backward, use its parameters. Frozen ones have only parameters to
        divide: stage 3, or 0."""
        frozen = not family.first[0].trainable
        if ranks == 1 or (frozen and self.plan.zero_stage < 3):
            return 0
        if self.plan.zero_stage < 2:
            return self.plan.zero_stage
        if family.begin not in self._zero_stages:
            users = [name for parameter in family.first for name in self.model.parameter_users[parameter.name]]
            divided = len({self.chunk_of[name] for name in users}) == 1 and not self.differentiable.isdisjoint(users)
            self._zero_stages[family.begin] = self.plan.zero_stage if divided else 0 if frozen else 1
        return self._zero_stages[family.begin]

    def updated_elements(self, family: BucketFamily, ranks: int) -> int:
        """How many of a bucket's parameters each of the ranks that share it updates: a part of them under ZeRO, or all."""
        return -(-family.elements // ranks) if self.zero_stage(family, ranks) else family.elements

    def updated_bytes(self, family: BucketFamily, ranks: int) -> int:
        """Bytes of the gradients that each of these ranks updates with, and of the parameters that it then has."""
        return family.padded_bytes(ranks) // ranks if self.zero_stage(family, ranks) else family.size_bytes

    @shared("zero")
    def _zero_stages(self) -> dict[int, int]:
        return {}

    @shared("zero")
    def rank_updates(self) -> dict[int, tuple[OptimizerStep, ...]]:
        return {}

    @shared("zero")
    def unsharded_families(self) -> dict[str, tuple[int, ...]]:
        """By component the buckets, of all shards and sharding groups (by `BucketFamily.begin`), of its parameters that lie
        whole (unsharded) on a rank for a while only. With ZeRO 2 these are gradients, with ZeRO 3 parameters too, and those of
        the whole layer."""
        families: dict[str, dict[int, None]] = {component.name: {} for component in self.model.components}
        frozen = self.frozen_buckets.families if self.plan.zero_stage >= 3 else ()
        for family in (*self.buckets.families, *frozen) if self.plan.zero_stage >= 2 else ():
            for name in self.users_of(family) if self.zero_stage(family, len(family.groups[0][1])) >= 2 else ():
                families[name][family.begin] = None
        if self.plan.zero_stage >= 3:
            for unit in self._units():
                together = {begin: None for name in unit for begin in families[name]}
                families |= {name: together if families[name] else {} for name in unit}
        return {name: tuple(begins) for name, begins in families.items()}

    def _units(self) -> Iterator[list[str]]:
        """Components of a chunk whose parameters come and go together, whatever layers are cut into: a layer, what lies before
        the first one, and what lies behind the last (torchtitan's fully_shard of [norm, output])."""
        names, layers = [component.name for component in self.model.components], layers_of(self.model)
        cuts = sorted({0, len(names), *(bound for layer in layers for bound in layer)}) if layers else []
        for first, last in pairwise(cuts):
            for _, run in groupby(names[first:last], key=self.chunk_of.__getitem__):
                unit = list(run)
                if all(self.placement[name].kind != "place" for name in unit):  # what runs on one rank is its own
                    yield unit

    def unsharded_buckets(self, component: str, buckets: BucketsByFamily) -> list[Bucket]:
        """Those of some buckets (`by_family`) that are of `unsharded_families`."""
        return [bucket for begin in self.unsharded_families[component] for bucket in buckets.get(begin, ())]

    def completes(self, family: BucketFamily, stage: int) -> tuple[str, ...]:
        """The components whose backward is the last of their chunk in `stage` to add to the buckets of a family."""
        key = family.begin, stage
        if key not in self._completing:
            order, last = self.model.component_index, dict[int, str]()  # of the backward: the first of the forward, by chunk
            for name in (name for parameter in family.first for name in self.model.parameter_users[parameter.name]):
                if self.stage_of[name] == stage and name in self.differentiable:
                    first = last.setdefault(self.chunk_of[name], name)
                    if order[name] < order[first]:
                        last[self.chunk_of[name]] = name
            self._completing[key] = tuple(last[chunk] for chunk in sorted(last))
        return self._completing[key]

    @shared("buckets")
    def _completing(self) -> dict[tuple[int, int], tuple[str, ...]]:
        return {}

    def users_of(self, family: BucketFamily) -> tuple[str, ...]:
        users = self.model.parameter_users
        return tuple(dict.fromkeys(name for parameter in family.first for name in users[parameter.name]))


# Components of a plan whose tasks differ by names and ranks alone, so that one of each kind is lowered.
#
# Two components are of one kind if they do the same work and all that the passes of computation and conversion look at is
# equal. That is how they are placed, what is done with them again, and how each value that they read or make is laid out and
# sent. Neighbours count by their distance in the model, and places on the pp axis by their difference. What a task waits for
# lies in the tasks of neighbours, so these have to be equal too, one by one.
#
# A value with many readers (a mask, rotary positions, the output of an encoder) is known by its name instead. So its readers
# are alike in spite of their distance, but for the first of each reading. That one converts the value or its gradient for the
# others.


MANY_READERS = 4
"""From more readers on a value is known by its name."""


class ComponentKinds:
    """The kinds of a plan's components, by number of the component in the model (`of`)."""

    def __init__(self, layout: PlanIndex) -> None:
        self._layout = layout
        self._number = layout.model.component_index
        self._places = [layout.stage_of[component.name] for component in layout.model.components]
        self._layout_numbers: dict[str, int] = {}
        self._shapes: dict[Hashable, int] = {}
        self._firsts: dict[str, frozenset[int]] = {}
        numbered = list(enumerate(layout.model.components))
        signatures: dict[Hashable, int] = {}
        alone = [signatures.setdefault(self._signature(*pair), len(signatures)) for pair in numbered]
        kinds: dict[Hashable, int] = {}
        self.of = [
            kinds.setdefault((alone[pair[0]], *(alone[other] for other in self._neighbours(*pair))), len(kinds))
            for pair in numbered
        ]

    def is_far(self, value: str) -> bool:
        """Whether a value is known by its name: it has many readers."""
        return len(self._layout.consumers[value]) > MANY_READERS

    def known_by_number(self, number: int) -> frozenset[int]:
        """Components in whose pieces a component waits for a value with many readers, unless they are its neighbours too."""
        component = self._layout.model.components[number]
        far = {
            other
            for value in component.inputs
            if self._layout.stage_of_value[value] is not None and self.is_far(value)
            for other in self._ways_to(number, component, value)
        }
        return frozenset(far.difference(self._neighbours(number, component)) if far else ())

    def _ways_to(self, number: int, component: Component, value: str) -> list[int]:
        """Who makes a value, and who puts its parts together for all that read it so, beside the reader itself."""
        producer = self._layout.model.value[value].producer
        assert producer is not None
        joiner = self._layout.first_reader(value, self._reading(component, value))
        return [other for other in (self._number[producer], self._number[joiner]) if other != number]

    def _neighbours(self, number: int, component: Component) -> Iterator[int]:
        """Components in whose tasks those of this one wait, or may; one several times where several values lead to it."""
        layout = self._layout
        for name in component.inputs:
            value = layout.model.value[name]
            if value.producer is None:
                continue
            if self.is_far(name):
                if number in self._first_of(value):
                    yield from (self._number[reader] for reader in self._reading(component, name).components)
                continue
            yield self._number[value.producer]
            yield from (self._number[reader] for reader in layout.consumers[name])
        for name in component.outputs:
            yield from (self._number[reader] for reader in layout.consumers[name])

    def _signature(self, number: int, component: Component) -> Hashable:
        layout, name, place = self._layout, component.name, self._places[number]
        by_operator = component.selective if layout.recomputes_by_operator(name) else None
        work = (
            layout.model.work_kind[name],
            layout.placement[name],
            name in layout.differentiable,
            layout.is_halved(name),
            layout.recomputes(name),
            by_operator is not None and by_operator.operators,
            tuple(self._number[other] - number for other in layout.segment_of(name)),
            None if component.inside is None else layout.inside(name),
        )
        reads = tuple([self._read(number, component, value, place) for value in component.inputs])
        makes = tuple([value if self.is_far(value) else self._laid_out(value) for value in component.outputs])
        return work, reads, makes

    def _read(self, number: int, component: Component, name: str, place: int) -> Hashable:
        layout, value = self._layout, self._layout.model.value[name]
        if value.producer is None:
            return self._loading[place]
        maker = self._number[value.producer]
        remade = bool(layout.plan.repeated) and layout.is_remade(name, component.name)
        if not self.is_far(name):
            output = layout.model.components[maker].outputs.index(name)
            return number - maker, place - self._places[maker], output, self._laid_out(name), remade
        reading = self._reading(component, name)
        first = self._readers(number, reading) if number in self._first_of(value) else ()
        neighbours = frozenset(self._neighbours(number, component))
        near = tuple(number - other for other in self._ways_to(number, component, name) if other in neighbours)
        return name, place, reading.ends, first, near, remade

    def _laid_out(self, name: str) -> int:
        """A number, equal for values with few readers that are laid out alike: seen from their makers, all that is theirs."""
        if name not in self._layout_numbers:
            value, layout = self._layout.model.value[name], self._layout
            assert value.producer is not None
            maker = self._number[value.producer]
            readings = tuple(
                (reading.stage - self._places[maker], reading.ends, self._readers(maker, reading))
                for reading in layout.readings[name]
            )
            shape = value.bytes_per_sample, value.fixed_bytes, value.differentiable, layout.source[name], readings
            self._layout_numbers[name] = self._shapes.setdefault(shape, len(self._shapes))
        return self._layout_numbers[name]

    @cached_property
    def _loading(self) -> dict[int, frozenset[int]]:
        """Per place on the pp axis, which of its tp ranks load a batch."""
        loading: dict[int, set[int]] = {}
        for value in self._layout.model.values:
            for reading in self._layout.readings[value.name] if value.producer is None else ():
                loading.setdefault(reading.stage, set()).update(reading.ends.value.holders(self._layout.plan.mesh.tp))
        return {place: frozenset(ranks) for place, ranks in loading.items()}

    def _readers(self, number: int, reading: Reading) -> tuple[tuple[int, bool], ...]:
        """How far each reader is away, and whether it has a backward."""
        differentiable = self._layout.differentiable
        return tuple([(self._number[reader] - number, reader in differentiable) for reader in reading.components])

    def _reading(self, component: Component, value: str) -> Reading:
        return next(reading for reading in self._layout.readings[value] if component.name in reading.components)

    def _first_of(self, value: Value) -> frozenset[int]:
        """The first reader of every reading, and the first with a backward. Who puts parts together is such a first reader."""
        if value.name not in self._firsts:
            names: list[str] = []
            for reading in self._layout.readings[value.name]:
                backward = [reader for reader in reading.components if reader in self._layout.differentiable]
                names += [reading.components[0], *backward[:1]]
            self._firsts[value.name] = frozenset(map(self._number.__getitem__, names))
        return self._firsts[value.name]
