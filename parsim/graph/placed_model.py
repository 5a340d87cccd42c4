"""A plan laid over its model: which rank runs each component, and which makes and reads each value, in which layout.

"Stage" here is a place on the pp axis, because the place decides which ranks exchange values. All chunks of a rank are
one stage here. Only the pipeline's actions (`Plan.stages`) distinguish them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parsim.graph.index.divisions import FollowsFrom, divisions_of, shared
from parsim.model.component import InnerExchange
from parsim.model.model import Model
from parsim.model.shard.narrow import narrow
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.placement import Placement
from parsim.plans.plan import Plan
from parsim.plans.redistribution import ValueAndGradientLayout, ValueLayout, input_ends, output_ends
from parsim.work import Phase


class Reading(NamedTuple):
    """Some components of one stage that read a value alike: in one layout, making its gradient in one layout."""

    stage: int
    ends: ValueAndGradientLayout
    components: tuple[str, ...]


@dataclass(frozen=True)
class PlacedModel:
    """What follows from mesh, stages and placements of a plan, and from what it recomputes."""

    plan: Plan
    model: Model

    @cached_property
    def worked_out(self) -> dict[FollowsFrom, dict[str, object]]:
        """What indexes of the same model have worked out for plans that agree with this one, by what it follows from."""
        return divisions_of(self.model, self.plan)

    def rank(self, stage: int, replica: int, shard: int = 0) -> int:
        return self.plan.mesh.rank(stage=stage, replica=replica, shard=shard)

    @shared("division")
    def placement(self) -> dict[str, Placement]:
        return {name: placement for stage in self.plan.stages for name, placement in stage.placed()}

    def runs_on(self, rank: int, component: str) -> bool:
        """Whether the rank runs the component."""
        if self.stage_of[component] != self.plan.stage_of_rank(rank):
            return False
        return self.placement[component].runs_on(self.plan.shard_of_rank(rank))

    @shared("division")
    def shards_alike(self) -> bool:
        """Whether every component runs on all tp ranks: none is placed on one of them."""
        return all(placement.kind != "place" for placement in self.placement.values())

    def runners(self, component: str, replica: int) -> tuple[int, ...]:
        """The ranks of a replica that run the component."""
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
        """What the rank runs, in execution order."""
        return self._rank_components[self.plan.stage_of_rank(rank), self.plan.shard_of_rank(rank)]

    def inside(self, component: str) -> InnerExchange | None:
        """What a rank exchanges while it runs the component; None: nothing, so it is one task."""
        if component not in self._inside:
            placement, whole = self.placement[component], self.model.component(component)
            shard = None if whole.inside is None else narrow(whole, placement.rule, placement.ways)
            self._inside[component] = None if shard is None else shard.inside
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
        """Samples of one microbatch on one replica."""
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
        """Number in `Plan.stages` by component."""
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
        """Whether only some of its operators run again."""
        return component in self._by_operator

    @shared("recomputed")
    def _recomputed(self) -> frozenset[str]:
        return self.plan.recomputed & self.differentiable

    @shared("recomputed")
    def _by_operator(self) -> frozenset[str]:
        """Those that keep less so, as they are placed."""
        return frozenset(
            name for name in self.plan.recomputed_by_operator & self.differentiable if self._keeps_less_by_operator(name)
        )

    def _keeps_less_by_operator(self, name: str) -> bool:
        component, placement = self.model.component(name), self.placement[name]
        cut = placement.rule and placement.ways > 1
        return component.selective is not None and (not cut or component.sharding(placement.rule).selective is not None)

    def segment_of(self, component: str) -> tuple[str, ...]:
        """The components that are recomputed together with this one, those with a backward; none if it is not in a segment."""
        return self._segments.get(component, ())

    @shared("recomputed")
    def _segments(self) -> dict[str, tuple[str, ...]]:
        kept = (tuple(name for name in segment if name in self.differentiable) for segment in self.plan.segments)
        return {name: segment for segment in kept for name in segment}

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
        """Components that read a value, in execution order."""
        return self.model.readers

    @property
    def differentiable(self) -> frozenset[str]:
        """Components that have a backward."""
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
        found: dict[str, tuple[Reading, ...]] = {}
        for value, names in self.consumers.items():
            groups: dict[tuple[int, ValueAndGradientLayout], list[str]] = {}
            for name in names:
                groups.setdefault((self.stage_of[name], self.reads_in(name, value)), []).append(name)
            found[value] = tuple(Reading(stage, ends, tuple(group)) for (stage, ends), group in groups.items())
        return found

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
        found: dict[int, list[str]] = {place: [] for place in range(self.plan.mesh.pp)}
        for value in self.model.values:
            home = self.stage_of_value[value.name]
            for place in {reading.stage for reading in self.readings[value.name]} | ({home} if home is not None else set()):
                found[place].append(value.name)
        return {place: tuple(names) for place, names in found.items()}

    def batch_layouts(self, rank: int) -> dict[str, tuple[ValueLayout, ...]]:
        """The values of the batch that a rank's components read, and in which layouts."""
        stage, shard, tp = self.plan.stage_of_rank(rank), self.plan.shard_of_rank(rank), self.plan.mesh.tp
        found: dict[str, tuple[ValueLayout, ...]] = {}
        for value in self.values_at[stage]:
            if self.stage_of_value[value] is None:
                layouts = dict.fromkeys(
                    reading.ends.value
                    for reading in self.readings[value]
                    if reading.stage == stage and shard in reading.ends.value.holders(tp)
                )
                if layouts:
                    found[value] = tuple(layouts)
        return found

    def batch_ways(self, rank: int) -> int:
        """How many neighbouring tp ranks load the same samples: enough for all that this rank's components read."""
        layouts = [layout for found in self.batch_layouts(rank).values() for layout in found]
        ways = max((layout.ways for layout in layouts), default=1)
        nested = all(ways % layout.ways == 0 for layout in layouts)
        return ways if nested else self.plan.mesh.tp

    def completed_readings(self, stage: int, name: str) -> tuple[tuple[str, Reading], ...]:
        """The values, each with the reading, whose gradient is complete once the backward of `name` has run in `stage`."""
        found = []
        for value in dict.fromkeys(self.model.component(name).inputs):
            if self.stage_of_value[value] is None or not self.model.value[value].differentiable:
                continue
            for reading in self.readings[value]:
                backward = [reader for reader in reading.components if reader in self.differentiable]
                if reading.stage == stage and backward and backward[0] == name:
                    found.append((value, reading))
        return tuple(found)
