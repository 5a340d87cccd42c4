"""An index of one plan of one model: what `PlacedModel` says, and who holds parameters and sums their gradients.

Lowering, memory and the executor use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parsim.errors import PlanError
from parsim.graph.component_kinds import ComponentKinds
from parsim.graph.index.divisions import shared
from parsim.graph.parameter_buckets import Bucket, BucketFamily, Buckets, HeldParameter, gradient_buckets, hold
from parsim.graph.placed_model import PlacedModel, Reading
from parsim.model.component import Value
from parsim.plans.pipeline import check_order
from parsim.plans.plan import check_plan
from parsim.plans.redistribution import Hop, conversion
from parsim.work import OptimizerStep


@dataclass(frozen=True)
class PlanIndex(PlacedModel):
    """A plan laid over its model. Raises PlanError if they do not match.

    Attributes: offloaded: with `activation_offload`, bytes of a microbatch that are copied to the host behind each component's
        forward, on a rank that runs it (`parsim.predict.host.offloaded`); None: nobody has said.
    """

    offloaded: Mapping[str, int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        plan = self.plan
        check_plan(plan, self.model)
        check_order(plan.pipeline_order, plan.mesh.pp, plan.microbatches, plan.chunks)
        if self.plan.is_mixed:
            self._check_conversions()

    def _check_conversions(self) -> None:
        """Every value can be cut as its way from layout to layout asks."""
        samples = self.plan.microbatch_samples
        for value, reading, pieces in self._cuts:
            if pieces is None:
                raise PlanError(
                    f"value {value.name} has no samples along dim 0, so {', '.join(reading.components)} cannot read it in "
                    f"another layout than {value.producer} makes it in; place them alike"
                )
            if samples % pieces:
                raise PlanError(
                    f"value {value.name} is cut into {pieces} pieces of the batch on its way to {reading.components[0]}, "
                    f"which a microbatch of {samples} samples does not divide into. Use fewer microbatches, or place "
                    f"{value.producer} and {reading.components[0]} the same way"
                )

    @shared("division")
    def _cuts(self) -> tuple[tuple[Value, Reading, int | None], ...]:
        """Values that are cut on the way to a reading, and into how many pieces of the batch; None: it cannot be cut."""
        tp, found = self.plan.mesh.tp, list[tuple[Value, Reading, int | None]]()
        for value in self.model.values:
            for reading in self.readings[value.name]:
                hops = self._hops_of(value.name, reading)
                if value.batch_first and value.bytes_per_sample:
                    pieces = max((tp // layout.ways for hop in hops for layout in (hop.source, hop.target)), default=1)
                    if pieces > 1:
                        found.append((value, reading, pieces))
                elif any(hop.operation != "all_reduce" or hop.source.ways != tp for hop in hops):
                    found.append((value, reading, None))  # no summands of a gradient that all ranks hold whole
        return tuple(found)

    def _hops_of(self, value: str, reading: Reading) -> tuple[Hop, ...]:
        """All that changes the layout of a value and of its gradient between its maker and a reading."""
        if value not in self.source:
            return ()
        made, tp = self.source[value], self.plan.mesh.tp
        hops = conversion(made.value, reading.ends.value, tp)
        if self.model.value[value].differentiable:
            hops = hops + conversion(reading.ends.gradient, made.gradient, tp)
        return hops

    @shared("recomputed")
    def kinds(self) -> ComponentKinds:
        """Which components differ by names and ranks alone."""
        return ComponentKinds(self)

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
            found: dict[str, HeldParameter] = {}
            for name in self._rank_components[place, shard]:
                component = self.model.component(name)
                for parameter in component.parameters:
                    if parameter.name not in found:
                        found[parameter.name] = hold(component, self.placement[name], parameter, shard)
            self._held[place, shard] = tuple(found.values())
        return self._held[place, shard]

    @shared("buckets")
    def buckets(self) -> Buckets:
        """See `gradient_buckets`."""
        return gradient_buckets(self.plan, self.model, self.placement, self.holders)

    @property
    def has_frozen(self) -> bool:
        """Whether the model has frozen parameters."""
        return len(self.model.trainable_parameters) < len(self.model.parameters)

    @shared("buckets")
    def frozen(self) -> dict[int, tuple[HeldParameter, ...]]:
        """By rank the frozen parameters, or pieces, of which it is the first holder."""
        found: dict[int, list[HeldParameter]] = {rank: [] for rank in range(self.plan.world_size)}
        for group in gradient_buckets(self.plan, self.model, self.placement, self.holders, frozen=True):
            found[group.group[0]] += group.parameters
        return {rank: tuple(parameters) for rank, parameters in found.items()}

    @shared("buckets")
    def _rank_buckets(self) -> dict[int, tuple[Bucket, ...]]:
        """Of ranks that were asked for."""
        return {}

    def rank_buckets(self, rank: int) -> tuple[Bucket, ...]:
        """The buckets that hold the gradients of a rank's parameters."""
        if rank not in self._rank_buckets:
            self._rank_buckets[rank] = tuple(self.buckets.having(lambda group: rank in group))
        return self._rank_buckets[rank]

    def is_divided(self, bucket: Bucket) -> bool:
        """Whether the optimizer state of these parameters is spread over the group (ZeRO 1 and above)."""
        return self.zero_stage_of(bucket) >= 1

    def zero_stage_of(self, bucket: Bucket) -> int:
        """See `zero_stage`."""
        return self.zero_stage(bucket.family, len(bucket.group))

    def zero_stage(self, family: BucketFamily, ranks: int) -> int:
        """The ZeRO stage of a bucket: that of `Plan.zero_stage`, with two exceptions. It is 0 if one rank holds the
        bucket alone. It is at most 1 (the optimizer state) if several stages of the plan, or no backward, use its
        parameters.
        """
        if ranks == 1:
            return 0
        if self.plan.zero_stage < 2:
            return self.plan.zero_stage
        if family.begin not in self._zero_stages:
            users = [name for parameter in family.first for name in self._users[parameter.name]]
            alone = len({self.chunk_of[name] for name in users}) == 1
            divided = alone and not self.differentiable.isdisjoint(users)
            self._zero_stages[family.begin] = self.plan.zero_stage if divided else 1
        return self._zero_stages[family.begin]

    def updated_elements(self, family: BucketFamily, ranks: int) -> int:
        """How many of a bucket's parameters each of the ranks that share it updates: a part of them under ZeRO, or all."""
        return -(-family.elements // ranks) if self.zero_stage(family, ranks) else family.elements

    def updated_bytes(self, family: BucketFamily, ranks: int) -> int:
        """Of the gradients that each of these ranks updates with, and of the parameters that it then has."""
        return family.padded_bytes(ranks) // ranks if self.zero_stage(family, ranks) else family.size_bytes

    @shared("zero")
    def _zero_stages(self) -> dict[int, int]:
        """Of families that were asked for, by their first bucket."""
        return {}

    @shared("zero")
    def rank_updates(self) -> dict[int, tuple[OptimizerStep, ...]]:
        """What ranks that were asked for update."""
        return {}

    @shared("zero")
    def _unsharded(self) -> dict[str, tuple[Bucket, ...]]:
        found: dict[str, dict[int, Bucket]] = {component.name: {} for component in self.model.components}
        for bucket in self.buckets if self.plan.zero_stage >= 2 else ():
            if self.zero_stage_of(bucket) >= 2:
                for parameter in bucket.first:
                    for name in self._users[parameter.name]:
                        found[name][bucket.number] = bucket
        return {name: tuple(buckets.values()) for name, buckets in found.items()}

    def unsharded_buckets(self, component: str) -> tuple[Bucket, ...]:
        """The buckets, of all shards, of the component's parameters that lie whole (unsharded) on a rank for a while only. With
        ZeRO 2 these are gradients, with ZeRO 3 parameters too."""
        return self._unsharded[component]

    def completes(self, family: BucketFamily, stage: int) -> tuple[str, ...]:
        """The components whose backward is the last of their chunk in `stage` to add to the buckets of a family."""
        key = family.begin, stage
        if key not in self._completing:
            self._completing[key] = self._completed_by(family, stage)
        return self._completing[key]

    @shared("buckets")
    def _completing(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """Of families that were asked for, by their first bucket and stage."""
        return {}

    def _completed_by(self, family: BucketFamily, stage: int) -> tuple[str, ...]:
        found: dict[int, str] = {}
        users, stage_of, differentiable, order = self._users, self.stage_of, self.differentiable, self.model.component_index
        for parameter in family.first:
            for name in users[parameter.name]:
                if stage_of[name] == stage and name in differentiable:
                    first = found.setdefault(self.chunk_of[name], name)
                    if first != name and order[name] < order[first]:
                        found[self.chunk_of[name]] = name
        return tuple(found.values()) if len(found) < 2 else tuple(found[chunk] for chunk in sorted(found))

    def users_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The components that use a bucket's parameters, each once."""
        return tuple(dict.fromkeys(name for parameter in bucket.first for name in self._users[parameter.name]))

    @property
    def _users(self) -> Mapping[str, tuple[str, ...]]:
        """Components that use a parameter, in execution order."""
        return self.model.parameter_users
