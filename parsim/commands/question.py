"""From a RunConfig to what the scheduler answers: the Problem, and the plans the [plan] table allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parsim.config import RunConfig, mesh_of
from parsim.errors import PlanError
from parsim.plan.plan import DEFAULT_BUCKET_BYTES, Plan, check_plan

if TYPE_CHECKING:
    from parsim.schedule.problem import Problem
    from parsim.schedule.search import Search


def problem_of(config: RunConfig) -> Problem:
    """Load the model and the profile that the file names. Raises ModelError, ProfileError."""
    from parsim.hardware.cluster import cluster_from_profile
    from parsim.hardware.profile import load_profile
    from parsim.model.spec import load_model
    from parsim.schedule.problem import Problem

    cluster = cluster_from_profile(load_profile(config.cluster.profile), config.devices)
    return Problem(
        model=load_model(config.model_spec),
        cluster=cluster,
        global_batch=config.training.global_batch,
        precision=config.training.precision,
        optimizer=config.training.optimizer,
    )


def fixed_plan(problem: Problem, config: RunConfig) -> Plan | None:
    """The plan of strategy "custom" or of a plan file; None where plans are searched for.

    Raises:
        PlanError: the plan contradicts the model, the batch or the cluster.
    """
    table = config.plan
    if table.plan_path is not None:
        plan = Plan.load(table.plan_path)
        check_plan(plan, problem.model)
        if plan.global_batch != problem.global_batch:
            raise PlanError(
                f"{table.plan_path} is for global_batch {plan.global_batch}, the run file asks for {problem.global_batch}; "
                f"set training.global_batch = {plan.global_batch} or plan again"
            )
        return plan
    if table.mesh is None:
        return None
    from parsim.plan.mesh import check_mesh
    from parsim.schedule.families import balanced_plan

    mesh = mesh_of(table.mesh)
    check_mesh(mesh, problem.cluster.size)
    return balanced_plan(
        problem,
        "custom",
        mesh,
        microbatches=table.microbatches or 1,
        pipeline_order=table.pipeline_order or "1f1b",
        bucket_bytes=table.bucket_bytes or DEFAULT_BUCKET_BYTES,
    )


def search_plans(problem: Problem, config: RunConfig, *, top: int | None = None) -> Search:
    """Search the family that [plan] names. Raises ScheduleError, CostError."""
    from parsim.schedule.search import search

    return search(problem, (config.plan.strategy,), top=top)
