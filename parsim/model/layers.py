"""Layers: runs of components that repeat, whatever they are called.

Two components are alike if they do the same work. A model is divided where the longest repetition begins and ends, and what
lies before and behind it again. A layer begins where least enters it: in a transformer before the first norm, where the
stream alone does, and not behind it, where what the norm has made does too. The last norm is like those of layers, and the
first layer may begin with a component that is like no other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from parsim.model.model import Model
from parsim.records import once

LAYER = re.compile(r"h\.(\d+)(?:\.|$)")
"""The name of a component in a layer of a transformer by name."""

Runs = tuple[tuple[int, int], ...]
"""Of each its first component, and one past its last."""


@once
def layers_of(model: Model) -> Runs:
    """The layers of several components, in order; none of a model whose layers are components."""
    changes = [0] * (len(model.components) + 1)
    for value in model.values:
        if value.producer is not None and (readers := model.readers[value.name]):
            size = value.bytes_per_sample
            changes[model.component_index[value.producer] + 1] += size
            changes[model.component_index[readers[-1]] + 1] -= size
    prints = model.fingerprints
    found = repeated_blocks(prints, list(accumulate(changes)))
    return tuple((first, last) for first, last in found if len(set(prints[first:last])) > 1)


def all_layers_of(model: Model) -> Runs:
    """The layers, in order: by their names in a transformer by name; else runs of components that repeat, or components that
    are like one beside them."""
    numbers = [named[1] if (named := LAYER.match(component.name)) else "" for component in model.components]
    if any(numbers):
        ends = list(accumulate(len(list(run)) for _, run in groupby(numbers)))
        return tuple((first, last) for first, last in pairwise((0, *ends)) if numbers[first])
    if several := layers_of(model):
        return several
    prints = ("", *model.fingerprints, "")
    neighbours = enumerate(zip(prints, prints[1:], prints[2:], strict=False))
    return tuple((number, number + 1) for number, (before, own, behind) in neighbours if own in (before, behind))


LONGEST_LAYER = 64
"""Components of a repeated block at most."""


def repeated_blocks(prints: Sequence[str], entering: Sequence[int] = ()) -> Runs:
    """The blocks of several components, in order: of each the first component, and one past the last.

    Args:
        prints: of every component, equal for those that are alike.
        entering: by component the bytes per sample that enter it and those behind it from those before; none: alike for all.
    """
    found = _longest_repetition(prints)
    if found is None:
        return ()
    first, last, period = found
    entering = entering or [0] * len(prints)
    last = max(range(last - period + 1, last + 1), key=lambda end: (-sum(entering[end - period : first : -period]), end))
    starts = list(range(last, first, -period))
    begin = max(0, starts[-1] - period) if starts[-1] > first else first
    bounds = sorted({begin, *starts})
    before = repeated_blocks(prints[:begin], entering[:begin])
    behind = repeated_blocks(prints[last:], entering[last:])
    return (*before, *pairwise(bounds), *((one + last, two + last) for one, two in behind))


def _longest_repetition(prints: Sequence[str]) -> tuple[int, int, int] | None:
    """First component, one past the last, and length of the block that is repeated; the shortest block where several do."""
    best: tuple[int, int, int] | None = None
    for period in range(2, min(LONGEST_LAYER, len(prints) // 2) + 1):
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
