"""Options that may belong to a best choice: what is left to price once conversions cost nothing.

With c_i(k) the computation and update of component i under option k, no choice takes less than the sum of the c_i(k) that it
takes: conversions and late sums only add. So with U seconds of one choice that fits, an option with

    c_i(k) + sum of min c_j over all other j  >  U

is in no choice as good as that one. Of most models one option per component is left, and few conversions are to be priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from parsim.schedule.placement.objective import fits, step_s
from parsim.schedule.placement.placement_problem import PlacementProblem

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
    """Those choices of which every option is kept, by its number among the kept ones.

    Args:
        kept: by component. choices: by the numbers of all options.
    """
    places = [{number: place for place, number in enumerate(own)} for own in kept]
    found = [[own.get(number) for own, number in zip(places, choice, strict=True)] for choice in choices]
    return [tuple(number for number in choice if number is not None) for choice in found if None not in choice]
