"""The activations that a rank keeps for the backward under a plan; precision and recomputation change them.

A recomputed component keeps its inputs as it reads them, and copies of its buffers. Its saved activations live only from
its second forward to the end of its backward. So its inputs have one keeper more, and its saved values one fewer. By operator
it keeps outputs of operators besides, and of its inputs and outputs those that `Selective.values` names.

Leaves out: values that share one storage (each counts by itself where a recomputed component reads it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from parsim.costs.memory.records import Again
from parsim.graph.plan_index import PlanIndex
from parsim.model.component import ALONE, Component, Selective, Value, share_of
from parsim.model.precision import component_in, value_in
from parsim.model.shard.narrow import narrow
from parsim.plans.redistribution import conversion

VIEWS = ("split_batch", "keep")
"""Hops whose result lies in the storage of what they start from."""


@dataclass(frozen=True)
class KeptActivations:
    """A model as the ranks of one layout keep it. Components are as one rank has them: shards, where the plan cuts them."""

    layout: PlanIndex
    precision: str

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """All values, with the components that keep them under this plan."""
        if not self._recomputes:
            return self._before
        return {value.name: self._value(value) for value in self._before.values()}

    @cached_property
    def _before(self) -> Mapping[str, Value]:
        """All values, with the components that would keep them if nothing were recomputed."""
        return {value.name: value_in(value, self.precision) for value in self.layout.model.values}

    def _value(self, value: Value) -> Value:
        readers = {
            name
            for name in self.layout.consumers[value.name]
            if self._keeps_again(value.name, name) and not self.layout.is_remade(value.name, name)
        }
        if value.producer is not None and self._by_operator(value.producer) and self._keeps_again(value.name, value.producer):
            readers.add(value.producer)
        savers = value.savers or ()
        if not readers and not any(self.layout.recomputes(name) for name in savers):
            return value
        keepers = readers | {name for name in savers if not self.layout.recomputes(name)}
        order = self.layout.model.component_index
        return replace(value, savers=tuple(sorted(keepers, key=lambda name: order[name])), saved=bool(keepers))

    def _by_operator(self, name: str) -> bool:
        return self.layout.recomputes_by_operator(name)

    def _keeps_again(self, value: str, name: str) -> bool:
        """Whether a recomputed component keeps an input, or by operator also an output."""
        if not self._by_operator(name):
            return self.layout.recomputes(name)
        selective = self.layout.model.component(name).selective
        assert selective is not None
        return value in selective.values

    def component(self, name: str) -> Component:
        """The part of the component on a rank that runs it, with its saved activations under this plan."""
        if name not in self._components:
            self._components[name] = self._component(name)
        return self._components[name]

    @cached_property
    def _components(self) -> dict[str, Component]:
        return {}

    @cached_property
    def _recomputes(self) -> bool:
        return bool(self.layout.plan.recomputed or self.layout.plan.recomputed_by_operator)

    def _component(self, name: str) -> Component:
        own = self._alone(name)
        if not self._recomputes:
            return own
        rate, fixed = own.saved_activation_bytes, own.saved_fixed_bytes
        if self.layout.recomputes(name):
            rate, fixed = 0, own.buffer_bytes
        if self._by_operator(name) and own.selective is not None:
            rate, fixed = own.selective.kept[0], own.selective.kept[1] + own.buffer_bytes
        for value in self._values_at(name):
            before, now = (_counts(name, values[value]) for values in (self._before, self.values))
            counted = now - (before and not self.layout.recomputes(name))
            own_rate, own_fixed = self._size_at(name, value)
            rate, fixed = rate + counted * own_rate, fixed + counted * own_fixed
            elsewhere = before and not now and not self.layout.is_remade(value, name)
            if elsewhere and value in own.inputs and self.values[value].savers:  # kept for an earlier component too
                own = replace(own, backward_peaks=tuple((r + own_rate, f + own_fixed) for r, f in own.backward_peaks))
        return replace(own, saved_activation_bytes=max(0, rate), saved_fixed_bytes=max(0, fixed))

    def counted_values(self, name: str) -> list[tuple[str, int]]:
        """The values among what a component saves, and their bytes of one microbatch as it has them."""
        samples, found = self.layout.local_samples(name), list[tuple[str, int]]()
        for value in self._values_at(name):
            if _counts(name, self.values[value]):
                rate, fixed = self._size_at(name, value)
                found.append((value, rate * samples + fixed))
        return found

    def again(self, name: str) -> Again:
        """The changes of memory by the second forward of a recomputed component.

        An input that its backward does not need is let go before that, if nobody else keeps it. Of a segment, what earlier
        components have saved again is there too.
        """
        segment = self.layout.segment_of(name)
        if not segment:
            return self._again(name)
        parts = [self._again(entry) for entry in segment[: segment.index(name) + 1]]
        return Again(saved_bytes=sum(part.saved_bytes for part in parts), released_bytes=parts[-1].released_bytes)

    def _again(self, name: str) -> Again:
        own, samples = self._alone(name), self.layout.local_samples(name)
        saved, released = own.saved_activation_bytes * samples + own.saved_fixed_bytes, 0
        if self._by_operator(name) and own.selective is not None:
            return self._again_by_operator(name, own.selective, samples)
        for value in dict.fromkeys(own.inputs):
            rate, fixed = self._size_at(name, value)
            before, now = self._before[value], self.values[value]
            if self.layout.is_remade(value, name):
                continue
            if _counts(name, before):
                saved -= rate * samples + fixed
            if name not in (before.savers or ()) and _counts(name, now) and now.producer is not None:
                released += rate * samples + fixed
        return Again(saved_bytes=max(0, saved), released_bytes=released)

    def _again_by_operator(self, name: str, selective: Selective, samples: int) -> Again:
        """Inputs that the backward does not need are let go here too. The counted bytes contain all else."""
        released = 0
        for value in selective.values:
            rate, fixed = self._size_at(name, value)
            before, now = self._before[value], self.values[value]
            if name not in (before.savers or ()) and _counts(name, now) and now.producer not in (None, name):
                released += rate * samples + fixed

        def fullest(peaks: tuple[tuple[int, int], ...]) -> int:
            return max((rate * samples + fixed for rate, fixed in peaks), default=0)

        return Again(
            saved_bytes=selective.again[0] * samples + selective.again[1],
            released_bytes=released,
            first_bytes=fullest(selective.first_peaks),
            fullest_bytes=fullest(selective.second_peaks),
        )

    def _alone(self, name: str) -> Component:
        """What a rank has of the component, as if nothing were recomputed."""
        placement = self.layout.placement[name]
        own = narrow(component_in(self.layout.model.component(name), self.precision), placement.rule, placement.ways)
        return own.at_samples(self.layout.local_samples(name))

    def _values_at(self, name: str) -> tuple[str, ...]:
        component = self.layout.model.component(name)
        return tuple(dict.fromkeys((*component.inputs, *component.outputs)))

    def _size_at(self, name: str, value: str) -> tuple[int, int]:
        """Bytes per sample that the component sees, and fixed, of a value as it reads or makes it."""
        entry = self._before[value]
        made = self.layout.model.value[value].producer == name
        ends = self.layout.source[value] if made else self.layout.reads_in(name, value)
        share = share_of(ends.value.size, ends.value.ways) if ends.value.form == "shard" else ALONE
        rate = entry.bytes_per_sample
        if entry.producer is not None and self.layout.stage_of[entry.producer] == self.layout.stage_of[name]:
            hops = conversion(self.layout.source[value].value, ends.value, self.layout.plan.mesh.tp)
            if made or all(hop.operation in VIEWS for hop in hops):  # else a copy, which has no larger storage
                rate = entry.storage_bytes_per_sample or rate
        return share.of(rate), entry.fixed_bytes


def _counts(name: str, value: Value) -> bool:
    """Whether the value is among what this component saves: it is the first that keeps it."""
    return (value.savers or ())[:1] == (name,)
