"""Exact placement by dynamic programming: labels over frontiers, from the last component to the first.

In this order the late gradient sums need one number: after component i they outlast its backward by
F_i = sync_i + max(0, F_{i+1} - backward_i). A label is (seconds so far, F, bytes per tp rank) for one set of options of the
components that earlier ones still refer to. One label dominates another if it uses no more memory anywhere and its seconds,
plus the amount by which its F is larger, are no more. A label is dropped as soon as no completion can beat the best choice
known, by the Lagrangian bound of `parsim.schedule.placement.relaxation`. Where no choice that fits is known, a linear program
over divided components tells first whether any can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from parsim.arrays import Floats
from parsim.schedule.placement.objective import Solution, fits, step_s, why_infeasible
from parsim.schedule.placement.placement_problem import PlacementProblem
from parsim.schedule.placement.relaxation import Frontiers, Relaxation

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
    placing: PlacementProblem, *, hints: Iterable[Sequence[int]] = (), most_labels: int = MOST_LABELS
) -> Solution:
    """The choice with the shortest step that fits, proven; "feasible" with its bound if that takes too many labels.

    Args:
        placing: the problem. most_labels: kept at once.
        hints: known choices to start from (the uniform ones); those that do not fit are ignored.

    Returns:
        A Solution. Leaves out what `PlacementProblem` leaves out: pipelines, and overlap of conversions with computation.
    """
    frontiers = Frontiers(_with_distinct_ranks(placing))
    placing = frontiers.placing
    best, relaxation = _bounds(frontiers, hints)
    if relaxation.value == np.inf:
        return _infeasible(placing)
    if best is not None and best[0] - relaxation.value <= TOLERANCE * abs(best[0]):
        return Solution(choice=best[1], seconds=best[0], lower_bound_s=relaxation.value, status="optimal")
    if best is None and not _parts_fit(placing):
        return _infeasible(placing)
    search = _Search(frontiers, relaxation, best[0] if best is not None else np.inf, most_labels)
    found = search.run()
    if found is not None and (best is None or found[0] < best[0]):
        best = found
    if search.gave_up:
        if best is None:
            return Solution(
                choice=(),
                seconds=np.inf,
                lower_bound_s=relaxation.value,
                status="inaccurate",
                reason="the search was left before any choice that fits was found",
            )
        return Solution(choice=best[1], seconds=best[0], lower_bound_s=relaxation.value, status="feasible")
    if best is None:
        return _infeasible(placing)
    return Solution(choice=best[1], seconds=best[0], lower_bound_s=best[0], status="optimal")


def _infeasible(placing: PlacementProblem) -> Solution:
    return Solution(choice=(), seconds=np.inf, lower_bound_s=np.inf, status="infeasible", reason=why_infeasible(placing))


def _parts_fit(placing: PlacementProblem) -> bool:
    """Whether the memory would do if components could be divided among their options: where it would not, no choice fits."""
    sizes = [len(options) for options in placing.options]
    scale = np.maximum(placing.limit_bytes, 1.0)
    used = np.concatenate(placing.memory_bytes, axis=0).T / scale[:, None]
    once = np.zeros((len(sizes), sum(sizes)))
    once[np.repeat(np.arange(len(sizes)), sizes), np.arange(sum(sizes))] = 1.0
    room = placing.limit_bytes / scale + PARTS_SLACK
    found = linprog(np.zeros(sum(sizes)), A_ub=used, b_ub=room, A_eq=once, b_eq=np.ones(len(sizes)), method="highs")
    return int(found.status) != 2  # 2: infeasible, as HiGHS proved


def _with_distinct_ranks(placing: PlacementProblem) -> PlacementProblem:
    """Tp ranks that need the same memory under every option are one constraint: the one with the lowest limit."""
    columns = np.concatenate(placing.memory_bytes, axis=0).T
    order = np.argsort(placing.limit_bytes, kind="stable")
    seen: dict[bytes, int] = {}
    for rank in order.tolist():
        seen.setdefault(columns[rank].tobytes(), rank)
    keep = sorted(seen.values())
    if len(keep) == len(placing.limit_bytes):
        return placing
    return PlacementProblem(
        components=placing.components,
        options=placing.options,
        forward_s=placing.forward_s,
        backward_s=placing.backward_s,
        synchronisation_s=placing.synchronisation_s,
        conversion_s=placing.conversion_s,
        memory_bytes=tuple(own[:, keep] for own in placing.memory_bytes),
        limit_bytes=placing.limit_bytes[keep],
        allowed=placing.allowed,
    )


def _bounds(frontiers: Frontiers, hints: Iterable[Sequence[int]]) -> tuple[tuple[float, tuple[int, ...]] | None, Relaxation]:
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
        used = sum((own[option] for own, option in zip(placing.memory_bytes, choice, strict=True)), np.zeros_like(scale))
        over = (used - placing.limit_bytes) / scale
        if np.all(over <= 0) and not prices.any():
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
    if best is not None and best[0] - tightest.value > TOLERANCE * abs(best[0]):
        best = _improve(placing, best)
    return best, tightest


def _improve(placing: PlacementProblem, best: tuple[float, tuple[int, ...]]) -> tuple[float, tuple[int, ...]]:
    """Change one component at a time as long as that helps."""
    seconds, choice = best
    changed = True
    rounds = 0
    while changed and rounds < 3:
        changed, rounds = False, rounds + 1
        for number, options in enumerate(placing.options):
            for option in range(len(options)):
                if option == choice[number]:
                    continue
                other = (*choice[:number], option, *choice[number + 1 :])
                trial = step_s(placing, other)
                if trial < seconds * (1 - TOLERANCE) and fits(placing, other):
                    seconds, choice, changed = trial, other, True
    return seconds, choice


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
        self._least = self._least_memory()
        self.gave_up = False

    def _least_memory(self) -> Floats:
        """[i]: what the components before i need at least, per constraint."""
        own = np.array([entry.min(axis=0) for entry in self._placing.memory_bytes])
        return np.concatenate([np.zeros((1, own.shape[1])), np.cumsum(own, axis=0)])

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
            merged[place], compared = _undominated(_joined(parts), self._comparisons)
            self._comparisons -= compared
        self._history.append(
            (
                np.concatenate([labels.parent for labels in merged.values()]) if merged else np.zeros(0, dtype=np.int64),
                np.concatenate([labels.option for labels in merged.values()]) if merged else np.zeros(0, dtype=np.int64),
            )
        )
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
    return _Labels(labels.seconds[which], labels.late[which], labels.memory[which], labels.parent[which], labels.option[which])


def _joined(parts: Sequence[_Labels]) -> _Labels:
    return _Labels(
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.late for part in parts]),
        np.concatenate([part.memory for part in parts]),
        np.concatenate([part.parent for part in parts]),
        np.concatenate([part.option for part in parts]),
    )


def _undominated(labels: _Labels, most_comparisons: int) -> tuple[_Labels, int]:
    """Without those that another label of the state makes superfluous, sorted by seconds; and how many pairs were compared."""
    if len(labels.seconds) == 1:
        return labels, 0
    from parsim.schedule.placement.dominance import undominated

    order = np.lexsort((labels.late, labels.seconds))
    keep, compared = undominated(labels.seconds[order], labels.late[order], labels.memory[order], most_comparisons)
    return _chosen(labels, order[keep]), int(compared)
