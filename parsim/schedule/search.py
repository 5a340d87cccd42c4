"""Choose among plans: price and simulate every family's members, rank them, and record why each lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parsim.errors import CostError, ScheduleError, near_matches
from parsim.plans.plan import Plan
from parsim.plans.recompute import AUTO, NONE, Recompute
from parsim.predict.evaluate import SAMPLES, Evaluation, evaluate, with_interval
from parsim.predict.planning_problem import PlanningProblem
from parsim.registry import is_reference
from parsim.schedule.choose_recompute import recomputed_to_fit
from parsim.schedule.closed_form import ClosedFormEstimates
from parsim.schedule.families import FAMILIES, mixed_plans
from parsim.schedule.placement.objective import Solution
from parsim.units import format_bytes, format_seconds

REACH = 1.25
"""A family is left at plans whose closed form is this much slower than the best one simulated."""

FEWEST = 3
"""Plans of a family that are simulated in any case, if they fit."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Attributes:
    candidates: the best of each family and how many of its members were judged, fastest fitting first.
    chosen: the winner; None if nothing fits.
    status: "best_of_candidates" (the families were searched, optimality is not claimed) or "infeasible".
    lower_bound_s: the least of the candidates' own bounds: no candidate plan can be faster under these costs.
    skipped: families without a member, and why.
    placements: the solver's answers to the placement problem (strategy "adaptive"), one per number of microbatches tried.
    """

    candidates: tuple[Evaluation, ...]
    chosen: Evaluation | None
    status: str
    lower_bound_s: float
    judged: int
    skipped: tuple[tuple[str, str], ...]
    placements: tuple[Solution, ...] = ()

    @property
    def gap(self) -> float:
        """(chosen - lower bound) / chosen; 1 where nothing was chosen."""
        if self.chosen is None:
            return 1.0
        median = self.chosen.result.step_s.median
        return max(0.0, (median - self.lower_bound_s) / median)

    def to_dict(self) -> dict[str, Any]:
        return {
            "candidates": [candidate.result.to_dict() for candidate in self.candidates],
            "chosen": None if self.chosen is None else self.chosen.result.to_dict(),
            "status": self.status,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "judged": self.judged,
            "skipped": dict(self.skipped),
            "placements": [solution.to_dict() for solution in self.placements],
        }


def search(
    problem: PlanningProblem, strategies: Sequence[str] = tuple(FAMILIES), *, samples: int = SAMPLES, top: int | None = None
) -> Search:
    """Find the best plan of each named family, rank them, and choose the fastest that fits.

    Args:
        problem: model, cluster, batch and constraints.
        strategies: keys of FAMILIES or "package.module:ROW"; "adaptive" stands for all of FAMILIES. Its candidate is the best
            of all plans judged, so no other candidate is predicted faster.
        samples: draws for the intervals. top: keep this many plans over all families instead of the best of each.

    Returns:
        A Search. Leaves out plans outside the families: it claims no optimality beyond its candidates.

    Raises:
        ScheduleError: an unknown strategy, or no family has any member. CostError: nothing can be priced.
    """
    mixes = "adaptive" in strategies
    wanted = (*FAMILIES, "adaptive") if mixes else tuple(dict.fromkeys(strategies))
    for name in wanted:
        if name not in (*FAMILIES, "adaptive") and not is_reference(name):
            raise ScheduleError(f"unknown strategy {name!r}{near_matches(name, [*FAMILIES, 'adaptive'])}")
    families = {name: FAMILIES[name] for name in wanted if name != "adaptive"}
    closed_form = ClosedFormEstimates(problem)
    solutions: list[Solution] = []
    simulated: dict[Plan, Evaluation] = {}
    judged: list[Evaluation] = []
    skipped: dict[str, str] = {}
    unpriced: CostError | None = None
    for name in wanted:
        if name != "single" and problem.cluster.size == 1:
            skipped[name] = "one device: there is nothing to distribute"
            continue
        try:
            plans = mixed_plans(problem, solutions) if name == "adaptive" else families[name](problem)
            members, left_out = _members(plans)
            if is_reference(name):
                members = [replace(plan, strategy=name) for plan in members]
            judged.extend(_judge_family(problem, _respecting(problem, members), closed_form, simulated))
            if left_out is not None:
                skipped[name] = f"judged without some of its plans: {left_out}"
        except ScheduleError as error:
            skipped[name] = str(error)
        except CostError as error:
            skipped[name] = str(error)
            unpriced = error
    if not judged:
        if unpriced is not None:
            raise unpriced
        raise ScheduleError("no plan to choose from: " + "; ".join(f"{name}: {why}" for name, why in skipped.items()))
    ranked = sorted(judged, key=_rank)
    best_mixes = mixes and problem.cluster.size > 1
    if top is not None:
        ranked = _distinct([_renamed(ranked[0], "adaptive"), *ranked[1:]] if best_mixes else ranked)
    elif best_mixes and ranked[0].result.strategy != "adaptive":
        ranked = sorted([*ranked, _renamed(ranked[0], "adaptive")], key=_rank)
    kept = ranked[:top] if top is not None else _best_of_each(ranked)
    winner = ranked[0] if ranked[0].result.fits else None
    candidates = tuple(_with_interval(problem, entry, ranked[0], samples) for entry in kept)
    chosen = None
    if winner is not None:
        chosen = next(entry for entry in candidates if entry.result.plan == winner.result.plan)
        if mixes:
            chosen = _renamed(chosen, "adaptive")
    return Search(
        candidates=candidates,
        chosen=chosen,
        status="best_of_candidates" if winner is not None else "infeasible",
        lower_bound_s=min(entry.result.lower_bound_s for entry in judged),
        judged=len(judged),
        skipped=tuple(skipped.items()),
        placements=tuple(solutions),
    )


def _rank(entry: Evaluation) -> tuple[bool, float]:
    """The order of the candidates: plans that fit first, the fastest of them first."""
    return not entry.result.fits, entry.result.step_s.median


def _renamed(entry: Evaluation, strategy: str) -> Evaluation:
    """The same plan and the same figures under another strategy's name."""
    plan = replace(entry.result.plan, strategy=strategy)
    return replace(entry, result=replace(entry.result, plan=plan, strategy=strategy))


def _members(plans: Iterable[Plan]) -> tuple[list[Plan], CostError | None]:
    """The plans up to the first that cannot be priced, and why it cannot. Raises CostError if that is the first."""
    found: list[Plan] = []
    try:
        for plan in plans:
            found.append(plan)
    except CostError as error:
        if not found:
            raise
        return found, error
    return found, None


def _respecting(problem: PlanningProblem, found: list[Plan]) -> list[Plan]:
    """Those that keep the problem's pins and forbids. Raises ScheduleError if none does."""
    if not problem.pins and not problem.forbids:
        return found
    kept = [
        plan
        for plan in found
        if all(problem.allows(name, placement) for stage in plan.stages for name, placement in stage.placed())
    ]
    if found and not kept:
        raise ScheduleError("none of its plans keeps what pin and forbid ask for")
    return kept


def _judge_family(
    problem: PlanningProblem, plans: Iterable[Plan], closed_form: ClosedFormEstimates, simulated: dict[Plan, Evaluation]
) -> list[Evaluation]:
    """Simulate the members that a closed form puts first, until the rest are out of reach.

    Args:
        simulated: evaluations by plan without the strategy's name, read and added to: families that meet in one program
            share its evaluation.

    Where the problem leaves recomputation open, a member that does not fit makes room for one that does by recomputing. Of
    members that do not fit one is simulated, the one closest to fitting, and only if none fits.
    """
    ordered = sorted(_recomputing(problem, plans), key=closed_form.step_s)
    judged: list[Evaluation] = []
    too_large: list[tuple[int, Plan]] = []
    best: float | None = None
    for plan in ordered:
        if best is not None and len(judged) >= FEWEST and closed_form.step_s(plan) > REACH * best:
            break
        memory = problem.memory(plan)
        if not all(entry.fits for entry in memory):
            too_large.append((max(entry.excess_bytes for entry in memory), plan))
            continue
        evaluation = _evaluated(problem, plan, simulated)
        judged.append(evaluation)
        if best is None or evaluation.result.step_s.median < best:
            best = evaluation.result.step_s.median
    if not judged and too_large:
        judged.append(_evaluated(problem, min(too_large, key=lambda entry: entry[0])[1], simulated))
    return judged


def _evaluated(problem: PlanningProblem, plan: Plan, simulated: dict[Plan, Evaluation]) -> Evaluation:
    """The evaluation of a plan under its own strategy's name, simulated once per program."""
    program = replace(plan, strategy="custom")
    if program not in simulated:
        simulated[program] = evaluate(problem, plan, samples=0, fold=True)
    return _renamed(simulated[program], plan.strategy)


def _recomputing(problem: PlanningProblem, plans: Iterable[Plan]) -> list[Plan]:
    """The plans with what the problem says of recomputation."""
    if problem.recompute != AUTO:
        return [replace(plan, recompute=problem.recompute) for plan in plans]
    found = []
    for plan in plans:
        fits = all(entry.fits for entry in problem.memory(plan))
        found.append(plan if fits else recomputed_to_fit(problem, plan) or plan)
    return found


def _best_of_each(ranked: Sequence[Evaluation]) -> list[Evaluation]:
    best: dict[str, Evaluation] = {}
    for entry in ranked:
        best.setdefault(entry.result.strategy, entry)
    return list(best.values())


def _distinct(ranked: Sequence[Evaluation]) -> list[Evaluation]:
    """Each program once, under the first of its names."""
    found: dict[Plan, Evaluation] = {}
    for entry in ranked:
        found.setdefault(replace(entry.result.plan, strategy="custom"), entry)
    return list(found.values())


def _with_interval(problem: PlanningProblem, entry: Evaluation, first: Evaluation, samples: int) -> Evaluation:
    """With draws, and why the plan won or lost against the first of the ranking."""
    return with_interval(problem, entry, samples=samples, reason=_reason(entry, first, problem.recompute))


def _reason(entry: Evaluation, first: Evaluation, recompute: Recompute) -> str:
    if not entry.result.fits:
        worst = max(entry.memory, key=lambda memory: memory.excess_bytes)
        line, size = worst.worst
        tried = ", even with all recomputed" if recompute == AUTO else ""
        over = format_bytes(worst.excess_bytes)
        return f"does not fit{tried}: rank {worst.rank} by {over}, mostly {line} ({format_bytes(size)})"
    plan = entry.result.plan
    again = f"; recomputes {len(plan.recomputed)} of {len(plan.components)} components" if plan.recompute != NONE else ""
    if entry is first:
        return f"fastest plan that fits{again}"
    if same_program(entry.result.plan, first.result.plan):
        return f"the same plan as {first.result.strategy}"
    slower = entry.result.step_s.median - first.result.step_s.median
    return f"slower by {format_seconds(slower)} ({100 * slower / first.result.step_s.median:.0f}%){_where(entry, first)}{again}"


def same_program(one: Plan, other: Plan) -> bool:
    """Whether two plans differ at most in the name of their strategy.

    Args:
        one, other: plans of one model.
    """
    return replace(one, strategy=other.strategy) == other


def _where(entry: Evaluation, first: Evaluation) -> str:
    """The category of a step that costs the most more than in the first plan, averaged over each plan's own ranks."""
    names = ("compute_s", "exposed_communication_s", "bubble_s", "idle_s", "load_s", "host_s")

    def mean(evaluation: Evaluation, name: str) -> float:
        return float(sum(getattr(rank, name) for rank in evaluation.breakdown)) / len(evaluation.breakdown)

    more = {name: mean(entry, name) - mean(first, name) for name in names}
    name = max(more, key=lambda key: more[key])
    return f"; mostly {name.removesuffix('_s').replace('_', ' ')} (+{format_seconds(more[name])} per rank)"
