"""Pipeline stages of one mesh, cut by cost: the plan whose slowest stage is fastest among those whose stages fit."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.costs.costs import Costs
from parsim.errors import ScheduleError
from parsim.plans.concurrent import concurrent_with
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import check_chunks, moments, rank_of_stage, stages_by_rank
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan, Stage
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.options import Prices
from parsim.schedule.partition import INFINITE, partition, sums_between
from parsim.work import Phase, SendRecv

TIGHTENINGS = 4
"""How often stages that do not fit after all (workspace, boundary values) are cut again with that much less memory."""

Bounds = tuple[tuple[int, int], ...]


def balanced_plan(
    problem: PlanningProblem,
    strategy: str,
    mesh: Mesh,
    *,
    microbatches: int,
    pipeline_order: str,
    chunks: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    placements: Mapping[str, Placement] | None = None,
) -> Plan:
    """The plan whose slowest stage is fastest among those whose stages fit; among all, where none fits.

    Args:
        chunks: stages per rank, of which each may take an equal part of its memory.
        placements: by component; None: all batch-sharded.

    Raises:
        ScheduleError: more stages than components. PlanError: the batch, the placements and the mesh do not go together.
        CostError: stages cannot be balanced where a component has no cost.
    """
    chosen = placements or {}
    check_chunks(pipeline_order, chunks)
    places = rank_of_stage(pipeline_order, mesh.pp, chunks)
    components = problem.model.components

    def plan(bounds: Bounds) -> Plan:
        return Plan(
            strategy=strategy,
            mesh=mesh,
            stages=tuple(
                Stage(
                    components=tuple(component.name for component in components[first:last]),
                    ranks=mesh.stage_ranks(places[number]),
                    placements=tuple(chosen.get(component.name, BATCH) for component in components[first:last]),
                )
                for number, (first, last) in enumerate(bounds)
            ),
            global_batch=problem.global_batch,
            microbatches=microbatches,
            pipeline_order=pipeline_order,
            bucket_bytes=bucket_bytes,
            zero_stage=problem.zero_stage,
        )

    count = mesh.pp * chunks
    if count == 1:
        return plan(((0, len(components)),))
    samples = problem.global_batch // (mesh.dp * microbatches)
    costs = _StageCosts(problem, mesh, samples, microbatches, pipeline_order, chunks, chosen)
    cuts = costs.cuts_s()
    fastest = plan(partition(len(components), count, costs.seconds, cuts))
    tried = fastest
    limits = costs.limits_bytes()
    with contextlib.suppress(ScheduleError):  # where no cut fits, the fastest one is judged and shown as not fitting
        for _ in range(TIGHTENINGS):
            excess = _excess_bytes(problem, tried)
            if not any(excess):
                return tried
            limits = [limit - 1.02 * over / chunks for limit, over in zip(limits, excess, strict=True)]
            tried = plan(partition(len(components), count, partial(costs.fitting_s, limits), cuts))
    return fastest if any(_excess_bytes(problem, tried)) else tried


def _excess_bytes(problem: PlanningProblem, plan: Plan) -> list[float]:
    """Per stage by how much its worst rank does not fit."""
    memory = problem.memory(plan)
    return [float(max(memory[rank].excess_bytes for rank in stage.ranks)) for stage in plan.stages]


@dataclass(frozen=True)
class _StageCosts:
    """Time and memory of a run of components on the devices of one stage."""

    problem: PlanningProblem
    mesh: Mesh
    samples: int
    microbatches: int
    order: str
    chunks: int
    placements: Mapping[str, Placement]

    @cached_property
    def _costs(self) -> Costs:
        return self.problem.costs(self.mesh.size)

    @cached_property
    def _seconds(self) -> dict[str, Floats]:
        """Per device kind: forward and backward of one microbatch of components first..last-1, at [last, first]."""
        prices = self._prices(in_flight=1)
        chosen = [(component, self.placements.get(component.name, BATCH)) for component in self.problem.model.components]
        totals: dict[str, Floats] = {}
        for rank in range(self.mesh.size):
            kind = self._costs.device_kind(rank)
            if kind not in totals:
                running = _running(
                    [
                        prices.compute_on_s(component, placement, Phase.FORWARD, rank)
                        + prices.compute_on_s(component, placement, Phase.BACKWARD, rank)
                        for component, placement in chosen
                    ]
                )
                totals[kind] = np.where(_some_components(len(chosen)), sums_between(running), INFINITE)
        return totals

    @cached_property
    def _kinds(self) -> list[set[str]]:
        """Per stage its kinds of devices."""
        return [
            {self._costs.device_kind(rank) for rank in self.mesh.stage_ranks(place)}
            for place in rank_of_stage(self.order, self.mesh.pp, self.chunks)
        ]

    def seconds(self, stage: int) -> Floats:
        """At [last, first]: forward and backward of one microbatch on the slowest device of the stage; infinite where empty."""
        slowest: Floats = np.max([self._seconds[kind] for kind in self._kinds[stage]], axis=0)
        return slowest

    def _prices(self, *, in_flight: int) -> Prices:
        return Prices(
            problem=self.problem,
            mesh=self.mesh,
            samples=self.samples,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            in_flight=in_flight,
            zero_stage=self.problem.zero_stage,
        )

    @cached_property
    def _up_to_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of the first i components: a fixed part, and a part per microbatch in flight."""
        running = []
        for alive in (0, 1):
            prices = self._prices(in_flight=alive)
            running.append(
                _running(
                    [
                        prices.memory_bytes(component, self.placements.get(component.name, BATCH), 0)
                        for component in self.problem.model.components
                    ]
                )
            )
        return running[0], running[1] - running[0]

    def limits_bytes(self) -> list[float]:
        """Per stage what its smallest device has for components of one chunk."""
        devices = self.problem.cluster.devices
        return [
            float(
                min(devices[rank].type.memory_bytes - devices[rank].type.context_bytes for rank in self.mesh.stage_ranks(place))
            )
            / self.chunks
            for place in rank_of_stage(self.order, self.mesh.pp, self.chunks)
        ]

    def fitting_s(self, limits_bytes: Sequence[float], stage: int) -> Floats:
        """As `seconds`, infinite where the stage would hold more than its limit."""
        kept, per_microbatch = (sums_between(up_to) for up_to in self._up_to_bytes)
        pp = self.mesh.pp
        place = rank_of_stage(self.order, pp, self.chunks)[stage]
        chunk = stages_by_rank(self.order, pp, self.chunks)[place].index(stage)
        alive = max(moment[chunk] for moment in moments(self.order, place, pp, self.microbatches, self.chunks))
        held = kept + alive * per_microbatch
        return np.where(held <= limits_bytes[stage], self.seconds(stage), INFINITE)

    def cuts_s(self) -> list[float]:
        """Per place the transfer of everything that crosses the cut before it, forward, between the first two stages."""
        known: dict[int, float] = {}
        found = []
        for size_bytes in crossing_bytes(self.problem, self.samples):
            if size_bytes not in known:
                work = SendRecv(source=0, destination=self.mesh.dp * self.mesh.tp, size_bytes=size_bytes)
                beside = concurrent_with(self.mesh, work) if self._costs.shares_links else ()
                known[size_bytes] = self._costs.estimate(work, 0, beside).median_s
            found.append(known[size_bytes])
        return found


def _some_components(count: int) -> NDArray[np.bool_]:
    """bool [n + 1, n + 1]: at [last, first] whether first < last."""
    return np.tri(count + 1, k=-1, dtype=bool)


def _running(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def crossing_bytes(problem: PlanningProblem, samples: int) -> list[int]:
    """Per place the bytes of one microbatch that cross the cut before it: every value once, however many read it."""
    model = problem.model
    place = model.component_index
    last_reader: dict[str, int] = {}
    for number, component in enumerate(model.components):
        for value in component.inputs:
            last_reader[value] = number
    crossing = np.zeros(len(model.components) + 1, dtype=np.int64)
    for value, reader in last_reader.items():
        producer = model.value[value].producer
        if producer is not None:
            crossing[place[producer] + 1] += model.value[value].size_bytes(samples)
            crossing[reader + 1] -= model.value[value].size_bytes(samples)
    return [int(size) for size in np.cumsum(crossing)[: len(model.components)]]
