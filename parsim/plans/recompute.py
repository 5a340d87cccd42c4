"""Which components of a plan are recomputed: they keep only their inputs, and run their forward again before their backward.

"none", "full" (all that have a backward) or their names. A component keeps its inputs as it reads them, so that recomputing
repeats computation alone and no communication.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from parsim.errors import PlanError, near_matches

Recompute = str | tuple[str, ...]

NONE = "none"
FULL = "full"
AUTO: Literal["auto"] = "auto"
"""Of a search, not of a plan: as little as makes a plan fit, and none where it fits without."""


def normalised(recompute: Recompute | Sequence[str], components: Sequence[str]) -> Recompute:
    """The one way to write the choice: names in execution order, "full" for all of them, "none" for no name.

    Raises PlanError for another word, or a name that is no component of the plan.
    """
    if isinstance(recompute, str):
        if recompute not in (NONE, FULL):
            raise PlanError(
                f"recompute = {recompute!r}{near_matches(recompute, (NONE, FULL))}: it is {NONE!r}, {FULL!r} or a list of "
                "component names"
            )
        return recompute
    for name in recompute:
        if name not in components:
            raise PlanError(f"recompute names {name!r}, which is no component of the plan{near_matches(name, components)}")
    chosen = tuple(name for name in components if name in set(recompute))
    return FULL if len(chosen) == len(components) else chosen or NONE


def recomputed_names(recompute: Recompute, components: Sequence[str]) -> frozenset[str]:
    """The components that a normalised choice names."""
    if isinstance(recompute, str):
        return frozenset(components if recompute == FULL else ())
    return frozenset(recompute)
