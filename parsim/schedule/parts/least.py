"""What the components of a model take at least on a mesh, whatever the cut into stages, and the memory that no plan saves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from parsim.arrays import Floats
from parsim.errors import ScheduleError
from parsim.plans.mesh import Mesh
from parsim.plans.placement import Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.memory import missing_bytes
from parsim.schedule.options import Prices, device_kinds, placements_of
from parsim.schedule.tensor import MOST_PLACES, uniform_options
from parsim.work import Phase


class LeastSeconds(NamedTuple):
    """Seconds of every component, their sum and the longest; the placements among which they are the least."""

    seconds: Floats
    sum_s: float
    longest_s: float
    options: tuple[tuple[Placement, ...], ...]


@dataclass
class _Known:
    """Of one problem, by prices, kinds of devices, tp, samples and whether placements are mixed."""

    by_shape: dict[tuple[int, tuple[str, ...], int, int, bool], LeastSeconds] = field(default_factory=dict)
    missing: dict[tuple[Mesh, int, bool, tuple[tuple[str, int], ...]], float] = field(default_factory=dict)


def least_seconds(problem: PlanningProblem, mesh: Mesh, count: int, *, mixed: bool) -> LeastSeconds:
    """Per component forward and backward of one microbatch, under the cheapest of its placements on the fastest device.

    Args:
        problem: model, cluster and batch. mesh: of the plans. count: microbatches per replica.
        mixed: whether every component has a placement of its own.
    """
    samples = problem.global_batch // (mesh.dp * count)
    known = problem.remembered(_Known).by_shape
    kinds = device_kinds(problem, mesh.size)
    key = (problem.cost_group(mesh.size), tuple(kinds), mesh.tp, samples, mixed)
    if key not in known:
        prices = Prices(problem=problem, mesh=mesh, samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES)
        seen: dict[object, float] = {}
        found, chosen = [], []
        for component in problem.model.components:
            options = _options(problem, component.name, mesh.tp, samples, mixed=mixed)
            chosen.append(options)
            work = (prices.same_work(component), component.name in prices.differentiable, options)
            if work not in seen:
                seen[work] = min((_mean_s(prices, component.name, option) for option in options), default=0.0)
            found.append(seen[work])
        known[key] = LeastSeconds(np.array(found), sum(found), max(found), tuple(chosen))
    return known[key]


def least_missing_bytes(
    problem: PlanningProblem, mesh: Mesh, count: int, pipeline: Sequence[tuple[str, int]], *, mixed: bool
) -> float:
    """By how much no plan can fit; 0 where some might.

    Args:
        problem, mesh, count, mixed: as `least_seconds` takes them. pipeline: orders, with their stages per rank.
    """
    known = problem.remembered(_Known).missing
    key = (mesh, count, mixed, tuple(pipeline))
    if key not in known:
        known[key] = missing_bytes(problem, mesh, count, least_seconds(problem, mesh, count, mixed=mixed).options, pipeline)
    return known[key]


def _options(problem: PlanningProblem, name: str, tp: int, samples: int, *, mixed: bool) -> tuple[Placement, ...]:
    component = problem.model.component(name)
    if not mixed:
        with contextlib.suppress(ScheduleError):  # said where such a part is opened
            return uniform_options(problem, component, tp, divides=samples % tp == 0)
        return ()
    options = placements_of(component, Mesh(tp=tp), samples, places=places(tp))
    return tuple(option for option in options if problem.allows(name, option))


def _mean_s(prices: Prices, name: str, placement: Placement) -> float:
    """Forward and backward of one microbatch on the fastest device, as the mean over the tp ranks."""
    component = prices.problem.model.component(name)
    phases = (Phase.FORWARD, Phase.BACKWARD) if name in prices.differentiable else (Phase.FORWARD,)
    share = 1 / prices.mesh.tp if placement.kind == "place" else 1.0
    return share * sum(prices.compute_s(component, placement, phase, fastest=True) for phase in phases)


def places(tp: int) -> range | tuple[int]:
    """The tp ranks on which a component may be placed alone."""
    return range(tp) if tp <= MOST_PLACES else (0,)
