"""The problem without memory limits and without late gradient sums: a shortest path over frontiers, by array arithmetic.

Memory enters with a price per byte and tp rank. For any non-negative prices the value is a lower bound of the problem
(Lagrangian duality). The least cost from a state on is an admissible guide for an exact search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parsim.arrays import Floats
from parsim.schedule.placement.placement_problem import PlacementProblem

MOST_STATES = 4_000_000
"""Beyond so many joint options of a frontier the guide is left out (bounds stay valid, the search is slower)."""


@dataclass(frozen=True, eq=False)
class Frontiers:
    """Edges with their whole costs, and which components are still of interest at every cut between components.

    Attributes (cut i lies before component i):
        cost: (i, j) -> seconds [options of i, options of j], infinite where not allowed.
        before[i]: components < i with an edge to one >= i. after[i]: components >= i with an edge from one < i.
    """

    placing: PlacementProblem

    @cached_property
    def cost(self) -> Mapping[tuple[int, int], Floats]:
        edges = {pair: forward + backward for pair, (forward, backward) in self.placing.conversion_s.items()}
        for pair, allowed in self.placing.allowed.items():
            barrier = np.where(allowed, 0.0, np.inf)
            edges[pair] = edges[pair] + barrier if pair in edges else barrier
        return edges

    @property
    def count(self) -> int:
        return len(self.placing.components)

    @cached_property
    def before(self) -> list[tuple[int, ...]]:
        last = dict[int, int]()
        for one, two in self.cost:
            last[one] = max(two, last.get(one, 0))
        return self._crossing((one, one + 1, end) for one, end in last.items())

    @cached_property
    def after(self) -> list[tuple[int, ...]]:
        first = dict[int, int]()
        for one, two in self.cost:
            first[two] = min(one, first.get(two, one))
        return self._crossing((two, begin + 1, two) for two, begin in first.items())

    def _crossing(self, spans: Iterable[tuple[int, int, int]]) -> list[tuple[int, ...]]:
        """By cut the components, ascending, each of which counts from one cut to another."""
        found: list[list[int]] = [[] for _ in range(self.count + 1)]
        for component, first, last in sorted(spans):
            for cut in range(first, last + 1):
                found[cut].append(component)
        return [tuple(own) for own in found]

    def size(self, component: int) -> int:
        return len(self.placing.options[component])


class Relaxation:
    """The relaxed problem under memory `prices` (seconds per byte and tp rank)."""

    def __init__(self, frontiers: Frontiers, prices: Floats) -> None:
        self._frontiers = frontiers
        self.prices = prices
        placing = frontiers.placing
        self.node = [
            placing.forward_s[number] + placing.backward_s[number] + placing.memory_bytes[number] @ prices
            for number in range(frontiers.count)
        ]
        self._ahead: list[Floats] = [np.zeros(())]
        self._picks: list[tuple[tuple[int, ...], tuple[int, ...], Floats]] = []
        for number in range(frontiers.count):
            self._step(number)
        self.value = float(self._ahead[-1]) - float(prices @ placing.limit_bytes)

    def _spread(self, array: Floats, own: tuple[int, ...], axes: tuple[int, ...]) -> Floats:
        """The array with one axis per component of `axes`; those it has not are of length one."""
        shape = [array.shape[own.index(axis)] if axis in own else 1 for axis in axes]
        order = [own.index(axis) for axis in axes if axis in own]
        return array.transpose(order).reshape(shape)

    def _step(self, number: int) -> None:
        """Cost of all components up to and with `number`, by the options of those still of interest."""
        frontiers = self._frontiers
        held = frontiers.before[number]
        axes = (*held, number)
        total = self._spread(self._ahead[-1], held, axes) + self._spread(self.node[number], (number,), axes)
        for one in held:
            if (one, number) in frontiers.cost:
                total = total + self._spread(frontiers.cost[one, number], (one, number), axes)
        kept = frontiers.before[number + 1]
        gone = tuple(axis for axis in axes if axis not in kept)
        ordered = total.transpose([axes.index(axis) for axis in (*kept, *gone)])
        shape = tuple(frontiers.size(axis) for axis in kept)
        flat = np.broadcast_to(ordered, (*shape, *(frontiers.size(axis) for axis in gone))).reshape(*shape, -1)
        self._picks.append((kept, gone, flat.argmin(axis=-1)))
        self._ahead.append(flat.min(axis=-1))

    def choice(self) -> tuple[int, ...]:
        """The cheapest choice of the relaxed problem."""
        chosen: dict[int, int] = {}
        for kept, gone, picks in reversed(self._picks):
            place = tuple(chosen[axis] for axis in kept)
            sizes = tuple(self._frontiers.size(axis) for axis in gone)
            for axis, option in zip(gone, np.unravel_index(int(picks[place]), sizes) if gone else (), strict=True):
                chosen[axis] = int(option)
        return tuple(chosen[number] for number in range(self._frontiers.count))

    def to_go(self, cut: int) -> Floats | None:
        """What the components before the cut cost at least, by the options of `after[cut]`; None if too many states."""
        frontiers = self._frontiers
        held, given = frontiers.before[cut], frontiers.after[cut]
        axes = (*given, *held)
        sizes = [frontiers.size(axis) for axis in axes]
        if np.prod(sizes, dtype=float) > MOST_STATES:
            return None
        total = np.zeros([frontiers.size(axis) for axis in given] + [1] * len(held))
        total = total + self._spread(self._ahead[cut], held, axes)
        for (one, two), cost in frontiers.cost.items():
            if one < cut <= two:
                total = total + self._spread(cost, (one, two), axes)
        cheapest: Floats = total.reshape(*(frontiers.size(axis) for axis in given), -1).min(axis=-1)
        return cheapest
