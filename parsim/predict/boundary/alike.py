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
from parsim.model.component import Component, Value

T = TypeVar("T")


class CountedKinds:
    """What was counted of values and components, by kind.

    Args:
        layout: the plan and its model. values: by name, as kept under the plan.

    Attributes:
        kind: by component a number, equal for those of one kind whose values are as large; empty where nothing is alike.
        known: what was counted, by whether of values or components, what, and of which kind. numbers: of kinds of values.
    """

    def __init__(self, layout: PlanIndex, values: Mapping[str, Value]) -> None:
        self.layout = layout
        self.values = values
        self.kind: dict[str, int] = {}
        self.known: dict[tuple[str, str, int], object] = {}
        self.numbers: dict[Hashable, int] = {}
        if layout.shards_alike:
            sizes: dict[Hashable, int] = {}
            size = {
                name: sizes.setdefault(
                    (value.bytes_per_sample, value.fixed_bytes, value.differentiable, value.saved), len(sizes)
                )
                for name, value in values.items()
            }
            kinds: dict[Hashable, int] = {}
            for component, alike in zip(layout.model.components, layout.kinds.of, strict=True):
                own = tuple([size[value] for value in (*component.inputs, *component.outputs)])
                key = alike, own, _views(component)
                self.kind[component.name] = kinds.setdefault(key, len(kinds))

    def on(self, rank: int) -> AlikeOnRank:
        """The same for the values and components of a rank."""
        return AlikeOnRank(self, rank)


def _views(component: Component) -> Hashable:
    """Which inputs have gradients that are parts of those of outputs, and of which."""
    return tuple([(component.inputs.index(own), component.outputs.index(of)) for own, of in component.gradient_views])


class AlikeOnRank:
    """What was counted already, as it stands on one rank.

    Args:
        counted: on all ranks. rank: global number.

    Attributes: place: of the rank's components, their number in execution order.
    """

    def __init__(self, counted: CountedKinds, rank: int) -> None:
        self.place = {name: number for number, name in enumerate(counted.layout.rank_components(rank))}
        self._counted = counted
        self._numbers: dict[str, int | None] = {}

    def waits(self, what: str, value: Value, count: Callable[[], list[Wait]]) -> list[Wait]:
        """Where a value, or its gradient, waits on the rank: counted, or those of its like beside other components.

        Args:
            what: is counted. value: of the model. count: does so.
        """
        number = self._number(value)
        if number is None or value.producer is None:
            return count()
        begin = self.place[value.producer]
        first, found = self._once(("value", what, number), lambda: (begin, count()))
        if first == begin:
            return found
        return [Wait(wait.first + begin - first, wait.last + begin - first, wait.size_bytes) for wait in found]

    def of_value(self, what: str, value: Value, count: Callable[[], T]) -> T:
        """What does not depend on where on the rank a value is.

        Args:
            what, value, count: as for `waits`.
        """
        number = self._number(value)
        return count() if number is None else self._once(("value", what, number), count)

    def of_component(self, what: str, name: str, count: Callable[[], T]) -> T:
        """What depends on a component and on the values that it reads and makes.

        Args:
            what: is counted. name: of the component. count: does so.
        """
        kind = self._counted.kind
        return self._once(("component", what, kind[name]), count) if kind else count()

    def _once(self, key: tuple[str, str, int], count: Callable[[], T]) -> T:
        known = self._counted.known
        if key not in known:
            known[key] = count()
        return known[key]  # type: ignore[return-value]  # of one key, all that is counted is of one type

    def _number(self, value: Value) -> int | None:
        """Equal for values that are alike; None: nothing says of which others this one is."""
        if value.name not in self._numbers:
            self._numbers[value.name] = self._new_number(value)
        return self._numbers[value.name]

    def _new_number(self, value: Value) -> int | None:
        layout, maker, kind = self._counted.layout, value.producer, self._counted.kind
        if maker is None or maker not in self.place or not kind:
            return None
        chunk_of, readers = layout.chunk_of, layout.consumers[value.name]
        chunk, begin = chunk_of[maker], self.place[maker]
        users = (*readers, *(value.savers or ()))
        for user in users:
            if chunk_of[user] != chunk:
                return None
        key = (
            kind[maker],
            layout.model.component(maker).outputs.index(value.name),
            value.savers is None,
            tuple([self.place[user] - begin for user in users]),
            tuple([kind[reader] for reader in readers]),
        )
        return self._counted.numbers.setdefault(key, len(self._counted.numbers))
