"""A few actions of a long pipeline that stand for all of them: the beginning, two of what repeats, and the end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from parsim.plans.pipeline import PIPELINE_ORDERS, Action, few_rounds, in_few_rounds, pipeline_actions

REPEATS = 4
"""Actions of one kind in a row, or in turn with another one, of which the inner two are like all further ones."""


class FewActions(NamedTuple):
    """Attributes:
    actions: of one place, in order. microbatches: by action of the whole order, that of the one among `actions` which
        stands for it: the same phase of the same stage, with the like before and after it.
    """

    actions: tuple[Action, ...]
    microbatches: tuple[int, ...]


@lru_cache(maxsize=1024)
def few_actions(order: str, place: int, ranks: int, microbatches: int, chunks: int) -> FewActions:
    """Fewer actions in which buckets come and go as in all of them.

    Args:
        order: of a pipeline. place: in it. ranks, chunks: of the pipeline. microbatches: per step.
    """
    whole = pipeline_actions(order, place, ranks, microbatches, chunks)
    few = few_rounds(order, ranks, microbatches)
    actions = pipeline_actions(order, place, ranks, few, chunks)
    numbers = [in_few_rounds(order, ranks, microbatches, action.microbatch) for action in whole]
    if chunks > 1 or PIPELINE_ORDERS[order].halves:
        return FewActions(tuple(actions), tuple(numbers))
    standing = _stand_for(actions)
    by_action = {
        (action.phase, action.microbatch): actions[other].microbatch for action, other in zip(actions, standing, strict=True)
    }
    kept = sorted(set(standing))
    return FewActions(
        tuple(actions[number] for number in kept),
        tuple(by_action[action.phase, number] for action, number in zip(whole, numbers, strict=True)),
    )


def _stand_for(actions: Sequence[Action]) -> list[int]:
    """By action the number of the one that stands for it, where the inner ones of many repeats stand for one another."""
    phases = [action.phase for action in actions]
    found: list[int] = []
    while (first := len(found)) < len(phases):
        repeats, period = _repeats(phases, first)
        for repeat in range(repeats):
            inner = REPEATS // 2 <= repeat < repeats - REPEATS // 2
            other = first + (REPEATS // 2 if inner else repeat) * period
            found += range(other, other + period)
    return found


def _repeats(phases: Sequence[object], first: int) -> tuple[int, int]:
    """How often what begins there repeats, and its actions: one, or two in turn. (1, 1) where it repeats too seldom."""
    for period in (1, 2):
        unit, repeats = phases[first : first + period], 1
        while phases[first + repeats * period : first + (repeats + 1) * period] == unit:
            repeats += 1
        if repeats > REPEATS:
            return repeats, period
    return 1, 1
