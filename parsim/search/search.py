"""Choose among plans: bound, simulate and rank every family's members, and record why each lost.

A plan at most 3.5% slower than the choice is a tie: two measurements of one program differ by as much in the median. The
choice stays the fastest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, TypeVar

from parsim.costs.draws import medians_s
from parsim.errors import PlanError, ScheduleError, near_matches
from parsim.numeric import rare_collections
from parsim.plans.constraints import PlanConstraints
from parsim.plans.layouts import BATCH
from parsim.plans.plan import AUTO, DEFAULT_BUCKET_BYTES, FULL, Plan, Recompute
from parsim.plans.stages import without_idle_ranks
from parsim.predict.breakdown import busiest_resource_s
from parsim.predict.evaluate import SAMPLES, Evaluation, SimulatedStep, evaluate, simulated_step, with_interval
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.registry import is_reference
from parsim.search.families import FAMILIES, mixed_meshes, nodes_of
from parsim.search.refine import way_out
from parsim.search.space import (
    Allowance,
    Node,
    PosedPlacement,
    divided_problems,
    is_large,
    most_late,
    most_singles,
    zero_stages,
)
from parsim.search.stages import recomputing_layers
from parsim.search.tree import Incumbents, JudgedPlan, Members, Tally, Variants, judged_best_first, open_one_by_one
from parsim.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Search:
    """Attributes:
    candidates: the best of each family, fastest fitting first.
    chosen: the winner; None if nothing fits.
    status: "best_of_candidates" (the families were searched, optimality is not claimed) or "infeasible".
    lower_bound_s: the least of the bounds of all plans considered: none of them can be faster under these costs.
    judged: plans that were simulated. tally: what became of all plans.
    skipped: families without a member, and why.
    placements: the solver's answers to the placement problems (strategy "adaptive").
    unrefined: families that lost before their late parts were opened: a separate search may find faster plans.
    """

    candidates: tuple[Evaluation, ...]
    chosen: Evaluation | None
    status: str
    lower_bound_s: float
    judged: int
    skipped: tuple[tuple[str, str], ...]
    tally: Tally = field(default_factory=Tally)
    placements: tuple[PosedPlacement, ...] = ()
    unrefined: tuple[str, ...] = ()

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
            "considered": self.tally.to_dict(),
            "unrefined": list(self.unrefined),
            "skipped": dict(self.skipped),
            "placements": [solution.to_dict() for solution in self.placements],
        }


@rare_collections()
def search(
    problem: PlanningProblem, strategies: Sequence[str] = tuple(FAMILIES), *, samples: int = SAMPLES, top: int | None = None
) -> Search:
    """Find the best plan of each named family, rank them, and choose the fastest that fits.

    Args:
        problem: model, cluster, batch and constraints: what it leaves open is free.
        strategies: keys of FAMILIES or "package.module:ROW"; "adaptive" stands for all of FAMILIES. Its candidate is the best
            of all plans considered, so no other candidate is predicted faster.
        top: keep this many plans over all families instead of the best of each.

    Returns:
        A Search. A plan that was not simulated has a lower bound that is not below the best of its family. Leaves out plans
        outside the families: it claims no optimality beyond them.

    Raises:
        ScheduleError: an unknown strategy, or no family has any member. CostError: nothing can be priced.
    """
    divided = divided_problems(problem)
    mixes = "adaptive" in strategies
    names = _known_names(strategies)
    posed: list[PosedPlacement] = []
    skipped: dict[str, str] = {}
    together = Incumbents(wanted=top or 1)
    opening = _Opening(problem, is_large=is_large(divided[0]))
    parts: dict[str, list[Node]] = {}
    owners: dict[str, Incumbents] = {}
    for name in names:
        if name != "single" and problem.cluster.size == 1:
            skipped[name] = "one device: there is nothing to distribute"
            continue
        try:
            parts[name] = _nodes(divided, name, posed)
        except ScheduleError as error:
            skipped[name] = str(error)
            continue
        shared = name == "adaptive" or top is not None
        owners[name] = together if shared else Incumbents(rival_s=together.best_s if mixes else float("inf"))
        if opening.spare is None:
            opening.early(name, parts[name], owners[name])
            together.steps_s.update(owners[name].steps_s)
    if opening.spare is not None:
        opening.tally.add(open_one_by_one(parts, owners, together, opening.spare, opening.early, rivals=mixes))
    # each family opens as many late parts as it would alone, so adaptive is never slower than any of them
    unrefined = [name for name, own in owners.items() if opening.late[name] and own is not together and mixes]
    for name, own in owners.items():
        opening.later(name, own if not mixes and top is None else Incumbents(steps_s=together.steps_s))
    for own in owners.values():
        opening.misfit(own)
    steps, tally = opening.steps, opening.tally
    judged = opening.judged
    if all(problem.allows(component.name, BATCH) for component in problem.model.components):
        judged = [_without_idle_ranks(problem, entry, steps) for entry in judged]
    found = {entry.plan.strategy for entry in judged}
    for name in [name for name in owners if parts[name] and name not in found and not (found and name == "adaptive")]:
        skipped[name] = most_frequent(opening.impossible[name]) if opening.impossible[name] else NOT_TRIED
    if not judged:
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise tally.unpriced or ScheduleError(f"no plan to choose from: {why}")
    skipped.pop("adaptive", None)  # its plan is then the best one of the families
    ranked = sorted(judged, key=_rank)
    best_mixes = mixes and problem.cluster.size > 1
    if top is not None:
        ranked = _distinct([_renamed(ranked[0], "adaptive"), *ranked[1:]] if best_mixes else ranked)
    elif best_mixes and ranked[0].plan.strategy != "adaptive":
        ranked = sorted([*ranked, _renamed(ranked[0], "adaptive")], key=_rank)
    shown = ranked[:top] if top is not None else first_of_each(ranked, lambda entry: entry.plan.strategy)
    candidates = _with_intervals(problem, _evaluated(problem, shown, steps), samples)
    chosen = candidates[0] if candidates[0].result.fits else None
    if mixes and chosen is not None:
        chosen = replace(chosen, result=_result_named(chosen, "adaptive"))
    return Search(
        candidates=candidates,
        chosen=chosen,
        status="best_of_candidates" if chosen is not None else "infeasible",
        lower_bound_s=min(steps.bounds_s),
        judged=len(judged),
        skipped=tuple(skipped.items()),
        tally=tally,
        placements=tuple(posed),
        unrefined=tuple(name for name in unrefined if _lost(name, candidates)),
    )


def _lost(name: str, candidates: Sequence[Evaluation]) -> bool:
    first = candidates[0].result.plan
    return any(each.result.strategy == name and each.result.plan.program != first.program for each in candidates)


NOT_TRIED = "none of its plans that were tried fits; others were more promising, and not all plans of a large problem are tried"

MOST_DRAWN = 2**25
"""Durations that are drawn for the interval of a plan: a program of more than 168,000 tasks gets fewer than 200 draws."""

FEWEST_DRAWS, OF_A_LOSER = 64, 40
"""Draws at least, for the plan that is chosen and for one that lost."""


def most_frequent(reasons: Mapping[str, int], where: str = "") -> str:
    """The reason that was met most often, and how many others there are.

    Args:
        reasons: at least one, with how often each was met. where: the others can be read.
    """
    reason = max(reasons, key=reasons.__getitem__)
    others = len(reasons) - 1
    return f"{reason}; {others} more reason{'s' if others > 1 else ''}{where}" if others else reason


def _without_idle_ranks(problem: PlanningProblem, entry: JudgedPlan, steps: _Steps) -> JudgedPlan:
    """The plan on fewer devices where its tp axis divides nothing, unless these are slower or hold less than its own."""
    other = without_idle_ranks(entry.plan)
    if other is entry.plan or (entry.fits and _excess_bytes(problem, other)):
        return entry
    step_s = steps.of(other)
    return replace(entry, plan=other, step_s=step_s) if step_s <= entry.step_s * (1 + 1e-12) else entry


def _known_names(strategies: Sequence[str]) -> tuple[str, ...]:
    """Every name once; "adaptive" stands for all families. Raises ScheduleError for an unknown one."""
    every = (*FAMILIES, "adaptive")
    names = every if "adaptive" in strategies else tuple(dict.fromkeys(strategies))
    for name in names:
        if name not in every and not is_reference(name):
            raise ScheduleError(f"unknown strategy {name!r}{near_matches(name, every)}")
        if name != "adaptive":
            FAMILIES[name]  # raises for a reference that leads nowhere
    return names


def _nodes(divided: Sequence[PlanningProblem], name: str, posed: list[PosedPlacement]) -> list[Node]:
    """The family as parts with lower bounds; "adaptive": all placements of single components.

    Args:
        divided: the problem, by what divides its model. posed: receives the solutions of placement problems.

    Raises:
        ScheduleError: it has no member, with the reason of the first of these.
    """
    nodes, errors = list[Node](), list[ScheduleError]()
    for problem in divided:
        try:
            nodes += _nodes_of(Members(problem, name, mixed=name == "adaptive", placements=posed))
        except ScheduleError as error:
            errors.append(error)
    if len(errors) == len(divided):
        raise errors[0]
    return nodes


def _nodes_of(members: Members) -> list[Node]:
    """The parts of a family with one division of the model."""
    problem = members.problem
    if members.mixed:
        some = mixed_meshes(problem)
        return nodes_of(members, some) if some else []
    strategy = FAMILIES[members.strategy]
    if strategy.plans is None:
        return strategy.nodes(problem, members.strategy)
    plans = [replace(plan, strategy=members.strategy) for plan in strategy.plans(problem)]
    if problem.recompute != AUTO:
        plans = [recomputing_layers(problem, plan, problem.recompute) for plan in plans]
    kept = [plan for plan in plans if _keeps(problem.constraints, plan)]
    if plans and not kept:
        raise ScheduleError(f"no plan of {members.strategy} satisfies [plan]: {problem.constraints}")
    return members.given(kept)


def _keeps(asked: PlanConstraints, plan: Plan) -> bool:
    keys = ("microbatches", "bucket_bytes", "pipeline_order", "chunks")
    return asked.allow(plan.mesh) and all(getattr(asked, key) in (None, getattr(plan, key)) for key in keys)


def _excess_bytes(problem: PlanningProblem, plan: Plan) -> int:
    return max((memory.excess_bytes for memory in problem.unlike_memory(plan)), default=0)


def _rank(entry: JudgedPlan) -> tuple[bool, float]:
    """The order of the candidates: plans that fit first, the fastest of them first."""
    return not entry.fits, entry.step_s


def _renamed(entry: JudgedPlan, strategy: str) -> JudgedPlan:
    """A plan and its figures under another strategy's name."""
    return replace(entry, plan=replace(entry.plan, strategy=strategy))


def _result_named(entry: Evaluation, strategy: str) -> PlanResult:
    return replace(entry.result, plan=replace(entry.result.plan, strategy=strategy), strategy=strategy)


def _evaluated(problem: PlanningProblem, shown: Sequence[JudgedPlan], steps: _Steps) -> list[Evaluation]:
    """The evaluation of every plan under its own strategy's name, made once per program."""
    known: dict[Plan, Evaluation] = {}
    evaluations = []
    for entry in shown:
        program = entry.plan.program
        if program not in known:
            known[program] = evaluate(problem, entry.plan, samples=0, fold=True, run=steps.simulated(program))
        evaluation = known[program]
        evaluations.append(replace(evaluation, result=_result_named(evaluation, entry.plan.strategy)))
    return evaluations


Entry = TypeVar("Entry")


def first_of_each(ranked: Iterable[Entry], key: Callable[[Entry], object]) -> list[Entry]:
    """The first of all that have the same key, in order."""
    first: dict[object, Entry] = {}
    for entry in ranked:
        first.setdefault(key(entry), entry)
    return list(first.values())


@dataclass
class _Steps:
    """The step of every program that one search simulated, and a bound of the mean of many such steps."""

    problem: PlanningProblem
    seconds: dict[Plan, float] = field(default_factory=dict)
    bounds_s: list[float] = field(default_factory=list)
    runs: dict[str, dict[Plan, SimulatedStep]] = field(default_factory=dict)

    def simulated(self, program: Plan) -> SimulatedStep | None:
        """The simulation of a program, where it is kept."""
        return next((runs[program] for runs in self.runs.values() if program in runs), None)

    def of(self, plan: Plan) -> float:
        """Simulated once, whatever the strategy is called."""
        program = plan.program
        if program not in self.seconds:
            run = simulated_step(self.problem, plan, fold=True)
            self.bounds_s.append(busiest_resource_s(run.compiled, medians_s(run.estimates)[run.compiled.columns.unit]))
            if run.step_s < min((known.step_s for known in self.runs.get(plan.strategy, {}).values()), default=float("inf")):
                self.runs[plan.strategy] = {program: run}  # of each family the fastest, which is to be evaluated
            self.seconds[program] = run.step_s
        return self.seconds[program]


@dataclass
class _Opening:
    """What was opened in one search, and what became of it.

    Attributes: late: by family the parts that are put aside. impossible: by family the reasons of impossible plans.
        spare: what may be spent on a large problem.
    """

    problem: PlanningProblem
    is_large: bool
    judged: list[JudgedPlan] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    late: defaultdict[str, list[Node]] = field(default_factory=lambda: defaultdict(list))
    impossible: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @cached_property
    def steps(self) -> _Steps:
        return _Steps(self.problem)

    @cached_property
    def spare(self) -> Allowance | None:
        return Allowance(len(self.problem.model.components)) if self.is_large else None

    def early(self, name: str, nodes: list[Node], incumbents: Incumbents) -> None:
        """Open parts of a family."""
        self._open(name, nodes, incumbents, self.late[name], float("inf"))

    def later(self, name: str, incumbents: Incumbents) -> None:
        """Open the late parts of a family, as many as may be."""
        self._open(name, self.late.pop(name, []), incumbents, None, most_late(self.problem))

    def misfit(self, incumbents: Incumbents) -> None:
        """Judge the plan of a family that is closest to fitting, where none of it fits."""
        if not incumbents.steps_s:
            self.judged += incumbents.closest.judged(self.steps.of, partial(_excess_bytes, self.problem), self._variants)

    @property
    def _variants(self) -> Variants:
        """With all recomputed, and with every other ZeRO stage, where the question leaves that open: whole parameters may be
        the most of what a plan holds."""

        def recomputed(plan: Plan) -> list[Plan]:
            free = self.problem.recompute == AUTO and not plan.recomputes
            return [plan, replace(plan, recompute=FULL)] if free else [plan]

        def divided(plan: Plan) -> list[Plan]:
            stages = zero_stages(self.problem, self.problem.layout(plan))
            return [plan, *(replace(plan, zero_stage=stage) for stage in stages if stage != plan.zero_stage)]

        return (recomputed, divided)

    def _open(self, name: str, nodes: list[Node], incumbents: Incumbents, late: list[Node] | None, most: float) -> None:
        judged, tally = judged_best_first(
            nodes,
            excess_bytes=partial(_excess_bytes, self.problem),
            judge=self.steps.of,
            variants=self._variants,
            incumbents=incumbents,
            late=late,
            most=most,
            singles=most_singles(self.problem),
            spare=self.spare,
        )
        self.judged.extend(judged)
        self.tally.add(tally)
        self.impossible[name].update(tally.infeasible)


def _distinct(ranked: Sequence[JudgedPlan]) -> list[JudgedPlan]:
    """Each program once, under the first of its names, with the fastest of its cuts into stages."""

    def program(entry: JudgedPlan) -> object:
        plan = entry.plan
        placed = tuple(pair for stage in plan.stages for pair in stage.placed())
        pipeline = plan.mesh, plan.microbatches, plan.pipeline_order, plan.chunks
        return pipeline, placed, plan.zero_stage, plan.bucket_bytes, plan.recompute, plan.segments

    return first_of_each(ranked, program)


def _with_intervals(problem: PlanningProblem, kept: Sequence[Evaluation], samples: int) -> tuple[Evaluation, ...]:
    """With draws, and why each plan won or lost against the first of the ranking.

    A program that has several names is drawn once. Large programs get fewer draws, above all those of plans that lost.
    """
    first, drawn = kept[0], list[Evaluation]()
    ways_out: dict[Plan, str] = {}
    for entry in kept:
        reason = _reason(entry, first, problem.recompute)
        if not first.result.fits:
            program = entry.result.plan.program
            if program not in ways_out:
                ways_out[program] = way_out(problem, program)
            reason += ways_out[program]
        same = next((other.result for other in drawn if other.compiled is entry.compiled), None)
        if same is not None:
            names = ("step_s", "throughput_samples_per_s", "interval_correction")
            figures: dict[str, Any] = {name: getattr(same, name) for name in names}
            drawn.append(replace(entry, result=replace(entry.result, reason=reason, **figures)))
            continue
        fewest = FEWEST_DRAWS if entry.compiled is first.compiled else OF_A_LOSER
        most = max(fewest, MOST_DRAWN // max(1, entry.compiled.size))
        drawn.append(with_interval(problem, entry, samples=min(samples, most), reason=reason))
    return tuple(drawn)


def _recomputed_text(plan: Plan) -> str:
    """`3 of 12 components`, `5 of 12 components, 2 of them by operator`, `8 of 12 components, in 2 segments`."""
    whole, some = len(plan.recomputed), len(plan.recomputed_by_operator)
    by_operator = f", {some if whole else 'all'} of them by operator" if some else ""
    together = f", in {len(plan.segments)} segments" if plan.segments else ""
    return f"{whole + some} of {len(plan.components)} components{by_operator}{together}"


def _reason(entry: Evaluation, first: Evaluation, recompute: Recompute) -> str:
    plan, step_s, least_s = entry.result.plan, entry.result.step_s.median, first.result.step_s.median
    if not entry.result.fits:
        worst = max(entry.memory, key=lambda memory: memory.excess_bytes)
        line, size = worst.worst
        tried = ", even with all recomputed" if recompute == AUTO else ""
        over = format_bytes(worst.excess_bytes)
        return f"does not fit{tried}: rank {worst.rank} by {over}, mostly {line} ({format_bytes(size)})"
    again = f"; recomputes {_recomputed_text(plan)}" if plan.recomputes else ""
    if entry is first:
        return f"fastest plan that fits{again}"
    if plan.program == first.result.plan.program:
        return f"the same plan as {first.result.strategy}"
    slower = step_s - least_s
    return f"slower by {format_seconds(slower)} ({100 * slower / least_s:.0f}%){_where(entry, first)}{again}"


def _where(entry: Evaluation, first: Evaluation) -> str:
    """The category of a step that costs the most more than in the first plan, averaged over each plan's own ranks."""
    names = ("compute_s", "exposed_communication_s", "bubble_s", "idle_s", "load_s", "host_s")

    def mean(evaluation: Evaluation, name: str) -> float:
        return float(sum(getattr(rank, name) for rank in evaluation.breakdown)) / len(evaluation.breakdown)

    more = {name: mean(entry, name) - mean(first, name) for name in names}
    name = max(more, key=lambda key: more[key])
    return f"; mostly {name.removesuffix('_s').replace('_', ' ')} (+{format_seconds(more[name])} per rank)"


# Plans that are closer to the choice than a measurement can tell.


TIE = 0.035
"""Of the step. Two measurements of one program differ by so much in the median (the A/A floor of `experiments/this_machine`).
So a single run of each would not show which of two closer plans is faster."""


def is_tie(step_s: float, best_s: float) -> bool:
    """Whether a step is at most `TIE` longer than the best one. Seconds."""
    return step_s <= best_s * (1 + TIE)


def simpler_tie(problem: PlanningProblem, chosen: Evaluation) -> Evaluation | None:
    """The simplest plan on the mesh of the choice that fits and ties with it; None where the choice is as simple.

    Simpler means: no ZeRO, and buckets as PyTorch's DDP has them. Keys that the question gives stay.
    """
    plan, asked = chosen.result.plan, problem.constraints
    is_free = not isinstance(problem.zero_stage, int) and asked.dp_shard in (None, plan.mesh.dp)
    stages = [0, plan.zero_stage] if plan.zero_stage and is_free else [plan.zero_stage]
    sizes = [plan.bucket_bytes]
    if asked.bucket_bytes is None and plan.bucket_bytes != DEFAULT_BUCKET_BYTES:
        sizes.insert(0, DEFAULT_BUCKET_BYTES)
    for stage, size in product(stages, sizes):
        if (stage, size) == (plan.zero_stage, plan.bucket_bytes):
            continue
        simpler = replace(plan, mesh=plan.mesh if stage else plan.mesh.undivided(), zero_stage=stage, bucket_bytes=size)
        try:
            evaluation = evaluate(problem, simpler, samples=0, reason="simpler than the choice")
        except PlanError:  # the rules of this plan forbid the variant, as gathering ahead does without ZeRO
            continue
        if evaluation.result.fits and is_tie(evaluation.result.step_s.median, chosen.result.step_s.median):
            return evaluation
    return None
