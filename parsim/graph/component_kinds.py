"""Components of a plan whose tasks differ by names and ranks alone, so that one of each kind is lowered.

Two components are of one kind if they do the same work and all that the passes of computation and conversion look at is
equal. That is how they are placed, what is done with them again, and how each value that they read or make is laid out and
sent. Neighbours count by their distance in the model, and places on the pp axis by their difference. What a task waits for lies
in the tasks of neighbours, so these have to be equal too, one by one.

A value with many readers (a mask, rotary positions, the output of an encoder) is known by its name instead. So its readers are
alike in spite of their distance, but for the first of each reading. That one converts the value or its gradient for the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property

from parsim.graph.placed_model import PlacedModel, Reading
from parsim.model.component import Component, Value

MANY_READERS = 4
"""From more readers on a value is known by its name."""


class ComponentKinds:
    """The kinds of a plan's components, by number of the component in the model.

    Args:
        layout: the plan and its model.
    """

    def __init__(self, layout: PlacedModel) -> None:
        self._layout = layout
        self._number = layout.model.component_index
        alone: dict[Hashable, int] = {}
        own = [
            alone.setdefault(self._signature(number, component), len(alone))
            for number, component in enumerate(layout.model.components)
        ]
        among: dict[Hashable, int] = {}
        self.of = [
            among.setdefault((own[number], *(own[other] for other in self._neighbours(number, component))), len(among))
            for number, component in enumerate(layout.model.components)
        ]

    def is_far(self, value: str) -> bool:
        """Whether a value is known by its name: it has many readers."""
        return len(self._layout.consumers[value]) > MANY_READERS

    @cached_property
    def _places(self) -> list[int]:
        return [self._layout.stage_of[component.name] for component in self._layout.model.components]

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
        found = [self._number[producer], self._number[self._layout.first_reader(value, self._reading(component, value))]]
        return [other for other in found if other != number]

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
        own = (
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
        return own, reads, makes

    def _read(self, number: int, component: Component, name: str, place: int) -> Hashable:
        layout, value = self._layout, self._layout.model.value[name]
        if value.producer is None:
            return self._loading[place]
        maker = self._number[value.producer]
        remade = bool(layout.plan.segments) and layout.is_remade(name, component.name)
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
        if name not in self._known:
            value, layout = self._layout.model.value[name], self._layout
            assert value.producer is not None
            maker = self._number[value.producer]
            readings = tuple(
                (reading.stage - self._places[maker], reading.ends, self._readers(maker, reading))
                for reading in layout.readings[name]
            )
            shape = value.bytes_per_sample, value.fixed_bytes, value.differentiable, layout.source[name], readings
            self._known[name] = self._shapes.setdefault(shape, len(self._shapes))
        return self._known[name]

    @cached_property
    def _loading(self) -> dict[int, frozenset[int]]:
        """Per place on the pp axis, which of its tp ranks load a batch."""
        found: dict[int, set[int]] = {}
        for value in self._layout.model.values:
            for reading in self._layout.readings[value.name] if value.producer is None else ():
                found.setdefault(reading.stage, set()).update(reading.ends.value.holders(self._layout.plan.mesh.tp))
        return {place: frozenset(ranks) for place, ranks in found.items()}

    @cached_property
    def _known(self) -> dict[str, int]:
        return {}

    @cached_property
    def _shapes(self) -> dict[Hashable, int]:
        return {}

    def _readers(self, number: int, reading: Reading) -> tuple[tuple[int, bool], ...]:
        """How far each reader is away, and whether it has a backward."""
        differentiable = self._layout.differentiable
        return tuple([(self._number[reader] - number, reader in differentiable) for reader in reading.components])

    def _reading(self, component: Component, value: str) -> Reading:
        return next(reading for reading in self._layout.readings[value] if component.name in reading.components)

    def _first_of(self, value: Value) -> frozenset[int]:
        """Of every reading the first reader, and the first with a backward. Who puts parts together is such a first reader."""
        if value.name not in self._firsts:
            found: set[int] = set()
            for reading in self._layout.readings[value.name]:
                backward = [reader for reader in reading.components if reader in self._layout.differentiable]
                found.update(self._number[reader] for reader in (reading.components[0], *backward[:1]))
            self._firsts[value.name] = frozenset(found)
        return self._firsts[value.name]

    @cached_property
    def _firsts(self) -> dict[str, frozenset[int]]:
        return {}
