"""Which components of a plan are recomputed: they keep only their inputs, and run their forward again before their backward.

"none", "full" (all that have a backward), "selective" (all by operator) or a list. An entry of a list is a component's name, or
"selective:NAME" for a component by operator. A component keeps its inputs as it reads them, so that recomputing repeats
computation alone and no communication. By operator it also keeps the outputs that are dear to compute, and runs the rest again
(`parsim.model.autograd.kept_calls`). A component that would keep no less so stays as it is. A segment (a run of components,
such as a transformer layer) keeps only what enters it, so its conversions between tensor shards are sent again, as Megatron's
full recomputation does.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from parsim.errors import PlanError, near_matches

Recompute = str | tuple[str, ...]

NONE = "none"
FULL = "full"
SELECTIVE = "selective"
BY_OPERATOR = f"{SELECTIVE}:"
"""Begins an entry of a list that means a component by operator."""
AUTO: Literal["auto"] = "auto"
"""Of a search, not of a plan: as little as makes a plan fit, and none where it fits without."""


def normalised(recompute: Recompute | Sequence[str], components: Sequence[str]) -> Recompute:
    """The one way to write the choice: names in execution order, a word where it means all or none of them.

    Raises PlanError for another word, a name that is not a component of the plan, or one that is recomputed in both ways.
    """
    if isinstance(recompute, str):
        if recompute not in WORDS:
            raise PlanError(
                f"recompute = {recompute!r}{near_matches(recompute, WORDS)}: it is {', '.join(map(repr, WORDS))} or a list of "
                f'component names ("{BY_OPERATOR}NAME" for one by operator)'
            )
        return recompute
    given = set(recompute)
    for entry in given:
        name = entry.removeprefix(BY_OPERATOR)
        if name not in components:
            raise PlanError(f"recompute names {name!r}, which is not a component of the plan{near_matches(name, components)}")
        if entry != name and name in given:
            raise PlanError(f"recompute names {name!r} and {entry!r}: a component is recomputed in one way; drop one of them")
    chosen = tuple(entry for name in components for entry in (name, BY_OPERATOR + name) if entry in given)
    if len(chosen) == len(components):
        for word, begins in ((FULL, False), (SELECTIVE, True)):
            if all(entry.startswith(BY_OPERATOR) == begins for entry in chosen):
                return word
    return chosen or NONE


WORDS = (NONE, SELECTIVE, FULL)


def recomputed_names(recompute: Recompute, components: Sequence[str]) -> frozenset[str]:
    """The components that a normalised choice names whole."""
    if isinstance(recompute, str):
        return frozenset(components if recompute == FULL else ())
    return frozenset(entry for entry in recompute if not entry.startswith(BY_OPERATOR))


def names_by_operator(recompute: Recompute, components: Sequence[str]) -> frozenset[str]:
    """The components that a normalised choice names by operator."""
    if isinstance(recompute, str):
        return frozenset(components if recompute == SELECTIVE else ())
    return frozenset(entry.removeprefix(BY_OPERATOR) for entry in recompute if entry.startswith(BY_OPERATOR))


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
    if recompute != SELECTIVE:  # which leaves out what segments recompute
        seen |= names_by_operator(recompute, tuple(place))
    for segment in segments:
        for name in segment:
            if name not in place:
                raise PlanError(
                    f"segments name {name!r}, which is not a component of the plan{near_matches(name, list(place))}"
                )
            if name in seen:
                raise PlanError(f"{name} would be recomputed twice: it is in two segments, or in recompute as well")
            seen.add(name)
        stage, first = place[segment[0]] if segment else (0, 0)
        if not segment or [place[name] for name in segment] != [(stage, first + offset) for offset in range(len(segment))]:
            raise PlanError(
                f"a segment is a run of consecutive components of one stage, and {', '.join(segment) or 'an empty one'} is not"
            )
