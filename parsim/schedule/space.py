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
    """Every mesh over the first devices of the cluster that keeps the constraints, most devices and fewest stages first.

    Those that leave devices idle are among them: the batch, or what shards divide by, may not divide over all, and one more
    device must not make the answer slower.

    Args:
        problem: cluster, model and constraints.
    """
    asked = problem.constraints
    for devices in range(problem.cluster.size, 0, -1):
        for pp in (asked.pp,) if asked.pp else range(1, min(devices, len(problem.model.components)) + 1):
            for tp in (asked.tp,) if asked.tp else range(1, devices // pp + 1):
                dp, rest = divmod(devices, pp * tp * (asked.cp or 1))
                if not rest and dp and asked.dp in (None, dp) and dp * (asked.cp or 1) % (asked.ep or 1) == 0:
                    yield Mesh(pp=pp, dp=dp, tp=tp, cp=asked.cp or 1, ep=asked.ep or 1)


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
            f"global_batch ({problem.global_batch}) is not divisible by dp ({mesh.dp}); use a multiple of {mesh.dp}, "
            f"e.g. {nearest}"
        )
    asked = problem.constraints.microbatches
    if asked is None:
        return divisors(samples)
    if samples % asked:
        parts = mesh.dp * asked
        nearest = max(1, round(problem.global_batch / parts)) * parts
        raise ScheduleError(
            f"global_batch ({problem.global_batch}) is not divisible by dp ({mesh.dp}) * microbatches ({asked}) = {parts}; "
            f"use a multiple of it, e.g. {nearest}"
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
            f'{"" if asked.chunks is None else f" with {asked.chunks} chunks each"}; use fewer stages or granularity "layer"'
        )
    return found


def bucket_sizes(problem: PlanningProblem) -> tuple[int, ...]:
    """Bucket sizes that differ for this model: all that hold the whole model are one."""
    if problem.constraints.bucket_bytes is not None:
        return (problem.constraints.bucket_bytes,)
    whole = sum(parameter.size_bytes for parameter in problem.model.trainable_parameters)
    useful = [size for size in BUCKET_BYTES if size < whole]
    return tuple(useful) or (DEFAULT_BUCKET_BYTES,)


def zero_stages(problem: PlanningProblem, layout: PlanIndex) -> tuple[int, ...]:
    """Every stage that is asked for; 0 alone where no two ranks hold the same parameters."""
    if isinstance(problem.zero_stage, int):
        return (problem.zero_stage,)
    shared = layout.plan.mesh.copies > 1 or any(len(bucket.group) > 1 for bucket in layout.buckets)
    return ZERO_STAGES if shared else (0,)
