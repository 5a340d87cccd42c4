"""Which components to recompute so that a rank keeps least between forward and backward, and what each keeps then.

A recomputed component keeps its inputs. One that is not keeps what it saves, which may stand for the inputs of others: a
normalisation that stays as it is keeps one value for two that it reads. So recomputing all components need not keep least.
Components of one kind are treated alike: kind by kind, as long as that keeps less.

Leaves out: fixed bytes, layouts of values between shards. It decides what is tried, never what is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.model.model import Model
from parsim.model.precision import component_in, value_in
from parsim.plans.recompute import BY_OPERATOR, NONE, Recompute
from parsim.predict.planning_problem import PlanningProblem

MOST_KINDS = 24
"""Kinds of components of which more and less recomputation is tried, the most frequent first."""

AS_IT_IS, SOME, WHOLE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastKept:
    """Attributes:
    recompute: of a plan. kept: float64 [n], bytes per sample that each component keeps. whole: bool [n], whether all of its
        forward runs again.
    """

    recompute: Recompute
    kept: Floats
    whole: NDArray[np.bool_]


@dataclass
class _Known:
    """Of one problem."""

    found: LeastKept | None = None


def least_kept(problem: PlanningProblem) -> LeastKept:
    """The choice that keeps least of those that treat components of one kind alike.

    Args:
        problem: model and precision.
    """
    known = problem.remembered(_Known)
    if known.found is None:
        known.found = _found(problem.model, problem.precision)
    return known.found


def _found(model: Model, precision: str) -> LeastKept:
    ledger = _Ledger(model, precision)
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
        self._values: list[tuple[float, list[tuple[int, set[int]]]]] = []
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
            self._values.append((size, sorted(found.items())))

    def kept(self, levels: list[int]) -> Floats:
        """float64 [n], bytes per sample: a value counts with the first component that keeps it."""
        total = np.array([own[level] for own, level in zip(self._own, levels, strict=True)])
        for size, keepers in self._values:
            for number, when in keepers:
                if levels[number] in when:
                    total[number] += size
                    break
        return total
