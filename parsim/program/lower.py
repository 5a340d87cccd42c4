"""From intent to program: a Plan over a Model becomes the TaskGraph of one training step, in small named passes."""

from __future__ import annotations

from collections.abc import Iterator

from parsim.model.model import Model
from parsim.plans.plan import Plan
from parsim.program.passes.compute import add_computation
from parsim.program.passes.gradients import (
    add_clipping,
    add_gathering_ahead,
    add_gradient_reduction,
    add_optimizer,
    add_parameter_gathering,
    add_replica_sums,
)
from parsim.program.passes.offload import add_activation_copies, add_offloaded_optimizer
from parsim.program.passes.rounds import add_packing, add_round, without_arrivals, without_idle
from parsim.program.passes.unsharded import add_unsharded_buckets
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Draft, TaskGraph

PASSES_AT_THE_END = (
    add_activation_copies,
    add_unsharded_buckets,
    add_gathering_ahead,
    add_gradient_reduction,
    add_replica_sums,
    add_clipping,
    add_optimizer,
    add_offloaded_optimizer,
    add_parameter_gathering,
)
PASSES = (add_computation, *PASSES_AT_THE_END)


def lower(
    plan: Plan, model: Model, layout: PlanIndex | None = None, *, mixing_round: int = 0, local: bool = False
) -> TaskGraph:
    """The task graph of one step.

    Each pass adds tasks in issue order. First come loading and computation per rank, with the communication of values behind
    them. Then come the gradient buckets in the order they fill, the optimizer, and the collectives that gather its result.

    layout: of this plan and model (as a rank has it, `parsim.model.divided`), if there is one already. mixing_round: where
    replicas mix their weights in rounds, the number of the round that follows the step. local: a step before that round
    instead, with the same tasks under the same numbers, up to those of the round. Raises PlanError: the plan does not fit the
    model.
    """
    layout = layout or PlanIndex(plan, model)
    draft = Draft(world_size=plan.world_size)
    if plan.synchronisation.combines_first:
        add_packing(draft, layout)
    for add in PASSES:
        add(draft, layout)
    steps = len(draft)
    if not local:
        add_round(draft, layout, mixing_round)
    graph = draft.finish()
    if plan.synchronisation.is_stale:
        return without_arrivals(graph, layout)
    return without_idle(graph, layout, mixing_round, steps)


def step_graphs(layout: PlanIndex) -> Iterator[TaskGraph]:
    """The graphs of all rounds of a cycle; of a plan whose steps are alike, that of its step."""
    rule = layout.plan.synchronisation
    for number in rule.cycle(layout.plan.mesh.dp) if rule.mixes else (0,):
        yield lower(layout.plan, layout.model, layout, mixing_round=number)
