"""What a search is free to choose: meshes, microbatches, pipeline orders, ZeRO stages and bucket sizes under the constraints.

Every key that the question gives has one value here, every other all that make sense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from parsim.errors import ScheduleError
from parsim.graph.plan_index import PlanIndex
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, ZERO_STAGES
from parsim.predict.planning_problem import PlanningProblem
from parsim.units import divisors

MIB = 1024 * 1024
BUCKET_BYTES = (DEFAULT_BUCKET_BYTES, 4 * MIB, 100 * MIB)

SMALL_BUCKET_BYTES = (MIB, MIB // 4, MIB // 16)
"""Tried where the plans with larger ones leave room for a faster step."""

MOST_SMALL_BUCKETS = 128
"""Of a rank. Sizes that make more are not tried."""

MOST_BUCKET_SIZES = 64
"""Of a plan whose parameters have fewer sums than this, every size that makes other buckets is tried."""

FREE_ORDERS = ("1f1b", "gpipe", "interleaved")
"""Not zero-bubble: no calibration has measured a backward's halves yet, so what it would gain over 1f1b rests on an assumed
split. It can be asked for."""

FREE_CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages per rank that are tried where their number is free."""


def meshes(problem: PlanningProblem, wanted: Callable[[int, int, int], bool] | None = None) -> Iterator[Mesh]:
    """Every mesh over the first devices of the cluster that keeps the constraints, most devices and fewest stages first.

    Those that leave devices idle are among them: the batch, or what shards divide by, may not divide over all, and one more
    device must not make the answer slower.

    Args:
        problem: cluster, model and constraints. wanted: of pp, dp and tp, whether to make the mesh; None: all.
    """
    asked, most = problem.constraints, len(problem.model.components)
    for devices in range(problem.cluster.size, 0, -1):
        context = asked.cp or 1
        if devices % context:
            continue
        for pp in divisors(devices // context):
            if asked.pp not in (None, pp) or (pp > most and not asked.pp):
                continue
            for tp in divisors(devices // context // pp):
                dp = devices // context // (pp * tp)
                if wanted is not None and not wanted(pp, dp, tp):
                    continue  # of 16,384 devices there are 377,000
                if asked.tp in (None, tp) and asked.dp in (None, dp) and dp * context % (asked.ep or 1) == 0:
                    yield from _sharded(problem, Mesh(pp=pp, dp=dp, tp=tp, cp=context, ep=asked.ep or 1))


def _sharded(problem: PlanningProblem, mesh: Mesh) -> Iterator[Mesh]:
    """The mesh, and with sharding groups of one node each where replicas span several; with the groups that are asked for."""
    asked, width = problem.constraints.dp_shard, mesh.tp * mesh.cp
    if asked is not None:
        if mesh.dp % asked == 0 and asked * mesh.cp % mesh.ep == 0 and asked * mesh.cp > 1:
            yield replace(mesh, dp_shard=asked)
        return
    yield mesh
    if problem.zero_stage == 0 or problem.constraints.synchronisation.is_relaxed:
        return
    on_a_node = devices_on_a_node(problem)
    size, rest = divmod(on_a_node, width)
    spans = on_a_node < problem.cluster.size and not rest and 1 < size < mesh.dp
    if spans and mesh.dp % size == 0 and size * mesh.cp % mesh.ep == 0:
        yield replace(mesh, dp_shard=size)


@dataclass
class _Nodes:
    """Of one problem: devices on each node; 0: not known yet."""

    devices: int = 0


def devices_on_a_node(problem: PlanningProblem) -> int:
    """How many devices every node has, if ranks fill one node after the other; else all, for there are no nodes to speak of.

    Args:
        problem: with the cluster.
    """
    known = problem.remembered(_Nodes)
    if not known.devices:
        cluster = problem.cluster
        known.devices = cluster.size
        if cluster.profile.communication.link_model is not None:
            most = cluster.most_on_a_node
            if all(node == rank // most for rank, (node, _) in enumerate(cluster.places)):
                known.devices = most
    return known.devices


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
        return list(divisors(samples))
    if samples % asked:
        parts = mesh.dp * asked
        nearest = max(1, round(problem.global_batch / parts)) * parts
        raise ScheduleError(
            f"global_batch ({problem.global_batch}) is not divisible by dp ({mesh.dp}) * microbatches ({asked}) = {parts}; "
            f"use a multiple of it, e.g. {nearest}"
        )
    return [asked]


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
    """Bucket sizes that differ for this model: of those that hold it whole the first."""
    if problem.constraints.bucket_bytes is not None:
        return (problem.constraints.bucket_bytes,)
    whole = sum(parameter.size_bytes for parameter in problem.model.trainable_parameters)
    useful = tuple(size for size in BUCKET_BYTES if size < whole)
    holding = (size for size in BUCKET_BYTES if size >= whole)  # the default first
    return (*useful, *list(holding)[:1])


def other_bucket_sizes(problem: PlanningProblem, layout: PlanIndex) -> list[int]:
    """Further bucket sizes worth trying: every one that makes other buckets, or some small ones where these are too many.

    A bucket is closed once it holds `bucket_bytes`. So buckets change only where it passes the sum of a run of parameters.

    Args:
        problem: model and constraints. layout: of a plan, whatever its bucket size.
    """
    if problem.constraints.bucket_bytes is not None:
        return []
    plan = layout.plan
    whole = problem.layout(replace(plan, bucket_bytes=2**62))
    runs = [[each.size_bytes for each in bucket.parameters] for bucket in whole.buckets if len(bucket.group) > 1]
    if not runs:
        return []
    known = bucket_sizes(problem)
    if sum(len(run) * (len(run) + 1) // 2 for run in runs) > MOST_BUCKET_SIZES:
        most = max(map(sum, runs))
        return [size for size in SMALL_BUCKET_BYTES if size < most <= size * MOST_SMALL_BUCKETS]
    sums = {sum(run[first:last]) for run in runs for last in range(1, len(run) + 1) for first in range(last)}
    found: dict[tuple[tuple[int, ...], ...], int] = {_closings(runs, size): 0 for size in known}
    for size in sorted(sums - {0}, reverse=True):
        found.setdefault(_closings(runs, size), size)
    return [size for size in found.values() if size]


def _closings(runs: Sequence[Sequence[int]], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Per run of parameters after which of them a bucket is closed."""
    found = []
    for run in runs:
        held, closed = 0, []
        for number, size in enumerate(run):
            held += size
            if held >= bucket_bytes or number == len(run) - 1:
                closed.append(number)
                held = 0
        found.append(tuple(closed))
    return tuple(found)


def zero_stages(problem: PlanningProblem, layout: PlanIndex) -> tuple[int, ...]:
    """Every stage that is asked for; 0 alone where no two ranks hold the same parameters, and not with sharding groups."""
    if isinstance(problem.zero_stage, int):
        return (problem.zero_stage,)
    if layout.plan.mesh.dp_shard:
        return ZERO_STAGES[1:]
    shared = layout.plan.mesh.copies > 1 or any(len(group) > 1 for group in layout.buckets.groups.values())
    return ZERO_STAGES if shared else (0,)


@dataclass
class _Chain:
    """Of one problem: whether its model is a chain."""

    found: bool | None = None


def is_chain(problem: PlanningProblem) -> bool:
    """Whether every component waits for the one before it, forward and backward. Else stages may run beside one another.

    Args:
        problem: whose model is meant.
    """
    known = problem.remembered(_Chain)
    if known.found is None:
        known.found = _is_chain(problem.model)
    return known.found


def _is_chain(model: Model) -> bool:
    backwards = model.differentiable_components
    for one, two in zip(model.components, model.components[1:], strict=False):
        shared = [model.value[name] for name in two.inputs if name in one.outputs]
        returns = any(value.differentiable for value in shared) and two.name in backwards
        if not shared or (one.name in backwards and not returns):
            return False
    return True
