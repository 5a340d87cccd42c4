"""The problem without memory limits and without late gradient sums: a shortest path over frontiers.

Memory enters with a price per byte and tp rank. For any non-negative prices the value is a lower bound of the problem
(Lagrangian duality). The least cost from a state on is an admissible guide for an exact search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.schedule.placement.placement_problem import PlacementProblem
from parsim.schedule.placement.state_table import StateTable

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

    def sizes(self, components: Iterable[int]) -> tuple[int, ...]:
        """How many options each of these has."""
        return tuple(self.size(component) for component in components)

    @cached_property
    def table(self) -> StateTable:
        """What every relaxation of the problem shares: which state and which option lead to which state."""
        held = [self.before[number] for number in range(self.count)]
        kept = [self.before[number + 1] for number in range(self.count)]
        parts = [self._extensions(number, held[number], kept[number]) for number in range(self.count)]
        extensions = np.array([len(before) for before, _, _ in parts], dtype=np.int64)
        states = np.array([math.prod(self.sizes(own)) for own in kept], dtype=np.int64)
        edges = np.array([len(costs) for _, _, costs in parts], dtype=np.int64)
        return StateTable(
            states=states,
            ways=extensions // states,
            begins=_starts(np.concatenate([np.ones(1, dtype=np.int64), states])),
            firsts=_starts(extensions),
            nodes=_starts(np.array(self.sizes(range(self.count)), dtype=np.int64)),
            edges=edges,
            edge_firsts=_starts(edges * extensions),
            before=np.concatenate([before for before, _, _ in parts]),
            option=np.concatenate([option for _, option, _ in parts]),
            edge_s=np.concatenate([cost for _, _, costs in parts for cost in costs] or [np.zeros(0)]),
        )

    def _extensions(
        self, number: int, held: tuple[int, ...], kept: tuple[int, ...]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Floats]]:
        """Of every state of cut `number` with every option of the component: both, and the seconds of the edges between.

        In the order of the states of the next cut, and of one state all that lead to it in a row.
        """
        axes = (*held, number)
        order = (*kept, *(axis for axis in axes if axis not in kept))

        def listed(array: NDArray[Any], own: tuple[int, ...]) -> NDArray[Any]:
            whole = np.broadcast_to(_spread(array, own, order), self.sizes(order))
            return np.ascontiguousarray(whole).reshape(-1)

        states = np.arange(math.prod(self.sizes(held)), dtype=np.int64).reshape(self.sizes(held))
        options = np.arange(self.size(number), dtype=np.int64)
        costs = [listed(self.cost[one, number], (one, number)) for one in held if (one, number) in self.cost]
        return listed(states, held), listed(options, (number,)), costs


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of so many entries begins, in one array of all."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)[:-1]])


def _spread(array: NDArray[Any], own: tuple[int, ...], axes: tuple[int, ...]) -> NDArray[Any]:
    """The array with one axis per component of `axes`; those it has not are of length one."""
    shape = [array.shape[own.index(axis)] if axis in own else 1 for axis in axes]
    order = [own.index(axis) for axis in axes if axis in own]
    return array.transpose(order).reshape(shape)


class Relaxation:
    """The relaxed problem under memory `prices` (seconds per byte and tp rank)."""

    def __init__(self, frontiers: Frontiers, prices: Floats) -> None:
        self._frontiers = frontiers
        self.prices = prices
        placing = frontiers.placing
        node = [
            placing.forward_s[number] + placing.backward_s[number] + placing.memory_bytes[number] @ prices
            for number in range(frontiers.count)
        ]
        self._least_s, self._picks = frontiers.table.least(np.concatenate(node))
        self.value = float(self._least_s[-1]) - float(prices @ placing.limit_bytes)

    def choice(self) -> tuple[int, ...]:
        """The cheapest choice of the relaxed problem."""
        return self._frontiers.table.choice(self._picks)

    def to_go(self, cut: int) -> Floats | None:
        """What the components before the cut cost at least, by the options of `after[cut]`; None if too many states."""
        frontiers = self._frontiers
        held, given = frontiers.before[cut], frontiers.after[cut]
        axes = (*given, *held)
        if np.prod(frontiers.sizes(axes), dtype=float) > MOST_STATES:
            return None
        total = np.zeros([*frontiers.sizes(given), *(1 for _ in held)])
        total = total + _spread(frontiers.table.of_cut(self._least_s, cut).reshape(frontiers.sizes(held)), held, axes)
        for (one, two), cost in frontiers.cost.items():
            if one < cut <= two:
                total = total + _spread(cost, (one, two), axes)
        cheapest: Floats = total.reshape(*frontiers.sizes(given), -1).min(axis=-1)
        return cheapest
