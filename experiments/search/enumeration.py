"""Every plan of a tiny problem, and the fastest of them that fits: the oracle of a search.

Enumerated are all meshes over the first w devices, all cuts into stages, pipeline orders and numbers of microbatches. So are
placements of every component, ZeRO stages, sets of recomputed components, and bucket sizes that make different buckets. Each is
simulated as `evaluate` does, unless its computation alone takes longer than the best plan known so far.

Leaves out: zero-bubble orders, which a search does not propose, and more than two chunks per rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parsim.costs.estimate import medians_s
from parsim.engines.program import mean_step_s
from parsim.errors import CostError, PlanError
from parsim.model.component import Component
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, NONE, Plan, check_plan
from parsim.plans.stages import stages_of
from parsim.predict.evaluate import REPEATED_STEPS, simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.program.passes.gradients import DP_STREAM
from parsim.work import Compute, OptimizerStep, Phase

ORDERS = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2))
CLOSE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is free; everything else is as given.

    Attributes:
        zero_stages: to try. recompute: whether any set of components may be recomputed, else none is.
        fewer_devices: whether plans may leave devices idle; else only those on one device and on all of them.
        any_buckets: every bucket size that makes different buckets; else `bucket_bytes` alone.
    """

    zero_stages: tuple[int, ...] = (0,)
    recompute: bool = False
    fewer_devices: bool = True
    any_buckets: bool = True
    bucket_bytes: tuple[int, ...] = (DEFAULT_BUCKET_BYTES,)


@dataclass(kw_only=True)
class Found:
    """Attributes:
    best: the fastest plan that fits, None where none does. seconds: its step.
    outlines: meshes, cuts, orders, microbatches and placements together. fitting: plans found to fit. simulated: plans judged.
    """

    best: Plan | None = None
    seconds: float = float("inf")
    outlines: int = 0
    fitting: int = 0
    simulated: int = 0
    ties: list[Plan] = field(default_factory=list)


def exhaustive(problem: PlanningProblem, space: Space, *, known_s: float = float("inf")) -> Found:
    """The fastest plan of the space that fits. known_s: the step of a plan known already; plans that cannot be faster are
    passed over."""
    found = Found()
    outlines = [(bound_s(problem, plan), plan) for plan in outlined(problem, space)]
    found.outlines = len(outlines)

    several = len(space.zero_stages) > 1 or space.recompute or space.any_buckets

    def too_slow(plan: Plan) -> bool:
        return bound_s(problem, plan) > min(found.seconds, known_s) * (1 + CLOSE)

    for bound, outline in sorted(outlines, key=lambda entry: entry[0]):
        if bound > min(found.seconds, known_s) * (1 + CLOSE):
            break
        if several and floor_s(problem, outline) > min(found.seconds, known_s) * (1 + CLOSE):
            continue
        for plan in _filled_in(problem, outline, space, too_slow):
            found.fitting += 1
            if too_slow(plan):
                continue
            seconds = simulated_step(problem, plan, fold=False).step_s
            found.simulated += 1
            if seconds < found.seconds * (1 - CLOSE):
                found.best, found.seconds, found.ties = plan, seconds, []
            elif seconds <= found.seconds * (1 + CLOSE):
                found.ties.append(plan)
    return found


def floor_s(problem: PlanningProblem, outline: Plan) -> float:
    """The step of an outline whose gradients are summed and whose parameters are updated in no time: whatever ZeRO stage,
    buckets and recomputed components are added to it, each only adds tasks."""
    run = simulated_step(problem, outline, fold=False)
    columns = run.compiled.columns
    free = np.array([isinstance(unit.work, OptimizerStep) for unit in columns.units])[columns.unit]
    sums = np.array([resource.stream == DP_STREAM for resource in columns.resources])
    free[columns.uses.row_numbers[sums[columns.uses.values]]] = True
    seconds = np.where(free, 0.0, medians_s(run.estimates)[columns.unit])
    return float(mean_step_s(run.compiled, seconds[None, :], run.overlap, steps=REPEATED_STEPS)[0]) * (1 - CLOSE)


def any_fits(problem: PlanningProblem, space: Space) -> Plan | None:
    """A plan of the space that fits; None if there is none."""
    for outline in outlined(problem, space):
        for plan in _filled_in(problem, outline, space, lambda plan: False):
            return plan
    return None


def outlined(problem: PlanningProblem, space: Space) -> Iterator[Plan]:
    """Every mesh, cut, order, number of microbatches and placement that makes a valid plan."""
    devices, components = problem.cluster.size, problem.model.components
    sizes = range(1, devices + 1) if space.fewer_devices else sorted({1, devices})
    for mesh in (mesh for size in sizes for mesh in meshes(size)):
        if problem.global_batch % mesh.dp:
            continue
        replica = problem.global_batch // mesh.dp
        choices = [placements(component, mesh.tp) for component in components]
        for order, chunks in ORDERS if mesh.pp > 1 else ORDERS[:1]:
            for bounds in cuts(len(components), mesh.pp * chunks):
                for microbatches in (count for count in range(1, replica + 1) if replica % count == 0):
                    for chosen in itertools.product(*choices):
                        if mesh.tp > 1 and set(chosen) == {BATCH} and replica % (mesh.tp * microbatches) == 0:
                            continue  # more replicas, by another name
                        plan = plan_of(problem, mesh, order, chunks, bounds, microbatches, chosen)
                        if plan is not None:
                            yield plan


def meshes(size: int) -> Iterator[Mesh]:
    """All pp x dp x tp = size."""
    for pp in range(1, size + 1):
        for dp in range(1, size // pp + 1):
            tp, rest = divmod(size, pp * dp)
            if not rest:
                yield Mesh(pp=pp, dp=dp, tp=tp)


def cuts(components: int, stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every division of a chain into so many runs."""
    for inner in itertools.combinations(range(1, components), stages - 1):
        yield tuple(itertools.pairwise((0, *inner, components)))


def placements(component: Component, tp: int) -> tuple[Placement, ...]:
    """Every placement of a component on so many tp ranks."""
    if tp == 1:
        return (BATCH,)
    cut = [
        Placement("shard", rule=sharding.rule, ways=ways)
        for sharding in component.shardings
        for ways in range(2, tp + 1)
        if tp % ways == 0 and sharding.limit % ways == 0
    ]
    return (BATCH, REPLICATE, *(Placement("place", shard=shard) for shard in range(tp)), *cut)


def plan_of(
    problem: PlanningProblem,
    mesh: Mesh,
    order: str,
    chunks: int,
    bounds: Sequence[tuple[int, int]],
    microbatches: int,
    chosen: Sequence[Placement],
) -> Plan | None:
    """The plan with these parts; None where they do not go together. bounds: first and last component of every stage."""
    names = [component.name for component in problem.model.components]
    try:
        plan = Plan(
            strategy="custom",
            mesh=mesh,
            stages=stages_of(
                mesh,
                (names[first:last] for first, last in bounds),
                dict(zip(names, chosen, strict=True)).__getitem__ if mesh.tp > 1 else None,
                order=order,
                chunks=chunks,
            ),
            global_batch=problem.global_batch,
            microbatches=microbatches,
            pipeline_order=order,
        )
        check_plan(plan, problem.model)
        problem.layout(plan)
    except PlanError:
        return None
    return plan


def _filled_in(problem: PlanningProblem, outline: Plan, space: Space, too_slow: Callable[[Plan], bool]) -> Iterator[Plan]:
    """The outline with every ZeRO stage, bucket size and set of recomputed components with which it fits, too slow or not.

    Below ZeRO 2, recomputing more only adds tasks to a program. So of the sets that fit only the smallest are tried.
    """
    names = [component.name for component in problem.model.components if component.name in differentiable(problem)]
    sets = [some for size in range(len(names) + 1) for some in itertools.combinations(names, size)] if space.recompute else [()]
    shared = any(len(bucket.group) > 1 for bucket in problem.layout(outline).buckets)
    for zero_stage in space.zero_stages if shared else (0,):
        for bucket_bytes in bucket_sizes(problem, replace(outline, zero_stage=zero_stage), space):
            enough: list[frozenset[str]] = []
            for some in sets:
                if zero_stage < 2 and any(less <= frozenset(some) for less in enough):
                    continue
                plan = replace(outline, zero_stage=zero_stage, bucket_bytes=bucket_bytes, recompute=some or NONE)
                if not too_slow(plan) and all(entry.fits for entry in problem.memory(plan)):
                    enough.append(frozenset(some))
                    yield plan


def differentiable(problem: PlanningProblem) -> frozenset[str]:
    """Components that have a backward."""
    return problem.model.differentiable_components


def bucket_sizes(problem: PlanningProblem, plan: Plan, space: Space) -> list[int]:
    """Bucket sizes that make different buckets of this plan."""
    if plan.world_size == 1:
        return [DEFAULT_BUCKET_BYTES]
    if not space.any_buckets:
        return list(space.bucket_bytes)
    sizes = [parameter.size_bytes for component in problem.model.components for parameter in component.parameters]
    ways = {placement.ways for stage in plan.stages for placement in stage.placements} | {1}
    sums = {sum(sizes[first:last]) // way for first, last in itertools.combinations(range(len(sizes) + 1), 2) for way in ways}
    found: dict[object, int] = {}
    for size in sorted({*sums, DEFAULT_BUCKET_BYTES, 1}, reverse=True):
        layout = problem.layout(replace(plan, bucket_bytes=max(1, size)))
        buckets = tuple(tuple(layout.rank_buckets(rank)) for rank in range(plan.world_size))
        found.setdefault(buckets, max(1, size))
    return list(found.values())


def bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds below which the plan cannot be, whatever is sent.

    A rank computes all microbatches of its components. It begins once a microbatch has gone forward through the components
    before its own, and after its last backward a microbatch still goes back through them. Prices are those of `evaluate`.
    """
    costs = problem.costs(plan.world_size)
    known: dict[tuple[object, str], float] = problem.remembered(_Prices).seconds
    has_backward = differentiable(problem)

    def seconds(name: str, placement: Placement, rank: int) -> float:
        samples = plan.microbatch_samples * placement.batch_ways(plan.mesh.tp) // plan.mesh.tp
        phases = [Phase.FORWARD]
        if name in has_backward:
            phases += [Phase.BACKWARD, *([Phase.FORWARD] if name in plan.recomputed else [])]
        total = 0.0
        for phase in phases:
            work = Compute(component=name, phase=phase, samples=samples, rule=placement.rule, ways=placement.ways)
            key = (work, costs.device_kind(rank))
            if key not in known:
                known[key] = costs.estimate(work, rank).median_s
            total += known[key]
        return total

    busy, before = [0.0] * plan.world_size, 0.0
    first: list[float | None] = [None] * plan.world_size
    for stage in plan.stages:
        for name, placement in stage.placed():
            own = [
                seconds(name, placement, rank) if placement.runs_on(plan.shard_of_rank(rank)) else 0.0 for rank in stage.ranks
            ]
            for rank, taken in zip(stage.ranks, own, strict=True):
                if taken:
                    first[rank] = before if first[rank] is None else first[rank]
                    busy[rank] += taken
            before += min((taken for taken in own if taken), default=0.0)
    ends = (plan.microbatches * own + (start or 0.0) for own, start in zip(busy, first, strict=True))
    return max(ends) * (1 - CLOSE)


@dataclass
class _Prices:
    """Of one problem."""

    seconds: dict[tuple[object, str], float] = field(default_factory=dict)


def searched(problem: PlanningProblem) -> tuple[float, Plan | None, str]:
    """The search's answer: seconds (inf where nothing fits), plan, status or error."""
    from parsim.errors import ScheduleError
    from parsim.search.search import search

    try:
        found = search(problem, ("adaptive",), samples=0)
    except (ScheduleError, CostError) as error:
        return float("inf"), None, f"error: {error}"
    if found.chosen is None:
        return float("inf"), None, found.status
    return found.chosen.result.step_s.median, found.chosen.result.plan, found.status
