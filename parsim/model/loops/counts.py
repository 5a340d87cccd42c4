"""What a program counts with all groups of its loop, from counts with three, four and five.

Every group beyond the third adds the same. So a size grows by equal steps. A list of sizes, one per moment, has one piece more
per group. A piece differs from the one before by equal steps, and what follows the loop by the same step for every group.
Three counts show whether that holds: two of them say what the third is, entry by entry. Where it does not, nothing is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def size_with(sizes: Sequence[int], times: int) -> int | None:
    """A size with so many groups.

    Args:
        sizes: with KEPT groups. times: how many the loop has.
    """
    three, four, five = sizes
    return three + (times - 3) * (four - three) if five - four == four - three else None


def moments_with(lists: Sequence[Sequence[int]], times: int) -> list[int] | None:
    """Sizes at all moments of a program with so many groups, in order.

    Args:
        lists: with KEPT groups. times: how many the loop has.
    """
    three, four, five = map(list, lists)
    more = len(four) - len(three)
    if more < 0 or len(five) - len(four) != more:
        return None
    for place in _places(three, four, more):
        before, added, next_added = (
            three[place - more : place],
            four[place : place + more],
            five[place + more : place + 2 * more],
        )
        ends = three[place:], four[place + more :], five[place + 2 * more :]
        step, slope = _differences(added, before), _differences(ends[1], ends[0])
        if five[: place + more] != four[: place + more]:
            continue
        if _differences(next_added, added) == step and _differences(ends[2], ends[1]) == slope:
            groups = [size + number * growth for number in range(times - 3) for size, growth in zip(added, step, strict=True)]
            after = [size + (times - 3) * growth for size, growth in zip(ends[0], slope, strict=True)]
            return [*three[:place], *groups, *after]
    return None


def items_with(lists: Sequence[Sequence[Item]], times: int) -> list[Item] | None:
    """All items of a program with so many groups, each of which adds the same ones.

    Args:
        lists: with KEPT groups. times: how many the loop has.
    """
    three, four, five = map(list, lists)
    more = len(four) - len(three)
    for place in _places(three, four, more) if more >= 0 else ():
        added, after = four[place : place + more], three[place:]
        if four[place + more :] == after and five == [*three[:place], *added, *added, *after]:
            return [*three[:place], *added * (times - 3), *after]
    return None


def _places(three: Sequence[Any], four: Sequence[Any], more: int) -> range:
    """Where the fourth group may have been put in: what is before it is the same, and holds another group."""
    same = next((place for place, (one, other) in enumerate(zip(three, four, strict=False)) if one != other), len(three))
    return range(same, max(same - more, more) - 1, -1)


def _differences(more: Sequence[int], less: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(more, less, strict=True)]
