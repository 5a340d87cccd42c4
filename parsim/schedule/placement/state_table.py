"""A shortest path over states as flat arrays, so that one compiled loop walks it under any costs of the options."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable:
    """Components in order. A state of a cut is an option for each component before it that later ones look at.

    An extension is a state with an option of the next component; it leads to a state of the next cut.

    Attributes:
        states, ways: int64 [components]: of the cut behind a component the states, and the extensions that lead to each.
        begins: int64 [components + 1]: where the states of a cut begin among all states.
        firsts: int64 [components]: where a component's extensions begin among all, in the order of the states they lead to.
        nodes: int64 [components]: where a component's options begin among all options.
        edges, edge_firsts: int64 [components]: edges that end at a component, and where their seconds begin in `edge_s`.
        before, option: int64 [extensions]: the state within its cut, and the option. edge_s: float64: edge after edge.
    """

    states: NDArray[np.int64]
    ways: NDArray[np.int64]
    begins: NDArray[np.int64]
    firsts: NDArray[np.int64]
    nodes: NDArray[np.int64]
    edges: NDArray[np.int64]
    edge_firsts: NDArray[np.int64]
    before: NDArray[np.int64]
    option: NDArray[np.int64]
    edge_s: Floats

    def least(self, node_s: Floats) -> tuple[Floats, NDArray[np.int64]]:
        """The least seconds of every state, and which of the extensions that lead to it has them (the first of equals).

        Args:
            node_s: float64 [options of all components].
        """
        from parsim.schedule.placement.dominance import least_of_states

        return least_of_states(
            self.states,
            self.ways,
            self.begins,
            self.firsts,
            self.nodes,
            self.edges,
            self.edge_firsts,
            self.before,
            self.option,
            self.edge_s,
            node_s,
        )

    def choice(self, picks: NDArray[np.int64]) -> tuple[int, ...]:
        """The option of every component on the way to the last state.

        Args:
            picks: of `least`.
        """
        from parsim.schedule.placement.dominance import way_to_the_last

        return tuple(way_to_the_last(self.ways, self.begins, self.firsts, self.before, self.option, picks).tolist())

    def of_cut(self, values: Floats, cut: int) -> Floats:
        """The entries of one cut. Args: values: per state. cut: lies before the component of that number."""
        end = self.begins[cut + 1] if cut + 1 < len(self.begins) else None
        return values[self.begins[cut] : end]
