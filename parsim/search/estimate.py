"""What the best plan of an outline is likely to take: how the parts of a large problem are put in order. It proves nothing.

An outline is a mesh, a number of microbatches and a pipeline order. Its stages are taken as equal. The estimate adds the fill
and drain of the pipeline, the forwards that must run again to fit, the sums of gradients and, with ZeRO, gathered parameters.

Leaves out: workspace and buffers, unequal stages, tied parameters, replicas that a tp axis makes of what is not cut.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from parsim.errors import ScheduleError
from parsim.model.component import Component
from parsim.model.optimizers import update_steps
from parsim.numeric import Floats
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import in_flight
from parsim.plans.plan import AUTO
from parsim.predict.problem import PlanningProblem
from parsim.records import once
from parsim.search.bound import ChainSeconds
from parsim.search.memory_floor import HeldTotals, LeastKept, held_totals, memory_floor, missing_bytes, tightest
from parsim.search.prices import Prices, device_kinds
from parsim.search.stages import crossing_bytes
from parsim.search.tensor import allowed_placements, uniform_options
from parsim.work import Collective, HostCopy, HostUpdate, OptimizerStep, SendRecv, Work

INFINITE = float("inf")

USED = 0.94
"""Of a device's memory, the share that weights and activations are counted on to have."""

STEPS = 24
"""Lengths of the longest stage that are tried, each an eighth of the mean more than the one before."""

UNCOVERED = 0.85
"""Of the gathers and sums of ZeRO 3, the share that nothing covers where norms are components: they run too shortly."""


def estimated_s(
    problem: PlanningProblem,
    mesh: Mesh,
    count: int,
    order: tuple[str, int],
    placements: Mapping[str, Placement],
    chain: ChainSeconds,
) -> float:
    """Seconds of a step of the best plan; infinite where none is likely to fit.

    Args:
        mesh, order: of the outline; the order with its stages per rank. count: microbatches.
        placements: by component; what is left out is batch-sharded. chain: seconds of one microbatch.
    """
    samples = problem.global_batch // (mesh.dp * count)
    placed = tuple(placements.get(component.name, BATCH) for component in problem.model.components)
    held = held_totals(problem, mesh, samples, placed)
    forward_s, backward_s = float(chain.forward_s.sum()), float(chain.backward_s.sum())
    rounds = count + (mesh.pp - 1) / order[1]
    passing_s = 2 * (mesh.pp * order[1] - 1) * transfer_s(problem, mesh, samples)
    stages = [stage for stage in problem.zero_stages if stage >= mesh.least_zero_stage or isinstance(problem.zero_stage, int)]

    def step_s(stage: int, again: float, slowest: float) -> float:
        stage_s = max(slowest * (forward_s * (1 + again) + backward_s) / mesh.pp, chain.longest_s)
        sums_s, late_s = _sent_s(problem, mesh, count, held, stage)
        hidden_s = backward_s / mesh.pp if stage < 2 else count * stage_s
        exposed_s = UNCOVERED * sums_s if stage == 3 else max(0.0, sums_s - hidden_s) + late_s
        return rounds * stage_s + passing_s + exposed_s + update_s(problem, mesh, stage)

    shares = {
        stage: _recomputed_share(problem, mesh, count, order, placed, held, stage)
        for stage in (stages if mesh.copies > 1 else stages[:1])
    }
    best = min((step_s(stage, again, 1.0) for stage, again in shares.items() if again <= 1), default=INFINITE)
    for stage, again in shares.items():
        if again > 1 and step_s(stage, 1.0, 1.0) < best:  # longer stages only take longer
            best = min(best, step_s(stage, 1.0, _slowest_share(problem, mesh, count, order, placed, stage)))
    return best


def _recomputed_share(
    problem: PlanningProblem,
    mesh: Mesh,
    count: int,
    order: tuple[str, int],
    placed: tuple[Placement, ...],
    held: HeldTotals,
    stage: int,
) -> float:
    """The share of the forwards that must run again; infinite where that is not enough with equal stages."""
    devices = problem.cluster.devices[: mesh.size]
    room = USED * min(device.type.room_bytes for device in devices) * mesh.pp
    name, chunks = order
    alive = in_flight(name, 0, mesh.pp, count, chunks) / chunks
    over = held.weights[stage] + alive * held.saved - room
    if over <= 0 or problem.recompute != AUTO:
        return 0.0
    samples = problem.global_batch // (mesh.dp * count)
    kept = float(least_bytes(problem, tightest(problem), mesh, samples, placed).sum())
    freed = alive * (held.saved - (kept if problem.segments else max(held.kept, kept)))
    return over / freed if over <= freed else INFINITE


def least_bytes(problem: PlanningProblem, way: LeastKept, mesh: Mesh, samples: int, placed: Sequence[Placement]) -> Floats:
    """float64 [n]: what each component keeps of one microbatch where a rank recomputes in a way that keeps little."""
    local: Floats = way.kept * _local_shares(problem, mesh.tp, tuple(placed)) * samples
    return local


@once
def _local_shares(problem: PlanningProblem, tp: int, placed: tuple[Placement, ...]) -> Floats:
    """By component its samples over those of a microbatch."""
    return np.array([placement.batch_ways(tp) / tp for placement in placed])


def _slowest_share(
    problem: PlanningProblem, mesh: Mesh, count: int, order: tuple[str, int], placed: tuple[Placement, ...], stage: int
) -> float:
    """How much longer than the others' mean the slowest stage takes, where stages that hold fewer microbatches are longer.

    Infinite where no cut makes all stages fit. Every component is taken to keep least, and to take its share of bytes.
    """
    name, chunks = order
    if chunks > 1 or problem.recompute != AUTO:
        return INFINITE
    samples = problem.global_batch // (mesh.dp * count)
    floor = memory_floor(problem, mesh, samples, tuple((placement,) for placement in placed))
    weights, kept = floor.weights.of(stage), least_bytes(problem, tightest(problem), mesh, samples, placed)
    up_to = np.concatenate([np.zeros((2, 1)), np.cumsum([weights, kept], axis=1)], axis=1)
    components = len(kept)

    alive = [in_flight(name, place, mesh.pp, count, chunks) for place in range(mesh.pp)]

    def reaches(share: float) -> bool:
        taken = 0
        for held_here, room in zip(alive, floor.rooms.tolist(), strict=True):
            held = up_to[0] - up_to[0][taken] + held_here * (up_to[1] - up_to[1][taken])
            most = int(np.searchsorted(held, USED * room - floor.largest_bytes, side="right")) - 1
            taken = min(most, round(taken + share * components / mesh.pp))
        return taken >= components

    tried = [1.0 + 0.125 * step for step in range(STEPS)]
    if not reaches(tried[-1]):  # the longer the longest stage may be, the further they reach
        return INFINITE
    return tried[bisect_left(tried, True, key=reaches)]


@once
def transfer_s(problem: PlanningProblem, mesh: Mesh, samples: int) -> float:
    """Seconds of what crosses the middle of the model, between the first two places."""
    if mesh.pp == 1:
        return 0.0
    size = max(1, _middle_bytes(problem, samples) // mesh.tp)
    return price_s(problem, mesh, SendRecv(source=0, destination=mesh.copies * mesh.tp, size_bytes=size))


@once
def _middle_bytes(problem: PlanningProblem, samples: int) -> int:
    return int(np.median(crossing_bytes(problem, samples)))


def _sent_s(problem: PlanningProblem, mesh: Mesh, count: int, held: HeldTotals, stage: int) -> tuple[float, float]:
    """Seconds of gradients and gathered parameters that computation may hide, and of those that follow the optimizer."""
    if mesh.copies == 1:
        return 0.0, 0.0
    summed, gathered, across = sent_s(problem, mesh, max(1, round(held.parameters / mesh.pp)), stage)
    if stage == 3:
        return count * (summed + 2 * gathered) + across, 0.0
    return (count if stage == 2 else 1) * summed + across, gathered


class Sent(NamedTuple):
    """Seconds to sum the gradients of a rank, to gather its parameters, and to sum its part over all sharding groups."""

    summed_s: float
    gathered_s: float
    across_s: float


def sent_s(problem: PlanningProblem, mesh: Mesh, size_bytes: int, stage: int) -> Sent:
    """What a ZeRO stage sends of a rank's `size_bytes` of parameters, in one piece each."""

    def seconds(operation: str, copies: range, part_bytes: int) -> float:
        group = tuple(mesh.rank(stage=0, replica=copy, shard=0) for copy in copies)
        return price_s(problem, mesh, Collective(operation=operation, group=group, size_bytes=part_bytes))

    if stage == 0:
        return Sent(seconds("all_reduce", range(mesh.copies), size_bytes), 0.0, 0.0)
    own = range(mesh.group_copies)
    across = range(0, mesh.copies, mesh.group_copies)
    return Sent(
        seconds("reduce_scatter", own, size_bytes),
        seconds("all_gather", own, size_bytes),
        seconds("all_reduce", across, max(1, size_bytes // len(own))) if mesh.groups > 1 else 0.0,
    )


def update_s(problem: PlanningProblem, mesh: Mesh, stage: int) -> float:
    """Seconds of the update of a rank's equal share of the model; on the host, beside the copies of new parameters."""
    shares = mesh.pp * mesh.tp * (mesh.group_copies if stage else 1)
    known, key = problem.answers(update_s), (shares, mesh.size)
    if key not in known:
        parts = [(step, max(1, round(step.elements / shares))) for step in _updates(problem)]
        if problem.optimizer_offload:
            works: list[Work] = [HostUpdate(elements=elements, optimizer=step.optimizer) for step, elements in parts]
        else:
            works = [replace(step, elements=elements, tensors=1) for step, elements in parts]
        known[key] = sum(price_s(problem, mesh, work) for work in works)
        if problem.optimizer_offload:
            size = sum(parameter.size_bytes for parameter in problem.model.trainable_parameters) // shares
            known[key] = max(known[key], price_s(problem, mesh, HostCopy(size_bytes=size, to_host=False)))
    return float(known[key])


@once
def _updates(problem: PlanningProblem) -> tuple[OptimizerStep, ...]:
    return update_steps(problem.model.trainable_parameters)


def price_s(problem: PlanningProblem, mesh: Mesh, work: Work) -> float:
    return problem.price([(work, 0)], mesh)[0].median_s


# What the components of a model take at least on a mesh, whatever the cut into stages, and the memory that no plan saves.


class LeastSeconds(NamedTuple):
    """Seconds of every component, their sum and the longest; the placements among which they are the least."""

    seconds: Floats
    sum_s: float
    longest_s: float
    options: tuple[tuple[Placement, ...], ...]


def least_seconds(problem: PlanningProblem, mesh: Mesh, count: int, *, mixed: bool) -> LeastSeconds:
    """Per component forward and backward of one microbatch, under the cheapest of its placements on the fastest device.

    Args:
        mixed: whether every component has a placement of its own.
    """
    samples = problem.global_batch // (mesh.dp * count)
    known = problem.answers(least_seconds)
    key = (problem.cost_group(mesh.size), tuple(device_kinds(problem, mesh.size)), mesh.tp, samples, mixed)
    if key not in known:
        prices = Prices(problem=problem, mesh=mesh, samples=samples)
        seen: dict[object, float] = {}
        seconds, chosen = [], []
        for component in problem.model.components:
            options = _options(problem, component, mesh.tp, samples, mixed=mixed)
            chosen.append(options)
            work = (prices.same_work(component), component.name in prices.differentiable, options)
            if work not in seen:
                seen[work] = min((_mean_s(prices, component, option) for option in options), default=0.0)
            seconds.append(seen[work])
        known[key] = LeastSeconds(np.array(seconds), sum(seconds), max(seconds), tuple(chosen))
    return cast(LeastSeconds, known[key])


@once
def least_missing_bytes(
    problem: PlanningProblem, mesh: Mesh, count: int, pipeline: tuple[tuple[str, int], ...], *, mixed: bool
) -> float:
    """By how much no plan with these pipeline orders can fit; 0 where some might."""
    return missing_bytes(problem, mesh, count, least_seconds(problem, mesh, count, mixed=mixed).options, pipeline)


def _options(problem: PlanningProblem, component: Component, tp: int, samples: int, *, mixed: bool) -> tuple[Placement, ...]:
    if not mixed:
        with contextlib.suppress(ScheduleError):  # said where such a part is opened
            return uniform_options(problem, component, tp, divides=samples % tp == 0)
        return ()
    return allowed_placements(problem, component, Mesh(tp=tp), samples)


def _mean_s(prices: Prices, component: Component, placement: Placement) -> float:
    """Forward and backward of one microbatch on the fastest device, as the mean over the tp ranks."""
    share = 1 / prices.mesh.tp if placement.kind == "place" else 1.0
    phases = prices.phases(component)
    return share * sum(prices.compute_s(component, placement, phase, fastest=True) for phase in phases)
