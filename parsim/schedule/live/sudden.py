"""A change so large that a few steps show it.

Waiting for two windows is right for a change that noise could feign. One that makes communication twenty times as long is as
certain after three steps, and every step that passes before the answer costs what the change costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from parsim.costs.feedback.run_corrections import ClassSeconds, CommunicationClass, learn

FactorKey = int | CommunicationClass
"""A rank's computation, or a class of communication."""


class StepsInARow(NamedTuple):
    """The latest |steps| steps in a row, all beyond the limit on one side (steps > 0: slower). `mean`: of their factors."""

    steps: int
    mean: float


def after_steps(
    runs: Mapping[FactorKey, StepsInARow],
    steps: Sequence[ClassSeconds],
    expected: ClassSeconds,
    weighty: Set[FactorKey],
    before: Callable[[FactorKey], float],
    limit: float,
) -> dict[FactorKey, StepsInARow]:
    """The runs after some more steps; a factor whose last step was within the limit has none.

    Args:
        runs: before these steps. steps: seconds by class of each. expected: the profile's seconds by class.
        weighty: the factors that can matter. before: what a factor is compared with.
        limit: above 1; a step is beyond it with at least `limit` times the factor before, or at most 1 / `limit` of it.
    """
    found = {key: run for key, run in runs.items() if key in weighty}
    for step in steps:
        factors = learn(step, expected).factors()
        for key in weighty:
            factor = factors.get(key)
            if factor is None:
                continue
            side = 1 if factor >= limit * before(key) else -1 if factor * limit <= before(key) else 0
            run = found.pop(key, None)
            if side:
                going_on = run is not None and run.steps * side > 0
                count, mean = (run.steps, run.mean) if run is not None and going_on else (0, 0.0)
                found[key] = StepsInARow(count + side, mean + (factor - mean) / (abs(count) + 1))
    return found
