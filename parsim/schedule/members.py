"""The members of a family as a tree: every node has a lower bound of the plans below it, and opens into smaller parts.

    mesh and microbatches     least computation of any cut into stages
    order, chunks, stages     computation, conversions and transfers of these stages
    ZeRO stage, buckets       collectives of the gradients and parameters too: `bounds.step_bound_s`
    recomputation             the plan as it fits

A node's bound is at most that of the nodes it opens into. So a search that opens the least bound first may stop once that bound
is above a plan it has simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from parsim.errors import CostError, ParsimError, PlanError, ScheduleError
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import ZERO_STAGES, Plan
from parsim.plans.recompute import AUTO
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.devices import DeviceSeconds
from parsim.schedule.bounds.plan_floor import floor_excess_bytes
from parsim.schedule.bounds.step import ROUNDING, computation_bound_s, least_noise, order_bound_s, step_bound_s
from parsim.schedule.bounds.weights import weights_are_too_many
from parsim.schedule.cuts import Bounds
from parsim.schedule.partition import least_round_s
from parsim.schedule.parts.instead import instead_of, may_fit, missing_of_cut
from parsim.schedule.parts.least import least_missing_bytes, least_seconds
from parsim.schedule.parts.node import BOUNDED, CUT, LOOKED_AT, REMEMBERED, Node, PosedPlacement
from parsim.schedule.parts.outlines import outlines
from parsim.schedule.parts.refinements import every_choice, other_cuts
from parsim.schedule.parts.usual import is_large
from parsim.schedule.space import (
    bucket_sizes,
    is_chain,
    microbatch_counts,
    orders,
    other_bucket_sizes,
    zero_stages,
)
from parsim.schedule.stage_costs import is_long
from parsim.schedule.stages import Cutting
from parsim.schedule.tensor import best_placement, can_be_cut, uncut_text, uniform_placements


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

        Args:
            mesh: of all devices, or of one.

        Raises:
            ScheduleError: the batch or the components do not divide so far, or nothing can be cut.
        """
        if mesh.pp > len(self.problem.model.components):
            raise ScheduleError(
                f"{self.strategy} wants {mesh.pp} stages and {self.problem.model.name} has "
                f'{len(self.problem.model.components)} components; use fewer devices or granularity "layer"'
            )
        if mesh.tp > 1 and not self.mixed and not can_be_cut(self.problem, mesh.tp):
            raise ScheduleError(uncut_text(self.problem, mesh.tp))
        if not is_large(self.problem):
            return self._by_counts(mesh, orders(self.problem, mesh))
        if self.mixed:
            least_s = self.problem.remembered(DeviceSeconds).step_s(self.problem, mesh.size)
            every = partial(self._by_counts, mesh, orders(self.problem, mesh))
            return [Node(least_s, self._plans_on(mesh), every, late=True)]

        def part(count: int, order: tuple[str, int], bound_s: float) -> Node:
            missing = partial(least_missing_bytes, self.problem, mesh, count, (order,), mixed=False)
            return Node(
                bound_s, self._ways(mesh), self._opening(mesh, count, [order], bound_s), missing_bytes=missing, visits=LOOKED_AT
            )

        return outlines(
            self.problem,
            mesh,
            self._ways(mesh),
            placed=lambda count: next(iter(self._placed(mesh, count))),
            part=part,
            others=partial(self._by_counts, mesh),
        )

    def _by_counts(self, mesh: Mesh, every: Sequence[tuple[str, int]]) -> list[Node]:
        """The parts with some pipeline orders."""
        found = []
        for count in microbatch_counts(self.problem, mesh):
            if self.mixed:
                least = least_seconds(self.problem, mesh, count, mixed=True)
                found += every_choice(self.problem, self.strategy, mesh, count, least, self._ways(mesh), self._of_cut)
            if self.mixed and mesh.dp != (self.problem.constraints.dp or 1):
                continue  # the tp axis makes replicas too
            by_chunks: dict[bool, list[tuple[str, int]]] = {}
            for order in every:
                by_chunks.setdefault(self._outruns(order), []).append(order)
            least, noise = least_seconds(self.problem, mesh, count, mixed=self.mixed), least_noise(self.problem, mesh.size)
            for several, some in by_chunks.items():
                bound = max(count * least.sum_s / mesh.pp, count * least.longest_s) * noise
                if is_chain(self.problem) and not PIPELINE_ORDERS[some[0][0]].halves:
                    bound = max(bound, least.sum_s * noise)  # one microbatch alone
                if not several:
                    bound = max(bound, least.sum_s / (1 - (1 - 1 / count) ** mesh.pp) * noise)
                found.append(self._root(mesh, count, some, bound))
        return found

    def of_fewer_devices(
        self, by_size: Sequence[Sequence[Mesh]], opened: Callable[[Members, Sequence[Mesh], dict[str, None]], list[Node]]
    ) -> list[Node]:
        """Parts of the meshes that leave devices idle, opened only as far as so few devices may be faster.

        Args:
            by_size: meshes of equal size, the largest first. opened: the parts on some meshes.
        """
        counts = [{mesh: self._plans_on(mesh) for mesh in some} for some in by_size]
        by_size = [kept for some in counts if (kept := [mesh for mesh, plans in some.items() if plans])]
        sizes = [total for some in counts if (total := sum(some.values()))]
        if not by_size:
            return []
        bounds = self.problem.remembered(DeviceSeconds)
        if is_large(self.problem) and weights_are_too_many(self.problem, by_size[0][0].size):
            never = float("inf")  # nor are they close to it, beside plans on more devices
            return [Node(0.0, sum(sizes), partial(opened, self, by_size[0], {}), missing_bytes=lambda: never)]

        def of_size(number: int) -> list[Node]:
            return opened(self, by_size[number], {})

        def rest(number: int) -> list[Node]:
            if number == len(by_size):
                return []
            bound_s = bounds.step_s(self.problem, by_size[number][0].size)
            return [Node(bound_s, sum(sizes[number:]), lambda: [*of_size(number), *rest(number + 1)])]

        if bounds.are_alike(self.problem):
            return rest(0)
        bounds_s = [bounds.step_s(self.problem, some[0].size) for some in by_size]
        return [Node(bound_s, sizes[number], partial(of_size, number)) for number, bound_s in enumerate(bounds_s)]

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

    def _root(self, mesh: Mesh, count: int, some: Sequence[tuple[str, int]], bound_s: float) -> Node:
        """With a bound that is made sharper when it is opened first."""
        size = self._ways(mesh) * len(some)
        missing = partial(least_missing_bytes, self.problem, mesh, count, tuple(some), mixed=self.mixed)
        if mesh.pp == 1 or self._outruns(some[0]):
            return Node(bound_s, size, self._opening(mesh, count, some, bound_s), missing_bytes=missing)

        def opened() -> list[Node]:
            least_s = least_round_s(least_seconds(self.problem, mesh, count, mixed=self.mixed).seconds, mesh.pp, count)
            sharper = max(bound_s, least_s * least_noise(self.problem, mesh.size) * ROUNDING)
            return [Node(sharper, size, self._opening(mesh, count, some, sharper))]

        return Node(bound_s * ROUNDING, size, opened, missing_bytes=missing)

    def _outruns(self, order: tuple[str, int]) -> bool:
        """Whether the bound of a round does not hold. It does not with several stages per rank, where gradients do not wait for
        all of a backward, or where stages do not wait for one another."""
        return order[1] > 1 or PIPELINE_ORDERS[order[0]].halves or not is_chain(self.problem)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return bucket_sizes(self.problem)

    def _ways(self, mesh: Mesh) -> int:
        """Combinations of ZeRO stages and bucket sizes."""
        if mesh.copies * mesh.tp == 1:
            return 1
        stages = 1 if isinstance(self.problem.zero_stage, int) else len(ZERO_STAGES) - mesh.least_zero_stage
        return len(self._sizes) * stages

    def _opening(self, mesh: Mesh, count: int, some: Sequence[tuple[str, int]], bound_s: float) -> Callable[[], list[Node]]:
        def opened() -> list[Node]:
            found = []
            for cutting in self._cuttings(mesh, count, some):
                found.append(Node(bound_s, self._ways(mesh), partial(self._of_cut, cutting), visits=CUT))
                found += other_cuts(cutting, self._ways(mesh), bound_s, self._of_cut)
            return found

        return opened

    def _cuttings(self, mesh: Mesh, count: int, some: Sequence[tuple[str, int]]) -> Iterator[Cutting]:
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
        """Every plan on a mesh, those that are impossible left out; with recomputation only where it is asked for.

        Args:
            mesh: of all devices, or of fewer.
        """
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
            plan = replace(plan, recompute=self.problem.recompute)
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
        if (mesh, count) not in self._found:
            self._found[mesh, count] = list(self._worth_judging(mesh, count))
        return self._found[mesh, count]

    @cached_property
    def _found(self) -> dict[tuple[Mesh, int], list[Mapping[str, Placement]]]:
        return {}

    def _worth_judging(self, mesh: Mesh, count: int) -> Iterator[Mapping[str, Placement]]:
        samples = self.problem.global_batch // (mesh.dp * count)
        if not self.mixed:
            chosen = (
                {} if mesh.tp == 1 else uniform_placements(self.problem, self._cut_mesh(mesh), divides=samples % mesh.tp == 0)
            )
            yield chosen
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

    def _cut_mesh(self, mesh: Mesh) -> Mesh:
        """On which uniform placements are sought: of long models once for all numbers of replicas."""
        return Mesh(dp=1 if is_long(self.problem.model) else mesh.dp, tp=mesh.tp)

    def _of_cut(self, cutting: Cutting, bounds: Bounds | None = None) -> list[Node]:
        """The plans of one cut behind bounds that cost more and more: of its stages alone, of the plan, of its memory."""
        least_s = cutting.least_s(bounds) * least_noise(self.problem, cutting.mesh.size) * ROUNDING
        return [Node(least_s, self._ways(cutting.mesh), lambda: self._placed_cut(cutting, bounds), visits=0)]

    def _placed_cut(self, cutting: Cutting, bounds: Bounds | None) -> list[Node]:
        plan, size = self._fastest(cutting, bounds), self._ways(cutting.mesh)
        whole = None if bounds is not None else cutting
        bound_s = computation_bound_s(self.problem, plan)
        return [Node(bound_s, size, lambda: self._of_ways_that_fit(plan, whole, bound_s), visits=0)]

    def _of_ways_that_fit(self, plan: Plan, cutting: Cutting | None, bound_s: float) -> list[Node]:
        """The ZeRO stages and bucket sizes of one cut; where none can fit, the plan that is closest to fitting."""
        size = self._ways(plan.mesh)
        missing, closest = missing_of_cut(self.problem, plan, cutting)
        if missing:
            return [Node(0.0, size, plan=closest, missing_bytes=lambda: missing)]
        first = self._sizes[:1] if is_large(self.problem) else self._sizes

        def resized() -> list[Node]:
            sizes = other_bucket_sizes(self.problem, self.problem.layout(plan))
            sizes = [*self._sizes[len(first) :], *sizes]
            return [self._counted(each, cutting, bound_s) for each in self._of_ways(plan, sizes)] if sizes else []

        def in_order() -> list[Node]:
            least_s = max(bound_s, order_bound_s(self.problem, plan))
            tried = size * len(first) // len(self._sizes) if size > 1 else size

            def every_way() -> list[Node]:
                return [self._counted(each, cutting, least_s) for each in self._of_ways(plan, first)]

            return [Node(least_s, tried, every_way, visits=BOUNDED), Node(least_s, size - tried, resized, late=True)]

        return in_order() if plan.mesh.pp == 1 else [Node(bound_s, size, in_order)]

    def _counted(self, plan: Plan, cutting: Cutting | None, bound_s: float) -> Node:
        """One plan; one that is impossible or has no price says so when it is opened, and its neighbours stay."""
        try:
            return self.of_plan(plan, cutting)
        except (PlanError, ScheduleError, CostError) as error:
            return Node(bound_s, 1, partial(_refuse, error))

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
            plan: of the problem's model. cutting: where its stages may be cut otherwise.

        Raises:
            PlanError: it does not match the model. ScheduleError: it does not keep pins and forbids.
        """
        self._check_asked(plan)
        over = floor_excess_bytes(self.problem, plan, recomputing=False) if not plan.recomputes else 0.0
        if over and not may_fit(self.problem, plan, cutting):
            return Node(0.0, 1, plan=plan, missing_bytes=lambda: over)
        bound_s = step_bound_s(self.problem, plan)
        return Node(bound_s, 1, None, plan, lambda: instead_of(self.problem, plan, cutting), over_bytes=over, visits=REMEMBERED)


def _refuse(error: ParsimError) -> list[Node]:
    raise error
