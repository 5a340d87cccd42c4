"""A plan's step in closed form: good enough to say which plans are worth simulating, in well under a millisecond each.

    stages     t_s = forward (twice where recomputed) + backward of one microbatch, its conversions and half of its transfers
    step       M * max t_s + fill + exposed gradient synchronisation + optimizer step
    with ZeRO 2 and 3 at least M * what every microbatch sends of gradients and parameters, and the optimizer step
    fill       sum of t_s - max t_s; over V chunks per rank (which t_s takes together) a V-th of it; with backwards in halves
               that part of it which the forwards have in t_s, as if both halves took equally long

Leaves out: contention, overlap factors, how exactly an uneven pipeline fills. The simulator judges what this puts first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, in_flight
from parsim.plans.plan import Plan
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.options import Prices
from parsim.work import Phase, SendRecv


@dataclass
class ClosedForms:
    """Of one problem: prices by mesh, microbatch, bucket size and ZeRO stage, and seconds of the plans asked for."""

    prices: dict[tuple[Mesh, int, int, int], Prices] = field(default_factory=dict)
    steps_s: dict[Plan, float] = field(default_factory=dict)


class ClosedFormEstimates:
    """Remembers, with the problem, the prices of meshes and microbatches already seen and the plans already asked for."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        known = problem.remembered(ClosedForms)
        self._prices, self._steps = known.prices, known.steps_s

    def prices(self, plan: Plan) -> Prices:
        """Of the plan's mesh and microbatch, on the ranks of its first stage."""
        key = (plan.mesh, plan.microbatch_samples, plan.bucket_bytes, plan.zero_stage)
        if key not in self._prices:
            self._prices[key] = Prices(
                problem=self._problem,
                mesh=plan.mesh,
                samples=plan.microbatch_samples,
                bucket_bytes=plan.bucket_bytes,
                in_flight=max(
                    1, in_flight(plan.pipeline_order, 0, plan.mesh.pp, plan.microbatches, plan.chunks) // plan.chunks
                ),
                zero_stage=plan.zero_stage,
            )
        return self._prices[key]

    def step_s(self, plan: Plan) -> float:
        """Seconds of one step."""
        if plan not in self._steps:
            self._steps[plan] = self._step_s(plan)
        return self._steps[plan]

    def _step_s(self, plan: Plan) -> float:
        model, prices = self._problem.model, self.prices(plan)
        placements = {name: placement for stage in plan.stages for name, placement in stage.placed()}
        moving, again = self._moves_s(plan), plan.recomputed
        stages, exposed, forwards, sending = [], 0.0, 0.0, 0.0
        for number in range(plan.mesh.pp):
            names = [name for chunk in plan.place_stages(number) for name in plan.stages[chunk].components]
            components = [model.component(name) for name in names]
            forward = [prices.compute_s(c, placements[c.name], Phase.FORWARD) for c in components]
            ahead = sum(forward)
            backs = [
                prices.compute_s(c, placements[c.name], Phase.BACKWARD) + (own if c.name in again else 0.0)
                if c.name in prices.differentiable
                else 0.0
                for c, own in zip(components, forward, strict=True)
            ]
            stages.append(ahead + sum(backs) + moving[number])
            forwards += ahead
            sums = [prices.synchronisation_s(c, placements[c.name]) for c in components]
            update = sum(prices.update_s(c, placements[c.name]) for c in components)
            exposed = max(exposed, exposed_s(sums, backs) + update)
            every = sum(prices.every_microbatch_s(c, placements[c.name]) for c in components)
            sending = max(sending, plan.microbatches * every + update)
        fill = (sum(stages) - max(stages)) / plan.chunks
        if PIPELINE_ORDERS[plan.pipeline_order].halves:
            fill *= forwards / max(sum(stages), 1e-30)
        return max(plan.microbatches * max(stages) + fill + exposed, sending)

    def _moves_s(self, plan: Plan) -> list[float]:
        """Per stage the conversions of one microbatch, forward and backward, and half of the transfers to and from it."""
        model, prices = self._problem.model, self.prices(plan)
        total = [0.0] * plan.mesh.pp
        if plan.mesh.pp == 1 and not plan.is_mixed:
            return total
        layout = self._problem.layout(plan)
        for value in model.values:
            home = layout.stage_of_value[value.name]
            if home is None:
                continue
            made = layout.source[value.name]
            for reading in layout.readings[value.name]:
                backward = any(name in prices.differentiable for name in reading.components) and value.differentiable
                total[home] += prices.conversion_s(value, made.value, reading.ends.value)
                if backward:
                    total[home] += prices.conversion_s(value, reading.ends.gradient, made.gradient)
                if reading.stage != home:
                    share = reading.ends.value.local_share(plan.mesh.tp)
                    size_bytes = round(value.size_bytes(plan.microbatch_samples) * share)
                    ends = (plan.mesh.rank(stage=home, replica=0), plan.mesh.rank(stage=reading.stage, replica=0))
                    work = SendRecv(source=ends[0], destination=ends[1], size_bytes=size_bytes)
                    seconds = prices.work_s(work, ends[0]) * (2 if backward else 1)
                    total[home] += seconds / 2
                    total[reading.stage] += seconds / 2
        return total


def exposed_s(synchronisation_s: list[float], backward_s: list[float]) -> float:
    """What of the gradient synchronisation outlasts the backward: components are given in execution order.

    From the last component on: its sums wait for its backward, and for the sums before. F_i = sync_i + max(0, F_{i+1} - b_i).
    """
    late = 0.0
    for summed, back in zip(reversed(synchronisation_s), reversed(backward_s), strict=True):
        late = summed + max(0.0, late - back)
    return late
