"""Which components to recompute so that a rank keeps least between forward and backward, and what each keeps then.

A recomputed component keeps its inputs. One that is not keeps what it saves, which may stand for the inputs of others: a
normalisation that stays as it is keeps one value for two that it reads. So recomputing all components need not keep least.
Components of one kind are treated alike: kind by kind, as long as that keeps less. Components of a segment keep what enters it.

Leaves out: fixed bytes, layouts of values between shards. It decides what is tried, never what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.model.model import Model
from parsim.model.precision import component_in, value_in
from parsim.plans.recompute import BY_OPERATOR, NONE, Recompute
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.recomputation.segments import segments_of
from parsim.schedule.recomputation.steps import Segments

MOST_KINDS = 24
"""Kinds of components of which more and less recomputation is tried, the most frequent first."""

AS_IT_IS, SOME, WHOLE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastKept:
    """Attributes:
    recompute, segments: of a plan, of which stages may cut segments in two.
    kept: float64 [n], bytes per sample that each component keeps. whole: bool [n], whether all of its forward runs again.
    """

    recompute: Recompute
    kept: Floats
    whole: NDArray[np.bool_]
    segments: Segments = ()


@dataclass
class _Known:
    """Of one problem."""

    alone: LeastKept | None = None
    together: tuple[LeastKept, ...] | None = None


def least_kept(problem: PlanningProblem) -> LeastKept:
    """The choice that keeps least of those that treat components of one kind alike, without segments.

    Args:
        problem: model and precision.
    """
    known = problem.remembered(_Known)
    if known.alone is None:
        known.alone = _found(problem.model, _Ledger(problem.model, problem.precision))
    return known.alone


def kept_together(problem: PlanningProblem) -> tuple[LeastKept, ...]:
    """The same with layers as segments, the shortest segments first; none where a problem has no segments.

    Args:
        problem: model, precision and what plans may have.
    """
    known = problem.remembered(_Known)
    if known.together is None:
        ways = segments_of(problem)
        ledger = _Ledger(problem.model, problem.precision) if ways else None
        known.together = tuple(_together(problem, ledger, segments) for segments in ways) if ledger is not None else ()
    return known.together


def tightest(problem: PlanningProblem) -> LeastKept:
    """What keeps least: single components, or segments of one block, which are hardly more than these while they are whole.

    Args:
        problem: model, precision and what plans may have.
    """
    return min([least_kept(problem), *kept_together(problem)[:1]], key=lambda way: float(way.kept.sum()))


def _together(problem: PlanningProblem, ledger: _Ledger, segments: Segments) -> LeastKept:
    """Layers as segments, and all else as it keeps least alone."""
    alone, names = least_kept(problem), problem.model.component_index
    number_of = {name: number for number, segment in enumerate(segments) for name in segment}
    entries = () if alone.recompute == NONE else alone.recompute
    levels = dict.fromkeys(names, AS_IT_IS)
    rest = [entry for entry in entries if entry.removeprefix(BY_OPERATOR) not in number_of]
    levels |= {entry.removeprefix(BY_OPERATOR): SOME if entry.startswith(BY_OPERATOR) else WHOLE for entry in rest}
    backwards = problem.model.differentiable_components
    levels |= {name: WHOLE for name in number_of if name in backwards}
    own = list(levels.values())
    return LeastKept(
        recompute=tuple(rest) or NONE,
        kept=ledger.kept(own, [number_of.get(name, -1) for name in names]),
        whole=np.array(own) == WHOLE,
        segments=segments,
    )


def _found(model: Model, ledger: _Ledger) -> LeastKept:
    backwards = model.differentiable_components
    kinds: dict[str, list[int]] = {}
    for number, component in enumerate(model.components):
        if component.name in backwards:
            kinds.setdefault(component.fingerprint, []).append(number)
    levels = [WHOLE if component.name in backwards else AS_IT_IS for component in model.components]
    least = ledger.kept(levels).sum()
    frequent = Counter({kind: len(numbers) for kind, numbers in kinds.items()}).most_common(MOST_KINDS)
    for kind, _ in frequent:
        numbers = kinds[kind]
        ways = (AS_IT_IS, SOME) if model.components[numbers[0]].selective is not None else (AS_IT_IS,)
        for level in ways:
            tried = list(levels)
            for number in numbers:
                tried[number] = level
            if (total := ledger.kept(tried).sum()) < least:
                least, levels = total, tried
    entries = tuple(
        component.name if level == WHOLE else BY_OPERATOR + component.name
        for component, level in zip(model.components, levels, strict=True)
        if level != AS_IT_IS
    )
    return LeastKept(recompute=entries or NONE, kept=ledger.kept(levels), whole=np.array(levels) == WHOLE)


class _Ledger:
    """By value the components that may keep it and when, by component what it keeps beside values."""

    def __init__(self, model: Model, precision: str) -> None:
        order = model.component_index
        components = [component_in(component, precision) for component in model.components]
        self._own = [
            (float(one.saved_activation_bytes), float(one.selective.kept[0]) if one.selective else 0.0, 0.0)
            for one in components
        ]
        keepers: dict[str, dict[int, set[int]]] = {}
        for number, component in enumerate(components):
            for name in dict.fromkeys(component.inputs):
                keepers.setdefault(name, {}).setdefault(number, set()).add(WHOLE)
            for name in component.selective.values if component.selective else ():
                keepers.setdefault(name, {}).setdefault(number, set()).add(SOME)
        self._values: list[tuple[float, int, list[tuple[int, set[int]]]]] = []
        for value in (value_in(value, precision) for value in model.values):
            savers = sorted(order[name] for name in value.savers or ())
            size = float(value.bytes_per_sample)
            if savers:
                saved, some, whole = self._own[savers[0]]
                self._own[savers[0]] = max(0.0, saved - size), some, whole
            if value.producer is None:
                continue
            found = keepers.get(value.name, {})
            for number in savers:
                found.setdefault(number, set()).add(AS_IT_IS)
            self._values.append((size, order[value.producer], sorted(found.items())))

    def kept(self, levels: list[int], segments: Sequence[int] = ()) -> Floats:
        """float64 [n], bytes per sample: a value counts with the first component that keeps it.

        Args:
            levels: by component. segments: by component the number of its segment, -1 for none.
        """
        total = np.array([own[level] for own, level in zip(self._own, levels, strict=True)])
        for size, maker, keepers in self._values:
            for number, when in keepers:
                remade = segments and segments[number] >= 0 and segments[number] == segments[maker]
                if levels[number] in when and not remade:
                    total[number] += size
                    break
        return total
