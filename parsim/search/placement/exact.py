"""Exact placement by dynamic programming: labels over frontiers, from the last component to the first.

In this order the late gradient sums need one number: after component i they outlast its backward by
F_i = sync_i + max(0, F_{i+1} - backward_i). A label is (seconds so far, F, bytes per tp rank) for one set of options of the
components that earlier ones still refer to. One label dominates another if it uses no more memory anywhere and its seconds,
plus the amount by which its F is larger, are no more. A label is dropped as soon as no completion can beat the best choice
known, by a Lagrangian bound (`Relaxation`). Where no choice that fits is known, a linear program
over divided components tells first whether any can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.jit import njit
from parsim.numeric import Floats, solve
from parsim.search.placement.problem import PlacementProblem, Solution, fits, memory_of, no_choice, step_s, why_infeasible

# The compiled loops of the exact placement solver. Importing this module loads numba (about a second).


@njit(cache=True, nogil=True)
def undominated(
    seconds: Floats, late: Floats, memory: Floats, most_comparisons: int
) -> tuple[NDArray[np.bool_], int]:  # pragma: no cover (compiled)
    """Which labels no other one makes superfluous.

    Args:
        seconds, late: float64 [labels], sorted by (seconds, late). memory: float64 [labels, ranks], bytes.
        most_comparisons: of two labels; beyond it the remaining labels are kept unseen, and the count says so.

    Returns:
        bool [labels], and how many pairs were compared (more than `most_comparisons`: it was left early).
    """
    count, ranks = memory.shape
    keep = np.zeros(count, dtype=np.bool_)
    kept = np.empty(count, dtype=np.int64)
    survivors = 0
    compared = 0
    for place in range(count):
        if compared > most_comparisons:
            keep[place:] = True
            return keep, compared
        superfluous = False
        for number in range(survivors):
            other = kept[number]
            compared += 1
            behind = late[other] - late[place]
            if seconds[other] + (behind if behind > 0.0 else 0.0) > seconds[place]:
                continue
            superfluous = True
            for rank in range(ranks):
                if memory[other, rank] > memory[place, rank]:
                    superfluous = False
                    break
            if superfluous:
                # What dominates one label tends to dominate the next: try it earlier.
                kept[number] = kept[number // 2]
                kept[number // 2] = other
                break
        if not superfluous:
            kept[survivors] = place
            survivors += 1
            keep[place] = True
    return keep, compared


# A shortest path over states as flat arrays, so that one compiled loop walks it under any costs of the options.


class StateTable(NamedTuple):
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

    def of_cut(self, values: Floats, cut: int) -> Floats:
        """By state of the values: the entries of the cut before the component of that number."""
        end = self.begins[cut + 1] if cut + 1 < len(self.begins) else None
        return values[self.begins[cut] : end]


@njit(cache=True, nogil=True)
def least_of_states(table: StateTable, node_s: Floats) -> tuple[Floats, NDArray[np.int64]]:  # pragma: no cover (compiled)
    """The least seconds of every state, and which of the extensions that lead to it has them (the first of equals).

    Args:
        node_s: float64 [options of all components].

    Returns:
        float64 and int64 [states of all cuts]. The first state is the empty one, of 0 seconds.
    """
    count = table.begins[-1] + table.states[-1]
    least = np.zeros(count)
    picks = np.zeros(count, dtype=np.int64)
    for number in range(len(table.states)):
        size = table.states[number] * table.ways[number]
        for state in range(table.states[number]):
            best, pick = np.inf, 0
            for way in range(table.ways[number]):
                place = state * table.ways[number] + way
                at = table.firsts[number] + place
                seconds = least[table.begins[number] + table.before[at]] + node_s[table.nodes[number] + table.option[at]]
                for edge in range(table.edges[number]):
                    seconds += table.edge_s[table.edge_firsts[number] + edge * size + place]
                if seconds < best:
                    best, pick = seconds, way
            least[table.begins[number + 1] + state] = best
            picks[table.begins[number + 1] + state] = pick
    return least, picks


@njit(cache=True, nogil=True)
def way_to_the_last(table: StateTable, picks: NDArray[np.int64]) -> NDArray[np.int64]:  # pragma: no cover (compiled)
    """The option of every component on the way to the last state, by the picks of `least_of_states`."""
    chosen = np.zeros(len(table.ways), dtype=np.int64)
    state = 0
    for back in range(len(table.ways)):
        number = len(table.ways) - 1 - back
        at = table.firsts[number] + state * table.ways[number] + picks[table.begins[number + 1] + state]
        chosen[number] = table.option[at]
        state = table.before[at]
    return chosen


# The problem without memory limits and without late gradient sums: a shortest path over frontiers.
#
# Memory enters with a price per byte and tp rank. For any non-negative prices the value is a lower bound of the problem
# (Lagrangian duality). The least cost from a state on is an admissible guide for an exact search.


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
        by_cut: list[list[int]] = [[] for _ in range(self.count + 1)]
        for component, first, last in sorted(spans):
            for cut in range(first, last + 1):
                by_cut[cut].append(component)
        return [tuple(own) for own in by_cut]

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
        """Every state of cut `number` with every option of the component, and the seconds of the edges between.

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
        self._least_s, self._picks = least_of_states(frontiers.table, np.concatenate(node))
        self.value = float(self._least_s[-1]) - float(prices @ placing.limit_bytes)

    def choice(self) -> tuple[int, ...]:
        """The cheapest choice of the relaxed problem."""
        return tuple(way_to_the_last(self._frontiers.table, self._picks).tolist())

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


MOST_LABELS = 300_000
COMPARISONS_PER_LABEL = 10_000
"""Of two labels, in the whole search, per label that may be kept: about 30 s for MOST_LABELS, 1 s for 10,000."""
PARTS_SLACK = 1e-6
"""Of a limit: more than the solver's tolerance, so that what it calls infeasible is."""
ROUNDS = 40
TOLERANCE = 1e-12


class _Labels(NamedTuple):
    """Columns of the labels of one state; `parent` and `option` lead back to the choice."""

    seconds: Floats
    late: Floats
    memory: Floats
    parent: NDArray[np.int64]
    option: NDArray[np.int64]


def solve_exactly(
    placing: PlacementProblem,
    *,
    hints: Iterable[Sequence[int]] = (),
    most_labels: int = MOST_LABELS,
    within: float = TOLERANCE,
) -> Solution:
    """The choice with the shortest step that fits, proven; "feasible" with its bound if that takes too many labels.

    Args:
        within: of a step: a choice that is known to be so close to the best is taken.
        most_labels: kept at once; 0: the best choice under some prices of memory, which need not be the best.
        hints: known choices to start from (the uniform ones); those that do not fit are ignored.

    Returns:
        A Solution. Leaves out what `PlacementProblem` leaves out: pipelines, and overlap of conversions with computation.
    """
    frontiers = Frontiers(_with_distinct_ranks(placing))
    placing = frontiers.placing
    best, relaxation = _bounds(frontiers, hints, within)
    bound_s, gave_up = relaxation.value, not most_labels
    proven = best is not None and best[0] - bound_s <= within * abs(best[0])
    if bound_s < np.inf and not proven and most_labels and (best is not None or _parts_fit(placing)):
        search = _Search(frontiers, relaxation, best[0] if best is not None else np.inf, most_labels)
        found, gave_up = search.run(), search.gave_up
        if found is not None and (best is None or found[0] < best[0]):
            best = found
        if not gave_up and best is not None:
            bound_s = best[0]
    if best is not None and bound_s < np.inf:
        is_best = not gave_up and best[0] - bound_s <= TOLERANCE * abs(best[0])
        return Solution(choice=best[1], seconds=best[0], lower_bound_s=bound_s, status="optimal" if is_best else "feasible")
    if gave_up:
        return no_choice("inaccurate", "the search was left before any choice that fits was found", bound_s)
    return no_choice("infeasible", why_infeasible(placing))


def _parts_fit(placing: PlacementProblem) -> bool:
    """Whether the memory would do if components could be divided among their options: where it would not, no choice fits."""
    sizes = [len(options) for options in placing.options]
    scale = np.maximum(placing.limit_bytes, 1.0)
    used = np.concatenate(placing.memory_bytes, axis=0).T / scale[:, None]
    once = np.zeros((len(sizes), sum(sizes)))
    once[np.repeat(np.arange(len(sizes)), sizes), np.arange(sum(sizes))] = 1.0
    room = placing.limit_bytes / scale + PARTS_SLACK
    ones = np.ones(len(sizes))
    none = np.full(len(room), -np.inf)
    rows, low, high = np.concatenate([used, once]), np.concatenate([none, ones]), np.concatenate([room, ones])
    return solve(np.zeros(sum(sizes)), rows, low, high)[1] != "Infeasible"


def _with_distinct_ranks(placing: PlacementProblem) -> PlacementProblem:
    """Tp ranks that need the same memory under every option are one constraint: the one with the lowest limit."""
    columns = np.concatenate(placing.memory_bytes, axis=0).T
    distinct: dict[bytes, int] = {}
    for rank in np.argsort(placing.limit_bytes, kind="stable").tolist():
        distinct.setdefault(columns[rank].tobytes(), rank)
    keep = sorted(distinct.values())
    memory = tuple(sizes[:, keep] for sizes in placing.memory_bytes)
    return replace(placing, memory_bytes=memory, limit_bytes=placing.limit_bytes[keep])


def _bounds(
    frontiers: Frontiers, hints: Iterable[Sequence[int]], within: float
) -> tuple[tuple[float, tuple[int, ...]] | None, Relaxation]:
    """The best feasible choice met while prices of memory are raised, improved by single changes; and the best bound."""
    placing = frontiers.placing
    best: tuple[float, tuple[int, ...]] | None = None

    def consider(choice: Sequence[int]) -> None:
        nonlocal best
        if fits(placing, choice):
            seconds = step_s(placing, choice)
            if best is None or seconds < best[0]:
                best = (seconds, tuple(choice))

    for hint in hints:
        consider(hint)
    relaxation = Relaxation(frontiers, np.zeros_like(placing.limit_bytes))
    if not np.isfinite(relaxation.value):
        return best, relaxation
    tightest = relaxation
    scale = np.maximum(placing.limit_bytes, 1.0)
    prices = np.zeros_like(scale)
    pace = 1.0
    for _ in range(ROUNDS):
        choice = relaxation.choice()
        consider(choice)
        over = (memory_of(placing, choice) - placing.limit_bytes) / scale
        if np.all(over <= 0) and not prices.any():
            break
        if best is not None and best[0] - tightest.value <= within * abs(best[0]):
            break
        target = best[0] if best is not None else 2 * abs(tightest.value) + 1e-12
        norm = float(over @ over)
        if norm == 0:
            break
        stride = pace * max(target - relaxation.value, 1e-6 * abs(target)) / norm
        prices = np.maximum(0.0, prices + stride * over / scale)
        relaxation = Relaxation(frontiers, prices)
        if relaxation.value > tightest.value:
            tightest = relaxation
        else:
            pace *= 0.8
    if best is not None and best[0] - tightest.value > within * abs(best[0]):
        best = _improve(placing, best)
    return best, tightest


def _improve(placing: PlacementProblem, best: tuple[float, tuple[int, ...]]) -> tuple[float, tuple[int, ...]]:
    """Change one component at a time as long as that helps: first to what computation and conversions say is fastest."""
    seconds, chosen = best
    choice = list(chosen)
    pairs: list[list[tuple[int, Floats]]] = [[] for _ in choice]
    for (one, two), (forward, backward) in placing.conversion_s.items():
        pairs[one].append((two, forward + backward))
        pairs[two].append((one, (forward + backward).T))
    alone = [ahead + back for ahead, back in zip(placing.forward_s, placing.backward_s, strict=True)]
    used = memory_of(placing, choice)
    changed, rounds = True, 0
    while changed and rounds < 3:
        changed, rounds = False, rounds + 1
        for number, sizes in enumerate(placing.memory_bytes):
            own_s = alone[number] + sum((cost[:, choice[other]] for other, cost in pairs[number]), np.zeros(len(sizes)))
            rest = used - sizes[choice[number]]
            helps = (own_s < own_s[choice[number]]) & np.all(rest + sizes <= placing.limit_bytes * (1 + TOLERANCE), axis=1)
            for option in sorted(np.flatnonzero(helps).tolist(), key=own_s.__getitem__):
                other = (*choice[:number], option, *choice[number + 1 :])
                trial = step_s(placing, other)
                if trial < seconds * (1 - TOLERANCE) and fits(placing, other):
                    seconds, choice, used, changed = trial, list(other), rest + sizes[option], True
                    break
    return seconds, tuple(choice)


class _Search:
    """The labels of all states at one cut, and the way to the next."""

    def __init__(self, frontiers: Frontiers, relaxation: Relaxation, upper_s: float, most_labels: int) -> None:
        self._frontiers = frontiers
        self._placing = frontiers.placing
        self._relaxation = relaxation
        self._upper = upper_s * (1 + TOLERANCE) if np.isfinite(upper_s) else np.inf
        self._most = most_labels
        self._comparisons = COMPARISONS_PER_LABEL * most_labels
        self._history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        least = np.array([sizes.min(axis=0) for sizes in self._placing.memory_bytes])
        self._least = np.concatenate([np.zeros((1, least.shape[1])), np.cumsum(least, axis=0)])  # [i]: of components before i
        self.gave_up = False

    def run(self) -> tuple[float, tuple[int, ...]] | None:
        dims = len(self._placing.limit_bytes)
        empty = np.zeros(1, dtype=np.int64)
        states: dict[tuple[int, ...], _Labels] = {
            (): _Labels(np.zeros(1), np.zeros(1), np.zeros((1, dims)), empty - 1, empty - 1)
        }
        for number in range(self._frontiers.count - 1, -1, -1):
            states = self._advance(states, number)
            total = sum(len(labels.seconds) for labels in states.values())
            if total > self._most or self._comparisons < 0:
                self.gave_up = True
                return None
            if not total:
                return None
        (labels,) = states.values()
        finals = labels.seconds + labels.late
        at = int(finals.argmin())
        return float(finals[at]), self._trace(at)

    def _advance(self, states: dict[tuple[int, ...], _Labels], number: int) -> dict[tuple[int, ...], _Labels]:
        """All labels extended by every option of component `number`."""
        frontiers, placing = self._frontiers, self._placing
        given = frontiers.after[number + 1]
        kept = frontiers.after[number]
        guide = self._relaxation.to_go(number)
        edges = [(two, *placing.conversion_s[one, two]) for one, two in placing.conversion_s if one == number]
        ties = [(two, allowed) for (one, two), allowed in placing.allowed.items() if one == number]
        grown: dict[tuple[int, ...], list[_Labels]] = {}
        offset = 0
        for state, labels in states.items():
            options = dict(zip(given, state, strict=True))
            parents = offset + np.arange(len(labels.seconds), dtype=np.int64)
            offset += len(labels.seconds)
            for option in range(frontiers.size(number)):
                if not all(allowed[option, options[two]] for two, allowed in ties):
                    continue
                ahead = float(placing.forward_s[number][option])
                back = float(placing.backward_s[number][option])
                for two, forward, backward in edges:
                    ahead += float(forward[option, options[two]])
                    back += float(backward[option, options[two]])
                late = placing.synchronisation_s[number][option] + np.maximum(0.0, labels.late - back)
                made = _Labels(
                    labels.seconds + ahead + back,
                    late,
                    labels.memory + placing.memory_bytes[number][option],
                    parents,
                    np.full(len(parents), option, dtype=np.int64),
                )
                chosen = {**options, number: option}
                place = tuple(chosen[axis] for axis in kept)
                alive = self._alive(made, number, None if guide is None else float(guide[place]))
                if alive.any():
                    grown.setdefault(place, []).append(_chosen(made, alive))
        merged = {}
        for place, parts in grown.items():
            merged[place], compared = _undominated(_Labels(*map(np.concatenate, zip(*parts, strict=True))), self._comparisons)
            self._comparisons -= compared
        none = np.zeros(0, dtype=np.int64)
        parents = np.concatenate([none, *(labels.parent for labels in merged.values())])
        self._history.append((parents, np.concatenate([none, *(labels.option for labels in merged.values())])))
        return merged

    def _alive(self, labels: _Labels, cut: int, to_go_s: float | None) -> NDArray[np.bool_]:
        """Whether a completion may still fit, and beat the best choice known."""
        limit = self._placing.limit_bytes
        alive: NDArray[np.bool_] = np.all(labels.memory + self._least[cut] <= limit * (1 + TOLERANCE), axis=1)
        if to_go_s is not None:
            prices = self._relaxation.prices
            bound = labels.seconds + labels.memory @ prices + to_go_s - float(prices @ limit)
            alive &= bound <= self._upper
        return alive

    def _trace(self, label: int) -> tuple[int, ...]:
        """The options that led to a label of the last cut, component by component from the first."""
        choice = []
        for parents, options in reversed(self._history):
            choice.append(int(options[label]))
            label = int(parents[label])
        return tuple(choice)


def _chosen(labels: _Labels, which: NDArray[Any]) -> _Labels:
    """Some labels: by mask or by place."""
    return _Labels(*(column[which] for column in labels))


def _undominated(labels: _Labels, most_comparisons: int) -> tuple[_Labels, int]:
    """Without those that another label of the state makes superfluous, sorted by seconds; and how many pairs were compared."""
    if len(labels.seconds) == 1:
        return labels, 0

    order = np.lexsort((labels.late, labels.seconds))
    keep, compared = undominated(labels.seconds[order], labels.late[order], labels.memory[order], most_comparisons)
    return _chosen(labels, order[keep]), int(compared)


# Options that may belong to a best choice: what is left to price once conversions cost nothing.
#
# With c_i(k) the computation and update of component i under option k, no choice takes less than the sum of the c_i(k) that
# it takes: conversions and late sums only add. So with U seconds of one choice that fits, an option with
#
#     c_i(k) + sum of min c_j over all other j  >  U
#
# is in no choice as good as that one. Of most models one option per component is left, and few conversions are to be priced.


SLACK = 1e-9
"""Of the seconds of the known choice: sums in another order differ by rounding."""

Numbers = tuple[tuple[int, ...], ...]
"""By component, numbers of its options, ascending."""


def options_in_reach(
    placing: PlacementProblem,
    hints: Iterable[Sequence[int]],
    converted: Callable[[PlacementProblem], PlacementProblem],
) -> Numbers:
    """The options without which no choice is left out that is as good as every hint; all, where no hint fits.

    Args:
        placing: without conversions. hints: choices, by component the number of its option.
        converted: the problem with conversions, of a part of its options.
    """
    best_s = float("inf")
    for hint in hints:
        if fits(placing, hint):
            alone = converted(placing.restricted([(number,) for number in hint]))
            best_s = min(best_s, step_s(alone, (0,) * len(hint)))
    own_s = [ahead + back for ahead, back in zip(placing.forward_s, placing.backward_s, strict=True)]
    spare_s = best_s * (1 + SLACK) - sum(float(seconds.min()) for seconds in own_s)
    return tuple(tuple(np.flatnonzero(seconds - seconds.min() <= spare_s).tolist()) for seconds in own_s)


def numbers_among(kept: Numbers, choices: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """The choices of which every option is kept, by its number among the kept ones.

    Args:
        kept: by component. choices: by the numbers of all options.
    """
    places = [{number: place for place, number in enumerate(own)} for own in kept]
    numbered = [[own.get(number) for own, number in zip(places, choice, strict=True)] for choice in choices]
    return [tuple(number for number in choice if number is not None) for choice in numbered if None not in choice]
