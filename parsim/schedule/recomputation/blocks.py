"""Runs of components that repeat, as the layers of a transformer do, whatever they are called.

Two components are alike if they do the same work. A model is divided where the longest repetition begins and ends, and what
lies before and behind it again. Blocks are counted from the end of a repetition. The first one may begin with components that
are like no others: the first norm of a transformer has no sum to make.

A repetition may end within a block: the last norm of a transformer is like those of its layers. So blocks can also end with the
component that holds most parameters. A block that runs again does so right before its backward, which begins with its last
component. Under ZeRO 3 the parameters that are gathered for that one serve both, and those of the others are gathered twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from parsim.schedule.cuts import Bounds

LONGEST_BLOCK = 64
"""Components of a repeated block at most."""


def repeated_blocks(prints: Sequence[str], held: Sequence[int] = ()) -> Bounds:
    """The blocks of several components, in order: of each the first component, and one past the last.

    Args:
        prints: of every component, equal for those that are alike.
        held: the parameters of every component; none: a block ends where its repetition does.
    """
    found = _longest_repetition(prints)
    if found is None:
        return ()
    first, last, period = found
    if held:
        last = max(range(last, last - period, -1), key=lambda end: held[end - 1])
    starts = list(range(last, first, -period))
    begin = max(0, starts[-1] - period) if starts[-1] > first else first
    bounds = sorted({begin, *starts})
    before = repeated_blocks(prints[:begin], held[:begin])
    behind = repeated_blocks(prints[last:], held[last:])
    return (*before, *pairwise(bounds), *((one + last, two + last) for one, two in behind))


def _longest_repetition(prints: Sequence[str]) -> tuple[int, int, int] | None:
    """First component, one past the last, and length of the block that is repeated; the shortest block where several do."""
    best: tuple[int, int, int] | None = None
    for period in range(2, min(LONGEST_BLOCK, len(prints) // 2) + 1):
        first = None
        for number in range(len(prints) - period + 1):
            same = number < len(prints) - period and prints[number] == prints[number + period]
            if same and first is None:
                first = number
            if not same and first is not None:
                last = number + period
                if last - first >= 2 * period - 1 and (best is None or last - first > best[1] - best[0]):
                    best = first, last, period
                first = None
    return best
