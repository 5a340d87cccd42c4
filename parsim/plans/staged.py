"""Components of a model as the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import rank_of_stage
from parsim.plans.placement import Placement
from parsim.plans.plan import Plan, Stage


def even_cuts(components: int, stages: int) -> list[int]:
    """Where stages of as equal a number of components as can be begin, and where the last one ends.

    Args:
        components, stages: how many.
    """
    return [round(components * number / stages) for number in range(stages + 1)]


def even_parts(names: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """The names in order, cut by `even_cuts`.

    Args:
        names: of components. stages: how many parts.
    """
    return [tuple(names[first:last]) for first, last in pairwise(even_cuts(len(names), stages))]


def stages_of(
    mesh: Mesh,
    parts: Iterable[Sequence[str]],
    placement: Callable[[str], Placement] | None = None,
    *,
    order: str = "1f1b",
    chunks: int = 1,
) -> tuple[Stage, ...]:
    """Each part on the ranks of its place in the pipeline.

    Args:
        mesh: of the plan. parts: names of components by stage. placement: of a component by name; None: none is given.
        order, chunks: of the pipeline, which places the stages.

    Raises:
        PlanError: the order gives ranks different numbers of stages.
    """
    places = rank_of_stage(order, mesh.pp, chunks)
    return tuple(
        Stage(
            components=tuple(names),
            ranks=mesh.stage_ranks(places[number]),
            placements=() if placement is None else tuple(placement(name) for name in names),
        )
        for number, names in enumerate(parts)
    )


WHOLE = ("replicate", "place")
"""Kinds of placement under which a rank does all of a component or nothing."""


def without_idle_ranks(plan: Plan) -> Plan:
    """The plan on tp = 1 where its tp axis divides nothing: every stage is on one tp rank, or every rank does all of it.

    Args:
        plan: of any placements. With ZeRO the axis divides the states, so the plan stays as it is.
    """
    placed = [{placement for _, placement in stage.placed()} for stage in plan.stages]
    if plan.mesh.tp == 1 or plan.zero_stage or any(len(own) > 1 or next(iter(own)).kind not in WHOLE for own in placed):
        return plan
    mesh = replace(plan.mesh, tp=1)
    parts = [stage.components for stage in plan.stages]
    return replace(plan, mesh=mesh, stages=stages_of(mesh, parts, order=plan.pipeline_order, chunks=plan.chunks))
