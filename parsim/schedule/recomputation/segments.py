"""Whole layers recomputed together: what a plan's `segments` may be where the model is cut more finely than its layers.

A segment keeps what enters it alone, and the components within it nothing. So a model at granularity "sublayer" can keep as
little as the same model by blocks. The executor cannot run segments, so they are tried where a problem says so
(`PlanningProblem.segments`) and leaves open what is recomputed.

Leaves out: segments that are no runs of repeated blocks, and plans with segments of several lengths.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from parsim.plans.plan import Plan
from parsim.plans.recompute import AUTO, BY_OPERATOR, NONE
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.recomputation.blocks import repeated_blocks
from parsim.schedule.recomputation.steps import Segments

BLOCKS_TOGETHER = (1, 2, 4)
"""Blocks that are one segment, in the order in which they are tried: longer ones keep less, and are whole for a while."""


@dataclass
class _Known:
    """Of one problem."""

    found: tuple[Segments, ...] | None = None
    back_by: Mapping[str, int] | None = None


def segments_of(problem: PlanningProblem) -> tuple[Segments, ...]:
    """The ways in which a problem's layers may be segments, the shortest first; none where they may not be.

    Args:
        problem: model and what plans may have.
    """
    known = problem.remembered(_Known)
    if known.found is None:
        allowed = problem.segments and problem.recompute == AUTO
        known.found = tuple(_ways(problem)) if allowed else ()
    return known.found


def _ways(problem: PlanningProblem) -> Iterator[Segments]:
    components, backwards = problem.model.components, problem.model.differentiable_components
    blocks = repeated_blocks(problem.model.fingerprints)
    for together in BLOCKS_TOGETHER:
        joined = (blocks[first : first + together] for first in range(0, len(blocks), together))
        names = (tuple(component.name for first, last in some for component in components[first:last]) for some in joined)
        yield tuple(segment for segment in names if sum(name in backwards for name in segment) > 1)


def within_stages(plan: Plan, segments: Segments) -> Segments:
    """Segments cut where the stages of a plan begin; what is left of them of one component is none.

    Args:
        plan: whose stages are meant. segments: of its model.
    """
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.components}
    parts = (tuple(part) for segment in segments for _, part in groupby(segment, key=stage_of.__getitem__))
    return tuple(part for part in parts if len(part) > 1)


def ending_with_most(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The plan with its segments moved back until each ends with the component of its block that holds most parameters.

    Under ZeRO 3 that may hide gathers or not, so it is for the simulator to say.

    Args:
        problem: model. plan: with segments, as `segments_of` begins them.

    Returns:
        None where they end so already, or where the plan recomputes all else by a word. It may hold more, or less.
    """
    shift, model = _back_by(problem), problem.model
    if not any(shift.get(segment[-1]) for segment in plan.segments) or (
        isinstance(plan.recompute, str) and plan.recompute != NONE
    ):
        return None
    moved: list[tuple[str, ...]] = []
    behind = 0
    for segment in plan.segments:
        back = shift.get(segment[-1], 0)
        first, last = (max(behind, model.component_index[name] - back) for name in (segment[0], segment[-1]))
        behind = last + 1
        moved.append(tuple(component.name for component in model.components[first:behind]))
    segments = within_stages(plan, tuple(moved))
    inside = {name for segment in segments for name in segment}
    alone = () if isinstance(plan.recompute, str) else plan.recompute
    kept = tuple(entry for entry in alone if entry.removeprefix(BY_OPERATOR) not in inside)
    return replace(plan, segments=segments, recompute=kept or NONE)


def _back_by(problem: PlanningProblem) -> Mapping[str, int]:
    """By component of a block, how far the block's heaviest component lies before its end."""
    known, components = problem.remembered(_Known), problem.model.components
    if known.back_by is None:
        held = [sum(parameter.elements for parameter in component.parameters) for component in components]
        prints = problem.model.fingerprints
        ends = [end for _, end in repeated_blocks(prints, held)]
        known.back_by = {
            component.name: last - ends[bisect_right(ends, last) - 1] if bisect_right(ends, last) else 0
            for first, last in repeated_blocks(prints)
            for component in components[first:last]
        }
    return known.back_by
