"""A lower bound of the step on so many devices, whatever the mesh: all computation of the batch, divided evenly.

A component computes its samples in portions: m samples at a time on a device, or on w devices that hold a shard each. Every
portion divides the batch. So the least device-seconds per sample, over all portions and shardings, bound every plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from parsim.model.component import Component
from parsim.model.shard.narrow import ways_of
from parsim.plans.mesh import Mesh
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.step import ROUNDING, least_noise
from parsim.schedule.options import Prices, device_kinds
from parsim.units import divisors
from parsim.work import Phase


@dataclass
class DeviceSeconds:
    """Of one problem, by prices and kinds of devices: the least device-seconds of one batch."""

    known: dict[tuple[int, tuple[str, ...]], float] = field(default_factory=dict)

    def step_s(self, problem: PlanningProblem, devices: int) -> float:
        """Seconds that no step on so many devices goes below.

        Args:
            problem: model, cluster and batch. devices: the first ones of the cluster.
        """
        kinds = tuple(sorted(device_kinds(problem, devices)))
        key = problem.cost_group(devices), kinds
        if key not in self.known:
            self.known[key] = _batch_s(problem, devices)
        return self.known[key] / devices * least_noise(problem, devices) * ROUNDING

    def are_alike(self, problem: PlanningProblem) -> bool:
        """Whether prices do not depend on how many ranks compute: then fewer devices never have a lower bound."""
        noise = problem.cluster.profile.noise
        return problem.cost_group(1) == problem.cost_group(problem.cluster.size) and (noise is None or not noise.rank_sigma)


def _batch_s(problem: PlanningProblem, devices: int) -> float:
    known: dict[object, float] = {}
    total = 0.0
    for component in problem.model.components:
        prices = _prices(problem, devices, 1)
        ways = _ways(component, devices)
        key = prices.same_work(component), component.name in prices.differentiable, tuple(ways)
        if key not in known:
            known[key] = min(
                _device_seconds(_prices(problem, devices, samples), component, placement) / samples
                for samples in divisors(problem.global_batch)
                for placement in ways
            )
        total += known[key]
    return total * problem.global_batch


def _prices(problem: PlanningProblem, devices: int, samples: int) -> Prices:
    return Prices(problem=problem, mesh=Mesh(dp=devices), samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES)


def _ways(component: Component, devices: int) -> list[Placement]:
    """Whole, and every rule with every number of shards."""
    return [
        BATCH,
        *(
            Placement("shard", rule=each.rule, ways=ways)
            for each in component.shardings
            for ways in ways_of(each)
            if ways <= devices
        ),
    ]


def _device_seconds(prices: Prices, component: Component, placement: Placement) -> float:
    """Forward and backward of so many samples, times the devices that share them."""
    phases = (Phase.FORWARD, Phase.BACKWARD) if component.name in prices.differentiable else (Phase.FORWARD,)
    ranks = device_kinds(prices.problem, prices.mesh.size).values()
    whole = [sum(prices.local_s(component, placement, phase, rank) for phase in phases) for rank in ranks]
    return placement.ways * min(whole)
