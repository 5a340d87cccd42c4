"""Best first: open the part of a family with the least bound, simulate single plans, stop where no bound is below the best.

Every plan that is not simulated either does not fit, is impossible, or has a lower bound that is not below the best plan
found. So the best of the family is found, among its members.

Late parts are put aside. They refine what the others stand for (other cuts into stages, other bucket sizes), so they are opened
last, when the best plan is known: few of their bounds are below it.
"""

from __future__ import annotations

import contextlib
import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from operator import itemgetter
from typing import Any

from parsim.errors import CostError, PlanError, ScheduleError
from parsim.plans.plan import Plan
from parsim.schedule.parts.node import Node
from parsim.schedule.parts.usual import Allowance


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
    """A plan that was simulated, its step, and whether it fits."""

    plan: Plan
    step_s: float
    fits: bool = True


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
    """Of what does not fit, what is closest to it.

    Attributes: exact: the single plan that needs least beyond the memory, and how many bytes. bounded: the parts and plans
        with the least bounds of them. A bound may be far below what any plan needs, so all are compared by their plans.
    """

    exact: tuple[float, Node] | None = None
    bounded: tuple[tuple[float, Node], ...] = ()

    def add(self, other: Closest) -> None:
        """What is closest of both."""
        self.exact = min(filter(None, (self.exact, other.exact)), key=itemgetter(0), default=None)
        self.bounded = tuple(sorted(self.bounded + other.bounded, key=itemgetter(0))[:MOST_BOUNDED])

    def judged(
        self, judge: Callable[[Plan], float], excess_bytes: Callable[[Plan], int], variants: Variants
    ) -> list[JudgedPlan]:
        """The plan that is closest; of each part its first one that is possible.

        Args:
            judge: seconds of a plan's step. excess_bytes: by how much a plan does not fit. variants: of plans.
        """
        found = self._plans()
        if not found:
            return []
        for variants_of in variants:
            found = [_closest([each for plan in found for each in variants_of(plan)], excess_bytes)]
        plan = _closest(found, excess_bytes)
        return [JudgedPlan(plan=plan, step_s=judge(plan), fits=not excess_bytes(plan))]

    def _plans(self) -> list[Plan]:
        """Those to compare: the exact one, and of the bounded ones first those of the shortest pipelines."""
        exact = None if self.exact is None else _first_plan(self.exact[1])
        near = [node for missing, node in self.bounded if missing < float("inf")] or [node for _, node in self.bounded]
        bounded = sorted(filter(None, map(_first_plan, near)), key=_actions)
        up_to = list(accumulate(map(_actions, bounded)))
        few = max(1, bisect_right(up_to, MOST_ACTIONS))
        return [*filter(None, (exact,)), *bounded[:few]]


def _closest(plans: Sequence[Plan], excess_bytes: Callable[[Plan], int]) -> Plan:
    """The first that exceeds the memory by the least, or by hardly more."""
    excess = [excess_bytes(plan) for plan in plans]
    most = min(excess) * (1 + HARDLY_MORE)
    return next(plan for plan, own in zip(plans, excess, strict=True) if own <= most)


def _actions(plan: Plan) -> int:
    return plan.mesh.pp * plan.chunks * plan.microbatches


LOSERS_WITHIN = 0.02
"""A family that has lost to a plan of another one is known this well: its best may take so much less than the one shown."""


@dataclass
class Incumbents:
    """The steps of the best plans of a family so far, of which `wanted` are kept.

    Attributes: rival_s: of the best plan of other families. A family that no longer can be faster is left at a plan of which
        its best is within `LOSERS_WITHIN`. closest: of parts that are opened one by one, what exceeds the memory least.
    """

    wanted: int = 1
    steps_s: dict[Plan, float] = field(default_factory=dict)
    rival_s: float = float("inf")
    closest: Closest = field(default_factory=Closest)

    @property
    def best_s(self) -> float:
        """Of all plans so far."""
        return min(self.steps_s.values(), default=float("inf"))

    @property
    def bar_s(self) -> float:
        """A plan whose bound is at or above this is not wanted."""
        best = sorted(self.steps_s.values())
        if len(best) < self.wanted:
            return float("inf")
        bar = best[self.wanted - 1]
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
) -> tuple[list[JudgedPlan], Tally]:
    """All plans of a family that could be its best.

    Args:
        nodes: the family. excess_bytes: by how much a plan does not fit. judge: seconds of a plan's step.
        variants: as `Closest.judged` takes them. incumbents: the best so far, read and added to.
        late: receives the parts that are put aside; None: none are. most: parts that are opened, once some plan fits; those
            that cost nothing apart. singles: how many more if they are single plans, which wait behind parts of lower bounds.
        spare: of a large problem, what may be spent: the parts come one by one, and none that does not fit is judged.

    Returns:
        Of plans that do not fit one is judged, the one closest to fitting, and only if none fits and `late` is given.
    """
    tally, number = Tally(), count()
    queue: list[tuple[float, int, Node]] = []
    judged, passed = list[JudgedPlan](), list[tuple[float, int]]()
    closest = Closest()

    def push(node: Node, least_s: float = 0.0) -> None:
        if node.late and late is not None:
            late.append(node if node.bound_s >= least_s else replace(node, bound_s=least_s))
        else:
            first = node.fits and spare is not None and not incumbents.steps_s  # then the search knows when to stop
            heapq.heappush(queue, (0.0 if first else max(node.bound_s, least_s), next(number), node))

    for node in nodes:
        push(node)
    taken = 0
    while queue and queue[0][0] < incumbents.bar_s:
        known = bool(incumbents.steps_s) or incumbents.rival_s < float("inf")
        if _is_spent(taken, most + singles if spare is None else most, spare, known=known):
            break
        bound_s, _, node = heapq.heappop(queue)
        if spare is None and taken >= most and not node.is_one:
            passed.append((bound_s, node.size))
            continue
        taken += node.visits > 0
        if spare is not None:
            spare.open(node.visits)
        try:
            missing = 0.0 if node.missing_bytes is None else node.missing_bytes()
            if missing:
                tally.too_large += node.size
                closest.add(Closest(bounded=((missing, node),)))
                continue
            if node.opened is not None:
                for part in node.opened():
                    push(part, node.bound_s)
                continue
            assert node.plan is not None
            over = node.over_bytes or excess_bytes(node.plan)
            if over:
                others = list(node.instead()) if node.instead is not None else []
                others = [other for other in others if late is not None or not other.covered]
                tally.too_large += all(other.late for other in others)
                closest.add(Closest(bounded=((over, node),)) if node.over_bytes else Closest(exact=(over, node)))
                for other in others:
                    push(other, node.bound_s)
                continue
            if spare is not None:
                spare.simulate(node.plan)
            step_s = judge(node.plan)
        except (PlanError, ScheduleError) as error:
            tally.infeasible[str(error)] += node.size
            continue
        except CostError as error:
            tally.infeasible[str(error)] += node.size
            tally.unpriced = tally.unpriced or error
            continue
        tally.simulated += 1
        judged.append(JudgedPlan(plan=node.plan, step_s=step_s))
        incumbents.steps_s[replace(node.plan, strategy="custom")] = step_s
    tally.leave([*passed, *((bound_s, node.size) for bound_s, _, node in queue)], incumbents.bar_s)
    if spare is not None:
        incumbents.closest.add(closest)
    elif late is not None and not judged and not incumbents.steps_s:
        judged += closest.judged(judge, excess_bytes, variants)
    return judged, tally


def _is_spent(taken: int, most: float, spare: Allowance | None, *, known: bool) -> bool:
    """Whether no more may be opened; `known`: whether some plan fits, without which the search of a large problem goes on."""
    if spare is None:
        return taken >= most
    return (taken >= most and known) or not spare.lasts(known=known)


def _first_plan(node: Node) -> Plan | None:
    """The first plan of a part that is possible."""
    if node.plan is not None or node.opened is None:
        return node.plan
    with contextlib.suppress(PlanError, ScheduleError, CostError):
        for part in node.opened():
            if (plan := _first_plan(part)) is not None:
                return plan
    return None
