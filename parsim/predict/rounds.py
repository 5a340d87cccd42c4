"""The steps of a plan that mixes weights in rounds, as a Program, and their mean.

    Program = for every round of a cycle: (period - 1) local steps, then a step with the round behind it

A cycle is one period of the graph, one round of every graph that Ada comes to, or `DRAWN_ROUNDS` rounds where replicas are
drawn. Merging in turn is a cycle of one round, which may outlast its step. Local steps in a row repeat exactly, so at most
`UNROLLED_STEPS` of a period are simulated in one graph. Each further one takes as long as a local step in a row of its own.

Leaves out: that the slowest of unequal replicas need not be the same one in a long row of local steps and in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from statistics import fmean

import numpy as np

from parsim.costs.communication.algorithms import exchange_seconds
from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate, OverlapFactors, Term, medians_s, sample_durations_s
from parsim.engines import static
from parsim.engines.program import Part, Program, carried_by_steps, mean_step_s, unrolled
from parsim.engines.static import CompiledGraph, compile_graph
from parsim.hardware.cluster import Cluster
from parsim.model.component import Component
from parsim.model.model import Model
from parsim.numeric import Floats, Ints
from parsim.plans.plan import Plan
from parsim.predict.breakdown import RankBreakdown, breakdown, busiest_resource_s
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import Columns, Folding, Unit, Units, columns_of
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import TaskGraph
from parsim.program.templates import lower_columns
from parsim.work import Collective, Compute, Phase, SendRecv, Work

# Tensor-parallel communication beside products.
#
# With `Plan.tensor_overlap` an all_gather or reduce_scatter of T seconds over n shards runs in n pieces beside products of m
# seconds, whose rows are cut alike. A shard has the first piece that it gathers, so no gathering is exposed while products take
# longer. The last piece of a sum is, in the forward. In the backward sums run whole, beside the gradient of a weight:
#
#     gathering = max(0, T - (n - 1) / n * m)        sums = mean of  max(T / n, T - (n - 1) / n * m)  and  max(0, T - m)
#
# m is the mean forward of the plan's cut components with products. Products in pieces fill the device less: all of a layer's in
# the forward, and towards the inputs those that are cut by rows. Source: methods of initialize_ub in NVIDIA/TransformerEngine
# transformer_engine/pytorch/module/base.py (ring_exchange, pipeline, bulk).
#
# With `Plan.tensor_backward_overlap` the gradient of the input of a product that is cut by columns is summed over the shards
# (all_reduce or reduce_scatter) beside the gradient of its weight, w seconds, taken to be those of its forward:
#
#     exposed = T - min(T, w)
#
# Forwards and backwards send the same, so they share a price: the mean over them. Source: the backward of
# ColumnParallelLinearWithAsyncAllreduce and ColumnParallelLinearWithSequenceParallelism, NVIDIA/Megatron-LM
# megatron/mpu/layers.py @02bb1f5c86fc.
#
# Leaves out: the multiprocessors that communication takes from products; in pieces, sums (all_reduce), which no product waits
# for piece by piece; beside gradients of weights, components that were measured as a whole, whose products are not known
# apart: they hide nothing.


IN_PIECES = ("all_gather", "reduce_scatter")
SUMS = ("all_reduce", "reduce_scatter")


def beside_products(
    model: Model, costs: Costs, plan: Plan, units: Sequence[Unit], estimates: Sequence[Estimate]
) -> list[Estimate]:
    """Estimates of a program's units with tensor-parallel communication as far as products do not hide it."""
    if not (plan.tensor_overlap or plan.tensor_backward_overlap):
        return list(estimates)
    if plan.tensor_overlap:
        estimates = [_in_pieces(costs, plan.mesh.tp, unit, estimate) for unit, estimate in zip(units, estimates, strict=True)]
    column_share = {component.name: _column_share(component) for component in model.components}
    forwards = [
        (unit.work.component, estimate)
        for unit, estimate in zip(units, estimates, strict=True)
        if isinstance(unit.work, Compute) and unit.work.phase is Phase.FORWARD and unit.work.ways > 1
    ]
    if plan.tensor_backward_overlap:
        operations, detail = SUMS, "in the backward beside gradients of weights"
        beside_s = [
            share * sum(term.value for term in estimate.terms if term.name == "matmul")
            for name, estimate in forwards
            if (share := column_share[name])
        ]
        cut = [name for name, share in column_share.items() if share]
        again = sum(name in cut for names in plan.segments for name in names) / max(1, len(cut))
        backward = 1 / (2 + again)  # of the runs of a component: its forward, its backward, and its forward again

        def share_of(operation: str, seconds: float) -> float:
            return 1 - backward * fmean(min(1.0, each / seconds) for each in beside_s)

    else:
        pieces = plan.mesh.tp
        operations, detail, hidden = IN_PIECES, f"{pieces} pieces beside products", (pieces - 1) / pieces
        products = {part.name for part in model.components if any(op.kind == "matmul" for op in part.operators)}
        beside_s = [estimate.median_s for name, estimate in forwards if name in products]
        product_s = fmean(beside_s or [0.0])

        def share_of(operation: str, seconds: float) -> float:
            gathered = max(0.0, 1 - hidden * product_s / seconds)
            if operation == "all_gather":
                return gathered
            return fmean((max(1 - hidden, gathered), max(0.0, 1 - product_s / seconds)))

    if not beside_s:
        return list(estimates)

    def exposed(operation: str, estimate: Estimate) -> Estimate:
        term = Term("exposed share", "times", share_of(operation, estimate.median_s), "assumed", detail)
        return replace(estimate.then(term), detail=f"{estimate.detail}; {detail}")

    tp = plan.mesh.tp
    return [
        exposed(unit.work.operation, estimate)
        if isinstance(unit.work, Collective) and estimate.median_s and _among_shards(unit.work, tp, operations)
        else estimate
        for unit, estimate in zip(units, estimates, strict=True)
    ]


def _in_pieces(costs: Costs, pieces: int, unit: Unit, estimate: Estimate) -> Estimate:
    """Computation with its products in pieces of rows, between which a shard sends and receives."""
    work = unit.work
    if not isinstance(work, Compute) or work.ways == 1 or work.part not in ("", "rest") or not estimate.median_s:
        return estimate
    times = costs.in_pieces(work, unit.rank, pieces)
    return estimate if times == 1 else estimate.then(Term("pieces", "times", times, "fitted", f"products in {pieces} pieces"))


def least_exposed(work: Work, tp: int, switches: Mapping[str, bool]) -> float:
    """The share of any work that products cannot hide, at least, whatever the plan: all of what is not among all tp ranks."""
    if switches.get("tensor_overlap") and _among_shards(work, tp, IN_PIECES):
        return 1 / (2 * tp) if _among_shards(work, tp, SUMS) else 0.0
    return 1 / 2 if switches.get("tensor_backward_overlap") and _among_shards(work, tp, SUMS) else 1.0


def _among_shards(work: Work, tp: int, operations: Sequence[str]) -> bool:
    if not isinstance(work, Collective) or work.operation not in operations or len(work.group) != tp:
        return False
    return len({rank // tp for rank in work.group}) == 1


def _column_share(component: Component) -> float:
    """Flop of the products that shards cut by columns, over those of all its products; 0 without any."""
    cut = {entry.number for sharding in component.shardings for entry in sharding.operators if entry.dim == "n"}
    products = {number: op.forward_flop for number, op in enumerate(component.operators) if op.kind == "matmul"}
    return sum(flop for number, flop in products.items() if number in cut) / (sum(products.values()) or 1.0)


UNROLLED_STEPS = 3
PERIODS = 3
"""Cycles in a row, over which the mean is taken."""


def is_one_step(plan: Plan) -> bool:
    """Whether every step is like the next: synchronous and stale plans, and one equal round behind every step.

    Merging in turn is not: its rounds outlast their steps.
    """
    rule = plan.synchronisation
    return not rule.mixes or (
        rule.kind != "merge"
        and rule.round_steps == 1
        and len(plan.synchronisation.cycle(plan.mesh.dp)) == 1
        and rule.participation == 1.0
    )


def folds(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether interchangeable ranks of a relaxed plan may be simulated once: all replicas average, or gossip.

    Of gossip `folding_of` finds which replicas are alike. Leaves out merging in turn, drawn replicas, gossip beside the step,
    stages with stale gradients, noise of single ranks, and machines on which computation and communication slow one another.
    """
    rule, profile = plan.synchronisation, problem.cluster.profile
    if not rule.is_relaxed:
        return True
    noisy = profile.noise is not None and profile.noise.rank_sigma > 0
    alike = rule.kind in ("average", "gossip") and rule.participation == 1.0 and not rule.combines_first and not rule.is_stale
    return alike and not noisy and profile.overlap is None


def step_program(layout: PlanIndex, folding: Folding, overlap: OverlapFactors, *, local_steps: int) -> Program:
    """The steps of one cycle of a plan that mixes, with so many before each step with a round. `overlap`: tells whether loading
    runs ahead."""
    parts: list[Part] = []
    for number in layout.plan.synchronisation.cycle(layout.plan.mesh.dp):
        if local_steps:
            parts.append(_part(_graph(layout, folding, number, local=True), overlap, repeat=local_steps))
        parts.append(_part(_graph(layout, folding, number), overlap))
    return Program(parts=tuple(parts))


def _graph(layout: PlanIndex, folding: Folding, number: int, *, local: bool = False) -> TaskGraph:
    if not folding.is_folded:
        return lower(layout.plan, layout.model, layout, mixing_round=number, local=local)
    return lower_columns(layout.plan, layout.model, layout, folding, mixing_round=number, local=local).graph


def _part(graph: TaskGraph, overlap: OverlapFactors, *, repeat: int = 1) -> Part:
    makes, reads = carried_by_steps(columns_of(graph), overlap)
    return Part(graph=graph, repeat=repeat, makes=makes, reads=reads)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixingPeriod:
    """A cycle of rounds, simulated as one graph.

    Attributes:
        cycle: the rounds, each behind at most `UNROLLED_STEPS` steps. local: one local step; None where none is left out.
        estimates: of the units of both. unit: int64 [tasks of the cycle], local_unit: those of the local step, in `estimates`.
        rounds: in the cycle. steps: from one round to the next. simulated: of these, in the graph.
        staggers: replicas begin together and then keep a distance, as when they merge in turn. The mean leaves out the first
            cycle, in which they come to it.
        ranks: that are simulated.
    """

    cycle: CompiledGraph
    local: CompiledGraph | None
    estimates: tuple[Estimate, ...]
    unit: Ints
    local_unit: Ints
    overlap: OverlapFactors
    rounds: int
    steps: int
    simulated: int
    staggers: bool = False
    ranks: tuple[int, ...]

    def mean_s(self, cycle_s: Floats, local_s: Floats) -> Floats:
        """The mean step, from seconds of a cycle and of a local step."""
        mean: Floats = (cycle_s / self.rounds + (self.steps - self.simulated) * local_s) / self.steps
        return mean

    def steps_s(self, rows_s: Floats) -> Floats:
        """float64 [rows]: the mean step for every row of durations, float64 [rows, estimates]."""
        durations = rows_s[:, self.unit]
        cycle = mean_step_s(self.cycle, durations, self.overlap, steps=PERIODS)
        if self.staggers:
            cycle = self._one_more(self.cycle, durations)
        return self.mean_s(cycle, self._local(rows_s))

    def _local(self, rows_s: Floats) -> Floats:
        """Seconds of one more local step in a row of them."""
        if self.local is None:
            return np.zeros(len(rows_s))
        return self._one_more(self.local, rows_s[:, self.local_unit])

    def _one_more(self, compiled: CompiledGraph, durations_s: Floats) -> Floats:
        """Seconds by which one more repeat makes a row of repeats longer."""
        more, fewer = (
            steps * mean_step_s(compiled, durations_s, self.overlap, steps=steps) for steps in (PERIODS + 1, PERIODS)
        )
        added: Floats = more - fewer
        return added

    def unsteady_s(self, cycle_s: Callable[[CompiledGraph, Floats], float], rows_s: Floats) -> float:
        """The mean step where the seconds of a cycle include noise of single ranks; `rows_s`: float64 [rows, estimates]."""
        local_s = self._local(rows_s).mean()
        return float(self.mean_s(np.array(cycle_s(self.cycle, rows_s[:, self.unit])), local_s))

    @property
    def medians_s(self) -> Floats:
        """float64 [1, estimates]."""
        return medians_s(self.estimates)[None, :]

    def drawn_s(self, samples: int, seed: int) -> Floats:
        """float64 [samples]: the mean step under draws of the cost parameters; noise of tasks is drawn once per unit of
        work."""
        return self.steps_s(sample_durations_s(self.estimates, samples, seed))

    @property
    def lower_bound_s(self) -> float:
        """Work of the busiest resource over the mean step."""
        medians = self.medians_s[0]
        cycle = busiest_resource_s(self.cycle, medians[self.unit])
        local = 0.0 if self.local is None else busiest_resource_s(self.local, medians[self.local_unit])
        return float(self.mean_s(np.array(cycle), np.array(local)))

    def breakdown(self) -> tuple[RankBreakdown, ...]:
        medians = self.medians_s[0]
        timeline = static.simulate(self.cycle, medians[self.unit], overlap=self.overlap)
        parts = breakdown(self.cycle, timeline, ranks=self.ranks)
        if self.local is None:
            return tuple(self._mean_breakdown(part, None) for part in parts)
        local = static.simulate(self.local, medians[self.local_unit], overlap=self.overlap)
        alone = breakdown(self.local, local, ranks=self.ranks)
        return tuple(self._mean_breakdown(part, own) for part, own in zip(parts, alone, strict=True))

    def _mean_breakdown(self, cycle: RankBreakdown, local: RankBreakdown | None) -> RankBreakdown:
        names = [field.name for field in fields(RankBreakdown) if field.name != "rank"]
        mean = {
            name: float(self.mean_s(np.array(getattr(cycle, name)), np.array(0.0 if local is None else getattr(local, name))))
            for name in names
        }
        return RankBreakdown(rank=cycle.rank, **mean)


def mixing_period(
    problem: PlanningProblem,
    layout: PlanIndex,
    folding: Folding,
    *,
    lowest: bool = False,
) -> MixingPeriod:
    """The cycle of a plan that mixes, priced. `folding`: which ranks stand for which, of a plan that `folds`; `lowest`: as
    of `priced_units`. Raises CostError for a task without a price."""
    plan, rule = layout.plan, layout.plan.synchronisation
    costs = problem.costs(plan.world_size)
    simulated = min(rule.round_steps, UNROLLED_STEPS)
    ahead = costs.overlap([], [])
    program = step_program(layout, folding, ahead, local_steps=simulated - 1)
    cycle = _resuming(_apart_by_round(columns_of(unrolled(program)), program), problem, plan)
    local = None
    if simulated < rule.round_steps:
        local = _resuming(columns_of(_graph(layout, folding, 0, local=True)), problem, plan)
    units = Units.of((*cycle.units, *(() if local is None else local.units)))
    rounds = _rounds_of_units(cycle, program, len(units))
    estimates = tuple(priced_units(problem, plan, units, folding, rounds=rounds, lowest=lowest))
    seconds = medians_s(estimates)[cycle.unit]
    factors = costs.overlap([cycle.units[number].work for number in cycle.unit.tolist()], seconds)
    return MixingPeriod(
        cycle=compile_graph(cycle),
        local=None if local is None else compile_graph(local),
        estimates=estimates,
        unit=cycle.unit,
        local_unit=np.empty(0, dtype=np.int64) if local is None else local.unit + len(cycle.units),
        overlap=factors,
        rounds=len(plan.synchronisation.cycle(plan.mesh.dp)),
        steps=rule.round_steps,
        simulated=simulated,
        staggers=rule.kind == "merge",
        ranks=folding.ranks,
    )


def _rounds_of_tasks(program: Program) -> Ints:
    """int64 [tasks of the cycle written out]: the number of the part that a task belongs to; parts repeat alike."""
    parts = {id(part): number for number, part in enumerate(program.parts)}
    steps = [np.full(len(part.graph.tasks), parts[id(part)], dtype=np.int64) for part in program.steps]
    return np.concatenate(steps)


def _apart_by_round(columns: Columns, program: Program) -> Columns:
    """The program, in which a message of two rounds has a unit for each: other messages share its links there."""
    messages = np.array([isinstance(unit.work, SendRecv) for unit in columns.units], dtype=np.int64)
    rounds = 1 + len(program.parts)
    keys = columns.unit * rounds + messages[columns.unit] * (1 + _rounds_of_tasks(program))
    distinct, numbers = np.unique(keys, return_inverse=True)
    units = tuple(columns.units[key // rounds] for key in distinct.tolist())
    return replace(columns, unit=np.asarray(numbers, dtype=np.int64).reshape(columns.size), units=Units.of(units))


def _rounds_of_units(cycle: Columns, program: Program, count: int) -> Ints:
    """int64 [count]: the part that each unit of a cycle belongs to, 0 for those behind them. Only messages need it."""
    rounds = np.zeros(count, dtype=np.int64)
    rounds[cycle.unit] = _rounds_of_tasks(program)
    return rounds


def _resuming(columns: Columns, problem: PlanningProblem, plan: Plan) -> Columns:
    return columns.resuming() if problem.costs(plan.world_size).post_wait_s else columns


def priced_units(
    problem: PlanningProblem,
    plan: Plan,
    units: Units,
    folding: Folding,
    *,
    rounds: Ints | None = None,
    lowest: bool = False,
) -> list[Estimate]:
    """Prices of the units of a plan: overlapped where it says so, and the messages of a round of mixing share links.

    Args:
        rounds: per unit the round that it belongs to; None: all to one.
        folding: as of the columns. Of messages that a simulated one stands for the highest price is taken, or
            (`lowest`) the lowest.

    Leaves out, on machines without a link model, what messages of one round cost one another.
    """
    estimates = beside_products(
        problem.model, problem.costs(plan.world_size), plan, units, problem.price_units(units, plan.mesh)
    )
    rule, cluster = plan.synchronisation, problem.cluster
    if rule.kind != "gossip" or cluster.profile.communication.link_model is None:
        return estimates
    messages = {
        number: unit.work
        for number, unit in enumerate(units)
        if isinstance(unit.work, SendRecv)
        and plan.replica_of_rank(unit.work.source) != plan.replica_of_rank(unit.work.destination)
    }
    together: dict[tuple[int, int], list[int]] = {}
    for number, work in messages.items():
        together.setdefault((work.size_bytes, 0 if rounds is None else int(rounds[number])), []).append(number)
    steps = range(0, plan.mesh.copies, len(folding.replicas))
    end = min if lowest else max
    for (size_bytes, _), numbers in together.items():
        pairs = {(messages[number].source, messages[number].destination): number for number in numbers}
        every = _all_moved_on(tuple(pairs), steps, plan.world_size)
        alone = exchange_seconds(every, size_bytes, cluster).reshape(len(steps), len(pairs))
        nearly = not folding.is_exact
        unlike = _unlike_steps(cluster, tuple(pairs), steps, plan.world_size) if nearly else []
        for place, (pair, number) in enumerate(pairs.items()):
            if nearly:
                likes = [_moved_on(pair, step, plan.world_size) for step in unlike[place]]
                works = [replace(messages[number], source=source, destination=to) for source, to in likes]
                paid = problem.price([(work, 0) for work in works], plan.mesh)
                estimates[number] = end(paid, key=attrgetter("median_s"))
            more = float(end(alone[:, place])) - estimates[number].median_s
            if more > 0:
                detail = f"{len(every)} messages of a round at once"
                estimates[number] = estimates[number].then(Term("other messages", "plus", more, "assumed", detail))
    return estimates


def _moved_on(pair: tuple[int, int], step: int, ranks: int) -> tuple[int, int]:
    """A message between ranks further on; a replica that is folded is one rank."""
    return (pair[0] + step) % ranks, (pair[1] + step) % ranks


@lru_cache(maxsize=4)
def _all_moved_on(pairs: tuple[tuple[int, int], ...], steps: range, ranks: int) -> tuple[tuple[int, int], ...]:
    return tuple(_moved_on(pair, step, ranks) for step in steps for pair in pairs)


@lru_cache(maxsize=4)
def _unlike_steps(cluster: Cluster, pairs: tuple[tuple[int, int], ...], steps: range, ranks: int) -> list[tuple[int, ...]]:
    """Per message the steps on which its like passes other leaf switches, one for each way through these."""
    names = [cluster.nodes.leaf[node] for node, _ in cluster.places[:ranks]]
    kinds = dict.fromkeys(cluster.nodes.leaves.get(name) for name in names)
    number = {kind: place for place, kind in enumerate(kinds)}
    leaf = np.unique(names, return_inverse=True)[1]
    kind = np.array([number[cluster.nodes.leaves.get(name)] for name in names], dtype=np.int64)
    moves = np.array(steps, dtype=np.int64)
    unlike = []
    for pair in pairs:
        source, to = ((rank + moves) % ranks for rank in pair)
        ways = ((leaf[source] == leaf[to]) * len(kinds) + kind[source]) * len(kinds) + kind[to]
        unlike.append(tuple(moves[np.unique(ways, return_index=True)[1]].tolist()))
    return unlike
