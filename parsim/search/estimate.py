"""What the best plan of an outline is likely to take: how the parts of a large problem are put in order. It proves nothing.

An outline is a mesh, a number of microbatches and a pipeline order. Its stages are taken as equal. The estimate adds the fill
and drain of the pipeline, the forwards that must run again to fit, the sums of gradients and, with ZeRO, gathered parameters.

Leaves out: workspace and buffers, unequal stages, tied parameters, replicas that a tp axis makes of what is not cut.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, cast

import numpy as np

from parsim.errors import PlanError, ScheduleError
from parsim.model.component import Component
from parsim.model.optimizers import update_steps
from parsim.numeric import Floats
from parsim.plans.layouts import BATCH, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import in_flight
from parsim.plans.plan import AUTO, ZERO_STAGES, Plan
from parsim.predict.problem import PlanningProblem
from parsim.records import once
from parsim.search.bound import ChainSeconds
from parsim.search.memory_floor import (
    HeldTotals,
    LeastKept,
    held_totals,
    memory_floor,
    missing_bytes,
    rooms_of,
    tightest,
)
from parsim.search.prices import Prices, device_kinds, fewer_copies
from parsim.search.stages import crossing_bytes
from parsim.search.tensor import allowed_placements, uniform_options
from parsim.work import COLLECTIVE_KINDS, Collective, HostCopy, HostUpdate, OptimizerStep, SendRecv, Work

INFINITE = float("inf")

USED = 0.92
"""Of a device's memory, the share that weights and activations are counted on to have."""

STEPS = 24
"""Lengths of the longest stage that are tried, each an eighth of the mean more than the one before."""

UNCOVERED = 0.85
"""Of the gathers and sums of ZeRO 3, the share that nothing covers where norms are components: they run too shortly."""


def estimated_s(
    problem: PlanningProblem,
    mesh: Mesh,
    counts: Sequence[int],
    orders: Sequence[tuple[str, int]],
    placements: Sequence[Mapping[str, Placement]],
    chains: Sequence[ChainSeconds],
) -> Floats:
    """Seconds of a step of the best plan of every outline on a mesh; infinite where none is likely to fit.

    Args:
        counts: microbatches. orders: of the pipeline, with their stages per rank.
        placements: per count, by component; what is left out is batch-sharded. chains: per count, seconds of one microbatch.

    Returns:
        float64 [counts, orders].
    """
    names = [component.name for component in problem.model.components]
    placed = [tuple(some.get(name, BATCH) for name in names) for some in placements]
    samples = [problem.global_batch // (mesh.dp * count) for count in counts]
    held = [held_totals(problem, mesh, *each) for each in zip(samples, placed, strict=True)]
    stages = problem.zero_stages_on(mesh)[: None if mesh.copies > 1 else 1]

    def by_count(figures: Sequence[float]) -> Floats:
        return np.array(figures, dtype=np.float64)[:, None, None]

    count, chunks = by_count(counts), np.array([each for _, each in orders], dtype=np.float64)[:, None]
    forward_s = by_count([chain.forward_s for chain in chains])
    backward_s = by_count([chain.backward_s for chain in chains])
    passing_s = 2 * (mesh.pp * chunks - 1) * by_count([transfer_s(problem, mesh, each) for each in samples])
    longest_s = by_count([chain.longest_s for chain in chains])
    # beside a component that is longer than a stage, its place has the other stages of a place too
    others_s = (chunks - 1) * (forward_s + backward_s - longest_s) / np.maximum(1, mesh.pp * chunks - 1)
    sent = [[_sent_s(problem, mesh, each, zero) for zero in stages] for each in held]
    once_s, every_s, late_s = np.moveaxis(np.array(sent, dtype=np.float64), -1, 0)[:, :, None, :]
    updates_s = np.array([update_s(problem, mesh, zero) for zero in stages])
    sums_s = once_s + count * every_s
    stage = np.array(stages)

    def steps_s(again: Floats | float, slowest: Floats | float) -> Floats:
        """float64 [counts, orders, stages]"""
        whole_s = forward_s * (1 + again) + backward_s
        stage_s = np.maximum(slowest * whole_s / mesh.pp, longest_s + others_s)
        hidden_s = np.where(stage < 2, backward_s / mesh.pp, count * stage_s)
        exposed_s = np.where(stage == 3, UNCOVERED * sums_s, np.maximum(0.0, sums_s - hidden_s) + late_s)
        # a place computes all its microbatches, or one microbatch passes all places, and the rest is filling and draining
        busy_s = count * stage_s + np.maximum(0.0, whole_s - stage_s) / chunks
        alone_s = whole_s + (count - 1) * stage_s / chunks
        step_s: Floats = np.maximum(busy_s, alone_s) + passing_s + exposed_s + updates_s
        return step_s

    again = _recomputed_shares(problem, mesh, counts, orders, placed, held, stages)
    alike = again <= 1
    best: Floats = np.where(alike, steps_s(np.where(alike, again, 1.0), 1.0), INFINITE).min(axis=-1)
    all_again_s = steps_s(1.0, 1.0)  # longer stages only take longer
    for row, column, number in zip(*np.nonzero(~alike & (all_again_s < best[:, :, None])), strict=True):
        if all_again_s[row, column, number] < best[row, column]:
            share = _slowest_share(problem, mesh, counts[row], orders[column], placed[row], stages[number])
            if share < INFINITE:
                best[row, column] = min(best[row, column], steps_s(1.0, share)[row, column, number])
    return best


def _recomputed_shares(
    problem: PlanningProblem,
    mesh: Mesh,
    counts: Sequence[int],
    orders: Sequence[tuple[str, int]],
    placed: Sequence[tuple[Placement, ...]],
    held: Sequence[HeldTotals],
    stages: Sequence[int],
) -> Floats:
    """float64 [counts, orders, stages]: the share of the forwards that must run again; infinite where that is not enough with
    equal stages."""
    if problem.recompute != AUTO:
        return np.zeros((len(counts), len(orders), len(stages)))
    alive = np.full((len(counts), len(orders)), np.nan)
    for (row, count), (column, (name, chunks)) in product(enumerate(counts), enumerate(orders)):
        with contextlib.suppress(PlanError):  # the order does not take so many microbatches
            alive[row, column] = in_flight(name, 0, mesh.pp, count, chunks) / chunks
    samples = [problem.global_batch // (mesh.dp * count) for count in counts]
    kept = [float(least_bytes(problem, tightest(problem), mesh, *each).sum()) for each in zip(samples, placed, strict=True)]
    if not problem.segments:
        kept = [max(least, each.kept) for least, each in zip(kept, held, strict=True)]
    saved = np.array([each.saved for each in held])
    weights = np.array([[each.weights[stage] for stage in stages] for each in held])
    over = weights[:, None, :] + (alive * saved[:, None])[:, :, None] - USED * mesh.pp * _least_room(problem, mesh.size)
    freed = (alive * (saved - kept)[:, None])[:, :, None]
    enough = over <= freed
    return np.where(over <= 0, 0.0, np.where(enough, over / np.where(enough & (freed > 0), freed, 1.0), INFINITE))


@once
def _least_room(problem: PlanningProblem, ranks: int) -> float:
    """Bytes that weights and activations may have on the smallest of the first devices."""
    return float(rooms_of(problem)[:ranks].min())


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
    rooms = [USED * room - floor.largest_bytes for room in floor.rooms.tolist()]
    alive = [in_flight(name, place, mesh.pp, count, chunks) for place in range(mesh.pp)]
    held_with = {number: (up_to[0] + number * up_to[1]).tolist() for number in set(alive)}

    def reaches(share: float) -> bool:
        taken = 0
        for held_here, room in zip(alive, rooms, strict=True):
            held = held_with[held_here]
            most = bisect_right(held, held[taken] + room) - 1
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
    size, some = max(1, _middle_bytes(problem, samples) // mesh.tp), fewer_copies(mesh)
    return price_s(problem, mesh, SendRecv(source=0, destination=some.copies * some.tp, size_bytes=size), some)


@once
def _middle_bytes(problem: PlanningProblem, samples: int) -> int:
    return int(np.median(crossing_bytes(problem, samples)))


def _sent_s(problem: PlanningProblem, mesh: Mesh, held: HeldTotals, stage: int) -> tuple[float, float, float]:
    """Seconds of gradients and gathered parameters that computation may hide, once per step and per microbatch; and of those
    that follow the optimizer."""
    if mesh.copies == 1:
        return 0.0, 0.0, 0.0
    summed, gathered, across = sent_s(problem, mesh, max(1, round(held.trained / mesh.pp)), min(stage, 1))
    if stage == 3:
        if held.frozen:
            gathered += sent_s(problem, mesh, max(1, round(held.frozen / mesh.pp)), 1).gathered_s
        return across, summed + 2 * gathered, 0.0
    return (across, summed, gathered) if stage == 2 else (summed + across, 0.0, gathered)


def gathering_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds that ZeRO 3 is likely to add to a step."""
    placed = {name: placement for stage in plan.stages for name, placement in stage.placed()}
    placements = tuple(placed[component.name] for component in problem.model.components)
    held = held_totals(problem, plan.mesh, plan.microbatch_samples, placements)
    once_s, every_s, _ = _sent_s(problem, plan.mesh, held, ZERO_STAGES[-1])
    return UNCOVERED * (once_s + plan.microbatches * every_s)


class Sent(NamedTuple):
    """Seconds to sum the gradients of a rank, to gather its parameters, and to sum its part over all sharding groups."""

    summed_s: float
    gathered_s: float
    across_s: float


@once
def sent_s(problem: PlanningProblem, mesh: Mesh, size_bytes: int, stage: int) -> Sent:
    """What a ZeRO stage (0, or 1 for all others) sends of a rank's `size_bytes` of parameters, in one piece each."""

    some = fewer_copies(mesh)

    def first_s(operation: str, copies: range, part_bytes: int) -> float:
        group = tuple(mesh.rank(stage=0, replica=copy, shard=0) for copy in copies)
        return price_s(problem, mesh, Collective(operation=operation, group=group, size_bytes=part_bytes), some)

    def seconds(operation: str, copies: range, part_bytes: int) -> float:
        n, few = len(copies), len(range(0, some.copies, copies.step))
        if n <= few or few < 4:
            return first_s(operation, copies, part_bytes)
        half = few // 2
        half_s, few_s = (first_s(operation, copies[:each], part_bytes) for each in (half, few))
        if COLLECTIVE_KINDS[operation].trees:  # a level more for twice as many
            return few_s + math.log2(n / few) * max(0.0, few_s - half_s)
        # a ring of n: n hops, and (n - 1) / n of the bytes over each link
        hop_s = (few_s * (1 - 1 / half) - half_s * (1 - 1 / few)) / (few * (1 - 1 / half) - half * (1 - 1 / few))
        hop_s = max(0.0, hop_s)
        return n * hop_s + (few_s - few * hop_s) * (1 - 1 / n) / (1 - 1 / few)

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


def price_s(problem: PlanningProblem, mesh: Mesh, work: Work, beside: Mesh | None = None) -> float:
    return problem.price([(work, 0)], mesh, beside)[0].median_s


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
