"""From intent to program: a Plan over a Model becomes the TaskGraph of one training step, in small named passes."""

from __future__ import annotations

from parsim.graph.graph_builder import Draft
from parsim.graph.passes.compute import add_computation
from parsim.graph.passes.gradients import add_gradient_reduction, add_optimizer, add_parameter_gathering
from parsim.graph.passes.unsharded import add_unsharded_buckets
from parsim.graph.plan_index import PlanIndex
from parsim.graph.taskgraph import TaskGraph
from parsim.model.model import Model
from parsim.plans.plan import Plan

PASSES_AT_THE_END = (add_unsharded_buckets, add_gradient_reduction, add_optimizer, add_parameter_gathering)
PASSES = (add_computation, *PASSES_AT_THE_END)


def lower(plan: Plan, model: Model) -> TaskGraph:
    """The task graph of one step. Raises PlanError if the plan does not fit the model.

    A pass writes tasks in issue order: per rank loading and computation with the communication of values behind it, then
    the gradient buckets in the order they fill, then the optimizer, then what gathers its result.
    """
    layout = PlanIndex(plan, model)
    draft = Draft(world_size=plan.world_size)
    for add in PASSES:
        add(draft, layout)
    return draft.finish()
