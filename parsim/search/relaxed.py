"""Choose among plans whose replicas or stages are synchronised by a relaxed rule.

The rule is given, never searched for, because it changes what is learnt. Free are the replicas (the most that the batch
divides into), with stale the stages, and the microbatches. The bounds of `parsim.search.search` count gradients that are
summed in every step, so they would not hold. These plans are few enough to simulate them all, but for gossip and merging on
more than `SCREENED_RANKS` ranks, of which some are simulated rank by rank. There the numbers of microbatches
are ranked by the same plans with `average`, whose replicas are simulated once, and only the first that fits is simulated as
asked. A round follows the optimizer's step, so it costs the same whatever that number is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from parsim.errors import PlanError, ScheduleError
from parsim.plans.layouts import BATCH
from parsim.plans.mesh import Mesh
from parsim.plans.plan import AUTO, DEFAULT_BUCKET_BYTES, NONE, Plan
from parsim.plans.synchronisation import Synchronisation
from parsim.predict.evaluate import SAMPLES, Evaluation, evaluate, with_interval
from parsim.predict.problem import PlanningProblem
from parsim.predict.rounds import folds
from parsim.search.by_hand import custom_plan
from parsim.search.search import Search, first_of_each
from parsim.search.space import meshes, microbatch_counts
from parsim.search.tree import Tally
from parsim.units import format_seconds

SCREENED_RANKS = 128
MOST_PLANS = 200
"""Plans of one rule that are simulated; the rest of the microbatches is counted as not tried."""


def relaxed_search(
    problem: PlanningProblem, strategies: Sequence[str], *, samples: int = SAMPLES, top: int | None = None
) -> Search:
    """Simulate every plan of the rule that the problem's constraints ask for, and choose the fastest that fits.

    Args:
        problem: with `constraints.synchronisation` relaxed. strategies: dp, hp, mp (stale) or adaptive, which is all of them.
        top: keep so many plans instead of the best of each family.

    Returns:
        A Search, whose candidates all keep the rule.

    Raises:
        ScheduleError: the rule has no plan on these devices, with the reasons. CostError: nothing can be priced.
    """
    reasons: dict[str, None] = {}
    evaluations: list[Evaluation] = []
    untried = 0
    plans = _plans(problem, strategies, reasons)
    for mesh, same in groupby(plans, key=lambda plan: plan.mesh):
        group = list(same)
        # such ranks are simulated one by one, and once where the replicas average
        is_dear = group[0].synchronisation.kind in ("gossip", "merge") and folds(problem, _averaging(group[0]))
        one_is_enough = top is None and mesh.size > SCREENED_RANKS and len(group) > 1 and is_dear
        if one_is_enough:
            group.sort(key=lambda plan: _screened_s(problem, plan))
        for number, plan in enumerate(group):
            if len(evaluations) == MOST_PLANS:
                untried += 1
                continue
            try:
                evaluations.append(evaluate(problem, plan, samples=0))
            except PlanError as error:
                reasons[str(error)] = None
                continue
            if one_is_enough and evaluations[-1].result.fits:
                untried += len(group) - number - 1
                break
    if not evaluations:
        rule = problem.constraints.synchronisation
        why = "; ".join(reason.removeprefix(f"synchronisation {rule}: ") for reason in reasons)
        raise ScheduleError(f"no plan has synchronisation {rule}: {why or _no_mesh(problem, strategies)}")
    evaluations.sort(key=lambda entry: (not entry.result.fits, entry.result.step_s.median))
    best_of_each = first_of_each(evaluations, lambda entry: entry.result.plan.strategy)
    shown = best_of_each if top is None else evaluations[:top]
    best = shown[0]
    candidates = tuple(with_interval(problem, entry, samples=samples, reason=_reason(entry, best)) for entry in shown)
    return Search(
        candidates=candidates,
        chosen=candidates[0] if best.result.fits else None,
        recommended=candidates[0] if best.result.fits else None,
        status="best_of_candidates" if best.result.fits else "infeasible",
        lower_bound_s=min(entry.result.lower_bound_s for entry in evaluations),
        judged=len(evaluations),
        skipped=(),
        tally=Tally(simulated=len(evaluations), untried=untried),
    )


def _no_mesh(problem: PlanningProblem, strategies: Sequence[str]) -> str:
    """Why no mesh suits the rule and the family."""
    constraints = problem.constraints
    if (
        tuple(strategies) == ("hp",)
        and constraints.synchronisation.mixes
        and (constraints.pp or 1) * (constraints.tp or 1) == 1
    ):
        return 'replicas of strategy "hp" have several ranks: set plan.mesh with pp or tp above 1, or plan.strategy = "dp"'
    return "the mesh leaves no replicas"


def _averaging(plan: Plan) -> Plan:
    return replace(plan, synchronisation=Synchronisation(kind="average", period_steps=plan.synchronisation.period_steps))


def _screened_s(problem: PlanningProblem, plan: Plan) -> float:
    """The step of the same plan whose replicas average. Plans that cannot be evaluated come last."""
    try:
        return evaluate(problem, _averaging(plan), samples=0).result.step_s.median
    except PlanError:
        return math.inf


def _reason(entry: Evaluation, best: Evaluation) -> str:
    if not entry.result.fits:
        return "does not fit"
    if entry is best:
        return "the fastest that fits"
    step, least = entry.result.step_s.median, best.result.step_s.median
    return f"{step / least - 1:.0%} slower than {format_seconds(least)}"


def relaxed_meshes(problem: PlanningProblem, strategies: Sequence[str]) -> list[Mesh]:
    """Meshes of the rule, of most devices: one stage per replica, or with stale every number of stages above one.

    Args:
        problem: with constraints; an axis that they give is kept. strategies: as `relaxed_search` takes them.
    """
    constraints, rule = problem.constraints, problem.constraints.synchronisation
    chosen: list[Mesh] = []
    for mesh in meshes(problem, lambda _pp, _dp, tp: tp == (constraints.tp or 1), ()):
        if problem.global_batch % mesh.dp:
            continue
        suits = (mesh.pp > 1 if rule.is_stale else mesh.pp == (constraints.pp or 1)) and (mesh.dp > 1 or not rule.mixes)
        if suits and ("adaptive" in strategies or _family(mesh) in strategies):
            if chosen and mesh.size < chosen[0].size:
                break
            chosen.append(mesh)
    return chosen


def _family(mesh: Mesh) -> str:
    return "dp" if mesh.pp * mesh.tp == 1 else "mp" if mesh.dp == 1 else "hp"


def _plans(problem: PlanningProblem, strategies: Sequence[str], reasons: dict[str, None]) -> Iterator[Plan]:
    """The plans of the rule; why others are none goes into `reasons`."""
    constraints = problem.constraints
    stale = constraints.synchronisation.is_stale
    if barred := [each.name for each in problem.model.components if not problem.allows(each.name, BATCH)]:
        text = f"plan.pin and plan.forbid bar placement batch for {', '.join(barred[:4])}, and relaxed plans have no other"
        reasons[f"{text}; drop them"] = None
        return
    for mesh in relaxed_meshes(problem, strategies):
        try:
            for count in [constraints.microbatches or 1] if stale else microbatch_counts(problem, mesh):
                plan = custom_plan(
                    problem,
                    mesh,
                    microbatches=count,
                    pipeline_order=constraints.pipeline_order or "1f1b",
                    chunks=constraints.chunks or 1,
                    bucket_bytes=constraints.bucket_bytes or DEFAULT_BUCKET_BYTES,
                    recompute=NONE if problem.recompute == AUTO else problem.recompute,
                    synchronisation=constraints.synchronisation,
                )
                yield replace(plan, strategy=_family(mesh))
        except (PlanError, ScheduleError) as error:
            reasons[str(error)] = None
