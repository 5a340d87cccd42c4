"""The parts of all families of a large problem, one by one: the most promising first, as far as the allowance lasts.

Two families are not searched one after the other, because the first would spend what the better one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parsim.schedule.branch_and_bound import Incumbents, Tally
from parsim.schedule.parts.node import Node
from parsim.schedule.parts.usual import Allowance


def open_one_by_one(
    parts: Mapping[str, list[Node]],
    owners: Mapping[str, Incumbents],
    together: Incumbents,
    spare: Allowance,
    opened: Callable[[str, list[Node], Incumbents], None],
    *,
    rivals: bool,
) -> Tally:
    """Open the parts of all families.

    Args:
        parts: by family. owners: the best plans of each family so far. together: of all families. spare: what may be spent.
        opened: opens parts of a family. rivals: whether a family is left that can no longer be faster than another one.

    Returns:
        What became of the plans of parts that were not opened.
    """
    queue = [(node.promise_s, node.bound_s, name, node) for name, some in parts.items() for node in some]
    left = []
    for _, bound_s, name, node in sorted(queue, key=lambda entry: entry[:2]):
        own = owners[name]
        if own is not together and rivals:
            own.rival_s = together.best_s
        known = bool(own.steps_s) or own.rival_s < float("inf")
        if bound_s >= own.bar_s or not spare.lasts(known=known):
            left.append((bound_s, own, node))
            continue
        opened(name, [node], own)
        if own is not together:
            together.steps_s.update(own.steps_s)
    tally = Tally()
    for bound_s, own, node in left:
        tally.leave([(bound_s, node.size)], own.bar_s)
    return tally
