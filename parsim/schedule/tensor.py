"""Plans with a tp axis: the same placement for every component (mp, hp), or the best one for each (adaptive).

uniform    every component is cut over all tp ranks where one of its rules allows it, and replicated where none does;
           which of its rules, a shortest path over the conversions between them decides
adaptive   one stage, tp over all devices: every component takes any placement, by `parsim.schedule.exact`; batch over all
           ranks (dp), cut over all (mp) and over some (hp) are among them, so mixing costs nothing in generality
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from parsim.errors import PlanError, ScheduleError
from parsim.model.component import Component
from parsim.plan.mesh import Mesh
from parsim.plan.placement import BATCH, REPLICATE, Placement
from parsim.plan.plan import DEFAULT_BUCKET_BYTES, Plan, Stage
from parsim.schedule.exact import solve_exactly
from parsim.schedule.objective import Solution
from parsim.schedule.options import Prices, placements_of
from parsim.schedule.placing import Placing, placing_of
from parsim.schedule.problem import Problem
from parsim.schedule.quick import QuickEstimates
from parsim.schedule.relaxation import Frontiers, Relaxation
from parsim.schedule.stages import balanced_plan

TIGHTENINGS = 4
"""How often a choice that does not fit after all (workspace, conversions) is sought again with that much less memory."""

SLOWER = 1.02
"""More microbatches are no longer tried once a closed form has them this much slower than fewer."""

OTHER_ORDERS = (("gpipe", 1), ("interleaved", 2))
"""(pipeline order, chunks per rank) tried beside 1f1b. Not zero-bubble: no calibration has measured a backward's halves yet, so
what it would gain over 1f1b rests on an assumed split; it can be asked for."""

ROOMY = 0.8
"""A placement that leaves a fifth of every rank's memory was not limited by it: more microbatches would not help."""

MOST_PLACES = 4
"""Up to so many tp ranks a component may also be placed on one of them alone; beyond, on the first alone."""


def can_be_cut(problem: Problem, ways: int) -> bool:
    """Whether any component can be cut into that many shards."""
    return any(sharding.limit % ways == 0 for component in problem.model.components for sharding in component.shardings)


def tensor_meshes(devices: int, components: int, *, replicated: bool) -> Iterator[Mesh]:
    """All pp x dp x tp = devices with tp > 1; dp > 1 if `replicated`, else dp = 1."""
    for tp in range(2, devices + 1):
        for dp in range(1, devices // tp + 1):
            pp, rest = divmod(devices, tp * dp)
            if not rest and (dp > 1) == replicated and pp <= components:
                yield Mesh(pp=pp, dp=dp, tp=tp)


def uniform_plans(problem: Problem, strategy: str, *, replicated: bool, microbatches: Sequence[int]) -> Iterator[Plan]:
    """Every mesh with a tp axis, with the microbatch counts and orders that make sense on it."""
    for mesh in tensor_meshes(problem.cluster.size, len(problem.model.components), replicated=replicated):
        if can_be_cut(problem, mesh.tp):
            yield from useful_plans(problem, strategy, mesh, microbatches=microbatches)


def useful_plans(problem: Problem, strategy: str, mesh: Mesh, *, microbatches: Sequence[int]) -> Iterator[Plan]:
    """Plans of one mesh: from as many microbatches as stages upwards, and downwards, each way until those that fit are slower
    by a closed form; then the other pipeline orders with the best count. With a tp axis placements are uniform.

    Without a pipeline, more microbatches than memory asks for only cost.
    """
    quick = QuickEstimates(problem)
    best: tuple[float, Plan] | None = None
    counts = [count for count in microbatches if problem.global_batch % (mesh.dp * count) == 0]
    upwards = [count for count in counts if count >= mesh.pp]
    downwards = [count for count in reversed(counts) if count < mesh.pp]
    for way in (upwards, downwards):
        for count in way:
            plan = _uniform_plan(problem, strategy, mesh, count, "1f1b")
            if plan is None:
                continue
            yield plan
            if any(not entry.fits for entry in problem.memory(plan)):
                continue
            seconds = quick.step_s(plan)
            if best is not None and seconds > SLOWER * best[0]:
                break
            if best is None or seconds < best[0]:
                best = (seconds, plan)
            if mesh.pp == 1:
                return
    for order, chunks in OTHER_ORDERS:
        if best is not None:
            try:
                other = _uniform_plan(problem, strategy, mesh, best[1].microbatches, order, chunks)
            except (PlanError, ScheduleError):  # too few components for so many chunks, or microbatches that make no rounds
                continue
            if other is not None:
                yield other


def _uniform_plan(problem: Problem, strategy: str, mesh: Mesh, count: int, order: str, chunks: int = 1) -> Plan | None:
    """None where parameters tied across components would be cut differently."""
    samples = problem.global_batch // (mesh.dp * count)
    chosen = uniform_placements(problem, Mesh(dp=mesh.dp, tp=mesh.tp), samples) if mesh.tp > 1 else None
    plan = balanced_plan(problem, strategy, mesh, microbatches=count, pipeline_order=order, chunks=chunks, placements=chosen)
    try:
        problem.layout(plan)
    except PlanError:
        return None
    return plan


def uniform_placements(problem: Problem, mesh: Mesh, samples: int) -> dict[str, Placement]:
    """Every component cut over all tp ranks where it can be, replicated where not; the cheapest such choice.

    It is sought once per mesh: which rules go together hardly depends on the samples.
    """
    known = problem.uniform_placements.get(mesh)
    if known is None:
        known = problem.uniform_placements[mesh] = _uniform_placements(problem, mesh, samples)
    return known


def _uniform_placements(problem: Problem, mesh: Mesh, samples: int) -> dict[str, Placement]:
    options: list[tuple[Placement, ...]] = []
    for component in problem.model.components:
        cut = [
            Placement("shard", rule=sharding.rule, ways=mesh.tp)
            for sharding in component.shardings
            if sharding.limit % mesh.tp == 0
        ]
        options.append(tuple(cut) or (REPLICATE,))
    prices = Prices(problem=problem, mesh=mesh, samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES)
    placing = placing_of(prices, options, microbatches=1, limit_bytes=[0.0] * mesh.tp)
    frontiers = Frontiers(placing)
    relaxation = Relaxation(frontiers, np.zeros(mesh.tp))
    if not np.isfinite(relaxation.value):
        return {component.name: REPLICATE for component in problem.model.components}
    return _named(placing, relaxation.choice())


def _named(placing: Placing, choice: Sequence[int]) -> dict[str, Placement]:
    return {name: options[option] for name, options, option in zip(placing.components, placing.options, choice, strict=True)}


def adaptive_plans(problem: Problem, *, microbatches: Sequence[int], solutions: list[Solution] | None = None) -> Iterator[Plan]:
    """The best placement of every component on one stage over all devices, for as many microbatches as help.

    Args:
        solutions: receives the solver's answer for every count tried.

    Raises:
        ScheduleError: nothing fits, with the constraint and what would be enough.
    """
    found = False
    why = ""
    before = np.inf
    for count in microbatches:
        if problem.global_batch % count:
            continue
        solution, plan = best_placement(problem, count)
        if solutions is not None:
            solutions.append(solution)
        if plan is None:
            why = why or solution.reason
            continue
        found = True
        yield plan
        roomy = all(entry.total_bytes <= ROOMY * entry.limit_bytes for entry in problem.memory(plan))
        if roomy or solution.seconds > before:
            return
        before = solution.seconds
    if not found:
        raise ScheduleError(f"no choice of placements fits: {why or 'the batch divides into no microbatches'}")


def best_placement(problem: Problem, microbatches: int) -> tuple[Solution, Plan | None]:
    """The best placement on `tp` = all devices, and its plan if one fits."""
    mesh = Mesh(tp=problem.cluster.size)
    samples = problem.global_batch // microbatches
    prices = Prices(
        problem=problem, mesh=mesh, samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES, zero_stage=problem.zero_stage
    )
    options = [_allowed(problem, component, mesh, samples) for component in problem.model.components]
    limits = [float(device.type.memory_bytes - device.type.context_bytes) for device in problem.cluster.devices]
    placing = placing_of(prices, options, microbatches=microbatches, limit_bytes=limits)
    hints = list(_uniform_choices(placing, problem, mesh, samples))
    for _ in range(TIGHTENINGS):
        solution = solve_exactly(placing, hints=hints)
        if not solution.choice:
            return solution, None
        plan = _plan(problem, mesh, _named(placing, solution.choice), microbatches)
        excess = max(entry.excess_bytes for entry in problem.memory(plan))
        if not excess:
            return solution, plan
        placing = replace(placing, limit_bytes=placing.limit_bytes - 1.02 * excess)
    return replace(solution, choice=(), status="inaccurate", reason="what fits by its parts does not fit as a whole"), None


def _allowed(problem: Problem, component: Component, mesh: Mesh, samples: int) -> tuple[Placement, ...]:
    places = range(mesh.tp) if mesh.tp <= MOST_PLACES else (0,)
    found = tuple(
        placement
        for placement in placements_of(component, mesh, samples, places=tuple(places))
        if problem.allows(component.name, placement)
    )
    if not found:
        raise ScheduleError(
            f"pin and forbid leave {component.name} no placement on tp = {mesh.tp} with microbatches of {samples} samples; "
            "drop one of them"
        )
    return found


def _uniform_choices(placing: Placing, problem: Problem, mesh: Mesh, samples: int) -> Iterator[tuple[int, ...]]:
    """Batch everywhere, replicate everywhere, cut everywhere: as far as the options hold them."""
    cut = uniform_placements(problem, mesh, samples) if can_be_cut(problem, mesh.tp) else {}
    wishes: list[Mapping[str, Placement]] = [
        dict.fromkeys(placing.components, BATCH),
        dict.fromkeys(placing.components, REPLICATE),
        cut,
    ]
    for wish in wishes:
        try:
            yield tuple(options.index(wish[name]) for name, options in zip(placing.components, placing.options, strict=True))
        except (KeyError, ValueError):  # pinned, forbidden, or not divisible: this uniform choice is none
            continue


def _plan(problem: Problem, mesh: Mesh, placements: Mapping[str, Placement], microbatches: int) -> Plan:
    names = tuple(component.name for component in problem.model.components)
    if all(placements[name] == BATCH for name in names):
        mesh = Mesh(dp=mesh.tp)  # the same thing by its usual name
    stage = Stage(
        components=names,
        ranks=mesh.stage_ranks(0),
        placements=tuple(placements[name] for name in names) if mesh.tp > 1 else (),
    )
    return Plan(
        strategy="adaptive",
        mesh=mesh,
        stages=(stage,),
        global_batch=problem.global_batch,
        microbatches=microbatches,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        zero_stage=problem.zero_stage,
    )
