"""What properties ask of the search, and what they draw: small problems of many kinds, one answer each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from experiments.search.problems import GIB, ClusterDraw, ProblemDraw, random_problem
from parsim.plans.layouts import BATCH
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan
from parsim.predict.evaluate import Evaluation
from parsim.predict.problem import PlanningProblem
from parsim.search.search import Search, search

CLOSE = 1e-9
"""Two steps are equal up to this share."""

Check = Callable[[ProblemDraw, Random], int]
"""A property of one problem. Returns how many comparisons it made: 0 where the problem has nothing to compare.

Raises AssertionError where the property does not hold.
"""

SHAPES = (
    (1, 3, (4, 6)),
    (2, 1, (4, 8)),
    (2, 2, (2, 4, 6)),
    (2, 2, (8,)),
    (2, 3, (2,)),
    (3, 1, (3, 6, 12)),
    (3, 2, (3,)),
    (4, 1, (2, 4)),
    (4, 1, (6,)),
)
"""Most devices (at least two, where these are not one), most components beside the loss, batches. A problem of four devices
and three components takes up to 15 CPU-seconds: its search opens as many late parts as it may."""

TINY = ((2, 1, (2, 4)), (3, 1, (3,)), (2, 2, (2,)))
"""For a check at every change."""

HUNGRY = 0.5
"""Share of the problems of two components whose activations are large beside everything else. With three components such a
problem takes up to 10 CPU-seconds: the memory of every recomputed set of thousands of plans."""

Shape = tuple[int, int, tuple[int, ...]]


@dataclass
class Seen:
    """What the searches of one property answered.

    Attributes: searches: how many. untried: of how many plans were left "not tried". infeasible: nothing fitted.
        used: of the chosen plans, how many use a feature.
    """

    searches: int = 0
    untried: int = 0
    infeasible: int = 0
    used: Counter[str] = field(default_factory=Counter)

    def add(self, problem: PlanningProblem, found: Search) -> None:
        """Count one answer."""
        self.searches += 1
        self.untried += found.tally.untried > 0
        self.infeasible += found.chosen is None
        if found.chosen is not None:
            self.used.update(features(problem, found.chosen.result.plan))


SEEN: ContextVar[Seen | None] = ContextVar("SEEN", default=None)
"""Where `answered` counts, within `counting.counted`."""


def drawn(random: Random, shape: Shape) -> ProblemDraw:
    """A problem of a shape."""
    devices, components, batches = shape
    draw = random_problem(random, most_devices=devices, most_components=components, batches=batches)
    if devices > 1 and draw.cluster.nodes * len(draw.cluster.kinds) == 1:
        draw = on(draw, kinds=draw.cluster.kinds * 2)
    several = len(draw.model.flop) == 2
    return hungry(draw, random.choice((0.9, 0.75, 0.6))) if several and random.random() < HUNGRY else draw


def hungry(draw: ProblemDraw, share: float) -> ProblemDraw:
    """The same, but a sample keeps 4 GiB, alike in all components, and devices have room for the weights and a `share` of that.

    So microbatches cannot be small enough: components are recomputed, or divided over devices. There are two or more, since one
    that runs again is whole for a while.
    """
    model = draw.model
    saved = (4 * GIB // len(model.flop),) * len(model.flop)
    memory = 16 * sum(model.elements) + GIB // 2 + int(share * 4 * GIB)
    return on(replace(draw, model=replace(model, saved_bytes=saved)), memory_bytes=(memory, int(1.25 * memory)))


def on(draw: ProblemDraw, **changes: Any) -> ProblemDraw:
    """The same problem on a changed cluster."""
    cluster: ClusterDraw = replace(draw.cluster, **changes)
    return replace(draw, cluster=cluster)


def answered(problem: PlanningProblem, strategies: tuple[str, ...] = ("adaptive",), *, top: int | None = None) -> Search:
    """The search's answer, without intervals. Raises ScheduleError where the strategies have no plan."""
    found = search(problem, strategies, samples=0, top=top)
    seen = SEEN.get()
    if seen is not None:
        seen.add(problem, found)
    return found


def chosen_of(problem: PlanningProblem) -> Evaluation | None:
    """What is chosen, None where nothing fits."""
    return answered(problem).chosen


def best_s(problem: PlanningProblem) -> float:
    """The step of what is chosen; infinite where nothing fits."""
    chosen = chosen_of(problem)
    return float("inf") if chosen is None else chosen.result.step_s.median


def features(problem: PlanningProblem, plan: Plan) -> list[str]:
    """What a plan makes use of, of all that a search is free to choose."""
    placed = [[placement for _, placement in stage.placed()] for stage in plan.stages]
    every = [placement for stage in placed for placement in stage] if plan.mesh.tp > 1 else []
    sizes = {len(stage.components) for stage in plan.stages}
    has = {
        "ZeRO 1": plan.zero_stage == 1,
        "ZeRO 2": plan.zero_stage == 2,
        "ZeRO 3": plan.zero_stage == 3,
        "recomputation": bool(plan.recomputed or plan.recomputed_by_operator),
        "microbatches": plan.microbatches > 1,
        "other buckets": plan.bucket_bytes != DEFAULT_BUCKET_BYTES,
        "gpipe": plan.mesh.pp > 1 and plan.pipeline_order == "gpipe",
        "chunks": plan.chunks > 1,
        "dp": plan.mesh.dp > 1,
        "tp": plan.mesh.tp > 1,
        "pp": plan.mesh.pp > 1,
        "shards": any(placement.kind == "shard" for placement in every),
        "one device": any(placement.kind == "place" for placement in every),
        "mixed": plan.mesh.tp > 1 and any(len(set(stage)) > 1 for stage in placed) and any(each != BATCH for each in every),
        "uneven stages": len(sizes) > 1,
        "idle devices": plan.world_size < problem.cluster.size,
    }
    return [name for name, holds in has.items() if holds]
