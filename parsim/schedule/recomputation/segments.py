"""Whole layers recomputed together: what a plan's `segments` may be where the model is cut more finely than its layers.

A segment keeps what enters it alone, and the components within it nothing. So a model at granularity "sublayer" can keep as
little as the same model by blocks. The executor cannot run segments, so they are tried where a problem says so
(`PlanningProblem.segments`) and leaves open what is recomputed.

Leaves out: segments that are no runs of repeated blocks, and plans with segments of several lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from parsim.plans.plan import Plan
from parsim.plans.recompute import AUTO
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.recomputation.blocks import repeated_blocks
from parsim.schedule.recomputation.steps import Segments

BLOCKS_TOGETHER = (1, 2, 4)
"""Blocks that are one segment, in the order in which they are tried: longer ones keep less, and are whole for a while."""


@dataclass
class _Known:
    """Of one problem."""

    found: tuple[Segments, ...] | None = None


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
