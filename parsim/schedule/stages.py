"""Pipeline stages of one mesh, cut by cost: the plan whose slowest stage is fastest among those whose stages fit."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from functools import cached_property

from parsim.costs.costs import Costs
from parsim.costs.memory import rank_memory
from parsim.errors import ScheduleError
from parsim.model.component import Component
from parsim.plan.mesh import Mesh
from parsim.plan.pipeline import in_flight
from parsim.plan.plan import DEFAULT_BUCKET_BYTES, Plan, Stage
from parsim.schedule.partition import INFINITE, partition
from parsim.schedule.problem import Problem
from parsim.work import Compute, Phase, SendRecv


def balanced_plan(
    problem: Problem,
    strategy: str,
    mesh: Mesh,
    *,
    microbatches: int,
    pipeline_order: str,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Plan:
    """The plan whose slowest stage is fastest among those whose stages fit; among all, where none fits."""
    stages = _StageCosts(problem, mesh, problem.global_batch // (mesh.dp * microbatches), microbatches, pipeline_order)
    count = len(problem.model.components)
    cuts = [stages.cut_s(place) for place in range(count)]
    bounds = partition(count, mesh.pp, stages.seconds, cuts)
    if not all(stages.fits(stage, first, last) for stage, (first, last) in enumerate(bounds)):
        with contextlib.suppress(ScheduleError):  # where no cut fits, the fastest one is judged and shown as not fitting
            bounds = partition(count, mesh.pp, stages.fitting_s, cuts)
    names = [component.name for component in problem.model.components]
    return Plan(
        strategy=strategy,
        mesh=mesh,
        stages=tuple(
            Stage(components=tuple(names[first:last]), ranks=mesh.stage_ranks(number))
            for number, (first, last) in enumerate(bounds)
        ),
        global_batch=problem.global_batch,
        microbatches=microbatches,
        pipeline_order=pipeline_order,
        bucket_bytes=bucket_bytes,
        zero_stage=problem.zero_stage,
    )


@dataclass(frozen=True)
class _StageCosts:
    """Time and memory of a run of components on the devices of one stage."""

    problem: Problem
    mesh: Mesh
    samples: int
    microbatches: int
    order: str

    @property
    def _costs(self) -> Costs:
        return self.problem.costs(self.mesh.size)

    @cached_property
    def _up_to_s(self) -> dict[str, list[float]]:
        """Per device type: time of the first i components, forward and backward of one microbatch."""
        totals: dict[str, list[float]] = {}
        for rank in range(self.mesh.size):
            kind = self._costs.device_kind(rank)
            if kind not in totals:
                seconds = [self._component_s(component, rank) for component in self.problem.model.components]
                totals[kind] = [0.0, *itertools.accumulate(seconds)]
        return totals

    def _component_s(self, component: Component, rank: int) -> float:
        return sum(
            self._costs.estimate(Compute(component=component.name, phase=phase, samples=self.samples), rank).median_s
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )

    def _types(self, stage: int) -> dict[str, int]:
        """One rank of the stage for each of its device types."""
        return {self._costs.device_kind(rank): rank for rank in self.mesh.stage_ranks(stage)}

    def seconds(self, stage: int, first: int, last: int) -> float:
        """Forward and backward of one microbatch on the slowest device of the stage."""
        return max(self._up_to_s[kind][last] - self._up_to_s[kind][first] for kind in self._types(stage))

    def fits(self, stage: int, first: int, last: int) -> bool:
        """Whether every device type of the stage can hold these components."""
        problem = self.problem
        alive = in_flight(self.order, stage, self.mesh.pp, self.microbatches)
        return all(
            rank_memory(
                rank=rank,
                components=problem.model.components[first:last],
                values=problem.model.value,
                microbatch_samples=self.samples,
                in_flight=alive,
                optimizer=problem.optimizer,
                precision=problem.precision,
                device=problem.cluster.devices[rank].type,
                backend=problem.cluster.profile.communication.backend,
                communicators=2,
                loaded_microbatches=self.microbatches,
            ).fits
            for rank in self._types(stage).values()
        )

    def fitting_s(self, stage: int, first: int, last: int) -> float:
        """As `seconds`, infinite where a device of the stage cannot hold it."""
        return self.seconds(stage, first, last) if self.fits(stage, first, last) else INFINITE

    def cut_s(self, place: int) -> float:
        """Transfer of everything that crosses the cut before component `place`, forward, between the first two ranks."""
        if place == 0 or self.mesh.size == 1:
            return 0.0
        model = self.problem.model
        before = {component.name for component in model.components[:place]}
        after = {value for component in model.components[place:] for value in component.inputs}
        size = sum(model.value[name].size_bytes(self.samples) for name in after if model.value[name].producer in before)
        transfer = SendRecv(source=0, destination=self.mesh.dp, size_bytes=size)
        return self._costs.estimate(transfer, 0).median_s
