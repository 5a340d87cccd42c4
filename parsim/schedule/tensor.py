"""Plans with a tp axis: the same placement for every component (mp, hp), or the best one for each (adaptive).

uniform    every component is cut over all tp ranks where one of its rules allows it, and replicated where none does;
           which of its rules, a shortest path over the conversions between them decides
adaptive   one stage, tp over all devices: every component takes any placement, by `parsim.schedule.placement.exact`; batch
           over all ranks (dp), cut over all (mp) and over some (hp) are among them, so mixing costs nothing in generality
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from parsim.errors import PlanError, ScheduleError
from parsim.model.component import Component
from parsim.plans.mesh import Mesh
from parsim.plans.placement import BATCH, REPLICATE, Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan, Stage
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.closed_form import ClosedFormEstimates
from parsim.schedule.options import Prices, placements_of
from parsim.schedule.placement.exact import solve_exactly
from parsim.schedule.placement.objective import Solution, step_s
from parsim.schedule.placement.placement_problem import PlacementProblem, placement_problem_of
from parsim.schedule.placement.relaxation import Frontiers, Relaxation
from parsim.schedule.stages import balanced_plan
from parsim.work import Phase

TIGHTENINGS = 6
"""How often a choice that does not fit after all is sought again with the room that it leaves for its parts."""

LABELS_WITHIN = 50_000
"""Of each of those searches."""

SLOWER = 1.02
"""More microbatches are no longer tried once a closed form has them this much slower than fewer."""

HOPELESS = 1.1
"""A mesh is passed over where a bound on its step is this much above the family's best closed form."""

OTHER_ORDERS = (("gpipe", 1), ("interleaved", 2))
"""(pipeline order, chunks per rank) tried beside 1f1b. Not zero-bubble: no calibration has measured a backward's halves yet, so
what it would gain over 1f1b rests on an assumed split; it can be asked for."""

ROOMY = 0.8
"""A placement that leaves a fifth of every rank's memory was not limited by it: more microbatches would not help."""

MOST_PLACES = 4
"""Up to so many tp ranks a component may also be placed on one of them alone; beyond, on the first alone."""


def can_be_cut(problem: PlanningProblem, ways: int) -> bool:
    """Whether any component can be cut into that many shards."""
    return any(sharding.limit % ways == 0 for component in problem.model.components for sharding in component.shardings)


def tensor_meshes(devices: int, components: int, *, replicated: bool) -> Iterator[Mesh]:
    """All pp x dp x tp = devices with tp > 1; dp > 1 if `replicated`, else dp = 1."""
    for tp in range(2, devices + 1):
        for dp in range(1, devices // tp + 1):
            pp, rest = divmod(devices, tp * dp)
            if not rest and (dp > 1) == replicated and pp <= components:
                yield Mesh(pp=pp, dp=dp, tp=tp)


@dataclass
class Best:
    """The closed-form seconds of the best plan of a family so far, over all its meshes."""

    seconds: float = np.inf


def uniform_plans(
    problem: PlanningProblem, strategy: str, *, replicated: bool, microbatches: Sequence[int], best: Best | None = None
) -> Iterator[Plan]:
    """Every mesh with a tp axis, with the microbatch counts and orders that make sense on it."""
    for mesh in tensor_meshes(problem.cluster.size, len(problem.model.components), replicated=replicated):
        if can_be_cut(problem, mesh.tp):
            yield from useful_plans(problem, strategy, mesh, microbatches=microbatches, best=best)


def useful_plans(
    problem: PlanningProblem, strategy: str, mesh: Mesh, *, microbatches: Sequence[int], best: Best | None = None
) -> Iterator[Plan]:
    """Plans of one mesh. The number of microbatches starts at the number of stages and goes up and down, until plans that
    fit are slower by a closed form. Then come the other pipeline orders with the best count. With a tp axis placements
    are uniform.

    Without a pipeline, more microbatches than memory asks for only cost. Counts whose computation alone, perfectly balanced,
    takes HOPELESS times as long as the family's best so far are passed over.
    """
    closed_form = ClosedFormEstimates(problem)
    rival = best or Best()
    own: tuple[float, Plan] | None = None
    counts = [count for count in microbatches if problem.global_batch % (mesh.dp * count) == 0]
    upwards = [count for count in counts if count >= mesh.pp]
    downwards = [count for count in reversed(counts) if count < mesh.pp]
    whole_s = _whole_batch_s(problem, mesh) if rival.seconds < np.inf else 0.0
    for way in (upwards, downwards):
        for count in way:
            if whole_s * (1 + (count - 1) / mesh.pp) / count > HOPELESS * rival.seconds:
                continue
            plan = _uniform_plan(problem, strategy, mesh, count, "1f1b")
            if plan is None:
                continue
            yield plan
            if any(not entry.fits for entry in problem.memory(plan)):
                continue
            seconds = closed_form.step_s(plan)
            rival.seconds = min(rival.seconds, seconds)
            if own is not None and seconds > SLOWER * own[0]:
                break
            if own is None or seconds < own[0]:
                own = (seconds, plan)
            if mesh.pp == 1:
                return
    for order, chunks in OTHER_ORDERS:
        if own is not None:
            try:
                other = _uniform_plan(problem, strategy, mesh, own[1].microbatches, order, chunks)
            except (PlanError, ScheduleError):  # too few components for so many chunks, or microbatches that make no rounds
                continue
            if other is not None:
                yield other


def _whole_batch_s(problem: PlanningProblem, mesh: Mesh) -> float:
    """Forward and backward of a replica's whole batch, conversions included, if the components followed one another on one
    stage: with M microbatches on S stages a step takes at least (1 + (M - 1) / S) / M of it, as small pieces run no faster."""
    if mesh.tp > 1:
        return _cut(problem, Mesh(dp=mesh.dp, tp=mesh.tp)).seconds
    samples = problem.global_batch // mesh.dp
    prices = Prices(problem=problem, mesh=Mesh(dp=mesh.dp), samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES)
    return sum(
        prices.compute_s(component, BATCH, phase, fastest=True)
        for component in problem.model.components
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        if phase is Phase.FORWARD or component.name in prices.differentiable
    )


def _uniform_plan(problem: PlanningProblem, strategy: str, mesh: Mesh, count: int, order: str, chunks: int = 1) -> Plan | None:
    """None where parameters tied across components would be cut differently."""
    chosen = uniform_placements(problem, Mesh(dp=mesh.dp, tp=mesh.tp)) if mesh.tp > 1 else None
    plan = balanced_plan(problem, strategy, mesh, microbatches=count, pipeline_order=order, chunks=chunks, placements=chosen)
    try:
        problem.layout(plan)
    except PlanError:
        return None
    return plan


class _Cut(NamedTuple):
    placements: dict[str, Placement]
    seconds: float


def uniform_placements(problem: PlanningProblem, mesh: Mesh) -> dict[str, Placement]:
    """Every component cut over all tp ranks where it can be, replicated where not; the cheapest such choice.

    It is sought once per mesh, for a replica's whole batch: which rules go together hardly depends on the samples.
    """
    return _cut(problem, mesh).placements


@dataclass
class _Cuts:
    """Of one problem, the cheapest uniform placements of the meshes seen."""

    by_mesh: dict[Mesh, _Cut] = field(default_factory=dict)


def _cut(problem: PlanningProblem, mesh: Mesh) -> _Cut:
    """The uniform placements of a mesh of one stage, with forward and backward of a whole batch of one replica."""
    found = problem.remembered(_Cuts).by_mesh
    if mesh not in found:
        found[mesh] = _cheapest_cut(problem, mesh)
    return found[mesh]


def _cheapest_cut(problem: PlanningProblem, mesh: Mesh) -> _Cut:
    options = [_uniform_options(component, mesh.tp) for component in problem.model.components]
    prices = Prices(problem=problem, mesh=mesh, samples=problem.global_batch // mesh.dp, bucket_bytes=DEFAULT_BUCKET_BYTES)
    placing = placement_problem_of(prices, options, microbatches=1, limit_bytes=[0.0] * mesh.tp)
    nothing = tuple(np.zeros_like(own) for own in placing.synchronisation_s)
    frontiers = Frontiers(replace(placing, synchronisation_s=nothing))  # of the gradients: it may hide behind the backward
    relaxation = Relaxation(frontiers, np.zeros(mesh.tp))
    if not np.isfinite(relaxation.value):
        return _Cut({component.name: REPLICATE for component in problem.model.components}, 0.0)
    return _Cut(_named(placing, relaxation.choice()), relaxation.value)


def _uniform_options(component: Component, tp: int) -> tuple[Placement, ...]:
    """Every rule that cuts the component over all tp ranks; replicated where none does."""
    if tp == 1:
        return (BATCH,)
    cut = [Placement("shard", rule=each.rule, ways=tp) for each in component.shardings if each.limit % tp == 0]
    return tuple(cut) or (REPLICATE,)


def _named(placing: PlacementProblem, choice: Sequence[int]) -> dict[str, Placement]:
    return {name: options[option] for name, options, option in zip(placing.components, placing.options, choice, strict=True)}


def adaptive_plans(
    problem: PlanningProblem, *, microbatches: Sequence[int], solutions: list[Solution] | None = None
) -> Iterator[Plan]:
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
        roomy = all(entry.high_bytes <= ROOMY * entry.limit_bytes for entry in problem.memory(plan))
        if roomy or solution.seconds > before:
            return
        before = solution.seconds
    if not found:
        raise ScheduleError(f"no choice of placements fits: {why or 'the batch divides into no microbatches'}")


def posed_placement(problem: PlanningProblem, microbatches: int) -> tuple[PlacementProblem, list[tuple[int, ...]]]:
    """The placement problem on `tp` = all devices, and the uniform choices, which a solver may begin with.

    Raises:
        ScheduleError: pins and forbids leave a component no placement.
    """
    mesh = Mesh(tp=problem.cluster.size)
    samples = problem.global_batch // microbatches
    prices = Prices(
        problem=problem, mesh=mesh, samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES, zero_stage=problem.zero_stage
    )
    options = [_allowed(problem, component, mesh, samples) for component in problem.model.components]
    limits = [float(device.type.memory_bytes - device.type.context_bytes) for device in problem.cluster.devices]
    placing = placement_problem_of(prices, options, microbatches=microbatches, limit_bytes=limits)
    return placing, list(_uniform_choices(placing, problem, mesh))


def best_placement(problem: PlanningProblem, microbatches: int) -> tuple[Solution, Plan | None]:
    """The best placement on `tp` = all devices, and its plan if one fits."""
    mesh = Mesh(tp=problem.cluster.size)
    placing, hints = posed_placement(problem, microbatches)
    solution = solve_exactly(placing, hints=hints)
    if not solution.choice:
        return solution, None
    plan = _plan(problem, mesh, _named(placing, solution.choice), microbatches)
    if all(entry.fits for entry in problem.memory(plan)):
        return solution, plan
    return _within_memory(problem, mesh, placing, microbatches, solution.lower_bound_s)


def _within_memory(
    problem: PlanningProblem, mesh: Mesh, placing: PlacementProblem, microbatches: int, lower_bound_s: float
) -> tuple[Solution, Plan | None]:
    """The best choice that fits as a whole, where the best one does so only by its parts.

    The overhead of a plan beyond its components is mostly one communicator per set of ranks that exchange data. So it
    depends on the numbers of ways that the plan uses. Each set of ways is solved alone, with the memory that its last
    solution left.
    """
    best: tuple[Solution, Plan] | None = None
    for choice in _evenly_cut(placing):
        seconds = step_s(placing, choice)
        if seconds >= (np.inf if best is None else best[0].seconds):
            continue
        plan = _plan(problem, mesh, _named(placing, choice), microbatches)
        if all(entry.fits for entry in problem.memory(plan)):
            best = Solution(choice=choice, seconds=seconds, lower_bound_s=lower_bound_s, status="feasible"), plan
    for ways in _ways_sets(placing):
        some = placing.restricted(
            [
                [number for number, option in enumerate(options) if option.kind != "place" and option.ways in ways]
                for options in placing.options
            ]
        )
        if not all(some.options):
            continue
        too_little = np.minimum(0.0, placing.limit_bytes)
        too_much = room = placing.limit_bytes
        for _ in range(TIGHTENINGS):
            solution = solve_exactly(replace(some, limit_bytes=room), most_labels=LABELS_WITHIN)
            if best is not None and solution.choice and solution.seconds >= best[0].seconds:
                break
            if not solution.choice:
                too_little, room = room, (room + too_much) / 2
                continue
            plan = _plan(problem, mesh, _named(some, solution.choice), microbatches)
            memory = problem.memory(plan)
            if all(entry.fits for entry in memory):
                best = replace(solution, lower_bound_s=lower_bound_s, status="feasible"), plan
                break
            parts = sum(own[option] for own, option in zip(some.memory_bytes, solution.choice, strict=True))
            left = np.array([entry.limit_bytes - entry.high_bytes for entry in memory]) + parts
            too_much, room = room, np.maximum(np.minimum(left, room), (too_little + room) / 2)
    if best is not None:
        return best
    reason = "what fits by its parts does not fit as a whole, with its communicators, conversions and workspace"
    return Solution(choice=(), seconds=np.inf, lower_bound_s=lower_bound_s, status="inaccurate", reason=reason), None


def _evenly_cut(placing: PlacementProblem) -> Iterator[tuple[int, ...]]:
    """Every component cut in the same number of ways where it can be, by its cheapest rule, and whole where not."""
    for ways in {option.ways for options in placing.options for option in options} - {1}:
        choice = []
        for number, options in enumerate(placing.options):
            fitting = [place for place, option in enumerate(options) if option.ways == ways]
            whole = [place for place, option in enumerate(options) if option.kind in ("batch", "replicate")]
            choice.append(min(fitting or whole, key=placing.forward_s[number].__getitem__, default=0))
        yield tuple(choice)


def _ways_sets(placing: PlacementProblem) -> Iterator[frozenset[int]]:
    """Sets of ways that any option has, few ways first; whole components (1 way) belong to each."""
    known = sorted({option.ways for options in placing.options for option in options} - {1}, reverse=True)
    for size in range(len(known) + 1):
        for some in combinations(known, size):
            yield frozenset((1, *some))


def _allowed(problem: PlanningProblem, component: Component, mesh: Mesh, samples: int) -> tuple[Placement, ...]:
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


def _uniform_choices(placing: PlacementProblem, problem: PlanningProblem, mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Batch everywhere, replicate everywhere, cut everywhere: as far as the options hold them."""
    cut = uniform_placements(problem, mesh) if can_be_cut(problem, mesh.tp) else {}
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


def _plan(problem: PlanningProblem, mesh: Mesh, placements: Mapping[str, Placement], microbatches: int) -> Plan:
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
