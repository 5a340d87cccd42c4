"""Lower bounds of a plan's step: what the simulation of the plan cannot go below, without lowering or simulating it.

Every rank issues its computation in order, and begins a step when its own tasks of the step before have ended. So with
F and B the computation of one microbatch on a place of the pp axis (a block), conversions between its components included:

    own       M * (F + B), then every bucket whose gradients are complete k seconds before the end, then the optimizer
    round     place 0 begins the step; place p cannot begin before the first microbatch has come to it (E), and after the last
              backward of p a gradient still goes back to place 0 (D): E + M * (F + B) + D, then the last buckets of place 0;
              nor can its backwards begin before one microbatch has come to the loss and back (L): L + M * B + D
    order     the last block of place 0 by the order of all blocks (`parsim.schedule.bounds.order`), then its last buckets
    sending   all collectives on the stream of the gradients, which takes one at a time (sums over sharding groups are not on
              it); with ZeRO 3 also what waits for parameters that are gathered late (`parsim.schedule.bounds.gathering`)

The bound is the largest of these over the places. All prices are those of the simulation.

Leaves out: loading, overlap factors, cores that ranks share, waiting between blocks. All of them make a step longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from parsim.arrays import Floats
from parsim.costs.uncertainty.draws import rank_noise
from parsim.engines.side_by_side import FEWEST_DRAWS
from parsim.graph.passes.gradients import bucket_work, gathering_work, updates_of
from parsim.graph.passes.replica_sums import replica_sum_work
from parsim.graph.plan_index import PlanIndex
from parsim.plans.plan import Plan
from parsim.predict.evaluate import NOISY_STEPS, SEED
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.computation import PlaceWork, computation_of, order_s
from parsim.schedule.bounds.gathering import gathered_s
from parsim.work import HostUpdate, Work

ROUNDING = 1 - 1e-9
"""Sums in another order differ by rounding: a bound is lowered by that much."""


@dataclass
class KnownNoise:
    """Of one problem, by number of ranks: the mean of the least noisy core over the draws of the simulation, at most 1."""

    means: dict[int, float] = field(default_factory=dict)


def step_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds that no simulation of the plan goes below.

    Args:
        problem: model, cluster and batch. plan: of this model.

    Raises:
        PlanError: the plan does not match the model. CostError: a component without a price.
    """
    layout = problem.layout(plan)
    places = computation_of(problem, plan)
    ends = [_place_end_s(problem, layout, place, work) for place, work in enumerate(places)]
    rounds = [work.done_s + work.after_s for work in places if work.after_s is not None]
    rounds.append(order_s(problem, plan, anew=False))
    last = _last_buckets_s(problem, layout, places[0])
    bound = max(*ends, max(rounds, default=0.0) + last)
    return (bound * least_noise(problem, plan.world_size) + problem.costs(plan.world_size).between_steps_s) * ROUNDING


def computation_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """The same for all ZeRO stages and bucket sizes at once: computation, conversions and transfers alone.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    places = computation_of(problem, plan)
    own = max(work.busy_s for work in places)
    rounds = [work.done_s + work.after_s for work in places if work.after_s is not None]
    bound = max(own, *rounds) if rounds else own
    return (bound * least_noise(problem, plan.world_size) + problem.costs(plan.world_size).between_steps_s) * ROUNDING


def order_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """As `computation_bound_s`, by the order of the pipeline's blocks: sharper, and slower to find. Later bounds of plans that
    differ in ZeRO stage and bucket size alone include it.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    bound = order_s(problem, plan)
    return (bound * least_noise(problem, plan.world_size) + problem.costs(plan.world_size).between_steps_s) * ROUNDING


def least_noise(problem: PlanningProblem, ranks: int) -> float:
    """The mean of the least noisy core over the draws with which a step is simulated, however many, at most 1.

    Args:
        problem: whose profile may hold noise of single ranks. ranks: of the plan.
    """
    noise = problem.cluster.profile.noise
    if noise is None or not noise.rank_sigma or ranks == 1:
        return 1.0
    known = problem.remembered(KnownNoise).means
    if ranks not in known:
        cores = np.arange(1 + max(problem.cluster.core_of_rank(ranks), default=0))
        means = rank_noise(np.arange(max(len(cores), ranks)), noise.rank_sigma, NOISY_STEPS, SEED)
        own = rank_noise(cores, noise.rank_sigma, NOISY_STEPS, SEED)
        known[ranks] = min(1.0, _least_mean(means), _least_mean(own))
    return known[ranks]


def _least_mean(draws: Floats) -> float:
    """Over the cores, and over the numbers of draws from `FEWEST_DRAWS` on."""
    means = np.cumsum(draws, axis=0) / np.arange(1, len(draws) + 1)[:, None]
    return float(means[FEWEST_DRAWS - 1 :].min())


# --- gradients and parameters -----------------------------------------------------------------------------------------


def _place_end_s(problem: PlanningProblem, layout: PlanIndex, place: int, work: PlaceWork) -> float:
    """When the first rank of a place is done with its own step, or its gradients' stream is."""
    mesh, microbatches = layout.plan.mesh, layout.plan.microbatches
    rank = layout.rank(place, 0)

    def seconds(of: Work) -> float:
        return problem.price([(of, rank)], mesh)[0].median_s

    sending, gathering, done, late = 0.0, 0.0, work.busy_s, []
    for bucket in layout.rank_buckets(rank):
        across = replica_sum_work(layout, bucket, rank)
        across_s = 0.0 if across is None else seconds(across)
        if len(bucket.group) == 1:
            if across is not None:
                late.append((_remaining(work, layout.completes(bucket.family, place)), 0.0, across_s))
            continue
        stage = layout.zero_stage_of(bucket)
        summed = seconds(bucket_work(layout, bucket))
        sending += summed * (microbatches if stage >= 2 else 1)
        if stage in (1, 2):
            gathering += seconds(gathering_work(bucket))
        late.append((_remaining(work, layout.completes(bucket.family, place)), summed, across_s))
    if layout.plan.zero_stage >= 3:
        gathered, waiting = gathered_s(problem, layout, place, rank)
        sending += microbatches * gathered
        done = max(done, microbatches * waiting)
    last = _Sums()
    for remaining, summed, across_s in sorted(late):
        last.add(summed, across_s)
        done = max(done, work.busy_s - remaining + last.end_s)
    return max(done + _after_s(_update_s(problem, layout, rank), gathering, layout), sending + gathering)


def _after_s(update_s: float, gathering_s: float, layout: PlanIndex) -> float:
    """What follows the last gradients. A host's update goes bucket by bucket, and buckets are gathered beside later ones."""
    return max(update_s, gathering_s) if layout.plan.optimizer_offload else update_s + gathering_s


@dataclass
class _Sums:
    """Of buckets that are complete at one moment or later: what passes at least until their sums have ended.

    Sums of a sharding group run one after the other. Sums over all groups do too, each behind the first sum of its bucket.
    """

    summed_s: float = 0.0
    across_s: float = 0.0
    least_summed_s: float = float("inf")
    least_across_s: float = float("inf")

    def add(self, summed_s: float, across_s: float) -> None:
        """One more bucket."""
        self.summed_s += summed_s
        self.across_s += across_s
        self.least_summed_s = min(self.least_summed_s, summed_s)
        self.least_across_s = min(self.least_across_s, across_s)

    @property
    def end_s(self) -> float:
        if self.least_summed_s == float("inf"):
            return 0.0
        return max(self.summed_s + self.least_across_s, self.least_summed_s + self.across_s)


def _remaining(work: PlaceWork, completing: Sequence[str]) -> float:
    """Seconds that the place computes after the gradients of a bucket are complete; of tied parameters at any of its places."""
    known = [work.remaining_s[name] for name in completing if name in work.remaining_s]
    return min(known, default=work.busy_s)


def _last_buckets_s(problem: PlanningProblem, layout: PlanIndex, work: PlaceWork) -> float:
    """What follows the last backward of place 0: the buckets that it completes, the optimizer, gathered parameters."""
    rank, last, gathering = layout.rank(0, 0), _Sums(), 0.0

    def seconds(of: Work) -> float:
        return problem.price([(of, rank)], layout.plan.mesh)[0].median_s

    for bucket in layout.rank_buckets(rank):
        across, several = replica_sum_work(layout, bucket, rank), len(bucket.group) > 1
        if (several or across is not None) and _remaining(work, layout.completes(bucket.family, 0)) <= 0.0:
            last.add(seconds(bucket_work(layout, bucket)) if several else 0.0, 0.0 if across is None else seconds(across))
        if several and layout.zero_stage_of(bucket) in (1, 2):
            gathering += seconds(gathering_work(bucket))
    return last.end_s + _after_s(_update_s(problem, layout, rank), gathering, layout)


def _update_s(problem: PlanningProblem, layout: PlanIndex, rank: int) -> float:
    steps: list[tuple[Work, int]] = [(step, rank) for step in updates_of(layout, rank)]
    if layout.plan.optimizer_offload:
        steps = [(HostUpdate(elements=own.elements, optimizer=own.optimizer), rank) for own in updates_of(layout, rank)]
    return sum(price.median_s for price in problem.price(steps, layout.plan.mesh)) if steps else 0.0
