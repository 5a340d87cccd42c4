"""A controller's world small enough to reckon by hand: plans whose step is compute * c + communication * x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parsim.costs.observed import CommunicationClass, ComputeClass, RunCorrections, WorkClass
from parsim.errors import ScheduleError
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.search.adapt.controller import Controller, ControllerConfig, Observation, PlanChoice
from parsim.work import Phase

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MESH = Mesh(dp=2)


@dataclass(frozen=True)
class ToyPlan:
    """Both ranks compute for `compute_s`, then communicate for `communication_s`, with an operation of the plan's own."""

    number: int
    compute_s: float
    communication_s: float

    @property
    def plan(self) -> Plan:
        stage = Stage(components=("c",), ranks=MESH.stage_ranks(0))
        return Plan(strategy="custom", mesh=MESH, stages=(stage,), global_batch=16, microbatches=2**self.number)

    @property
    def group(self) -> CommunicationClass:
        return CommunicationClass(OPERATIONS[self.number], (0, 1))

    @property
    def expected(self) -> dict[WorkClass, float]:
        ranks = {ComputeClass(rank, "c", Phase.FORWARD): self.compute_s for rank in (0, 1)}
        return {**ranks, self.group: self.communication_s}

    def step_s(self, corrections: RunCorrections) -> float:
        slowest = max(corrections.rank_factor(rank) for rank in (0, 1))
        return self.compute_s * slowest + self.communication_s * corrections.communication_factor(self.group)


@dataclass(frozen=True)
class Toy:
    """Attributes: cost_s: of every switch."""

    plans: tuple[ToyPlan, ...]
    cost_s: float = 10.0

    def plan_for(self, corrections: RunCorrections, current: Plan) -> PlanChoice:
        steps = {entry.plan: entry.step_s(corrections) for entry in self.plans}
        if current not in steps:
            raise ScheduleError("unknown plan")
        best = min(self.plans, key=lambda entry: entry.step_s(corrections))
        return PlanChoice(plan=best.plan, step_s=steps[best.plan], current_step_s=steps[current], expected=best.expected)

    def controller(self, config: ControllerConfig) -> Controller:
        first = self.plans[0]
        return Controller(
            config=config,
            plan_for=self.plan_for,
            switch_cost_s=lambda old, new: self.cost_s,
            plan=first.plan,
            expected=first.expected,
        )

    def toy_of(self, plan: Plan) -> ToyPlan:
        return next(entry for entry in self.plans if entry.plan == plan)

    def truth(self, *, compute: float = 1.0, communication: float = 1.0) -> RunCorrections:
        """The machine as it really is, known in full."""
        return RunCorrections(
            ranks=((0, compute), (1, compute)),
            communication=tuple((entry.group, communication) for entry in self.plans),
        )


def seen(
    toy: ToyPlan,
    window: int,
    *,
    compute: float | Sequence[float] = 1.0,
    communication: float = 1.0,
    steps_left: int = 10_000,
    epoch_ended: bool = False,
    probes: Mapping[CommunicationClass, float] | None = None,
) -> Observation:
    """What a window under `toy` shows when ranks take `compute` and links `communication` times the profile's seconds."""
    factors = (compute, compute) if isinstance(compute, float | int) else tuple(compute)
    seconds: dict[WorkClass, float] = {
        ComputeClass(rank, "c", Phase.FORWARD): toy.compute_s * factor for rank, factor in enumerate(factors)
    }
    seconds[toy.group] = toy.communication_s * communication
    return Observation(
        window=window,
        steps_left=steps_left,
        step_s=toy.compute_s * max(factors) + toy.communication_s * communication,
        seconds=seconds,
        epoch_ended=epoch_ended,
        probes=RunCorrections(communication=tuple((probes or {}).items())),
    )
