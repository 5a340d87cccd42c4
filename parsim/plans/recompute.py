"""Which components of a plan are recomputed: they keep only their inputs, and run their forward again before their backward.

"none", "full" (all that have a backward) or their names. A component keeps its inputs as it reads them, so that recomputing
repeats computation alone and no communication. A segment (a run of components, such as a transformer layer) keeps only what
enters it, so its conversions between tensor shards are sent again, as Megatron's full recomputation does.

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


def check_segments(segments: Sequence[Sequence[str]], recompute: Recompute, stages: Sequence[Sequence[str]]) -> None:
    """Check that every segment is a run of consecutive components of one stage, and that no component is recomputed twice.

    Args:
        segments: of a plan. recompute: its normalised choice of components. stages: components of each stage, in order.

    Raises:
        PlanError: the first rule that is broken, with its names.
    """
    if not segments:
        return
    place = {name: (number, index) for number, stage in enumerate(stages) for index, name in enumerate(stage)}
    seen = set(recomputed_names(recompute, tuple(place)))
    for segment in segments:
        for name in segment:
            if name not in place:
                raise PlanError(f"segments name {name!r}, which is no component of the plan{near_matches(name, list(place))}")
            if name in seen:
                raise PlanError(f"{name} would be recomputed twice: it stands in two segments, or in recompute as well")
            seen.add(name)
        stage, first = place[segment[0]] if segment else (0, 0)
        if not segment or [place[name] for name in segment] != [(stage, first + offset) for offset in range(len(segment))]:
            raise PlanError(
                f"a segment is a run of consecutive components of one stage, and {', '.join(segment) or 'an empty one'} is not"
            )
