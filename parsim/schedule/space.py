"""What a search is free to choose: meshes, microbatches, pipeline orders, ZeRO stages and bucket sizes under the constraints.

Every key that the question gives has one value here, every other all that make sense.
"""

from __future__ import annotations

from collections.abc import Iterator

from parsim.errors import ScheduleError
from parsim.graph.plan_index import PlanIndex
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, ZERO_STAGES
from parsim.predict.planning_problem import PlanningProblem

BUCKET_BYTES = (DEFAULT_BUCKET_BYTES, 4 * 1024 * 1024, 100 * 1024 * 1024)

FREE_ORDERS = ("1f1b", "gpipe", "interleaved")
"""Not zero-bubble: no calibration has measured a backward's halves yet, so what it would gain over 1f1b rests on an assumed
split. It can be asked for."""

FREE_CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages per rank that are tried where their number is free."""


def meshes(problem: PlanningProblem) -> Iterator[Mesh]:
    """Every mesh over all devices that keeps the constraints, fewest stages first."""
    devices = problem.cluster.size
    for pp in range(1, min(devices, len(problem.model.components)) + 1):
        for tp in range(1, devices // pp + 1):
            dp, rest = divmod(devices, pp * tp)
            mesh = Mesh(pp=pp, dp=dp, tp=tp) if not rest else None
            if mesh is not None and problem.constraints.allow(mesh):
                yield mesh


def microbatch_counts(problem: PlanningProblem, mesh: Mesh) -> list[int]:
    """Every number of microbatches into which a replica's samples divide, ascending.

    Args:
        problem: model, cluster, batch and constraints. mesh: its dp are the replicas.

    Raises:
        ScheduleError: the batch does not divide over the replicas, or not into the microbatches that are asked for.
    """
    samples, rest = divmod(problem.global_batch, mesh.dp)
    if rest:
        nearest = max(1, round(problem.global_batch / mesh.dp)) * mesh.dp
        raise ScheduleError(
            f"global_batch ({problem.global_batch}) is not divisible by dp ({mesh.dp}); use a multiple of {mesh.dp}, e.g. {nearest}"
        )
    asked = problem.constraints.microbatches
    if asked is None:
        return divisors(samples)
    if samples % asked:
        parts = mesh.dp * asked
        nearest = max(1, round(problem.global_batch / parts)) * parts
        raise ScheduleError(
            f"global_batch ({problem.global_batch}) is not divisible by dp ({mesh.dp}) * microbatches ({asked}) = {parts}; use a "
            f"multiple of it, e.g. {nearest}"
        )
    return [asked]


def divisors(number: int) -> list[int]:
    """Of a positive number, ascending."""
    low = [count for count in range(1, int(number**0.5) + 1) if number % count == 0]
    return sorted({*low, *(number // count for count in low)})


def orders(problem: PlanningProblem, mesh: Mesh) -> list[tuple[str, int]]:
    """Pipeline orders with the stages per rank that they take; one of them where there is no pipeline.

    Args:
        problem: model and constraints. mesh: its pp are the ranks of the pipeline.

    Raises:
        ScheduleError: the model has too few components.
    """
    asked = problem.constraints
    names = FREE_ORDERS if asked.pipeline_order is None else (asked.pipeline_order,)
    most = len(problem.model.components) // mesh.pp
    if mesh.pp == 1:
        return [(asked.pipeline_order or "1f1b", 1)]
    counts = FREE_CHUNKS if asked.chunks is None else (asked.chunks,)
    found = []
    for name in names:
        row = PIPELINE_ORDERS[name]
        own = {row.fewest_chunks, *counts} if asked.chunks is None else set(counts)
        found += [(name, count) for count in sorted(own) if row.takes(count) and count <= most]
    if not found:
        raise ScheduleError(
            f"{problem.model.name} has {len(problem.model.components)} components for {mesh.pp} ranks of a pipeline"
            f"{'' if asked.chunks is None else f' with {asked.chunks} chunks each'}; use fewer stages or granularity \"layer\""
        )
    return found


def bucket_sizes(problem: PlanningProblem) -> tuple[int, ...]:
    """Bucket sizes that differ for this model: all that hold the whole model are one."""
    if problem.constraints.bucket_bytes is not None:
        return (problem.constraints.bucket_bytes,)
    useful = [size for size in BUCKET_BYTES if size < problem.model.parameter_bytes]
    return tuple(useful) or (DEFAULT_BUCKET_BYTES,)


def zero_stages(problem: PlanningProblem, layout: PlanIndex) -> tuple[int, ...]:
    """Every stage that is asked for; 0 alone where no two ranks hold the same parameters."""
    if isinstance(problem.zero_stage, int):
        return (problem.zero_stage,)
    return ZERO_STAGES if any(len(bucket.group) > 1 for bucket in layout.buckets) else (0,)
