"""Choose among plans: bound, simulate and rank every family's members, and record why each lost.

A plan at most 3.5% slower than the fastest is a tie: two measurements of one program differ by as much in the median. What is
recommended is the simplest plan that ties. A plan that fits safely (`PlanningProblem.safe_probability`) goes before any other.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

from parsim.costs.estimate import medians_s
from parsim.errors import CostError, PlanError, ScheduleError, near_matches
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
from parsim.search.memory_floor import floor_excess_bytes
from parsim.search.refine import way_out
from parsim.search.space import (
    FREE_RANKS,
    MOST_LATE_VISITS,
    Allowance,
    Node,
    PosedPlacement,
    divided_problems,
    inner_axes,
    is_small,
    most_late,
    most_singles,
    zero_stages,
)
from parsim.search.stages import recomputing_layers
from parsim.search.tree import (
    TIE,
    Incumbents,
    JudgedPlan,
    Members,
    Tally,
    Variants,
    is_tie,
    judged_best_first,
    open_one_by_one,
)
from parsim.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Search:
    """Attributes:
    candidates: the best of each family: those that fit safely first, then those that fit, the fastest of them first.
    chosen: the fastest of these; None if nothing fits.
    recommended: the simplest plan that ties with it, in the place of its family among the candidates; often the same.
    riskier: the fastest plan that fits, and not safely, if it is faster than the choice by more than a tie.
    status: "best_of_candidates" (the families were searched, optimality is not claimed) or "infeasible".
    lower_bound_s: the least of the bounds of all plans considered: none of them can be faster under these costs.
    judged: plans that were simulated. tally: what became of all plans.
    skipped: families without a member, and why.
    placements: the solver's answers to the placement problems (strategy "adaptive").
    unrefined: families that lost before their late parts were opened: a separate search may find faster plans.
    cut_short: whether Ctrl-C ended the search; what was not opened is not counted then.
    """

    candidates: tuple[Evaluation, ...]
    chosen: Evaluation | None
    recommended: Evaluation | None = None
    riskier: Evaluation | None = None
    status: str
    lower_bound_s: float
    judged: int
    skipped: tuple[tuple[str, str], ...]
    tally: Tally = field(default_factory=Tally)
    placements: tuple[PosedPlacement, ...] = ()
    unrefined: tuple[str, ...] = ()
    cut_short: bool = False

    @property
    def gap(self) -> float:
        """(chosen - lower bound) / chosen; 1 where nothing was chosen."""
        if self.chosen is None:
            return 1.0
        median = self.chosen.result.step_s.median
        return max(0.0, (median - self.lower_bound_s) / median)

    def each(self, change: Callable[[Evaluation], Evaluation]) -> Search:
        """The search with every evaluation changed."""
        named = ("chosen", "recommended", "riskier")
        kept: dict[str, Any] = {name: None if (entry := getattr(self, name)) is None else change(entry) for name in named}
        return replace(self, candidates=tuple(map(change, self.candidates)), **kept)

    def to_dict(self) -> dict[str, Any]:
        return {
            "candidates": [candidate.result.to_dict() for candidate in self.candidates],
            "chosen": None if self.recommended is None else self.recommended.result.to_dict(),
            "fastest": None if self.chosen is None else self.chosen.result.to_dict(),
            "riskier": None if self.riskier is None else self.riskier.result.to_dict(),
            "status": self.status,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "judged": self.judged,
            "considered": self.tally.to_dict(),
            "unrefined": list(self.unrefined),
            "cut_short": self.cut_short,
            "skipped": dict(self.skipped),
            "placements": [solution.to_dict() for solution in self.placements],
        }


@rare_collections()
def search(
    problem: PlanningProblem,
    strategies: Sequence[str] = tuple(FAMILIES),
    *,
    samples: int = SAMPLES,
    top: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Search:
    """Find the best plan of each named family, rank them, and choose the fastest that fits.

    Args:
        problem: model, cluster, batch and constraints: what it leaves open is free.
        strategies: keys of FAMILIES or "package.module:ROW"; "adaptive" stands for all of FAMILIES. Its candidate is the best
            of all plans considered, so no other candidate is predicted faster.
        top: keep this many plans over all families instead of the best of each.
        say: hears every two seconds what is searched, what is left, and the best step so far.

    Returns:
        A Search; after Ctrl-C of what was simulated by then (`cut_short`). A plan that was not simulated has a lower bound that
        is not below the best of its family, or is counted as not tried. Leaves out plans outside the families.

    Raises:
        ScheduleError: an unknown strategy, or no family has any member. CostError: nothing can be priced.
    """
    names = _known_names(strategies)
    opening = _Opening(problem, divided_problems(problem), _Telling(say))
    families = _families_of(opening, names, mixes="adaptive" in strategies, top=top)
    cut_short = False
    try:
        unrefined = _open_all(opening, families)
    except KeyboardInterrupt:
        if not opening.judged:
            raise
        unrefined, cut_short = list(families.owners), True
    judged, steps = opening.judged, opening.steps
    skipped = families.without_plan(judged, opening.impossible)
    if not judged:
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise opening.tally.unpriced or ScheduleError(f"no plan to choose from: {why}")
    if not cut_short and all(problem.allows(component.name, BATCH) for component in problem.model.components):
        judged = [_without_idle_ranks(problem, entry, steps) for entry in judged]
    rows = _rows(problem, judged, None if cut_short else steps.of, mixes=families.mixes and problem.cluster.size > 1, top=top)
    choice = _evaluated_choice(problem, rows, steps, samples=samples, mixes=families.mixes)
    return Search(
        candidates=choice.candidates,
        chosen=choice.chosen,
        recommended=choice.recommended,
        riskier=choice.riskier,
        status="best_of_candidates" if choice.chosen is not None else "infeasible",
        lower_bound_s=min(steps.bounds_s),
        judged=rows.judged,
        skipped=tuple(skipped.items()),
        tally=opening.tally,
        placements=tuple(families.placements),
        unrefined=tuple(name for name in unrefined if _lost(name, choice.candidates)),
        cut_short=cut_short,
    )


@dataclass
class _Families:
    """What one search opens.

    Attributes: parts: by family. owners: the best plans of each family so far. together: of all families.
        skipped: families without a member, and why. placements: receives the answers of the placement solver.
        mixes: whether "adaptive" is asked for, which stands for all. top: plans that are wanted over all families.
    """

    together: Incumbents
    mixes: bool
    top: int | None
    parts: dict[str, list[Node]] = field(default_factory=dict)
    owners: dict[str, Incumbents] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    placements: list[PosedPlacement] = field(default_factory=list)

    def without_plan(self, judged: Sequence[JudgedPlan], impossible: Mapping[str, Counter[str]]) -> dict[str, str]:
        """By family without a plan why. The plan of "adaptive" is the best one of the families."""
        found = {entry.plan.strategy for entry in judged}
        for name in self.owners:
            if self.parts[name] and name not in found and not (found and name == "adaptive"):
                self.skipped[name] = most_frequent(impossible[name]) if impossible[name] else NOT_TRIED
        if judged:
            self.skipped.pop("adaptive", None)
        return self.skipped


def _families_of(opening: _Opening, names: Sequence[str], *, mixes: bool, top: int | None) -> _Families:
    """The parts of every family."""
    problem = opening.problem
    families = _Families(Incumbents(wanted=top or 1), mixes, top)
    for name in names:
        if name != "single" and problem.cluster.size == 1:
            families.skipped[name] = "one device: there is nothing to distribute"
            continue
        try:
            families.parts[name] = _nodes(opening.divided, name, families.placements)
        except ScheduleError as error:
            families.skipped[name] = str(error)
            continue
        shared = name == "adaptive" or top is not None
        families.owners[name] = families.together if shared else Incumbents()
    return families


class _Rows(NamedTuple):
    """The fastest plan, the simplest that ties with it, the fastest that does not fit safely and is faster than both; the plans
    of the answer's table, best first; and how many plans were simulated."""

    fastest: JudgedPlan
    simplest: JudgedPlan
    riskier: JudgedPlan | None
    shown: list[JudgedPlan]
    judged: int


def _rows(
    problem: PlanningProblem,
    judged: Sequence[JudgedPlan],
    step_s: Callable[[Plan], float] | None,
    *,
    mixes: bool,
    top: int | None,
) -> _Rows:
    """The plans of the answer's table: of each family the simplest that ties with its fastest, or `top` over all families.

    Args:
        step_s: simulates a plan; None: no more are. mixes: the fastest plan is that of "adaptive" too.
    """
    rows = list[JudgedPlan]()
    if top is None:
        for family in dict.fromkeys(entry.plan.strategy for entry in judged):
            rows.append(simplest_tie(problem, [entry for entry in judged if entry.plan.strategy == family], step_s))
    # among them variants that no family had tried, and of which one may be the fastest
    judged = [*judged, *(row for row in rows if row not in judged)]
    simplest = simplest_tie(problem, judged, step_s)
    if simplest not in judged:
        judged = [*judged, simplest]
    ranked = sorted(judged, key=_rank)
    fastest = ranked[0]
    if top is not None:
        shown = _distinct([_renamed(fastest, "adaptive"), *ranked[1:]] if mixes else ranked)[:top]
        fastest = shown[0]
        if simplest.plan.program != fastest.plan.program and simplest not in shown:
            shown.append(simplest)
    else:
        best = {row.plan.strategy: row for row in rows}
        if mixes:
            best["adaptive"] = _renamed(fastest, "adaptive")
        if simplest.plan.program != fastest.plan.program or not mixes:
            best[simplest.plan.strategy] = simplest
        shown = list(best.values())
    risky = min((entry for entry in judged if not entry.safe and entry.fits), key=_rank, default=None)
    is_faster = risky is not None and fastest.safe and not is_tie(fastest.step_s, risky.step_s)
    return _Rows(fastest, simplest, risky if is_faster else None, sorted(shown, key=_rank), len(judged))


class _Choice(NamedTuple):
    """The evaluations that an answer is made of."""

    candidates: tuple[Evaluation, ...]
    chosen: Evaluation | None
    recommended: Evaluation | None
    riskier: Evaluation | None


def _evaluated_choice(problem: PlanningProblem, rows: _Rows, steps: _Steps, *, samples: int, mixes: bool) -> _Choice:
    """The rows with memory, breakdown, intervals and why each won or lost. `mixes`: the fastest is named "adaptive"."""
    # the fastest may have lost its family's place to the simplest
    before = [] if rows.shown[0].plan.program == rows.fastest.plan.program else [rows.fastest]
    entries = [*before, *rows.shown, *([rows.riskier] if rows.riskier is not None else [])]
    simplest = rows.simplest.plan.program
    evaluations = _with_intervals(problem, _evaluated(problem, entries, steps), samples, simplest)
    candidates = evaluations[len(before) : len(before) + len(rows.shown)]
    riskier = evaluations[-1] if rows.riskier is not None else None
    if not rows.fastest.fits:
        return _Choice(candidates, None, None, riskier)
    chosen = evaluations[0]
    recommended = next(one for one in candidates if one.result.plan.program == simplest)
    if mixes:
        chosen = replace(chosen, result=_result_named(chosen, "adaptive"))
        if simplest == chosen.result.plan.program:
            recommended = chosen
    return _Choice(candidates, chosen, recommended, riskier)


def _open_all(opening: _Opening, families: _Families) -> list[str]:
    """Open the parts of all families, then those that refine what was found; which families were not refined for themselves."""
    parts, owners, together, mixes = families.parts, families.owners, families.together, families.mixes
    if opening.spare is not None:
        early = open_one_by_one(parts, owners, together, opening.spare, opening.early, rivals=mixes, tell=opening.tell)
        opening.tally.add(early)
    for name, own in owners.items() if opening.spare is None else ():
        if mixes and own is not together:
            own.rival_s = together.best_s
        opening.early(name, parts[name], own)
        together.steps_s.update(own.steps_s)
    # each family opens as many late parts as it would alone, so adaptive is never slower than any of them
    unrefined = [
        name
        for name, own in owners.items()
        if own is not together and mixes and not all(is_tie(own.best_s, part.bound_s) for part in opening.late[name])
    ]
    if opening.spare is not None:
        opening.spare.left = MOST_LATE_VISITS
    for number, (name, own) in enumerate(owners.items()):
        # where mixed placements only tie they are not recommended, so they are not searched for
        ahead = TIE if name == "adaptive" and opening.spare is not None else 0.0
        found = own if not mixes and families.top is None else Incumbents(steps_s=together.steps_s, ahead=ahead)
        opening.later(name, found, 1 / (len(owners) - number))
    for own in owners.values():
        opening.misfit(own)
    return unrefined


@dataclass
class _Telling:
    """Says how far a search is, at most every two seconds. It decides nothing."""

    say: Callable[[str], None]
    last_s: float = field(default_factory=lambda: time.monotonic())

    def __call__(self, what: str, left: int, best_s: float) -> None:
        if time.monotonic() - self.last_s > 2.0:
            self.last_s = time.monotonic()
            best = "nothing fits so far" if best_s == float("inf") else f"best so far {format_seconds(best_s)}"
            self.say(f"{what}: {left} parts left, {best}")


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
    if other is entry.plan or (entry.fits and (_excess_bytes(problem, other) or (entry.safe and problem.unsafe_bytes(other)))):
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


def _unsafe_bytes(problem: PlanningProblem, plan: Plan) -> int:
    return max((size for _, size in problem.unsafe_bytes(plan)), default=0)


def _rank(entry: JudgedPlan) -> tuple[bool, bool, float, int]:
    """The order of the candidates: plans that fit safely, plans that fit, the others; of them the fastest first, and of equal
    steps the one on fewer devices."""
    return not entry.fits, not entry.safe, entry.step_s, entry.plan.mesh.size


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
    divided: Sequence[PlanningProblem]
    tell: _Telling
    judged: list[JudgedPlan] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    late: defaultdict[str, list[Node]] = field(default_factory=lambda: defaultdict(list))
    impossible: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @cached_property
    def steps(self) -> _Steps:
        return _Steps(self.problem)

    @cached_property
    def spare(self) -> Allowance | None:
        return None if is_small(self.problem) else Allowance(problem=self.problem)

    def early(
        self,
        name: str,
        nodes: list[Node],
        incumbents: Incumbents,
        until_s: float = float("inf"),
        spare: Allowance | None = None,
    ) -> list[Node]:
        """Open parts of a family; of a large problem, which has something to spend, return those whose bounds are above
        `until_s`."""
        tell = partial(self.tell, name) if spare is None else None  # else it is told which part of all families is opened
        rest = list[Node]()
        self._open(name, nodes, incumbents, self.late[name], float("inf"), spare, tell, until_s, rest)
        return rest

    def later(self, name: str, incumbents: Incumbents, share: float) -> None:
        """Open the late parts of a family, as many as may be, for a share of what may still be spent."""
        nodes, most, tell = self.late.pop(name, []), most_late(self.problem), partial(self.tell, f"refinements of {name}")
        incumbents.longer.clear()  # other cuts may exceed their bounds by less
        if self.spare is None:
            self._open(name, nodes, incumbents, None, most, None, tell)
            return
        own = replace(self.spare, left=share * self.spare.left, misses=1)
        rest = self.spare.left - own.left
        self._open(name, nodes, incumbents, None, most, own, tell)
        self.spare.left, self.spare.memories = rest + max(0.0, own.left), own.memories

    def misfit(self, incumbents: Incumbents) -> None:
        """Judge the plan of a family that is closest to fitting, where none of it fits; on more ranks than are free only where
        no other family fits, because that alone takes ten CPU-s on 100,000."""
        if self.problem.cluster.size > FREE_RANKS and incumbents.rival_s < float("inf"):
            return
        if not incumbents.steps_s and incumbents.risky_s == float("inf"):
            self.judged += incumbents.closest.judged(
                self.steps.of, partial(_excess_bytes, self.problem), self._variants, self._floor_bytes
            )

    def _floor_bytes(self, plan: Plan) -> float:
        """By how much a plan does not fit at least."""
        axes = plan.mesh.cp, plan.mesh.ep
        problem = next((each for each in self.divided if inner_axes(each) == axes), None)
        if problem is None:  # a plan of a strategy that is not parsim's own
            return 0.0
        return floor_excess_bytes(problem, plan, recomputing=plan.recomputes, segments=bool(plan.segments))

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

    def _open(
        self,
        name: str,
        nodes: list[Node],
        incumbents: Incumbents,
        late: list[Node] | None,
        most: float,
        spare: Allowance | None,
        tell: Callable[[int, float], None] | None,
        until_s: float = float("inf"),
        rest: list[Node] | None = None,
    ) -> None:
        _, tally = judged_best_first(
            nodes,
            excess_bytes=partial(_unsafe_bytes, self.problem),
            fits=lambda plan: not _excess_bytes(self.problem, plan),
            floor_bytes=self._floor_bytes,
            judge=self.steps.of,
            variants=self._variants,
            incumbents=incumbents,
            late=late,
            most=most,
            singles=most_singles(self.problem),
            spare=spare,
            tell=tell,
            found=self.judged.append,  # each at once: Ctrl-C may end this search
            until_s=until_s,
            rest=rest,
        )
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


def _with_intervals(
    problem: PlanningProblem, kept: Sequence[Evaluation], samples: int, recommended: Plan
) -> tuple[Evaluation, ...]:
    """With draws, and why each plan won or lost against the first of the ranking.

    A program that has several names is drawn once. Large programs get fewer draws, above all those of plans that lost.
    """
    first, drawn = kept[0], list[Evaluation]()
    ways_out: dict[Plan, str] = {}
    for entry in kept:
        reason = _reason(entry, first, problem.recompute)
        if entry.result.plan.program == recommended != first.result.plan.program:
            reason += "; a tie with the fastest, and simpler"
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
    if slower < 0:
        by, sure = f"{format_seconds(-slower)} ({-100 * slower / least_s:.0f}%)", entry.result.fit_probability
        return f"faster by {by}, but fits with a probability of only {sure:.0%}{again}"
    return f"slower by {format_seconds(slower)} ({100 * slower / least_s:.0f}%){_where(entry, first)}{again}"


def _where(entry: Evaluation, first: Evaluation) -> str:
    """The category of a step that costs the most more than in the first plan, averaged over each plan's own ranks."""
    names = ("compute_s", "exposed_communication_s", "bubble_s", "idle_s", "load_s", "host_s")

    def mean(evaluation: Evaluation, name: str) -> float:
        return float(sum(getattr(rank, name) for rank in evaluation.breakdown)) / len(evaluation.breakdown)

    more = {name: mean(entry, name) - mean(first, name) for name in names}
    name = max(more, key=lambda key: more[key])
    return f"; mostly {name.removesuffix('_s').replace('_', ' ')} (+{format_seconds(more[name])} per rank)"


# The simplest of the plans that a measurement could not tell from the fastest.


def complexity(problem: PlanningProblem, plan: Plan) -> tuple[int, ...]:
    """What makes a plan harder to run and to change, the worst first: plans are compared by these numbers.

    Placements by component; a tp axis over several nodes; pipeline stages; a tp axis; a cp axis; an ep axis of whole replicas;
    recomputation; ZeRO (0, then 3 as FSDP has it, of a pipeline 1 as Megatron has it); sharding groups; chunks of a stage;
    buckets other than PyTorch's.
    """
    mesh = plan.mesh
    return (
        plan.strategy == "adaptive",
        mesh.tp > problem.cluster.most_on_a_node,
        mesh.pp > 1,
        mesh.tp > 1,
        mesh.cp > 1,
        mesh.ep > 1 and mesh.pp * mesh.tp == 1,
        bool(plan.recomputes),
        ((0, 1, 2, 3) if mesh.pp > 1 else (0, 3, 2, 1)).index(plan.zero_stage),
        mesh.dp_shard > 0,
        plan.chunks > 1,
        plan.bucket_bytes != DEFAULT_BUCKET_BYTES,
    )


def simplest_tie(problem: PlanningProblem, judged: Sequence[JudgedPlan], step_s: Callable[[Plan], float] | None) -> JudgedPlan:
    """The simplest plan that fits as safely as the fastest and ties with it; the fastest of those that are as simple.

    Where none fits, the best one.

    Args:
        judged: plans. step_s: simulates a plan; None: a simpler one that nobody has simulated is not looked for.
    """
    best = min(judged, key=_rank)
    if not best.fits:
        return best
    ties = [each for each in judged if (each.fits, each.safe) == (best.fits, best.safe) and is_tie(each.step_s, best.step_s)]
    if problem.constraints.dp_shard is not None and best.plan.zero_stage:  # groups were asked for, and ZeRO 0 has none
        ties = [each for each in ties if each.plan.zero_stage]
    simplest = min(ties, key=lambda entry: (complexity(problem, entry.plan), _rank(entry)))
    if step_s is None:
        return simplest
    variants = {*_simpler(problem, simplest.plan), *_simpler(problem, best.plan)}
    for plan in sorted(variants, key=partial(complexity, problem)):
        told, least = complexity(problem, plan), complexity(problem, simplest.plan)
        if told > least:
            break
        with contextlib.suppress(PlanError, CostError):  # the rules of a plan forbid the variant
            if _excess_bytes(problem, plan) or (simplest.safe and problem.unsafe_bytes(plan)):
                continue
            seconds = step_s(plan)
            if is_tie(seconds, best.step_s) and (told < least or seconds < simplest.step_s):
                simplest = replace(simplest, plan=plan, step_s=seconds)
    return simplest


def _simpler(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The plan without ZeRO or at its simplest stage, without sharding groups, and with PyTorch's buckets, as far as that is
    simpler and the question leaves it open."""
    asked = problem.constraints
    is_free = not isinstance(problem.zero_stage, int) and asked.dp_shard is None
    stages = {plan.zero_stage, *({0, 1, 3}.intersection(problem.zero_stages) if is_free and plan.zero_stage else ())}
    sizes = {plan.bucket_bytes, *((DEFAULT_BUCKET_BYTES,) if asked.bucket_bytes is None else ())}
    meshes = {plan.mesh, *((plan.mesh.undivided(),) if asked.dp_shard is None else ())}
    for stage, size, mesh in product(stages, sizes, meshes):
        if stage == 0 and mesh.dp_shard:
            continue
        with contextlib.suppress(PlanError):
            other = replace(plan, mesh=mesh, zero_stage=stage, bucket_bytes=size)
            if complexity(problem, other) < complexity(problem, plan):
                yield other
