"""What a program counts with all groups of its loop, from counts with three, five and four.

Every group beyond the third adds the same. So a size grows by equal steps. A list of sizes, one per moment, has one piece more
per group. A piece differs from the one before by equal steps, and what follows the loop by the same step for every group.
The third, fourth and fifth piece show whether that holds. A count with four groups, if there is one, must be what the other two
say it is, entry by entry. Where it does not hold, nothing is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

Item = TypeVar("Item")


def size_with(sizes: Sequence[int], times: int) -> int | None:
    """A size with so many groups.

    Args:
        sizes: with KEPT groups, or the first two of them. times: how many the loop has.
    """
    three, five, *four = sizes
    slope, rest = divmod(five - three, 2)
    return None if rest or any(size != three + slope for size in four) else three + (times - 3) * slope


def moments_with(lists: Sequence[Sequence[int]], times: int) -> list[int] | None:
    """Sizes at all moments of a program with so many groups, in order.

    Args:
        lists: with KEPT groups, or the first two of them. times: how many the loop has.
    """
    three, five, *four = map(list, lists)
    for place, more in _places(three, five):
        before, added, last = three[place - more : place], five[place : place + more], five[place + more : place + 2 * more]
        step, growth = _differences(added, before), _differences(five[place + 2 * more :], three[place:])
        if _differences(last, added) != step or any(size % 2 for size in growth):
            continue
        slope = [size // 2 for size in growth]
        begun, steps, rest = three[:place], list(zip(added, step, strict=True)), list(zip(three[place:], slope, strict=True))
        moments = partial(_moments, begun, steps, rest)
        if all(entry == moments(4) for entry in four):
            return moments(times)
    return None


def _moments(head: list[int], added: list[tuple[int, int]], after: list[tuple[int, int]], groups: int) -> list[int]:
    """With so many groups. `added`, `after`: sizes in the fourth group and behind three, and what each further group adds."""
    inside = [size + number * step for number in range(groups - 3) for size, step in added]
    return [*head, *inside, *(size + (groups - 3) * slope for size, slope in after)]


def items_with(lists: Sequence[Sequence[Item]], times: int) -> list[Item] | None:
    """All items of a program with so many groups, each of which adds the same ones.

    Args:
        lists: with KEPT groups, or the first two of them. times: how many the loop has.
    """
    three, five, *four = map(list, lists)
    for place, more in _places(three, five):
        head, added, tail = three[:place], five[place : place + more], three[place:]
        if five == [*head, *added * 2, *tail] and all(entry == [*head, *added, *tail] for entry in four):
            return [*head, *added * (times - 3), *tail]
    return None


def _places(three: Sequence[Any], five: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Where two groups may have been put in, and what each adds: what is before them is the same, and holds another group."""
    more, rest = divmod(len(five) - len(three), 2)
    if more < 0 or rest:
        return
    same = next((place for place, (one, other) in enumerate(zip(three, five, strict=False)) if one != other), len(three))
    yield from ((place, more) for place in range(same, max(same - more, more) - 1, -1))


def _differences(more: Sequence[int], less: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(more, less, strict=True)]
