"""The members of a family as a tree: every node has a lower bound of the plans below it, and opens into smaller parts.

    mesh and microbatches     least computation of any cut into stages
    order, chunks, stages     computation, conversions and transfers of these stages
    ZeRO stage, buckets       collectives of the gradients and parameters too: `bounds.step_bound_s`
    recomputation             the plan as it fits

A node's bound is at most that of the nodes it opens into. So a search that opens the least bound first may stop once that bound
is above a plan it has simulated.

A family that has lost is searched until its best is known within 2% (LOSERS_WITHIN); the winner is exact, and the answer
names the families that were not refined.
"""

from __future__ import annotations

import contextlib
import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from itertools import count as counter
from operator import itemgetter
from typing import Any

import numpy as np

from parsim.errors import CostError, PlanError, ScheduleError
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import AUTO, ZERO_STAGES, Plan
from parsim.predict.problem import PlanningProblem
from parsim.search.bound import (
    chain_seconds,
    computation_bound_s,
    device_bound_s,
    lowered_s,
    order_bound_s,
    prices_are_alike,
    step_bound_s,
)
from parsim.search.estimate import estimated_s, gathering_s, least_missing_bytes, least_seconds
from parsim.search.memory_floor import floor_excess_bytes, weights_are_too_many
from parsim.search.placement.problem import is_chain
from parsim.search.refine import every_choice, instead_of, may_fit, missing_of_cut, other_cuts
from parsim.search.space import (
    BOUNDED,
    CUT,
    MOST_VISITS,
    Allowance,
    Bounds,
    Node,
    PosedPlacement,
    bucket_sizes,
    is_large,
    is_small,
    is_usual,
    microbatch_counts,
    orders,
    other_bucket_sizes,
    zero_stages,
)
from parsim.search.stages import Cutting, recomputing_layers
from parsim.search.tensor import best_placement, can_be_cut, tensor_placements, uncut_text

# Best first: open the part of a family with the least bound, simulate single plans, stop where no bound is below the best.
#
# Every plan that is not simulated either does not fit, is impossible, or has a lower bound that is not below the best plan
# found. So the best of the family is found, among its members.
#
# Late parts are put aside. They refine what the others stand for (other cuts into stages, other bucket sizes), so they are
# opened last, when the best plan is known: few of their bounds are below it.


@dataclass
class Tally:
    """What became of the plans of a search.

    Attributes: simulated, too_large (do not fit), slower (their lower bound is above the best plan), untried
        (parts of the search beyond its limit): numbers of plans.
        infeasible: numbers of plans by the reason why they are impossible. unpriced: the first error of a price.
    """

    simulated: int = 0
    too_large: int = 0
    slower: int = 0
    untried: int = 0
    infeasible: Counter[str] = field(default_factory=Counter)
    unpriced: CostError | None = None

    @property
    def considered(self) -> int:
        """All plans."""
        return self.simulated + self.too_large + self.slower + self.untried + sum(self.infeasible.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "plans": self.considered,
            "simulated": self.simulated,
            "slower_by_a_lower_bound": self.slower,
            "do_not_fit": self.too_large,
            "not_tried": self.untried,
            "infeasible": dict(self.infeasible),
        }

    def leave(self, parts: Iterable[tuple[float, int]], bar_s: float) -> None:
        """Count the plans of parts that are not opened.

        Args:
            parts: bounds, and numbers of plans. bar_s: a plan whose bound is at or above this is not wanted.
        """
        for bound_s, size in parts:
            if bound_s < bar_s:
                self.untried += size
            else:
                self.slower += size

    def add(self, other: Tally) -> None:
        """Count the plans of another family too."""
        self.simulated += other.simulated
        self.too_large += other.too_large
        self.slower += other.slower
        self.untried += other.untried
        self.infeasible.update(other.infeasible)
        self.unpriced = self.unpriced or other.unpriced


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPlan:
    """A plan that was simulated, its step, and whether it fits; safe: with the probability that a search prefers."""

    plan: Plan
    step_s: float
    fits: bool = True
    safe: bool = True


MOST_BOUNDED = 8
"""Parts of which the plans are compared where none fits: bounds of weights are alike on many meshes."""

MOST_ACTIONS = 2**13
"""Actions of the pipelines of these plans together, on all ranks: memory is worked out action by action."""

HARDLY_MORE = 3e-3
"""Of what a plan exceeds the memory by: no reason for more microbatches, which take longer."""

Variants = Sequence[Callable[[Plan], Iterable[Plan]]]
"""Each takes a plan to what may stand for it, itself included: the first all plans, each further one the best so far."""


@dataclass
class Closest:
    """What of all that does not fit is closest to fitting.

    Attributes: exact: the single plan that needs least beyond the memory, and how many bytes. bounded: the parts and plans
        with the least bounds of them, of every mesh in turn. A bound may be far below what any plan needs, on some meshes
        further than on others, so all are compared by their plans.
    """

    exact: tuple[float, Node] | None = None
    bounded: tuple[tuple[float, Node], ...] = ()

    def add(self, other: Closest) -> None:
        """What is closest of both."""
        self.exact = min(filter(None, (self.exact, other.exact)), key=itemgetter(0), default=None)
        of_mesh: Counter[Mesh | None] = Counter()
        ranked = []
        for missing, node in sorted(self.bounded + other.bounded, key=itemgetter(0)):
            mesh = node.mesh if node.plan is None else node.plan.mesh
            ranked.append((of_mesh[mesh], missing, node))
            of_mesh[mesh] += 1
        self.bounded = tuple(part[1:] for part in sorted(ranked, key=itemgetter(0, 1))[:MOST_BOUNDED])

    def judged(
        self,
        judge: Callable[[Plan], float],
        excess_bytes: Callable[[Plan], int],
        variants: Variants,
        floor_bytes: Callable[[Plan], float],
    ) -> list[JudgedPlan]:
        """The plan that is closest; of each part its first one that is possible.

        Args:
            judge: seconds of a plan's step. excess_bytes: by how much a plan does not fit; floor_bytes: at least.
        """
        plans = self._plans()
        if not plans:
            return []
        for variants_of in variants:
            plans = [_closest([each for plan in plans for each in variants_of(plan)], excess_bytes, floor_bytes)]
        plan = _closest(plans, excess_bytes, floor_bytes)
        fits = not excess_bytes(plan)
        return [JudgedPlan(plan=plan, step_s=judge(plan), fits=fits, safe=fits)]

    def _plans(self) -> list[Plan]:
        """What to compare: the exact one, and of the bounded ones first those of the shortest pipelines."""
        exact = None if self.exact is None else _first_plan(self.exact[1])
        near = [node for missing, node in self.bounded if missing < float("inf")] or [node for _, node in self.bounded]

        def actions(plan: Plan) -> int:
            return plan.mesh.pp * plan.chunks * plan.microbatches

        bounded = sorted(filter(None, map(_first_plan, near)), key=actions)
        few = max(1, bisect_right(list(accumulate(map(actions, bounded))), MOST_ACTIONS))
        return [*filter(None, (exact,)), *bounded[:few]]


def _closest(plans: Sequence[Plan], excess_bytes: Callable[[Plan], int], floor_bytes: Callable[[Plan], float]) -> Plan:
    """The first that exceeds the memory by the least, or by hardly more; memory is worked out where floors leave it open."""
    floors = [floor_bytes(plan) for plan in plans]
    excess, most = dict[int, int](), float("inf")
    for number in sorted(range(len(plans)), key=floors.__getitem__):
        if floors[number] > most:
            break
        excess[number] = excess_bytes(plans[number])
        most = min(most, excess[number] * (1 + HARDLY_MORE))
    return plans[min(number for number, own in excess.items() if own <= most)]


TIE = 0.035
"""Of the step. Two measurements of one program differ by so much in the median (the A/A floor of `experiments/this_machine`).
So a single run of each would not show which of two closer plans is faster."""


def is_tie(step_s: float, best_s: float) -> bool:
    """Whether a step is at most `TIE` longer than the best one. Seconds."""
    return step_s <= best_s * (1 + TIE)


LOSERS_WITHIN = 0.02
"""A family that has lost to a plan of another one is known this well: its best may take so much less than the one shown."""


@dataclass
class Incumbents:
    """The steps of the best plans of a family so far, of which `wanted` are kept.

    Attributes: rival_s: of the best plan of other families. A family that no longer can be faster is left at a plan of which
        its best is within `LOSERS_WITHIN`. closest: of parts that are opened one by one, what exceeds the memory least.
        risky_s: of the fastest plan so far that fits, and not safely. ahead: of the best step, by how much one must be faster.
        longer: of plans that differ in ZeRO stage and buckets alone, by how much one was simulated to take longer than its
        bound, at least.
    """

    wanted: int = 1
    steps_s: dict[Plan, float] = field(default_factory=dict)
    rival_s: float = float("inf")
    closest: Closest = field(default_factory=Closest)
    risky_s: float = float("inf")
    ahead: float = 0.0
    longer: dict[object, float] = field(default_factory=dict)

    @property
    def risky_bar_s(self) -> float:
        """A plan that does not fit safely is wanted if it is faster than any other such plan, and no tie with a safe one."""
        return min(self.risky_s, min(self.best_s, self.rival_s) / (1 + TIE))

    @property
    def best_s(self) -> float:
        """The step of the fastest plan so far."""
        return min(self.steps_s.values(), default=float("inf"))

    @property
    def bar_s(self) -> float:
        """A plan whose bound is at or above this is not wanted."""
        best = sorted(self.steps_s.values())
        if len(best) < self.wanted:
            return float("inf")
        bar = best[self.wanted - 1] / (1 + self.ahead)
        return min(bar, max(self.rival_s, (1 - LOSERS_WITHIN) * bar))


def judged_best_first(
    nodes: Iterable[Node],
    *,
    excess_bytes: Callable[[Plan], int],
    judge: Callable[[Plan], float],
    variants: Variants = (),
    incumbents: Incumbents,
    late: list[Node] | None = None,
    most: float = float("inf"),
    singles: int = 0,
    spare: Allowance | None = None,
    fits: Callable[[Plan], bool] = lambda _: False,
    floor_bytes: Callable[[Plan], float] = lambda _: 0.0,
    tell: Callable[[int, float], None] | None = None,
    found: Callable[[JudgedPlan], None] = lambda _: None,
    until_s: float = float("inf"),
    rest: list[Node] | None = None,
) -> tuple[list[JudgedPlan], Tally]:
    """All plans of a family that could be its best.

    Args:
        excess_bytes: by how much a plan does not fit safely; floor_bytes: at least. judge: seconds of a plan's step.
        fits: whether a plan that does not fit safely fits; the fastest of these are judged too.
        incumbents: the best so far, read and added to. late: receives the parts that are put aside; None: none are.
        most: parts that are opened, once some plan fits; those that cost nothing apart. singles: how many more if they are
            single plans, which wait behind parts of lower bounds.
        spare: of a large problem, what may be spent: the parts come one by one, and none that does not fit is judged.
        tell: hears before every part how many are left and the best step so far. found: receives every plan once it is judged.
        rest: receives the parts whose bounds are above `until_s`, once some plan fits; None: they are opened too.

    Returns:
        Of plans that do not fit one is judged, the one closest to fitting, and only if none fits and `late` is given.
    """
    front = _Front(excess_bytes, judge, fits, incumbents, late, spare, tell, found, until_s, rest)
    front.open(nodes, most, singles)
    if spare is not None:
        incumbents.closest.add(front.closest)
    elif late is not None and not front.judged and not incumbents.steps_s:
        for entry in front.closest.judged(judge, excess_bytes, variants, floor_bytes):
            front.keep(entry)
    return front.judged, front.tally


MOST_FRUITLESS = 500
"""Refinements in a row that are judged and not the fastest so far: no more are. Of 1,000 random problems 5 lose up to 1.9% to
enumeration with 100, 2 of them with 200, and none with 400 (`experiments/search`)."""


@dataclass
class _Front:
    """Parts of a family in the order in which they are opened, and what became of those that were.

    Attributes: passed: bounds and sizes of parts that were left. taken: parts that were opened. fruitless: plans judged in a
        row that were not the fastest so far. Others: as above.
    """

    excess_bytes: Callable[[Plan], int]
    judge: Callable[[Plan], float]
    fits: Callable[[Plan], bool]
    incumbents: Incumbents
    late: list[Node] | None
    spare: Allowance | None
    tell: Callable[[int, float], None] | None
    found: Callable[[JudgedPlan], None]
    until_s: float
    rest: list[Node] | None
    tally: Tally = field(default_factory=Tally)
    judged: list[JudgedPlan] = field(default_factory=list)
    closest: Closest = field(default_factory=Closest)
    passed: list[tuple[float, int]] = field(default_factory=list)
    taken: int = 0
    fruitless: int = 0
    queue: list[tuple[bool, float, int, Node]] = field(default_factory=list)
    number: Iterator[int] = field(default_factory=counter)

    def open(self, nodes: Iterable[Node], most: float, singles: int) -> None:
        """Open what could hold the best plan, as far as may be, and count what is left."""
        for node in nodes:
            self._push(node)
        while self.queue:
            node = self.queue[0][-1]
            if self.tell is not None:
                self.tell(len(self.queue), self.incumbents.best_s)
            wanted = self._expected_s(node) < self.incumbents.bar_s
            if wanted and self._is_over(node, most, singles):
                break
            heapq.heappop(self.queue)
            if self.rest is not None and self.incumbents.steps_s and self._waits(node):
                self.rest.append(node)
                continue
            if not wanted or (self.spare is None and self.taken >= most and not node.is_one):
                self.passed.append((node.bound_s, node.size))
                continue
            self.taken += node.visits > 0
            if self.spare is not None:
                self.spare.open(node.visits)
            try:
                self._open(node)
            except (PlanError, ScheduleError, CostError) as error:
                self.tally.infeasible[str(error)] += node.size
                if isinstance(error, CostError):
                    self.tally.unpriced = self.tally.unpriced or error
        self.tally.leave([*self.passed, *((node.bound_s, node.size) for *_, node in self.queue)], self.incumbents.bar_s)

    def _push(self, node: Node, least_s: float = 0.0, *, at_once: bool = False) -> None:
        """Put a part where its turn is, or aside. `least_s`: a bound of what it belongs to."""
        own_s = max(node.bound_s, least_s)
        if own_s > node.bound_s or (at_once and not node.at_once):
            node = replace(node, bound_s=own_s, at_once=at_once or node.at_once)
        if node.late and self.late is not None:
            self.late.append(node)
            return
        first = node.fits and self.spare is not None and not self.incumbents.steps_s  # then the search knows when to stop
        heapq.heappush(self.queue, (not node.at_once, 0.0 if first else node.expected_s, next(self.number), node))

    def _expected_s(self, node: Node) -> float:
        """The bound of a part; of a single plan of a large problem what it would take if it exceeds its bound as others do."""
        if self.spare is None or node.plan is None:
            return node.bound_s
        if node.promise_s < float("inf"):
            return max(node.bound_s, node.promise_s / (1 + UNLIKELY))
        return node.bound_s * self.incumbents.longer.get(_without_gathers(node.plan), 1.0)

    def _waits(self, node: Node) -> bool:
        """Whether parts elsewhere come first. What stands for a plan does not: its memory is worked out already."""
        return node.expected_s > self.until_s and not (node.at_once or node.instead_of_one or node.fits)

    def _is_over(self, node: Node, most: float, singles: int) -> bool:
        """Whether nothing more is opened, of which `node` would be next."""
        if self.spare is None:
            return self.taken >= most + singles or (self.late is None and self.fruitless >= MOST_FRUITLESS)
        # without a plan that fits the search of a large problem goes on for longer
        known = bool(self.incumbents.steps_s) or self.incumbents.rival_s < float("inf")
        return (self.taken >= most and known) or not (node.at_once or self.spare.lasts(known=known))

    def _open(self, node: Node) -> None:
        missing = 0.0 if node.missing_bytes is None else node.missing_bytes()
        if missing:
            self.tally.too_large += node.size
            self.closest.add(Closest(bounded=((missing, node),)))
        elif node.opened is not None:
            for part in node.opened():
                self._push(part, node.bound_s, at_once=node.at_once)
        else:
            assert node.plan is not None
            over = node.over_bytes or self.excess_bytes(node.plan)
            if over:
                self._stand_in(node, node.plan, over)
            else:
                self._judge(node, node.plan)

    def keep(self, entry: JudgedPlan) -> None:
        """Add a plan that was judged."""
        self.judged.append(entry)
        self.found(entry)

    def _judge(self, node: Node, plan: Plan) -> None:
        step_s = self.judge(plan)
        self.fruitless = 0 if step_s < self.incumbents.best_s else self.fruitless + 1
        if self.spare is not None:
            self.spare.simulate(plan)
            key, longer = _without_gathers(plan), step_s / node.bound_s if node.bound_s else 1.0
            self.incumbents.longer[key] = min(longer, self.incumbents.longer.get(key, longer))
        self.tally.simulated += 1
        self.keep(JudgedPlan(plan=plan, step_s=step_s))
        self.incumbents.steps_s[plan.program] = step_s

    def _stand_in(self, node: Node, plan: Plan, over: float) -> None:
        """Put what may be judged instead of a plan that does not fit safely where its turn is; judge it too if it may win."""
        others = list(node.instead()) if node.instead is not None else []
        others = [other for other in others if self.late is not None or not other.covered]
        if not node.over_bytes and node.bound_s < self.incumbents.risky_bar_s and self.fits(plan):
            self.keep(JudgedPlan(plan=plan, step_s=self.judge(plan), safe=False))
            self.incumbents.risky_s = min(self.incumbents.risky_s, self.judged[-1].step_s)
            self.tally.simulated += 1
        else:
            self.tally.too_large += all(other.late for other in others)
        self.closest.add(Closest(bounded=((over, node),)) if node.over_bytes else Closest(exact=(over, node)))
        for other in others:
            self._push(other, node.bound_s, at_once=node.at_once)


def _without_gathers(plan: Plan) -> object:
    """Equal for plans that differ in ZeRO stage and bucket size alone, those that gather parameters (ZeRO 3) apart."""
    return plan.mesh, plan.without_zero(), plan.recompute, plan.segments, plan.zero_stage == ZERO_STAGES[-1]


def _first_plan(node: Node) -> Plan | None:
    """The first plan of a part that is possible."""
    if node.plan is not None or node.opened is None:
        return node.plan
    with contextlib.suppress(PlanError, ScheduleError, CostError):
        for part in node.opened():
            if (plan := _first_plan(part)) is not None:
                return plan
    return None


OrderAndChunks = tuple[str, int]


def outline_bound_s(problem: PlanningProblem, mesh: Mesh, count: int, order: OrderAndChunks, *, mixed: bool) -> float:
    """Seconds that no step goes below, whatever the cut, the ZeRO stage, the buckets and what is recomputed: computation alone.

    With t_s the time of one microbatch on stage s of a chain, no step x is below sum_{j < s} t_j + M t_s. So a stage leaves at
    least (1 - 1/M) of what the stages before it have left of x, and p stages hold at most x (1 - (1 - 1/M)^p).
    """
    least = least_seconds(problem, mesh, count, mixed=mixed)
    bound_s = max(count * least.sum_s / mesh.pp, count * least.longest_s)
    if is_chain(problem) and not PIPELINE_ORDERS[order[0]].halves:
        bound_s = max(bound_s, least.sum_s)
        if order[1] == 1:
            bound_s = max(bound_s, least.sum_s / (1 - (1 - 1 / count) ** mesh.pp))
    return lowered_s(problem, mesh, bound_s)


@dataclass(frozen=True)
class Members:
    """The tree of one family of one problem.

    Attributes: strategy: name that the plans get. mixed: whether every component has a placement of its own.
        placements: receives the solutions of the placement problems.
    """

    problem: PlanningProblem
    strategy: str
    mixed: bool = False
    placements: list[PosedPlacement] = field(default_factory=list)

    def of_mesh(self, mesh: Mesh) -> list[Node]:
        """One node per number of microbatches, and per kind of pipeline order.

        Raises:
            ScheduleError: the batch or the components do not divide so far, or nothing can be cut.
        """
        if mesh.pp > len(self.problem.model.components):
            raise ScheduleError(
                f"{self.strategy} wants {mesh.pp} stages and {self.problem.model.name} has "
                f'{len(self.problem.model.components)} components; use fewer devices, or granularity "layer" with tp = 1'
            )
        if mesh.tp > 1 and not self.mixed and not can_be_cut(self.problem, mesh.tp):
            raise ScheduleError(uncut_text(self.problem, mesh.tp))
        if is_small(self.problem):
            return self._by_counts(mesh, orders(self.problem, mesh))
        if self.mixed:
            every = partial(self._by_counts, mesh, orders(self.problem, mesh))
            return [Node(device_bound_s(self.problem, mesh.size), self._plans_on(mesh), every, late=True)]
        return self._outlines(mesh)

    def _outlines(self, mesh: Mesh) -> list[Node]:
        """The parts of one mesh: one per number of microbatches and order; of a large problem usual orders, the others late."""
        problem, nodes = self.problem, list[Node]()
        least_s, counts = device_bound_s(problem, mesh.size), microbatch_counts(problem, mesh)
        opened = []
        for order in orders(problem, mesh):
            usual = is_usual(problem, mesh, order)
            if usual or not is_large(problem):
                opened.append((order, usual))
                continue
            size = len(counts) * self._ways(mesh)
            nodes.append(Node(least_s, size, partial(self._by_counts, mesh, [order]), late=True))
        figures = self._figures(mesh, counts, [order for order, _ in opened]) if opened else {}
        for order, usual in opened:
            for count in counts:
                # of what is impossible or has no price neither is known: it says so when it is opened
                bound_s, promise_s = figures.get((count, order), (0.0, float("inf")))
                node = self._outline(mesh, count, [order], max(least_s, bound_s))
                nodes.append(replace(node, promise_s=promise_s, usual=usual))
        return nodes

    def _figures(
        self, mesh: Mesh, counts: Sequence[int], some: Sequence[OrderAndChunks]
    ) -> dict[tuple[int, OrderAndChunks], tuple[float, float]]:
        """By outline its bound and its estimate, in seconds, of those that are known."""
        known = []
        for count in counts:
            with contextlib.suppress(PlanError, ScheduleError, CostError):
                placements = next(iter(self._placed(mesh, count)))
                known.append((count, placements, chain_seconds(self.problem, mesh, count, placements)))
        if not known:
            return {}
        priced, placements_of, chains = zip(*known, strict=True)
        promised = np.full((len(known), len(some)), float("inf"))
        with contextlib.suppress(PlanError, ScheduleError, CostError):
            promised = estimated_s(self.problem, mesh, priced, some, placements_of, chains)
        figures = {}
        for row, count in enumerate(priced):
            for column, order in enumerate(some):
                bound_s = outline_bound_s(self.problem, mesh, count, order, mixed=False)
                figures[count, order] = bound_s, max(bound_s, float(promised[row, column]))
        return figures

    def _by_counts(self, mesh: Mesh, every: Sequence[OrderAndChunks]) -> list[Node]:
        """The parts with some pipeline orders."""
        nodes = []
        counts = microbatch_counts(self.problem, mesh)
        for count in reversed(counts) if self.mixed else counts:  # placements of small microbatches fit first
            if self.mixed:
                least = least_seconds(self.problem, mesh, count, mixed=True)
                nodes += every_choice(self.problem, self.strategy, mesh, count, least, self._ways(mesh), self._of_cut)
                if mesh.dp != (self.problem.constraints.dp or 1):
                    continue  # the tp axis makes replicas too
            by_bound: dict[float, list[OrderAndChunks]] = {}
            for order in every:
                bound_s = outline_bound_s(self.problem, mesh, count, order, mixed=self.mixed)
                by_bound.setdefault(bound_s, []).append(order)
            nodes += [self._outline(mesh, count, some, bound_s) for bound_s, some in by_bound.items()]
        return nodes

    def _outline(self, mesh: Mesh, count: int, some: Sequence[OrderAndChunks], bound_s: float) -> Node:
        """One number of microbatches and some pipeline orders of one bound."""
        missing = partial(least_missing_bytes, self.problem, mesh, count, tuple(some), mixed=self.mixed)
        size = self._ways(mesh) * len(some)
        return Node(bound_s, size, self._opening(mesh, count, some, bound_s), missing_bytes=missing, mesh=mesh)

    def of_fewer_devices(
        self, by_size: Sequence[Sequence[Mesh]], opened: Callable[[Members, Sequence[Mesh], dict[str, None]], list[Node]]
    ) -> list[Node]:
        """Parts of the meshes that leave devices idle, opened only as far as so few devices may be faster.

        Args:
            by_size: meshes of equal size, the largest first. opened: the parts on some meshes.
        """
        counts = [{mesh: plans for mesh in some if (plans := self._plans_on(mesh))} for some in by_size]
        parts = [(list(some), sum(some.values())) for some in counts if some]
        if not parts:
            return []
        devices = [some[0].size for some, _ in parts]
        if not is_small(self.problem) and weights_are_too_many(self.problem, devices[0]):
            never = float("inf")  # nor are they close to it, beside plans on more devices
            every = sum(size for _, size in parts)
            return [Node(0.0, every, partial(opened, self, parts[0][0], {}), missing_bytes=lambda: never)]

        def rest(number: int) -> list[Node]:
            if number == len(parts):
                return []
            left = sum(size for _, size in parts[number:])
            bound_s = device_bound_s(self.problem, devices[number])
            return [Node(bound_s, left, lambda: [*opened(self, parts[number][0], {}), *rest(number + 1)])]

        if prices_are_alike(self.problem):
            return rest(0)
        return [Node(device_bound_s(self.problem, some[0].size), size, partial(opened, self, some, {})) for some, size in parts]

    def divides(self, mesh: Mesh) -> bool:
        """Whether the batch divides over the replicas."""
        return self.problem.global_batch % mesh.dp == 0

    def _plans_on(self, mesh: Mesh) -> int:
        """How many plans a mesh has, cuts into stages apart; 0 where it is impossible."""
        if mesh.pp > len(self.problem.model.components) or not self.divides(mesh):
            return 0
        if mesh.tp > 1 and not self.mixed and not can_be_cut(self.problem, mesh.tp):
            return 0
        with contextlib.suppress(ScheduleError):
            counts = len(microbatch_counts(self.problem, mesh))
            return counts * self._ways(mesh) * len(orders(self.problem, mesh))
        return 0

    @property
    def _solved(self) -> bool:
        """Whether placements were solved for, which takes longer than to judge the plans that follow."""
        return self.mixed and not is_small(self.problem)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return bucket_sizes(self.problem)

    def _ways(self, mesh: Mesh) -> int:
        """Combinations of ZeRO stages and bucket sizes."""
        if mesh.copies * mesh.tp == 1:
            return 1
        return len(self._sizes) * len(self.problem.zero_stages_on(mesh))

    def _opening(self, mesh: Mesh, count: int, some: Sequence[OrderAndChunks], bound_s: float) -> Callable[[], list[Node]]:
        def opened() -> list[Node]:
            nodes = []
            for cutting in self._cuttings(mesh, count, some):
                of_cut = partial(self._of_cut, cutting)
                nodes.append(Node(bound_s, self._ways(mesh), of_cut, visits=CUT, at_once=self._solved))
                nodes += other_cuts(cutting, self._ways(mesh), bound_s, self._of_cut)
            return nodes

        return opened

    def _cuttings(self, mesh: Mesh, count: int, some: Sequence[OrderAndChunks]) -> Iterator[Cutting]:
        for placements in self._placed(mesh, count):
            for order, chunks in some:
                yield Cutting(
                    problem=self.problem,
                    strategy=self.strategy,
                    mesh=mesh,
                    microbatches=count,
                    order=order,
                    chunks=chunks,
                    placements=placements,
                )

    def plans(self, mesh: Mesh) -> Iterator[Plan]:
        """Every plan on a mesh, those that are impossible left out; with recomputation only where it is asked for."""
        with contextlib.suppress(ScheduleError):
            self.of_mesh(mesh)
            for count in microbatch_counts(self.problem, mesh):
                for cutting in self._cuttings(mesh, count, orders(self.problem, mesh)):
                    with contextlib.suppress(PlanError, ScheduleError):
                        yield from self._of_ways(self._fastest(cutting))

    def _fastest(self, cutting: Cutting, bounds: Bounds | None = None) -> Plan:
        """With recomputation as the question has it. Raises PlanError, ScheduleError, CostError."""
        plan = cutting.fastest() if bounds is None else cutting.plan(bounds)
        if self.problem.recompute != AUTO:
            plan = recomputing_layers(self.problem, plan, self.problem.recompute)
        self._check_asked(plan)
        return plan

    def _of_ways(self, plan: Plan, sizes: Sequence[int] = ()) -> list[Plan]:
        """With every ZeRO stage and every bucket size, those that are tried first where none are given."""
        layout = self.problem.layout(plan)
        if all(len(group) == 1 for group in layout.buckets.groups.values()):
            sizes = self._sizes[:1]
        stages = zero_stages(self.problem, layout)
        return [replace(plan, zero_stage=stage, bucket_bytes=size) for stage in stages for size in sizes or self._sizes]

    def _placed(self, mesh: Mesh, count: int) -> list[Mapping[str, Placement]]:
        """The placements worth judging with so many microbatches. Raises ScheduleError if there are none."""
        if (mesh, count) not in self._chosen:
            self._chosen[mesh, count] = list(self._worth_judging(mesh, count))
        return self._chosen[mesh, count]

    @cached_property
    def _chosen(self) -> dict[tuple[Mesh, int], list[Mapping[str, Placement]]]:
        return {}

    def _worth_judging(self, mesh: Mesh, count: int) -> Iterator[Mapping[str, Placement]]:
        if not self.mixed:
            yield tensor_placements(self.problem, mesh, count)
            return
        stages = (self.problem.zero_stage,) if isinstance(self.problem.zero_stage, int) else (0, 3)
        seen: list[Mapping[str, Placement]] = []
        reason = ""
        for stage in stages:
            solution, placements, limited = best_placement(self.problem, count, mesh, zero_stage=stage)
            self.placements.append(PosedPlacement(mesh=mesh, microbatches=count, solution=solution))
            reason = solution.reason
            if placements is None:
                continue
            if placements not in seen and any(placement != BATCH for placement in placements.values()):
                yield placements  # all batch-sharded is data parallelism by another name
            seen.append(placements)
            if not limited:
                return  # more room would change nothing
        if not seen:
            raise ScheduleError(f"no choice of placements fits: {reason}")

    def _of_cut(self, cutting: Cutting, bounds: Bounds | None = None) -> list[Node]:
        """The plans of one cut behind bounds that cost more and more: of its stages alone, of the plan, of its memory."""
        size = self._ways(cutting.mesh)

        def placed() -> list[Node]:
            plan = self._fastest(cutting, bounds)
            bound_s = computation_bound_s(self.problem, plan)
            other_stages = cutting if bounds is None else None
            return [Node(bound_s, size, lambda: self._of_ways_that_fit(plan, other_stages, bound_s), visits=0)]

        return [Node(lowered_s(self.problem, cutting.mesh, cutting.least_s(bounds)), size, placed, visits=0)]

    def _of_ways_that_fit(self, plan: Plan, cutting: Cutting | None, bound_s: float) -> list[Node]:
        """The ZeRO stages and bucket sizes of one cut; where none can fit, the plan that is closest to fitting."""
        size = self._ways(plan.mesh)
        missing, closest = missing_of_cut(self.problem, plan, cutting)
        if missing:
            return [Node(0.0, size, plan=closest, missing_bytes=lambda: missing)]
        first = self._sizes if is_small(self.problem) else self._sizes[:1]

        def of_sizes(sizes: Sequence[int], least_s: float) -> list[Node]:
            return [self._counted(each, cutting, least_s) for each in self._of_ways(plan, sizes)] if sizes else []

        def in_order() -> list[Node]:
            least_s = max(bound_s, order_bound_s(self.problem, plan))
            tried = size * len(first) // len(self._sizes) if size > 1 else size

            def resized() -> list[Node]:
                others = other_bucket_sizes(self.problem, self.problem.layout(plan))
                return of_sizes([*self._sizes[len(first) :], *others], bound_s)

            return [
                Node(least_s, tried, lambda: of_sizes(first, least_s), visits=BOUNDED),
                Node(least_s, size - tried, resized, late=True),
            ]

        return in_order() if plan.mesh.pp == 1 else [Node(bound_s, size, in_order)]

    def _counted(self, plan: Plan, cutting: Cutting | None, bound_s: float) -> Node:
        """One plan; one that is impossible or has no price says so when it is opened, and its neighbours stay."""
        try:
            return self.of_plan(plan, cutting)
        except (PlanError, ScheduleError, CostError) as error:
            refused = error

            def refuse() -> list[Node]:
                raise refused

            return Node(bound_s, 1, refuse)

    def _check_asked(self, plan: Plan) -> None:
        for stage in plan.stages:
            for name, placement in stage.placed():
                if not self.problem.allows(name, placement):
                    raise ScheduleError("no plan satisfies plan.pin and plan.forbid")

    def given(self, plans: Iterable[Plan]) -> list[Node]:
        """One node per plan that a strategy lists; what is impossible about one is counted when it is opened."""
        return [Node(0.0, 1, partial(lambda plan: [self.of_plan(plan)], plan)) for plan in plans]

    def of_plan(self, plan: Plan, cutting: Cutting | None = None) -> Node:
        """One plan; where it does not fit, with recomputation, or with stages that fit without.

        Args:
            cutting: where its stages may be cut otherwise.

        Raises:
            PlanError: it does not match the model. ScheduleError: it does not keep pins and forbids.
        """
        self._check_asked(plan)
        over = floor_excess_bytes(self.problem, plan, recomputing=False) if not plan.recomputes else 0.0
        if over and not may_fit(self.problem, plan, cutting):
            return Node(0.0, 1, plan=plan, missing_bytes=lambda: over)
        bound_s = step_bound_s(self.problem, plan)
        node = Node(bound_s, 1, None, plan, lambda: instead_of(self.problem, plan, cutting), over_bytes=over)
        if is_small(self.problem) or plan.zero_stage < ZERO_STAGES[-1] or plan.mesh.pp == 1:
            return node
        return replace(node, promise_s=bound_s + gathering_s(self.problem, plan))


# The parts of all families of a large problem, one by one: the most promising first, as far as the allowance lasts.
#
# Two families are not searched one after the other, because the first would spend what the better one needs.


ROW_SHARE = 0.2
"""Of the allowance: what a family without a plan that fits gets for itself when all is spent, for its row in the answer. Llama
3 70B on 64 H100s has no row of data parallelism with less than 0.15."""

UNLIKELY = 0.05
"""Of an estimate, how much too short it may be: an outline whose estimate is so much above the best step is not opened."""

LOSERS_SHARE = 0.1
"""Of the allowance: until so much is spent, families that lost are searched for rows of their own. ResNet-50 on 8 V100s: the mp
row is 590 ms with it, 780 ms without. Llama 3 8B on 64 H100s: it is 6% slower than with 0.2, and the search 4 s shorter."""


def open_one_by_one(
    parts: Mapping[str, list[Node]],
    owners: Mapping[str, Incumbents],
    together: Incumbents,
    spare: Allowance,
    opened: Callable[[str, list[Node], Incumbents, float, Allowance], list[Node]],
    *,
    rivals: bool,
    tell: Callable[[str, int, float], None],
) -> Tally:
    """Open the parts of all families, and count the plans of those that were not opened.

    Args:
        parts: by family. owners: the best plans of each family so far. together: of all families. spare: what may be spent.
        opened: opens parts of a family, and returns those whose bounds are above some seconds: the turn of others comes first.
        tell: hears which family is opened, how many parts are left and the best step so far.
        rivals: whether a family is left that can no longer be faster than another one.
    """
    queue, number = list[tuple[bool, float, float, int, str, Node]](), counter()
    left = defaultdict[str, list[tuple[float, Node]]](list)

    def wait(name: str, node: Node, promise_s: float, *, usual: bool) -> None:
        heapq.heappush(queue, (not usual, promise_s, node.bound_s, next(number), name, node))

    for name, some in parts.items():
        for node in some:
            wait(name, node, node.promise_s, usual=node.usual)
    while queue:
        unusual, promise_s, bound_s, _, name, node = heapq.heappop(queue)
        family = owners[name]
        if family is not together and rivals:
            family.rival_s = together.best_s
        known = bool(family.steps_s) or family.rival_s < float("inf")
        if node.late:
            opened(name, [node], family, float("inf"), spare)  # puts it aside
            continue
        unlikely = promise_s > max(bound_s, (1 + UNLIKELY) * min(family.rival_s, family.best_s))
        if unlikely and family.rival_s < family.best_s and (spare.spent < LOSERS_SHARE or not family.steps_s):
            unlikely = promise_s > family.bar_s  # it may still be the best of a family that lost
        if bound_s >= family.bar_s or unlikely or not spare.lasts(known=known):
            left[name].append((promise_s, node))
            continue
        tell(name, len(queue), together.best_s)
        until_s = queue[0][1] if queue and queue[0][0] == unusual else float("inf")
        # what a plan takes at least is as good as what an outline promises
        for part in opened(name, [node], family, until_s, spare):
            wait(name, part, part.expected_s, usual=not unusual)
        if family is not together:
            together.steps_s.update(family.steps_s)
    tally = Tally()
    for name, family in owners.items():
        own = replace(spare, left=ROW_SHARE * MOST_VISITS, memories=len(spare.problem.with_memory))
        for _, node in sorted(left[name], key=itemgetter(0)):
            if rivals and not family.steps_s and family.rival_s < float("inf") and own.lasts(known=True):
                opened(name, [node], family, float("inf"), own)
            else:
                tally.leave([(node.bound_s, node.size)], family.bar_s)
        spare.memories = own.memories
    return tally
