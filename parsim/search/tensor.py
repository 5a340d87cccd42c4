"""Placements on a tp axis: the same for every component (mp, hp), or the best one for each (adaptive).

uniform    every component is cut over all tp ranks where one of its rules allows it, and batch-sharded or replicated where
           none does; which of its rules, a shortest path over the conversions between them decides
adaptive   every component takes any placement, by `parsim.search.placement.exact`; batch over all ranks (dp), cut over all
           (mp) and over some (hp) are among them, so mixing costs nothing in generality
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from parsim.errors import ScheduleError
from parsim.model.component import Component
from parsim.model.model import Model
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import AUTO, DEFAULT_BUCKET_BYTES, Plan, Stage, holding
from parsim.predict.problem import PlanningProblem
from parsim.records import once
from parsim.search.placement.exact import Frontiers, Relaxation, numbers_among, options_in_reach, solve_exactly
from parsim.search.placement.problem import (
    PlacementProblem,
    Solution,
    converted,
    no_choice,
    placement_problem_of,
    step_s,
    unconverted,
)
from parsim.search.prices import Prices, placements_of
from parsim.search.space import is_small

TIGHTENINGS = 6
"""How often a choice that does not fit after all is sought again with the room that it leaves for its parts."""

MOST_LABELS = 2_000
"""Of one exact search for placements. Beyond it the best choice known is taken, with the bound that is proven."""

PLACED_WITHIN = 2e-3
"""Of a step, to which a choice is proven: the placement problem leaves out overlap, which is worth more."""

MOST_PLACES = 4
"""Up to so many tp ranks a component may also be placed on one of them alone; beyond, on the first alone."""


def can_be_cut(problem: PlanningProblem, ways: int) -> bool:
    """Whether tensor parallelism over so many ranks divides the model: some component can be cut, and each that repeats.

    A component that occurs once (an embedding, a head) may stay whole. Layers that stay whole make the rest hardly faster.
    """
    return ways in ways_of(problem)


class Limits(NamedTuple):
    """The rules of a component with the sizes that they cut, and whether the model has the component several times."""

    rules: tuple[tuple[str, int], ...]
    repeats: bool

    def allow(self, ways: int) -> bool:
        """Whether any rule cuts it into that many shards of equal size."""
        return any(limit % ways == 0 for _, limit in self.rules)


@once
def ways_of(problem: PlanningProblem) -> tuple[int, ...]:
    """Every number of tp ranks up to the devices that `can_be_cut`, ascending."""
    every = limits_of(problem).values()
    layers = [own for own in every if own.repeats]
    return tuple(
        ways
        for ways in range(2, problem.cluster.size + 1)
        if any(own.allow(ways) for own in every) and all(own.allow(ways) for own in layers)
    )


@once
def limits_of(problem: PlanningProblem) -> dict[str, Limits]:
    """By name of the first of components that are alike; without those that no rule cuts."""
    model = problem.model
    count = Counter(model.fingerprints)
    first: dict[str, Component] = {}
    for fingerprint, component in zip(model.fingerprints, model.components, strict=True):
        first.setdefault(fingerprint, component)
    return {
        component.name: Limits(tuple((each.rule, each.limit) for each in component.shardings), count[fingerprint] > 1)
        for fingerprint, component in first.items()
        if component.shardings
    }


def partly_cut(model: Model, tp: int) -> tuple[str, ...]:
    """What to say of layers that no rule cuts whole, as blocks of a transformer that were traced as one component, and of
    parameters that no rules of their components cut alike over tp ranks."""
    return (*_cut_in_part(model), *_uncut_tables(model, tp))


def _uncut_tables(model: Model, tp: int) -> tuple[str, ...]:
    users: dict[str, list[str]] = {}
    for component, parameter in tied_whole(model, tp).items():
        users.setdefault(parameter, []).append(component)
    return tuple(
        f"tensor parallelism may leave {' and '.join(some)} whole on every rank: they share {parameter}, and no rule cuts it "
        f"alike in both over tp = {tp}"
        for parameter, some in users.items()
    )


def _cut_in_part(model: Model) -> tuple[str, ...]:
    count = Counter(model.fingerprints)
    for fingerprint, component in zip(model.fingerprints, model.components, strict=True):
        products = {number for number, each in enumerate(component.operators) if each.kind in PRODUCTS and each.parameter_bytes}
        cuts = ({cut.number for cut in each.operators} for each in component.shardings)
        whole = min((len(products - cut) for cut in cuts), default=len(products))
        if count[fingerprint] > 1 and whole:
            return (
                f"tensor parallelism cuts layers of {model.name} in part: {whole} of {len(products)} products of "
                f"{component.name} run whole on every rank; a Model traced at another granularity may be cut further",
            )
    return ()


PRODUCTS = ("matmul", "convolution")


def tensor_placements(problem: PlanningProblem, mesh: Mesh, microbatches: int) -> dict[str, Placement]:
    """`uniform_placements` for a number of microbatches; none without a tp axis.

    Raises:
        ScheduleError: `can_be_cut` is false, or pins and forbids leave a component no placement.
    """
    if mesh.tp == 1:
        return {}
    if not can_be_cut(problem, mesh.tp):
        raise ScheduleError(uncut_text(problem, mesh.tp))
    samples = problem.global_batch // (mesh.dp * microbatches)
    return uniform_placements(problem, Mesh(tp=mesh.tp), divides=samples % mesh.tp == 0)


@once
def uniform_placements(problem: PlanningProblem, mesh: Mesh, *, divides: bool = False) -> dict[str, Placement]:
    """Every component cut over all tp ranks where it can be; the cheapest such choice.

    What cannot be cut is replicated, or batch-sharded if that is cheaper. Pins and forbids are kept. It is sought once, for the
    whole batch: which rules go together hardly depends on the samples.

    Args:
        mesh: of one stage. divides: whether a microbatch divides over the tp ranks, so that components can be batch-sharded.

    Raises:
        ScheduleError: pins and forbids leave a component no such placement.
    """
    options = [uniform_options(problem, component, mesh.tp, divides=divides) for component in problem.model.components]
    prices = Prices(problem=problem, mesh=mesh, samples=problem.global_batch // mesh.dp)
    placing = placement_problem_of(prices, options, microbatches=1, limit_bytes=[0.0] * mesh.tp)
    nothing = tuple(np.zeros_like(seconds) for seconds in placing.synchronisation_s)
    frontiers = Frontiers(replace(placing, synchronisation_s=nothing))  # sums of gradients may hide behind the backward
    relaxation = Relaxation(frontiers, np.zeros(mesh.tp))
    if not np.isfinite(relaxation.value):
        return {name: choices[-1] for name, choices in zip(placing.components, options, strict=True)}
    return _named(placing, relaxation.choice())


def uniform_options(problem: PlanningProblem, component: Component, tp: int, *, divides: bool) -> tuple[Placement, ...]:
    """Every rule that cuts the component over all tp ranks; batch-sharded or replicated where none does.

    Args:
        divides: whether a microbatch divides over them.

    Raises:
        ScheduleError: none is left.
    """
    if tp == 1:
        return (BATCH,)
    pinned = dict(problem.pins).get(component.name)
    if pinned is not None:
        if pinned == BATCH and not divides:
            raise ScheduleError(f"{component.name} is pinned to batch, and its microbatch does not divide over tp = {tp}")
        return (pinned,)
    whole = [BATCH, REPLICATE] if divides else [REPLICATE]
    often = [*_cuts(component, tp), *(whole if component.name in tied_whole(problem.model, tp) else ())]
    for options in (often, whole):
        allowed = tuple(placement for placement in options if problem.allows(component.name, placement))
        if allowed:
            return allowed
    raise ScheduleError(f"pin and forbid leave {component.name} no placement on tp = {tp}; drop one of them")


def _cuts(component: Component, tp: int) -> list[Placement]:
    return [Placement("shard", rule=each.rule, ways=tp) for each in component.shardings if each.allows(tp)]


@once
def tied_whole(model: Model, tp: int) -> dict[str, str]:
    """By component the parameter that it shares with others and that no rules of theirs cut alike over tp ranks."""
    users: dict[str, list[Component]] = {}
    for component in model.components:
        for parameter in component.parameters:
            users.setdefault(parameter.name, []).append(component)
    found = dict[str, str]()
    for name, some in users.items():
        held = [{holding(component, cut, name) for cut in _cuts(component, tp)} for component in some]
        if len(some) > 1 and any(held) and not set.intersection(*held):
            found |= {component.name: name for component in some}
    return found


def _named(placing: PlacementProblem, choice: Sequence[int]) -> dict[str, Placement]:
    return {name: options[option] for name, options, option in zip(placing.components, placing.options, choice, strict=True)}


def posed_placement(
    problem: PlanningProblem, microbatches: int, mesh: Mesh | None = None, *, zero_stage: int | None = None
) -> tuple[PlacementProblem, list[tuple[int, ...]]]:
    """The placement problem on the tp axis of a mesh, and the uniform choices, which a solver may begin with.

    With several stages it is that of one stage with as much memory as all have together.

    Args:
        mesh: None: `tp` = all devices. zero_stage: None: that of the problem.

    Raises:
        ScheduleError: pins and forbids leave a component no placement.
    """
    stage = problem.fixed_zero_stage if zero_stage is None else zero_stage
    prices, placing, hints = _unconverted(problem, microbatches, mesh or Mesh(tp=problem.cluster.size), stage)
    return converted(placing, prices, microbatches), hints


def _unconverted(
    problem: PlanningProblem, microbatches: int, mesh: Mesh, zero_stage: int
) -> tuple[Prices, PlacementProblem, list[tuple[int, ...]]]:
    """The placement problem without conversions, the prices that it was made by, and the uniform choices."""
    stages, mesh = mesh.pp, Mesh(dp=mesh.dp, tp=mesh.tp)
    samples = problem.global_batch // (mesh.dp * microbatches)
    prices = Prices(problem=problem, mesh=mesh, samples=samples, zero_stage=zero_stage)
    options = []
    for component in problem.model.components:
        options.append(allowed_placements(problem, component, mesh, samples))
        if not options[-1]:
            raise ScheduleError(
                f"pin and forbid leave {component.name} no placement on tp = {mesh.tp} with microbatches of {samples} samples; "
                "drop one of them"
            )
    devices = problem.cluster.devices[: mesh.tp]
    limits = [stages * float(device.type.room_bytes) for device in devices]
    placing = unconverted(prices, options, microbatches=microbatches, limit_bytes=limits)
    return prices, placing, list(_uniform_choices(placing, problem, mesh))


def best_placement(
    problem: PlanningProblem, microbatches: int, mesh: Mesh | None = None, *, zero_stage: int | None = None
) -> BestPlacement:
    """The best placement of every component on the tp axis of a mesh.

    Args:
        mesh: None: `tp` = all devices. zero_stage: None: that of the problem.
    """
    mesh = mesh or Mesh(tp=problem.cluster.size)
    stage = problem.fixed_zero_stage if zero_stage is None else zero_stage

    prices, every, hints = _unconverted(problem, microbatches, mesh, stage)
    limited = bool((np.sum([sizes.max(axis=0) for sizes in every.memory_bytes], axis=0) > every.limit_bytes).any())
    kept = options_in_reach(every, hints, lambda some: converted(some, prices, microbatches))
    some = converted(every.restricted(kept), prices, microbatches)
    solution = solve_exactly(some, hints=numbers_among(kept, hints), most_labels=MOST_LABELS, within=PLACED_WITHIN)
    if not solution.choice:
        return BestPlacement(solution, None, limited)
    solution = replace(solution, choice=tuple(own[number] for own, number in zip(kept, solution.choice, strict=True)))
    placements = _named(every, solution.choice)
    recomputes = problem.recompute == AUTO and not is_small(problem)  # then it is made to fit by recomputation
    several = mesh.pp > 1 or mesh.copies > 1
    if recomputes or several or _fits(problem, _plan(problem, mesh, placements, microbatches, stage)):
        return BestPlacement(solution, placements, limited)
    placing = converted(every, prices, microbatches)
    return BestPlacement(*_within_memory(problem, mesh, placing, microbatches, solution.lower_bound_s, stage), limited=True)


class BestPlacement(NamedTuple):
    """A solution and its placements by component, None where none fits. `limited`: whether memory rules out any choice."""

    solution: Solution
    placements: dict[str, Placement] | None
    limited: bool


def _fits(problem: PlanningProblem, plan: Plan) -> bool:
    return not problem.unsafe_bytes(plan)


def _within_memory(
    problem: PlanningProblem,
    mesh: Mesh,
    placing: PlacementProblem,
    microbatches: int,
    lower_bound_s: float,
    zero_stage: int,
) -> tuple[Solution, dict[str, Placement] | None]:
    """The best choice that fits as a whole, where the best one does so only by its parts.

    The overhead of a plan beyond its components is mostly one communicator per set of ranks that exchange data. So it
    depends on the numbers of ways that the plan uses. Each set of ways is solved alone, with the memory that its last
    solution left.
    """
    best: tuple[Solution, dict[str, Placement]] | None = None
    for choice in _evenly_cut(placing):
        seconds = step_s(placing, choice)
        if seconds >= (np.inf if best is None else best[0].seconds):
            continue
        named = _named(placing, choice)
        if _fits(problem, _plan(problem, mesh, named, microbatches, zero_stage)):
            best = Solution(choice=choice, seconds=seconds, lower_bound_s=lower_bound_s, status="feasible"), named
    for ways, alone in _ways_sets(placing):
        some = placing.restricted(
            [
                [number for number, option in enumerate(options) if option.ways in ways and (alone or option.kind != "place")]
                for options in placing.options
            ]
        )
        if not all(some.options):
            continue
        too_little = np.minimum(0.0, placing.limit_bytes)
        too_much = room = placing.limit_bytes
        for _ in range(TIGHTENINGS):
            solution = solve_exactly(replace(some, limit_bytes=room), most_labels=MOST_LABELS, within=PLACED_WITHIN)
            if best is not None and solution.choice and solution.seconds >= best[0].seconds:
                break
            if not solution.choice:
                too_little, room = room, (room + too_much) / 2
                continue
            named = _named(some, solution.choice)
            plan = _plan(problem, mesh, named, microbatches, zero_stage)
            if not problem.unsafe_bytes(plan):
                best = replace(solution, lower_bound_s=lower_bound_s, status="feasible"), named
                break
            parts = sum(own[option] for own, option in zip(some.memory_bytes, solution.choice, strict=True))
            needed = [entry.needed_at(problem.safe_probability) for entry in problem.memory(plan)]
            left = placing.limit_bytes - np.array(needed) + parts
            too_much, room = room, np.maximum(np.minimum(left, room), (too_little + room) / 2)
    if best is not None:
        return best
    reason = "what fits by its parts does not fit as a whole, with its communicators, conversions and workspace"
    return no_choice("inaccurate", reason, lower_bound_s), None


def _evenly_cut(placing: PlacementProblem) -> Iterator[tuple[int, ...]]:
    """Every component cut in the same number of ways where it can be, by its cheapest rule, and whole where not."""
    for ways in {option.ways for options in placing.options for option in options} - {1}:
        choice = []
        for number, options in enumerate(placing.options):
            fitting = [place for place, option in enumerate(options) if option.ways == ways]
            whole = [place for place, option in enumerate(options) if option.kind in ("batch", "replicate")]
            choice.append(min(fitting or whole, key=placing.forward_s[number].__getitem__, default=0))
        yield tuple(choice)


def _ways_sets(placing: PlacementProblem) -> Iterator[tuple[frozenset[int], bool]]:
    """Sets of ways that options may have, and whether a component may lie on a single rank: none, each alone, then all.

    Whole components (1 way) belong to each.
    """
    known = sorted({option.ways for options in placing.options for option in options} - {1}, reverse=True)
    some = dict.fromkeys(frozenset((1, *ways)) for ways in ((), *((each,) for each in known), tuple(known)))
    yield from ((ways, False) for ways in some)
    yield frozenset((1, *known)), True


def allowed_placements(problem: PlanningProblem, component: Component, mesh: Mesh, samples: int) -> tuple[Placement, ...]:
    """Every placement that pins and forbids leave a component."""
    places = range(mesh.tp) if mesh.tp <= MOST_PLACES else (0,)
    options = placements_of(component, mesh, samples, places=places)
    return tuple(placement for placement in options if problem.allows(component.name, placement))


def _uniform_choices(placing: PlacementProblem, problem: PlanningProblem, mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Batch everywhere, replicate everywhere, cut everywhere: as far as the options hold them."""
    divides = problem.global_batch // mesh.dp % mesh.tp == 0
    cut: Mapping[str, Placement] = {}
    if any(own.allow(mesh.tp) for own in limits_of(problem).values()):
        with contextlib.suppress(ScheduleError):  # pins and forbids leave no uniform choice
            cut = uniform_placements(problem, mesh, divides=divides)
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


def _plan(
    problem: PlanningProblem, mesh: Mesh, placements: Mapping[str, Placement], microbatches: int, zero_stage: int
) -> Plan:
    names = tuple(component.name for component in problem.model.components)
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
        zero_stage=max(zero_stage, mesh.least_zero_stage),
        **problem.plan_settings,
    )


def uncut_text(problem: PlanningProblem, tp: int) -> str:
    """Why tensor parallelism over `tp` ranks does not divide the model: the sizes that it must divide, and the nearest tp."""
    limits, name = limits_of(problem), problem.model.name
    if not limits:
        return f"no component of {name} can be cut into shards, so tp = {tp} shards nothing; use pp and dp"
    repeats = any(own.repeats for own in limits.values())
    texts = [
        f"{where} is cut by {' or '.join(f'{rule} ({limit})' for rule, limit in own.rules)}"
        for where, own in limits.items()
        if own.repeats == repeats and not own.allow(tp)
    ]
    possible = [ways for ways in ways_of(problem) if problem.cluster.size % ways == 0] or ways_of(problem)
    below, above = ([ways for ways in possible if (ways < tp) is less] for less in (True, False))
    near = " or ".join(map(str, [*below[-1:], *above[:1]]))
    return (
        f"tp = {tp} does not divide {'the layers' if repeats else 'any component'} of {name}: {', '.join(texts[:3])}; "
        f"{f'the nearest that does: tp = {near}' if near else 'use pp and dp'}"
    )
