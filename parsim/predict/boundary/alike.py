"""Values and components of a rank that are like earlier ones: what is counted of the first of a kind holds for the others.

Components of one kind do the same work, placed alike, beside neighbours that do (`parsim.graph.component_kinds`). So a value
waits as long after its maker as that of another component of this kind, if as much is kept of it as far away. That holds where
its maker, its readers and those that keep it are of one chunk: what comes before and after does not matter then.

Where components are placed on single tp ranks, nothing is alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from parsim.costs.memory.waiting import Wait
from parsim.graph.plan_index import PlanIndex
from parsim.model.component import Value

T = TypeVar("T")


class CountedKinds:
    """What was counted of values and components, by kind.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan.
    """

    def __init__(self, layout: PlanIndex, values: Mapping[str, Value]) -> None:
        self.layout = layout
        self.values = values
        self.known: dict[Hashable, object] = {}

    def on(self, rank: int) -> AlikeOnRank:
        """The same for the values and components of a rank."""
        return AlikeOnRank(self, rank)


class AlikeOnRank:
    """What was counted already, as it stands on one rank.

    Args:
        counted: on all ranks. rank: global number.

    Attributes: place: of the rank's components, their number in execution order.
    """

    def __init__(self, counted: CountedKinds, rank: int) -> None:
        self.place = {name: number for number, name in enumerate(counted.layout.rank_components(rank))}
        self._counted = counted
        self._keys: dict[str, Hashable] = {}

    def waits(self, what: str, value: Value, count: Callable[[], list[Wait]]) -> list[Wait]:
        """Where a value, or its gradient, waits on the rank: counted, or those of its like beside other components.

        Args:
            what: is counted. value: of the model. count: does so.
        """
        key = self._key(value)
        if key is None or value.producer is None:
            return count()
        begin = self.place[value.producer]
        first, found = self._once((what, key), lambda: (begin, count()))
        if first == begin:
            return found
        return [Wait(wait.first + begin - first, wait.last + begin - first, wait.size_bytes) for wait in found]

    def of_value(self, what: str, value: Value, count: Callable[[], T]) -> T:
        """What does not depend on where on the rank a value is.

        Args:
            what, value, count: as for `waits`.
        """
        key = self._key(value)
        return count() if key is None else self._once((what, key), count)

    def of_component(self, what: str, name: str, count: Callable[[], T]) -> T:
        """What depends on a component and on the values that it reads and makes.

        Args:
            what: is counted. name: of the component. count: does so.
        """
        layout = self._counted.layout
        if not layout.shards_alike:
            return count()
        component = layout.model.component(name)
        sizes = tuple([self._size(value) for value in (*component.inputs, *component.outputs)])
        return self._once((what, layout.kinds.of[layout.model.component_index[name]], sizes), count)

    def _once(self, key: Hashable, count: Callable[[], T]) -> T:
        known = self._counted.known
        if key not in known:
            known[key] = count()
        return known[key]  # type: ignore[return-value]  # of one key, all that is counted is of one type

    def _key(self, value: Value) -> Hashable:
        """Equal for values that are alike; None: nothing says of which others this one is."""
        if value.name not in self._keys:
            self._keys[value.name] = self._new_key(value)
        return self._keys[value.name]

    def _new_key(self, value: Value) -> Hashable:
        layout, maker = self._counted.layout, value.producer
        if maker not in self.place or maker is None or not layout.shards_alike:
            return None
        chunk, begin = layout.chunk_of[maker], self.place[maker]
        readers = layout.consumers[value.name]
        users = (*readers, *(value.savers or ()))
        if any(layout.chunk_of[user] != chunk for user in users):
            return None
        number = layout.model.component_index[maker]
        return (
            layout.kinds.of[number],
            layout.model.components[number].outputs.index(value.name),
            value.savers is None,
            tuple([self.place[user] - begin for user in users]),
            tuple([self._view(reader, value.name) for reader in readers]),
            self._size(value.name),
        )

    def _view(self, reader: str, value: str) -> Hashable:
        """The output of a reader of whose gradient that of the value is a part."""
        component = self._counted.layout.model.component(reader)
        output = dict(component.gradient_views).get(value) if component.gradient_views else None
        return None if output is None else (component.outputs.index(output), self._size(output))

    def _size(self, value: str) -> Hashable:
        entry = self._counted.values[value]
        return entry.bytes_per_sample, entry.fixed_bytes, entry.differentiable, entry.saved
